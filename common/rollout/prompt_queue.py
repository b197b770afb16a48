"""Queue of the prompts of a run: prompts in flight, prompts of a step, and prompts that a resumed
run samples again.

Prompts are numbered in the order of the draws. Prompt d belongs to training rank d % ranks. A step
takes the oldest prompts. With `--oversample`, more prompts are in flight than a step needs. The
step then takes the oldest complete ones, equally many from each rank. The others stay in flight,
but only as long as no token becomes older than `--max_staleness` steps. So each drawn prompt is
trained on exactly once, and over a run no length is favoured."""

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, dropwhile

from common.config.online import OnlineArgs
from common.data.order import Order


@dataclass
class PromptBatch:
    """Batch of `prompts_per_step` prompts that are drawn together."""

    index: int
    """number of the batch in this run, from 0"""
    cursor: dict
    """position of the row order before this batch"""
    rows: list[int]
    """indices of the data rows"""

    @property
    def numbers(self) -> range:
        return range(self.index * len(self.rows), (self.index + 1) * len(self.rows))


class PromptQueue:
    """Queue of prompt numbers, without texts and completions. It is the same on all ranks, except
    for `rank`."""

    def __init__(self, order: Order, args: OnlineArgs, rank: int, ranks: int, prefetch_steps: int):
        """`prefetch_steps`: number of later steps whose prompts may be in flight together with
        those of this step."""
        self.order = order
        self.rank = rank
        self.ranks = ranks
        self.prompts_per_step = args.prompts_per_step
        self.max_staleness = args.max_staleness
        self.oversamples = args.oversample > 1
        # number of prompts of later steps that may be in flight
        self.ahead = round((prefetch_steps + args.oversample - 1) * args.prompts_per_step)
        # lane: number % lanes; a step takes the oldest of each lane
        self.lanes = ranks if self.oversamples else 1
        self.next_batch = 0
        # batches of which an earlier step has not taken all prompts
        self.pending: deque[PromptBatch] = deque()
        self.in_flight: dict[int, int] = {}  # prompt -> the step in which its sampling began
        self.used: set[int] = set()  # prompts of `pending` that a step has taken
        # prompts of this rank that the step may take, oldest first
        self.candidates: list[int] = []
        self.step = -1  # the current step
        self.taken: list[int] = []  # prompts that the current step has taken
        self.size = self.prompts_per_step  # number of prompts to take next, on all ranks
        # prompts of all ranks that were taken last, in the order of the data or, with
        # oversampling, one of each rank in turn
        self.selection: Sequence[int] = range(self.size)

    # ---- one rollout, in this order ----

    def draw(self, step: int, total_steps: int, size: int | None = None) -> list[int]:
        """Return the prompts of all ranks whose sampling begins now. Then `size` prompts (default:
        `prompts_per_step`) are in flight for step `step`, counted from 0, and enough for the steps
        after it. With oversampling, `size` is rounded up to a multiple of the number of ranks."""
        if step != self.step:
            self.step = step
            self.taken = []
            while self.pending and self.used.issuperset(self.pending[0].numbers):
                self.used.difference_update(self.pending.popleft().numbers)
        self.size = size or self.prompts_per_step
        self.size += -self.size % self.lanes
        ahead = min(self.ahead, max(0, total_steps - step - 1) * self.prompts_per_step)
        per_lane = (self.size + ahead) // self.lanes
        room = [per_lane] * self.lanes
        for number in self.in_flight:
            room[number % self.lanes] -= 1
        lacking = sum(max(0, prompts) for prompts in room)
        drawn: list[int] = []
        unbegun = self._unbegun()
        while len(drawn) < lacking:
            number = next(unbegun)
            lane = number % self.lanes
            if room[lane] > 0:
                room[lane] -= 1
                drawn.append(number)
        self.in_flight |= dict.fromkeys(drawn, step)
        oldest_first = sorted(self.in_flight)
        if not self.oversamples:
            oldest_first = oldest_first[: self.size]
        self.candidates = [number for number in oldest_first if self.is_here(number)]
        return drawn

    def choose(self, complete: Container[int]) -> list[int] | None:
        """Return this rank's prompts to train on, oldest first, or None while too few are
        `complete` or a remaining one would exceed `max_staleness`."""
        complete_here = [number for number in self.candidates if number in complete]
        chosen = complete_here[: self._needed]
        if len(complete_here) == len(self.candidates):
            return chosen
        if len(chosen) < self._needed:
            return None
        per_step = self.prompts_per_step // self.ranks
        remaining = [number for number in self.candidates if number not in chosen]
        for i, number in enumerate(remaining):
            step_of_use = self.step + 1 + i // per_step
            if step_of_use - self.in_flight[number] > self.max_staleness:
                return None
        return chosen

    def fraction_complete(self, complete: Container[int]) -> float:
        """Return the number of complete prompts of this rank, divided by the number that the step
        needs."""
        count = sum(number in complete for number in self.candidates)
        return count / self._needed if self._needed else 1.0

    def take(self, chosen: Iterable[int]) -> None:
        """Mark the prompts that all ranks have chosen as trained on."""
        lanes: list[list[int]] = [[] for _ in range(self.lanes)]
        for number in sorted(chosen):
            lanes[number % self.lanes].append(number)
            del self.in_flight[number]
        self.selection = list(chain(*zip(*lanes, strict=True)))
        self.used.update(self.selection)
        self.taken += self.selection

    def undo_step(self) -> None:
        """Mark the prompts of the current step as not taken: a run that stops now samples them
        again after a resume."""
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
    def positions(self) -> list[int]:
        """Indices of this rank's prompts in the last selection of all ranks."""
        return [i for i, number in enumerate(self.selection) if self.is_here(number)]

    @property
    def rows(self) -> list[int]:
        """Indices of the data rows of the last selection of all ranks, in the order of
        `positions`."""
        return [self.row(number) for number in self.selection]

    def _unbegun(self) -> Iterator[int]:
        """Yield prompts that are neither in flight nor used, first from pending batches, then from
        new ones."""
        for i in count():
            if i == len(self.pending):
                cursor = self.order.cursor
                rows = self.order.draw(self.prompts_per_step)
                self.pending.append(PromptBatch(self.next_batch, cursor, rows))
                self.next_batch += 1
            for number in self.pending[i].numbers:
                if number not in self.in_flight and number not in self.used:
                    yield number

    @property
    def _needed(self) -> int:
        """Number of this rank's candidates that the step takes."""
        return self.size // self.ranks if self.oversamples else len(self.candidates)

    # ---- resume ----

    def _unfinished(self) -> list[PromptBatch]:
        """Return the drawn batches from the oldest one of which not all prompts are taken."""
        return list(dropwhile(lambda b: self.used.issuperset(b.numbers), self.pending))

    @property
    def cursor(self) -> dict:
        """Position of the row order before the oldest prompt that is not taken yet."""
        return next((batch.cursor for batch in self._unfinished()), self.order.cursor)

    def state_dict(self) -> dict:
        """Return the position in the data. After a resume, prompts that were drawn but not taken
        are sampled again."""
        batches = self._unfinished()
        number = self.next_batch - len(batches)
        state = dict(number=number, order=self.order.state_dict())
        if batches:
            state["batches"] = [(batch.cursor, batch.rows) for batch in batches]
        used = sorted(n for n in self.used if n >= number * self.prompts_per_step)
        return state | dict(used=used) if used else state

    def load_state_dict(self, state: dict) -> None:
        first = state["number"]
        batches = state.get("batches", ())  # earlier versions drew them again
        self.pending = deque(PromptBatch(first + i, *batch) for i, batch in enumerate(batches))
        self.next_batch = first + len(batches)
        self.used = set(state.get("used", ()))
        self.order.load_state_dict(state["order"])
