"""Rollouts of an engine in this process: which prompts, which seeds, whose weights, what a step takes and leaves, and
where a resumed run goes on. The engine is one that notes what it is asked."""

from collections import Counter
from itertools import chain, groupby
from types import SimpleNamespace

import pytest
import torch
from conftest import Args

from common.data.order import epochs_of
from common.metrics.meter import Meter
from common.model.hub import load_tokenizer
from common.model.tiny import tiny_model
from common.parallel import distributed
from common.rollout import engine as base
from common.rollout import sampler
from common.rollout.engine import SEED_SPACING
from common.rollout.prompts import Prompts
from common.rollout.sampler import Rollouts

ROWS = 10


class Engine(base.Engine):
    """A turn samples one token of each completion, until there are as many as the prompt's own id says; `did` has what
    was called, in order."""

    def __init__(self, args):
        super().__init__("", args, [], load_tokenizer(tiny_model()), torch.device("cpu"), trained=False)

    def _start(self, path):
        self.did, self.seeds = [], {}

    def wake(self):
        self.did.append("wake")

    def sleep(self):
        assert not self.running
        self.did.append("sleep")

    def close(self):
        self.did.append("close")

    def _load(self, weights):
        self.did.append(f"load {weights}")

    def _begin(self, name, completion):
        if not completion.ids:
            self.seeds.setdefault(completion.order, completion.seed)

    def _advance(self):
        self.did.append(f"step {next(iter(self.running.values())).temperature:g}")
        for completion in self.running.values():
            ended = len(completion.ids) >= completion.prompt[0]
            self._said(completion, [completion.seed % SEED_SPACING], [-1.0], "stop" if ended else None)


@pytest.fixture
def make(device, monkeypatch):
    monkeypatch.setattr(sampler, "make_engine", lambda path, args, *_: Engine(args))
    monkeypatch.setattr(sampler, "eos_token_ids", lambda *_: [1])
    monkeypatch.setattr(sampler, "whole_weights", lambda model, dtype: f"{model.version} as {dtype}")
    prompts = Prompts([[i] for i in range(ROWS)], [dict(prompt=f"{i}?") for i in range(ROWS)], 0)

    def make(rank: int = 0, ranks: int = 1, **flags) -> Rollouts:
        args = Args(**dict(prompts_per_step=4, samples_per_prompt=2) | flags)
        rollouts = Rollouts(SimpleNamespace(path="", version=0), prompts, args, None, device)
        rollouts.rank, rollouts.ranks = rank, ranks
        return rollouts

    return make


def step(rollouts: Rollouts, number: int, total: int = 100, size: int | None = None):
    rollouts.submit(number, total, size)
    return rollouts.collect(number, Meter())


def step_of_ranks(shares: list[Rollouts], number: int, total: int = 100, size: int | None = None) -> list[list]:
    """Of several ranks; each is told what a gather would have told it."""
    before = [len(rollouts.collected) for rollouts in shares if rollouts.step == number] or [0] * len(shares)
    groups = [step(rollouts, number, total, size) for rollouts in shares]
    taken = [rollouts.collected[count:] for rollouts, count in zip(shares, before, strict=True)]
    for rollouts, own in zip(shares, taken, strict=True):
        for other in set(chain(*taken)) - set(own):
            del rollouts.in_flight[other]
            rollouts.used.add(other)
            rollouts.collected.append(other)
    return groups


def rows(groups) -> list[str]:
    for sample in (sample for group in groups for sample in group):
        number = int(sample.row["prompt"][:-1])
        assert sample.row is groups[0][0].row or sample.ids[0] == number
        assert len(sample.completion_ids) == number + 1 and sample.finish_reason == "stop"
    return [group[0].row["prompt"] for group in groups]


