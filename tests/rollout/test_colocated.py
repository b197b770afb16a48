"""Rollouts of an engine in this process: which prompts, which seeds, whose weights, and where a resumed run goes on.
The engine is one that notes what it is asked."""

from types import SimpleNamespace

import pytest
import torch
from conftest import Args

from common import distributed
from common.meter import Meter
from common.order import epochs_of
from common.packing import Sample
from common.prompts import Prompts
from common.rollout import colocated
from common.rollout.colocated import Rollouts

ROWS = 10


class Engine:
    """Its completions are the seeds; `did` has what was called, in order."""

    dtype = torch.float32

    def __init__(self):
        self.did, self.seeds = [], []

    def wake(self):
        self.did.append("wake")

    def load_weights(self, weights):
        self.did.append(f"load {weights}")

    def sleep(self):
        self.did.append("sleep")

    def close(self):
        self.did.append("close")

    def generate(self, prompts, n, seeds, temperature, limits):
        self.did.append(f"generate {temperature:g}")
        self.seeds += seeds
        return [
            [Sample(prompt + [i], [False] * len(prompt) + [True], text=f"{seed}") for i in range(n)]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]


@pytest.fixture
def make(device, monkeypatch):
    engine = Engine()
    monkeypatch.setattr(colocated, "make_engine", lambda *_: engine)
    monkeypatch.setattr(colocated, "eos_token_ids", lambda *_: [1])
    monkeypatch.setattr(colocated, "whole_weights", lambda model, dtype: f"{model.version} as {dtype}")
    prompts = Prompts([[i] for i in range(ROWS)], [dict(prompt=f"{i}?") for i in range(ROWS)], 0)

    def make(rank: int = 0, ranks: int = 1, **flags) -> Rollouts:
        args = Args(**dict(prompts_per_step=4, samples_per_prompt=2) | flags)
        rollouts = Rollouts(SimpleNamespace(path="", version=0), prompts, args, None, device)
        rollouts.rank, rollouts.ranks = rank, ranks
        rollouts.positions = range(rank, args.prompts_per_step, ranks)
        return rollouts

    return make


def step(rollouts: Rollouts, number: int, total: int = 100):
    rollouts.submit(number, total)
    return rollouts.collect(number, Meter())


def rows(groups) -> list[str]:
    assert all(sample.row is group[0].row for group in groups for sample in group)
    assert all(sample.ids[:-1] == [int(sample.row["prompt"][:-1])] for group in groups for sample in group)
    return [group[0].row["prompt"] for group in groups]


def test_every_row_once_an_epoch_with_seeds_and_version(make):
    rollouts, drawn = make(), []
    for number in range(5):
        groups = step(rollouts, number)
        drawn += rows(groups)
        assert [len(group) for group in groups] == [2] * 4 and {s.version for g in groups for s in g} == {number}
        assert epochs_of(rollouts.cursor) == dict(epoch=pytest.approx(4 * (number + 1) / ROWS))
    assert set(drawn[:ROWS]) == set(drawn[ROWS:]) and len(set(drawn)) == ROWS and drawn[:ROWS] != drawn[ROWS:]
    assert rollouts.engine.seeds == [distributed.fold_seed(0, number, i) for number in range(5) for i in range(4)]
    assert len(set(rollouts.engine.seeds)) == 20


def test_ranks_divide_a_step_without_changing_it(make):
    whole, first, second = make(), make(0, 2), make(1, 2)
    for number in range(3):
        groups, mine, theirs = (step(rollouts, number) for rollouts in (whole, first, second))
        for share, positions in ((mine, first.positions), (theirs, second.positions)):
            assert [(s.ids, s.text) for g in share for s in g] == [
                (s.ids, s.text) for i in positions for s in groups[i]
            ]
    assert sorted([*first.positions, *second.positions]) == [*whole.positions]


def test_the_engine_is_given_the_weights_of_now_before_it_samples_and_sleeps_after(make):
    rollouts = make(temperature=0.5)
    step(rollouts, 0)
    rollouts.model.version = 1
    rollouts.sample_now(1, rollouts.prompts, [0] * ROWS, n=1, temperature=0.0)
    rollouts.close()
    assert rollouts.engine.did == [
        "wake", "load 0 as torch.float32", "generate 0.5", "sleep",
        "wake", "load 1 as torch.float32", "generate 0", "sleep", "close",
    ]  # fmt: skip


def test_held_out_prompts_are_divided_among_the_ranks(make):
    seeds = list(range(ROWS))
    shares = [make(rank, 3).sample_now(0, make().prompts, seeds, n=1, temperature=0.0) for rank in range(3)]
    assert [rows(share) for share in shares] == [[f"{i}?" for i in range(rank, ROWS, 3)] for rank in range(3)]
    assert [sample.text for share in shares for (sample,) in share] == [
        f"{i}" for r in range(3) for i in range(r, 10, 3)
    ]


def test_a_restored_cursor_draws_and_samples_what_would_have_come(make):
    rollouts = make()
    for number in range(3):
        step(rollouts, number)
    resumed = make()
    resumed.load_state_dict(rollouts.state_dict())
    for number in range(3, 6):
        whole, again = step(rollouts, number), step(resumed, number)
        assert rows(whole) == rows(again) and [g[0].text for g in whole] == [g[0].text for g in again]
        assert rollouts.cursor == resumed.cursor


def test_what_a_step_that_was_broken_off_had_drawn_counts_as_never_drawn(make, monkeypatch):
    """With dynamic sampling a step draws several times: all of them come again."""
    rollouts = make()
    step(rollouts, 0)
    before, epochs = rollouts.state_dict(), rollouts.cursor
    first = step(rollouts, 1)
    assert rollouts.state_dict() != before
    monkeypatch.setattr(distributed, "stop_requested", lambda: True)
    assert step(rollouts, 1) is None
    assert rollouts.state_dict() == before and rollouts.cursor == epochs
    monkeypatch.setattr(distributed, "stop_requested", lambda: False)
    resumed = make()
    resumed.load_state_dict(rollouts.state_dict())
    assert rows(step(resumed, 1)) == rows(first)


def test_prompts_that_are_submitted_and_not_collected_come_again(make):
    rollouts = make()
    step(rollouts, 0)
    before, epochs = rollouts.state_dict(), rollouts.cursor
    rollouts.submit(1, 100)
    assert rollouts.state_dict() == before and rollouts.cursor == epochs


def test_batches_ahead_end_with_the_run(make):
    rollouts = make()
    rollouts.ahead = 2
    assert [rollouts.submit(0, 100) or len(rollouts.pending)] == [3]
    numbers = []
    for number in range(4):
        rollouts.submit(number, total_steps=4)
        numbers.append(len(rollouts.pending))
        rollouts.collect(number, Meter())
    assert numbers == [3, 3, 2, 1] and rollouts.next_number == 4
