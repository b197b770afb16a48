"""Messages between training and rollout ranks, pickled, over gloo; and the group in which weights
are broadcast."""

import pickle
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from common.data.sample import Group
from common.metrics.meter import Meter
from common.parallel import distributed
from common.parallel.process import fail_in_thread
from common.rollout.episode import PromptRequest


@dataclass
class NewPrompts:
    """From rank 0 to rollout ranks: prompts to complete."""

    requests: list[PromptRequest]


@dataclass
class NewWeights:
    """From rank 0 to rollout ranks: the broadcast of all weights follows, in this order."""

    version: int
    names_and_shapes: list[tuple[str, torch.Size]]


@dataclass
class ReadyForWeights:
    """From a rollout rank to all training ranks: the broadcast may begin."""

    load: Meter
    """metrics of the rollout rank since its last message"""


@dataclass
class CompleteGroups:
    """From a rollout rank to a training rank: completions of some of its prompts."""

    groups: dict[int, Group]
    """by the number of the prompt"""
    stop: bool
    """whether the rollout rank received a signal to stop"""
    load: Meter
    """metrics of the rollout rank since its last message"""


def generating_rank(request: PromptRequest) -> int:
    """Return the rollout rank that completes a prompt."""
    return distributed.rollout_ranks[request.number % len(distributed.rollout_ranks)]


class Mail:
    """Messages to and from the ranks of the other role.

    One thread sends, and one thread per sender receives, so that no rank waits for the other role.
    If a rank of the other role dies, a thread ends this process."""

    def __init__(self, receive: Callable[[object], None] | None = None) -> None:
        """`receive` is called with each message in the receiving threads; by default messages go to
        `inbox`."""
        all_ranks = [*distributed.training_ranks, *distributed.rollout_ranks]
        self.link = distributed.link("mail", all_ranks, torch.device("cpu"))
        self.inbox: queue.Queue = queue.Queue()
        self.receive = receive or self.inbox.put
        self.sender = ThreadPoolExecutor(1)  # sends in the order of the calls
        senders = distributed.rollout_ranks
        if distributed.is_rollout_rank():
            senders = distributed.training_ranks[:1]
        self.threads = []
        for rank in senders:
            thread = threading.Thread(target=self._listen, args=(rank,), daemon=True)
            thread.start()
            self.threads.append(thread)

    def send(self, message: object, receiver: int) -> None:
        """Send a message and return at once."""
        self.sender.submit(self._deliver, bytearray(pickle.dumps(message)), receiver)

    def flush(self) -> None:
        """Wait until all messages are delivered. No other may follow."""
        self.sender.shutdown()

    def _deliver(self, message: bytearray, receiver: int) -> None:
        size = torch.tensor([len(message)])
        data = torch.frombuffer(message, dtype=torch.uint8)
        try:
            self.link.send([size], receiver, 0).wait()
            self.link.send([data], receiver, 0).wait()
        except RuntimeError as error:
            fail_in_thread(_rank_is_gone(receiver, error))

    def _listen(self, sender: int) -> None:
        """Receive messages until None. Report exceptions: no caller waits for this thread."""
        try:
            while True:
                message = self._next(sender)
                self.receive(message)
                if message is None:
                    return
        except Exception as error:  # a bug, or a rank that is gone: without this the run would hang
            fail_in_thread(error)

    def _next(self, sender: int) -> object:
        try:
            size = torch.empty(1, dtype=torch.int64)
            self.link.recv([size], sender, 0).wait()
            data = torch.empty(int(size), dtype=torch.uint8)
            self.link.recv([data], sender, 0).wait()
        except RuntimeError as error:
            raise _rank_is_gone(sender, error) from error
        return pickle.loads(data.numpy())


def _rank_is_gone(rank: int, error: RuntimeError) -> distributed.RunError:
    """Return the error for a rank that has died; gloo reports a connection closed, or reset, by
    peer."""
    role = "training" if rank in distributed.training_ranks else "rollout"
    return distributed.RunError(f"{role} rank {rank} is gone: {distributed.first_line(error)}")


def weights_link(device: torch.device) -> torch.distributed.ProcessGroup:
    """Return the group in which weights are broadcast: rank 0, which gathers them, and all rollout
    ranks."""
    return distributed.link("weights", [0, *distributed.rollout_ranks], device)


def close_link(link: torch.distributed.ProcessGroup | None) -> None:
    """Close an NCCL group, which otherwise warns at exit. A gloo group closes itself."""
    if link is not None and link.name() == "nccl":
        link.abort()
