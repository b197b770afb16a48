"""dapo.py: the objective by naive formulas, and dynamic sampling."""

import math
import statistics
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close_metrics, completion, metrics, run
from hypothesis import given
from hypothesis import strategies as st
from in_process import talkative
from test_grpo import REWARD, samples

import dapo

NAN = math.nan


def double(x):
    return torch.tensor(x, dtype=torch.float64)


# ---- rewards and advantages ----


@given(
    st.integers(0, 40),
    st.integers(2, 30),
    st.sampled_from([0.2, 0.5, 1.0]),
    st.sampled_from([1.0, 2.0]),
)
def test_length_penalty_is_a_ramp_over_the_buffer(length, longest, buffer, penalty):
    args = dapo.Args(max_new_tokens=longest, overlong_buffer=buffer, overlong_penalty=penalty)
    start = longest - buffer * longest
    expected = 0.0 if length <= start else -penalty * min(1, (length - start) / (longest - start))
    got = dapo.overlong_penalties(torch.tensor([length]), args)
    assert got.item() == pytest.approx(expected, abs=1e-9) and got.dtype == torch.float64


@pytest.mark.parametrize(
    ("buffer", "penalty", "expected"),
    [
        (0.0, 1.0, [[0, 0], [0, 0], [0, 0]]),
        (0.4, 1.0, [[-1, -1], [-0.5, -0.75], [0, -0.25]]),
        (0.4, 2.0, [[-2, -2], [-1, -1.5], [0, -0.5]]),
        (0.2, 1.0, [[-1, -1], [0, -0.5], [0, 0]]),
    ],
)
def test_penalties_equal_a_calculation_by_hand(buffer, penalty, expected):
    flags = dict(overlong_buffer=buffer) | (dict(overlong_penalty=penalty) if buffer else {})
    got = dapo.overlong_penalties(
        torch.tensor([[10, 12], [8, 9], [1, 7]]), dapo.Args(max_new_tokens=10, **flags)
    )
    torch.testing.assert_close(got, double(expected))


reward = st.integers(-50, 50).map(float) | st.just(NAN)


@given(st.lists(st.lists(reward, min_size=4, max_size=4), min_size=1, max_size=4))
def test_advantages_equal_naive_ones(rewards):
    for group, got in zip(rewards, dapo.advantages(double(rewards)).tolist(), strict=True):
        present = [r for r in group if not math.isnan(r)]
        if len(set(present)) < 2:
            assert got == [0.0] * 4
            continue
        mean, std = statistics.fmean(present), statistics.stdev(present)
        assert got == pytest.approx(
            [0.0 if math.isnan(r) else (r - mean) / (std + 1e-6) for r in group], abs=1e-9
        )


# ---- GFPO: the retained completions of a group ----

scored = st.tuples(reward, st.integers(1, 6))


@given(
    st.lists(scored, min_size=4, max_size=4),
    st.sampled_from([0, 2, 3, 4]),
    st.sampled_from(["length", "reward_per_token"]),
)
def test_retained_completions_and_their_advantages_equal_naive_code(group, keep, by):
    """Statistics are those of the retained completions; the others have advantage 0 and no trained
    tokens. With all of a group retained, the advantages are the usual ones."""
    rewards, lengths = map(list, zip(*group, strict=True))

    def cost(i):
        if math.isnan(rewards[i]):
            return math.inf
        return lengths[i] if by == "length" else -rewards[i] / lengths[i]

    best = sorted(range(4), key=lambda i: (cost(i), i))[: keep or 4]
    flags = dict(gfpo_keep=keep, gfpo_by=by) if keep else {}
    args = dapo.Args(samples_per_prompt=4, **flags)
    is_retained = dapo.retained(double([rewards]), torch.tensor([lengths]), args)
    assert is_retained[0].tolist() == [i in best for i in range(4)]
    total = double([rewards]).masked_fill(~is_retained, NAN)
    got = dapo.advantages(total)[0].tolist()
    present = [rewards[i] for i in best if not math.isnan(rewards[i])]
    unequal = len(set(present)) > 1
    mean, std = statistics.fmean(present or [0]), statistics.stdev(present) if unequal else 1.0
    for i in range(4):
        counts = unequal and i in best and not math.isnan(rewards[i])
        assert got[i] == pytest.approx((rewards[i] - mean) / (std + 1e-6) if counts else 0.0)
    if keep in (0, 4):
        assert torch.equal(dapo.advantages(double([rewards]))[0], double(got))


def test_completions_that_are_not_retained_or_truncated_have_no_trained_tokens():
    reasons = ("stop", "length", "stop", "length")
    group = [completion(3, finish_reason=reason) for reason in reasons]
    rewards_G = double([1.0, 0.0, NAN, NAN])
    for flags, expected in (
        ({}, [True, True, True, True]),
        (dict(mask_truncated=True), [True, False, True, False]),
        (dict(gfpo_keep=2), [True, True, False, False]),
        (dict(gfpo_keep=2, mask_truncated=True), [True, False, False, False]),
    ):
        masked = dapo.masked(group, rewards_G, dapo.Args(samples_per_prompt=4, **flags))
        assert [any(sample.loss_mask) for sample in masked] == expected
        assert [sample.ids for sample in masked] == [sample.ids for sample in group]


