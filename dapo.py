r"""DAPO: GRPO for long chains of thought (Yu et al. 2025, arXiv:2503.14476).

    torchrun --nproc_per_node 8 dapo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k \
        --reward gsm8k

Groups of G completions are compared as in grpo.py, with four changes: a wider upper clip bound
(clip-higher), a mean over all tokens of the batch, a penalty near the length limit (overlong
shaping), and further groups in place of those whose rewards are all equal (dynamic sampling,
chapter 1 of the loop). There is no KL term:

    R_i   = r_i + penalty(length_i)                                             overlong_penalties()
    A_i   = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                                      advantages()
    L     = mean_t [ -c_t min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i) ]     loss()
    rho_t = pi(y_t) / pi_old(y_t)                    pi_old: the policy at the time of the rollout

On request only the tokens of highest entropy have a loss (Wang et al. 2025, arXiv:2506.01939), or
only the shortest completions of a group (GFPO, arXiv:2508.09726).

Differences from the paper (docs/dapo.md): truncated importance weights c_t = pi_old(y_t) /
pi_engine(y_t) correct for the difference between engine and trainer, and a step trains on fewer
groups if --max_draws do not give enough.

Shapes: P prompts on this rank, B of all draws and ranks of a step, G completions per prompt, T
packed tokens of a micro-batch. Per-token tensors are aligned with the *targets*: x_T[t] describes
the prediction of targets_T[t]."""

import fractions
import math
from dataclasses import replace
from itertools import chain
from typing import Literal, NamedTuple

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import (
    AtLeast2,
    Fraction,
    NotNegative,
    Positive,
    PositiveFraction,
)
from common.config.objectives import ClipArgs, CorrectionArgs, LogKLArgs
from common.config.online import OnlineArgs
from common.config.parse import parse
from common.config.rules import require_default
from common.data.packing import PackedBatch, count_trained, pack_minibatches
from common.data.sample import Completion, Group
from common.evaluate.greedy import evaluate_prompts
from common.metrics.meter import Meter
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.policy import load_policy, load_reference
from common.model.scoring import with_logprobs
from common.objectives.advantages import centre_groups, group_std, unequal
from common.objectives.importance import bounded_exp, importance_weights, is_clipped
from common.objectives.kl import kl_estimate
from common.parallel import distributed
from common.rewards.total import Rewards
from common.rollout.agreement import mean_weight, measure_mismatch, require_agreement
from common.rollout.base_sampler import Sampler
from common.rollout.measure import lengths, measure_groups, truncation_penalties
from common.rollout.prompts import load_prompts
from common.rollout.sampler import make_sampler, serve
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, SHOW, describe_rollouts, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

# ---- the objective ----


def overlong_penalties(lengths: Tensor, args: "Args") -> Tensor:
    """Return the penalties for length, float64: 0 up to (1 - overlong_buffer) max_new_tokens
    tokens, then falling linearly to -overlong_penalty at max_new_tokens (Eq. 13)."""
    if not args.overlong_buffer:
        return torch.zeros_like(lengths, dtype=torch.float64)
    buffer = args.overlong_buffer * args.max_new_tokens
    excess = (args.max_new_tokens - buffer - lengths.double()) / buffer
    return args.overlong_penalty * excess.clamp(-1, 0)


def retained(scores_PG: Tensor, lengths_PG: Tensor, args: "Args") -> Tensor:
    """Return which completions count in the statistics of their group and are trained on, [P, G]
    bool: all or, with --gfpo_keep, the shortest ones or those with the most reward per token
    (arXiv:2508.09726); the first of equal ones, and those without a reward (NaN) last."""
    if not args.gfpo_keep:
        return torch.ones_like(scores_PG, dtype=torch.bool)
    cost_PG = lengths_PG.double()
    if args.gfpo_by == "reward_per_token":
        cost_PG = -scores_PG / cost_PG
    cost_PG = cost_PG.masked_fill(scores_PG.isnan(), math.inf)
    return cost_PG.argsort(stable=True).argsort() < args.gfpo_keep


def advantages(rewards_BG: Tensor) -> Tensor:
    """Return the advantage of every completion, [B, G] float64: (R - mean) / std of its group. A
    missing reward (NaN) counts in no statistic and gets 0; a group of equal rewards gets exactly
    0."""
    return centre_groups(rewards_BG) / (group_std(rewards_BG) + 1e-6)


def loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    old_entropy_T: Tensor | None,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    tokens: Tensor,
    threshold: float,
    args: "Args",
    c_mean: float = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each token's share of the objective L, to be minimised, and per-token tensors to log.
    `mask_T`: trained tokens; `sequence_ids_T`: the completion of each token; `tokens`: number of
    trained tokens of the *global* minibatch; `threshold`: least entropy of a token with a loss,
    with --top_entropy."""
    log_rho_T = logprobs_T - old_logprobs_T
    A_T = advantages_T
    rho_T = bounded_exp(log_rho_T)
    clipped_T = rho_T.clamp(1 - args.clip_low, 1 + args.clip_high)
    loss_T = -torch.min(rho_T * A_T, clipped_T * A_T)
    c_T = importance_weights(
        old_logprobs_T, rollout_logprobs_T, mask_T, sequence_ids_T, args.correction_form, c_mean
    )
    loss_T = loss_T * c_T
    if args.top_entropy < 1:
        loss_T = loss_T * (old_entropy_T >= threshold)
    logged = {
        "ratio": rho_T.detach(),
        "clip_ratio/region_mean": is_clipped(
            log_rho_T.detach(), A_T, args.clip_low, args.clip_high
        ),
        "sampling/weight": c_T,
        "sampling/kept_fraction": c_T > 0,
    }
    return loss_T * mask_T / tokens, logged


def entropy_threshold(minibatches: list[list[PackedBatch]], fraction: float) -> float:
    """Return the entropy, in nats, that the top `fraction` of the trained tokens of all ranks
    reaches, rounded up to whole tokens: of 100 tokens and 0.07, the seventh highest
    (arXiv:2506.01939). Collective."""
    if fraction == 1:
        return -math.inf
    on_rank = torch.cat([mb.old_entropy_T[mb.loss_mask_T] for mb in chain(*minibatches)]).cpu()
    entropies = torch.cat(distributed.gather_objects(on_rank)).sort(descending=True).values
    # exact: 0.07 * 100 is above 7 in floats
    count = math.ceil(fractions.Fraction(str(fraction)) * len(entropies))
    return entropies[count - 1].item() if count else math.inf


# ---- dynamic sampling ----


def next_draw(kept: int, drawn: int, args: "Args") -> int:
    """Return the number of prompts to draw next: the smallest number that probably fills the step.
    The number is at most `--prompts_per_step` and keeps all draws within `--max_draws`.

    `kept` of the `drawn` groups have unequal rewards. If further groups are unequal as often, n
    draws keep n `chance` groups on average, and fewer by two standard deviations with a probability
    of about 0.02."""
    missing = args.prompts_per_step - kept
    chance = kept / max(1, drawn)
    left = max(1, args.max_draws) * args.prompts_per_step - drawn
    for n in range(missing, args.prompts_per_step):
        std = math.sqrt(n * chance * (1 - chance))
        if n * chance - 2 * std >= missing:
            return min(n, left)
    return min(args.prompts_per_step, left)


class Drawn(NamedTuple):
    """Groups of a step, in the order in which they were drawn."""

    groups: dict[int, Group]
    """this rank's groups by their position among those of all ranks"""
    named_rewards: dict[str, Tensor]
    """of this rank's groups, [P, G] each"""
    scores_BG: Tensor
    """rewards of all ranks without penalties"""
    rewards_BG: Tensor
    """rewards of all ranks; NaN for completions that are not `retained`"""
    is_unequal_B: Tensor
    """whether a group has unequal rewards among the retained ones, or all are trained on"""
    kept: list[int]
    """positions of the groups to train on"""


