"""Who computes is not who owns. A rank owns samples: their masks, streams and losses. Which rank runs the model on them
is decided here, by the work that they are; behind the model every rank gets the streams of its own tokens back.

FSDP makes every micro-batch wait for its slowest rank: balanced, nobody waits long (`bench/balance.py`). With
`--context_ranks` R neighbours, a unit, run each pack together: its stream is cut into R equal parts, and around
attention, the one thing that is not token by token, tokens are exchanged for heads (DeepSpeed-Ulysses,
arXiv:2309.14509). A sequence may then be R times `--pack_tokens`.

Shapes: T own tokens, t computed tokens, H heads, d their width. A key is (owner, number of its group).
"""

import bisect
import functools
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

Key = tuple[int, int]
# A sequence of n tokens is work for n + ATTENTION n^2. It is heads x head_dim x layers / weights: 2e-5 in an 8B model,
# 1e-4 in one of 0.6B.
ATTENTION = 4e-5

all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_unit: dist.ProcessGroup | None = None  # of the ranks that run packs together with this one


def setup(context_ranks: int, minutes: float) -> None:
    """Every `context_ranks` neighbours become a unit, who wait for each other so many minutes. Collective, when first
    called."""
    global _unit
    if context_ranks > 1 and _unit is None:
        for first in range(0, dist.get_world_size(), context_ranks):  # every rank makes all groups
            unit = list(range(first, first + context_ranks))
            group = dist.new_group(unit, timeout=timedelta(minutes=minutes))
            _unit = group if first <= dist.get_rank() < first + context_ranks else _unit


def unit_size() -> int:
    return 1 if _unit is None else dist.get_world_size(_unit)


@dataclass
class Stream:
    """What a model runs on. T is the number of targets."""

    input_ids_T: Tensor  # int64
    targets_T: Tensor  # int64
    position_ids_T: Tensor  # int64, restarts at 0 in every sequence
    cu_seqlens_N1: Tensor  # int32, N + 1 offsets: sequence n is [cu_seqlens[n], cu_seqlens[n + 1])
    offsets: list[int]  # cu_seqlens_N1 on the host
    max_seqlen: int  # on the host too: no kernel launch waits for the device
    sequences: int  # N, or one less where the last is a filler, nobody's
    unit: dist.ProcessGroup | None = field(default=None, kw_only=True)  # whose ranks have one part each of these tokens


# ---- which rank computes what ----


def work(lengths: list[int]) -> float:
    """Of sequences, in tokens of a short one."""
    return sum(n + ATTENTION * n * n for n in lengths)


def assign(groups: dict[Key, list[int]], units: int, room: int) -> list[list[list[Key]]]:
    """Groups of sequences, known by their lengths, to rows of one bin for each unit. A group stays whole, a bin has at
    most `room` tokens, the bins of a row are of like work, and there are as few rows as best-fit decreasing needs.

    Raises `ValueError` for a group that does not fit.
    """
    sizes, bins, free = {key: sum(lengths) for key, lengths in groups.items()}, [], []  # free: (room left, bin), sorted
    for key in sorted(groups, key=lambda key: (-sizes[key], key)):
        if sizes[key] > room:
            what = "a sequence" if len(groups[key]) == 1 else f"{len(groups[key])} sequences that belong together"
            times = f" x --context_ranks {unit_size()}" if unit_size() > 1 else ""
            raise ValueError(f"{what} of {sizes[key]} tokens do not fit in --pack_tokens {room // unit_size()}{times}")
        at = bisect.bisect_left(free, (sizes[key], -1))
        left, i = free.pop(at) if at < len(free) else (room, len(bins))
        if i == len(bins):
            bins.append([])
        bins[i].append(key)
        bisect.insort(free, (left - sizes[key], i))
    rows = max(1, math.ceil(len(bins) / units))
    if units > 1:  # longest processing time first, if no bin overflows by it
        costs = {key: work(lengths) for key, lengths in groups.items()}
        even, loads = [[] for _ in range(rows * units)], [(0.0, i) for i in range(rows * units)]
        for key in sorted(groups, key=lambda key: (-costs[key], key)):
            load, i = loads[0]
            even[i].append(key)
            heapq.heapreplace(loads, (load + costs[key], i))
        if all(sum(sizes[key] for key in keys) <= room for keys in even):
            bins = even
    bins += [[] for _ in range(rows * units - len(bins))]
    bins.sort(key=lambda keys: -sum(work(groups[key]) for key in keys))
    return [bins[first : first + units] for first in range(0, rows * units, units)]


# ---- what a rank computes of a row, and where its own tokens are then ----


@dataclass
class Shared(Stream):
    """What this rank computes of a row."""

    own_T: Tensor  # int64: where this rank's own tokens are among those that all ranks computed
    longest: int  # most tokens that a rank computes


