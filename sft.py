"""Supervised fine-tuning: next-token cross-entropy on completions, packed (no padding).

    torchrun --nproc_per_node 8 sft.py --model Qwen/Qwen3-1.7B-Base --dataset trl-lib/Capybara --batch_size 128

The loss of a step is the mean over the trained tokens of the whole global batch, whatever the number of ranks and
however the batch is packed: -1/M sum_t log p(targets_t), M = trained tokens of all ranks. See docs/sft.md.

Shapes: T packed tokens in one micro-batch. Every per-token stream is aligned with *targets*: x_T[t] describes the
prediction of targets_T[t].
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common import distributed
from common.checkpoint import Checkpointer, prepare_output_dir
from common.cli import parse
from common.config import RunArgs
from common.data import Encoder, RowOrder
from common.hub import context_length, load_tokenizer, resolve_model
from common.metrics import Meter, RunLogger, Totals
from common.models import Policy, load_policy
from common.optim import adamw, learning_rate, optimizer_step
from common.packing import PackedBatch, Sample, pack
from common.rows import SFT_COLUMNS, require_columns, train_and_eval_rows


@dataclass
class Args(RunArgs):
    output_dir: str = "runs/sft"
    """where everything goes: args.yaml, metrics.jsonl, curves.png, checkpoints/, hf/"""
    batch_size: int = 64
    """sequences per optimizer step, over all ranks"""
    max_length: int = 2048
    """longest sequence, in tokens"""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """what to do with longer rows: leave them out, cut their end off (both are counted and reported), or refuse"""
    train_on: Literal["completion", "all"] = "completion"
    """completion: the loss covers completions, or every assistant turn; all: prompts too"""
    lr: float = 2e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """after warmup: stay, or decay to `min_lr_ratio` of the peak by the end"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("batch_size", "max_length")
        self.require_multiple("batch_size", distributed.world_size(), "the number of ranks")
        if self.max_length > self.pack_tokens + 1:
            raise ValueError(f"--max_length {self.max_length} does not fit in --pack_tokens {self.pack_tokens}")


def encode_rows(
    rows: list[dict], columns: tuple[str, ...], encoder: Encoder, args: Args
) -> tuple[list[Sample], Counter]:
    """Rows -> samples no longer than `--max_length`, and how many rows something was done to, by what."""
    samples, counts = [], Counter()
    for row in rows:
        sample = encoder.sft(row, columns, args.train_on == "all")
        if (length := len(sample.ids)) > args.max_length:
            if args.overlong == "error":
                raise ValueError(
                    f"{row['_source']} has {length} tokens, --max_length is {args.max_length} (--overlong)"
                )
            if args.overlong == "drop":
                counts["dropped as too long"] += 1
                continue
            counts["truncated"] += 1
            sample.ids, sample.loss_mask = sample.ids[: args.max_length], sample.loss_mask[: args.max_length]
        if not any(sample.loss_mask[1:]):  # the first token is never predicted
            counts["dropped as nothing in them is trained"] += 1
            continue
        if encoder.tokenizer.unk_token_id in sample.ids:
            counts["with characters the tokenizer does not know"] += 1
        samples.append(sample)
    return samples, counts


def measure(
    meter: Meter, prefix: str, mb: PackedBatch, logprobs_T: Tensor, entropy_T: Tensor, correct_T: Tensor
) -> None:
    """Loss (nats per token), entropy and teacher-forced accuracy over the trained tokens of a micro-batch."""
    meter.masked_mean(f"{prefix}loss", -logprobs_T, mb.loss_mask_T)
    meter.masked_mean(f"{prefix}entropy", entropy_T, mb.loss_mask_T)
    meter.masked_mean(f"{prefix}mean_token_accuracy", correct_T, mb.loss_mask_T)


