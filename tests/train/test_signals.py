"""Signals and killed ranks: a run told to stop saves and can be resumed; a run that lost a rank ends."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from helpers import (
    PATIENCE,
    PIPE,
    ROOT,
    Moment,
    Ranks,
    assert_same_weights,
    command,
    ended,
    environment,
    kill,
    metrics,
    run,
)

pytestmark = pytest.mark.slow

SFT = ["--batch_size", 4, "--eval_every", 0, "--save_every", 1000, "--lr", 1e-3]
GRPO = ["--prompts_per_step", 4, "--samples_per_prompt", 2, "--max_new_tokens", 8, "--eval_size", 4,
        "--save_every", 1000, "--engine", "transformers", "--max_steps", 5]  # fmt: skip


def stopped_at(folder: Path) -> int:
    """The step of the one checkpoint there is."""
    (checkpoint,) = (folder / "checkpoints").iterdir()
    return int(checkpoint.name.removeprefix("step_"))


# ---- told to stop ----


def test_one_rank_told_to_stop_stops_all_and_the_same_command_resumes(sums, tmp_path):
    flags = [*SFT, "--dataset", sums, "--max_steps", 8]
    run(2, "sft.py", *flags, "--output_dir", tmp_path / "whole")
    stopped = tmp_path / "stopped"
    with Ranks(2, "sft.py", *flags, "--output_dir", stopped, moment=Moment(stopped, step=2)) as ranks:
        ranks.until_frozen()
        os.kill(ranks.pids[1], signal.SIGTERM)
        os.kill(ranks.pids[0], signal.SIGCONT)
        done = ranks.end()
    step = stopped_at(stopped)
    assert 2 <= step < 8 and done.returncode == 0, done.stderr
    assert f"told to stop after step {step}" in done.stdout and (stopped / "hf/model.safetensors").is_file()
    resumed = run(2, "sft.py", *flags, "--output_dir", stopped).stdout
    assert f"step_{step:06d} (step {step})" in resumed
    assert [line["step"] for line in metrics(stopped)] == list(range(1, 9))
    assert_same_weights(tmp_path / "whole", stopped)


def test_a_rollout_told_to_stop_is_made_again(tmp_path):
    """In the middle of what would become step 3."""
    (tmp_path / "stopped.py").write_text(f"""
import os, runpy, signal
from pathlib import Path
from common.rollout.transformers_engine import TransformersEngine
from tests.helpers import Moment
moment, step, told = Moment(Path({str(tmp_path / "stopped")!r}), step=2), TransformersEngine.step, []

def interrupted(engine):
    if moment.logged() and not told:
        told.append(os.kill(os.getpid(), signal.SIGINT))
    return step(engine)

TransformersEngine.step = interrupted
runpy.run_path("grpo.py", run_name="__main__")
""")
    run(1, "grpo.py", *GRPO, "--output_dir", tmp_path / "whole")
    done = run(1, tmp_path / "stopped.py", *GRPO, "--output_dir", tmp_path / "stopped")
    assert stopped_at(tmp_path / "stopped") == 2 and "told to stop after step 2" in done.stdout
    run(1, "grpo.py", *GRPO, "--output_dir", tmp_path / "stopped")
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")


def test_asked_twice_it_stops_at_once(sums, tmp_path):
    twice = Moment(tmp_path, step=2, signals=(signal.SIGTERM, signal.SIGTERM))
    flags = [*SFT, "--dataset", sums, "--max_steps", 8, "--output_dir", tmp_path]
    with Ranks(1, "sft.py", *flags, moment=twice) as ranks:
        assert ranks.end().returncode == -signal.SIGTERM
    assert metrics(tmp_path)[-1]["step"] == 2 and not list((tmp_path / "checkpoints").iterdir())


# ---- with torchrun ----


class Running:
    """A run under torchrun, with the process ids of its ranks once it has logged a step."""

    def __init__(self, ranks: int, script: str, *flags: object, folder: Path, after_step: int):
        line = command(ranks, script, *flags, "--output_dir", folder)
        self.process = subprocess.Popen(line, cwd=ROOT, env=environment(), stdout=PIPE, stderr=PIPE, text=True)
        self.ranks, logged, deadline = [], Moment(folder, after_step).logged, time.monotonic() + PATIENCE
        while not logged():
            if self.process.poll() is not None or time.monotonic() > deadline:
                kill(self.process.pid)
                raise AssertionError(f"no step {after_step}: {self.process.communicate()}")
            time.sleep(0.02)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.ranks = [int(pid) for pid in children]
        assert len(self.ranks) == ranks

    def end(self) -> subprocess.CompletedProcess:
        done = ended(self.process, self.ranks)
        assert "forcefully exiting" not in done.stderr, "a rank did not end when it was told to, and was killed"
        return done


def test_the_launcher_passes_the_signal_on(sums, tmp_path):
    job = Running(2, "sft.py", *SFT, "--dataset", sums, "--max_steps", 100_000, folder=tmp_path, after_step=2)
    job.process.send_signal(signal.SIGINT)
    done = job.end()
    assert f"told to stop after step {stopped_at(tmp_path)}" in done.stdout, done.stderr


def test_a_killed_rank_ends_the_run(sums, tmp_path):
    job = Running(2, "sft.py", *SFT, "--dataset", sums, "--max_steps", 100_000, folder=tmp_path, after_step=2)
    os.kill(job.ranks[1], signal.SIGKILL)
    done = job.end()
    assert done.returncode == 1 and "error: rank 0 lost another rank: " in done.stderr, done.stderr


@pytest.mark.parametrize("signals, code, said", [(1, 1, "error: heard\n"), (2, -signal.SIGTERM, "")])
def test_a_rank_that_reports_is_heard_though_the_launcher_ends_it(signals, code, said, tmp_path):
    """By the first signal, which may come at any time once another rank was killed. The second ends what hangs."""
    (tmp_path / "fails.py").write_text(f"""
import os, signal
from common.parallel import distributed
distributed.setup(0)
for _ in range({signals}):
    distributed.before_failing.append(lambda: os.kill(os.getpid(), signal.SIGTERM))
raise distributed.RunError("heard")
""")
    with Ranks(1, tmp_path / "fails.py") as ranks:
        done = ranks.end()
    assert (done.returncode, done.stderr) == (code, said)
