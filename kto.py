"""KTO: learning from single completions that were good or bad (Ethayarajh et al. 2024, arXiv:2402.01306).

    torchrun --nproc_per_node 8 kto.py --model Qwen/Qwen3-1.7B --dataset trl-lib/kto-mix-14k

What dpo.py does without pairs: the reward of a completion is the policy's log-ratio to a reference, and it is compared
not with that of another completion but with a baseline z0, an estimate of KL(policy || reference): a desirable
completion has loss 1 - s(beta (l - z0)), an undesirable one 1 - s(beta (z0 - l)).

Differences from the paper: z0 is over the global batch, from completions that belong to other prompts; the reference's
log-probs are computed once, before training. See docs/kto.md.

Shapes: N completions and T packed tokens in one micro-batch. Every per-token stream is aligned with *targets*: x_T[t]
describes the prediction of targets_T[t].
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from common.config.flags import Positive, with_flags
from common.config.groups import TrainArgs
from common.config.parse import parse
from common.data.encode import PAIR_FLAGS, Encoder, cut, encode_pairs
from common.data.order import make_order
from common.data.packing import LazyGroups, PackedBatch, Sample, pack
from common.data.rows import KTO_COLUMNS, PAIR_COLUMNS
from common.data.token_cache import Samples, load_samples
from common.metrics.logger import wilson_interval
from common.metrics.meter import Meter, evaluate_sets
from common.model.hub import context_length, fit_max_length, load_tokenizer, require_same_tokenizer, resolve_model
from common.model.logprobs import store_reference_logps
from common.model.lora import LoRAArgs
from common.model.policy import Policy, load_policy, load_reference
from common.objectives.preference import kto, wpo_weights
from common.parallel import distributed
from common.train.checkpoint import prepare_output_dir
from common.train.optim import adamw, optimizer_step
from common.train.run import Run


@dataclass
class Args(LoRAArgs, TrainArgs):
    TINY_DEFAULTS: ClassVar[dict] = dict(lr=5e-4, beta=1.0)
    """defaults for the built-in model and task"""
    output_dir: str = "runs/kto"
    """where everything goes: args.yaml, metrics.jsonl, curves.png, checkpoints/, hf/"""
    batch_size: Positive[int] = 64
    """completions per optimizer step, over all ranks"""
    max_length: Positive[int] | None = None
    """longest prompt and completion together, in tokens; default: 2048, or what context and pack_tokens allow"""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """what to do with longer rows: leave them out, cut their end off (both are counted), or refuse"""
    identical_pairs: Literal["drop", "keep", "error"] = "drop"
    """of pairs: what to do where chosen and rejected are the same: leave them out (counted), keep them, or refuse"""
    lr: Positive[float] = 1e-6
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """after warmup: stay, or decay to `min_lr_ratio` of the peak by the end"""
    beta: Positive[float] = 0.1
    """scale of the implicit rewards: how strongly the policy is held to the reference"""
    desirable_weight: Positive[float] = 1.0
    """weight of completions with a true label"""
    undesirable_weight: Positive[float] = 1.0
    """weight of completions with a false label"""
    reference_model: str | None = None
    """Hugging Face id or folder of the reference; default: the starting model"""
    reference_logprobs: Literal["stored", "online"] = "stored"
    """stored: computed once before training; online: the reference stays in memory and computes them at every step"""
    wpo: bool = False
    """weight each completion by how likely the policy is to write it (WPO, arXiv:2406.11827)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length and self.max_length - 1 > self.room:
            raise ValueError(f"a sequence of --max_length {self.max_length} exceeds {self.room_flags}")

    def check_ranks(self, ranks: int) -> None:
        self.require_multiple("batch_size", ranks, "the number of ranks")
        super().check_ranks(ranks)


def encode_rows(
    rows: list[dict], columns: tuple[str, ...], encoder: Encoder, args: Args
) -> tuple[list[list[Sample]], Counter]:
    """Rows -> [completion] or, of a pair, [desirable, undesirable], with a bool `label` in their rows; and how many
    rows something was done to, by what."""

    def encode(row: dict) -> list[Sample]:
        if columns != KTO_COLUMNS[0]:
            return encoder.pair(row, columns)
        if not isinstance(row.get("label"), bool):
            raise ValueError(f"{row['_source']}: column label must be true or false")
        return [encoder.completion(row, "prompt", "completion")]

    found, counts = with_flags(encode_pairs, args)(rows, encode)
    for pair in found if "chosen" in columns else ():
        for sample, label in zip(pair, (True, False), strict=True):
            sample.row = sample.row | dict(label=label)
    return found, counts