# ---- the loss ----

# Two completions, the first with tool output in its middle, and a third one without trained tokens.
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0]).bool()
IDS = torch.tensor([0] * 7 + [1] * 4 + [2] * 2)
ADVANTAGES = double([1.5] * 7 + [-0.7] * 4 + [2.0] * 2)
TOKENS = torch.tensor(17)  # number of trained tokens of the global minibatch


def streams() -> list[torch.Tensor]:
    """Return log-probs of the policy, with gradient, the old policy and the engine, and
    entropies."""
    generator = torch.Generator().manual_seed(4)
    new, *drifts, entropy = torch.randn(4, len(MASK), generator=generator, dtype=torch.float64)
    new = -2 + 0.5 * new
    old = new + 0.8 * drifts[0]
    return [new.requires_grad_(), old, old + 0.9 * drifts[1], entropy.abs()]


@pytest.mark.parametrize("threshold", [-math.inf, 0.5])
def test_loss_and_gradient_equal_naive_code(threshold):
    new, old, engine, entropy = streams()
    args = dapo.Args(top_entropy=0.5 if threshold > 0 else 1.0)
    expected, slopes, clipped, kept = 0.0, [0.0] * len(MASK), [], 0
    for t in MASK.nonzero()[:, 0].tolist():
        a, ratio, weight = (
            ADVANTAGES[t].item(),
            (new[t] - old[t]).exp().item(),
            min(math.exp(old[t] - engine[t]), 2.0),
        )
        clipped.append((a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8))
        if entropy[t] >= threshold:
            kept += 1
            expected -= weight * min(ratio * a, min(max(ratio, 0.8), 1.28) * a) / 17
            slopes[t] = 0.0 if clipped[-1] else -weight * ratio * a / 17
    share_T, logged = dapo.loss(
        new, old, engine, entropy, ADVANTAGES, MASK, IDS, TOKENS, threshold, args
    )
    assert share_T.sum().item() == pytest.approx(expected, rel=1e-6)
    assert torch.autograd.grad(share_T.sum(), new)[0].tolist() == pytest.approx(slopes, rel=1e-6)
    assert logged["clip_ratio/region_mean"][MASK].tolist() == clipped and 0 < sum(clipped) < len(
        clipped
    )
    assert 0 < kept < len(clipped) or threshold == -math.inf


def threshold(entropies: torch.Tensor, fraction: float) -> float:
    """Return the threshold of tokens in two minibatches with untrained tokens between them."""
    mask, high = torch.tensor([False]).expand(3), torch.full((3,), 1e9)
    half = len(entropies) // 2
    minibatches = [
        [
            SimpleNamespace(
                old_entropy_T=torch.cat([x, high.to(x)]),
                loss_mask_T=torch.cat([x.isfinite(), mask]),
            )
        ]
        for x in (entropies[:half], entropies[half:])
    ]
    return dapo.entropy_threshold(minibatches, fraction)


