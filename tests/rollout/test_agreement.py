"""Engine and trainer are compared on trained tokens only, and a difference ends the run; the mean
weight of a minibatch is that of all ranks."""

import contextlib
import math
from itertools import chain

import pytest
import torch
from in_process import Args

import dapo
from common.data.packing import PackedBatch, pack
from common.data.sample import Completion, Sample
from common.metrics.meter import Meter
from common.objectives.importance import Correction
from common.parallel import distributed
from common.parallel.distributed import RunError
from common.rollout import agreement

CPU, NAN = torch.device("cpu"), math.nan


def engine_batch() -> PackedBatch:
    """Return two completions with trainer / engine ratios 1, 4, 1/2 and 3, 3. Prompts have extreme
    ratios."""
    samples = [
        Completion(
            [0] * 5,
            [False] * 2 + [True] * 3,
            rollout_logprobs=[0.0] * 5,
            versions=[0] * 5,
            prompt_length=2,
        ),
        Completion(
            [0] * 4,
            [False] * 2 + [True] * 2,
            rollout_logprobs=[0.0] * 4,
            versions=[0] * 4,
            prompt_length=2,
        ),
    ]
    (mb,) = pack(samples, 100, CPU)
    mb.old_logprobs_T = torch.tensor([9.0, 1, 4, 0.5, 9, 3, 3]).log()
    return mb


def test_sampling_metrics_count_only_trained_tokens():
    meter, mb = Meter(), engine_batch()
    agreement.measure_mismatch(meter, mb.old_logprobs_T, mb)
    metrics = meter.reduce()
    ratios = torch.tensor([1, 4, 0.5, 3, 3]).double()
    logs = ratios.log().abs()
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(logs.mean().item())
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(logs.max().item())
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(ratios.mean().item())
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(4)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5)
    assert metrics["sampling/ess"] == pytest.approx(
        (ratios.mean() ** 2 / ratios.square().mean()).item()
    )


def test_empty_pack_adds_no_metric():
    (filler,) = pack([], 10, CPU)
    meter = Meter()
    agreement.measure_mismatch(meter, torch.zeros(1), filler)
    assert meter.reduce() == {}


def test_disagreement_on_a_sampled_token_is_an_error(device):
    def check(mb, **flags):
        agreement.require_agreement([[mb]], 0, Args(dtype="float32", **flags), CPU)

    mb = engine_batch()
    mb.old_logprobs_T[mb.loss_mask_T] = (
        0.0  # the prompts' tokens, which are not sampled, differ widely
    )
    check(mb)
    mb.old_logprobs_T[mb.loss_mask_T.nonzero()[-1]] += 0.01
    with pytest.raises(
        RunError, match="differ: mean 0.002 nats, 99.9th percentile 0.01 .*_difference 0.001"
    ):
        check(mb)
    check(mb, max_logprob_difference=0.1)
    mb.old_logprobs_T[mb.loss_mask_T.nonzero()[-1]] = NAN
    with pytest.raises(RunError, match="differ: mean inf nats"):
        check(mb, max_logprob_difference=0.1)
    agreement.require_agreement([pack([], 10, CPU)], 0, Args(dtype="float32"), CPU)


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


# ---- normalised weights ----

# Log-probs of trained tokens by the current policy, the trainer at rollout time and the engine, and
# the advantages of their completions.
NEW = [[-0.6, -1.1, -0.4], [-2.1], [-0.5, -0.9], [-1.7, -0.2, -0.3, -1.2], [-0.8, -0.8]]
OLD = [[-0.7, -1.0, -0.5], [-2.0], [-0.5, -1.0], [-1.5, -0.2, -0.4, -1.0], [-0.9, -0.7]]
ENGINE = [[-0.5, -1.6, -0.9], [-1.2], [-0.5, -0.9], [-2.9, -0.3, -0.1, -1.6], [-0.9, -0.4]]
A = torch.tensor([1.0, -0.5, 2.0, -1.0, 0.7])
WHOLE = dict(level="sequence", mode="mask", high=4.0)
NORMALIZED = [
    dict(level="token"),
    dict(level="token", reject="seq_mean_k3", bound=0.1),
    dict(level="sequence", high=3.0),
    WHOLE,
    WHOLE | dict(reject="seq_max_tv", bound=0.2),
]


