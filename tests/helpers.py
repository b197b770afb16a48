"""What tests of all kinds need: data, and what a run has written (metrics, samples, weights), with
its comparison. The other files that tests import from:

    in_process.py           `main("sft", *flags)`, one rank in the test process; small models, data
    processes.py            `run(2, "sft.py", *flags)`, ranks as processes; errors, signals, kills
    warm.py, preload.py     the process from which these ranks are forked; what it has imported
    replaced.py             what runs of tests do otherwise than a user's
    engines.py              fixtures `engine`, of transformers and vLLM, and `policy`
    naive.py                scalar objectives; `check` compares values and gradients with them
    scripts.py              names and flags of the project's scripts
    model/checkpoints.py    models with random weights, and what plain transformers computes
    model/adapters.py       weights of LoRA: equal in trainer, engine and files
    model/architectures.py  what every architecture of docs/models.md has to do
    rewards/scored.py       completions, and rewards that score them
    text/chats.py           turns and chat templates
"""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from string import ascii_lowercase
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from common.model.tiny import tiny_model
from common.packs.packing import PackedBatch
from common.packs.sample import Completion, Sample

ROOT = Path(__file__).resolve().parent.parent


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like that of `tiny`, which a test may change: it belongs to no model."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.name_or_path = ""
    return tokenizer


def completion(length: int, finish_reason: str = "stop", said: int = 0) -> Completion:
    """Return a completion of `length` tokens after a prompt of two. An environment said `said`
    tokens after its first one."""
    mask = [False] * 2 + [True] + [False] * said + [True] * (length - 1 - said)
    return Completion([0] * (2 + length), mask, prompt_length=2, finish_reason=finish_reason)


def samples_of(mb: PackedBatch) -> list[Sample]:
    """Return the samples of a micro-batch in the order of its stream. In one process only."""
    return [mb.own_samples[index] for index in mb.index_N.tolist()]


# ---- data, and outputs of a run ----


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def write_rows(path: Path, rows: Iterable[dict]) -> Path:
    """Write a file of JSON lines and return its path."""
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder: Path) -> list[dict]:
    """Return the metrics that a run logged, without a last line that it may be writing."""
    lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def samples(folder: Path, step: int | None = None) -> list[dict]:
    """Return the samples that a run logged, in all steps or in one."""
    lines = read_rows(folder / "samples.jsonl")
    return [line for line in lines if step in (None, line["step"])]


def logged(folder: Path, step: int) -> bool:
    """Return whether a run has logged `step` or a later one."""
    has_file = (folder / "metrics.jsonl").is_file()
    return has_file and any(line["step"] >= step for line in metrics(folder))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "hf" / "model.safetensors")


def stored(folder: Path | str) -> dict[str, torch.Tensor]:
    """Return the weights in a model's folder, by their names in its files."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: weight for file in files for name, weight in load_file(file).items()}


def assert_same_weights(one: Path, other: Path) -> None:
    """Compare the exported weights of two runs bit for bit."""
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_close_metrics(
    one: Path, other: Path, names: Sequence[str], rel: float, floor: float = 0.0
) -> None:
    """Compare the metrics of two runs step by step. The tolerance is relative to the larger of two
    values, or to `floor` if both are smaller."""
    one, other = ([line for line in metrics(folder) if line["step"] > 0] for folder in (one, other))
    assert [line["step"] for line in one] == [line["step"] for line in other]
    assert all(any(name in line for line in one) for name in names), "a metric is never logged"
    for a, b in zip(one, other, strict=True):
        for name in (name for name in names if name in a or name in b):
            difference, size = abs(a[name] - b[name]), max(abs(a[name]), abs(b[name]), floor)
            assert difference <= rel * size, (a["step"], name, a[name], b[name])


def of_each_step(folder: Path) -> list[dict]:
    """Return the metrics of a run that do not depend on the machine or the packing."""
    other = ("time/", "idle/", "speed/", "memory/", "packing/", "engine/",
             "tokens_per_second")  # fmt: skip
    return [{k: v for k, v in line.items() if not k.startswith(other)} for line in metrics(folder)]


def assert_equal_runs(run: Path, other: Path, without: tuple[str, ...] = ()) -> None:
    """Compare metrics, but those that begin with `without`, and samples."""
    names, other_names = (
        sorted({x for line in of_each_step(each) for x in line if not x.startswith(without)})
        for each in (run, other)
    )
    assert names == other_names
    # Many are small differences of float32 numbers of size 1: 1e-5 of 0.1 is their precision.
    assert_close_metrics(run, other, ("loss", "grad_norm"), rel=1e-5, floor=0.1)
    assert_close_metrics(run, other, names, rel=1e-4, floor=0.1)
    if (other / "samples.jsonl").exists():
        for a, b in zip(samples(run), samples(other), strict=True):
            assert a | dict(reward=0, advantage=0) == b | dict(reward=0, advantage=0)
            assert a["reward"] == pytest.approx(b["reward"], abs=1e-6)
            assert a["advantage"] == pytest.approx(b["advantage"], abs=1e-4)


def assert_resumes_exactly(
    main: Callable, script: str, *flags: object, folder: Path, finished: int
) -> None:
    """Copy a finished run without its last checkpoint, continue the copy, and compare it with the
    run bit for bit."""
    again = folder.with_name(f"{folder.name}_again")
    shutil.copytree(folder, again, ignore=lambda *_: ["hf", f"step_{finished:06d}"])
    (before,) = again.glob("checkpoints/step_*")
    assert 0 < int(before.name.removeprefix("step_")) < finished and not (again / "hf").exists()
    main(script, *flags, "--output_dir", again)
    assert_same_weights(folder, again)
    timed = ("time/", "speed/", "memory/", "tokens_per_second")
    lines, same = (
        [{k: v for k, v in m.items() if not k.startswith(timed)} for m in metrics(run)]
        for run in (folder, again)
    )
    assert lines == same and [line["step"] for line in same] == list(range(1, finished + 1))


def short_turns(engine):
    """Return a context in which any lower-case letter ends a turn; untrained models hardly end
    one."""
    letters = engine.tokenizer.convert_tokens_to_ids([*ascii_lowercase])
    return mock.patch.object(engine, "eos_ids", engine.eos_ids + letters)