class Ids:
    """The token ids of all ranks' sequences. Collective: they travel as one tensor."""

    def __init__(self, ids: list[list[int]], groups: dict[Key, list[int]], device: torch.device):
        totals = [0] * dist.get_world_size()
        self.starts, self.groups = {}, groups  # starts: of a group's first sequence
        for key in sorted(groups):  # of each rank, as they are numbered
            self.starts[key] = totals[key[0]]
            totals[key[0]] += sum(groups[key]) + len(groups[key])
        width, spare = max(totals), unit_size() + 1  # spare: what fillers read
        mine = torch.zeros(width, dtype=torch.int32)
        mine[: totals[dist.get_rank()]] = torch.tensor([i for sequence in ids for i in sequence], dtype=torch.int32)
        self.flat = torch.zeros(width * len(totals) + spare, dtype=torch.int32, device=device)
        all_gather_into(self.flat[:-spare], mine.to(device))
        self.starts = {key: key[0] * width + start for key, start in self.starts.items()}

    def shared(self, row: list[list[Key]], own: list[Key]) -> Shared:
        """What this rank computes of a row, in which it owns the groups `own`."""
        R, device = unit_size(), self.flat.device
        totals = [max(1, sum(sum(self.groups[key]) for key in keys)) for keys in row]
        parts = [math.ceil(total / R) for total in totals]
        places = {}  # of a group's first token: among those of all ranks if parts were not cut, and the part's length
        for unit, keys in enumerate(row):
            at = 0
            for key in keys:
                places[key] = unit, at
                at += sum(self.groups[key])
        longest, own_T = max(parts), []
        for key in own:
            unit, at = places[key]
            in_unit = torch.arange(at, at + sum(self.groups[key]))
            rank = unit * R + in_unit // parts[unit]
            own_T.append(rank * longest + in_unit % parts[unit])
        own_T = torch.cat(own_T) if own else torch.zeros(1, dtype=torch.int64)  # a filler's token has no owner

        unit, r = divmod(dist.get_rank(), R)
        lengths, starts = [], []
        for key in row[unit]:
            start = self.starts[key]
            for n in self.groups[key]:
                lengths.append(n)
                starts.append(start)
                start += n + 1
        if filler := parts[unit] * R - sum(lengths):  # one more sequence, nobody's
            lengths.append(filler)
            starts.append(len(self.flat) - R - 1)
        lengths_N, cu_seqlens_N1 = torch.tensor(lengths), torch.zeros(len(lengths) + 1, dtype=torch.int32)
        cu_seqlens_N1[1:] = lengths_N.cumsum(0)
        position_ids_T = torch.arange(sum(lengths)) - cu_seqlens_N1[:-1].repeat_interleave(lengths_N)
        here = slice(r * parts[unit], (r + 1) * parts[unit])
        position_ids_T = position_ids_T[here]
        ids_T = (torch.tensor(starts).repeat_interleave(lengths_N)[here] + position_ids_T).to(device)
        return Shared(
            input_ids_T=self.flat[ids_T].long(),
            targets_T=self.flat[ids_T + 1].long(),
            position_ids_T=position_ids_T.to(device),
            cu_seqlens_N1=cu_seqlens_N1.to(device),
            offsets=cu_seqlens_N1.tolist(),
            max_seqlen=max(lengths),
            sequences=len(lengths) - (filler > 0),
            unit=_unit,
            own_T=own_T.to(device),
            longest=longest,
        )


def own(streams_t: tuple[Tensor, ...], shared: Shared | None) -> tuple[Tensor, ...]:
    """Computed streams, [t], as those of this rank's own tokens, [T]. Their gradients go back to who computed them.

    One collective for all of them: whichever a loss uses, all ranks meet in its backward. Collective.
    """
    if shared is None:
        return streams_t
    both = torch.stack([x_t.to(streams_t[0].dtype) for x_t in streams_t], dim=1)
    padded = torch.nn.functional.pad(both, (0, 0, 0, shared.longest - len(both)))
    owned = all_gather(padded, 0, dist.group.WORLD)[shared.own_T]
    # Copies: what a module returns may be written to, and FSDP would not see it through a view.
    return tuple(x_T.to(x_t.dtype, copy=True) for x_T, x_t in zip(owned.unbind(1), streams_t, strict=True))


def lend(x_T: Tensor, shared: Shared | None) -> Tensor:
    """The way back of `own`, without gradient: an integer stream of this rank's own tokens, 0 on a filler, as that of
    the tokens that it computes, [t]; 0 on nobody's. Collective."""
    if shared is None:
        return x_T
    everyones = x_T.new_zeros(dist.get_world_size() * shared.longest)
    everyones[shared.own_T] = x_T
    dist.all_reduce(everyones)
    return everyones.view(-1, shared.longest)[dist.get_rank()][: len(shared.targets_T)]


# ---- attention of a unit ----


def exchange(attention: Callable) -> Callable:
    """An attention function of all tokens and some heads, made one of some tokens and all heads."""

    @functools.wraps(attention)
    def exchanged(module, query, key, value, *args, **kwargs):
        if "pack" not in kwargs or (unit := kwargs["pack"].unit) is None:
            return attention(module, query, key, value, *args, **kwargs)
        R = dist.get_world_size(unit)
        copies = math.lcm(key.shape[1], R) // key.shape[1]  # fewer heads of keys than ranks: each goes to several
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        out, weights = attention(module, *(_to_heads(x, unit, R) for x in (query, key, value)), *args, **kwargs)
        # [1, all tokens, H / R, d] -> [R tokens, t, H / R, d] -> [R heads, t, H / R, d] -> [1, t, H, d]
        out = collectives.all_to_all_single_autograd(out[0].unflatten(0, (R, -1)).contiguous(), None, None, unit)
        return out.transpose(0, 1).flatten(1, 2)[None], weights

    return exchanged


def _to_heads(x: Tensor, unit: dist.ProcessGroup, R: int) -> Tensor:
    """[1, H, t, d] -> [1, H / R, all tokens, d]."""
    x = collectives.all_to_all_single_autograd(x[0].unflatten(0, (R, -1)).contiguous(), None, None, unit)
    return x.transpose(0, 1).flatten(1, 2)[None]
