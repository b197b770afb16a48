"""Queue of the prompts of a run: prompts in flight, prompts of a step, and prompts that a resumed run samples again.

Prompts are numbered in the order of the draws. Prompt d belongs to training rank d % ranks. A step takes the oldest
prompts. With `--oversample`, more prompts are in flight than a step needs. The step then takes the oldest complete
ones, equally many from each rank. The others stay in flight, but only as long as no token becomes older than
`--max_staleness` steps. So each drawn prompt is trained on exactly once, and over a run no length is favoured.
"""

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice

from common.config.groups import OnlineArgs
from common.data.order import Order


@dataclass
class PromptBatch:
    """Batch of `prompts_per_step` prompts that are drawn together, and the state from which to draw them again."""

    index: int
    """number of the batch in this run, from 0"""
    cursor: dict
    """state of the row order before this batch"""
    rows: list[int]
    """indices of the data rows"""

    @property
    def numbers(self) -> range:
        return range(self.index * len(self.rows), (self.index + 1) * len(self.rows))


class PromptQueue:
    """Queue of prompt numbers, without texts and completions. It is the same on all ranks, except for `rank`."""

    def __init__(self, order: Order, args: OnlineArgs, rank: int, ranks: int, prefetch_steps: int):
        """`prefetch_steps`: number of later steps whose prompts may be in flight together with those of this step."""
        self.order, self.rank, self.ranks, self.prefetch_steps = order, rank, ranks, prefetch_steps
        self.prompts_per_step, self.max_staleness = args.prompts_per_step, args.max_staleness
        self.oversample = args.oversample
        self.lanes = ranks if self.oversample > 1 else 1  # lane: number % lanes; a step takes the oldest of each lane
        self.next_batch = 0
        self.pending: deque[PromptBatch] = deque()  # batches of which an earlier step has not taken all prompts
        self.in_flight: dict[int, int] = {}  # prompt -> the step in which its sampling began
        self.used: set[int] = set()  # prompts of `pending` that a step has taken
        self.step, self.taken = -1, []  # the current step, and the prompts that it has taken
        self.size = self.prompts_per_step  # number of prompts to take next, on all ranks
        self.positions: Sequence[int] = range(rank, self.size, ranks)
        """indices of this rank's prompts in the last selection of all ranks"""
        self.selected: list[int] = []  # prompts of the last selection of all ranks

    # ---- one rollout, in this order ----

    def draw(self, step: int, total_steps: int, size: int | None = None) -> list[int]:
        """Return the prompts of all ranks whose sampling begins now. Then `size` prompts (default: `prompts_per_step`)
        are in flight for step `step`, counted from 0, and enough for the steps after it. With oversampling, `size` is
        rounded up to a multiple of the number of ranks."""
        if step != self.step:
            self.step, self.taken = step, []
            while self.pending and self.used.issuperset(self.pending[0].numbers):
                self.used.difference_update(self.pending.popleft().numbers)
        self.size = size or self.prompts_per_step
        self.size += -self.size % self.lanes
        further = round((self.prefetch_steps + self.oversample - 1) * self.prompts_per_step)
        further = min(further, max(0, total_steps - step - 1) * self.prompts_per_step)
        drawn: list[int] = []
        for lane in range(self.lanes):
            in_flight = sum(number % self.lanes == lane for number in self.in_flight)
            unbegun = (number for number in self._unbegun() if number % self.lanes == lane)
            drawn += islice(unbegun, max(0, (self.size + further) // self.lanes - in_flight))
        drawn.sort()
        self.in_flight |= dict.fromkeys(drawn, step)
        return drawn

    def choose(self, complete: Container[int]) -> list[int] | None:
        """Return this rank's prompts to train on, oldest first, or None while too few are `complete` or a remaining one
        would exceed `max_staleness`."""
        candidates, needed = self._candidates_here()
        found = [number for number in candidates if number in complete]
        if len(found) == len(candidates):
            return found[:needed]
        if len(found) < needed:
            return None
        chosen, per_step = found[:needed], self.prompts_per_step // self.ranks
        left = [number for number in candidates if number not in chosen]
        late = (self.in_flight[x] + self.max_staleness < self.step + 1 + i // per_step for i, x in enumerate(left))
        return None if any(late) else chosen

    def fraction_complete(self, complete: Container[int]) -> float:
        """Return the number of complete prompts of this rank, divided by the number that the step needs."""
        candidates, needed = self._candidates_here()
        return sum(number in complete for number in candidates) / needed if needed else 1.0

    def take(self, chosen: Iterable[int]) -> None:
        """Mark the prompts that all ranks have chosen as trained on, and update `positions`."""
        self.positions = range(self.rank, self.size, self.ranks)
        if self.oversample == 1:  # the ranks may have different numbers of prompts
            self.positions = [i for i, number in enumerate(self._candidates()) if self.is_here(number)]
        self.selected = list(chosen)
        for number in self.selected:
            del self.in_flight[number]
            self.used.add(number)
            self.taken.append(number)

    def undo_step(self) -> None:
        """Mark the prompts of the current step as not taken: a run that stops now samples them again after a resume."""
        self.used.difference_update(self.taken)

    # ---- numbers ----

    def is_here(self, number: int) -> bool:
        """Return whether a prompt belongs to this rank."""
        return number % self.ranks == self.rank

    def row(self, number: int) -> int:
        """Return the index of the data row of a pending prompt."""
        batch, position = divmod(number, self.prompts_per_step)
        return self.pending[batch - self.pending[0].index].rows[position]

    @property
    def rows(self) -> list[int]:
        """Indices of the data rows of the last selection of all ranks, in the order of `positions`."""
        lanes = [sorted(x for x in self.selected if x % self.lanes == lane) for lane in range(self.lanes)]
        return [self.row(number) for number in chain(*zip(*lanes, strict=True))]

    def _unbegun(self) -> Iterator[int]:
        """Yield prompts that are neither in flight nor used, first from pending batches, then from new ones."""
        for i in count():
            if i == len(self.pending):
                cursor = self.order.state_dict()
                self.pending.append(PromptBatch(self.next_batch, cursor, self.order.draw(self.prompts_per_step)))
                self.next_batch += 1
            yield from (x for x in self.pending[i].numbers if x not in self.in_flight and x not in self.used)

    def _candidates(self) -> list[int]:
        """Return the prompts of all ranks that the step may take, oldest first."""
        oldest_first = sorted(self.in_flight)
        return oldest_first if self.oversample > 1 else oldest_first[: self.size]

    def _candidates_here(self) -> tuple[list[int], int]:
        """Return the prompts of this rank that the step may take, oldest first, and the number that it takes."""
        here = [number for number in self._candidates() if self.is_here(number)]
        return here, self.size // self.ranks if self.oversample > 1 else len(here)

    # ---- resume ----

    @property
    def cursor(self) -> dict:
        """State of the row order before the oldest prompt that is not taken yet."""
        return self.state_dict()["order"]

    def state_dict(self) -> dict:
        """Return the position in the data. After a resume, prompts that were drawn but not taken are sampled again."""
        oldest = next((batch for batch in self.pending if not self.used.issuperset(batch.numbers)), None)
        if oldest is None:
            return dict(number=self.next_batch, order=self.order.state_dict())
        used = sorted(number for number in self.used if number >= oldest.numbers.start)
        return dict(number=oldest.index, order=oldest.cursor) | (dict(used=used) if used else {})

    def load_state_dict(self, state: dict) -> None:
        self.next_batch, self.used = state["number"], set(state.get("used", ()))
        self.order.load_state_dict(state["order"])
