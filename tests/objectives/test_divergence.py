"""Divergences are those of loops over the whole vocabulary, gradients too; and what a teacher is to a student."""

import math
from functools import partial

import pytest
import torch

from common.config.groups import TrainArgs
from common.data.packing import Sample, pack
from common.model import logprobs
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.objectives.divergence import Logits, compare, forward_kl, jsd, most_likely, reverse_kl

EXACT = dict(rtol=1e-9, atol=1e-9)
CHOSEN = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "jsd_0.1": partial(jsd, jsd_beta=0.1),
    "jsd_0.5": partial(jsd, jsd_beta=0.5),
    "jsd_0.9": partial(jsd, jsd_beta=0.9),
}


def kl(a_TV, b_TV):
    """KL(a || b) of probabilities, token by token of the vocabulary."""
    return sum(a_T * (a_T.log() - b_T.log()) for a_T, b_T in zip(a_TV.unbind(1), b_TV.unbind(1), strict=True))


def naive(name, p_TV, q_TV):
    if not name.startswith("jsd"):
        return kl(p_TV, q_TV) if name == "reverse_kl" else kl(q_TV, p_TV)
    b = float(name.removeprefix("jsd_"))
    mixed_TV = b * q_TV + (1 - b) * p_TV
    return b * kl(q_TV, mixed_TV) + (1 - b) * kl(p_TV, mixed_TV)


def whole(logits: Logits, temperature: float) -> torch.Tensor:
    logits_TV = logits.hidden_TD @ logits.head_VD.T + (0 if logits.bias_V is None else logits.bias_V)
    logits_TV = logits_TV * logits.scale
    cap = logits.softcap
    return (logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)) / temperature


@pytest.fixture(params=[(37, 37), (37, 41), (41, 37)], ids=lambda sizes: f"{sizes[0]}_beside_{sizes[1]}")
def models(request, monkeypatch):
    """A student and a teacher of other widths and, but for the first, vocabularies; 13 tokens in chunks of 5."""
    monkeypatch.setattr(logprobs, "LOGPROB_CHUNK", 5)
    generator, (ours, theirs) = torch.Generator().manual_seed(3), request.param
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    student = Logits(draw(13, 8).requires_grad_(), draw(ours, 8).requires_grad_(), draw(ours).requires_grad_(), 0.8)
    teacher = Logits(draw(13, 6), draw(theirs, 6), None, 1.3, 3.0)
    return student, teacher, torch.randint(37, (13,), generator=generator), draw(2, 13)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("name", CHOSEN)
def test_values_and_gradients(models, name, temperature, softcap):
    student, teacher, targets_T, weights_2T = models
    student = student._replace(softcap=softcap)
    both = min(len(student.head_VD), len(teacher.head_VD))
    ours = compare(student, teacher, targets_T, temperature, CHOSEN[name])
    logits_TV, theirs_TV = whole(student, temperature), whole(teacher, temperature)[:, :both]
    p_TV, q_TV, logp_TV = logits_TV[:, :both].softmax(-1), theirs_TV.softmax(-1), logits_TV.log_softmax(-1)
    expected = (
        logp_TV.gather(-1, targets_T[:, None])[:, 0],
        naive(name, p_TV, q_TV),
        -(logp_TV.exp() * logp_TV).sum(-1),
        kl(p_TV, q_TV),
        q_TV.log().gather(-1, targets_T[:, None])[:, 0],
        -(q_TV * q_TV.log()).sum(-1),
        torch.ones(len(q_TV)).double(),
    )
    for value, wanted in zip(ours, expected, strict=False):
        torch.testing.assert_close(value, wanted, **EXACT)
    assert torch.equal(ours.agree_T, p_TV.argmax(-1) == q_TV.argmax(-1))
    for through in ((1, 1), (0, 1), (1, 0)):  # log-probs, divergence
        gradients = (
            torch.autograd.grad(
                sum((values[i] * weights_2T[i]).sum() for i in (0, 1) if through[i]), student[:3], retain_graph=True
            )
            for values in (ours, expected)
        )
        for gradient, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, wanted, **EXACT)


def naive_top(q_TV, top_k, *distributions):
    """Each as [T, K + 1], token by token: those of q's K largest, and the sum of the others."""
    ranked = [sorted(range(q_TV.shape[1]), key=lambda v: -q_V[v].item()) for q_V in q_TV]  # noqa: B023
    return [
        torch.stack([
            torch.stack([*(x_V[v] for v in order[:top_k]), *[sum(x_V[v] for v in order[top_k:])][: len(order) - top_k]])
            for x_V, order in zip(x_TV, ranked, strict=True)
        ])
        for x_TV in distributions
    ]  # fmt: skip


