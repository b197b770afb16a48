"""One rank in the test process with an engine of each kind, for the tests that call common/ directly."""

import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from common.config.groups import OnlineArgs, SamplingArgs, TrainArgs
from common.data.tasks import arithmetic_rows
from common.model.hub import eos_token_ids, load_tokenizer
from common.model.policy import Policy, load_policy
from common.model.tiny import tiny_model
from common.parallel import distributed
from common.rollout.engine import Engine
from common.rollout.engines import make_engine, whole_weights

NEW_TOKENS = 24
RANK_0_OF_1 = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")

settings.register_profile("no deadline", deadline=None)  # the first example may compile a template or load a file
settings.load_profile("no deadline")


@dataclass
class Args(OnlineArgs, SamplingArgs, TrainArgs):
    """Flags of a script that samples and trains."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with many slow tests first: at the end the workers have short ones to share."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session")
def sums(tmp_path_factory) -> Path:
    """A file with the first rows of the built-in task: each rank takes a second to encode all of it, a run of a few
    steps trains on less than these."""
    path = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in arithmetic_rows("train")[:400]))
    return path


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """The device of a process group of one. What `setup` changes beside it is put back: the scripts that tests start
    must not inherit a rank, and Ctrl-C must stop pytest."""
    environment, hook = dict(os.environ), sys.excepthook
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    device, _, _ = distributed.setup(0)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    sys.excepthook = hook
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    yield device
    distributed.cleanup()


@pytest.fixture(scope="session")
def engines(device) -> Iterator[dict[str, Engine]]:
    """By kind, started when first asked for, for all tests: vLLM takes seconds to start, and cannot start twice in a
    process. Closed at the very end, because its shutdown leaves the process group."""
    started: dict[str, Engine] = {}
    yield started
    for engine in started.values():
        engine.close()


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def engine(request, engines, device) -> Engine:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    if request.param not in engines:
        before = dict(os.environ)
        os.environ |= RANK_0_OF_1 | dict(MASTER_PORT="0")  # the process group is there already
        path, args = tiny_model(), Args(dtype="float32", engine=request.param, max_new_tokens=NEW_TOKENS)
        tokenizer = load_tokenizer(path)
        engines[request.param] = make_engine(path, args, eos_token_ids(path, tokenizer), tokenizer, device)
        for name in RANK_0_OF_1.keys() | {"MASTER_PORT"}:
            os.environ.pop(name, None)
            os.environ |= {name: before[name]} if name in before else {}
    return engines[request.param]


@pytest.fixture(scope="module")
def policy(device) -> Policy:
    """Not the weights the engine has loaded: all of them changed, the tied embedding too."""
    policy = load_policy(tiny_model(), Args(dtype="float32"), device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            noise = 0.05 * torch.randn(parameter.shape, generator=generator)
            local = parameter.to_local()  # one rank: its shard is all of it
            local.add_(noise.to(local.device))
    return policy


@pytest.fixture(scope="session")
def small(sums, tmp_path_factory) -> tuple[str | Path, ...]:
    """Flags of a short run: one of the tiny model's four layers, and some of the task's questions."""
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(tiny_model(), tmp_path_factory.mktemp("small") / "model")
    config = json.loads((model / "config.json").read_text())
    fewer = dict(num_hidden_layers=1, layer_types=config["layer_types"][:1])
    (model / "config.json").write_text(json.dumps(config | fewer))
    file = model / "model.safetensors"
    weights = {name: w for name, w in load_file(file).items() if ".layers." not in name or ".layers.0." in name}
    save_file(weights, file, metadata=dict(format="pt"))
    return "--model", model, "--dataset", sums


@pytest.fixture
def synced(engine, policy) -> Engine:
    engine.wake()
    engine.load_weights(whole_weights(policy, engine.dtype))
    return engine


def talkative(folder: Path, model: str | Path | None = None) -> Path:
    """The tiny model or another, in `folder`, whose completions are short also untrained: most letters end one."""
    shutil.copytree(model or tiny_model(), folder)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | dict(eos_token_id=[*config["eos_token_id"], *range(10, 60)])))
    return folder
