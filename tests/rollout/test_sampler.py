"""Colocated sampling: prompts and seeds, weights and their versions, stop and resume. The engine is
a stand-in that records its calls."""

from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from in_process import Args

from common.data.order import Order
from common.data.sample import Completion
from common.metrics.meter import Meter
from common.model.hub import load_tokenizer
from common.model.tiny import tiny_model
from common.parallel import distributed
from common.rollout import engine as base
from common.rollout import sampler as module
from common.rollout.base_sampler import measure_staleness
from common.rollout.engine import SEED_SPACING
from common.rollout.prompts import Prompts
from common.rollout.sampler import LocalSampler, make_sampler

ROWS = 10


class Engine(base.Engine):
    """Engine whose turn samples one token of each request until there is one more than the prompt's
    id. `calls` has the names of the called methods."""

    def __init__(self, args):
        super().__init__(
            "", args, [], load_tokenizer(tiny_model()), torch.device("cpu"), trained=False
        )

    def _start(self, path):
        self.calls, self.seeds = [], {}

    def wake(self):
        self.calls.append("wake")

    def sleep(self):
        assert not self.running
        self.calls.append("sleep")

    def close(self):
        self.calls.append("close")

    def _load(self, weights):
        self.calls.append(f"load {weights}")

    def _admit(self, name, request):
        if not request.num_sampled:
            self.seeds.setdefault(request.priority, request.seed)

    def _sample(self):
        self.calls.append(f"step {next(iter(self.running.values())).temperature:g}")
        for request in self.running.values():
            ended = request.num_sampled >= request.completion.ids[0]
            self.append_output(
                request, [request.seed % SEED_SPACING], [-1.0], "stop" if ended else None
            )


@pytest.fixture
def make(device, monkeypatch):
    monkeypatch.setattr(module, "make_engine", lambda path, args, *_: Engine(args))
    monkeypatch.setattr(module, "eos_token_ids", lambda *_: [1])
    monkeypatch.setattr(module, "whole_weights", lambda model, dtype: f"{model.version} as {dtype}")
    prompts = Prompts([[i] for i in range(ROWS)], [dict(prompt=f"{i}?") for i in range(ROWS)], 0)

    def make(rank: int = 0, ranks: int = 1, order: Order | None = None, **flags) -> LocalSampler:
        args = Args(**dict(prompts_per_step=4, samples_per_prompt=2) | flags)
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "get_rank", lambda: rank)
            patch.setattr(torch.distributed, "get_world_size", lambda: ranks)
            rewards = SimpleNamespace(begin=lambda groups, order: None)
            policy = SimpleNamespace(path="", version=0, device=device)
            return make_sampler(policy, prompts, args, None, rewards, order)

    return make


def step(sampler: LocalSampler, number: int, total: int = 100):
    return sampler.rollout(number, total, Meter())


def rows(groups) -> list[str]:
    for sample in (sample for group in groups for sample in group):
        number = int(sample.row["prompt"][:-1])
        assert sample.row is groups[0][0].row or sample.ids[0] == number
        assert len(sample.completion_ids) == number + 1 and sample.finish_reason == "stop"
    return [group[0].row["prompt"] for group in groups]


def test_completions_have_the_row_seed_and_version_of_their_step(make):
    sampler = make()
    for number in range(5):
        groups = step(sampler, number)
        assert len(set(rows(groups))) == 4 and [len(group) for group in groups] == [2] * 4
        assert {v for group in groups for s in group for v in s.versions[1:] + [s.version]} == {
            number
        }
    seeds = [
        distributed.fold_seed(0, number, i) * SEED_SPACING for number in range(5) for i in range(4)
    ]
    assert sampler.engine.seeds == dict(enumerate(seeds)) and len(set(seeds)) == 20


def test_order_of_your_own_chooses_the_prompts(make):
    class Backwards(Order):
        def draw(self, count: int) -> list[int]:
            start = self.drawn[""]
            super().draw(count)
            return [-n % ROWS for n in range(start + 1, start + count + 1)]

    sampler = make(order=Backwards({"": range(ROWS)}, seed=0))
    assert [rows(step(sampler, number)) for number in range(2)] == [
        ["9?", "8?", "7?", "6?"],
        ["5?", "4?", "3?", "2?"],
    ]
    resumed = make(order=Backwards({"": range(ROWS)}, seed=0))
    resumed.load_state_dict(sampler.state_dict())
    assert rows(step(resumed, 2)) == ["1?", "0?", "9?", "8?"]


def test_engine_loads_current_weights_before_sampling_and_sleeps_after(make):
    sampler = make(temperature=0.5)
    step(sampler, 0)
    sampler.policy.version = 1
    sampler.sample_now(1, sampler.prompts, [0] * ROWS, n=1, temperature=0.0)
    sampler.close()
    calls = [name for name, _ in groupby(sampler.engine.calls)]
    assert calls == [
        "wake", "load 0 as torch.float32", "step 0.5", "sleep",
        "wake", "load 1 as torch.float32", "step 0", "sleep", "close",
    ]  # fmt: skip


def test_held_out_prompts_are_divided_among_ranks(make):
    samplers = [make(rank, 3) for rank in range(3)]
    shares = [
        each.sample_now(0, each.prompts, list(range(ROWS)), n=1, temperature=0.0)
        for each in samplers
    ]
    assert [rows(share) for share in shares] == [
        [f"{i}?" for i in range(rank, ROWS, 3)] for rank in range(3)
    ]
    seeds = [
        sorted(seed // SEED_SPACING for seed in each.engine.seeds.values()) for each in samplers
    ]
    assert seeds == [list(range(rank, ROWS, 3)) for rank in range(3)]


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


def test_stopped_rollout_returns_none_and_is_sampled_again(make, monkeypatch):
    sampler = make()
    step(sampler, 0)
    cursor = sampler.cursor
    first = step(sampler, 1)
    assert sampler.cursor != cursor
    monkeypatch.setattr(distributed, "stop_requested", lambda: True)
    assert step(sampler, 1) is None
    assert sampler.cursor == cursor
    monkeypatch.setattr(distributed, "stop_requested", lambda: False)
    resumed = make()
    resumed.load_state_dict(sampler.state_dict())
    assert rows(step(resumed, 1)) == rows(first)
