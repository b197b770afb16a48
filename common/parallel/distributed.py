"""Process group, seeds, reductions, ends and failures, alike for one process and for many nodes.

Every script calls `setup()` first, `cleanup()` at the end of its `main`, and `end_process()` after
it. In between a rank may fail at any point: the first rank that fails reports why in one line, and
no rank waits for it (see `_report_and_exit`).

`--rollout_ranks` divides the launch into two roles, training ranks and rollout ranks. Each role has
its own process group, so that everything here and in the libraries spans the ranks of one role;
`link` joins ranks of both."""

import atexit
import contextlib
import ctypes
import hashlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.parallel import signals
from common.parallel.console import print_any_text, visible
from common.parallel.failures import PROJECT as PROJECT  # for modules that import this one
from common.parallel.failures import RunError as RunError
from common.parallel.failures import explain, first_line

DAY = timedelta(days=1)
NCCL_TIMEOUT = timedelta(minutes=30)
T = TypeVar("T")

# Set by setup(). The store of the whole launch also decides which rank failed first. `_launch_rank`
# is among all ranks of the launch; after setup(), RANK and WORLD_SIZE are those within the role.
_store: dist.Store | None = None
_launch_rank = 0
training_ranks = range(1)  # ranks of the launch
rollout_ranks = range(0)
# called before an error is printed, for example to end a progress bar
before_failing: list[Callable[[], None]] = []


def world_size() -> int:
    """Return the number of ranks of this rank's role, or before `setup()` of the launch; 1 without
    torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Return the number of this process among the ranks of its role; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def is_main() -> bool:
    """Return whether this process writes files and the console: rank 0, which always trains."""
    return rank() == 0 and not is_rollout_rank()


def say(text: str) -> None:
    """Print on rank 0 only, with visible control characters."""
    if is_main():
        print(visible(text), flush=True)


def is_rollout_rank() -> bool:
    """Return whether this process is one of the last `--rollout_ranks` ranks, which only
    generate."""
    return _launch_rank in rollout_ranks


def setup(seed: int, num_rollout_ranks: int = 0) -> tuple[torch.device, int, int]:
    """Join the process group of this rank's role, install the signal and failure handlers and seed
    torch. Exits with one line if the other ranks cannot be reached.

    Returns `(device, rank, world_size)`, the latter two within the role, from the environment that
    torchrun sets; plain `python script.py` is one rank. CUDA ranks use NCCL (gloo for CPU tensors),
    others gloo. Collectives time out after `NCCL_TIMEOUT` on CUDA and after a day on the
    host, for a download or the longest completion. Every rank gets the same seed: initial weights
    must not depend on the rank, and nothing else draws from torch's generator."""
    global _store, _launch_rank, training_ranks, rollout_ranks
    print_any_text()
    signals.default_signals()  # ranks wait for each other inside a library, with nothing to save
    if "RANK" not in os.environ:  # plain python; the engine reads these variables too
        _set_torchrun_environment()
    size = world_size()
    if size > 1 and os.environ["MASTER_PORT"] == "0":  # each rank would wait at another port
        fail("--master_port 0: on one machine use torchrun --standalone, else name a port", code=2)
    _launch_rank = int(os.environ["RANK"])
    training_ranks = range(size - num_rollout_ranks)
    rollout_ranks = range(size - num_rollout_ranks, size)
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        # Ranks may share a GPU: tests/gpu.
        local_rank = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        device = torch.device("cuda", local_rank)
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        # several communicators, one order (NCCL 2.26)
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    try:
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)  # c10d would retry for minutes
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
        if os.environ["MASTER_PORT"] == "0":  # one rank: the store has chosen a free one
            os.environ["MASTER_PORT"] = str(store.port)
        # After a restart torchrun's store still holds the addresses of the dead ranks.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        _store = dist.PrefixStore(f"attempt/{restarts}", store)
        # One role may wait for the other's engine; init_process_group leaves a store's timeout.
        _store.set_timeout(DAY)
        role = rollout_ranks if is_rollout_rank() else training_ranks
        rank = role.index(_launch_rank)
        size = len(role)
        os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(size))  # vLLM reads them
        store = dist.PrefixStore(f"role/{role.start}", _store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=DAY)
    except (dist.DistNetworkError, dist.DistStoreError, socket.gaierror) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        problem = f"cannot reach the other ranks at {address}: {first_line(error)}"
        fail(f"rank {_launch_rank} {problem}", code=2)
    if device.type == "cuda":
        set_timeout(dist.group.WORLD, device, NCCL_TIMEOUT)
    sys.excepthook = _report_and_exit  # after init_process_group, which wraps the hook it finds
    if not num_rollout_ranks:  # otherwise when both roles have met
        signals.install_signal_handlers()
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # PR_SET_PDEATHSIG: ranks end with a torchrun that is killed
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    torch.manual_seed(seed)
    return device, rank, size


