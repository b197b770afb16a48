"""Four faults of the campaign of bench/faults.py (`make faults`), drawn by a fixed seed: runs
survive them or end with one line."""

import random
import shutil
import sys
from collections.abc import Iterable
from itertools import islice

import pytest

from bench.fault_cases import disk, fuzz, kill
from bench.fault_cases.case import Case, Setting

SFT = Setting("sft", flags=(("keep_last", 1),))


def during(rng: random.Random) -> Iterable[Case]:
    """Return two second launches in the middle of the first one, which is active or dies: the
    active one refuses."""
    return [case for case in kill.twice(rng, 8) if 0.4 < case.values[0] < 0.8][:2]


KINDS = dict(
    disk=lambda _: islice(disk.disk(SFT), 60),  # of a new run
    powercut=lambda _: disk.powercut(SFT),
    fuzz=lambda rng: fuzz.fuzz(rng, count=40, names=("resume",)),
    twice=during,
)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler"
)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_survive_faults_or_end_with_one_line(kind, tmp_path):
    rng = random.Random(0)
    case = rng.choice(list(KINDS[kind](rng)))
    assert case.check(tmp_path, *case.values) is None, case.name
