"""`--rollout_ranks`: sampling on dedicated ranks while the other ranks train (Noukhovitch et al.
2024, arXiv:2410.18252).

Rank 0 sends the prompts of a step and of up to `--max_staleness` further steps to the rollout
ranks. Each rollout rank always has its share of them in flight, and sends each complete group to
the rank that will train on it. A rollout waits for the groups that it needs.

The version of weights is the number of finished steps. A rollout first sends the present weights.
The rollout ranks interrupt their completions, load the weights and go on."""

import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from common.config.online import OnlineArgs
from common.data.sample import Group
from common.metrics.meter import Meter
from common.model.hub import load_tokenizer, resolve_model
from common.model.policy import Policy, compute_dtype
from common.parallel import distributed, process
from common.parallel.process import fail_in_thread
from common.rollout.engine import Engine
from common.rollout.engines import make_engine
from common.rollout.episodes import Episodes, OnComplete, PromptRequest
from common.rollout.weights import whole_weights

# ---- messages over gloo ----


@dataclass
class Orders:
    """From rank 0 to each engine: prompts of all rollout ranks and, before they begin, weights."""

    requests: list[PromptRequest]
    version: int
    names_and_shapes: list[tuple[str, torch.Size]]
    """of the weights whose broadcast follows, in this order; none if the engine has them"""


@dataclass
class News:
    """From a rollout rank to a training rank."""

    groups: list[Group]
    """those that are complete since its last message"""
    meter: Meter
    """metrics of the rollout rank since its last message"""
    stop: bool
    """whether the rollout rank received a signal to stop"""


class Mail:
    """Messages to and from the ranks of the other role.

    A thread receives from each, so that a message is taken at once, whatever this rank does. If a
    rank of the other role dies, such a thread ends this process."""

    def __init__(self, receive: Callable[[object], None]) -> None:
        """`receive` is called with each message, in the receiving threads. Collective over all
        ranks of the launch."""
        ranks = [*distributed.training_ranks, *distributed.rollout_ranks]
        self.link = distributed.link("mail", ranks, torch.device("cpu"))
        # Of the training ranks only rank 0 sends.
        senders = ranks[:1] if distributed.is_rollout_rank() else distributed.rollout_ranks
        self.threads = [
            threading.Thread(target=self._listen, args=(rank, receive), daemon=True)
            for rank in senders
        ]
        for thread in self.threads:
            thread.start()

    def send(self, message: object, rank: int) -> None:
        """Send a message to a rank of the launch; None is the last one."""
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        for x in (torch.tensor([len(data)]), data):
            self.link.send([x], rank, 0).wait()

    def close(self) -> None:
        """Wait for the last messages."""
        for thread in self.threads:
            thread.join()

    def _listen(self, rank: int, receive: Callable[[object], None]) -> None:
        message: object = ""
        try:
            while message is not None:
                size = torch.empty(1, dtype=torch.int64)
                self.link.recv([size], rank, 0).wait()
                data = torch.empty(int(size), dtype=torch.uint8)
                self.link.recv([data], rank, 0).wait()
                message = pickle.loads(data.numpy())
                receive(message)
        except Exception as error:  # the rank has died, or a bug: without this the run would hang
            fail_in_thread(error)


def weights_link(device: torch.device) -> torch.distributed.ProcessGroup:
    """Return the group in which rank 0 broadcasts weights to the rollout ranks."""
    return distributed.link("weights", [0, *distributed.rollout_ranks], device)


def close_link(link: torch.distributed.ProcessGroup | None) -> None:
    """Close an NCCL group, which otherwise warns at exit. A gloo group closes itself."""
    if link is not None and link.name() == "nccl":
        link.abort()


# ---- training ranks ----


