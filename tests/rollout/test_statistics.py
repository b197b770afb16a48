"""Statistics of a rollout: computed by hand, over trained tokens only, and independent of the division among ranks."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import Args

from common.data.packing import PackedBatch, pack
from common.data.sample import Completion
from common.metrics.meter import Meter
from common.parallel import distributed
from common.parallel.distributed import RunError
from common.rollout import statistics

CPU, NAN = torch.device("cpu"), math.nan

# ---- groups of all ranks ----


def test_gathered_groups_are_in_the_order_of_their_positions(monkeypatch):
    ranks = [([0, 2], torch.tensor([[0.0], [2.0]])), ([1, 3], torch.tensor([[1.0], [3.0]])), ([], torch.zeros(0, 1))]
    monkeypatch.setattr(distributed, "gather_objects", lambda mine: ranks)
    assert statistics.gather_groups(torch.zeros(0, 1), []).tolist() == [[0], [1], [2], [3]]


def test_equal_prompts_are_two_groups():
    """Two draws of one prompt have the same rewards, with a third group between them."""
    x_PG = torch.tensor([[0.0, 1.0], [5.0, 6.0], [0.0, 1.0]])
    assert statistics.gather_groups(x_PG, [4, 0, 2]).tolist() == [[5, 6], [0, 1], [0, 1]]


# ---- counts ----


def completion(length: int, finish_reason: str = "stop", said: int = 0) -> Completion:
    """Return a completion after a prompt of two tokens; all tokens but the first are an environment's reply."""
    trained = [True] + [False] * said + [True] * (length - 1 - said)
    return Completion([0] * (2 + length), [False] * 2 + trained, prompt_length=2, finish_reason=finish_reason)


def test_completion_counts_equal_a_count_by_hand():
    """An environment's reply is part of the completion and is not trained; a masked completion has no trained token."""
    masked = completion(3)
    masked.loss_mask = [False] * 5
    groups = [[completion(4), completion(5, "length", said=2)], [masked, completion(1, "length")]]
    assert statistics.lengths(groups).tolist() == [[4, 5], [3, 1]]
    assert statistics.trained_counts(groups).tolist() == [[4, 3], [0, 1]]
    assert statistics.truncated(groups).tolist() == [[False, True], [False, True]]


def test_trained_tokens_and_sequences_of_a_minibatch_are_at_least_one_each():
    samples = [completion(4), completion(6, said=3), completion(5)]
    samples[2].loss_mask = [False] * 7
    for pack_tokens in (100, 8):
        assert [int(x) for x in statistics.count_trained(pack(samples, pack_tokens, CPU))] == [7, 2]
    assert [int(x) for x in statistics.count_trained(pack([], 8, CPU))] == [1, 1]


# ---- rewards ----


def test_measured_rewards_exclude_missing_ones():
    groups = [[completion(4), completion(2, "length"), completion(3)], [completion(6), completion(8), completion(1)]]
    rewards, meter = torch.tensor([[1.0, 3.0, NAN], [2.0, 2.0, 2.0]]).double(), Meter()
    statistics.measure_groups(meter, groups, rewards, dict(first=rewards))
    metrics = meter.reduce()
    assert metrics["reward"] == metrics["rewards/first/mean"] == 2
    assert metrics["reward_std"] == pytest.approx(math.sqrt(2) / 2) and metrics["frac_reward_zero_std"] == 0.5
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 6)
    assert metrics["completions/mean_length"] == 4
    assert not any(name.startswith("reward/") for name in metrics)
    for name, group in zip("ab", groups, strict=True):
        for sample in group:
            sample.row = dict(_dataset=name)
    statistics.measure_groups(meter, groups, rewards + torch.tensor([[1.0], [0.0]]), {})
    metrics = meter.reduce()
    assert (metrics["reward/a"], metrics["reward/b"]) == (3, 2)


def test_truncated_completions_are_penalised():
    groups = [[completion(4), completion(2, "length")], [completion(3, "length"), completion(1)]]
    got = statistics.truncation_penalties(groups, 0.5)
    assert got.tolist() == [[0, -0.5], [-0.5, 0]] and got.dtype == torch.float64