@torch.no_grad()
def evaluate(model: Policy, samples: list[Sample], args: Args, device: torch.device) -> dict[str, float]:
    """Held-out metrics over all ranks; `samples` is this rank's share."""
    meter = Meter()
    for mb in pack(samples, args.pack_tokens, device):
        measure(meter, "eval_", mb, *model(mb)[:3])
    return meter.reduce()


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, rank, world_size = distributed.setup(args.seed)
    prepare_output_dir(args)

    # ---- data ----
    path = resolve_model(args.model)
    if args.max_length > (context := context_length(path, args)):
        raise ValueError(f"--max_length {args.max_length} is beyond the model's context, {context} tokens")
    tokenizer = load_tokenizer(path)
    encoder = Encoder(tokenizer, args)
    train_rows, eval_rows = train_and_eval_rows(args)
    columns = require_columns(f"--dataset {args.dataset}", train_rows, SFT_COLUMNS)
    samples, train_counts = encode_rows(train_rows, columns, encoder, args)
    eval_samples, eval_counts = encode_rows(eval_rows, columns, encoder, args)
    if not samples:
        raise ValueError(f"--dataset {args.dataset}: no rows are left, {dict(train_counts)}; see --max_length")
    if eval_rows and not eval_samples:
        raise ValueError(f"no held-out rows are left, {dict(eval_counts)}; see --max_length and --eval_split")
    order = RowOrder(len(samples), args.seed)
    total_steps = args.max_steps or math.ceil(args.epochs * len(samples) / args.batch_size)

    # ---- model: FSDP2 shards of float32 masters ----
    model = load_policy(path, args, device)
    optimizer = adamw(model, args)

    # ---- resume: everything else is a function of (seed, step) ----
    totals = Totals()
    checkpointer = Checkpointer(args, model, optimizer, order=order, totals=totals)
    first_step = checkpointer.load_latest()
    meter = Meter()
    logger = RunLogger(
        args, first_step, total_steps, show=("loss", "mean_token_accuracy", "eval_loss", "tokens_per_second"),
        curves=("loss", "eval_loss", "mean_token_accuracy", "eval_mean_token_accuracy", "grad_norm", "lr"),
    )  # fmt: skip
    for name, counts in (("training", train_counts), ("held-out", eval_counts)):
        for reason, count in counts.items():
            logger.message(f"{count} {name} rows {reason}")
    logger.message(
        f"{len(samples)} training rows, {len(eval_samples)} held out, {total_steps} steps, {world_size} ranks"
    )
    logger.preview(samples[0], tokenizer)

    for step in range(first_step, total_steps):
        # ---- 1. batch: the same global rows whatever the number of ranks, every rank takes its share ----
        with meter.time("step"):
            batch = [samples[i] for i in order.draw(args.batch_size)[rank::world_size]]
            # pack() gives every rank the same number of micro-batches: FSDP collectives must match.
            micro_batches = pack(batch, args.pack_tokens, device)
            global_tokens = distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in micro_batches))

            # ---- 2. update: one optimizer step over the whole batch ----
            batch_loss = torch.zeros((), device=device)
            for mb in micro_batches:
                logprobs_T, entropy_T, correct_T, _ = model(mb)
                # Token mean over the *global* batch. FSDP averages gradients over ranks; undo that.
                loss = (-logprobs_T * mb.loss_mask_T).sum() / global_tokens
                (loss * world_size).backward()
                batch_loss += loss.detach()
                measure(meter, "", mb, logprobs_T, entropy_T, correct_T)
            lr = learning_rate(step, total_steps, args)
            grad_norm = optimizer_step(model, optimizer, lr, args.max_grad_norm, batch_loss)

        # ---- 3. log, evaluate, checkpoint ----
        tokens = int(distributed.all_sum(sum(sample.num_targets for sample in batch)))
        totals.num_tokens += tokens
        metrics = meter.reduce()
        metrics |= dict(grad_norm=grad_norm, lr=lr, epoch=order.epochs_done, num_tokens=totals.num_tokens)
        metrics["tokens_per_second"] = tokens / metrics["time/step"]
        last = step + 1 == total_steps
        stopping = distributed.stop_requested()
        if eval_samples and ((step + 1) % args.eval_every == 0 or last):
            metrics |= evaluate(model, eval_samples[rank::world_size], args, device)
        logger.log(step + 1, metrics)
        if (step + 1) % args.save_every == 0 or last or stopping:
            checkpointer.save(step + 1)
            logger.draw_curves()
        if stopping:
            logger.message(f"told to stop: saved step {step + 1}; the same command goes on from there")
            break
    else:
        checkpointer.export_hf(tokenizer)
        logger.message(f"done: {args.output_dir}/hf")
    logger.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
