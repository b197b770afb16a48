"""Run a script of which one rank sends itself signals at a defined moment, however fast the machine
is:

    signal_at.py RANK FUNCTION FOLDER STEP SIGNALS SCRIPT FLAGS...

The moment is the first call of FUNCTION, as `os.rename`, after FOLDER/metrics.jsonl has the line of
STEP. SIGNALS are numbers with commas between them."""

import os
import runpy
import sys
from pathlib import Path
from pkgutil import resolve_name

from helpers import logged

rank, function, folder, step, signals, *sys.argv = sys.argv[1:]
place, _, name = function.rpartition(".")
owner, pending = resolve_name(place), signals.split(",")
original = getattr(owner, name)


def signalling(*args, **named):
    while pending and logged(Path(folder), int(step)):
        os.kill(os.getpid(), int(pending.pop(0)))
    return original(*args, **named)


if os.environ.get("RANK", "0") == rank:
    setattr(owner, name, signalling)
runpy.run_path(sys.argv[0], run_name="__main__")
