"""Sequences on their way to the ranks that train on them, and the tokens that a model computes.

A model mostly computes the tokens of its micro-batch. Two flags change that:

With `--share_prefix`, a prefix that sequences of a group have in common, such as the prompt of its
completions, is computed once (docs/memory.md). If two sequences agree in their first p + 1 ids, the
later one reuses p computed targets of the earlier and computes the rest. Each sequence is compared
with the one before it alone: in lexical order, the shared prefixes then form a tree.

With `--context_ranks`, the ranks of a context group join their micro-batches to one stream, and
each rank computes a part of it (common/parallel/context.py).

Shapes: N sequences, T tokens of a micro-batch, t computed tokens of this rank, A attended keys."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.packs.sample import ImageSpan, Sample


class TokenSequence(NamedTuple):
    """What the rank that trains on a sequence needs to know of its sample. Its arrays pickle in
    fewer bytes than lists: 5 a token, 4 more for a stream of float32, 8 for `stored_at`, and 4
    top_k for `support`."""

    index: int  # number of the sample, counted over all ranks
    ids: np.ndarray  # int32
    loss_mask: np.ndarray  # bool
    streams: dict[str, np.ndarray]  # float32; `stored_at` is int64, `support` int32 [., top_k]
    dataset: str | None = None
    images: list[ImageSpan] = []  # all its images, also those in a shared prefix
    shared: int = 0  # it shares its first `shared` targets with the sequence before it
    left_out: int = 0  # on its way: first ids not sent, as the sequence before it has them

    @property
    def num_targets(self) -> int:
        return len(self.ids) - 1


def sequence_of(index: int, sample: Sample) -> TokenSequence:
    """Return a sample as it travels. Streams have the names of their lists."""
    names = ("rollout_logprobs", "versions")
    lists = {name: getattr(sample, name, None) for name in names} | sample.streams
    streams = {name: np.array(x, np.float32) for name, x in lists.items() if x is not None}
    if sample.stored_at is not None:  # a place for each trained token, from the first on
        places = accumulate(sample.loss_mask[1:-1], initial=sample.stored_at)
        streams["stored_at"] = np.array([0, *places], np.int64)
    ids, loss_mask = np.array(sample.ids, np.int32), np.frombuffer(bytes(sample.loss_mask), bool)
    if support := getattr(sample, "support", None):  # other tokens could only be themselves
        streams["support"] = np.repeat(ids[:, None], len(support[0]), axis=1)
        streams["support"][streams["versions"] >= 0] = support
    dataset = sample.row.get("_dataset")
    return TokenSequence(index, ids, loss_mask, streams, dataset, sample.images)


def for_sending(part: list[TokenSequence]) -> list[TokenSequence]:
    """Return the sequences of a part as they travel: each without the first ids, up to the trained
    ones, that it shares with the sequence before it. Whole, 50 turns of a conversation would have
    25 times the ids of the last turn's sequence."""
    travelling = []
    for s in part:
        untrained = int(s.loss_mask.argmax()) if s.loss_mask.any() else len(s.ids)
        n = min(s.shared, untrained)
        travelling.append(s._replace(ids=s.ids[n:], loss_mask=s.loss_mask[n:], left_out=n))
    return travelling


def after_arrival(part: list[TokenSequence]) -> list[TokenSequence]:
    """Undo `for_sending`: return the whole sequences of a part."""
    whole: list[TokenSequence] = []
    for s in part:
        if n := s.left_out:
            ids = np.concatenate([whole[-1].ids[:n], s.ids])
            loss_mask = np.concatenate([np.zeros(n, bool), s.loss_mask])
            s = s._replace(ids=ids, loss_mask=loss_mask, left_out=0)
        whole.append(s)
    return whole


def padding(num_targets: int, streams: dict[str, np.ndarray]) -> TokenSequence:
    """Return a sequence of zeros without trained tokens."""
    zeros = np.zeros(num_targets + 1, np.int32)
    streams_of_zeros = {x: np.repeat(like, len(zeros), axis=0) for x, like in streams.items()}
    return TokenSequence(-1, zeros, zeros.astype(bool), streams_of_zeros)


def tensor_of(arrays: list[np.ndarray], device: torch.device) -> Tensor:
    x = torch.from_numpy(np.concatenate(arrays))
    # A copy from memory that is not pinned makes the host wait for the GPU.
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class ModelTokens:
    """Tokens that a model runs on.

    A plain class: FSDP rebuilds every dataclass and tuple that a block is given, with all that it
    contains."""

    context_group: Any = None  # ContextGroup, whose ranks hold one part each of these tokens
    keys: "AttentionKeys | None" = None  # set if prefixes are shared
    image_sequences: list[TokenSequence] | None = None  # the sequences, if any of them has images
    images: Any = None  # PackedImages (extras/images/packed.py), made from them when needed
    next: "ModelTokens | None" = None  # with images, the tokens that the model runs on next
    support_T: Tensor | None = None  # int32 [T, top_k]: the ids that a target could have been
    stored_at_T: Tensor | None = None  # int64: places of targets in the teacher's stored log-probs

    def __init__(
        self, ids_T: Tensor, targets_T: Tensor, position_ids_T: Tensor, lengths: list[int]
    ):
        self.input_ids_T = ids_T.long()
        self.targets_T = targets_T.long()
        self.position_ids_T = position_ids_T  # int64: the place of a token in its sequence
        self.lengths = lengths
        self.offsets = [0, *accumulate(lengths)]  # sequence n is [offsets[n], offsets[n + 1])
        self.cu_seqlens_N1 = tensor_of([np.array(self.offsets, np.int32)], ids_T.device)
        self.max_seqlen = max(lengths)  # on the host, like `offsets`: no launch waits for the GPU


