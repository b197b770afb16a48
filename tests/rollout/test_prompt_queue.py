"""The prompt queue: the rows of each step, their division among ranks, oversampling, staleness,
stop and resume."""

from collections import Counter
from itertools import chain

import pytest
from in_process import Args

from common.data.order import RowOrder, epochs_of
from common.rollout.prompt_queue import PromptQueue

ROWS = 10
ENDLESS = 1000


class Simulation:
    """Queues of all ranks, with completions that need one turn more than the index of their row."""

    def __init__(self, ranks: int = 1, prefetch_steps: int = 0, **flags):
        args = Args(prompts_per_step=4, **flags)
        self.queues = [
            PromptQueue(RowOrder(ROWS, 0), args, rank, ranks, prefetch_steps)
            for rank in range(ranks)
        ]
        self.turns, self.complete = Counter(), set()

    def step(self, number: int, total: int = ENDLESS, size: int | None = None) -> list[list[int]]:
        """Return the training rows of each rank."""
        drawn = [queue.draw(number, total, size) for queue in self.queues]
        assert all(numbers == drawn[0] for numbers in drawn)
        while any(queue.choose(self.complete) is None for queue in self.queues):
            for prompt in self.queues[0].in_flight:
                self.turns[prompt] += 1
                self.complete |= {prompt} if self.turns[prompt] > self.row(prompt) else set()
        chosen = [queue.choose(self.complete) for queue in self.queues]
        rows = [[self.row(prompt) for prompt in prompts] for prompts in chosen]
        for queue, own in zip(self.queues, rows, strict=True):
            queue.take(chain(*chosen))
            assert [queue.rows[i] for i in queue.positions] == own
        return rows

    def undo_step(self) -> None:
        for queue in self.queues:
            queue.undo_step()

    def row(self, prompt: int) -> int:
        return self.queues[0].row(prompt)

    @property
    def taken(self) -> list[int]:
        return self.queues[0].taken

    def state_dict(self) -> dict:
        states = [queue.state_dict() for queue in self.queues]
        assert all(state == states[0] for state in states)
        return states[0]

    def resumed(self, ranks: int = 1, **flags) -> "Simulation":
        run = Simulation(ranks, **flags)
        for queue in run.queues:
            queue.load_state_dict(self.state_dict())
        return run


