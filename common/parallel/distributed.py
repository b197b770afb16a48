"""The ranks of a launch: how they start, talk and stop, and the seeds that they share.

Every `main` calls `setup()` first, `cleanup()` at the end of its `main`, and `end_process()` after
it. `--rollout_ranks` divides the launch into two roles, training ranks and rollout ranks. Each role
has its own process group, so every collective, here and in the libraries, spans the ranks of one
role. `link` makes a group of ranks of both roles."""

import contextlib
import ctypes
import functools
import hashlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.parallel import process
from common.parallel.process import RunError, counted, end_process, fail, first_line  # noqa: F401

DAY = timedelta(days=1)
NCCL_TIMEOUT = timedelta(minutes=30)

# `setup` sets these. They count the ranks of the whole launch. The variables RANK and WORLD_SIZE
# count those of the role after `setup`.
_store: dist.Store | None = None
_ring: "Ring | None" = None  # None if the launch has one rank
_launch_rank = 0
training_ranks = range(1)
rollout_ranks = range(0)
context_group: Any = None  # ContextGroup (context.py); None if every rank runs its packs alone


def world_size() -> int:
    """Return the number of ranks in this rank's role; before `setup()`, in the launch."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Return the number of this process among the ranks of its role, from 0."""
    return int(os.environ.get("RANK", 0))


def context_group_size() -> int:
    """Return the number of ranks that run each pack together (`--context_ranks`)."""
    return 1 if context_group is None else context_group.size


def is_rollout_rank() -> bool:
    """Return whether this rank only generates: the last `--rollout_ranks` of the launch do."""
    return _launch_rank in rollout_ranks


def is_main() -> bool:
    """Return whether this is rank 0, which writes files and the console, and always trains."""
    return rank() == 0 and not is_rollout_rank()


def say(text: str) -> None:
    """Print on rank 0 only, with visible control characters."""
    if is_main():
        print(process.visible(text), flush=True)


def setup(seed: int, num_rollout_ranks: int = 0) -> tuple[torch.device, int, int]:
    """Join the process group of this rank's role, install the handler of failures, and seed torch.

    Returns `(device, rank, world_size)`, the latter two within the role. They come from the
    environment that torchrun sets; plain `python script.py` is one rank. Collectives of CUDA
    tensors (NCCL) time out after `NCCL_TIMEOUT`. Those on the host (gloo) may take a day: some wait
    for a download or the longest completion. Every rank gets the same seed, since initial weights
    must not depend on the rank."""
    global _store, _ring, _launch_rank, training_ranks, rollout_ranks
    process.print_any_text()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process as SIGTERM does
    if "RANK" not in os.environ:  # without torchrun; the engine reads these variables too
        os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # 0 stands for any free port
    _launch_rank, ranks = rank(), world_size()
    training_ranks = range(ranks - num_rollout_ranks)
    rollout_ranks = range(ranks - num_rollout_ranks, ranks)
    role = rollout_ranks if is_rollout_rank() else training_ranks
    rank_in_role, size = role.index(_launch_rank), len(role)

    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        # Ranks may share a GPU: the tests in tests/gpu do.
        local_rank = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        # Several communicators may deadlock unless NCCL (2.26) launches them in one order.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
        if os.environ["MASTER_PORT"] == "0":  # the store has chosen a free one
            os.environ["MASTER_PORT"] = str(store.port)
        # After a restart torchrun's store still holds the addresses of the dead ranks.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        _store = dist.PrefixStore(f"attempt/{attempt}", store)
        _store.set_timeout(DAY)  # one role may wait for the other's engine
        os.environ |= dict(RANK=str(rank_in_role), WORLD_SIZE=str(size))  # vLLM reads them
        store = dist.PrefixStore(f"role/{role.start}", _store)
        dist.init_process_group(
            backend, store=store, rank=rank_in_role, world_size=size, timeout=DAY
        )
    except dist.DistError as error:
        fail(f"rank {_launch_rank} cannot reach the other ranks: {first_line(error)}")
    if device.type == "cuda":
        set_timeout(dist.group.WORLD, device, NCCL_TIMEOUT)
    # Set after init_process_group, which wraps the hook that it finds. The hook gets a connection
    # of its own: a thread that waits in the store blocks all others on the same connection.
    sys.excepthook = functools.partial(process.report_and_exit, _store.clone(), _launch_rank)
    _ring = Ring(ranks) if ranks > 1 else None
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # 1 is PR_SET_PDEATHSIG: if torchrun is killed, its ranks end too.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    torch.manual_seed(seed)
    return device, rank_in_role, size


