"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and the objectives that followed it.

    torchrun --nproc_per_node 8 dpo.py --model Qwen/Qwen3-1.7B --dataset trl-lib/ultrafeedback_binarized

A pair is a prompt with a chosen and a rejected completion. The policy's own log-ratio to a reference model serves as
the reward, and -log s(beta (lc - lr)) makes it larger for the chosen one. common/objectives/preference.py has the
formulas, docs/dpo.md a table of them. kto.py learns from single completions.

Differences from the papers: the reference's log-probs are computed once, before training, so that training has one
model in memory; chosen and rejected share one packed stream.

Shapes: N pairs (2N sequences) and T packed tokens in one micro-batch; sequences 2i and 2i + 1 are chosen and rejected
of pair i. Every per-token stream is aligned with *targets*: x_T[t] describes the prediction of targets_T[t].
"""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from common.config.flags import Fraction, Positive, with_flags
from common.config.groups import PreferenceArgs, TrainArgs
from common.config.parse import parse
from common.data.encode import PAIR_FLAGS, Encoder, encode_pairs
from common.data.packing import LazyGroups, PackedBatch, Sample, pack_groups
from common.data.rows import PAIR_COLUMNS
from common.data.token_cache import Samples, load_samples
from common.metrics.logger import wilson_interval
from common.metrics.meter import Meter, evaluate_sets
from common.model.hub import context_length, fit_max_length, load_tokenizer, require_same_tokenizer, resolve_model
from common.model.logprobs import store_reference_logps, weighted_logps
from common.model.lora import LoRAArgs
from common.model.policy import Policy, load_policy, load_reference
from common.objectives.preference import (
    LOSSES,
    OVER_BATCH,
    PER_TOKEN,
    REFERENCE_FREE,
    Pairs,
    implicit_rewards,
    preference_losses,
    rewards_per_token,
    wpo_weights,
)
from common.parallel import distributed
from common.train.checkpoint import prepare_output_dir
from common.train.optim import adamw, optimizer_step
from common.train.run import Run


@dataclass
class Args(PreferenceArgs, LoRAArgs, TrainArgs):
    output_dir: str = "runs/dpo"
    """where everything goes: args.yaml, metrics.jsonl, curves.png, checkpoints/, hf/"""
    batch_size: Positive[int] = 64
    """pairs per optimizer step, over all ranks"""
    max_length: Positive[int] | None = None
    """longest prompt and completion together, in tokens; default: 2048, or what context and pack_tokens allow"""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """what to do with pairs of which one is longer: leave them out, cut its end off (both are counted), or refuse"""
    identical_pairs: Literal["drop", "keep", "error"] = "drop"
    """what to do with pairs whose chosen and rejected are the same: leave them out (counted), keep them, or refuse"""
    lr: Positive[float] = 1e-6
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """after warmup: stay, or decay to `min_lr_ratio` of the peak by the end"""
    reference_model: str | None = None
    """Hugging Face id or folder of the reference; default: the starting model"""
    reference_logprobs: Literal["stored", "online"] = "stored"
    """stored: computed once before training; online: the reference stays in memory and computes them at every step"""
    ld_alpha: Fraction = 1.0
    """weight of a completion's tokens beyond the length of the other one (LD-DPO, arXiv:2409.06411)"""
    wpo: bool = False
    """weight each pair by how likely the policy is to write it (WPO, arXiv:2406.11827)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        names, chosen = " ".join(self.loss), set(self.loss)
        if chosen <= REFERENCE_FREE and (self.reference_model or self.reference_logprobs == "online"):
            raise ValueError(
                f"--loss {names} has no reference: --reference_model and --reference_logprobs are not read"
            )
        if self.ld_alpha < 1 and chosen & (REFERENCE_FREE | PER_TOKEN):
            raise ValueError(f"--ld_alpha is for summed log-ratios of pairs, not for --loss {names}")
        if self.max_length and 2 * (self.max_length - 1) > self.room:
            raise ValueError(f"two sequences of --max_length {self.max_length} exceed {self.room_flags}")

    def check_ranks(self, ranks: int) -> None:
        self.require_multiple("batch_size", ranks, "the number of ranks")
        super().check_ranks(ranks)


def encode_rows(
    rows: list[dict], columns: tuple[str, ...], encoder: Encoder, args: Args
) -> tuple[list[list[Sample]], Counter]:
    """Rows -> [chosen, rejected] pairs no longer than `--max_length`, their tokens weighted as `--ld_alpha` says; and
    how many rows something was done to, by what."""
    pairs, counts = with_flags(encode_pairs, args)(rows, lambda row: encoder.pair(row, columns))
    for pair in pairs if args.ld_alpha < 1 else ():
        shared = min(sum(sample.loss_mask) for sample in pair)
        for sample in pair:
            sample.weights = [1.0 if n <= shared else args.ld_alpha for n in accumulate(sample.loss_mask)]
    return pairs, counts


@torch.no_grad()
def reference_logps(mb: PackedBatch, reference: Policy | None) -> Tensor:
    """Log-prob of each completion by the reference, [2N]: by the model if it is in memory, else as stored; 0 without
    any."""
    return mb.of_samples("ref_logp") if reference is None else weighted_logps(mb, reference(mb)[0])


def pairs_of(mb: PackedBatch, logprobs_T: Tensor, collision_T: Tensor, ref_logps_2N: Tensor, wpo: bool) -> Pairs:
    """What the objectives see of a micro-batch."""
    logps_2N, lengths_2N = weighted_logps(mb, logprobs_T), mb.sequence_sums(torch.ones_like(logprobs_T))
    sides = [x_2N[side::2] for x_2N in (logps_2N, ref_logps_2N, lengths_2N) for side in (0, 1)]
    adjusted_2N = mb.sequence_sums(logprobs_T.detach() - collision_T) / lengths_2N
    weights_N = wpo_weights(adjusted_2N[0::2] + adjusted_2N[1::2]) if wpo else torch.ones_like(sides[0])
    return Pairs(*sides, weights=weights_N)


@torch.no_grad()
def gather_pairs(
    model: Policy, reference: Policy | None, micro_batches: list[PackedBatch], args: Args
) -> tuple[Pairs | None, list[slice]]:
    """For objectives that sort the pairs of all ranks: these, and where those of each of our micro-batches stand among
    them; else None. Collective."""
    if not OVER_BATCH & set(args.loss):
        return None, [slice(None)] * len(micro_batches)
    mine = []
    for mb in micro_batches:
        logprobs_T, _, _, collision_T = model(mb)
        mine.append(pairs_of(mb, logprobs_T, collision_T, reference_logps(mb, reference), args.wpo).tensors())
    ranks = distributed.gather_objects([torch.cat(column).cpu() for column in zip(*mine, strict=True)])
    first = sum(len(columns[0]) for columns in ranks[: torch.distributed.get_rank()])
    ends = accumulate((len(tensors[0]) for tensors in mine), initial=first)
    everyone = Pairs(*(torch.cat(columns).to(mine[0][0].device) for columns in zip(*ranks, strict=True)))
    return everyone, [slice(*bounds) for bounds in pairwise(ends)]


def insert_own(everyone: Pairs | None, own: slice, pairs: Pairs) -> Pairs:
    """Our pairs, which have gradients, in their place among everyone's, which have none; alone without those."""
    if everyone is None:
        return pairs
    columns = zip(everyone.tensors(), pairs.tensors(), strict=True)
    return Pairs(*(torch.cat([x_N[: own.start], ours_N, x_N[own.stop :]]) for x_N, ours_N in columns))


