"""Reductions and gathers are the same on every rank, a signal to one stops all, and a seed depends on all its parts."""

import signal
import socket

import pytest
import torch
from helpers import ROOT, run

from common.parallel import distributed

RANK = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import os, signal
from pathlib import Path
import torch
from common.parallel import distributed
from common.train.checkpoint import prepare_output_dir
from common.config.groups import TrainArgs
from common.data.packing import Sample, pack, pack_groups

device, rank, size = distributed.setup(0)
mine = torch.tensor(0.5, dtype=torch.float64)
distributed.all_sum(mine)
seen = dict(
    mine=mine.item(),
    sum=distributed.all_sum(rank + 0.5).item(), whole=distributed.all_sum(rank + 1).item(),
    max=distributed.all_max(torch.tensor([rank, -rank])).tolist(),
    objects=distributed.gather_objects(dict(rank=rank)), dict=distributed.gather_dict({{rank: "x" * rank}}),
    world=(size, distributed.world_size()), same=torch.rand(1).item(),
    packs=len(pack([Sample([1, 2, 3], [True] * 3)] * (5 * rank), 4, device)), before=distributed.stop_requested(),
)
problems = []
here = Path(sys.argv[2], str(rank))  # of each rank a folder of its own, as on machines that share none
here.mkdir(parents=True)
os.chdir(here)
for folder in sys.argv[1], "run":
    try:
        prepare_output_dir(TrainArgs(output_dir=folder))
    except ValueError as error:
        problems.append(str(error))
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
seen |= dict(problems=problems, after=distributed.stop_requested())
everyone = distributed.gather_objects(seen)
if distributed.is_main():
    assert all(of_rank == everyone[0] for of_rank in everyone), everyone
    print(everyone[0])
distributed.cleanup()
"""


@pytest.mark.slow
def test_what_two_ranks_agree_on(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "file").touch()
    done = run(2, tmp_path / "rank.py", tmp_path / "file" / "run", tmp_path / "machines", timeout=600)
    seen = eval(done.stdout.strip().splitlines()[-1])
    assert seen["mine"] == 0.5  # a sum is not put where a summand was
    assert (seen["sum"], seen["whole"], seen["max"], seen["world"]) == (2.0, 3, [1, 0], (2, 2))
    assert seen["objects"] == [dict(rank=0), dict(rank=1)] and seen["dict"] == {0: "", 1: "x"}
    assert seen["packs"] == 2  # of five samples that one rank owns the two compute four at a time
    no_folder, not_shared = seen["problems"]  # the first only rank 0 has met, the second only rank 1
    assert no_folder.startswith(f"--output_dir {tmp_path}/file/run: ")
    assert not_shared == (
        f"--output_dir run: {socket.gethostname()} does not see what rank 0 writes there; "
        "it must be a folder that all machines share"
    )
    assert not list(tmp_path.glob("machines/*/run/checkpoints/*"))
    assert (seen["before"], seen["after"]) == (False, True)


def test_one_rank_reduces_to_itself(device):
    assert distributed.all_sum(2).dtype == torch.int64 and distributed.all_sum(0.5).dtype == torch.float64
    value = torch.ones(2, requires_grad=True)
    assert distributed.all_sum(value).tolist() == [1, 1] and not distributed.all_sum(value).requires_grad
    assert distributed.gather_objects("x") == ["x"] and distributed.gather_dict({1: 2}) == {1: 2}


def test_a_folded_seed_depends_on_every_part_and_on_their_order():
    seeds = [distributed.fold_seed(*parts) for parts in ((0,), (1,), (0, 1), (1, 0), (0, 0, 1), (11,), (1, 1))]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds)
    assert distributed.fold_seed(1, 2, 3) == 3922471037  # the same in every process and for ever: runs resume with it


def test_told_to_stop(device, monkeypatch):
    monkeypatch.setattr(distributed, "_stop_signal", None)
    assert not distributed.told_to_stop() and not distributed.stop_requested()
    distributed.tell_to_stop()
    assert distributed.told_to_stop() and distributed.stop_requested()


def test_the_second_signal_ends_the_process(monkeypatch):
    monkeypatch.setattr(distributed, "_stop_signal", None)
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        distributed.install_signal_handlers()
        signal.raise_signal(signal.SIGTERM)
        assert distributed.told_to_stop() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyError), distributed.signals_end_the_process():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
            raise KeyError
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
