"""Numbers of the prompts of a run: which a step takes, which are in flight for later steps, and
which a resumed run samples again.

Prompts are numbered in the order of the draws. Prompt d belongs to training rank d % ranks."""

from collections import deque
from typing import NamedTuple

from common.data.order import Order


class PromptBatch(NamedTuple):
    """`prompts_per_step` prompts that are drawn together."""

    cursor: dict
    """position of the row order before this batch"""
    rows: list[int]
    """indices of the data rows"""


class PromptQueue:
    """It is the same on all ranks, except for `rank`."""

    def __init__(self, order: Order, prompts_per_step: int, rank: int, ranks: int, steps: int):
        """`steps`: number of later steps whose prompts are in flight together with those of this
        step."""
        self.order = order
        self.prompts_per_step = prompts_per_step
        self.rank = rank
        self.ranks = ranks
        self.ahead = steps * prompts_per_step
        self.step = -1  # the current step
        self.first = 0  # its first prompt
        self.selection = range(0)  # prompts of all ranks that were taken last
        self.begun = 0  # all smaller numbers are in flight or taken
        self.batches: deque[PromptBatch] = deque()  # from the one with `first`
        self.drawn = 0  # number of the batch after these

    def take(self, step: int, total_steps: int, size: int | None = None) -> range:
        """Take the next `size` prompts (default: `prompts_per_step`) for step `step`, counted from
        0. Return the prompts of all ranks whose sampling begins now, for this step and for those
        after it."""
        if step != self.step:
            self.step = step
            self.first = self.selection.stop
            self.batches = deque(self._untaken())
        start = self.selection.stop
        self.selection = range(start, start + (size or self.prompts_per_step))
        steps_left = max(0, total_steps - step - 1)
        in_flight = min(self.ahead, steps_left * self.prompts_per_step)
        begun = range(self.begun, max(self.begun, self.selection.stop + in_flight))
        self.begun = begun.stop
        while self.drawn * self.prompts_per_step < self.begun:
            cursor = self.order.cursor
            self.batches.append(PromptBatch(cursor, self.order.draw(self.prompts_per_step)))
            self.drawn += 1
        return begun

    def undo_step(self) -> None:
        """Mark the prompts of the current step as not taken: a run that stops now samples them
        again after a resume."""
        self.selection = range(self.first, self.first)

    # ---- numbers ----

    def is_here(self, number: int) -> bool:
        """Return whether a prompt belongs to this rank."""
        return number % self.ranks == self.rank

    def row(self, number: int) -> int:
        """Return the index of the data row of a prompt, which no earlier step has taken."""
        batch, position = divmod(number, self.prompts_per_step)
        return self.batches[batch - self.drawn].rows[position]

    @property
    def own(self) -> list[int]:
        """This rank's prompts of the last selection."""
        return [number for number in self.selection if self.is_here(number)]

    @property
    def positions(self) -> list[int]:
        """Indices of `own` in the last selection of all ranks."""
        return [number - self.selection.start for number in self.own]

    @property
    def rows(self) -> list[int]:
        """Indices of the data rows of the last selection of all ranks."""
        return [self.row(number) for number in self.selection]

    # ---- resume ----

    def _untaken(self) -> list[PromptBatch]:
        """Return the drawn batches from the oldest one of which not all prompts are taken."""
        count = self.drawn - self.selection.stop // self.prompts_per_step
        return list(self.batches)[len(self.batches) - count :]

    @property
    def cursor(self) -> dict:
        """Position of the row order before the batch of the oldest prompt that is not taken."""
        return next((batch.cursor for batch in self._untaken()), self.order.cursor)

    def state_dict(self) -> dict:
        """Return the position in the data. After a resume, prompts that were drawn but not taken
        are sampled again."""
        batches = [tuple(batch) for batch in self._untaken()]
        return dict(taken=self.selection.stop, batches=batches, order=self.order.state_dict())

    def load_state_dict(self, state: dict) -> None:
        self.first = self.begun = state["taken"]
        self.selection = range(self.first, self.first)
        self.batches = deque(PromptBatch(*batch) for batch in state["batches"])
        self.drawn = self.first // self.prompts_per_step + len(self.batches)
        self.order.load_state_dict(state["order"])
