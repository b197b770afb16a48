"""eval.py over a run's checkpoints: which there are, and the curve through their results.

<output_dir>/step_000100/{completions.jsonl, results.json}      of each checkpoint
<output_dir>/metrics.jsonl, curves.png                          of all of them
"""

import json
from collections.abc import Sequence
from pathlib import Path

from common.metrics.logger import draw_curves
from common.model.convert import checkpoints_in
from common.parallel import distributed

BESIDE = ("reward_model", "reward_model_against", "win_rate", "perplexity")  # in results.json, beside `overall`


def places(model: str, folder: Path) -> list[tuple[Path, str]]:
    """Where the results of what is to be measured go, and what: of a folder of checkpoints each, the oldest first, in a
    folder of its own; else `model`, in `folder`. Collective. Raises `ValueError` if there are none in such a folder."""
    root = Path(model).expanduser()
    found = distributed.gather_objects([path.name for path in checkpoints_in(root)])[0]
    if (root / "config.json").exists():
        return [(folder, model)]
    if root.is_dir() and root.name == "checkpoints" and not found:
        raise ValueError(f"--model {model}: there is no checkpoint in it")
    return [(folder / name, str(root / name)) for name in reversed(found)] or [(folder, model)]


def still_there(model: str) -> bool:
    """Whether a checkpoint has not been deleted by its run, which may go on meanwhile. Collective."""
    there = all(distributed.gather_objects(Path(model).is_dir()))
    if not there and distributed.is_main():
        print(f"{model} was deleted meanwhile: left out")
    return there


def draw(folder: Path, ks: Sequence[int]) -> None:
    """metrics.jsonl, a line for each checkpoint that has a results.json, with the means, of pass@k and majority@k for
    these k; and curves.png of it."""
    lines = []
    for file in sorted(folder.glob("step_*/results.json")):
        results = json.loads(file.read_text())
        values = results["overall"] | {name: results[name] for name in BESIDE if name in results}
        values |= {f"rewards/{name}/mean": value for name, value in values.pop("rewards").items()}
        for name in ("pass", "majority"):
            at_k = values.pop(f"{name}_at_k")
            values |= {f"{name}_at_{k}": at_k[str(k)] for k in ks if str(k) in at_k}
        means = {name: value["mean"] for name, value in values.items() if name != "prompts" and value}
        lines.append(dict(step=int(file.parent.name.removeprefix("step_"))) | means)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = dict.fromkeys(name for line in lines for name in line if name != "step")
    draw_curves([folder / "metrics.jsonl"], list(names), folder / "curves.png")
