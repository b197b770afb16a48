"""Draw your runs of a lesson over stored ones (README.md).

    python course/lesson.py 6            # after the commands of course/lessons/06_*.md
    python course/lesson.py 6 --store    # every arm with its seeds: curves, picture and table

A lesson has four files in course/lessons: page (.md), description (.yaml), stored curves (.json),
picture (.png). The band of a metric is the range of the stored runs, which differ in the seed."""

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import yaml

from common.config.options import Options
from common.metrics.runs import Run, band, by_seed, read_run, values_of
from common.parallel.process import print_any_text

ROOT = Path(__file__).resolve().parent.parent
LESSONS = ROOT / "course/lessons"


class Lesson(NamedTuple):
    """Description of a lesson, from its .yaml."""

    path: Path  # of its files, without suffix
    script: str  # or a program with --seed that writes args.yaml and metrics.jsonl to --output_dir
    arms: dict[str, str]  # flags of each arm
    metrics: list[str]  # to show; "a over b" draws a over b in place of a over the step
    yours: list[str]  # arms that a reader runs; default: all
    flags: str = ""  # flags of all arms
    seeds: int = 3  # stored runs of each arm have the seeds 1, 2, ...; a reader's run has 0
    before: dict[
        str, str
    ] = {}  # commands by the folder that each of them makes; they run once, before all runs

    @property
    def names(self) -> list[str]:
        return list(
            dict.fromkeys(name for metric in self.metrics for name in metric.split(" over "))
        )

    def folder(self, arm: str, seed: int | None = None) -> str:
        """Return the output folder of a reader's run, or of a stored one."""
        return f"runs/course/{self.path.name[:2]}/" + (
            arm if seed is None else f"stored/{arm}_{seed}"
        )

    def command(self, arm: str, seed: int | None = None) -> str:
        """Return the command of an arm, as on the page, or with a seed."""
        launcher = (
            "torchrun --nproc_per_node 2" if "--rollout_ranks" in self.arms[arm] else "python"
        )
        words = (
            launcher,
            self.script,
            self.flags,
            self.arms[arm],
            "--output_dir",
            self.folder(arm, seed),
        )
        return " ".join(" ".join(words).split()) + ("" if seed is None else f" --seed {seed}")


def read_lesson(name: str) -> Lesson:
    """Read a lesson by its number, or by the name of its files. Raises `ValueError` if there is
    none."""
    found = sorted(LESSONS.glob(f"{name.zfill(2)}_*.yaml" if name.isdecimal() else f"{name}.yaml"))
    if not found:
        raise ValueError(f"lesson {name}: no such lesson; course/README.md lists them")
    keys = yaml.safe_load(found[0].read_text(encoding="utf-8"))
    return Lesson(found[0].with_suffix(""), **{"yours": list(keys["arms"])} | keys)