@pytest.mark.parametrize("top_k", [1, 5, 36, 37])
@pytest.mark.parametrize("name", CHOSEN)
def test_the_teachers_most_likely_tokens_and_the_rest(models, name, top_k):
    """Values and gradients are those of the coarsened distributions; the value is at most the whole one, and it at
    K = V. What is kept of the teacher stands in for it."""
    student, teacher, targets_T, (weights_T, _) = models
    both = min(len(student.head_VD), len(teacher.head_VD))
    ours = compare(student, teacher, targets_T, 0.8, CHOSEN[name], top_k)
    full = compare(student, teacher, targets_T, 0.8, CHOSEN[name])
    p_TV, q_TV = whole(student, 0.8)[:, :both].softmax(-1), whole(teacher, 0.8)[:, :both].softmax(-1)
    p_TS, q_TS = naive_top(q_TV, top_k, p_TV, q_TV)
    wanted_T = naive(name, p_TS, q_TS)
    torch.testing.assert_close(ours.divergence_T, wanted_T, **EXACT)
    torch.testing.assert_close(ours.reverse_kl_T, kl(p_TS, q_TS), **EXACT)
    torch.testing.assert_close(ours.teacher_mass_T, q_TS[:, :top_k].sum(-1), **EXACT)
    for value, same in zip((*ours[:1], *ours[4:6], ours[7]), (*full[:1], *full[4:6], full[7]), strict=True):
        torch.testing.assert_close(value, same, **EXACT)
    assert (ours.divergence_T <= full.divergence_T + 1e-12).all()
    if top_k == both:
        torch.testing.assert_close(ours.divergence_T, full.divergence_T, **EXACT)
    else:
        assert (ours.divergence_T < full.divergence_T).any()
    kept = compare(student, most_likely(teacher, targets_T, 0.8, both, top_k), targets_T, 0.8, CHOSEN[name])
    assert all(torch.equal(a, b) for a, b in zip(kept, ours, strict=True))
    gradients = (
        torch.autograd.grad((value_T * weights_T).sum(), student[:3], retain_graph=True)
        for value_T in (ours.divergence_T, kept.divergence_T, wanted_T)
    )
    for gradient, same, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, **EXACT)
        assert torch.equal(gradient, same)


def test_a_rest_without_mass_has_finite_gradients():
    """Of the student or of the teacher, in float32, where 1 - sum p would be 0."""
    head_VD, none_T = torch.eye(4), torch.zeros(2, dtype=torch.int64)
    peaked, other = (
        torch.tensor([[300.0, 0, 1, 0], [0.0, 300, 2, 1]]),
        torch.tensor([[300.0, 0, 0, 1], [300.0, 1, 2, 0]]),
    )
    for divergence in CHOSEN.values():
        hidden_TD = peaked.clone().requires_grad_()
        out = compare(Logits(hidden_TD, head_VD), Logits(other, head_VD), none_T, 1.0, divergence, top_k=1)
        out.divergence_T.sum().backward()
        assert out.divergence_T.isfinite().all() and hidden_TD.grad.isfinite().all()


def test_plain_truncation_is_no_bound_and_teaches_the_wrong_tail():
    """What the rest is there for. The K terms alone are above the whole divergence for some, and where student and
    teacher are equal they still draw the student's mass to the K; renormalised over the K it is no bound either, and
    the student's mass on all other tokens is nobody's."""
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, 64, 9, dtype=torch.float64, generator=generator)
    logp_TV, logq_TV = (2 * draw()).log_softmax(-1), (2 * draw()).log_softmax(-1)
    top_TK = logq_TV.topk(3).indices

    def alone(logp_TV):
        p_TK, q_TK = logp_TV.gather(1, top_TK), logq_TV.gather(1, top_TK)
        return (q_TK.exp() * (q_TK - p_TK)).sum(-1)

    def renormalised(logp_TV):
        return forward_kl(*(x_TV.gather(1, top_TK).log_softmax(-1) for x_TV in (logp_TV, logq_TV)))[0]

    full_T, head_VD = forward_kl(logp_TV, logq_TV)[0], torch.eye(9, dtype=torch.float64)
    assert (alone(logp_TV) > full_T + 0.01).any() and (renormalised(logp_TV) > full_T + 0.01).any()
    outside_TV = torch.ones(64, 9, dtype=torch.bool).scatter(1, top_TK, False)

    def gradient(loss, logits_TV):
        logits_TV = logits_TV.clone().requires_grad_()
        return torch.autograd.grad(loss(logits_TV).sum(), logits_TV)[0]

    def ours(logits_TV):
        student, teacher = Logits(logits_TV, head_VD), Logits(logq_TV, head_VD)
        return compare(student, teacher, top_TK[:, 0], divergence=forward_kl, top_k=3).divergence_T

    assert gradient(ours, logq_TV).abs().max() < 1e-12
    drawn_TV = gradient(lambda logits_TV: alone(logits_TV.log_softmax(-1)), logq_TV)
    assert (drawn_TV[outside_TV] > 0).all() and drawn_TV.abs().max() > 0.1
    untaught_TV = gradient(lambda logits_TV: renormalised(logits_TV.log_softmax(-1)), logp_TV)
    assert untaught_TV[outside_TV].abs().max() < 1e-12 < 0.1 < gradient(ours, logp_TV)[outside_TV].abs().max()


