"""Token log-probs are those of the whole logits; what is added to a rollout, and what is stored of a data set."""

import json
from dataclasses import dataclass

import pytest
import torch

from common.config.groups import TrainArgs
from common.data.packing import Sample, pack, pack_minibatches
from common.model.logprobs import LOGPROB_CHUNK, token_logprobs, with_logprobs, with_values
from common.model.lora import LoRAArgs
from common.model.policy import load_policy, load_scalar_model
from common.model.reference import store_reference_logps
from common.model.tiny import tiny_model

# ---- of tokens ----


def naive(hidden_TD, head_VD, targets_T, temperature):
    logp_TV = (hidden_TD @ head_VD.T / temperature).log_softmax(-1)
    return logp_TV.gather(-1, targets_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)


@pytest.mark.parametrize("through", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("tokens", [1, LOGPROB_CHUNK, 2 * LOGPROB_CHUNK + 3])
def test_token_logprobs_value_and_gradient(tokens, temperature, through):
    generator = torch.Generator().manual_seed(tokens)
    hidden_TD = torch.randn(tokens, 8, dtype=torch.float64, generator=generator).requires_grad_()
    head_VD = torch.randn(37, 8, dtype=torch.float64, generator=generator).requires_grad_()
    targets_T = torch.randint(37, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, dtype=torch.float64, generator=generator)  # another weight on every token
    weights *= torch.tensor([[through != "entropy"], [through != "logprobs"]])
    results = []
    for function in (token_logprobs, naive):
        values = function(hidden_TD, head_VD, targets_T, temperature)[:2]
        used = [(v * w).sum() for v, w in zip(values, weights, strict=True) if w.any()]
        results.append([*values, *torch.autograd.grad(sum(used), (hidden_TD, head_VD))])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale, softcap", [(0.25, None), (1.0, 3.0), (4.0, 2.0)])
def test_heads_with_bias_scale_and_soft_cap(bias, scale, softcap):
    """In the order of the models that have them: bias, scale, cap, and then the temperature."""
    generator = torch.Generator().manual_seed(5)
    hidden_TD, head_VD, bias_V, weights = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((LOGPROB_CHUNK + 3, 8), (37, 8), (37,), (2, LOGPROB_CHUNK + 3))
    )
    targets_T = torch.randint(37, (len(hidden_TD),), generator=generator)
    inputs = [x.requires_grad_() for x in (hidden_TD, head_VD, bias_V)[: 3 if bias else 2]]
    logits_TV = (hidden_TD @ head_VD.T + (bias_V if bias else 0)) * scale
    logits_TV = logits_TV if softcap is None else softcap * torch.tanh(logits_TV / softcap)
    logp_TV = (logits_TV / 0.7).log_softmax(-1)
    expected = logp_TV.gather(-1, targets_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)
    ours = token_logprobs(hidden_TD, head_VD, targets_T, 0.7, bias_V if bias else None, scale, softcap)
    assert torch.equal(ours[2], logits_TV.argmax(-1) == targets_T)
    torch.testing.assert_close(ours[3], (2 * logp_TV).logsumexp(-1), atol=1e-10, rtol=1e-10)
    for value, naive_value in zip(ours, expected, strict=False):
        torch.testing.assert_close(value, naive_value, atol=1e-10, rtol=1e-10)
    gradients = (
        torch.autograd.grad(sum((v * w).sum() for v, w in zip(values, weights, strict=False)), inputs)
        for values in (ours, expected)
    )
    for gradient, naive_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, naive_gradient, atol=1e-10, rtol=1e-10)


def test_token_logprobs_are_float32_whatever_comes_in():
    hidden_TD, head_VD, targets_T = torch.randn(5, 8), torch.randn(11, 8), torch.arange(5)
    low = hidden_TD.bfloat16().requires_grad_(), head_VD.bfloat16().requires_grad_()
    logprobs_T, entropy_T, correct_T, _ = token_logprobs(*low, targets_T)
    expected = naive(low[0].detach().double(), low[1].detach().double(), targets_T, 1.0)
    assert logprobs_T.dtype == entropy_T.dtype == torch.float32 and correct_T.dtype == torch.bool
    torch.testing.assert_close((logprobs_T.double(), entropy_T.double()), expected, atol=1e-5, rtol=0)
    logprobs_T.sum().backward()
    assert low[0].grad.dtype == torch.bfloat16


def test_what_bfloat16_costs():
    """Log-probs and entropies as exact as float32 sums of a thousand logits are; gradients within the two roundings to
    bfloat16, of that of the logits and of the result: each is at most 2^-8."""
    generator = torch.Generator().manual_seed(1)
    low = [torch.randn(n, 64, generator=generator).bfloat16().requires_grad_() for n in (LOGPROB_CHUNK + 9, 1000)]
    exact = [x.detach().double().requires_grad_() for x in low]
    targets_T = torch.randint(1000, (len(low[0]),), generator=generator)
    weights_T = torch.randn(len(low[0]), dtype=torch.float64, generator=generator)
    values, expected = token_logprobs(*low, targets_T)[:2], naive(*exact, targets_T, 1.0)
    for ours, wanted in zip(values, expected, strict=True):
        assert (ours.double() - wanted).abs().max() < 3e-5
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
    logprobs_T, entropy_T, correct_T, collision_T = token_logprobs(hidden_TD, head_VD, torch.tensor([0, 0, 2]), 0.5)
    torch.testing.assert_close(logprobs_T, torch.tensor([0.0, -4e4, -torch.tensor(3.0).log()]))
    torch.testing.assert_close(entropy_T, torch.tensor([0.0, 0.0, torch.tensor(3.0).log()]))
    assert correct_T.tolist() == [True, False, True]
    torch.testing.assert_close(collision_T, torch.tensor([0.0, 0.0, -torch.tensor(3.0).log()]))  # log sum_v p_v^2
    (logprobs_T.sum() + entropy_T.sum()).backward()
    assert hidden_TD.grad.isfinite().all() and head_VD.grad.isfinite().all()


