"""dapo.py: what it adds to grpo.py and nothing else, one gradient whatever the ranks, exact resume, learning."""

import math
from itertools import chain, groupby

import pytest
import torch
from conftest import talkative
from helpers import assert_close_metrics, metrics, run
from test_grpo import REWARD, SAME, samples

import dapo
from common.data.packing import Sample, pack

CPU = torch.device("cpu")

# ---- its own functions ----


def group(number: int) -> list[Sample]:
    return [Sample([number, i, 1, 1], [False, True, True, True], prompt_length=1) for i in range(2)]


@pytest.mark.parametrize(
    ("kept", "count", "expected"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([1, 2, 5, 6, 9], 2, [[1, 2], [5, 6, 9]]),
        ([4, 7], 4, [[4], [7]]),  # fewer groups than minibatches: none of them is empty
        ([3], 3, [[3]]),
    ],
)
def test_kept_groups_are_divided_among_minibatches_as_on_any_number_of_ranks(kept, count, expected):
    def packed(mine):
        minibatches = dapo.pack_kept({i: group(i) for i in mine}, kept, count, 100, CPU)
        return [sorted({s.ids[0] for mb in minibatch for s in mb.samples}) for minibatch in minibatches]

    assert packed(range(10)) == expected
    even, odd = packed(range(0, 10, 2)), packed(range(1, 10, 2))
    assert [sorted(a + b) for a, b in zip(even, odd, strict=True)] == expected


def test_a_draw_is_as_small_as_fills_the_step_and_no_larger_than_what_is_allowed():
    args = dapo.Args(prompts_per_step=64, max_draws=3)

    def draw(kept: int, drawn: int) -> int:
        return dapo.next_draw(kept, drawn, args)

    assert draw(0, 0) == draw(0, 64) == draw(20, 64) == 64
    assert draw(32, 64 + 64) == 64 and draw(32, 150) == 42 and draw(32, 192) == 0, "--max_draws leaves no more"
    for kept in (40, 48, 56, 60, 63):
        size, chance = draw(kept, 64), kept / 64
        fills = [sum(math.comb(n, k) * chance**k * (1 - chance) ** (n - k) for k in range(64 - kept, n + 1))
                 for n in (size, size - 3)]  # fmt: skip
        assert fills[0] > 0.95 or size == 64
        assert size == 64 or fills[1] < 0.98, "three fewer would not do"
    whole = dapo.Args(prompts_per_step=64, max_draws=0)
    assert dapo.next_draw(0, 0, whole) == 64 and dapo.next_draw(3, 64, whole) == 0


def test_entropy_threshold_is_of_the_trained_tokens_of_all_minibatches():
    minibatches = [pack(group(i), 100, CPU) for i in range(2)]
    for i, mb in enumerate(chain(*minibatches)):
        mb.loss_mask_T[0] = False
        mb.old_entropy_T = torch.arange(len(mb.loss_mask_T)) + 10.0 * i
        mb.old_entropy_T[0] = 99.0
    assert dapo.entropy_threshold(minibatches, 0.2) == 14  # ten tokens are left: the second highest
    assert dapo.entropy_threshold(minibatches, 1.0) == -math.inf


# ---- as a whole ----


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD + "\n\ndef longer(completion, row):\n    return float(len(completion) > 4)\n")
    return path


