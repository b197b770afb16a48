"""Compare packed to padded pairs, and stored reference log-probs to a reference model in memory.

    OMP_NUM_THREADS=1 python bench/preference.py                                # lengths are drawn
    OMP_NUM_THREADS=1 python bench/preference.py --dataset preferences.jsonl

1. Speed: training steps of `tiny` (sigmoid loss) on the same `--batch_size` pairs in random order.
   A step includes batching, forward, backward, clipping and AdamW. Tokens are those of prompts and
   completions, without padding.
   - packed: as dpo.py, with metrics and stored reference log-probs;
   - packed, online: the same with `--reference_logprobs online`, one more forward pass of the
     reference;
   - padded: the Hugging Face model with SDPA and an attention mask on [2B, L], chosen rows above
     rejected ones, padded on the right to the longest; full logits, log_softmax, gather; stored
     log-probs. Micro-batches of B = 32, 8 and 4 pairs: the whole batch, about as many as a pack
     holds, and a small one.
   All take turns on every batch and must report the same loss; else the exit code is 1. Storing
   takes one forward pass over the pairs, as online does in one epoch; its time is printed too.
2. Memory of stored and online, for `tiny` and for `--model`. Each measurement runs in its own
   process, in turns. Exact: bytes of the stored numbers of all pairs (Python floats), and of the
   reference's parameters. Measured: growth of the resident set (on CUDA of the allocator) when the
   numbers are filled in or the reference is loaded, beside the policy, before any step; and the
   peak of the process over training steps of 2 pairs. The process with the reference also times
   steps without and with it, in turns. With `tiny` the measured bytes are mostly noise.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from bench.logprobs import peak, reset_peak
from common.data.encode import Encoder
from common.data.packing import pack_groups
from common.data.rows import load_rows
from common.data.sample import Sample
from common.metrics.meter import Meter
from common.model.hub import load_tokenizer, resolve_model
from common.model.policy import compute_dtype, load_policy
from common.model.reference import reference_logps, store_reference_logps
from common.objectives.preference import Pairs
from common.parallel import distributed
from common.train.optim import adamw, optimizer_step
from dpo import Args, encode_rows, forward
from dpo import loss as loss_of_pairs

TARGET = 1.5
LR = 1e-5  # enough to move the loss


def load_pairs(flags, path: str, args: Args) -> list[list[Sample]]:
    """Return [chosen, rejected] of every pair in random order. Without `--dataset`, draw random
    tokens with the lengths of 2,191 pairs of GSM8K answers in `tiny`'s characters: prompt, chosen
    and rejected are log-normal, on average 232, 280 and 275 long, and their logs are correlated by
    0.45."""
    rng, pairs = random.Random(0), []
    if flags.dataset:
        rows, encoder = (
            load_rows("--dataset", flags.dataset, "train"),
            Encoder(load_tokenizer(path), args),
        )
        pairs, _ = encode_rows(
            rng.sample(rows, len(rows)), ("prompt", "chosen", "rejected"), encoder, args
        )
        return pairs
    for _ in range(2191):
        shared, lengths = rng.gauss(0, 0.45**0.5), []
        for mean, deviation, low, high in (
            (5.382, 0.356, 81, 614),
            (5.553, 0.412, 47, 1005),
            (5.508, 0.471, 3, 1572),
        ):
            drawn = rng.lognormvariate(mean + deviation * shared, deviation * 0.55**0.5)
            lengths.append(min(max(int(drawn), low), high))
        prompt, *sides = ([rng.randrange(95) for _ in range(n)] for n in lengths)
        pairs.append(
            [Sample(prompt + side, [False] * len(prompt) + [True] * len(side)) for side in sides]
        )
    return pairs


def packed_step(model, optimizer, batch, stored_P2, args: Args, device, reference=None) -> float:
    meter, total, micro_batches = (
        Meter(),
        torch.zeros((), device=device),
        pack_groups(batch, args.pack_tokens, device),
    )
    logps_P2 = reference_logps(reference, micro_batches, stored_P2)
    for mb in micro_batches:
        loss = forward(model, mb, logps_P2, None, slice(None), args, meter) / len(batch)
        loss.backward()
        total += loss.detach()
    optimizer_step(model, optimizer, args.lr, args.max_grad_norm, total)
    return total.item()


def padded_step(hf, optimizer, batch, stored_P2, args: Args, device, size: int) -> float:
    total, dtype = torch.zeros((), device=device), compute_dtype(args, device)
    for start in range(0, len(batch), size):
        rows = [pair[side] for side in range(2) for pair in batch[start : start + size]]
        half, L = len(rows) // 2, max(len(s.ids) for s in rows)
        ids_BL = torch.tensor([s.ids + [0] * (L - len(s.ids)) for s in rows]).to(device)
        mask_BL = torch.tensor([[1] * len(s.ids) + [0] * (L - len(s.ids)) for s in rows]).to(device)
        trained_BL = torch.tensor([s.loss_mask + [False] * (L - len(s.ids)) for s in rows]).to(
            device
        )[:, 1:]
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits_BLV = hf(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits
        logp_BL = logits_BLV[:, :-1].float().log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]
        logps = torch.where(trained_BL, logp_BL, 0).double().sum(-1)
        ref_logps = stored_P2[start : start + size].T.flatten().to(device)
        columns = [
            side
            for x in (logps, ref_logps, trained_BL.sum(-1).double())
            for side in (x[:half], x[half:])
        ]
        loss_N, _ = loss_of_pairs(Pairs(*columns, weights=torch.ones_like(logps[:half])), args)
        loss = loss_N.sum() / len(batch)
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(hf.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total.item()


def speed(flags, folder: str) -> bool:
    """Run part 1 and return whether all variants report the same losses."""
    device, _, _ = distributed.setup(seed=0)
    args, path, size = Args(lr=LR, output_dir=folder), resolve_model("tiny"), flags.batch_size
    pairs = load_pairs(flags, path, args)[: size * (flags.steps + 1)]
    policy, online = (load_policy(path, args, device) for _ in range(2))
    reference, start = load_policy(path, args, device, trainable=False), time.perf_counter()
    (stored,) = store_reference_logps([pairs], path, lambda: reference, Path(folder), args, device)
    storing = (time.perf_counter() - start) / (flags.steps + 1)
    variants = {"packed": (packed_step, policy, adamw(policy, args), ())}
    variants["packed, online"] = (packed_step, online, adamw(online, args), (reference,))
    for rows in (32, 8, 4):
        hf = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="sdpa", dtype=torch.float32
        ).to(device)
        variants[f"padded, {rows} pairs"] = (padded_step, hf.train(), adamw(hf, args), (rows,))
    seconds, losses = ({name: [] for name in variants} for _ in range(2))
    for at in range(0, len(pairs), size):
        for name, (run, model, optimizer, more) in variants.items():
            start = time.perf_counter()
            losses[name].append(
                run(
                    model,
                    optimizer,
                    pairs[at : at + size],
                    stored[at : at + size],
                    args,
                    device,
                    *more,
                )
            )  # waits for device
            seconds[name].append(time.perf_counter() - start)
    lengths = [len(sample.ids) for pair in pairs for sample in pair]
    print(f"{device}, {torch.get_num_threads()} threads, {flags.steps} steps of {size} pairs, "
          f"mean length {sum(lengths) / len(lengths):.0f}, longest {max(lengths)}")  # fmt: skip
    tokens, ours = (sum(lengths) - len(lengths)) / (flags.steps + 1), median(seconds["packed"][1:])
    for name, times in seconds.items():
        took, target = (
            median(times[1:]),
            f" (target: at least {TARGET}x)" if name.startswith("padded") else "",
        )
        print(
            f"{name:16} {took:6.2f} s/step {tokens / took:6.0f} tokens/s {took / ours:5.2f}x the "
            f"time{target}"
        )
    print(f"storing the reference log-probs of {size} pairs: {storing:.2f} s, once in a run")
    difference = max(max(step) - min(step) for step in zip(*losses.values(), strict=True))
    limit = 1e-4 if compute_dtype(args, device) == torch.float32 else 2e-2
    print("losses of packed:", *(f"{loss:.4f}" for loss in losses["packed"]))
    print(
        f"largest difference of the losses of a step: {difference:.1e} (target: at most {limit:g})",
        flush=True,
    )
    distributed.cleanup()
    return difference <= limit


def larger_model(folder: str) -> str:
    """Write a random Qwen3 of 47M parameters with the tokenizer of `tiny`."""
    tiny, layers = (
        resolve_model("tiny"),
        dict(num_hidden_layers=12, layer_types=["full_attention"] * 12),
    )
    width = dict(
        hidden_size=512,
        intermediate_size=2048,
        head_dim=64,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tiny, **width, **layers)
    ).save_pretrained(folder)
    load_tokenizer(tiny).save_pretrained(folder)
    return folder


def measure_memory(flags) -> None:
    """Measure `stored` or `online` in this process and print JSON: memory, seconds of a step with
    and without it."""
    device, _, _ = distributed.setup(seed=0)
    args, references = Args(lr=LR), [None]
    pairs, policy = load_pairs(flags, flags.model, args), load_policy(flags.model, args, device)
    optimizer, stored, before = (
        adamw(policy, args),
        torch.zeros(len(pairs), 2).double(),
        reset_peak(device.type),
    )
    if flags.only == "online":
        references.append(load_policy(flags.model, args, device, trainable=False))
        size = sum(p.numel() * p.element_size() for p in references[1].parameters())
    else:
        size = stored.numel() * stored.element_size()
    growth, seconds = reset_peak(device.type) - before, [[] for _ in references]
    for at in (0, 2, 4):
        for reference, times in zip(references, seconds, strict=True):
            start = time.perf_counter()
            packed_step(
                policy, optimizer, pairs[at : at + 2], stored[at : at + 2], args, device, reference
            )
            times.append(time.perf_counter() - start)
    without, with_reference = median(seconds[0][1:]), median(seconds[-1][1:])
    values = dict(
        size=size,
        growth=growth,
        peak=peak(device.type),
        without=without,
        with_reference=with_reference,
    )
    print(json.dumps(values))
    distributed.cleanup()


def memory(flags, folder: str) -> None:
    """Run part 2."""
    environment = {
        name: value for name, value in os.environ.items() if name != "RANK"
    }  # it has its own process group
    data = ["--dataset", flags.dataset] if flags.dataset else []
    for name in ("tiny", flags.model):
        path = resolve_model(name) if name else larger_model(folder)
        runs: dict[str, list[dict]] = dict(stored=[], online=[])
        for variant in [*runs] * flags.rounds:
            command = [sys.executable, __file__, "--only", variant, "--model", path, *data]
            output = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, env=environment
            ).stdout
            runs[variant].append(json.loads(output.splitlines()[-1]))
        print(f"{name or 'random Qwen3, 47M'}, {flags.rounds} rounds")
        for variant, measured in runs.items():
            m = {key: median(run[key] for run in measured) for key in measured[0]}
            print(f"{variant:16} {m['size'] / 1e6:8.3f} MB, measured {m['growth'] / 1e6:8.3f} MB, "
                  f"peak of the process {m['peak'] / 1e6:5.0f} MB")  # fmt: skip
        took = f"{m['with_reference']:.2f} s against {m['without']:.2f} s"
        print(
            f"a step online: {took}, {m['with_reference'] / m['without']:.2f}x the time", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", help="a .jsonl file with `prompt`, `chosen` and `rejected`")
    parser.add_argument("--batch_size", type=int, default=32, help="pairs per step in part 1")
    parser.add_argument(
        "--steps", type=int, default=3, help="timed steps in part 1, after one untimed step"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="measurements of each variant in part 2"
    )
    parser.add_argument(
        "--model", help="second model of part 2; default: a random Qwen3 of 47M parameters"
    )
    parser.add_argument(
        "--only", choices=("stored", "online"), help=argparse.SUPPRESS
    )  # for child processes
    flags = parser.parse_args()
    if flags.only:
        return measure_memory(flags)
    with tempfile.TemporaryDirectory() as folder:
        same = speed(flags, folder)
        memory(flags, f"{folder}/model")
    sys.exit(not same)


if __name__ == "__main__":
    main()
