"""Comparison of a student with its teacher at every token, in chunks (head.py), over the whole
vocabulary or the K most likely tokens of the teacher.

Both distributions have the same temperature. Only the student has gradients. The two heads may have
different numbers of rows for one tokenizer. Then the divergence covers the shared tokens, and each
distribution is normalised over them.

Shapes: T packed tokens, C tokens of one chunk, V vocabulary, K most likely tokens. S = K + 1 with
one entry for all other tokens, or V for distributions over the whole vocabulary."""

from typing import NamedTuple

import torch
from torch import Tensor

from common.model.head import Logits, LogitsGradient
from common.objectives.divergence import Divergence, coarsen, reverse_kl, spread_gradient


class TopK:
    """Distributions of a teacher over the shared tokens, coarsened to its most likely tokens. This
    is a plain class, because FSDP would round the tensors of a dataclass or tuple to the compute
    dtype."""

    def __init__(
        self,
        logprobs_TS: Tensor,
        tokens_TK: Tensor,
        target_T: Tensor,
        entropy_T: Tensor,
        vocabulary: int,
    ):
        # Log-probs of the K most likely tokens, then of all other tokens together.
        self.logprobs_TS = logprobs_TS
        self.tokens_TK = tokens_TK  # the most likely one first
        self.target_logprobs_T = target_T
        self.entropy_T = entropy_T  # entropy before coarsening
        self.vocabulary = vocabulary  # number of shared tokens


class Comparison(NamedTuple):
    """Statistics of a student and its teacher at each token: nats, float32 (or float64), [T]."""

    logprobs_T: Tensor  # log-prob of the target by the student, with gradient
    divergence_T: Tensor | None  # with gradient; 0 without a divergence
    entropy_T: Tensor  # entropy of the student
    reverse_kl_T: Tensor  # KL(student || teacher), coarsened like the divergence
    teacher_logprobs_T: Tensor  # log-prob of the target by the teacher, over the shared tokens
    teacher_entropy_T: Tensor | None
    teacher_mass_T: Tensor | None  # teacher's probability of the kept tokens; 1 if all are kept
    agree_T: Tensor | None  # whether the two have the same most likely token, bool


@torch.no_grad()
def most_likely(
    teacher: Logits, targets_T: Tensor, temperature: float, vocabulary: int, top_k: int
) -> TopK:
    """Coarsen a teacher's distributions over the first `vocabulary` tokens to the `top_k` most
    likely ones."""
    chunks = []
    for c in teacher.chunks():
        logq_CV = teacher.chunk(c, temperature)[0][:, :vocabulary].log_softmax(-1)
        tokens_CK = logq_CV.topk(top_k).indices
        target_C = logq_CV.gather(-1, targets_T[c, None])[:, 0]
        chunks.append((coarsen(logq_CV, tokens_CK), tokens_CK, target_C, _entropy(logq_CV)))
    return TopK(*map(torch.cat, zip(*chunks, strict=True)), vocabulary=vocabulary)


def _entropy(logp_CV: Tensor) -> Tensor:
    return -torch.linalg.vecdot(logp_CV.exp(), logp_CV)


