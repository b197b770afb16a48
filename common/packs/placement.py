"""Placement: which rank trains on which samples.

FSDP makes every micro-batch wait for its slowest rank. Therefore all samples of a step are divided
among the ranks by their cost. A context group (common/parallel/context.py) counts as one rank.

A key (owner, i) names item i of rank `owner`: a group, or a part of one. A micro-batch of all ranks
has one bin of keys for each rank."""

import bisect
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from common.parallel.distributed import context_group_size

GroupKey = tuple[int, int]
MicroBatches = list[list[list[GroupKey]]]  # the keys of each bin of each micro-batch
# A sequence of n tokens costs n + ATTENTION n^2. ATTENTION is heads x head width x layers /
# weights: 2e-5 in a model of 8B, 1e-4 in one of 0.6B.
ATTENTION = 4e-5
# A sequence copies the keys of its shared prefix: each copy is less than 1/8 of a token's memory.
KEY_COPY = 1 / 8


class GroupShape(NamedTuple):
    """The lengths of the sequences of a group, or of a part of it, in targets. Sequence n begins
    with the same `shared[n]` targets as the sequence before it; they are computed once."""

    lengths: list[int]
    shared: list[int]  # 0 for the first sequence; less than its length for every other one

    @property
    def tokens(self) -> int:
        """Number of computed tokens."""
        return sum(self.lengths) - sum(self.shared)

    @property
    def size(self) -> int:
        """Room that the group takes in a pack: its tokens, and copies of shared keys."""
        return self.tokens + math.ceil(KEY_COPY * sum(self.shared))

    @property
    def cost(self) -> float:
        """Compute cost, in units of one token of a short sequence."""
        pairs = sum(n * n for n in self.lengths) - sum(n * n for n in self.shared)
        return self.tokens + ATTENTION * pairs

    def parts(self, limit: int) -> list["GroupShape"]:
        """Split the group in order into parts of at most this size, or of one sequence. A sequence
        begins a new part if it does not fit, or shares nothing with the one before it."""
        parts: list[GroupShape] = []
        for length, prefix in zip(*self, strict=True):
            if prefix:
                longer = GroupShape([*parts[-1].lengths, length], [*parts[-1].shared, prefix])
                if longer.size <= limit:
                    parts[-1] = longer
                    continue
            parts.append(GroupShape([length], [0]))
        return parts


def place_groups(
    ranks: Sequence[list[GroupShape]], num_bins: int, max_tokens: int, together: bool
) -> tuple[dict[GroupKey, GroupShape], MicroBatches]:
    """Assign the groups of all ranks to micro-batches of `num_bins` bins, one for each context
    group. Return the groups, or their parts, by key, and the micro-batches.

    A group is split into parts unless its sequences have to stay `together`. Parts are large, since
    each computes its prefix again, but none of several sequences is above a bin's equal share of
    all tokens. A bin holds at most `max_tokens`, and the bins of a micro-batch cost about the same.
    There are as few micro-batches as best fit, with the largest first, needs."""
    if not together:
        total = sum(group.size for groups in ranks for group in groups)
        limit = min(max_tokens, total // num_bins + 1)
        ranks = [[part for group in groups for part in group.parts(limit)] for groups in ranks]
    groups = {(r, i): group for r, rank in enumerate(ranks) for i, group in enumerate(rank)}
    bins = best_fit(groups, max_tokens)
    count = max(1, math.ceil(len(bins) / num_bins))
    if num_bins > 1:
        even = longest_first(groups, count * num_bins)
        if all(sum(groups[key].size for key in keys) <= max_tokens for keys in even):
            bins = even
    bins += [[] for _ in range(count * num_bins - len(bins))]
    bins.sort(key=lambda keys: sum(groups[key].cost for key in keys), reverse=True)
    micro_batches = [bins[first : first + num_bins] for first in range(0, len(bins), num_bins)]
    return groups, micro_batches


def best_fit(groups: dict[GroupKey, GroupShape], max_tokens: int) -> list[list[GroupKey]]:
    """Put each group, the largest first, into the bin that it fills best."""
    bins: list[list[GroupKey]] = []
    room: list[tuple[int, int]] = []  # sorted pairs (space left, bin)
    for key in sorted(groups, key=lambda key: groups[key].size, reverse=True):
        size = groups[key].size
        if size > max_tokens:
            count, context_ranks = len(groups[key].lengths), context_group_size()
            what = "a sequence has" if count == 1 else f"{count} sequences to keep together take"
            flags = f"--pack_tokens {max_tokens // context_ranks}"
            if context_ranks > 1:
                flags += f" x --context_ranks {context_ranks}"
            advice = "raise --pack_tokens or --context_ranks"
            raise ValueError(f"{flags}: {what} {size} tokens; {advice}")
        at = bisect.bisect_left(room, (size, -1))
        if at == len(room):  # it needs a new bin
            room.append((max_tokens, len(bins)))
            bins.append([])
        space, i = room.pop(at)
        bins[i].append(key)
        bisect.insort(room, (space - size, i))
    return bins


def longest_first(groups: dict[GroupKey, GroupShape], num_bins: int) -> list[list[GroupKey]]:
    """Put each group, the most expensive first, into the bin that is cheapest so far."""
    bins: list[list[GroupKey]] = [[] for _ in range(num_bins)]
    loads = [(0.0, i) for i in range(num_bins)]
    for key in sorted(groups, key=lambda key: groups[key].cost, reverse=True):
        load, i = loads[0]
        bins[i].append(key)
        heapq.heapreplace(loads, (load + groups[key].cost, i))
    return bins
