"""Two machines, here two torchruns on one."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from helpers import ROOT, alive, descendants, environment, kill, logged, until

LAUNCH = "-m torch.distributed.run --nnodes=2 --nproc_per_node=1 --master_addr=127.0.0.1"


@pytest.mark.slow
def test_machines_train_together_and_stop_after_a_torchrun_is_killed(small, tmp_path):
    """The ranks of the killed torchrun get a stop signal and save, which stops those of the other
    machine."""
    folder, agents, ranks = tmp_path / "run", [], []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = (*small, "--max_steps", 100_000, "--epochs", 1e6, "--batch_size", 2, "--eval_every", 0)
    flags += ("--save_every", 100_000, "--trace_every", 0, "--output_dir", folder)
    for node in (0, 1):
        place = f"--node_rank={node}", f"--master_port={port}"
        line = [sys.executable, *LAUNCH.split(), *place, ROOT / "sft.py", *map(str, flags)]
        with (tmp_path / f"{node}.txt").open("w") as out:
            options = dict(cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT)
            agents.append(subprocess.Popen(line, **options))
    try:
        until(lambda: logged(folder, 2))
        ranks = [rank for agent in agents for rank in descendants(agent.pid)]
        os.kill(agents[1].pid, signal.SIGKILL)
        until(lambda: not any(map(alive, ranks)))
    finally:
        kill(*ranks, *(agent.pid for agent in agents))
        for agent in agents:
            agent.wait()
    (saved,) = (folder / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step_"))
    assert f"stopped after step {step}" in (tmp_path / "0.txt").read_text()
