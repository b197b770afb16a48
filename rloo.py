"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

    torchrun --nproc_per_node 8 rloo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k

Several completions of each prompt are sampled; the whole completion is one action. Its reward is the score minus
beta times log(policy / reference) of the completion, its baseline the mean reward of the other completions of the
prompt, and -A log p(completion) makes the better ones more likely. No value model.

Differences from the paper: a rollout may be divided among several updates, with PPO's clipped ratio of whole
completions, and engine and trainer are reconciled by a truncated importance weight of whole completions. See
docs/rloo.md.

Shapes: P prompts on this rank, G samples per prompt; N completions and T packed tokens in one micro-batch. Every
per-token stream is aligned with *targets*: x_T[t] describes the prediction of targets_T[t].
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common import distributed
from common.advantages import leave_one_out
from common.checkpoint import Checkpointer, prepare_output_dir
from common.cli import parse
from common.data import Encoder
from common.hub import context_length, load_tokenizer, resolve_model
from common.losses import clip_policy_loss
from common.metrics import Meter, RunLogger, Totals
from common.models import load_policy
from common.online import (
    KLCoefficient,
    PolicyGradientArgs,
    correction_weights,
    effective_sample_size,
    evaluate,
    length_penalties,
    measure_groups,
    measure_sampling,
    shape_rewards,
)
from common.optim import adamw, learning_rate, optimizer_step
from common.packing import pack
from common.prompts import encode_prompts, prompt_columns
from common.rewards.scoring import Rewards
from common.rollout.measure import check_agreement
from common.rollout.remote import make_rollouts, serve
from common.rows import train_and_eval_rows