def test_the_ends_of_jsd_are_the_two_kl():
    """Each of its parts goes to 0 with b or 1 - b, in proportion (arXiv:2306.13649)."""
    generator = torch.Generator().manual_seed(0)
    logp_CV, logq_CV = (torch.randn(4, 9, dtype=torch.float64, generator=generator).log_softmax(-1) for _ in range(2))
    for b, other, scale in ((1e-7, forward_kl, 1e-7), (1 - 1e-7, reverse_kl, 1e-7)):
        for ours, wanted in zip(jsd(logp_CV, logq_CV, jsd_beta=b), other(logp_CV, logq_CV), strict=True):
            torch.testing.assert_close(ours / scale, wanted, rtol=1e-5, atol=1e-5)


def test_equal_and_far_distributions():
    logp_CV = torch.tensor([[0.0, 1.0, 2.0]]).log_softmax(-1)
    far_CV = torch.tensor([[1e4, 0.0, -1e4]]).log_softmax(-1)
    for divergence in CHOSEN.values():
        for part in divergence(logp_CV, logp_CV):
            torch.testing.assert_close(part, torch.zeros_like(part), atol=1e-7, rtol=0)
        for p, q in ((logp_CV, far_CV), (far_CV, logp_CV), (far_CV, far_CV)):
            assert all(part.isfinite().all() for part in divergence(p, q))
    assert CHOSEN["jsd_0.5"](logp_CV, far_CV)[0] < math.log(2) + 1e-6


def test_the_sampled_estimator_is_unbiased():
    """All tokens of a small vocabulary, each with its probability: the expected gradient of the clipped loss with
    log q - log p as advantage is that of KL(p || q)."""
    generator = torch.Generator().manual_seed(2)
    logits_V = torch.randn(7, dtype=torch.float64, generator=generator).requires_grad_()
    logq_V = torch.randn(7, dtype=torch.float64, generator=generator).log_softmax(-1)
    logp_V = logits_V.log_softmax(-1)
    (wanted,) = torch.autograd.grad((logp_V.exp() * (logp_V - logq_V)).sum(), logits_V, retain_graph=True)
    expected = torch.zeros_like(wanted)
    for v in range(7):
        advantage = logq_V[v] - logp_V[v].detach()
        loss = -torch.exp(logp_V[v] - logp_V[v].detach()) * advantage  # PPO's loss on policy: no bound is reached
        expected += logp_V[v].exp().detach() * torch.autograd.grad(loss, logits_V, retain_graph=True)[0]
    torch.testing.assert_close(expected, wanted, rtol=1e-12, atol=1e-12)


def test_a_teacher_of_a_pack(device):
    """Its head outlives its forward, which frees FSDP's; the student alone has a gradient."""
    args, folder = TrainArgs(dtype="float32"), tiny_model()
    student, teacher = load_policy(folder, args, device), load_policy(folder, args, device, trainable=False)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.1)
    (mb,) = pack([Sample([5, 8, 13, 21, 34], [True] * 5), Sample([3, 4, 7], [True] * 3)], 100, device)
    out = student(mb, temperature=0.7, teacher=teacher.teach(mb), divergence=forward_kl)
    with torch.no_grad():
        plain = [model(mb, temperature=0.7)[:2] for model in (student, teacher)]
    torch.testing.assert_close((out.logprobs_T, out.entropy_T), plain[0])
    torch.testing.assert_close((out.teacher_logprobs_T, out.teacher_entropy_T), plain[1])
    assert (out.divergence_T > 1e-4).all()
    out.divergence_T.sum().backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())
