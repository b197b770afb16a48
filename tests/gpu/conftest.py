"""What can only be proven with GPUs: `make gpu-test`, docs/gpu.md.

A test marked `gpu(n)` needs n GPUs and is skipped in one line where there are fewer. Nothing here touches CUDA or
imports vLLM before a test runs, so that the ordinary suite, which collects these files too, only skips them, also on a
machine with GPUs: its two processes would share one.

    ONEFILE_GPU_TESTS_ON_CPU=1 python -m pytest -m gpu tests/gpu -k ...

runs the tests' own code on a machine without a GPU: the same bodies on the CPU, whatever the number of GPUs they ask
for, with shorter runs and without what is of CUDA alone (free memory, peak memory).
"""

import gc

import pytest
import torch
from on_gpu import ON_CPU


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None or ON_CPU:
        return
    if "gpu" not in item.config.option.markexpr:
        pytest.skip("a test for GPUs: make gpu-test")
    (needed,) = marker.args
    if (found := torch.cuda.device_count()) < needed:
        pytest.skip(f"needs {needed} GPUs, {found} found")


@pytest.fixture(autouse=True)
def nothing_kept():
    """The programs that tests start share the GPU with this process, and vLLM asks for a fraction of all its memory."""
    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
