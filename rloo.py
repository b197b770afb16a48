"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

    torchrun --nproc_per_node 8 rloo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k

The policy samples G completions of every prompt. A whole completion y is one action, and its reward R is compared with
those of the other completions of the prompt:

    R_i   = score_i - beta log(pi_old(y_i) / pi_ref(y_i))                                    rewards_PG in main()
    A_i   = R_i - mean of the other R_j of the prompt                                        advantages()
    L     = mean_i [ -c_i min(rho_i A_i, clip(rho_i, 1 - clip_low, 1 + clip_high) A_i) ]     loss()
    rho_i = pi(y_i) / pi_old(y_i)                    pi_old: the policy at the time of the rollout

There is no value model. Differences from the paper (docs/rloo.md): the clip of PPO allows several updates per rollout,
and truncated importance weights c_i = pi_old(y_i) / pi_engine(y_i) correct for the difference between engine and
trainer.

Shapes: P prompts on this rank, G completions per prompt, N completions and T packed tokens of a micro-batch. Per-token
tensors are aligned with the *targets*: x_T[t] describes the prediction of targets_T[t].
"""

from itertools import chain
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import AtLeast2, BelowOne, NotNegative, Positive
from common.config.groups import TINY_ONLINE, OnlineArgs
from common.config.objectives import CorrectionArgs, LogKLArgs, RewardArgs
from common.config.parse import parse
from common.data.packing import pack_minibatches, per_sample
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.policy import load_policy, load_reference
from common.model.scoring import with_logprobs
from common.objectives.advantages import centre_groups
from common.objectives.importance import importance_weights
from common.objectives.policy import bounded_exp, is_clipped
from common.objectives.shaping import KLCoefficient, shape_rewards
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout import statistics
from common.rollout.prompts import load_prompts
from common.rollout.remote_sampler import make_sampler, serve
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, SHOW, describe_rollouts, num_steps
from common.train.plan import dry_run
from common.train.run import Run
from common.train.run_folder import prepare_output_dir

# ---- the objective ----


def advantages(rewards_PG: Tensor) -> Tensor:
    """Return the advantage of every completion, [P, G] float64: its reward minus the mean reward of the others of its
    group. A missing reward (NaN) counts in no mean and gets 0; a group of equal rewards gets exactly 0."""
    size_P1 = (~rewards_PG.isnan()).sum(-1, keepdim=True)
    return centre_groups(rewards_PG) * size_P1 / (size_P1 - 1).clamp(min=1)  # n / (n - 1) (R - mean of all n)


def loss(
    logprobs_N: Tensor, old_logprobs_N: Tensor, weights_N: Tensor, advantages_N: Tensor, completions: Tensor,
    args: "Args",
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each completion's share of the objective L, to be minimised, and further numbers of each to log.
    Log-probs are those of whole completions. `weights_N`: c_i; `completions`: their number in the *global* minibatch.
    """
    log_rho_N, A_N = logprobs_N - old_logprobs_N, advantages_N
    rho_N = bounded_exp(log_rho_N)
    loss_N = -torch.min(rho_N * A_N, rho_N.clamp(1 - args.clip_low, 1 + args.clip_high) * A_N) * weights_N
    clipped_N = is_clipped(log_rho_N.detach(), A_N, args.clip_low, args.clip_high)
    return loss_N / completions, {"loss": loss_N, "ratio": rho_N, "clip_ratio/region_mean": clipped_N}


