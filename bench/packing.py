"""Compare packed to padded supervised training: trained tokens per second of the same model on the
same samples.

    OMP_NUM_THREADS=1 python bench/packing.py                                # lengths are drawn
    OMP_NUM_THREADS=1 python bench/packing.py --dataset gsm8k/train.jsonl

An optimizer step has `--batch_size` sequences in random order, the same completion tokens and the
same AdamW. It includes batching, forward, backward, clipping and update.
- packed: as sft.py. `pack()` into micro-batches of `--pack_tokens`, `Policy` (log-prob, entropy,
  accuracy).
- padded: the Hugging Face model with SDPA and an attention mask, full logits and cross-entropy.
  Micro-batches of 64, 16 and 8 rows, padded on the right to the longest: the whole batch at once,
  as many rows as a pack holds (about equal memory), and the default of most trainers. The four take
  turns on every batch and must report the same loss.
"""

import argparse
import os
import random
import sys
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from common.config.groups import TrainArgs
from common.data.encode import Encoder
from common.data.packing import pack
from common.data.rows import load_rows
from common.data.sample import Sample
from common.model.hub import load_tokenizer, resolve_model
from common.model.policy import compute_dtype, load_policy
from common.parallel import distributed
from common.train.optim import adamw, optimizer_step

TARGET = 1.5


def drawn_samples(count: int, rng: random.Random) -> list[Sample]:
    """Draw random tokens with the lengths of GSM8K in characters with `tiny`'s chat template. They
    are log-normal: mean 6.23 and deviation 0.37 of the log (mean length 543, longest of 7,473 rows
    1,712); 53% of the tokens are completion."""
    lengths = [min(max(int(rng.lognormvariate(6.229, 0.370)), 145), 1712) for _ in range(count)]
    return [
        Sample([rng.randrange(95) for _ in range(n)], [i >= 0.47 * n for i in range(n)])
        for n in lengths
    ]


def packed_step(model, optimizer, batch: list[Sample], args, device) -> float:
    tokens, total = sum(sum(s.loss_mask[1:]) for s in batch), torch.zeros((), device=device)
    for mb in pack(batch, args.pack_tokens, device):
        logprobs_T, *_ = model(mb)
        loss = (-logprobs_T * mb.loss_mask_T).sum() / tokens
        loss.backward()
        total += loss.detach()
    optimizer_step(model, optimizer, args.lr, args.max_grad_norm, total)
    return total.item()


def padded_step(hf, optimizer, batch: list[Sample], args, device, rows: int) -> float:
    tokens, total = sum(sum(s.loss_mask[1:]) for s in batch), torch.zeros((), device=device)
    dtype = compute_dtype(args, device)
    for start in range(0, len(batch), rows):
        part = batch[start : start + rows]
        L = max(len(s.ids) for s in part)
        ids_BL = torch.tensor([s.ids + [0] * (L - len(s.ids)) for s in part]).to(device)
        mask_BL = torch.tensor([[1] * len(s.ids) + [0] * (L - len(s.ids)) for s in part]).to(device)
        labels_BL = torch.full_like(ids_BL, -100)
        for row, s in enumerate(part):
            labels_BL[row, : len(s.ids)] = torch.tensor(s.ids).where(
                torch.tensor(s.loss_mask), -100
            )
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits_BLV = hf(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits
        loss = F.cross_entropy(
            logits_BLV[:, :-1].flatten(0, 1).float(), labels_BL[:, 1:].flatten(), reduction="sum"
        )
        (loss / tokens).backward()
        total += loss.detach() / tokens
    nn.utils.clip_grad_norm_(hf.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", help="a .jsonl file with `question` and `answer`")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument(
        "--steps", type=int, default=8, help="timed optimizer steps, after one untimed step"
    )
    flags = parser.parse_args()
    device, _, _ = distributed.setup(seed=0)
    args, rng, path = TrainArgs(lr=1e-4), random.Random(0), resolve_model("tiny")
    count = flags.batch_size * (flags.steps + 1)
    samples = drawn_samples(count, rng)
    if flags.dataset:
        encoder = Encoder(load_tokenizer(path), args)
        rows = rng.sample(load_rows("--dataset", flags.dataset, "train"), count)
        samples = [encoder.sft(row, ("question", "answer")) for row in rows]

    policy = load_policy(path, args, device)
    variants = {"packed": (packed_step, policy, adamw(policy, args), ())}
    for rows in (64, 16, 8):
        hf = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="sdpa", dtype=torch.float32
        ).to(device)
        variants[f"padded, {rows} rows"] = (padded_step, hf.train(), adamw(hf, args), (rows,))
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    difference = 0.0
    for step in range(flags.steps + 1):
        batch, losses = samples[step * flags.batch_size : (step + 1) * flags.batch_size], []
        for name, (run, model, optimizer, more) in variants.items():
            start = time.perf_counter()
            losses.append(
                run(model, optimizer, batch, args, device, *more)
            )  # .item() waits for the device
            seconds[name].append(time.perf_counter() - start)
        difference = max(difference, max(losses) - min(losses))
    tokens = sum(sum(s.loss_mask[1:]) for s in samples) / (flags.steps + 1)
    print(
        f"{device}, {torch.get_num_threads()} threads, "
        f"{flags.steps} steps of {flags.batch_size} sequences, "
        f"mean length {sum(len(s.ids) for s in samples) / count:.0f}, "
        f"{tokens:.0f} trained tokens/step"
    )
    ours = median(seconds["packed"][1:])
    for name, times in seconds.items():
        print(
            f"{name:16} {median(times[1:]):7.2f} s/step {tokens / median(times[1:]):8.0f} "
            "trained tokens/s "
            f"{median(times[1:]) / ours:6.2f}x (target: padded at least {TARGET}x)"
        )
    limit = 1e-4 if compute_dtype(args, device) == torch.float32 else 2e-2
    print(
        f"largest difference of the losses of a step: {difference:.1e} (target: at most {limit:g})"
    )
    distributed.cleanup()
    sys.exit(difference > limit)


if __name__ == "__main__":
    main()