class RolloutRanks:
    """The engines of the rollout ranks, in place of a `ColocatedEngine` (sampler.py)."""

    def __init__(self, policy: Policy, args: OnlineArgs, on_complete: OnComplete):
        self.policy = policy
        self.args = args
        self.on_complete = on_complete
        self.steps_ahead = args.max_staleness
        self.dtype = compute_dtype(args, policy.device)
        self.rows: dict[int, dict] = {}  # of this rank's prompts in flight
        self.groups: dict[int, Group] = {}  # complete ones that are not taken yet
        self.inbox: queue.Queue[News] = queue.Queue()
        self.mail = Mail(self._receive)  # waits for the rollout ranks
        self.link = weights_link(policy.device) if distributed.is_main() else None
        self.names_and_shapes = [
            (name, weight.shape) for name, weight in whole_weights(policy, self.dtype)
        ]
        self.version: int | None = None  # of the weights that the rollout ranks have
        self.last_wait = time.perf_counter()

    def __str__(self) -> str:
        ranks = len(distributed.rollout_ranks)
        return f"{ranks} rollout ranks (staleness up to {self.args.max_staleness})"

    def close(self) -> None:
        if distributed.is_main():
            for rank in distributed.rollout_ranks:
                self.mail.send(None, rank)
        self.mail.close()
        close_link(self.link)

    def complete(
        self, requests: list[PromptRequest], own: list[int], step: int, meter: Meter
    ) -> list[Group]:
        """Send the prompts of all ranks and the weights after `step` steps, unless they are there.
        Return the groups of this rank's `own` numbers, of which some may have been requested
        before. Measure the ages of their weights, and how long both roles waited since the last
        call. Collective."""
        self.rows |= {each.number: each.row for each in requests if is_own(each.number)}
        distributed.barrier()  # no group comes to a rank before it knows the rows
        self._send(requests, step, meter)
        began = time.perf_counter()
        with meter.time("rollout"):
            while not self.groups.keys() >= set(own):
                news = self.inbox.get()
                self.groups |= {group[0].number: group for group in news.groups}
                meter.add(news.meter)
                process.stop_signalled |= news.stop
        now = time.perf_counter()
        meter.mean("idle/training_ranks", now - began, now - self.last_wait)
        self.last_wait = now
        groups = [self.groups.pop(number) for number in own]
        measure_staleness(meter, groups, step)
        return groups

    def _send(self, requests: list[PromptRequest], step: int, meter: Meter) -> None:
        is_new = self.version != step
        self.version = step
        if distributed.is_main():
            if not self.args.has_turns:  # rows may be large; an engine reads their images only
                requests = [
                    replace(each, row=dict(_images=each.row.get("_images"))) for each in requests
                ]
            orders = Orders(requests, step, self.names_and_shapes if is_new else [])
            for engine in distributed.rollout_ranks[:: self.args.tensor_parallel_size]:
                self.mail.send(orders, engine)  # to the first rank of each
        if is_new:
            with meter.time("sync"):
                for _, weight in whole_weights(self.policy, self.dtype):
                    if self.link is not None:
                        self.link.broadcast(weight, 0).wait()

    def _receive(self, news: News | None) -> None:
        """Give new groups their rows, and hand them on at once. Runs in the threads of `mail`."""
        if news is not None:  # None: the last message
            for group in news.groups:
                row = self.rows.pop(group[0].number)
                for sequence in chain(*(completion.sequences for completion in group)):
                    sequence.row = row
                self.on_complete(group)
            self.inbox.put(news)


def is_own(number: int) -> bool:
    """Return whether this rank trains on the completions of a prompt."""
    return number % distributed.world_size() == distributed.rank()


def measure_staleness(meter: Meter, groups: list[Group], step: int) -> None:
    """Log the age in steps of the weights that sampled the completions of step `step`."""
    for completion in chain(*(sample.sequences for sample in chain(*groups))):
        ages = [step - version for version in completion.versions if version >= 0]
        spread = max(ages) - min(ages)
        meter.mean("sampling/staleness/mean", sum(ages), len(ages))
        meter.max("sampling/staleness/max", max(ages))
        meter.mean("sampling/version_spread/mean", spread)
        meter.max("sampling/version_spread/max", spread)


# ---- rollout ranks ----


def serve(args: OnlineArgs, device: torch.device) -> None:
    """Generate on a rollout rank until training ends."""
    path = resolve_model(args.model)
    engine = make_engine(path, args, load_tokenizer(path, args), device)
    episodes = Episodes(engine, args)
    inbox: queue.Queue[Orders | None] = queue.Queue()
    mail = Mail(inbox.put)
    link = weights_link(device)
    process.note_signals()  # a stop can reach the training ranks now
    _generate(engine, episodes, inbox, mail, link)
    for rank in distributed.training_ranks:
        mail.send(None, rank)
    mail.close()
    close_link(link)
    episodes.close()
    engine.close()
    distributed.cleanup()


def _generate(engine: Engine, episodes: Episodes, inbox: queue.Queue, mail: Mail, link) -> None:
    """Follow the orders of rank 0 and sample in between, until it sends None."""
    rank, ranks = distributed.rank(), len(distributed.rollout_ranks)
    trainers = distributed.training_ranks
    meter = Meter()
    last = time.monotonic()
    while True:
        is_idle = not any(engine.gather_in_engine(bool(episodes.prompts)))
        began = time.monotonic()
        orders = []
        if engine.group_rank == 0:
            if is_idle:
                orders.append(inbox.get())
            while not inbox.empty():
                orders.append(inbox.get())
        orders = engine.gather_in_engine(orders)[0]
        now = time.monotonic()
        meter.mean("idle/rollout_ranks", (now - began) * is_idle, now - last)
        last = now
        for order in orders:
            if order is None:
                return
            if order.names_and_shapes:
                engine.load_weights(_received(order, link, engine), order.version)
            for request in order.requests:
                if request.number % ranks == rank:
                    episodes.add(request)
        complete = episodes.advance(meter)
        for i, trainer in enumerate(trainers):
            groups = [group for group in complete if group[0].number % len(trainers) == i]
            if groups:
                mail.send(News(groups, meter, process.stop_signalled), trainer)
                meter = Meter()


def _received(orders: Orders, link, engine: Engine) -> Iterator[tuple[str, Tensor]]:
    for name, shape in orders.names_and_shapes:
        weight = torch.empty(shape, dtype=engine.dtype, device=engine.device)
        link.broadcast(weight, 0).wait()
        yield name, weight