def draw_groups(
    rollouts: Sampler, rewards: Rewards, step: int, total_steps: int, args: "Args", meter: Meter
) -> Drawn | None:
    """Sample prompts and score their completions until enough groups have unequal rewards. Return
    None if a stop was requested. Collective. Raises `RunError` if no group has."""
    groups = {}
    named_rewards = []  # of each draw
    draws = []  # scores and rewards of all ranks, [B, 2, G] each
    kept = []
    num_drawn = 0
    while len(kept) < args.prompts_per_step:
        size = next_draw(len(kept), num_drawn, args)
        if size <= 0:
            break
        new_groups = rollouts.rollout(step, total_steps, meter, size)
        if new_groups is None:
            return None
        with meter.time("reward"):
            scores_PG, named_PG, _ = rewards(new_groups, meter)
        measure_groups(meter, new_groups, scores_PG, named_PG, warn=step == num_drawn == 0)
        named_rewards.append(named_PG)
        penalties_PG = truncation_penalties(new_groups, args.missing_eos_penalty)
        penalties_PG = penalties_PG + overlong_penalties(lengths(new_groups), args)
        is_retained_PG = retained(scores_PG, lengths(new_groups), args)
        rewards_PG = (scores_PG + penalties_PG).masked_fill(~is_retained_PG, math.nan)
        scores_P2G = torch.stack([scores_PG, rewards_PG], dim=1)
        draws.append(distributed.gather_rows(scores_P2G, rollouts.positions))
        groups |= zip((num_drawn + i for i in rollouts.positions), new_groups, strict=True)
        scores_BG, rewards_BG = torch.cat(draws).unbind(1)
        retained_BG = scores_BG.masked_fill(rewards_BG.isnan(), math.nan)
        is_unequal_B = unequal(retained_BG) | (args.max_draws == 0)
        num_drawn = len(is_unequal_B)
        kept = is_unequal_B.nonzero().flatten().tolist()[: args.prompts_per_step]
    if not kept:
        problem = f"no group has unequal rewards after --max_draws {args.max_draws}"
        raise distributed.RunError(f"step {step + 1}: {problem}")
    named_rewards = {
        name: torch.cat([named_PG[name] for named_PG in named_rewards]) for name in named_rewards[0]
    }
    return Drawn(groups, named_rewards, scores_BG, rewards_BG, is_unequal_B, kept)


@dataclass
class Args(ClipArgs, LogKLArgs, CorrectionArgs, OnlineArgs):
    lr: Positive[float] = 1e-6
    samples_per_prompt: AtLeast2 = 8
    """completions sampled for each prompt (G): a group, whose rewards are compared"""
    clip_high: NotNegative[float] = 0.28
    max_draws: NotNegative[int] = 10
    """maximum prompts drawn for a step, as a multiple of prompts_per_step, to fill it with groups
    of different rewards; 0: train on all groups"""
    overlong_buffer: Fraction = 0.2
    """last fraction of max_new_tokens, in which a completion is penalised; 0: off"""
    overlong_penalty: NotNegative[float] = 1.0
    """penalty on the reward of a completion of max_new_tokens; falls linearly to 0 where the buffer
    begins"""
    mask_truncated: bool = False
    """do not train on truncated completions; their rewards still count in their groups"""
    gfpo_keep: NotNegative[int] = 0
    """number of completions of each group to train on; only these count in its statistics (GFPO,
    arXiv:2508.09726); 0: all"""
    gfpo_by: Literal["length", "reward_per_token"] = "length"
    """what --gfpo_keep keeps. length: the shortest; reward_per_token: those with most of it"""
    top_entropy: PositiveFraction = 1.0
    """fraction of tokens with a policy loss, those of highest entropy (arXiv:2506.01939: 0.2); 1:
    all tokens"""

    def __post_init__(self) -> None:
        if not self.overlong_buffer:
            require_default(self, ("overlong_penalty",), "with --overlong_buffer 0")
        if not self.gfpo_keep:
            require_default(self, ("gfpo_by",), "with --gfpo_keep 0")
        elif not 2 <= self.gfpo_keep <= self.samples_per_prompt:
            most = f"at most --samples_per_prompt ({self.samples_per_prompt})"
            raise ValueError(f"--gfpo_keep {self.gfpo_keep} must be 0, or at least 2 and {most}")


