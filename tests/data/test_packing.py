"""Packing shifts streams once, keeps every sample and never exceeds its budget."""

import pytest
import torch
from helpers import samples_of
from hypothesis import given
from hypothesis import strategies as st

from common.data.packing import pack, pack_groups, pack_minibatches, per_sample
from common.data.sample import Completion, Sample
from common.objectives.reduction import sequence_mean, sequence_sum

CPU = torch.device("cpu")


def sample(length: int, start: int = 0) -> Sample:
    ids = list(range(start, start + length))
    return Completion(
        ids=ids,
        loss_mask=[i % 2 == 0 for i in ids],
        rollout_logprobs=[float(-i) for i in ids],
        weights=[float(10 * i) for i in ids],
    )


@given(st.lists(st.integers(2, 30), max_size=40), st.integers(30, 100))
def test_every_target_appears_once_with_its_streams(lengths, pack_tokens):
    samples = [sample(length, start=1000 * n) for n, length in enumerate(lengths)]
    micro_batches = pack(samples, pack_tokens, CPU)
    targets = []
    for mb in micro_batches:
        assert len(mb.targets_T) <= pack_tokens
        assert mb.offsets == mb.cu_seqlens_N1.tolist() and mb.offsets[-1] == len(mb.targets_T)
        if not samples:
            continue
        assert torch.equal(
            mb.rollout_logprobs_T, -mb.targets_T.float()
        )  # streams are aligned with the targets
        assert torch.equal(mb.weights_T, 10 * mb.targets_T.float())
        assert torch.equal(mb.loss_mask_T, mb.targets_T % 2 == 0)
        assert torch.equal(
            mb.targets_T, mb.input_ids_T + 1
        )  # the ids of a sample are consecutive: targets are shifted by one
        assert torch.equal(
            mb.position_ids_T, mb.input_ids_T % 1000
        )  # positions restart in every sequence
        targets += mb.targets_T.tolist()
    assert sorted(targets) == sorted(i for s in samples for i in s.ids[1:])


def test_streams_of_your_own_are_aligned_with_the_targets():
    samples = [sample(3), sample(4, 100)]
    for each in samples:
        each.streams = dict(
            advantages=[i / 2 for i in each.ids], curiosity=[i / 4 for i in each.ids]
        )
    (mb,) = pack(samples, 100, CPU)
    assert torch.equal(mb.advantages_T, mb.targets_T / 2) and torch.equal(
        mb.curiosity_T, mb.targets_T / 4
    )


@pytest.mark.parametrize(
    ("streams", "words"),
    [
        (
            dict(x=[0.0] * 3),
            "^stream x: 3 numbers for 4 ids; "
            "give every sample of a batch one number for each of its",
        ),
        (dict(y=[0.0] * 4), "^stream x: 0 numbers for 4 ids; give"),
        (
            dict(x=[0.0] * 4, loss_mask=[0.0] * 4),
            "^stream loss_mask: a micro-batch has another loss_mask_T; rename it",
        ),
    ],
)
def test_wrong_streams_are_refused(streams, words):
    samples = [sample(4), sample(4)]
    for each, own in zip(
        samples, (dict.fromkeys(("x", *streams), [0.0] * 4), streams), strict=True
    ):
        each.streams = own
    with pytest.raises(ValueError, match=words):
        pack(samples, 100, CPU)


def test_targets_are_the_next_tokens():
    (mb,) = pack([sample(3), sample(4, 100)], 100, CPU)
    assert mb.input_ids_T.tolist() == [100, 101, 102, 0, 1] and mb.targets_T.tolist() == [
        101,
        102,
        103,
        1,
        2,
    ]


def test_positions_restart_in_every_sequence():
    (mb,) = pack([sample(3), sample(4, 100)], 100, CPU)
    assert mb.position_ids_T.tolist() == [0, 1, 2, 0, 1]


def test_sequence_ids_and_offsets_mark_the_samples():
    (mb,) = pack([sample(3), sample(5, 100)], 100, CPU)
    assert mb.offsets == [0, 4, 6] and mb.max_seqlen == 4 and mb.num_samples == 2
    assert mb.sequence_ids_T.tolist() == [0, 0, 0, 0, 1, 1]


