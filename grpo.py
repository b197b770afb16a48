r"""GRPO: reinforcement learning with verifiable rewards (Shao et al. 2024, arXiv:2402.03300).

    torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k \
        --reward gsm8k --preset dr_grpo

The policy samples G completions of every prompt. Each is compared with the others of its group:

    A_i   = (r_i - mean(r_1..r_G)) / std(r_1..r_G)                                      advantages()
    L     = mean_t [ -c_t min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i)
                     + beta KL_t ]                                                            loss()
    rho_t = pi(y_t) / pi_old(y_t)                              pi_old: the policy before the updates

`--loss`, `--reduction` and `--advantage` select a variant, `--preset` that of a paper. gspo.py has
the losses with the ratio of a completion. Differences from the paper, without a preset: mean over
all tokens and clip bounds of DAPO (arXiv:2503.14476); no KL term; weights c_t = pi_old / pi_engine.

Shapes: P prompts on this rank, B on all ranks, G completions per prompt, K rewards, T packed tokens
of a micro-batch. Per-token tensors are aligned with the *targets*: x_T[t] is about targets_T[t]."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import AtLeast2, BelowOne, NotNegative, Positive
from common.config.objectives import CorrectionArgs, KLEstimateArgs, LogKLArgs, MovingArgs
from common.config.online import OnlineArgs
from common.config.parse import parse
from common.config.rules import require_default, require_effect
from common.config.training import ImageArgs
from common.data.packing import count_trained, pack_minibatches
from common.evaluate.greedy import evaluate_prompts
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.policy import load_policy, load_reference, move_reference
from common.model.scoring import with_logprobs
from common.objectives.advantages import centre_groups, group_std, whiten
from common.objectives.importance import (
    bounded_exp,
    importance_weights,
    is_clipped,
    off_policy_mask,
)
from common.objectives.kl import KLEstimator, kl_estimate
from common.objectives.shaping import EntropyCoefficient
from common.objectives.token_weights import token_weights
from common.parallel import distributed
from common.rewards.total import Rewards
from common.rollout.agreement import mean_weight, measure_mismatch, require_agreement
from common.rollout.measure import measure_groups, trained_counts, truncation_penalties
from common.rollout.prompts import load_prompts
from common.rollout.sampler import make_sampler, serve
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, SHOW, describe_rollouts, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

LOSSES = {  # flags that only some losses read
    "clip": ("clip_low", "clip_high", "dual_clip"),
    "dppo": ("dppo_divergence", "dppo_bound"),
    "cispo": ("cispo_high", "cispo_mask"),
    "sapo": ("sapo_tau_positive", "sapo_tau_negative"),
    "reinforce": (),
}
PPO = dict(loss="clip", clip_low=0.2, clip_high=0.2)  # of most presets

# ---- the objective ----


def advantages(
    name: str, rewards_BG: Tensor, rewards_KBG: Tensor, weights_K: Sequence[float],
    tokens_BG: Tensor | None = None, k: int = 1,
) -> Tensor:  # fmt: skip
    """Return the advantage of every completion of all ranks, [B, G] float64, from its total reward;
    gdpo: from its K rewards; group_mean_by_length: also from its number of tokens. Statistics
    ignore missing rewards (NaN), which get 0. A group of equal rewards gets 0."""
    centred_BG = centre_groups(rewards_BG)  # r - mean of its group
    valid_BG = ~rewards_BG.isnan()
    match name:
        case "group":  # GRPO: (r - mean) / std of the group
            return centred_BG / (group_std(rewards_BG) + 1e-6)
        case "group_mean":  # Dr. GRPO (arXiv:2503.20783): std favours very easy and hard prompts
            return centred_BG
        case "group_ratio":  # MaxRL (arXiv:2602.02710): (r - mean) / mean, for rewards >= 0
            if (rewards_BG < 0).any():
                raise ValueError("--advantage group_ratio: a reward (or a penalty) is negative")
            return (centred_BG / (rewards_BG - centred_BG + 1e-6)).nan_to_num()
        case "group_mean_by_length":  # OPO (arXiv:2505.23585): the mean is weighted by length
            return centre_groups(rewards_BG, tokens_BG)
        case "leave_one_out":  # RLOO (arXiv:2402.14740 Eq. 7): r - mean of the others
            size_B1 = valid_BG.sum(-1, keepdim=True)
            return centred_BG * size_B1 / (size_B1 - 1).clamp(min=1)
        case "pass_at_k":  # PKPO (arXiv:2505.15201): the best of k with it, less that without it
            from common.objectives.best_of_k import best_of_k

            return best_of_k(centred_BG, valid_BG, k)
        case "group_mean_batch_std":  # LitePPO (arXiv:2508.08221): std of the whole batch
            valid = rewards_BG[valid_BG].double()
            return centred_BG / ((valid.std() if len(valid) > 1 else 0.0) + 1e-6)
        case "gdpo":  # arXiv:2601.05242: `group` of each reward; their sum, whitened over all
            rewards_KBG = rewards_KBG.masked_fill(~valid_BG, math.nan)
            each_K = [advantages("group", r_BG, rewards_KBG, weights_K) for r_BG in rewards_KBG]
            total_BG = sum(w * A_BG for w, A_BG in zip(weights_K, each_K, strict=True))
            return whiten(total_BG, (~rewards_KBG.isnan().all(0)).long())
    raise ValueError(name)


def is_stopped(log_rho_T: Tensor, A_T: Tensor, logprobs_T: Tensor, args: "Args") -> Tensor:
    """Return which tokens have no policy gradient: ratio or divergence is beyond a bound."""
    match args.loss:
        case "clip":
            return is_clipped(log_rho_T, A_T, args.clip_low, args.clip_high, args.dual_clip)
        case "cispo" if args.cispo_mask:  # arXiv:2506.13585 Eq. 7: the bounds of PPO
            return is_clipped(log_rho_T, A_T, *args.cispo_mask)
        case "dppo":  # a token has two outcomes, itself and another
            pi_T = logprobs_T.exp().clamp(max=1 - 1e-7)
            old_T = (logprobs_T - log_rho_T).exp().clamp(max=1 - 1e-7)
            distance_T = (pi_T - old_T).abs()  # total variation
            if args.dppo_divergence == "kl":  # KL(pi_old || pi)
                distance_T = (1 - old_T) * ((1 - old_T) / (1 - pi_T)).log() - old_T * log_rho_T
            return (distance_T > args.dppo_bound) & (log_rho_T * A_T > 0)
    return torch.zeros_like(A_T, dtype=torch.bool)


def policy_loss(log_rho_T: Tensor, A_T: Tensor, logprobs_T: Tensor, args: "Args") -> Tensor:
    """Return the policy loss of each token. log_rho: log(pi / pi_old); A: advantage."""
    rho_T = bounded_exp(log_rho_T)
    likelihood_T = -A_T * logprobs_T
    match args.loss:
        case "clip":  # PPO (arXiv:1707.06347 Eq. 7)
            clipped_T = rho_T.clamp(1 - args.clip_low, 1 + args.clip_high)
            objective_T = torch.min(rho_T * A_T, clipped_T * A_T)
            if args.dual_clip:  # if A < 0, a loss of at most dual_clip |A| (arXiv:1912.09729 Eq. 5)
                bounded_T = torch.max(objective_T, args.dual_clip * A_T)
                objective_T = torch.where(A_T < 0, bounded_T, objective_T)
            return -objective_T
        case "dppo":  # arXiv:2602.04879: a bound on the divergence in place of the ratio's clip
            weights_T = rho_T.clamp(max=10)  # as in the code of the authors
        case "cispo":  # arXiv:2506.13585 Eq. 4: clips the weight of the gradient, not the gradient
            weights_T = rho_T.clamp(max=1 + args.cispo_high)
        case "sapo":  # arXiv:2511.20347: a sigmoid gate that closes gradually as rho leaves 1
            tau_T = torch.where(A_T > 0, args.sapo_tau_positive, args.sapo_tau_negative)
            return -4 / tau_T * torch.sigmoid(tau_T * (rho_T - 1)) * A_T
        case "reinforce":  # Williams 1992: unbiased for the first update of a rollout alone
            return likelihood_T
    return (weights_T * ~is_stopped(log_rho_T, A_T, logprobs_T, args)).detach() * likelihood_T


def loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor,
    ref_logprobs_T: Tensor | None, entropy_T: Tensor, advantages_T: Tensor, mask_T: Tensor,
    sequence_ids_T: Tensor, tokens: Tensor, sequences: Tensor, args: "Args", c_mean: float = 1,
    entropy_coef: float = 0,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each token's share of the objective L, to be minimised, and per-token tensors to log:

        L = sum_t w_t (c_t policy_loss_t + beta KL_t + old_beta log^2 rho_t / 2 - entropy_coef H_t)

    The shares of all micro-batches and ranks add up to a mean over the *global* minibatch, which
    has `tokens` trained tokens in `sequences` completions. c_t = pi_old / pi_engine, bounded, over
    `c_mean`, without gradient. `mask_T`: trained; `sequence_ids_T`: number of the completion."""
    log_rho_T = logprobs_T - old_logprobs_T
    c_T = importance_weights(
        old_logprobs_T, rollout_logprobs_T, mask_T, sequence_ids_T, args.correction_form, c_mean
    )
    loss_T = policy_loss(log_rho_T, advantages_T, logprobs_T, args) * c_T
    logged = {
        "ratio": bounded_exp(log_rho_T.detach()),
        "clip_ratio/region_mean": is_stopped(log_rho_T, advantages_T, logprobs_T, args),
        "sampling/weight": c_T,
        "sampling/kept_fraction": c_T > 0,
    }
    if (threshold := args.off_policy_threshold) is not None:  # mask if A < 0 and pi is far away
        drift_T = rollout_logprobs_T - logprobs_T
        loss_T *= off_policy_mask(drift_T, advantages_T, mask_T, sequence_ids_T, threshold)
    if ref_logprobs_T is not None:
        kl_T = kl_estimate(logprobs_T, ref_logprobs_T, args.kl_estimator, args.kl_clamp)
        if args.unbiased_kl:  # samples come from pi_old (arXiv:2512.02556)
            kl_T = bounded_exp(log_rho_T) * kl_T
        loss_T = loss_T + args.beta * kl_T
        logged["kl"] = kl_T
    if args.old_beta:  # (log rho)^2 / 2 (Kimi k1.5, arXiv:2501.12599; DRO, arXiv:2405.19107)
        loss_T = loss_T + args.old_beta * kl_estimate(logprobs_T, old_logprobs_T, "k2")
    if entropy_coef:  # skipped at 0: the entropy's backward pass reads all logits again
        loss_T = loss_T - entropy_coef * entropy_T
    w_T = token_weights(
        args.reduction, mask_T, sequence_ids_T, tokens, sequences, args.max_new_tokens
    )
    return loss_T * w_T, logged


