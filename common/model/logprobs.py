"""Log-probs and entropies of tokens, and their gradients, for one chunk of tokens at a time: the
logits of all tokens, [T, V], often need more memory than the model.

Shapes: T packed tokens, C tokens of one chunk, D hidden size, V vocabulary."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

CPU_CHUNK = 256  # tokens of a chunk: 256 * 151,936 logits * 4 bytes = 156 MB
CUDA_CHUNK = 1024  # on CUDA, a chunk has at least these, and as many as fit in CUDA_BYTES
CUDA_BYTES = 2**30


def chunk_size(vocabulary: int, on_cuda: bool) -> int:
    return max(CUDA_CHUNK, CUDA_BYTES // (4 * vocabulary)) if on_cuda else CPU_CHUNK


class Logits(NamedTuple):
    """What the logits of T tokens are computed from: z = (hidden head^T + bias) * scale and, with a
    softcap, softcap * tanh(z / softcap)."""

    hidden_TD: Tensor
    head_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def chunks(self, extra: int = 0) -> list[slice]:
        """Divide the T tokens into chunks. `extra`: numbers that a token needs beside logits."""
        size = chunk_size(len(self.head_VD) + extra, self.hidden_TD.is_cuda)
        return [slice(start, start + size) for start in range(0, len(self.hidden_TD), size)]

    def chunk(self, c: slice, temperature: float) -> tuple[Tensor, Tensor | float]:
        """Return logits / temperature of a chunk, [C, V], and their derivative with respect to
        hidden head^T: a single number or, with a softcap, [C, V]."""
        logits_CV = product(self.hidden_TD[c], self.head_VD.T)
        if self.bias_V is not None:
            logits_CV += self.bias_V
        derivative = self.scale / temperature
        if self.softcap is None:
            return multiply_(logits_CV, derivative), derivative
        tanh_CV = logits_CV.mul_(self.scale / self.softcap).tanh_()
        return tanh_CV * (self.softcap / temperature), (1 - tanh_CV.square()) * derivative


class ChunkFunctions(NamedTuple):
    """What `by_chunk` computes from the logits of a chunk `c`. Both may overwrite the logits."""

    forward: Callable
    """(logits_CV, c, *tensors) -> statistics, [C] each. Only the first two have a gradient"""
    backward: Callable
    """(logits_CV, c, grads_T, tensors, out_T) -> d loss / d logits. `grads_T`: d loss / d statistic
    (None for an unused one); `out_T`: all statistics of the forward"""
    extra: int = 0
    """numbers that the functions need for each token beside its logits"""


def by_chunk(
    logits: Logits, temperature: float, functions: ChunkFunctions, *tensors: Tensor | None
) -> tuple[Tensor, ...]:
    """Return statistics of each token's distribution, [T] each, without ever holding all logits
    [T, V]: the backward pass computes each chunk again. `tensors` go to both `functions`; the
    backward pass frees them."""
    form = logits[3:]
    return _ByChunk.apply(*logits[:3], form, temperature, functions, *tensors)


class _ByChunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None, form: tuple,
        temperature: float, functions: ChunkFunctions, *tensors: Tensor | None,
    ):  # fmt: skip
        logits = Logits(hidden_TD, head_VD, bias_V, *form)
        parts = [
            functions.forward(logits.chunk(c, temperature)[0], c, *tensors)
            for c in logits.chunks(functions.extra)
        ]
        out_T = tuple(map(torch.cat, zip(*parts, strict=True)))
        ctx.save_for_backward(hidden_TD, head_VD, bias_V, *tensors, *out_T)
        ctx.form, ctx.temperature, ctx.functions = form, temperature, functions
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*out_T[2:])
        return out_T

    @staticmethod
    def backward(ctx, *grads_T: Tensor | None):
        """Sums the gradients of head and bias over the chunks in at least float32."""
        hidden_TD, head_VD, bias_V, *rest = ctx.saved_tensors
        logits = Logits(hidden_TD, head_VD, bias_V, *ctx.form)
        tensors, out_T = rest[: -len(grads_T)], rest[-len(grads_T) :]
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        grad_hidden_TD = torch.empty_like(hidden_TD)
        grad_head_VD = torch.zeros_like(head_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=wide)
        for c in logits.chunks(ctx.functions.extra):
            logits_CV, derivative = logits.chunk(c, ctx.temperature)
            grad_logits_CV = ctx.functions.backward(logits_CV, c, grads_T[:2], tensors, out_T)
            grad_logits_CV = multiply_(grad_logits_CV, derivative)
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_CV.sum(0)
            grad_logits_CV = grad_logits_CV.to(head_VD.dtype)
            if grad_head_VD is not None:
                add_product_(grad_head_VD, grad_logits_CV.T, hidden_TD[c])
            grad_hidden_TD[c] = product(grad_logits_CV, head_VD)
            del logits_CV, grad_logits_CV  # the next chunk takes their memory
        factors = (x if x is None else x.to(hidden_TD.dtype) for x in (grad_head_VD, grad_bias_V))
        return grad_hidden_TD, *factors, *[None] * (3 + len(tensors))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product a b. For matrices in 16 bits, sums and result are float32."""
    if a.dtype.itemsize != 2:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # a CPU has no such kernel


