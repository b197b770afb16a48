"""Measure where a training step of sft, dpo or rm spends its time on one CPU core, as a table.

    python bench/cpu_share.py sft --dataset gsm8k/train.jsonl
    python bench/cpu_share.py rm --dataset gsm8k/train.jsonl --more pack_tokens=4096

The script runs in this process with one thread, and with the model, rows and flags of peers.py.
torch.profiler records every step except the first two, with logging and packing. The own time of an
operator counts for one part. The columns are means over the steps:

- work: operations of the matrix products, by their shapes (attention: of each pair of a query and a
  key that it attends to), or bytes of elementwise operators (inputs and one output);
- alone: the rate of the same products, repeated by themselves in this process, or of a sum of two
  tensors of 12 MB. "s alone" is the time at this rate.

Other programs on the machine change the rates; repeat."""

import argparse
import importlib
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from functools import cache
from math import prod
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ |= dict(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(random.randrange(20_000, 60_000)))

import peers  # noqa: E402
import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

from common.config.parse import parse  # noqa: E402
from common.train.run import Run  # noqa: E402

SKIPPED = 2  # first steps
PRODUCTS = {"aten::mm": 0, "aten::addmm_": 1}  # position of the first factor
SDPA = "aten::_scaled_dot_product_flash_attention_for_cpu"
ELEMENTWISE = "mul mul_ add add_ sub div neg pow mean sum silu silu_backward copy_ rsqrt".split()
# The innermost of an operator and its callers that has one of these names decides.
PARTS = {
    f"{SDPA}_backward": "attention, backward",
    "aten::scaled_dot_product_attention": "attention, forward",
    "evaluate_function": "elementwise, backward",
    "_TokenLogprobs": "head and log-probs",
    "Optimizer.step": "optimizer",
    "gradient norm": "gradient norm",
    "packing": "packing",
    "FSDP::": "FSDP and collectives",
    "c10d": "FSDP and collectives",
}


def part_of(event) -> str:
    """Return the part of a step that an operator belongs to."""
    part = None
    caller = event
    while part is None and caller is not None:
        part = next((part for name, part in PARTS.items() if name in caller.name), None)
        caller = caller.cpu_parent
    part = part or "elementwise, forward"
    return part.replace("elementwise", "linear layers") if event.name in PRODUCTS else part


def work_of(event) -> tuple[float, float]:
    """Return the operations or bytes of an operator, and its seconds alone."""
    shapes = event.input_shapes
    if event.name in PRODUCTS:
        (m, k), (_, n) = shapes[PRODUCTS[event.name] :][:2]
        return 2.0 * m * k * n, seconds_alone(m, k, n)
    if event.name.startswith(SDPA):
        is_backward = event.name != SDPA
        (count, heads, queries, width), (_, _, keys, _) = shapes[is_backward:][:2]
        pairs = queries * (keys - queries) + queries * (queries + 1) / 2
        return 4.0 * (1 + is_backward) * count * heads * width * pairs, 0.0
    if event.name.removeprefix("aten::") in ELEMENTWISE:
        sizes = [prod(shape) for shape in shapes if shape]
        size = 4.0 * (sum(sizes) + max(sizes, default=0))
        return size, size / bandwidth()
    return 0.0, 0.0


def shortest(function) -> float:
    """Return the seconds of the fastest of 7 calls."""
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@cache
def seconds_alone(m: int, k: int, n: int) -> float:
    """Return the seconds of a matrix product. A gradient of weights, whose k is the number of
    tokens, reads its first factor transposed."""
    a = torch.randn(k, m).T if k > m else torch.randn(m, k)
    b = torch.randn(k, n)
    return shortest(lambda: a @ b)


@cache
def bandwidth() -> float:
    """Return the bytes per second of a sum of two activations."""
    a, b, out = (torch.randn(4096, 768) for _ in range(3))
    return 3 * 4 * a.numel() / shortest(lambda: torch.add(a, b, out=out))


def profile_steps(script: str, folder: Path, flags) -> list[tuple[float, list]]:
    """Run the script. Return the seconds and the operators of each recorded step."""
    flags.gpu, flags.batch_size = False, None
    peers.write_model(folder / "model", gpu=False)
    peers.write_rows(flags.dataset, folder, 16 * flags.steps, flags.lengths)
    sys.argv = peers.our_command(script, folder, flags)
    sys.argv += [f"--{flag}" for flag in flags.more]
    module = importlib.import_module(script)
    packer = "pack" if script == "sft" else "pack_groups"
    setattr(module, packer, record_function("packing")(getattr(module, packer)))
    norm = torch.nn.utils.clip_grad_norm_
    torch.nn.utils.clip_grad_norm_ = record_function("gradient norm")(norm)
    steps = []
    run_steps = Run.steps

    def recorded(run):
        for step in run_steps(run):
            start = time.perf_counter()
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorder:
                yield step
                seconds = time.perf_counter() - start
            if step >= SKIPPED:
                steps.append((seconds, recorder.events()))

    Run.steps = recorded
    module.main(parse(module.Args))
    return steps


def table(steps: list[tuple[float, list]]) -> str:
    """Return a Markdown table of the parts."""
    seconds, work, alone = (defaultdict(float) for _ in range(3))  # of a step, by part
    total = sum(step_seconds for step_seconds, _ in steps) / len(steps)
    for event in (event for _, events in steps for event in events):
        part = part_of(event)
        seconds[part] += event.self_cpu_time_total / 1e6 / len(steps)
        event_work, event_alone = work_of(event)
        work[part] += event_work / 1e9 / len(steps)
        alone[part] += event_alone / len(steps)
    seconds["Python, data, logging"] = total - sum(seconds.values())
    seconds["step"] = total
    lines = ["| | s | share | work | rate | alone | s alone |", "|---|---|---|---|---|---|---|"]
    for part in sorted(seconds, key=seconds.get, reverse=True):
        cells = [part, f"{seconds[part]:.3f}", f"{seconds[part] / total:.1%}", "", "", "", ""]
        unit = "GB" if part.startswith("elementwise") else "GFLOP"
        if part.startswith(("linear", "attention", "elementwise")):
            cells[3:5] = [f"{work[part]:.1f} {unit}", f"{work[part] / seconds[part]:.0f} {unit}/s"]
        if alone[part] and cells[3]:
            cells[5:] = [f"{work[part] / alone[part]:.0f} {unit}/s", f"{alone[part]:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    square = 2 * 2048**3 / seconds_alone(2048, 2048, 2048) / 1e9
    return "\n".join([*lines, "", f"product of two matrices of 2,048^2: {square:.0f} GFLOP/s"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", choices=["sft", "dpo", "rm"])
    parser.add_argument("--dataset", required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--lengths", type=int, nargs=2, metavar=("P", "C"), help="as in peers.py")
    parser.add_argument("--steps", type=int, default=SKIPPED + 3)
    parser.add_argument("--more", nargs="+", default=[], metavar="FLAG=VALUE")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        steps = profile_steps(flags.script, Path(folder), flags)
        print(table(steps), flush=True)


if __name__ == "__main__":
    main()
