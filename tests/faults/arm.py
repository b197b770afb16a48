"""Run a script whose file operations fail, or are recorded, as shim.c describes:

    arm.py RANK FOLDER OPERATION PATTERN FAULT TRACE COPIES SCRIPT FLAGS...
    arm.py RANK clock CALLS SECONDS SCRIPT FLAGS...

With `clock`, the clock jumps by SECONDS after CALLS readings. Ranks other than RANK run as usual.
"""

import ctypes
import os
import posix
import runpy
import sys

os.fsync = posix.fsync  # not that of tests/replaced.py
_, rank, *words = sys.argv
count = 3 if words[0] == "clock" else 6
values, sys.argv = words[:count], words[count:]
if os.environ.get("RANK", "0") == rank:
    shim = ctypes.CDLL(None)
    if values[0] == "clock":
        shim.faults_jump(*(ctypes.c_longlong(int(value)) for value in values[1:]))
    else:
        folder, operation, pattern, fault, trace, copies = (value.encode() for value in values)
        shim.faults_arm(folder, operation, pattern, int(fault), trace, copies)
runpy.run_path(sys.argv[0], run_name="__main__")