def add_product_(sum_VD: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `product` to a float32 sum, on CUDA without a second tensor of its size."""
    if a.dtype.itemsize != 2:
        sum_VD.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(sum_VD, a, b, out_dtype=torch.float32, out=sum_VD)
    else:
        sum_VD += product(a, b)


def multiply_(x_CV: Tensor, factor: Tensor | float) -> Tensor:
    """Multiply in place, but skip a factor of 1: reading and writing [C, V] is what takes time."""
    return x_CV if not isinstance(factor, Tensor) and factor == 1 else x_CV.mul_(factor)


class TokenStats(NamedTuple):
    """Statistics of the distribution of each token: nats, float32 (or float64), [T]."""

    logprobs_T: Tensor  # log-prob of the target, with gradient
    entropy_T: Tensor  # with gradient
    correct_T: Tensor  # whether the target is the most likely token, bool


def logprobs_or_scalars(output: TokenStats | Tensor) -> Tensor:
    """Return the log-probs in a policy's output, or the output of a scalar model, [T]."""
    return output if isinstance(output, Tensor) else output.logprobs_T


def token_logprobs(
    logits: Logits, targets_T: Tensor, temperature: float = 1.0, compiled: bool = False,
    support_TK: Tensor | None = None,
) -> TokenStats:  # fmt: skip
    """Return statistics of softmax(logits / temperature); with `support_TK`, of the distribution on
    these ids alone. `compiled`: let torch.compile fuse the work on a chunk.

    The logits are float32 even if hidden states and head are bfloat16. So are the engine's: here
    sampling and scoring would differ most in bfloat16. The gradient of the logits is rounded to
    bfloat16 before the matrix products."""
    of_chunk, its_gradient = statistics, gradient
    if compiled:
        of_chunk, its_gradient = fused(statistics_of_copy), fused(gradient)

    def forward(logits_CV: Tensor, c: slice, targets_T: Tensor, support_TK) -> tuple[Tensor, ...]:
        return of_chunk(on_support(logits_CV, support_TK, c), targets_T[c])

    def backward(logits_CV: Tensor, c: slice, grads_T, tensors, out_T) -> Tensor:
        entropy_T = TokenStats(*out_T[:3]).entropy_T
        largest_T, sum_T = out_T[3:]
        grad_logprob_T = torch.zeros_like(sum_T) if grads_T[0] is None else grads_T[0]
        numbers_T = tensors[0], largest_T, sum_T, entropy_T, grad_logprob_T, grads_T[1]
        logits_CV = on_support(logits_CV, tensors[1], c)
        return its_gradient(logits_CV, *(None if x_T is None else x_T[c] for x_T in numbers_T))

    of_tokens = ChunkFunctions(forward, backward)
    return TokenStats(*by_chunk(logits, temperature, of_tokens, targets_T, support_TK)[:3])


def on_support(logits_CV: Tensor, support_TK: Tensor | None, c: slice) -> Tensor:
    """Set the probability of all ids that are not in a chunk's support to 0, in place."""
    if support_TK is None:
        return logits_CV
    ids_CK = support_TK[c].long()
    kept_CK = logits_CV.gather(1, ids_CK)
    return logits_CV.fill_(-1e30).scatter_(1, ids_CK, kept_CK)


def statistics(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, ...]:
    """Return the statistics of a chunk in the order of `TokenStats`, then the largest logit and the
    sum of exp(logit - largest). (Not their logsumexp, which would be rounded to the precision of
    the largest logit.) Overwrites the logits."""
    largest_C = logits_CV.amax(-1)
    # This changes neither log-probs nor entropy. Now exp cannot overflow, and nothing cancels.
    logits_CV.sub_(largest_C[:, None])
    target_C = logits_CV.gather(-1, targets_C[:, None])[:, 0]
    exp_CV = logits_CV.exp()
    sum_C = exp_CV.sum(-1)
    entropy_C = sum_C.log() - logits_CV.mul_(exp_CV).sum(-1) / sum_C
    return target_C - sum_C.log(), entropy_C, target_C == 0, largest_C, sum_C


def gradient(
    logits_CV: Tensor, targets_C: Tensor, largest_C: Tensor, sum_C: Tensor, entropy_C: Tensor,
    grad_logprob_C: Tensor, grad_entropy_C: Tensor | None,
) -> Tensor:  # fmt: skip
    """Turn the gradients of a chunk's log-probs and entropies into the gradient of its logits.
    Overwrites the logits:

    d log pi_target / d logit_j = [j is target] - pi_j,    dH / d logit_j = -pi_j (log pi_j + H)"""
    logits_CV.sub_(largest_C[:, None])
    grad_exp_C = -grad_logprob_C / sum_C
    if grad_entropy_C is None:
        grad_CV = logits_CV.exp_().mul_(grad_exp_C[:, None])
    else:
        exp_CV = logits_CV.exp()
        offset_C = entropy_C - sum_C.log()  # log pi_j + H = logit_j - largest + offset
        slope_C = -grad_entropy_C / sum_C
        grad_CV = logits_CV.add_(offset_C[:, None]).mul_(slope_C[:, None]).add_(grad_exp_C[:, None])
        grad_CV.mul_(exp_CV)
    return grad_CV.scatter_add_(1, targets_C[:, None], grad_logprob_C[:, None])


def statistics_of_copy(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, ...]:
    """Return `statistics`. Compiled, this neither makes the copy nor writes the logits back."""
    return statistics(logits_CV.clone(), targets_C)


fused = functools.cache(torch.compile)
