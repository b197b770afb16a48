"""Tokens that a model runs on where they are not those of its micro-batch.

With `--share_prefix`, a prefix that sequences of a group have in common, such as the prompt of its
completions, is computed once (docs/prefix.md). A model reads the ids x_0 .. x_(n-1) of a sequence
and predicts x_1 .. x_n. Where the first p + 1 ids of two sequences agree, so do their first p
targets. The first sequence of a group is computed whole, each later one from its p-th token on,
where p is the prefix that it shares with the sequence before it. Every computed token has one
target. The shared prefixes form a tree if the sequences are in lexical order.

With `--context_ranks` R, the R ranks of a context group run the samples of all of them together, a
part of the stream each (context.py).

Shapes: N sequences, T tokens of the micro-batch, t computed tokens of this rank, K keys.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from common.data.tokens import Tokens
from common.data.transfer import Placed

all_gather = getattr(collectives, "all_gather_single_autograd", None) or (
    collectives.all_gather_tensor_autograd
)


class CompactTokens(Tokens):
    """Computed tokens. Their results belong to the tokens of a micro-batch."""

    def __init__(self, *tokens, rows_T: Tensor, group: dist.ProcessGroup | None):
        super().__init__(*tokens)
        self.rows_T = rows_T  # computed token of each token of the micro-batch, in the whole stream
        self.context_group = group

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
    like `Tokens`."""

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
    table_IC: Tensor, samples: list[Placed], own: list[Placed], streams: list[str],
    group: dist.ProcessGroup | None,
) -> CompactTokens:  # fmt: skip
    """Return the tokens that this rank computes of `samples`, which are those of its micro-batch,
    `own`, or, in a context group, of the micro-batches of all its ranks. `table_IC` has the columns
    id, loss mask and `streams` (packing.py)."""
    device = table_IC.device
    R = 1 if group is None else dist.get_world_size(group)
    lengths = [sample.num_targets - sample.shared for sample in samples]
    shared = [sample.shared for sample in samples]
    first_rows = [sample.first_row + sample.shared for sample in samples]
    in_stream = rows_of_sequences(lengths, shared)
    rows = {s.first_row: rows for s, rows in zip(samples, in_stream, strict=True)}
    # A padding token takes any result.
    rows_T = torch.cat([rows[s.first_row] for s in own] or [torch.zeros(1).long()])

    part = math.ceil(max(1, sum(lengths)) / R)  # tokens of each rank of the context group
    padding = part * R - sum(lengths)
    if padding:  # a sequence of zeros makes the parts equal
        lengths.append(padding)
        shared.append(0)
        first_rows.append(len(table_IC) - R - 1)
    r = 0 if group is None else dist.get_rank(group)
    here = slice(r * part, (r + 1) * part)
    behind_prefix_t = torch.cat([torch.arange(length) for length in lengths])[here]
    of_sequences = torch.tensor([first_rows, shared]).repeat_interleave(torch.tensor(lengths), 1)
    rows_t, position_ids_t = (of_sequences[:, here] + behind_prefix_t).to(device)
    targets_tC = table_IC[rows_t + 1]
    tokens = CompactTokens(
        table_IC[rows_t, 0].long(), targets_tC[:, 0].long(), position_ids_t, lengths,
        rows_T=rows_T.to(device), group=group,
    )  # fmt: skip
    if any(shared):
        tokens.keys = Keys(lengths, shared, device)
    if "stored_at" in streams:
        tokens.stored_at_T = targets_tC[:, 2 + streams.index("stored_at")].long()
    return tokens
