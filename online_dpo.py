"""Online DPO against a reward (Guo et al. 2024, arXiv:2402.04792; asynchronously: Noukhovitch et al. 2024,
arXiv:2410.18252).

    torchrun --nproc_per_node 8 online_dpo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k

Several completions of each prompt are sampled and rewarded; the best and the worst of them are a pair, and an objective
of dpo.py makes the policy prefer the one to the other by more than the starting model does. No value model, no
importance ratio: a pair that somewhat older weights sampled is still a pair, so of the online scripts this one minds
`--max_staleness` least.

Differences from the papers: more than two completions may be sampled, and every objective of dpo.py that looks at one
pair at a time can be had. See docs/online_dpo.md.

Shapes: P prompts on this rank, G samples per prompt; N completions and T packed tokens in one micro-batch, whose
completions 2i and 2i + 1 are chosen and rejected of pair i. Every per-token stream is aligned with *targets*: x_T[t]
describes the prediction of targets_T[t].
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common import distributed
from common.checkpoint import Checkpointer, prepare_output_dir
from common.cli import parse
from common.config import OnlineArgs
from common.data import Encoder
from common.hub import context_length, load_tokenizer, resolve_model
from common.metrics import Meter, RunLogger, Totals
from common.models import load_policy
from common.online import (
    check_first_rollout,
    effective_sample_size,
    evaluate,
    measure_groups,
    measure_sampling,
    truncation_penalties,
)
from common.optim import adamw, learning_rate, optimizer_step
from common.packing import PackedBatch, Sample, pack_groups
from common.preference_losses import (
    OVER_BATCH,
    REFERENCE_FREE,
    Pairs,
    PreferenceArgs,
    implicit_rewards,
    preference_losses,
)
from common.prompts import encode_prompts, prompt_columns
from common.rewards.scoring import Rewards
from common.rollout.remote import make_rollouts, serve
from common.rows import train_and_eval_rows


@dataclass
class Args(OnlineArgs, PreferenceArgs):
    output_dir: str = "runs/online_dpo"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    samples_per_prompt: int = 2
    """completions sampled for each prompt (G); the best and the worst are the pair"""
    lr: float = 1e-6
    """peak learning rate of AdamW"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_prompt < 2:
            raise ValueError(f"--samples_per_prompt {self.samples_per_prompt}: a pair needs at least 2")
        for name in self.loss:
            if name == "kto" or name in OVER_BATCH:
                what = "single completions" if name == "kto" else "all pairs of a batch at once"
                raise ValueError(f"--loss {name} looks at {what}: it is for dpo.py")


def best_and_worst(groups: list[list[Sample]], rewards_PG: Tensor) -> list[list[Sample]]:
    """[chosen, rejected] of each group: highest and lowest reward, of equal ones the first. [] for a group whose
    rewards, those that could be computed (not NaN), are all equal."""
    pairs = []
    for group, rewards_G in zip(groups, rewards_PG, strict=True):
        best, worst = rewards_G.nan_to_num(nan=-math.inf).argmax(), rewards_G.nan_to_num(nan=math.inf).argmin()
        pairs.append([group[best], group[worst]] if rewards_G[best] > rewards_G[worst] else [])
    return pairs


def measure_pairs(meter: Meter, rewards_PG: Tensor) -> None:
    """How far apart best and worst are, in rewards, and how often no choice could be made, or only among equals."""
    best_P = rewards_PG.nan_to_num(nan=-math.inf).amax(-1)
    worst_P = rewards_PG.nan_to_num(nan=math.inf).amin(-1)
    unequal_P = best_P > worst_P
    tied_P = ((rewards_PG == best_P[:, None]).sum(-1) > 1) | ((rewards_PG == worst_P[:, None]).sum(-1) > 1)
    meter.mean("pairs/win_margin", (best_P - worst_P)[unequal_P].sum(), unequal_P.sum())
    meter.mean("pairs/skipped_fraction", (~unequal_P).sum(), len(unequal_P))
    meter.mean("pairs/tied_fraction", (tied_P & unequal_P).sum(), len(unequal_P))


