"""grpo.py: the objective for its flags, and runs with the real engine: agreement of engine and
trainer, ranks and packing, tensor parallelism, real data. tests/test_grpo_objective.py and
tests/objectives/test_advantages.py have the formulas."""

import itertools
import math
import typing
from pathlib import Path

import pytest
import torch
from helpers import (
    GSM8K,
    ROOT,
    assert_close_metrics,
    ended,
    finished,
    metrics,
    needs_gsm8k,
    run,
    samples,
    samples_of,
    start,
)
from in_process import REWARD

import grpo
from common.data.packing import PackedBatch, pack
from common.data.sample import Sample
from common.metrics.meter import Meter
from common.objectives.advantages import Scores

SAME = (
    "grad_norm",
    "reward",
    "reward_std",
    "entropy",
    "completions/mean_length",
    "num_tokens",
    "epoch",
)


# ---- the objective on samples with random log-probs: no model, no engine ----

LENGTHS = (5, 30, 1, 12, 20, 7)  # lengths of the completions; prompts have 3 tokens
ADVANTAGES = torch.tensor([1.5, -0.7, 0.0, -2.0, 0.4, -1.1])


def batch(drift: float) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
    """Return a pack with current and old log-probs; whole completions exceed the clip bounds on
    both sides. The fourth completion has tool output in its middle; the last has no trained
    token."""
    made = [Sample([1] * (3 + n), [False] * 3 + [True] * n, prompt_length=3) for n in LENGTHS]
    made[3].loss_mask[6:9] = [False] * 3
    made[5].loss_mask = [False] * len(made[5].ids)
    (mb,) = pack(made, 8192, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    logprobs_T = -3 * torch.rand(len(mb.targets_T), generator=generator, dtype=torch.float64)
    old_logprobs_T = logprobs_T + drift * torch.randn(
        len(mb.targets_T), generator=generator, dtype=torch.float64
    )
    return mb, logprobs_T, old_logprobs_T


def loss(args: grpo.Args, mb: PackedBatch, logprobs_T, old_logprobs_T) -> tuple[torch.Tensor, dict]:
    """Return the loss of grpo.py if engine and trainer agree and the policy equals the
    reference."""
    tokens, sequences = (
        mb.loss_mask_T.sum(),
        torch.tensor(sum(any(s.loss_mask) for s in samples_of(mb))),
    )
    share_T, logged = grpo.loss(
        logprobs_T, old_logprobs_T, old_logprobs_T, None, torch.zeros_like(logprobs_T),
        mb.on_tokens(ADVANTAGES), mb.loss_mask_T, mb.sequence_ids_T, tokens, sequences, args,
    )  # fmt: skip
    return share_T.sum(), logged


def outcome(**flags) -> float:
    """Return the loss of far off-policy log-probs."""
    return loss(grpo.Args(**flags), *batch(drift=2.0))[0].item()


@pytest.mark.parametrize(
    ("flags", "one", "other"),
    [
        *(({}, dict(loss=a), dict(loss=b)) for a, b in
          itertools.pairwise(("reinforce", "clip", "reinforce", "cispo", "sapo", "dppo"))),
        *((dict(reduction="sequence"), dict(loss=a), dict(loss=b)) for a, b in
          itertools.pairwise(("clip", "gspo", "sequence_clip", "gmpo", "topr", "vespo"))),
        *(({}, dict(reduction=a), dict(reduction=b)) for a, b in
          itertools.pairwise(("token", "sequence", "sequence_sum", "constant"))),
        *(({}, {flag: 0.1}, {flag: 0.3}) for flag in ("clip_low", "clip_high")),
        (dict(reduction="constant"), dict(max_new_tokens=128), dict(max_new_tokens=256)),
    ],
)  # fmt: skip
def test_flag_changes_the_loss(flags, one, other):
    assert outcome(**flags, **one) != pytest.approx(outcome(**flags, **other), rel=1e-6)


def test_clip_fraction_counts_the_tokens_without_gradient():
    """The logged fraction is that of trained tokens without gradient."""
    mb, logprobs_T, old_logprobs_T = batch(drift=2.0)
    logprobs_T.requires_grad_()
    total, logged = loss(grpo.Args(), mb, logprobs_T, old_logprobs_T)
    (gradient_T,) = torch.autograd.grad(total, logprobs_T)
    without_T = (gradient_T == 0) & mb.loss_mask_T & (mb.on_tokens(ADVANTAGES) != 0)
    meter = Meter()
    meter.tokens(mb, logged)
    fraction = meter.reduce()["clip_ratio/region_mean"]
    assert fraction == pytest.approx((without_T.sum() / mb.loss_mask_T.sum()).item()) and fraction


# ---- advantages ----

REWARDS = torch.tensor([[1.0, 0, 0, 3, 1, 2], [2, 2, 1, 0, 0, 2], [0] * 6]).double()
PENALTIES = -torch.tensor([[4.0, 9, 2, 1, 2, 3], [8, 3, 1, 1, 4, 7], [5] * 6]).double()
PARTS = torch.stack([REWARDS / 2, REWARDS.flip(1), PENALTIES])
NAMES = typing.get_args(typing.get_type_hints(grpo.Args)["advantage"])


TOKENS = torch.tensor([[5, 1, 9, 2, 3, 1], [3, 8, 1, 4, 2, 9], [2] * 6])


def advantages(name, rewards=REWARDS, parts=PARTS, weights=(1.0, 1.0, 1.0)):
    return grpo.advantages(name, Scores(rewards, parts, weights, TOKENS))


def test_advantage_estimators_differ_and_give_zero_for_equal_rewards():
    got = {name: advantages(name) for name in NAMES}
    for one, other in itertools.combinations(NAMES, 2):
        assert not torch.allclose(got[one], got[other], rtol=1e-3), (one, other)
    assert all((got[name][2].abs() < 1e-9).all() for name in NAMES)


def test_gdpo_gives_zero_to_a_completion_without_a_reward():
    rewards, parts = REWARDS.clone(), PARTS.clone()
    rewards[0, 1] = math.nan  # although all parts of the reward exist
    got = advantages("gdpo", rewards, parts)
    parts[:, 0, 1] = 7.0  # the parts of this completion count in no statistic
    assert (
        got[0, 1] == 0 and got[0, 0] != 0 and torch.equal(got, advantages("gdpo", rewards, parts))
    )


def test_gdpo_weighs_the_rewards_and_treats_penalties_as_another_one():
    none = torch.cat([PARTS[:2], torch.zeros_like(PARTS[2:])])
    assert not torch.allclose(
        advantages("gdpo", parts=none, weights=(1.0, 3.0, 1.0)),
        advantages("gdpo", parts=none, weights=(3.0, 1.0, 1.0)),
    )
    assert not torch.allclose(advantages("gdpo", parts=none), advantages("gdpo"))


# ---- presets ----


@pytest.mark.parametrize("name", grpo.Args.PRESETS)
def test_presets_have_a_finite_objective(name):
    assert math.isfinite(outcome(preset=name, **grpo.Args.PRESETS[name]))
    assert advantages(grpo.Args.PRESETS[name]["advantage"]).isfinite().all()


# ---- whole runs: vLLM, default flags ----


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD)
    return path


