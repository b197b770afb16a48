"""Scripts on one rank and tools inside the test process, and models and data for short runs."""

import importlib
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import write_rows
from hypothesis import settings
from processes import last
from replaced import IN_TESTS, in_process
from transformers import AutoConfig, AutoModelForCausalLM

from common.config.online import OnlineArgs
from common.config.parse import parse
from common.model.tiny import tiny_model
from common.parallel import distributed
from common.text.tasks import arithmetic_rows

REWARD = '''
def digits(completion, row):
    """Varies among the completions of an untrained model: each step has something to learn."""
    return sum(c.isdigit() for c in completion) / (1 + len(completion))

def first(completion, row):
    """Often the same for all completions of a prompt."""
    return float(completion[:1].isdigit())

def longer(completion, row):
    return float(len(completion) > 4)
'''
# No deadline: the first example may compile a template or load a file.
settings.register_profile(
    "examples", deadline=None, max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", 25))
)
settings.load_profile("examples")


Args = OnlineArgs  # flags of a script that samples and trains


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with many slow tests first, so that the workers have short ones to share at the
    end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """The device of a process group of one rank, which all tests in this process share. Scripts
    that tests start do not inherit it, and Ctrl-C still stops pytest."""
    handlers = mock.patch("signal.signal")
    with mock.patch.dict("os.environ"), mock.patch.object(sys, "excepthook"), handlers:
        device, _, _ = distributed.setup(0)
    yield device
    distributed.cleanup()


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Tests that save without a run do not wait for the disk either."""
    with mock.patch("os.fsync", IN_TESTS["os.fsync"]):
        yield


@pytest.fixture(scope="session")
def main(device) -> Callable[..., None]:
    """`main("sft", *flags)` runs a script in this process."""

    def run_main(script: str, *flags: object) -> None:
        module = importlib.import_module(script)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (IN_TESTS | in_process(device)).items():
                patch.setattr(name, value)
            module.main(parse(module.Args, last(flags)))

    return run_main


def call_main(
    main: Callable[[], None], words: Sequence[object], code: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> tuple[str, str]:  # fmt: skip
    """Call the `main` of a tool with this command line, and check that it ends with `code`. Return
    stdout and stderr."""
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    ended = 0
    try:
        main()
    except SystemExit as error:
        ended = error.code
    shown = capsys.readouterr()
    assert ended == code, shown
    return shown.out, shown.err


@pytest.fixture(scope="session")
def sums(tmp_path_factory) -> Path:
    """A file with the first rows of the built-in task, whose encoding takes a second on each
    rank."""
    path = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    return write_rows(path, arithmetic_rows("train")[:160])


@pytest.fixture(scope="session")
def small(sums, tmp_path_factory) -> tuple[str | Path, ...]:
    """Flags of a short run: the tiny model with one of its four layers, and `sums`."""
    folder = shutil.copytree(tiny_model(), tmp_path_factory.mktemp("small") / "model")
    model = AutoModelForCausalLM.from_pretrained(
        folder, num_hidden_layers=1, layer_types=["full_attention"]
    )
    model.save_pretrained(folder)
    return "--model", folder, "--dataset", sums


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(["apples", "7", "and", "pears", "sold", "12", "left"], k=count))


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> Path:
    """A file of pairs of very different lengths, with margins; some rejected sides are short."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        dict(prompt=words(rng, 3), chosen=words(rng, rng.randint(1, 30)),
             rejected=words(rng, rng.randint(1, 30) if i % 3 else 1), margin=i % 3)
        for i in range(40)
    ]  # fmt: skip
    return write_rows(path, rows)


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD)
    return path


@pytest.fixture(scope="session")
def online(small, reward_file) -> tuple[object, ...]:
    """Flags of a short run of a script that samples."""
    return (
        *small, "--reward", f"{reward_file}:digits", "--max_steps", 2, "--prompts_per_step", 8,
        "--samples_per_prompt", 3, "--minibatches", 2, "--max_new_tokens", 12, "--lr", 1e-4,
        "--warmup_steps", 0, "--eval_every", 0, "--max_logprob_difference", 1e-4,
        "--engine", "transformers",
    )  # fmt: skip


def talkative(folder: Path, model: str | Path | None = None) -> Path:
    """Copy a model to `folder`, with most letters as tokens that end a completion, so that
    completions of the untrained model are short."""
    shutil.copytree(model or tiny_model(), folder)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(config | dict(eos_token_id=[*config["eos_token_id"], *range(10, 60)]))
    )
    return folder


def write_teacher(folder: Path, vocabulary: int = 364) -> Path:
    """Write a teacher that differs from `tiny` in all that may matter: it is narrower, has fewer
    layers, has vocabulary rows without a token, and its logits are not flat."""
    shutil.copytree(tiny_model(), folder)
    config = AutoConfig.from_pretrained(folder)
    config.hidden_size, config.num_hidden_layers, config.vocab_size = 64, 2, vocabulary
    config.layer_types = config.layer_types[:2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        hf = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        hf.get_input_embeddings().weight.mul_(10)
    hf.save_pretrained(folder)
    return folder
