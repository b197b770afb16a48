"""The prompt queue: the rows of each step, their division among ranks, stop and resume."""

from itertools import chain

import pytest

from common.data.order import Order, epochs_of
from common.rollout.prompt_queue import PromptQueue

ROWS = 10
ENDLESS = 1000


class Queues:
    """The queues of all ranks."""

    def __init__(self, ranks: int = 1, ahead: int = 0):
        self.queues = [
            PromptQueue(Order({"": range(ROWS)}, 0), 4, rank, ranks, steps=ahead)
            for rank in range(ranks)
        ]

    def begin(self, step: int, total: int = ENDLESS, size: int | None = None) -> range:
        """Return the prompts whose sampling begins."""
        begun = [queue.take(step, total, size) for queue in self.queues]
        assert all(numbers == begun[0] for numbers in begun)
        return begun[0]

    def step(self, number: int, total: int = ENDLESS, size: int | None = None) -> list[list[int]]:
        """Return the training rows of each rank."""
        self.begin(number, total, size)
        for queue in self.queues:
            rows = [queue.row(number) for number in queue.own]
            assert [queue.rows[i] for i in queue.positions] == rows
        return [[queue.row(number) for number in queue.own] for queue in self.queues]

    def state_dict(self) -> dict:
        states = [queue.state_dict() for queue in self.queues]
        assert all(state == states[0] for state in states)
        return states[0]

    def resumed(self, ranks: int = 1, ahead: int = 0) -> "Queues":
        run = Queues(ranks, ahead)
        for queue in run.queues:
            queue.load_state_dict(self.state_dict())
        return run


def test_every_row_is_drawn_once_per_epoch():
    run, rows = Queues(), []
    for number in range(5):
        rows += run.step(number)[0]
        assert epochs_of(run.queues[0].cursor) == dict(epoch=pytest.approx(4 * (number + 1) / ROWS))
    assert (
        set(rows[:ROWS]) == set(rows[ROWS:])
        and len(set(rows)) == ROWS
        and rows[:ROWS] != rows[ROWS:]
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("ahead", [0, 2])
def test_rows_of_a_step_do_not_depend_on_ranks_or_sizes(ranks, ahead):
    """Some sizes are below the number of ranks: some ranks then have no prompt, and no prompt is
    left behind."""
    one, several = Queues(ahead=ahead), Queues(ranks, ahead)
    for number, sizes in enumerate([(4,), (4, 1, 3), (None,), (2, 1), (4,)]):
        for size in sizes:
            (rows,), shares = one.step(number, size=size), several.step(number, size=size)
            assert len(rows) == (size or 4)
            for queue, share in zip(several.queues, shares, strict=True):
                assert share == [rows[i] for i in queue.positions]
            positions = chain(*(queue.positions for queue in several.queues))
            assert sorted(positions) == [*one.queues[0].positions]
    (queue,) = one.queues
    assert queue.selection == range(19, 23) and queue.begun == 23 + 4 * ahead
    assert several.state_dict() == one.state_dict()


def test_prefetching_stops_at_the_last_step():
    run = Queues(ahead=2)
    begun = [run.begin(number, 4) for number in range(4)]
    assert begun == [range(12), range(12, 16), range(16, 16), range(16, 16)]
    assert run.queues[0].drawn == 4


# ---- stop and resume ----


@pytest.mark.parametrize("ahead", [0, 2])
def test_restored_queue_takes_the_same_prompts(ahead):
    """The resumed run may have another number of ranks. Sizes that end within a batch leave the
    rest of it to the next step."""
    run = Queues(ahead=ahead)
    for number in range(3):
        run.step(number, size=3)
    resumed = run.resumed(ahead=ahead)
    other = run.resumed(2, ahead)
    for number in range(3, 6):
        (rows,) = run.step(number)
        assert resumed.step(number) == [rows] and sorted(chain(*other.step(number))) == sorted(rows)
        assert run.state_dict() == resumed.state_dict() == other.state_dict()


def test_untaken_prompts_are_sampled_again_after_a_resume():
    """Two batches are drawn ahead, for a run that goes on without rollout ranks."""
    run = Queues(ahead=2)
    (first,) = run.step(0)
    cursor = run.queues[0].cursor
    resumed = run.resumed()
    assert resumed.queues[0].cursor == cursor
    assert resumed.begin(1) == range(4, 8) and run.begin(1) == range(12, 16)
    assert [*map(resumed.queues[0].row, range(4, 8))] == [*map(run.queues[0].row, range(4, 8))]
    assert not {*first} & {*resumed.queues[0].rows}


def test_undone_step_is_sampled_again():
    """With dynamic sampling, a step takes prompts several times; all of them are sampled again."""
    run = Queues()
    run.step(0, size=3)
    before = run.state_dict()
    first = run.step(1) + run.step(1, size=2)
    for queue in run.queues:
        queue.undo_step()
    assert run.state_dict()["taken"] == before["taken"]
    resumed = run.resumed()
    assert resumed.step(1) + resumed.step(1, size=2) == first
    again = Queues()
    for number, size in ((0, 3), (1, 4), (1, 2)):
        again.step(number, size=size)
    assert resumed.step(2) == again.step(2) and resumed.state_dict() == again.state_dict()
