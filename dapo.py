r"""DAPO: GRPO for long chains of thought (Yu et al. 2025, arXiv:2503.14476).

    torchrun --nproc_per_node 8 dapo.py --config configs/qwen3_1.7b_dapo.yaml

Groups of G completions are compared as in grpo.py, with four changes: a wider upper clip bound
(clip-higher), a mean over all tokens of the batch, a penalty near the length limit (overlong
shaping), and further groups in place of groups with equal rewards (dynamic sampling, chapter 1
of the loop). There is no KL term:

    score_i = r_i + penalty(length_i)                                           overlong_penalties()
    A_i     = (score_i - mean(score_1..score_G)) / std(score_1..score_G)                advantages()
    L       = mean_t [ -c_t min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i) ]   loss()
    rho_t   = pi(y_t) / pi_old(y_t)                         pi_old: the policy before the updates

Differences from the paper (docs/dapo.md): importance weights c_t = min(pi_old(y_t) /
pi_engine(y_t), 2) correct for the difference between engine and trainer, and a step trains on fewer
groups if 10 x prompts_per_step prompts do not give enough.

Shapes: P prompts on this rank, B of all draws and ranks of a step, G completions per prompt, T
packed tokens of a micro-batch. Per-token tensors are aligned with the *targets*: x_T[t] is about
targets_T[t]."""

import math
from itertools import chain
from typing import Annotated, NamedTuple

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import AtLeast2, Fraction, Needs, NotNegative, Positive
from common.config.online import OnlineArgs
from common.config.parse import parse
from common.evaluate.held_out import evaluate_prompts
from common.metrics.meter import Meter
from common.model.hub import longest_sequence, resolve_model
from common.model.policy import load_policy, load_reference
from common.model.scoring import with_logprobs
from common.objectives.advantages import EPSILON, centre_groups, group_std, unequal
from common.objectives.importance import CorrectionArgs, bounded_exp, importance_weights, is_clipped
from common.objectives.kl import LogKLArgs, kl_estimate
from common.objectives.policy import BY_TOKEN, PolicyInputs, PolicyLoss, PolicyLossArgs
from common.packs.packing import count_trained, pack_minibatches
from common.packs.sample import Group
from common.parallel import distributed
from common.rewards.total import Rewards, without_unscored
from common.rollout.agreement import measure_mismatch, require_agreement
from common.rollout.measure import lengths, measure_groups, truncation_penalties
from common.rollout.prompts import load_prompts
from common.rollout.sampler import Sampler, make_sampler, serve
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, SHOW, describe_rollouts, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

MAX_DRAWS = 10  # a step draws at most 10 x prompts_per_step prompts

# ---- the objective ----


def overlong_penalties(lengths: Tensor, args: "Args") -> Tensor:
    """Return the penalties for length, float64: 0 up to (1 - overlong_buffer) max_new_tokens
    tokens, then falling linearly to -1 at max_new_tokens (Eq. 13)."""
    if not args.overlong_buffer:
        return torch.zeros_like(lengths, dtype=torch.float64)
    buffer = args.overlong_buffer * args.max_new_tokens
    excess = (args.max_new_tokens - buffer - lengths.double()) / buffer
    return excess.clamp(-1, 0)


def advantages(rewards_BG: Tensor) -> Tensor:
    """Return the advantage of every completion, [B, G] float64: (r - mean) / std of its group. A
    missing reward (NaN) counts in no statistic and gets 0; a group of equal rewards gets exactly
    0."""
    return centre_groups(rewards_BG) / (group_std(rewards_BG) + EPSILON)


def clip(x: PolicyInputs) -> PolicyLoss:
    """Return loss, rho and clipping per token. The same in five scripts; a test compares them."""
    rho_T = bounded_exp(x.log_rho_T)
    clipped_T = rho_T.clamp(1 - x.clip_low, 1 + x.clip_high)
    loss_T = -torch.min(rho_T * x.A_T, clipped_T * x.A_T)
    return PolicyLoss(loss_T, rho_T, is_clipped(x.log_rho_T, x.A_T, x.clip_low, x.clip_high))


LOSSES = {"clip": clip} | BY_TOKEN  # by --loss


def loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, advantages_T: Tensor,
    mask_T: Tensor, sequence_ids_T: Tensor, num_tokens: Tensor, args: "Args",
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each token's share of L (Eq. 8), to be minimised, and per-token tensors to log.
    `mask_T`: trained tokens; `sequence_ids_T`: the completion of each token; `num_tokens`: trained
    tokens of the *global* minibatch."""
    low, high = args.clip_low, args.clip_high
    x = PolicyInputs(logprobs_T, old_logprobs_T, advantages_T, mask_T, sequence_ids_T, low, high)
    loss_T, ratio_T, stopped_T = LOSSES[args.loss](x)
    correction = args.correction_form()
    c_T = importance_weights(old_logprobs_T, rollout_logprobs_T, mask_T, sequence_ids_T, correction)
    logged = {
        "ratio": ratio_T.detach(),
        "clip_ratio/region_mean": stopped_T,
        "sampling/weight": c_T,
    }
    return loss_T * c_T * mask_T / num_tokens, logged


# ---- dynamic sampling ----


def next_draw(num_kept: int, num_drawn: int, prompts_per_step: int) -> int:
    """Return the number of prompts to draw next: the smallest that probably fills the step, but at
    most `prompts_per_step`, and `MAX_DRAWS` times as many in all draws of a step.

    If a prompt is kept with the same chance as so far (`num_kept` of `num_drawn`), n prompts give
    n chance groups on average. With probability 0.98 they are at most two deviations fewer."""
    missing = prompts_per_step - num_kept
    chance = num_kept / max(1, num_drawn)
    left = MAX_DRAWS * prompts_per_step - num_drawn
    for n in range(missing, prompts_per_step):
        if n * chance - 2 * math.sqrt(n * chance * (1 - chance)) >= missing:
            return min(n, left)
    return min(prompts_per_step, left)


class Drawn(NamedTuple):
    """Groups of a step, in the order in which they were drawn."""

    groups: dict[int, Group]
    """this rank's groups by their position in the draws of all ranks"""
    named_rewards: dict[str, Tensor]
    """of this rank's groups, [P, G] each"""
    rewards_BG: Tensor
    """of all ranks, without penalties"""
    scores_BG: Tensor
    """of all ranks: rewards with penalties"""
    is_unequal_B: Tensor
    """whether a group has unequal rewards, without penalties"""
    kept: list[int]
    """positions of the groups to train on"""


def draw_groups(
    sampler: Sampler, rewards: Rewards, step: int, total_steps: int, args: "Args", meter: Meter
) -> Drawn | None:
    """Sample prompts and score their completions until enough groups have unequal rewards. Return
    None if a stop was requested. Collective. Raises `RunError` if no group has."""
    groups = {}
    named_of_draws = []  # this rank's rewards by name, one table per draw
    draws = []  # rewards and scores of all ranks, [B, 2, G] each
    kept = []
    num_drawn = 0
    while len(kept) < args.prompts_per_step:
        size = next_draw(len(kept), num_drawn, args.prompts_per_step)
        if size <= 0:
            break
        rollout = sampler.rollout(step, total_steps, meter, size)
        if rollout is None:
            return None
        new_groups, positions = rollout.groups, rollout.positions  # P of the B groups
        with meter.time("reward"):
            rewards_PG, named_PG, _ = rewards.wait(new_groups, meter)
        measure_groups(meter, new_groups, rewards_PG, named_PG, warn=step == num_drawn == 0)
        named_of_draws.append(named_PG)
        penalties_PG = truncation_penalties(new_groups, args.missing_eos_penalty)
        penalties_PG = penalties_PG + overlong_penalties(lengths(new_groups), args)
        both_P2G = torch.stack([rewards_PG, rewards_PG + penalties_PG], dim=1)
        draws.append(distributed.gather_rows(both_P2G, positions))
        groups |= zip((num_drawn + i for i in positions), new_groups, strict=True)
        is_unequal_B = unequal(torch.cat(draws)[:, 0])
        num_drawn = len(is_unequal_B)
        kept = is_unequal_B.nonzero().flatten().tolist()[: args.prompts_per_step]
    if not kept:
        most = MAX_DRAWS * args.prompts_per_step
        raise distributed.RunError(f"step {step + 1}: none of {most} groups has unequal rewards")
    named_rewards = {
        name: distributed.join_rows([of_draw[name] for of_draw in named_of_draws])
        for name in named_of_draws[0]
    }
    rewards_BG, scores_BG = torch.cat(draws).unbind(1)
    return Drawn(groups, named_rewards, rewards_BG, scores_BG, unequal(rewards_BG), kept)


@dataclass
class Args(PolicyLossArgs, LogKLArgs, CorrectionArgs, OnlineArgs):
    lr: Positive[float] = 1e-6
    samples_per_prompt: AtLeast2 = 8
    """sample this many completions for each prompt (G): a group, whose rewards are compared"""
    clip_high: Annotated[NotNegative[float], Needs(loss="clip")] = 0.28
    overlong_buffer: Fraction = 0.2
    """within this last fraction of max_new_tokens, penalise length by up to 1; 0: off"""
    mask_truncated: bool = False
    """do not train on truncated completions; their rewards still count in their groups"""


