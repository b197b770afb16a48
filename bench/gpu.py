"""Measure how much of a GPU's matrix-product rate training and the engine use, as one Markdown
table.

    python bench/gpu.py                             # a GPU with 40 GB or more
    python bench/gpu.py --layers 8 --tokens 4096    # a smaller one
    OMP_NUM_THREADS=1 python bench/gpu.py           # no GPU: --small, which only shows that it runs

The reference is the machine's own rate of square matrix products, in bfloat16 and in float32 (TF32
is off). Parts:
- attention: common.model.attention.packed_attention over a pack of equal sequences, one layer;
- token log-probs: common.model.logprobs.token_logprobs with the head, at the model's width and
  vocabulary;
- micro-batch: forward and backward of a whole policy (FSDP2, one rank), without and with activation
  checkpointing, and a step of AdamW;
- engine: tokens per second, and the seconds of weight sync and sleep. `--model random`, the
  default, builds a model in the shape of Qwen3-1.7B.

Counted operations are those of the mathematics, without recomputation. Attention: 2 heads head_dim
L^2 per sequence in the forward pass (causal: half), twice that in the backward pass. Log-probs: 2 T
V D and 4 T V D. A micro-batch: three times `forward_flops` of common/model/flops.py, as in the
metric `speed/tflops`. Every part runs in its own process: two warm-up rounds, then the median of
`--rounds`. Memory is the peak of this process, on CUDA of the allocator."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from pydantic.dataclasses import dataclass
from transformers import AutoTokenizer

from bench.completions import complete
from common.config.groups import TrainArgs
from common.config.online import OnlineArgs, SamplingArgs
from common.model.attention import packed_attention, packed_inputs
from common.model.flops import forward_flops
from common.model.hub import resolve_model
from common.model.logprobs import Logits, token_logprobs
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.packs.packing import PackedBatch, pack
from common.packs.sample import Sample
from common.parallel import distributed
from common.rollout.engines import make_engine
from common.rollout.weights import sync_weights, whole_weights
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step

MICRO_BATCHES = {  # activation checkpointing, --compile
    "plain": (False, False), "checkpointed": (True, False), "compiled": (False, True),
    "checkpointed_compiled": (True, True),
}  # fmt: skip
PARTS = ("matmul", "attention", "logprobs", *MICRO_BATCHES, "engine")
LARGE = dict(
    layers=28,
    width=2048,
    vocabulary=151_936,
    tokens=8192,
    length=1024,
    matrix=8192,
    prompts=256,
    new=256,
)
SMALL = dict(
    layers=2, width=256, vocabulary=2000, tokens=512, length=128, matrix=512, prompts=8, new=8
)
HEAD_DIM = 128


@dataclass
class Args(OnlineArgs, SamplingArgs, TrainArgs):
    """Flags of a script that samples and trains."""


# ---- measurement ----


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak(device: str) -> int:
    """Reset the peak of memory, and return the bytes in use."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
    return peak(device)


def peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) * 1024


def seconds(
    call: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None
) -> float:
    times = []
    for _ in range(2 + rounds):
        before()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return median(times[2:])


def row(
    part: str,
    size: str,
    dtype: str,
    seconds: float,
    flop: float = 0,
    tokens: int = 0,
    memory: int = 0,
) -> dict:
    return dict(
        part=part, size=size, dtype=dtype, seconds=seconds, flop=flop, tokens=tokens, memory=memory
    )


def there_and_back(name, size, dtype, forward, inputs, flop, flags, device) -> list[dict]:
    """Return a row for forward and one for backward. Backward is not timed alone: its time is that
    of both minus that of forward."""
    gradient = torch.randn_like(forward())
    one = seconds(forward, flags.rounds)
    start = reset_peak(device.type)
    both = seconds(lambda: torch.autograd.grad(forward(), inputs, gradient), flags.rounds)
    memory = peak(device.type) - start
    return [
        row(f"{name}, forward", size, dtype, one, flop),
        row(f"{name}, backward", size, dtype, both - one, 2 * flop, memory=memory),
    ]


# ---- parts ----


def matmul(flags, device, dtype) -> list[dict]:
    n, rows = flags.matrix, []
    for each in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(n, n, device=device).to(each) for _ in range(2))
        rows.append(
            row(
                "matmul",
                f"{n}^3",
                name_of(each),
                seconds(lambda a=a, b=b: a @ b, flags.rounds),
                2 * n**3,
            )
        )
    return rows


