"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and the objectives that followed it.

    torchrun --nproc_per_node 8 dpo.py --model Qwen/Qwen3-1.7B --dataset trl-lib/ultrafeedback_binarized

A pair is a prompt with a chosen and a rejected completion. The policy's own log-ratio to a reference model serves as
the reward, and -log s(beta (lc - lr)) makes it larger for the chosen one. common/preference_losses.py has the formulas,
docs/dpo.md a table of them.

Differences from the papers: the reference's log-probs are computed once, before training, so that training has one
model in memory; chosen and rejected share one packed stream; KTO's baseline is over the global batch.

Shapes: N pairs (2N sequences; with --loss kto N sequences) and T packed tokens in one micro-batch. Every per-token
stream is aligned with *targets*: x_T[t] describes the prediction of targets_T[t].
"""

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from common import distributed
from common.checkpoint import Checkpointer, prepare_output_dir
from common.cli import parse
from common.data import Encoder, RowOrder
from common.hub import context_length, load_tokenizer, require_same_tokenizer, resolve_model
from common.metrics import Meter, RunLogger, Totals, wilson_interval
from common.models import Policy, load_policy
from common.optim import adamw, learning_rate, optimizer_step
from common.packing import PackedBatch, Sample, pack, pack_groups

from common.preference_losses import (  # isort: skip
    OVER_BATCH, PER_TOKEN, REFERENCE_FREE, Pairs, PreferenceArgs, implicit_rewards, kto, preference_losses, wpo_weights,
)  # fmt: skip
from common.rows import KTO_COLUMNS, PAIR_COLUMNS, reasons, require_columns, train_and_eval_rows


@dataclass
class Args(PreferenceArgs):
    output_dir: str = "runs/dpo"
    """where everything goes: args.yaml, metrics.jsonl, curves.png, checkpoints/, hf/"""
    batch_size: int = 64
    """pairs (kto: completions) per optimizer step, over all ranks"""
    max_length: int = 2048
    """longest prompt and completion together, in tokens"""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """what to do with pairs of which one is longer: leave them out, cut its end off (both are counted), or refuse"""
    identical_pairs: Literal["drop", "keep", "error"] = "drop"
    """what to do with pairs whose chosen and rejected are the same: leave them out (counted), keep them, or refuse"""
    lr: float = 1e-6
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """after warmup: stay, or decay to `min_lr_ratio` of the peak by the end"""
    reference_model: str | None = None
    """Hugging Face id or folder of the reference; default: the starting model"""
    reference_logprobs: Literal["stored", "online"] = "stored"
    """stored: computed once before training; online: the reference stays in memory and computes them at every step"""
    ld_alpha: float = 1.0
    """weight of a completion's tokens beyond the length of the other one (LD-DPO, arXiv:2409.06411)"""
    wpo: bool = False
    """weight each pair by how likely the policy is to write it (WPO, arXiv:2406.11827)"""
    desirable_weight: float = 1.0
    """kto: weight of completions with a true label"""
    undesirable_weight: float = 1.0
    """kto: weight of completions with a false label"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("batch_size", "max_length", "desirable_weight", "undesirable_weight")
        self.require_finite("desirable_weight", "undesirable_weight")
        self.require_multiple("batch_size", distributed.world_size(), "the number of ranks")
        names, chosen = " ".join(self.loss), set(self.loss)
        if "kto" in chosen and (len(chosen) > 1 or self.sft_weight):
            raise ValueError("--loss kto is of single completions: no other loss and no --sft_weight beside it")
        if "kto" not in chosen and (self.desirable_weight, self.undesirable_weight) != (1, 1):
            raise ValueError(f"--desirable_weight and --undesirable_weight have no meaning in --loss {names}")
        if chosen <= REFERENCE_FREE and (self.reference_model or self.reference_logprobs == "online"):
            raise ValueError(
                f"--loss {names} has no reference: --reference_model and --reference_logprobs are not read"
            )
        if not 0 <= self.ld_alpha <= 1:
            raise ValueError(f"--ld_alpha {self.ld_alpha} must be in [0, 1]")
        if self.ld_alpha < 1 and chosen & (REFERENCE_FREE | PER_TOKEN | {"kto"}):
            raise ValueError(f"--ld_alpha is for summed log-ratios of pairs, not for --loss {names}")
        if 2 * (self.max_length - 1) > self.pack_tokens:
            raise ValueError(f"two sequences of --max_length {self.max_length} exceed --pack_tokens {self.pack_tokens}")


def encode_rows(
    rows: list[dict], columns: tuple[str, ...], encoder: Encoder, args: Args
) -> tuple[list[list[Sample]], Counter]:
    """Rows -> [chosen, rejected] pairs no longer than `--max_length`, and how many something was done to, by what.

    With --loss kto: [completion, mismatch] with a bool `label` in the completion's row, see `with_mismatches`; a pair
    counts as one desirable and one undesirable row.
    """
    pairs, counts, unpaired = [], Counter(), columns == KTO_COLUMNS[0]
    for row in rows:
        if unpaired and not isinstance(row.get("label"), bool):
            raise ValueError(f"{row['_source']}: column label must be true or false")
        pair = [encoder.completion(row, "prompt", "completion")] if unpaired else encoder.pair(row, columns)
        if (length := max(len(s.ids) for s in pair)) > args.max_length:
            if args.overlong == "error":
                raise ValueError(f"{row['_source']} has {length} tokens, more than --max_length (--overlong)")
            if args.overlong == "drop" or max(s.prompt_length for s in pair) >= args.max_length:
                counts["dropped as too long (--max_length)"] += 1
                continue
            counts["truncated (--max_length)"] += 1
            pair = [cut(sample, args.max_length) for sample in pair]
        if not unpaired and pair[0].ids == pair[1].ids:
            if args.identical_pairs == "error":
                raise ValueError(f"{row['_source']}: chosen and rejected are the same (--identical_pairs)")
            counts["with chosen = rejected (--identical_pairs)"] += 1
            if args.identical_pairs == "drop":
                continue
        if args.ld_alpha < 1:
            shared = min(sum(sample.loss_mask) for sample in pair)
            for sample in pair:
                sample.weights = [1.0 if n <= shared else args.ld_alpha for n in accumulate(sample.loss_mask)]
        pairs.append(pair)
    if args.loss == ("kto",):
        pairs = with_mismatches(pairs, args)
    return pairs, counts


def with_mismatches(pairs: list[list[Sample]], args: Args) -> list[list[Sample]]:
    """[completion] or [chosen, rejected] -> [completion, mismatch]: the same prompt with the completion of the next row
    that has another prompt, whose log-ratio estimates the KL baseline."""
    for chosen, *rejected in pairs:
        for sample, label in ((chosen, True), *((r, False) for r in rejected)):
            sample.row = dict(label=label) | sample.row
    samples = [pair[side] for side in range(2) for pair in pairs if side < len(pair)]
    prompts = [sample.ids[: sample.prompt_length] for sample in samples]
    if samples and all(prompt == prompts[0] for prompt in prompts):
        raise ValueError("--loss kto needs rows with different prompts: its baseline takes completions of other ones")
    groups = []
    for i, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
        other = next(j % len(samples) for j in range(i + 1, i + len(samples)) if prompts[j % len(samples)] != prompt)
        completion, mask = samples[other].completion_ids, samples[other].loss_mask[len(prompts[other]) :]
        groups.append([sample, cut(Sample(prompt + completion, [False] * len(prompt) + mask), args.max_length)])
    return groups


def require_both_labels(groups: list[list[Sample]]) -> None:
    if len(labels := {sample.row["label"] for sample, _ in groups}) < 2:
        raise ValueError(f"--loss kto needs rows with label true and rows with label false; all are {labels.pop()}")


def cut(sample: Sample, length: int) -> Sample:
    sample.ids, sample.loss_mask = sample.ids[:length], sample.loss_mask[:length]
    return sample


def completion_logps(mb: PackedBatch, logprobs_T: Tensor) -> Tensor:
    """Log-prob of each completion, in nats, [2N] float64; tokens weighted as `--ld_alpha` says."""
    return mb.sequence_sums(logprobs_T if mb.weights_T is None else logprobs_T * mb.weights_T)


@torch.no_grad()
def reference_logps(mb: PackedBatch, reference: Policy | None) -> Tensor:
    """`completion_logps` of the reference: by the model if it is in memory, else as stored; 0 without any."""
    if reference is not None:
        return completion_logps(mb, reference(mb)[0])
    return mb.per_sequence(sample.ref_logp or 0.0 for sample in mb.samples)


def store_reference_logps(
    groups: list[list[Sample]], reference_path: str, load_reference, args: Args, device: torch.device
) -> None:
    """Fill `ref_logp` of every sample on every rank: from `<output_dir>/reference_logps.json` if it is of these very
    samples and this reference, else by one pass of the reference over them, divided among the ranks."""
    samples, path = [sample for group in groups for sample in group], Path(args.output_dir) / "reference_logps.json"
    files = [
        (f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(Path(reference_path).glob("*.safetensors"))
    ]
    hashed = hashlib.blake2b(repr((reference_path, files, args.dtype)).encode())
    for sample in samples:
        hashed.update(repr((sample.ids, sample.loss_mask, sample.weights)).encode())
    digest, stored = hashed.hexdigest(), {}
    if distributed.is_main() and path.is_file():
        try:
            stored = json.loads(path.read_text())
            if stored["digest"] == digest and len(stored["logps"]) != len(samples):
                raise ValueError("another number of samples")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged, delete it: {distributed.first_line(error)}") from error
    digest, stored = distributed.gather_objects((digest, stored))[0]  # nodes may hold copies: the first one decides
    if stored.get("digest") != digest:
        reference, rank, world_size = load_reference(), torch.distributed.get_rank(), distributed.world_size()
        for start in range(0, len(samples), chunk := 1024 * world_size):  # the same number of packs on every rank
            for mb in pack(samples[start + rank : start + chunk : world_size], args.pack_tokens, device):
                for sample, logp in zip(mb.samples, reference_logps(mb, reference).tolist(), strict=True):
                    sample.ref_logp = logp
        reference.reshard()  # the root stays whole after a forward without backward
        ranks = distributed.gather_objects([sample.ref_logp for sample in samples[rank::world_size]])
        stored = dict(digest=digest, logps=[ranks[i % world_size][i // world_size] for i in range(len(samples))])
        if distributed.is_main():
            work = path.with_suffix(".tmp")
            work.write_text(json.dumps(stored))
            work.rename(path)
    for sample, logp in zip(samples, stored["logps"], strict=True):
        sample.ref_logp = logp


class Objective:
    """`--loss` over one global batch, micro-batch by micro-batch: what it needs of the whole batch comes first."""

    def __init__(self, model: Policy, reference: Policy | None, batch: list[list[Sample]], args: Args, device):
        self.model, self.reference, self.args = model, reference, args
        self.is_kto = args.loss == ("kto",)
        # pack() gives every rank the same number of micro-batches: FSDP collectives must match.
        groups = [[completion] for completion, _ in batch] if self.is_kto else batch
        self.micro_batches = pack_groups(groups, args.pack_tokens, device)
        self.whole: Pairs | None = None  # the pairs of all ranks, for objectives that sort them; ours start at self.at
        with torch.no_grad():
            if self.is_kto:  # KL(policy || reference) from completions that belong to other prompts
                log_ratios = [
                    (completion_logps(mb, model(mb)[0]) - reference_logps(mb, reference)).sum()
                    for mb in pack([mismatch for _, mismatch in batch], args.pack_tokens, device)
                ]
                count = distributed.all_sum(len(batch))
                self.baseline = (distributed.all_sum(sum(log_ratios)) / count).clamp(min=0).to(device)
            elif OVER_BATCH & set(args.loss):
                mine = [self.pairs(mb, *model(mb)).tensors() for mb in self.micro_batches]
                ranks = distributed.gather_objects([torch.cat(column).cpu() for column in zip(*mine, strict=True)])
                self.whole = Pairs(*(torch.cat(columns).to(device) for columns in zip(*ranks, strict=True)))
                self.at = sum(len(columns[0]) for columns in ranks[: torch.distributed.get_rank()])

    def pairs(self, mb: PackedBatch, logprobs_T: Tensor, _entropy, _correct, collision_T: Tensor) -> Pairs:
        """Sequences 2i and 2i + 1 of the pack are chosen and rejected of pair i."""
        logps, ref_logps = completion_logps(mb, logprobs_T), reference_logps(mb, self.reference)
        lengths = mb.sequence_sums(torch.ones_like(logprobs_T))
        weights = torch.ones_like(lengths[0::2])
        if self.args.wpo:
            adjusted = mb.sequence_sums(logprobs_T.detach() - collision_T) / lengths
            weights = wpo_weights(adjusted[0::2] + adjusted[1::2])
        return Pairs(logps[0::2], logps[1::2], ref_logps[0::2], ref_logps[1::2], lengths[0::2], lengths[1::2], weights)

    def __call__(self, mb: PackedBatch, meter: Meter, prefix: str = "") -> Tensor:
        """The loss summed over the pairs (kto: completions) of a micro-batch, and its metrics."""
        logprobs_T, entropy_T, _, collision_T = scores = self.model(mb)
        meter.masked_mean(f"{prefix}entropy", entropy_T, mb.loss_mask_T)
        if self.is_kto:
            return self.unpaired(mb, logprobs_T, collision_T, meter, prefix)
        args, pairs = self.args, self.pairs(mb, *scores)
        own, everything = slice(None), pairs
        if self.whole is not None:  # our rows with gradient among all others without
            own = slice(self.at, self.at + len(pairs.weights))
            self.at = own.stop
            columns = zip(self.whole.tensors(), pairs.tensors(), strict=True)
            everything = Pairs(*(torch.cat([all_[: own.start], ours, all_[own.stop :]]) for all_, ours in columns))
        loss_N, parts = preference_losses(everything, args)
        # The value is that of our pairs; the gradient is through ours, of every pair that they were sorted against.
        loss = loss_N.sum() + (loss_N[own].sum() - loss_N.sum()).detach()
        nll = -mb.sequence_sums(logprobs_T)[0::2]
        nll = nll / pairs.chosen_lengths if args.sft_length_normalize else nll
        if args.sft_weight:
            loss = loss + args.sft_weight * nll.sum()
            meter.mean(f"{prefix}loss/sft", nll.detach().sum(), len(nll))
        if len(parts) > 1 or args.sft_weight:
            for name, part in parts.items():
                meter.mean(f"{prefix}loss/{name}", part[own].detach().sum(), len(nll))
        if args.wpo:
            meter.mean(f"{prefix}wpo/weight", pairs.weights.sum(), len(nll))
        chosen, rejected = implicit_rewards(pairs, args)
        for name, values in (
            ("loss", loss), ("rewards/chosen", chosen), ("rewards/rejected", rejected),
            ("rewards/margins", chosen - rejected), ("rewards/accuracies", chosen > rejected),
            ("logps/chosen", pairs.chosen_logps), ("logps/rejected", pairs.rejected_logps),
        ):  # fmt: skip
            meter.mean(prefix + name, values.detach().sum(), len(nll))
        return loss

    def unpaired(self, mb: PackedBatch, logprobs_T: Tensor, collision_T: Tensor, meter: Meter, prefix: str) -> Tensor:
        args, logps = self.args, completion_logps(mb, logprobs_T)
        log_ratios = logps - reference_logps(mb, self.reference)
        label = mb.per_sequence(sample.row["label"] for sample in mb.samples).bool()
        loss_N = kto(log_ratios, label, self.baseline, args.beta, (args.desirable_weight, args.undesirable_weight))
        if args.wpo:
            lengths = mb.sequence_sums(torch.ones_like(logprobs_T))
            weights = wpo_weights(mb.sequence_sums(logprobs_T.detach() - collision_T) / lengths)
            loss_N = loss_N * weights
            meter.mean(f"{prefix}wpo/weight", weights.sum(), len(weights))
        rewards = args.beta * log_ratios.detach()
        meter.mean(f"{prefix}loss", loss_N.detach().sum(), len(loss_N))
        meter.mean(f"{prefix}kl", self.baseline * len(loss_N), len(loss_N))
        right = (rewards > args.beta * self.baseline) == label
        meter.mean(f"{prefix}rewards/accuracies", right.sum(), len(right))
        for name, side in (("chosen", label), ("rejected", ~label)):
            meter.mean(f"{prefix}rewards/{name}", rewards[side].sum(), side.sum())
            meter.mean(f"{prefix}logps/{name}", logps.detach()[side].sum(), side.sum())
        return loss_N.sum()


@torch.no_grad()
def evaluate(model: Policy, reference: Policy | None, groups: list[list[Sample]], args: Args, device) -> dict:
    """Held-out metrics over all ranks; `groups` is this rank's share."""
    meter = Meter()
    objective = Objective(model, reference, groups, args, device)
    for mb in objective.micro_batches:
        objective(mb, meter, "eval_")
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
    choices = (*KTO_COLUMNS, *PAIR_COLUMNS) if args.loss == ("kto",) else PAIR_COLUMNS
    columns = require_columns(f"--dataset {args.dataset}", train_rows, choices)
    groups, train_counts = encode_rows(train_rows, columns, encoder, args)
    eval_groups, eval_counts = encode_rows(eval_rows, columns, encoder, args)
    if not groups:
        raise ValueError(f"--dataset {args.dataset}: no rows are left: {reasons(train_counts)}")
    if eval_rows and not eval_groups:
        raise ValueError(f"no held-out rows are left: {reasons(eval_counts)}")
    if args.loss == ("kto",):
        require_both_labels(groups)
    order = RowOrder(len(groups), args.seed)
    total_steps = args.max_steps or math.ceil(args.epochs * len(groups) / args.batch_size)

    # ---- model: FSDP2 shards of float32 masters; the reference scores the data, then it is let go ----
    model, reference = load_policy(path, args, device), None
    if not set(args.loss) <= REFERENCE_FREE:
        reference_path = resolve_model(args.reference_model or args.model, "--reference_model")
        require_same_tokenizer("--reference_model", reference_path, tokenizer)
        if args.max_length > (context := context_length(reference_path, args)):
            raise ValueError(f"--max_length {args.max_length} is beyond the reference's context, {context} tokens")

        def load_reference() -> Policy:
            other = reference_path != path or args.reference_logprobs == "online"
            return load_policy(reference_path, args, device, False, "--reference_model") if other else model

        if args.reference_logprobs == "online":
            reference = load_reference()
        else:  # before the checkpoint is loaded: the policy still is the starting model
            store_reference_logps(groups + eval_groups, reference_path, load_reference, args, device)
    optimizer = adamw(model, args)

    # ---- resume: everything else is a function of (seed, step) ----
    totals = Totals()
    checkpointer = Checkpointer(args, model, optimizer, order=order, totals=totals)
    first_step = checkpointer.load_latest()
    meter, metrics = Meter(), {}
    logger = RunLogger(
        args, first_step, total_steps, show=("loss", "rewards/accuracies", "eval_rewards/accuracies", "time/step"),
        curves=("loss", "eval_loss", "rewards/accuracies", "eval_rewards/accuracies", "rewards/margins", "kl",
                "rewards/chosen", "rewards/rejected", "grad_norm"),
    )  # fmt: skip
    for name, counts in (("training", train_counts), ("held-out", eval_counts)):
        for reason, count in counts.items():
            logger.message(f"{count} {name} rows {reason}")
    logger.message(f"{len(groups)} training rows, {len(eval_groups)} held out, {total_steps} steps, {world_size} ranks")
    for sample in groups[0][: 1 if args.loss == ("kto",) else 2]:
        logger.preview(sample, tokenizer)

    for step in range(first_step, total_steps):
        # ---- 1. batch: the same global pairs whatever the number of ranks, every rank takes its share ----
        with meter.time("step"):
            batch = [groups[i] for i in order.draw(args.batch_size)[rank::world_size]]
            objective = Objective(model, reference, batch, args, device)

            # ---- 2. update: one optimizer step over the whole batch ----
            batch_loss = torch.zeros((), device=device)
            for mb in objective.micro_batches:
                # Mean over the pairs of the *global* batch. FSDP averages gradients over ranks; undo that.
                loss = objective(mb, meter) / args.batch_size
                (loss * world_size).backward()
                batch_loss += loss.detach()
            lr = learning_rate(step, total_steps, args)
            grad_norm = optimizer_step(model, optimizer, lr, args.max_grad_norm, batch_loss)

        # ---- 3. log, evaluate, checkpoint ----
        tokens = sum(sample.num_targets for mb in objective.micro_batches for sample in mb.samples)
        tokens = int(distributed.all_sum(tokens))
        totals.num_tokens += tokens
        metrics = meter.reduce()
        metrics |= dict(grad_norm=grad_norm, lr=lr, epoch=order.epochs_done, num_tokens=totals.num_tokens)
        metrics["tokens_per_second"] = tokens / metrics["time/step"]
        last = step + 1 == total_steps
        stopping = distributed.stop_requested()
        if eval_groups and ((step + 1) % args.eval_every == 0 or last):
            metrics |= evaluate(model, reference, eval_groups[rank::world_size], args, device)
        logger.log(step + 1, metrics)
        if (step + 1) % args.save_every == 0 or last or stopping:
            checkpointer.save(step + 1)
            logger.draw_curves()
        if stopping:
            logger.message(f"told to stop: saved step {step + 1}; the same command goes on from there")
            break
    else:
        checkpointer.export_hf(tokenizer)
        if (accuracy := metrics.get("eval_rewards/accuracies")) is not None:
            low, high = wilson_interval(accuracy, len(eval_groups))
            logger.message(f"held-out accuracy {accuracy:.3f} (95% interval {low:.3f} to {high:.3f})")
        logger.message(f"done: {args.output_dir}/hf")
    logger.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
