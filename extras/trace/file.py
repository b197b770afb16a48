"""File of a trace: the groups in it, its numbers, and how it is written and read."""

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

SCHEMA = 1


def choose(
    values: dict[int, tuple[float, float]], count: int, positions: Sequence[int] = ()
) -> dict[int, list[str]]:
    """Return `positions` and the positions of `count` further groups, with the reasons: the
    first, the last, the best and the most disputed; then others by dispute. `values`: how good and
    how disputed each group is."""
    if not values:
        return {}
    unknown = set(positions) - values.keys()
    if unknown:
        groups = f"groups {min(values)} to {max(values)}"
        raise ValueError(f"--trace_positions {min(unknown)}: this step has {groups}")
    by_dispute = sorted(values, key=lambda i: (-values[i][1], i))
    named = dict(
        first=min(values), last=max(values), best=max(values, key=lambda i: (values[i][0], -i))
    )
    reasons = {i: ["given"] for i in positions}
    count += len(reasons)
    for reason, i in [*named.items(), ("disputed", by_dispute[0]), *(("", i) for i in by_dispute)]:
        if i in reasons or len(reasons) < count:
            reasons.setdefault(i, []).extend([reason] if reason else [])
    return reasons


def write(path: Path, lines: list[dict]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.parent.mkdir(exist_ok=True)
    work = path.with_name(f"{path.name}.tmp")
    work.write_bytes(gzip.compress(text.encode(), 6, mtime=0))
    work.replace(path)


def read(path: Path) -> list[dict]:
    """Return the lines of a trace: its header and its groups. Raises `ValueError` for another
    schema."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    if lines[0].get("schema") != SCHEMA:
        problem = f"schema {lines[0].get('schema')}, expected {SCHEMA}"
        raise ValueError(f"{path}: {problem}; read it with its own version")
    return lines


def all_rounded(x_T: Tensor) -> list:
    return [rounded(x) for x in x_T.tolist()]


def rounded(x: float | bool) -> float | int | None:
    """Return a number with seven significant digits; None if it is not finite."""
    if isinstance(x, (bool, int)):
        return int(x)
    return float(f"{x:.7g}") if math.isfinite(x) else None
