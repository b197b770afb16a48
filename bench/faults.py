"""Break runs in every way that a machine, a user or an attacker might, and check what they leave.

    python bench/faults.py --seed 0 --minutes 30                 all kinds, cases drawn by the seed
    python bench/faults.py --kinds disk powercut --minutes 60
    python bench/faults.py --seed 0 --only fuzz/CASE             one case again

Prints a line of JSON for each case, with what is wrong or null, and then a table. The exit code is
1 if any case failed. A kind that this machine does not allow is skipped, with the reason.
docs/launch.md has the promises and the results."""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tests.faults import disk, fuzz, kill, network
from tests.faults.case import Case, Setting, Skip, work
from tests.faults.exits import exits
from tests.faults.shim import shim

SFT, GRPO = Setting("sft"), Setting("grpo", steps=4)
KINDS = dict(
    disk=lambda rng: [case for setting in (SFT, GRPO) for case in disk.disk(setting)],
    powercut=lambda rng: [
        case
        for keep in (1, 2)
        for case in disk.powercut(Setting("sft", flags=(("keep_last", keep),)))
    ],
    fuzz=lambda rng: fuzz.fuzz(rng, 500),
    kill=lambda rng: kill.kills(rng, 50),
    twice=lambda rng: kill.twice(rng, 20),
    clock=lambda rng: kill.clock(rng, 20),
    soak=lambda rng: kill.soak(),
    network=lambda rng: network.network(),
    exits=lambda rng: exits(late=10, plain=50),
)


def run(case: Case, seed: int) -> dict:
    """Return the record of a case."""
    folder, began = Path(tempfile.mkdtemp(dir=work())), time.monotonic()
    try:
        wrong = case.check(folder, *case.values)
        record = dict(wrong=wrong)
    except Skip as reason:
        record = dict(wrong=None, skipped=str(reason))
    except Exception as error:  # a case that cannot be judged has failed
        record = dict(wrong=f"{type(error).__name__}: {str(error)[-300:]}")
    shutil.rmtree(folder, ignore_errors=True)
    name = f"{case.kind}/{case.name}"
    return dict(case=name, seed=seed, seconds=round(time.monotonic() - began, 1)) | record


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="decides the order of the cases and random corruptions"
    )
    parser.add_argument("--minutes", type=float, default=30, help="time for all kinds together")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", help="pattern of case names")
    args = parser.parse_args()
    os.environ |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", LD_PRELOAD=shim())
    if not shim():
        parser.error("it needs a C compiler, `cc`")
    table = {}
    for kind in args.kinds:
        ends = time.monotonic() + args.minutes * 60 / len(args.kinds)
        cases = list(KINDS[kind](random.Random(args.seed)))
        random.Random(args.seed).shuffle(cases)
        counts = table[kind] = Counter(cases=len(cases))
        for case in cases:
            if args.only and not fnmatch(f"{kind}/{case.name}", args.only):
                continue
            if time.monotonic() > ends:
                break
            record = run(case, args.seed)
            counts[
                "skipped" if "skipped" in record else "failed" if record["wrong"] else "passed"
            ] += 1
            print(json.dumps(record), flush=True)
    print(f"{'kind':12}{'cases':>8}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for kind, counts in table.items():
        print(
            f"{kind:12}"
            + "".join(f"{counts[name]:>8}" for name in ("cases", "passed", "failed", "skipped"))
        )
    return int(any(counts["failed"] for counts in table.values()))


if __name__ == "__main__":
    sys.exit(main())
