"""Packing shifts streams once, keeps every sample and never exceeds its budget."""

from dataclasses import replace

import pytest
import torch
from helpers import samples_of
from hypothesis import given
from hypothesis import strategies as st
from processes import run

from common.objectives.reduction import sequence_mean, sequence_sum
from common.packs.packing import PackedBatch, pack, pack_groups, pack_minibatches, per_sample
from common.packs.sample import Completion, Sample

CPU = torch.device("cpu")


def sample(length: int, start: int = 0) -> Completion:
    ids = list(range(start, start + length))
    return Completion(
        ids=ids,
        loss_mask=[i % 2 == 0 for i in ids],
        rollout_logprobs=[float(-i) for i in ids],
        streams=dict(advantages=[i / 2 for i in ids], curiosity=[i / 4 for i in ids]),
    )


def starts(mb: PackedBatch) -> list[int]:
    return [s.ids[0] for s in samples_of(mb)]


# ---- streams ----


@given(st.lists(st.integers(2, 30), max_size=40), st.integers(30, 100))
def test_every_target_appears_once_with_its_streams(lengths, pack_tokens):
    samples = [sample(length, start=1000 * n) for n, length in enumerate(lengths)]
    targets = []
    for mb in pack(samples, pack_tokens, CPU):
        x_T = mb.targets_T
        assert len(x_T) <= pack_tokens
        assert mb.offsets == mb.cu_seqlens_N1.tolist() and mb.offsets[-1] == len(x_T)
        if not samples:
            continue
        assert torch.equal(x_T, mb.input_ids_T + 1)  # the ids of a sample are consecutive
        assert torch.equal(mb.position_ids_T, mb.input_ids_T % 1000)
        assert torch.equal(mb.loss_mask_T, x_T % 2 == 0)
        assert torch.equal(mb.rollout_logprobs_T, -x_T.float())
        assert torch.equal(mb.sequence_ids_T.unique_consecutive(), torch.arange(len(mb.lengths)))
        assert mb.sequence_ids_T.bincount().tolist() == mb.lengths
        assert mb.max_seqlen == max(mb.lengths)
        assert torch.equal(mb.advantages_T, x_T / 2) and torch.equal(mb.curiosity_T, x_T / 4)
        targets += x_T.tolist()
    assert sorted(targets) == sorted(i for s in samples for i in s.ids[1:])


def test_targets_are_the_next_tokens():
    (mb,) = pack([sample(3), sample(4, 100)], 100, CPU)
    assert mb.input_ids_T.tolist() == [100, 101, 102, 0, 1]
    assert mb.targets_T.tolist() == [101, 102, 103, 1, 2]


def test_positions_restart_in_every_sequence():
    (mb,) = pack([sample(3), sample(4, 100)], 100, CPU)
    assert mb.position_ids_T.tolist() == [0, 1, 2, 0, 1]


def test_places_of_stored_logprobs_are_exact():
    first = 2**31 - 1
    (mb,) = pack([Sample([5, 6, 7, 8], [False, True, False, True], stored_at=first)], 9, CPU)
    assert mb.stored_at_T.tolist() == [first, first + 1, first + 1]


PLAIN = Sample([5, 6, 7], [True] * 3)
ADVICE = "give every sample of a batch one number for each of its ids"


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("turned", [False, True])
def test_stream_that_not_all_samples_have_is_refused(count, turned):
    other = replace(PLAIN, streams=dict(x=[0.0] * count))
    with pytest.raises(ValueError, match=f"^stream x: [02] numbers for 3 ids; {ADVICE}$"):
        pack([other, PLAIN] if turned else [PLAIN, other], 100, CPU)


def test_stream_with_a_name_of_the_micro_batch_is_refused():
    error = "stream loss_mask: a micro-batch has another loss_mask_T; rename it"
    with pytest.raises(ValueError, match=f"^{error}$"):
        pack([replace(PLAIN, streams=dict(loss_mask=[0.0] * 3))], 100, CPU)


RANKS = """
import torch
from common.packs import packing
from common.parallel import distributed
from packs.test_packing import sample

device, rank, ranks = distributed.setup(0)
samples = [sample(3 + n * 7 % 11, start=1000 * n) for n in range(23)]
numbers = torch.tensor([s.ids[0] for s in samples])
exchange, arrived = distributed.exchange_objects, []
def recorded(outgoing):
    arrived.extend(exchange(outgoing))
    return arrived
distributed.exchange_objects = recorded
mbs = packing.pack(samples[rank::ranks], 20, device)
trained = [n for mb in mbs for n in mb.index_N.tolist()]
came = [s.index for of_rank in arrived for group in of_rank.values() for s in group]
assert sorted(came) == sorted(trained)
for mb in mbs:
    x_T = mb.targets_T
    if mb.num_samples:
        assert torch.equal(x_T, mb.input_ids_T + 1) and torch.equal(mb.advantages_T, x_T / 2)
        assert torch.equal(mb.on_tokens(numbers), (x_T // 1000 * 1000).float())
assert sorted(mbs[0].own_samples) == [*range(23)][rank::ranks]
trained = distributed.gather_objects(trained)
assert sorted(sum(trained, [])) == [*range(23)] and all(trained)
if rank == ranks - 1:
    samples[rank].streams["x"] = [0.0] * len(samples[rank].ids)
packing.pack(samples[rank::ranks][:1], 20, device)
"""


