"""`--rollout_ranks`: sampling on dedicated ranks while the other ranks train (Noukhovitch et al.
2024, arXiv:2410.18252).

At each step rank 0 sends an order to the rollout ranks: load the new weights, which it broadcasts
next, and sample the prompts of this step and of up to `--max_staleness` further steps. They
interrupt their completions, load the weights and go on. The version of the weights is the number of
finished steps. A rollout rank samples its part of the prompts, and sends each complete group to the
training rank that scores it (`is_own`). A step waits until its groups have arrived."""

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
from common.metrics.meter import Meter
from common.model.hub import resolve_model
from common.model.policy import Policy, compute_dtype
from common.packs.sample import Group
from common.parallel import distributed, process
from common.rollout.engine import Engine, EngineOptions
from common.rollout.engines import make_engine
from common.rollout.episodes import Episodes, OnComplete, PromptRequest, is_own
from common.rollout.weights import sync_weights, whole_weights
from common.text.tokenizer import load_tokenizer

# ---- messages over gloo ----


@dataclass
class SamplingOrder:
    """From rank 0 to each engine: load these weights, then sample these prompts."""

    requests: list[PromptRequest]
    """prompts of all rollout ranks; each takes its own"""
    version: int
    weights: list[tuple[str, torch.Size, torch.dtype]]
    """name, shape and dtype of each weight that rank 0 broadcasts next, in this order; empty if the
    engine already has the weights of this version"""


@dataclass
class SampledGroup:
    """From a rollout rank to the training rank that scores it: a complete group."""

    group: Group
    meter: Meter
    """metrics of the rollout rank since its last message"""


class Channel:
    """Messages between the training ranks and the rollout ranks.

    One thread listens to each sender: messages are read at once, also during a training step."""

    def __init__(self, receive: Callable[[object], None]) -> None:
        """The threads call `receive` with each message. Collective over all ranks of the launch."""
        ranks = [*distributed.training_ranks, *distributed.rollout_ranks]
        self.link = distributed.link("messages", ranks, torch.device("cpu"))
        # Of the training ranks only rank 0 sends.
        senders = ranks[:1] if distributed.is_rollout_rank() else distributed.rollout_ranks
        self.threads = [
            threading.Thread(target=self._listen, args=(rank, receive), daemon=True)
            for rank in senders
        ]
        for thread in self.threads:
            thread.start()

    def send(self, message: object, rank: int) -> None:
        """Send a message to a rank of the launch. None says that no more will come."""
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        for x in (torch.tensor([len(data)]), data):
            self.link.send([x], rank, 0).wait()

    def close(self) -> None:
        """Wait until every sender has sent its last message."""
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
        except Exception as error:  # a dead sender or a bug; without this the run would hang
            process.fail_in_thread(error)


def weights_link(device: torch.device) -> torch.distributed.ProcessGroup:
    """Return the process group in which rank 0 broadcasts weights to the rollout ranks."""
    return distributed.link("weights", [0, *distributed.rollout_ranks], device)


def close_link(link: torch.distributed.ProcessGroup | None) -> None:
    """Close an NCCL group, which otherwise warns at exit. A gloo group closes itself."""
    if link is not None and link.name() == "nccl":
        link.abort()


# ---- training ranks ----


