"""Compare runs: curves with a band over seeds, and a table with confidence intervals.

    python tools/compare.py runs/a0 runs/a1 runs/a2 runs/b0 runs/b1 runs/b2
    python tools/compare.py runs/a* runs/b* --metrics eval/solved 'reward*' --last 20 --out ab.png
    python tools/compare.py runs/before runs/after     # of eval.py: paired by question

Runs of the same script and code form a group if they differ only in the flags seed, output_dir and
resume; if a seed is repeated, each run is its own group. Curves and numbers of a group use the
steps that all of its runs have. A metric that equals an earlier one in all runs is left out."""

import fnmatch
import json
import math
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from common.config.options import Options
from common.evaluate.estimators import SOLVED, mean_and_interval
from common.metrics.curves import can_draw, distinct
from common.metrics.runs import Run, band, by_seed, interval, read_run, t_quantile, values_of
from common.parallel.process import print_any_text, visible

FREE = ("seed", "output_dir", "resume")  # flags that may differ within a group
CAPTION = "mean over seeds; band: 95% t interval of the mean, range for 2 seeds"
COLUMNS = (
    "metric", "group", "seeds", "step", "first -> last", "95% interval",
    "difference to the first group",
)  # fmt: skip
EVALUATION = (
    "solved", "evaluation", "questions", "mean", "95% interval", "difference to the first",
    "gained, lost",
)  # fmt: skip


def group_runs(runs: list[Run]) -> list[list[Run]]:
    """Return the groups of runs, in the order of their first runs."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        flags = {name: value for name, value in run.flags.items() if name not in FREE}
        alike.setdefault(json.dumps([flags, run.script], sort_keys=True, default=str), []).append(
            run
        )
    groups = []
    for group in alike.values():
        has_repeated_seeds = len(by_seed(group, group)) < len(group)
        groups += [[run] for run in group] if has_repeated_seeds else [group]
    return groups


def label_groups(groups: list[list[Run]]) -> list[str]:
    """Return a label for each group: the flags in which the groups differ, if there are at most 3
    and they tell the groups apart; else folders."""
    flags = [{k: str(v) for k, v in group[0].flags.items() if k not in FREE} for group in groups]
    names = [k for k in dict.fromkeys(chain(*flags)) if len({of.get(k) for of in flags}) > 1]
    by_flags = [", ".join(f"{k} {of.get(k, '-')}" for k in names) for of in flags]
    if len(names) <= 3 and len({*by_flags}) == len(groups) > 1:
        return by_flags
    return [", ".join(str(run.folder) for run in group) for group in groups]


# ---- numbers ----


def shown_interval(values_R: np.ndarray) -> str:
    if len(values_R) < 2:
        return "needs 2 seeds"
    low, high = interval(values_R)
    return f"[{low:.4g}, {high:.4g}]"


def difference(base: dict[str, float], other: dict[str, float]) -> str:
    """Return the difference between the means of two groups, given by seed, with an interval if
    both have 2 seeds: a paired one for equal seeds, else Welch's."""
    a, b = np.array([*base.values()]), np.array([*other.values()])
    mean = b.mean() - a.mean()
    if min(len(a), len(b)) < 2:
        return f"{mean:+.4g}"
    if base.keys() == other.keys():
        differences = np.array([other[seed] - base[seed] for seed in base])
        if not np.ptp(differences):
            return f"{mean:+.4g} (no interval: the same for each seed)"
        return f"{mean:+.4g} {shown_interval(differences)} paired"
    v, w = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    df = (v + w) ** 2 / (v**2 / (len(a) - 1) + w**2 / (len(b) - 1)) if v + w else 1
    half = t_quantile(df) * math.sqrt(v + w)
    return f"{mean:+.4g} [{mean - half:.4g}, {mean + half:.4g}] Welch"


def rows_of(groups: list[list[Run]], labels: list[str], name: str, last: int) -> list[list[str]]:
    """Return the table's rows about one metric, with a cell for each of `COLUMNS`."""
    rows = []
    base: dict[str, float] = {}
    for label, group in zip(labels, groups, strict=True):
        steps, values = values_of(group, name)
        last_values = values[:, -1 if name.startswith("eval") else -last :].mean(1)
        ends = by_seed(group, last_values)
        rows.append(
            [
                name,
                label,
                str(len(group)),
                str(steps[-1]),
                f"{values[:, 0].mean():.4g} -> {last_values.mean():.4g}",
                shown_interval(last_values),
                difference(base, ends) if base else "",
            ]
        )
        base = base or ends
    return rows


# ---- evaluations ----


