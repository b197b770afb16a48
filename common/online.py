"""What the policy-gradient scripts share around a rollout: flags, penalties, corrections and what is measured.

Shapes: P prompts on this rank, G samples per prompt, T packed tokens in one micro-batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common import distributed
from common.advantages import group_advantages, overlong_penalty
from common.config import MAX_FLOAT, EnvironmentArgs, OnlineArgs
from common.losses import importance_weights
from common.metrics import Meter
from common.models import Policy
from common.packing import PackedBatch, Sample, pack
from common.rewards.scoring import Rewards
from common.rollout.colocated import Rollouts
from common.rollout.measure import check_agreement


@dataclass
class PolicyGradientArgs(EnvironmentArgs, OnlineArgs):
    """Flags of every script that follows a policy gradient: grpo.py, rloo.py, ppo.py."""

    beta: float = 0.0
    """weight of the KL penalty to the starting model; 0 never loads it"""
    kl_target: float = 0.0
    """adapt beta so that the logged KL stays near this many nats (per token in grpo.py, per completion in rloo.py and
    ppo.py); 0: beta stays as it is"""
    kl_horizon: int = 10_000
    """with --kl_target: in this many completions beta grows or shrinks by a fifth at most (arXiv:1909.08593)"""
    correction: Literal["none", "token", "sequence"] = "token"
    """weigh samples by trainer / engine probability, of each token or of the whole completion"""
    correction_mode: Literal["truncate", "mask"] = "truncate"
    """weights outside the bounds are set to the bound, or to 0"""
    correction_low: float = 0.0
    """lower bound of the weights"""
    correction_high: float = 2.0
    """upper bound of the weights"""
    correction_filter: tuple[float, float] | None = None
    """drop completions whose geometric-mean trainer / engine ratio is outside these two bounds, e.g. 0.5 2"""
    reward_scale: float = 1.0
    """rewards are multiplied by this"""
    reward_clip: float = 0.0
    """scaled rewards are clipped to [-reward_clip, reward_clip]; 0: off"""
    overlong_buffer: float = 0.0
    """a completion that reaches into this last fraction of max_new_tokens is penalised (DAPO: 0.2); 0: off"""
    overlong_penalty: float = 1.0
    """subtracted from the reward of one of max_new_tokens; linearly less, down to 0 where the buffer begins"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("kl_horizon")
        self.require_not_negative("beta", "kl_target", "correction_low", "reward_clip", "overlong_penalty")
        self.require_positive("reward_scale")
        self.require_finite("reward_scale")
        if self.kl_target and not self.beta:
            raise ValueError("--kl_target adapts --beta: start it above 0")
        for flag, bounds in (
            ("correction_low and --correction_high", (self.correction_low, self.correction_high)),
            ("correction_filter", self.correction_filter or (0.0, 1.0)),
        ):
            if not 0 <= bounds[0] < bounds[1] <= MAX_FLOAT:
                raise ValueError(f"--{flag}: the bounds {bounds[0]:g} and {bounds[1]:g} cross or are negative")
        for flag in ("correction_mode", "correction_low", "correction_high", "correction_filter"):
            self.require_read(flag, self.correction != "none", "--correction is none")
        if not 0 <= self.overlong_buffer <= 1:
            raise ValueError(f"--overlong_buffer {self.overlong_buffer} is a fraction of max_new_tokens: 0 to 1")
        self.require_read("overlong_penalty", self.overlong_buffer > 0, "--overlong_buffer is 0")
        self.require_read("kl_horizon", self.kl_target > 0, "--kl_target is 0")

    def require_clip_bounds(self) -> None:
        self.require_not_negative("clip_low", "clip_high")
        if self.clip_low >= 1:
            raise ValueError(f"--clip_low {self.clip_low} must be below 1: ratios are positive")


class KLCoefficient:
    """beta, constant or adapted to keep the KL near `--kl_target` (Ziegler et al. 2019, arXiv:1909.08593 Eq. 3-4, with
    e^x for their factor 1 + x: it stays positive whatever the horizon)."""

    def __init__(self, args: PolicyGradientArgs):
        self.value, self.target, self.horizon = args.beta, args.kl_target, args.kl_horizon

    def update(self, kl: float, completions: int) -> None:
        """After a step whose `completions` had this mean KL, in nats."""
        if self.target:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= math.exp(error * completions / self.horizon)

    def state_dict(self) -> dict:
        return dict(value=self.value)

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]


def all_groups(x_PG: Tensor, positions: Sequence[int]) -> Tensor:
    """[P, ...] of every rank, whose groups have these positions in the step -> that of the whole step, in order, on
    every rank. What is computed from it is the same on any number of ranks."""
    ranks = distributed.gather_objects((list(positions), x_PG))
    order = torch.tensor([position for positions_of_rank, _ in ranks for position in positions_of_rank]).argsort()
    return torch.cat([x for _, x in ranks])[order]


def shape_rewards(rewards_PG: Tensor, args: PolicyGradientArgs) -> Tensor:
    """Scaled, then clipped. Missing rewards (NaN) stay missing."""
    scaled_PG = rewards_PG * args.reward_scale
    return scaled_PG.clamp(-args.reward_clip, args.reward_clip) if args.reward_clip else scaled_PG


def truncation_penalties(groups: list[list[Sample]], args: OnlineArgs) -> Tensor:
    """Minus `--missing_eos_penalty` for a completion that was cut off, [P, G] float64: what is added to its reward."""
    truncated_PG = torch.tensor([[s.finish_reason == "length" for s in group] for group in groups])
    return -args.missing_eos_penalty * truncated_PG.double()