ENDED, CUT = "stop", "length"
NO_EOS = "no completion ended with an EOS: see --chat_template, --prompt_format and --max_new_tokens"
FORM = "see --reward, the answer format in the prompt, and --temperature"


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ([[(0.0, ENDED), (1.0, CUT)], [(0.0, ENDED), (1.0, ENDED)]], []),
        ([[(0.0, CUT), (1.0, CUT)], [(0.0, ENDED), (1.0, ENDED)]], []),  # half of them
        ([[(0.0, CUT), (1.0, CUT)], [(0.0, CUT), (1.0, ENDED)]],
         ["3 of 4 completions were truncated: see --max_new_tokens"]),
        ([[(0.0, CUT), (1.0, CUT)]], [NO_EOS]),
        ([[(0.5, ENDED), (0.5, ENDED)]] * 2, [f"all 4 rewards are 0.5: {FORM}"]),
        ([[(0.0, ENDED), (NAN, ENDED)], [(0.0, ENDED), (0.0, ENDED)]], [f"all 3 rewards are 0: {FORM}"]),
        ([[(0.0, ENDED)] * 2] * 9 + [[(0.0, ENDED), (1.0, ENDED)]],
         [f"in 9 of 10 groups all rewards are equal: {FORM}"]),
        ([[(0.0, ENDED)] * 2] * 8 + [[(0.0, ENDED), (1.0, ENDED)]] * 2, []),
        ([[(0.0, ENDED)], [(1.0, ENDED)], [(1.0, ENDED)]], []),  # groups of one have equal rewards
        ([[(NAN, ENDED), (NAN, ENDED)], [(0.0, ENDED), (NAN, ENDED)]], []),  # a single reward is equal to itself
        ([[(NAN, ENDED)] * 2], ["no completion has a reward: does the function of --reward return a number for each?"]),
        ([], []),
    ],
)  # fmt: skip
def test_warnings_name_the_obstacles_to_learning(groups, found):
    assert statistics.warnings(groups) == found


def test_warning_covers_only_the_first_rollout_of_all_ranks_together(monkeypatch, capsys):
    groups, zeros = [[completion(4), completion(2)]], torch.zeros(1, 2).double()
    statistics.measure_groups(Meter(), groups, zeros, {})
    assert capsys.readouterr().out == ""
    statistics.measure_groups(Meter(), groups, zeros, {}, first=True)
    assert capsys.readouterr().out == f"warning: in the first rollout all 2 rewards are 0: {FORM}\n"
    monkeypatch.setattr(distributed, "gather_objects", lambda mine: [mine, [[(0.0, ENDED), (1.0, ENDED)]]])
    statistics.measure_groups(Meter(), groups, zeros, {}, first=True)
    assert capsys.readouterr().out == ""


def test_solved_uses_the_first_reward_and_ignores_a_missing_one():
    """Evaluation samples one greedy completion per prompt; the sum of the rewards is logged too."""
    asked = {}

    def sample_now(step, held_out, seeds, n, temperature):
        asked.update(step=step, seeds=seeds, n=n, temperature=temperature)
        groups = [[completion(3)] for _ in held_out]
        for (sample,), row in zip(groups, held_out, strict=True):
            sample.row = row
        return groups

    class Scored:
        def __call__(self, groups, meter):
            meter.mean("reward/error_fraction", 0, 3)
            return sum(parts.values()), parts, {"first/words": torch.tensor([[1.0], [3.0], [5.0]])}

        def first(self, parts):
            return parts["first"]

    parts = dict(first=torch.tensor([[1.0], [0.5], [NAN]]), second=torch.tensor([[2.0], [2.0], [2.0]]))
    got = statistics.evaluate(SimpleNamespace(sample_now=sample_now), 7, [{}, {}, {}], Scored())
    assert asked == dict(step=7, seeds=[0, 0, 0], n=1, temperature=0.0)
    assert got["eval/solved"] == pytest.approx(1 / 2) and got["eval/rewards/first/mean"] == pytest.approx(0.75)
    assert got["eval/rewards/first/words"] == 3 and not any("error" in name for name in got)
    assert got["eval/rewards/second/mean"] == 2 and got["eval/reward"] == pytest.approx(2.75)
    rows = [dict(_dataset="x"), dict(_dataset="y"), dict(_dataset="y")]
    of_sets = statistics.evaluate(SimpleNamespace(sample_now=sample_now), 7, rows, Scored())
    assert {name: x for name, x in of_sets.items() if not name.endswith(("/x", "/y"))} == got
    assert len(of_sets) == 3 * len(got) and of_sets["eval/solved/x"] == 1 and of_sets["eval/solved/y"] == 0
    assert of_sets["eval/rewards/first/mean/y"] == 0.5 and of_sets["eval/rewards/first/words/y"] == 4
    assert of_sets["eval/reward/x"] == 3 and of_sets["eval/reward/y"] == 2.5


