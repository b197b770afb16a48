"""Run a script that compares engine and trainer in each step:

each_step.py SCRIPT FLAGS..."""

import runpy
import sys

from common.train import run

run.CHECK_EVERY = 1
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
