"""Sampling for the steps of a run.

    rollout = sampler.rollout(step, total_steps, meter)
    rollout.groups                 completions of this rank's prompts

A step may call `rollout` several times and ask for a different number of prompts each time. The
engine is in this process (`ColocatedEngine`) or, with `--rollout_ranks`, on other ranks
(`RolloutRanks` in remote.py).

Prompts are numbered in the order in which their rows are drawn. Training rank n % ranks receives
and scores the group of prompt n. The packer may then send its samples to other ranks for training.
Seeds do not depend on the ranks; on a CPU, nor do the samples."""

import math
from collections import deque
from dataclasses import dataclass

import torch

from common.config.online import OnlineArgs
from common.metrics.meter import Meter
from common.model.policy import Policy
from common.packs.order import Order, make_order
from common.packs.sample import Group
from common.parallel import distributed
from common.rollout.engine import NO_OPTIONS, EngineOptions
from common.rollout.engines import make_engine
from common.rollout.episodes import Episodes, OnComplete, PromptRequest, in_order, is_own
from common.rollout.measure import trained_counts
from common.rollout.prompts import Prompts
from common.rollout.weights import sync_weights, whole_weights


def make_sampler(
    policy: Policy, prompts: Prompts, args: OnlineArgs, tokenizer, on_complete: OnComplete,
    options: EngineOptions = NO_OPTIONS,
) -> "Sampler":  # fmt: skip
    """Return the sampler of `prompts`, with an engine here or on the rollout ranks, as the flags
    say. Call this on every training rank. Raises `ValueError` if the engine is not available.

    The sampler calls `on_complete` with each group of this rank as soon as its last completion has
    ended: rewards are then computed while the engine samples other groups or, with
    `--rollout_ranks`, while this rank trains. Rollout ranks take `options` from `serve` instead."""
    if args.rollout_ranks:
        from common.rollout.remote import RolloutRanks

        source = RolloutRanks(policy, args, on_complete)
    else:
        source = ColocatedEngine(policy, args, tokenizer, on_complete, options)
    return Sampler(prompts, args, make_order(prompts.rows, args), source)


def serve(args: OnlineArgs, device: torch.device, options: EngineOptions = NO_OPTIONS) -> None:
    """Sample on a rollout rank until training ends (`--rollout_ranks`)."""
    from common.rollout.remote import serve_until_end

    serve_until_end(args, device, options)


@dataclass(frozen=True)
class Rollout:
    """Completions for a step."""

    groups: list[Group]
    """this rank's groups of `samples_per_prompt` completions; a rank may have none"""
    positions: list[int]
    """for each of these groups, the place of its prompt among the prompts of all ranks"""
    data_rows: list[int]
    """the number of the data row of each prompt, over all ranks, for a curriculum"""


