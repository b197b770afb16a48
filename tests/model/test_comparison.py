"""Comparison of student and teacher: values and gradients equal those of whole logits."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import completion
from objectives.test_divergence import CHOSEN, EXACT, kl, naive

from common.config.groups import TrainArgs
from common.model import logprobs
from common.model.distill import Student, Teacher, compare, most_likely
from common.model.logprobs import Logits
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.objectives.divergence import forward_kl
from common.packs.packing import pack
from common.packs.sample import Sample
from common.parallel.distributed import RunError


def whole(logits: Logits, temperature: float) -> torch.Tensor:
    bias_V = 0 if logits.bias_V is None else logits.bias_V
    logits_TV = (logits.hidden_TD @ logits.head_VD.T + bias_V) * logits.scale
    cap = logits.softcap
    return (logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)) / temperature


def gradients(values: Sequence[torch.Tensor], weights_2T, student: Logits) -> tuple:
    """Return the gradients of a weighted sum of log-probs and divergences, those that have a
    weight."""
    pairs = [(x_T * w_T).sum() for x_T, w_T in zip(values, weights_2T, strict=False) if w_T.any()]
    return torch.autograd.grad(sum(pairs), student[:3], retain_graph=True)


@pytest.fixture(
    params=[(11, 11), (11, 13), (13, 11)], ids=lambda sizes: f"{sizes[0]}_beside_{sizes[1]}"
)
def models(request, monkeypatch):
    """Return student and teacher of different widths and vocabularies, and 13 tokens in chunks of
    5."""
    monkeypatch.setattr(logprobs, "CPU_CHUNK", 5)
    generator, (ours, theirs) = torch.Generator().manual_seed(3), request.param
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    student = Logits(*(draw(*n).requires_grad_() for n in ((13, 8), (ours, 8), (ours,))), 0.8)
    teacher = Logits(draw(13, 6), draw(theirs, 6), None, 1.3, 3.0)
    return student, teacher, torch.randint(11, (13,), generator=generator), draw(2, 13)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", CHOSEN)
def test_values_and_gradients_equal_those_of_whole_logits(models, name, softcap):
    (student, teacher, targets_T, weights_2T), temperature = models, 0.6
    student = student._replace(softcap=softcap)
    both = min(len(student.head_VD), len(teacher.head_VD))
    ours = compare(student, teacher, targets_T, temperature, CHOSEN[name])
    logits_TV, theirs_TV = whole(student, temperature), whole(teacher, temperature)[:, :both]
    p_TV, q_TV = (x_TV[:, :both].softmax(-1) for x_TV in (logits_TV, theirs_TV))
    logp_TV = logits_TV.log_softmax(-1)
    expected = (
        logp_TV.gather(-1, targets_T[:, None])[:, 0],
        naive(name, p_TV, q_TV),
        -(logp_TV.exp() * logp_TV).sum(-1),
        kl(p_TV, q_TV),
        q_TV.log().gather(-1, targets_T[:, None])[:, 0],
        -(q_TV * q_TV.log()).sum(-1),
        torch.ones(len(q_TV)).double(),
    )
    torch.testing.assert_close(tuple(ours[:7]), expected, **EXACT)
    assert torch.equal(ours.agree_T, p_TV.argmax(-1) == q_TV.argmax(-1))
    for through in ((1, 1), (0, 1), (1, 0)):  # log-probs, divergence
        some_2T = weights_2T * torch.tensor(through)[:, None]
        both_gradients = (gradients(values, some_2T, student) for values in (ours, expected))
        torch.testing.assert_close(*both_gradients, **EXACT)


def naive_top(q_TV, top_k, *distributions):
    """Return each distribution as [T, K + 1]: the probabilities of q's K largest tokens, and the
    sum of the others."""
    order_TV = q_TV.argsort(-1, descending=True)
    ranked = [x_TV.gather(-1, order_TV) for x_TV in distributions]
    rests = [x_TV[:, top_k:].sum(-1, keepdim=True) for x_TV in ranked]
    has_rest = top_k < q_TV.shape[1]
    both = zip(ranked, rests, strict=True)
    return [torch.cat([x_TV[:, :top_k], rest_T1[:, :has_rest]], -1) for x_TV, rest_T1 in both]


@pytest.mark.parametrize("top_k", [1, 5, 11])
@pytest.mark.parametrize("name", CHOSEN)
def test_top_k_with_a_rest_bucket_equals_coarsened_distributions(models, name, top_k):
    """Values and gradients are those of the coarsened distributions. The value is at most the full
    divergence, and equal at K = V. A stored TopK gives the same numbers as the teacher."""
    student, teacher, targets_T, weights_2T = models
    both = min(len(student.head_VD), len(teacher.head_VD))
    ours = compare(student, teacher, targets_T, 0.8, CHOSEN[name], top_k)
    full = compare(student, teacher, targets_T, 0.8, CHOSEN[name])
    p_TV, q_TV = (whole(x, 0.8)[:, :both].softmax(-1) for x in (student, teacher))
    p_TS, q_TS = naive_top(q_TV, top_k, p_TV, q_TV)
    wanted = ours.logprobs_T, naive(name, p_TS, q_TS), ours.entropy_T, kl(p_TS, q_TS)
    torch.testing.assert_close(tuple(ours[:4]), wanted, **EXACT)
    torch.testing.assert_close(ours.teacher_mass_T, q_TS[:, :top_k].sum(-1), **EXACT)
    for i in (0, 4, 5, 7):  # what coarsening does not change
        torch.testing.assert_close(ours[i], full[i], **EXACT)
    assert (ours.divergence_T <= full.divergence_T + 1e-12).all()
    if top_k == both:
        torch.testing.assert_close(ours.divergence_T, full.divergence_T, **EXACT)
    else:
        assert (ours.divergence_T < full.divergence_T).any()
    stored = most_likely(teacher, targets_T, 0.8, both, top_k)
    kept = compare(student, stored, targets_T, 0.8, CHOSEN[name])
    assert all(map(torch.equal, kept, ours))
    of_divergence_2T = weights_2T * torch.tensor([[0], [1]])
    found, same, expected = (gradients(x, of_divergence_2T, student) for x in (ours, kept, wanted))
    torch.testing.assert_close(found, expected, **EXACT)
    assert all(map(torch.equal, found, same))


def test_rest_bucket_without_mass_has_finite_gradients():
    """The rest bucket of student or teacher may have no mass: in float32, 1 - sum p would be 0."""
    head_VD, none_T = torch.eye(4), torch.zeros(2, dtype=torch.int64)
    peaked = torch.tensor([[300.0, 0, 1, 0], [0.0, 300, 2, 1]])
    other = torch.tensor([[300.0, 0, 0, 1], [300.0, 1, 2, 0]])
    for divergence in CHOSEN.values():
        student = Logits(peaked.clone().requires_grad_(), head_VD)
        out = compare(student, Logits(other, head_VD), none_T, 1.0, divergence, top_k=1)
        out.divergence_T.sum().backward()
        assert out.divergence_T.isfinite().all() and student.hidden_TD.grad.isfinite().all()


def test_teacher_logprobs_train_only_the_student(device):
    """The copy of the teacher's head outlives the teacher's forward; only the student has
    gradients."""
    args, folder = TrainArgs(dtype="float32"), tiny_model()
    student = load_policy(folder, args, device, kind=Student)
    teacher = load_policy(folder, args, device, trainable=False, kind=Teacher)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.1)
    samples = [Sample(ids, [True] * len(ids)) for ids in ([5, 8, 13, 21, 34], [3, 4, 7])]
    (mb,) = pack(samples, 100, device)
    out = student.distill(mb, teacher.teach(mb), forward_kl, temperature=0.7)
    with torch.no_grad():
        plain = [model(mb, temperature=0.7)[:2] for model in (student, teacher)]
    torch.testing.assert_close((out.logprobs_T, out.entropy_T), plain[0])
    torch.testing.assert_close((out.teacher_logprobs_T, out.teacher_entropy_T), plain[1])
    assert (out.divergence_T > 1e-4).all()
    out.divergence_T.sum().backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_token_that_the_teacher_lacks_is_refused(device):
    """A student's head may have rows that are no tokens, and they may be sampled."""
    args, folder = TrainArgs(dtype="float32"), tiny_model()
    teacher = load_policy(folder, args, device, trainable=False, kind=Teacher)
    known = completion(3)
    assert teacher.read([[known]], None) == [[known]]
    padded = replace(known, ids=[*known.ids[:-1], teacher.hf.config.vocab_size])
    with pytest.raises(RunError, match="^--teacher .*: has no token that the student uses$"):
        teacher.read([[known, padded]], None)
