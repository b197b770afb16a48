"""Samples -> packed micro-batches: several sequences in one stream of tokens, without padding.

A rank reads or samples its share of a step. Before packing, whole samples move to the ranks that
train on them, so that all ranks have the same work (placement.py). From then on a micro-batch is
this rank's own: the model runs on its tokens, and the loss is computed from its tokens. A number
that a sample got before, such as its advantage, is found by the index of the sample among those of
all ranks: `mb.select(advantages_BG)`.

This module shifts tokens, and compact.py those of shared prefixes. In a `Sample`, streams are
aligned with `ids`: `x[i]` describes the token `ids[i]`. The packer makes inputs `ids[:-1]` and
targets `ids[1:]`, and aligns every stream with the targets: in a `PackedBatch`, `x_T[t]` describes
the prediction of `targets_T[t]`.

Shapes: N sequences and T tokens in one micro-batch, I ids of samples, B groups of all ranks.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.data.compact import compact_tokens
from common.data.sample import Sample
from common.data.tokens import Tokens
from common.data.transfer import (
    INTEGERS,
    Outline,
    Placed,
    placed_samples,
    sample_table,
    send_rows,
    streams_of,
)
from common.parallel import distributed
from common.parallel.context import context_group, context_group_size
from common.parallel.placement import GroupShape, place


class PackedBatch(Tokens):
    """Micro-batch of this rank. Streams that no sample has are None.

    A rank without samples gets a padding token that is masked."""

    compact: Any = None  # CompactTokens: what the model runs on, if it is not these tokens
    rollout_logprobs_T: Tensor | None = None  # float32, like all below
    versions_T: Tensor | None = None
    weights_T: Tensor | None = None
    turn_rewards_T: Tensor | None = None  # of ppo.py
    # Streams that scripts add:
    old_logprobs_T: Tensor | None = None  # log-probs by the trainer at rollout time
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
        self.index_N = index_N  # int64, on the host: index of each sample among those of all ranks
        self.num_samples = len(index_N)  # N, or 0 with one sequence of padding
        self.datasets = datasets  # name of the data set of each sample
        of_sequences = [torch.full((length,), n) for n, length in enumerate(self.lengths)]
        self.sequence_ids_T = torch.cat(of_sequences).to(loss_mask_T.device)  # int64, 0..N-1
        # Samples that this rank gave to the packer, by index. Other ranks may train on them.
        self.sent: dict[int, Sample] = {}

    @property
    def model_tokens(self) -> Tokens:
        """The tokens that the model runs on: these, unless prefixes are shared or the ranks of a
        context group run their samples together."""
        return self.compact or self

    def expand(self, streams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return streams of `model_tokens` on the tokens of this micro-batch, [T] each."""
        return streams if self.compact is None else self.compact.expand(streams)

    def sequence_sums(self, x_T: Tensor) -> Tensor:
        """Sum a stream over the trained tokens of each sequence: [N], float64. For padding the sum
        is empty but still part of the graph, so that its backward runs."""
        trained_T = torch.where(self.loss_mask_T, x_T, 0).double()
        sums = torch.zeros(len(self.lengths), dtype=torch.float64, device=x_T.device)
        return sums.index_add(0, self.sequence_ids_T, trained_T)[: self.num_samples]

    def select(self, values: Tensor) -> Tensor:
        """Return the numbers of this micro-batch's samples, [N], float64. `values` has one number
        for each packed sample of all ranks, in any shape: [B, G] for groups of completions."""
        return values.double().flatten()[self.index_N].to(self.loss_mask_T.device)

    def on_tokens(self, values: Tensor) -> Tensor:
        """Return, on each token, the number of its sample: [T], float32; 0 on padding. `values` as
        for `select`."""
        values_N = self.select(values)
        # Padding belongs to sequence 0, which has no sample.
        padded = torch.cat([values_N, values_N.new_zeros(1)])
        return padded[self.sequence_ids_T].float()

    def with_streams(self, **streams_T: Tensor) -> "PackedBatch":
        """Return this micro-batch with further streams, [T] each."""
        batch = copy.copy(self)
        vars(batch).update(streams_T)
        return batch

    @property
    def source_masks_T(self) -> dict[str, Tensor]:
        """Masks of the trained tokens of each named dataset, by `/name`: [T] each, bool."""
        masks_T = {}
        names = {name for name in self.datasets if name is not None}
        for name in sorted(names):
            is_of_dataset_N = torch.tensor([dataset == name for dataset in self.datasets])
            is_of_dataset_T = is_of_dataset_N.to(self.loss_mask_T.device)[self.sequence_ids_T]
            masks_T[f"/{name}"] = self.loss_mask_T & is_of_dataset_T
        return masks_T

    @property
    def ends_N(self) -> Tensor:
        """Position of the last token of each sample: [N], int64."""
        return self.cu_seqlens_N1[1 : self.num_samples + 1].long() - 1


