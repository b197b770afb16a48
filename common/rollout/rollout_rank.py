"""`--rollout_ranks`: a rank that only generates, for the training ranks (remote_sampler.py)."""

import queue
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from common.config.online import OnlineArgs
from common.data.sample import Group
from common.metrics.meter import Meter
from common.model.hub import eos_token_ids, load_tokenizer, resolve_model
from common.parallel import distributed, process
from common.rollout.engine import Engine
from common.rollout.engines import make_engine
from common.rollout.episodes import Episodes
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


class Activity:
    """Present activity of a rollout rank, and its metrics for the training ranks."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.name = "wait"
        self.measured = time.monotonic()  # time of the last call of `switch`

    def switch(self, name: str) -> None:
        """Record the activity until now, and begin or continue `sample`, `wait` or `weights`."""
        now = time.monotonic()
        seconds = now - self.measured
        idle = seconds if self.name == "wait" else 0.0
        self.meter.mean("idle/rollout_ranks", idle, seconds)
        self.measured = now
        self.name = name

    def take(self) -> Meter:
        """Return the metrics since the last call."""
        meter = self.meter
        self.meter = Meter()
        return meter


def generate_until_training_ends(args: OnlineArgs, device: torch.device) -> None:
    path = resolve_model(args.model, rope_factor=args.rope_factor)
    tokenizer = load_tokenizer(path, args)
    eos_ids = eos_token_ids(path, tokenizer, args.prompt_format, args.stop_token_ids)
    engine = make_engine(path, args, eos_ids, tokenizer, device)
    episodes = Episodes(engine, args)
    engine.wake()
    mail = Mail()
    link = weights_link(device)
    process.note_signals()  # a stop can reach the training ranks now
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
    activity = Activity()
    rank = distributed.rollout_ranks[torch.distributed.get_rank()]
    while True:
        is_idle = not engine.any_rank(episodes.are_in_flight)
        activity.switch("wait" if is_idle else "sample")
        messages = _new_messages(mail, wait=is_idle) if engine.group_rank == 0 else []
        for message in engine.gather_in_engine(messages)[0]:
            if message is None:
                return
            if isinstance(message, NewPrompts):
                for request in message.requests:
                    if generating_rank(request) == rank:
                        episodes.add(request)
            else:
                for trainer in distributed.training_ranks:
                    mail.send(ReadyForWeights(activity.take()), trainer)
                activity.switch("weights")
                engine.load_weights(_received_weights(message, link, engine), message.version)
        _send_groups(episodes.advance(), mail, activity)
        engine.measure(activity.meter)


def _send_groups(groups: list[tuple[int, Group]], mail: Mail, activity: Activity) -> None:
    """Send each group to the rank that will train on it."""
    trainers = distributed.training_ranks
    for i, trainer in enumerate(trainers):
        share = {number: group for number, group in groups if number % len(trainers) == i}
        if share:
            mail.send(CompleteGroups(share, process.stop_signalled, activity.take()), trainer)


def _new_messages(mail: Mail, wait: bool) -> list:
    """Return the new messages in order. With `wait`, wait for the first one, but at most a minute
    because the other ranks of the engine wait in a collective."""
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
