"""One rank in the test process, for the tests that call common/ directly."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from common import distributed

settings.register_profile("no deadline", deadline=None)  # the first example may compile a template or load a file
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """The device of a process group of one. What `setup` changes beside it is put back: the scripts that tests start
    must not inherit a rank, and Ctrl-C must stop pytest."""
    environment, hook = dict(os.environ), sys.excepthook
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    device, _, _ = distributed.setup(0)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    sys.excepthook = hook
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    yield device
    distributed.cleanup()
