"""Run a step of a run again, exactly or with changed flags.

    python extras/trace/replay.py runs/demo/grpo --step 132
    python extras/trace/replay.py runs/demo/grpo --step 132 --advantage group_ratio
    python extras/trace/replay.py runs/demo/grpo --steps 120:140 --lr 1e-4

A replay starts from the newest checkpoint before the step, or from the start of the run, and
repeats the steps between. It writes to `RUN/replay/`: metrics, traces and a log. Without changed
flags it compares the weights with those of the run. Changed flags hold from the first of the given
steps on: the replay without changes is run first, the other one starts from its weights. It runs
the script itself, with as many ranks as the run had."""

import argparse
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import yaml

from common.config.parse import one_line, parse, read_file
from common.metrics.curves import read_metrics
from common.model.checkpoint_files import checkpoints_in
from common.parallel import distributed
from common.parallel.process import print_any_text, visible
from common.train.run import Run
from common.train.run_folder import unlock
from extras.trace import file as trace_file

# Beginnings of metrics that measure the machine.
OF_THE_MACHINE = ("time/", "speed/", "idle/", "memory/", "engine/", "tokens_per_second")
REPLACED = dict(resume="auto", log=[], dry_run=False, trace_every=1)


# ---- one replay: the script's main() with another Run ----


class ReplayRun(Run):
    """Run that ends after step `last`, and saves no checkpoint but the one before step `first`."""

    first = last = 1

    @property
    def done(self) -> bool:
        return self.finished >= self.last

    def steps(self) -> Iterator[int]:
        for step in super().steps():
            if step + 1 == self.first and step > self.first_step:
                super()._save()
            yield step

    def _save(self) -> None:
        """Save none of the checkpoints of the run."""

    def end(self, summary: str = "") -> None:
        self.logger.close()
        unlock()


def load_script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def work(script: str, config: str, first: str, last: str) -> None:
    """Replay on this rank. `config`: a file with all flags."""
    module = load_script(script)
    ReplayRun.first, ReplayRun.last = int(first), int(last)
    vars(module).update(Run=ReplayRun)
    module.main(parse(module.Args, ["--config", config]))
    distributed.end_process()


# ---- the run that is replayed ----


def find_start(run: Path, first: int) -> tuple[Path | None, int]:
    """Return the newest checkpoint before step `first`, counted from 1, and its step; None and 0 if
    there is none."""
    steps = {
        path: int(path.name.removeprefix("step_")) for path in checkpoints_in(run / "checkpoints")
    }
    before = {path: step for path, step in steps.items() if step < first}
    return max(before.items(), key=lambda item: item[1], default=(None, 0))


def prepare(run: Path, folder: Path, start: Path | None, flags: dict) -> Path:
    """Fill the folder of a replay with a checkpoint and the files of its run. Return the path of
    the flags."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if start is not None:
        shutil.copytree(start, folder / "checkpoints" / start.name, copy_function=os.link)
        for path in filter(Path.is_file, run.iterdir()):
            if path.name not in ("args.yaml", "lock", "wandb_id", "curves.png", "view.html"):
                shutil.copy(path, folder)
    config = folder / "replay.yaml"
    config.write_text(yaml.safe_dump(flags | dict(output_dir=str(folder))))
    return config


def launch(ranks: int, folder: Path, *words: object) -> None:
    """Replay on `ranks` ranks; the output goes to `log.txt`. Raises `ValueError` with the first
    error if it fails."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        ranks,
        __file__,
        "--work",
        *words,
    ]
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        lines = (folder / "log.txt").read_text(errors="replace").splitlines()
        error = next(
            (line for line in lines if line.startswith("error: ")), f"exit code {done.returncode}"
        )
        raise ValueError(
            f"{error.removeprefix('error: ')} (the replay's output is in {folder}/log.txt)"
        )


def obstacles(flags: dict) -> Iterator[str]:
    """Yield the reasons why a replay of a run with these flags may not be exact."""
    if torch.cuda.is_available():
        yield "on CUDA, sums in another order change the last digits"
    if flags.get("rollout_ranks") and flags.get("max_staleness"):
        yield (
            f"--rollout_ranks with --max_staleness {flags['max_staleness']}: "
            "timing decides which weights sample"
        )


# ---- the comparison ----


def row_of(folder: Path, step: int) -> dict[str, float]:
    """Return the metrics of a step, without those of the machine. Raises `ValueError` if the run
    has no such step."""
    for row in read_metrics(folder / "metrics.jsonl"):
        if row["step"] == step:
            return {name: x for name, x in row.items() if not name.startswith(OF_THE_MACHINE)}
    raise ValueError(f"--step {step}: {folder} has no such step")


