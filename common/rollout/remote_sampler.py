"""Sampling on dedicated rollout ranks while the other ranks train (Noukhovitch et al. 2024, arXiv:2410.18252).

The training ranks send the prompts of a step and of up to `--max_staleness` further steps to the rollout ranks, which
run `serve`. Each rollout rank always has its share of them in flight and sends each complete group to the rank that
will train on it. A rollout waits for the groups that it needs.

The version of weights is the number of finished steps. A rollout first sends the present weights. The rollout ranks
interrupt their completions, or with `--partial_rollouts false` finish them, load the weights and go on.
"""

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from common.config.groups import OnlineArgs
from common.data.order import Order, make_order
from common.data.sample import Group
from common.metrics.meter import Meter
from common.metrics.timeline import Span, Timeline
from common.model.hub import eos_token_ids, load_tokenizer, resolve_model
from common.model.policy import Policy, compute_dtype
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout.engine import Engine
from common.rollout.engines import make_engine, whole_weights
from common.rollout.episodes import Episodes, PromptRequest
from common.rollout.messages import (
    CompleteGroups,
    Mail,
    NewPrompts,
    NewWeights,
    ReadyForWeights,
    close_link,
    weights_link,
)
from common.rollout.prompts import Prompts
from common.rollout.sampler import LocalSampler, Sampler

PARTS = 4  # parts of a step's prompts: reward models score each part when it is complete


def generating_rank(number: int) -> int:
    """Return the rollout rank that completes the prompt with this number."""
    return distributed.rollout_ranks[number % len(distributed.rollout_ranks)]


def leaders(args: OnlineArgs) -> range:
    """Return the rollout ranks that receive messages: the first rank of each engine, for all its ranks."""
    return distributed.rollout_ranks[:: args.tensor_parallel_size]


def make_sampler(
    policy: Policy, prompts: Prompts, args: OnlineArgs, tokenizer, rewards: Rewards, order: Order | None = None
) -> Sampler:
    """Return the sampler of `prompts` for the present flags. It begins `rewards` of complete groups. `order`: order of
    the prompts, by default that of `make_order`. Call on every training rank. Raises `ValueError` for an engine that is
    not available."""
    kind = RemoteSampler if args.rollout_ranks else LocalSampler
    return kind(policy, prompts, args, tokenizer, rewards, order or make_order(prompts.rows, args))


class RemoteSampler(Sampler):
    """Sampler on the rollout ranks. Rank 0 sends them prompts and weights; they send groups to every training rank."""

    def __init__(self, policy: Policy, prompts: Prompts, args: OnlineArgs, tokenizer, rewards: Rewards, order: Order):
        # With --oversample a step leaves prompts in flight, as old as those that are begun one step ahead without it.
        prefetch_steps = args.max_staleness - (args.oversample > 1)
        super().__init__(policy, prompts, args, rewards, order, prefetch_steps)
        self.dtype = compute_dtype(args, policy.device)
        self.mail = Mail(self._receive)  # waits for the rollout ranks: until then signals end the process
        self.link = weights_link(policy.device) if self.queue.rank == 0 else None
        distributed.install_signal_handlers()
        self.names_and_shapes = [(name, weight.shape) for name, weight in whole_weights(policy, self.dtype)]
        self.rows: dict[int, dict] = {}  # of this rank's prompts in flight
        self.sent_version: int | None = None
        self.ready = 0  # rollout ranks that wait for weights
        self.load = Meter()  # from the rollout ranks, since the last rollout
        self.waited, self.last_rollout = 0.0, time.perf_counter()  # seconds of waiting since then

    def __str__(self) -> str:
        return f"{len(distributed.rollout_ranks)} rollout ranks (staleness up to {self.args.max_staleness})"

    def rollout(self, step: int, total_steps: int, meter: Meter, size: int | None = None) -> list[Group] | None:
        self._send(self._draw(step, total_steps, size), step, meter)
        # Groups that are scored together are packed together. Without staleness all bits equal those of a run without
        # rollout ranks, so all groups of the step are scored at once.
        if self.rewards.collective and self.args.max_staleness > 0:
            for part in range(1, PARTS):
                self._wait(lambda part=part: self.queue.fraction_complete(self.groups) >= part / PARTS, meter)
                with meter.time("reward"):
                    self.rewards.ask_models(list(self.groups.values()))
        self._wait(self._is_ready, meter)
        now = time.perf_counter()
        meter.mean("idle/training_ranks", self.waited, now - self.last_rollout)
        meter.add(self.load)
        self.load, self.waited, self.last_rollout = Meter(), 0.0, now
        return self._take(step, meter)

    def sample_now(self, step: int, prompts: Prompts, seeds: list[int], n: int, temperature: float) -> list[Group]:
        requests, meter = self._urgent(prompts, seeds, n, temperature), Meter()
        numbers = [request.number for request in requests if self.queue.is_here(request.number)]
        self._send(requests, step, meter)
        self._wait(lambda: self.groups.keys() >= set(numbers), meter)
        return [self.groups.pop(number) for number in numbers]

    def close(self) -> None:
        for rollout_rank in distributed.rollout_ranks:
            self._send_to(rollout_rank, None)
        self.mail.flush()
        for thread in self.mail.threads:
            thread.join()
        close_link(self.link)

    def _send(self, requests: list[PromptRequest], step: int, meter: Meter) -> None:
        """Send the weights after `step` steps, unless they are there, and the prompts of all ranks."""
        if self.sent_version != step:
            self._send_weights(step, meter)
        self.rows |= {request.number: request.row for request in requests if self.queue.is_here(request.number)}
        if not self.args.environment:
            requests = [replace(request, row={}) for request in requests]
        for leader in leaders(self.args):
            ranks = range(leader, leader + self.args.tensor_parallel_size)
            self._send_to(leader, NewPrompts([r for r in requests if generating_rank(r.number) in ranks]))

    def _send_weights(self, step: int, meter: Meter) -> None:
        for leader in leaders(self.args):
            self._send_to(leader, NewWeights(step, self.names_and_shapes))
        self._wait(lambda: self.ready == len(distributed.rollout_ranks), meter)
        with meter.time("sync"):
            for _, weight in whole_weights(self.policy, self.dtype):
                if self.link is not None:
                    self.link.broadcast(weight, 0).wait()
        self.ready, self.sent_version = 0, step

    def _send_to(self, rollout_rank: int, message: object) -> None:
        if self.queue.rank == 0:
            self.mail.send(message, rollout_rank)

    def _receive(self, message: ReadyForWeights | CompleteGroups | None) -> None:
        """Begin the rewards of new groups at once. Runs in the threads of `mail`."""
        for number, group in message.groups.items() if isinstance(message, CompleteGroups) else ():
            row = self.rows.pop(number)
            for completion in group:
                completion.row = row
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
                        distributed.request_stop()
        self.waited += time.perf_counter() - began


