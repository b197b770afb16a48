"""Samples -> packed micro-batches: several sequences in one stream of tokens, without padding.

Only this module shifts tokens. In a `Sample`, streams are aligned with `ids`: `x[i]` describes the token `ids[i]`. The
packer makes inputs `ids[:-1]` and targets `ids[1:]`, and aligns every stream with the targets: in a `PackedBatch`,
`x_T[t]` describes the prediction of `targets_T[t]`.

Shapes: N sequences and T tokens in one micro-batch.
"""

import copy
import math
from collections.abc import Iterable
from itertools import accumulate, chain, islice, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from common.data.sample import Sample
from common.parallel import distributed
from common.parallel.context import context_group_size
from common.parallel.placement import GroupShape, TokenIds, Tokens, place

# Optional per-token streams of a Sample, beside its own `streams`; in a PackedBatch they are `<name>_T`.
STREAMS = ("rollout_logprobs", "versions", "weights")
_shortest_prefix = 0  # shortest common beginning that is computed once; 0: none is
_needs_whole_sequences = False  # whether a model of this process failed the check of shared prefixes


class PackedBatch(Tokens):
    """Micro-batch: its T tokens that this rank owns. Streams that no sample has are None. With several ranks the model
    may run on other tokens, `computed`.

    A rank without samples gets a padding token that is masked.
    """

    assigned: Tokens | None = None  # with several ranks or shared prefixes: what this rank computes
    rollout_logprobs_T: Tensor | None = None  # float32, like all below
    versions_T: Tensor | None = None
    weights_T: Tensor | None = None
    # Streams that scripts add:
    old_logprobs_T: Tensor | None = None  # log-probs by the trainer at rollout time
    old_entropy_T: Tensor | None = None  # entropies by the trainer at rollout time
    ref_logprobs_T: Tensor | None = None
    advantages_T: Tensor | None = None
    importance_T: Tensor | None = None  # importance weight of each token, pi_old / pi_engine
    values_T: Tensor | None = None  # predictions of the value model, before targets_T[t] is emitted
    returns_T: Tensor | None = None  # regression targets of the values

    def __init__(self, *tokens, loss_mask_T: Tensor, sequence_ids_T: Tensor, samples: list[Sample], index_N: Tensor):
        super().__init__(*tokens, sequences=len(samples))
        self.loss_mask_T = loss_mask_T  # bool
        self.sequence_ids_T = sequence_ids_T  # int64: the sequence of each token, 0..N-1
        self.samples = samples  # N of them, in the order of the stream
        self.index_N = index_N  # int64, on the host: index of each sample among all packed samples

    @property
    def computed(self) -> Tokens:
        """The tokens that the model runs on."""
        return self.assigned or self

    def sequence_sums(self, x_T: Tensor) -> Tensor:
        """Sum a stream over the trained tokens of each sequence: [N], float64. For padding the sum is empty but still
        part of the graph, so that its backward runs."""
        trained_T = torch.where(self.loss_mask_T, x_T, 0).double()
        sums = torch.zeros(len(self.offsets) - 1, dtype=torch.float64, device=x_T.device)
        return sums.index_add(0, self.sequence_ids_T, trained_T)[: len(self.samples)]

    def per_sequence(self, values: Iterable[float]) -> Tensor:
        """Return one number per sample as a tensor on the device: [N], float64."""
        return torch.tensor(list(values), dtype=torch.float64).to(self.loss_mask_T.device)

    def select(self, values: Tensor) -> Tensor:
        """Return the numbers of this micro-batch's samples, [N], float64. `values` has one number for each sample that
        was packed, in any shape: [P, G] for groups of completions."""
        return values.double().flatten()[self.index_N].to(self.loss_mask_T.device)

    def on_tokens(self, values: Tensor) -> Tensor:
        """Return, on each token, the number of its sample: [T], float32; 0 on padding. `values` as for `select`."""
        values_N = self.select(values)
        padded = torch.cat([values_N, values_N.new_zeros(1)])  # padding belongs to sequence 0, which has no sample
        return padded[self.sequence_ids_T].float()

    def with_streams(self, **streams_T: Tensor) -> "PackedBatch":
        """Return this micro-batch with further streams, [T] each."""
        batch = copy.copy(self)
        vars(batch).update(streams_T)
        return batch

    @property
    def source_masks_T(self) -> dict[str, Tensor]:
        """Masks of the trained tokens of each named dataset, by `/name`: [T] each, bool."""
        names = [sample.row.get("_dataset") for sample in self.samples]
        of_N = {name: self.per_sequence(own == name for own in names).bool() for name in sorted({*names} - {None})}
        return {f"/{name}": self.loss_mask_T & own_N[self.sequence_ids_T] for name, own_N in of_N.items()}

    @property
    def ends_N(self) -> Tensor:
        """Position of the last token of each sample: [N], int64."""
        return self.cu_seqlens_N1[1 : len(self.samples) + 1].long() - 1