def pairs_of(mb: PackedBatch, logprobs_T: Tensor) -> Pairs:
    """What the objectives see: log-probs summed over completions, those of the starting model, and lengths."""
    logps_N, ref_logps_N = mb.sequence_sums(logprobs_T), mb.sequence_sums(mb.ref_logprobs_T)
    lengths_N = mb.sequence_sums(torch.ones_like(logprobs_T))
    sides = [x_N[side::2] for x_N in (logps_N, ref_logps_N, lengths_N) for side in (0, 1)]
    return Pairs(*sides, weights=torch.ones_like(sides[0]))


def measure_update(meter: Meter, args: Args, pairs: Pairs, has_reference: bool) -> None:
    """What the policy thinks of the pairs of a micro-batch."""
    chosen_N, rejected_N = implicit_rewards(pairs, args)
    for name, values_N in (
        ("rewards/chosen", chosen_N), ("rewards/rejected", rejected_N), ("rewards/margins", chosen_N - rejected_N),
        ("rewards/accuracies", chosen_N > rejected_N), ("logps/chosen", pairs.chosen_logps),
        ("logps/rejected", pairs.rejected_logps),
    ):  # fmt: skip
        meter.mean(name, values_N.detach().sum(), len(values_N))
    if has_reference:
        meter.mean("kl", (pairs.lc + pairs.lr).detach().sum(), 2 * len(chosen_N))


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, _, world_size = distributed.setup(args.seed, args.rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until the others are done
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and what the rewards need beside them ----
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path)
    encoder = Encoder(tokenizer, args)
    rows, eval_rows = train_and_eval_rows(args)
    columns = prompt_columns(args, rows + eval_rows)
    rewards = Rewards(args, rows + eval_rows, tokenizer, device)
    room = min(context_length(path, args), args.pack_tokens // 2 + 1) - args.max_new_tokens  # a pair shares a pack
    prompts, rows, dropped = encode_prompts(rows, columns, encoder, room, args)
    eval_prompts, eval_rows, eval_dropped = encode_prompts(eval_rows, columns, encoder, room, args)
    total_steps = args.max_steps or math.ceil(args.epochs * len(prompts) / args.prompts_per_step)

    # ---- models: FSDP2 shards train; vLLM samples, in the same process or on the rollout ranks ----
    model = load_policy(path, args, device)
    needs_reference = not set(args.loss) <= REFERENCE_FREE
    reference = load_policy(path, args, device, trainable=False) if needs_reference else None
    optimizer = adamw(model, args)
    rollouts = make_rollouts(model, prompts, rows, args, tokenizer, device)

    # ---- resume: everything else is a function of (seed, step) ----
    totals = Totals()
    checkpointer = Checkpointer(args, model, optimizer, rollouts=rollouts, totals=totals)
    first_step = checkpointer.load_latest()
    meter = Meter()
    logger = RunLogger(
        args, first_step, total_steps, show=("reward", "rewards/accuracies", "eval/pass_at_1", "time/step"),
        curves=("reward", *(f"rewards/{name}/mean" for name in rewards.scorers), "eval/pass_at_1", "eval/reward", "kl",
                "pairs/win_margin", "rewards/accuracies", "entropy", "completions/mean_length", "grad_norm"),
    )  # fmt: skip
    updates = args.minibatches * args.epochs_per_rollout
    logger.message(
        f"{len(prompts)} prompts ({dropped} too long), {len(eval_prompts)} held out ({eval_dropped} too long), "
        f"{total_steps} steps on {world_size} ranks, {rollouts}, {updates} updates per rollout"
    )
    if eval_prompts and first_step == 0:
        logger.log(0, evaluate(rollouts, 0, eval_prompts, eval_rows, rewards))

    stopping = False
    for step in range(first_step, total_steps):
        # ---- 1. rollout, by the weights we are about to update or, with --rollout_ranks, somewhat older ones ----
        with meter.time("step"):
            rollouts.submit(step, total_steps)
            groups = rollouts.collect(step, meter)
            if groups is None:  # told to stop
                stopping = True
                break

            # ---- 2. score and choose; log-probs of the starting model ----
            with meter.time("reward"):
                scores_PG, parts = rewards(groups, meter)
            measure_groups(meter, groups, scores_PG, parts)
            rewards_PG = scores_PG + truncation_penalties(groups, args)
            measure_pairs(meter, rewards_PG)
            if step == first_step:
                check_first_rollout(model, groups, args, device)
            chosen_and_rejected = best_and_worst(groups, rewards_PG)
            # Groups [m * size, (m + 1) * size) of every rank are minibatch m: the same global prompts on any ranks.
            # pack_groups() gives every rank the same number of micro-batches: FSDP collectives must match.
            size = len(groups) // args.minibatches
            minibatches = [
                pack_groups([pair for pair in chosen_and_rejected[m : m + size] if pair], args.pack_tokens, device)
                for m in range(0, len(groups), size)
            ]
            for group, pair in zip(groups, chosen_and_rejected, strict=True):
                for sample in group:  # for samples.jsonl: 1 chosen, -1 rejected, 0 neither
                    sample.advantage = float(any(sample is s for s in pair[:1]) - any(sample is s for s in pair[1:]))
            micro_batches = [mb for minibatch in minibatches for mb in minibatch]
            with meter.time("logprobs"), torch.no_grad():
                for mb in micro_batches:
                    mb.ref_logprobs_T = torch.zeros_like(mb.targets_T, dtype=torch.float32)
                    if reference is not None:
                        mb.ref_logprobs_T, *_ = reference(mb, temperature=args.temperature)

            # ---- 3. update ----
            with meter.time("train"):
                for update in range(updates):
                    minibatch = minibatches[update % args.minibatches]
                    global_pairs = int(distributed.all_sum(sum(len(mb.samples) // 2 for mb in minibatch)))
                    minibatch_loss = torch.zeros((), device=device)
                    for mb in minibatch:
                        logprobs_T, entropy_T, *_ = model(mb, temperature=args.temperature)
                        pairs = pairs_of(mb, logprobs_T)
                        loss_N, _ = preference_losses(pairs, args)
                        if args.sft_weight:
                            nll_N = -pairs.mean_pc if args.sft_length_normalize else -pairs.chosen_logps
                            loss_N = loss_N + args.sft_weight * nll_N
                        # Mean over the pairs of the *global* minibatch. FSDP averages over ranks; undo that.
                        loss = loss_N.sum() / max(1, global_pairs)
                        (loss * world_size).backward()
                        minibatch_loss += loss.detach()
                        meter.mean("loss", loss_N.detach().sum(), len(loss_N))
                        meter.masked_mean("entropy", entropy_T, mb.loss_mask_T)
                        measure_update(meter, args, pairs, reference is not None)
                        if update < args.minibatches:
                            mb.old_logprobs_T = logprobs_T.detach()
                            measure_sampling(meter, mb, torch.ones_like(mb.old_logprobs_T))
                    lr = learning_rate(step, total_steps, args)
                    if not global_pairs:  # every group is all equal: nothing to learn, and no step by momentum alone
                        optimizer.zero_grad()
                        continue
                    grad_norm = optimizer_step(model, optimizer, lr, args.max_grad_norm, minibatch_loss)
                    meter.mean("grad_norm", grad_norm)

        # ---- 4. log, evaluate, checkpoint ----
        totals.num_tokens += int(distributed.all_sum(sum(s.num_targets for group in groups for s in group)))
        metrics = effective_sample_size(meter.reduce())
        metrics |= dict(lr=lr, epoch=rollouts.epochs_done, num_tokens=totals.num_tokens)
        last = step + 1 == total_steps
        if eval_prompts and ((step + 1) % args.eval_every == 0 or last):
            metrics |= evaluate(rollouts, step + 1, eval_prompts, eval_rows, rewards)
        logger.log(step + 1, metrics)
        if (step + 1) % args.log_every == 0 or last:
            logger.samples(step + 1, groups, scores_PG, rollouts.positions)
        stopping = distributed.stop_requested()
        if stopping:
            step += 1
            break
        if (step + 1) % args.save_every == 0 or last:
            with meter.time("save"):  # counted in the next step's line
                checkpointer.save(step + 1)
            logger.draw_curves()

    if stopping:
        if step > 0:
            checkpointer.save(step)
        logger.message(f"told to stop after step {step}; the same command goes on from there")
    else:
        checkpointer.export_hf(tokenizer)
        logger.message(f"done: {args.output_dir}/hf")
    logger.close()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
