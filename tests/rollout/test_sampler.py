"""Prompts, rows and seeds of each step, stop and resume. The engine is a stand-in."""

import pytest
from in_process import Args

from common.metrics.meter import Meter
from common.packs.order import Order
from common.packs.sample import Completion
from common.parallel import distributed
from common.rollout.episodes import is_own
from common.rollout.prompts import Prompts
from common.rollout.remote import measure_staleness
from common.rollout.sampler import Sampler

ROWS = 10


class Source:
    """Engines without engines. `begun` has the numbers of the prompts."""

    def __init__(self, steps_ahead: int):
        self.steps_ahead = steps_ahead
        self.begun: list[int] = []
        self.requests = {}

    def complete(self, requests, own, step, meter, stops=True):
        self.begun += [request.number for request in requests]
        self.seeds = {request.number: request.seed for request in requests}
        self.requests |= {request.number: request for request in requests}
        rows = [self.requests[number].row for number in own]
        return [[Completion([0], [False], 1, row)] for row in rows]


class Run:
    """The samplers of all ranks."""

    def __init__(self, monkeypatch, ranks: int = 1, ahead: int = 0, order: type = Order):
        prompts = Prompts([[i] for i in range(ROWS)], [dict(row=i) for i in range(ROWS)], 0)
        args = Args(prompts_per_step=4, eval_samples=2, eval_temperature=0.5)
        self.monkeypatch = monkeypatch
        self.samplers = [
            Sampler(prompts, args, order({"": range(ROWS)}, 0), Source(ahead)) for _ in range(ranks)
        ]

    def each_rank(self):
        """Yield the sampler of each rank, on that rank."""
        for rank, sampler in enumerate(self.samplers):
            with self.monkeypatch.context() as patch:
                patch.setattr(distributed, "rank", lambda rank=rank: rank)
                patch.setattr(distributed, "world_size", lambda: len(self.samplers))
                yield sampler

    def step(self, number: int, total: int = 1000, size: int | None = None) -> list[int]:
        """Return the rows of all ranks, in order."""
        rows = {}
        for sampler in self.each_rank():
            rollout = sampler.rollout(number, total, Meter(), size)
            if rollout is not None:
                own = [completion.row["row"] for (completion,) in rollout.groups]
                assert [rollout.data_rows[i] for i in rollout.positions] == own
                rows |= zip(rollout.positions, own, strict=True)
        return [rows[i] for i in range(len(rows))]

    def state_dict(self) -> dict:
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return states[0]

    def resume(self, other: "Run") -> "Run":
        for sampler in self.samplers:
            sampler.load_state_dict(other.state_dict())
        return self


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("ahead", [0, 2])
def test_rows_and_seeds_do_not_depend_on_ranks_or_sizes(monkeypatch, ranks, ahead):
    """Some sizes are below the number of ranks: some ranks then have no prompt, and no prompt is
    left behind."""
    one, several = Run(monkeypatch, 1, ahead), Run(monkeypatch, ranks, ahead)
    for number, sizes in enumerate([(4,), (4, 1, 3), (None,), (2, 1), (4,)]):
        for size in sizes:
            rows = one.step(number, size=size)
            assert len(rows) == (size or 4) and several.step(number, size=size) == rows
            for sampler in (*one.samplers, *several.samplers):
                seeds = sampler.source.seeds
                assert seeds == {n: distributed.fold_seed(0, n // 4, n % 4) for n in seeds}
    begun = [sampler.source.begun for sampler in (*one.samplers, *several.samplers)]
    assert begun == [[*range(23 + 4 * ahead)]] * (ranks + 1)
    assert several.state_dict() == one.state_dict()


@pytest.mark.parametrize("ahead", [0, 2])
def test_resumed_run_takes_the_same_prompts(monkeypatch, ahead):
    """It may have another number of ranks. Prompts that were in flight are sampled again."""
    run = Run(monkeypatch, 1, ahead)
    for number in range(3):
        run.step(number, size=3)
    resumed = Run(monkeypatch, 1, ahead).resume(run)
    others = [Run(monkeypatch, 2, ahead).resume(run), Run(monkeypatch, 1, 2 - ahead).resume(run)]
    for number in range(3, 6):
        rows = run.step(number)
        assert [each.step(number) for each in (resumed, *others)] == [rows] * 3
        assert run.state_dict() == resumed.state_dict() == others[0].state_dict()
    assert resumed.samplers[0].source.begun[:4] == [9, 10, 11, 12]


@pytest.mark.parametrize("ahead", [0, 2])
def test_all_rollouts_of_a_stopped_step_are_sampled_again(monkeypatch, ahead):
    """With dynamic sampling, a step takes prompts several times."""
    run = Run(monkeypatch, 1, ahead)
    run.step(0, size=3)
    whole = Run(monkeypatch, 1, ahead).resume(run)
    first, second, third = whole.step(1), whole.step(1, size=2), whole.step(2)
    assert run.step(1) == first
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "stop_requested", lambda: True)
        assert run.step(1, size=2) == []
    resumed = Run(monkeypatch, 1, ahead).resume(run)
    assert [resumed.step(1), resumed.step(1, size=2), resumed.step(2)] == [first, second, third]


def test_no_prompt_is_begun_for_steps_after_the_last(monkeypatch):
    run = Run(monkeypatch, ahead=2)
    begun = []
    for number in range(4):
        run.step(number, total=4)
        begun.append(len(run.samplers[0].source.begun))
    assert begun == [12, 16, 16, 16]


def test_order_of_your_own_chooses_the_prompts(monkeypatch):
    class Backwards(Order):
        def draw(self, count: int) -> list[int]:
            start = self.drawn[""]
            super().draw(count)
            return [-n % ROWS for n in range(start + 1, start + count + 1)]

    run = Run(monkeypatch, order=Backwards)
    assert [run.step(number) for number in range(2)] == [[9, 8, 7, 6], [5, 4, 3, 2]]
    assert Run(monkeypatch, order=Backwards).resume(run).step(2) == [1, 0, 9, 8]


def test_held_out_prompts_are_divided_among_ranks(monkeypatch):
    """The seed of a prompt is the same on any number of ranks, and in every evaluation."""
    for rank, sampler in enumerate(Run(monkeypatch, 3).each_rank()):
        groups = sampler.complete_held_out(rank, sampler.prompts)
        assert [sample.row["row"] for (sample,) in groups] == [*range(rank, ROWS, 3)]
        requests = [*sampler.source.requests.values()]
        assert [each.seed for each in requests] == [
            distributed.fold_seed(0, i) for i in range(ROWS)
        ]
        assert {(each.samples, each.temperature) for each in requests} == {(2, 0.5)}
        assert requests[-1].number < 0 and is_own(requests[rank].number)  # before the run's


def test_staleness_is_the_age_of_the_weights_of_sampled_tokens():
    completions = [
        Completion([0, 1, 2], [False, True, True], 1, versions=versions)
        for versions in ([-1, 3, 5], [-1, 4, 4])
    ]
    meter = Meter()
    measure_staleness(meter, [completions], step=5)
    assert meter.reduce() == {
        "sampling/staleness/mean": 1.0,
        "sampling/staleness/max": 2,
        "sampling/version_spread/mean": 1.0,
        "sampling/version_spread/max": 2,
    }
