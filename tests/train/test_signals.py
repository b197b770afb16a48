"""Signals: a run that a signal stops saves and can be resumed. tests/rollout/test_remote_sampler.py
kills ranks."""

import signal
from pathlib import Path

import pytest
from helpers import SIGNAL_AT, assert_same_weights, metrics, run

pytestmark = pytest.mark.slow

SFT = ["--batch_size", 4, "--eval_every", 0, "--save_every", 1000, "--lr", 1e-3]
GRPO = ["--prompts_per_step", 4, "--samples_per_prompt", 2, "--max_new_tokens", 8, "--eval_size", 4,
        "--save_every", 1000, "--engine", "transformers", "--max_steps", 4]  # fmt: skip


def stopped_at(folder: Path) -> int:
    """Return the step of the only checkpoint."""
    (checkpoint,) = (folder / "checkpoints").iterdir()
    return int(checkpoint.name.removeprefix("step_"))


# ---- a signal in the middle of step 3 ----


@pytest.mark.parametrize("signals", ["SIGTERM", "SIGHUP SIGHUP", "SIGUSR1"])
def test_signal_to_one_rank_stops_all_and_the_same_command_resumes(signals, small, tmp_path):
    """tests/test_every_script.py compares the weights of resumed runs."""
    flags = [*SFT, *small, "--max_steps", 5, "--output_dir", tmp_path]
    numbers = ",".join(str(int(signal.Signals[name])) for name in signals.split())
    moment = (1, "torch.optim.AdamW.step", tmp_path, 2, numbers)
    done = run(2, SIGNAL_AT, *moment, "sft.py", *flags)
    assert stopped_at(tmp_path) == 3 and (tmp_path / "hf/model.safetensors").is_file()
    assert "stopped after step 3" in done.stdout
    assert "step_000003 (step 3)" in run(2, "sft.py", *flags).stdout
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 6))


def test_rollout_stopped_by_a_signal_is_repeated(small, main, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    flags = [*GRPO, *small]
    main("grpo", *flags, "--output_dir", whole)
    step = "common.rollout.transformers_engine.TransformersEngine.step"
    moment = (0, step, stopped, 2, int(signal.SIGINT))
    done = run(1, SIGNAL_AT, *moment, "grpo.py", *flags, "--output_dir", stopped)
    assert stopped_at(stopped) == 2 and "stopped after step 2" in done.stdout
    main("grpo", *flags, "--output_dir", stopped)
    assert_same_weights(whole, stopped)


def test_second_signal_stops_at_once(small, tmp_path):
    twice = f"{int(signal.SIGTERM)},{int(signal.SIGTERM)}"
    flags = [*SFT, *small, "--max_steps", 4, "--output_dir", tmp_path]
    moment = (0, "torch.optim.AdamW.step", tmp_path, 2, twice)
    run(1, SIGNAL_AT, *moment, "sft.py", *flags, code=-signal.SIGTERM)
    assert metrics(tmp_path)[-1]["step"] == 2 and not list((tmp_path / "checkpoints").iterdir())


# ---- other ends ----


@pytest.mark.parametrize("ignores", [False, True])
def test_closed_terminal_stops_a_run_that_nohup_did_not_start(ignores):
    """The closed terminal takes no output, also not the table of the last step."""
    program = f"""
import os, signal
from common.parallel import process
if {ignores}:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
kept = os.dup(1)
master, terminal = os.openpty()
os.dup2(terminal, 1)
process.note_signals()
os.kill(os.getpid(), signal.SIGHUP)
os.close(master)
if not {ignores}:
    print("to the closed terminal", flush=True)
os.write(kept, str(process.stop_signalled).encode())
"""
    assert run(1, program).stdout == str(not ignores)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_before_the_first_step_ends_the_process(signum, small, tmp_path):
    """There is nothing to save, and what runs may hang, such as a user's file."""
    (tmp_path / "reward.py").write_text(
        f"import os\nos.kill(os.getpid(), {int(signum)})\ndef f(completion, row): return 1.0\n"
    )
    flags = [*GRPO, *small, "--reward", f"{tmp_path}/reward.py:f", "--output_dir", tmp_path / "run"]
    assert "Traceback" not in run(1, "grpo.py", *flags, code=-signum).stderr


@pytest.mark.parametrize(
    "signals, code, said", [(1, 1, "error: heard\n"), (2, -signal.SIGTERM, "")]
)
def test_rank_reports_its_failure_although_the_launcher_ends_it(signals, code, said):
    """The first signal may arrive at any time after another rank was killed. The second ends a
    hanging rank."""
    fails = f"""
import os, signal
from common.parallel import distributed, process
distributed.setup(0)
explain = process.explain
def signalled(error, rank):
    for _ in range({signals}):
        os.kill(os.getpid(), signal.SIGTERM)
    return explain(error, rank)
process.explain = signalled
raise distributed.RunError("heard")
"""
    assert run(1, fails, code=code).stderr == said