def test_empty_batch_gives_one_masked_pack():
    (mb,) = pack([], 10, CPU)
    assert len(mb.targets_T) == 1 and not mb.loss_mask_T.any()


def test_overlong_sample_is_refused_and_names_the_flag():
    with pytest.raises(ValueError, match="--pack_tokens 10"):
        pack([sample(12)], 10, CPU)


def test_first_fit_decreasing_fills_the_bins():
    micro_batches = pack([sample(n + 1) for n in (2, 5, 5, 8, 3, 7)], 10, CPU)
    assert [len(mb.targets_T) for mb in micro_batches] == [10, 10, 10]


@given(
    st.lists(st.tuples(st.integers(2, 15), st.integers(2, 15)), max_size=20), st.integers(30, 60)
)
def test_packs_keep_groups_together_and_in_order(lengths, pack_tokens):
    groups = [
        [sample(a, start=1000 * n), sample(b, start=1000 * n + 500)]
        for n, (a, b) in enumerate(lengths)
    ]
    seen = []
    for mb in pack_groups(groups, pack_tokens, CPU):
        assert mb.num_samples % 2 == 0 and (not mb.num_samples or len(mb.targets_T) <= pack_tokens)
        for first, second in zip(samples_of(mb)[0::2], samples_of(mb)[1::2], strict=True):
            assert second.ids[0] == first.ids[0] + 500
            seen.append(first.ids[0] // 1000)
        starts = [mb.input_ids_T[begin].item() for begin in mb.offsets[:-1]]
        assert not mb.num_samples or starts == [s.ids[0] for s in samples_of(mb)]
    assert sorted(seen) == list(range(len(groups)))


def test_sequence_sums_count_only_trained_tokens():
    (mb,) = pack([sample(3), sample(5, 100)], 100, CPU)
    x_T = torch.tensor([1.0, 2, 4, 8, 16, 32]).requires_grad_()
    assert mb.loss_mask_T.tolist() == [False, True, False, True, False, True]
    sums = mb.sequence_sums(x_T)
    assert sums.tolist() == [2 + 8, 32] and sums.dtype == torch.float64
    (filler,) = pack([], 10, CPU)
    y_T = torch.tensor([float("nan")], requires_grad=True)
    empty = filler.sequence_sums(y_T)
    assert empty.shape == (0,)
    empty.sum().backward()
    assert y_T.grad.tolist() == [0.0]


# ---- sums, means and values per sequence ----


def test_broadcast_sequence_sums_and_means_count_only_trained_tokens():
    (mb,) = pack([sample(3), sample(5, 100)], 100, CPU)
    x_T = torch.tensor([float("nan"), 2, float("inf"), 4, float("nan"), 32]).requires_grad_()
    assert sequence_sum(x_T, mb.loss_mask_T, mb.sequence_ids_T).tolist() == [6] * 4 + [32] * 2
    means_T = sequence_mean(x_T, mb.loss_mask_T, mb.sequence_ids_T)
    assert means_T.tolist() == [3] * 4 + [32] * 2 and means_T.dtype == torch.float64
    means_T.sum().backward()
    assert x_T.grad.tolist() == [
        0,
        2,
        0,
        2,
        0,
        2,
    ]  # 4 tokens get a mean over 2, 2 tokens get a mean over 1


def test_mean_of_a_sequence_without_trained_tokens_is_zero():
    masked = sample(4)
    masked.loss_mask = [False] * 4
    (mb,) = pack([masked], 100, CPU)
    assert sequence_mean(torch.ones(3), mb.loss_mask_T, mb.sequence_ids_T).tolist() == [0, 0, 0]
    assert mb.sequence_sums(torch.ones(3)).tolist() == [0]


@given(st.lists(st.integers(2, 15), min_size=1, max_size=12))
def test_sample_values_are_broadcast_to_their_tokens_in_pack_order(lengths):
    samples = [sample(length, start=1000 * n) for n, length in enumerate(lengths)]
    numbers = torch.tensor([s.ids[0] for s in samples]).double()
    micro_batches = pack(samples, 20, CPU)
    for mb in micro_batches:
        first_T = (mb.input_ids_T // 1000 * 1000).float()
        assert torch.equal(mb.on_tokens(numbers), first_T)
        assert mb.select(numbers).tolist() == [s.ids[0] for s in samples_of(mb)]
        assert mb.targets_T[mb.ends_N].tolist() == [s.ids[-1] for s in samples_of(mb)]
    back = per_sample(
        micro_batches, [2 * mb.select(numbers) for mb in micro_batches], (len(samples), 1)
    )
    assert torch.equal(back, 2 * numbers[:, None])


def test_padding_pack_has_a_token_and_no_sequences():
    (filler,) = pack([], 10, CPU)
    assert (
        filler.on_tokens(torch.zeros(0)).tolist()
        == filler.on_tokens(torch.ones(2, 3)).tolist()
        == [0.0]
    )
    assert filler.select(torch.ones(2, 3)).shape == (0,)
    where = filler.loss_mask_T, filler.sequence_ids_T
    assert filler.ends_N.tolist() == [] and sequence_mean(torch.ones(1), *where).tolist() == [0.0]
    assert sequence_sum(filler.loss_mask_T, *where).tolist() == [0.0]


def test_group_values_are_assigned_to_the_samples_of_every_minibatch():
    groups = [
        [sample(3), sample(4)],
        [sample(5), sample(6)],
        [sample(4), sample(2)],
        [sample(3), sample(9)],
    ]
    lengths_PG = torch.tensor([[len(s.ids) for s in group] for group in groups])
    for minibatch in pack_minibatches(groups, range(4), 2, 12, CPU):
        for mb in minibatch:
            assert mb.select(lengths_PG).tolist() == [len(s.ids) for s in samples_of(mb)]


# ---- minibatches ----


@pytest.mark.parametrize("together", [False, True])
def test_minibatch_has_the_samples_of_its_groups(together):
    """Groups have any lengths; `together` puts a minibatch into one micro-batch."""
    groups = [
        [sample(3 + n % 4, start=1000 * n), sample(9, start=1000 * n + 500)] for n in range(6)
    ]
    minibatches = pack_minibatches(groups, range(6), 3, 16, CPU, together=together)
    for m, minibatch in enumerate(minibatches):
        firsts = [s.ids[0] for mb in minibatch for s in samples_of(mb)]
        assert sorted(firsts) == sorted(
            s.ids[0] for group in groups[2 * m : 2 * m + 2] for s in group
        )
        if together:
            assert all(
                a // 1000 == b // 1000 for a, b in zip(firsts[0::2], firsts[1::2], strict=True)
            )
    groups[2] = groups[3] = []  # dropped: the second minibatch would be empty
    _, (filler,), _ = pack_minibatches(groups, range(6), 3, 16, CPU, together=together)
    assert filler.num_samples == 0 and not filler.loss_mask_T.any()


@pytest.mark.parametrize(
    ("mine", "count", "expected"),
    [
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3, 4]]),
        ([1, 4], 2, [[1], [4]]),  # the other groups are on other ranks and empty here
        ([0], 2, [[0], []]),
    ],
)
def test_indivisible_groups_are_divided_consistently_across_ranks(mine, count, expected):
    """Empty groups count: online_dpo.py has them for prompts without a pair."""
    groups = [
        [sample(4, start=100 * n), sample(5, start=100 * n)] if n in mine else [] for n in range(5)
    ]
    minibatches = pack_minibatches(groups, range(5), count, 8, CPU)
    firsts = [
        [s.ids[0] // 100 for mb in minibatch for s in samples_of(mb)] for minibatch in minibatches
    ]
    assert [sorted({*of_one}) for of_one in firsts] == expected
    numbers_PG = torch.tensor([[n + 0.4, n + 0.5] for n in mine])
    for mb in (mb for minibatch in minibatches for mb in minibatch):
        assert mb.select(numbers_PG).tolist() == pytest.approx(
            [s.ids[0] // 100 + len(s.ids) / 10 for s in samples_of(mb)]
        )
