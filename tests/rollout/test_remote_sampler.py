"""Dedicated rollout ranks: a run equal to that with a colocated engine, bounded staleness, no
prompt lost by a kill, and no hang when a rank of either role dies. tests/test_grpo.py has vLLM."""

import os
import signal
from collections import Counter

import pytest
from helpers import assert_close_metrics, assert_same_weights, logged, metrics, samples, write_rows
from in_process import REWARD
from model.checkpoints import save_classifier
from processes import Ranks, run, run_and_kill, until

from bench.models import checkpoint

pytestmark = pytest.mark.slow

STEPS, PROMPTS = 6, 8


@pytest.fixture(scope="module")
def flags(small, tmp_path_factory):
    """Return flags with 48 different prompts: an epoch has six steps."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "reward.py").write_text(REWARD)
    rows = [dict(prompt=f"{100 + i}+7=", answer=str(107 + i)) for i in range(STEPS * PROMPTS)]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "eval.jsonl", rows[:5])
    return (
        *small[:2], "--dataset", folder / "rows.jsonl", "--eval_dataset", folder / "eval.jsonl",
        "--eval_split", "train", "--reward", f"{folder / 'reward.py'}:digits",
        "--prompts_per_step", PROMPTS, "--samples_per_prompt", 4, "--max_new_tokens", 8,
        "--lr", 1e-4, "--eval_every", 3, "--save_every", 2,
    )  # fmt: skip


FAST = ("--engine", "transformers")


def test_dedicated_rank_without_staleness_equals_the_colocated_run_after_a_signal(flags, tmp_path):
    """The signal to a rollout rank stops all ranks, and the same command resumes."""
    colocated, apart = tmp_path / "colocated", tmp_path / "apart"
    run(1, "rloo.py", *flags, *FAST, "--output_dir", colocated)
    flags = (*flags, *FAST, "--rollout_ranks", 1, "--max_staleness", 0, "--output_dir", apart)
    with Ranks(2, "rloo.py", *flags) as ranks:
        until(lambda: logged(apart, 2))
        os.kill(ranks.pids[1], signal.SIGTERM)
        done = ranks.end()
    assert done.returncode == 0 and "stopped after step" in done.stdout, done.stderr
    assert "resuming from" in run(2, "rloo.py", *flags).stdout
    assert_same_weights(colocated, apart)
    assert samples(colocated) == samples(apart)
    numbers = ("loss", "kl", "grad_norm", "reward", "eval/solved", "eval/reward", "epoch")
    assert_close_metrics(colocated, apart, numbers, rel=0)


def test_staleness_is_bounded_and_a_kill_loses_no_prompt(flags, tmp_path):
    staleness = 3
    flags = (*flags, *FAST, "--rollout_ranks", 1, "--max_staleness", staleness)
    flags = (*flags, "--output_dir", tmp_path)
    run_and_kill(2, "rloo.py", *flags, folder=tmp_path, after_step=3, at="os.rename")
    assert not (tmp_path / "hf").exists(), "killed too late"
    run(2, "rloo.py", *flags)
    ages = [line["step"] - 1 - line["version"] for line in samples(tmp_path)]
    assert 0 < max(ages) <= staleness and min(ages) == 0, Counter(ages)
    uses = Counter(line["prompt"] for line in samples(tmp_path))
    # each prompt of the epoch once, four samples
    assert len(uses) == STEPS * PROMPTS and set(uses.values()) == {4}
    for line in metrics(tmp_path)[1:]:
        differs = line["sampling/sampling_logp_difference/max"] > 1e-4
        assert differs == (line["sampling/staleness/max"] > 0), "old weights, other probabilities"
        assert 0 < line["idle/training_ranks"] < 1
    # A rollout rank tells its load with its groups, which may come steps before they are taken.
    loads = [line for line in metrics(tmp_path) if "engine/running" in line]
    assert loads and all(0 <= line["idle/rollout_ranks"] <= 1 for line in loads)


@pytest.mark.parametrize(("ranks", "rollout_ranks", "script", "extra"), [
    (4, 1, "dapo.py", ("--prompts_per_step", 6)),  # several rollouts in a step
    (3, 1, "ppo.py", ("--value_warmup_steps", 1)),
    (4, 3, "online_dpo.py", ()),
    (2, 1, "dapo.py", ()),  # several rollouts in a step
    (3, 1, "ppo.py", ("--value_warmup_steps", 1, "--reward", "model:MODEL")),  # collective
    (4, 2, "online_dpo.py", ()),
    (2, 1, "distill.py", ("--teacher", "tiny")),
])  # fmt: skip
def test_scripts_run_with_rollout_ranks(ranks, rollout_ranks, script, extra, flags, tmp_path):
    where = ("--rollout_ranks", rollout_ranks, "--max_steps", 2, "--output_dir", tmp_path)
    if "model:MODEL" in extra:
        extra = (*extra[:-1], f"model:{save_classifier(tmp_path / 'model')}")
    run(ranks, script, *flags, *FAST, *extra, *where)
    assert [line["step"] for line in metrics(tmp_path)] == [0, 1, 2]
    assert [line["sampling/staleness/max"] for line in metrics(tmp_path)[1:]] == [0, 1]


def test_buffers_in_float32_reach_the_rollout_ranks_of_a_run_in_bfloat16(flags, tmp_path):
    """GLM-4.5 has biases of its router."""
    model = checkpoint("glm4_moe", tmp_path / "model")
    own = ("--model", model, "--dtype", "bfloat16", "--rollout_ranks", 1, "--max_staleness", 0)
    own += ("--max_steps", 1, "--eval_every", 0, "--output_dir", tmp_path / "run")
    run(2, "grpo.py", *flags, *FAST, *own)
    (line,) = metrics(tmp_path / "run")
    assert line["sampling/sampling_logp_difference/max"] < 0.1


# Program of a rank: grpo.py whose engine takes no weights after the first ones.
STALE = """
import grpo
from common.config.parse import parse
from common.parallel import distributed
from common.rollout.transformers_engine import TransformersEngine
original = TransformersEngine.load_weights
def load(engine, weights, version=0):
    if version == 0:
        original(engine, weights, version)
