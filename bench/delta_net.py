"""Speed of a gated delta net on packs, against transformers on padded rows, on a CPU.

    OMP_NUM_THREADS=1 python bench/delta_net.py

A Qwen3.5 of 4M weights, forward and backward of all log-probs; the two take turns, and the fastest
of five counts. Both run transformers' torch code of the recurrence."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.models import ARGS, DELTA
from common.data.packing import pack
from common.data.sample import Sample
from common.model.policy import load_policy
from common.model.tiny import build_tokenizer
from common.parallel import distributed

SIZES = dict(
    vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=2048,
)  # fmt: skip
LENGTHS = dict(
    ragged=[40, 700, 120, 90, 300, 60, 200, 500],
    equal=[256] * 8,
    short=[20] * 64,
    chat=[57, 388, 120, 301, 64, 233, 97, 180, 345, 71, 150, 210],
)


def fastest(*functions: Callable[[], None]) -> list[float]:
    """Return the seconds of each function, the fastest of five turns after a first one."""
    seconds = [float("inf")] * len(functions)
    for turn in range(6):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            if turn:
                seconds[i] = min(seconds[i], time.perf_counter() - start)
    return seconds


def main() -> None:
    device, _, _ = distributed.setup(0)
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3_5_text", **SIZES | DELTA)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        policy = load_policy(folder, ARGS, device)
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print("| lengths | pack, s | padded rows, s | ratio |\n| --- | --- | --- | --- |")
    for name, lengths in LENGTHS.items():
        rows = [torch.randint(3, 2000, (n,), generator=generator).tolist() for n in lengths]
        packs = pack([Sample(row, [True] * len(row)) for row in rows], 8192, device)
        ids = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, rows)], batch_first=True)
        mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()

        def packed(packs=packs) -> None:
            for mb in packs:
                policy(mb)[0].sum().backward()

        def padded(ids=ids, mask=mask) -> None:
            logits = hf(ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            (logp * mask[:, 1:]).sum().backward()

        ours, theirs = fastest(packed, padded)
        print(f"| {name} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()