def packed(numbers, pack_tokens):
    """Pack the completions with these numbers on one rank; each has a prompt of two tokens."""
    samples = []
    for n in numbers:
        streams = [[0.0] * 2 + values[n] for values in (NEW, OLD, ENGINE)]
        trained = len(NEW[n])
        named = dict(zip(("new", "old_logprobs", "rollout_logprobs"), streams, strict=True))
        samples.append(Sample([0] * (2 + trained), [False] * 2 + [True] * trained, streams=named))
    minibatch = pack(samples, pack_tokens, CPU)
    for mb in minibatch:  # from places on this rank to numbers of completions
        mb.index_N = torch.tensor([numbers[i] for i in mb.index_N], dtype=torch.int64)
    return minibatch


def weight_of_all(minibatches, correction, monkeypatch):
    """Return the mean weight of minibatches on as many ranks: each rank's sums are added to those
    of the others."""
    sums = [[] for _ in minibatches]
    for minibatch, calls in zip(minibatches, sums, strict=True):
        keep = lambda x, calls=calls: calls.append(torch.as_tensor(x)) or calls[-1]  # noqa: E731
        monkeypatch.setattr(distributed, "all_sum", keep)
        agreement.mean_weight(minibatch, correction)
    found = []
    for minibatch in minibatches:
        totals = iter([sum(calls) for calls in zip(*sums, strict=True)])
        monkeypatch.setattr(distributed, "all_sum", lambda _, totals=totals: next(totals))
        found.append(agreement.mean_weight(minibatch, correction))
    assert len(set(found)) == 1
    return found[0]


def naive_gradient(form):
    """Return the gradient of the normalised loss by each log-prob of `NEW`, by completion."""
    weights = []
    for old, engine in zip(OLD, ENGINE, strict=True):
        logs = [o - e for o, e in zip(old, engine, strict=True)]
        if form["level"] == "token":
            c = [min(math.exp(x), 2.0) for x in logs]
        elif form.get("mode") == "mask":
            c = [math.exp(sum(logs)) * (math.exp(sum(logs)) <= form["high"])] * len(logs)
        else:
            c = [min(math.exp(sum(logs)), form["high"])] * len(logs)
        k3 = sum(math.exp(x) - 1 - x for x in logs) / len(logs)
        tv = max(abs(math.exp(o) - math.exp(e)) for o, e in zip(old, engine, strict=True))
        drops = dict(seq_mean_k3=k3 > 0.1, seq_max_tv=tv > 0.2).get(form.get("reject"), False)
        weights.append([0.0 if drops else x for x in c])
    counted = [c[:1] for c in weights] if form["level"] == "sequence" else weights
    mean = sum(map(sum, counted)) / sum(map(len, counted))
    assert mean > 0 and abs(mean - 1) > 0.02
    tokens = sum(map(len, NEW))
    return [
        [-a * math.exp(new - old) * x / mean / tokens for new, old, x in zip(*rows, strict=True)]
        for a, *rows in zip(A.tolist(), NEW, OLD, weights, strict=True)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("pack_tokens", [100, 8])
@pytest.mark.parametrize("form", NORMALIZED)
def test_normalised_weights_give_one_gradient(form, pack_tokens, ranks, monkeypatch):
    """The weights have mean 1 over the trained tokens, or completions, of all ranks. The bounds of
    the clip are wide."""
    flags = {name: value for name, value in form.items() if name != "level"}
    args = dapo.Args(
        correction=form["level"], correction_normalize=True, clip_low=0.99, clip_high=9.0,
        **{f"correction_{name}": value for name, value in flags.items()},
    )  # fmt: skip
    divided = [[0, 1, 2, 3, 4]] if ranks == 1 else [[0, 3], [1, 2, 4]]
    minibatches = [packed(numbers, pack_tokens) for numbers in divided]
    c_mean = weight_of_all(minibatches, args.correction_form, monkeypatch)
    found = {}
    for mb in chain(*minibatches):
        new_T = mb.new_T.double().requires_grad_()
        share_T, _ = dapo.loss(
            new_T, mb.old_logprobs_T.double(), mb.rollout_logprobs_T.double(), None,
            mb.on_tokens(A), mb.loss_mask_T, mb.sequence_ids_T, torch.tensor(12), 0.0, args, c_mean,
        )  # fmt: skip
        share_T.sum().backward()
        for n, number in enumerate(mb.index_N.tolist()):
            of_completion = mb.loss_mask_T & (mb.sequence_ids_T == n)
            found[number] = new_T.grad[of_completion].tolist()
    for number, expected in enumerate(naive_gradient(form)):
        assert found[number] == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_weights_that_are_all_0_stay_0():
    nothing = Correction("token", reject="veto", bound=1e9, normalize=True)
    assert agreement.mean_weight(packed([0, 1], 100), nothing) == 1
    assert agreement.mean_weight(packed([0, 1], 100), Correction("token")) == 1