class AttentionKeys:
    """Keys that the queries of each sequence attend to: its prefix's and its own. A plain class,
    like `ModelTokens`."""

    def __init__(self, places: list[np.ndarray], device: torch.device):
        """`places`: where the keys of each sequence are among the computed tokens."""
        self.places_A = tensor_of(places, device)
        self.lengths = [len(of_sequence) for of_sequence in places]
        self.cu_seqlens_N1 = tensor_of([np.array([0, *accumulate(self.lengths)], np.int32)], device)
        self.max_seqlen = max(self.lengths)


class CompactTokens(ModelTokens):
    """The tokens that a rank computes. `expand` hands their results to those of a micro-batch."""

    def __init__(self, *tokens, places_T: Tensor, context_group: Any):
        super().__init__(*tokens)
        self.places_T = places_T  # of the micro-batch's tokens, among all computed ones
        self.context_group = context_group

    def expand(self, streams_t: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return computed streams [t] on the tokens of the micro-batch, [T]. Gradients go back to
        the rank that computed a token, and add up where sequences share a prefix.

        All streams travel in one collective: whichever of them a loss uses, all ranks of a context
        group meet in its backward. Collective in the context group."""
        stacked = torch.stack([x_t.to(streams_t[0].dtype) for x_t in streams_t], dim=1)
        if self.context_group is not None:
            stacked = self.context_group.gather(stacked)
        # Indexing would add gradients in any order on several threads.
        expanded = stacked.index_select(0, self.places_T)
        # Copies: the output of a module may be written to, and FSDP would not see that through a
        # view.
        columns = zip(expanded.unbind(1), streams_t, strict=True)
        return tuple(x_T.to(x_t.dtype, copy=True) for x_T, x_t in columns)


def compact_tokens(
    parts: list[list[TokenSequence]], streams: dict[str, np.ndarray], device: torch.device,
    context_group: Any,
) -> CompactTokens:  # fmt: skip
    """Return the tokens that this rank computes for the `parts` of groups in its micro-batch. The
    ranks of a context group compute their micro-batches together: part i belongs to rank i modulo
    their number."""
    size, rank = (1, 0) if context_group is None else (context_group.size, context_group.rank)
    sequences = [sequence for part in parts for sequence in part]
    num_tokens = sum(s.num_targets - s.shared for s in sequences)
    per_rank = math.ceil(max(1, num_tokens) / size)
    if per_rank * size > num_tokens:  # all ranks compute the same number
        sequences.append(padding(per_rank * size - num_tokens, streams))
    here = slice(rank * per_rank, (rank + 1) * per_rank)
    places = places_of(sequences)
    bounds = pairwise([0, *accumulate(map(len, parts))])
    own_parts = [places[start:end] for start, end in bounds][rank::size]
    own_places = [of_sequence for part in own_parts for of_sequence in part]
    tokens = CompactTokens(
        tensor_of([s.ids[s.shared : -1] for s in sequences], device)[here],
        tensor_of([s.ids[s.shared + 1 :] for s in sequences], device)[here],
        tensor_of([np.arange(s.shared, s.num_targets) for s in sequences], device)[here],
        [s.num_targets - s.shared for s in sequences],
        places_T=tensor_of(own_places or [np.array([0])], device),  # padding takes any result
        context_group=context_group,
    )
    if any(sequence.shared for sequence in sequences):
        tokens.keys = AttentionKeys(places, device)
    for name in {"stored_at", "support"} & streams.keys():
        own = [s.streams[name][s.shared + 1 :] for s in sequences]
        setattr(tokens, f"{name}_T", tensor_of(own, device)[here])
    return tokens


def places_of(sequences: list[TokenSequence]) -> list[np.ndarray]:
    """Return, for each sequence, the places of its tokens among the computed ones. A shared prefix
    is there only once, so its tokens have the places that they have in the sequence before."""
    places: list[np.ndarray] = []
    begin = 0
    for sequence in sequences:
        end = begin + sequence.num_targets - sequence.shared
        own = np.arange(begin, end)
        prefix = places[-1][: sequence.shared] if sequence.shared else own[:0]
        places.append(np.concatenate([prefix, own]))
        begin = end
    return places
