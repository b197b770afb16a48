"""The end of a rank and a stop signal reach all ranks of a launch, whatever their main threads do.
No launcher ends a rank here: those on other machines have another one."""

import os
import signal

import pytest
from processes import Ranks, run, until

pytestmark = pytest.mark.slow

PROGRAM = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch
from common.parallel import distributed, process
folder, rollout_ranks = Path(sys.argv[1]), int(sys.argv[2])
device, rank, size = distributed.setup(0, rollout_ranks)
number = rank + size * distributed.is_rollout_rank()
process.note_signals()
(folder / str(number)).touch()
"""
WAITS = {
    # stands for NCCL: a call in C, during which Python handles no signal
    "in C": "ctypes.CDLL(None).sleep(1000)",
    "in the store": "distributed.link('x', [0, 1, 2, 3], device)",
    "in gloo": "distributed.barrier()",
    "for another role": "time.sleep(1000)",
}


@pytest.mark.parametrize(("wait", "rollout_ranks"), zip(WAITS, (0, 0, 0, 2), strict=True))
def test_killed_rank_ends_all_others_with_one_line(wait, rollout_ranks, tmp_path):
    program = f"{PROGRAM}\nif number == 1:\n    time.sleep(1000)\n{WAITS[wait]}\n"
    with Ranks(4, program, tmp_path, rollout_ranks) as ranks:
        until(lambda: len([*tmp_path.iterdir()]) == 4)
        os.kill(ranks.pids[1], signal.SIGKILL)
        until(lambda: all(process.exitcode is not None for process in ranks.processes))
        codes, stderr = [process.exitcode for process in ranks.processes], ranks.end().stderr
    assert codes == [1, -signal.SIGKILL, 1, 1]
    assert "lost another rank" in stderr and stderr.count("\n") == 1, stderr


def test_error_of_a_rank_ends_those_that_wait_in_c_without_a_second_line(tmp_path):
    fails = "\nif number == 0:\n    raise distributed.RunError('said')\n"
    with Ranks(3, PROGRAM + fails + WAITS["in C"], tmp_path, 0) as ranks:
        until(lambda: all(process.exitcode is not None for process in ranks.processes))
        assert ranks.end().stderr == "error: said\n"


@pytest.mark.parametrize("rollout_ranks", [0, 2])
def test_stop_signal_to_one_rank_is_heard_by_all_and_they_end_one_after_the_other(
    rollout_ranks, tmp_path
):
    """A rank that has said farewell is not dead."""
    program = f"""{PROGRAM}
if number == 3:
    os.kill(os.getpid(), signal.SIGUSR1)
while not distributed.stop_heard():
    time.sleep(0.001)
distributed.stop_requested()
time.sleep(0.02 * number)
distributed.cleanup()
distributed.end_process()
"""
    done = run(4, program, tmp_path, rollout_ranks)
    assert done.stderr == "", done.stderr
