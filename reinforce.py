r"""REINFORCE for language models (Williams 1992), REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).

    torchrun --nproc_per_node 8 reinforce.py --config configs/qwen3_1.7b_reinforce.yaml

The policy makes rewarded completions more likely. REINFORCE++ needs neither a group nor a value
model: it compares the reward of a completion, less its KL to the starting model, with all rewards
of the batch. At a token, the KL counts from this token on:

    R_t   = score_i - beta sum_{j >= t} KL_j                                            kl_to_come()
    A_t   = (R_t - mean(R)) / std(R)       over all trained tokens of the step     with_advantages()
    L     = mean_t [ -c_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) ]     loss()
    rho_t = pi(y_t) / pi_old(y_t)                         pi_old: the policy before the updates

Its variant with a baseline subtracts the mean of the group first and puts the KL into the loss.
`--preset` sets either, or plain REINFORCE, -A log pi(y_t), as published.

Difference from the papers: weights c_t = min(pi_old(y_t) / pi_engine(y_t), 2) (docs/losses.md).

Shapes: P prompts on this rank, B on all ranks, G completions per prompt, T packed tokens of a
micro-batch. Per-token tensors are aligned with the *targets*: x_T[t] is about targets_T[t]."""

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import NotNegative, Positive
from common.config.online import OnlineArgs
from common.config.parse import parse
from common.evaluate.held_out import evaluate_prompts
from common.metrics.moments import moments
from common.model.hub import longest_sequence, resolve_model
from common.model.policy import load_policy, load_reference
from common.model.scoring import with_logprobs
from common.objectives.advantages import EPSILON, centre_groups
from common.objectives.importance import CorrectionArgs, bounded_exp, importance_weights, is_clipped
from common.objectives.kl import KL, KLEstimateArgs, LogKLArgs, kl_estimate
from common.objectives.policy import BY_TOKEN, PolicyInputs, PolicyLoss, PolicyLossArgs
from common.packs.packing import PackedBatch, count_trained, pack_minibatches, per_sample
from common.parallel import distributed
from common.rewards.total import Rewards, without_unscored
from common.rollout.agreement import measure_mismatch, require_agreement
from common.rollout.measure import measure_groups, trained_counts, truncation_penalties
from common.rollout.prompts import load_prompts
from common.rollout.sampler import make_sampler, serve
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, SHOW, describe_rollouts, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

# ---- the objective ----


def less_mean(rewards_BG: Tensor) -> Tensor:
    """Return the reward of every completion of all ranks minus the mean of all, [B, G] float64. A
    missing reward (NaN) counts in no mean and gets 0; equal rewards get exactly 0."""
    return centre_groups(rewards_BG.reshape(1, -1)).reshape(rewards_BG.shape)


def leave_one_out(rewards_BG: Tensor) -> Tensor:
    """Return each reward minus the mean of the others of its group (RLOO), [B, G] float64."""
    size_B1 = (~rewards_BG.isnan()).sum(-1, keepdim=True)
    # n / (n - 1) (r - mean of all n)
    return centre_groups(rewards_BG) * size_B1 / (size_B1 - 1).clamp(min=1)


LESS_BASELINE = {  # by --advantage
    "reinforce++": less_mean,
    "reinforce++_baseline": centre_groups,  # minus the mean of the group
    "leave_one_out": leave_one_out,
}


