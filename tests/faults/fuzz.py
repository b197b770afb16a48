"""Damaged files, and files that an attacker wrote: never other numbers with exit code 0, never code
of a folder."""

import json
import os
import pickle
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from processes import Ranks

from common import durable
from tests.faults.case import Case, Setting, illegible, inputs, outcome, reference, work
from tests.faults.disk import interrupted

SFT = Setting("sft")
LORA = Setting("sft", flags=(("lora_rank", 2),))
TEACHER = Setting("distill")


class Scenario(NamedTuple):
    """Files in a folder `place`, and a command that reads them."""

    files: tuple[str, ...]
    """patterns of the files to damage, below `place`"""
    prepare: Callable[[Path], object]
    """fills `place`"""
    run: Callable[[Path], subprocess.CompletedProcess]
    result: Callable[[Path], object]
    """what must not change"""


def resuming(setting: Setting, *files: str) -> Scenario:
    return Scenario(
        files,
        lambda place: shutil.copytree(interrupted(setting), place / "run"),
        lambda place: setting.run(place / "run"),
        lambda place: outcome(place / "run"),
    )


def starting(setting: Setting, flag: str, source: Callable[[], Path]) -> Scenario:
    """Start a run of one step from a folder."""
    return Scenario(
        ("input/*",),
        lambda place: shutil.copytree(source(), place / "input"),
        lambda place: replace(setting, flags=(*setting.flags, (flag, place / "input"))).run(
            place / "run"
        ),
        lambda place: outcome(place / "run"),
    )


def evaluate(place: Path) -> subprocess.CompletedProcess:
    flags = (
        f"--model {inputs()}/model --dataset {inputs()}/rows.jsonl --output_dir {place}/run "
        "--engine transformers"
    )
    with Ranks(
        1, "eval.py", *flags.split(), "--max_new_tokens", "4", "--reward", "exact_match"
    ) as started:
        return started.end()


def half_evaluated(place: Path) -> None:
    evaluate(place)
    (place / "run" / "results.json").unlink()
    file = place / "run" / "completions.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:12]))


SCENARIOS = dict(
    resume=resuming(SFT, "run/args.yaml", "run/checkpoints/*/*", "run/best/*"),
    teacher=resuming(TEACHER, "run/teacher_logprobs/*"),
    model=starting(SFT, "model", lambda: reference(SFT) / "hf"),
    checkpoint=starting(SFT, "model", lambda: reference(SFT) / "checkpoints" / "step_000006"),
    adapter=starting(LORA, "adapter", lambda: reference(LORA) / "adapter"),
    completions=Scenario(
        ("run/completions.jsonl", "run/args.yaml"),
        half_evaluated,
        evaluate,
        lambda place: None,  # the file has no checksum: a changed digit is another answer
    ),
)


@cache
def golden(name: str) -> tuple[Path, object]:
    """Return a scenario's files, and the result without damage."""
    scenario, folder = SCENARIOS[name], Path(tempfile.mkdtemp(dir=work()))
    (folder / "place").mkdir()
    scenario.prepare(folder / "place")
    shutil.copytree(folder / "place", folder / "work")
    done = scenario.run(folder / "work")
    assert done.returncode == 0, done.stderr
    return folder / "place", scenario.result(folder / "work")


# ---- damage ----


