"""Signals and killed ranks: a run told to stop saves and can be resumed; a run that lost a rank ends."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers import assert_same_weights, command, environment, metrics, run

pytestmark = pytest.mark.slow

SFT = ["--batch_size", 4, "--eval_every", 0, "--save_every", 1000, "--lr", 1e-3]
GRPO = ["--prompts_per_step", 4, "--samples_per_prompt", 2, "--max_new_tokens", 8, "--eval_size", 4,
        "--save_every", 1000, "--engine", "transformers"]  # fmt: skip
PATIENCE = 20  # seconds a run that was told to stop may take


class Running:
    """A run of its own, with the process ids of its ranks once it has logged `after_step`."""

    def __init__(self, ranks: int, script: str, *flags: object, folder: Path, after_step: int):
        self.process = subprocess.Popen(
            command(ranks, script, *flags, "--output_dir", folder), cwd=Path(__file__).parent.parent,
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        log, deadline = folder / "metrics.jsonl", time.monotonic() + 60
        while not (log.is_file() and any(line["step"] >= after_step for line in metrics(folder))):
            assert self.process.poll() is None and time.monotonic() < deadline, "the run ended before its time"
            time.sleep(0.02)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.ranks = [int(pid) for pid in children] if ranks > 1 else [self.process.pid]
        assert len(self.ranks) == ranks

    def end(self) -> subprocess.CompletedProcess:
        """Wait for launcher and ranks: torchrun starts each rank in a session of its own, none may stay behind."""
        try:
            stdout, stderr = self.process.communicate(
                timeout=PATIENCE
            )  # the pipes close when the last process has gone
        finally:
            for pid in [self.process.pid, *self.ranks]:
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, signal.SIGKILL)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, stdout, stderr)


def stopped_at(folder: Path) -> int:
    """The step of the one checkpoint there is."""
    (checkpoint,) = (folder / "checkpoints").iterdir()
    return int(checkpoint.name.removeprefix("step_"))


def test_one_rank_told_to_stop_stops_all_and_the_same_command_resumes(tmp_path):
    flags = [*SFT, "--max_steps", 30]
    run(2, "sft.py", *flags, "--output_dir", tmp_path / "whole")
    job = Running(2, "sft.py", *flags, folder=tmp_path / "stopped", after_step=2)
    os.kill(job.ranks[1], signal.SIGTERM)
    done = job.end()
    step = stopped_at(tmp_path / "stopped")
    assert 2 <= step < 30 and done.returncode == 0, done.stderr
    assert f"told to stop: saved step {step}" in done.stdout
    resumed = run(2, "sft.py", *flags, "--output_dir", tmp_path / "stopped").stdout
    assert f"step_{step:06d} (step {step})" in resumed
    assert [line["step"] for line in metrics(tmp_path / "stopped")] == list(range(1, 31))
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")


def test_the_launcher_passes_the_signal_on(tmp_path):
    job = Running(2, "sft.py", *SFT, "--max_steps", 5000, folder=tmp_path, after_step=2)
    job.process.send_signal(signal.SIGINT)
    done = job.end()
    assert f"told to stop: saved step {stopped_at(tmp_path)}" in done.stdout, done.stderr


def test_a_rollout_told_to_stop_is_made_again(tmp_path):
    flags = [*GRPO, "--max_steps", 20]
    run(1, "grpo.py", *flags, "--output_dir", tmp_path / "whole")
    job = Running(1, "grpo.py", *flags, folder=tmp_path / "stopped", after_step=2)
    os.kill(job.ranks[0], signal.SIGINT)
    done = job.end()
    assert done.returncode == 0 and 2 <= stopped_at(tmp_path / "stopped") < 20, done.stderr
    run(1, "grpo.py", *flags, "--output_dir", tmp_path / "stopped")
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (signum - 1) & 1)


def test_asked_twice_it_stops_at_once(tmp_path):
    job = Running(1, "sft.py", *SFT, "--max_steps", 5000, folder=tmp_path, after_step=2)
    os.kill(job.ranks[0], signal.SIGTERM)
    while catches(job.ranks[0], signal.SIGTERM):  # the handler gives way to the system's once it has run
        pass
    os.kill(job.ranks[0], signal.SIGTERM)
    assert job.end().returncode == -signal.SIGTERM
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.suffix == ""]


def test_a_killed_rank_ends_the_run(tmp_path):
    job = Running(2, "sft.py", *SFT, "--max_steps", 5000, folder=tmp_path, after_step=2)
    os.kill(job.ranks[1], signal.SIGKILL)
    done = job.end()
    assert done.returncode == 1 and "error: rank 0 lost another rank: " in done.stderr, done.stderr
