"""Generating and training at the same time, on different ranks (Noukhovitch et al. 2024, arXiv:2410.18252).

`submit` sends prompts to the rollout ranks, which are in `serve`: a step's, and up to `--max_staleness` batches beyond
it. `collect` gives them new weights and waits for what is not there yet.

Weights have the number of finished steps as their version. A batch says which version it needs at least; while the
rollout ranks have it they go on to the next batch by themselves, with the newest they were given. They are given new
ones between two steps when nobody would be held up: they have nothing they may do, or the trainers need the very batch
they are at.
"""

import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from common import distributed
from common.config import OnlineArgs
from common.hub import eos_token_ids, load_tokenizer, resolve_model
from common.meter import Meter
from common.models import Policy, compute_dtype
from common.prompts import Prompts
from common.rollout.colocated import Batch, Group, Rollouts
from common.rollout.engine import make_engine, whole_weights
from common.rollout.episodes import Episodes

NO_WEIGHTS = -(1 << 62)  # the version of an engine that has not been given any


def make_rollouts(model: Policy, prompts: Prompts, args: OnlineArgs, tokenizer, device: torch.device) -> Rollouts:
    """Completions of `prompts` by `model`, by this process or by the rollout ranks. Call it on every rank that trains.

    Raises `ValueError` for an engine that cannot be had.
    """
    return (RemoteRollouts if args.rollout_ranks else Rollouts)(model, prompts, args, tokenizer, device)


# ---- messages ----


@dataclass
class Request:
    """Rank 0 to the rollout ranks: complete these prompts."""

    number: int
    prompts: list[list[int]]
    rows: list[dict]  # for the environment, if there is one
    seeds: list[int]
    samples: int
    temperature: float
    min_version: int
    """not by older weights than these"""


@dataclass
class NewWeights:
    """Rank 0 to the rollout ranks: every weight follows, in this order."""

    version: int
    names_and_shapes: list[tuple[str, torch.Size]]


@dataclass
class Ready:
    """A rollout rank to all training ranks: the weights may come."""


@dataclass
class Share:
    """A rollout rank to a training rank: its completions of that rank's prompts."""

    number: int
    groups: dict[int, Group]
    """by position in the batch"""
    began: float
    ended: float
    """seconds since 1970"""
    stop: bool
    """whether the rollout rank was told to stop"""


