"""What training and rollout ranks say to each other, and how: messages by gloo, weights by broadcast."""

import pickle
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.config.groups import OnlineArgs
from common.parallel import distributed
from common.rollout.episodes import Group
from common.rollout.sampler import Prompt


@dataclass
class Work:
    """Rank 0 to the rollout ranks: complete these prompts."""

    prompts: list[Prompt]


@dataclass
class NewWeights:
    """Rank 0 to the rollout ranks: every weight follows, in this order."""

    version: int
    names_and_shapes: list[tuple[str, torch.Size]]


@dataclass
class Ready:
    """A rollout rank to all training ranks: the weights may come."""

    load: dict[str, tuple[float, float]]
    """as in `Done`, to one of them; nothing to the others"""


@dataclass
class Done:
    """A rollout rank to a training rank: the completions of some of its prompts, by their numbers."""

    groups: dict[int, Group]
    stop: bool
    """whether the rollout rank was told to stop"""
    load: dict[str, tuple[float, float]]
    """what the rollout rank measured of itself since it last said so: sums and weights"""


def worker(number: int) -> int:
    """The rollout rank that completes the prompt of this number."""
    return distributed.rollout_ranks[number % len(distributed.rollout_ranks)]


def leaders(args: OnlineArgs) -> range:
    """The rollout ranks that are written to: the first of those that share an engine, for all of them."""
    return distributed.rollout_ranks[:: args.tensor_parallel_size]


class Mail:
    """Messages between training and rollout ranks, pickled, over gloo. A thread sends, and one for each sender
    receives: nobody waits for the other side's work. They also notice at once when a rank of the other side dies, and
    then end this one."""

    def __init__(self, receive: Callable[[object], None] | None = None) -> None:
        """`receive` is called in those threads with each message; without it they go to the inbox."""
        everyone = [*distributed.training_ranks, *distributed.rollout_ranks]
        self.link = distributed.link("mail", everyone, torch.device("cpu"))
        self.inbox: queue.Queue = queue.Queue()
        self.receive = receive or self.inbox.put
        senders = distributed.training_ranks[:1] if distributed.is_rollout_rank() else distributed.rollout_ranks
        self.outbox: queue.Queue = queue.Queue()
        threading.Thread(target=self._deliver, daemon=True).start()
        self.threads = [threading.Thread(target=self._listen, args=(sender,), daemon=True) for sender in senders]
        for thread in self.threads:
            thread.start()

    def send(self, message: object, receiver: int) -> None:
        """In the order of the calls; the message must stay as it is."""
        self.outbox.put((message, receiver))

    def flush(self) -> None:
        """Until all is delivered."""
        self.outbox.join()

    def _deliver(self) -> None:
        while True:
            message, receiver = self.outbox.get()
            data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
            try:
                self.link.send([torch.tensor([len(data)])], receiver, 0).wait()
                self.link.send([data], receiver, 0).wait()
            except RuntimeError as error:
                distributed.fail_in_thread(_gone(receiver, error))
            self.outbox.task_done()

    def _listen(self, sender: int) -> None:
        """Until it sends None. What goes wrong here nobody else would see."""
        message = self
        try:
            while message is not None:
                message = self._next(sender)
                self.receive(message)
        except Exception as error:
            distributed.fail_in_thread(error)

    def _next(self, sender: int) -> object:
        try:
            size = torch.empty(1, dtype=torch.int64)
            self.link.recv([size], sender, 0).wait()
            data = torch.empty(int(size), dtype=torch.uint8)
            self.link.recv([data], sender, 0).wait()
        except RuntimeError as error:
            raise _gone(sender, error) from error
        return pickle.loads(data.numpy())


def _gone(rank: int, error: RuntimeError) -> distributed.RunError:
    """What gloo says of a rank that has died: connection closed, or reset, by peer."""
    kind = "training" if rank in distributed.training_ranks else "rollout"
    return distributed.RunError(f"{kind} rank {rank} is gone: {distributed.what_gloo_says(error)}")


def weights_link(device: torch.device) -> torch.distributed.ProcessGroup:
    """The group that weights are broadcast in: rank 0, which sees them whole, and all rollout ranks."""
    return distributed.link("weights", [0, *distributed.rollout_ranks], device)


def close_link(link: torch.distributed.ProcessGroup | None) -> None:
    """NCCL complains of groups that are open at exit; gloo's close by themselves."""
    if link is not None and link.name() == "nccl":
        link.abort()
