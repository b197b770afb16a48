"""Token log-probs and entropies, chunk by chunk, equal those of whole logits."""

import pytest
import torch

from common.model.logprobs import CPU_CHUNK, Logits, token_logprobs


def naive(hidden_TD, head_VD, targets_T, temperature, support_TK=None):
    logits_TV = hidden_TD @ head_VD.T / temperature
    if support_TK is not None:
        kept_TV = torch.zeros_like(logits_TV, dtype=torch.bool).scatter(1, support_TK.long(), True)
        logits_TV = torch.where(kept_TV, logits_TV, -torch.inf)
    logp_TV = logits_TV.log_softmax(-1)
    terms_TV = logp_TV.exp() * logp_TV.clamp(min=-1e9)
    return logp_TV.gather(-1, targets_T[:, None])[:, 0], -terms_TV.sum(-1)


@pytest.mark.parametrize("through", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("tokens", [1, CPU_CHUNK, 2 * CPU_CHUNK + 3])
@pytest.mark.parametrize("size", [None, 1, 5])
def test_token_logprobs_and_gradient_equal_naive_code(tokens, temperature, through, size):
    """`size`: ids of each token's support, some of them twice; the target is among them."""
    generator = torch.Generator().manual_seed(tokens)
    hidden_TD = torch.randn(tokens, 8, dtype=torch.float64, generator=generator).requires_grad_()
    head_VD = torch.randn(37, 8, dtype=torch.float64, generator=generator).requires_grad_()
    targets_T = torch.randint(37, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, dtype=torch.float64, generator=generator)  # of each token
    weights *= torch.tensor([[through != "entropy"], [through != "logprobs"]])
    support_TK = None
    if size is not None:
        support_TK = torch.randint(37, (tokens, size), generator=generator, dtype=torch.int32)
        support_TK[:, 0] = targets_T
    results = []
    for values in (
        token_logprobs(Logits(hidden_TD, head_VD), targets_T, temperature, support_TK=support_TK)[
            :2
        ],
        naive(hidden_TD, head_VD, targets_T, temperature, support_TK),
    ):
        used = [(v * w).sum() for v, w in zip(values, weights, strict=True) if w.any()]
        results.append([*values, *torch.autograd.grad(sum(used), (hidden_TD, head_VD))])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale, softcap", [(0.25, None), (1.0, 3.0), (4.0, 2.0)])
def test_head_applies_bias_scale_and_softcap(bias, scale, softcap):
    """The order is bias, scale, softcap, temperature."""
    generator = torch.Generator().manual_seed(5)
    hidden_TD, head_VD, bias_V, weights = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((CPU_CHUNK + 3, 8), (37, 8), (37,), (2, CPU_CHUNK + 3))
    )
    targets_T = torch.randint(37, (len(hidden_TD),), generator=generator)
    inputs = [x.requires_grad_() for x in (hidden_TD, head_VD, bias_V)[: 3 if bias else 2]]
    logits_TV = (hidden_TD @ head_VD.T + (bias_V if bias else 0)) * scale
    logits_TV = logits_TV if softcap is None else softcap * torch.tanh(logits_TV / softcap)
    logp_TV = (logits_TV / 0.7).log_softmax(-1)
    expected = logp_TV.gather(-1, targets_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)
    ours = token_logprobs(
        Logits(hidden_TD, head_VD, bias_V if bias else None, scale, softcap), targets_T, 0.7
    )
    assert torch.equal(ours[2], logits_TV.argmax(-1) == targets_T)
    for value, naive_value in zip(ours, expected, strict=False):
        torch.testing.assert_close(value, naive_value, atol=1e-10, rtol=1e-10)
    gradients = (
        torch.autograd.grad(
            sum((v * w).sum() for v, w in zip(values, weights, strict=False)), inputs
        )
        for values in (ours, expected)
    )
    for gradient, naive_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, naive_gradient, atol=1e-10, rtol=1e-10)