def without_truncated(group: Group) -> Group:
    """Return the group, in which truncated completions have no trained tokens any more."""
    return [sample.untrained() if sample.finish_reason == "length" else sample for sample in group]


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.live_rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args, args.dry_run)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    path = resolve_model(args.model, weights=not args.dry_run)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, longest_sequence(path, args))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device, args.dry_run)
    if args.dry_run:
        frozen = [path] if args.log_kl else []
        return dry_run(args, path, tokenizer, prompts, held_out, rewards, frozen,
                       own_forwards=1 - 1 / args.minibatches)  # fmt: skip
    begin_run(args, prompts.rows, held_out.rows)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    reference = load_reference(policy, args, device) if args.log_kl else None  # frozen
    optimizer = adamw(policy, args)
    sampler = make_sampler(policy, prompts, args, tokenizer, on_complete=rewards.begin)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    curves = (*CURVES, "dynamic_sampling/unequal_fraction")
    run = Run(
        args, policy, optimizer, tokenizer, total_steps, sampler=sampler, show=SHOW, curves=curves
    )
    run.message(*describe_rollouts(args, prompts, held_out, sampler))
    meter = run.meter
    if run.first_step == 0:
        run.log(0, evaluate_prompts(sampler, 0, held_out, rewards))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. rollouts until enough groups have unequal rewards (dynamic sampling) ----
        drawn = draw_groups(sampler, rewards, step, total_steps, args, meter)
        if drawn is None:  # a stop was requested
            break
        groups, kept = drawn.groups, drawn.kept

        # ---- 2. advantages; pack: kept completions move to the ranks that train on them ----
        advantages_BG = advantages(drawn.scores_BG)[kept].to(device)
        kept_at = {i: n for n, i in enumerate(kept) if i in groups}  # this rank's, by their draw
        kept_groups = without_unscored([groups[i] for i in kept_at], drawn.rewards_BG[[*kept_at]])
        if args.mask_truncated:
            kept_groups = [without_truncated(group) for group in kept_groups]
        positions = [*kept_at.values()]
        num_minibatches = min(args.minibatches, len(kept))
        minibatches = pack_minibatches(
            kept_groups, positions, num_minibatches, args.pack_tokens, device, policy.share_prefix
        )
        checks_engine = run.checks_engine(step)
        with meter.time("logprobs"):
            minibatches = with_logprobs(
                minibatches, args.temperature, old=policy, ref=reference, old_of_first=checks_engine
            )
        if checks_engine:
            require_agreement(minibatches, step, args, device)

        # ---- 3. update: one optimizer step per minibatch; a loss of nan or inf stops the run ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for n, minibatch in enumerate(minibatches * args.epochs_per_rollout):
                num_tokens, _ = count_trained(minibatch)  # on all ranks
                total_loss = torch.zeros((), device=device)
                for mb in minibatch:
                    logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
                    if n == 0:  # before the first update pi_old is pi
                        mb.old_logprobs_T = logprobs_T.detach()
                    share_T, logged = loss(
                        logprobs_T, mb.old_logprobs_T, mb.rollout_logprobs_T,
                        mb.on_tokens(advantages_BG), mb.loss_mask_T, mb.sequence_ids_T,
                        num_tokens, args,
                    )  # fmt: skip
                    if mb.ref_logprobs_T is not None:
                        logged["kl"] = kl_estimate(logprobs_T.detach(), mb.ref_logprobs_T)
                    # FSDP averages gradients over ranks; undo that.
                    (share_T.sum() * world_size).backward()
                    total_loss += share_T.detach().sum()
                    meter.tokens(mb, {"entropy": entropy_T} | logged, share_T)
                    measure_mismatch(meter, mb.old_logprobs_T, mb)
                grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, total_loss)
                meter.mean("grad_norm", grad_norm)
                meter.sum_over_ranks("loss", total_loss)

        # ---- 4. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*kept_groups), lr=lr)
        metrics["dynamic_sampling/draws"] = len(drawn.rewards_BG) / args.prompts_per_step
        metrics["dynamic_sampling/unequal_fraction"] = float(drawn.is_unequal_B.double().mean())
        if run.evaluates(step + 1):
            metrics |= evaluate_prompts(sampler, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        shown_BG = torch.zeros(drawn.rewards_BG.shape, dtype=torch.float64)
        shown_BG[kept] = advantages_BG.cpu()  # samples.jsonl has all groups that were drawn
        drawn_at = list(groups)
        run.show_samples(
            step + 1,
            list(groups.values()),
            drawn_at,
            drawn.rewards_BG[drawn_at],
            shown_BG[drawn_at],
            drawn.named_rewards,
        )

    run.end()
    sampler.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
