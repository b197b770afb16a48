"""Placement: which rank computes which sequence, and how its results return to the rank that owns the sequence.

A rank owns samples: their masks, streams and losses. `place` chooses by cost which rank runs the model on them, and
`scatter_back` returns the results to the owners. FSDP makes every micro-batch wait for its slowest rank, so that load
balancing saves time (`bench/balance.py`). A context group (context.py) counts as one rank.

A prefix that sequences of a group have in common, such as the prompt of its completions, is computed once
(docs/prefix.md). Of the ids x_0 .. x_n of a sequence a model reads x_0 .. x_(n-1) and predicts x_1 .. x_n. Where the
first p + 1 ids of two sequences agree, so do their first p targets. The first sequence of a group is computed whole,
each later one from its p-th token on, where p is the prefix that it shares with the sequence before it. Every computed
token has one target. The shared prefixes form a tree if the sequences are in lexical order.

Shapes: N sequences, T own tokens, t computed tokens, K keys. A key of a dict is (owner, index of its group).
"""

import bisect
import heapq
import math
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from common.parallel import distributed
from common.parallel.context import context_group, context_group_size

Key = tuple[int, int]
# Attention costs ATTENTION n^2 for a sequence of n tokens: heads x head width x layers / weights. 2e-5 in an 8B model,
# 1e-4 in one of 0.6B.
ATTENTION = 4e-5
KEY_COPY = 1 / 8  # room for a copied key and value, in tokens: a block keeps at least eight times as much of a token
MICRO_BATCH = 256  # fixed cost of a micro-batch, in tokens

all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def rows_of_sequences(lengths: list[int], shared: list[int]) -> list[Tensor]:
    """Return, for each sequence, the positions of its tokens among the computed ones, int64. Sequence n computes
    `lengths[n]` tokens behind the first `shared[n]` tokens of sequence n - 1."""
    rows: list[Tensor] = []
    for prefix, (begin, end) in zip(shared, pairwise(accumulate(lengths, initial=0)), strict=True):
        own = torch.arange(begin, end)
        rows.append(torch.cat([rows[-1][:prefix], own]) if prefix else own)
    return rows


class Keys:
    """Keys that the queries of each sequence attend to: its prefix's and its own. A plain class, like `Tokens`."""

    def __init__(self, lengths: list[int], shared: list[int], device: torch.device):
        """`lengths` and `shared` as in `rows_of_sequences`."""
        self.lengths = [sum(each) for each in zip(lengths, shared, strict=True)]
        self.rows_K = torch.cat(rows_of_sequences(lengths, shared)).to(device)  # positions among the computed tokens
        self.cu_seqlens_N1 = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32).to(device)
        self.max_seqlen = max(self.lengths)


class Tokens:
    """Packed sequences that a model runs on: this rank's own, or those that `place` gave to it. A sequence that shares
    a prefix with the one before it has the tokens behind this prefix.

    A plain class: FSDP rebuilds every dataclass and tuple that a block is given, with all that it contains.
    """

    own_T: Tensor | None = None  # int64: positions of this rank's own tokens among those that all ranks compute
    longest = 0  # most tokens that a rank computes
    context_group: dist.ProcessGroup | None = None  # ranks that hold one part each of these tokens
    keys: Keys | None = None  # None: no sequence shares a prefix

    def __init__(self, ids_T: Tensor, targets_T: Tensor, position_ids_T: Tensor, lengths: list[int], sequences: int):
        """The first `sequences` of the sequences with these `lengths` are samples; another is padding."""
        self.input_ids_T = ids_T  # int64
        self.targets_T = targets_T  # int64
        self.position_ids_T = position_ids_T  # int64, of a token in its sequence
        self.lengths = lengths
        self.offsets = [0, *accumulate(lengths)]  # sequence n is [offsets[n], offsets[n + 1])
        self.cu_seqlens_N1 = torch.tensor(self.offsets, dtype=torch.int32).to(ids_T.device)
        self.max_seqlen = max(lengths)  # on the host, like `offsets`: no kernel launch waits for the device
        self.sequences = sequences


# ---- which rank computes what ----


class GroupShape(NamedTuple):
    """Sequences of a group or of a part of it, by their numbers of targets. The first `shared[n]` targets of sequence n
    are those of the sequence before it, and are computed once."""

    lengths: list[int]
    shared: list[int]  # 0 for the first sequence; less than its length for every other one

    @property
    def tokens(self) -> int:
        """Number of computed tokens."""
        return sum(self.lengths) - sum(self.shared)

    @property
    def size(self) -> int:
        """Room that the group takes in a pack: its tokens, and copies of shared keys. It is at most that of whole
        sequences."""
        return self.tokens + math.ceil(KEY_COPY * sum(self.shared))

    @property
    def cost(self) -> float:
        """Compute cost, in units of one token of a short sequence."""
        return self.tokens + ATTENTION * (sum(n * n for n in self.lengths) - sum(n * n for n in self.shared))

    def parts(self, limit: int) -> list["GroupShape"]:
        """Return the sequences, in their order, as groups of at most this size, or of one sequence. A sequence without
        a shared prefix begins a group."""
        parts: list[GroupShape] = []
        for n, prefix in zip(*self, strict=True):
            if prefix and (longer := GroupShape([*parts[-1].lengths, n], [*parts[-1].shared, prefix])).size <= limit:
                parts[-1] = longer
            else:
                parts.append(GroupShape([n], [0]))
        return parts

    def rows(self) -> Tensor:
        """Return the positions of the targets of all sequences, one after the other, among the computed tokens: [T]."""
        own = [n - prefix for n, prefix in zip(*self, strict=True)]
        return torch.cat(rows_of_sequences(own, self.shared))


