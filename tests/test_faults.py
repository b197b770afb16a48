"""Seven faults of the campaign of bench/faults.py (`make faults`), drawn by a fixed seed: runs
survive them or end with one line."""

import random
import shutil
import sys
from functools import partial

import pytest

from bench.fault_cases import disk, fuzz, kill
from bench.fault_cases.case import Case, Setting

SFT, KEEPS_ONE = Setting("sft"), Setting("sft", flags=(("keep_last", 1),))
QUICK = (
    "resume",
    "model",
    "checkpoint",
    "reference",
)  # scenarios whose undisturbed runs take a second


def during(rng: random.Random) -> list[Case]:
    """Return two second launches in the middle of the first one, which is active or dies: the
    active one refuses."""
    return [case for case in kill.twice(rng, 8) if 0.4 < case.values[0] < 0.8][:2]


KINDS = dict(
    disk=(1, lambda rng: disk.disk(SFT)),
    powercut=(1, lambda rng: disk.powercut(KEEPS_ONE)),
    fuzz=(2, partial(fuzz.fuzz, count=80, names=QUICK)),
    kill=(1, partial(kill.kills, count=6, layouts=("one rank",))),
    twice=(1, during),
    clock=(1, partial(kill.clock, count=4)),
)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler"
)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_survive_faults_or_end_with_one_line(kind, tmp_path):
    count, cases = KINDS[kind]
    rng = random.Random(0)
    for case in rng.sample(list(cases(rng)), count):
        (folder := tmp_path / str(hash(case.name))).mkdir()
        assert case.check(folder, *case.values) is None, case.name