@dataclass
class Args(PolicyGradientArgs):
    output_dir: str = "runs/rloo"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    lr: float = 1e-6
    """peak learning rate of AdamW"""
    clip_low: float = 0.2
    """the ratio of a completion is clipped below at 1 - clip_low"""
    clip_high: float = 0.2
    """the ratio of a completion is clipped above at 1 + clip_high"""
    beta: float = 0.05
    """weight of log(policy / starting model) in the reward; 0 never loads the starting model"""
    correction: Literal["none", "sequence"] = "sequence"
    """weigh completions by their trainer / engine probability"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"--samples_per_prompt {self.samples_per_prompt}: the baseline is the others, it needs at least 2"
            )
        self.require_clip_bounds()


def measure_clipping(meter: Meter, args: Args, log_ratio_N: Tensor, advantages_N: Tensor) -> None:
    """Share of the completions whose ratio has left the bounds in the direction their advantage asks for."""
    too_low_N = (log_ratio_N < math.log(1 - args.clip_low)) & (advantages_N < 0)
    too_high_N = (log_ratio_N > math.log(1 + args.clip_high)) & (advantages_N > 0)
    meter.mean("clip_ratio/region_mean", (too_low_N | too_high_N).sum(), len(log_ratio_N))


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
    room = context_length(path, args) - args.max_new_tokens
    prompts, rows, dropped = encode_prompts(rows, columns, encoder, room, args)
    eval_prompts, eval_rows, eval_dropped = encode_prompts(eval_rows, columns, encoder, room, args)
    total_steps = args.max_steps or math.ceil(args.epochs * len(prompts) / args.prompts_per_step)

    # ---- models: FSDP2 shards train; vLLM samples, in the same process or on the rollout ranks ----
    model = load_policy(path, args, device)
    reference = load_policy(path, args, device, trainable=False) if args.beta else None
    optimizer = adamw(model, args)
    rollouts = make_rollouts(model, prompts, rows, args, tokenizer, device)

    # ---- resume: everything else is a function of (seed, step) ----
    totals, beta = Totals(), KLCoefficient(args)
    checkpointer = Checkpointer(args, model, optimizer, rollouts=rollouts, totals=totals, beta=beta)
    first_step = checkpointer.load_latest()
    meter = Meter()
    logger = RunLogger(
        args, first_step, total_steps, show=("reward", "kl", "eval/pass_at_1", "time/step"),
        curves=("reward", *(f"rewards/{name}/mean" for name in rewards.scorers), "eval/pass_at_1", "kl", "entropy",
                "completions/mean_length", "grad_norm", "sampling/sampling_logp_difference/max"),
    )  # fmt: skip
    updates = args.minibatches * args.epochs_per_rollout
    logger.message(
        f"{len(prompts)} prompts ({dropped} too long), {len(eval_prompts)} held out ({eval_dropped} too long), "
        f"{total_steps} steps on {world_size} ranks, {rollouts}, "
        + ("on-policy" if updates == 1 and not rollouts.ahead else f"off-policy, {updates} updates per rollout")
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

            # ---- 2. score, KL and advantage: a completion is one action with one reward ----
            with meter.time("reward"):
                scores_PG, parts = rewards(groups, meter)
            measure_groups(meter, groups, scores_PG, parts)
            # Groups [m * size, (m + 1) * size) of every rank are minibatch m: the same global prompts on any ranks.
            # pack() gives every rank the same number of micro-batches: FSDP collectives must match.
            size = len(groups) // args.minibatches
            minibatches = [
                pack([s for group in groups[m : m + size] for s in group], args.pack_tokens, device)
                for m in range(0, len(groups), size)
            ]
            kl_of = {}
            with meter.time("logprobs"), torch.no_grad():
                for mb in (mb for minibatch in minibatches for mb in minibatch):
                    if updates > 1 or reference is not None:  # else the update's own forward gives them
                        mb.old_logprobs_T, *_ = model(mb, temperature=args.temperature)
                    if reference is not None:
                        ref_logprobs_T, *_ = reference(mb, temperature=args.temperature)
                        kl_N = mb.sequence_sums(mb.old_logprobs_T - ref_logprobs_T)
                        kl_of |= zip(map(id, mb.samples), kl_N.tolist(), strict=True)
                        meter.mean("kl", kl_N.sum(), len(kl_N))
                model.reshard()  # a forward without backward leaves the root whole
            kl_PG = torch.tensor([[kl_of.get(id(s), 0.0) for s in group] for group in groups], dtype=torch.float64)
            rewards_PG = shape_rewards(scores_PG, args) + length_penalties(groups, args) - beta.value * kl_PG
            advantages_PG = leave_one_out(rewards_PG)
            for group, advantages_G in zip(groups, advantages_PG.tolist(), strict=True):
                for sample, advantage in zip(group, advantages_G, strict=True):
                    sample.advantage = advantage  # of the whole completion

            # ---- 3. update ----
            with meter.time("train"):
                for update in range(updates):
                    minibatch = minibatches[update % args.minibatches]
                    global_completions = distributed.all_sum(sum(len(mb.samples) for mb in minibatch))
                    minibatch_loss = torch.zeros((), device=device)
                    for mb in minibatch:
                        logprobs_T, entropy_T, *_ = model(mb, temperature=args.temperature)
                        if mb.old_logprobs_T is None:
                            mb.old_logprobs_T = logprobs_T.detach()
                        logps_N, old_logps_N = mb.sequence_sums(logprobs_T), mb.sequence_sums(mb.old_logprobs_T)
                        advantages_N = mb.per_sequence(sample.advantage for sample in mb.samples)
                        loss_N = clip_policy_loss(logps_N, old_logps_N, advantages_N, args.clip_low, args.clip_high)
                        weights_T = correction_weights(mb, args)  # the same on every token of a completion
                        loss_N = loss_N * weights_T[mb.ends_N]
                        # Mean over the completions of the *global* minibatch. FSDP averages over ranks; undo that.
                        loss = loss_N.sum() / global_completions
                        (loss * world_size).backward()
                        minibatch_loss += loss.detach()
                        meter.mean("loss", loss_N.detach().sum(), len(loss_N))
                        meter.masked_mean("entropy", entropy_T, mb.loss_mask_T)
                        measure_clipping(meter, args, (logps_N - old_logps_N).detach(), advantages_N)
                        if update < args.minibatches:
                            measure_sampling(meter, mb, weights_T)
                    if step == first_step and update == 0:
                        check_agreement([mb for minibatch in minibatches for mb in minibatch], args, device)
                    lr = learning_rate(step, total_steps, args)
                    grad_norm = optimizer_step(model, optimizer, lr, args.max_grad_norm, minibatch_loss)
                    meter.mean("grad_norm", grad_norm)

        # ---- 4. log, evaluate, checkpoint ----
        totals.num_tokens += int(distributed.all_sum(sum(s.num_targets for group in groups for s in group)))
        metrics = effective_sample_size(meter.reduce())
        metrics |= dict(lr=lr, epoch=rollouts.epochs_done, num_tokens=totals.num_tokens)
        if args.beta:
            metrics["beta"] = beta.value
            beta.update(metrics["kl"], args.prompts_per_step * args.samples_per_prompt)
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