def by_key(ranks: list[list[GroupShape]]) -> dict[Key, GroupShape]:
    return {(owner, i): group for owner, groups in enumerate(ranks) for i, group in enumerate(groups)}


Placement = tuple[dict[Key, GroupShape], list[list[list[Key]]]]  # groups of all ranks, rows of bins


def place(ranks: list[list[GroupShape]], num_bins: int, max_tokens: int, together: bool) -> Placement:
    """Return the groups of all ranks, in parts unless the sequences of a group have to stay `together`, and the rows
    that `assign` makes of them.

    Large parts compute few prefixes, small parts can be divided evenly. The cheapest of several sizes is taken.
    """
    if together:
        whole = by_key(ranks)
        return whole, assign(whole, num_bins, max_tokens)
    groups = [group for rank in ranks for group in rank]
    even = min(max_tokens, sum(group.size for group in groups) // num_bins + 1)
    limits, placements = {max_tokens, even, even // 2, even // 4, even // 8, 0}, []
    for limit in sorted(limits, reverse=True) if any(any(group.shared) for group in groups) else [0]:
        parts = by_key([[part for group in rank for part in group.parts(limit)] for rank in ranks])
        placements.append((parts, assign(parts, num_bins, max_tokens)))
    return min(placements, key=lambda placement: cost(*placement))


def cost(groups: dict[Key, GroupShape], rows: list[list[list[Key]]]) -> float:
    """Return the cost of all rows, each of which waits for its slowest bin."""
    return sum(MICRO_BATCH + max(sum(groups[key].cost for key in keys) for keys in row) for row in rows)


def assign(groups: dict[Key, GroupShape], num_bins: int, max_tokens: int) -> list[list[list[Key]]]:
    """Assign groups of sequences to rows of `num_bins` bins: one micro-batch of each context group. A group stays
    whole, the sizes in a bin add up to at most `max_tokens`, and the bins of a row cost about the same. There are as
    few rows as best-fit decreasing needs.

    Raises `ValueError` for a group that does not fit.
    """
    sizes, bins, free = {key: group.size for key, group in groups.items()}, [], []  # free: sorted (space left, bin)
    for key in sorted(groups, key=lambda key: (-sizes[key], key)):
        if sizes[key] > max_tokens:
            count = len(groups[key].lengths)
            label = "a sequence has" if count == 1 else f"{count} sequences to keep together take"
            flags = f"--pack_tokens {max_tokens // (R := context_group_size())}"
            flags += f" x --context_ranks {R}" if R > 1 else ""
            raise ValueError(f"{flags}: {label} {sizes[key]} tokens; raise --pack_tokens or --context_ranks")
        at = bisect.bisect_left(free, (sizes[key], -1))
        left, i = free.pop(at) if at < len(free) else (max_tokens, len(bins))
        if i == len(bins):
            bins.append([])
        bins[i].append(key)
        bisect.insort(free, (left - sizes[key], i))
    rows = max(1, math.ceil(len(bins) / num_bins))
    costs = {key: group.cost for key, group in groups.items()}
    if num_bins > 1:  # longest processing time first, unless it overfills a bin
        even, loads = [[] for _ in range(rows * num_bins)], [(0.0, i) for i in range(rows * num_bins)]
        for key in sorted(groups, key=lambda key: (-costs[key], key)):
            load, i = loads[0]
            even[i].append(key)
            heapq.heapreplace(loads, (load + costs[key], i))
        if all(sum(sizes[key] for key in keys) <= max_tokens for keys in even):
            bins = even
    bins += [[] for _ in range(rows * num_bins - len(bins))]
    bins.sort(key=lambda keys: -sum(costs[key] for key in keys))
    return [bins[first : first + num_bins] for first in range(0, rows * num_bins, num_bins)]


# ---- what a rank computes of a row, and how its results return ----


class TokenIds:
    """Token ids of all ranks' sequences, one tensor. Making it is collective."""

    def __init__(self, ids: list[list[int]], groups: dict[Key, GroupShape], device: torch.device):
        """`ids` are this rank's sequences, `groups` the shapes of all ranks."""
        self.groups, self.rank = groups, dist.get_rank() if dist.is_initialized() else 0
        starts, totals = {}, [0] * distributed.world_size()  # starts: of a group's first sequence in its owner's part
        for key in sorted(groups):
            starts[key] = totals[key[0]]
            totals[key[0]] += sum(n + 1 for n in groups[key].lengths)
        width, padding = max(totals), context_group_size() + 1  # padding: zeros after the last rank's part
        mine = torch.zeros(width, dtype=torch.int32)
        mine[: totals[self.rank]] = torch.tensor([i for sequence in ids for i in sequence], dtype=torch.int32)
        self.flat = torch.zeros(width * len(totals) + padding, dtype=torch.int32, device=device)
        if dist.is_initialized():
            all_gather_into(self.flat[:-padding], mine.to(device))
        else:
            self.flat[:-padding] = mine
        self.starts = {key: key[0] * width + start for key, start in starts.items()}

    def sequences(self, keys: list[Key]) -> list[tuple[int, int, int]]:
        """Return the sequences of these groups in order: number of computed tokens, where the ids of these tokens start
        in `flat`, number of tokens shared with the sequence before."""
        found = []
        for key in keys:
            start = self.starts[key]
            for n, prefix in zip(*self.groups[key], strict=True):
                found.append((n - prefix, start + prefix, prefix))
                start += n + 1
        return found

    def computed(self, row: list[list[Key]], owned: list[Key]) -> Tokens:
        """Return the tokens of a row that this rank computes. `owned`: the groups of the row that it owns."""
        R, device = context_group_size(), self.flat.device
        totals = [max(1, sum(self.groups[key].tokens for key in keys)) for keys in row]
        parts = [math.ceil(total / R) for total in totals]  # tokens of each rank of a context group
        longest = max(parts)

        firsts = {}  # of each group: its context group, and the position of its first token in that stream
        for number, keys in enumerate(row):
            positions = accumulate((self.groups[key].tokens for key in keys), initial=0)
            firsts |= {key: (number, first) for key, first in zip(keys, positions, strict=False)}
        own_T = []
        for key in owned:
            number, first = firsts[key]
            in_stream = first + self.groups[key].rows()
            own_T.append((number * R + in_stream // parts[number]) * longest + in_stream % parts[number])
        own_T = torch.cat(own_T) if owned else torch.zeros(1, dtype=torch.int64)  # a padding token takes any result

        number, r = divmod(self.rank, R)
        sequences = self.sequences(row[number])
        num_samples = len(sequences)
        if padding := parts[number] * R - sum(length for length, _, _ in sequences):
            sequences.append((padding, len(self.flat) - R - 1, 0))  # a sequence of zeros makes the parts equal
        lengths, starts, shared = map(list, zip(*sequences, strict=True))
        here = slice(r * parts[number], (r + 1) * parts[number])
        in_sequence_t = torch.cat([torch.arange(n) for n in lengths])[here]
        of_sequence_2t = torch.tensor([starts, shared]).repeat_interleave(torch.tensor(lengths), dim=1)[:, here]
        ids_t, position_ids_t = (of_sequence_2t + in_sequence_t).to(device)
        tokens = Tokens(self.flat[ids_t].long(), self.flat[ids_t + 1].long(), position_ids_t, lengths, num_samples)
        tokens.own_T, tokens.longest, tokens.context_group = own_T.to(device), longest, context_group()
        tokens.keys = Keys(lengths, shared, device) if any(shared) else None
        return tokens


def scatter_back(streams_t: tuple[Tensor, ...], computed: Tokens) -> tuple[Tensor, ...]:
    """Return computed streams [t] on this rank's own tokens, [T]; their gradients go to the ranks that computed them,
    and those of a prefix add up over its sequences.

    All streams travel in one collective: whichever of them a loss uses, all ranks meet in its backward. Collective.
    """
    if computed.own_T is None:
        return streams_t
    stacked = torch.stack([x_t.to(streams_t[0].dtype) for x_t in streams_t], dim=1)
    if dist.is_initialized():
        padded = torch.nn.functional.pad(stacked, (0, 0, 0, computed.longest - len(stacked)))
        stacked = all_gather(padded, 0, dist.group.WORLD)
    own = stacked.index_select(0, computed.own_T)  # indexing would add gradients in any order on several threads
    # Copies: the output of a module may be written to, and FSDP would not see that through a view.
    return tuple(x_T.to(x_t.dtype, copy=True) for x_T, x_t in zip(own.unbind(1), streams_t, strict=True))


def send_to_computing_rank(x_T: Tensor, computed: Tokens) -> Tensor:
    """Return an integer stream of own tokens, [T], on the tokens that this rank computes, [t]: `scatter_back` reversed,
    without gradient. `x_T` is 0 on padding tokens, and so is the result. A token of a shared prefix gets the largest
    number of its sequences. Collective."""
    if computed.own_T is None:
        return x_T
    of_all_ranks = x_T.new_zeros(distributed.world_size() * computed.longest)
    of_all_ranks.scatter_reduce_(0, computed.own_T, x_T, "amax")
    of_all_ranks = distributed.all_sum(of_all_ranks).view(-1, computed.longest)
    return of_all_ranks[dist.get_rank() if dist.is_initialized() else 0][: len(computed.targets_T)]
