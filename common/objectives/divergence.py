"""How far a student is from its teacher, over the whole vocabulary, without the logits of a whole pack ever existing.
Or over the teacher's K most likely tokens and the rest as one more: of such coarsened distributions each divergence is
a lower bound of the whole one (data processing inequality), and nothing is said about how the rest is divided.

p is the student's distribution of a token, q the teacher's, both at one temperature; gradients go through p alone. A
divergence is `f(logp, logq)` and gives its value and the gradient of that with respect to the student's logits:
p_j (g_j - sum_i p_i g_i), where g = d value / d p. Keyword-only parameters have the names of the flags that set them.

The two may have heads of other sizes, rows beyond their tokenizer's tokens: p and q are then of the tokens that both
have, each divided by its sum over them.

Shapes: T packed tokens, C tokens of one chunk, D hidden size of either model, V vocabulary, K most likely tokens, S = K
and the rest, or V if nothing is coarsened.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.model.logprobs import chunk_logits, chunks, through_head, times_

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None

# ---- of distributions ----


def reverse_kl(logp_CV: Tensor, logq_CV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p log(p / q), nats [C]; p (log(p / q) - KL), [C, V]."""
    p_CV, log_ratio_CV = logp_CV.exp(), logp_CV - logq_CV
    value_C = torch.linalg.vecdot(p_CV, log_ratio_CV)
    return value_C, p_CV * (log_ratio_CV - value_C[:, None])


def forward_kl(logp_CV: Tensor, logq_CV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p) = sum q log(q / p), nats [C]; p - q, [C, V]."""
    q_CV = logq_CV.exp()
    return torch.linalg.vecdot(q_CV, logq_CV - logp_CV), logp_CV.exp() - q_CV


def jsd(logp_CV: Tensor, logq_CV: Tensor, *, jsd_beta: float) -> tuple[Tensor, Tensor]:
    """b KL(q || m) + (1 - b) KL(p || m) with m = b q + (1 - b) p (arXiv:2306.13649 Eq. 1), nats [C];
    (1 - b) p (log(p / m) - KL(p || m)), [C, V]. 0 < b < 1: towards 0 it is b times forward_kl, towards 1 it is (1 - b)
    times reverse_kl."""
    b = torch.tensor(jsd_beta, dtype=torch.float64)
    logm_CV = torch.logaddexp(logq_CV + b.log().item(), logp_CV + torch.log1p(-b).item())
    of_q_C = torch.linalg.vecdot(logq_CV.exp(), logq_CV - logm_CV)
    of_p_C, slope_CV = reverse_kl(logp_CV, logm_CV)
    return jsd_beta * of_q_C + (1 - jsd_beta) * of_p_C, (1 - jsd_beta) * slope_CV


DIVERGENCES = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": jsd}


def coarsened(logp_CV: Tensor, tokens_CK: Tensor) -> Tensor:
    """Log-probs of some tokens and, behind them, of all others together, [C, S]. Of all tokens: nothing is behind."""
    some_CK = logp_CV.gather(1, tokens_CK)
    if tokens_CK.shape[1] == logp_CV.shape[1]:
        return some_CK
    rest_C1 = logp_CV.scatter(1, tokens_CK, -math.inf).logsumexp(1, keepdim=True)  # 1 - sum p would cancel
    return torch.cat([some_CK, rest_C1], 1)


def spread(gradient_CS: Tensor, logp_CV: Tensor, logp_CS: Tensor, tokens_CK: Tensor) -> Tensor:
    """The gradient with respect to logits [C, V] of one with respect to those of the distributions `coarsened`: the
    rest's is divided in proportion to p."""
    share_CV = (logp_CV - logp_CS[:, -1:]).exp()
    return (share_CV * gradient_CS[:, -1:]).scatter(1, tokens_CK, gradient_CS[:, : tokens_CK.shape[1]])


# ---- of models ----


class Logits(NamedTuple):
    """What the logits of tokens are made of: (hidden head^T + bias) * scale, under `softcap` softcap * tanh of that /
    softcap."""

    hidden_TD: Tensor
    head_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def chunk(self, c: slice, temperature: float) -> tuple[Tensor, Tensor | float]:
        """Logits / temperature of some tokens, [C, V], and what they change by with hidden head^T."""
        bias_V = self.bias_V
        if bias_V is not None and self.hidden_TD.dtype == torch.bfloat16:
            bias_V = bias_V.float()
        return chunk_logits(self.hidden_TD[c], self.head_VD, bias_V, temperature, self.scale, self.softcap)

    def kept(self) -> "Logits":
        """With a head that stays when FSDP frees its own."""
        bias_V = None if self.bias_V is None else self.bias_V.clone()
        return self._replace(head_VD=self.head_VD.clone(), bias_V=bias_V)


