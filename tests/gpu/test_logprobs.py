"""Token log-probs of a large vocabulary against float64: value, gradient, and how much memory they take."""

import pytest
import torch
from on_gpu import HERE_AND_THERE, ON_CPU, gpu, relative_error

from common.model.logprobs import LOGPROB_CHUNK, token_logprobs

# nats at a token; nats in the mean; of the gradients' norms
BOUNDS = {torch.bfloat16: (2e-3, 2e-4, 1e-2), torch.float32: (5e-5, 5e-6, 1e-4)}


def inputs(device, dtype, T, D, V):
    """Hidden states and a head whose logits have a standard deviation of 2, as a trained model's do."""
    generator = torch.Generator(device).manual_seed(0)
    hidden_TD = torch.randn(T, D, device=device, generator=generator).to(dtype).requires_grad_()
    head_VD = torch.randn(V, D, device=device, generator=generator).mul_(2 * D**-0.5).to(dtype).requires_grad_()
    targets_T = torch.randint(V, (T,), device=device, generator=generator)
    weights_2T = torch.randn(2, T, device=device, generator=generator)
    return hidden_TD, head_VD, targets_T, weights_2T


def exact(hidden_TD, head_VD, targets_T, weights_2T, temperature):
    """Values and gradients in float64, a hundred tokens at a time."""
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
def test_token_logprobs_against_float64(device, dtype, temperature):
    """The head is where sampling and scoring part first. What it multiplies in bfloat16 has to be added up in float32
    (and TF32 has to be off in float32), which no CPU decides. CPU twins: the first case, and
    test_logprobs.test_token_logprobs_value_and_gradient."""
    large = device == "cuda"
    T = 1024 if large else 2 * LOGPROB_CHUNK + 3
    hidden_TD, head_VD, targets_T, weights_2T = inputs(device, dtype, T, *((2048, 151_936) if large else (64, 1000)))
    logprobs_T, entropy_T, *_ = token_logprobs(hidden_TD, head_VD, targets_T, temperature)
    ours_2T = torch.stack([logprobs_T, entropy_T])
    assert ours_2T.dtype == torch.float32
    (ours_2T * weights_2T).sum().backward()
    expected_2T, *gradients = exact(hidden_TD, head_VD, targets_T, weights_2T, temperature)
    difference_2T, (at_a_token, in_the_mean, of_norm) = (ours_2T - expected_2T).abs(), BOUNDS[dtype]
    assert difference_2T.max() < at_a_token and difference_2T.mean() < in_the_mean
    for x, gradient in zip((hidden_TD, head_VD), gradients, strict=True):
        assert x.grad.dtype == dtype and relative_error(x.grad, gradient) < of_norm


@gpu(1)
def test_peak_memory_is_a_fraction_of_the_logits():
    """A whole pack's logits, log-probs and their gradient are 15 GB at 8,192 tokens of Qwen3's vocabulary; forward and
    backward need less than half of that. CPU twin: bench/logprobs.py. Speed: bench/gpu.py."""
    T, D, V = (600, 64, 20_000) if ON_CPU else (8192, 2048, 151_936)
    hidden_TD, head_VD, targets_T, _ = inputs("cpu" if ON_CPU else "cuda", torch.bfloat16, T, D, V)
    if not ON_CPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    token_logprobs(hidden_TD, head_VD, targets_T)[0].sum().backward()
    assert hidden_TD.grad.isfinite().all() and head_VD.grad.isfinite().all()
    if not ON_CPU:
        assert torch.cuda.max_memory_allocated() - before < 0.5 * 3 * T * V * 4
