"""Log-probs and entropies of tokens, computed chunk by chunk (head.py).

Shapes: T packed tokens, C tokens of one chunk, D hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.model.head import Logits, LogitsGradient


class TokenStats(NamedTuple):
    """Statistics of the distribution of each token: nats, float32 (or float64), [T]."""

    logprobs_T: Tensor  # log-prob of the target, with gradient
    entropy_T: Tensor  # with gradient
    correct_T: Tensor  # whether the target is the most likely token, bool


def token_logprobs(
    logits: Logits, targets_T: Tensor, temperature: float = 1.0, compiled: bool = False
) -> TokenStats:
    """Return statistics of softmax(logits / temperature) without holding [T, V]. `compiled`: with
    fused kernels, which read the logits of a chunk once or twice.

    The logits are float32 also for hidden states and a head in bfloat16, like those of the engine:
    in bfloat16, sampling and scoring would differ most here. Their gradient is rounded to bfloat16
    before the matrix products."""
    return TokenStats(*_TokenLogprobs.apply(*logits, targets_T, temperature, compiled))


def statistics(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, ...]:
    """Return the statistics of a chunk, in the order of `TokenStats`, then the largest logit and
    the sum of exp(logit - largest). These two stay apart: their logsumexp would be rounded to the
    precision of the largest logit. Overwrites the logits."""
    largest_C = logits_CV.amax(-1)
    # Log-probs and entropy stay the same, and nothing overflows or cancels.
    logits_CV.sub_(largest_C[:, None])
    target_C = logits_CV.gather(-1, targets_C[:, None])[:, 0]
    exp_CV = logits_CV.exp()
    sum_C = exp_CV.sum(-1)
    entropy_C = sum_C.log() - logits_CV.mul_(exp_CV).sum(-1) / sum_C
    return target_C - sum_C.log(), entropy_C, target_C == 0, largest_C, sum_C


def gradient(
    logits_CV: Tensor,
    targets_C: Tensor,
    largest_C: Tensor,
    sum_C: Tensor,
    entropy_C: Tensor,
    by_logprob_C: Tensor,
    by_entropy_C: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits of a chunk, in their place, from those of log-probs and
    entropies:

    d log pi_target / d logit_j = [j is target] - pi_j,    dH / d logit_j = -pi_j (log pi_j + H)

    The factor 1 / sum of pi_j is in the numbers per token, which saves a pass over the chunk.
    """
    logits_CV.sub_(largest_C[:, None])
    by_exp_C = -by_logprob_C / sum_C
    if by_entropy_C is None:
        grad_CV = logits_CV.exp_().mul_(by_exp_C[:, None])
    else:
        exp_CV = logits_CV.exp()
        offset_C = entropy_C - sum_C.log()  # log pi_j + H = logit_j - largest + offset
        slope_C = -by_entropy_C / sum_C
        grad_CV = logits_CV.add_(offset_C[:, None]).mul_(slope_C[:, None]).add_(by_exp_C[:, None])
        grad_CV.mul_(exp_CV)
    return grad_CV.scatter_add_(1, targets_C[:, None], by_logprob_C[:, None])


def statistics_of_copy(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, ...]:
    """Return `statistics`. Compiled, it makes no copy, and does not write the logits back."""
    return statistics(logits_CV.clone(), targets_C)


@functools.cache
def fused(function: Callable) -> Callable:
    return torch.compile(function)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None, scale: float,
        softcap: float | None, targets_T: Tensor, temperature: float, compiled: bool,
    ):  # fmt: skip
        logits = Logits(hidden_TD, head_VD, bias_V, scale, softcap)
        chunk_statistics = fused(statistics_of_copy) if compiled else statistics
        chunks = []
        for c in logits.chunks():
            chunks.append(chunk_statistics(logits.chunk(c, temperature)[0], targets_T[c]))
        *stats, largest_T, sum_T = map(torch.cat, zip(*chunks, strict=True))
        entropy_T = stats[1]
        ctx.save_for_backward(hidden_TD, head_VD, bias_V, targets_T, largest_T, sum_T, entropy_T)
        ctx.settings = scale, softcap, temperature, compiled
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*stats[2:])
        return tuple(stats)

    @staticmethod
    def backward(ctx, by_logprob_T: Tensor | None, by_entropy_T: Tensor | None, *_):
        hidden_TD, head_VD, bias_V, targets_T, largest_T, sum_T, entropy_T = ctx.saved_tensors
        scale, softcap, temperature, compiled = ctx.settings
        logits = Logits(hidden_TD, head_VD, bias_V, scale, softcap)
        chunk_gradient = fused(gradient) if compiled else gradient
        total = LogitsGradient(logits, head_is_trained=ctx.needs_input_grad[1])
        if by_logprob_T is None:
            by_logprob_T = torch.zeros_like(entropy_T)
        for c in logits.chunks():
            logits_CV, derivative = logits.chunk(c, temperature)
            grad_CV = chunk_gradient(
                logits_CV,
                targets_T[c],
                largest_T[c],
                sum_T[c],
                entropy_T[c],
                by_logprob_T[c],
                None if by_entropy_T is None else by_entropy_T[c],
            )
            total.add(c, grad_CV, derivative)
        return *total.result(), *[None] * 5
