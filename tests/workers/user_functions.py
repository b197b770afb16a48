"""A user's file, for the tests of the pool and of its processes: functions that compute, hang,
crash, print, fork."""

import asyncio
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


def do(code, x=None):
    """Return the value of an expression."""
    return eval(code, globals() | dict(x=x))


def raises(error):
    raise error


def recurse():
    return recurse()


def say(text):
    print(text)
    sys.stdout.buffer.write(b"bytes" * 1000)
    os.write(1, b"directly")
    return sys.stdin.read()


def meet(folder, number):
    """Return the process id once as many processes have arrived."""
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while len(os.listdir(folder)) < number:
        time.sleep(0.005)
    return os.getpid()


def where():
    modules = sorted(name for name in sys.modules if "common" in name)
    return "torch" in sys.modules, sys.path, os.getcwd(), os.getsid(0), modules


# ---- functions that hang, after writing their process ids to a file ----


def began(path, *pids):
    if path:
        with open(path, "w") as file:
            file.writelines(f"{pid} " for pid in pids or [os.getpid()])


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
    """Start a child, one in a session of its own, and an orphan in another."""
    children = [
        subprocess.Popen(["sleep", "9999"], start_new_session=own).pid for own in (False, True)
    ]
    command = "sleep 9999 >/dev/null & echo $!"
    orphan = subprocess.run(command, shell=True, start_new_session=True, stdout=-1).stdout
    began(path, *children, int(orphan))
    time.sleep(9999)


# ---- async ----

running, most, loops = 0, 0, set()


async def wait(seconds=0.0, how="sleep", number=0):
    """Return the maximum number of concurrent calls so far, the number of event loops, and the
    process."""
    global running, most
    running, most = running + 1, max(most, running + 1)
    try:
        loops.add(asyncio.get_running_loop())
        if how == "block":
            time.sleep(9999)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how in ("own", "exit"):
            raise TimeoutError("from a server") if how == "own" else SystemExit("mine")
        if how == "function":
            return lambda: 0
        while how == "meet" and most < number:
            await asyncio.sleep(0.005)
        await asyncio.sleep(9999 if how in ("late", "stubborn") else seconds)
        return most, len(loops), os.getpid()
    finally:
        running -= 1
        while how == "stubborn":
            try:
                await asyncio.sleep(9999)
            except asyncio.CancelledError:
                pass
