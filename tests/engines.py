"""An engine of each kind in the test process, and a policy to sample from, as fixtures."""

import os
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from in_process import Args

from common.model.policy import Policy, load_policy
from common.model.tiny import tiny_model
from common.rollout.engine import Engine
from common.rollout.engines import make_engine
from common.rollout.weights import sync_weights, whole_weights
from common.text.tokenizer import load_tokenizer

NEW_TOKENS = 24
RANK_0_OF_1 = dict(
    RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",
)  # fmt: skip


@pytest.fixture(scope="session")
def engines(device) -> Iterator[dict[str, Engine]]:
    """Return a cache of engines by kind, for all tests: vLLM takes seconds to start, and cannot
    start twice in a process. The engines are closed at the very end, because vLLM's shutdown leaves
    the process group."""
    started: dict[str, Engine] = {}
    yield started
    for engine in started.values():
        engine.close()


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def engine(request, engines, device) -> Engine:
    kind, path = request.param, tiny_model()
    if kind == "vllm":
        pytest.importorskip("vllm")
    if kind not in engines:
        tokenizer = load_tokenizer(path)
        args = Args(dtype="float32", engine=kind, max_new_tokens=NEW_TOKENS)
        with mock.patch.dict(os.environ, RANK_0_OF_1):
            engines[kind] = make_engine(path, args, tokenizer, device)
    return engines[kind]


@pytest.fixture(scope="module")
def policy(device) -> Policy:
    """Return a policy all of whose weights differ from the checkpoint and the engine, tied or
    not."""
    policy = load_policy(tiny_model(), Args(dtype="float32"), device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            local = parameter.to_local()  # all weights on one rank
            local.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(local.device))
    return policy


@pytest.fixture
def synced(engine, policy) -> Engine:
    sync_weights(engine, whole_weights(policy, engine.dtype))
    return engine


def stopping(engine: Engine, strings: tuple[str, ...]):
    """Return a context in which the engine has these `--stop` strings."""
    return mock.patch.object(engine, "args", replace(engine.args, stop=strings))
