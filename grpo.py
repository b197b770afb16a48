"""GRPO and its family: reinforcement learning with verifiable rewards (Shao et al. 2024, arXiv:2402.03300).

    torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k --preset gspo

The policy samples G completions of every prompt. The advantage of each is its reward relative to its group:

    A_i   = (r_i - mean(r_1..r_G)) / std(r_1..r_G)                                              advantages()
    L     = mean_t [ -c_t min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i) + beta KL_t ]    loss()
    rho_t = pi(y_t) / pi_old(y_t)                      pi_old: the policy at the time of the rollout

There is no value model, and no reference model unless `--beta` is positive. `--loss`, `--reduction` and `--advantage`
select a variant of the family, and `--preset` selects that of a paper. dapo.py and reinforce.py have further variants.
Differences from the paper, without a preset (docs/grpo.md): the mean is over the tokens of the global minibatch and the
clip bounds differ (both as in DAPO, arXiv:2503.14476); no KL term; truncated weights c_t = pi_old / pi_engine.

Shapes: P prompts on this rank, B on all ranks, G completions per prompt, K rewards, T packed tokens of a micro-batch.
Per-token tensors are aligned with the *targets*: x_T[t] describes the prediction of targets_T[t].
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import AtLeast2, BelowOne, NotNegative, Positive, require_default, require_effect
from common.config.groups import OnlineArgs
from common.config.objectives import CorrectionArgs, LogKLArgs
from common.config.parse import parse
from common.data.packing import pack_minibatches
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.policy import load_policy, load_reference
from common.model.scoring import with_logprobs
from common.objectives.advantages import centre_groups, whiten
from common.objectives.importance import importance_weights, off_policy_mask
from common.objectives.policy import KLEstimator, bounded_exp, is_clipped, kl_estimate
from common.objectives.reduction import per_token, sequence_mean, sequence_sum
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

# For each --loss: the level of its importance ratio (token or completion), and the flags that only this loss reads.
CLIP = ("clip_low", "clip_high", "dual_clip")
LOSSES = {
    "clip": (per_token, CLIP),
    "reinforce": (per_token, ()),
    "cispo": (per_token, ("cispo_high",)),
    "sapo": (per_token, ("sapo_tau_positive", "sapo_tau_negative")),
    "gspo": (sequence_mean, CLIP),
    "sequence_clip": (sequence_sum, CLIP),
    "topr": (sequence_sum, ()),
    "vespo": (sequence_sum, ("vespo_k_positive", "vespo_lambda_positive", "vespo_k_negative", "vespo_lambda_negative")),
}

# ---- the objective ----


def advantages(name: str, rewards_BG: Tensor, rewards_KBG: Tensor, weights_K: Sequence[float]) -> Tensor:
    """Return the advantage of every completion of all ranks, [B, G] float64, from its total reward or, for gdpo, from
    its K rewards. Statistics ignore missing rewards (NaN), which get 0. A group of equal rewards gets exactly 0."""
    centred_BG, valid_BG = centre_groups(rewards_BG), ~rewards_BG.isnan()  # r - mean of its group
    size_B1 = valid_BG.sum(-1, keepdim=True)
    match name:
        case "group":  # GRPO: (r - mean) / std of the group
            std_B1 = (centred_BG.square().sum(-1, keepdim=True) / (size_B1 - 1).clamp(min=1)).sqrt()
            return centred_BG / (std_B1 + 1e-6)
        case "group_mean":  # Dr. GRPO (arXiv:2503.20783): a division by std favours very easy and hard prompts
            return centred_BG
        case "leave_one_out":  # RLOO (arXiv:2402.14740 Eq. 7): r - mean of the others
            return centred_BG * size_B1 / (size_B1 - 1).clamp(min=1)
        case "group_mean_batch_std":  # LitePPO (arXiv:2508.08221): std of the whole batch
            valid = rewards_BG[valid_BG].double()
            return centred_BG / ((valid.std() if len(valid) > 1 else 0.0) + 1e-6)
        case "gdpo":  # arXiv:2601.05242: each reward as in `group`, their weighted sum whitened over the batch
            rewards_KBG = rewards_KBG.masked_fill(~valid_BG, math.nan)
            each_K = [advantages("group", r_BG, rewards_KBG, weights_K) for r_BG in rewards_KBG]
            total_BG = sum(w * A_BG for w, A_BG in zip(weights_K, each_K, strict=True))
            return whiten(total_BG, (~rewards_KBG.isnan().all(0)).long())
    raise ValueError(name)


def policy_loss(log_rho_T: Tensor, A_T: Tensor, logprobs_T: Tensor, args: "Args") -> Tensor:
    """Return the policy loss of each token. log_rho: log(pi / pi_old) of the token or its completion; A: advantage."""
    rho_T = bounded_exp(log_rho_T)
    match args.loss:
        case "clip" | "gspo" | "sequence_clip":  # PPO (arXiv:1707.06347 Eq. 7), GSPO (arXiv:2507.18071 Eq. 5)
            objective_T = torch.min(rho_T * A_T, rho_T.clamp(1 - args.clip_low, 1 + args.clip_high) * A_T)
            if args.dual_clip:  # the loss of a negative advantage is at most dual_clip |A| (arXiv:1912.09729 Eq. 5)
                objective_T = torch.where(A_T < 0, torch.max(objective_T, args.dual_clip * A_T), objective_T)
            return -objective_T
        case "reinforce":  # Williams 1992: without rho, only the first update of a rollout is unbiased
            return -A_T * logprobs_T
        case "cispo":  # arXiv:2506.13585 Eq. 4: clips the weight of the gradient, so that every token has a gradient
            return rho_T.clamp(max=1 + args.cispo_high).detach() * (-A_T * logprobs_T)
        case "sapo":  # arXiv:2511.20347: a sigmoid gate that closes gradually as rho leaves 1
            tau_T = torch.where(A_T > 0, args.sapo_tau_positive, args.sapo_tau_negative)
            return -4 / tau_T * torch.sigmoid(tau_T * (rho_T - 1)) * A_T
        case "topr":  # arXiv:2503.14286 Eq. 8: truncates rho of bad completions, ignores rho of good ones
            return torch.where(A_T < 0, rho_T.clamp(max=1), 1.0).detach() * (-A_T * logprobs_T)
        case "vespo":  # arXiv:2602.10693: phi(rho) = rho^vespo_k exp(vespo_lambda (1 - rho)), 1 at 1
            positive_T = args.vespo_k_positive * log_rho_T + args.vespo_lambda_positive * (1 - rho_T)
            negative_T = args.vespo_k_negative * log_rho_T + args.vespo_lambda_negative * (1 - rho_T)
            return bounded_exp(torch.where(A_T < 0, negative_T, positive_T)).detach() * (-A_T * logprobs_T)
    raise ValueError(args.loss)


def loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, ref_logprobs_T: Tensor | None,
    entropy_T: Tensor, advantages_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, tokens: Tensor, sequences: Tensor,
    args: "Args",
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each token's share of the objective L, to be minimised, and per-token tensors to log:

        L = sum_t w_t (c_t policy_loss_t + beta KL_t - entropy_coef H_t)

    With the weights w_t, the shares of all micro-batches and ranks add up to a mean over the *global* minibatch. It has
    `tokens` trained tokens in `sequences` completions. c_t = pi_old / pi_engine, bounded, without gradient. KL_t
    estimates KL(pi || pi_ref). `mask_T`: trained tokens; `sequence_ids_T`: number of each token's completion.
    """
    where, (level, flags) = (mask_T, sequence_ids_T), LOSSES[args.loss]
    log_rho_T = level(logprobs_T, *where) - level(old_logprobs_T, *where)
    c_T = importance_weights(
        old_logprobs_T - rollout_logprobs_T, *where, level=args.correction, mode=args.correction_mode,
        low=args.correction_low, high=args.correction_high, keep=args.correction_filter,
    )  # fmt: skip
    loss_T = policy_loss(log_rho_T, advantages_T, logprobs_T, args) * c_T
    logged = {"ratio": bounded_exp(log_rho_T.detach()), "sampling/weight": c_T, "sampling/kept_fraction": c_T > 0}
    if args.off_policy_threshold is not None:  # mask if A < 0 and the policy has moved far away
        loss_T *= off_policy_mask(rollout_logprobs_T - logprobs_T, advantages_T, *where, args.off_policy_threshold)
    if flags == CLIP:
        bounds = args.clip_low, args.clip_high, args.dual_clip
        logged["clip_ratio/region_mean"] = is_clipped(log_rho_T.detach(), advantages_T, *bounds)
    if ref_logprobs_T is not None:
        kl_T = kl_estimate(logprobs_T, ref_logprobs_T, args.kl_estimator, args.kl_clamp)
        if args.unbiased_kl:  # samples come from pi_old: weight by the token's ratio, with gradient (2512.02556)
            kl_T = bounded_exp(logprobs_T - old_logprobs_T) * kl_T
        loss_T, logged["kl"] = loss_T + args.beta * kl_T, kl_T
    if args.entropy_coef:  # skipped at 0: the entropy's backward pass reads all logits again
        loss_T = loss_T - args.entropy_coef * entropy_T
    match args.reduction:
        case "token":  # mean over tokens (DAPO, arXiv:2503.14476)
            w_T = mask_T / tokens
        case "sequence":  # mean over completions of their token means (GRPO)
            w_T = mask_T / sequence_sum(mask_T, *where).clamp(min=1) / sequences
        case "sequence_sum":  # mean over completions of their token sums (REINFORCE)
            w_T = mask_T / sequences
        case "constant":  # the same, over a constant length (Dr. GRPO, arXiv:2503.20783)
            w_T = mask_T / sequences / args.max_new_tokens
    return loss_T * w_T, logged