def masked(group: Group, rewards_G: Tensor, args: Args) -> Group:
    """Return the group; without trained tokens are completions that are not `retained`, and with
    --mask_truncated truncated ones."""

    def is_masked(sample: Completion, reward: float) -> bool:
        is_dropped = args.gfpo_keep > 0 and math.isnan(reward)
        return is_dropped or (args.mask_truncated and sample.finish_reason == "length")

    return [
        replace(sample, loss_mask=[False] * len(sample.loss_mask), branches=[])
        if is_masked(sample, reward)
        else sample
        for sample, reward in zip(group, rewards_G.tolist(), strict=True)
    ]


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.live_rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    needs_old = args.updates_per_rollout > 1 or args.top_entropy < 1 or args.correction_normalize
    path = resolve_model(args.model, weights=not args.dry_run, rope_factor=args.rope_factor)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, context_length(path, args))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    if args.dry_run:  # ends the process
        frozen = [path] * args.log_kl
        dry_run(args, path, tokenizer, prompts, held_out, rewards, frozen, own_forwards=needs_old)
    begin_run(args)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    reference = load_reference(policy, args, device) if args.log_kl else None  # frozen
    optimizer = adamw(policy, args)
    rollouts = make_sampler(policy, prompts, args, tokenizer, rewards)  # here or on rollout ranks

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    curves = (*CURVES, "dynamic_sampling/unequal_fraction")
    run = Run(
        args, policy, optimizer, tokenizer, total_steps, rollouts=rollouts, show=SHOW, curves=curves
    )
    run.message(*describe_rollouts(args, prompts, held_out, rollouts))
    meter = run.meter
    if run.first_step == 0:
        run.log(0, evaluate_prompts(rollouts, 0, held_out, rewards))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. rollouts until enough groups have unequal rewards (dynamic sampling) ----
        drawn = draw_groups(rollouts, rewards, step, total_steps, args, meter)
        if drawn is None:  # a stop was requested
            break
        groups = drawn.groups
        kept = drawn.kept

        # ---- 2. advantages; pack: kept completions move to the ranks that train on them ----
        advantages_BG = advantages(drawn.rewards_BG)
        kept_advantages_BG = advantages_BG[kept]
        positions = [position for position, i in enumerate(kept) if i in groups]  # of this rank
        kept_groups = [masked(groups[i], drawn.rewards_BG[i], args) for i in kept if i in groups]
        count = min(args.minibatches, len(kept))
        minibatches = pack_minibatches(
            kept_groups, positions, count, args.pack_tokens, device, args.share_prefix
        )
        checks_engine = run.checks_engine(step)
        old = policy if checks_engine or needs_old else None  # None: the update computes them
        with meter.time("logprobs"):
            minibatches = with_logprobs(minibatches, args.temperature, old=old, ref=reference)
        if checks_engine:
            require_agreement(minibatches, step, args, device)
        threshold = entropy_threshold(minibatches, args.top_entropy)

        # ---- 3. update: one optimizer step per minibatch; none if the loss is not finite ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for minibatch in minibatches * args.epochs_per_rollout:
                tokens, _ = count_trained(minibatch)  # of all ranks
                c_mean = mean_weight(minibatch, args.correction_form)
                total_loss = torch.zeros((), device=device)
                for mb in minibatch:
                    logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
                    old_logprobs_T = mb.old_logprobs_T
                    if old_logprobs_T is None:  # on policy
                        old_logprobs_T = logprobs_T.detach()
                    share_T, logged = loss(
                        logprobs_T, old_logprobs_T, mb.rollout_logprobs_T, mb.old_entropy_T,
                        mb.on_tokens(kept_advantages_BG), mb.loss_mask_T, mb.sequence_ids_T,
                        tokens, threshold, args, c_mean,
                    )  # fmt: skip
                    if mb.ref_logprobs_T is not None:
                        logged["kl"] = kl_estimate(logprobs_T.detach(), mb.ref_logprobs_T)
                    # FSDP averages gradients over ranks; undo that.
                    (share_T.sum() * world_size).backward()
                    total_loss += share_T.detach().sum()
                    meter.tokens(mb, {"entropy": entropy_T} | logged, share_T)
                    measure_mismatch(meter, old_logprobs_T, mb)
                grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, total_loss)
                meter.mean("grad_norm", grad_norm)
                meter.mean("loss", total_loss, 1 / world_size)  # the loss is the sum over ranks

        # ---- 4. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*kept_groups), lr=lr)
        metrics["dynamic_sampling/draws"] = len(advantages_BG) / args.prompts_per_step
        metrics["dynamic_sampling/unequal_fraction"] = float(drawn.is_unequal_B.double().mean())
        if run.evaluates(step + 1):
            metrics |= evaluate_prompts(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        is_kept_B = torch.zeros(len(advantages_BG), dtype=torch.bool)
        is_kept_B[kept] = True
        advantages_BG[~is_kept_B] = 0.0  # samples.jsonl has all groups that were drawn
        positions = list(groups)
        run.show_samples(
            step + 1, list(groups.values()), positions, drawn.scores_BG[positions],
            advantages_BG[positions], drawn.named_rewards,
        )  # fmt: skip

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
