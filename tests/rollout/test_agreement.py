"""Engine and trainer are compared on trained tokens only, and a difference ends the run."""

import contextlib
import math

import pytest
import torch
from in_process import Args

from common.metrics.meter import Meter
from common.packs.packing import PackedBatch, pack
from common.packs.sample import Completion
from common.parallel.distributed import RunError
from common.rollout import agreement

CPU, NAN = torch.device("cpu"), math.nan


def engine_batch() -> PackedBatch:
    """Return two completions with trainer / engine ratios 1, 4, 1/2 and 3, 3. Prompts have extreme
    ratios."""
    samples = [
        Completion([0] * n, [False] * 2 + [True] * (n - 2), 2, rollout_logprobs=[0.0] * n,
                   versions=[0] * n)
        for n in (5, 4)
    ]  # fmt: skip
    (mb,) = pack(samples, 100, CPU)
    mb.old_logprobs_T = torch.tensor([9.0, 1, 4, 0.5, 9, 3, 3]).log()
    return mb


def test_sampling_metrics_count_only_trained_tokens():
    """An empty pack adds none."""
    meter, mb = Meter(), engine_batch()
    agreement.measure_mismatch(meter, mb.old_logprobs_T, mb)
    agreement.measure_mismatch(meter, torch.zeros(1), pack([], 10, CPU)[0])
    metrics = meter.reduce()
    ratios = torch.tensor([1, 4, 0.5, 3, 3]).double()
    logs = ratios.log().abs()
    expected = {
        "sampling_logp_difference/mean": logs.mean(),
        "sampling_logp_difference/max": logs.max(),
        "importance_sampling_ratio/mean": ratios.mean(),
        "importance_sampling_ratio/max": 4,
        "importance_sampling_ratio/min": 0.5,
        "ess": ratios.mean() ** 2 / ratios.square().mean(),
    }
    assert metrics == pytest.approx({f"sampling/{k}": float(x) for k, x in expected.items()})


def test_disagreement_on_a_sampled_token_is_an_error(device):
    def check(mb, **flags):
        agreement.require_agreement([[mb]], 0, Args(dtype="float32", **flags), CPU)

    mb = engine_batch()
    mb.old_logprobs_T[mb.loss_mask_T] = 0.0  # the prompts' tokens still differ widely
    check(mb)
    mb.old_logprobs_T[mb.loss_mask_T.nonzero()[-1]] += 0.01
    words = "differ: mean 0.002 nats, 99.9th percentile 0.01 .*_difference 0.001"
    with pytest.raises(RunError, match=words):
        check(mb)
    check(mb, max_logprob_difference=0.1)
    mb.old_logprobs_T[mb.loss_mask_T.nonzero()[-1]] = NAN
    with pytest.raises(RunError, match="differ: mean inf nats"):
        check(mb, max_logprob_difference=0.1)
    check(*pack([], 10, CPU))


@pytest.mark.parametrize(
    "far, near, fails",
    [(1, 0.0, False), (2, 0.0, False), (3, 0.0, True), (0, 0.04, False), (0, 0.06, True)],
)
def test_few_tokens_may_disagree_and_many_may_not(device, far, near, fails):
    """Two of 2,000 tokens are a thousandth: they may differ by more than the limit, like the
    maximum over many tokens in bfloat16. A third such token, or a difference of all tokens by more
    than a tenth of the limit, shows two different models."""
    sample = Completion(
        [1] * 2001, [False] + [True] * 2000, rollout_logprobs=[0.0] * 2001, versions=[7] * 2001
    )
    (mb,) = pack([sample], 2000, CPU)
    mb.old_logprobs_T = torch.full((2000,), near)
    mb.old_logprobs_T[:far] = -3.0
    args = Args(dtype="bfloat16")
    with pytest.raises(RunError, match="_difference 0.5") if fails else contextlib.nullcontext():
        agreement.require_agreement([[mb]], 7, args, CPU)
    agreement.require_agreement([[mb]], 8, args, CPU)  # sampled by older weights: no comparison
