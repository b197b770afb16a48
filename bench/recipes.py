"""Print the table of docs/recipes.md: predicted memory and sizes of steps of recipes for Qwen3, by
arithmetic alone.

python bench/recipes.py
"""

import importlib
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.memory_plan import CONFIGS
from common.config.flag_files import read_yaml
from common.config.online import OnlineArgs
from common.train import plan

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {  # GB of a GPU, and the case
    "qwen3_8b_grpo_lora": (80, "GRPO of 8B with LoRA, completions of 8,192 tokens"),
    "qwen3_8b_grpo": (80, "GRPO of all weights of 8B"),
    "qwen3_grpo_24gb": (24, "GRPO of 1.7B with LoRA on one card of 24 GB"),
    "qwen3_8b_dpo": (80, "DPO of 8B"),
    "qwen3_8b_rm": (80, "reward model of 8B"),
    "qwen3_code_grpo": (80, "code with tests, 1.7B"),
    "qwen3_tool_grpo": (80, "tool use, 1.7B"),
    "qwen3_rloo_rm": (80, "RLOO of 1.7B on a reward model of 1.7B"),
    "qwen3_8b_distill": (80, "distillation of 8B into 1.7B"),
}
SIZES = {"Qwen/Qwen3-1.7B": "1.7B", "Qwen/Qwen3-8B": "8B", "model:runs/qwen3_rm/hf": "1.7B"}


def rows(models: Path) -> Iterator[str]:
    """Yield a row of the table for each recipe. Configs of the models are written to the folder
    `models`."""
    folders = {name: models / f"{size}_{name[:5]}" for name, size in SIZES.items()}
    for name, folder in folders.items():
        CONFIGS[SIZES[name]].save_pretrained(folder)
        (folder / "tokenizer_config.json").write_text("{}")
    for recipe, (gigabytes, case) in RECIPES.items():
        file = ROOT / f"configs/{recipe}.yaml"
        command, ranks, script = re.search(
            r"(torchrun --nproc_per_node (\d+) (\w+)\.py .*)", file.read_text()
        ).groups()
        args_class = importlib.import_module(script).Args
        args = args_class(**read_yaml(args_class, str(file)), dry_run=f"{ranks}x{gigabytes}GB")
        path = str(folders[args.model])
        beta = script != "dpo" and getattr(args, "beta", 0)
        frozen = [path] if beta else []
        frozen += [str(folders[teacher]) for teacher in getattr(args, "teacher", ())]
        args.reward = tuple(
            f"model:{folders[r]}" if r in folders else r for r in getattr(args, "reward", ())
        )
        shapes = plan.shapes(
            args, *((None, frozen, path) if script == "rm" else (path, frozen, None))
        )
        problem, line = plan.predicted(args, shapes)
        assert problem is None, problem
        memory = re.search(r"[0-9.]+ GiB of [0-9.]+", line)[0]
        yield f"| {case} | `{command}` | {ranks} | {memory} | {step(args)} |"


def step(args) -> str:
    """Return the cells for the batch: sequences, tokens at most, optimizer steps."""
    if not isinstance(args, OnlineArgs):
        count = 2 * args.batch_size
        return f"{args.batch_size} pairs = {count:,} sequences | {count * args.max_length:,} | 1"
    prompts, samples = args.prompts_per_step, args.samples_per_prompt
    count = prompts * samples
    cells = (
        f"{prompts} x {samples} = {count:,} sequences",
        f"{count * args.max_new_tokens:,}",
        args.updates_per_rollout,
    )
    return " | ".join(map(str, cells))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(*rows(Path(folder)), sep="\n")
