"""Several machines, here two torchruns on one: one trains, one generates, and a killed torchrun
ends all ranks."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT, alive, environment, kill, logged, metrics, until

pytestmark = pytest.mark.slow

FLAGS = (
    "--prompts_per_step", 4, "--samples_per_prompt", 2, "--max_new_tokens", 8,
    "--engine", "transformers", "--eval_every", 0, "--save_every", 100_000,
    "--rollout_ranks", 1,
)  # fmt: skip


class Node:
    """torchrun with one rank."""

    def __init__(self, index: int, port: int, script: str, *flags: object, folder: Path):
        launch = "-m torch.distributed.run --nnodes=2 --nproc_per_node=1 --master_addr=127.0.0.1"
        place = (f"--node_rank={index}", f"--master_port={port}")
        program = [sys.executable, *launch.split(), *place, ROOT / script]
        line = [*program, *map(str, flags), "--output_dir", folder]
        self.output = folder.with_name(f"{folder.name}_{index}.txt")
        with self.output.open("w") as file:
            self.agent = subprocess.Popen(
                line, cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def rank(self) -> int:
        """Return the process id of the rank."""
        children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children")
        return int(children.read_text().split()[0])


@contextlib.contextmanager
def two_nodes(script: str, *flags: object, folder: Path) -> Iterator[list[Node]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [Node(index, port, script, *FLAGS, *flags, folder=folder) for index in (0, 1)]
    try:
        yield nodes
    finally:
        kill(*(node.agent.pid for node in nodes))
        for node in nodes:
            node.agent.wait()


def test_one_node_trains_the_other_generates_and_ranks_end_after_their_torchrun_is_killed(
    small, tmp_path
):
    """The ranks get a stop signal and save, which stops the ranks of the other machine."""
    folder = tmp_path / "run"
    with two_nodes(
        "online_dpo.py", *small, "--max_steps", 100_000, "--epochs", 1e6, folder=folder
    ) as nodes:
        until(lambda: logged(folder, 2))
        ranks = [node.rank for node in nodes]
        try:
            os.kill(nodes[1].agent.pid, signal.SIGKILL)
            until(lambda: not any(map(alive, ranks)))
        except BaseException:
            kill(*ranks)
            raise
        assert metrics(folder)[1]["sampling/staleness/max"] == 1
        (saved,) = (folder / "checkpoints").iterdir()
        step = int(saved.name.removeprefix("step_"))
        assert f"stopped after step {step}" in nodes[0].output.read_text()
