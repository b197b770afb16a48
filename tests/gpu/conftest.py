"""Tests that need GPUs: `make gpu-test`, docs/scaling.md.

A test marked `gpu(n)` needs n GPUs and is skipped in one line if there are fewer; `gpu(n,
shared=True)` also runs as n ranks on one GPU (share_gpu.py). The files run in the order of what
they prove in ten minutes on one GPU. Nothing here touches CUDA or imports vLLM before a test runs.
The ordinary suite collects these files too and always skips them, also on a machine with GPUs,
where its two processes would share one GPU.

    ONEFILE_GPU_TESTS_ON_CPU=1 python -m pytest -m gpu tests/gpu -k ...

runs the same test functions on the CPU, for any number of GPUs they need, with shorter runs and
without checks that only CUDA allows (free memory, peak memory)."""

import gc
from pathlib import Path

import pytest
import torch
from on_gpu import ON_CPU

HERE = Path(__file__).parent
FILES = "logprobs ranks attention models offload engine commands".split()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None or ON_CPU:
        return
    if "gpu" not in item.config.option.markexpr:
        pytest.skip("a test for GPUs: make gpu-test")
    needed = 1 if marker.kwargs.get("shared") else marker.args[0]
    if (found := torch.cuda.device_count()) < needed:
        pytest.skip(f"needs {needed} GPUs, {found} found")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.parent == HERE]
    order = iter(sorted(here, key=lambda item: FILES.index(item.path.stem[5:])))
    items[:] = [next(order) if item.path.parent == HERE else item for item in items]


@pytest.fixture(autouse=True)
def empty_cache():
    """Free cached memory: programs of the tests share the GPU, and vLLM takes a fraction of all its
    memory."""
    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
