"""Supervised fine-tuning: next-token cross-entropy on completions, packed (no padding).

    torchrun --nproc_per_node 8 sft.py --model Qwen/Qwen3-1.7B-Base --dataset trl-lib/Capybara --batch_size 128

The loss of a step is the mean over the trained tokens of the whole global batch, whatever the number of ranks and
however the batch is packed: -1/M sum_t log p(targets_t), M = trained tokens of all ranks, or with `--loss dft` each of
them times p(targets_t). See docs/sft.md.

Shapes: T packed tokens in one micro-batch. Every per-token stream is aligned with *targets*: x_T[t] describes the
prediction of targets_T[t].
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from common.config.flags import NotNegative, Positive
from common.config.groups import TrainArgs
from common.config.parse import parse
from common.data.encode import Encoder
from common.data.packing import PackedBatch, Sample, pack
from common.data.rows import SFT_COLUMNS, usable
from common.data.streaming import StreamArgs
from common.data.token_cache import load_samples
from common.metrics.meter import Meter, evaluate_sets
from common.model.hub import fit_max_length, load_tokenizer, resolve_model
from common.model.lora import LoRAArgs
from common.model.policy import Policy, load_policy
from common.objectives.policy import dft_loss, nll_loss
from common.parallel import distributed
from common.train.checkpoint import prepare_output_dir
from common.train.optim import adamw, optimizer_step
from common.train.run import Run

LOSSES = dict(nll=nll_loss, dft=dft_loss)


@dataclass
class Args(StreamArgs, LoRAArgs, TrainArgs):
    output_dir: str = "runs/sft"
    """where everything goes: args.yaml, metrics.jsonl, curves.png, checkpoints/, hf/"""
    batch_size: Positive[int] = 64
    """sequences per optimizer step, over all ranks"""
    max_length: Positive[int] | None = None
    """longest sequence, in tokens; default: 2048, or what context and pack_tokens allow"""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """what to do with longer rows: leave them out, cut their end off (both are counted and reported), or refuse"""
    train_on: Literal["completion", "all"] = "completion"
    """completion: the loss covers completions, or every assistant turn; all: prompts too"""
    loss: Literal[tuple(LOSSES)] = "nll"
    """what is minimised: nll: -log p of each token; dft: p times that, p without gradient; evaluations are always of
    nll, so that runs compare"""
    lr: Positive[float] = 2e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """after warmup: stay, or decay to `min_lr_ratio` of the peak by the end"""
    router_aux_loss_coef: NotNegative[float] = 0.0
    """mixtures of experts: weight of the loss that spreads each sequence's tokens over the experts, see docs/moe.md;
    0: off"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length and self.max_length > self.room + 1:
            raise ValueError(f"--max_length {self.max_length} does not fit in {self.room_flags}")

    def check_ranks(self, ranks: int) -> None:
        super().check_ranks(ranks)
        self.require_multiple("batch_size", ranks, "the number of ranks")


def encode_rows(
    rows: list[dict], columns: tuple[str, ...], encoder: Encoder, args: Args
) -> tuple[list[Sample], Counter]:
    """Rows -> samples no longer than `--max_length`, and how many rows something was done to, by what."""
    samples, counts = [], Counter()
    encode = partial(encoder.sft, columns=columns, train_on_all=args.train_on == "all")
    for row, sample in usable(rows, encode, args.on_bad_row):
        if (length := len(sample.ids)) > args.max_length:
            if args.overlong == "error" and args.on_bad_row == "error":
                raise ValueError(
                    f"{row['_source']} has {length} tokens, --max_length is {args.max_length} (--overlong)"
                )
            if args.overlong != "truncate":
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


def measure(meter: Meter, prefix: str, mb: PackedBatch, loss_T: Tensor, entropy_T: Tensor, correct_T: Tensor) -> None:
    """Loss (nats per token), entropy and teacher-forced accuracy over the trained tokens of a micro-batch."""
    meter.masked_mean(f"{prefix}loss", loss_T, mb.loss_mask_T)
    meter.masked_mean(f"{prefix}entropy", entropy_T, mb.loss_mask_T)
    meter.masked_mean(f"{prefix}mean_token_accuracy", correct_T, mb.loss_mask_T)