@dataclass
class Args(ImageArgs, KLEstimateArgs, LogKLArgs, CorrectionArgs, MovingArgs, OnlineArgs):
    PRESETS: ClassVar[dict[str, dict]] = {
        "grpo": PPO | dict(reduction="sequence", advantage="group", beta=0.04),
        "dr_grpo": PPO | dict(reduction="constant", advantage="group_mean"),
        "maxrl": PPO | dict(reduction="token", advantage="group_ratio"),
        "dppo": dict(loss="dppo", reduction="constant", advantage="group_mean",
                     old_logprobs="engine", correction="none"),
        "cispo": dict(loss="cispo", reduction="token", advantage="group"),
        "sapo": dict(loss="sapo", reduction="sequence", advantage="group"),
        "liteppo": PPO | dict(reduction="token", advantage="group_mean_batch_std"),
        "gdpo": PPO | dict(reduction="token", advantage="gdpo"),
    }  # fmt: skip
    MOVED: ClassVar[dict] = {
        "loss": dict.fromkeys(("gspo", "sequence_clip", "gmpo", "topr", "vespo"),
                              "python gspo.py --loss {}"),
        "preset": {"dapo": "python dapo.py"}
        | dict.fromkeys(("gspo", "luspo", "gmpo", "topr"), "python gspo.py --preset {}")
        | dict.fromkeys(("reinforce", "reinforce++", "reinforce++_baseline"),
                        "python reinforce.py --preset {}"),
    }  # fmt: skip
    samples_per_prompt: AtLeast2 = 8
    lr: Positive[float] = 1e-6
    preset: Literal[tuple(PRESETS)] | None = None
    """published variant, which sets flags (docs/grpo.md); contradicting flags are an error"""
    loss: Literal[tuple(LOSSES)] = "clip"
    """policy loss (docs/grpo.md). clip: PPO; dppo: bounded divergence; cispo: clips the weight of
    the gradient; sapo: soft clip; reinforce: -A log pi"""
    reduction: Literal["token", "sequence", "sequence_sum", "constant"] = "token"
    """reduction of the loss. token: mean over tokens; sequence: mean over completions of their
    means; sequence_sum: of their sums; constant: of their sums / max_new_tokens"""
    advantage: Literal[
        "group", "group_mean", "group_ratio", "group_mean_by_length", "leave_one_out", "pass_at_k",
        "group_mean_batch_std", "gdpo",
    ] = "group"  # fmt: skip
    """advantage by reward r. group: (r - mean) / std; group_mean: r - mean; group_ratio: (r - mean)
    / mean; group_mean_by_length: mean weighted by length; leave_one_out: r - mean of the others;
    pass_at_k: gain of the best of k; group_mean_batch_std, gdpo: scaled over the batch"""
    pass_k: Positive[int] = 4
    """pass_at_k: number of completions of which the best one counts"""
    clip_low: BelowOne = 0.2
    """clip: distance from 1 of the lower bound of the importance ratio"""
    clip_high: NotNegative[float] = 0.28
    """clip: distance from 1 of the upper bound of the importance ratio"""
    dual_clip: NotNegative[float] = 0.0
    """clip: maximum loss if A < 0, in |A| (above 1, often 3); 0: off"""
    dppo_divergence: Literal["tv", "kl"] = "tv"
    """dppo: divergence of the sampled token's probability. tv: total variation; kl: binary KL"""
    dppo_bound: Positive[float] = 0.15
    """dppo: maximum divergence of a token with a gradient (the paper: tv 0.15, kl 0.05)"""
    cispo_high: Positive[float] = 4.0
    """cispo: distance from 1 of the upper bound of a token's weight"""
    cispo_mask: tuple[BelowOne, NotNegative[float]] | None = None
    """cispo: the clip_low and clip_high beyond which tokens have no gradient; default: off"""
    sapo_tau_positive: Positive[float] = 1.0
    """sapo: temperature of the gate for positive advantages"""
    sapo_tau_negative: Positive[float] = 1.05
    """sapo: temperature of the gate for negative and zero advantages"""
    off_policy_threshold: Positive[float] | None = None
    """mask completions with A < 0 whose log-prob fell by more than this per token; default: off"""
    beta: NotNegative[float] = 0.0
    """weight of the KL penalty to the starting model in the loss; 0: no reference model"""
    kl_estimator: KLEstimator = "k3"
    unbiased_kl: bool = False
    """importance ratio, with its gradient, as a factor of the KL estimate (arXiv:2512.02556)"""
    old_beta: NotNegative[float] = 0.0
    """weight of the quadratic penalty (log pi - log pi_old)^2 / 2 on each token"""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """source of pi_old. trainer: a forward pass before the updates; engine: its log-probs"""

    def __post_init__(self) -> None:
        require_effect(self, "loss", LOSSES)
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"--dual_clip {self.dual_clip} must be above 1, or 0 to turn it off")
        if self.advantage != "pass_at_k":
            require_default(self, ("pass_k",), f"with --advantage {self.advantage}")
        elif self.pass_k >= self.samples_per_prompt:
            raise ValueError(f"--pass_k {self.pass_k} must be below --samples_per_prompt")
        if self.old_logprobs == "engine":
            why = "with --old_logprobs engine"
            if self.correction != "none":
                raise ValueError(f"--correction {self.correction}: use none {why}")
            require_default(self, ("correction_filter", "correction_reject"), why)
        if not (self.beta or self.log_kl):
            require_default(self, ("kl_estimator", "kl_clamp", "unbiased_kl"), "with --beta 0")

    def cautions(self) -> Iterator[str]:
        """Yield warnings about flags with unexpected effects."""
        if self.beta and self.kl_estimator == "k1" and not self.unbiased_kl:
            yield "--kl_estimator k1: the expected gradient is zero and constrains nothing"
        if self.loss == "reinforce" and self.updates_per_rollout > 1:
            yield "--loss reinforce: the gradient is biased after the first update of a rollout"
        if self.old_beta and self.updates_per_rollout == 1 and self.old_logprobs == "trainer":
            yield "--old_beta: without effect, because a rollout has one update"


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.live_rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    needs_reference = args.beta > 0 or args.log_kl
    needs_old = args.updates_per_rollout > 1 and args.old_logprobs == "trainer"
    path = resolve_model(args.model, weights=not args.dry_run, rope_factor=args.rope_factor)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, context_length(path, args))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    if args.dry_run:  # ends the process
        dry_run(args, path, tokenizer, prompts, held_out, rewards, [path] * needs_reference,
                moving=args.reference_sync > 0, own_forwards=needs_old)  # fmt: skip
    begin_run(args)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    reference = load_reference(policy, args, device) if needs_reference else None  # frozen
    optimizer = adamw(policy, args)
    rollouts = make_sampler(policy, prompts, args, tokenizer, rewards)  # here or on rollout ranks

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    entropy = EntropyCoefficient(args.entropy_coef, args.entropy_target, args.entropy_step)
    run = Run(args, policy, optimizer, tokenizer, total_steps, rollouts=rollouts, entropy=entropy,
              moving=reference if args.reference_sync else None,
              show=SHOW, curves=CURVES)  # fmt: skip
    run.message(*describe_rollouts(args, prompts, held_out, rollouts), *args.cautions())
    meter = run.meter
    if run.first_step == 0:
        run.log(0, evaluate_prompts(rollouts, 0, held_out, rewards))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. rollout: G completions of each of P prompts; their rewards begin meanwhile ----
        groups = rollouts.rollout(step, total_steps, meter)  # syncs weights, then samples
        if groups is None:  # a stop was requested
            break
        positions = list(rollouts.positions)  # of this rank's prompts among the B of all ranks

        # ---- 2. rewards: wait for the last ones; advantages: from the rewards of all ranks ----
        with meter.time("reward"):
            rewards_PG, named_rewards, _ = rewards(groups, meter)
        measure_groups(meter, groups, rewards_PG, named_rewards, warn=step == 0)
        penalties_PG = truncation_penalties(groups, args.missing_eos_penalty)
        total_BG = distributed.gather_rows(rewards_PG + penalties_PG, positions)
        each_PKG = torch.stack([*named_rewards.values(), penalties_PG], dim=1)  # K rewards
        each_KBG = distributed.gather_rows(each_PKG, positions).transpose(0, 1)
        tokens_BG = distributed.gather_rows(trained_counts(groups), positions)
        w_K = [*rewards.weights, args.missing_eos_penalty]
        advantages_BG = advantages(args.advantage, total_BG, each_KBG, w_K, tokens_BG, args.pass_k)

        # ---- 3. pack: completions move to the ranks that train on them; fixed log-probs ----
        minibatches = pack_minibatches(
            groups, positions, args.minibatches, args.pack_tokens, device, args.share_prefix
        )
        checks_engine = run.checks_engine(step)
        old = policy if checks_engine or needs_old or args.correction_normalize else None
        with meter.time("logprobs"):
            minibatches = with_logprobs(minibatches, args.temperature, old=old, ref=reference)
        if checks_engine:
            require_agreement(minibatches, step, args, device)

        # ---- 4. update: one optimizer step per minibatch; none if the loss is not finite ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for minibatch in minibatches * args.epochs_per_rollout:
                tokens, sequences = count_trained(minibatch)  # of all ranks
                c_mean = mean_weight(minibatch, args.correction_form)
                total_loss = torch.zeros((), device=device)
                for mb in minibatch:
                    logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
                    old_logprobs_T = mb.old_logprobs_T
                    if old_logprobs_T is None:  # on policy
                        old_logprobs_T = logprobs_T.detach()
                    measure_mismatch(meter, old_logprobs_T, mb)
                    if args.old_logprobs == "engine":
                        old_logprobs_T = mb.rollout_logprobs_T
                    share_T, logged = loss(
                        logprobs_T, old_logprobs_T, mb.rollout_logprobs_T, mb.ref_logprobs_T,
                        entropy_T, mb.on_tokens(advantages_BG), mb.loss_mask_T, mb.sequence_ids_T,
                        tokens, sequences, args, c_mean, entropy.value,
                    )  # fmt: skip
                    # FSDP averages gradients over ranks; undo that.
                    (share_T.sum() * world_size).backward()
                    total_loss += share_T.detach().sum()
                    meter.tokens(mb, {"entropy": entropy_T} | logged, share_T)
                grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, total_loss)
                meter.mean("grad_norm", grad_norm)
                meter.mean("loss", total_loss, 1 / world_size)  # the loss is the sum over ranks
        move_reference(reference, policy, step + 1, args)  # with --reference_sync

        # ---- 5. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr, beta=args.beta, entropy_coef=entropy.value)
        entropy.update(metrics.get("entropy", math.inf))  # no entropy without trained tokens
        if run.evaluates(step + 1):
            metrics |= evaluate_prompts(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        advantages_PG = advantages_BG[positions]
        run.show_samples(step + 1, groups, positions, rewards_PG, advantages_PG, named_rewards)

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
