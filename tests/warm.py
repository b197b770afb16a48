"""The process from which ranks are forked: it has imported what scripts import, without which `make
test` would take more than 7 minutes (preload.py). The controller of pytest-xdist starts it for all
workers."""

import multiprocessing
import os
import re
import sys
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from unittest import mock

import pytest

SHARED = "ONEFILE_FORK_SERVER"  # variable with the address of the controller's


def start() -> None:
    """Start the process, unless it already runs."""
    forkserver.set_forkserver_preload(["preload"])
    # vLLM reads its variables at its import, and not again in a rank.
    variables = dict(
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH=str(Path(__file__).parent),
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR",
    )  # fmt: skip
    with mock.patch.dict(os.environ, variables):
        forkserver.ensure_running()


def context() -> BaseContext:
    """Return the multiprocessing context whose processes are forked from it."""
    server = forkserver._forkserver
    if SHARED not in os.environ:
        start()
    elif server._forkserver_address is None:
        server._forkserver_address = os.environ[SHARED]
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = lambda: None
    return multiprocessing.get_context("forkserver")


# ---- hooks of the controller ----


def pytest_configure(config: pytest.Config) -> None:
    is_controller = config.getoption("numprocesses", None) and SHARED not in os.environ
    if is_controller and sys.version_info < (3, 14):  # which asks for a key
        start()
        os.environ[SHARED] = forkserver._forkserver._forkserver_address


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give all tests of a file to the same worker. One worker gets all tests of vLLM's engine,
    because it takes seconds to start."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if "/commands/" in file:  # the commands of a page run in order
                return test.rpartition("[")[2].partition(":")[0]
            return "vllm" if re.search(r"[\[-]vllm\b", test) else file

    config.option.loadscopereorder = False  # the order of in_process.py
    return Scheduling(config, log)
