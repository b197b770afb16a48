"""The tokens that a model computes, where they are not those of its micro-batch.

With `--share_prefix`, a prefix that sequences of a group have in common, such as the prompt of its
completions, is computed once (docs/memory.md). Where the first p + 1 ids of two sequences agree, so
do their first p targets. The first sequence of a group is computed whole, each later one from its
p-th token on, where p is the prefix that it shares with the sequence before it. The shared prefixes
form a tree if the sequences are in lexical order.

With `--context_ranks` R, the R ranks of a context group run the samples of all of them together, a
part of the stream each (context.py).

Shapes: N sequences, T tokens of the micro-batch, t computed tokens of this rank, K keys.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, chain, islice, pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from common.data.tokens import ModelTokens, TokenSequence, joined, padding

all_gather = getattr(collectives, "all_gather_single_autograd", None) or (
    collectives.all_gather_tensor_autograd
)


class CompactTokens(ModelTokens):
    """Computed tokens. Their results belong to the tokens of a micro-batch."""

    def __init__(self, *tokens, rows_T: Tensor, context_group: dist.ProcessGroup | None):
        super().__init__(*tokens)
        self.rows_T = rows_T  # computed token of each token of the micro-batch, in the whole stream
        self.context_group = context_group

    def expand(self, streams_t: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return computed streams [t] on the tokens of the micro-batch, [T]. Their gradients go to
        the ranks that computed them, and those of a prefix add up over its sequences.

        All streams travel in one collective: whichever of them a loss uses, all ranks of a context
        group meet in its backward. Collective in the context group."""
        stacked = torch.stack([x_t.to(streams_t[0].dtype) for x_t in streams_t], dim=1)
        if self.context_group is not None:
            stacked = all_gather(stacked, 0, self.context_group)
        # Indexing would add gradients in any order on several threads.
        expanded = stacked.index_select(0, self.rows_T)
        # Copies: the output of a module may be written to, and FSDP would not see that through a
        # view.
        columns = zip(expanded.unbind(1), streams_t, strict=True)
        return tuple(x_T.to(x_t.dtype, copy=True) for x_T, x_t in columns)


class Keys:
    """Keys that the queries of each sequence attend to: its prefix's and its own. A plain class,
    like `ModelTokens`."""

    def __init__(self, lengths: list[int], shared: list[int], device: torch.device):
        """`lengths` and `shared` as in `rows_of_sequences`."""
        self.lengths = [length + prefix for length, prefix in zip(lengths, shared, strict=True)]
        # positions among the computed tokens
        self.rows_K = torch.cat(rows_of_sequences(lengths, shared)).to(device)
        self.cu_seqlens_N1 = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
        self.cu_seqlens_N1 = self.cu_seqlens_N1.to(device)
        self.max_seqlen = max(self.lengths)


def rows_of_sequences(lengths: list[int], shared: list[int]) -> list[Tensor]:
    """Return, for each sequence, the positions of its tokens among the computed ones, int64.
    Sequence n computes `lengths[n]` tokens behind the first `shared[n]` tokens of the one
    before it."""
    rows: list[Tensor] = []
    bounds = pairwise(accumulate(lengths, initial=0))
    for prefix, (begin, end) in zip(shared, bounds, strict=True):
        suffix = torch.arange(begin, end)
        rows.append(torch.cat([rows[-1][:prefix], suffix]) if prefix else suffix)
    return rows


def compact_tokens(
    groups: list[list[TokenSequence]], streams: list[str], device: torch.device,
    context_group: dist.ProcessGroup | None,
) -> CompactTokens:  # fmt: skip
    """Return the tokens that this rank computes. `groups` are those of its micro-batch or, in a
    context group, of the micro-batches of all its ranks, to which they belong in turn."""
    R, r = 1, 0
    if context_group is not None:
        R, r = dist.get_world_size(context_group), dist.get_rank(context_group)
    sequences = [*chain(*groups)]
    num_tokens = sum(s.num_targets - s.shared for s in sequences)
    part = math.ceil(max(1, num_tokens) / R)  # tokens of each rank of the context group
    if part * R > num_tokens:  # makes the parts equal
        sequences.append(padding(part * R - num_tokens, streams))
    lengths = [s.num_targets - s.shared for s in sequences]
    shared = [s.shared for s in sequences]
    rest = iter(rows_of_sequences(lengths, shared))
    rows_of_groups = [[*islice(rest, len(group))] for group in groups]
    own_rows = [*chain(*rows_of_groups[r::R])] or [torch.tensor([0])]  # padding takes any result

    here = slice(r * part, (r + 1) * part)
    position_ids = [np.arange(s.shared, s.num_targets) for s in sequences]
    tokens = CompactTokens(
        joined([s.ids[s.shared : -1] for s in sequences], device)[here],
        joined([s.ids[s.shared + 1 :] for s in sequences], device)[here],
        joined(position_ids, device)[here],
        lengths,
        rows_T=torch.cat(own_rows).to(device),
        context_group=context_group,
    )
    if any(shared):
        tokens.keys = Keys(lengths, shared, device)
    if "stored_at" in streams:
        places = [s.streams["stored_at"][s.shared + 1 :] for s in sequences]
        tokens.stored_at_T = joined(places, device)[here]
    return tokens