def length_penalties(groups: list[list[Sample]], args: PolicyGradientArgs) -> Tensor:
    """What is added to the shaped rewards for length, [P, G] float64, never positive: `truncation_penalties` and DAPO's
    ramp over the last `--overlong_buffer`."""
    penalties_PG = truncation_penalties(groups, args)
    if args.overlong_buffer:
        lengths_PG = torch.tensor([[len(s.completion_ids) for s in group] for group in groups])
        buffer = args.overlong_buffer * args.max_new_tokens
        penalties_PG += args.overlong_penalty * overlong_penalty(lengths_PG, args.max_new_tokens, buffer)
    return penalties_PG


def correction_weights(mb: PackedBatch, args: PolicyGradientArgs) -> Tensor:
    """What each token's loss is multiplied by because the engine, not the trainer, sampled it: [T], no gradient.

    `--correction none`: ones. `--correction_filter` (sequence-masked importance sampling) drops whole completions by
    the geometric mean of their tokens' ratios.
    """
    log_ratio_T = mb.old_logprobs_T - mb.rollout_logprobs_T
    if args.correction == "none":
        return torch.ones_like(log_ratio_T)
    of_what_T = mb.sequence_sum_T(log_ratio_T) if args.correction == "sequence" else log_ratio_T
    weights_T = importance_weights(of_what_T, args.correction_mode, args.correction_low, args.correction_high)
    if args.correction_filter is not None:
        low, high = args.correction_filter
        mean_ratio_T = mb.sequence_mean_T(log_ratio_T).exp()
        weights_T = weights_T * ((low <= mean_ratio_T) & (mean_ratio_T <= high))
    return weights_T


@torch.no_grad()
def check_first_rollout(model: Policy, groups: list[list[Sample]], args: OnlineArgs, device: torch.device) -> None:
    """`check_agreement` where a script trains on some of the samples only. Collective."""
    micro_batches = pack([sample for group in groups for sample in group], args.pack_tokens, device)
    for mb in micro_batches:
        mb.old_logprobs_T, *_ = model(mb, temperature=args.temperature)
    model.reshard()  # a forward without backward leaves the root whole
    check_agreement(micro_batches, args, device)


# ---- what is measured ----


def measure_groups(meter: Meter, groups: list[list[Sample]], rewards_PG: Tensor, parts: dict[str, Tensor]) -> None:
    """Reward and length statistics of this rank's groups. NaN is no reward."""
    valid_PG = ~rewards_PG.isnan()
    squares_P = group_advantages(rewards_PG, scale_by_std=False).square().sum(-1)
    std_P = (squares_P / (valid_PG.sum(-1) - 1).clamp(min=1)).sqrt()
    meter.mean("reward", rewards_PG.nansum(), valid_PG.sum())
    meter.mean("reward_std", std_P.sum(), len(std_P))
    meter.mean("frac_reward_zero_std", (std_P == 0).sum(), len(std_P))
    for name, part_PG in parts.items():
        meter.mean(f"rewards/{name}/mean", part_PG.nansum(), (~part_PG.isnan()).sum())
    for sample in (sample for group in groups for sample in group):
        meter.mean("completions/mean_length", len(sample.completion_ids))
        meter.mean("completions/clipped_ratio", sample.finish_reason == "length")
        if sample.transcript:
            meter.mean("completions/mean_turns", sample.turns)


def measure_sampling(meter: Meter, mb: PackedBatch, weights_T: Tensor) -> None:
    """How far the engine's probabilities are from the trainer's, on the tokens the engine sampled, and which of them
    the correction keeps."""
    if not mb.loss_mask_T.any():  # an empty pack, perhaps without rollout_logprobs_T
        return
    difference = (mb.old_logprobs_T - mb.rollout_logprobs_T)[mb.loss_mask_T]
    ratio, name = difference.exp(), "sampling/importance_sampling_ratio"
    meter.mean("sampling/sampling_logp_difference/mean", difference.abs().sum(), len(difference))
    meter.max("sampling/sampling_logp_difference/max", difference.abs().max())
    meter.mean(f"{name}/mean", ratio.sum(), len(ratio))
    meter.mean(f"{name}/mean_square", ratio.square().sum(), len(ratio))
    meter.min(f"{name}/min", ratio.min())
    meter.max(f"{name}/max", ratio.max())
    meter.masked_mean("sampling/kept_fraction", weights_T > 0, mb.loss_mask_T)


def effective_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """`sampling/ess` of the importance ratios, (mean w)^2 / mean w^2, in place of the mean square."""
    name = "sampling/importance_sampling_ratio"
    square = metrics.pop(f"{name}/mean_square", None)
    return metrics | ({} if square is None else {"sampling/ess": metrics[f"{name}/mean"] ** 2 / square})


def evaluate(
    rollouts: Rollouts, step: int, prompts: list[list[int]], rows: list[dict], rewards: Rewards
) -> dict[str, float]:
    """Greedy completions of all held-out prompts by the weights after `step` steps. pass@1: the fraction whose first
    reward is at least 1."""
    meter = Meter()
    groups = rollouts.sample_now(step, prompts, rows, [0] * len(prompts), n=1, temperature=0.0)
    for group, row in zip(groups, rows[rollouts.rank :: rollouts.ranks], strict=True):
        group[0].row = row
    rewards_PG, parts = rewards(groups, Meter())
    solved_PG = rewards.first(parts) >= 1
    meter.mean("eval/pass_at_1", solved_PG.sum(), solved_PG.numel())
    for name, part_PG in parts.items():
        meter.mean(f"eval/rewards/{name}/mean", part_PG.nansum(), (~part_PG.isnan()).sum())
    meter.mean("eval/reward", rewards_PG.nansum(), (~rewards_PG.isnan()).sum())
    return meter.reduce()
