"""Run one step of a run again, exactly or with changed flags.

    python extras/trace/replay.py runs/demo/grpo --step 132
    python extras/trace/replay.py runs/demo/grpo --step 132 --advantage group_ratio
    python extras/trace/replay.py runs/demo/grpo --step 132 --pack step.zip
    python extras/trace/replay.py step.zip     # computes a packed step again, without the run

The run's own script starts at the newest checkpoint before the step, on as many ranks, and repeats
all steps up to it. Metrics, traces and a log go to `RUN/replay/`. The weights after the step are
compared with those of the run. Changed flags apply to this step alone: a second replay, which
starts from the weights right before it, has them."""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from common.config.flags import TreeLoader
from common.config.options import Options
from common.config.parse import parse
from common.metrics.curves import read_metrics
from common.model.hub import checkpoints_in
from common.parallel import distributed
from common.parallel.process import print_any_text, visible
from common.train.run import Run
from common.train.run_folder import unlock
from extras.trace import file as trace_file
from extras.trace import step as packed

# Metrics that begin like this measure the machine, so a replay has other values.
OF_THE_MACHINE = ("time/", "speed/", "idle/", "memory/", "engine/", "tokens_per_second")
REPLACED = dict(resume="auto", log_to=[], dry_run=False, trace_every=1)


# ---- in each rank: the script's main() with another Run ----


class ReplayRun(Run):
    """A `Run` that ends after the replayed step, and saves only right before it."""

    replayed = 1  # counted from 1

    def steps(self) -> Iterator[int]:
        for step in super().steps():
            if step + 1 < self.replayed:
                yield step
                continue
            if step > self.first_step:
                super()._save()
            folder = Path(self.args.output_dir, packed.PARTS)
            with packed.recorded(self, folder) if folder.is_dir() else nullcontext():
                yield step
            self.total_steps = self.replayed

    def _save(self) -> None:
        """Skip the checkpoints that the run itself would save."""

    def end(self, summary: str = "") -> None:
        self.logger.close()
        unlock()


def load_script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def work(script: str, step: str, *words: str) -> None:
    """Replay the step on this rank, with the flags in `words`."""
    module = load_script(script)
    ReplayRun.replayed = int(step)
    module.Run = ReplayRun
    module.main(parse(module.Args, words))
    distributed.end_process()


# ---- the run that is replayed ----


def launch(ranks: int, log: Path, *words: str) -> None:
    """Start the ranks, write their output to `log` and wait. Raises `ValueError` if they fail."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks))
    with log.open("w") as file:
        done = subprocess.run(
            [*torchrun, __file__, "--work", *words], stdout=file, stderr=subprocess.STDOUT
        )
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        raise ValueError(f"{' '.join(errors[:1]) or 'the replay failed'} (its output: {log})")


def repeat(
    run: Path, step: int, folder: Path, script: str, ranks: int, words: list[str], packs=False
) -> None:
    """Repeat `run` up to this step in a new `folder`. Flags in `words` replace the run's own."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / packed.PARTS if packs else folder).mkdir(parents=True)
    saved = checkpoints_in(run / "checkpoints")  # newest first
    before = [path for path in saved if int(path.name.removeprefix("step_")) < step]
    for start in before[:1]:
        shutil.copytree(start, folder / "checkpoints" / start.name, copy_function=os.link)
        shutil.copy(run / "metrics.jsonl", folder)
    print(f"{folder}: from {before[0] if before else 'the start of the run'}", flush=True)
    flags = yaml.load((run / "args.yaml").read_text(), TreeLoader) | REPLACED
    flags.pop("preset", None)  # args.yaml has the flags that it sets
    config = folder / "replay.yaml"
    config.write_text(yaml.safe_dump(flags | dict(output_dir=str(folder))))
    ranks += flags.get("rollout_ranks", 0)  # rollout ranks have no trace
    launch(ranks, folder / "log.txt", script, str(step), "--config", str(config), *words)