@torch.no_grad()
def evaluate(model: Policy, samples: list[Sample], args: Args, device: torch.device) -> Meter:
    """Held-out metrics; `samples` is this rank's share."""
    meter = Meter()
    for mb in pack(samples, args.pack_tokens, device):
        logprobs_T, entropy_T, correct_T, _ = model(mb)
        measure(meter, "eval_", mb, nll_loss(logprobs_T), entropy_T, correct_T)
    return meter


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, rank, world_size = distributed.setup(args.seed, nccl_timeout=args.nccl_timeout)
    prepare_output_dir(args)

    # ---- data ----
    path = resolve_model(args.model)
    fit_max_length(args, path, room=args.room + 1)
    tokenizer = load_tokenizer(path, args)
    own_flags = ("max_length", "overlong", "train_on")  # that encode_rows reads: large data is tokenised only once
    (samples, train_counts), (eval_samples, eval_counts) = load_samples(
        encode_rows, SFT_COLUMNS, tokenizer, args, own_flags
    )
    order = samples.order(args)
    total_steps = args.max_steps or math.ceil(args.epochs * len(samples) / args.batch_size)

    # ---- model: FSDP2 shards of float32 masters ----
    model = load_policy(path, args, device)
    if args.router_aux_loss_coef:
        model.watch_experts("--router_aux_loss_coef")
    optimizer = adamw(model, args)

    # ---- resume: everything else is a function of (seed, step) ----
    run = Run(
        args, model, optimizer, tokenizer, total_steps, order=order,
        show=("loss", "mean_token_accuracy", "eval_loss", "tokens_per_second"),
        curves=("loss", "eval_loss", "mean_token_accuracy", "eval_mean_token_accuracy", "grad_norm", "lr"),
    )  # fmt: skip
    meter = run.meter
    for name, counts in (("training", train_counts), ("held-out", eval_counts)):
        for reason, count in counts.items():
            run.message(f"{count} {name} rows {reason}")
    run.message(f"{samples.many} training rows, {len(eval_samples)} held out, {total_steps} steps, {world_size} ranks")
    run.logger.preview(samples[0], tokenizer)

    for step in run.steps():
        # ---- 1. batch: the same global rows whatever the number of ranks, every rank takes its share ----
        with meter.time("step"):
            batch = [samples[i] for i in order.draw(args.batch_size)[rank::world_size]]
            # pack() gives every rank the same number of micro-batches: FSDP collectives must match.
            micro_batches = pack(batch, args.pack_tokens, device)
            global_tokens = distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in micro_batches))

            # ---- 2. update: one optimizer step over the whole batch ----
            with meter.time("train"):
                batch_loss = torch.zeros((), device=device)
                for mb in micro_batches:
                    logprobs_T, entropy_T, correct_T, _ = model(mb)
                    loss_T = LOSSES[args.loss](logprobs_T)
                    # Token mean over the *global* batch. FSDP averages gradients over ranks; undo that.
                    loss = (loss_T * mb.loss_mask_T).sum() / global_tokens
                    if args.router_aux_loss_coef:  # a mean over sequences: that of all tokens would depend on the packs
                        loss = loss + args.router_aux_loss_coef * model.expert_balance_N.sum() / args.batch_size
                        meter.mean("expert_balance", model.expert_balance_N.sum(), len(model.expert_balance_N))
                    (loss * world_size).backward()
                    batch_loss += loss.detach()
                    measure(meter, "", mb, loss_T, entropy_T, correct_T)
                    for name, mask_T in mb.source_masks_T.items():
                        meter.masked_mean(f"loss{name}", loss_T, mask_T)
                lr = run.learning_rate(step)
                grad_norm = optimizer_step(model, optimizer, lr, args.max_grad_norm, batch_loss)

        # ---- 3. log and evaluate ----
        metrics = run.reduce(batch, grad_norm=grad_norm, lr=lr)
        if eval_samples and run.evaluates(step + 1):
            metrics |= evaluate_sets(eval_samples, lambda ours: evaluate(model, ours, args, device))
        run.log(step + 1, metrics)

    run.end()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