@pytest.mark.slow
def test_a_rank_receives_what_it_trains_on():
    """And a stream that only a sample of another rank has ends the run with one line."""
    done = run(3, RANKS, code=1)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: stream x: 0 numbers for ") and line.endswith(ADVICE)


# ---- sequences and groups ----


@given(
    st.lists(st.tuples(st.integers(2, 15), st.integers(2, 15)), max_size=20), st.integers(30, 60)
)
def test_packs_keep_groups_together_and_in_order(lengths, pack_tokens):
    pairs = [(sample(a, 1000 * n), sample(b, 1000 * n + 500)) for n, (a, b) in enumerate(lengths)]
    seen = []
    for mb in pack_groups([*map(list, pairs)], pack_tokens, CPU):
        assert len(mb.targets_T) <= pack_tokens
        first, second = starts(mb)[0::2], starts(mb)[1::2]
        assert second == [start + 500 for start in first]
        if mb.num_samples:
            assert mb.input_ids_T[mb.offsets[:-1]].tolist() == starts(mb)
        seen += first
    assert sorted(seen) == [1000 * n for n in range(len(pairs))]


# ---- sums, means and values per sequence ----


def test_sums_count_only_trained_tokens():
    (mb,) = pack([sample(3), sample(5, 100)], 100, CPU)
    assert mb.loss_mask_T.tolist() == [False, True, False, True, False, True]
    x_T = torch.tensor([float("nan"), 2, float("inf"), 4, float("nan"), 32])
    sums = mb.sequence_sums(x_T)
    assert sums.tolist() == [2 + 4, 32] and sums.dtype == torch.float64


def test_mean_of_a_sequence_without_trained_tokens_is_zero():
    (mb,) = pack([replace(sample(4), loss_mask=[False] * 4)], 100, CPU)
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
        assert mb.select(numbers).tolist() == starts(mb)
        assert mb.targets_T[mb.ends_N].tolist() == [s.ids[-1] for s in samples_of(mb)]
    twice = [2 * mb.select(numbers) for mb in micro_batches]
    assert torch.equal(per_sample(micro_batches, twice, (len(samples), 1)), 2 * numbers[:, None])


def test_numbers_of_the_branches_of_a_completion_add_up():
    """In whichever micro-batches they are."""
    one = replace(sample(6), branches=[sample(4, 100), sample(7, 200)])
    (packs,) = pack_minibatches([[one], [sample(5, 300)]], range(2), 1, 8, CPU)
    lengths = [mb.sequence_sums(torch.ones_like(mb.targets_T)) for mb in packs]
    trained = [sum(x.loss_mask[1:]) for x in (*one.sequences, sample(5, 300))]
    assert len(packs) > 1
    assert per_sample(packs, lengths, (2,)).tolist() == [sum(trained[:3]), trained[3]]


def test_padding_is_one_masked_token_of_no_sample():
    (filler,) = pack([], 10, CPU)
    assert len(filler.targets_T) == 1 and not filler.loss_mask_T.any()
    assert filler.num_samples == 0 and filler.ends_N.tolist() == []
    for values in (torch.zeros(0), torch.ones(2, 3)):
        assert filler.on_tokens(values).tolist() == [0.0] and filler.select(values).shape == (0,)
    where = filler.loss_mask_T, filler.sequence_ids_T
    assert sequence_mean(torch.ones(1), *where).tolist() == [0.0]
    assert sequence_sum(filler.loss_mask_T, *where).tolist() == [0.0]
    y_T = torch.tensor([float("nan")], requires_grad=True)
    empty = filler.sequence_sums(y_T)
    empty.sum().backward()
    assert empty.shape == (0,) and y_T.grad.tolist() == [0.0]


# ---- minibatches ----


@pytest.mark.parametrize("together", [False, True])
def test_minibatch_has_the_samples_of_its_groups(together):
    """Groups have any lengths; `together` puts a minibatch into one micro-batch."""
    groups = [[sample(3 + n % 4, 1000 * n), sample(9, 1000 * n + 500)] for n in range(6)]
    numbers_BG = torch.tensor([[s.ids[0] for s in group] for group in groups])
    for m, minibatch in enumerate(pack_minibatches(groups, range(6), 3, 16, CPU, 0, together)):
        firsts = [start for mb in minibatch for start in starts(mb)]
        assert sorted(firsts) == numbers_BG[2 * m : 2 * m + 2].flatten().tolist()
        assert all(mb.select(numbers_BG).tolist() == starts(mb) for mb in minibatch)
        if together:
            assert [a // 1000 for a in firsts[0::2]] == [b // 1000 for b in firsts[1::2]]
    groups[2] = groups[3] = []  # dropped: the second minibatch would be empty
    _, (filler,), _ = pack_minibatches(groups, range(6), 3, 16, CPU, 0, together)
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
    groups = [[sample(4, 100 * n), sample(5, 100 * n)] if n in mine else [] for n in range(5)]
    minibatches = pack_minibatches(groups, range(5), count, 8, CPU)
    numbers_PG = torch.tensor([[n + 0.4, n + 0.5] for n in mine]).double()
    for minibatch, positions in zip(minibatches, expected, strict=True):
        found = [s for mb in minibatch for s in samples_of(mb)]
        assert sorted({s.ids[0] // 100 for s in found}) == positions
        numbers = [x for mb in minibatch for x in mb.select(numbers_PG).tolist()]
        assert numbers == pytest.approx([s.ids[0] // 100 + len(s.ids) / 10 for s in found])
