"""Devices of the GPU tests, and scripts started from the command line."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from processes import PATIENCE, ended, finished, start

ON_CPU = os.environ.get("ONEFILE_GPU_TESTS_ON_CPU") == "1"
"""the tests run on the CPU, see tests/gpu/conftest.py"""
DEVICE = "cpu" if ON_CPU else "cuda"
DTYPES = ("bfloat16", "float32")
gpu = pytest.mark.gpu
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)
ENGINES = ("transformers", pytest.param("vllm", marks=needs_vllm))
HERE_AND_THERE = (
    pytest.param("cpu", torch.float32),
    pytest.param(DEVICE, torch.bfloat16, marks=gpu(1)),
    pytest.param(DEVICE, torch.float32, marks=gpu(1)),
)
"""(device, dtype): the ordinary suite tests the first; the others extend it"""


def launch(
    ranks: int, script: str, *flags: object, **variables: object
) -> subprocess.CompletedProcess:
    """Run a script to its end in new processes. Forked ranks would add CUDA in a forked process as
    a source of failures. Ranks share a GPU if there are fewer GPUs."""
    return finished(ended(started(ranks, script, *flags, **variables), timeout=6 * PATIENCE))


def started(ranks: int, script: str, *flags: object, **variables: object) -> subprocess.Popen:
    """Start a script like `launch`."""
    if ON_CPU or torch.cuda.device_count() >= ranks:
        return start(ranks, script, *flags, **variables)
    return start(ranks, "tests/gpu/share_gpu.py", ROOT / script, *flags, **variables)


def measured(program: Path, *arguments: object) -> dict:
    """Return the last line of a program of tests/gpu. The program is a separate process, because
    vLLM starts only once per process."""
    done = launch(1, program, *arguments, ONEFILE_GPU_TESTS_ON_CPU=int(ON_CPU))
    return json.loads(done.stdout.splitlines()[-1])


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference, as a fraction of the norm."""
    ours, exact = ours.detach().double(), exact.detach().double()
    return float((ours - exact).norm() / exact.norm().clamp(min=1e-30))