def _set_torchrun_environment() -> None:
    """Set the variables of torchrun for one rank, at any free port."""
    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def set_timeout(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives on `device`, also under
    TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    backend = group._get_backend(device)
    getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)


def link(name: str, ranks: list[int], device: torch.device) -> dist.ProcessGroup:
    """Return a process group of `ranks` of the launch, of any role, for tensors on `device`. It has
    only `send`, `recv` and `broadcast`, and no timeout. Collective over `ranks`."""
    store = dist.PrefixStore(name, _store)
    rank = ranks.index(_launch_rank)
    timeout = timedelta(days=100)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, len(ranks), options)


# ---- reductions: plain numbers or tensors in, the same value on every rank out ----


def _reduce(value, op: dist.ReduceOp) -> Tensor:
    value = torch.as_tensor(value)
    dtype = torch.float64 if value.is_floating_point() else torch.int64
    value = value.detach().to(dtype, copy=True)
    if dist.is_initialized():
        dist.all_reduce(value, op)
    return value


def all_sum(value: Tensor | float) -> Tensor:
    """Return the sum over ranks, float64 or int64, on the device of `value`. Numbers stay on the
    host: no wait."""
    return _reduce(value, dist.ReduceOp.SUM)


def all_max(value: Tensor | float) -> Tensor:
    """Return the maximum over ranks, like `all_sum`."""
    return _reduce(value, dist.ReduceOp.MAX)


def barrier() -> None:
    """Wait for all ranks on the host. `dist.barrier` would wait on the device, where
    `NCCL_TIMEOUT` ends it."""
    all_max(0)


def gather_objects(value: object) -> list:
    """Return the `value` of every rank, in rank order, on every rank. For small objects: it
    pickles."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_main(value: T) -> T:
    """Return the `value` of rank 0 on every rank. Pickles. Collective."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather_on_main(value: object) -> list:
    """Return the `value` of every rank, in rank order, on rank 0, and an empty list on the others,
    whose memory `gather_objects` would fill. Pickles. Collective."""
    values = [value] * world_size() if rank() == 0 else None
    if world_size() > 1:
        dist.gather_object(value, values, 0)
    return values or []


def gather_dict(values: dict) -> dict:
    """Return the union of the dicts of all ranks, whose keys differ, on every rank."""
    items = (of_rank.items() for of_rank in gather_objects(values))
    return dict(chain.from_iterable(items))