# ---- engine against trainer ----


def engine_batch() -> PackedBatch:
    """Return two completions with trainer / engine ratios 1, 4, 1/2 and 3, 3. Prompts have extreme ratios."""
    samples = [
        Completion([0] * 5, [False] * 2 + [True] * 3, rollout_logprobs=[0.0] * 5, versions=[0] * 5, prompt_length=2),
        Completion([0] * 4, [False] * 2 + [True] * 2, rollout_logprobs=[0.0] * 4, versions=[0] * 4, prompt_length=2),
    ]
    (mb,) = pack(samples, 100, CPU)
    mb.old_logprobs_T = torch.tensor([9.0, 1, 4, 0.5, 9, 3, 3]).log()
    return mb


def test_sampling_metrics_count_only_trained_tokens():
    meter, mb = Meter(), engine_batch()
    statistics.measure_mismatch(meter, mb.old_logprobs_T, mb)
    metrics = meter.reduce()
    ratios = torch.tensor([1, 4, 0.5, 3, 3]).double()
    logs = ratios.log().abs()
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(logs.mean().item())
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(logs.max().item())
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(ratios.mean().item())
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(4)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5)
    assert metrics["sampling/ess"] == pytest.approx((ratios.mean() ** 2 / ratios.square().mean()).item())


def test_empty_pack_adds_no_metric():
    (filler,) = pack([], 10, CPU)
    meter = Meter()
    statistics.measure_mismatch(meter, torch.zeros(1), filler)
    assert meter.reduce() == {}


def test_disagreement_on_a_sampled_token_is_an_error(device):
    def check(mb, **flags):
        statistics.check_agreement([[mb]], 0, Args(dtype="float32", **flags), CPU)

    mb = engine_batch()
    mb.old_logprobs_T[mb.loss_mask_T] = 0.0  # the prompts' tokens, which are not sampled, differ widely
    check(mb)
    mb.old_logprobs_T[mb.loss_mask_T.nonzero()[-1]] += 0.01
    with pytest.raises(RunError, match="differ: mean 0.002 nats, 99.9th percentile 0.01 .*_difference 0.001"):
        check(mb)
    check(mb, max_logprob_difference=0.1)
    mb.old_logprobs_T[mb.loss_mask_T.nonzero()[-1]] = NAN
    with pytest.raises(RunError, match="differ: mean inf nats"):
        check(mb, max_logprob_difference=0.1)
    statistics.check_agreement([pack([], 10, CPU)], 0, Args(dtype="float32"), CPU)


@pytest.mark.parametrize(
    "far, near, fails",
    [(1, 0.0, False), (2, 0.0, False), (3, 0.0, True), (0, 0.04, False), (0, 0.06, True)],
)
def test_few_tokens_may_disagree_and_many_may_not(device, far, near, fails):
    """Two of 2,000 tokens are a thousandth: they may differ by more than the limit, like the maximum over many tokens
    in bfloat16. A third such token, or a difference of all tokens by more than a tenth of the limit, shows two
    different models."""
    sample = Completion([1] * 2001, [False] + [True] * 2000, rollout_logprobs=[0.0] * 2001, versions=[7] * 2001)
    (mb,) = pack([sample], 2000, CPU)
    mb.old_logprobs_T = torch.full((2000,), near)
    mb.old_logprobs_T[:far] = -3.0
    args = Args(dtype="bfloat16")
    with pytest.raises(RunError, match="_difference 0.5") if fails else contextlib.nullcontext():
        statistics.check_agreement([[mb]], 7, args, CPU)
    statistics.check_agreement([[mb]], 8, args, CPU)  # sampled by older weights: no comparison
