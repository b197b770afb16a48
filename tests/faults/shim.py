"""The library of shim.c, compiled once per process that needs it."""

import atexit
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path


@cache
def shim() -> str:
    """Return a library that makes file operations fail once a rank arms it; empty without a C
    compiler on Linux."""
    if sys.platform != "linux" or not shutil.which("cc"):
        return ""
    library = Path(tempfile.mkdtemp()) / "shim.so"
    atexit.register(shutil.rmtree, library.parent)
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return str(library)
