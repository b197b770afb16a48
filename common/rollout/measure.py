"""Whether engine and trainer agree."""

import torch

from common import distributed
from common.config import RolloutArgs
from common.models import compute_dtype
from common.packing import PackedBatch


def check_agreement(micro_batches: list[PackedBatch], args: RolloutArgs, device: torch.device) -> None:
    """Compare the log-probs of engine and trainer on everything a first rollout sampled. Collective.

    A wrong temperature, a stale head or a weight that did not arrive shows here, before anything is learned from it.
    Raises `RunError` above `--max_logprob_difference`.
    """
    limit = args.max_logprob_difference or (1e-3 if compute_dtype(args, device) == torch.float32 else 1.0)
    trained = [mb for mb in micro_batches if mb.loss_mask_T.any()]
    differences = [(mb.old_logprobs_T - mb.rollout_logprobs_T)[mb.loss_mask_T].abs() for mb in trained]
    largest = max((float(d.nan_to_num(nan=torch.inf).max()) for d in differences), default=0.0)
    if (worst := float(distributed.all_max(largest))) > limit:
        raise distributed.RunError(
            f"engine and trainer differ by {worst:.2g} nats on a sampled token (--max_logprob_difference {limit:g}): "
            "they do not compute the same model"
        )