def with_mismatches(rows: Samples, args: Args) -> LazyGroups:
    """[completion, mismatch] of each completion, of pairs all desirable ones first. A mismatch is the same prompt with
    the completion of the next one that has another prompt: its log-ratio estimates the KL."""
    count = len(rows) * (len(rows[0]) if rows else 1)

    def completion(i: int) -> Sample:
        return rows[i % len(rows)][i // len(rows)]

    def group(i: int) -> list[Sample]:
        sample, others = completion(i), (completion(j % count) for j in range(i + 1, i + count))
        if not (other := next((other for other in others if other.prompt_ids != sample.prompt_ids), None)):
            raise ValueError("kto.py needs rows with different prompts: its baseline takes completions of other ones")
        mask = [False] * sample.prompt_length + other.loss_mask[other.prompt_length :]
        return [sample, cut(Sample(sample.prompt_ids + other.completion_ids, mask), args.max_length)]

    if rows:
        group(0)  # what is wrong is said before the model is loaded
    return LazyGroups(count, group)


def require_both_labels(rows: Samples) -> None:
    labels = [label for label in (True, False) if any(sample.row["label"] == label for row in rows for sample in row)]
    if len(labels) < 2:
        raise ValueError(f"kto.py needs rows with label true and rows with label false; all are {labels[0]}")


def reference_of(
    model: Policy, parts: list[LazyGroups], tokenizer, args: Args, device: torch.device
) -> tuple[Policy | None, list[LazyGroups]]:
    """The reference model if it stays in memory, else None, and the samples have their `ref_logp`. Call it before a
    checkpoint is loaded, as the policy still is the starting model, which often is the reference. Collective."""
    path = resolve_model(args.reference_model or args.model, "--reference_model")
    require_same_tokenizer("--reference_model", path, tokenizer)
    if args.max_length > (context := context_length(path, args)):
        raise ValueError(f"--max_length {args.max_length} is beyond the reference's context, {context} tokens")

    def load() -> Policy:
        other = args.reference_model or args.reference_logprobs == "online"
        return load_reference(model, args, device, args.reference_model and path) if other else model

    if args.reference_logprobs == "online":
        return load(), parts
    return None, store_reference_logps(parts, path, load, Path(args.output_dir), args, device)


@torch.no_grad()
def reference_logps(mb: PackedBatch, reference: Policy | None) -> Tensor:
    """Log-prob of each completion by the reference, [N]: by the model if it is in memory, else as stored."""
    return mb.of_samples("ref_logp") if reference is None else mb.sequence_sums(reference(mb)[0])


@torch.no_grad()
def kl_baseline(
    model: Policy, reference: Policy | None, mismatches: list[Sample], args: Args, device: torch.device
) -> Tensor:
    """z0: the mean log-ratio of all ranks' completions that belong to other prompts, not below 0. Collective."""
    log_ratios = [
        (mb.sequence_sums(model(mb)[0]) - reference_logps(mb, reference)).sum()
        for mb in pack(mismatches, args.pack_tokens, device)
    ]
    mean = distributed.all_sum(sum(log_ratios)) / distributed.all_sum(len(mismatches))
    return mean.clamp(min=0).to(device)


def labels(mb: PackedBatch) -> Tensor:
    """Which completions are desirable, [N] bool."""
    return mb.per_sequence(sample.row["label"] for sample in mb.samples).bool()


def weights_of(mb: PackedBatch, logprobs_T: Tensor, collision_T: Tensor, wpo: bool) -> Tensor:
    """How much each completion counts: 1, or `wpo_weights`. [N], no gradient."""
    lengths_N = mb.sequence_sums(torch.ones_like(logprobs_T))
    adjusted_N = mb.sequence_sums(logprobs_T.detach() - collision_T) / lengths_N
    return wpo_weights(adjusted_N) if wpo else torch.ones_like(adjusted_N)


def measure(
    meter: Meter, prefix: str, args: Args, mb: PackedBatch, loss_N: Tensor, log_ratio_N: Tensor, logps_N: Tensor,
    baseline: Tensor,
) -> None:  # fmt: skip
    """Loss, implicit rewards and log-probs of a micro-batch's completions, desirable and undesirable ones apart."""
    rewards_N, label_N, count = args.beta * log_ratio_N.detach(), labels(mb), len(loss_N)
    right_N = (rewards_N > args.beta * baseline) == label_N
    meter.mean(f"{prefix}loss", loss_N.detach().sum(), count)
    meter.mean(f"{prefix}kl", baseline * count, count)
    meter.mean(f"{prefix}rewards/accuracies", right_N.sum(), count)
    for name, side_N in (("chosen", label_N), ("rejected", ~label_N)):
        meter.mean(f"{prefix}rewards/{name}", rewards_N[side_N].sum(), side_N.sum())
        meter.mean(f"{prefix}logps/{name}", logps_N.detach()[side_N].sum(), side_N.sum())


@torch.no_grad()
def evaluate(
    model: Policy, reference: Policy | None, groups: list[list[Sample]], args: Args, device: torch.device
) -> Meter:
    """Held-out metrics; `groups` is this rank's share."""
    meter, completions, mismatches = Meter(), [c for c, _ in groups], [m for _, m in groups]
    micro_batches, loss_of = pack(completions, args.pack_tokens, device), with_flags(kto, args)
    baseline = kl_baseline(model, reference, mismatches, args, device)
    for mb in micro_batches:
        logprobs_T, entropy_T, _, collision_T = model(mb)
        logps_N, label_N = mb.sequence_sums(logprobs_T), labels(mb)
        log_ratio_N = logps_N - reference_logps(mb, reference)
        weights_N = weights_of(mb, logprobs_T, collision_T, args.wpo)
        loss_N = loss_of(log_ratio_N, label_N, baseline) * weights_N
        measure(meter, "eval_", args, mb, loss_N, log_ratio_N, logps_N, baseline)
        meter.masked_mean("eval_entropy", entropy_T, mb.loss_mask_T)
        meter.mean("eval_wpo/weight", weights_N.sum(), len(weights_N) if args.wpo else 0)
    return meter


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, rank, world_size = distributed.setup(args.seed, nccl_timeout=args.nccl_timeout)
    prepare_output_dir(args, owned=("reference_logps.json",))

    # ---- data ----
    path = resolve_model(args.model)
    fit_max_length(args, path, room=args.room + 1)
    tokenizer = load_tokenizer(path, args)
    (rows, train_counts), (eval_rows, eval_counts) = load_samples(
        encode_rows, (*KTO_COLUMNS, *PAIR_COLUMNS), tokenizer, args, PAIR_FLAGS, kept=("label",)
    )
    groups, eval_groups = (with_mismatches(part, args) for part in (rows, eval_rows))
    require_both_labels(rows)
    order = make_order(rows.rows * (len(groups) // len(rows)), args)
    total_steps = args.max_steps or math.ceil(args.epochs * len(groups) / args.batch_size)

    # ---- model: FSDP2 shards of float32 masters; the reference scores the data, then it is let go ----
    model = load_policy(path, args, device)
    reference, (groups, eval_groups) = reference_of(model, [groups, eval_groups], tokenizer, args, device)
    optimizer, loss_of = adamw(model, args), with_flags(kto, args)

    # ---- resume: everything else is a function of (seed, step) ----
    run = Run(
        args, model, optimizer, tokenizer, total_steps, order=order,
        show=("loss", "rewards/accuracies", "eval_rewards/accuracies", "time/step"),
        curves=("loss", "eval_loss", "rewards/accuracies", "eval_rewards/accuracies", "kl", "rewards/chosen",
                "rewards/rejected", "grad_norm"),
    )  # fmt: skip
    meter = run.meter
    for name, counts in (("training", train_counts), ("held-out", eval_counts)):
        for reason, count in counts.items():
            run.message(f"{count} {name} rows {reason}")
    run.message(f"{len(groups)} training rows, {len(eval_groups)} held out, {total_steps} steps, {world_size} ranks")
    run.logger.preview(groups[0][0], tokenizer)

    for step in run.steps():
        # ---- 1. batch: the same global rows whatever the number of ranks, every rank takes its share ----
        with meter.time("step"):
            batch = [groups[i] for i in order.draw(args.batch_size)[rank::world_size]]
            completions, mismatches = [c for c, _ in batch], [m for _, m in batch]
            # pack() gives every rank the same number of micro-batches: FSDP collectives must match.
            micro_batches = pack(completions, args.pack_tokens, device)

            # ---- 2. what a completion is compared with ----
            with meter.time("logprobs"):
                baseline = kl_baseline(model, reference, mismatches, args, device)

            # ---- 3. update: one optimizer step over the whole batch ----
            with meter.time("train"):
                batch_loss = torch.zeros((), device=device)
                for mb in micro_batches:
                    logprobs_T, entropy_T, _, collision_T = model(mb)
                    logps_N, label_N = mb.sequence_sums(logprobs_T), labels(mb)
                    log_ratio_N = logps_N - reference_logps(mb, reference)
                    weights_N = weights_of(mb, logprobs_T, collision_T, args.wpo)
                    loss_N = loss_of(log_ratio_N, label_N, baseline) * weights_N
                    # Mean over the completions of the *global* batch. FSDP averages gradients over ranks; undo that.
                    loss = loss_N.sum() / args.batch_size
                    (loss * world_size).backward()
                    batch_loss += loss.detach()
                    measure(meter, "", args, mb, loss_N, log_ratio_N, logps_N, baseline)
                    meter.masked_mean("entropy", entropy_T, mb.loss_mask_T)
                    meter.mean("wpo/weight", weights_N.sum(), len(weights_N) if args.wpo else 0)
                lr = run.learning_rate(step)
                grad_norm = optimizer_step(model, optimizer, lr, args.max_grad_norm, batch_loss)

        # ---- 4. log and evaluate ----
        metrics = run.reduce(completions, grad_norm=grad_norm, lr=lr)
        if eval_groups and run.evaluates(step + 1):
            metrics |= evaluate_sets(eval_groups, lambda ours: evaluate(model, reference, ours, args, device))
        run.log(step + 1, metrics)

    summary = ""
    if (accuracy := run.latest.get("eval_rewards/accuracies")) is not None:
        low, high = wilson_interval(accuracy, len(eval_groups))
        summary = f"held-out accuracy {accuracy:.3f} (95% interval {low:.3f} to {high:.3f})"
    run.end(summary)
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
