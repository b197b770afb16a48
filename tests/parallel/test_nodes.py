"""Two machines, here two torchruns on one."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from helpers import ROOT, alive, descendants, environment, kill, until, write

LAUNCH = "-m torch.distributed.run --nnodes=2 --nproc_per_node=1 --master_addr=127.0.0.1"
# A loop like that of a run, without a model: imports take most of the time of a launch.
PROGRAM = """
import sys, time
from pathlib import Path
from common.parallel import distributed, process
_, rank, size = distributed.setup(0)
process.note_signals()
Path(sys.argv[1], f"begun_{rank}_of_{size}").touch()
while not distributed.stop_requested():
    time.sleep(0.01)
Path(sys.argv[1], f"stopped_{rank}").touch()
"""


@pytest.mark.slow
def test_machines_meet_and_all_ranks_stop_after_a_torchrun_is_killed(tmp_path):
    """The rank of the killed torchrun gets a stop signal, which stops that of the other machine
    too. tests/train/test_signals.py has the checkpoint that they save."""
    program, agents, ranks = write(tmp_path / "program.py", PROGRAM), [], []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for node in (0, 1):
        place = f"--node_rank={node}", f"--master_port={port}"
        line = [sys.executable, *LAUNCH.split(), *place, program, tmp_path]
        options = dict(cwd=ROOT, env=environment(PYTHONPATH=ROOT), stderr=subprocess.DEVNULL)
        agents.append(subprocess.Popen(line, **options))
    try:
        until(lambda: len([*tmp_path.glob("begun_[01]_of_2")]) == 2)
        ranks = [rank for agent in agents for rank in descendants(agent.pid)]
        os.kill(agents[1].pid, signal.SIGKILL)
        until(lambda: not any(map(alive, ranks)))
    finally:
        kill(*ranks, *(agent.pid for agent in agents))
        for agent in agents:
            agent.wait()
    assert len([*tmp_path.glob("stopped_[01]")]) == 2
