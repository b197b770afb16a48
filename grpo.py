"""GRPO and its family: reinforcement learning with verifiable rewards (Shao et al. 2024, arXiv:2402.03300).

    torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k --preset gspo

The policy samples G completions of every prompt. The advantage of each is its reward relative to its group:

    A_i   = (r_i - mean(r_1..r_G)) / std(r_1..r_G)                                              advantages()
    L     = mean_t [ -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A) + beta KL_t ]    loss()
    rho_t = pi(y_t) / pi_old(y_t)                      pi_old: the policy at the time of the rollout

There is no value model, and no reference model unless `--beta` is positive. `--loss`, `--reduction` and `--advantage`
select the variants of the family, `--preset` those of one paper. dapo.py and reinforce.py continue from here.

Differences from the paper, without a preset (docs/grpo.md): the mean is over the tokens of the global minibatch and the
clip bounds differ (both DAPO, arXiv:2503.14476), the KL term is off, and truncated importance weights correct for the
difference between the probabilities of the inference engine and the trainer.

Shapes: P prompts on this rank, B on all ranks, G completions per prompt, K rewards, T packed tokens of a micro-batch.
Per-token tensors are aligned with the *targets*: x_T[t] describes the prediction of targets_T[t].
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

import torch
from torch import Tensor

from common.config.flags import AtLeast2, BelowOne, NotNegative, Positive, require_read_by
from common.config.groups import OnlineArgs, SamplingArgs, TrainArgs
from common.config.parse import parse
from common.data.packing import pack_minibatches
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.logprobs import with_logprobs
from common.model.lora import LoRAArgs
from common.model.policy import load_policy, load_reference
from common.objectives.advantages import centre_groups, whiten
from common.objectives.importance import CorrectionArgs, importance_weights, off_policy_mask
from common.objectives.policy import KLEstimator, bounded_exp, is_clipped, kl_estimate
from common.objectives.reduction import per_token, sequence_mean, sequence_sum
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout import statistics
from common.rollout.prompts import load_prompts
from common.rollout.remote_sampler import make_rollouts, serve
from common.train.checkpoint import prepare_output_dir
from common.train.online import CURVES, SHOW, describe, num_steps
from common.train.optim import adamw, optimizer_step
from common.train.run import Run

# --loss: level of its importance ratio, and the flags that only it reads.
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
    its K rewards. A missing reward (NaN) counts in no statistic and gets 0; a group of equal rewards gets exactly 0."""
    centred_BG, valid_BG = centre_groups(rewards_BG), ~rewards_BG.isnan()  # r - mean of its group
    size_B1 = valid_BG.sum(-1, keepdim=True)
    match name:
        case "group":  # GRPO: (r - mean) / std of the group
            std_B1 = (centred_BG.square().sum(-1, keepdim=True) / (size_B1 - 1).clamp(min=1)).sqrt()
            return centred_BG / (std_B1 + 1e-6)
        case "group_mean":  # Dr. GRPO (arXiv:2503.20783): dividing would favour very easy and very hard prompts
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
        case "cispo":  # arXiv:2506.13585 Eq. 4: clips the weight of the gradient, so that every token keeps one
            return rho_T.clamp(max=1 + args.cispo_high).detach() * (-A_T * logprobs_T)
        case "sapo":  # arXiv:2511.20347: a sigmoid gate that closes gradually as rho leaves 1
            tau_T = torch.where(A_T > 0, args.sapo_tau_positive, args.sapo_tau_negative)
            return -4 / tau_T * torch.sigmoid(tau_T * (rho_T - 1)) * A_T
        case "topr":  # arXiv:2503.14286 Eq. 8: truncates rho of bad completions, ignores rho of good ones
            return torch.where(A_T < 0, rho_T.clamp(max=1), 1.0).detach() * (-A_T * logprobs_T)
        case "vespo":  # arXiv:2602.10693: phi(rho) = rho^k exp(lambda (1 - rho)), which is 1 at rho = 1
            positive_T = args.vespo_k_positive * log_rho_T + args.vespo_lambda_positive * (1 - rho_T)
            negative_T = args.vespo_k_negative * log_rho_T + args.vespo_lambda_negative * (1 - rho_T)
            return bounded_exp(torch.where(A_T < 0, negative_T, positive_T)).detach() * (-A_T * logprobs_T)
    raise ValueError(args.loss)


def loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, ref_logprobs_T: Tensor | None,
    entropy_T: Tensor, advantages_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, tokens: Tensor, sequences: Tensor,
    args: "Args",
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return this micro-batch's share of the objective, to be minimised, and per-token tensors to log:

        L = sum_t w_t (c_t policy_loss_t + beta KL_t - entropy_coef H_t)

    w_t makes the sum over the micro-batches of all ranks a mean over the *global* minibatch, which has `tokens` trained
    tokens in `sequences` completions. c_t = pi_old / pi_engine, bounded, without gradient. KL_t estimates
    KL(pi || pi_ref). `mask_T`: trained tokens; `sequence_ids_T`: the completion of each token.
    """
    where, (level, flags) = (mask_T, sequence_ids_T), LOSSES[args.loss]
    log_rho_T = level(logprobs_T, *where) - level(old_logprobs_T, *where)
    c_T = importance_weights(
        old_logprobs_T - rollout_logprobs_T, *where, level=args.correction, mode=args.correction_mode,
        low=args.correction_low, high=args.correction_high, keep=args.correction_filter,
    )  # fmt: skip
    loss_T = policy_loss(log_rho_T, advantages_T, logprobs_T, args) * c_T
    logged = {"entropy": entropy_T, "sampling/kept_fraction": c_T > 0}
    if args.off_policy_threshold is not None:  # mask bad completions that the policy has left
        streams = logprobs_T, rollout_logprobs_T, advantages_T
        loss_T = loss_T * off_policy_mask(*streams, *where, args.off_policy_threshold)
    if flags == CLIP:
        bounds = args.clip_low, args.clip_high, args.dual_clip
        logged["clip_ratio/region_mean"] = is_clipped(log_rho_T.detach(), advantages_T, *bounds)
    if ref_logprobs_T is not None:
        kl_T = kl_estimate(logprobs_T, ref_logprobs_T, args.kl_estimator, args.kl_clamp)
        if args.unbiased_kl:  # the samples are of pi_old: weigh by the token's ratio, with its gradient (2512.02556)
            kl_T = bounded_exp(logprobs_T - old_logprobs_T) * kl_T
        loss_T, logged["kl"] = loss_T + args.beta * kl_T, kl_T
    if args.entropy_coef:  # not times 0: the backward pass of the entropy reads all logits again
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
    return (loss_T * w_T).sum(), logged


@dataclass
class Args(CorrectionArgs, OnlineArgs, SamplingArgs, LoRAArgs, TrainArgs):
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
    RENAMED_PRESETS: ClassVar[dict[str, str]] = {"dapo": "python dapo.py"} | {
        name: f"python reinforce.py --preset {name}" for name in ("reinforce", "reinforce++", "reinforce++_baseline")
    }
    output_dir: str = "runs/grpo"
    samples_per_prompt: AtLeast2 = 8
    """completions sampled for each prompt (G): a group, whose members are compared"""
    lr: Positive[float] = 1e-6
    preset: Literal[tuple(PRESETS)] | None = None
    """the flags of a published variant, see docs/grpo.md; one that is also given with another value is an error"""
    loss: Literal[tuple(LOSSES)] = "clip"
    """what is minimised for each token: the table in docs/grpo.md, `LOSSES` above"""
    reduction: Literal["token", "sequence", "sequence_sum", "constant"] = "token"
    """mean over: tokens; completions, of their means (sequence) or sums; or sum / (completions x max_new_tokens)"""
    advantage: Literal["group", "group_mean", "group_mean_batch_std", "leave_one_out", "gdpo"] = "group"
    """how rewards become advantages: the table in docs/grpo.md, `ADVANTAGES` above"""
    clip_low: BelowOne = 0.2
    """clip, gspo, sequence_clip: the importance ratio is clipped below at 1 - clip_low"""
    clip_high: NotNegative[float] = 0.28
    """clip, gspo, sequence_clip: the importance ratio is clipped above at 1 + clip_high"""
    dual_clip: NotNegative[float] = 0.0
    """clip, gspo, sequence_clip: a negative advantage's loss is at most dual_clip |A| (above 1; usual: 3); 0: not"""
    cispo_high: Positive[float] = 4.0
    """cispo: the weight of a token is at most 1 + cispo_high"""
    sapo_tau_positive: Positive[float] = 1.0
    """sapo: temperature of the gate for positive advantages"""
    sapo_tau_negative: Positive[float] = 1.05
    """sapo: temperature of the gate for the others"""
    vespo_k_positive: NotNegative[float] = 2.0
    """vespo: for advantages >= 0, how fast the weight falls as the completion's ratio goes below 1"""
    vespo_lambda_positive: NotNegative[float] = 3.0
    """vespo: for advantages >= 0, how fast it falls as the ratio goes above 1"""
    vespo_k_negative: NotNegative[float] = 3.0
    """vespo: vespo_k_positive for the others"""
    vespo_lambda_negative: NotNegative[float] = 2.0
    """vespo: vespo_lambda_positive for the others"""
    off_policy_threshold: Positive[float] | None = None
    """mask completions with A < 0 whose mean log(pi_engine / pi) exceeds this (arXiv:2512.02556 Eq. 9); default: off"""
    beta: NotNegative[float] = 0.0
    """weight of the KL to the starting model on each token of the loss; 0 never loads that model"""
    kl_estimator: KLEstimator = "k3"
    """estimate of the KL per token: k1, k2 or k3"""
    kl_clamp: NotNegative[float] = 0.0
    """the estimate is clamped to [-kl_clamp, kl_clamp] on each token; 0: not"""
    unbiased_kl: bool = False
    """the estimate is multiplied by the token's importance ratio, gradient and all (arXiv:2512.02556)"""
    entropy_coef: NotNegative[float] = 0.0
    """weight of the entropy bonus, which is reduced as the loss is (--reduction)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_read_by(self, {name: flags for name, (_, flags) in LOSSES.items()}, self.loss)
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"--dual_clip {self.dual_clip} must be above 1, or 0 for none")
        if self.loss in ("gspo", "sequence_clip"):
            for flag, fits in (("reduction", "sequence"), ("correction", "sequence or none")):
                if (value := getattr(self, flag)) not in fits.split(" or "):
                    raise ValueError(f"--loss {self.loss} is of whole completions: --{flag} {fits}, not {value}")
        for flag in ("kl_estimator", "kl_clamp", "unbiased_kl"):
            self.require_read(flag, self.beta > 0, "--beta is 0")

    def cautions(self) -> Iterator[str]:
        """Yield lines about flags whose effect may surprise."""
        if self.beta and self.kl_estimator == "k1":
            yield "--kl_estimator k1: the expected gradient of this KL term is zero; it does not constrain the policy"
        if self.loss == "reinforce" and self.updates_per_rollout > 1:
            yield "--loss reinforce: the gradient is biased after the first update of a rollout"


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.rollout_ranks, args.nccl_timeout)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, context_length(path, args))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    reference = load_reference(policy, args, device) if args.beta else None  # frozen
    optimizer = adamw(policy, args)
    rollouts = make_rollouts(policy, prompts, args, tokenizer, device, rewards)  # vLLM, here or on rollout ranks

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    run = Run(args, policy, optimizer, tokenizer, total_steps, rollouts=rollouts, show=SHOW, curves=CURVES)
    run.message(*describe(args, prompts, held_out, rollouts), *args.cautions())
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
            rewards_PG, parts = rewards(groups, meter)
        penalties_PG = statistics.truncation_penalties(groups, args.missing_eos_penalty)
        mine = torch.stack([rewards_PG + penalties_PG, *parts.values(), penalties_PG], dim=1)
        total_BG, *parts_KBG = statistics.gather_groups(mine, rollouts.positions).unbind(1)
        advantages_BG = advantages(args.advantage, total_BG, torch.stack(parts_KBG), [*rewards.weights, 1.0])
        advantages_PG = advantages_BG[list(rollouts.positions)]
        statistics.measure_groups(meter, groups, rewards_PG, parts, first=step == 0)

        # ---- 3. pack; log-probs that stay fixed: of the policy before its updates, of the reference ----
        minibatches = pack_minibatches(groups, args.minibatches, args.pack_tokens, device)
        check = run.checks_engine(step)
        with meter.time("logprobs"):  # on policy the log-probs of the update itself serve as old ones
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
                    mb_loss, logged = loss(
                        logprobs_T, old_logprobs_T, mb.rollout_logprobs_T, mb.ref_logprobs_T, entropy_T,
                        mb.on_tokens(advantages_PG), mb.loss_mask_T, mb.sequence_ids_T, tokens, sequences, args,
                    )  # fmt: skip
                    (mb_loss * world_size).backward()  # FSDP averages gradients over ranks; undo that
                    minibatch_loss += mb_loss.detach()
                    meter.masked_means(logged, mb.loss_mask_T)
                    statistics.measure_mismatch(meter, old_logprobs_T, mb)
                meter.mean("grad_norm", optimizer_step(policy, optimizer, lr, args.max_grad_norm, minibatch_loss))
                meter.mean("loss", minibatch_loss, 1 / world_size)  # the loss is the sum over ranks

        # ---- 5. log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr, beta=args.beta)
        if run.evaluates(step + 1):
            metrics |= statistics.evaluate(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        run.show_samples(step + 1, groups, rollouts.positions, rewards_PG, advantages_PG)

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