def exchange_objects(outgoing: list) -> list:
    """Send `outgoing[r]` to each rank r. Return what each rank sent to this one, in rank order.
    Pickles, over the host. Collective."""
    if world_size() == 1:
        return outgoing
    pickled = [pickle.dumps(value) for value in outgoing]
    sizes = torch.tensor([len(each) for each in pickled])
    arriving = torch.empty_like(sizes)
    dist.all_to_all_single(arriving, sizes)
    sent = torch.frombuffer(bytearray().join(pickled), dtype=torch.uint8)
    received = torch.empty(int(arriving.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, sent, arriving.tolist(), sizes.tolist())
    return [pickle.loads(each.numpy()) for each in received.split(arriving.tolist())]


def share_of(items: Sequence) -> Sequence:
    """Return this rank's share of `items`, which are the same on all ranks: every
    `world_size()`-th."""
    return items[rank() :: world_size()]


def gather_rows(x_P: Tensor, positions: Sequence[int]) -> Tensor:
    """Return the rows [P, ...] of all ranks, sorted by their positions: [B, ...]. Results computed
    from them do not depend on the number of ranks. A rank may have no rows. Collective."""
    ranks = gather_objects((list(positions), x_P))
    gathered_positions = list(chain.from_iterable(rank_positions for rank_positions, _ in ranks))
    rows = torch.cat([x for _, x in ranks if len(x)])
    return rows[torch.tensor(gathered_positions).argsort()]


def fold_seed(*numbers: int) -> int:
    """Return a 32-bit seed from integers, the same in every process: `fold_seed(seed, step,
    prompt_index)`."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def stop_requested() -> bool:
    """Return whether any rank has received a stop signal. Collective: every rank must call it at
    the same point."""
    return bool(all_max(int(signals.stop_signalled())))


# ---- leaving: exit code 0 ----


def cleanup() -> None:
    """Leave the process group, unless vLLM's shutdown has already left it. Call last, after
    `Engine.close()`."""
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()


def end_process() -> None:
    """End this process with exit code 0, as the last line of a script, after its threads and exit
    hooks. Return if another program, such as a profiler or pytest, runs the script: it ends the
    process after its own work.

    Python would next finalize the interpreter. A thread of gloo may still hold a tensor then,
    because models keep their process groups alive. Before Python 3.14, freeing it at that time
    aborts the process (SIGABRT)."""
    callers = {frame.f_globals["__name__"] for frame, _ in traceback.walk_stack(sys._getframe())}
    if all(name == "__main__" or name.startswith("common.") for name in callers):
        threading._shutdown()  # joins the threads that are no daemons, as Python does
        atexit._run_exitfuncs()
        _exit_without_finalizing(0)


def _exit_without_finalizing(code: int) -> NoReturn:
    """End this process without finalizing the interpreter. As in Python, the code is 120 if output
    is lost."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed before Python started
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader of a pipe has gone, or the stream is closed
            code = code or 120
    ctypes.CDLL(None).fflush(None)  # output of libraries in C
    os._exit(code)


# ---- failing: one message, no hang ----


def fail_in_thread(error: Exception) -> None:
    """End this process for an error outside its main thread, which may be in a collective that
    never ends."""
    _report_and_exit(type(error), error, error.__traceback__)


def fail(message: str, code: int) -> None:
    """Print `error: message` once, whatever the number of ranks, and exit. For errors that all
    ranks raise. Other ranks wait for the launcher to end them: if one exited first, rank 0 might be
    killed before it prints."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"error: {visible(message)}", file=sys.stderr, flush=True)
    else:
        time.sleep(60)
    sys.exit(code)


def _report_and_exit(kind: type[BaseException], error: BaseException, trace) -> None:
    """Handle an uncaught exception, as `sys.excepthook` of every rank: only the first rank that
    fails prints.

    A ValueError raised by this checkout's own files is bad input, and a RunError ends a run: one
    line. Anything else is a bug and keeps its traceback. The exit is immediate: the exit hooks of
    vLLM and NCCL wait for ranks that may be gone. The collectives of the other ranks then fail, or
    the launcher ends them; they get here too and print nothing."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    stop_signal = signals.received
    if in_main_thread:
        # The launcher signals this rank because another one was killed: print first; a second
        # signal ends the process.
        signals.install_signal_handlers()
    try:
        is_first = _store is None or _store.add("failed", 1) == 1
    except dist.DistError:
        # its host is gone, where a rank failed first; every other machine prints a line
        is_first = _launch_rank > 0 and os.environ["LOCAL_RANK"] == "0"
    if not is_first:
        # Wait for the launcher's SIGTERM. If our handler already received it, no other comes for 30
        # seconds.
        if in_main_thread:
            signals.default_signals()
        time.sleep(60 if signals.received is None and in_main_thread else 1)
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
        _exit_without_finalizing(code)
