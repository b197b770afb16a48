"""Runs on data or with user code that misbehaves, their limits and what they must give."""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from unittest import mock

from helpers import Ranks, metrics, warm

from bench.fault_cases.case import illegible, inputs, outcome, work

SECONDS, MEMORY = 60, 4 << 20  # limits of a run; kB
SAME, FINE = (
    "the same numbers",
    "exit 0",
)  # other expectations are text of the error line; "" allows any one line

ROWS = [
    dict(prompt=f"{n}+1=", completion=f"{n + 1}", chosen=f"{n + 1}", rejected="0", label=n % 2 == 0)
    for n in range(10, 18)
]
COLUMNS = dict(sft="prompt completion", dpo="prompt chosen rejected", kto="prompt completion label",
               rm="prompt chosen rejected", grpo="prompt")  # fmt: skip


def lines(rows: list) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def rows_of(script: str) -> list[dict]:
    return [{name: row[name] for name in COLUMNS[script].split()} for row in ROWS]


# ---- runs ----


GRPO = dict(
    prompts_per_step=2, samples_per_prompt=2, max_new_tokens=4, engine="transformers",
    max_logprob_difference=1, reward="{inputs}/reward.py:digits", reward_timeout=1,
    reward_workers=2,
)  # fmt: skip


def flags_of(script: str) -> dict[str, Path | int | str]:
    """Return the flags of a run of one step."""
    flags = dict(model=inputs() / "model", max_steps=1, save_every=9, eval_every=0)
    return {**flags, **(dict(batch_size=4, max_length=128) if script != "grpo" else GRPO)}


def ended(script: str, folder: Path, **flags: object) -> subprocess.CompletedProcess | str:
    """Run a script with its output in `folder / "run"`. Return how it ended, or which limit it
    exceeded."""
    flags = flags_of(script) | dict(output_dir=folder / "run") | flags
    words = [
        word.format(inputs=inputs(), folder=folder) if "{" in word else word
        for name, value in flags.items()
        for word in (f"--{name}", *str(value).split("\t"))
    ]
    warm()  # its processes must not have the mark of this run
    with (
        mock.patch.dict(os.environ, FAULTS=str(folder)),
        Ranks(1, f"{script}.py", *words) as started,
    ):
        (pid,), deadline = started.pids, time.monotonic() + SECONDS
        while started.processes[0].exitcode is None:
            if used(pid) > MEMORY:
                return f"uses {used(pid) >> 20} GiB"
            if time.monotonic() > deadline:
                return f"runs for more than {SECONDS} s: " + output(started)[-300:]
            time.sleep(0.02)
        return started.end()


def output(started: Ranks) -> str:
    return Path(started.folder.name, "stderr").read_text(errors="replace")


def used(pid: int) -> int:
    """Return the peak memory of a process, in kB."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1])
    return 0


def unexpected(
    done: subprocess.CompletedProcess | str, wanted: str, run: Path, usual: dict[str, object]
) -> str | None:
    """Return how the end of a run differs from the expected one, None if it does not."""
    if isinstance(done, str):
        return done
    if problem := illegible(done):
        return problem
    if done.returncode:
        (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        return (
            None
            if wanted in error and wanted not in (SAME, FINE)
            else f"instead of {wanted!r}: {error[:300]}"
        )
    if left := [str(path) for path in run.rglob("*") if path.name not in usual["files"]]:
        return f"leaves {left}"
    if wrong := [
        name for line in metrics(run) for name, x in line.items() if isinstance(x, float) and x != x
    ]:
        return f"logs NaN as {wrong}"
    if wanted == SAME:
        found = outcome(run)
        unequal = [name for name in found if found[name] != usual[name]]
        return f"other {unequal[0]}: {str(found[unequal[0]])[-200:]}" if unequal else None
    return None if wanted in (FINE, "") else "succeeds"


@cache
def usual(script: str, code: str = "") -> dict[str, object]:
    """Return the outcome of a run on good rows, with a reward `code`, and the names of its
    files."""
    folder = Path(tempfile.mkdtemp(dir=work()))
    (folder / "user.py").write_text(code)
    (folder / "x.jsonl").write_bytes(lines(rows_of(script)))
    done = ended(
        script,
        folder,
        dataset=folder / "x.jsonl",
        **(dict(reward=folder / "user.py:f") if code else {}),
    )
    assert not isinstance(done, str) and done.returncode == 0, done
    return outcome(folder / "run") | dict(files={path.name for path in folder.rglob("*")})