@pytest.mark.parametrize("tokens", [1, 3, 10, 100, 1000])
def test_entropy_threshold_keeps_its_fraction_rounded_up(tokens):
    """In floating point 0.07 * 100, 0.14 * 100 and others slightly exceed the exact integer."""
    entropies = torch.randperm(tokens).double()
    for permille in range(1, 1000):
        kept = tokens - threshold(entropies, permille / 1000)  # entropies are 0, 1, ..., tokens - 1
        assert kept == -(-permille * tokens // 1000), permille


@pytest.mark.parametrize(
    ("fraction", "kept"),
    [(0.2, 2), (0.25, 3), (0.5, 5), (0.7, 7), (0.95, 10), (1e-9, 1), (1.0, 10)],
)
def test_entropy_threshold_of_ten_tokens_is_exact(fraction, kept):
    entropies = torch.tensor([0.3, 0.1, 0.2, 0.6, 1.0, 0.5, 0.4, 0.9, 0.7, 0.8])
    assert (entropies >= threshold(entropies, fraction)).sum() == kept


def test_entropy_threshold_without_tokens_is_infinite():
    assert threshold(torch.zeros(0), 0.2) == math.inf
    assert threshold(torch.zeros(0), 1.0) == -math.inf


# ---- dynamic sampling ----


def test_draw_is_the_smallest_that_fills_the_step_within_max_draws():
    args = dapo.Args(prompts_per_step=64, max_draws=3)

    def draw(kept: int, drawn: int) -> int:
        return dapo.next_draw(kept, drawn, args)

    assert draw(0, 0) == draw(0, 64) == draw(20, 64) == 64
    assert draw(32, 64 + 64) == 64 and draw(32, 150) == 42 and draw(32, 192) == 0, (
        "--max_draws leaves no more"
    )
    for kept in (40, 48, 56, 60, 63):
        size, chance = draw(kept, 64), kept / 64
        fills = [
            sum(
                math.comb(n, k) * chance**k * (1 - chance) ** (n - k)
                for k in range(64 - kept, n + 1)
            )
            for n in (size, size - 3)
        ]
        assert fills[0] > 0.95 or size == 64
        assert size == 64 or fills[1] < 0.98, "three fewer would not do"
    whole = dapo.Args(prompts_per_step=64, max_draws=0)
    assert dapo.next_draw(0, 0, whole) == 64 and dapo.next_draw(3, 64, whole) == 0


# ---- whole runs ----


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(
        REWARD + "\n\ndef longer(completion, row):\n    return float(len(completion) > 4)\n"
    )
    return path


@pytest.fixture(scope="module")
def flags(reward, small, tmp_path_factory):
    return (
        "--model", talkative(tmp_path_factory.mktemp("model") / "talkative", small[1]), *small[2:],
        "--reward", f"{reward}:longer", "--max_steps", 4, "--prompts_per_step", 12,
        "--samples_per_prompt", 3, "--minibatches", 3, "--max_new_tokens", 12, "--lr", 1e-4,
        "--eval_every", 0, "--engine", "transformers",
        "--max_logprob_difference", 1e-4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def everything(flags):
    """Dynamic sampling, every penalty, and both masks."""
    return (
        *flags, "--max_draws", 3, "--overlong_buffer", 0.5, "--overlong_penalty", 0.7,
        "--missing_eos_penalty", 0.1, "--mask_truncated", "--top_entropy", 0.5,
        "--correction", "sequence",
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(everything, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(1, "dapo.py", *everything, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_samples_include_all_draws_and_only_kept_groups_have_advantages(trained):
    drawn = []
    for line, (_, of_step) in zip(
        metrics(trained), groupby(samples(trained), lambda s: s["step"]), strict=True
    ):
        groups = list(zip(*[iter(of_step)] * 3, strict=True))
        assert len(groups) == 12 * line["dynamic_sampling/draws"]
        assert all(len({sample["prompt"] for sample in group}) == 1 for group in groups)
        drawn.append(len(groups))
        unequal = [
            i for i, group in enumerate(groups) if len({sample["reward"] for sample in group}) > 1
        ]
        assert line["dynamic_sampling/unequal_fraction"] == pytest.approx(
            len(unequal) / len(groups)
        )
        assert len(unequal) >= 12 or line["dynamic_sampling/draws"] == 3
        trained = [
            i for i, group in enumerate(groups) if any(sample["advantage"] for sample in group)
        ]
        assert trained == unequal[:12], "the first twelve of them"
    assert any(12 < count < 24 for count in drawn) and any(count % 2 for count in drawn), (
        "not in whole steps"
    )


@pytest.mark.slow
def test_dapo_without_its_additions_equals_grpo(flags, reward, tmp_path):
    """GFPO keeps all completions of a group."""
    flags = (*flags, "--reward", f"{reward}:digits", "--prompts_per_step", 6, "--max_steps", 3)
    run(1, "grpo.py", *flags, "--output_dir", tmp_path / "grpo")
    run(
        1,
        "dapo.py",
        *flags,
        "--max_draws",
        0,
        "--overlong_buffer",
        0,
        "--gfpo_keep",
        3,
        "--output_dir",
        tmp_path / "dapo",
    )
    assert samples(tmp_path / "grpo") == samples(tmp_path / "dapo")
    names = {name for line in metrics(tmp_path / "grpo") for name in line} - {
        "tokens_per_second",
        "step",
        "beta",
        "entropy_coef",
    }
    names = tuple(
        sorted(name for name in names if not name.startswith(("time/", "speed/", "memory/")))
    )
    assert {"loss", "grad_norm", "entropy", "clip_ratio/region_mean"} <= set(names)
    assert_close_metrics(tmp_path / "grpo", tmp_path / "dapo", names, rel=1e-6)


@pytest.mark.slow
def test_equal_rewards_in_all_draws_are_an_error(flags, tmp_path):
    reward = tmp_path / "same.py"
    reward.write_text("def same(completion, row):\n    return 1.0\n")
    extra = (
        "--reward",
        f"{reward}:same",
        "--max_draws",
        2,
        "--max_new_tokens",
        2,
        "--prompts_per_step",
        6,
    )
    done = run(2, "dapo.py", *flags, *extra, "--output_dir", tmp_path / "run", code=1)
    assert done.stderr.count("error: step 1: no group has unequal rewards after --max_draws 2") == 1


@pytest.mark.curve
def test_policy_learns_to_write_digits(flags, reward, tmp_path):
    """Training starts from the untrained model."""
    extra = (
        "--reward",
        f"{reward}:digits",
        "--max_steps",
        16,
        "--prompts_per_step",
        16,
        "--samples_per_prompt",
        8,
    )
    extra += (
        "--minibatches",
        1,
        "--lr",
        5e-3,
        "--max_new_tokens",
        4,
        "--overlong_buffer",
        0,
        "--output_dir",
        tmp_path,
    )
    run(1, "dapo.py", *flags, *extra)
    rewards = [line["reward"] for line in metrics(tmp_path)]
    assert rewards[0] < 0.2 and rewards[-1] > 0.5, rewards  # the maximum is 0.8
