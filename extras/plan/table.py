"""Memory and speed of Qwen3 by size, method and GPU, by the plan's arithmetic: the table of
docs/memory.md.

    python extras/plan/table.py            # print it
    python extras/plan/table.py --write    # put it between the marks of docs/memory.md

Nothing here is measured, and no weights are loaded: models are built on meta from their shapes."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import Qwen3Config

import grpo
import sft
from common.config.groups import TrainArgs
from common.config.online import ALONE, USABLE
from common.model.hub import longest_sequence
from common.model.policy import PackedModel
from extras.plan.launch import GPUS, Launch
from extras.plan.memory import GIB, total
from extras.plan.plan import build

PAGE = Path(__file__).resolve().parents[2] / "docs/memory.md"
MARKS = "<!-- written by extras/plan/table.py -->", "<!-- end of the table -->"


def qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool = False, **changes):
    sizes = dict(
        vocab_size=151936, head_dim=128, max_position_embeddings=40960, hidden_size=hidden,
        intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, tie_word_embeddings=tied,
    )  # fmt: skip
    return Qwen3Config(**sizes | changes)


SHAPES = {  # as published with the checkpoints
    "1.7B": qwen3(2048, 6144, 28, 16, tied=True),
    "4B": qwen3(2560, 9728, 36, 32, tied=True),
    "8B": qwen3(4096, 12288, 36, 32),
    "14B": qwen3(5120, 17408, 40, 40),
    "32B": qwen3(5120, 25600, 64, 64),
}
SCRIPTS = ("sft", "grpo")
SIZES = ("1.7B", "4B", "8B", "32B")
METHODS: dict[str, dict] = {
    "full": {},
    "LoRA": dict(lora_rank=16),
    "offload": dict(offload="all"),
    "LoRA, offload": dict(lora_rank=16, offload="all"),
}
TIMED = ("full", "LoRA")  # the traffic of --offload is not predicted
COUNTS = {"1 GPU": 1, "8 GPUs": 8}
COLUMNS = [*product(["1 GPU"], METHODS), *product(["8 GPUs"], TIMED)]  # 8 rarely need to offload
CARDS = {24: "4090", 80: "H100", 141: "H200"}  # by GB
FLAGS = dict(dtype="bfloat16", compile=True)  # the defaults on CUDA
SFT = dict(batch_size=128, pack_tokens=8192, **FLAGS)
LENGTH = 1024  # tokens of a conversation
GRPO = dict(
    prompts_per_step=64, samples_per_prompt=8, max_new_tokens=1024, pack_tokens=8192, **FLAGS
)
PROMPT = 200  # tokens


@cache
def folder(size: str) -> str:
    """Return a folder that has the config of a model but no weights."""
    path = Path(tempfile.mkdtemp(prefix="plan_"), size)
    SHAPES[size].save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return str(path)


@cache
def policy_of(size: str, lora_rank: int) -> PackedModel:
    """Return the policy on meta. It is the same for both scripts and all GPUs."""
    args = sft.Args(**SFT, lora_rank=lora_rank)
    (policy,), _ = build(args, folder(size), None, [])
    return policy


def launch_of(script: str, size: str, method: str, gpus: int, card: int, ways: int = 1) -> Launch:
    """Return a launch of sft.py or grpo.py. `ways`: `--tensor_parallel_size`."""
    kind = CARDS[card]
    planned = dict(dry_run=f"{gpus}x{kind}", **METHODS[method])
    if script == "sft":
        args: TrainArgs = sft.Args(**SFT, **planned)
        prompt, each = LENGTH, 1
    else:
        args = grpo.Args(**GRPO, **planned, tensor_parallel_size=ways)
        prompt, each = PROMPT, args.samples_per_prompt
    policy = policy_of(size, args.lora_rank)
    return Launch(args, gpus, GPUS[kind], gpus, [policy], [], [], prompt, each)


def least_memory(launch: Launch) -> float:
    """Return how many GiB the smallest card for this launch has, if all blocks recompute their
    activations and an engine has just room for its weights and one sequence."""
    again = replace(launch, args=replace(launch.args, activation_checkpointing=True))
    needed = total(again.update_memory)
    if launch.has_vllm:
        longest = longest_sequence(launch.trained[0].path, launch.args)
        engine = launch.cached(longest.tokens)
        engine += launch.engine_weights
        needed = max(needed, total(launch.sampling) + engine, engine * USABLE / ALONE)
    return needed / USABLE / GIB


def figure(launches: Sequence[Launch]) -> str:
    """Return the cell of a launch: tokens/s of sft.py on all GPUs, or seconds of a step of grpo.py,
    to two digits. It is about the first of `launches` that fits, "-" if none does."""
    fits = (each for each in launches if least_memory(each) * GIB <= each.gpu.memory)
    launch = next(fits, None)
    if launch is None:
        return "-"
    step = launch.step_seconds(launch.seconds())
    if launch.samples:
        return f"{float(f'{step:.2g}'):g}"
    return f"{float(f'{launch.sequences * launch.length / step / 1000:.2g}'):g}k"


@cache
def launches_of(script: str, size: str, gpus: int, method: str) -> list[list[Launch]]:
    """Return, for each card, the launches in all ways to divide the engines."""
    ways = (1, 2, 4, 8) if script == "grpo" and gpus == 8 else (1,)
    return [[launch_of(script, size, method, gpus, card, n) for n in ways] for card in CARDS]


def needed(script: str, size: str, gpus: int, method: str) -> float:
    """Return the GiB of the smallest card for a launch, with its engines divided at best."""
    return min(map(least_memory, launches_of(script, size, gpus, method)[0]))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def lines(sizes: Sequence[str] = SIZES, scripts: Sequence[str] = SCRIPTS) -> Iterator[str]:
    """Yield for each script a table of the memory of all methods, and one of the speed of those
    whose traffic is planned. A row has 1 GPU first and then 8."""
    for script in scripts:
        yield row(f"{script}.py, GiB", *map(", ".join, COLUMNS))
        yield f"|---|{'--:|' * len(COLUMNS)}"
        for size in sizes:
            yield row(size, *(f"{needed(script, size, COUNTS[n], m):.1f}" for n, m in COLUMNS))
        yield ""
        unit = dict(sft="tokens/s", grpo="s/step")[script]
        yield row(f"{script}.py, {unit}", *(f"{n}, {card} GB" for n in COUNTS for card in CARDS))
        yield f"|---|{'--:|' * len(CARDS) * len(COUNTS)}"
        for size, method in product(sizes, TIMED):
            cards = chain(*(launches_of(script, size, n, method) for n in COUNTS.values()))
            yield row(f"{size}, {method}", *map(figure, cards))
        yield ""


def written(page: str) -> str:
    """Return the page with new tables between its marks."""
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return "\n".join((f"{before}{MARKS[0]}", "", *lines(), f"{MARKS[1]}{after}"))


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(*lines(), sep="\n")
