"""Do the engine and the trainer give a sampled token the same probability? Scripts that train on
their own samples check it before an update (`require_agreement`) and log it (`measure_mismatch`).

Shapes: T packed tokens in one micro-batch."""

import math
from itertools import chain

import torch
from torch import Tensor

from common.config.online import LOGPROB_DIFFERENCE, OnlineArgs
from common.metrics.meter import Meter
from common.model.policy import Policy, compute_dtype
from common.model.scoring import with_logprobs
from common.packs.packing import Minibatches, PackedBatch, pack_minibatches, positions_of_rank
from common.packs.sample import Group
from common.parallel import distributed


def require_agreement(
    minibatches: Minibatches, step: int, args: OnlineArgs, device: torch.device
) -> None:
    """Compare the log-probs of engine and trainer on all tokens that the engine sampled with the
    current weights, those after `step` steps. Tokens of older weights differ anyway. Collective.

    This finds a wrong temperature, or a weight that the engine has not loaded, before the update
    trains on it. (Weights that are one step old differ too little to show here; `sync_weights`
    finds those.) Raises `RunError` if the 99.9th percentile of the differences is above
    `--max_logprob_difference`, or their mean above a tenth of it. The maximum has no limit: in
    bfloat16, rounding alone makes it large when there are many tokens."""
    dtype = str(compute_dtype(args, device)).removeprefix("torch.")
    limit = args.max_logprob_difference or LOGPROB_DIFFERENCE[dtype]
    on_rank = [torch.zeros(0)]
    for mb in chain(*minibatches):
        if mb.num_samples:
            fresh_T = mb.loss_mask_T & (mb.versions_T == step)
            on_rank.append((mb.old_logprobs_T - mb.rollout_logprobs_T)[fresh_T].abs().cpu())
    found = torch.cat(distributed.gather_objects(torch.cat(on_rank))).nan_to_num(nan=torch.inf)
    if not len(found):  # older weights sampled all tokens
        return
    mean = found.mean().item()
    high = found.sort().values[math.ceil(0.999 * len(found)) - 1].item()
    if high > limit or mean > limit / 10:
        values = f"mean {mean:.2g} nats, 99.9th percentile {high:.2g}"
        flag = f"--max_logprob_difference {limit:g}"
        raise distributed.RunError(
            f"engine and trainer log-probs differ: {values} ({flag}); see extras/trace/README.md"
        )


def require_rollout_agreement(
    model: Policy, groups: list[Group], step: int, args: OnlineArgs
) -> None:
    """Run `require_agreement` on all samples of `groups`. For scripts that train on some of them
    only, such as the best of n, and so have no minibatches of all samples. Collective."""
    positions = positions_of_rank(len(groups))
    minibatches = pack_minibatches(
        groups, positions, 1, args.pack_tokens, model.device, model.share_prefix
    )
    minibatches = with_logprobs(minibatches, args.temperature, old=model)
    require_agreement(minibatches, step, args, model.device)


def measure_mismatch(meter: Meter, old_logprobs_T: Tensor, mb: PackedBatch) -> None:
    """Log how far engine and trainer differ on the sampled tokens of a micro-batch: differences of
    log-probs, the ratios pi_old / pi_engine, and the effective sample size of these ratios."""
    if not mb.num_samples:  # a pack of padding alone; it may lack rollout_logprobs_T
        return
    mask_T = mb.loss_mask_T
    name = "sampling/importance_sampling_ratio"
    difference_T = torch.where(mask_T, old_logprobs_T - mb.rollout_logprobs_T, 0.0)
    ratio_T = difference_T.exp()
    meter.masked_mean("sampling/sampling_logp_difference/mean", difference_T.abs(), mask_T)
    meter.max("sampling/sampling_logp_difference/max", difference_T.abs().max())
    meter.masked_mean(f"{name}/mean", ratio_T, mask_T)
    meter.min(f"{name}/min", ratio_T.masked_fill(~mask_T, math.inf).min())
    meter.max(f"{name}/max", ratio_T.masked_fill(~mask_T, -math.inf).max())
    meter.effective_fraction("sampling/ess", ratio_T, mask_T)
