"""dapo.py: the objective by naive formulas, and dynamic sampling."""

import math
import statistics
from itertools import groupby

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


@given(st.integers(0, 40), st.integers(2, 30), st.sampled_from([0.2, 0.5, 1.0]))
def test_length_penalty_is_a_ramp_over_the_buffer(length, longest, buffer):
    args = dapo.Args(max_new_tokens=longest, overlong_buffer=buffer)
    start = longest - buffer * longest
    expected = 0.0 if length <= start else -min(1, (length - start) / (longest - start))
    got = dapo.overlong_penalties(torch.tensor([length]), args)
    assert got.item() == pytest.approx(expected, abs=1e-9) and got.dtype == torch.float64


@pytest.mark.parametrize(
    ("buffer", "expected"),
    [
        (0.0, [[0, 0], [0, 0], [0, 0]]),
        (0.4, [[-1, -1], [-0.5, -0.75], [0, -0.25]]),
        (0.2, [[-1, -1], [0, -0.5], [0, 0]]),
    ],
)
def test_penalties_equal_a_calculation_by_hand(buffer, expected):
    args = dapo.Args(max_new_tokens=10, overlong_buffer=buffer)
    got = dapo.overlong_penalties(torch.tensor([[10, 12], [8, 9], [1, 7]]), args)
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


def test_truncated_completions_have_no_trained_tokens():
    group = [completion(3, finish_reason=reason) for reason in ("stop", "length", "stop")]
    masked = dapo.without_truncated(group)
    assert [any(sample.loss_mask) for sample in masked] == [True, False, True]
    assert [sample.ids for sample in masked] == [sample.ids for sample in group]


# ---- the loss ----

# Two completions, the first with tool output in its middle, and a third one without trained tokens.
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0]).bool()
IDS = torch.tensor([0] * 7 + [1] * 4 + [2] * 2)
ADVANTAGES = double([1.5] * 7 + [-0.7] * 4 + [2.0] * 2)
TOKENS = torch.tensor(17)  # number of trained tokens of the global minibatch


def streams() -> list[torch.Tensor]:
    """Return log-probs of the policy, with gradient, the old policy and the engine."""
    generator = torch.Generator().manual_seed(4)
    new, *drifts = torch.randn(3, len(MASK), generator=generator, dtype=torch.float64)
    new = -2 + 0.5 * new
    old = new + 0.8 * drifts[0]
    return [new.requires_grad_(), old, old + 0.9 * drifts[1]]


def test_loss_and_gradient_equal_naive_code():
    new, old, engine = streams()
    expected, slopes, clipped = 0.0, [0.0] * len(MASK), []
    for t in MASK.nonzero()[:, 0].tolist():
        a, ratio, weight = (
            ADVANTAGES[t].item(),
            (new[t] - old[t]).exp().item(),
            min(math.exp(old[t] - engine[t]), 2.0),
        )
        clipped.append((a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8))
        expected -= weight * min(ratio * a, min(max(ratio, 0.8), 1.28) * a) / 17
        slopes[t] = 0.0 if clipped[-1] else -weight * ratio * a / 17
    share_T, logged = dapo.loss(new, old, engine, ADVANTAGES, MASK, IDS, TOKENS, dapo.Args())
    assert share_T.sum().item() == pytest.approx(expected, rel=1e-6)
    assert torch.autograd.grad(share_T.sum(), new)[0].tolist() == pytest.approx(slopes, rel=1e-6)
    assert logged["clip_ratio/region_mean"][MASK].tolist() == clipped and 0 < sum(clipped) < len(
        clipped
    )


# ---- dynamic sampling ----


def test_draw_is_what_probably_fills_the_step_within_ten_steps():
    def draw(kept: int, drawn: int) -> int:
        return dapo.next_draw(kept, drawn, 64)

    assert draw(0, 0) == draw(0, 64) == draw(20, 64) == 64, "at most a step of prompts"
    assert draw(48, 64) == 22, "16 are missing, and three in four are unequal: 21.3"
    assert draw(63, 64) == 2 and draw(63, 63) == 1
    assert draw(32, 630) == 10 and draw(32, 640) == 0, "ten steps of prompts in all"


# ---- whole runs ----


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(
        REWARD + "\n\ndef longer(completion, row):\n    return float(len(completion) > 4)\n"
        "\n\nimport zlib\n\ndef different(completion, row):\n"
        "    return zlib.crc32(completion.encode()) % 1009 / 1009\n"
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
    """Dynamic sampling, every penalty, and the mask."""
    return (
        *flags, "--overlong_buffer", 0.5, "--missing_eos_penalty", 0.1, "--mask_truncated",
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
        assert len(unequal) >= 12
        trained = [
            i for i, group in enumerate(groups) if any(sample["advantage"] for sample in group)
        ]
        assert trained == unequal[:12], "the first twelve of them"
    assert any(count % 12 for count in drawn), "not in whole steps"


@pytest.mark.slow
def test_dapo_without_its_additions_equals_grpo(flags, reward, tmp_path):
    """All groups have unequal rewards."""
    flags = (*flags, "--reward", f"{reward}:different")
    flags += ("--prompts_per_step", 6, "--max_steps", 3)
    run(1, "grpo.py", *flags, "--output_dir", tmp_path / "grpo")
    run(1, "dapo.py", *flags, "--overlong_buffer", 0, "--output_dir", tmp_path / "dapo")
    assert samples(tmp_path / "grpo") == samples(tmp_path / "dapo")
    names = {name for line in metrics(tmp_path / "grpo") for name in line} - {
        "tokens_per_second",
        "step",
        "beta",
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
        "--max_new_tokens",
        2,
        "--prompts_per_step",
        6,
    )
    done = run(2, "dapo.py", *flags, *extra, "--output_dir", tmp_path / "run", code=1)
    assert done.stderr.count("error: step 1: none of 60 groups has unequal rewards") == 1


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
