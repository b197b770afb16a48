"""Reductions and gathers are equal on all ranks, a signal to one rank stops all, a seed depends on
all its parts, and a process ends with its exit code and at most one line."""

import errno
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from helpers import ROOT
from processes import run
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from common.parallel import distributed, process

RANK = """
import os, signal, sys
from pathlib import Path
import torch
from common.parallel import distributed, process
from common.train.run_folder import prepare_output_dir
from common.config.groups import TrainArgs
from common.packs.packing import pack, pack_groups
from common.packs.sample import Sample

device, rank, size = distributed.setup(0)
assert distributed._store.timeout.days == 1  # one role may start much later than the other
mine = torch.tensor(0.5, dtype=torch.float64)
distributed.all_sum(mine)
seen = dict(
    mine=mine.item(),
    sum=distributed.all_sum(rank + 0.5).item(), whole=distributed.all_sum(rank + 1).item(),
    max=distributed.all_max(torch.tensor([rank, -rank])).tolist(),
    objects=distributed.gather_objects(dict(rank=rank)),
    dict=distributed.gather_dict({rank: "x" * rank}),
    # two draws of one prompt are two rows, also with equal numbers
    rows=distributed.gather_rows(torch.tensor([[0.0], [rank]]), [rank, 3 - rank]).tolist(),
    none=distributed.gather_rows(torch.ones(rank, 1), range(rank)).tolist(),
    of_main=distributed.from_main(dict(rank=rank)),
    world=(size, distributed.world_size()), same=torch.rand(1).item(),
    packs=len(pack([Sample([1, 2, 3], [True] * 3)] * (5 * rank), 4, device)),
    before=distributed.stop_requested(),
)
here = Path(sys.argv[1], str(rank))  # a folder for each rank, as on machines without a shared one
here.mkdir(parents=True)
os.chdir(here)
try:
    prepare_output_dir(TrainArgs(output_dir="run"))
except ValueError as error:
    problem = str(error)
process.note_signals()
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
seen |= dict(problem=problem, after=distributed.stop_requested())
ranks = distributed.gather_objects(seen)
if distributed.is_main():
    assert all(of_rank == ranks[0] for of_rank in ranks), ranks
    print(ranks[0])
distributed.cleanup()
"""


@pytest.mark.slow
def test_two_ranks_agree_on_reductions_stops_and_errors(tmp_path):
    done = run(2, RANK, tmp_path / "machines")
    seen = eval(done.stdout.strip().splitlines()[-1])
    assert seen["mine"] == 0.5  # a sum does not overwrite its argument
    assert (seen["sum"], seen["whole"], seen["max"], seen["world"]) == (2.0, 3, [1, 0], (2, 2))
    assert seen["objects"] == [dict(rank=0), dict(rank=1)] and seen["dict"] == {0: "", 1: "x"}
    assert seen["of_main"] == dict(rank=0)
    assert seen["rows"] == [[0], [0], [1], [0]] and seen["none"] == [[1]]
    assert seen["packs"] == 2  # one rank owns five samples, both together compute four at a time
    assert seen["problem"] == (  # arises on rank 1 only
        f"--output_dir run: files of rank 0 are not visible on {socket.gethostname()}; "
        "use a folder that all machines share"
    )
    assert not list(tmp_path.glob("machines/*/run/checkpoints/*"))
    assert (seen["before"], seen["after"]) == (False, True)


def test_reduction_on_one_rank_is_the_identity(device):
    assert distributed.all_sum(2).dtype == torch.int64
    assert distributed.all_sum(0.5).dtype == torch.float64
    found = distributed.all_sum(torch.ones(2, requires_grad=True))
    assert found.tolist() == [1, 1] and not found.requires_grad
    assert distributed.gather_objects("x") == ["x"] and distributed.gather_dict({1: 2}) == {1: 2}
    assert distributed.from_main("x") == "x"


def test_folded_seed_depends_on_every_part_and_their_order():
    parts = ((0,), (1,), (0, 1), (1, 0), (0, 0, 1), (11,), (1, 1))
    seeds = [distributed.fold_seed(*each) for each in parts]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds)
    # It must stay constant: resumed runs depend on it.
    assert distributed.fold_seed(1, 2, 3) == 3922471037


