"""Measure what shared prefixes save: time and memory of forward and backward, with and without, as
Markdown tables.

    OMP_NUM_THREADS=1 python bench/prefix.py [time] [memory] [shortest]
    python bench/prefix.py time memory --device cuda

A Qwen3 of 2.5M parameters (4 layers, width 256; on CUDA 0.6B parameters in bfloat16) computes one
pack of groups of random tokens: G completions of C tokens after a prompt of P tokens. Ragged:
completions have 0.4 C to 1.6 C tokens.
- time: a round times a step without and a step with shared prefixes. The table has medians over the
  rounds, also of their ratios.
- memory: the largest sum of live tensors beside weights and gradients, with activations kept and
  recomputed.
- shortest: the ratio of times for short prompts, to choose the default of `--share_prefix`.
"""

import argparse
import gc
import random
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.gpu import synchronize
from common.model.attention import packed_attention
from common.model.policy import Policy
from common.packs.packing import PackedBatch, pack_groups
from common.packs.sample import Sample

Case = tuple[int, int, int, int, bool]  # P, C, G, number of groups, ragged
CASES: list[Case] = [
    (512, 128, 8, 1, False), (512, 128, 8, 1, True), (1000, 300, 8, 1, False),
    (100, 200, 8, 1, False), (100, 200, 8, 1, True), (256, 256, 16, 1, False),
    (300, 150, 2, 4, False), (300, 150, 2, 4, True),
]  # fmt: skip
SHORT = [(8, 100), (2, 100), (8, 400)]  # G, C of the groups with short prompts
SMALL = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, vocab_size=512,
)  # fmt: skip
LARGE = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
             num_key_value_heads=8, head_dim=128, vocab_size=151_936)  # fmt: skip


def make_policy(device: torch.device) -> Policy:
    transformers.AttentionInterface.register("packed", packed_attention)
    sizes, dtype = (LARGE, torch.bfloat16) if device.type == "cuda" else (SMALL, torch.float32)
    config = transformers.Qwen3Config(
        **sizes, tie_word_embeddings=True, max_position_embeddings=4096
    )
    torch.manual_seed(0)
    with device:
        hf = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="packed", dtype=dtype
        )
    policy = Policy(hf, "").train()
    policy.compiled = False
    return policy


def make_groups(case: Case) -> list[list[Sample]]:
    """Return groups of samples; the loss is on the completions."""
    P, C, G, count, ragged = case
    draw, groups = random.Random(0), []
    for _ in range(count):
        prompt, group = [draw.randrange(512) for _ in range(P)], []
        for i in range(G):
            n = round(C * (0.4 + 1.2 * i / (G - 1))) if ragged else C
            ids = [*prompt, i, *(draw.randrange(512) for _ in range(n - 1))]
            group.append(Sample(ids, [False] * P + [True] * n))
        groups.append(group)
    return groups


def both_packs(case: Case, device: torch.device) -> list[list[PackedBatch]]:
    """Return the micro-batches without and with shared prefixes."""
    return [
        pack_groups(make_groups(case), 10**9, device, share_prefix=share_prefix)
        for share_prefix in (0, 1)
    ]


def tokens_of(packs: list[PackedBatch]) -> int:
    return sum(len(mb.model_tokens.targets_T) for mb in packs)


def forward_and_backward(policy: Policy, packs: list[PackedBatch]) -> None:
    for mb in packs:
        logprobs_T, *_ = policy(mb)
        (logprobs_T * mb.loss_mask_T).sum().backward()


def seconds(policy: Policy, packs: list[PackedBatch]) -> float:
    policy.zero_grad()
    synchronize()
    start = time.perf_counter()
    forward_and_backward(policy, packs)
    synchronize()
    return time.perf_counter() - start


def compare(policy: Policy, case: Case, rounds: int) -> tuple[list[int], float, float, list[float]]:
    """Return the tokens without and with shared prefixes, the median seconds of each, and the
    ratios of all rounds, sorted."""
    both = both_packs(case, next(policy.parameters()).device)
    for packs in both:  # warm up
        seconds(policy, packs)
    times = [[seconds(policy, packs) for packs in both] for _ in range(rounds)]
    without, shared = map(median, zip(*times, strict=True))
    return list(map(tokens_of, both)), without, shared, sorted(a / b for a, b in times)


def label(case: Case) -> str:
    P, C, G, count, ragged = case
    return (
        f"{P} / {C} / {G}"
        + (f", {count} groups" if count > 1 else "")
        + (", ragged" if ragged else "")
    )


def print_time(device: torch.device, rounds: int) -> None:
    policy = make_policy(device)
    print("| P / C / G | tokens | | step | median ratio (all) |\n|---|---|---|---|---|")
    for case in CASES:
        (a, b), without, shared, ratios = compare(policy, case, rounds)
        spread = f"**{median(ratios):.2f}x** ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        tokens = f"{a:,} -> {b:,} | {a / b:.2f}x"
        print(
            f"| {label(case)} | {tokens} | {without:.3f} -> {shared:.3f} s | {spread} |", flush=True
        )


def print_shortest(device: torch.device, rounds: int) -> None:
    policy = make_policy(device)
    print(
        "| P | "
        + " | ".join(f"{G} x {C}" for G, C in SHORT)
        + " |\n|---"
        + "|---" * len(SHORT)
        + "|"
    )
    for P in (5, 9, 17, 33, 65, 129):
        cells = [compare(policy, (P, C, G, max(1, 16 // G), True), rounds)[3] for G, C in SHORT]
        print(
            f"| {P} | " + " | ".join(f"{median(ratios):.2f}x" for ratios in cells) + " |",
            flush=True,
        )


class PeakOfTensors(TorchDispatchMode):
    """Counts the bytes of live storages."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args: Sequence = (), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if (
                isinstance(x, torch.Tensor)
                and (key := x.untyped_storage()._cdata) not in self.alive
            ):
                storage = x.untyped_storage()
                self.alive[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._end, key)
        return out

    def _end(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


def peak(policy: Policy, packs: list[PackedBatch]) -> float:
    """Return the peak of live tensors in a step, except weights and gradients."""
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    with PeakOfTensors() as counter:
        forward_and_backward(policy, packs)
    return counter.peak


def print_memory(device: torch.device) -> None:
    kept, recomputed = make_policy(device), make_policy(device)
    recomputed.hf.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs=dict(use_reentrant=False)
    )
    print("| P / C / G | activations kept | | recomputed | |\n|---|---|---|---|---|")
    for case in CASES:
        cells, both = [], both_packs(case, device)
        for policy in (kept, recomputed):
            a, b = (peak(policy, packs) / 1e6 for packs in both)
            cells.append(f"{a:.0f} -> {b:.0f} MB | {a / b:.2f}x")
        print(f"| {label(case)} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", choices=["time", "memory", "shortest"], default=["time", "memory"]
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each case")
    flags = parser.parse_args()
    device = torch.device(flags.device)
    for part in flags.parts:
        print(f"\n{part}, {device.type}:\n", flush=True)
        if part == "memory":
            print_memory(device)
        else:
            dict(time=print_time, shortest=print_shortest)[part](device, flags.rounds)


if __name__ == "__main__":
    main()