@pytest.fixture(scope="module")
def flags(reward, small, tmp_path_factory):
    return (
        "--model", talkative(tmp_path_factory.mktemp("model") / "talkative", small[1]),
        *small[2:], "--reward", f"{reward}:longer",
        "--max_steps", 4, "--prompts_per_step", 12, "--samples_per_prompt", 3, "--minibatches", 3,
        "--max_new_tokens", 12, "--lr", 1e-4, "--eval_every", 0, "--log_every", 1, "--engine", "transformers",
        "--max_logprob_difference", 1e-4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def everything(flags):
    """Dynamic sampling, every penalty, and both masks."""
    return (
        *flags, "--max_draws", 3, "--overlong_buffer", 0.5, "--overlong_penalty", 0.7, "--missing_eos_penalty", 0.1,
        "--mask_truncated", "--top_entropy", 0.5, "--correction", "sequence",
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(everything, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run(2, "dapo.py", *everything, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_one_gradient_whatever_the_ranks_and_packing_also_when_resumed(two_ranks, everything, tmp_path):
    flags = (*everything, "--pack_tokens", 60, "--output_dir", tmp_path)
    run(1, "dapo.py", *flags, "--max_steps", 2)
    assert "resuming from" in run(1, "dapo.py", *flags).stdout
    assert [s["completion"] for s in samples(two_ranks)] == [s["completion"] for s in samples(tmp_path)]
    assert_close_metrics(two_ranks, tmp_path, ("loss",), rel=1e-4, floor=0.1)
    names = (*SAME, "dynamic_sampling/unequal_fraction", "dynamic_sampling/draws")
    assert_close_metrics(two_ranks, tmp_path, names, rel=1e-4)
    assert all(0 < line["dynamic_sampling/unequal_fraction"] < 1 for line in metrics(two_ranks))
    assert all(0 < line["completions/clipped_ratio"] < 1 for line in metrics(two_ranks)), "the mask is no whole batch"


@pytest.mark.slow
def test_samples_have_all_that_was_drawn_and_only_kept_groups_have_advantages(two_ranks):
    drawn = []
    for line, (_, of_step) in zip(metrics(two_ranks), groupby(samples(two_ranks), lambda s: s["step"]), strict=True):
        groups = list(zip(*[iter(of_step)] * 3, strict=True))
        assert len(groups) == 12 * line["dynamic_sampling/draws"]
        assert all(len({sample["prompt"] for sample in group}) == 1 for group in groups)
        drawn.append(len(groups))
        unequal = [i for i, group in enumerate(groups) if len({sample["reward"] for sample in group}) > 1]
        assert line["dynamic_sampling/unequal_fraction"] == pytest.approx(len(unequal) / len(groups))
        assert len(unequal) >= 12 or line["dynamic_sampling/draws"] == 3
        trained = [i for i, group in enumerate(groups) if any(sample["advantage"] for sample in group)]
        assert trained == unequal[:12], "the first twelve of them"
    assert any(12 < count < 24 for count in drawn) and any(count % 2 for count in drawn), "not in whole steps"


@pytest.mark.slow
def test_without_what_it_adds_it_is_grpo(flags, reward, tmp_path):
    flags = (*flags, "--reward", f"{reward}:digits", "--prompts_per_step", 6, "--max_steps", 3)
    run(1, "grpo.py", *flags, "--output_dir", tmp_path / "grpo")
    run(1, "dapo.py", *flags, "--max_draws", 0, "--overlong_buffer", 0, "--output_dir", tmp_path / "dapo")
    assert samples(tmp_path / "grpo") == samples(tmp_path / "dapo")
    names = {name for line in metrics(tmp_path / "grpo") for name in line} - {"tokens_per_second", "step", "beta"}
    names = tuple(sorted(name for name in names if not name.startswith(("time/", "speed/", "memory/"))))
    assert {"loss", "grad_norm", "entropy", "clip_ratio/region_mean"} <= set(names)
    assert_close_metrics(tmp_path / "grpo", tmp_path / "dapo", names, rel=1e-6)


@pytest.mark.slow
def test_no_unequal_rewards_after_all_draws_is_an_error(flags, tmp_path):
    reward = tmp_path / "same.py"
    reward.write_text("def same(completion, row):\n    return 1.0\n")
    extra = ("--reward", f"{reward}:same", "--max_draws", 2, "--max_new_tokens", 2, "--prompts_per_step", 6)
    done = run(2, "dapo.py", *flags, *extra, "--output_dir", tmp_path / "run", code=1)
    assert done.stderr.count("error: step 1: no group has unequal rewards after --max_draws 2") == 1


@pytest.mark.slow
def test_learns(flags, reward, tmp_path):
    """From scratch, to write digits."""
    extra = ("--reward", f"{reward}:digits", "--max_steps", 16, "--prompts_per_step", 16, "--samples_per_prompt", 8)
    extra += ("--minibatches", 1, "--lr", 5e-3, "--max_new_tokens", 4, "--overlong_buffer", 0, "--output_dir", tmp_path)
    run(1, "dapo.py", *flags, *extra)
    rewards = [line["reward"] for line in metrics(tmp_path)]
    assert rewards[0] < 0.2 and rewards[-1] > 0.5, rewards  # 0.8 is to be had
