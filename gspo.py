r"""GSPO (Zheng et al. 2025, arXiv:2507.18071) and other losses whose importance ratio is that of a
whole completion.

    torchrun --nproc_per_node 8 gspo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k \
        --reward gsm8k

The policy samples G completions of every prompt, and the advantage of each is its reward relative
to its group. A reward belongs to a completion, and so does the ratio that corrects for samples of
an older policy:

    A_i   = (r_i - mean(r_1..r_G)) / std(r_1..r_G)                                      advantages()
    L     = mean_i [ -c_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i) ]          loss()
    s_i   = rho_i^(1/n_i)                      the geometric mean of the ratios of its n_i tokens
    rho_i = pi(y_i) / pi_old(y_i)                              pi_old: the policy before the updates

`--loss` and `--preset` select another loss of this family (docs/gspo.md); grpo.py has the losses
with the ratio of a token. Difference from the paper: truncated weights c_i = pi_old(y_i) /
pi_engine(y_i) correct for the difference between engine and trainer.

Shapes: P prompts on this rank, B on all ranks, G completions per prompt, T packed tokens of a
micro-batch. Per-token tensors are aligned with the *targets*: x_T[t] describes the prediction of
targets_T[t]. A number of a completion is repeated on each of its tokens."""

from itertools import chain
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import AtLeast2, BelowOne, NotNegative, Positive
from common.config.objectives import CorrectionArgs, KLEstimateArgs, LogKLArgs
from common.config.online import OnlineArgs
from common.config.parse import parse
from common.config.rules import require_default, require_effect
from common.data.packing import count_trained, pack_minibatches
from common.evaluate.greedy import evaluate_prompts
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.policy import load_policy, load_reference
from common.model.scoring import with_logprobs
from common.objectives.advantages import centre_groups, group_std
from common.objectives.importance import bounded_exp, importance_weights, is_clipped
from common.objectives.kl import kl_estimate
from common.objectives.reduction import sequence_mean, sequence_sum
from common.objectives.token_weights import token_weights
from common.parallel import distributed
from common.rewards.total import Rewards
from common.rollout.agreement import mean_weight, measure_mismatch, require_agreement
from common.rollout.measure import measure_groups, truncation_penalties
from common.rollout.prompts import load_prompts
from common.rollout.sampler import make_sampler, serve
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, SHOW, describe_rollouts, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

LOSSES = {  # flags that only some losses read
    "gspo": ("clip_low", "clip_high", "dual_clip"),
    "sequence_clip": ("clip_low", "clip_high", "dual_clip"),
    "gmpo": ("clip_low", "clip_high"),
    "topr": (),
    "vespo": (
        "vespo_k_positive", "vespo_lambda_positive", "vespo_k_negative", "vespo_lambda_negative",
    ),
}  # fmt: skip
CLIP_BOUNDS = {"gspo": (3e-4, 4e-4), "sequence_clip": (0.2, 0.2), "gmpo": (0.4, 0.4)}

# ---- the objective ----


def advantages(name: str, rewards_BG: Tensor) -> Tensor:
    """Return the advantage of every completion of all ranks, [B, G] float64. A missing reward (NaN)
    counts in no statistic and gets 0; a group of equal rewards gets exactly 0."""
    centred_BG = centre_groups(rewards_BG)  # r - mean of its group
    match name:
        case "group":  # GRPO: (r - mean) / std of the group
            return centred_BG / (group_std(rewards_BG) + 1e-6)
        case "group_mean":  # Dr. GRPO (arXiv:2503.20783)
            return centred_BG
        case "leave_one_out":  # RLOO (arXiv:2402.14740 Eq. 7): r - mean of the others
            size_B1 = (~rewards_BG.isnan()).sum(-1, keepdim=True)
            return centred_BG * size_B1 / (size_B1 - 1).clamp(min=1)
    raise ValueError(name)


