"""PPO for language models (Schulman et al. 2017, arXiv:1707.06347; for RLHF: Ziegler et al. 2019, arXiv:1909.08593).

    torchrun --nproc_per_node 8 ppo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k

Each token y_t of a sampled completion is an action. A second model predicts its value V_t, the sum of future rewards:

    r_t   = -beta log(pi_old(y_t) / pi_ref(y_t)), plus the score of the completion at its last token     token_rewards()
    A_t   = sum_j (gamma lambda)^j (r_{t+j} + gamma V_{t+j+1} - V_{t+j})  R_t = A_t + V_t                   advantages()
    L     = mean_t [ -c_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) ]                          loss()
    L_V   = mean_t [ max((v_t - R_t)^2, (clip(v_t, V_t - value_clip, V_t + value_clip) - R_t)^2) / 2 ]      value_loss()
    rho_t = pi(y_t) / pi_old(y_t)                         pi_old, V: the models at the time of the rollout

Differences from the papers (docs/ppo.md): value and policy are separate models with an optimizer each, advantages are
whitened over the rollout and not over a minibatch, and truncated importance weights c_t = pi_old(y_t) / pi_engine(y_t).

Shapes: P prompts on this rank, G completions per prompt, N completions and T packed tokens of a micro-batch. Per-token
tensors are aligned with the *targets*: x_T[t] describes the prediction of targets_T[t]; values_T[t] is the value of the
prefix before it.
"""

import math
from collections.abc import Callable
from itertools import chain

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import BelowOne, Fraction, NotNegative, Positive, require_default
from common.config.groups import TINY_ONLINE, OnlineArgs
from common.config.objectives import CorrectionArgs, LogKLArgs, RewardArgs
from common.config.parse import parse
from common.data.packing import PackedBatch, pack_minibatches, per_sample
from common.metrics.meter import Meter
from common.model.hub import context_length, load_tokenizer, require_same_tokenizer, resolve_model
from common.model.policy import load_reference
from common.model.scoring import with_logprobs, with_values
from common.model.value import load_with_value_model
from common.objectives.advantages import gae
from common.objectives.importance import importance_weights
from common.objectives.policy import KLEstimator, bounded_exp, is_clipped, kl_estimate
from common.objectives.shaping import KLCoefficient, shape_rewards
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout import statistics
from common.rollout.prompts import load_prompts
from common.rollout.remote_sampler import make_sampler, serve
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, describe_rollouts, num_steps
from common.train.plan import dry_run
from common.train.run import Run
from common.train.run_folder import prepare_output_dir

SHOW = ("reward", "objective/kl", "eval/solved", "time/step")

# ---- the objective ----


def token_rewards(mb: PackedBatch, scores_PG: Tensor, turn_weight: float, beta: float, args: "Args") -> Tensor:
    """Return the reward of each token, [T] float32: the score of its completion on the last token, -beta KL on each.
    Rewards of an environment for earlier turns, times `turn_weight`, move from the last token to that of their turn."""
    rewards = [0.0] * len(mb.loss_mask_T)
    completions = zip(mb.samples, mb.select(scores_PG).tolist(), mb.offsets, mb.offsets[1:], strict=False)
    for sample, score, start, end in completions:  # padding has offsets, but no sample
        rewards[end - 1] = score
        for index, reward in sample.turn_rewards[: sample.turns - 1]:
            rewards[start + index - 1] = turn_weight * reward  # targets begin with the second id
            rewards[end - 1] -= turn_weight * reward
    rewards_T = torch.tensor(rewards).to(mb.loss_mask_T.device)
    if mb.ref_logprobs_T is not None:
        rewards_T -= beta * kl_estimate(mb.old_logprobs_T, mb.ref_logprobs_T, args.kl_estimator, args.kl_clamp)
    return rewards_T


def advantages(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, lengths_N: Tensor, args: "Args"
) -> tuple[Tensor, Tensor]:
    """Return advantages for the policy and returns for the value model, [T] float32 each. The returns may have a lambda
    of their own (VC-PPO, arXiv:2503.01491), the advantages one that grows with the length of the completion (VAPO)."""
    lambda_N = torch.full_like(lengths_N, args.gae_lambda)
    value_lambda_N = lambda_N if args.value_lambda is None else torch.full_like(lengths_N, args.value_lambda)
    if args.lambda_alpha:
        lambda_N = (1 - 1 / (args.lambda_alpha * lengths_N)).clamp(min=0)  # arXiv:2504.05118
    A_T, value_A_T = (
        gae(rewards_T, values_T, mask_T, sequence_ids_T, args.gamma, each_N) for each_N in (lambda_N, value_lambda_N)
    )
    return A_T.float(), (value_A_T + values_T).float()


def loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, entropy_T: Tensor, A_T: Tensor, importance_T: Tensor, mask_T: Tensor,
    tokens: Tensor, positives: Tensor, args: "Args",
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each token's share of the policy loss and per-token tensors to log. The loss is a mean over the `tokens`
    of the *global* minibatch; that of `--positive_nll` over its `positives`, the tokens with A > 0."""
    log_rho_T = logprobs_T - old_logprobs_T
    rho_T = bounded_exp(log_rho_T)
    loss_T = -torch.min(rho_T * A_T, rho_T.clamp(1 - args.clip_low, 1 + args.clip_high) * A_T) * importance_T
    if args.entropy_coef:  # not times 0: the backward pass of the entropy reads all logits again
        loss_T = loss_T - args.entropy_coef * entropy_T
    share_T = loss_T * mask_T / tokens
    share_T = share_T - args.positive_nll * logprobs_T * (mask_T & (A_T > 0)) / positives.clamp(min=1)
    moved_T = kl_estimate(old_logprobs_T, logprobs_T.detach())  # from the policy of the rollout
    clipped_T = is_clipped(log_rho_T.detach(), A_T, args.clip_low, args.clip_high)
    return share_T, {"ratio": rho_T.detach(), "policy/approx_kl": moved_T, "clip_ratio/region_mean": clipped_T}


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, value_clip: float) -> Tensor:
    """Return the loss of each value, [T]: half the squared error, without gradient for values that have moved
    by more than `value_clip` towards their returns; 0: no clip."""
    loss_T = (values_T - returns_T).square()
    if value_clip:
        clipped_T = torch.clamp(values_T, old_values_T - value_clip, old_values_T + value_clip)
        loss_T = torch.max(loss_T, (clipped_T - returns_T).square())
    return loss_T / 2


@dataclass
class Args(LogKLArgs, RewardArgs, CorrectionArgs, OnlineArgs):
    TINY_DEFAULTS = TINY_ONLINE | dict(value_lr=1e-3, prompts_per_step=256, samples_per_prompt=1, max_steps=30)
    value_model: str | None = None
    """Hugging Face id or folder that the value model starts from: a reward model with its head, or a language model,
    which gets a new head; default: `model`"""
    lr: Positive[float] = 1e-6
    """peak learning rate of AdamW for the policy"""
    value_lr: Positive[float] = 1e-5
    """peak learning rate of AdamW for the value model; warmup and schedule are those of the policy"""
    value_warmup_steps: NotNegative[int] = 0
    """number of first steps in which only the value model is trained"""
    prompts_per_step: Positive[int] = 512
    samples_per_prompt: Positive[int] = 1
    minibatches: Positive[int] = 4
    gamma: Fraction = 1.0
    """discount per token"""
    gae_lambda: Fraction = 0.95
    """lambda of the advantages, from 0 (one-step estimates by the value model) to 1 (sampled returns alone)"""
    value_lambda: Fraction | None = None
    """lambda of the returns that the value model is trained on; default: gae_lambda; 1: unbiased returns (VC-PPO)"""
    lambda_alpha: NotNegative[float] = 0.0
    """length-adaptive lambda of the advantages, 1 - 1 / (lambda_alpha x length of completion) (VAPO: 0.05); 0: off"""
    whiten_advantages: bool = True
    """whiten advantages to mean 0 and standard deviation 1 over the tokens of a rollout"""
    clip_low: BelowOne = 0.2
    """lower clip bound of the importance ratio: 1 - clip_low"""
    clip_high: NotNegative[float] = 0.2
    """upper clip bound of the importance ratio: 1 + clip_high"""
    value_clip: NotNegative[float] = 0.2
    """maximum change of a value from that at rollout time; 0: off"""
    beta: NotNegative[float] = 0.05
    kl_estimator: KLEstimator = "k1"
    """estimator of the KL per token, with d = log(policy / reference). k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d"""
    kl_clamp: NotNegative[float] = 0.0
    """bound of the KL estimate of each token, which is clamped to [-kl_clamp, kl_clamp]; 0: off"""
    kl_stop: NotNegative[float] = 0.0
    """maximum KL of the policy to the one that sampled a rollout, in nats per token of the next minibatch; beyond it
    the rest of the rollout is skipped; 0: off"""
    entropy_coef: NotNegative[float] = 0.0
    """weight of the entropy bonus"""
    positive_nll: NotNegative[float] = 0.0
    """weight of the mean negative log-likelihood of tokens with a positive advantage (VAPO, arXiv:2504.05118)"""

    def __post_init__(self) -> None:
        if self.lambda_alpha and self.value_lambda is not None:
            require_default(self, ("gae_lambda",), "with --lambda_alpha and --value_lambda")
        if self.updates_per_rollout == 1:
            require_default(self, ("kl_stop",), "with one update per rollout")
        if self.max_steps is not None and self.value_warmup_steps >= self.max_steps:
            raise ValueError(f"--value_warmup_steps {self.value_warmup_steps} must be below --max_steps")
        if not (self.beta or self.log_kl):
            require_default(self, ("kl_estimator", "kl_clamp"), "with --beta 0")


def estimate(
    mb: PackedBatch, scores_PG: Tensor, turn_weight: float, beta: float, args: Args, meter: Meter
) -> PackedBatch:
    """Return the micro-batch with advantages, returns and importance weights; measure its rewards and KL."""
    rewards_T = token_rewards(mb, scores_PG, turn_weight, beta, args)
    meter.mean("objective/rlhf_reward", mb.sequence_sums(rewards_T).sum(), len(mb.samples))
    if mb.ref_logprobs_T is not None:
        log_ratio_N = mb.sequence_sums(mb.old_logprobs_T - mb.ref_logprobs_T)
        meter.mean("objective/kl", log_ratio_N.sum(), len(log_ratio_N))
    where = mb.loss_mask_T, mb.sequence_ids_T
    advantages_T, returns_T = advantages(rewards_T, mb.values_T, *where, mb.sequence_sums(mb.loss_mask_T), args)
    importance_T = importance_weights(
        mb.old_logprobs_T - mb.rollout_logprobs_T, *where, level=args.correction, mode=args.correction_mode,
        low=args.correction_low, high=args.correction_high, keep=args.correction_filter,
    )  # fmt: skip
    statistics.measure_mismatch(meter, mb.old_logprobs_T, mb)
    meter.masked_mean("sampling/kept_fraction", importance_T > 0, mb.loss_mask_T)
    return mb.with_streams(advantages_T=advantages_T, returns_T=returns_T, importance_T=importance_T)


def moments(minibatches: list[list[PackedBatch]], stream_of: Callable[[PackedBatch], Tensor]) -> tuple[float, float]:
    """Return mean and standard deviation (n - 1) of a stream over the trained tokens of all ranks. Collective."""
    xs = [stream_of(mb)[mb.loss_mask_T].double() for mb in chain(*minibatches)]
    count = max(1, int(distributed.all_sum(sum(x.numel() for x in xs))))
    mean = float(distributed.all_sum(sum(x.sum() for x in xs))) / count
    squares = float(distributed.all_sum(sum((x - mean).square().sum() for x in xs)))
    return mean, math.sqrt(squares / max(1, count - 1))


def explained_variance(minibatches: list[list[PackedBatch]]) -> float:
    """Return 1 - Var(R - V) / Var(R) over the trained tokens of all ranks, or 0 for equal returns. Collective."""
    _, error = moments(minibatches, lambda mb: mb.returns_T - mb.values_T)
    _, spread = moments(minibatches, lambda mb: mb.returns_T)
    return 1 - (error / spread) ** 2 if spread else 0.0


def whiten(rollout: list[list[PackedBatch]]) -> list[list[PackedBatch]]:
    """Return the micro-batches with advantages of mean 0 and standard deviation 1 over the rollout. Collective."""
    mean, std = moments(rollout, lambda mb: mb.advantages_T)
    return [[mb.with_streams(advantages_T=(mb.advantages_T - mean) / (std + 1e-6)) for mb in mbs] for mbs in rollout]


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.rollout_ranks * (not args.dry_run), args.nccl_timeout)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    path, weights = resolve_model(args.model, weights=not args.dry_run), not args.dry_run
    value_path = path if args.value_model is None else resolve_model(args.value_model, "--value_model", weights)
    tokenizer = load_tokenizer(path, args)
    require_same_tokenizer("--value_model", value_path, tokenizer)
    prompts, held_out = load_prompts(args, tokenizer, min(context_length(path, args), context_length(value_path, args)))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    dry_run(args, path, tokenizer, prompts, held_out, rewards, [path] if args.beta or args.log_kl else [], value_path)
    turn_weight = args.reward_scale * rewards.weight_of("environment")

    # ---- models: FSDP2 shards ----
    policy, value_model = load_with_value_model(path, value_path, args, device)  # trained
    reference = load_reference(policy, args, device) if args.beta or args.log_kl else None  # frozen
    optimizer, value_optimizer = adamw(policy, args), adamw(value_model, args)
    rollouts = make_sampler(policy, prompts, args, tokenizer, rewards)  # vLLM, here or on rollout ranks

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps, beta = num_steps(args, prompts), KLCoefficient(args.beta, args.kl_target, args.kl_horizon)
    run = Run(args, policy, optimizer, tokenizer, total_steps, value=(value_model, value_optimizer), rollouts=rollouts,
              beta=beta, show=SHOW, curves=(*CURVES, "objective/kl", "value_loss", "explained_variance"))  # fmt: skip
    run.message(*describe_rollouts(args, prompts, held_out, rollouts))
    meter = run.meter
    if run.first_step == 0:
        run.log(0, statistics.evaluate(rollouts, 0, held_out, rewards))

    for step in run.steps():
        # ---- 1. rollout: G completions of each of this rank's P prompts ----
        groups = rollouts.rollout(step, total_steps, meter)
        if groups is None:  # a stop was requested
            break

        # ---- 2. scores; pack; log-probs and values that stay fixed ----
        with meter.time("reward"):
            rewards_PG, parts, _ = rewards(groups, meter)
        statistics.measure_groups(meter, groups, rewards_PG, parts, first=step == 0)
        shaped_PG = shape_rewards(rewards_PG, reward_scale=args.reward_scale, reward_clip=args.reward_clip)
        scores_PG = shaped_PG + statistics.truncation_penalties(groups, args.missing_eos_penalty)
        minibatches = pack_minibatches(groups, args.minibatches, args.pack_tokens, device)
        minibatches = [[mb.with_streams(loss_mask_T=mb.loss_mask_T & ~mb.on_tokens(scores_PG).isnan()) for mb in mbs]
                       for mbs in minibatches]  # fmt: skip
        with meter.time("logprobs"):
            minibatches = with_logprobs(minibatches, args.temperature, old=policy, ref=reference)
            minibatches = with_values(minibatches, value_model)
        if run.checks_engine(step):
            statistics.check_agreement(minibatches, step, args, device)

        # ---- 3. rewards of tokens; advantages and returns ----
        fixed = scores_PG, turn_weight, beta.value, args, meter
        minibatches = [[estimate(mb, *fixed) for mb in minibatch] for minibatch in minibatches]
        if args.whiten_advantages:
            minibatches = whiten(minibatches)

        # ---- 4. update: policy and value model, with an optimizer each ----
        with meter.time("train"):
            learn_policy, updates, lr = step >= args.value_warmup_steps, 0, run.learning_rate(step)
            if step == args.value_warmup_steps:  # a save in warm-up made the optimizer's state by a step of zeros
                for state in optimizer.state.values():
                    state["step"].zero_()
            for minibatch in minibatches * args.epochs_per_rollout:
                tokens, _ = statistics.count_trained(minibatch)  # of the *global* minibatch
                positives = distributed.all_sum(sum((mb.loss_mask_T & (mb.advantages_T > 0)).sum() for mb in minibatch))
                policy_sum, value_sum, moved = (torch.zeros((), device=device) for _ in range(3))
                for mb in minibatch:
                    if learn_policy:
                        logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
                        share_T, logged = loss(logprobs_T, mb.old_logprobs_T, entropy_T, mb.advantages_T,
                                               mb.importance_T, mb.loss_mask_T, tokens, positives, args)  # fmt: skip
                        (share_T.sum() * world_size).backward()  # FSDP averages gradients over ranks; undo that
                        policy_sum += share_T.detach().sum()
                        moved += (logged["policy/approx_kl"] * mb.loss_mask_T).sum()
                        meter.tokens(mb, {"entropy": entropy_T} | logged, share_T)
                    value_loss_T = value_loss(value_model(mb), mb.values_T, mb.returns_T, args.value_clip)
                    mb_loss = (value_loss_T * mb.loss_mask_T).sum() / tokens
                    (mb_loss * world_size).backward()
                    value_sum += mb_loss.detach()
                if args.kl_stop and distributed.all_sum(moved) / tokens > args.kl_stop:
                    optimizer.zero_grad()
                    value_optimizer.zero_grad()
                    break
                updates += 1
                if learn_policy:
                    meter.mean("grad_norm", optimizer_step(policy, optimizer, lr, args.max_grad_norm, policy_sum))
                    meter.mean("loss", policy_sum, 1 / world_size)  # the loss is the sum over ranks
                value_lr = lr * args.value_lr / args.lr
                grad_norm = optimizer_step(value_model, value_optimizer, value_lr, args.max_grad_norm, value_sum)
                meter.mean("value_grad_norm", grad_norm)
                meter.mean("value_loss", value_sum, 1 / world_size)

        # ---- 5. log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr, updates=updates, explained_variance=explained_variance(minibatches))
        if args.beta:
            metrics["beta"] = beta.value
            if learn_policy:
                beta.update(metrics["objective/kl"], args.prompts_per_step * args.samples_per_prompt)
        if run.evaluates(step + 1):
            metrics |= statistics.evaluate(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        last = [mb.advantages_T[mb.ends_N] for mb in chain(*minibatches)]  # advantages of the last tokens
        advantages_PG = per_sample(chain(*minibatches), last, rewards_PG.shape)
        run.show_samples(step + 1, groups, rollouts.positions, rewards_PG, advantages_PG, parts)

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.leave()
