"""Process group, seeds, reductions, signals and failures, alike for one process and for many nodes.

Every script calls `setup()` first, `cleanup()` at the end of its `main`, and `leave()` after it. In between a rank may
fail at any point: the first rank that fails reports why in one line, and no rank waits for it (see
`_report_and_exit`).

`--rollout_ranks` divides the launch into two roles, training ranks and rollout ranks. Each role has its own process
group, so that everything here and in the libraries spans the ranks of one role; `link` joins ranks of both.
"""

import atexit
import contextlib
import ctypes
import hashlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from common.parallel.console import print_any_text, visible
from common.parallel.failures import PROJECT as PROJECT  # for modules that import this one
from common.parallel.failures import RunError as RunError
from common.parallel.failures import explain, first_line

DAY = timedelta(days=1)
STOP_SIGNALS = signal.SIGTERM, signal.SIGINT

_store: dist.Store | None = None  # of the whole launch, set by setup(); also decides which rank failed first
_launch_rank = 0  # among all ranks of the launch; after setup(), RANK and WORLD_SIZE are those within the role
training_ranks, rollout_ranks = range(1), range(0)  # ranks of the launch by role, set by setup()
_stop_signal: int | None = None  # set by the signal handler
before_failing: list[Callable[[], None]] = []  # called before an error is printed, for example to end a progress bar


def world_size() -> int:
    """Return the number of ranks of this rank's role, or before `setup()` of the launch; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_main() -> bool:
    """Return whether this process writes files and the console: rank 0, which always trains."""
    return int(os.environ.get("RANK", 0)) == 0 and not is_rollout_rank()


def say(text: str) -> None:
    """Print on rank 0 only, with visible control characters."""
    if is_main():
        print(visible(text), flush=True)


def is_rollout_rank() -> bool:
    """Return whether this process is one of the last `--rollout_ranks` ranks, which only generate."""
    return _launch_rank in rollout_ranks


def setup(seed: int, num_rollout_ranks: int = 0, nccl_timeout: float = 30) -> tuple[torch.device, int, int]:
    """Join the process group of this rank's role, install the signal and failure handlers and seed torch. Exits with
    one line if the other ranks cannot be reached.

    Returns `(device, rank, world_size)`, the latter two within the role, from the environment that torchrun sets; plain
    `python script.py` is one rank. CUDA ranks use NCCL (gloo for CPU tensors), others gloo. Collectives time out after
    `nccl_timeout` minutes on CUDA and after a day on the host, for a download or the longest completion. Every rank
    gets the same seed: initial weights must not depend on the rank, and nothing else draws from torch's generator.
    """
    global _store, _launch_rank, training_ranks, rollout_ranks
    print_any_text()
    default_signals()  # ranks wait for each other inside a library, with nothing to save
    if "RANK" not in os.environ:  # plain python; the engine reads these variables too
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if world_size() > 1 and os.environ["MASTER_PORT"] == "0":  # each rank would wait at another port
        fail("--master_port 0: on one machine use torchrun --standalone, else name a port", code=2)
    _launch_rank, device, backend = int(os.environ["RANK"]), torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        local = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()  # ranks may share a GPU: tests/gpu
        device, backend = torch.device("cuda", local), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # several communicators, one order (NCCL 2.26)
    try:
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)  # c10d would retry for minutes
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
        # After a restart torchrun's store still holds the addresses of the dead ranks.
        _store = dist.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        _store.set_timeout(DAY)  # one role may wait for the other's engine; init_process_group leaves a store's timeout
        ranks, training = range(world_size()), world_size() - num_rollout_ranks
        training_ranks, rollout_ranks = ranks[:training], ranks[training:]
        role = rollout_ranks if is_rollout_rank() else training_ranks
        rank, size, store = role.index(_launch_rank), len(role), dist.PrefixStore(f"role/{role.start}", _store)
        os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(size))  # vLLM reads them
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=DAY)
    except (dist.DistNetworkError, dist.DistStoreError, socket.gaierror) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        fail(f"rank {_launch_rank} cannot reach the other ranks at {where}: {first_line(error)}", code=2)
    if device.type == "cuda":
        set_timeout(dist.group.WORLD, device, timedelta(minutes=nccl_timeout))
    sys.excepthook = _report_and_exit  # after init_process_group, which wraps the hook it finds
    if not num_rollout_ranks:  # otherwise when both roles have met
        install_signal_handlers()
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":  # ranks end with a torchrun that is killed
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    torch.manual_seed(seed)
    return device, rank, size


def set_timeout(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives on `device`, also under TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    backend = group._get_backend(device)
    getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)


def link(name: str, ranks: list[int], device: torch.device) -> dist.ProcessGroup:
    """Return a process group of `ranks` of the launch, of any role, for tensors on `device`. It has only `send`, `recv`
    and `broadcast`, and no timeout. Collective over `ranks`."""
    store, rank = dist.PrefixStore(name, _store), ranks.index(_launch_rank)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, len(ranks), timedelta(days=100))
    (options := dist.ProcessGroupNCCL.Options())._timeout = timedelta(days=100)
    return dist.ProcessGroupNCCL(store, rank, len(ranks), options)


# ---- reductions: plain numbers or tensors in, the same value on every rank out ----


def _reduce(value, op: dist.ReduceOp) -> Tensor:
    value = torch.as_tensor(value)
    value = value.detach().to(torch.float64 if value.is_floating_point() else torch.int64, copy=True)
    if dist.is_initialized():
        dist.all_reduce(value, op)
    return value


def all_sum(value: Tensor | float) -> Tensor:
    """Return the sum over ranks, float64 or int64, on the device of `value`. Numbers stay on the host: no wait."""
    return _reduce(value, dist.ReduceOp.SUM)


def all_max(value: Tensor | float) -> Tensor:
    """Return the maximum over ranks, like `all_sum`."""
    return _reduce(value, dist.ReduceOp.MAX)


barrier = partial(all_max, 0)  # on the host; dist.barrier would wait on the device, where --nccl_timeout ends it


def gather_objects(value: object) -> list:
    """Return the `value` of every rank, in rank order, on every rank. For small objects: it pickles."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_dict(mine: dict) -> dict:
    """Return the union of the dicts of all ranks, whose keys differ, on every rank."""
    return {key: value for of_rank in gather_objects(mine) for key, value in of_rank.items()}


