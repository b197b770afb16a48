"""Samples -> packed micro-batches: several sequences in one stream of tokens, without padding.

A rank reads or samples its part of a step. The sequences then travel to the ranks that train on
them, so that all ranks have the same work (placement.py). Every sample has an index, counted
over all ranks. Use it to look up what was computed before packing, such as advantages:
`mb.select(advantages_BG)`. Move such numbers to the device once, before the micro-batches.

Tokens are shifted here, and in tokens.py for shared prefixes and context ranks. In a `Sample`,
streams are aligned with `ids`: `x[i]` describes the token `ids[i]`. The packer makes inputs
`ids[:-1]` and targets `ids[1:]`, and aligns every stream with the targets: in a `PackedBatch`,
`x_T[t]` describes the prediction of `targets_T[t]`.

Shapes: N sequences and T tokens in one micro-batch, B groups of all ranks."""

import copy
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, islice, pairwise, product

import numpy as np
import torch
from torch import Tensor

from common.packs.placement import GroupKey, GroupShape, MicroBatches, place_groups
from common.packs.sample import Sample
from common.packs.tokens import (
    CompactTokens,
    ModelTokens,
    TokenSequence,
    after_arrival,
    compact_tokens,
    for_sending,
    padding,
    sequence_of,
    tensor_of,
)
from common.parallel import distributed
from common.parallel.distributed import context_group_size


