"""Generating and training at the same time, on different ranks (Noukhovitch et al. 2024, arXiv:2410.18252).

`submit` sends prompts to the rollout ranks, which are in `serve`: a step's, and those of up to `--max_staleness` steps
beyond it. Each rollout rank has its own share of them in work, all the time, as many as its engine has room for, and
sends a prompt's completions to the rank that will learn from them when they are there. `collect` waits for what it
needs.

Weights have the number of finished steps as their version. `collect` first hands over those of now: the rollout ranks
stop after the token they are at, or with `--partial_rollouts false` after the completions they are at, take them, and
go on.
"""

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from common.config.groups import OnlineArgs
from common.metrics.meter import Meter
from common.metrics.timeline import Span, Timeline
from common.model.hub import eos_token_ids, load_tokenizer, resolve_model
from common.model.policy import Policy, compute_dtype
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout.engines import make_engine, whole_weights
from common.rollout.episodes import Episodes
from common.rollout.messages import Done, Mail, NewWeights, Ready, Work, close_link, leaders, weights_link, worker
from common.rollout.prompts import Prompts
from common.rollout.sampler import Group, Prompt, Rollouts

PARTS = 4  # of a step's prompts: reward models are asked about each when it is complete


def make_rollouts(
    model: Policy, prompts: Prompts, args: OnlineArgs, tokenizer, device: torch.device, rewards: Rewards | None = None
) -> Rollouts:
    """Completions of `prompts` by `model`, by this process or by the rollout ranks, and their `rewards` begun. Call it
    on every rank that trains.

    Raises `ValueError` for an engine that cannot be had.
    """
    return (RemoteRollouts if args.rollout_ranks else Rollouts)(model, prompts, args, tokenizer, device, rewards)


class RemoteRollouts(Rollouts):
    """Completions from the rollout ranks. Rank 0 speaks to them; they answer every training rank."""

    def _start(self, tokenizer) -> None:
        # What a step may leave to the next one is as old as what would else be begun a step earlier.
        self.ahead = self.args.max_staleness - (self.args.oversample > 1)
        self.dtype = compute_dtype(self.args, self.device)
        self.mail = Mail(self._receive)  # waits for the rollout ranks; the signals are still the system's
        self.link = weights_link(self.device) if self.rank == 0 else None
        distributed.install_signal_handlers()
        self.names_and_shapes = [(name, w.shape) for name, w in whole_weights(self.model, self.dtype)]
        self.sent_version: int | None = None
        self.unsent: list[Prompt] = []  # which wait for weights that they may begin with
        self.ready = 0  # rollout ranks that wait for weights
        self.loads: list[dict[str, tuple[float, float]]] = []  # of rollout ranks
        self.collected_at, self.waited = time.perf_counter(), 0.0  # seconds since then, for rollout ranks

    def __str__(self) -> str:
        return f"{len(distributed.rollout_ranks)} more that generate (staleness up to {self.args.max_staleness})"

    def _ask(self, prompts: list[Prompt]) -> None:
        self.rows |= {prompt.number: prompt.row for prompt in prompts if self._is_mine(prompt.number)}
        self.unsent += prompts

    def _send(self, step: int, meter: Meter) -> None:
        """The weights of now, and what may begin with them."""
        if self.sent_version != step:
            self._give_weights(step, meter)
        if not self.args.environment:
            self.unsent = [replace(prompt, row={}) for prompt in self.unsent]
        for leader in leaders(self.args):
            theirs = range(leader, leader + self.args.tensor_parallel_size)
            self._tell(leader, Work([prompt for prompt in self.unsent if worker(prompt.number) in theirs]))
        self.unsent = []

    def _tell(self, rollout_rank: int, message: object) -> None:
        if self.rank == 0:
            self.mail.send(message, rollout_rank)

    def _receive(self, message: Ready | Done | None) -> None:
        """In the threads of the mail."""
        for number, group in message.groups.items() if isinstance(message, Done) else ():
            self._arrived(number, group)
        self.mail.inbox.put(message)

    def _wait(self, until: Callable[[], bool], meter: Meter) -> None:
        """For messages of the rollout ranks."""
        began = time.perf_counter()
        with meter.time("rollout"):
            while not until():
                message = self.mail.inbox.get()
                if isinstance(message, Ready):
                    self.ready += 1
                elif isinstance(message, Done):
                    self.done |= message.groups
                    if message.stop:
                        distributed.tell_to_stop()
                self.loads.append(message.load)
        self.waited += time.perf_counter() - began

    def _give_weights(self, step: int, meter: Meter) -> None:
        for leader in leaders(self.args):
            self._tell(leader, NewWeights(step, self.names_and_shapes))
        self._wait(lambda: self.ready == len(distributed.rollout_ranks), meter)
        with meter.time("sync"):
            for _, weight in whole_weights(self.model, self.dtype):
                if self.link is not None:
                    self.link.broadcast(weight, 0).wait()
        self.ready, self.sent_version = 0, step

    def _sample(self, step: int, meter: Meter) -> None:
        self._send(step, meter)
        # In parts they are packed otherwise: without staleness every bit is that of the colocated run.
        if self.rewards is not None and self.rewards.collective and self.args.max_staleness > 0:
            self._ask_models_meanwhile(meter)
        self._wait(lambda: self._chosen(step) is not None, meter)
        now = time.perf_counter()
        meter.mean("idle/training_ranks", self.waited, now - self.collected_at)
        self.collected_at, self.waited = now, 0.0
        for load in self.loads:
            for name, (total, weight) in load.items():
                meter.mean(name, total, weight)
        self.loads = []

    def _ask_models_meanwhile(self, meter: Meter) -> None:
        """What reward models say of what is complete, while the rest is sampled. Collective: all ranks ask as often."""
        for part in range(1, PARTS):
            self._wait(lambda part=part: self._has_part(part), meter)
            with meter.time("reward"):
                self.rewards.ask_models(list(self.done.values()))

    def _has_part(self, part: int) -> bool:
        _, complete, count = self._progress()
        return PARTS * len(complete) >= part * count

    def _sample_all(self, step: int, numbers: list[int]) -> None:
        self._send(step, meter := Meter())
        self._wait(lambda: all(number in self.done for number in numbers), meter)

    def close(self) -> None:
        for rollout_rank in distributed.rollout_ranks:
            self._tell(rollout_rank, None)
        self.mail.flush()
        for thread in self.mail.threads:
            thread.join()
        close_link(self.link)


