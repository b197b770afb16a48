"""Comparison of student and teacher: values and gradients equal those of whole logits."""

from functools import partial

import pytest
import torch
from objectives.test_divergence import CHOSEN, EXACT, kl, naive

from common.config.groups import TrainArgs
from common.data.packing import pack
from common.data.sample import Sample
from common.model import logprobs
from common.model.distill import Student, Teacher, compare, most_likely
from common.model.logprobs import Logits
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.objectives.divergence import forward_kl


def whole(logits: Logits, temperature: float) -> torch.Tensor:
    logits_TV = logits.hidden_TD @ logits.head_VD.T + (
        0 if logits.bias_V is None else logits.bias_V
    )
    logits_TV = logits_TV * logits.scale
    cap = logits.softcap
    return (logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)) / temperature


@pytest.fixture(
    params=[(37, 37), (37, 41), (41, 37)], ids=lambda sizes: f"{sizes[0]}_beside_{sizes[1]}"
)
def models(request, monkeypatch):
    """Return student and teacher of different widths and vocabularies, and 13 tokens in chunks of
    5."""
    monkeypatch.setattr(logprobs, "CPU_CHUNK", 5)
    generator, (ours, theirs) = torch.Generator().manual_seed(3), request.param
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    student = Logits(
        draw(13, 8).requires_grad_(),
        draw(ours, 8).requires_grad_(),
        draw(ours).requires_grad_(),
        0.8,
    )
    teacher = Logits(draw(13, 6), draw(theirs, 6), None, 1.3, 3.0)
    return student, teacher, torch.randint(37, (13,), generator=generator), draw(2, 13)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", CHOSEN)
def test_values_and_gradients_equal_those_of_whole_logits(models, name, softcap):
    (student, teacher, targets_T, weights_2T), temperature = models, 0.6
    student = student._replace(softcap=softcap)
    both = min(len(student.head_VD), len(teacher.head_VD))
    ours = compare(student, teacher, targets_T, temperature, CHOSEN[name])
    logits_TV, theirs_TV = whole(student, temperature), whole(teacher, temperature)[:, :both]
    p_TV, q_TV, logp_TV = (
        logits_TV[:, :both].softmax(-1),
        theirs_TV.softmax(-1),
        logits_TV.log_softmax(-1),
    )
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
                sum((values[i] * weights_2T[i]).sum() for i in (0, 1) if through[i]),
                student[:3],
                retain_graph=True,
            )
            for values in (ours, expected)
        )
        for gradient, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, wanted, **EXACT)


def naive_top(q_TV, top_k, *distributions):
    """Return each distribution as [T, K + 1]: the probabilities of q's K largest tokens, and the
    sum of the others."""
    ranked = [sorted(range(q_TV.shape[1]), key=lambda v: -q_V[v].item()) for q_V in q_TV]  # noqa: B023
    return [
        torch.stack(
            [
                torch.stack(
                    [
                        *(x_V[v] for v in order[:top_k]),
                        *[sum(x_V[v] for v in order[top_k:])][: len(order) - top_k],
                    ]
                )
                for x_V, order in zip(x_TV, ranked, strict=True)
            ]
        )
        for x_TV in distributions
    ]


@pytest.mark.parametrize("top_k", [1, 5, 37])
@pytest.mark.parametrize("name", CHOSEN)
def test_top_k_with_a_rest_bucket_equals_coarsened_distributions(models, name, top_k):
    """Values and gradients are those of the coarsened distributions. The value is at most the full
    divergence, and equal at K = V. A stored TopK gives the same numbers as the teacher."""
    student, teacher, targets_T, (weights_T, _) = models
    both = min(len(student.head_VD), len(teacher.head_VD))
    ours = compare(student, teacher, targets_T, 0.8, CHOSEN[name], top_k)
    full = compare(student, teacher, targets_T, 0.8, CHOSEN[name])
    p_TV, q_TV = (
        whole(student, 0.8)[:, :both].softmax(-1),
        whole(teacher, 0.8)[:, :both].softmax(-1),
    )
    p_TS, q_TS = naive_top(q_TV, top_k, p_TV, q_TV)
    wanted_T = naive(name, p_TS, q_TS)
    torch.testing.assert_close(ours.divergence_T, wanted_T, **EXACT)
    torch.testing.assert_close(ours.reverse_kl_T, kl(p_TS, q_TS), **EXACT)
    torch.testing.assert_close(ours.teacher_mass_T, q_TS[:, :top_k].sum(-1), **EXACT)
    for value, same in zip(
        (*ours[:1], *ours[4:6], ours[7]), (*full[:1], *full[4:6], full[7]), strict=True
    ):
        torch.testing.assert_close(value, same, **EXACT)
    assert (ours.divergence_T <= full.divergence_T + 1e-12).all()
    if top_k == both:
        torch.testing.assert_close(ours.divergence_T, full.divergence_T, **EXACT)
    else:
        assert (ours.divergence_T < full.divergence_T).any()
    kept = compare(
        student, most_likely(teacher, targets_T, 0.8, both, top_k), targets_T, 0.8, CHOSEN[name]
    )
    assert all(torch.equal(a, b) for a, b in zip(kept, ours, strict=True))
    gradients = (
        torch.autograd.grad((value_T * weights_T).sum(), student[:3], retain_graph=True)
        for value_T in (ours.divergence_T, kept.divergence_T, wanted_T)
    )
    for gradient, same, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, **EXACT)
        assert torch.equal(gradient, same)


def test_rest_bucket_without_mass_has_finite_gradients():
    """The rest bucket of student or teacher may have no mass: in float32, 1 - sum p would be 0."""
    head_VD, none_T = torch.eye(4), torch.zeros(2, dtype=torch.int64)
    peaked, other = (
        torch.tensor([[300.0, 0, 1, 0], [0.0, 300, 2, 1]]),
        torch.tensor([[300.0, 0, 0, 1], [300.0, 1, 2, 0]]),
    )
    for divergence in CHOSEN.values():
        hidden_TD = peaked.clone().requires_grad_()
        out = compare(
            Logits(hidden_TD, head_VD), Logits(other, head_VD), none_T, 1.0, divergence, top_k=1
        )
        out.divergence_T.sum().backward()
        assert out.divergence_T.isfinite().all() and hidden_TD.grad.isfinite().all()


def test_teacher_logprobs_train_only_the_student(device):
    """The copy of the teacher's head outlives the teacher's forward; only the student has
    gradients."""
    args, folder = TrainArgs(dtype="float32"), tiny_model()
    student, teacher = (
        load_policy(folder, args, device, kind=Student),
        load_policy(folder, args, device, trainable=False, kind=Teacher),
    )
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.1)
    (mb,) = pack(
        [Sample([5, 8, 13, 21, 34], [True] * 5), Sample([3, 4, 7], [True] * 3)], 100, device
    )
    out = student.distill(mb, teacher.teach(mb), forward_kl, temperature=0.7)
    with torch.no_grad():
        plain = [model(mb, temperature=0.7)[:2] for model in (student, teacher)]
    torch.testing.assert_close((out.logprobs_T, out.entropy_T), plain[0])
    torch.testing.assert_close((out.teacher_logprobs_T, out.teacher_entropy_T), plain[1])
    assert (out.divergence_T > 1e-4).all()
    out.divergence_T.sum().backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())
