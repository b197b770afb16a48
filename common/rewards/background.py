"""Threads for what is computed while the main thread does something else."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class Background:
    """`size` threads that call functions in the order in which they were handed over; they end with this object.

    They live as long as it does, because Linux ends processes with the thread that has started them. Unlike those of
    `concurrent.futures`, nothing waits for them when the interpreter exits: a run that fails must not hang.
    """

    def __init__(self, size: int):
        self.queue: SimpleQueue = SimpleQueue()
        for _ in range(size):
            threading.Thread(target=_work, args=(self.queue,), daemon=True).start()
            weakref.finalize(self, self.queue.put, None)

    def submit(self, function: Callable, *arguments: object) -> Future:
        """`function(*arguments)`, as soon as a thread is free. From any thread."""
        future: Future = Future()
        self.queue.put((future, function, arguments))
        return future


def _work(queue: SimpleQueue) -> None:
    while (job := queue.get()) is not None:
        future, function, arguments = job
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # whoever waits for the result gets it
            future.set_exception(error)
        del job, future, function, arguments  # they may be what keeps the owner of this thread alive