def fold_seed(*parts: int) -> int:
    """Return a 32-bit seed from integers, the same in every process: `fold_seed(seed, step, prompt_index)`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "little")


# ---- signals: SIGTERM and SIGINT request a stop; the loop stops where its state can be saved ----


def install_signal_handlers() -> None:
    """Make SIGTERM and SIGINT set a flag. Called again after vLLM starts: libraries replace handlers."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, _note_signal)


def _note_signal(signum: int, frame) -> None:
    global _stop_signal
    _stop_signal = signum
    signal.signal(signum, signal.SIG_DFL)  # a second signal stops at once


def default_signals() -> dict:
    """Make SIGTERM and SIGINT end this process, also inside a library. Return the handlers before."""
    return {signum: signal.signal(signum, signal.SIG_DFL) for signum in STOP_SIGNALS}


@contextlib.contextmanager
def signals_end_the_process() -> Iterator[None]:
    """Apply `default_signals` within a block, then restore the handlers."""
    before = default_signals()
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def request_stop() -> None:
    """Act as if this process had received SIGTERM: another process has received it."""
    global _stop_signal
    _stop_signal = signal.SIGTERM


def stop_signalled() -> bool:
    """Return whether this process has received a stop signal."""
    return _stop_signal is not None


def stop_requested() -> bool:
    """Return whether any rank has received a stop signal. Collective: every rank must call it at the same point."""
    return bool(all_max(int(stop_signalled())))


# ---- leaving: exit code 0 ----


def cleanup() -> None:
    """Leave the process group, unless vLLM's shutdown has already left it. Call last, after `Engine.close()`."""
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()


def leave() -> None:
    """End this process with exit code 0, as the last line of a script, after its threads and exit hooks. Return if
    another program, such as a profiler or pytest, runs the script: it ends the process after its own work.

    Python would next finalize the interpreter. A thread of gloo may still hold a tensor then, because models keep their
    process groups alive. Before Python 3.14, freeing it at that time aborts the process (SIGABRT).
    """
    callers = {frame.f_globals["__name__"] for frame, _ in traceback.walk_stack(sys._getframe())}
    if all(name == "__main__" or name.startswith("common.") for name in callers):
        threading._shutdown()  # joins the threads that are no daemons, as Python does
        atexit._run_exitfuncs()
        _end_process(0)


def _end_process(code: int) -> NoReturn:
    """End this process without finalizing the interpreter. As in Python, the code is 120 if output is lost."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed before Python started
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader of a pipe has gone, or the stream is closed
            code = code or 120
    ctypes.CDLL(None).fflush(None)  # output of libraries in C
    os._exit(code)


# ---- failing: one message, no hang ----


def fail_in_thread(error: Exception) -> None:
    """End this process for an error outside its main thread, which may be in a collective that never ends."""
    _report_and_exit(type(error), error, error.__traceback__)


def fail(message: str, code: int) -> None:
    """Print `error: message` once, whatever the number of ranks, and exit. For errors that all ranks raise. Other ranks
    wait for the launcher to end them: if one exited first, rank 0 might be killed before it prints."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"error: {visible(message)}", file=sys.stderr, flush=True)
    else:
        time.sleep(60)
    sys.exit(code)


def _report_and_exit(kind: type[BaseException], error: BaseException, trace) -> None:
    """Handle an uncaught exception, as `sys.excepthook` of every rank: only the first rank that fails prints.

    A ValueError raised by this checkout's own files is bad input, and a RunError ends a run: one line. Anything else is
    a bug and keeps its traceback. The exit is immediate: the exit hooks of vLLM and NCCL wait for ranks that may be
    gone. The collectives of the other ranks then fail, or the launcher ends them; they get here too and print nothing.
    """
    in_main_thread, stop_signal = threading.current_thread() is threading.main_thread(), _stop_signal
    if in_main_thread:
        # The launcher signals this rank because another one was killed: print first; a second signal ends the process.
        install_signal_handlers()
    try:
        first = _store is None or _store.add("failed", 1) == 1
    except dist.DistError:  # its host is gone, where a rank failed first; every other machine prints a line
        first = _launch_rank > 0 and os.environ["LOCAL_RANK"] == "0"
    if not first:
        # Wait for the launcher's SIGTERM. If our handler already received it, no other comes for 30 seconds.
        if in_main_thread:
            default_signals()
        time.sleep(60 if _stop_signal is None and in_main_thread else 1)
        os._exit(1)
    code = 1
    try:
        for prepare in before_failing:
            with contextlib.suppress(OSError):  # the terminal has gone
                prepare()
        code, text = explain(error, trace, _launch_rank, stop_signal)
        print(visible(text), file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:  # whatever happens here: other ranks may wait for the end of this one
        _end_process(code)
