"""A user's file, for the tests of the pool and of its processes: functions that compute, hang,
crash, print, fork."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time


class Refuses(BaseException):
    def __str__(self):
        raise ValueError("no text")


class Mine:
    """Class that exists in no other process."""


def do(what, *arguments):
    """Evaluate Python source, chosen by `what`."""
    return globals()[what](*arguments)


# ---- functions that return ----


def value(x):
    return x


def size(row):
    return len(row["text"])


def pid():
    return os.getpid()


def function():
    return lambda: 0


def mine():
    return Mine()


def fork():
    os.fork()
    return 1


def say(text):
    print(text)
    sys.stdout.buffer.write(b"bytes" * 1000)
    os.write(1, b"directly")
    return sys.stdin.read()


def spawn():
    """Start a child, one in a session of its own, and an orphan in another; return their process
    ids."""
    children = [
        subprocess.Popen(["sleep", "9999"], start_new_session=own).pid for own in (False, True)
    ]
    orphan = "sleep 9999 >/dev/null & echo $!"
    return *children, int(
        subprocess.run(orphan, shell=True, start_new_session=True, stdout=-1).stdout
    )


def meet(folder, number):
    """Return the process id once as many processes have arrived."""
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while len(os.listdir(folder)) < number:
        time.sleep(0.005)
    return os.getpid()


def where():
    return (
        "torch" in sys.modules,
        sys.path,
        os.getcwd(),
        os.getsid(0),
        sorted(m for m in sys.modules if "common" in m),
    )


# ---- functions that raise ----


def recurse():
    return recurse()


def leave_politely():
    sys.exit(5)


def interrupt():
    raise KeyboardInterrupt


def refuse():
    raise Refuses


def lines():
    raise ValueError("one\ntwo")


def hoard():
    return len([bytearray(2**20) for _ in range(2000)])


# ---- functions that kill the process ----


def leave(code):
    os._exit(code)


def segfault():
    ctypes.string_at(0)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def close_all():
    os.closerange(0, 1000)
    return 1


def alarm(pid):
    os.kill(pid, signal.SIGALRM)
    time.sleep(9999)


# ---- functions that hang, after creating a file ----


def began(path):
    if path:
        with open(path, "w") as file:
            file.write(str(os.getpid()))


def spin(path=None):
    began(path)
    while True:
        pass


def power(path=None):
    began(path)
    return 3 ** (10**9) % 7  # C code that holds the GIL and handles no signal


def deaf(path=None):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    began(path)
    time.sleep(9999)


def spawn_and_hang(path):
    with open(path, "w") as file:
        file.writelines(f"{pid} " for pid in spawn())
    time.sleep(9999)


# ---- async ----

running, most, loops = 0, 0, set()


async def wait(seconds=0.0, how="sleep", what=None):
    """Return the seconds, the maximum number of concurrent calls so far, the number of event loops,
    and the process."""
    global running, most
    running, most = running + 1, max(most, running + 1)
    try:
        loops.add(asyncio.get_running_loop())
        if how == "block":
            began(what)
            time.sleep(9999)
        if how == "kill":
            kill()
        if how == "stop":
            asyncio.get_running_loop().stop()
        if how == "own":
            raise TimeoutError("from a server")
        if how == "exit":
            raise SystemExit("mine")
        while how == "meet" and most < what:
            await asyncio.sleep(0.005)
        while how == "stubborn":
            try:
                await asyncio.sleep(9999)
            except asyncio.CancelledError:
                pass
        await asyncio.sleep(seconds)
        return seconds, most, len(loops), os.getpid()
    finally:
        running -= 1