TransformersEngine.load_weights = load
grpo.main(parse(grpo.Args))
distributed.end_process()
"""


@pytest.mark.parametrize("rollout_ranks", [0, 1])
def test_old_weights_end_a_run_in_bfloat16_in_its_second_step(rollout_ranks, flags, tmp_path):
    """At this rate log-probs change less than bfloat16 rounds."""
    own = ("--dtype", "bfloat16", "--lr", 1e-6, "--warmup_steps", 0, "--max_steps", 4)
    own += ("--eval_every", 0, "--rollout_ranks", rollout_ranks, "--output_dir", tmp_path)
    own += ("--max_staleness", 0) if rollout_ranks else ()
    with Ranks(1 + rollout_ranks, STALE, *flags, *FAST, *own) as ranks:
        done = ranks.end()
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert len(said) == 1 and "weights are not those of step 1" in said[0], done.stderr
    assert len(metrics(tmp_path)) == 1


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_dead_rank_of_either_role_ends_the_job(victim, flags, tmp_path):
    """All ranks end by themselves: under several launchers, on several machines, none would end
    those of another."""
    flags = (*flags, *FAST, "--rollout_ranks", 1, "--max_steps", 5000, "--epochs", 1000)
    flags = (*flags, "--eval_every", 0)
    with Ranks(3, "rloo.py", *flags, "--output_dir", tmp_path) as ranks:
        until(lambda: logged(tmp_path, 2))
        os.kill(ranks.pids[victim], signal.SIGKILL)
        until(lambda: all(process.exitcode is not None for process in ranks.processes))
        done = ranks.end()
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "lost another rank" in said[0], done.stderr


def test_rollout_ranks_end_if_trainers_fail_at_start(flags, tmp_path):
    bad = ("--reward", "boxed", "gsm8k", "nonsense", "--rollout_ranks", 1, "--output_dir", tmp_path)
    with Ranks(2, "rloo.py", *flags, *FAST, *bad) as ranks:
        stderr = ranks.end().stderr
        assert all(process.exitcode is not None for process in ranks.processes)  # by a signal
    said = [line for line in stderr.splitlines() if line.startswith("error: ")]
    codes = [process.exitcode for process in ranks.processes]
    assert len(said) == 1 and said[0].startswith("error: --reward nonsense"), (codes, stderr)
