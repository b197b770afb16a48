"""Samples -> packed micro-batches: several sequences in one stream of tokens, no padding.

The one place where tokens are shifted. A `Sample` keeps its streams aligned with its own `ids`: `x[i]` describes the
token `ids[i]`. The packer turns them into inputs `ids[:-1]` and targets `ids[1:]`, and every stream follows the
targets: in a `PackedBatch`, `x_T[t]` describes the prediction of `targets_T[t]`.

Shapes: N sequences and T tokens in one micro-batch.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from common.objectives.reduction import sequence_mean, sequence_sum
from common.parallel import distributed
from common.parallel.placement import Ids, Shared, Stream, assign, unit_size

# Per-token streams that a Sample may carry and a PackedBatch then has as `<name>_T`.
STREAMS = ("rollout_logprobs", "versions", "weights")


@dataclass
class Sample:
    """A prompt and its completion as token ids. Lists, not tensors: samples are small, many and travel by pickle."""

    ids: list[int]
    """prompt, then completion"""
    loss_mask: list[bool]
    """which of `ids` are trained on; same length. The first token is never predicted, so its entry is ignored"""
    rollout_logprobs: list[float] | None = None
    """log-probs of `ids` by the engine that sampled them, 0 where it did not; same length"""
    versions: list[int] | None = None
    """how many steps had been finished with the weights that sampled each of `ids`, -1 where none did; same length"""
    weights: list[float] | None = None
    """weight of each token in a sum over the sequence"""
    stored_at: int = 0
    """where what is stored of its trained tokens begins (common/model/teacher.py)"""
    prompt_length: int = 0
    """tokens of the prompt; `ids[prompt_length:]` is the completion"""
    finish_reason: str = ""
    """`stop` (an EOS was sampled) or `length` (cut off by max_new_tokens or max_turns)"""
    version: int = 0
    """the oldest of `versions`"""
    text: str = ""
    """the completion decoded, of several turns the last: for rewards and for people; never tokenised again"""
    turns: int = 1
    """how often the model spoke; between its turns an environment did, in tokens that are not trained on"""
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """what the environment gave, each with the index in `ids` of the turn's last token"""
    error: str = ""
    """what the environment raised, if it did"""
    transcript: str = ""
    """all turns, for people; empty without an environment"""
    numbers: dict[str, float] = field(default_factory=dict)
    """what rewards measured beside the reward, as `reward/number`"""
    row: dict = field(default_factory=dict)
    """the data row it came from, for the reward"""
    scores: Future | None = None
    """what rewards return for it, while they are computed"""
    model_scores: dict[str, object] | None = None
    """what reward models say of it, from when they are asked until it is used"""

    @property
    def prompt_ids(self) -> list[int]:
        return self.ids[: self.prompt_length]

    @property
    def completion_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def num_targets(self) -> int:
        """Tokens this sample takes in a pack: every id but the first is predicted once."""
        return len(self.ids) - 1


def first(item: Sample | list[Sample]) -> Sample:
    """The sample, or of a group the first one."""
    return item[0] if isinstance(item, list) else item