def flip_a_bit(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def flip_bits(rng: random.Random, data: bytearray) -> None:
    for _ in range(20):
        flip_a_bit(rng, data)


def change_a_digit(rng: random.Random, data: bytearray) -> None:
    places = [i for i, byte in enumerate(data) if chr(byte).isdigit()] or [0]
    place = rng.choice(places)
    data[place] = rng.choice([x for x in b"0123456789" if x != data[place]])


def truncate(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def empty(rng: random.Random, data: bytearray) -> None:
    data.clear()


def zero_a_block(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data))
    block = data[start : start + 512]
    data[start : start + 512] = bytes(len(block))


def swap_blocks(rng: random.Random, data: bytearray) -> None:
    half = len(data) // 2
    size = min(half, rng.randint(1, 512))
    data[:size], data[half : half + size] = data[half : half + size], data[:size]


def append(rng: random.Random, data: bytearray) -> None:
    data += rng.randbytes(rng.randint(1, 100))


def deep_json(rng: random.Random, data: bytearray) -> None:
    data[:] = b"[" * 100_000


def long_integer(rng: random.Random, data: bytearray) -> None:
    data[:] = b'{"step": ' + b"9" * 5000 + b"}"


DAMAGE = (
    flip_a_bit, flip_bits, change_a_digit, truncate, empty, zero_a_block, swap_blocks, append,
    deep_json, long_integer,
)  # fmt: skip


def fuzz(
    rng: random.Random, count: int, names: tuple[str, ...] = tuple(SCENARIOS)
) -> Iterator[Case]:
    """Yield `count` corruptions, spread over the scenarios, then their planted programs."""
    for i in range(count):
        name, damage, seed = (
            names[i % len(names)],
            DAMAGE[i // len(names) % len(DAMAGE)],
            rng.randrange(1 << 32),
        )
        yield Case("fuzz", f"{name}/{damage.__name__}/{seed}", damaged, (name, damage, seed))
    for name, plant in PLANTS:
        if name in names:
            yield Case("fuzz", f"{name}/{plant.__name__}", planted, (name, plant))


def damaged(folder: Path, name: str, damage: Callable, seed: int) -> str | None:
    """The command succeeds with the same result, or ends with one line."""
    (place, expected), rng, scenario = golden(name), random.Random(seed), SCENARIOS[name]
    shutil.copytree(place, folder / "place")
    paths = sorted(
        path
        for pattern in scenario.files
        for path in (folder / "place").glob(pattern)
        if path.is_file()
    )
    path = rng.choice(paths)
    data = bytearray(path.read_bytes() or b"\n")
    before = bytes(data)
    damage(rng, data)
    path.write_bytes(data)
    done = scenario.run(folder / "place")
    where = f"{path.relative_to(folder / 'place')}"
    if problem := illegible(done):
        return f"{where}: {problem}"
    if (
        done.returncode == 0
        and bytes(data) != before
        and scenario.result(folder / "place") != expected
    ):
        return f"{where}: exit 0 with other numbers"
    return None


# ---- programs in the files of an attacker, who also writes the checksums ----


class Program:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def in_metadata(place: Path, mark: Path) -> None:
    """PyTorch's other format of checkpoints has this file."""
    for file in place.rglob("state.json"):
        file.with_name(".metadata").write_bytes(pickle.dumps(Program(mark)))


def in_shards(place: Path, mark: Path) -> None:
    for file in place.rglob("shard-*.safetensors"):
        file.write_bytes(pickle.dumps(Program(mark)))


def in_yaml(place: Path, mark: Path) -> None:
    for file in place.rglob("args.yaml"):
        file.write_text(f"!!python/object/apply:os.mkdir ['{mark}']\n")


def in_model_code(place: Path, mark: Path) -> None:
    for file in place.rglob("config.json"):
        config = json.loads(file.read_text()) | dict(
            model_type="mine",
            auto_map=dict(AutoConfig="mine.Config", AutoModelForCausalLM="mine.Model"),
        )
        file.write_text(json.dumps(config))
        file.with_name("mine.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")


def in_pickled_weights(place: Path, mark: Path) -> None:
    for file in place.rglob("*.safetensors"):
        file.with_name("pytorch_model.bin").write_bytes(pickle.dumps(Program(mark)))
        file.unlink()


def in_chat_template(place: Path, mark: Path) -> None:
    call = f"{{{{ cycler.__init__.__globals__.os.mkdir('{mark}') }}}}"
    for file in place.rglob("chat_template.jinja"):
        file.write_text(call + file.read_text())


def in_state(place: Path, mark: Path) -> None:
    for file in place.rglob("state.json"):
        file.write_bytes(pickle.dumps(Program(mark)))


PLANTS = [
    ("resume", in_metadata), ("resume", in_shards), ("resume", in_yaml), ("resume", in_state),
    ("checkpoint", in_metadata), ("checkpoint", in_shards), ("checkpoint", in_model_code),
    ("model", in_model_code), ("model", in_pickled_weights), ("model", in_chat_template),
    ("adapter", in_pickled_weights),
]  # fmt: skip


def planted(folder: Path, name: str, plant: Callable[[Path, Path], None]) -> str | None:
    """The program does not run, and the exit is one line or none."""
    shutil.copytree(golden(name)[0], folder / "place")
    plant(folder / "place", folder / "mark")
    for sums in sorted(folder.rglob(durable.CHECKSUMS), reverse=True):  # hf/ before its checkpoint
        sums.unlink()
        durable.write_checksums(sums.parent)
    done = SCENARIOS[name].run(folder / "place")
    return "the program ran" if (folder / "mark").exists() else illegible(done)