def measure(
    meter: Meter, prefix: str, args: Args, pairs: Pairs, loss: Tensor, parts: dict[str, Tensor], nll_N: Tensor
) -> None:
    """Of a micro-batch's pairs: the loss, a sum, and its parts; implicit rewards (those of the first objective);
    log-probs."""
    referenced, per_token = args.loss[0] not in REFERENCE_FREE, rewards_per_token(args.loss[0], args.length_normalize)
    chosen_N, rejected_N = implicit_rewards(pairs, per_token=per_token, referenced=referenced, beta=args.beta)
    values = {"loss": loss, "rewards/chosen": chosen_N, "rewards/rejected": rejected_N,
              "rewards/margins": chosen_N - rejected_N, "rewards/accuracies": chosen_N > rejected_N,
              "logps/chosen": pairs.chosen_logps, "logps/rejected": pairs.rejected_logps}  # fmt: skip
    if len(parts) > 1 or args.sft_weight:
        values |= {f"loss/{name}": part_N for name, part_N in parts.items()}
    values |= ({"loss/sft": nll_N} if args.sft_weight else {}) | ({"wpo/weight": pairs.weights} if args.wpo else {})
    for name, value in values.items():
        meter.mean(prefix + name, value.detach().sum(), len(chosen_N))


@torch.no_grad()
def evaluate(
    model: Policy, reference: Policy | None, pairs: list[list[Sample]], args: Args, device: torch.device
) -> Meter:
    """Held-out metrics; `pairs` is this rank's share."""
    meter, micro_batches = Meter(), pack_groups(pairs, args.pack_tokens, device)
    objectives = {name: with_flags(LOSSES[name], args) for name in args.loss}
    everyone, places = gather_pairs(model, reference, micro_batches, args)
    for mb, own in zip(micro_batches, places, strict=True):
        logprobs_T, entropy_T, _, collision_T = model(mb)
        ours = pairs_of(mb, logprobs_T, collision_T, reference_logps(mb, reference), args.wpo)
        loss_N, parts = preference_losses(insert_own(everyone, own, ours), objectives, args.loss_weights)
        nll_N = -mb.sequence_sums(logprobs_T)[0::2] / (ours.chosen_lengths if args.sft_length_normalize else 1)
        loss = loss_N[own].sum() + args.sft_weight * nll_N.sum()
        measure(meter, "eval_", args, ours, loss, {name: part_N[own] for name, part_N in parts.items()}, nll_N)
        meter.masked_mean("eval_entropy", entropy_T, mb.loss_mask_T)
    return meter