class LazyGroups(Sequence):
    """Groups of samples that are made when they are drawn; `rows` has the data row of each."""

    def __init__(self, rows: list[dict], make: Callable[[int], list[Sample]]):
        self.rows, self.make = rows, make

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def many(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> list[Sample]:
        return self.make(range(len(self))[i])  # raises IndexError


@dataclass
class PackedBatch(Stream):
    """One micro-batch: the tokens that this rank owns of it. T is their number; streams that no sample carries are
    None. On one rank they are what the model runs on, on several that is `shared`.

    A rank that owns nothing of it gets a filler: one masked token and no samples.
    """

    loss_mask_T: Tensor  # bool
    sequence_ids_T: Tensor  # int64: which sequence, 0..N-1
    samples: list[Sample]  # N of them, in the order of the stream
    index_N: Tensor  # int64, on the host: the place of each sample among those that were packed, for `on_tokens`
    shared: Shared | None = None  # what this rank computes of the micro-batch, its own tokens or those of others
    rollout_logprobs_T: Tensor | None = None  # float32, like all below
    versions_T: Tensor | None = None
    weights_T: Tensor | None = None
    # What scripts put beside the samples' own streams:
    old_logprobs_T: Tensor | None = None  # of the trainer at rollout time
    old_entropy_T: Tensor | None = None  # likewise
    ref_logprobs_T: Tensor | None = None
    advantages_T: Tensor | None = None
    importance_T: Tensor | None = None  # importance weight of each token, pi_old / pi_engine
    values_T: Tensor | None = None  # of the value model, before targets_T[t] is emitted
    returns_T: Tensor | None = None  # what they should have been

    @property
    def computed(self) -> Stream:
        """What the model is run on."""
        return self.shared or self

    def sequence_sums(self, x_T: Tensor) -> Tensor:
        """Sum of a stream over the trained tokens of each sequence: [N], float64. A filler gives an empty tensor that
        is still part of the graph, so its backward runs."""
        trained_T = torch.where(self.loss_mask_T, x_T, 0).double()
        sums = torch.zeros(len(self.offsets) - 1, dtype=torch.float64, device=x_T.device)
        return sums.index_add(0, self.sequence_ids_T, trained_T)[: len(self.samples)]

    def sequence_sum_T(self, x_T: Tensor) -> Tensor:
        """`sequence_sums` on every token of the sequence: [T], float64."""
        return sequence_sum(x_T, self.loss_mask_T, self.sequence_ids_T)

    def sequence_mean_T(self, x_T: Tensor) -> Tensor:
        """Mean of a stream over the trained tokens of a sequence, on every token of it: [T], float64. 0 without any."""
        return sequence_mean(x_T, self.loss_mask_T, self.sequence_ids_T)

    @property
    def lengths_T(self) -> Tensor:
        """Trained tokens of the sequence, on every token of it: [T], float64."""
        return self.sequence_sum_T(self.loss_mask_T)

    def per_sequence(self, values: Iterable[float]) -> Tensor:
        """One number per sample -> [N], float64, on the device."""
        return torch.tensor(list(values), dtype=torch.float64).to(self.loss_mask_T.device)

    def select(self, values: Tensor) -> Tensor:
        """Return the numbers of this micro-batch's samples, [N], float64. `values` has one number for each sample that
        was packed, in any shape: [P, G] for groups of completions."""
        return values.double().flatten()[self.index_N].to(self.loss_mask_T.device)

    def on_tokens(self, values: Tensor) -> Tensor:
        """Return the number of its sample on each token, [T], float32; 0 on padding. `values` as for `select`."""
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
        """The trained tokens of each dataset that has a weight, by `/name`."""
        names = [sample.row.get("_dataset") for sample in self.samples]
        of_N = {name: self.per_sequence(own == name for own in names).bool() for name in sorted({*names} - {None})}
        return {f"/{name}": self.loss_mask_T & own_N[self.sequence_ids_T] for name, own_N in of_N.items()}

    @property
    def ends_N(self) -> Tensor:
        """Where the last token of each sample is: [N], int64."""
        return self.cu_seqlens_N1[1 : len(self.samples) + 1].long() - 1


# FSDP rebuilds every dataclass that it is given and all that is in it, before and after each block: here that would be
# every sample's lists of ids, a quarter of the demo's step.
for kind in (PackedBatch, Shared, Stream):
    del kind.__dataclass_fields__


def pack(samples: list[Sample], pack_tokens: int, device: torch.device) -> list[PackedBatch]:
    """Pack the samples of all ranks into micro-batches of at most `pack_tokens` targets on a rank (times
    `--context_ranks` on those that run them together): of this rank's micro-batches, what it owns and what it computes.

    Collective: every rank gets the same number of micro-batches, because each one's forward and backward run FSDP
    collectives. Ranks that own nothing of one get fillers, whose loss is exactly zero.

    Raises `ValueError` for a sample that does not fit.
    """
    return pack_groups([[sample] for sample in samples], pack_tokens, device)


def pack_groups(groups: list[list[Sample]], pack_tokens: int, device: torch.device) -> list[PackedBatch]:
    """`pack`, with the samples of a group side by side in one micro-batch: chosen and rejected of a pair, say."""
    mine = [[sample.num_targets for sample in group] for group in groups]
    streams = [name for name in STREAMS if groups and getattr(groups[0][0], name) is not None]
    ranks = distributed.gather_objects((mine, streams))
    rank, R = int(dist.is_initialized() and dist.get_rank()), unit_size()
    lengths = {(owner, i): group for owner, (sizes, _) in enumerate(ranks) for i, group in enumerate(sizes)}
    rows = assign(lengths, len(ranks) // R, pack_tokens * R)
    owned = [[key for keys in row for key in keys if key[0] == rank] for row in rows]
    streams = sorted(set().union(*(of_rank for _, of_rank in ranks)))  # also for a rank without samples
    starts = list(accumulate((len(group) for group in groups), initial=0))  # of each group among the samples
    packs = [
        _pack_one(
            [sample for _, i in keys for sample in groups[i]],
            [starts[i] + k for _, i in keys for k in range(len(groups[i]))],
            streams,
            device,
        )
        for keys in owned
    ]
    if len(ranks) > 1:
        ids = Ids([sample.ids for group in groups for sample in group], lengths, device)
        for mb, row, keys in zip(packs, rows, owned, strict=True):
            mb.shared = ids.shared(row, keys)
    return packs


def pack_minibatches(
    groups: list[list[Sample]], count: int, pack_tokens: int, device: torch.device, together: bool = False
) -> list[list[PackedBatch]]:
    """Divide this rank's groups into `count` minibatches, of micro-batches each. Minibatch m has the m-th of `count`
    equal parts of the groups of every rank: the same global prompts on any number of ranks. A group may be empty. With
    `together` the samples of a group share a micro-batch. Collective."""
    cuts, minibatches = [len(groups) * m // count for m in range(count + 1)], []
    for start, end in pairwise(cuts):
        chosen = [group for group in groups[start:end] if group]
        wholes = chosen if together else [[sample] for group in chosen for sample in group]
        before = sum(len(group) for group in groups[:start])
        minibatches.append(
            [mb.with_streams(index_N=mb.index_N + before) for mb in pack_groups(wholes, pack_tokens, device)]
        )
    return minibatches


def _pack_one(samples: list[Sample], index: list[int], streams: list[str], device: torch.device) -> PackedBatch:
    packed = samples
    if not samples:
        samples = [Sample(ids=[0, 0], loss_mask=[False, False], **{name: [0.0, 0.0] for name in streams})]
    lengths = torch.tensor([sample.num_targets for sample in samples])
    cu_seqlens_N1 = torch.zeros(len(samples) + 1, dtype=torch.int32)
    cu_seqlens_N1[1:] = lengths.cumsum(0)

    def targets(values_of, dtype: torch.dtype) -> Tensor:
        """Streams follow the targets: everything about a sample's first token is dropped."""
        return torch.tensor([x for sample in samples for x in values_of(sample)[1:]], dtype=dtype).to(device)

    batch = PackedBatch(
        input_ids_T=torch.tensor([x for sample in samples for x in sample.ids[:-1]]).to(device),
        targets_T=targets(lambda sample: sample.ids, torch.int64),
        position_ids_T=torch.cat([torch.arange(length) for length in lengths]).to(device),
        loss_mask_T=targets(lambda sample: sample.loss_mask, torch.bool),
        sequence_ids_T=torch.arange(len(samples)).repeat_interleave(lengths).to(device),
        cu_seqlens_N1=cu_seqlens_N1.to(device),
        offsets=cu_seqlens_N1.tolist(),
        max_seqlen=int(lengths.max()),
        sequences=len(packed),
        samples=packed,
        index_N=torch.tensor(index, dtype=torch.int64),
        **{f"{name}_T": targets(lambda s, name=name: getattr(s, name), torch.float32) for name in streams},
    )
    return batch


def per_sample(micro_batches: Iterable[PackedBatch], values: Iterable[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return the numbers of all packed samples in the order in which they were packed, float64, on the host: the
    reverse of `PackedBatch.select`. `values` has [N] for each micro-batch; `shape` is [P, G] for groups."""
    out = torch.zeros(math.prod(shape), dtype=torch.float64)
    for mb, values_N in zip(micro_batches, values, strict=True):
        out[mb.index_N] = values_N.detach().double().cpu()
    return out.reshape(shape)