def launch(command: str) -> None:
    """Run a command of a page with this Python, and with one thread for each rank."""
    words = shlex.split(command)
    words[:1] = (
        [sys.executable]
        if words[0] == "python"
        else [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    )
    variables = os.environ | dict(
        OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", HF_HUB_OFFLINE="1"
    )
    subprocess.run(words, cwd=ROOT, env=variables, check=True, stdout=subprocess.DEVNULL)


def store(lesson: Lesson) -> None:
    """Run every arm with every seed, except finished runs. Write CPU seconds and curves, [step,
    value]."""
    for made, command in lesson.before.items():
        if not (ROOT / made).exists():
            launch(command)
    stored: dict[str, dict[str, dict]] = {arm: {} for arm in lesson.arms}
    for seed, arm in itertools.product(range(1, lesson.seeds + 1), stored):
        kept = (folder := ROOT / lesson.folder(arm, seed)) / "seconds"
        if not kept.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            start = sum(
                os.times()[2:4]
            )  # CPU time of ended children: other jobs on the machine do not change it
            launch(lesson.command(arm, seed))
            kept.write_text(f"{sum(os.times()[2:4]) - start:.0f}")
        curves = {
            n: [[x, float(f"{y:.4g}")] for x, y in read_run(folder).metrics[n].items()]
            for n in lesson.names
        }
        stored[arm][str(seed)] = dict(seconds=int(kept.read_text())) | curves
        print(f"{arm}, seed {seed}: {kept.read_text()} s", flush=True)
    lesson.path.with_suffix(".json").write_text(
        json.dumps(stored).replace("}, ", "},\n") + "\n", encoding="utf-8"
    )


def read_stored(lesson: Lesson) -> dict[str, list[Run]]:
    """Read the stored runs of every arm."""
    stored = lesson.path.with_suffix(".json").read_text(encoding="utf-8")
    return {
        arm: [
            Run(Path(arm), dict(seed=seed), [], {name: dict(run[name]) for name in lesson.names})
            for seed, run in runs.items()
        ]
        for arm, runs in json.loads(stored).items()
    }


def ends(runs: list[Run], name: str) -> np.ndarray:
    """Return the last value of a metric in each run; except for eval* the mean of the last 10
    logged ones."""
    return values_of(runs, name)[1][:, -1 if name.startswith("eval") else -10 :].mean(1)


def table(lesson: Lesson) -> str:
    """Return the mean last values of the stored runs as a table in Markdown. Bold: the arm differs
    from the first one, by the 95% t interval of the difference, paired by seed."""
    stored, base = read_stored(lesson), next(iter(lesson.arms))
    lines = [f"| | {' | '.join(f'`{arm}`' for arm in stored)} |", "|---" * (len(stored) + 1) + "|"]
    for name in lesson.names:
        first = by_seed(stored[base], ends(stored[base], name))
        cells = []
        for runs in stored.values():
            values = by_seed(runs, ends(runs, name))
            low, high = band(np.array([values[seed] - first[seed] for seed in first]))
            mean = f"{np.mean([*values.values()]):.3g}"
            cells.append(mean if low <= 0 <= high else f"**{mean}**")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def points(run: Run, y: str, x: str) -> tuple[list[float], list[float]]:
    """Return the values of the metric x, or the steps without one, and those of the metric y."""
    steps = [step for step in run.metrics.get(y, {}) if not x or step in run.metrics[x]]
    return [run.metrics[x][step] if x else step for step in steps], [
        run.metrics[y][step] for step in steps
    ]


def draw(lesson: Lesson, mine: dict[str, Run], picture: Path) -> None:
    """Draw a panel for each metric: for each arm the stored runs, their mean and band, and the
    reader's run, dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stored, count = read_stored(lesson), len(lesson.metrics)
    figure, axes = plt.subplots(
        1, count, figsize=(3.6 * count, 3.2), squeeze=False, layout="constrained"
    )
    for axis, metric in zip(axes.flat, lesson.metrics, strict=True):
        y, _, x = metric.partition(" over ")
        for number, (arm, runs) in enumerate(stored.items()):
            for run in runs:
                axis.plot(*points(run, y, x), color=f"C{number}", linewidth=0.6, alpha=0.6)
            steps, values_RT = (ends(runs, x), ends(runs, y)) if x else values_of(runs, y)
            axis.plot(
                steps,
                values_RT if x else values_RT.mean(0),
                "o" if x else "-",
                color=f"C{number}",
                label=arm,
            )
            if arm in mine:
                axis.plot(
                    *points(mine[arm], y, x),
                    "--",
                    color=f"C{number}",
                    linewidth=2.5,
                    label=f"{arm}, yours",
                )
        for number, runs in enumerate([] if x else stored.values()):
            steps, values_RT = values_of(runs, y)
            low_T, high_T = values_RT.min(0), values_RT.max(0)
            axis.fill_between(steps, low_T, high_T, color=f"C{number}", alpha=0.12, linewidth=0)
        axis.set(title=y, xlabel=x or "step")
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    figure.savefig(picture, dpi=90)
    plt.close(figure)


def verdicts(lesson: Lesson, mine: dict[str, Run]) -> list[str]:
    """Return a line for each last value of the reader's runs: whether it lies in the range of the
    stored runs."""
    lines, stored = [], read_stored(lesson)
    for arm, name in itertools.product(mine, lesson.names):
        end, values_R = ends([mine[arm]], name)[0], ends(stored[arm], name)
        low, high = values_R.min(), values_R.max()
        where = (
            f"{'in' if low <= end <= high else 'outside'} the range {low:.3g} to {high:.3g} of "
            f"the {len(values_R)} stored runs"
        )
        lines.append(f"{arm}: {name} {end:.3g} at step {max(mine[arm].metrics[name])} is {where}")
    return lines


def main() -> None:
    print_any_text()
    parser = Options(__doc__)
    parser.add_argument("name", help="number of the lesson, or the name of its files")
    parser.add_argument(
        "--store", action="store_true", help="run every arm with its seeds, and store the curves"
    )
    options = parser.parse_args()
    try:
        lesson = read_lesson(options.name)
        if options.store:
            store(lesson)
            draw(lesson, {}, lesson.path.with_suffix(".png"))
            return print(table(lesson))
        runs = {arm: ROOT / lesson.folder(arm) for arm in lesson.arms}
        found = {
            arm: read_run(folder)
            for arm, folder in runs.items()
            if (folder / "metrics.jsonl").is_file()
        }
        mine = {arm: run for arm, run in found.items() if {*lesson.names} <= {*run.metrics}}
        if found and not mine:
            raise ValueError(f"{[*found.values()][0].folder}: no finished step; resume it")
        if not mine:
            raise ValueError(
                f"lesson {options.name}: no run of yours; run {lesson.command(lesson.yours[0])}"
            )
        draw(lesson, mine, ROOT / (picture := lesson.folder(f"{lesson.path.name}.png")))
        print(*verdicts(lesson, mine), picture, sep="\n")
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
