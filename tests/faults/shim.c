// Preloaded library that makes one chosen operation on a file fail, and records all of them. It does nothing until
// faults_arm() names a folder. Only calls of the process itself pass here, not those that libc makes inside.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NONE, FULL, BROKEN, SHORT, KILL };  // what happens; Python has the same list

static char root[PATH_MAX], wanted_op[16], wanted_path[PATH_MAX], copies[PATH_MAX];
static int armed, fault, happened, trace = -1, line;
static long long jump_after, jump;  // seconds of the real-time clock
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })

// Fail `op` on paths in `folder` that match `pattern`; write the operations to `trace_file` and, on fsync, the file's
// content to `copies_folder`/LINE.
void faults_arm(const char *folder, const char *op, const char *pattern, int kind, const char *trace_file,
                const char *copies_folder) {
  strcpy(root, folder), strcpy(wanted_op, op), strcpy(wanted_path, pattern), strcpy(copies, copies_folder);
  fault = kind, happened = 0, line = 0;
  trace = *trace_file ? REAL(open)(trace_file, O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
  armed = 1;
}

// Move the real-time clock by `seconds` after `calls` more readings.
void faults_jump(long long calls, long long seconds) { jump_after = calls, jump = seconds; }

static const char *inside(const char *path) {
  size_t n = strlen(root);
  return !strncmp(path, root, n) && (path[n] == '/' || !path[n]) ? path + n + (path[n] == '/') : NULL;
}

static const char *at(int dir, const char *path, char *buffer) {
  if (*path == '/') return path;
  char link[64];
  snprintf(link, sizeof link, dir == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", dir);
  ssize_t n = readlink(link, buffer, PATH_MAX - 1);
  if (n < 0) return "";
  buffer[n] = 0;
  if (*path) strncat(buffer, "/", PATH_MAX - n - 1), strncat(buffer, path, PATH_MAX - n - 2);
  return buffer;
}

static void copy_file(int fd, int number) {
  char name[PATH_MAX + 16], block[1 << 16], link[64];
  snprintf(name, sizeof name, "%s/%d", copies, number), snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  int from = REAL(open)(link, O_RDONLY), to = REAL(open)(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  ssize_t n;
  while (from >= 0 && to >= 0 && (n = read(from, block, sizeof block)) > 0) REAL(write)(to, block, n);
  if (from >= 0) close(from);
  if (to >= 0) close(to);
}

// Return the fault of this operation. An operation that fails is not recorded, another is recorded before it happens.
static int step(const char *op, int dir, const char *path, int dir2, const char *path2, int fd) {
  if (!armed) return NONE;
  char one[PATH_MAX] = "", two[PATH_MAX] = "";
  const char *first = inside(at(dir, path, one)), *second = path2 ? inside(at(dir2, path2, two)) : NULL;
  if (!first) return NONE;
  pthread_mutex_lock(&mutex);
  int now = NONE, grows = strcmp(op, "unlink") && strcmp(op, "rename") && strcmp(op, "fsync");
  if (fault && !happened && !strcmp(op, wanted_op) && !fnmatch(wanted_path, first, 0)) now = fault, happened = 1;
  else if (fault == FULL && happened && grows) now = FULL;  // the disk stays full
  if (now == KILL) raise(SIGKILL);
  if (!now && trace >= 0) {
    struct stat info;
    int folder = fd >= 0 && !fstat(fd, &info) && S_ISDIR(info.st_mode);
    dprintf(trace, "%s\t%s\t%s\n", folder ? "fsync_folder" : op, first, second ? second : "");
    if (*copies && !strcmp(op, "fsync") && !folder) copy_file(fd, line);
    line++;
  }
  pthread_mutex_unlock(&mutex);
  return now;
}

#define FAIL(f) do { if ((f) == FULL || (f) == BROKEN) { errno = (f) == FULL ? ENOSPC : EIO; return -1; } } while (0)
#define CHECK(...) do { int f = step(__VA_ARGS__); FAIL(f); } while (0)
#define OPEN(name, dir, ...) do { \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { va_list a; va_start(a, flags); mode = va_arg(a, mode_t); va_end(a); } \
    if (flags & O_ACCMODE) CHECK(flags & O_TRUNC ? "truncate" : "open", dir, path, 0, NULL, -1); \
    return REAL(name)(__VA_ARGS__, mode); \
  } while (0)

int open(const char *path, int flags, ...) { OPEN(open, AT_FDCWD, path, flags); }
int open64(const char *path, int flags, ...) { OPEN(open64, AT_FDCWD, path, flags); }
int openat(int dir, const char *path, int flags, ...) { OPEN(openat, dir, dir, path, flags); }
int openat64(int dir, const char *path, int flags, ...) { OPEN(openat64, dir, dir, path, flags); }

#define WRITE(name, shorter, ...) do { \
    int f = step("write", fd, "", 0, NULL, -1); FAIL(f); \
    if (f == SHORT) shorter; \
    return REAL(name)(__VA_ARGS__); \
  } while (0)

ssize_t write(int fd, const void *data, size_t n) { WRITE(write, n = n > 1 ? n / 2 : n, fd, data, n); }
ssize_t pwrite(int fd, const void *data, size_t n, off_t to) { WRITE(pwrite, n = n > 1 ? n / 2 : n, fd, data, n, to); }
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t to) { WRITE(pwrite64, n = n > 1 ? n / 2 : n, fd, data, n, to); }
ssize_t writev(int fd, const struct iovec *v, int n) { WRITE(writev, n = n > 1 ? 1 : n, fd, v, n); }
ssize_t sendfile(int fd, int in, off_t *at, size_t n) { WRITE(sendfile, n = n > 1 ? n / 2 : n, fd, in, at, n); }
ssize_t sendfile64(int fd, int in, off64_t *at, size_t n) { WRITE(sendfile64, n = n > 1 ? n / 2 : n, fd, in, at, n); }
ssize_t copy_file_range(int in, off64_t *a, int fd, off64_t *b, size_t n, unsigned f_) {
  WRITE(copy_file_range, n = n > 1 ? n / 2 : n, in, a, fd, b, n, f_);
}

