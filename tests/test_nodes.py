"""Several machines: a torchrun on each, here two on one. They train and generate, and what kills one part ends all."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT, Moment, alive, command, environment, kill, metrics, run, until

pytestmark = pytest.mark.slow

FLAGS = ("--prompts_per_step", 4, "--samples_per_prompt", 2, "--max_new_tokens", 8, "--engine", "transformers",
         "--eval_every", 0, "--log_every", 1, "--save_every", 100_000, "--rollout_ranks", 1)  # fmt: skip


class Node:
    """A torchrun with one rank."""

    def __init__(self, index: int, port: int, script: str, *flags: object, folder: Path):
        python, *_, of_script = command(1, script)
        launch = ("--nnodes=2", f"--node_rank={index}", "--nproc_per_node=1", "--master_addr=127.0.0.1",
                  f"--master_port={port}")  # fmt: skip
        line = [python, "-m", "torch.distributed.run", *launch, of_script, *map(str, flags), "--output_dir", folder]
        self.said = folder.with_name(f"{folder.name}_{index}.txt")
        with self.said.open("w") as file:
            self.agent = subprocess.Popen(line, cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT)

    @property
    def rank(self) -> int:
        """The process id of its rank."""
        return int(Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split()[0])


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


def test_one_node_trains_and_one_generates(tmp_path):
    """With the numbers of the same ranks under one torchrun."""
    flags = ("--max_steps", 2, "--max_staleness", 0)
    with two_nodes("grpo.py", *flags, folder=tmp_path / "two") as nodes:
        for node in nodes:
            assert until(lambda node=node: node.agent.poll() is not None) and node.agent.returncode == 0, (
                node.said.read_text()
            )
    run(2, "grpo.py", *FLAGS, *flags, "--output_dir", tmp_path / "one")
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert all(a[name] == b[name] for name in ("step", "loss", "grad_norm", "reward", "entropy"))


@pytest.mark.parametrize("victim", ["the torchrun that generates", "the rank that trains"])
def test_a_kill_ends_the_other_node_too(victim, tmp_path):
    """Ranks whose torchrun was killed outright are told to stop by that, save, and so stop all."""
    folder = tmp_path / "run"
    with two_nodes("online_dpo.py", "--max_steps", 100_000, "--epochs", 1e6, folder=folder) as nodes:
        until(Moment(folder, step=2).logged)
        ranks = [node.rank for node in nodes]
        try:
            os.kill(nodes[1].agent.pid if victim.startswith("the torchrun") else ranks[0], signal.SIGKILL)
            until(lambda: not any(map(alive, ranks)))
        finally:
            kill(*ranks)
        said = [node.said.read_text() for node in nodes]
        if victim.startswith("the torchrun"):
            (saved,) = (folder / "checkpoints").iterdir()
            assert f"told to stop after step {int(saved.name.removeprefix('step_'))}" in said[0]
        else:
            until(lambda: nodes[1].agent.poll() is not None)
            assert nodes[1].agent.returncode == 1 and "error: training rank 0 is gone: " in nodes[1].said.read_text()