def test_bfloat16_rounding_errors_are_bounded():
    """Log-probs and entropies are as exact as float32 sums of a thousand logits. Gradients are
    rounded to bfloat16 twice, as gradients of logits and as results, each time by at most 2^-8."""
    generator = torch.Generator().manual_seed(1)
    low = [
        torch.randn(n, 64, generator=generator).bfloat16().requires_grad_()
        for n in (CPU_CHUNK + 9, 1000)
    ]
    exact = [x.detach().double().requires_grad_() for x in low]
    targets_T = torch.randint(1000, (len(low[0]),), generator=generator)
    weights_T = torch.randn(len(low[0]), dtype=torch.float64, generator=generator)
    values, expected = token_logprobs(Logits(*low), targets_T)[:2], naive(*exact, targets_T, 1.0)
    for ours, wanted in zip(values, expected, strict=True):
        assert ours.dtype == torch.float32 and (ours.double() - wanted).abs().max() < 3e-5
    ((values[0] + 0.3 * values[1]) * weights_T).sum().backward()
    logits_TV = (exact[0] @ exact[1].T).detach().requires_grad_()
    logp_TV = logits_TV.log_softmax(-1)
    entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    ((logp_TV.gather(-1, targets_T[:, None])[:, 0] + 0.3 * entropy_T) * weights_T).sum().backward()
    grad_TV, (hidden_TD, head_VD) = logits_TV.grad, (x.detach() for x in exact)
    for ours, wanted, terms in (
        (low[0].grad, grad_TV @ head_VD, grad_TV.abs() @ head_VD.abs()),
        (low[1].grad, grad_TV.T @ hidden_TD, grad_TV.T.abs() @ hidden_TD.abs()),
    ):
        assert ((ours.double() - wanted).abs() < 2**-7 * 1.001 * terms).all()
        assert (ours.double() - wanted).norm() < 2**-8 * wanted.norm()


def test_extreme_logits_do_not_overflow():
    hidden_TD = torch.tensor([[1e4, 0.0], [-1e4, 0.0], [0.0, 0.0]], requires_grad=True)
    head_VD = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.5, 0.0]], requires_grad=True)
    logprobs_T, entropy_T, correct_T = token_logprobs(
        Logits(hidden_TD, head_VD), torch.tensor([0, 0, 2]), 0.5
    )
    torch.testing.assert_close(logprobs_T, torch.tensor([0.0, -4e4, -torch.tensor(3.0).log()]))
    torch.testing.assert_close(entropy_T, torch.tensor([0.0, 0.0, torch.tensor(3.0).log()]))
    assert correct_T.tolist() == [True, False, True]
    (logprobs_T.sum() + entropy_T.sum()).backward()
    assert hidden_TD.grad.isfinite().all() and head_VD.grad.isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e2, 1e4, 1e6, 1e9])
def test_large_logits_lose_no_digits(size):
    """All logits are near `size`, and exact in float32. Values and gradients are those of float64
    whatever the size."""
    spacing = max(2**-6, torch.finfo(torch.float32).eps * size)  # of float32 numbers, or wider
    steps_TV = torch.randn(6, 37, generator=torch.Generator().manual_seed(0)) * 2 / spacing
    logits_TV = (size + steps_TV.round() * spacing).requires_grad_()
    exact_TV = logits_TV.detach().double().requires_grad_()
    targets_T = torch.tensor([*range(5), int(exact_TV[5].argmax())])
    ours = token_logprobs(Logits(logits_TV, torch.eye(37)), targets_T)
    logp_TV = exact_TV.log_softmax(-1)
    expected = logp_TV.gather(-1, targets_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)
    for value, wanted in zip(ours, expected, strict=False):
        torch.testing.assert_close(value.double(), wanted, atol=1e-6, rtol=1e-6)
        found_TV, wanted_TV = (
            torch.autograd.grad(x_T.sum(), x_TV, retain_graph=True)[0]
            for x_T, x_TV in ((value, logits_TV), (wanted, exact_TV))
        )
        torch.testing.assert_close(found_TV.double(), wanted_TV, atol=1e-6, rtol=1e-6)