def logits_of(hf: nn.Module, hidden_TD: Tensor) -> Logits:
    """As a Hugging Face model makes them of its last hidden states."""
    head, config = hf.get_output_embeddings(), hf.config.get_text_config()
    # What some models do to their logits: Cohere, Granite, Gemma 2. `check_packing` refuses what is missing here.
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Logits(hidden_TD, head.weight, head.bias, scale, softcap)


@dataclass
class TopK:
    """What is kept of a teacher's distributions: of the tokens that it shares with its student, at one temperature."""

    logprobs_TS: Tensor
    """of its K most likely tokens, then of all others together"""
    tokens_TK: Tensor
    """these tokens, the most likely one first"""
    targets_T: Tensor
    """log-prob of the target"""
    entropy_T: Tensor
    """of the whole distribution"""
    vocabulary: int
    """how many tokens the two models share"""


del TopK.__dataclass_fields__  # FSDP would round what is in it to the compute dtype
Teacher = Logits | TopK | None


@torch.no_grad()
def most_likely(teacher: Logits, targets_T: Tensor, temperature: float, vocabulary: int, top_k: int) -> TopK:
    """Among the first `vocabulary` tokens."""
    parts = []
    for c in chunks(teacher.hidden_TD, len(teacher.head_VD)):
        logq_CV = teacher.chunk(c, temperature)[0][:, :vocabulary].log_softmax(-1)
        tokens_CK = logq_CV.topk(top_k).indices
        target_C, entropy_C = logq_CV.gather(-1, targets_T[c, None])[:, 0], -torch.linalg.vecdot(logq_CV.exp(), logq_CV)
        parts.append((coarsened(logq_CV, tokens_CK), tokens_CK, target_C, entropy_C))
    return TopK(*map(torch.cat, zip(*parts, strict=True)), vocabulary)


class Comparison(NamedTuple):
    """Of a student beside its teacher, per token; nats, float32 (or float64)."""

    logprobs_T: Tensor
    """of the target, by the student; with gradient"""
    divergence_T: Tensor
    """the one that is asked for; with gradient. 0 if none is"""
    entropy_T: Tensor
    """of the student"""
    reverse_kl_T: Tensor
    """whichever is asked for; coarsened as that is"""
    teacher_logprobs_T: Tensor
    """of the target, among the tokens that both have"""
    teacher_entropy_T: Tensor
    teacher_mass_T: Tensor
    """how much of the teacher's probability is on the tokens that are not the rest; 1 without a rest"""
    agree_T: Tensor
    """bool: whether the two have the same most likely token"""


