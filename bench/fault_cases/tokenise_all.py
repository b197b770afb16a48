"""Run a script whose data counts as large however small it is, so that it is tokenised on disk."""

import runpy
import sys

from common.data import load

load.LARGE = 0
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