Minibatches = list[list[PackedBatch]]  # micro-batches of each


def pack(samples: list[Sample], pack_tokens: int, device: torch.device) -> list[PackedBatch]:
    """Pack the samples of all ranks into micro-batches of at most `pack_tokens` targets per rank (times the ranks of a
    context group for the whole group). Return this rank's micro-batches, each with the tokens it owns and computes.

    Collective: every rank gets the same number of micro-batches, because forward and backward run FSDP collectives. A
    rank without samples in a micro-batch gets padding, whose loss is exactly zero.

    Raises `ValueError` for a sample that does not fit.
    """
    return pack_groups([[sample] for sample in samples], pack_tokens, device)


def pack_groups(
    groups: list[list[Sample]], pack_tokens: int, device: torch.device, together: bool = True,
    shortest: int | None = None,
) -> list[PackedBatch]:  # fmt: skip
    """Pack like `pack`. Prefixes of at least `shortest` tokens (default: see `set_shortest_prefix`; 0: never) that
    samples of a group have in common are computed once. With `together` the samples of a group, such as chosen and
    rejected, are neighbours in one micro-batch; otherwise a group may be divided among micro-batches and ranks."""
    samples, ends = list(chain(*groups)), accumulate(map(len, groups), initial=0)
    order = [[*range(*bounds)] for bounds in pairwise(ends)]  # indices of each group's samples
    if not together:  # in lexical order, neighbours have the longest common prefixes
        order = [sorted(group, key=lambda i: samples[i].ids) for group in order]
    shortest = _shortest_prefix if shortest is None else shortest
    mine = [shape_of([samples[i] for i in group], shortest) for group in order]
    streams = _streams(samples[0]) if samples else {}
    ranks = distributed.gather_objects((mine, [*streams]))
    rank, R = int(dist.is_initialized() and dist.get_rank()), context_group_size()
    shapes, rows = place([shapes for shapes, _ in ranks], len(ranks) // R, pack_tokens * R, together)
    owned = [[key for keys in row for key in keys if key[0] == rank] for row in rows]
    streams = sorted(set().union(*(of_rank for _, of_rank in ranks)))  # also for a rank without samples
    sequence, of_group = chain(*order), {}  # indices in the order of the shapes; those of each group or part
    for key in shapes:
        if key[0] == rank:
            of_group[key] = list(islice(sequence, len(shapes[key].lengths)))
    indices = [[i for key in keys for i in of_group[key]] for keys in owned]
    packs = [_pack_one([samples[i] for i in index], index, streams, device) for index in indices]
    if len(ranks) > 1 or any(any(shape.shared) for shape in shapes.values()):
        ids = TokenIds([samples[i].ids for i in chain(*order)], shapes, device)
        for mb, row, keys in zip(packs, rows, owned, strict=True):
            mb.assigned = ids.computed(row, keys)
    return packs


def pack_minibatches(
    groups: list[list[Sample]], count: int, pack_tokens: int, device: torch.device, together: bool = False
) -> Minibatches:
    """Divide this rank's groups into `count` minibatches of micro-batches. Minibatch m has the m-th of `count` equal
    parts of each rank's groups, and so the same global prompts on any number of ranks. A group may be empty. `together`
    as in `pack_groups`. Collective."""
    cuts, minibatches = [len(groups) * m // count for m in range(count + 1)], []
    for start, end in pairwise(cuts):
        chosen = [group for group in groups[start:end] if group]
        before = sum(len(group) for group in groups[:start])
        packs = pack_groups(chosen, pack_tokens, device, together)
        minibatches.append([mb.with_streams(index_N=mb.index_N + before) for mb in packs])
    return minibatches


def set_shortest_prefix(shortest: int, allowed: bool) -> None:
    """Set the shortest prefix that `pack_groups` shares by default. A model for which this is not `allowed` sets it to
    0 for all models of the run, which have the same packs."""
    global _shortest_prefix, _needs_whole_sequences
    _needs_whole_sequences |= not allowed
    _shortest_prefix = 0 if _needs_whole_sequences else shortest


def prefixes_are_shared() -> bool:
    return _shortest_prefix > 0


def shape_of(samples: list[Sample], shortest: int) -> GroupShape:
    """Return the shape of a group. Each sample shares with the one before it the longest prefix that leaves it a target
    of its own."""
    lengths, shared = [sample.num_targets for sample in samples], [0] * len(samples)
    for n, (before, sample) in enumerate(pairwise(samples), 1) if shortest else ():
        pairs = zip(before.ids, sample.ids, strict=False)
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(before.ids))
        prefix = min(equal - 1, lengths[n] - 1)
        shared[n] = prefix if prefix + 1 >= shortest else 0
    return GroupShape(lengths, shared)


def _streams(sample: Sample) -> dict[str, list[float]]:
    """Return the per-token streams of a sample by name."""
    optional = {name: getattr(sample, name, None) for name in STREAMS}
    return {name: values for name, values in optional.items() if values is not None} | sample.streams


def _stream(sample: Sample, name: str) -> list[float]:
    """Return a stream of a sample. Raises `ValueError` unless it has one number for each id."""
    values = _streams(sample).get(name, [])
    if len(values) != len(sample.ids):
        wrong = f"{len(values)} numbers for {len(sample.ids)} ids"
        raise ValueError(f"stream {name}: {wrong}; give every sample of a batch one number for each of its ids")
    return values


def _pack_one(samples: list[Sample], index: list[int], streams: list[str], device: torch.device) -> PackedBatch:
    packed = samples
    if not samples:
        samples = [Sample(ids=[0, 0], loss_mask=[False, False], streams=dict.fromkeys(streams, [0.0, 0.0]))]
    lengths = [sample.num_targets for sample in samples]

    def targets(values_of, dtype: torch.dtype) -> Tensor:
        """Return a stream aligned with the targets: without the value of each sample's first token."""
        return torch.tensor([x for sample in samples for x in values_of(sample)[1:]], dtype=dtype).to(device)

    input_ids_T = torch.tensor([x for sample in samples for x in sample.ids[:-1]]).to(device)
    position_ids_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
    sequence_ids_T = torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths)).to(device)
    tokens = input_ids_T, targets(lambda sample: sample.ids, torch.int64), position_ids_T, lengths
    of_tokens = dict(loss_mask_T=targets(lambda sample: sample.loss_mask, torch.bool), sequence_ids_T=sequence_ids_T)
    batch = PackedBatch(*tokens, **of_tokens, samples=packed, index_N=torch.tensor(index, dtype=torch.int64))
    streams_T = {f"{name}_T": targets(lambda s, name=name: _stream(s, name), torch.float32) for name in streams}
    if taken := streams_T.keys() & vars(batch).keys():
        raise ValueError(f"stream {min(taken).removesuffix('_T')}: a micro-batch has another {min(taken)}; rename it")
    return batch.with_streams(**streams_T)


def per_sample(micro_batches: Iterable[PackedBatch], values: Iterable[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return the numbers of all packed samples in their original order, the inverse of `PackedBatch.select`. `values`
    has [N] for each micro-batch; `shape` is [P, G] for groups. Float64, on the host."""
    out = torch.zeros(math.prod(shape), dtype=torch.float64)
    for mb, values_N in zip(micro_batches, values, strict=True):
        out[mb.index_N] = values_N.detach().double().cpu()
    return out.reshape(shape)