def compare(
    student: Logits, teacher: Logits | TopK, targets_T: Tensor, temperature: float = 1.0,
    divergence: Divergence = None, top_k: int = 0,
) -> Comparison:  # fmt: skip
    """The two beside each other, chunk by chunk, forward and backward; with `top_k` coarsened to so many of the
    teacher's tokens. Targets are tokens that both have."""
    if top_k and isinstance(teacher, Logits):
        vocabulary = min(len(student.head_VD), len(teacher.head_VD))
        teacher = most_likely(teacher, targets_T, temperature, vocabulary, top_k)
    parts = _Compare.apply(*student, teacher, targets_T, temperature, divergence)
    return Comparison(*parts)


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None, scale: float, softcap: float | None,
        teacher: Logits | TopK, targets_T: Tensor, temperature: float, divergence: Divergence,
    ):  # fmt: skip
        student = Logits(hidden_TD, head_VD, bias_V, scale, softcap)
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        out = Comparison(*(hidden_TD.new_zeros(len(hidden_TD), dtype=wide) for _ in range(7)), targets_T.bool())
        for c in _chunks(student, teacher):
            whole_CV, logp_CV, logp_CS, logq_CS, _ = _log_probs(student, teacher, c, temperature)
            out.logprobs_T[c] = whole_CV.gather(-1, targets_T[c, None])[:, 0]
            out.entropy_T[c] = -torch.linalg.vecdot(whole_CV.exp(), whole_CV)
            if divergence is not None:
                out.divergence_T[c], _ = divergence(logp_CS, logq_CS)
            out.reverse_kl_T[c], _ = reverse_kl(logp_CS, logq_CS)
            if isinstance(teacher, Logits):
                out.teacher_logprobs_T[c] = logq_CS.gather(-1, targets_T[c, None])[:, 0]
                out.teacher_entropy_T[c], out.teacher_mass_T[c] = -torch.linalg.vecdot(logq_CS.exp(), logq_CS), 1.0
                theirs_C = logq_CS.argmax(-1)
            else:
                out.teacher_logprobs_T[c], out.teacher_entropy_T[c] = teacher.targets_T[c], teacher.entropy_T[c]
                out.teacher_mass_T[c] = logq_CS[:, : teacher.tokens_TK.shape[1]].exp().sum(-1)
                theirs_C = teacher.tokens_TK[c, 0]
            out.agree_T[c] = logp_CV.argmax(-1) == theirs_C
        tensors, others = (teacher[:3], teacher[3:]) if isinstance(teacher, Logits) else ((), teacher)
        ctx.save_for_backward(hidden_TD, head_VD, bias_V, targets_T, *tensors)
        ctx.numbers = (scale, softcap), others, temperature, divergence
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*out[2:])
        return tuple(out)

    @staticmethod
    def backward(ctx, grad_logprobs_T: Tensor | None, grad_divergence_T: Tensor | None, *_):
        hidden_TD, head_VD, bias_V, targets_T, *of_teacher = ctx.saved_tensors
        rest, teacher, temperature, divergence = ctx.numbers
        student, teacher = (
            Logits(hidden_TD, head_VD, bias_V, *rest),
            Logits(*of_teacher, *teacher) if of_teacher else teacher,
        )
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        grad_hidden_TD, grad_head_VD = torch.empty_like(hidden_TD), None
        if ctx.needs_input_grad[1]:  # beside adapters the head is frozen
            grad_head_VD = torch.zeros_like(head_VD, dtype=wide)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide)
        for c in _chunks(student, teacher):
            whole_CV, logp_CV, logp_CS, logq_CS, slope_CV = _log_probs(student, teacher, c, temperature)
            grad_CV = torch.zeros_like(whole_CV)
            if grad_divergence_T is not None and divergence is not None:
                _, of_logits_CV = divergence(logp_CS, logq_CS)
                if isinstance(teacher, TopK):
                    of_logits_CV = spread(of_logits_CV, logp_CV, logp_CS, teacher.tokens_TK[c])
                grad_CV[:, : logp_CV.shape[1]] = grad_divergence_T[c, None] * of_logits_CV
            if grad_logprobs_T is not None:  # d log p_target / dz_j = [j is target] - p_j
                grad_CV -= grad_logprobs_T[c, None] * whole_CV.exp()
                grad_CV.scatter_add_(1, targets_T[c, None], grad_logprobs_T[c, None])
            times_(grad_CV, slope_CV)
            grad_hidden_TD[c] = through_head(grad_CV, hidden_TD[c], head_VD, grad_head_VD, grad_bias_V)
        grad_head_VD = None if grad_head_VD is None else grad_head_VD.to(head_VD.dtype)
        grad_bias_V = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_TD, grad_head_VD, grad_bias_V, *[None] * 6


def _chunks(student: Logits, teacher: Logits | TopK) -> list[slice]:
    beside = len(teacher.head_VD) if isinstance(teacher, Logits) else teacher.vocabulary
    return chunks(student.hidden_TD, len(student.head_VD) + beside)


def _log_probs(
    student: Logits, teacher: Logits | TopK, c: slice, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | float]:
    """Of a chunk: the student's log-probs of all its tokens, and of those that both have; its and the teacher's of what
    is compared; what the student's logits change by."""
    logits_CV, slope_CV = student.chunk(c, temperature)
    theirs_CV = teacher.chunk(c, temperature)[0] if isinstance(teacher, Logits) else None
    both = min(logits_CV.shape[1], teacher.vocabulary if theirs_CV is None else theirs_CV.shape[1])
    whole_CV = logits_CV.log_softmax(-1)
    logp_CV = whole_CV if both == whole_CV.shape[1] else whole_CV[:, :both].log_softmax(-1)
    if theirs_CV is None:
        return whole_CV, logp_CV, coarsened(logp_CV, teacher.tokens_TK[c]), teacher.logprobs_TS[c], slope_CV
    return whole_CV, logp_CV, logp_CV, theirs_CV[:, :both].log_softmax(-1), slope_CV
