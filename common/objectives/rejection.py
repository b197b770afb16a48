"""Rejection of tokens and completions on which the policies of trainer and engine differ."""

import math

from torch import Tensor

from common.objectives.importance import Correction
from common.objectives.kl import kl_estimate
from common.objectives.reduction import sequence_mean, sequence_sum


def is_rejected(
    old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor,
    correction: Correction,
) -> Tensor:  # fmt: skip
    """Return which tokens `correction.reject` rejects. Bool [T], without gradient.

    `veto` rejects a completion with any ratio pi_old / pi_engine below the bound. Others compare a
    statistic of the sampled tokens with the bound: `k2` and `k3` estimate KL(pi_engine || pi_old)
    in nats; `tv` is |pi_old - pi_engine|. `token` rejects such tokens, `seq_max` a completion with
    any (arXiv:2512.23075), `seq_mean` a completion whose mean is above the bound."""
    bound = correction.bound
    where = mask_T, sequence_ids_T
    old_T = old_logprobs_T.detach()
    if correction.reject == "veto":
        return sequence_sum(old_T - rollout_logprobs_T < math.log(bound), *where) > 0
    scope, statistic = correction.reject.rsplit("_", 1)
    if statistic == "tv":
        x_T = (old_T.exp() - rollout_logprobs_T.exp()).abs()
    else:
        x_T = kl_estimate(rollout_logprobs_T, old_T, statistic)
    if scope == "token":
        return x_T > bound
    if scope == "seq_mean":
        return sequence_mean(x_T, *where) > bound
    return sequence_sum(x_T > bound, *where) > 0
