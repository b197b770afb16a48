"""`eval.py --model RUN/checkpoints`: which checkpoints it evaluates, and the curve of their
results.

    OUTPUT_DIR/step_000100/{completions.jsonl, results.json}      results of each checkpoint
    OUTPUT_DIR/metrics.jsonl, curves.png                          results of all checkpoints"""

import json
import os
from pathlib import Path

from common.evaluate.estimators import shown_ks
from common.metrics.curves import draw_curves
from common.model.hub import checkpoints_in
from common.model.loading import named_errors
from common.parallel import distributed

# results.json has these only if their flags are given
OPTIONAL_RESULTS = ("reward_model", "reward_model_against", "win_rate", "perplexity")


def results_folders(model: str, folder: Path) -> list[tuple[Path, str]]:
    """Return (results folder, model) for each model to evaluate: for a folder of checkpoints one
    pair each, the oldest first; for any other model just (`folder`, `model`). Collective. Raises
    `ValueError` for a folder without checkpoints."""
    root = Path(os.path.expanduser(model))
    names = distributed.from_main([path.name for path in checkpoints_in(root)])
    if (root / "config.json").exists():
        return [(folder, model)]
    if root.is_dir() and root.name == "checkpoints" and not names:
        raise ValueError(f"--model {model}: no checkpoints in this folder")
    return [(folder / name, str(root / name)) for name in reversed(names)] or [(folder, model)]


def still_exists(model: str) -> bool:
    """Return whether a checkpoint still exists; if not, say so. A run in progress deletes its old
    checkpoints while eval.py works through them. Collective."""
    exists = all(distributed.gather_objects(Path(model).is_dir()))
    if not exists:
        distributed.say(f"{model}: deleted by its run; skipped")
    return exists


def draw(folder: Path) -> None:
    """Collect the mean results of all evaluated checkpoints in metrics.jsonl, and draw curves.png
    from it. pass@k and majority@k are included for k = 1, 2, 4, ..."""
    lines = []
    for file in sorted(folder.glob("step_*/results.json")):
        with named_errors(f"{file}: broken; delete it, and the same command computes it anew"):
            means = mean_results(json.loads(file.read_text()))
        lines.append(dict(step=int(file.parent.name.removeprefix("step_"))) | means)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = dict.fromkeys(name for line in lines for name in line if name != "step")
    draw_curves([folder / "metrics.jsonl"], list(names), folder / "curves.png")


def mean_results(results: dict) -> dict[str, float]:
    """Return the means in results.json under the names that the curve has for them."""
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