def row_of(folder: Path, step: int) -> dict[str, float]:
    """Return a step's metrics, except those of the machine. Raises `ValueError` if it has none."""
    for row in read_metrics(folder / "metrics.jsonl"):
        if row["step"] == step:
            return {name: x for name, x in row.items() if not name.startswith(OF_THE_MACHINE)}
    raise ValueError(f"--step {step}: {folder} has no such step")


def weights_of(folder: Path, step: int) -> list | None:
    """Return the hashes of the weights after a step, or None if the step was not traced."""
    path = folder / "trace" / f"step_{step:06}.jsonl.gz"
    return trace_file.read(path)[0]["weights"] if path.is_file() else None


def replay(run: Path, step: int, words: list[str], pack: Path | None = None) -> None:
    """Replay a step exactly. Then write it to the file `pack`, if given, and if `words` has changed
    flags, replay the step once more with these."""
    if not (run / "args.yaml").is_file():
        raise ValueError(f"{run}: no args.yaml; name the --output_dir of a training run")
    script = (run / "args.yaml").read_text(encoding="utf-8").split("\n")[0].removeprefix("# ")
    if not Path(script).is_file():
        raise ValueError(f"{run / 'args.yaml'}: the first line names no script: {script}")
    if pack is not None and Path(script).stem not in packed.SCRIPTS:
        raise ValueError(f"--pack: {script} is none of {', '.join(packed.SCRIPTS)}")
    if pack is not None and (pack.suffix != ".zip" or pack.exists() or not pack.parent.is_dir()):
        raise ValueError(f"--pack {pack}: name a new file that ends in .zip")
    then = row_of(run, step)
    traces = sorted((run / "trace").glob("step_*.jsonl.gz"))
    if not traces:
        raise ValueError(f"{run}: no trace, which has the number of ranks; set --trace_every")
    ranks = len(trace_file.read(traces[0])[0]["weights"])
    exact = run / "replay" / f"step_{step:06}"
    repeat(run, step, exact, script, ranks, [], packs=pack is not None)
    now = row_of(exact, step)
    differing = [name for name in then if then[name] != now.get(name)]
    weights = "have no hash in the run, which did not trace this step"
    if weights_of(run, step) is not None:
        is_same = weights_of(run, step) == weights_of(exact, step)
        weights = f"{'are bitwise' if is_same else 'DIFFER from'} those of the run"
    equal = f"{len(then) - len(differing)} of {len(then)} metrics are equal"
    print(f"step {step}: the weights after it {weights}; {equal}", *differing[:1], flush=True)
    if pack is not None:
        packed.pack(exact, step, pack)
    if not words:
        return
    name = re.sub(r"[^A-Za-z0-9_=.,+-]", "-", "_".join(words).replace("--", ""))[:80]
    changed = exact.with_name(f"{exact.name}_{name}")
    repeat(exact, step, changed, script, ranks, words)
    print(visible(f"with {' '.join(words)}:"))
    after = row_of(changed, step)
    for name, before in now.items():
        one, other = f"{before:.5g}", f"{after.get(name, math.nan):.5g}"
        if one != other:
            print(f"  {name:40} {one:>10} -> {other}")
    print(visible(f"token by token: python extras/trace/view.py {exact} {changed}"))


def main() -> None:
    print_any_text()
    if sys.argv[1:2] == ["--work"]:
        return work(*sys.argv[2:])
    parser = Options(__doc__)
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="output folder of a run, or a step.zip"
    )
    parser.add_argument("--step", type=int, help="step to replay, counted from 1")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="step.zip to write")
    options, words = parser.parse_known_args()
    try:
        if options.run.suffix == ".zip":
            if words or options.step is not None or options.pack is not None:
                problem = "a packed step is computed as it is, without flags"
                raise ValueError(f"{options.run}: {problem}")
            sys.exit(packed.check(options.run))
        if options.step is None:
            parser.error("the following arguments are required: --step")
        replay(options.run, options.step, words, options.pack)
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
