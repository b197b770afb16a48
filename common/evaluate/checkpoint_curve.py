"""`eval.py --model RUN/checkpoints`: the list of checkpoints, and the curve of their results.

<output_dir>/step_000100/{completions.jsonl, results.json}      results of each checkpoint
<output_dir>/metrics.jsonl, curves.png                          results of all checkpoints
"""

import json
import os
from pathlib import Path

from common.evaluate.estimators import shown_ks
from common.metrics.curves import draw_curves
from common.model.hub import checkpoints_in
from common.model.loading import named_errors
from common.parallel import distributed

# optional parts of results.json
OPTIONAL_RESULTS = ("reward_model", "reward_model_against", "win_rate", "perplexity")


def results_folders(model: str, folder: Path) -> list[tuple[Path, str]]:
    """Return pairs of a results folder and a model. A folder of checkpoints gives one pair per
    checkpoint, the oldest first; other models give (`folder`, `model`). Collective. Raises
    `ValueError` for a folder without checkpoints."""
    root = Path(os.path.expanduser(model))
    names = distributed.from_main([path.name for path in checkpoints_in(root)])
    if (root / "config.json").exists():
        return [(folder, model)]
    if root.is_dir() and root.name == "checkpoints" and not names:
        raise ValueError(f"--model {model}: no checkpoints in this folder")
    return [(folder / name, str(root / name)) for name in reversed(names)] or [(folder, model)]


def still_exists(model: str) -> bool:
    """Return whether a checkpoint still exists: a run in progress deletes old ones. Collective."""
    exists = all(distributed.gather_objects(Path(model).is_dir()))
    if not exists:
        distributed.say(f"{model}: deleted by its run; skipped")
    return exists


def draw(folder: Path) -> None:
    """Write metrics.jsonl, with the mean results of each checkpoint that has a results.json, and
    draw curves.png from it. Of pass@k and majority@k only the powers of two are included."""
    lines = []
    for file in sorted(folder.glob("step_*/results.json")):
        with named_errors(f"{file}: broken; delete it, and the same command computes it anew"):
            means = mean_results(json.loads(file.read_text()))
        lines.append(dict(step=int(file.parent.name.removeprefix("step_"))) | means)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = dict.fromkeys(name for line in lines for name in line if name != "step")
    draw_curves([folder / "metrics.jsonl"], list(names), folder / "curves.png")


def mean_results(results: dict) -> dict[str, float]:
    """Return the means in results.json by the names of metrics."""
    values = results["overall"] | {
        name: results[name] for name in OPTIONAL_RESULTS if name in results
    }
    values |= {f"rewards/{name}/mean": value for name, value in values.pop("rewards").items()}
    for name in ("pass", "majority"):
        at_k = values.pop(f"{name}_at_k")
        values |= {f"{name}_at_{k}": at_k[str(k)] for k in shown_ks(len(at_k))}
    return {
        name: value if isinstance(value, int) else value["mean"]
        for name, value in values.items()
        if name != "prompts" and value is not None
    }