@dataclass
class Args(LogKLArgs, RewardArgs, CorrectionArgs, OnlineArgs):
    TINY_DEFAULTS: ClassVar[dict] = TINY_ONLINE | dict(beta=0.01)
    samples_per_prompt: AtLeast2 = 8
    """completions sampled for each prompt (G); the baseline of each is the mean reward of the others"""
    lr: Positive[float] = 1e-6
    clip_low: BelowOne = 0.2
    """lower clip bound of a completion's importance ratio: 1 - clip_low"""
    clip_high: NotNegative[float] = 0.2
    """upper clip bound of a completion's importance ratio: 1 + clip_high"""
    beta: NotNegative[float] = 0.05
    correction: Literal["none", "sequence"] = "sequence"
    """importance weights of sampled completions. sequence: trainer / engine probability; none: no weights"""


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.rollout_ranks * (not args.dry_run), args.nccl_timeout)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    path = resolve_model(args.model, weights=not args.dry_run)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, context_length(path, args))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    dry_run(args, path, tokenizer, prompts, held_out, rewards, [path] if args.beta or args.log_kl else [])

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    reference = load_reference(policy, args, device) if args.beta or args.log_kl else None  # frozen
    optimizer = adamw(policy, args)
    rollouts = make_sampler(policy, prompts, args, tokenizer, rewards)  # vLLM, here or on rollout ranks

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps, beta = num_steps(args, prompts), KLCoefficient(args.beta, args.kl_target, args.kl_horizon)
    run = Run(args, policy, optimizer, tokenizer, total_steps, rollouts=rollouts, beta=beta, show=SHOW, curves=CURVES)
    run.message(*describe_rollouts(args, prompts, held_out, rollouts))
    meter, needs_old = run.meter, reference is not None or args.updates_per_rollout > 1
    if run.first_step == 0:
        run.log(0, statistics.evaluate(rollouts, 0, held_out, rewards))

    for step in run.steps():
        # ---- 1. rollout: G completions of each of this rank's P prompts ----
        groups = rollouts.rollout(step, total_steps, meter)
        if groups is None:  # a stop was requested
            break

        # ---- 2. score; pack; log-probs that stay fixed: of the policy before its updates, of the reference ----
        with meter.time("reward"):
            scores_PG, parts, _ = rewards(groups, meter)
        statistics.measure_groups(meter, groups, scores_PG, parts, first=step == 0)
        minibatches = pack_minibatches(groups, args.minibatches, args.pack_tokens, device)
        with meter.time("logprobs"):  # on policy the log-probs of the update itself can serve as old ones
            old = policy if needs_old or run.checks_engine(step) else None
            minibatches = with_logprobs(minibatches, args.temperature, old=old, ref=reference)
        if run.checks_engine(step):
            statistics.check_agreement(minibatches, step, args, device)

        # ---- 3. rewards and advantages: the KL of a completion is subtracted from its score ----
        kl_PG = torch.zeros_like(scores_PG)
        if reference is not None:
            kl = [mb.sequence_sums(mb.old_logprobs_T - mb.ref_logprobs_T) for mb in chain(*minibatches)]
            kl_PG = per_sample(chain(*minibatches), kl, scores_PG.shape)
            for kl_N in kl:
                meter.mean("kl", kl_N.sum(), len(kl_N))
        shaped_PG = shape_rewards(scores_PG, reward_scale=args.reward_scale, reward_clip=args.reward_clip)
        penalties_PG = statistics.truncation_penalties(groups, args.missing_eos_penalty)
        rewards_PG = shaped_PG + penalties_PG - beta.value * kl_PG
        advantages_PG = advantages(rewards_PG)

        # ---- 4. update: one optimizer step per minibatch ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for minibatch in minibatches * args.epochs_per_rollout:
                completions = distributed.all_sum(sum(len(mb.samples) for mb in minibatch))  # of the *global* minibatch
                minibatch_loss = torch.zeros((), device=device)
                for mb in minibatch:
                    logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
                    old_logprobs_T = logprobs_T.detach() if mb.old_logprobs_T is None else mb.old_logprobs_T
                    weights_T = importance_weights(
                        old_logprobs_T - mb.rollout_logprobs_T, mb.loss_mask_T, mb.sequence_ids_T,
                        level=args.correction, mode=args.correction_mode, low=args.correction_low,
                        high=args.correction_high, keep=args.correction_filter,
                    )  # fmt: skip
                    share_N, logged = loss(
                        mb.sequence_sums(logprobs_T), mb.sequence_sums(old_logprobs_T), weights_T[mb.ends_N],
                        mb.select(advantages_PG), completions, args,
                    )  # fmt: skip
                    (share_N.sum() * world_size).backward()  # FSDP averages gradients over ranks; undo that
                    minibatch_loss += share_N.detach().sum()
                    meter.rows(mb, logged, share_N)
                    meter.tokens(mb, {"entropy": entropy_T, "sampling/kept_fraction": weights_T > 0})
                    statistics.measure_mismatch(meter, old_logprobs_T, mb)
                meter.mean("grad_norm", optimizer_step(policy, optimizer, lr, args.max_grad_norm, minibatch_loss))

        # ---- 5. log and evaluate; beta follows the KL ----
        metrics = run.reduce(chain(*groups), lr=lr)
        if args.beta:
            metrics["beta"] = beta.value
            beta.update(metrics["kl"], args.prompts_per_step * args.samples_per_prompt)
        if run.evaluates(step + 1):
            metrics |= statistics.evaluate(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        run.show_samples(step + 1, groups, rollouts.positions, scores_PG, advantages_PG, parts)

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.leave()