def solved_of(folder: Path) -> dict[str, dict[str, float]]:
    """Return the fraction of solved completions for each question in a folder of eval.py, once for
    greedy and once for sampled completions. Those to which no reward applies are left out."""
    values: dict[str, dict[str, float]] = dict(greedy={}, sampled={})
    file = folder / "completions.jsonl"
    try:
        for line in map(json.loads, file.read_text(encoding="utf-8").split("\n")[:-1]):
            for kind, own in values.items():
                scores = [
                    (c["score"] or 0) >= SOLVED
                    for c in line["completions"]
                    if c["greedy"] == (kind == "greedy")
                    and (c["score"] is not None or c["reward_errors"])
                ]
                if scores:
                    own[line["source"]] = sum(scores) / len(scores)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file}: no completions of eval.py: {error!r}") from error
    return {kind: own for kind, own in values.items() if own}


def bootstrapped(values: list[float]) -> tuple[str, str]:
    """Return a mean over questions and its 95% bootstrap interval, computed as in eval.py."""
    x = mean_and_interval(values, [1] * len(values), seed=0)
    return f"{x['mean']:.4g}", f"[{x['low']:.4g}, {x['high']:.4g}]"


def rows_of_evaluations(folders: list[Path]) -> list[list[str]]:
    """Return the table's rows about folders of eval.py, paired by question, a cell for each of
    `EVALUATION`."""
    values = [solved_of(folder) for folder in folders]
    rows = []
    for kind in values[0]:
        base = values[0][kind]
        for folder, of_kinds in zip(folders, values, strict=True):
            own = of_kinds.get(kind, {})
            if own.keys() != base.keys():
                problem = f"not the questions of {folders[0]}; evaluate both on the same rows"
                raise ValueError(f"{folder}: {len(own)} {kind} answers: {problem}")
            cells = [kind, str(folder), str(len(own)), *bootstrapped([*own.values()])]
            changes = [own[question] - base[question] for question in base]
            mean, interval = bootstrapped(changes)
            gained, lost = sum(x > 0 for x in changes), sum(x < 0 for x in changes)
            change = [f"{float(mean):+.4g} {interval} paired", f"{gained}, {lost}"]
            rows.append(cells + (["", ""] if own is base else change))
    return rows


# ---- picture, table ----


def draw(groups: list[list[Run]], labels: list[str], names: list[str], picture: Path) -> None:
    """Draw a panel for each metric, with a line and a band for each group."""
    if not can_draw(picture):
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    size = max(5, 4 * columns), 2.8 * rows + 0.4 + 0.2 * len(groups)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for axis, name in zip(axes.flat, names, strict=False):
        for number, (label, group) in enumerate(zip(labels, groups, strict=True)):
            steps, values = values_of(group, name)
            style = dict(color=f"C{number}", marker="." if len(steps) < 30 else "")
            count = f"{len(group)} seed{'s' * (len(group) > 1)}"
            axis.plot(steps, values.mean(0), label=f"{label} ({count})", **style)
            axis.fill_between(steps, *band(values), color=f"C{number}", alpha=0.2, linewidth=0)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
    legend: dict = dict(loc="outside lower center", fontsize=8, title=CAPTION, title_fontsize=8)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), **legend)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main() -> None:
    print_any_text()
    parser = Options(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    names = dict(nargs="+", default=["eval*", "reward", "loss"], metavar="NAME")
    add("--metrics", **names, help="metrics or patterns; default: eval* reward loss")
    means = "the last value of metrics other than eval* is the mean of the last N; default: 10"
    add("--last", type=int, default=10, metavar="N", help=means)
    add("--out", type=Path, help="picture to write; default: compare.png beside the first run")
    options = parser.parse_args()
    if options.last < 1:
        parser.error(f"--last {options.last}: must be at least 1")
    if all((folder / "results.json").is_file() for folder in options.runs):
        try:
            rows = rows_of_evaluations(options.runs)
        except ValueError as error:
            parser.error(" ".join(str(error).split()))
        return print_table(EVALUATION, rows, str(options.runs[-1]))
    try:
        runs = [read_run(folder) for folder in options.runs]
        shared = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
        found = list(chain(*(fnmatch.filter(shared, name) for name in options.metrics)))
        if not found:
            problem = f"--metrics {' '.join(options.metrics)}: not in all runs"
            raise ValueError(f"{problem}; common: {', '.join(shared) or 'none'}")
        names = distinct({name: [run.metrics[name] for run in runs] for name in found})
        groups = group_runs(runs)
        labels = label_groups(groups)
        rows = [row for name in names for row in rows_of(groups, labels, name, options.last)]
        picture = options.out or options.runs[0].parent / "compare.png"
        draw(groups, labels, names, picture)
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    print_table(COLUMNS, rows, labels[-1])
    print("95%: t interval of the mean over seeds, or of the differences of equal seeds (paired)")
    print(f"last: the mean of the last {options.last} logged values; of eval* the last one")
    if can_draw(picture):
        print(visible(f"curves: {picture}"))


def print_table(columns: Iterable[str], rows: list[list[str]], last: str) -> None:
    """Print a table. Each row about `last` ends a section."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row), end_section=row[1] == last)
    console = Console()
    console.width = console.width if console.is_terminal else 200
    console.print(table)


if __name__ == "__main__":
    with np.errstate(all="ignore"):  # infinite and missing values
        main()
