"""Placement: which rank computes which sequence, and how its results return to the rank that owns the sequence.

A rank owns samples: their masks, streams and losses. `assign` chooses by cost which rank runs the model on them, and
`scatter_back` returns the results to the owners. FSDP makes every micro-batch wait for its slowest rank, so that load
balancing saves time (`bench/balance.py`).

With `--context_ranks` R, R neighbours are a context group, which runs each pack together: every rank holds one of R
equal parts of the stream. Only attention mixes tokens; around it, tokens are exchanged for heads (DeepSpeed-Ulysses,
arXiv:2309.14509). A sequence may then be R times as long as `--pack_tokens`.

Shapes: N sequences, T own tokens, t computed tokens, H heads, d head width. A key is (owner, index of its group).
"""

import bisect
import functools
import heapq
import math
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

Key = tuple[int, int]
# Attention costs ATTENTION n^2 for a sequence of n tokens: heads x head width x layers / weights. 2e-5 in an 8B model,
# 1e-4 in one of 0.6B.
ATTENTION = 4e-5

all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_context_group: dist.ProcessGroup | None = None  # of this rank; None: every rank runs its packs alone


def setup_context_groups(context_ranks: int, minutes: float) -> None:
    """Make a context group of every `context_ranks` neighbours, with a timeout in minutes. The first call is
    collective, later ones do nothing."""
    global _context_group
    if context_ranks > 1 and _context_group is None:
        for first in range(0, dist.get_world_size(), context_ranks):  # every rank makes all groups
            ranks = range(first, first + context_ranks)
            group = dist.new_group(list(ranks), timeout=timedelta(minutes=minutes))
            _context_group = group if dist.get_rank() in ranks else _context_group


def context_group_size() -> int:
    return 1 if _context_group is None else dist.get_world_size(_context_group)


class Tokens:
    """Packed sequences that a model runs on: this rank's own, or those that `assign` gave to it.

    A plain class: FSDP rebuilds every dataclass and tuple that a block is given, with all that it contains.
    """

    own_T: Tensor | None = None  # int64: positions of this rank's own tokens among those that all ranks compute
    longest = 0  # most tokens that a rank computes
    context_group: dist.ProcessGroup | None = None  # ranks that hold one part each of these tokens

    def __init__(self, ids_T: Tensor, targets_T: Tensor, position_ids_T: Tensor, lengths: list[int], sequences: int):
        """The first `sequences` of the sequences with these `lengths` are samples; another one is padding."""
        self.input_ids_T = ids_T  # int64
        self.targets_T = targets_T  # int64
        self.position_ids_T = position_ids_T  # int64, restarts at 0 in every sequence
        self.offsets = [0, *accumulate(lengths)]  # sequence n is [offsets[n], offsets[n + 1])
        self.cu_seqlens_N1 = torch.tensor(self.offsets, dtype=torch.int32).to(ids_T.device)
        self.max_seqlen = max(lengths)  # on the host, like `offsets`: no kernel launch waits for the device
        self.sequences = sequences


# ---- which rank computes what ----


def cost(lengths: list[int]) -> float:
    """Return the compute cost of sequences, in units of one token of a short sequence."""
    return sum(n + ATTENTION * n * n for n in lengths)


def assign(groups: dict[Key, list[int]], num_bins: int, max_tokens: int) -> list[list[list[Key]]]:
    """Assign groups of sequences, given by their lengths, to rows of `num_bins` bins: one micro-batch of each context
    group. A group stays whole, a bin has at most `max_tokens` tokens, and the bins of a row cost about the same. There
    are as few rows as best-fit decreasing needs.

    Raises `ValueError` for a group that does not fit.
    """
    sizes, bins, free = {key: sum(lengths) for key, lengths in groups.items()}, [], []  # free: sorted (space left, bin)
    for key in sorted(groups, key=lambda key: (-sizes[key], key)):
        if sizes[key] > max_tokens:
            label = "a sequence has" if len(groups[key]) == 1 else f"{len(groups[key])} sequences to keep together have"
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
    if num_bins > 1:  # longest processing time first, unless it overfills a bin
        costs = {key: cost(lengths) for key, lengths in groups.items()}
        even, loads = [[] for _ in range(rows * num_bins)], [(0.0, i) for i in range(rows * num_bins)]
        for key in sorted(groups, key=lambda key: (-costs[key], key)):
            load, i = loads[0]
            even[i].append(key)
            heapq.heapreplace(loads, (load + costs[key], i))
        if all(sum(sizes[key] for key in keys) <= max_tokens for keys in even):
            bins = even
    bins += [[] for _ in range(rows * num_bins - len(bins))]
    bins.sort(key=lambda keys: -sum(cost(groups[key]) for key in keys))
    return [bins[first : first + num_bins] for first in range(0, rows * num_bins, num_bins)]


# ---- what a rank computes of a row, and how its results return ----


