"""Where a training step spends its time on one CPU core, part by part, as a table.

    python bench/cpu_share.py sft --dataset gsm8k/train.jsonl
    python bench/cpu_share.py rm --dataset gsm8k/train.jsonl -- --pack_tokens 4096

The script runs in this process with one thread, and with the model, rows and flags of peers.py.
Arguments after `--` are further flags. torch.profiler records every step except the first. The own
time of an operator counts for one part. The columns have medians over the steps:

- GFLOP: operations of the matrix products, by their shapes. Attention counts each pair of a query
  and a key that it attends to;
- GFLOP/s alone: the rate of the same products, repeated by themselves in this process;
- s alone: the time at this rate.

Two ranks add collectives, which take milliseconds with this model. The last lines are bounds: the
step if only its matrix products took time, and if all of them had the rate of a square one."""

import argparse
import importlib
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ |= dict(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(random.randrange(20_000, 60_000)))

import peers  # noqa: E402
import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from common.config.parse import parse  # noqa: E402
from common.model.policy import PackedModel  # noqa: E402
from common.train.run import Run  # noqa: E402

PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1}  # position of the first factor
# The innermost of an operator and its callers with one of these names decides.
PARTS = {
    "_TokenLogprobsBackward": "head and log-probs, backward",
    "_TokenLogprobs": "head and log-probs, forward",
    "flash_attention_for_cpu_backward": "attention, backward",
    "scaled_dot_product": "attention, forward",
    "Optimizer.step": "optimizer",
    "gradient norm": "gradient norm",
    "packing": "packing",
    "FSDP::": "FSDP and collectives",
    "c10d": "FSDP and collectives",
    "evaluate_function": "elementwise, backward",
}


def part_of(event) -> str:
    """Return the part of a step that an operator belongs to."""
    caller = event
    part = None
    while part is None and caller is not None:
        part = next((part for name, part in PARTS.items() if name in caller.name), None)
        caller = caller.cpu_parent
    part = part or "elementwise, forward"
    return part.replace("elementwise", "linear layers") if event.name in PRODUCTS else part


def factors_of(event) -> tuple[int, int, int]:
    """Return (m, k, n) of the product of an m x k and a k x n matrix."""
    at = PRODUCTS[event.name]
    (m, k), (_, n) = event.input_shapes[at : at + 2]
    return m, k, n


def rate_alone(m: int, k: int, n: int) -> float:
    """Return the FLOP/s of a product that is repeated, the best of 5. A gradient of weights (k is
    the number of tokens) reads its first factor transposed, and a forward its second."""
    a, b = (torch.randn(k, m).T if k > m else torch.randn(m, k)), torch.randn(n, k).T
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b if k <= m else b.contiguous())
        seconds.append(time.perf_counter() - start)
    return 2 * m * k * n / min(seconds)


def attention_flops(model: PackedModel) -> None:
    """See main."""