class PackedBatch(ModelTokens):
    """Micro-batch of this rank. Streams that no sample has are None.

    A rank without samples gets one masked token of padding."""

    is_last = True  # of its minibatch: hybrid sharding then averages over copies of the model
    compact: CompactTokens | None = None  # what the model runs on, if not on these tokens
    shape_of_samples: tuple[int, ...] = ()  # [B, G], or flat if groups differ in size
    rollout_logprobs_T: Tensor | None = None  # float32, like most below
    versions_T: Tensor | None = None  # training steps of the weights that sampled a token
    turn_rewards_T: Tensor | None = None  # for turns before the last; ppo.py sets them
    # Streams that scripts add:
    old_logprobs_T: Tensor | None = None  # log-probs by the trainer before the updates
    ref_logprobs_T: Tensor | None = None
    advantages_T: Tensor | None = None
    importance_T: Tensor | None = None  # importance weight of each token, pi_old / pi_engine
    values_T: Tensor | None = None  # predictions of the value model, before targets_T[t] is emitted
    returns_T: Tensor | None = None  # regression targets of the values

    def __init__(
        self, *tokens, loss_mask_T: Tensor, index_N: Tensor, datasets: Sequence[str | None] = ()
    ):
        super().__init__(*tokens)
        self.loss_mask_T = loss_mask_T  # bool
        self.index_N = index_N  # int64: index of each sample, over all ranks
        self.num_samples = len(index_N)  # N, or 0 with one sequence of padding
        self.datasets = datasets  # name of the data set of each sample
        device = loss_mask_T.device
        names = sorted({name for name in datasets if name is not None})
        # For each named data set, which samples are in it: bool.
        self.is_in_N = {x: tensor_of([np.array([y == x for y in datasets])], device) for x in names}
        numbers = np.repeat(np.arange(len(self.lengths)), self.lengths)
        self.sequence_ids_T = tensor_of([numbers], device)  # int64, 0..N-1
        # Samples that this rank gave to the packer, by index. Other ranks may train on them.
        self.own_samples: dict[int, Sample] = {}

    @property
    def model_tokens(self) -> ModelTokens:
        """The tokens that the model runs on: these, unless prefixes are shared or the ranks of a
        context group run their samples together."""
        return self.compact or self

    def expand(self, streams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Turn streams of `model_tokens` into streams of this micro-batch, [T] each."""
        return streams if self.compact is None else self.compact.expand(streams)

    def sequence_sums(self, x_T: Tensor) -> Tensor:
        """Sum a stream over the trained tokens of each sequence: [N], float64. For padding the sum
        is empty but still part of the graph, so that its backward runs."""
        trained_T = torch.where(self.loss_mask_T, x_T, 0).double()
        sums = torch.zeros(len(self.lengths), dtype=torch.float64, device=x_T.device)
        return sums.index_add(0, self.sequence_ids_T, trained_T)[: self.num_samples]

    @property
    def is_trained_N(self) -> Tensor:
        """Whether a sample has trained tokens: [N], bool."""
        return self.sequence_sums(self.loss_mask_T) > 0

    def select(self, values: Tensor) -> Tensor:
        """Look up one number per sample of this micro-batch: [N], float64. `values` has one for
        each packed sample of all ranks: [B, G] for groups, else [B]. Another number raises
        `ValueError`."""
        shape = self.shape_of_samples
        is_table = len(shape) > 1 and shape[1] > 1
        if shape and (values.numel() != math.prod(shape) or is_table and values.shape != shape):
            problem = f"of shape {[*values.shape]} for samples of shape {[*shape]}"
            advice = "advantages() or what else computes them must return one number for each"
            raise ValueError(f"advantages, or other numbers of samples, {problem}; {advice}")
        return values.to(self.index_N.device, torch.float64).flatten()[self.index_N]

    def on_tokens(self, values: Tensor) -> Tensor:
        """Look up the number of each token's sample: [T], float32; 0 on padding. `values`: as in
        `select`."""
        # Padding belongs to sequence 0, which has no sample.
        padded = torch.nn.functional.pad(self.select(values), (0, 1))
        return padded[self.sequence_ids_T].float()

    def with_streams(self, **streams_T: Tensor) -> "PackedBatch":
        """Return a copy with further streams. Raises `ValueError` unless each is [T, ...]."""
        for name, x_T in streams_T.items():
            if x_T.shape[:1] != self.loss_mask_T.shape:
                problem = f"{x_T.numel()} numbers for {len(self.loss_mask_T)} tokens"
                raise ValueError(f"{name}: {problem}; return one number for each token")
        mb = copy.copy(self)
        vars(mb).update(streams_T)
        return mb

    @property
    def source_masks_T(self) -> dict[str, Tensor]:
        """Masks of the trained tokens of each named dataset, by `/name`: [T] each, bool."""
        is_in_T = {name: is_in_N[self.sequence_ids_T] for name, is_in_N in self.is_in_N.items()}
        return {f"/{name}": self.loss_mask_T & x_T for name, x_T in is_in_T.items()}

    @property
    def ends_N(self) -> Tensor:
        """Position of the last token of each sample: [N], int64."""
        return self.cu_seqlens_N1[1 : self.num_samples + 1].long() - 1


Minibatches = list[list[PackedBatch]]  # each is a list of micro-batches


def pack(samples: list[Sample], pack_tokens: int, device: torch.device) -> list[PackedBatch]:
    """Pack the samples of all ranks into micro-batches and return this rank's. A micro-batch has at
    most `pack_tokens` targets; in a context group, that many for each of its ranks. `samples` are
    this rank's part `[rank::ranks]` of a batch.

    Collective: every rank gets the same number of micro-batches, because forward and backward run
    FSDP collectives. A rank without samples in a micro-batch gets padding, whose loss is exactly
    zero. Raises `ValueError` for a sample that does not fit, and unless every stream has one number
    for each id of every sample."""
    return pack_groups([[sample] for sample in samples], pack_tokens, device)


def pack_groups(
    groups: list[list[Sample]], pack_tokens: int, device: torch.device, share_prefix: int = 0,
    together: bool = True,
) -> list[PackedBatch]:  # fmt: skip
    """Pack like `pack`. The samples of a group, such as chosen and rejected, are neighbours in one
    micro-batch. `groups` are this rank's part `[rank::ranks]` of a batch. `share_prefix` and
    `together`: see `pack_minibatches`."""
    positions = positions_of_rank(len(groups))
    (mbs,) = pack_minibatches(groups, positions, 1, pack_tokens, device, share_prefix, together)
    return mbs


def pack_minibatches(
    groups: list[list[Sample]], positions: Sequence[int], num_minibatches: int, pack_tokens: int,
    device: torch.device, share_prefix: int = 0, together: bool = False,
) -> Minibatches:  # fmt: skip
    """Divide the groups of all ranks into minibatches of micro-batches, like `pack`.

    `positions`: where each of this rank's groups stands among the groups of all ranks. In that
    order the groups are cut into minibatches of equal size, and their samples are numbered (the
    index). So neither depends on the number of ranks. A group may be empty.

    Prefixes of at least `share_prefix` tokens that samples of a group have in common are computed
    once (docs/memory.md; 0: never). With `together` the samples of a group are neighbours in one
    micro-batch; otherwise a group may be divided among micro-batches and ranks. The branches of a
    completion are sequences of their own, with the index of the completion. Collective."""
    own_sizes = {position: len(group) for position, group in zip(positions, groups, strict=True)}
    sizes = dict(sorted(distributed.gather_dict(own_sizes).items()))
    *starts, num_samples = accumulate(sizes.values(), initial=0)
    first_index = dict(zip(sizes, starts, strict=True))
    minibatches = []
    bounds = [len(sizes) * m // num_minibatches for m in range(num_minibatches + 1)]
    for start, end in pairwise(bounds):
        chosen = {*islice(sizes, start, end)}
        by_index = [
            dict(enumerate(group, first_index[position]))
            for position, group in zip(positions, groups, strict=True)
            if position in chosen and group
        ]
        minibatches.append(_pack(by_index, pack_tokens, device, share_prefix, together))
    if num_samples:
        B, is_table = len(sizes), len({*sizes.values()}) == 1
        shape = (B, num_samples // B) if is_table else (num_samples,)
        for mb in chain(*minibatches):
            mb.shape_of_samples = shape
    return minibatches


def count_trained(minibatch: list[PackedBatch]) -> tuple[Tensor, Tensor]:
    """Count the trained tokens of a *global* minibatch, and the sequences that have any: int64, at
    least 1. Collective."""
    num_tokens = distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in minibatch))
    num_sequences = distributed.all_sum(sum(mb.is_trained_N.sum() for mb in minibatch))
    return num_tokens.clamp(min=1), num_sequences.clamp(min=1)


def positions_of_rank(count: int) -> range:
    """Return the positions in a batch of this rank's part `[rank::ranks]`, of `count` items."""
    rank, ranks = distributed.rank(), distributed.world_size()
    return range(rank, rank + count * ranks, ranks)


def per_sample(
    micro_batches: Iterable[PackedBatch], values: Iterable[Tensor], shape: tuple[int, ...]
) -> Tensor:
    """Gather one number for each sample of all ranks, by its index: the inverse of
    `PackedBatch.select`. Branches of a completion are summed. `values`: [N] for each micro-batch;
    `shape` is [B, G] for groups. Float64, on the host. Collective."""
    index = torch.cat([mb.index_N for mb in micro_batches]).cpu()
    numbers = torch.cat([*values]).detach().cpu().double()
    out = torch.zeros(math.prod(shape), dtype=torch.float64).index_add(0, index, numbers)
    return distributed.all_sum(out).reshape(shape)


def own_sample_values(micro_batches: list[PackedBatch], values: Iterable[Tensor]) -> list[float]:
    """Return one number for each sample that this rank packed, in order. `values` has [N] for each
    micro-batch. Collective."""
    own = micro_batches[0].own_samples
    num_samples = int(distributed.all_sum(len(own)))
    numbers = per_sample(micro_batches, values, (num_samples,)).tolist()
    return [numbers[index] for index in sorted(own)]


def split_pairs(mb: PackedBatch) -> tuple[PackedBatch, PackedBatch]:
    """Split a micro-batch of pairs, packed `together`, into one of the first samples and one of the
    second, in the same order. A sample gets the index of its pair. Padding is in both."""
    if not mb.num_samples:
        return mb, mb
    assert mb.compact is None, "pairs with a shared prefix"
    halves = []
    for start in (0, 1):
        here_T = mb.sequence_ids_T % 2 == start
        half = PackedBatch(
            mb.input_ids_T[here_T], mb.targets_T[here_T], mb.position_ids_T[here_T],
            mb.lengths[start::2], loss_mask_T=mb.loss_mask_T[here_T],
            index_N=mb.index_N[start::2] // 2, datasets=mb.datasets[start::2],
        )  # fmt: skip
        half.is_last, half.shape_of_samples = mb.is_last, ()
        half.own_samples = {i // 2: s for i, s in mb.own_samples.items() if i % 2 == start}
        streams_T = {name: x_T[here_T] for name, x_T in vars(mb).items() if name not in vars(half)}
        halves.append(half.with_streams(**streams_T))
    return halves[0], halves[1]


# ---- one minibatch ----


def _pack(
    groups: list[dict[int, Sample]], pack_tokens: int, device: torch.device, share_prefix: int,
    together: bool,
) -> list[PackedBatch]:  # fmt: skip
    """Pack one minibatch from this rank's groups of samples by index. Every rank decides from the
    shapes of all groups where they go, the sequences travel to the ranks that train on them, and
    each rank joins those that arrive. Collective."""
    context_ranks = context_group_size()
    num_bins = distributed.world_size() // context_ranks
    own_bin = distributed.rank() // context_ranks
    groups_of_sequences = [_sequences(group, together) for group in groups]
    sequences = [sequence for group in groups_of_sequences for sequence in group]
    shapes = [_shape(group, share_prefix) for group in groups_of_sequences]
    # A row of zeros of each stream is its padding, also on a rank that has no such sample.
    zeros = {x: np.zeros_like(each[:1]) for s in sequences for x, each in s.streams.items()}
    shapes_of_ranks, zeros_of_ranks = zip(*distributed.gather_objects((shapes, zeros)), strict=True)
    streams = {x: zero for of_rank in zeros_of_ranks for x, zero in of_rank.items()}
    parts, placed = place_groups(shapes_of_ranks, num_bins, pack_tokens * context_ranks, together)
    _require_streams(sequences, streams)
    arrived = _exchange(_own_parts(sequences, parts), placed)
    micro_batches = [
        join([arrived[key] for key in bins[own_bin]], streams, device) for bins in placed
    ]
    own_samples = {index: sample for group in groups for index, sample in group.items()}
    for mb in micro_batches:
        mb.own_samples = own_samples
        mb.is_last = mb is micro_batches[-1]
    for mb, following in pairwise(micro_batches):
        if following.model_tokens.image_sequences:
            mb.model_tokens.next = following.model_tokens
    return micro_batches


def _own_parts(
    sequences: list[TokenSequence], parts: dict[GroupKey, GroupShape]
) -> dict[GroupKey, list[TokenSequence]]:
    """Return the sequences of this rank's parts. Groups were split in order, so each part takes the
    next sequences."""
    own, start = {}, 0
    for key, part in parts.items():
        if key[0] == distributed.rank():
            end = start + len(part.shared)
            pairs = zip(sequences[start:end], part.shared, strict=True)
            own[key] = [sequence._replace(shared=shared) for sequence, shared in pairs]
            start = end
    return own


def _require_streams(sequences: Iterable[TokenSequence], streams: Iterable[str]) -> None:
    """Raise `ValueError` unless every stream has one number for each id of every sequence."""
    for name, sequence in product(streams, sequences):
        count, length = len(sequence.streams.get(name, ())), len(sequence.ids)
        if count != length:
            advice = "give every sample of a batch one number for each of its ids"
            raise ValueError(f"stream {name}: {count} numbers for {length} ids; {advice}")


def _exchange(
    own: dict[GroupKey, list[TokenSequence]], placed: MicroBatches
) -> dict[GroupKey, list[TokenSequence]]:
    """Send this rank's parts to the ranks that compute them, and return those that arrive. The
    ranks of a context group get the same ones. Collective."""
    outgoing = []
    for to in range(distributed.world_size()):
        keys = [key for bins in placed for key in bins[to // context_group_size()]]
        outgoing.append({key: for_sending(own[key]) for key in keys if key in own})
    arrived = {}
    for of_rank in distributed.exchange_objects(outgoing):
        arrived |= {key: after_arrival(part) for key, part in of_rank.items()}
    return arrived


def join(
    parts: list[list[TokenSequence]], streams: dict[str, np.ndarray], device: torch.device
) -> PackedBatch:
    """Return a micro-batch of this rank. The ranks of a context group compute all `parts` together,
    and each takes the loss of some of them."""
    context_ranks = context_group_size()
    own_parts = parts[distributed.rank() % context_ranks :: context_ranks]
    sequences = [sequence for part in parts for sequence in part]
    trained = [sequence for part in own_parts for sequence in part]
    mb = _micro_batch(trained, streams, device)
    if context_ranks > 1 or any(sequence.shared for sequence in sequences):
        mb.compact = compact_tokens(parts, streams, device, distributed.context_group)
    if any(sequence.images for sequence in sequences):
        mb.model_tokens.image_sequences = sequences
    return mb


def _sequences(group: dict[int, Sample], together: bool) -> list[TokenSequence]:
    sequences = [(i, each) for i, sample in group.items() for each in sample.sequences]
    if not together:  # in lexical order, neighbours share the longest prefixes
        sequences.sort(key=lambda pair: pair[1].ids)
    return [sequence_of(index, each) for index, each in sequences]


def _shape(group: list[TokenSequence], share_prefix: int) -> GroupShape:
    """Return the length of each sequence of a group, and how many targets it shares with the one
    before it: none if their common prefix has less than `share_prefix` ids."""
    shared = [0] * len(group)
    if share_prefix:
        for n, (before, sequence) in enumerate(pairwise(group), 1):
            prefix = _common_prefix(before, sequence)
            if prefix + 1 >= share_prefix:
                shared[n] = prefix
    return GroupShape([sequence.num_targets for sequence in group], shared)


def _common_prefix(before: TokenSequence, sequence: TokenSequence) -> int:
    """Return how many targets a sequence shares with the one before it: all that are equal from the
    start, but the last target is its own, and the prefix ends before an image that is different or
    would be cut."""
    length = min(len(before.ids), len(sequence.ids))
    differs = before.ids[:length] != sequence.ids[:length]
    if "support" in sequence.streams:
        one, other = (s.streams["support"][:length] for s in (before, sequence))
        differs |= (one != other).any(1)
    equal = int(differs.argmax()) if differs.any() else length
    images = {*before.images} ^ {*sequence.images}
    equal = min([equal, *(image.start for image in images)])
    prefix = min(equal, sequence.num_targets) - 1
    cut = (image.start for image in sequence.images if image.start < prefix < image.end)
    return next(cut, prefix)


def _micro_batch(
    trained: list[TokenSequence], streams: dict[str, np.ndarray], device: torch.device
) -> PackedBatch:
    """Join sequences to one stream. The model reads all ids of each but the last, and predicts all
    but the first. Without sequences the stream is padding."""
    sequences = trained or [padding(1, streams)]
    lengths = [s.num_targets for s in sequences]
    ids_T = tensor_of([s.ids[:-1] for s in sequences], device)
    targets_T = tensor_of([s.ids[1:] for s in sequences], device)
    position_ids_T = tensor_of([np.arange(length) for length in lengths], device)
    loss_mask_T = tensor_of([s.loss_mask[1:] for s in sequences], device)
    streams_T = {
        f"{x}_T": tensor_of([s.streams[x][1:] for s in sequences], device) for x in streams
    }
    mb = PackedBatch(
        ids_T, targets_T, position_ids_T, lengths, loss_mask_T=loss_mask_T,
        index_N=tensor_of([np.array([s.index for s in trained], np.int64)], device),
        datasets=[s.dataset for s in trained],
    )  # fmt: skip
    for name in streams:
        if f"{name}_T" in vars(mb):
            raise ValueError(f"stream {name}: a micro-batch has another {name}_T; rename it")
    return mb.with_streams(**streams_T)
