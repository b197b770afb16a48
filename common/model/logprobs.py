"""Log-probs and entropies of tokens, computed chunk by chunk (head.py).

Shapes: T packed tokens, C tokens of one chunk, D hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from common.model.head import Logits, LogitsGradient


class TokenStats(NamedTuple):
    """Statistics of the distribution of each token: nats, float32 (or float64), [T]."""

    logprobs_T: Tensor  # log-prob of the target, with gradient
    entropy_T: Tensor  # with gradient
    correct_T: Tensor  # whether the target is the most likely token, bool
    collision_T: Tensor  # log sum_v p_v^2: log-prob that two draws agree


def token_logprobs(logits: Logits, targets_T: Tensor, temperature: float = 1.0) -> TokenStats:
    """Return statistics of softmax(logits / temperature) without holding [T, V].

    The logits are float32 also for hidden states and a head in bfloat16, like those of the engine: in bfloat16,
    sampling and scoring would differ most here. Their gradient is rounded to bfloat16 before the matrix products.
    """
    return TokenStats(*_TokenLogprobs.apply(*logits, targets_T, temperature))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None, scale: float, softcap: float | None,
        targets_T: Tensor, temperature: float,
    ):  # fmt: skip
        logits = Logits(hidden_TD, head_VD, bias_V, scale, softcap)
        logprobs_T, entropy_T, collision_T, logsumexp_T = (
            hidden_TD.new_empty(len(hidden_TD), dtype=logits.dtype) for _ in range(4)
        )
        correct_T = torch.empty_like(targets_T, dtype=torch.bool)
        for c in logits.chunks():
            logits_CV, _ = logits.chunk(c, temperature)
            largest_C1 = logits_CV.amax(-1, keepdim=True)
            logits_CV.sub_(largest_C1)  # log-probs and entropy stay the same, and nothing overflows or cancels
            exp_CV = logits_CV.exp()
            sum_C = exp_CV.sum(-1)
            target_C = logits_CV.gather(-1, targets_T[c, None])[:, 0]
            logprobs_T[c], correct_T[c] = target_C - sum_C.log(), target_C == 0
            entropy_T[c] = sum_C.log() - torch.linalg.vecdot(exp_CV, logits_CV) / sum_C
            collision_T[c] = 2 * (torch.linalg.vector_norm(exp_CV, dim=-1).log() - sum_C.log())
            logsumexp_T[c] = largest_C1[:, 0] + sum_C.log()
        ctx.save_for_backward(hidden_TD, head_VD, bias_V, targets_T, logsumexp_T, entropy_T)
        ctx.numbers = scale, softcap, temperature
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(correct_T, collision_T)
        return logprobs_T, entropy_T, correct_T, collision_T

    @staticmethod
    def backward(ctx, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None, *_):
        hidden_TD, head_VD, bias_V, targets_T, logsumexp_T, entropy_T = ctx.saved_tensors
        scale, softcap, temperature = ctx.numbers
        logits = Logits(hidden_TD, head_VD, bias_V, scale, softcap)
        gradient = LogitsGradient(logits, head_is_trained=ctx.needs_input_grad[1])
        for c in logits.chunks():
            logits_CV, derivative = logits.chunk(c, temperature)
            logp_CV = logits_CV.sub_(logsumexp_T[c, None])
            probs_CV = logp_CV.exp()
            grad_CV = torch.zeros_like(probs_CV) if grad_logprobs_T is None else probs_CV * -grad_logprobs_T[c, None]
            if grad_entropy_T is not None:  # dH/dz_j = -p_j (log p_j + H)
                grad_CV -= grad_entropy_T[c, None] * probs_CV * (logp_CV + entropy_T[c, None])
            if grad_logprobs_T is not None:  # d log p_target / dz_j = [j is target] - p_j
                grad_CV.scatter_add_(1, targets_T[c, None], grad_logprobs_T[c, None])
            gradient.add(c, grad_CV, derivative)
        return *gradient.result(), None, None, None, None
