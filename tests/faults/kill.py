"""Processes that are killed, stopped, started twice, run for long, or whose clock jumps."""

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from helpers import metrics
from processes import Ranks, alive, descendants, kill

from tests.faults.case import (
    HERE,
    Case,
    Setting,
    Skip,
    after,
    differs,
    illegible,
    reference,
    seconds,
)

LAYOUTS = {
    "one rank": Setting("sft"),
    "two ranks": Setting("sft", ranks=2),
    "rollout ranks": Setting(
        "grpo", ranks=2, flags=(("rollout_ranks", 1), ("max_staleness", 0)), steps=4
    ),
    "context ranks": Setting("sft", ranks=2, flags=(("context_ranks", 2),)),
}
WITHIN = 10  # seconds in which a launch must end after the death of a rank
CGROUP = Path("/sys/fs/cgroup/memory")

# ---- kill ----


def kills(
    rng: random.Random, count: int, layouts: Iterable[str] = tuple(LAYOUTS)
) -> Iterator[Case]:
    """Yield `count` events for each layout, at random moments."""
    for layout in layouts:
        for i in range(count):
            event = list(EVENTS)[i % len(EVENTS)]
            moment, victim = rng.random(), rng.randrange(LAYOUTS[layout].ranks)
            yield Case(
                "kill",
                f"{layout}/{event}/{moment:.4f}",
                interrupted,
                (layout, event, moment, victim),
            )


def sigkill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def sigterm(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def sigterm_twice(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def ctrl_c(pid: int) -> None:
    os.kill(pid, signal.SIGINT)


def pause(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(pid, signal.SIGCONT)


def out_of_memory(pid: int) -> None:
    """Limit the memory that the process may still allocate to a little."""
    group = CGROUP / f"faults_{pid}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("20000000")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise Skip(f"no memory cgroup: {error.strerror}") from error


EVENTS = dict(
    kill=sigkill,
    term=sigterm,
    term_twice=sigterm_twice,
    ctrl_c=ctrl_c,
    pause=pause,
    out_of_memory=out_of_memory,
)


def interrupted(folder: Path, layout: str, event: str, moment: float, victim: int) -> str | None:
    """All ranks end in time and with at most one line, nothing stays, and the same command
    completes the run with the same numbers."""
    setting = LAYOUTS[layout]
    reference(setting)
    with Ranks(setting.ranks, *setting.line(folder / "run")) as started:
        time.sleep(moment * seconds(setting))
        processes = [p for pid in started.pids for p in (pid, *descendants(pid))]
        if not alive(started.pids[victim]):
            return differs(setting, folder / "run")  # too late
        EVENTS[event](started.pids[victim])
        began = time.monotonic()
        done = started.end()
        took = time.monotonic() - began
    if event == "out_of_memory":
        (CGROUP / f"faults_{started.pids[victim]}").rmdir()
    if event == "pause":
        return f"exit {done.returncode}" if done.returncode else differs(setting, folder / "run")
    if event == "kill" and took > WITHIN:
        return f"the launch ends {took:.0f} s after the death of a rank"
    if "Traceback" in done.stderr or len(re.findall("^error: ", done.stderr, re.MULTILINE)) > 1:
        return f"exit {done.returncode}: {done.stderr[-300:]}"
    time.sleep(0.2)
    if left := [pid for pid in processes if alive(pid)]:
        kill(*left)
        return f"{len(left)} processes survive"
    return after(setting, folder / "run")


# ---- twice: two launches in one folder ----


def twice(rng: random.Random, count: int) -> Iterator[Case]:
    """Yield second launches at random moments of the first one."""
    for _ in range(count):
        moment = rng.random() * 1.2
        for kills_first in (False, True):
            yield Case(
                "twice",
                f"{'dying' if kills_first else 'active'}/{moment:.4f}",
                second,
                (moment, kills_first),
            )


def second(folder: Path, moment: float, kills_first: bool) -> str | None:
    """The second launch is refused in one line, or the first one is over. The numbers are right in
    the end."""
    setting, run = LAYOUTS["one rank"], folder / "run"
    reference(setting)
    with Ranks(1, *setting.line(run)) as one:
        time.sleep(moment * seconds(setting))
        if kills_first:
            killed = [one.pids[0], *descendants(one.pids[0])]
            kill(*killed)
            while any(alive(pid) for pid in killed):  # it has the lock until it is gone
                time.sleep(0.01)
        with Ranks(1, *setting.line(run)) as two:
            done = two.end()
        if not kills_first and (problem := illegible(one.end())):
            return f"the first one: {problem}"
    if problem := illegible(done):
        return f"the second one: {problem}"
    if done.returncode and ("uses it; wait for it" not in done.stderr or kills_first):
        return f"the second one: {done.stderr[-300:]}"
    return after(setting, run)


# ---- clock ----


def clock(rng: random.Random, count: int) -> Iterator[Case]:
    """Yield jumps of the clock, forwards and backwards."""
    for _ in range(count):
        calls, jump = (
            rng.randrange(3000),
            rng.choice([-1, 1]) * rng.choice([3600, 86400, 3600 * 24 * 365 * 10]),
        )
        yield Case("clock", f"{jump}s after {calls} readings", jumps, (calls, jump))


def jumps(folder: Path, calls: int, jump: int) -> str | None:
    """The numbers do not change."""
    setting = LAYOUTS["one rank"]
    words = (HERE / "arm.py", 0, "clock", calls, jump)
    with Ranks(1, *words, *setting.line(folder / "run")) as started:
        done = started.end()
    return illegible(done) or (
        f"exit {done.returncode}" if done.returncode else differs(setting, folder / "run")
    )


# ---- soak ----


def soak() -> Iterator[Case]:
    yield Case("soak", "1000 steps", thousand_steps)


def thousand_steps(folder: Path) -> str | None:
    """Memory, descriptors, threads and temporary files after 1,000 steps are those after 100."""
    setting = Setting(
        "sft", flags=(("eval_every", 100), ("epochs", 1000)), steps=1000, save_every=100
    )
    early: dict[str, int] | None = None
    late: dict[str, int] = {}
    with Ranks(1, *setting.line(folder / "run")) as started:
        while started.processes[0].exitcode is None:
            if not (folder / "run" / "metrics.jsonl").is_file():
                continue
            steps = len(metrics(folder / "run"))
            if steps < 900 and alive(started.pids[0]):
                late = used(started.pids[0])
                early = late if steps < 200 else early
            elif alive(started.pids[0]) and steps < 1000:
                late = used(started.pids[0])
            time.sleep(0.05)
        done = started.end()
    if done.returncode or early is None:
        return f"exit {done.returncode}"
    grown = {name: (early[name], late[name]) for name in early if late[name] > 1.05 * early[name]}
    print(dict(early=early, late=late), flush=True)
    return f"grown: {grown}" if grown else None


def used(pid: int) -> dict[str, int]:
    """Return the memory in kB, and the numbers of descriptors, threads and temporary files."""
    status = Path(f"/proc/{pid}/status").read_text()
    return dict(
        memory=int(re.search(r"VmRSS:\s+(\d+)", status)[1]),
        threads=int(re.search(r"Threads:\s+(\d+)", status)[1]),
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        temporary=len(os.listdir("/tmp")) + len(os.listdir("/dev/shm")),
    )
