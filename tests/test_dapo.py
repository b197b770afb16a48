"""dapo.py: penalties for length, masks and dynamic sampling. tests/test_grpo_objective.py has the
loss."""

import math
from itertools import groupby

import pytest
import torch
from helpers import assert_close_metrics, completion, metrics, samples
from hypothesis import given
from hypothesis import strategies as st
from in_process import talkative
from processes import run

import dapo
from common.parallel.distributed import RunError

# ---- rewards and advantages ----


@given(st.integers(0, 40), st.integers(2, 30), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_length_penalty_is_a_ramp_over_the_buffer(length, longest, buffer):
    args = dapo.Args(max_new_tokens=longest, overlong_buffer=buffer)
    start = longest - buffer * longest
    outside = buffer and length > start
    expected = 0.0 if not outside else -min(1, (length - start) / (longest - start))
    got = dapo.overlong_penalties(torch.tensor([length]), args)
    assert got.item() == pytest.approx(expected, abs=1e-9) and got.dtype == torch.float64


def test_truncated_completions_have_no_trained_tokens():
    group = [completion(3, finish_reason=reason) for reason in ("stop", "length", "stop")]
    masked = dapo.without_truncated(group)
    assert [any(sample.loss_mask) for sample in masked] == [True, False, True]
    assert [sample.ids for sample in masked] == [sample.ids for sample in group]


# ---- dynamic sampling ----


def test_draw_is_the_smallest_that_probably_fills_the_step_within_ten_steps():
    def draw(kept: int, drawn: int) -> int:
        return dapo.next_draw(kept, drawn, 64)

    def fills(size: int, kept: int, chance: float) -> float:
        missing = range(64 - kept)
        fewer = (math.comb(size, k) * chance**k * (1 - chance) ** (size - k) for k in missing)
        return 1 - sum(fewer)

    assert draw(0, 0) == draw(0, 64) == draw(20, 64) == 64, "at most a step of prompts"
    for kept in (44, 48, 56, 60):
        assert fills(draw(kept, 64), kept, kept / 64) > 0.95
        assert fills(draw(kept, 64) - 3, kept, kept / 64) < 0.98, "three fewer would not do"
    assert draw(63, 63) == 1
    assert draw(32, 630) == 10 and draw(32, 640) == 0, "ten steps of prompts in all"


# ---- whole runs ----


@pytest.fixture(scope="module")
def flags(online, small, reward_file, tmp_path_factory):
    model = talkative(tmp_path_factory.mktemp("model") / "talkative", small[1])
    return (*online, "--model", model, "--reward", f"{reward_file}:longer", "--max_steps", 3)


@pytest.mark.slow
def test_samples_include_all_draws_and_only_kept_groups_have_advantages(flags, main, tmp_path):
    flags = (*flags, "--prompts_per_step", 12, "--overlong_buffer", 0)
    main("dapo", *flags, "--output_dir", tmp_path)
    drawn = []
    for line, (_, of_step) in zip(
        metrics(tmp_path), groupby(samples(tmp_path), lambda s: s["step"]), strict=True
    ):
        groups = list(zip(*[iter(of_step)] * 3, strict=True))
        assert len(groups) == 12 * line["dynamic_sampling/draws"]
        assert all(len({sample["prompt"] for sample in group}) == 1 for group in groups)
        drawn.append(len(groups))
        unequal = [i for i, group in enumerate(groups) if len({s["reward"] for s in group}) > 1]
        share = len(unequal) / len(groups)
        assert line["dynamic_sampling/unequal_fraction"] == pytest.approx(share)
        trained = [i for i, group in enumerate(groups) if any(s["advantage"] for s in group)]
        assert trained == unequal[:12] and len(trained) == 12, "the first twelve of them"
    assert any(count % 12 for count in drawn), "not in whole steps"


@pytest.mark.slow
def test_four_ranks_draw_as_one_does(flags, main, tmp_path):
    """In a further draw there are fewer prompts than ranks, so some ranks have none."""
    flags = (*flags, "--samples_per_prompt", 4, "--max_new_tokens", 5)
    main("dapo", *flags, "--output_dir", tmp_path / "one")
    run(4, "dapo.py", *flags, "--output_dir", tmp_path / "four")
    draws = [line["dynamic_sampling/draws"] for line in metrics(tmp_path / "one")]
    assert any(1 < draw < 1.5 for draw in draws), "fewer prompts than ranks"
    assert draws == [line["dynamic_sampling/draws"] for line in metrics(tmp_path / "four")]
    assert_close_metrics(tmp_path / "one", tmp_path / "four", ("loss", "grad_norm"), 1e-5, 0.1)
    assert samples(tmp_path / "one") == samples(tmp_path / "four")


@pytest.mark.slow
def test_equal_rewards_in_all_draws_are_an_error(flags, main, tmp_path):
    (tmp_path / "same.py").write_text("def same(completion, row):\n    return 1.0\n")
    extra = ("--reward", f"{tmp_path}/same.py:same", "--max_new_tokens", 2, "--prompts_per_step", 4)
    with pytest.raises(RunError, match="^step 1: none of 40 groups has unequal rewards"):
        main("dapo", *flags, *extra, "--output_dir", tmp_path / "run")
