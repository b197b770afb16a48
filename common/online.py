"""What the online scripts measure around a rollout: rewards and lengths, engine against trainer, held-out score.

Shapes: P prompts on this rank, G samples per prompt, T packed tokens in one micro-batch.
"""

from torch import Tensor

from common.advantages import group_advantages
from common.metrics import Meter
from common.packing import PackedBatch, Sample
from common.rewards import Rewards
from common.rollout import Engine


def measure_groups(meter: Meter, groups: list[list[Sample]], rewards_PG: Tensor, parts: dict[str, Tensor]) -> None:
    """Reward and length statistics of this rank's groups. NaN is a reward that could not be computed."""
    valid_PG = ~rewards_PG.isnan()
    squares_P = group_advantages(rewards_PG, scale_by_std=False).square().sum(-1)
    std_P = (squares_P / (valid_PG.sum(-1) - 1).clamp(min=1)).sqrt()
    meter.mean("reward", rewards_PG.nansum(), valid_PG.sum())
    meter.mean("reward_std", std_P.sum(), len(std_P))
    meter.mean("frac_reward_zero_std", (std_P == 0).sum(), len(std_P))
    meter.mean("reward/error_fraction", (~valid_PG).sum(), valid_PG.numel())
    for name, part_PG in parts.items():
        meter.mean(f"rewards/{name}/mean", part_PG.nansum(), (~part_PG.isnan()).sum())
    for sample in (sample for group in groups for sample in group):
        meter.mean("completions/mean_length", len(sample.completion_ids))
        meter.mean("completions/clipped_ratio", sample.finish_reason == "length")


def measure_sampling(meter: Meter, mb: PackedBatch) -> None:
    """How far the engine's probabilities are from the trainer's, on the tokens the engine sampled."""
    difference = (mb.old_logprobs_T - mb.rollout_logprobs_T)[mb.loss_mask_T]
    if len(difference) == 0:  # an empty pack
        return
    ratio, name = difference.exp(), "sampling/importance_sampling_ratio"
    meter.mean("sampling/sampling_logp_difference/mean", difference.abs().sum(), len(difference))
    meter.max("sampling/sampling_logp_difference/max", difference.abs().max())
    meter.mean(f"{name}/mean", ratio.sum(), len(ratio))
    meter.mean(f"{name}/mean_square", ratio.square().sum(), len(ratio))
    meter.min(f"{name}/min", ratio.min())
    meter.max(f"{name}/max", ratio.max())


def evaluate(engine: Engine, prompts: list[list[int]], rows: list[dict], rewards: Rewards) -> dict[str, float]:
    """Greedy completions of this rank's held-out prompts. pass@1: the fraction whose first reward is at least 1."""
    meter = Meter()
    groups = engine.generate(prompts, n=1, seeds=[0] * len(prompts), temperature=0.0)
    for group, row in zip(groups, rows, strict=True):
        group[0].row = row
    rewards_PG, parts = rewards(groups)
    solved_PG = next(iter(parts.values())) >= 1
    meter.mean("eval/pass_at_1", solved_PG.sum(), solved_PG.numel())
    meter.mean("eval/reward", rewards_PG.nansum(), (~rewards_PG.isnan()).sum())
    return meter.reduce()
