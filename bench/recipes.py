"""Print the table of extras/plan/README.md: memory and time of recipes for Qwen3 as
`--dry_run` predicts them, by arithmetic alone, for prompts of 200 tokens and pairs of full length.

    python bench/recipes.py
"""

import importlib
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.memory_plan import CONFIGS
from common.config.online import OnlineArgs
from common.config.parse import read_file
from common.model.policy import Policy
from extras.plan.launch import GPUS, Launch
from extras.plan.memory import GIB, total
from extras.plan.plan import build, span

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {  # kind of GPU, and the case
    "qwen3_8b_grpo_lora": ("H100", "GRPO of 8B with LoRA, completions of 8,192 tokens"),
    "qwen3_8b_grpo": ("H100", "GRPO of all weights of 8B"),
    "qwen3_1.7b_grpo_24gb": ("4090", "GRPO of 1.7B with LoRA on one card of 24 GB"),
    "qwen3_8b_dpo": ("H100", "DPO of 8B"),
    "qwen3_8b_rm": ("H100", "reward model of 8B"),
    "qwen3_1.7b_grpo_code": ("H100", "code with tests, 1.7B"),
    "qwen3_1.7b_rloo_rm": ("H100", "RLOO of 1.7B on a reward model of 1.7B"),
    "qwen3_1.7b_distill": ("H100", "distillation of 8B into 1.7B"),
}
SIZES = {"Qwen/Qwen3-1.7B": "1.7B", "Qwen/Qwen3-8B": "8B", "model:runs/qwen3_1.7b_rm/hf": "1.7B"}
PROMPT = 200  # tokens


def launch_of(recipe: str, folders: dict[str, str]) -> tuple[str, Launch]:
    """Return the command of a recipe and its launch. `folders`: of the models in SIZES."""
    path = ROOT / f"configs/{recipe}.yaml"
    command = re.search(r"torchrun --nproc_per_node (\d+) (\w+)\.py .*", path.read_text())
    gpus, script = int(command[1]), importlib.import_module(command[2])
    kind, _ = RECIPES[recipe]
    args = script.Args(**read_file(script.Args, str(path)), dry_run=f"{gpus}x{kind}")
    args = replace(args, dtype="bfloat16", compile=True)  # the defaults on CUDA
    policy = folders[args.model]
    frozen = [folders[teacher] for teacher in getattr(args, "teacher", ())]
    own_forwards = 0
    if isinstance(args, OnlineArgs):
        rewards = (f"model:{folders[name]}" if name in folders else name for name in args.reward)
        args = replace(args, reward=tuple(rewards))
        frozen += [policy] if getattr(args, "beta", 0) else []
        # The KL in the rewards of rloo.py reads all old log-probs.
        own_forwards = 1 if command[2] == "rloo" else 1 - 1 / args.minibatches
    paths = (None, policy) if script.__name__ == "rm" else (policy, None)
    trained, others = build(args, *paths, frozen, kind=getattr(script, "Student", Policy))
    return command[0], Launch(
        args, gpus, GPUS[kind], gpus, trained, others, others, own_forwards=own_forwards,
        prompt=PROMPT if isinstance(args, OnlineArgs) else args.max_length,
        each=args.samples_per_prompt if isinstance(args, OnlineArgs) else 2,
    )  # fmt: skip


def rows() -> Iterator[str]:
    """Yield the rows of the table."""
    with tempfile.TemporaryDirectory() as models:
        folders = {name: f"{models}/{size}_{name[:5]}" for name, size in SIZES.items()}
        for name, folder in folders.items():
            CONFIGS[SIZES[name]].save_pretrained(folder)
            Path(folder, "tokenizer_config.json").write_text("{}")
        for recipe, (kind, case) in RECIPES.items():
            command, launch = launch_of(recipe, folders)
            memory = total(launch.memory) / GIB
            size = f"{memory:.1f} GiB of {launch.gpu.memory / GIB:.1f}"
            step = f"{launch.args.rows_per_step} x {launch.each}"
            time = span(launch.step_seconds(launch.seconds()))
            gpus = f"{launch.gpus}x{kind}"
            yield f"| {case} | `{command}` | {gpus} | {size} | {step} | {time} |"


if __name__ == "__main__":
    print(*rows(), sep="\n")