LOST = "[gloo/transport/tcp/pair.cc:537] Read error: No route to host"


class LostStore:
    def add(self, *_: object) -> int:
        raise torch.distributed.DistNetworkError("no host")


def exit_of(
    error: BaseException, capfd: pytest.CaptureFixture, store: object = None
) -> tuple[int, str]:
    """Return the exit code and stderr of a process with this uncaught exception."""
    if (child := os.fork()) == 0:
        store = store or torch.distributed.HashStore()
        process.report_and_exit(store, 0, type(error), error, error.__traceback__)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), capfd.readouterr().err


def failing(action: Callable[[], None]) -> BaseException:
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        action()
    return raised.value


def test_end_of_a_run_a_lost_rank_a_full_gpu_and_a_vanished_file_are_one_line(capfd):
    lost = RuntimeError(f"{LOST}. This is typically caused by")
    missing = failing(lambda: open("/gone/metrics.jsonl"))  # noqa: SIM115
    for error, said in (
        (distributed.RunError("a\nb"), "a b"),
        (lost, f"rank 0 lost another rank: {LOST}"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full"),
            "rank 0: CUDA out of memory. Tried to allocate 2.00 GiB; "
            "lower --pack_tokens, or see --dry_run for what fits",
        ),
        (MemoryError(), "rank 0: out of memory"),
        (distributed.RunError(9000 * "a" + 9000 * "b"), f"{500 * 'a'} [...] {500 * 'b'}"),
        (missing, "[Errno 2] No such file or directory: '/gone/metrics.jsonl'"),
    ):
        assert exit_of(error, capfd) == (1, f"error: {said}\n")


def test_each_machine_reports_an_error_once_if_the_store_is_lost(capfd, monkeypatch):
    for local_rank, said in ((0, "error: a\n"), (1, "")):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert exit_of(distributed.RunError("a"), capfd, LostStore()) == (1, said)


NO_SPACE = "Error while serializing: I/O error: No space left on device (os error 28)"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError(NO_SPACE)]
)
def test_error_of_the_disk_is_found_below_other_errors(error, capfd):
    outer = RuntimeError("outer")
    outer.__context__ = CheckpointException("several ranks", {0: (error, None)})
    code, said = exit_of(outer, capfd)
    assert code == 1 and said.startswith("error: writing to the disk failed: ")
    assert "No space left on device" in said and said.count("\n") == 1


def test_failing_report_does_not_keep_the_process(capfd, monkeypatch):
    monkeypatch.setattr(process, "explain", lambda *_: 1 / 0)
    code, shown = exit_of(distributed.RunError("a"), capfd)
    assert code == 1 and "ZeroDivisionError" in shown


def test_error_controls_no_terminal(capfd):
    assert exit_of(distributed.RunError("row \x1b[2J"), capfd) == (1, "error: row \\x1b[2J\n")
    # a bug, with its traceback
    code, shown = exit_of(failing(lambda: {}["\x1b]0;a\x07\u202e"]), capfd)
    assert code == 1 and "Traceback" in shown and "\x1b" not in shown and "\u202e" not in shown


LEAVING = """
import atexit, threading
from common.parallel.process import end_process

class Kept:
    def __del__(self):
        print("finalized")

kept = Kept()
atexit.register(print, "first hook")
atexit.register(print, "second hook")
threading.Timer(0.01, print, ["thread"]).start()
print("end", end=" ")
end_process()
"""


def test_process_ends_after_its_threads_and_hooks_without_finalization():
    """Python would free what is left, which a thread of gloo may do too: the process aborts."""
    line = [sys.executable, "-c", LEAVING]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "end thread\nsecond hook\nfirst hook\n"


def test_program_that_runs_a_script_ends_the_process(tmp_path):
    """Here pytest, which has an exit code and a report."""
    distributed.end_process()
    text = "from common.parallel import distributed\ndistributed.end_process()\nover = True\n"
    (tmp_path / "script.py").write_text(text)
    assert runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")["over"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(("stdout", "code"), [("/dev/full", 120), (None, 0)])
def test_lost_output_is_an_exit_code_unless_it_was_closed_before_the_start(stdout, code):
    if (child := os.fork()) == 0:
        sys.stdout = stdout and open(stdout, "w")  # noqa: SIM115
        print("lost", end="")
        process.exit_now(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
