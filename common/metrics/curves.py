"""Curves of runs: metrics.jsonl -> curves.png."""

import fnmatch
import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

from common.parallel.process import visible


def read_metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def distinct(values: dict[str, list]) -> list[str]:
    """Drop each name whose values equal those of an earlier name, and return the others. NaN equals
    NaN."""
    first: dict[str, str] = {}
    for name, column in values.items():
        first.setdefault(str(column), name)
    return list(first.values())


@cache  # once for each picture, which a run draws again and again
def can_draw(picture: Path) -> bool:
    """Return whether matplotlib is installed; without it, say that the picture is not drawn."""
    is_installed = find_spec("matplotlib") is not None
    if not is_installed:
        missing = "matplotlib is not installed; pip install '.[plots]'"
        print(visible(f"{picture} is not drawn: {missing}"), flush=True)
    return is_installed


def draw_curves(
    runs: Sequence[Path], names: Sequence[str], picture: Path, labels: Sequence[str] = ()
) -> None:
    """Draw a panel for each metric (`names` may be patterns): a line per run or, for one run, also
    per held-out set. A metric that equals an earlier one is left out."""
    if not can_draw(picture):
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [read_metrics(path) for path in runs]
    keys = list(dict.fromkeys(key for lines in records for line in lines for key in line))
    matching = [key for name in names for key in fnmatch.filter(keys, name)]
    names = distinct(
        {key: [[line.get(key) for line in lines] for lines in records] for key in matching}
    )
    if not names:
        return
    held_out = [name for name in names if name.startswith("eval")]
    ends = [
        {key.removeprefix(f"{name}/") for key in keys if key.startswith(f"{name}/")}
        for name in held_out
    ]
    # All metrics have the held-out sets. Other ends are parts of a loss.
    sets = sorted(set.intersection(*ends)) if len(records) == 1 and ends else []
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    options = dict(squeeze=False, layout="constrained")
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 2.8 * rows), **options)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for axis, name in zip(axes.flat, names, strict=False):
        drawn = [(lines, name, label) for lines, label in zip_longest(records, labels)]
        drawn += [(records[0], f"{name}/{label}", label) for label in sets if name in held_out]
        for lines, key, label in drawn:
            points = [(line["step"], line[key]) for line in lines if key in line]
            steps, values = zip(*points, strict=True) if points else ((), ())
            axis.plot(steps, values, label=label, marker="." if len(points) < 30 else "")
        if len(drawn) > len(records):
            axis.legend(fontsize=8)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
    if labels:
        axes.flat[0].legend(fontsize=8)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
