"""Messages between training and rollout ranks, pickled, over gloo."""

import pickle
import queue
import threading
from collections.abc import Callable

import torch

from common.parallel import distributed
from common.parallel.process import fail_in_thread


class Mail:
    """Messages to and from the ranks of the other role.

    A thread receives from each, so that a message is taken at once, whatever this rank does. If a
    rank of the other role dies, such a thread ends this process."""

    def __init__(self, receive: Callable[[object], None] | None = None) -> None:
        """`receive` is called with each message in the receiving threads; by default messages go to
        `inbox`. Collective over all ranks of the launch."""
        ranks = [*distributed.training_ranks, *distributed.rollout_ranks]
        self.link = distributed.link("mail", ranks, torch.device("cpu"))
        self.inbox: queue.Queue = queue.Queue()
        self.receive = receive or self.inbox.put
        # Of the training ranks only rank 0 sends.
        senders = ranks[:1] if distributed.is_rollout_rank() else distributed.rollout_ranks
        self.threads = [
            threading.Thread(target=self._listen, args=(rank,), daemon=True) for rank in senders
        ]
        for thread in self.threads:
            thread.start()

    def send(self, message: object, rank: int) -> None:
        """Send a message to a rank of the launch; None is the last one."""
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        self.link.send([torch.tensor([len(data)])], rank, 0).wait()
        self.link.send([data], rank, 0).wait()

    def close(self) -> None:
        """Wait for the last messages."""
        for thread in self.threads:
            thread.join()

    def _listen(self, rank: int) -> None:
        try:
            while True:
                size = torch.empty(1, dtype=torch.int64)
                self.link.recv([size], rank, 0).wait()
                data = torch.empty(int(size), dtype=torch.uint8)
                self.link.recv([data], rank, 0).wait()
                message = pickle.loads(data.numpy())
                self.receive(message)
                if message is None:
                    return
        except Exception as error:  # the rank has died, or a bug: without this the run would hang
            fail_in_thread(error)