Minibatches = list[list[PackedBatch]]  # micro-batches of each


def pack(samples: list[Sample], pack_tokens: int, device: torch.device) -> list[PackedBatch]:
    """Pack the samples of all ranks into micro-batches of at most `pack_tokens` targets per rank
    (times the ranks of a context group for the whole group). Return this rank's micro-batches.
    `samples` are this rank's share `[rank::ranks]` of a batch.

    Collective: every rank gets the same number of micro-batches, because forward and backward run
    FSDP collectives. A rank without samples in a micro-batch gets padding, whose loss is exactly
    zero.

    Raises `ValueError` for a sample that does not fit.
    """
    return pack_groups([[sample] for sample in samples], pack_tokens, device)


def pack_groups(
    groups: list[list[Sample]], pack_tokens: int, device: torch.device, share_prefix: int = 0,
    together: bool = True,
) -> list[PackedBatch]:  # fmt: skip
    """Pack like `pack`. The samples of a group, such as chosen and rejected, are neighbours in one
    micro-batch. `groups` are this rank's share `[rank::ranks]` of a batch. `share_prefix` and
    `together`: see `pack_minibatches`."""
    positions = positions_of_share(len(groups))
    (packs,) = pack_minibatches(groups, positions, 1, pack_tokens, device, share_prefix, together)
    return packs


def pack_minibatches(
    groups: list[list[Sample]], positions: Sequence[int], count: int, pack_tokens: int,
    device: torch.device, share_prefix: int = 0, together: bool = False,
) -> Minibatches:  # fmt: skip
    """Divide the groups of all ranks into `count` minibatches of micro-batches, like `pack`.

    `positions` has the position of each of this rank's groups among those of all ranks. Minibatch m
    has the m-th of `count` equal parts of the groups, in the order of their positions, on any
    number of ranks. Indices of samples have the same order. A group may be empty.

    Prefixes of at least `share_prefix` tokens that samples of a group have in common are computed
    once (docs/prefix.md; 0: never). With `together` the samples of a group are neighbours in one
    micro-batch; otherwise a group may be divided among micro-batches and ranks. The branches of a
    completion are sequences with its index. Collective."""
    sizes = {position: len(group) for position, group in zip(positions, groups, strict=True)}
    sizes = dict(sorted(distributed.gather_dict(sizes).items()))
    first_index = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    cuts = [len(sizes) * m // count for m in range(count + 1)]
    minibatches = []
    for start, end in pairwise(cuts):
        chosen = set(islice(sizes, start, end))
        packables = [
            _packables(group, first_index[position])
            for position, group in zip(positions, groups, strict=True)
            if position in chosen and group
        ]
        minibatches.append(_pack(packables, pack_tokens, device, share_prefix, together))
    return minibatches


def count_trained(minibatch: list[PackedBatch]) -> tuple[Tensor, Tensor]:
    """Count the trained tokens of a *global* minibatch and the sequences with any: int64, at least
    1. Collective."""
    tokens = distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in minibatch))
    sequences = distributed.all_sum(
        sum((mb.sequence_sums(mb.loss_mask_T) > 0).sum() for mb in minibatch)
    )
    return tokens.clamp(min=1), sequences.clamp(min=1)


def positions_of_share(count: int) -> range:
    """Return the positions of this rank's share `[rank::ranks]` of a batch, of `count` items."""
    rank = distributed.rank()
    ranks = distributed.world_size()
    return range(rank, rank + count * ranks, ranks)


def per_sample(
    micro_batches: Iterable[PackedBatch], values: Iterable[Tensor], shape: tuple[int, ...]
) -> Tensor:
    """Return the numbers of all packed samples of all ranks by their index, the inverse of
    `PackedBatch.select`; those of the branches of a completion add up. `values` has [N] for each
    micro-batch; `shape` is [B, G] for groups. Float64, on the host. Collective."""
    out = torch.zeros(math.prod(shape), dtype=torch.float64)
    for mb, values_N in zip(micro_batches, values, strict=True):
        out.index_add_(0, mb.index_N, values_N.detach().double().cpu())
    return distributed.all_sum(out).reshape(shape)


def sent_values(micro_batches: list[PackedBatch], values: Iterable[Tensor]) -> list[float]:
    """Return the numbers of the samples that this rank gave to the packer, in their order. `values`
    has [N] for each micro-batch. Collective."""
    sent = micro_batches[0].sent
    num_samples = int(distributed.all_sum(len(sent)))
    numbers = per_sample(micro_batches, values, (num_samples,)).tolist()
    return [numbers[index] for index in sorted(sent)]