def header_of(folder: Path, step: int) -> dict | None:
    path = folder / "trace" / f"step_{step:06}.jsonl.gz"
    return trace_file.read(path)[0] if path.is_file() else None


def compare_exactly(run: Path, folder: Path, step: int) -> str:
    """Return a line that says whether a replayed step has the weights of the run."""
    then, now, (old, new) = (
        header_of(run, step),
        header_of(folder, step),
        (row_of(run, step), row_of(folder, step)),
    )
    different = [name for name in old if old[name] != new.get(name)]
    equal = f"{len(old) - len(different)} of {len(old)} metrics are equal"
    if then is None or now is None:
        return f"step {step}: {equal}; no trace of the run has a hash of its weights"
    weights = (
        "are bitwise those of the run"
        if then["weights"] == now["weights"]
        else "DIFFER from those of the run"
    )
    return f"step {step}: the weights after it {weights}; {equal}" + (
        f", {different[0]} is not" if different else ""
    )


def print_changes(exact: Path, changed: Path, step: int) -> None:
    """Print the metrics that differ between both replays."""
    one, other = row_of(exact, step), row_of(changed, step)
    for name, before, after in (
        (name, f"{one[name]:.5g}", f"{other.get(name, math.nan):.5g}") for name in one
    ):
        if before != after:
            print(f"  {name:40} {before:>10} -> {after}")


def replay(run: Path, first: int, last: int, changes: dict[str, str]) -> None:
    for name in ("args.yaml", "metrics.jsonl"):
        if not (run / name).is_file():
            raise ValueError(f"{run}: no {name}; name the --output_dir of a training run")
    script = (run / "args.yaml").read_text(encoding="utf-8").split("\n")[0].removeprefix("# ")
    if not Path(script).is_file():
        raise ValueError(f"{run / 'args.yaml'}: the first line names no script: {script}")
    traces = sorted((run / "trace").glob("step_*.jsonl.gz"))
    if not traces:
        raise ValueError(
            f"{run}: no trace, which has the number of ranks; train with --trace_every"
        )
    ranks = len(trace_file.read(traces[0])[0]["weights"])
    row_of(run, last)
    words = [word for flag, value in changes.items() for word in (f"--{flag}", value)]
    args_class = load_script(script).Args
    flags = read_file(args_class, str(run / "args.yaml"))
    flags = {
        name: REPLACED.get(name, value) for name, value in flags.items() if name != "preset"
    }  # its flags are set
    try:
        args_class(**(flags | changes))
    except ValueError as error:
        raise ValueError(one_line(error)) from error
    start, done = find_start(run, first)
    where = f"checkpoint {start.name}" if start else "the start of the run"
    between = f" repeats {first - 1 - done} steps, then" if first - 1 > done else ""
    print(
        f"{Path(script).name}, {ranks} ranks: starts from {where},{between} replays step {first}",
        flush=True,
    )
    for reason in obstacles(flags):
        print(f"may not be exact: {reason}")
    exact, until = run / "replay" / f"step_{first:06}", first if changes else last
    launch(ranks, exact, script, prepare(run, exact, start, flags), first, until)
    for step in range(first, until + 1):
        print(compare_exactly(run, exact, step), flush=True)
    if not changes:
        return
    name = "_".join(f"{flag}={value}" for flag, value in changes.items())
    folder = exact.with_name(f"{exact.name}_{re.sub(r'[^A-Za-z0-9_=.,+-]', '-', name)[:80]}")
    start, _ = find_start(exact, first)
    launch(ranks, folder, script, prepare(exact, folder, start, flags | changes), first, last)
    print(visible(f"with {' '.join(words)}:"))
    print_changes(exact, folder, first)
    print(visible(f"token by token: python extras/trace/view.py {exact} {folder}"))


def main() -> None:
    print_any_text()
    if sys.argv[1:2] == ["--work"]:
        return work(*sys.argv[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of the run (its --output_dir)")
    steps = parser.add_mutually_exclusive_group(required=True)
    steps.add_argument("--step", help="step to replay, counted from 1")
    steps.add_argument("--steps", help="first and last step to replay, such as 120:140")
    flags, words = parser.parse_known_args()
    try:
        numbers = [int(n) for n in (flags.step or flags.steps).split(":")]
        changes = dict(
            zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True)
        )
        if (
            not 1 <= numbers[0] <= numbers[-1]
            or len(numbers) > 2
            or not all(w.startswith("--") for w in words[::2])
        ):
            raise ValueError
    except ValueError:
        parser.error(
            "expected --step N or --steps FIRST:LAST from 1 on, and changed flags as --flag value"
        )
    try:
        replay(flags.run, numbers[0], numbers[-1], changes)
    except (ValueError, OSError) as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
