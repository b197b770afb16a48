"""Two machines whose network breaks: two network namespaces joined by a virtual cable."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from helpers import logged
from processes import Ranks, alive, kill

from tests.faults.case import HERE, Case, Setting, Skip, differs, reference

FLAGS = (("epochs", 100), ("eval_every", 4), ("shard_ranks", 2))  # as on one machine
SETTING = Setting("sft", ranks=2, flags=FLAGS, steps=8)
WITHIN = 10  # seconds in which a machine must notice the death of the other one
NEVER = 90  # seconds after which a machine that is cut off counts as waiting for ever
ADDRESS = "10.213.{}.{}"


def ip(*words: object) -> None:
    """Run a command of iproute2. Raises `Skip` if it is refused."""
    try:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    except OSError as error:
        raise Skip(f"{words[0]}: {error.strerror}") from error
    if done.returncode:
        raise Skip(f"{' '.join(map(str, words))}: {done.stderr.strip()[:100]}")


@contextlib.contextmanager
def machines() -> Iterator[tuple[str, str]]:
    """Yield the names of the machines without their last digit, and the address of the first."""
    names, net = f"ft{os.getpid() % 10**6}", os.getpid() % 250
    try:
        for i in (0, 1):
            ip("ip", "netns", "add", f"{names}{i}")
        ip("ip", "link", "add", f"{names}0", "netns", f"{names}0", "type", "veth",
           "peer", f"{names}1", "netns", f"{names}1")  # fmt: skip
        for i in (0, 1):
            inside = "ip", "-n", f"{names}{i}"
            ip(*inside, "addr", "add", f"{ADDRESS.format(net, i + 1)}/24", "dev", f"{names}{i}")
            ip(*inside, "link", "set", f"{names}{i}", "up")
            ip(*inside, "link", "set", "lo", "up")
        yield names, ADDRESS.format(net, 1)
    finally:
        for i in (0, 1):
            subprocess.run(["ip", "netns", "del", f"{names}{i}"], stderr=subprocess.DEVNULL)


def begin(names: str, address: str, folder: Path) -> Ranks:
    return Ranks(2, HERE / "in_namespace.py", names, address, *SETTING.line(folder))


def wait_for_step(started: Ranks, folder: Path, step: int) -> None:
    while not logged(folder, step) and all(map(alive, started.pids)):
        time.sleep(0.01)


def network() -> Iterator[Case]:
    """Yield networks that break for a while or for good, and machines that are lost."""
    for seconds in (0, 1, 3, 8):
        yield Case("network", f"partition of {seconds} s", heals, (seconds,))
    for victim in (0, 1):
        yield Case("network", f"machine {victim} is killed", dies, (victim,))
    yield Case("network", "partition that stays, with net.ipv4.tcp_retries2=5", cut, (5,))


def heals(folder: Path, seconds: float) -> str | None:
    """The run waits for the network and has the same numbers."""
    reference(SETTING)
    with machines() as (names, address), begin(names, address, folder / "run") as started:
        wait_for_step(started, folder / "run", 2)
        cable(names, "down")
        time.sleep(seconds)
        cable(names, "up")
        done = started.end()
    return (
        f"exit {done.returncode}: {done.stderr[-300:]}"
        if done.returncode
        else differs(SETTING, folder / "run")
    )


def cable(names: str, state: str) -> None:
    ip("ip", "-n", f"{names}0", "link", "set", f"{names}0", state)


def dies(folder: Path, victim: int) -> str | None:
    """The other machine ends in time with one line."""
    with machines() as (names, address), begin(names, address, folder / "run") as started:
        wait_for_step(started, folder / "run", 2)
        kill(started.pids[victim])
        return ending(started, [1 - victim], WITHIN)


def cut(folder: Path, retries: int) -> str | None:
    """Both machines end, each with one line."""
    with machines() as (names, address), begin(names, address, folder / "run") as started:
        for i in (0, 1):
            ip(
                "ip",
                "netns",
                "exec",
                f"{names}{i}",
                "sysctl",
                "-qw",
                f"net.ipv4.tcp_retries2={retries}",
            )
        wait_for_step(started, folder / "run", 2)
        cable(names, "down")
        return ending(started, [0, 1], NEVER)


def ending(started: Ranks, ranks: list[int], within: float) -> str | None:
    """Wait for the ends of ranks. Return what is wrong with them."""
    began, took = time.monotonic(), {}
    while len(took) < len(ranks) and time.monotonic() < began + within:
        for rank in ranks:
            if started.processes[rank].exitcode is not None:
                took.setdefault(rank, round(time.monotonic() - began, 1))
        time.sleep(0.05)
    kill(*started.pids)
    errors = Path(started.folder.name, "stderr").read_text()
    found = [line for line in errors.splitlines() if line.startswith("error: ")]
    print(took, found, flush=True)
    if late := [rank for rank in ranks if rank not in took]:
        return f"ranks {late} do not end within {within} s; ends after {took}, {found}"
    return (
        None
        if len(found) == len(ranks) and "Traceback" not in errors
        else f"{len(found)} lines: {errors[-300:]}"
    )