int ftruncate(int fd, off_t n) { CHECK("write", fd, "", 0, NULL, -1); return REAL(ftruncate)(fd, n); }
int ftruncate64(int fd, off64_t n) { CHECK("write", fd, "", 0, NULL, -1); return REAL(ftruncate64)(fd, n); }
int fsync(int fd) { CHECK("fsync", fd, "", 0, NULL, fd); return REAL(fsync)(fd); }
int fdatasync(int fd) { CHECK("fsync", fd, "", 0, NULL, fd); return REAL(fdatasync)(fd); }
int mkdir(const char *path, mode_t mode) { CHECK("mkdir", AT_FDCWD, path, 0, NULL, -1); return REAL(mkdir)(path, mode); }
int mkdirat(int dir, const char *path, mode_t mode) { CHECK("mkdir", dir, path, 0, NULL, -1); return REAL(mkdirat)(dir, path, mode); }
int unlink(const char *path) { CHECK("unlink", AT_FDCWD, path, 0, NULL, -1); return REAL(unlink)(path); }
int rmdir(const char *path) { CHECK("unlink", AT_FDCWD, path, 0, NULL, -1); return REAL(rmdir)(path); }
int unlinkat(int dir, const char *path, int flags) { CHECK("unlink", dir, path, 0, NULL, -1); return REAL(unlinkat)(dir, path, flags); }
int rename(const char *a, const char *b) { CHECK("rename", AT_FDCWD, a, AT_FDCWD, b, -1); return REAL(rename)(a, b); }
int renameat(int d, const char *a, int e, const char *b) { CHECK("rename", d, a, e, b, -1); return REAL(renameat)(d, a, e, b); }

int clock_gettime(clockid_t clock, struct timespec *time) {
  int code = REAL(clock_gettime)(clock, time);
  if (clock == CLOCK_REALTIME && jump && --jump_after < 0) time->tv_sec += jump;
  return code;
}

// A thread of gloo reports that a collective is done, and later frees its tensors: with FAULTS_LATE_GLOO=N 2 to N
// milliseconds later.
static __thread int of_gloo;

int pthread_setname_np(pthread_t thread, const char *name) {
  if (thread == pthread_self() && !strcmp(name, "pt_gloo_runloop")) of_gloo = 1;
  return REAL(pthread_setname_np)(thread, name);
}

int pthread_cond_broadcast(pthread_cond_t *condition) {
  static int (*real)(pthread_cond_t *);
  if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_broadcast", "GLIBC_2.3.2");  // dlsym may find an older one
  if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_broadcast");
  int code = real(condition);
  if (!of_gloo) return code;
  const char *late = getenv("FAULTS_LATE_GLOO");
  if (late) usleep(2000 + rand() % (1000 * (atoi(late) - 2) + 1));
  return code;
}