@dataclass
class Args(LogKLArgs, CorrectionArgs, OnlineArgs):
    PRESETS: ClassVar[dict[str, dict]] = {
        "grpo": dict(loss="clip", reduction="sequence", advantage="group", beta=0.04, clip_low=0.2, clip_high=0.2),
        "dr_grpo": dict(loss="clip", reduction="constant", advantage="group_mean", clip_low=0.2, clip_high=0.2),
        "gspo": dict(loss="gspo", reduction="sequence", advantage="group", clip_low=3e-4, clip_high=4e-4,
                     correction="sequence"),
        "cispo": dict(loss="cispo", reduction="token", advantage="group"),
        "sapo": dict(loss="sapo", reduction="sequence", advantage="group"),
        "topr": dict(loss="topr", reduction="sequence_sum", advantage="group_mean"),
        "liteppo": dict(loss="clip", reduction="token", advantage="group_mean_batch_std", clip_low=0.2, clip_high=0.2),
        "gdpo": dict(loss="clip", reduction="token", advantage="gdpo", clip_low=0.2, clip_high=0.2),
    }  # fmt: skip
    MOVED: ClassVar[dict] = dict(preset=dict(dapo="python dapo.py") | {
        old: f"python reinforce.py --preset {old}" for old in ("reinforce", "reinforce++", "reinforce++_baseline")
    })  # fmt: skip
    samples_per_prompt: AtLeast2 = 8
    lr: Positive[float] = 1e-6
    preset: Literal[tuple(PRESETS)] | None = None
    """published variant: sets the flags in its row of the table in docs/grpo.md; contradicting flags are an error"""
    loss: Literal[tuple(LOSSES)] = "clip"
    """policy loss (docs/grpo.md). clip: PPO; reinforce: -A log pi; cispo: clips the weight of the gradient; sapo: soft
    clip; gspo: clip, ratio of the whole completion, per token; sequence_clip: the same, summed; topr: clips the
    completion's ratio if A < 0; vespo: smooth weight by the completion's ratio"""
    reduction: Literal["token", "sequence", "sequence_sum", "constant"] = "token"
    """reduction of the loss. token: mean over tokens; sequence: mean over completions of their means; sequence_sum:
    mean over completions of their sums; constant: sum / (completions x max_new_tokens)"""
    advantage: Literal["group", "group_mean", "group_mean_batch_std", "leave_one_out", "gdpo"] = "group"
    """advantage by reward r. group: (r - mean) / std of its group; group_mean: r - mean; group_mean_batch_std: with
    the batch's std; leave_one_out: r - mean of the others; gdpo: group of each reward, summed, whitened"""
    clip_low: BelowOne = 0.2
    """clip, gspo, sequence_clip: distance from 1 of the lower bound of the importance ratio"""
    clip_high: NotNegative[float] = 0.28
    """clip, gspo, sequence_clip: distance from 1 of the upper bound of the importance ratio"""
    dual_clip: NotNegative[float] = 0.0
    """clip, gspo, sequence_clip: maximum loss for advantages A < 0, as a multiple of |A| (above 1, often 3); 0: off"""
    cispo_high: Positive[float] = 4.0
    """cispo: distance from 1 of the upper bound of a token's weight"""
    sapo_tau_positive: Positive[float] = 1.0
    """sapo: temperature of the gate for positive advantages"""
    sapo_tau_negative: Positive[float] = 1.05
    """sapo: temperature of the gate for negative and zero advantages"""
    vespo_k_positive: NotNegative[float] = 2.0
    """vespo, for advantages >= 0: decay of the weight as the completion's importance ratio goes below 1"""
    vespo_lambda_positive: NotNegative[float] = 3.0
    """vespo, for advantages >= 0: decay of the weight as the completion's importance ratio goes above 1"""
    vespo_k_negative: NotNegative[float] = 3.0
    """vespo, for advantages < 0: decay of the weight as the completion's importance ratio goes below 1"""
    vespo_lambda_negative: NotNegative[float] = 2.0
    """vespo, for advantages < 0: decay of the weight as the completion's importance ratio goes above 1"""
    off_policy_threshold: Positive[float] | None = None
    """mask completions with a negative advantage whose log-prob fell by more nats per token than this; default: off"""
    beta: NotNegative[float] = 0.0
    """weight of the KL penalty to the starting model, on each token of the loss; 0: no penalty, no reference model"""
    kl_estimator: KLEstimator = "k3"
    """estimator of the KL per token, with d = log(policy / reference). k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d"""
    kl_clamp: NotNegative[float] = 0.0
    """bound of the KL estimate of each token, which is clamped to [-kl_clamp, kl_clamp]; 0: off"""
    unbiased_kl: bool = False
    """multiplication of the KL estimate by the token's importance ratio, with its gradient (arXiv:2512.02556)"""
    entropy_coef: NotNegative[float] = 0.0
    """weight of the entropy bonus, reduced over tokens like the loss (--reduction)"""

    def __post_init__(self) -> None:
        require_effect(self, "loss", {name: flags for name, (_, flags) in LOSSES.items()})
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"--dual_clip {self.dual_clip} must be above 1, or 0 to turn it off")
        if self.loss in ("gspo", "sequence_clip"):
            for flag, fits in (("reduction", "sequence"), ("correction", "sequence or none")):
                if (value := getattr(self, flag)) not in fits.split(" or "):
                    raise ValueError(f"--{flag} {value}: --loss {self.loss} treats completions as a whole; use {fits}")
        if not (self.beta or self.log_kl):
            require_default(self, ("kl_estimator", "kl_clamp", "unbiased_kl"), "with --beta 0")

    def cautions(self) -> Iterator[str]:
        """Yield warnings about flags with unexpected effects."""
        if self.beta and self.kl_estimator == "k1":
            yield "--kl_estimator k1: the expected gradient of this KL term is zero; it does not constrain the policy"
        if self.loss == "reinforce" and self.updates_per_rollout > 1:
            yield "--loss reinforce: the gradient is biased after the first update of a rollout"


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
    total_steps = num_steps(args, prompts)
    run = Run(args, policy, optimizer, tokenizer, total_steps, rollouts=rollouts, show=SHOW, curves=CURVES)
    run.message(*describe_rollouts(args, prompts, held_out, rollouts), *args.cautions())
    meter, on_policy = run.meter, args.updates_per_rollout == 1
    if run.first_step == 0:
        run.log(0, statistics.evaluate(rollouts, 0, held_out, rewards))

    for step in run.steps():
        # ---- 1. rollout: G completions of each of this rank's P prompts ----
        groups = rollouts.rollout(step, total_steps, meter)
        if groups is None:  # a stop was requested
            break

        # ---- 2. rewards and advantages; the statistics are those of all ranks ----
        with meter.time("reward"):
            rewards_PG, parts, _ = rewards(groups, meter)
        penalties_PG = statistics.truncation_penalties(groups, args.missing_eos_penalty)
        mine = torch.stack([rewards_PG + penalties_PG, *parts.values(), penalties_PG], dim=1)
        total_BG, *parts_KBG = statistics.gather_groups(mine, rollouts.positions).unbind(1)
        advantages_BG = advantages(args.advantage, total_BG, torch.stack(parts_KBG), [*rewards.weights, 1.0])
        advantages_PG = advantages_BG[list(rollouts.positions)]
        statistics.measure_groups(meter, groups, rewards_PG, parts, first=step == 0)

        # ---- 3. pack; log-probs that stay fixed: of the policy before its updates, of the reference ----
        minibatches = pack_minibatches(groups, args.minibatches, args.pack_tokens, device)
        check = run.checks_engine(step)
        with meter.time("logprobs"):  # on policy, the old log-probs are those of the update itself
            old = policy if check or not on_policy else None
            minibatches = with_logprobs(minibatches, args.temperature, old=old, ref=reference)
        if check:
            statistics.check_agreement(minibatches, step, args, device)

        # ---- 4. update: one optimizer step per minibatch ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for minibatch in minibatches * args.epochs_per_rollout:
                tokens, sequences = statistics.count_trained(minibatch)  # of the *global* minibatch
                minibatch_loss = torch.zeros((), device=device)
                for mb in minibatch:
                    logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
                    old_logprobs_T = logprobs_T.detach() if mb.old_logprobs_T is None else mb.old_logprobs_T
                    share_T, logged = loss(
                        logprobs_T, old_logprobs_T, mb.rollout_logprobs_T, mb.ref_logprobs_T, entropy_T,
                        mb.on_tokens(advantages_PG), mb.loss_mask_T, mb.sequence_ids_T, tokens, sequences, args,
                    )  # fmt: skip
                    (share_T.sum() * world_size).backward()  # FSDP averages gradients over ranks; undo that
                    minibatch_loss += share_T.detach().sum()
                    meter.tokens(mb, {"entropy": entropy_T} | logged, share_T)
                    statistics.measure_mismatch(meter, old_logprobs_T, mb)
                meter.mean("grad_norm", optimizer_step(policy, optimizer, lr, args.max_grad_norm, minibatch_loss))
                meter.mean("loss", minibatch_loss, 1 / world_size)  # weights of all ranks add up to 1

        # ---- 5. log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr, beta=args.beta)
        if run.evaluates(step + 1):
            metrics |= statistics.evaluate(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        run.show_samples(step + 1, groups, rollouts.positions, rewards_PG, advantages_PG, parts)

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.leave()
