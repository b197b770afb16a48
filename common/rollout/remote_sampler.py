"""`--rollout_ranks`: sampling on dedicated ranks while the other ranks train (Noukhovitch et al.
2024, arXiv:2410.18252). This module is the side of the training ranks.

The training ranks send the prompts of a step and of up to `--max_staleness` further steps to the
rollout ranks (rollout_rank.py). Each rollout rank always has its share of them in flight and sends
each complete group to the rank that will train on it. A rollout waits for the groups that it needs.

The version of weights is the number of finished steps. A rollout first sends the present weights.
The rollout ranks interrupt their completions, load the weights and go on."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from common.config.online import OnlineArgs
from common.data.order import Order
from common.metrics.meter import Meter
from common.model.policy import Policy, compute_dtype
from common.parallel import distributed, process
from common.rewards.total import Rewards
from common.rollout.base_sampler import Sampler
from common.rollout.episode import PromptRequest, row_for_engine
from common.rollout.mail import (
    CompleteGroups,
    Mail,
    NewPrompts,
    NewWeights,
    ReadyForWeights,
    close_link,
    generating_rank,
    weights_link,
)
from common.rollout.prompts import Prompts
from common.rollout.weights import whole_weights

PORTIONS = 4  # portions of a step's prompts: reward models score each when it is complete


class RemoteSampler(Sampler):
    """Sampler on the rollout ranks. Rank 0 sends them prompts and weights; they send groups to
    every training rank."""

    def __init__(
        self, policy: Policy, prompts: Prompts, args: OnlineArgs, rewards: Rewards, order: Order
    ):
        super().__init__(policy, prompts, args, rewards, order, steps_ahead=args.max_staleness)
        self.dtype = compute_dtype(args, policy.device)
        self.mail = Mail(self._receive)  # waits for the rollout ranks
        self.link = weights_link(policy.device) if self.queue.rank == 0 else None
        self.names_and_shapes = [
            (name, weight.shape) for name, weight in whole_weights(policy, self.dtype)
        ]
        # the rollout ranks that receive messages: the first rank of each engine, for all its ranks
        self.leaders = distributed.rollout_ranks[:: args.tensor_parallel_size]
        self.rows: dict[int, dict] = {}  # of this rank's prompts in flight
        self.sent_version: int | None = None
        self.ready = 0  # rollout ranks that wait for weights
        self.load = Meter()  # from the rollout ranks, since the last rollout
        self.last_rollout = time.perf_counter()
        self.waited = 0.0  # seconds of waiting since then

    def __str__(self) -> str:
        ranks = len(distributed.rollout_ranks)
        return f"{ranks} rollout ranks (staleness up to {self.args.max_staleness})"

    def close(self) -> None:
        for rollout_rank in distributed.rollout_ranks:
            self._send(rollout_rank, None)
        self.mail.flush()
        for thread in self.mail.threads:
            thread.join()
        close_link(self.link)

    def _request(self, requests: list[PromptRequest], step: int, meter: Meter) -> None:
        """Send the weights after `step` steps, unless they are there, and the prompts of all
        ranks."""
        if self.sent_version != step:
            self._send_weights(step, meter)
        self.rows |= {request.number: request.row for request in self._share(requests)}
        if not self.args.has_turns:
            requests = [replace(each, row=row_for_engine(each.row)) for each in requests]
        for leader, engine_requests in self._by_leader(requests).items():
            self._send(leader, NewPrompts(engine_requests))

    def _by_leader(self, requests: list[PromptRequest]) -> dict[int, list[PromptRequest]]:
        """Return the requests of each engine."""
        divided: dict[int, list[PromptRequest]] = {leader: [] for leader in self.leaders}
        first = distributed.rollout_ranks.start
        for request in requests:
            engine = (generating_rank(request) - first) // self.args.tensor_parallel_size
            divided[self.leaders[engine]].append(request)
        return divided

    def _send_weights(self, step: int, meter: Meter) -> None:
        for leader in self.leaders:
            self._send(leader, NewWeights(step, self.names_and_shapes))
        self._wait(lambda: self.ready == len(distributed.rollout_ranks), meter)
        with meter.time("sync"):
            for _, weight in whole_weights(self.policy, self.dtype):
                if self.link is not None:
                    self.link.broadcast(weight, 0).wait()
        self.ready = 0
        self.sent_version = step

    def _send(self, rollout_rank: int, message: object) -> None:
        if self.queue.rank == 0:
            self.mail.send(message, rollout_rank)

    def _receive(self, message: ReadyForWeights | CompleteGroups | None) -> None:
        """Begin the rewards of new groups at once. Runs in the threads of `mail`."""
        if isinstance(message, CompleteGroups):
            for number, group in message.groups.items():
                row = self.rows.pop(number)
                for sequence in chain(*(completion.sequences for completion in group)):
                    sequence.row = row
                self.rewards.begin([group], number)  # groups with smaller numbers first
        self.mail.inbox.put(message)

    def _wait(self, is_ready: Callable[[], bool], meter: Meter) -> None:
        """Process messages of the rollout ranks until `is_ready`."""
        began = time.perf_counter()
        with meter.time("rollout"):
            while not is_ready():
                message = self.mail.inbox.get()
                self.load.add(message.load)
                if isinstance(message, ReadyForWeights):
                    self.ready += 1
                else:
                    self.groups |= message.groups
                    if message.stop:
                        process.stop_signalled = True
        self.waited += time.perf_counter() - began

    def _wait_for_step(self, meter: Meter) -> None:
        # Groups that are scored together are packed together. Without staleness all bits equal
        # those of a run without rollout ranks, so all groups of the step are scored at once.
        if self.rewards.collective and self.args.max_staleness > 0:
            for portion in range(1, PORTIONS):
                self._score_portion(portion / PORTIONS, meter)
        super()._wait_for_step(meter)
        now = time.perf_counter()
        meter.mean("idle/training_ranks", self.waited, now - self.last_rollout)
        meter.add(self.load)
        self.load = Meter()
        self.waited = 0.0
        self.last_rollout = now

    def _score_portion(self, fraction: float, meter: Meter) -> None:
        """Score the complete groups when they are this fraction of the step. Collective."""
        own = {*self.queue.own}
        self._wait(lambda: len(own & self.groups.keys()) >= fraction * len(own), meter)
        with meter.time("reward"):
            self.rewards.ask_models(list(self.groups.values()))