def compare(
    student: Logits,
    teacher: Logits | TopK,
    targets_T: Tensor,
    temperature: float = 1.0,
    divergence: Divergence | None = None,
    top_k: int = 0,
) -> Comparison:
    """Compare a student with its teacher. A `top_k` above 0 coarsens both to the teacher's most
    likely tokens. All targets must be shared tokens."""
    if top_k and isinstance(teacher, Logits):
        vocabulary = min(len(student.head_VD), len(teacher.head_VD))
        teacher = most_likely(teacher, targets_T, temperature, vocabulary, top_k)
    return Comparison._make(_Compare.apply(*student, teacher, targets_T, temperature, divergence))


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden_TD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        scale: float,
        softcap: float | None,
        teacher: Logits | TopK,
        targets_T: Tensor,
        temperature: float,
        divergence: Divergence | None,
    ):
        student = Logits(hidden_TD, head_VD, bias_V, scale, softcap)
        numbers = (torch.zeros_like(targets_T, dtype=student.dtype) for _ in range(7))
        out = Comparison._make([*numbers, torch.zeros_like(targets_T, dtype=torch.bool)])
        for c in _chunks(student, teacher):
            x = _logprobs(student, teacher, c, temperature)
            out.logprobs_T[c] = x.student_CV.gather(-1, targets_T[c, None])[:, 0]
            out.entropy_T[c] = _entropy(x.student_CV)
            if divergence is not None:
                out.divergence_T[c], _ = divergence(x.logp_CS, x.logq_CS)
            out.reverse_kl_T[c], _ = reverse_kl(x.logp_CS, x.logq_CS)
            if isinstance(teacher, Logits):
                out.teacher_logprobs_T[c] = x.logq_CS.gather(-1, targets_T[c, None])[:, 0]
                out.teacher_entropy_T[c] = _entropy(x.logq_CS)
                out.teacher_mass_T[c] = 1.0
                largest_C = x.logq_CS.argmax(-1)
            else:
                out.teacher_logprobs_T[c] = teacher.target_logprobs_T[c]
                out.teacher_entropy_T[c] = teacher.entropy_T[c]
                out.teacher_mass_T[c] = x.logq_CS[:, : teacher.tokens_TK.shape[1]].exp().sum(-1)
                largest_C = teacher.tokens_TK[c, 0]
            out.agree_T[c] = x.logp_CV.argmax(-1) == largest_C
        # The teacher's head is large, so its tensors are saved: the backward pass frees saved
        # tensors, not attributes.
        tensors = ()
        ctx.teacher = teacher
        if isinstance(teacher, Logits):
            tensors = teacher[:3]
            ctx.teacher = teacher[3:]
        ctx.save_for_backward(targets_T, hidden_TD, head_VD, bias_V, *tensors)
        ctx.numbers = scale, softcap, temperature, divergence
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*out[2:])
        return tuple(out)

    @staticmethod
    def backward(ctx, grad_logprobs_T: Tensor | None, grad_divergence_T: Tensor | None, *_):
        targets_T, hidden_TD, head_VD, bias_V, *tensors = ctx.saved_tensors
        scale, softcap, temperature, divergence = ctx.numbers
        student = Logits(hidden_TD, head_VD, bias_V, scale, softcap)
        teacher = Logits(*tensors, *ctx.teacher) if tensors else ctx.teacher
        gradient = LogitsGradient(student, head_is_trained=ctx.needs_input_grad[1])

        def chunk_gradient(c: slice) -> tuple[Tensor, Tensor | float]:
            """Return the gradient of a chunk's logits, and their derivative. A function, so that
            its tensors are freed before the next chunk."""
            x = _logprobs(student, teacher, c, temperature)
            grad_CV = torch.zeros_like(x.student_CV)
            if grad_divergence_T is not None and divergence is not None:
                _, slope_CV = divergence(x.logp_CS, x.logq_CS)
                if isinstance(teacher, TopK):
                    slope_CV = spread_gradient(slope_CV, x.logp_CV, x.logp_CS, teacher.tokens_TK[c])
                grad_CV[:, : x.logp_CV.shape[1]] = slope_CV.mul_(grad_divergence_T[c, None])
            if grad_logprobs_T is not None:  # d log pi_target / d logit_j = [j is target] - pi_j
                grad_CV -= x.student_CV.exp_().mul_(grad_logprobs_T[c, None])
                grad_CV.scatter_add_(1, targets_T[c, None], grad_logprobs_T[c, None])
            return grad_CV, x.derivative

        for c in _chunks(student, teacher):
            gradient.add(c, *chunk_gradient(c))
        return *gradient.result(), *[None] * 6


def _chunks(student: Logits, teacher: Logits | TopK) -> list[slice]:
    is_live = isinstance(teacher, Logits)
    return student.chunks(extra=len(teacher.head_VD) if is_live else teacher.vocabulary)


class _LogProbs(NamedTuple):
    """Log-probs of a chunk. Without a top_k, the coarsened distributions are those over the shared
    tokens."""

    student_CV: Tensor  # student, over its whole vocabulary
    logp_CV: Tensor  # student, over the shared tokens
    logp_CS: Tensor  # student, coarsened
    logq_CS: Tensor  # teacher, coarsened
    derivative: Tensor | float  # derivative of the student's logits, from `Logits.chunk`


def _logprobs(student: Logits, teacher: Logits | TopK, c: slice, temperature: float) -> _LogProbs:
    logits_CV, derivative = student.chunk(c, temperature)
    student_CV = logits_CV.log_softmax(-1)
    if isinstance(teacher, TopK):
        logp_CV = _first(student_CV, teacher.vocabulary)
        logp_CS = coarsen(logp_CV, teacher.tokens_TK[c])
        return _LogProbs(student_CV, logp_CV, logp_CS, teacher.logprobs_TS[c], derivative)
    teacher_CV, _ = teacher.chunk(c, temperature)
    shared = min(student_CV.shape[1], teacher_CV.shape[1])
    logp_CV = _first(student_CV, shared)
    logq_CV = teacher_CV[:, :shared].log_softmax(-1)
    return _LogProbs(student_CV, logp_CV, logp_CV, logq_CV, derivative)


def _first(logp_CV: Tensor, count: int) -> Tensor:
    """Return the log-probs of the first `count` tokens, normalised over these tokens."""
    return logp_CV if count >= logp_CV.shape[1] else logp_CV[:, :count].log_softmax(-1)