def clip_tokens(log_rho_T: Tensor, A_T: Tensor, low: float, high: float) -> Tensor:
    """Return the log-ratios of tokens without what exceeds the bounds in the direction of the
    advantage. [T]."""
    return torch.where(A_T < 0, log_rho_T.clamp(min=-low), log_rho_T.clamp(max=high))


def completion_log_ratio(
    log_rho_T: Tensor, A_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, args: "Args"
) -> Tensor:
    """Return the log-ratio of each token's completion from those of its tokens. [T]."""
    match args.loss:
        case "gspo":  # arXiv:2507.18071 Eq. 7: the geometric mean
            return sequence_mean(log_rho_T, mask_T, sequence_ids_T)
        case "gmpo":  # arXiv:2507.20673: the geometric mean of clipped ratios
            clipped_T = clip_tokens(log_rho_T, A_T, args.clip_low, args.clip_high)
            return sequence_mean(clipped_T, mask_T, sequence_ids_T)
    return sequence_sum(log_rho_T, mask_T, sequence_ids_T)


def policy_loss(log_rho_T: Tensor, A_T: Tensor, logprobs_T: Tensor, args: "Args") -> Tensor:
    """Return the policy loss of each token. log_rho: `completion_log_ratio`; A: advantage."""
    rho_T = bounded_exp(log_rho_T)
    match args.loss:
        case "gspo" | "sequence_clip":
            # PPO (arXiv:1707.06347 Eq. 7), GSPO (arXiv:2507.18071 Eq. 5)
            clipped_T = rho_T.clamp(1 - args.clip_low, 1 + args.clip_high)
            objective_T = torch.min(rho_T * A_T, clipped_T * A_T)
            if args.dual_clip:
                # the loss of a negative advantage is at most dual_clip |A| (arXiv:1912.09729 Eq. 5)
                bounded_T = torch.max(objective_T, args.dual_clip * A_T)
                objective_T = torch.where(A_T < 0, bounded_T, objective_T)
            return -objective_T
        case "gmpo":  # the clip is that of its tokens
            return -rho_T * A_T
        case "topr":
            # arXiv:2503.14286 Eq. 8: truncates rho of bad completions, ignores rho of good ones
            return torch.where(A_T < 0, rho_T.clamp(max=1), 1.0).detach() * (-A_T * logprobs_T)
        case "vespo":
            # arXiv:2602.10693: phi(rho) = rho^vespo_k exp(vespo_lambda (1 - rho)), 1 at 1
            fall_T = 1 - rho_T
            positive_T = args.vespo_k_positive * log_rho_T + args.vespo_lambda_positive * fall_T
            negative_T = args.vespo_k_negative * log_rho_T + args.vespo_lambda_negative * fall_T
            phi_T = bounded_exp(torch.where(A_T < 0, negative_T, positive_T))
            return phi_T.detach() * (-A_T * logprobs_T)
    raise ValueError(args.loss)


def is_stopped(token_log_rho_T: Tensor, log_rho_T: Tensor, A_T: Tensor, args: "Args") -> Tensor:
    """Return which tokens have no policy gradient, because the ratio of the token or of its
    completion is beyond a bound. Bool [T]."""
    match args.loss:
        case "gspo" | "sequence_clip":
            return is_clipped(log_rho_T, A_T, args.clip_low, args.clip_high, args.dual_clip)
        case "gmpo":
            clipped_T = clip_tokens(token_log_rho_T, A_T, args.clip_low, args.clip_high)
            return (clipped_T != token_log_rho_T) & (A_T != 0)
    return torch.zeros_like(A_T, dtype=torch.bool)


def loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor,
    ref_logprobs_T: Tensor | None, entropy_T: Tensor, advantages_T: Tensor, mask_T: Tensor,
    sequence_ids_T: Tensor, tokens: Tensor, sequences: Tensor, args: "Args", c_mean: float = 1,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each token's share of the objective L, to be minimised, and per-token tensors to log:

        L = sum_t w_t (c_i policy_loss_t + beta KL_t - entropy_coef H_t)

    The tokens of a completion have one policy loss or, for topr and vespo, share it. With the
    weights w_t, the shares of all micro-batches and ranks add up to a mean over the completions of
    the *global* minibatch, `sequences`. c_i = pi_old(y_i) / pi_engine(y_i), bounded, over `c_mean`,
    without gradient. KL_t estimates KL(pi || pi_ref). `mask_T`: trained tokens; `sequence_ids_T`:
    number of each token's completion."""
    token_log_rho_T = logprobs_T - old_logprobs_T
    A_T = advantages_T
    log_rho_T = completion_log_ratio(token_log_rho_T, A_T, mask_T, sequence_ids_T, args)
    c_T = importance_weights(
        old_logprobs_T, rollout_logprobs_T, mask_T, sequence_ids_T, args.correction_form, c_mean
    )
    loss_T = policy_loss(log_rho_T, A_T, logprobs_T, args) * c_T
    logged = {
        "ratio": bounded_exp(log_rho_T.detach()),
        "clip_ratio/region_mean": is_stopped(token_log_rho_T, log_rho_T, A_T, args),
        "sampling/weight": c_T,
        "sampling/kept_fraction": c_T > 0,
    }
    if ref_logprobs_T is not None:
        kl_T = kl_estimate(logprobs_T, ref_logprobs_T, args.kl_estimator, args.kl_clamp)
        loss_T = loss_T + args.beta * kl_T
        logged["kl"] = kl_T
    if args.entropy_coef:  # skipped at 0: the entropy's backward pass reads all logits again
        loss_T = loss_T - args.entropy_coef * entropy_T
    w_T = token_weights(
        args.reduction, mask_T, sequence_ids_T, tokens, sequences, args.max_new_tokens
    )
    return loss_T * w_T, logged