def test_every_row_once_an_epoch_with_seeds_and_version(make):
    rollouts, drawn = make(), []
    for number in range(5):
        groups = step(rollouts, number)
        drawn += rows(groups)
        assert [len(group) for group in groups] == [2] * 4
        assert {v for group in groups for s in group for v in s.versions[1:] + [s.version]} == {number}
        assert epochs_of(rollouts.cursor) == dict(epoch=pytest.approx(4 * (number + 1) / ROWS))
    assert set(drawn[:ROWS]) == set(drawn[ROWS:]) and len(set(drawn)) == ROWS and drawn[:ROWS] != drawn[ROWS:]
    seeds = [distributed.fold_seed(0, number, i) * SEED_SPACING for number in range(5) for i in range(4)]
    assert rollouts.engine.seeds == dict(enumerate(seeds)) and len(set(seeds)) == 20


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("ahead", [0, 2])
def test_ranks_divide_a_step_without_changing_it_however_many_prompts_it_takes_at_a_time(make, ranks, ahead):
    """Fewer than there are ranks, too: some of those have no prompt then, and none is left behind."""
    whole, shares = make(), [make(rank, ranks) for rank in range(ranks)]
    sizes = [(4,), (4, 1, 3), (None,), (2, 1), (4,)]
    for rollouts in (whole, *shares):
        rollouts.ahead = ahead
    for number, of_step in enumerate(sizes):
        for size in of_step:
            groups, of_ranks = step(whole, number, size=size), step_of_ranks(shares, number, size=size)
            assert len(groups) == (size or 4) and whole.in_flight == shares[0].in_flight
            for rollouts, share in zip(shares, of_ranks, strict=True):
                expected = [s.ids for i in rollouts.positions for s in groups[i]]
                assert [s.ids for group in share for s in group] == expected
            assert sorted(chain(*(rollouts.positions for rollouts in shares))) == [*whole.positions]
    assert len(whole.in_flight) == 4 * ahead and max(whole.in_flight, default=22) == 22 + 4 * ahead
    assert all(rollouts.state_dict() == whole.state_dict() for rollouts in shares)


def test_the_engine_is_given_the_weights_of_now_before_it_samples_and_sleeps_after(make):
    rollouts = make(temperature=0.5)
    step(rollouts, 0)
    rollouts.model.version = 1
    rollouts.sample_now(1, rollouts.prompts, [0] * ROWS, n=1, temperature=0.0)
    rollouts.close()
    did = [what for what, _ in groupby(rollouts.engine.did)]
    assert did == [
        "wake", "load 0 as torch.float32", "step 0.5", "sleep",
        "wake", "load 1 as torch.float32", "step 0", "sleep", "close",
    ]  # fmt: skip