# ---- from the samples of all ranks to the micro-batches of this one ----


class Packable(NamedTuple):
    """A sample before it is packed, with its index among those of all ranks."""

    index: int
    sample: Sample


def _packables(group: list[Sample], first_index: int) -> list[Packable]:
    packables = []
    for index, sample in enumerate(group, first_index):
        packables += [Packable(index, sequence) for sequence in sample.sequences]
    return packables


def _pack(
    groups: list[list[Packable]], pack_tokens: int, device: torch.device, share_prefix: int,
    together: bool,
) -> list[PackedBatch]:  # fmt: skip
    if not together:  # in lexical order, neighbours have the longest common prefixes
        groups = [sorted(group, key=lambda packable: packable.sample.ids) for group in groups]
    shapes = [shape_of([each.sample for each in group], share_prefix) for group in groups]
    indices = [each.index for each in chain(*groups)]
    samples = [each.sample for each in chain(*groups)]
    datasets = [sample.row.get("_dataset") for sample in samples]
    names = [*streams_of(samples[0])] if samples else []
    images = [sample.images for sample in samples]
    outlines = distributed.gather_objects(Outline(shapes, indices, datasets, images, names))
    streams = sorted(set().union(*(outline.streams for outline in outlines)))

    R = context_group_size()
    all_shapes = [outline.shapes for outline in outlines]
    parts, rows = place(all_shapes, len(outlines) // R, pack_tokens * R, together)
    table_IC, first_rows = send_rows(sample_table(samples, streams).to(device), parts, rows)
    placed = placed_samples(outlines, parts, first_rows)

    sent = dict(zip(indices, samples, strict=True))
    packs = []
    for row in rows:
        keys = row[distributed.rank() // R]
        trained = keys[distributed.rank() % R :: R]  # the ranks of a context group divide them
        own = [*chain(*(placed[key] for key in trained))]
        computed = own
        mb = _micro_batch(table_IC, own, streams)
        mb.sent = sent
        if R > 1 or any(any(parts[key].shared) for key in keys):
            computed = [*chain(*(placed[key] for key in keys))]
            mb.compact = compact_tokens(table_IC, computed, own, streams, context_group())
        if any(sequence.images for sequence in computed):
            mb.model_tokens.with_images = computed
            if packs:
                packs[-1].model_tokens.next = mb.model_tokens
        packs.append(mb)
    return packs


def shape_of(samples: list[Sample], share_prefix: int) -> GroupShape:
    """Return the shape of a group. Each sample shares with the one before it the longest prefix
    that leaves it a target of its own."""
    lengths = [sample.num_targets for sample in samples]
    shared = [0] * len(samples)
    for n, (before, sample) in enumerate(pairwise(samples), 1) if share_prefix else ():
        pairs = zip(before.ids, sample.ids, strict=False)
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(before.ids))
        prefix = min(equal - 1, lengths[n] - 1)
        has_equal_images = before.images == sample.images
        shared[n] = prefix if prefix + 1 >= share_prefix and has_equal_images else 0
    patches = [sum(image.patches for image in sample.images) for sample in samples]
    return GroupShape(lengths, shared, patches)


def _micro_batch(table_IC: Tensor, samples: list[Placed], streams: list[str]) -> PackedBatch:
    """Shift the rows of the samples: a model reads all ids but the last and predicts all but the
    first."""
    index_N = torch.tensor([sample.index for sample in samples], dtype=torch.int64)
    datasets = [sample.dataset for sample in samples]
    padding = Placed(len(table_IC) - 2, 1, 0, -1, None)
    sequences = samples or [padding]
    lengths = [sequence.num_targets for sequence in sequences]
    device = table_IC.device
    rows_T = torch.cat([torch.arange(s.num_targets) + s.first_row for s in sequences]).to(device)
    position_ids_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
    targets_TC = table_IC[rows_T + 1]
    targets_T, mask_T, *columns = targets_TC.unbind(1)
    batch = PackedBatch(
        table_IC[rows_T, 0].long(), targets_T.long(), position_ids_T, lengths,
        loss_mask_T=mask_T.bool(), index_N=index_N, datasets=datasets,
    )  # fmt: skip
    streams_T = {}
    for name, bits_T in zip(streams, columns, strict=True):
        values_T = bits_T.long() if name in INTEGERS else bits_T.view(torch.float32)
        streams_T[f"{name}_T"] = values_T.clone()
    taken = streams_T.keys() & vars(batch).keys()
    if taken:
        name = min(taken)
        what = f"a micro-batch has another {name}; rename it"
        raise ValueError(f"stream {name.removesuffix('_T')}: {what}")
    return batch.with_streams(**streams_T)