@pytest.fixture(scope="module")
def flags(reward, sums):
    return (
        "--dataset", sums, "--reward", f"{reward}:digits", "--max_steps", 3,
        "--prompts_per_step", 4, "--samples_per_prompt", 4, "--minibatches", 2,
        "--max_new_tokens", 12, "--lr", 1e-4, "--eval_every", 0,
        "--save_every", 100, "--max_logprob_difference", 1e-4, "--share_prefix", 1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def with_vllm(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("with_vllm")
    run(2, "grpo.py", *flags, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_gradient_does_not_depend_on_ranks_or_packing(with_vllm, flags, tmp_path):
    run(1, "grpo.py", *flags, "--share_prefix", 0, "--pack_tokens", 40, "--output_dir", tmp_path)
    assert samples(with_vllm, step=1) == samples(
        tmp_path, step=1
    )  # completions, rewards and advantages, exactly
    # The loss is a mean of terms of size 1 that nearly cancel, in float32: 1e-5 of 0.1 is its
    # precision.
    assert_close_metrics(with_vllm, tmp_path, ("loss",), rel=1e-5, floor=0.1)
    assert_close_metrics(with_vllm, tmp_path, SAME, rel=1e-5)


@pytest.mark.slow
def test_engine_and_trainer_agree_on_every_step(with_vllm):
    assert max(line["sampling/sampling_logp_difference/max"] for line in metrics(with_vllm)) <= 1e-4
    assert all(abs(line["sampling/ess"] - 1) < 1e-6 for line in metrics(with_vllm))


@pytest.mark.slow
def test_tensor_parallel_engine_gives_the_same_completions(with_vllm, flags, tmp_path):
    more = ("--tensor_parallel_size", 2, "--max_steps", 1, "--output_dir", tmp_path)
    run(2, "grpo.py", *flags, *more)
    # With AVX-512 vLLM's ranks share memory, under one name for all launches.
    assert not list(Path("/dev/shm").glob("*cpushm*"))
    assert [s["completion"] for s in samples(with_vllm, 1)] == [
        s["completion"] for s in samples(tmp_path, 1)
    ]


@pytest.mark.slow
def test_start_and_end_of_vllm_print_no_warnings(flags, small, tmp_path):
    """The run has its own process, with all imports."""
    done = finished(
        ended(start(1, "grpo.py", *flags, *small, "--max_steps", 1, "--output_dir", tmp_path))
    )
    assert not any(word in done.stderr for word in ("UserWarning", "FutureWarning", "Triton")), (
        done.stderr
    )


# ---- whole runs: transformers engine, every part of the objective ----


@pytest.mark.slow
def test_disagreement_stops_the_run_before_the_first_update(flags, small, tmp_path):
    extra = ("--max_logprob_difference", 1e-12, "--engine", "transformers")
    done = run(2, "grpo.py", *flags, *small, *extra, "--output_dir", tmp_path, code=1)
    assert done.stderr.count("error: engine and trainer log-probs differ: mean ") == 1
    assert not list(tmp_path.glob("checkpoints/*")) and not (tmp_path / "metrics.jsonl").exists()


@needs_gsm8k
@pytest.mark.slow
def test_gsm8k_recipe_runs_one_step(main, tmp_path):
    """A step of the recipe on the real file, with an untrained model; docs/log.md has the full
    run."""
    main(
        "grpo", "--config", ROOT / "configs/gsm8k_grpo.yaml", "--dataset", GSM8K, "--model", "tiny",
        "--output_dir", tmp_path, "--max_steps", 1, "--max_new_tokens", 32, "--eval_size", 4,
        "--prompts_per_step", 4, "--samples_per_prompt", 4, "--engine", "transformers",
    )  # fmt: skip
    assert {"rewards/gsm8k/mean", "rewards/format/mean", "completions/clipped_ratio"} <= metrics(
        tmp_path
    )[-1].keys()