def set_timeout(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives on `device`."""
    backend = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL this is a wrapper around the backend.
    getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)


@functools.cache  # all models share communicators
def shard_mesh(device: torch.device, shard_ranks: int | None) -> DeviceMesh:
    """Return the mesh of ranks for FSDP: (copies, shards), where `shard_ranks` neighbours (default:
    the ranks of a machine) hold the shards of one copy of each model, or (shards,) if there is only
    one copy, on all ranks. The first call is collective.

    With copies, FSDP gathers weights within a copy only, and averages gradients over copies and
    shards (hybrid sharding, arXiv:2304.11277, 3.2.2)."""
    ranks = world_size()
    per_copy = shard_ranks or int(all_max(int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    if per_copy >= ranks or ranks % per_copy:
        if per_copy < ranks:
            problem = f"{ranks} ranks are no multiple of the {per_copy} of a machine"
            say(f"{problem}: each model is sharded over all of them; see --shard_ranks")
        return init_device_mesh(device.type, (ranks,))
    copies = ranks // per_copy
    say(f"hybrid sharding: {copies} copies of each model, each on {per_copy} of the {ranks} ranks")
    mesh = init_device_mesh(device.type, (copies, per_copy), mesh_dim_names=("copies", "shards"))
    timeout = NCCL_TIMEOUT if device.type == "cuda" else DAY
    for group in mesh.get_all_groups():  # they do not inherit the default group's timeout
        set_timeout(group, device, timeout)
    return mesh


def link(name: str, ranks: list[int], device: torch.device) -> Any:
    """Return a process group of these `ranks` of the launch, in any roles, for tensors on `device`.
    It has only `send`, `recv` and `broadcast`, and no timeout. Collective over `ranks`."""
    store, rank, timeout = dist.PrefixStore(name, _store), ranks.index(_launch_rank), 100 * DAY
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, len(ranks), options)


STOP, FAREWELL = -1, -2  # words in the ring; a word from 0 on says that this rank has ended


class Ring:
    """Connects all ranks of a launch, so that each hears at once of a stop signal to any rank, and
    ends if any rank ends without a farewell. A thread of each rank listens to the next rank and
    passes on what it hears to the previous one, whatever the main thread is doing. Collective."""

    def __init__(self, ranks: int):
        self.link = link("ring", list(range(ranks)), torch.device("cpu"))
        self.previous, self.next = (_launch_rank - 1) % ranks, (_launch_rank + 1) % ranks
        self.said: set[int] = set()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def say(self, word: int) -> None:
        """Send a word to the previous rank. Each word is sent once, and none after a farewell."""
        with self.lock:
            if word not in self.said and FAREWELL not in self.said:
                self.said.add(word)
                self.link.send([torch.tensor([word])], self.previous, 0).wait()

    def _listen(self) -> None:
        word = torch.tensor([0])
        while True:
            try:
                self.link.recv([word], self.next, 0).wait()
            except RuntimeError:
                word[0] = self.next
            if word == FAREWELL:
                return
            if word == STOP:
                process.stop_signalled = True
            with contextlib.suppress(RuntimeError):  # the previous rank has ended too
                self.say(int(word))
            if word >= 0:
                problem = f"rank {_launch_rank} lost another rank: rank {int(word)} has ended"
                process.fail_in_thread(RunError(problem))


def cleanup() -> None:
    """Leave the process group, unless vLLM's shutdown has destroyed it, and then the ring."""
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()
    if _ring is not None:
        _ring.say(FAREWELL)
        _ring.thread.join()


def stop_requested() -> bool:
    """Return whether any rank has received a stop signal. Collective."""
    return bool(all_max(int(process.stop_signalled)))


def stop_heard() -> bool:
    """Return whether this rank has received, or heard of, a stop signal, and pass it on. Not
    collective: another rank may not have heard of it yet."""
    if process.stop_signalled and _ring is not None:
        _ring.say(STOP)
    return process.stop_signalled


# ---- reductions: each rank gives a number or tensor, and all get the same result ----


def all_sum(value: Tensor | float) -> Tensor:
    """Return the sum over ranks in float64 or int64, on the device of `value`. A plain number stays
    on the host, so nothing waits for the GPU."""
    return _reduce(value, dist.ReduceOp.SUM)


def all_max(value: Tensor | float) -> Tensor:
    """Return the maximum over ranks, like `all_sum`."""
    return _reduce(value, dist.ReduceOp.MAX)


def _reduce(value, op: dist.ReduceOp) -> Tensor:
    value = torch.as_tensor(value)
    dtype = torch.float64 if value.is_floating_point() else torch.int64
    value = value.detach().to(dtype, copy=True)
    if dist.is_initialized():
        dist.all_reduce(value, op)
    return value


def barrier() -> None:
    """Wait for all ranks. The wait is on the host, so `NCCL_TIMEOUT` does not apply."""
    all_max(0)


# ---- Python objects: they are pickled and sent from host to host ----


def gather_objects(value: object) -> list:
    """Return the `value` of every rank, in rank order, on every rank. For small objects."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_dict(values: dict) -> dict:
    """Return the union of all ranks' dicts on every rank. No two ranks may have the same key."""
    return dict(chain.from_iterable(of_rank.items() for of_rank in gather_objects(values)))


def from_main(value: Any) -> Any:
    """Return the `value` of rank 0 on every rank."""
    box = [value]
    if world_size() > 1:
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def exchange_objects(outgoing: list) -> list:
    """Send `outgoing[r]` to each rank r. Return what each rank sent to this one, in rank order."""
    if world_size() == 1:
        return outgoing
    pickled = [pickle.dumps(value) for value in outgoing]
    sizes = torch.tensor([len(each) for each in pickled])
    arriving = torch.empty_like(sizes)
    dist.all_to_all_single(arriving, sizes)
    to_others = torch.frombuffer(bytearray().join(pickled), dtype=torch.uint8)
    from_others = torch.empty(int(arriving.sum()), dtype=torch.uint8)
    dist.all_to_all_single(from_others, to_others, arriving.tolist(), sizes.tolist())
    return [pickle.loads(each.numpy()) for each in from_others.split(arriving.tolist())]


def gather_rows(x_P: Tensor, positions: Sequence[int]) -> Tensor:
    """Gather the rows [P, ...] of all ranks and sort them by `positions`: [B, ...]. Collective."""
    ranks = gather_objects((list(positions), x_P))
    order = torch.tensor([position for of_rank, _ in ranks for position in of_rank]).argsort()
    return join_rows([x for _, x in ranks])[order]


def join_rows(tables: Sequence[Tensor]) -> Tensor:
    """Join the rows of all tables into one, [B, ...]. A table without rows may have any number of
    columns: a rank without prompts does not know how many completions a prompt has."""
    return torch.cat([table for table in tables if len(table)] or [tables[0]])


def items_of_rank(items: Sequence) -> Sequence:
    """Return this rank's part of `items`: every `world_size()`-th."""
    return items[rank() :: world_size()]


def fold_seed(*numbers: int) -> int:
    """Hash integers into a 32-bit seed: `fold_seed(seed, step, prompt_index)`."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