def test_held_out_prompts_are_divided_among_the_ranks(make):
    everyone = [make(rank, 3) for rank in range(3)]
    shares = [r.sample_now(0, r.prompts, list(range(ROWS)), n=1, temperature=0.0) for r in everyone]
    assert [rows(share) for share in shares] == [[f"{i}?" for i in range(rank, ROWS, 3)] for rank in range(3)]
    seeds = [sorted(seed // SEED_SPACING for seed in r.engine.seeds.values()) for r in everyone]
    assert seeds == [list(range(rank, ROWS, 3)) for rank in range(3)]


def oversampled(make, steps: int, **flags) -> tuple[Rollouts, list[list[str]]]:
    rollouts = make(oversample=1.5, **flags)
    return rollouts, [rows(step(rollouts, number, total=steps)) for number in range(steps)]


def test_of_more_prompts_than_it_needs_a_step_takes_the_oldest_that_are_complete_and_leaves_the_others(make):
    """Six of ten are in work: the first step takes the four shortest of them."""
    rollouts, taken = oversampled(make, 5)
    whole = make()
    drawn = [name for number in range(5) for name in rows(step(whole, number))]
    assert sorted(taken[0]) == sorted(drawn[:6], key=lambda name: int(name[:-1]))[:4]
    assert taken[0] == [name for name in drawn[:6] if name in taken[0]], "in the order in which they were drawn"
    assert Counter(name for names in taken for name in names) == Counter(drawn), "nothing is lost, nothing comes twice"
    assert rollouts.state_dict() == whole.state_dict()


def test_oversampling_ranks_take_equally_many_of_each_however_few_a_step_asks_for(make):
    """Else the prompts of one would be drawn faster than it learns from them."""
    shares, taken = [make(rank, 2, oversample=1.5) for rank in range(2)], []
    for number in range(6):
        for size in (4, 3, 1):
            groups = step_of_ranks(shares, number, size=size)
            assert [len(share) for share in groups] == [-(-size // 2)] * 2
            assert sorted(chain(*(rollouts.positions for rollouts in shares))) == [*range(size + size % 2)]
        taken += shares[0].collected
        assert len(shares[0].pending) <= 5
    assert len(set(taken)) == len(taken) == 6 * 10 and max(taken) < 70


@pytest.mark.parametrize("staleness", [1, 2])
def test_what_is_left_goes_on_with_the_next_weights_and_never_too_long(make, staleness):
    rollouts, meters = make(oversample=1.5, max_staleness=staleness, samples_per_prompt=1), []
    for number in range(12):
        meters.append(Meter())
        rollouts.submit(number, 12)
        for (sample,) in rollouts.collect(number, meters[-1]):
            versions = sample.versions[1:]
            assert versions == sorted(versions) and number - staleness <= versions[0] <= versions[-1] <= number
            assert sample.version == versions[0]
    metrics = [meter.reduce() for meter in meters]
    assert max(line["sampling/staleness/max"] for line in metrics) == staleness
    assert max(line["sampling/version_spread/max"] for line in metrics) >= 1


def test_over_a_run_no_length_is_favoured(make):
    """Ten epochs have every length ten times. Thrown away what a step leaves, the short ones come more often."""
    _, taken = oversampled(make, 25)
    names = [name for step in taken for name in step]
    assert set(Counter(names).values()) == {10}
    rollouts, kept = make(oversample=1.5), []
    for number in range(25):
        kept += rows(step(rollouts, number))
        rollouts.used |= rollouts.in_flight.keys()
        rollouts.in_flight.clear()
    lengths = [int(name[:-1]) + 1 for name in kept]
    assert sum(lengths) / len(lengths) < 4.9, "5.5 tokens is the mean of all"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_with_prompts_left_over_resumes_with_each_of_them_once(make, ranks):
    """Also on another number of ranks, of which one may be left with more of the last ones."""
    rollouts, taken = make(oversample=1.5), []
    for number in range(3):
        step(rollouts, number, total=10)
        taken += rollouts.collected
    state = rollouts.state_dict()
    assert state["used"] and epochs_of(rollouts.cursor)["epoch"] < len(taken) / ROWS
    shares = [make(rank, ranks, oversample=1.5) for rank in range(ranks)]
    for resumed in shares:
        resumed.load_state_dict(state)
    for number in range(3, 10):
        step_of_ranks(shares, number, total=10)
        taken += shares[0].collected
    assert len(set(taken)) == 40 and set(taken) >= set(range(40 if ranks == 1 else 37))


def test_a_restored_cursor_draws_and_samples_what_would_have_come(make):
    rollouts = make()
    for number in range(3):
        step(rollouts, number)
    resumed = make()
    resumed.load_state_dict(rollouts.state_dict())
    for number in range(3, 6):
        whole, again = step(rollouts, number), step(resumed, number)
        assert rows(whole) == rows(again)
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


def test_prompts_ahead_end_with_the_run(make):
    rollouts = make()
    rollouts.ahead = 2
    rollouts.submit(0, 100)
    assert len(rollouts.in_flight) == 12
    in_flight = []
    for number in range(4):
        rollouts.submit(number, total_steps=4)
        in_flight.append(len(rollouts.in_flight))
        rollouts.collect(number, Meter())
    assert in_flight == [12, 12, 8, 4] and rollouts.next_number == 4