# ---- of a rollout ----

ARGS = TrainArgs(dtype="float32")


def samples(count: int = 6) -> list[Sample]:
    """Of different lengths; the first two ids are the prompt."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 90, (3 + 2 * n,), generator=generator).tolist() for n in range(count)]
    return [Sample(i, [t >= 2 for t in range(len(i))], prompt_length=2) for i in ids]


def test_what_is_added_to_a_rollout(device):
    """Log-probs at the temperature, entropies and values are those of a forward; nothing keeps a graph."""
    policy, value = load_policy(tiny_model(), ARGS, device), load_scalar_model(tiny_model(), ARGS, device)
    minibatches = pack_minibatches([[s] for s in samples()], 2, 20, device)
    assert len(minibatches) == 2 and len(minibatches[1]) > 1
    before = [vars(mb).copy() for minibatch in minibatches for mb in minibatch]
    added = with_values(with_logprobs(with_logprobs(minibatches, 0.7, old=policy), 1.0, ref=policy), value)
    assert [vars(mb) for minibatch in minibatches for mb in minibatch] == before
    minibatches = added
    for mb in (mb for minibatch in minibatches for mb in minibatch):
        with torch.no_grad():
            logprobs_T, entropy_T, *_ = policy(mb, temperature=0.7)
            assert torch.equal(mb.old_logprobs_T, logprobs_T) and torch.equal(mb.old_entropy_T, entropy_T)
            assert torch.equal(mb.ref_logprobs_T, policy(mb)[0]) and torch.equal(mb.values_T, value(mb))
        assert not any(x.requires_grad for x in (mb.old_logprobs_T, mb.ref_logprobs_T, mb.values_T))
    assert not torch.equal(mb.old_logprobs_T, mb.ref_logprobs_T)
    policy.reshard(), value.reshard()


# ---- of a data set ----


@dataclass
class StoringArgs(LoRAArgs, TrainArgs):
    """Of dpo.py and kto.py."""


def store(data, load, folder, dtype="auto", path=None, adapter=None) -> list[float]:
    args = StoringArgs(dtype=dtype, pack_tokens=40, lora_rank=1 if adapter else 0, adapter=adapter)
    parts = [[[sample] for sample in data[:1]], [[sample] for sample in data[1:]]]
    scored = store_reference_logps(parts, path or tiny_model(), load, folder, args, torch.device("cpu"))
    return torch.cat(scored)[:, 0].tolist()


def never():
    raise AssertionError("the file of the first time was not used")


def test_stored_log_probs_are_sums_over_completions_and_are_computed_once(tmp_path, device):
    data, policy = samples(), load_policy(tiny_model(), ARGS, device, trainable=False)
    data[3].weights = [0.5] * len(data[3].ids)
    for sample in data:
        sample.weights = sample.weights or [1.0] * len(sample.ids)
    first = store(data, lambda: policy, tmp_path)
    for sample, logp in zip(data, first, strict=True):
        (mb,) = pack([sample], 100, device)
        with torch.no_grad():
            assert logp == pytest.approx(mb.sequence_sums(policy(mb)[0] * mb.weights_T).item(), abs=1e-4)
    assert store(data, never, tmp_path) == first and not list(tmp_path.glob("*.tmp"))
    for change in (
        lambda: store(data[:-1], never, tmp_path),
        lambda: store(data, never, tmp_path, dtype="bfloat16"),
        lambda: store(data, never, tmp_path, path=str(tmp_path)),
        lambda: store(data, never, tmp_path, adapter=tiny_model()),
    ):
        with pytest.raises(AssertionError, match="was not used"):
            change()
    for name, value in (("ids", 7), ("loss_mask", False), ("weights", 0.25)):
        kept = getattr(data[2], name)[:]
        getattr(data[2], name)[-1] = value
        with pytest.raises(AssertionError, match="was not used"):
            store(data, never, tmp_path)
        setattr(data[2], name, kept)
    assert store(data, never, tmp_path) == first


@pytest.mark.parametrize("text", ["{", "[]", '{"logps": []}', "null", "short"])
def test_a_file_of_log_probs_that_is_damaged(text, tmp_path, device):
    data, file = samples(2), tmp_path / "reference_logps.json"
    if text == "short":
        policy = load_policy(tiny_model(), ARGS, device, trainable=False)
        store(data, lambda: policy, tmp_path)
        stored = json.loads(file.read_text())
        text = json.dumps(stored | dict(logps=stored["logps"][:1]))
    file.write_text(text)
    with pytest.raises(ValueError, match="reference_logps.json is damaged, delete it: "):
        store(data, never, tmp_path)
