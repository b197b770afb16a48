"""A whole model on one GPU: the packed forward and its gradient, checkpointed and compiled."""

from functools import partial

import pytest
import torch
from on_gpu import DTYPES, ON_CPU, gpu, relative_error
from transformers import AutoModelForCausalLM

import common.model.logprobs
from bench.models import VOCABULARY, checkpoint
from common.config.groups import TrainArgs
from common.model.lora import _MergedLinear, merge
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.packs.packing import pack
from common.packs.sample import Sample

pytestmark = gpu(1)
VALUE = dict(bfloat16=0.02, float32=2e-5)  # nats, mean over the tokens
GRADIENT = dict(bfloat16=0.05, float32=1e-4)  # relative norm, over all parameters


def samples(lengths=(130, 77, 77, 40, 23, 3)) -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]
    return [Sample(i, [t % 3 != 0 for t in range(len(i))]) for i in ids]


def ours(device, **flags) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and the gradient of their sum over the trained tokens."""
    policy = load_policy(tiny_model(), TrainArgs(**flags, compile=False), device)
    (mb,) = pack(samples(), 1000, device)
    logprobs_T, *_ = policy(mb)
    (logprobs_T * mb.loss_mask_T).sum().backward()
    gradient = [p.grad.full_tensor().flatten() for _, p in sorted(policy.hf.named_parameters())]
    return logprobs_T.detach(), torch.cat(gradient)


def theirs(device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs and gradient of the transformers model, sequence by sequence, in
    float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float64).to(device)
    everything = []
    for sample in samples():
        ids, targets = (torch.tensor(x, device=device) for x in ([sample.ids[:-1]], sample.ids[1:]))
        logits = model(ids, use_cache=False).logits[0].double()
        logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        (logprobs * torch.tensor(sample.loss_mask[1:], device=device)).sum().backward()
        everything.append(logprobs.detach())
    gradient = [p.grad.flatten() for _, p in sorted(model.named_parameters())]
    return torch.cat(everything), torch.cat(gradient)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_and_gradient_equal_those_of_transformers(dtype, recompute, device):
    """FSDP2, packed attention and the chunked head together, with and without recomputation. CPU
    twin: test_policy.test_gradient_does_not_depend_on_packing."""
    logprobs_T, gradient = ours(device, dtype=dtype, activation_checkpointing=recompute)
    expected_T, exact = theirs(device)
    assert (logprobs_T - expected_T).abs().mean() < VALUE[dtype]
    assert relative_error(gradient, exact) < GRADIENT[dtype]


@pytest.mark.parametrize("rank", [4, 8, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merged_weight_of_an_adapter_is_rounded_once(dtype, rank, device):
    """As if it were added up in float32. A compiled layer multiplies by the same bits: the engine
    and hf/ get them from a layer that is not compiled."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (512, 256), (rank, 256), (512, rank)
    weight, a, b = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    merged, scale = merge(weight, a, b, 2.0), 2.0
    exact = weight.double() + scale * b.double() @ a.double()
    terms = weight.double().abs() + scale * b.double().abs() @ a.double().abs()
    limit = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6 * terms
    assert ((merged.double() - exact).abs() <= limit).all()
    layer = torch.compile(_MergedLinear.apply)
    eye = torch.eye(256, device=device, dtype=dtype)
    assert torch.equal(layer(eye, weight, None, a, b, scale, torch.Tensor.to), merged.T)


@pytest.mark.parametrize("lengths", [(2,), (2, 3), (40, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_without_tokens_have_zero_gradients(model_type, dtype, lengths, device, tmp_path):
    """A pack of one token leaves most experts without any, where grouped matrix products have hung,
    and have had gradients of old memory. The gradient equals that on the CPU, and an expert without
    tokens has none. Three packs, because the first one may find fresh memory."""
    path, gradients = checkpoint(model_type, tmp_path), []
    for where in (device, torch.device("cpu")):
        policy = load_policy(path, TrainArgs(dtype=dtype, compile=False), where)
        for _ in range(3):
            policy.zero_grad()
            rows = [Sample([i % VOCABULARY for i in s.ids], s.loss_mask) for s in samples(lengths)]
            (mb,) = pack(rows, 100, where)
            policy(mb)[0].sum().backward()
        named = sorted(policy.hf.named_parameters())
        gradients.append({name: p.grad.full_tensor().float().cpu() for name, p in named})
    ours, exact = gradients
    flat = (torch.cat([g.flatten() for g in of.values()]) for of in gradients)
    assert relative_error(*flat) < GRADIENT[dtype]
    for name in (name for name in exact if "experts" in name):
        unused = exact[name].flatten(1).abs().amax(1) == 0
        assert lengths != (2,) or unused.any()
        assert ours[name].isfinite().all() and (ours[name][unused] == 0).all()


def test_compiled_forward_has_the_same_numbers_with_and_without_a_gradient(device):
    """Old log-probs come from a forward without a gradient. Without inductor's emulation of eager
    rounding the two graphs round at other places: 1.3e-3 nats in the mean on a CPU, with it 0."""
    policy = load_policy(tiny_model(), TrainArgs(dtype="bfloat16", compile=True), device)
    (mb,) = pack(samples(), 1000, device)
    with torch.no_grad():
        old_T = policy(mb)[0]
    assert (policy(mb)[0] - old_T).abs().mean() < 1e-4


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_give_equal_logprobs_and_compile_few_times(recompute, device, monkeypatch):
    """With --compile, log-probs are unchanged. After a few packs there are no further compilations,
    although packs differ in tokens, sequences and longest sequence, and one is a single padding
    token. The dtype is bfloat16, the default on CUDA. On a CPU the test compares only the numbers,
    without inductor: attention is a loop over lengths in Python."""
    from torch._dynamo.utils import counters  # takes a while

    if ON_CPU:
        if recompute:
            pytest.skip("on a CPU recomputed blocks may be compiled again")
        compiled_by = torch.nn.Module.compile
        monkeypatch.setattr(
            torch.nn.Module, "compile", lambda block, **_: compiled_by(block, backend="aot_eager")
        )
        fused = partial(torch.compile, backend="aot_eager")
        monkeypatch.setattr(common.model.logprobs, "fused", fused)
    args = dict(dtype="bfloat16", activation_checkpointing=recompute)
    torch._dynamo.reset()
    counters.clear()
    compiled = load_policy(tiny_model(), TrainArgs(compile=True, **args), device)
    plain, compilations = load_policy(tiny_model(), TrainArgs(compile=False, **args), device), []
    for n in range(4 if ON_CPU else 20):
        lengths = (2,) if n == 3 else (130 - 5 * n, *(20 + 3 * i for i in range(2 + n % 5)))
        (mb,) = pack(samples(lengths), 1000, device)
        logprobs_T, *_ = compiled(mb)
        (logprobs_T * mb.loss_mask_T).sum().backward()
        with torch.no_grad():
            assert (logprobs_T - plain(mb)[0]).abs().mean() < VALUE["bfloat16"]
        compilations.append(counters["stats"]["unique_graphs"])
    assert compilations[0] > 0
    assert ON_CPU or compilations[-1] == compilations[7] <= 16, compilations
    assert all(p.grad.full_tensor().isfinite().all() for p in compiled.parameters())