class TokenIds:
    """Token ids of all ranks' sequences, one tensor. Making it is collective."""

    def __init__(self, ids: list[list[int]], groups: dict[Key, list[int]], device: torch.device):
        self.groups, self.sizes = groups, {key: sum(lengths) for key, lengths in groups.items()}
        starts, totals = {}, [0] * dist.get_world_size()  # starts: of each sequence of a group, in its owner's part
        for key in sorted(groups):
            *starts[key], end = accumulate((n + 1 for n in groups[key]), initial=totals[key[0]])
            totals[key[0]] = end
        width, padding = max(totals), context_group_size() + 1  # padding: zeros after the last rank's part
        mine = torch.zeros(width, dtype=torch.int32)
        mine[: totals[dist.get_rank()]] = torch.tensor([i for sequence in ids for i in sequence], dtype=torch.int32)
        self.flat = torch.zeros(width * len(totals) + padding, dtype=torch.int32, device=device)
        all_gather_into(self.flat[:-padding], mine.to(device))
        self.starts = {key: [key[0] * width + start for start in starts[key]] for key in starts}

    def computed(self, row: list[list[Key]], owned: list[Key]) -> Tokens:
        """Return what this rank computes of a row, in which it owns the groups `owned`."""
        R, device = context_group_size(), self.flat.device
        totals = [max(1, sum(self.sizes[key] for key in keys)) for keys in row]
        parts = [math.ceil(total / R) for total in totals]  # tokens of each rank of a context group
        longest = max(parts)

        firsts = {}  # of each group: its context group, and the position of its first token in that stream
        for number, keys in enumerate(row):
            positions = accumulate((self.sizes[key] for key in keys), initial=0)
            firsts |= {key: (number, first) for key, first in zip(keys, positions, strict=False)}
        own_T = []
        for key in owned:
            number, first = firsts[key]
            in_stream = torch.arange(first, first + self.sizes[key])
            own_T.append((number * R + in_stream // parts[number]) * longest + in_stream % parts[number])
        own_T = torch.cat(own_T) if owned else torch.zeros(1, dtype=torch.int64)  # a padding token takes any result

        number, r = divmod(dist.get_rank(), R)
        lengths = [n for key in row[number] for n in self.groups[key]]
        starts = [start for key in row[number] for start in self.starts[key]]
        sequences = len(lengths)
        if padding := parts[number] * R - sum(lengths):  # a sequence of zeros makes the parts equal
            lengths.append(padding)
            starts.append(len(self.flat) - R - 1)
        here = slice(r * parts[number], (r + 1) * parts[number])
        position_ids_T = torch.cat([torch.arange(n) for n in lengths])[here]
        ids_T = torch.tensor(starts).repeat_interleave(torch.tensor(lengths))[here] + position_ids_T
        ids_T, position_ids_T = ids_T.to(device), position_ids_T.to(device)
        tokens = Tokens(self.flat[ids_T].long(), self.flat[ids_T + 1].long(), position_ids_T, lengths, sequences)
        tokens.own_T, tokens.longest, tokens.context_group = own_T.to(device), longest, _context_group
        return tokens


def scatter_back(streams_t: tuple[Tensor, ...], computed: Tokens) -> tuple[Tensor, ...]:
    """Return computed streams [t] on this rank's own tokens, [T]; their gradients go to the ranks that computed them.

    All streams travel in one collective: whichever of them a loss uses, all ranks meet in its backward. Collective.
    """
    if computed.own_T is None:
        return streams_t
    stacked = torch.stack([x_t.to(streams_t[0].dtype) for x_t in streams_t], dim=1)
    padded = torch.nn.functional.pad(stacked, (0, 0, 0, computed.longest - len(stacked)))
    own = all_gather(padded, 0, dist.group.WORLD)[computed.own_T]
    # Copies: the output of a module may be written to, and FSDP would not see that through a view.
    return tuple(x_T.to(x_t.dtype, copy=True) for x_T, x_t in zip(own.unbind(1), streams_t, strict=True))


def send_to_computing_rank(x_T: Tensor, computed: Tokens) -> Tensor:
    """Return an integer stream of own tokens, [T], on the tokens that this rank computes, [t]: `scatter_back` reversed,
    without gradient. `x_T` is 0 on padding tokens, and so is the result. Collective."""
    if computed.own_T is None:
        return x_T
    of_all_ranks = x_T.new_zeros(dist.get_world_size() * computed.longest)
    of_all_ranks[computed.own_T] = x_T
    dist.all_reduce(of_all_ranks)
    return of_all_ranks.view(-1, computed.longest)[dist.get_rank()][: len(computed.targets_T)]


# ---- attention in a context group ----


def exchange(attention: Callable) -> Callable:
    """Turn an attention function of all tokens and some heads into one of some tokens and all heads."""

    @functools.wraps(attention)
    def exchanged(module, query, key, value, *args, **kwargs):
        if "pack" not in kwargs or (group := kwargs["pack"].context_group) is None:
            return attention(module, query, key, value, *args, **kwargs)
        R = dist.get_world_size(group)
        copies = math.lcm(key.shape[1], R) // key.shape[1]  # fewer key heads than ranks: each goes to several
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        out, weights = attention(module, *(_to_heads(x, group, R) for x in (query, key, value)), *args, **kwargs)
        # [1, all tokens, H / R, d] -> [R tokens, t, H / R, d] -> [R heads, t, H / R, d] -> [1, t, H, d]
        out = collectives.all_to_all_single_autograd(out[0].unflatten(0, (R, -1)).contiguous(), None, None, group)
        return out.transpose(0, 1).flatten(1, 2)[None], weights

    return exchanged


def _to_heads(x: Tensor, group: dist.ProcessGroup, R: int) -> Tensor:
    """Exchange tokens for heads: [1, H, t, d] -> [1, H / R, all tokens, d]."""
    x = collectives.all_to_all_single_autograd(x[0].unflatten(0, (R, -1)).contiguous(), None, None, group)
    return x.transpose(0, 1).flatten(1, 2)[None]
