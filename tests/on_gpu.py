"""What the tests in tests/gpu share: where they run, and programs started as a user would."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import PATIENCE, PIPE, ROOT, command, ended, environment

ON_CPU = os.environ.get("ONEFILE_GPU_TESTS_ON_CPU") == "1"
"""the bodies run on the CPU, as tests/gpu/conftest.py says"""
DEVICE = "cpu" if ON_CPU else "cuda"
DTYPES = ("bfloat16", "float32")
gpu = pytest.mark.gpu
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
ENGINES = ("transformers", pytest.param("vllm", marks=needs_vllm))
HERE_AND_THERE = (
    pytest.param("cpu", torch.float32),
    pytest.param(DEVICE, torch.bfloat16, marks=gpu(1)),
    pytest.param(DEVICE, torch.float32, marks=gpu(1)),
)
"""(device, dtype): the first belongs to the ordinary suite, the others are what it stands for"""

BAD = ("CUDA Error", "Traceback", "Aborted", "terminate called", "pure virtual")


def finished(done: subprocess.CompletedProcess, code: int = 0) -> subprocess.CompletedProcess:
    """It ended with this exit code and, if that is 0, without a word of what CUDA and Python say at a bad end."""
    text = done.stdout[-4000:] + done.stderr[-8000:]
    assert done.returncode == code, text
    assert code or not any(word in done.stdout + done.stderr for word in BAD), text
    return done


def launch(ranks: int, script: str, *flags: object, code: int = 0, **variables: str) -> subprocess.CompletedProcess:
    """A script to its end, under torchrun if there are several ranks. Not forked, as the ordinary suite does: what
    CUDA does in a process that has imported and forked is one thing more that could go wrong."""
    with subprocess.Popen(
        command(ranks, script, *flags), cwd=ROOT, env=environment(**variables), stdout=PIPE, stderr=PIPE, text=True
    ) as process:
        return finished(ended(process, timeout=6 * PATIENCE), code)


def measured(program: Path, *arguments: object) -> dict:
    """What a program of tests/gpu says on its last line: it has a process of its own, as vLLM starts once in one."""
    environ = environment(ONEFILE_GPU_TESTS_ON_CPU="1" if ON_CPU else "0")
    call = [sys.executable, str(program), *map(str, arguments)]
    done = subprocess.run(call, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=3 * PATIENCE)
    return json.loads(finished(done).stdout.splitlines()[-1])


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference, as a fraction of the norm."""
    ours, exact = ours.detach(), exact.detach().double()
    return float((ours.double() - exact).norm() / exact.norm().clamp(min=1e-30))
