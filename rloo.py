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
from itertools import chain
from typing import ClassVar, Literal

import torch

from common.config.flags import AtLeast2, BelowOne, NotNegative, Positive, with_flags
from common.config.groups import OnlineArgs, SamplingArgs, TrainArgs
from common.config.parse import parse
from common.data.packing import of_samples, pack_minibatches, to_samples
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.logprobs import add_logprobs
from common.model.lora import LoRAArgs
from common.model.policy import load_policy, load_reference
from common.objectives.advantages import leave_one_out
from common.objectives.importance import CorrectionArgs, correction_weights
from common.objectives.policy import clip_policy_loss, clipped
from common.objectives.shaping import KLCoefficient, RewardArgs, shape_rewards, truncation_penalties
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout.prompts import load_prompts
from common.rollout.remote_sampler import make_rollouts, serve
from common.rollout.statistics import check_agreement, evaluate, measure_groups, measure_update, truncated
from common.train.checkpoint import prepare_output_dir
from common.train.optim import adamw, optimizer_step
from common.train.run import Run


@dataclass
class Args(RewardArgs, CorrectionArgs, OnlineArgs, SamplingArgs, LoRAArgs, TrainArgs):
    TINY_DEFAULTS: ClassVar[dict] = dict(beta=0.01)
    output_dir: str = "runs/rloo"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    samples_per_prompt: AtLeast2 = 8
    """completions sampled for each prompt (G); the baseline of each is the mean of the others"""
    lr: Positive[float] = 1e-6
    """peak learning rate of AdamW"""
    clip_low: BelowOne = 0.2
    """the ratio of a completion is clipped below at 1 - clip_low"""
    clip_high: NotNegative[float] = 0.2
    """the ratio of a completion is clipped above at 1 + clip_high"""
    beta: NotNegative[float] = 0.05
    """weight of the KL penalty to the starting model in the rewards; 0 never loads it"""
    correction: Literal["none", "sequence"] = "sequence"
    """weigh completions by their trainer / engine probability"""


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, _, world_size = distributed.setup(args.seed, args.rollout_ranks, args.nccl_timeout)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until the others are done
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and what the rewards need beside them ----
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, context_length(path, args))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    total_steps = args.max_steps or math.ceil(args.epochs * len(prompts) / args.prompts_per_step)

    # ---- models: FSDP2 shards train; vLLM samples, in the same process or on the rollout ranks ----
    model = load_policy(path, args, device)
    reference = load_reference(model, args, device) if args.beta else None
    optimizer = adamw(model, args)
    rollouts = make_rollouts(model, prompts, args, tokenizer, device, rewards)

    # ---- the objective, its floats bound to the flags of their names ----
    policy_loss, outside_clip = with_flags(clip_policy_loss, args), with_flags(clipped, args)
    correction = with_flags(correction_weights, args)
    shape, cut_off = with_flags(shape_rewards, args), with_flags(truncation_penalties, args)

    # ---- resume: everything else is a function of (seed, step) ----
    beta = KLCoefficient(args.beta, args.kl_target, args.kl_horizon)
    run = Run(
        args, model, optimizer, tokenizer, total_steps, rollouts=rollouts, beta=beta,
        show=("reward", "kl", "eval/pass_at_1", "time/step"),
        curves=("reward", *(f"rewards/{name}/mean" for name in rewards.scorers), "eval/pass_at_1", "kl", "entropy",
                "completions/mean_length", "grad_norm", "sampling/sampling_logp_difference/max"),
    )  # fmt: skip
    meter, updates = run.meter, args.minibatches * args.epochs_per_rollout
    first_pass = updates > 1 or reference is not None  # else the update's own forward will do
    how = "on-policy" if updates == 1 and not rollouts.ahead else f"off-policy, {updates} updates per rollout"
    run.message(f"{prompts}, {held_out} held out, {total_steps} steps on {world_size} ranks, {rollouts}, {how}")
    if held_out and run.first_step == 0:
        run.log(0, evaluate(rollouts, 0, held_out, rewards))

    for step in run.steps():
        # ---- 1. rollout, by the weights we are about to update or, with --rollout_ranks, somewhat older ones ----
        with meter.time("step"):
            rollouts.submit(step, total_steps)
            groups = rollouts.collect(step, meter)
            if groups is None:  # told to stop
                break

            # ---- 2. score; pack; log-probs of the policy that sampled and of the starting model ----
            with meter.time("reward"):
                scores_PG, parts = rewards(groups, meter)
            measure_groups(meter, groups, scores_PG, parts, first=step == 0)
            minibatches = pack_minibatches(groups, args.minibatches, args.pack_tokens, device)
            with meter.time("logprobs"):
                if first_pass or run.checks_engine(step):
                    add_logprobs("old", model, minibatches, args.temperature)
                if reference is not None:
                    add_logprobs("ref", reference, minibatches, args.temperature)
            if run.checks_engine(step):
                check_agreement(minibatches, step, args, device)

            # ---- 3. KL and advantage: a completion is one action with one reward ----
            if reference is not None:
                for mb in chain(*minibatches):
                    kl_N = mb.sequence_sums(mb.old_logprobs_T - mb.ref_logprobs_T)
                    mb.to_samples(kl=kl_N)
                    meter.mean("kl", kl_N.sum(), len(kl_N))
            rewards_PG = shape(scores_PG) + cut_off(truncated(groups)) - beta.value * of_samples(groups, "kl")
            to_samples(groups, advantage=leave_one_out(rewards_PG))

            # ---- 4. update: one optimizer step per minibatch ----
            with meter.time("train"):
                for minibatch in minibatches * args.epochs_per_rollout:
                    global_completions = distributed.all_sum(sum(len(mb.samples) for mb in minibatch))
                    minibatch_loss = torch.zeros((), device=device)
                    for mb in minibatch:
                        logprobs_T, entropy_T, *_ = model(mb, temperature=args.temperature)
                        if mb.old_logprobs_T is None:  # on-policy: the ratio is 1, its gradient is not 0
                            mb.old_logprobs_T = logprobs_T.detach()
                        engine_T = mb.old_logprobs_T - mb.rollout_logprobs_T
                        mb.correction_T = correction(engine_T, mb.loss_mask_T, mb.sequence_ids_T)
                        log_ratio_N = mb.sequence_sums(logprobs_T) - mb.sequence_sums(mb.old_logprobs_T)
                        advantages_N, weights_N = mb.of_samples("advantage"), mb.correction_T[mb.ends_N]
                        loss_N = policy_loss(log_ratio_N, advantages_N) * weights_N
                        # Mean over the completions of the *global* minibatch. FSDP averages over ranks; undo that.
                        loss = loss_N.sum() / global_completions
                        (loss * world_size).backward()
                        minibatch_loss += loss.detach()
                        clipped_N = outside_clip(log_ratio_N.detach(), advantages_N)
                        meter.mean("loss", loss_N.detach().sum(), len(loss_N))
                        meter.mean("clip_ratio/region_mean", clipped_N.sum(), len(clipped_N))
                        measure_update(meter, mb, entropy_T)
                    lr = run.learning_rate(step)
                    meter.mean("grad_norm", optimizer_step(model, optimizer, lr, args.max_grad_norm, minibatch_loss))

        # ---- 5. log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr)
        if args.beta:
            metrics["beta"] = beta.value
            beta.update(metrics["kl"], args.prompts_per_step * args.samples_per_prompt)
        if held_out and run.evaluates(step + 1):
            metrics |= evaluate(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        run.show_samples(step + 1, groups, rollouts.positions)

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