# ---- the rollout ranks ----


class Activity:
    """Present activity of a rollout rank, its metrics for the training ranks and its spans in the timeline."""

    def __init__(self, output_dir: str) -> None:
        self.meter, self.timeline = Meter(), Timeline(output_dir)
        self.what, self.began = "wait", time.time()
        self.measured = self.began  # time of the last call of `switch`

    def switch(self, what: str) -> None:
        """Record the activity until now, and begin or continue `sample`, `wait` or `weights`."""
        now = time.time()
        self.meter.mean("idle/rollout_ranks", (now - self.measured) * (self.what == "wait"), now - self.measured)
        self.measured = now
        if what != self.what:
            self.timeline.add([Span(self.what, self.began, now)])
            self.what, self.began = what, now

    def take(self) -> Meter:
        """Return the metrics since the last call."""
        meter, self.meter = self.meter, Meter()
        return meter


def serve(args: OnlineArgs, device: torch.device) -> None:
    """Generate on a rollout rank until training ends."""
    distributed.default_signals()  # a stop cannot reach the training ranks yet
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path, args)
    engine = make_engine(path, args, eos_token_ids(path, tokenizer, args.prompt_format), tokenizer, device)
    episodes = Episodes(engine, args, tokenizer)
    engine.wake()
    distributed.default_signals()  # the engine has installed our handlers
    mail, link = Mail(), weights_link(device)
    distributed.install_signal_handlers()
    _generate(args, engine, episodes, mail, link)
    for trainer in distributed.training_ranks:
        mail.send(None, trainer)
    mail.flush()
    close_link(link)
    episodes.close()
    engine.interrupt()
    engine.close()
    distributed.cleanup()


def _generate(args: OnlineArgs, engine: Engine, episodes: Episodes, mail: Mail, link) -> None:
    """Process messages of the training ranks and sample in between, until they send None."""
    activity = Activity(args.output_dir)
    rank, trainers = distributed.rollout_ranks[torch.distributed.get_rank()], distributed.training_ranks

    def send(groups: list[tuple[int, Group]]) -> None:
        for i, trainer in enumerate(trainers):
            if own := {number: group for number, group in groups if number % len(trainers) == i}:
                mail.send(CompleteGroups(own, distributed.stop_signalled(), activity.take()), trainer)

    while True:
        idle = not engine.any_rank(episodes.busy)
        activity.switch("wait" if idle else "sample")
        messages = engine.gather_in_engine(_messages(mail, wait=idle) if engine.group_rank == 0 else None)[0]
        for message in messages:
            if message is None:
                return
            if isinstance(message, NewPrompts):
                for request in message.requests:
                    if generating_rank(request.number) == rank:
                        episodes.begin(request)
            else:
                if not args.partial_rollouts:
                    send(episodes.finish())
                for trainer in trainers:
                    mail.send(ReadyForWeights(activity.take()), trainer)
                activity.switch("weights")
                engine.load_weights(_received_weights(message, link, engine), message.version)
        send(episodes.step())
        engine.measure(activity.meter)


def _messages(mail: Mail, wait: bool) -> list:
    """Return the new messages in order. With `wait`, wait for the first one, but at most a minute because the other
    ranks of the engine wait in a collective."""
    messages = []
    try:
        while True:
            messages.append(mail.inbox.get(block=wait and not messages, timeout=60))
    except queue.Empty:
        return messages


def _received_weights(message: NewWeights, link, engine: Engine) -> Iterator[tuple[str, Tensor]]:
    for name, shape in message.names_and_shapes:
        weight = torch.empty(shape, dtype=engine.dtype, device=engine.device)
        link.broadcast(weight, 0).wait()
        yield name, weight