def reference_of(
    model: Policy, parts: list[Samples], tokenizer, args: Args, device: torch.device
) -> tuple[Policy | None, list[Samples | LazyGroups]]:
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


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, rank, world_size = distributed.setup(args.seed, nccl_timeout=args.nccl_timeout)
    prepare_output_dir(args, owned=("reference_logps.json",))

    # ---- data ----
    path = resolve_model(args.model)
    fit_max_length(args, path, room=args.room // 2 + 1)
    tokenizer = load_tokenizer(path, args)
    (pairs, train_counts), (eval_pairs, eval_counts) = load_samples(
        encode_rows, PAIR_COLUMNS, tokenizer, args, (*PAIR_FLAGS, "ld_alpha")
    )
    order = pairs.order(args)
    total_steps = args.max_steps or math.ceil(args.epochs * len(pairs) / args.batch_size)

    # ---- model: FSDP2 shards of float32 masters; the reference scores the data, then it is let go ----
    model, reference = load_policy(path, args, device), None
    if not set(args.loss) <= REFERENCE_FREE:
        reference, (pairs, eval_pairs) = reference_of(model, [pairs, eval_pairs], tokenizer, args, device)
    optimizer = adamw(model, args)

    # ---- the objectives, their floats bound to the flags of their names ----
    objectives = {name: with_flags(LOSSES[name], args) for name in args.loss}

    # ---- resume: everything else is a function of (seed, step) ----
    run = Run(
        args, model, optimizer, tokenizer, total_steps, order=order,
        show=("loss", "rewards/accuracies", "eval_rewards/accuracies", "time/step"),
        curves=("loss", "eval_loss", "rewards/accuracies", "eval_rewards/accuracies", "rewards/margins",
                "rewards/chosen", "rewards/rejected", "grad_norm"),
    )  # fmt: skip
    meter = run.meter
    for name, counts in (("training", train_counts), ("held-out", eval_counts)):
        for reason, count in counts.items():
            run.message(f"{count} {name} rows {reason}")
    run.message(f"{len(pairs)} training rows, {len(eval_pairs)} held out, {total_steps} steps, {world_size} ranks")
    for sample in pairs[0]:
        run.logger.preview(sample, tokenizer)

    for step in run.steps():
        # ---- 1. batch: the same global pairs whatever the number of ranks, every rank takes its share ----
        with meter.time("step"):
            batch = [pairs[i] for i in order.draw(args.batch_size)[rank::world_size]]
            # pack_groups() gives every rank the same number of micro-batches: FSDP collectives must match.
            micro_batches = pack_groups(batch, args.pack_tokens, device)
            with meter.time("logprobs"):
                everyone, places = gather_pairs(model, reference, micro_batches, args)

            # ---- 2. update: one optimizer step over the whole batch ----
            with meter.time("train"):
                batch_loss = torch.zeros((), device=device)
                for mb, own in zip(micro_batches, places, strict=True):
                    logprobs_T, entropy_T, _, collision_T = model(mb)
                    ours = pairs_of(mb, logprobs_T, collision_T, reference_logps(mb, reference), args.wpo)
                    loss_N, parts = preference_losses(insert_own(everyone, own, ours), objectives, args.loss_weights)
                    lengths_N = ours.chosen_lengths if args.sft_length_normalize else 1
                    nll_N = -mb.sequence_sums(logprobs_T)[0::2] / lengths_N
                    # The value is our pairs'; the gradient is through ours, of every pair they were sorted against.
                    loss = loss_N.sum() + (loss_N[own].sum() - loss_N.sum()).detach() + args.sft_weight * nll_N.sum()
                    # Mean over the pairs of the *global* batch. FSDP averages gradients over ranks; undo that.
                    (loss / args.batch_size * world_size).backward()
                    batch_loss += loss.detach() / args.batch_size
                    measure(meter, "", args, ours, loss, {name: part_N[own] for name, part_N in parts.items()}, nll_N)
                    meter.masked_mean("entropy", entropy_T, mb.loss_mask_T)
                lr = run.learning_rate(step)
                grad_norm = optimizer_step(model, optimizer, lr, args.max_grad_norm, batch_loss)

        # ---- 3. log and evaluate ----
        metrics = run.reduce(chain(*batch), grad_norm=grad_norm, lr=lr)
        if eval_pairs and run.evaluates(step + 1):
            metrics |= evaluate_sets(eval_pairs, lambda ours: evaluate(model, reference, ours, args, device))
        run.log(step + 1, metrics)

    summary = ""
    if (accuracy := run.latest.get("eval_rewards/accuracies")) is not None:
        low, high = wilson_interval(accuracy, len(eval_pairs))
        summary = f"held-out accuracy {accuracy:.3f} (95% interval {low:.3f} to {high:.3f})"
    run.end(summary)
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
