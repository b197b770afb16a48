"""Offload to the host, and the memory of a training step on a GPU."""

import sys

import pytest
import torch
from helpers import ROOT
from on_gpu import ON_CPU, gpu
from transformers import AutoModelForCausalLM

from common.config.groups import TrainArgs
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.packs.packing import pack
from common.packs.sample import Sample
from common.rollout.weights import whole_weights
from common.train.optim import adamw, optimizer_step

pytestmark = gpu(1)


def trained(device, offload: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the weights for an engine and the gradient norms after three steps of two
    micro-batches."""
    args = TrainArgs(dtype="float32", lr=1e-3, offload=offload, compile=False)
    policy = load_policy(tiny_model(), args, device)
    optimizer, norms = adamw(policy, args), []
    for step in range(3):
        samples = [Sample([*range(n, n + 50)], [True] * 50) for n in (3 + step, 30)]
        for mb in pack(samples, 60, device):
            logprobs_T, *_ = policy(mb)
            (-logprobs_T.mean()).backward()
        norms.append(optimizer_step(policy, optimizer, args.lr, 1.0, logprobs_T.detach().sum()))
    where = "cpu" if offload == "all" else device.type
    assert {p.to_local().device.type for p in policy.parameters()} == {where}
    moments = {optimizer.state[p]["exp_avg"].to_local().device.type for p in policy.parameters()}
    assert moments == {device.type if offload == "none" else "cpu"}
    return {name: weight.clone() for name, weight in whole_weights(policy, torch.float32)}, norms


def test_offload_changes_no_number(device, monkeypatch):
    """--offload optimizer gives the same bits as none; all, which steps on the host, is close."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # set by torchrun
    (plain, norms), *others = (trained(device, offload) for offload in ("none", "optimizer", "all"))
    for (weights, those), atol in zip(others, (0.0, 1e-5), strict=True):
        assert those == pytest.approx(norms, rel=1e-4) and weights.keys() == plain.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, plain[name], atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize("kept", [0, 1, 3])  # of 3 blocks
@pytest.mark.skipif(ON_CPU, reason="a CPU counts no peak")
def test_predicted_memory_is_close_to_the_allocated_memory(tmp_path, device, kept):
    """The tolerance is a fifth, at the second micro-batch of a model with 60M weights."""
    sys.path.insert(0, str(ROOT))
    from bench.memory_plan import SMALL
    from extras.plan.memory import keep_activations, num_weights, total, training_peak

    AutoModelForCausalLM.from_config(SMALL["untied"]).save_pretrained(tmp_path)
    args = TrainArgs(activation_checkpointing=True, pack_tokens=4096, compile=False)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    policy = load_policy(str(tmp_path), args, device)
    keep_activations(policy, kept)
    optimizer = adamw(policy, args)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        (mb,) = pack([Sample([3 + i % 7000 for i in range(4097)], [True] * 4097)], 4096, device)
        logprobs_T, entropy_T, *_ = policy(mb)
        (logprobs_T + 0.1 * entropy_T).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    states = 16 * num_weights(policy)  # weights, gradients and Adam's moments
    needs = states + total(training_peak(policy, 1, 4096, kept))
    assert optimizer.state and needs == pytest.approx(peak, rel=0.2)