@dataclass
class Args(KLEstimateArgs, LogKLArgs, CorrectionArgs, OnlineArgs):
    PRESETS: ClassVar[dict[str, dict]] = {
        "gspo": dict(loss="gspo", reduction="sequence", advantage="group",
                     clip_low=3e-4, clip_high=4e-4),
        "luspo": dict(loss="gspo", reduction="sequence_sum", advantage="group",
                      clip_low=3e-4, clip_high=4e-4),
        "gmpo": dict(loss="gmpo", reduction="sequence", advantage="group",
                     clip_low=0.4, clip_high=0.4),
        "topr": dict(loss="topr", reduction="sequence_sum", advantage="group_mean"),
    }  # fmt: skip
    samples_per_prompt: AtLeast2 = 8
    lr: Positive[float] = 1e-6
    preset: Literal[tuple(PRESETS)] | None = None
    """published variant, which sets flags (docs/gspo.md); contradicting flags are an error"""
    loss: Literal[tuple(LOSSES)] = "gspo"
    """policy loss (docs/gspo.md), by the completion's ratio. gspo: clip of its geometric mean over
    tokens; sequence_clip: clip of the ratio itself; gmpo: geometric mean of clipped token ratios;
    topr: clips the ratio if A < 0; vespo: smooth weight"""
    reduction: Literal["sequence", "sequence_sum"] = "sequence"
    """reduction of the loss: mean over completions of the means (sequence) or sums (sequence_sum)
    of their tokens' losses. gspo with sequence_sum is LUSPO: the loss times the length"""
    advantage: Literal["group", "group_mean", "leave_one_out"] = "group"
    """advantage by reward r. group: (r - mean) / std of its group; group_mean: r - mean;
    leave_one_out: r - mean of the others"""
    weights_completions = True
    correction: Literal["none", "sequence"] = "sequence"
    """importance weights of sampled completions. sequence: trainer / engine probability; none: no
    weights"""
    clip_low: BelowOne | None = None
    """gspo, sequence_clip: distance from 1 of the lower bound of the completion's ratio; gmpo: of a
    token's log-ratio from 0; default: gspo 3e-4, sequence_clip 0.2, gmpo 0.4"""
    clip_high: NotNegative[float] | None = None
    """the same for the upper bound; default: gspo 4e-4, sequence_clip 0.2, gmpo 0.4"""
    dual_clip: NotNegative[float] = 0.0
    """gspo, sequence_clip: maximum loss if A < 0, in |A| (above 1, often 3); 0: off"""
    vespo_k_positive: NotNegative[float] = 2.0
    """vespo, advantages >= 0: exponent of the ratio; the weight is largest at k / lambda"""
    vespo_lambda_positive: NotNegative[float] = 3.0
    """vespo, advantages >= 0: rate of the decay of the weight above k / lambda"""
    vespo_k_negative: NotNegative[float] = 3.0
    """vespo, advantages < 0: exponent of the ratio; the weight is largest at k / lambda"""
    vespo_lambda_negative: NotNegative[float] = 2.0
    """vespo, advantages < 0: rate of the decay of the weight above k / lambda"""
    beta: NotNegative[float] = 0.0
    """weight of the KL penalty to the starting model in the loss; 0: no reference model"""
    kl_estimator: Literal["k2", "k3"] = "k3"
    entropy_coef: NotNegative[float] = 0.0
    """weight of the entropy bonus, reduced over tokens like the loss (--reduction)"""

    def __post_init__(self) -> None:
        require_effect(self, "loss", LOSSES)
        low, high = CLIP_BOUNDS.get(self.loss, (None, None))
        if self.clip_low is None:
            self.clip_low = low
        if self.clip_high is None:
            self.clip_high = high
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"--dual_clip {self.dual_clip} must be above 1, or 0 to turn it off")
        if self.loss in ("sequence_clip", "gmpo") and self.reduction != "sequence":
            problem = f"--loss {self.loss} has no version times the length; use sequence"
            raise ValueError(f"--reduction {self.reduction}: {problem}")
        if not (self.beta or self.log_kl):
            require_default(self, ("kl_estimator", "kl_clamp"), "with --beta 0")


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.live_rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    needs_reference = args.beta > 0 or args.log_kl
    needs_old = args.updates_per_rollout > 1 or args.correction_normalize
    path = resolve_model(args.model, weights=not args.dry_run, rope_factor=args.rope_factor)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, context_length(path, args))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    if args.dry_run:  # ends the process
        frozen = [path] * needs_reference
        dry_run(args, path, tokenizer, prompts, held_out, rewards, frozen, own_forwards=needs_old)
    begin_run(args)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    reference = load_reference(policy, args, device) if needs_reference else None  # frozen
    optimizer = adamw(policy, args)
    rollouts = make_sampler(policy, prompts, args, tokenizer, rewards)  # here or on rollout ranks

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    run = Run(
        args, policy, optimizer, tokenizer, total_steps, rollouts=rollouts, show=SHOW, curves=CURVES
    )
    run.message(*describe_rollouts(args, prompts, held_out, rollouts))
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
        advantages_BG = advantages(args.advantage, total_BG)

        # ---- 3. pack: completions move to the ranks that train on them; fixed log-probs ----
        minibatches = pack_minibatches(
            groups, positions, args.minibatches, args.pack_tokens, device, args.share_prefix
        )
        checks_engine = run.checks_engine(step)
        old = policy if checks_engine or needs_old else None  # None: the update computes them
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
                    share_T, logged = loss(
                        logprobs_T, old_logprobs_T, mb.rollout_logprobs_T, mb.ref_logprobs_T,
                        entropy_T, mb.on_tokens(advantages_BG), mb.loss_mask_T, mb.sequence_ids_T,
                        tokens, sequences, args, c_mean,
                    )  # fmt: skip
                    # FSDP averages gradients over ranks; undo that.
                    (share_T.sum() * world_size).backward()
                    total_loss += share_T.detach().sum()
                    meter.tokens(mb, {"entropy": entropy_T} | logged, share_T)
                    measure_mismatch(meter, old_logprobs_T, mb)
                grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, total_loss)
                meter.mean("grad_norm", grad_norm)
                meter.mean("loss", total_loss, 1 / world_size)  # the loss is the sum over ranks

        # ---- 5. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr, beta=args.beta)
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