class Sampler:
    """The prompts of a run, and the engine that completes them. All ranks have the same state."""

    def __init__(self, prompts: Prompts, args: OnlineArgs, order: Order, source):
        """`source` samples: a `ColocatedEngine` or `RolloutRanks`."""
        self.prompts = prompts
        self.args = args
        self.order = order
        self.source = source
        self.next_number = 0  # number of the first prompt that no step has taken
        self.drawn: deque[int] = deque()  # data rows of the prompts from `next_number` on
        self.next_to_begin = 0  # number of the first prompt that is not in flight
        self.step = -1
        self.before_step: dict = {}  # state before the present step

    def __str__(self) -> str:
        return str(self.source)

    def close(self) -> None:
        """Shut down, before `distributed.cleanup`. Collective."""
        self.source.close()

    def rollout(
        self, step: int, total_steps: int, meter: Meter, size: int | None = None
    ) -> Rollout | None:
        """Return this rank's part of the completions for step `step` (from 0), or None if a stop
        signal has come. A resumed run then samples the prompts of this step again.

        `size`: number of prompts over all ranks, by default `--prompts_per_step`. Collective."""
        args = self.args
        if step != self.step:
            self.step, self.before_step = step, self.state_dict()
        size = size or args.prompts_per_step
        steps_ahead = max(0, min(self.source.steps_ahead, total_steps - step - 1))
        # Prompts up to this number are in flight.
        end = self.next_number + size + steps_ahead * args.prompts_per_step
        self.drawn += self.order.draw(max(0, end - self.next_number - len(self.drawn)))
        requests = []
        for number in range(self.next_to_begin, end):
            ids, row = self.prompts[self.drawn[number - self.next_number]]
            seed = distributed.fold_seed(args.seed, *divmod(number, args.prompts_per_step))
            requests.append(
                PromptRequest(number, ids, row, seed, args.samples_per_prompt, args.temperature)
            )
        self.next_to_begin = max(self.next_to_begin, end)
        taken = range(self.next_number, self.next_number + size)
        self.next_number += size
        data_rows = [self.drawn.popleft() for _ in taken]
        own_numbers = [number for number in taken if is_own(number)]
        groups = self.source.complete(requests, own_numbers, step, meter)
        if distributed.stop_requested():  # groups may be missing
            self.load_state_dict(self.before_step)
            return None
        meter.sum("sampled", int(trained_counts(groups).sum()))
        positions = [taken.index(number) for number in own_numbers]
        return Rollout(groups, positions, data_rows)

    def complete_held_out(self, step: int, prompts: Prompts) -> list[Group]:
        """Complete this rank's part of the held-out `prompts`: every `world_size`-th prompt, the
        first of them at index `rank`. Each gets `--eval_samples` completions, sampled at
        `--eval_temperature` with the weights after `step` steps. Collective."""
        args = self.args
        ranks = distributed.world_size()
        padded = math.ceil(len(prompts) / ranks) * ranks
        # Negative, since training prompts count from 0. `is_own` gives the first one to rank 0.
        requests = [
            PromptRequest(i - padded, *prompts[i], distributed.fold_seed(args.seed, i),
                          args.eval_samples, args.eval_temperature)
            for i in range(len(prompts))
        ]  # fmt: skip
        own_numbers = [request.number for request in requests if is_own(request.number)]
        return self.source.complete(requests, own_numbers, step, Meter(), stops=False)

    # ---- resume ----

    def state_dict(self) -> dict:
        """Return the position in the data. Prompts that were requested ahead of their step are not
        saved with their completions: a resumed run samples them again."""
        return dict(number=self.next_number, rows=[*self.drawn], order=self.order.state_dict())

    def load_state_dict(self, state: dict) -> None:
        self.next_number = self.next_to_begin = state["number"]
        self.drawn = deque(state["rows"])
        self.order.load_state_dict(state["order"])


class ColocatedEngine:
    """An engine in this process. Sampling and training take turns."""

    steps_ahead = 0

    def __init__(
        self, policy: Policy, args: OnlineArgs, tokenizer, on_complete: OnComplete,
        options: EngineOptions = NO_OPTIONS,
    ):  # fmt: skip
        self.policy = policy
        self.version: int | None = None  # version of the weights in the engine
        self.shares_memory = bool(args.reward_models)  # they score an evaluation's samples too
        self.trains = False  # whether a step has sampled yet, not only an evaluation
        self.on_complete = on_complete
        self.engine = make_engine(policy.path, args, tokenizer, policy.device, options=options)
        self.episodes = Episodes(self.engine, args)

    def __str__(self) -> str:
        return type(self.engine).__name__

    def close(self) -> None:
        self.episodes.close()
        self.engine.close()

    def complete(
        self, requests: list[PromptRequest], own_numbers: list[int], step: int, meter: Meter,
        stops: bool = True,
    ) -> list[Group]:  # fmt: skip
        """Complete those `requests` of all ranks that are this rank's `own_numbers`, with the
        weights after `step` steps. `stops`: this is a training rollout: a stop signal ends it early
        (see `generate`), and afterwards the engine releases its memory for the update. After an
        evaluation it may keep it: the next step samples with the same weights. Collective."""
        self.trains |= stops
        with meter.time("sync"):
            if step != self.version:
                weights = whole_weights(self.policy, self.engine.dtype)
                sync_weights(self.engine, weights, step)
                self.version = step
        with meter.time("rollout"):
            own = set(own_numbers)
            prompts = [request for request in requests if request.number in own]
            groups = {}
            for number, group in self.episodes.generate(prompts, meter, stops):
                self.on_complete(group)
                groups[number] = group
            # An engine that keeps its weights sleeps too: this empties its prefix cache after an
            # evaluation, as a resumed run starts with an empty one.
            keeps = self.engine.keeps_weights
            if stops or self.shares_memory or keeps or not self.trains:
                self.engine.sleep()
                self.version = step if keeps else None
        return in_order(groups.items())