class Mail:
    """Messages between training and rollout ranks, pickled, over gloo. A thread receives: whoever sends never waits for
    the other side's work. It also notices at once when a rank of the other side dies, and then ends this one."""

    def __init__(self) -> None:
        everyone = [*distributed.training_ranks, *distributed.rollout_ranks]
        self.link = distributed.link("mail", everyone, torch.device("cpu"))
        self.inbox: queue.Queue = queue.Queue()
        senders = distributed.training_ranks[:1] if distributed.is_rollout_rank() else distributed.rollout_ranks
        self.thread = threading.Thread(target=self._listen, args=(senders,), daemon=True)
        if not distributed.is_rollout_rank() or torch.distributed.get_rank() == 0:  # rank 0 writes to the first alone
            self.thread.start()

    def send(self, message: object, receiver: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        self.link.send([torch.tensor([len(data)])], receiver, 0).wait()
        self.link.send([data], receiver, 0).wait()

    def _listen(self, senders: range) -> None:
        """One message of each sender in turn, until they send None."""
        sender, message = senders[0], True
        try:
            while message is not None:
                for sender in senders:
                    size = torch.empty(1, dtype=torch.int64)
                    self.link.recv([size], sender, 0).wait()
                    data = torch.empty(int(size), dtype=torch.uint8)
                    self.link.recv([data], sender, 0).wait()
                    message = pickle.loads(data.numpy())
                    self.inbox.put(message)
        except RuntimeError as error:  # gloo: connection closed, or reset, by peer
            kind = "training" if sender in distributed.training_ranks else "rollout"
            lost = distributed.RunError(f"{kind} rank {sender} is gone: {distributed.what_gloo_says(error)}")
            distributed.fail_in_thread(lost)


def weights_link(device: torch.device) -> torch.distributed.ProcessGroup:
    """The group that weights are broadcast in: rank 0, which sees them whole, and all rollout ranks."""
    return distributed.link("weights", [0, *distributed.rollout_ranks], device)


def close_link(link: torch.distributed.ProcessGroup | None) -> None:
    """NCCL complains of groups that are open at exit; gloo's close by themselves."""
    if link is not None and link.name() == "nccl":
        link.abort()


class RemoteRollouts(Rollouts):
    """Completions from the rollout ranks. Rank 0 speaks to them; they answer every training rank."""

    def _start(self, tokenizer) -> None:
        self.ahead = self.args.max_staleness
        self.dtype = compute_dtype(self.args, self.device)
        self.mail = Mail()  # waits for the rollout ranks; the signals are still the system's, see distributed.setup
        self.link = weights_link(self.device) if self.rank == 0 else None
        distributed.install_signal_handlers()
        self.names_and_shapes = [(name, w.shape) for name, w in whole_weights(self.model, self.dtype)]
        self.sent_version = NO_WEIGHTS
        self.urgent = 0  # minus the number of requests that went before all batches
        self.requests: dict[int, Request] = {}  # not answered
        self.shares: dict[int, list[Share]] = {}
        self.ready = 0  # rollout ranks that wait for weights

    def __str__(self) -> str:
        return f"{len(distributed.rollout_ranks)} more that generate (staleness up to {self.ahead})"

    def _send(self, batch: Batch, needed_at: int) -> None:
        prompts, rows = ([x[row] for row in batch.drawn] for x in (self.prompts.ids, self.prompts.rows))
        seeds, args, oldest = self._seeds(batch, range(len(prompts))), self.args, needed_at - self.ahead
        self._request(Request(batch.number, prompts, rows, seeds, args.samples_per_prompt, args.temperature, oldest))

    def _request(self, request: Request) -> None:
        request.rows = request.rows if self.args.environment else [{}] * len(request.prompts)
        self.requests[request.number] = request
        self._tell(request)

    def _tell(self, message: object) -> None:
        if self.rank == 0:
            self.mail.send(message, distributed.rollout_ranks[0])

    def _receive(self, message: Ready | Share) -> None:
        if isinstance(message, Ready):
            self.ready += 1
            return
        if message.stop:
            distributed.tell_to_stop()
        shares = self.shares.setdefault(message.number, [])
        shares.append(message)
        if len(shares) == len(distributed.rollout_ranks):
            del self.requests[message.number]

    def _answer(self, number: int) -> list[Group]:
        """This rank's groups of a request, waiting for them if need be."""
        while number in self.requests:
            self._receive(self.mail.inbox.get())
        groups = {i: group for share in self.shares[number] for i, group in share.groups.items()}
        return [groups[i] for i in sorted(groups)]

    def _give_weights(self, step: int, number: int, meter: Meter) -> None:
        """Send the weights of now, if the rollout ranks have nothing to do or are at the request with this number."""
        while not self.mail.inbox.empty():
            self._receive(self.mail.inbox.get())
        first = next(iter(self.requests.values()), None)  # what they are at, if they may be
        free = first is None or first.min_version > self.sent_version or number in self.requests
        # What has arrived may differ between the ranks, and gathering the weights takes all of them.
        if self.sent_version == step or not distributed.gather_objects(free)[0]:
            return
        self._tell(NewWeights(step, self.names_and_shapes))
        with meter.time("rollout"):
            while self.ready < len(distributed.rollout_ranks):
                self._receive(self.mail.inbox.get())
        with meter.time("sync"):
            for _, weight in whole_weights(self.model, self.dtype):
                if self.link is not None:
                    self.link.broadcast(weight, 0).wait()
        meter.max("clock/weights_given", time.time())
        self.ready, self.sent_version = 0, step

    def _sampled(self, batch: Batch, step: int, meter: Meter) -> list[Group]:
        self._give_weights(step, batch.number, meter)
        with meter.time("rollout"):
            groups = self._answer(batch.number)
        shares = self.shares.pop(batch.number)
        meter.max("time/generate", max(share.ended - share.began for share in shares))
        meter.min("clock/generation_began", min(share.began for share in shares))
        meter.max("clock/generation_ended", max(share.ended for share in shares))
        meter.max("clock/collected", time.time())
        for sample in (sample for group in groups for sample in group):
            meter.mean("sampling/staleness/mean", step - sample.version)
            meter.max("sampling/staleness/max", step - sample.version)
        return groups

    def _sampled_now(self, step: int, prompts: Prompts, seeds: list[int], n: int, temperature: float) -> list[Group]:
        self.urgent -= 1
        self._request(Request(self.urgent, prompts.ids, prompts.rows, seeds, n, temperature, step))
        self._give_weights(step, self.urgent, Meter())
        groups = self._answer(self.urgent)
        del self.shares[self.urgent]
        return groups

    def close(self) -> None:
        self._tell(None)
        self.mail.thread.join()
        close_link(self.link)


def serve(args: OnlineArgs, device: torch.device) -> None:
    """What a rollout rank does instead of training: generate until the training ranks are done.

    All rollout ranks do the same at the same time, each for every R-th prompt of a request.
    """
    distributed.default_signals()  # until the training ranks can be told
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path, args)
    engine = make_engine(path, args, eos_token_ids(path, tokenizer, args.prompt_format), tokenizer, device)
    episodes = Episodes(engine, args, tokenizer)
    engine.wake()
    distributed.default_signals()  # it has put our handlers back
    mail, link = Mail(), weights_link(device)
    distributed.install_signal_handlers()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    version, requests = NO_WEIGHTS, deque()
    while True:
        ready = bool(requests) and requests[0].min_version <= version
        messages = distributed.gather_objects(_messages(mail, wait=not ready) if rank == 0 else None)[0]
        for message in messages:
            if message is None:
                for trainer in distributed.training_ranks:
                    mail.send(None, trainer)
                close_link(link)
                engine.close()
                return distributed.cleanup()
            if isinstance(message, NewWeights):
                version = message.version
                for trainer in distributed.training_ranks:
                    mail.send(Ready(), trainer)
                engine.load_weights(_received(message, link, engine.dtype, device))
            elif message.number < 0:  # the trainers wait for it
                requests.appendleft(message)
            else:
                requests.append(message)
        if requests and requests[0].min_version <= version:
            request = requests.popleft()
            mine, began = range(rank, len(request.prompts), ranks), time.time()
            asked = ([every[i] for i in mine] for every in (request.prompts, request.rows, request.seeds))
            groups = dict(zip(mine, episodes.generate(*asked, request.samples, request.temperature), strict=True))
            ended, stop = time.time(), distributed.told_to_stop()
            for sample in (sample for group in groups.values() for sample in group):
                sample.version = version
            for trainer in distributed.training_ranks:
                theirs = {i: group for i, group in groups.items() if i % len(distributed.training_ranks) == trainer}
                mail.send(Share(request.number, theirs, began, ended, stop), trainer)


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