def one_pack(flags, vocabulary: int, device) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        vocabulary, (flags.tokens // flags.length, flags.length + 1), generator=generator
    ).tolist()
    (mb,) = pack([Sample(i, [True] * len(i)) for i in ids], flags.tokens, device)
    return mb


def attention_flop(mb: PackedBatch, heads: int, head_dim: int) -> int:
    """Return the operations of one layer's attention in a forward."""
    lengths = [end - begin for begin, end in zip(mb.offsets, mb.offsets[1:], strict=False)]
    return sum(2 * heads * head_dim * length**2 for length in lengths)


def attention(flags, device, dtype) -> list[dict]:
    mb, heads = one_pack(flags, flags.vocabulary, device), flags.width // HEAD_DIM
    shapes = [(1, n, len(mb.targets_T), HEAD_DIM) for n in (heads, heads // 2, heads // 2)]
    inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    query, key, value = inputs
    of_pack = packed_inputs(mb)
    for name in ("input_ids", "position_ids", "use_cache"):
        del of_pack[name]
    module = torch.nn.Identity()

    def forward():
        return packed_attention(module, query, key, value, None, HEAD_DIM**-0.5, **of_pack)[0]

    size, flop = (
        f"{flags.tokens} tokens in sequences of {flags.length}",
        attention_flop(mb, heads, HEAD_DIM),
    )
    return there_and_back("attention", size, name_of(dtype), forward, inputs, flop, flags, device)


def logprobs(flags, device, dtype) -> list[dict]:
    T, D, V = flags.tokens, flags.width, flags.vocabulary
    inputs = [
        (torch.randn(n, D, device=device) * D**-0.5).to(dtype).requires_grad_() for n in (T, V)
    ]
    targets_T = torch.randint(V, (T,), device=device)

    size, flop, rows = f"T={T} D={D} V={V}", 2 * T * D * V, []
    for name, compiled in (("token log-probs", False), ("token log-probs, compiled", True)):

        def forward(compiled=compiled):
            return token_logprobs(Logits(*inputs), targets_T, compiled=compiled).logprobs_T

        rows += there_and_back(name, size, name_of(dtype), forward, inputs, flop, flags, device)
    return rows


def micro_batch(flags, device, dtype, checkpointing: bool, compiled: bool) -> list[dict]:
    settings = dict(activation_checkpointing=checkpointing, compile=compiled)
    args = Args(**settings, pack_tokens=flags.tokens, max_new_tokens=1)
    policy = load_policy(flags.model, args, device)
    optimizer, mb = (
        adamw(policy, args),
        one_pack(flags, policy.hf.config.get_text_config().vocab_size, device),
    )
    tokens, loss = len(mb.targets_T), torch.zeros((), device=device)

    def step():
        logprobs_T, *_ = policy(mb)
        (-logprobs_T.mean()).backward()

    start = reset_peak(device.type)
    took = seconds(step, flags.rounds, before=lambda: optimizer.zero_grad(set_to_none=True))
    memory = peak(device.type) if device.type == "cuda" else peak(device.type) - start
    parameters = sum(p.numel() for p in policy.parameters())
    flop = 3 * forward_flops(policy.hf.config, policy.matrix_weights, mb)
    mode = ", activation checkpointing" * checkpointing + ", compiled" * compiled
    size = f"{parameters / 1e6:.0f}M, {tokens} tokens"
    rows = [row(f"micro-batch{mode}", size, name_of(dtype), took, flop, tokens, memory)]
    if (checkpointing, compiled) == (True, False):
        took = seconds(
            lambda: optimizer_step(policy, optimizer, 1e-6, 1.0, loss), flags.rounds, before=step
        )
        memory = peak(device.type) if device.type == "cuda" else 0
        rows.append(
            row("clip and AdamW", f"{parameters / 1e6:.0f}M", "float32", took, memory=memory)
        )
    return rows


def engine(flags, device, dtype) -> list[dict]:
    args = Args(
        max_new_tokens=flags.new,
        pack_tokens=flags.tokens,
        engine_args=("gpu_memory_utilization=0.4",),
        compile=False,
    )
    policy, tokenizer = load_policy(flags.model, args, device), load_tokenizer(flags.model)
    sampler = make_engine(flags.model, args, tokenizer, device)
    generator = torch.Generator().manual_seed(0)
    vocabulary = policy.hf.config.get_text_config().vocab_size
    prompts = torch.randint(
        vocabulary, (flags.prompts, flags.length // 2), generator=generator
    ).tolist()
    kind, times, tokens = (
        type(sampler).__name__,
        {name: [] for name in ("sync", "generate", "sleep")},
        0,
    )

    def timed(name: str, call: Callable[[], Any]) -> Any:
        synchronize()
        start = time.perf_counter()
        result = call()
        synchronize()
        times[name].append(time.perf_counter() - start)
        return result

    for n in range(1 + flags.rounds):
        timed("sync", lambda: sync_weights(sampler, whole_weights(policy, sampler.dtype)))
        seeds = [n * flags.prompts + i for i in range(flags.prompts)]
        groups = timed("generate", lambda seeds=seeds: complete(sampler, prompts, 1, seeds, 1.0))
        tokens = sum(
            len(sample.completion_ids) for group in groups for sample in group
        )  # last call; EOS is rare
        timed("sleep", sampler.sleep)
    size = f"{flags.prompts} prompts of {flags.length // 2}, {flags.new} new tokens"
    took = {name: median(values[1:]) for name, values in times.items()}
    rows = [row(f"{kind}: generate", size, name_of(dtype), took["generate"], tokens=tokens)]
    rows += [row(f"{kind}: {name}", "", name_of(dtype), took[name]) for name in ("sync", "sleep")]
    sampler.close()
    return rows


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure(flags) -> None:
    """Measure one part in this process. Print its rows as JSON on the last line."""
    device, *_ = distributed.setup(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # as --dtype auto
    if flags.only in MICRO_BATCHES:
        rows = micro_batch(flags, device, dtype, *MICRO_BATCHES[flags.only])
    else:
        rows = globals()[flags.only](flags, device, dtype)
    distributed.cleanup()
    print(json.dumps(rows), flush=True)
    distributed.end_process()


# ---- all parts ----


def random_model(flags, folder: str) -> str:
    """Write a checkpoint in the shape of Qwen3 with random weights and the tokenizer of `tiny`."""
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers.utils import logging

    heads, tokenizer = flags.width // HEAD_DIM, AutoTokenizer.from_pretrained(tiny_model())
    config = Qwen3Config(
        vocab_size=flags.vocabulary, hidden_size=flags.width, intermediate_size=3 * flags.width,
        num_hidden_layers=flags.layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
        head_dim=HEAD_DIM, max_position_embeddings=40_960, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    logging.disable_progress_bar()
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def table(rows: list[dict]) -> str:
    rates = {r["dtype"]: r["flop"] / r["seconds"] for r in rows if r["part"] == "matmul"}
    lines = [
        "| part | size | dtype | ms | TFLOP/s | of matmul | tokens/s | peak GB |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        rate, speed = r["flop"] / r["seconds"], r["tokens"] / r["seconds"]
        numbers = (
            (f"{rate / 1e12:.3g}", f"{rate / rates[r['dtype']]:.0%}") if r["flop"] else ("", "")
        )
        ends = (
            f"{speed:,.0f}" if r["tokens"] else "",
            f"{r['memory'] / 1e9:.2f}" if r["memory"] else "",
        )
        cells = (r["part"], r["size"], r["dtype"], f"{1e3 * r['seconds']:.1f}", *numbers, *ends)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="random", help="random, or a model as in the scripts: folder or hub id"
    )
    parser.add_argument(
        "--small",
        action="store_true",
        default=not torch.cuda.is_available(),
        help="sizes for a CPU",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--out", default="runs/gpu.md", help="file for the table")
    for name, value in LARGE.items():
        parser.add_argument(f"--{name}", type=int, help=f"default: {value}, small: {SMALL[name]}")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)  # for child processes
    flags = parser.parse_args()
    for name, value in (SMALL if flags.small else LARGE).items():
        setattr(flags, name, value if getattr(flags, name) is None else getattr(flags, name))
    if flags.only:
        return measure(flags)
    with tempfile.TemporaryDirectory() as folder:
        model = (
            random_model(flags, folder) if flags.model == "random" else resolve_model(flags.model)
        )
        sizes = [f"--{name}={getattr(flags, name)}" for name in LARGE]
        rows = []
        for part in dict.fromkeys(["matmul", *flags.parts]):
            command = [
                sys.executable,
                __file__,
                "--only",
                part,
                "--model",
                model,
                "--rounds",
                str(flags.rounds),
                *sizes,
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ)
            if done.returncode:
                sys.exit(f"{part} failed; its message is above")
            rows += json.loads(done.stdout.splitlines()[-1])
            print(f"{part} done", file=sys.stderr, flush=True)
    where = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )
    text = f"{where}, torch {torch.__version__}, median of {flags.rounds}\n\n{table(rows)}\n"
    out = Path(flags.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
