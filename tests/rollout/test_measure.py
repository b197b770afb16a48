"""Measurements of a rollout: computed by hand, over trained tokens only, and independent of the
division among ranks."""

import math

import pytest
import torch
from helpers import completion

from common.metrics.meter import Meter
from common.packs.packing import count_trained, pack
from common.rollout import measure

CPU, NAN = torch.device("cpu"), math.nan


def test_completion_counts_equal_a_count_by_hand():
    """An environment's reply is part of the completion and is not trained; a masked completion has
    no trained token."""
    masked = completion(3)
    masked.loss_mask = [False] * 5
    groups = [[completion(4), completion(5, "length", said=2)], [masked, completion(1, "length")]]
    assert measure.lengths(groups).tolist() == [[4, 5], [3, 1]]
    assert measure.trained_counts(groups).tolist() == [[4, 3], [0, 1]]


def test_trained_tokens_and_sequences_of_a_minibatch_are_at_least_one_each():
    samples = [completion(4), completion(6, said=3), completion(5)]
    samples[2].loss_mask = [False] * 7
    for pack_tokens in (100, 8):
        assert [int(x) for x in count_trained(pack(samples, pack_tokens, CPU))] == [7, 2]
    assert [int(x) for x in count_trained(pack([], 8, CPU))] == [1, 1]


# ---- rewards ----


def test_measured_rewards_exclude_missing_ones():
    groups = [
        [completion(4), completion(2, "length"), completion(3)],
        [completion(6), completion(8), completion(1)],
    ]
    rewards, meter = torch.tensor([[1.0, 3.0, NAN], [2.0, 2.0, 2.0]]).double(), Meter()
    measure.measure_groups(meter, groups, rewards, dict(first=rewards))
    metrics = meter.reduce()
    assert metrics["reward"] == metrics["rewards/first/mean"] == 2
    assert metrics["reward_std"] == pytest.approx(math.sqrt(2) / 2)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 6)
    assert metrics["completions/mean_length"] == 4
    assert not any(name.startswith("reward/") for name in metrics)
    for name, group in zip("ab", groups, strict=True):
        for sample in group:
            sample.row = dict(_dataset=name)
    measure.measure_groups(meter, groups, rewards + torch.tensor([[1.0], [0.0]]), {})
    metrics = meter.reduce()
    assert (metrics["reward/a"], metrics["reward/b"]) == (3, 2)


def test_truncated_completions_are_penalised():
    groups = [[completion(4), completion(2, "length")], [completion(3, "length"), completion(1)]]
    got = measure.truncation_penalties(groups, 0.5)
    assert got.tolist() == [[0, -0.5], [-0.5, 0]] and got.dtype == torch.float64


ENDED, CUT = (0.0, "stop"), (0.0, "length")
NO_EOS = (
    "no completion ended with an EOS: see --chat_template, --prompt_format and --max_new_tokens"
)
FORM = "see --reward, the answer format in the prompt, and --temperature"


@pytest.mark.parametrize(("groups", "found"), [
    ([[ENDED, (1.0, "length")], [ENDED, CUT]], []),  # half of them
    (
        [[CUT, (1.0, "length")], [CUT, ENDED]],
        ["3 of 4 completions were truncated: see --max_new_tokens"],
    ),
    ([[CUT, (1.0, "length")]], [NO_EOS]),
    ([[(0.5, "stop")] * 2] * 2, [f"all 4 rewards are 0.5: {FORM}"]),
    ([[ENDED, (NAN, "stop")], [ENDED, ENDED]], [f"all 3 rewards are 0: {FORM}"]),
    ([[(NAN, "stop")] * 2, [ENDED, (NAN, "stop")]], []),  # a single one equals itself
    ([[(NAN, "stop")]], ["no completion has a reward: does --reward return a number for each?"]),
    ([], []),
])  # fmt: skip
def test_warnings_name_the_obstacles_to_learning(groups, found):
    rewards_PG = torch.tensor([[reward for reward, _ in group] for group in groups])
    samples = [[completion(3, reason) for _, reason in group] for group in groups]
    assert measure.first_rollout_warnings(samples, rewards_PG) == found


def test_first_rollout_is_warned_about(capsys):
    groups, zeros = [[completion(4), completion(2)]], torch.zeros(1, 2).double()
    for warn, said in (
        (False, ""),
        (True, f"warning: in the first rollout all 2 rewards are 0: {FORM}\n"),
    ):
        measure.measure_groups(Meter(), groups, zeros, dict(x=zeros), warn=warn)
        assert capsys.readouterr().out == said
