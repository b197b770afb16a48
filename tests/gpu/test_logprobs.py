"""Token log-probs of a large vocabulary against float64: values, gradients and peak memory."""

import pytest
import torch
from on_gpu import HERE_AND_THERE, ON_CPU, gpu, relative_error

from common.model.logprobs import CPU_CHUNK, Logits, token_logprobs

# maximum difference in nats; mean in nats; relative norm of the gradient error
BOUNDS = {torch.bfloat16: (2e-3, 2e-4, 1e-2), torch.float32: (5e-5, 5e-6, 1e-4)}


def inputs(device, dtype, T, D, V):
    """Return hidden states and a head whose logits have a standard deviation of 2, as in trained
    models, then targets and weights."""
    generator = torch.Generator(device).manual_seed(0)
    hidden_TD = torch.randn(T, D, device=device, generator=generator).to(dtype).requires_grad_()
    head_VD = torch.randn(V, D, device=device, generator=generator).mul_(2 * D**-0.5)
    head_VD = head_VD.to(dtype).requires_grad_()
    targets_T = torch.randint(V, (T,), device=device, generator=generator)
    weights_2T = torch.randn(2, T, device=device, generator=generator)
    return hidden_TD, head_VD, targets_T, weights_2T


def exact(hidden_TD, head_VD, targets_T, weights_2T, temperature):
    """Return values and gradients in float64, computed for a hundred tokens at a time."""
    hidden_TD, head_VD = (x.detach().double().requires_grad_() for x in (hidden_TD, head_VD))
    values = []
    for start in range(0, len(hidden_TD), 100):
        c = slice(start, start + 100)
        logp_CV = (hidden_TD[c] @ head_VD.T / temperature).log_softmax(-1)
        both = logp_CV.gather(-1, targets_T[c, None])[:, 0], -(logp_CV.exp() * logp_CV).sum(-1)
        (torch.stack(both) * weights_2T[:, c]).sum().backward()
        values.append(torch.stack(both).detach())
    return torch.cat(values, 1), hidden_TD.grad, head_VD.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("device", "dtype"), HERE_AND_THERE)
def test_token_logprobs_equal_float64(device, dtype, temperature):
    """Sampling and scoring differ most in the head. Its products of bfloat16 matrices must be
    summed in float32, and TF32 must be off in float32; a CPU cannot show this."""
    large = device == "cuda"
    T = 1024 if large else 2 * CPU_CHUNK + 3
    sizes = (2048, 151_936) if large else (64, 1000)
    hidden_TD, head_VD, targets_T, weights_2T = inputs(device, dtype, T, *sizes)
    logprobs_T, entropy_T, *_ = token_logprobs(Logits(hidden_TD, head_VD), targets_T, temperature)
    ours_2T = torch.stack([logprobs_T, entropy_T])
    assert ours_2T.dtype == torch.float32
    (ours_2T * weights_2T).sum().backward()
    expected_2T, *gradients = exact(hidden_TD, head_VD, targets_T, weights_2T, temperature)
    difference_2T, (maximum, mean, of_norm) = (ours_2T - expected_2T).abs(), BOUNDS[dtype]
    assert difference_2T.max() < maximum and difference_2T.mean() < mean
    for x, gradient in zip((hidden_TD, head_VD), gradients, strict=True):
        assert x.grad.dtype == dtype and relative_error(x.grad, gradient) < of_norm


@gpu(1)
def test_peak_memory_is_a_fraction_of_the_logits():
    """The logits, log-probs and gradient of a whole pack take 15 GB at 8,192 tokens with Qwen3's
    vocabulary; forward and backward need less than half of that. Speed:
    bench/gpu.py."""
    T, D, V = (600, 64, 20_000) if ON_CPU else (8192, 2048, 151_936)
    hidden_TD, head_VD, targets_T, _ = inputs("cpu" if ON_CPU else "cuda", torch.bfloat16, T, D, V)
    if not ON_CPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    token_logprobs(Logits(hidden_TD, head_VD), targets_T).logprobs_T.sum().backward()
    assert hidden_TD.grad.isfinite().all() and head_VD.grad.isfinite().all()
    if not ON_CPU:
        assert torch.cuda.max_memory_allocated() - before < 0.5 * 3 * T * V * 4
