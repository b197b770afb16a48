"""Short runs, the faults that they meet, and the verdict on what they leave."""

import atexit
import hashlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from helpers import metrics
from processes import Ranks
from transformers import AutoModelForCausalLM

from common.model.tiny import tiny_model
from common.text.tasks import arithmetic_rows

HERE = Path(__file__).resolve().parent
TIMED = ("time/", "speed/", "memory/", "idle/", "engine/", "tokens_per_second")


class Case(NamedTuple):
    """One fault. `check(folder, *values)` uses an empty folder and returns what is wrong, None if
    nothing is."""

    kind: str
    name: str
    check: Callable[..., str | None]
    values: tuple = ()


class Skip(Exception):
    """This machine does not allow a case; the reason."""


@cache
def work() -> str:
    """Return a folder that is deleted at exit."""
    folder = tempfile.TemporaryDirectory(prefix="faults_")
    atexit.register(folder.cleanup)
    return folder.name


@cache
def inputs() -> Path:
    """Return a folder with a model of one layer, rows for all scripts and a reward function."""
    folder = Path(tempfile.mkdtemp(dir=work()))
    shutil.copytree(tiny_model(), folder / "model")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", num_hidden_layers=1, layer_types=["full_attention"]
    )
    model.save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in arithmetic_rows("train")[:24])
    )
    (folder / "reward.py").write_text(
        "def digits(completion, row):\n    return sum(map(str.isdigit, completion))\n"
    )
    return folder


OWN = dict(
    sft=dict(batch_size=4, eval_every=2, eval_size=4, keep_best="eval_loss", max_length=128),
    dpo=dict(batch_size=4, eval_every=0, max_length=128),
    distill=dict(
        prompts_per_step=4, samples_per_prompt=1, minibatches=1, eval_every=0, max_new_tokens=4,
        engine="transformers", teacher="tiny", teacher_logprobs="stored", on_policy_fraction=0,
        top_k=4,
    ),
    grpo=dict(
        prompts_per_step=2, samples_per_prompt=2, max_new_tokens=4, eval_every=0,
        engine="transformers", reward="{inputs}/reward.py:digits", max_logprob_difference=1,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Script with the flags of a short run and its number of ranks. `flags` are added to those of
    the script."""

    script: str
    ranks: int = 1
    flags: tuple[tuple[str, object], ...] = ()
    steps: int = 6
    save_every: int = 2

    def line(self, folder: Path) -> list[str]:
        """Return the script and all its flags, for a run in `folder`."""
        there = inputs()
        common = dict(model=there / "model", dataset=there / "rows.jsonl", output_dir=folder)
        common |= dict(max_steps=self.steps, save_every=self.save_every)
        flags = common | OWN[self.script] | dict(self.flags)
        return [
            f"{self.script}.py",
            *(x for k, v in flags.items() for x in (f"--{k}", str(v).format(inputs=there))),
        ]

    def run(self, folder: Path, fault: "Fault | None" = None) -> subprocess.CompletedProcess:
        line = self.line(folder) if fault is None else [*fault.words(folder), *self.line(folder)]
        with Ranks(self.ranks, *line) as started:
            return started.end()


FAULTS = ("none", "full", "broken", "short", "kill")  # as in shim.c


class Fault(NamedTuple):
    """Fault of one operation on the first path in a run's folder that matches `pattern`, or a
    `trace` of all."""

    kind: str
    operation: str = ""
    pattern: str = ""
    trace: Path | str = ""
    copies: Path | str = ""

    def words(self, folder: Path) -> list[str]:
        return [
            str(HERE / "arm.py"), "0", str(folder), self.operation, self.pattern,
            str(FAULTS.index(self.kind)), str(self.trace), str(self.copies),
        ]  # fmt: skip


# ---- verdicts ----


@cache
def reference(setting: Setting) -> Path:
    """Return the folder of an undisturbed run."""
    folder = Path(tempfile.mkdtemp(dir=work())) / "run"
    done = setting.run(folder)
    assert done.returncode == 0, done.stderr
    return folder


@cache
def seconds(setting: Setting) -> float:
    """Return how long a run takes, in a process like those before it."""
    with tempfile.TemporaryDirectory(dir=work()) as folder:
        began = time.monotonic()
        setting.run(Path(folder) / "run")
        return time.monotonic() - began


def illegible(done: subprocess.CompletedProcess) -> str | None:
    """Return what is wrong with how a run ended, None for success or one line."""
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    if "Traceback" in done.stderr or len(errors) != 1:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        return f"exit {done.returncode} with {len(errors)} error lines, {last[0][:200]}"
    return None


def outcome(folder: Path) -> dict[str, object]:
    """Return what a run's numbers determine: its exports, and its metrics without times."""
    found: dict[str, object] = {
        f"weights in {name}": hashlib.sha256(
            (folder / name / "model.safetensors").read_bytes()
        ).hexdigest()
        for name in ("hf", "best")
        if (folder / name).is_dir()
    }
    lines = [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in metrics(folder)]
    return found | dict(steps=[line["step"] for line in lines], metrics=lines)


def differs(setting: Setting, folder: Path) -> str | None:
    """Return how a finished run differs from the undisturbed one, None if it does not."""
    one, other = outcome(reference(setting)), outcome(folder)
    unequal = [name for name in one if one[name] != other.get(name)]
    return f"other {unequal[0]}, {str(other.get(unequal[0]))[:100]}" if unequal else None


def after(setting: Setting, folder: Path) -> str | None:
    """Repeat the command in `folder` and return what is wrong: it must finish like the undisturbed
    run."""
    done = setting.run(folder)
    return (
        f"the same command fails: {done.stderr.strip()[-300:]}"
        if done.returncode
        else differs(setting, folder)
    )