# ---- the other side ----


class Load:
    """How busy a rollout rank is: sums and their weights, since it was last asked; and when it did what."""

    def __init__(self, output_dir: str) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.timeline, self.spans = Timeline(output_dir), []
        self.what, self.since = "wait", time.time()
        self.began = self.since  # of what it does now

    def add(self, name: str, total: float, weight: float = 1.0) -> None:
        before, weights = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = before + total, weights + weight

    def does(self, what: str) -> None:
        """`sample`, `wait` or `weights`, from now on."""
        now = time.time()
        self.add("idle/rollout_ranks", (now - self.since) * (self.what == "wait"), now - self.since)
        if what != self.what:
            self.spans.append(Span(self.what, self.began, now))
            self.what, self.began = what, now
        self.since = now

    def take(self) -> dict[str, tuple[float, float]]:
        self.timeline.add(self.spans)
        sums, self.sums, self.spans = self.sums, {}, []
        return sums


def serve(args: OnlineArgs, device: torch.device) -> None:
    """What a rollout rank does instead of training: generate until the training ranks are done."""
    distributed.default_signals()  # until the training ranks can be told
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path, args)
    engine = make_engine(path, args, eos_token_ids(path, tokenizer, args.prompt_format), tokenizer, device)
    episodes = Episodes(engine, args, tokenizer)
    engine.wake()
    distributed.default_signals()  # it has put our handlers back
    mail, link, load = Mail(), weights_link(device), Load(args.output_dir)
    distributed.install_signal_handlers()
    rank, trainers = distributed.rollout_ranks[torch.distributed.get_rank()], distributed.training_ranks

    def send(groups: list[tuple[int, Group]]) -> None:
        for i, trainer in enumerate(trainers):  # what is done at the same turn travels together
            if theirs := {number: group for number, group in groups if number % len(trainers) == i}:
                mail.send(Done(theirs, distributed.told_to_stop(), load.take()), trainer)

    while True:
        idle = not engine.any_rank(episodes.busy)
        load.does("wait" if idle else "sample")
        messages = engine.together(_messages(mail, wait=idle) if engine.place == 0 else None)[0]
        for message in messages:
            if message is None:
                for trainer in trainers:
                    mail.send(None, trainer)
                mail.flush()
                close_link(link)
                episodes.close()
                engine.interrupt()
                engine.close()
                return distributed.cleanup()
            if isinstance(message, NewWeights):
                if not args.partial_rollouts:
                    send(episodes.finish())
                for trainer in trainers:
                    mail.send(Ready(load.take() if trainer == trainers[0] else {}), trainer)
                load.does("weights")
                engine.load_weights(_received(message, link, engine.dtype, device), message.version)
            else:
                for prompt in message.prompts:
                    if worker(prompt.number) == rank:
                        episodes.begin(*vars(prompt).values())
        send(episodes.step())
        for name, value in engine.occupancy().items():
            load.add(f"engine/{name}", value)


def _messages(mail: Mail, wait: bool) -> list:
    """What has come, in order; with `wait` at least one message, or none after a minute: collectives time out."""
    messages = []
    try:
        while True:
            messages.append(mail.inbox.get(block=wait and not messages, timeout=60))
    except queue.Empty:
        return messages


def _received(message: NewWeights, link, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for name, shape in message.names_and_shapes:
        weight = torch.empty(shape, dtype=dtype, device=device)
        link.broadcast(weight, 0).wait()
        yield name, weight