def kl_to_come(kl_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Return, at each token, the sum of the KL over the trained tokens of its completion from this
    one on (arXiv:2501.03262 Eq. 8). Shape [T], float64."""
    trained_T = torch.where(mask_T, kl_T, 0).double()
    until_T = trained_T.cumsum(0)
    ends_N = sequence_ids_T.bincount().cumsum(0) - 1
    return until_T[ends_N][sequence_ids_T] - until_T + trained_T


def sampled_kl(mb: PackedBatch, args: "Args") -> Tensor:
    """Return the estimated KL of the policy that sampled to the reference, [T]."""
    return kl_estimate(mb.old_logprobs_T, mb.ref_logprobs_T, args.kl_estimator)


def before_whitening(
    mb: PackedBatch, less_BG: Tensor, scores_BG: Tensor, args: "Args"
) -> PackedBatch:
    """Return the micro-batch with `advantages_T`, [T] float64: the completion's, minus beta times
    the KL to come. Tokens of an environment, and of completions without a reward (NaN), are masked:
    advantage 0, in no statistic."""
    A_T = mb.on_tokens(less_BG).double()
    if args.kl_in == "return" and mb.ref_logprobs_T is not None:
        kl_T = kl_to_come(sampled_kl(mb, args), mb.loss_mask_T, mb.sequence_ids_T)
        A_T = A_T - args.beta * kl_T
    mask_T = mb.loss_mask_T & ~mb.on_tokens(scores_BG).isnan()
    return mb.with_streams(advantages_T=torch.where(mask_T, A_T, 0), loss_mask_T=mask_T)


def with_advantages(
    minibatches: list[list[PackedBatch]], scores_BG: Tensor, args: "Args"
) -> list[list[PackedBatch]]:
    """Return the micro-batches with `advantages_T`, [T] float32. Except with leave_one_out they are
    whitened over the tokens of all ranks that count. Collective."""
    less_BG = LESS_BASELINE[args.advantage](scores_BG)
    raw = [[before_whitening(mb, less_BG, scores_BG, args) for mb in mbs] for mbs in minibatches]
    mean, scale = 0.0, 1.0
    if args.advantage != "leave_one_out":
        mean, std = moments(raw, lambda mb: mb.advantages_T)
        scale = std + EPSILON

    def with_whitened(mb: PackedBatch, raw_mb: PackedBatch) -> PackedBatch:
        A_T = (raw_mb.advantages_T - mean) / scale * raw_mb.loss_mask_T
        return mb.with_streams(advantages_T=A_T.float())

    return [
        [with_whitened(mb, raw_mb) for mb, raw_mb in zip(mbs, raw_mbs, strict=True)]
        for mbs, raw_mbs in zip(minibatches, raw, strict=True)
    ]


def clip(x: PolicyInputs) -> PolicyLoss:
    """Return loss, rho and clipping per token. The same in five scripts; a test compares them."""
    rho_T = bounded_exp(x.log_rho_T)
    clipped_T = rho_T.clamp(1 - x.clip_low, 1 + x.clip_high)
    loss_T = -torch.min(rho_T * x.A_T, clipped_T * x.A_T)
    return PolicyLoss(loss_T, rho_T, is_clipped(x.log_rho_T, x.A_T, x.clip_low, x.clip_high))


LOSSES = {"clip": clip} | BY_TOKEN  # by --loss


def loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor,
    ref_logprobs_T: Tensor | None, entropy_T: Tensor, advantages_T: Tensor, mask_T: Tensor,
    sequence_ids_T: Tensor, num_tokens: Tensor, num_sequences: Tensor, args: "Args",
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each token's share of the objective L, to be minimised, and per-token tensors to log:

        L = sum_t w_t (c_t policy_loss_t + beta KL_t - entropy_coef H_t)

    KL_t is there only with --kl_in loss. w_t = 1 / `num_tokens`, the trained tokens of the *global*
    minibatch, or 1 / `num_sequences` with --reduction sequence_sum. `mask_T`: trained tokens;
    `sequence_ids_T`: the completion of each token."""
    low, high = args.clip_low, args.clip_high
    x = PolicyInputs(logprobs_T, old_logprobs_T, advantages_T, mask_T, sequence_ids_T, low, high)
    policy_T, ratio_T, stopped_T = LOSSES[args.loss](x)
    correction = args.correction_form()
    c_T = importance_weights(old_logprobs_T, rollout_logprobs_T, mask_T, sequence_ids_T, correction)
    loss_T = policy_T * c_T
    logged = {
        "ratio": ratio_T.detach(),
        "clip_ratio/region_mean": stopped_T,
        "sampling/weight": c_T,
    }
    if args.kl_in == "loss" and ref_logprobs_T is not None:
        kl_T = kl_estimate(logprobs_T, ref_logprobs_T, args.kl_estimator)
        loss_T = loss_T + args.beta * kl_T
        logged["kl"] = kl_T
    if args.entropy_coef:  # skipped at 0: its backward pass reads all logits again
        loss_T = loss_T - args.entropy_coef * entropy_T
    w_T = mask_T / (num_tokens if args.reduction == "token" else num_sequences)
    return loss_T * w_T, logged


@dataclass
class Args(PolicyLossArgs, KLEstimateArgs, LogKLArgs, CorrectionArgs, OnlineArgs):
    PRESETS: ClassVar[dict[str, dict]] = {
        "reinforce": dict(loss="reinforce", reduction="sequence_sum", advantage="leave_one_out",
                          beta=0.0, minibatches=1, epochs_per_rollout=1),
        "reinforce++": dict(loss="clip", reduction="token", advantage="reinforce++", beta=0.01,
                            kl_in="return", kl_estimator="k1", clip_low=0.2, clip_high=0.2),
        "reinforce++_baseline": dict(loss="clip", reduction="token",
                                     advantage="reinforce++_baseline", beta=0.01, kl_in="loss",
                                     kl_estimator="k2", clip_low=0.2, clip_high=0.2),
    }  # fmt: skip
    lr: Positive[float] = 1e-6
    preset: Literal[tuple(PRESETS)] | None = None
    """set the flags of a published variant (docs/reinforce.md); contradicting flags are an error"""
    reduction: Literal["token", "sequence_sum"] = "token"
    """reduce the loss of all tokens. token: their mean; sequence_sum: mean over completions of
    their sums"""
    advantage: Literal[tuple(LESS_BASELINE)] = "reinforce++"
    """compute the advantage of a completion. reinforce++: the reward, whitened over the tokens of
    the batch; reinforce++_baseline: the same, after the mean of the group is subtracted;
    leave_one_out: the reward minus the mean of the others in its group"""
    beta: NotNegative[float] = 0.01
    """penalise the KL to the starting model with this weight (--kl_in); 0: no penalty, and no
    reference model in memory"""
    kl_in: Annotated[Literal["loss", "return"], KL] = "return"
    """put the KL penalty here. loss: on each token of the loss; return: summed from a token on, in
    the advantage of this token (REINFORCE++)"""
    entropy_coef: NotNegative[float] = 0.0
    """add an entropy bonus with this weight, reduced over tokens like the loss (--reduction)"""

    def __post_init__(self) -> None:
        if self.samples_per_prompt < 2 and self.advantage != "reinforce++":
            problem = f"--advantage {self.advantage} compares completions"
            raise ValueError(f"{problem}; set --samples_per_prompt above 1")

    def cautions(self) -> Iterator[str]:
        """Yield warnings about flags with unexpected effects."""
        if self.beta and self.kl_in == "loss" and self.kl_estimator == "k1":
            yield "--kl_estimator k1: the expected gradient is zero and constrains nothing"
        if self.loss == "reinforce" and self.updates_per_rollout > 1:
            yield "--loss reinforce: the gradient is biased after the first update of a rollout"


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.live_rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args, args.dry_run)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    needs_reference = args.beta > 0 or args.log_kl
    measures_kl = needs_reference and args.kl_in != "loss"  # before the update
    path = resolve_model(args.model, weights=not args.dry_run)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, longest_sequence(path, args))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device, args.dry_run)
    if args.dry_run:
        frozen = [path] if needs_reference else []
        return dry_run(args, path, tokenizer, prompts, held_out, rewards, frozen,
                       own_forwards=1 if measures_kl else 1 - 1 / args.minibatches)  # fmt: skip
    begin_run(args, prompts.rows, held_out.rows)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    reference = load_reference(policy, args, device) if needs_reference else None  # frozen
    optimizer = adamw(policy, args)
    sampler = make_sampler(policy, prompts, args, tokenizer, on_complete=rewards.begin)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    run = Run(
        args, policy, optimizer, tokenizer, total_steps, sampler=sampler, show=SHOW, curves=CURVES
    )
    run.message(*describe_rollouts(args, prompts, held_out, sampler, args.preset), *args.cautions())
    meter = run.meter
    if run.first_step == 0:
        run.log(0, evaluate_prompts(sampler, 0, held_out, rewards))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. rollout: G completions of each of P prompts; their rewards begin meanwhile ----
        rollout = sampler.rollout(step, total_steps, meter)  # syncs weights, then samples
        if rollout is None:  # a stop was requested
            break
        groups, positions = rollout.groups, rollout.positions  # P of the B groups

        # ---- 2. rewards: wait for the last ones; pack: completions move to ranks that train ----
        with meter.time("reward"):
            rewards_PG, named_rewards, _ = rewards.wait(groups, meter)
        measure_groups(meter, groups, rewards_PG, named_rewards, warn=step == 0)
        trained = without_unscored(groups, rewards_PG)
        minibatches = pack_minibatches(
            trained, positions, args.minibatches, args.pack_tokens, device, policy.share_prefix
        )
        checks_engine = run.checks_engine(step)
        needs_all = checks_engine or measures_kl
        with meter.time("logprobs"):
            minibatches = with_logprobs(
                minibatches, args.temperature, old=policy, ref=reference, old_of_first=needs_all
            )
        if checks_engine:
            require_agreement(minibatches, step, args, device)

        # ---- 3. scores and advantages, with statistics over all ranks ----
        penalties_PG = truncation_penalties(groups, args.missing_eos_penalty)
        scores_BG = distributed.gather_rows(rewards_PG + penalties_PG, positions)
        if measures_kl:
            for mb in chain(*minibatches):
                meter.masked_mean("kl", sampled_kl(mb, args), mb.loss_mask_T)
        minibatches = with_advantages(minibatches, scores_BG.to(device), args)

        # ---- 4. update: one optimizer step per minibatch; a loss of nan or inf stops the run ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for n, minibatch in enumerate(minibatches * args.epochs_per_rollout):
                num_tokens, num_sequences = count_trained(minibatch)  # on all ranks
                total_loss = torch.zeros((), device=device)
                for mb in minibatch:
                    logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
                    if n == 0:  # before the first update pi_old is pi
                        mb.old_logprobs_T = logprobs_T.detach()
                    share_T, logged = loss(
                        logprobs_T, mb.old_logprobs_T, mb.rollout_logprobs_T, mb.ref_logprobs_T,
                        entropy_T, mb.advantages_T, mb.loss_mask_T, mb.sequence_ids_T,
                        num_tokens, num_sequences, args,
                    )  # fmt: skip
                    # FSDP averages gradients over ranks; undo that.
                    (share_T.sum() * world_size).backward()
                    total_loss += share_T.detach().sum()
                    meter.tokens(mb, {"entropy": entropy_T} | logged, share_T)
                    measure_mismatch(meter, mb.old_logprobs_T, mb)
                grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, total_loss)
                meter.mean("grad_norm", grad_norm)
                meter.sum_over_ranks("loss", total_loss)

        # ---- 5. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate_prompts(sampler, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        of_tokens = (mb.sequence_sums(mb.advantages_T) for mb in chain(*minibatches))
        advantages_BG = per_sample(chain(*minibatches), of_tokens, scores_BG.shape)
        advantages_PG = advantages_BG[positions] / trained_counts(groups).clamp(min=1)
        run.show_samples(step + 1, groups, positions, rewards_PG, advantages_PG, named_rewards)

    run.end()
    sampler.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
