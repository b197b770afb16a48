"""Two machines, here two torchruns on one."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT, write
from processes import alive, descendants, ended, environment, kill, until

pytestmark = pytest.mark.slow

LAUNCH = "-m torch.distributed.run --nnodes=2 --nproc_per_node=1 --master_addr=127.0.0.1"
# Without a model: imports take most of the time of a launch.
BEGIN = """
import ctypes, os, sys, time
from pathlib import Path
from common.parallel import distributed, process
_, rank, size = distributed.setup(0)
process.note_signals()
Path(sys.argv[1], f"rank_{rank}").write_text(str(os.getpid()))
"""
# A loop like that of a run.
STEPS = """
while not distributed.stop_requested():
    time.sleep(0.01)
Path(sys.argv[1], f"stopped_{rank}").touch()
distributed.cleanup()
"""
# Stands for NCCL: a call in C, during which Python handles no signal.
WAITS = """
while True:
    ctypes.CDLL(None).sleep(1000)
"""


@contextlib.contextmanager
def machines(program: str, folder: Path) -> Iterator[tuple[list[subprocess.Popen], list[int]]]:
    """Yield two launchers and their ranks, which have begun."""
    script, agents = write(folder / "program.py", BEGIN + program), []
    begun = [folder / f"rank_{rank}" for rank in (0, 1)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for node in (0, 1):
        place = f"--node_rank={node}", f"--master_port={port}"
        line = [sys.executable, *LAUNCH.split(), *place, script, folder]
        options = dict(cwd=ROOT, env=environment(PYTHONPATH=ROOT), text=True)
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        agents.append(subprocess.Popen(line, **options, **pipes))
    try:
        until(lambda: all(file.is_file() and file.read_text() for file in begun))
        yield agents, [int(file.read_text()) for file in begun]
    finally:
        pids = [agent.pid for agent in agents]
        kill(*pids, *(rank for pid in pids for rank in descendants(pid)))
        for agent in agents:
            agent.communicate()


def test_machines_meet_and_all_ranks_stop_after_a_torchrun_is_killed(tmp_path):
    """The rank of the killed torchrun gets a stop signal, which stops that of the other machine
    too. tests/train/test_signals.py has the checkpoint that they save."""
    with machines(STEPS, tmp_path) as (agents, ranks):
        os.kill(agents[1].pid, signal.SIGKILL)
        until(lambda: not any(map(alive, ranks)))
    assert len([*tmp_path.glob("stopped_[01]")]) == 2


def test_killed_rank_ends_the_rank_of_the_other_machine_that_waits_in_c(tmp_path):
    """The first machine has the store. test_ring.py has more ways to end."""
    with machines(WAITS, tmp_path) as (agents, ranks):
        os.kill(ranks[0], signal.SIGKILL)
        done = [ended(agent, ranks) for agent in agents]
    assert [each.returncode for each in done] == [1, 1]
    said = [line for each in done for line in each.stderr.splitlines() if "error: " in line]
    lost = "error: rank 1 lost another rank: rank 0 has ended"
    assert [line for line in said if line.startswith("error: ")] == [lost], said
