"""Print the planned columns of configs/README.md: memory and time of the recipes for Qwen3, by the
arithmetic of `--dry_run`, for prompts of 200 tokens and rows of full length.

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
from common.config.extra import has_extra
from common.config.online import OnlineArgs
from common.config.parse import read_file
from common.model.distill import OwnTeacher, Student
from common.model.policy import Policy
from extras.plan.launch import GPUS, Launch
from extras.plan.memory import GIB, total
from extras.plan.plan import build, span

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "Qwen/Qwen3-1.7B": "1.7B", "Qwen/Qwen3-1.7B-Base": "1.7B", "Qwen/Qwen3-8B": "8B",
    "Qwen/Qwen3-8B-Base": "8B", "model:runs/qwen3_1.7b_rm/hf": "1.7B",
}  # fmt: skip
RECIPES = sorted(path.stem for path in ROOT.glob("configs/qwen3_[0-9]*.yaml"))
if not has_extra("quantized"):
    RECIPES = [name for name in RECIPES if not name.endswith("_nf4")]
# How often a step runs the trained models on all sequences before it updates them, in scripts where
# this differs from the old log-probs of later minibatches.
OWN_FORWARDS = dict(ppo=2, rloo=1, reinforce=1, online_dpo=0, bok=0, self_distill=0)
KINDS = dict(distill=Student, self_distill=OwnTeacher)
PROMPT = 200  # tokens


def launch_of(recipe: str, folders: dict[str, str]) -> Launch:
    """Return the launch of a recipe. `folders`: folders of the models in SIZES."""
    path = ROOT / f"configs/{recipe}.yaml"
    command = re.search(r"torchrun --nproc_per_node (\d+) (\w+)\.py", path.read_text())
    gpus, name = int(command[1]), command[2]
    script = importlib.import_module(name)
    kind = "4090" if "24gb" in recipe else "H100"
    args = script.Args(**read_file(script.Args, str(path)), dry_run=f"{gpus}x{kind}")
    args = replace(args, dtype="bfloat16", compile=True)  # the defaults on CUDA
    policy = folders[args.model]
    samples = isinstance(args, OnlineArgs)
    frozen = [folders[teacher] for teacher in args.teacher] if name == "distill" else []
    own_forwards, sequences = 0, 2 if name in ("dpo", "rm", "kto") else 1
    if samples:
        rewards = (f"model:{folders[name]}" if name in folders else name for name in args.reward)
        args = replace(args, reward=tuple(rewards))
        # With adapters the reference is the policy without them.
        reference = [policy] if getattr(args, "beta", 0) or name == "self_distill" else []
        own_forwards = OWN_FORWARDS.get(name, 1 - 1 / args.minibatches)
        own_forwards += len(reference) if args.lora_rank else 0
        frozen += reference
        sequences = args.samples_per_prompt
    kept = dict(online_dpo=2, bok=args.keep if name == "bok" else 0).get(name, sequences)
    trained, others = build(
        args, None if name == "rm" else policy, policy if name in ("rm", "ppo") else None, frozen,
        moving=name == "self_distill", kind=KINDS.get(name, Policy),
    )  # fmt: skip
    return Launch(
        args, gpus, GPUS[kind], gpus, trained, others, others, own_forwards=own_forwards,
        prompt=PROMPT if samples else args.max_length, each=sequences,
        trained_fraction=kept / sequences,
    )  # fmt: skip


def rows() -> Iterator[tuple[str, str]]:
    """Yield each recipe and its planned cells: GPUs, memory of each, sequences, time of a step."""
    with tempfile.TemporaryDirectory() as models:
        folders = {name: f"{models}/{i}_{size}" for i, (name, size) in enumerate(SIZES.items())}
        for name, folder in folders.items():
            CONFIGS[SIZES[name]].save_pretrained(folder)
            Path(folder, "tokenizer_config.json").write_text("{}")
        for recipe in RECIPES:
            launch = launch_of(recipe, folders)
            memory = f"{total(launch.memory) / GIB:.1f} of {launch.gpu.memory / GIB:.1f}"
            step = f"{launch.args.rows_per_step} x {launch.each}"
            time = span(launch.step_seconds(launch.seconds()))
            yield recipe, f"{launch.args.dry_run} | {memory} | {step} | {time} |"


if __name__ == "__main__":
    for recipe, cells in rows():
        print(f"{recipe:24} | {cells}")