def test_every_row_is_drawn_once_per_epoch():
    run, rows = Simulation(), []
    for number in range(5):
        rows += run.step(number)[0]
        assert epochs_of(run.queues[0].cursor) == dict(epoch=pytest.approx(4 * (number + 1) / ROWS))
    assert (
        set(rows[:ROWS]) == set(rows[ROWS:])
        and len(set(rows)) == ROWS
        and rows[:ROWS] != rows[ROWS:]
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("prefetch_steps", [0, 2])
def test_rows_of_a_step_do_not_depend_on_ranks_or_sizes(ranks, prefetch_steps):
    """Some sizes are below the number of ranks: some ranks then have no prompt, and no prompt is
    left behind."""
    one, several = (
        Simulation(prefetch_steps=prefetch_steps),
        Simulation(ranks, prefetch_steps=prefetch_steps),
    )
    for number, sizes in enumerate([(4,), (4, 1, 3), (None,), (2, 1), (4,)]):
        for size in sizes:
            (rows,), shares = one.step(number, size=size), several.step(number, size=size)
            assert (
                len(rows) == (size or 4) and one.queues[0].in_flight == several.queues[0].in_flight
            )
            for queue, share in zip(several.queues, shares, strict=True):
                assert share == [rows[i] for i in queue.positions]
            positions = chain(*(queue.positions for queue in several.queues))
            assert sorted(positions) == [*one.queues[0].positions]
    in_flight = one.queues[0].in_flight
    assert (
        len(in_flight) == 4 * prefetch_steps
        and max(in_flight, default=22) == 22 + 4 * prefetch_steps
    )
    assert several.state_dict() == one.state_dict()


def test_prefetching_stops_at_the_last_step():
    run, in_flight = Simulation(prefetch_steps=2), []
    for number in range(4):
        (queue,) = run.queues
        queue.draw(number, 4)
        in_flight.append(len(queue.in_flight))
        run.step(number, total=4)
    assert in_flight == [12, 12, 8, 4] and queue.next_batch == 4


# ---- oversampling ----


def test_oversampling_takes_the_oldest_complete_prompts_and_leaves_the_others():
    """Six of ten are in flight; the first step takes the four shortest of them."""
    run, whole = Simulation(oversample=1.5), Simulation()
    taken = [run.step(number, total=5)[0] for number in range(5)]
    drawn = [row for number in range(5) for row in whole.step(number, total=5)[0]]
    assert sorted(taken[0]) == sorted(drawn[:6])[:4]
    assert taken[0] == [row for row in drawn[:6] if row in taken[0]], (
        "in the order in which they were drawn"
    )
    assert Counter(chain(*taken)) == Counter(drawn), "none is lost, none comes twice"
    assert run.state_dict() == whole.state_dict()


def test_oversampling_takes_equally_many_prompts_from_each_rank():
    """Otherwise one rank would draw prompts faster than it trains on them."""
    run, taken = Simulation(2, oversample=1.5), []
    for number in range(6):
        for size in (4, 3, 1):
            assert [len(share) for share in run.step(number, size=size)] == [-(-size // 2)] * 2
            assert sorted(chain(*(queue.positions for queue in run.queues))) == [
                *range(size + size % 2)
            ]
        taken += run.taken
        assert len(run.queues[0].pending) <= 5
    assert len(set(taken)) == len(taken) == 6 * 10 and max(taken) < 70


def test_draw_for_many_ranks_visits_each_prompt_once(monkeypatch):
    """A visit for each rank would take seconds in every step of 1,024 ranks."""
    visits, unbegun = [], PromptQueue._unbegun

    def counted(queue):
        for number in unbegun(queue):
            visits.append(number)
            yield number

    monkeypatch.setattr(PromptQueue, "_unbegun", counted)
    args = Args(prompts_per_step=128, oversample=1.5, max_staleness=1)
    drawn = PromptQueue(RowOrder(ROWS, 0), args, rank=3, ranks=64, prefetch_steps=0).draw(0, 9)
    assert visits == drawn == [*range(192)]


@pytest.mark.parametrize("staleness", [1, 2])
def test_prompt_is_taken_before_it_exceeds_the_staleness(staleness):
    run, begun, ages = Simulation(oversample=1.5, max_staleness=staleness), {}, []
    for number in range(12):
        before = run.queues[0].in_flight.copy()
        run.step(number, total=12)
        begun |= dict.fromkeys(
            {*run.queues[0].in_flight, *run.taken} - before.keys() - begun.keys(), number
        )
        ages += [number - begun[prompt] for prompt in run.taken]
    assert max(ages) == staleness


def test_oversampling_favours_no_length_over_a_run():
    """Ten epochs have every row ten times. If a step dropped the remaining prompts, short ones
    would be more frequent."""
    run, dropping, kept = Simulation(oversample=1.5), Simulation(oversample=1.5), []
    taken = [row for number in range(25) for row in run.step(number, total=25)[0]]
    assert set(Counter(taken).values()) == {10}
    (queue,) = dropping.queues
    for number in range(25):
        kept += dropping.step(number)[0]
        queue.used |= queue.in_flight.keys()
        queue.in_flight.clear()
    assert sum(kept) / len(kept) < 3.9, "the mean of all rows is 4.5"


# ---- stop and resume ----


def test_restored_queue_draws_the_same_prompts():
    run = Simulation()
    for number in range(3):
        run.step(number)
    resumed = run.resumed()
    for number in range(3, 6):
        assert run.step(number) == resumed.step(number) and run.state_dict() == resumed.state_dict()


@pytest.mark.parametrize("ranks", [1, 2])
def test_remaining_prompts_are_resumed_once_each(ranks):
    """The resumed run may have another number of ranks, one of which may have more of the remaining
    prompts."""
    run, taken = Simulation(oversample=1.5), []
    for number in range(3):
        run.step(number, total=10)
        taken += run.taken
    assert run.state_dict()["used"] and epochs_of(run.queues[0].cursor)["epoch"] < len(taken) / ROWS
    resumed = run.resumed(ranks, oversample=1.5)
    for number in range(3, 10):
        resumed.step(number, total=10)
        taken += resumed.taken
    assert len(set(taken)) == 40 and set(taken) >= set(range(40 if ranks == 1 else 37))


def test_untaken_prompts_are_sampled_again_after_a_resume():
    run = Simulation()
    run.step(0)
    cursor = run.queues[0].cursor
    numbers = run.queues[0].draw(1, ENDLESS)
    resumed = run.resumed()
    assert resumed.queues[0].draw(1, ENDLESS) == numbers == [4, 5, 6, 7]
    assert resumed.queues[0].cursor == run.queues[0].cursor == cursor
    assert [*map(resumed.row, numbers)] == [*map(run.row, numbers)]


def test_undone_step_is_sampled_again():
    """With dynamic sampling, a step takes prompts several times; all of them are sampled again."""
    run = Simulation()
    run.step(0)
    before = run.state_dict()
    first = run.step(1) + run.step(1, size=2)
    run.undo_step()
    resumed = run.resumed()
    assert run.state_dict()["number"] == before["number"]
    assert resumed.step(1) + resumed.step(1, size=2) == first
    again = Simulation()
    for number, size in ((0, 4), (1, 4), (1, 2)):
        again.step(number, size=size)
    assert resumed.step(2) == again.step(2) and resumed.state_dict() == again.state_dict()


def test_checkpoints_of_earlier_versions_load():
    queue = PromptQueue(RowOrder(ROWS, 0), Args(prompts_per_step=4), 0, 1, prefetch_steps=0)
    queue.load_state_dict(dict(number=2, order=dict(epoch=0, index=8, num_rows=ROWS), used=[9, 11]))
    assert queue.draw(5, ENDLESS) == [8, 10, 12, 13]
