"""Print the table of docs/recipes.md, predicted memory and sizes of steps of recipes for Qwen3, and
that of docs/planning.md, capacity and time, by arithmetic alone.

python bench/recipes.py
"""

import importlib
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.memory_plan import CONFIGS
from common.config.online import OnlineArgs
from common.config.parse import read_file
from common.data.sample import Completion
from common.train import plan
from common.train.launch_plan import Setting, describe_all

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


# Recipes of docs/planning.md: GPUs, and assumed tokens of a prompt or of a side of a pair, with its
# prompt.
PLANS = {
    "qwen3_8b_grpo_lora": ("8xH100", 200),
    "qwen3_8b_grpo": ("8xH100", 200),
    "qwen3_grpo_24gb": ("1x4090", 150),
    "qwen3_8b_dpo": ("8xH100", 500),
    "qwen3_code_grpo": ("8xA100", 150),
}
PROMPT = 200  # tokens of a pair
HELD_OUT = 256  # rows, as --eval_size
ROWS = 10_000  # for training
LABELS = ("cache of an engine", "time of a step", "time of the run", "faster")


def folders_of(models: Path) -> dict[str, Path]:
    """Write configs of the models to `models`, and return their folders."""
    folders = {name: models / f"{size}_{name[:5]}" for name, size in SIZES.items()}
    for name, folder in folders.items():
        CONFIGS[SIZES[name]].save_pretrained(folder)
        (folder / "tokenizer_config.json").write_text("{}")
    return folders


def launch_command(recipe: str) -> tuple[str, str, str]:
    """Return the command in a recipe, its number of ranks and its script."""
    text = (ROOT / f"configs/{recipe}.yaml").read_text()
    return re.search(r"(torchrun --nproc_per_node (\d+) (\w+)\.py .*)", text).groups()


def load(recipe: str, gpus: str, folders: dict[str, Path]):
    """Return the flags of a recipe, the path of its policy, frozen policies, and all shapes."""
    script = launch_command(recipe)[2]
    args_class = importlib.import_module(script).Args
    args = args_class(**read_file(args_class, str(ROOT / f"configs/{recipe}.yaml")), dry_run=gpus)
    path = str(folders[args.model])
    frozen = [path] if script != "dpo" and getattr(args, "beta", 0) else []
    frozen += [str(folders[teacher]) for teacher in getattr(args, "teacher", ())]
    args.reward = tuple(
        f"model:{folders[r]}" if r in folders else r for r in getattr(args, "reward", ())
    )
    paths = (None, frozen, path) if script == "rm" else (path, frozen, None)
    return args, path, frozen, plan.shapes(args, *paths)


def rows(models: Path) -> Iterator[str]:
    """Yield a row of the table of docs/recipes.md for each recipe. Configs of the models are
    written to the folder `models`."""
    folders = folders_of(models)
    for recipe, (gigabytes, case) in RECIPES.items():
        command, ranks, _ = launch_command(recipe)
        args, *_, shapes = load(recipe, f"{ranks}x{gigabytes}GB", folders)
        line = plan.describe_memory(args, shapes)
        memory = re.search(r"[0-9.]+ GiB of [0-9.]+", line)[0]
        yield f"| {case} | `{command}` | {ranks} | {memory} | {step(args)} |"


def plan_of(recipe: str, folders: dict[str, Path]) -> list[str]:
    """Return the lines of a recipe's dry run about memory, capacity and time."""
    gpus, length = PLANS[recipe]
    args, path, frozen, shapes = load(recipe, gpus, folders)
    group = [Completion([0] * length, [False] * length, length)]
    if not args.samples:  # the sides of a pair share their prompt
        group.append(Completion([0] * PROMPT + [1] * (length - PROMPT), [], PROMPT))
    setting = Setting(shapes, path, frozen, False, [group], length, ROWS, HELD_OUT, 0.0)
    lines, problem = describe_all(args, setting, args.max_steps or 100)
    assert problem is None, problem
    return [plan.describe_memory(args, shapes), *lines]


def example(models: Path) -> list[str]:
    """Return the block at the top of docs/planning.md."""
    lines = plan_of("qwen3_8b_grpo", folders_of(models))
    indent = dict(initial_indent=" " * 4, subsequent_indent=" " * 8)
    return [*chain.from_iterable(textwrap.wrap(line, 128, **indent) for line in lines)]


def plans(models: Path) -> Iterator[str]:
    """Yield a row of the table of docs/planning.md for each recipe."""
    folders = folders_of(models)
    for recipe, (gpus, _) in PLANS.items():
        lines = [line.split(": ", 1) for line in plan_of(recipe, folders)]
        first = dict(reversed(lines))
        cells = [first.get(label, "") for label in LABELS]
        cells[2] = cells[2].split("; without")[0].replace(", one before the first step", "")
        yield f"| {recipe} | `{gpus}` | {' | '.join(cells)} |"


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
        path = Path(folder)
        print(*rows(path), "", *example(path), "", *plans(path), sep="\n")