class RolloutRanks:
    """The rollout ranks, as a training rank sees them; replaces `ColocatedEngine` (sampler.py)."""

    def __init__(self, policy: Policy, args: OnlineArgs, on_complete: OnComplete):
        self.policy = policy
        self.args = args
        self.on_complete = on_complete
        self.steps_ahead = args.max_staleness
        self.dtype = compute_dtype(args, policy.device)
        self.rows: dict[int, dict] = {}  # by number, rows of prompts whose groups will come here
        self.arrived: dict[int, SampledGroup] = {}  # complete groups that no step has taken yet
        self.channel = Channel(self._receive)  # this waits until the rollout ranks have started
        self.link = weights_link(policy.device) if distributed.is_main() else None
        self.weights = [(name, x.shape, x.dtype) for name, x in whole_weights(policy, self.dtype)]
        self.version: int | None = None  # version of the weights on the rollout ranks
        self.last_wait = time.perf_counter()

    def __str__(self) -> str:
        ranks = len(distributed.rollout_ranks)
        return f"{ranks} rollout ranks (staleness up to {self.args.max_staleness})"

    def close(self) -> None:
        if distributed.is_main():
            for rank in distributed.rollout_ranks:
                self.channel.send(None, rank)
        self.channel.close()
        close_link(self.link)

    def complete(
        self, requests: list[PromptRequest], own_numbers: list[int], step: int, meter: Meter,
        stops: bool = True,
    ) -> list[Group]:  # fmt: skip
        """Have the rollout ranks complete the `requests` of all ranks with the weights after `step`
        steps; send the weights first if they are new. Then wait for the groups of this rank's
        `own_numbers`, some of which an earlier step has requested, and return them. If `stops`, a
        stop signal ends the wait, and only the groups that have arrived are returned.

        Logs the age of the weights that sampled the groups, and how long training ranks and rollout
        ranks have waited since the last call. Collective."""
        self.rows |= {each.number: each.row for each in requests if is_own(each.number)}
        distributed.barrier()  # a group must not reach a rank that does not know its row yet
        self._send(requests, step, meter)
        began = time.perf_counter()
        with meter.time("rollout"):
            needed = set(own_numbers)
            while not (needed <= self.arrived.keys() or (stops and distributed.stop_heard())):
                time.sleep(0.005)
        now = time.perf_counter()
        if any(each.number < 0 for each in requests):  # held-out prompts: do not count their time
            self.last_wait += now - began
        else:
            meter.mean("idle/training_ranks", now - began, now - self.last_wait)
            self.last_wait = now
        messages = [self.arrived.pop(number) for number in own_numbers if number in self.arrived]
        for message in messages:
            meter.add(message.meter)
        groups = [message.group for message in messages]
        measure_staleness(meter, groups, step)
        return groups

    def _send(self, requests: list[PromptRequest], step: int, meter: Meter) -> None:
        is_new = self.version != step
        self.version = step
        if distributed.is_main():
            if not self.args.has_turns:  # rows may be large, and the engine reads only their images
                requests = [
                    replace(each, row=dict(_images=each.row.get("_images"))) for each in requests
                ]
            order = SamplingOrder(requests, step, self.weights if is_new else [])
            for engine in distributed.rollout_ranks[:: self.args.tensor_parallel_size]:
                self.channel.send(order, engine)  # to the first rank of each engine
        if is_new:
            with meter.time("sync"):
                for _, weight in whole_weights(self.policy, self.dtype):
                    if self.link is not None:
                        self.link.broadcast(weight, 0).wait()

    def _receive(self, message: SampledGroup | None) -> None:
        """Take a group from a rollout rank: give it its data row, and start its rewards at once
        (`on_complete`), while the main thread may still train. Runs in the channel's threads."""
        if message is not None:  # None: the last message
            row = self.rows.pop(message.group[0].number)
            for sequence in chain(*(completion.sequences for completion in message.group)):
                sequence.row = row
            self.on_complete(message.group)
            self.arrived[message.group[0].number] = message


def measure_staleness(meter: Meter, groups: list[Group], step: int) -> None:
    """Log how many steps old the weights were that sampled the completions of step `step`."""
    for completion in chain(*(sample.sequences for sample in chain(*groups))):
        ages = [step - version for version in completion.versions or () if version >= 0]
        spread = max(ages) - min(ages)
        meter.mean("sampling/staleness/mean", sum(ages), len(ages))
        meter.max("sampling/staleness/max", max(ages))
        meter.mean("sampling/version_spread/mean", spread)
        meter.max("sampling/version_spread/max", spread)


# ---- rollout ranks ----


def serve_until_end(args: OnlineArgs, device: torch.device, options: EngineOptions) -> None:
    """Sample on a rollout rank until training ends."""
    path = resolve_model(args.model)
    engine = make_engine(path, args, load_tokenizer(path, args), device, options=options)
    episodes = Episodes(engine, args)
    inbox: queue.Queue[SamplingOrder | None] = queue.Queue()
    channel = Channel(inbox.put)
    link = weights_link(device)
    process.note_signals()  # from here on this rank passes a stop signal on to the training ranks
    _sample_until_end(engine, episodes, inbox, channel, link)
    for rank in distributed.training_ranks:
        channel.send(None, rank)
    channel.close()
    close_link(link)
    episodes.close()
    engine.close()
    distributed.cleanup()


def _sample_until_end(
    engine: Engine, episodes: Episodes, inbox: queue.Queue, channel: Channel, link
) -> None:
    """Sample until rank 0 sends None. After each round of the engine, follow the orders that have
    come. With tensor parallelism, the first rank of the engine gets them and shares them."""
    meter = Meter()
    last = time.monotonic()
    while True:
        distributed.stop_heard()  # passes a stop signal on to the training ranks
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
            if order.weights:
                sync_weights(engine, _received(order, link, engine), order.version)
            for request in order.requests:
                if request.number % len(distributed.rollout_ranks) == distributed.rank():
                    episodes.add(request)
        for number, group in episodes.advance(meter).items():
            trainer = number % len(distributed.training_ranks)  # as in `is_own`
            channel.send(SampledGroup(group, meter), trainer)
            meter = Meter()


def _received(order: SamplingOrder, link, engine: Engine) -> Iterator[tuple[str, Tensor]]:
    for name, shape, dtype in order.weights:
        weight = torch.empty(shape, dtype=dtype, device=engine.device)
        link.broadcast(weight, 0).wait()
        yield name, weight
