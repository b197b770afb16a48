"""Signals: a run that a signal stops saves and can be resumed. tests/rollout/test_remote_sampler.py
kills ranks."""

import signal
from functools import partial
from pathlib import Path

import pytest
from helpers import assert_same_weights, metrics
from processes import run, signal_at

from common.parallel import process
from common.rollout import transformers_engine
from common.rollout.engine import Engine

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
    numbers = [signal.Signals[name] for name in signals.split()]
    moment = partial(signal_at, 1, "torch.optim.AdamW.step", tmp_path, 2, numbers)
    done = run(2, "sft.py", *flags, prepare=moment)
    assert stopped_at(tmp_path) == 3 and (tmp_path / "hf/model.safetensors").is_file()
    assert "stopped after step 3" in done.stdout
    assert "step_000003 (step 3)" in run(2, "sft.py", *flags).stdout
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 6))


def test_rollout_ends_after_the_round_in_which_a_stop_is_heard(small, main, tmp_path, monkeypatch):
    """A turn in each round: four of an evaluation, then eight in each step. The resumed run has the
    weights of one that was never stopped."""
    monkeypatch.setattr(transformers_engine, "BATCH", 1)
    whole, stopped, rounds, step = tmp_path / "whole", tmp_path / "stopped", [], Engine.step
    flags = [*GRPO, *small, "--max_steps", 2]

    def counted(engine, meter):
        step(engine, meter)
        rounds.append(1)
        process.stop_signalled |= len(rounds) == 4 + 8 + 3

    main("grpo", *flags, "--output_dir", whole)
    with monkeypatch.context() as patch:
        patch.setattr(process, "stop_signalled", False)
        patch.setattr(Engine, "step", counted)
        main("grpo", *flags, "--output_dir", stopped)
    assert len(rounds) == 4 + 8 + 3 and stopped_at(stopped) == 1
    main("grpo", *flags, "--output_dir", stopped)
    assert_same_weights(whole, stopped)


# From step 3 on no turn ends, and then one rank gets a signal.
ENDLESS = """
import os, runpy, signal, sys
from common.parallel import distributed
from common.rollout.remote import RolloutRanks
from common.rollout.transformers_engine import TransformersEngine
rank, *sys.argv = sys.argv[1:]
step, send = TransformersEngine._step, RolloutRanks._send
def signalled():
    if distributed._launch_rank == int(rank):
        os.kill(os.getpid(), signal.SIGUSR1)
def endless(engine, meter):
    if engine.version < 2:
        return step(engine, meter)
    signalled()
    return []
def sending(source, requests, number, meter):
    send(source, requests, number, meter)
    if number == 2:
        signalled()
TransformersEngine._step, RolloutRanks._send = endless, sending
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("ranks", "rollout_ranks", "rank"), [(2, 0, 1), (3, 1, 1), (2, 1, 1)])
def test_stop_of_one_rank_ends_the_rollouts_of_all(ranks, rollout_ranks, rank, small, tmp_path):
    """Of an engine beside the trainer, of a training rank that waits, of a rollout rank."""
    flags = [*GRPO, *small, "--output_dir", tmp_path]
    if rollout_ranks:
        flags += ["--rollout_ranks", rollout_ranks, "--max_staleness", 0]
    done = run(ranks, ENDLESS, rank, "grpo.py", *flags)
    assert stopped_at(tmp_path) == 2 and "stopped after step 2" in done.stdout


@pytest.mark.parametrize(
    ("signum", "said"), [(signal.SIGTERM, ""), (signal.SIGINT, "Ctrl-C: saves")]
)
def test_second_signal_stops_at_once(signum, said, small, tmp_path):
    flags = [*SFT, *small, "--max_steps", 4, "--output_dir", tmp_path]
    twice = partial(signal_at, 0, "torch.optim.AdamW.step", tmp_path, 2, [signum, signum])
    done = run(1, "sft.py", *flags, code=-signum, prepare=twice)
    assert said in done.stderr and ("saves" in done.stderr) == (said != "")
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
