"""Reading finished or running runs from their output folders, and confidence intervals over several
seeds. tools/compare.py and the doctor use it."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from common.config.flags import TreeLoader


class Run(NamedTuple):
    folder: Path
    flags: dict
    script: str  # name of the script's file, and a digest of its code
    metrics: dict[str, dict[int, float]]  # values by step


def read_run(folder: Path) -> Run:
    """Read flags and metrics of a run, without an unfinished last line. Raises `ValueError` if a
    file is missing or damaged."""
    metrics: dict[str, dict[int, float]] = {}
    for file in (folder / "args.yaml", folder / "metrics.jsonl"):
        if file.exists() and not file.is_file():
            raise ValueError(f"{file}: no regular file; name the output folder of a run")
    try:
        written = (folder / "args.yaml").read_text(encoding="utf-8")
        flags = dict(yaml.load(written, TreeLoader))
        for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
            line = json.loads(text)
            step = line.pop("step")
            for name, value in line.items():
                if isinstance(value, int | float):
                    metrics.setdefault(name, {})[step] = value
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
        raise ValueError(f"{problem}; name the output folder of a run") from error
    except (ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"{folder}: args.yaml or metrics.jsonl is damaged: {error}") from error
    head = [line for line in written.split("\n")[:2] if line.startswith("#")]
    script, *code = head or [""]
    return Run(folder, flags, " ".join([Path(script).name, *code]), metrics)


def by_seed(group: list[Run], values: Iterable) -> dict[str, Any]:
    return {str(run.flags.get("seed")): value for run, value in zip(group, values, strict=True)}


def values_of(group: list[Run], name: str) -> tuple[list[int], np.ndarray]:
    """Return the steps at which all runs of a group have a metric, and its values there, [R, T]."""
    steps = sorted(set.intersection(*({*run.metrics[name]} for run in group)))
    if not steps:
        folders = ", ".join(str(run.folder) for run in group)
        raise ValueError(f"{folders}: no step has {name} in all of these runs")
    values = [[run.metrics[name][step] for step in steps] for run in group]
    return steps, np.array(values, dtype=float)


def t_quantile(df: float) -> float:
    """Return the 97.5% quantile of Student's t with `df` degrees of freedom, integrated
    numerically: for t = sqrt(df) tan(a), the density of the angle a is proportional to cos(a)^(df -
    1)."""
    a = np.linspace(0, math.pi / 2, 100_001)
    mass = np.cumsum(np.cos((a[1:] + a[:-1]) / 2) ** (df - 1))
    return math.sqrt(df) * math.tan(np.interp(0.95, mass / mass[-1], a[1:]))


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95% t interval of the mean of the runs, or the range of 1 or 2 runs. `values`:
    [runs, steps]."""
    return interval(values) if len(values) > 2 else (values.min(0), values.max(0))


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95% t interval of the mean of at least 2 values."""
    count, mean = len(values), values.mean(0)
    half = t_quantile(count - 1) * values.std(0, ddof=1) / math.sqrt(count)
    return mean - half, mean + half
