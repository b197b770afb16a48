"""Log-probs: of target tokens from hidden states, without the logits of a whole pack ever existing; of a rollout,
before it is learned from; of a whole data set by a reference, stored.

Shapes: T packed tokens, C tokens of one chunk, D hidden size, V vocabulary, N sequences.
"""

import torch
from torch import Tensor, nn

from common.data.packing import PackedBatch

LOGPROB_CHUNK = 256  # tokens whose logits exist at the same time: 256 * 151,936 * 4 bytes = 156 MB
CUDA_CHUNK, CUDA_BYTES = 1024, 2**30  # at least so many there, else as many as have so many bytes of logits


def chunk_size(vocabulary: int, on_cuda: bool) -> int:
    """Tokens whose logits exist at the same time."""
    return max(CUDA_CHUNK, CUDA_BYTES // (4 * vocabulary)) if on_cuda else LOGPROB_CHUNK


def chunks(hidden_TD: Tensor, vocabulary: int) -> list[slice]:
    size = chunk_size(vocabulary, hidden_TD.is_cuda)
    return [slice(start, start + size) for start in range(0, len(hidden_TD), size)]


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a b, of bfloat16 accumulated and returned in float32: the products of two bfloat16 are exact there."""
    if a.dtype != torch.bfloat16:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()  # no such kernel on a CPU


class _TokenLogprobs(torch.autograd.Function):
    """Chunk by chunk, forward and backward, so that the logits of one chunk are all that ever exists of [T, V]."""

    @staticmethod
    def forward(ctx, hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor, *numbers: float):
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        logprobs_T, entropy_T, collision_T, logsumexp_T = (
            hidden_TD.new_empty(len(hidden_TD), dtype=wide) for _ in range(4)
        )
        correct_T = torch.empty_like(targets_T, dtype=torch.bool)
        for c in chunks(hidden_TD, len(head_VD)):
            logits_CV, _ = chunk_logits(hidden_TD[c], head_VD, bias_V, *numbers)
            largest_C1 = logits_CV.amax(-1, keepdim=True)
            logits_CV.sub_(largest_C1)  # log-probs and entropy do not change, and nothing overflows or cancels
            exp_CV = logits_CV.exp()
            sum_C = exp_CV.sum(-1)
            target_C = logits_CV.gather(-1, targets_T[c, None])[:, 0]
            logprobs_T[c], correct_T[c] = target_C - sum_C.log(), target_C == 0
            entropy_T[c] = sum_C.log() - torch.linalg.vecdot(exp_CV, logits_CV) / sum_C
            collision_T[c] = 2 * (torch.linalg.vector_norm(exp_CV, dim=-1).log() - sum_C.log())
            logsumexp_T[c] = largest_C1[:, 0] + sum_C.log()
        ctx.save_for_backward(hidden_TD, head_VD, bias_V, targets_T, logsumexp_T, entropy_T)
        ctx.numbers = numbers
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(correct_T, collision_T)
        return logprobs_T, entropy_T, correct_T, collision_T

    @staticmethod
    def backward(ctx, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None, *_):
        hidden_TD, head_VD, bias_V, targets_T, logsumexp_T, entropy_T = ctx.saved_tensors
        grad_hidden_TD, grad_head_VD = torch.empty_like(hidden_TD), None
        if ctx.needs_input_grad[1]:  # beside adapters the head is frozen
            grad_head_VD = torch.zeros_like(head_VD, dtype=logsumexp_T.dtype)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        for c in chunks(hidden_TD, len(head_VD)):
            logits_CV, slope_CV = chunk_logits(hidden_TD[c], head_VD, bias_V, *ctx.numbers)
            logp_CV = logits_CV.sub_(logsumexp_T[c, None])
            probs_CV = logp_CV.exp()
            grad_CV = torch.zeros_like(probs_CV) if grad_logprobs_T is None else probs_CV * -grad_logprobs_T[c, None]
            if grad_entropy_T is not None:  # dH/dz_j = -p_j (log p_j + H)
                grad_CV -= grad_entropy_T[c, None] * probs_CV * (logp_CV + entropy_T[c, None])
            if grad_logprobs_T is not None:  # d log p_target / dz_j = [j is target] - p_j
                grad_CV.scatter_add_(1, targets_T[c, None], grad_logprobs_T[c, None])
            times_(grad_CV, slope_CV)
            grad_hidden_TD[c] = through_head(grad_CV, hidden_TD[c], head_VD, grad_head_VD, grad_bias_V)
        grad_head_VD = None if grad_head_VD is None else grad_head_VD.to(head_VD.dtype)
        return grad_hidden_TD, grad_head_VD, grad_bias_V, None, None, None, None


def times_(x_CV: Tensor, by: Tensor | float) -> Tensor:
    """In place. A GPU spends its time reading and writing [C, V]: not for a one."""
    return x_CV if not isinstance(by, Tensor) and by == 1 else x_CV.mul_(by)


def through_head(
    grad_CV: Tensor, hidden_CD: Tensor, head_VD: Tensor, grad_head_VD: Tensor | None, grad_bias_V: Tensor | None
) -> Tensor:
    """The gradient of a chunk's hidden states from that of hidden head^T + bias; adds the head's and the bias's."""
    if grad_bias_V is not None:
        grad_bias_V += grad_CV.sum(0)
    grad_CV = grad_CV.to(head_VD.dtype)
    if grad_head_VD is not None:
        if head_VD.dtype == torch.bfloat16:
            grad_head_VD += _mm(grad_CV.T, hidden_CD)
        else:
            grad_head_VD.addmm_(grad_CV.T, hidden_CD)  # without a second [V, D]
    return _mm(grad_CV, head_VD)


def chunk_logits(
    hidden_CD: Tensor, head_VD: Tensor, bias_V: Tensor | None, temperature: float, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | float]:
    """Logits of a chunk [C, V], and what they change by with hidden head^T: a number, or [C, V] under a soft cap."""
    logits_CV = _mm(hidden_CD, head_VD.T)
    if bias_V is not None:
        logits_CV += bias_V
    if softcap is None:
        return times_(logits_CV, scale / temperature), scale / temperature
    tanh_CV = logits_CV.mul_(scale / softcap).tanh_()
    return tanh_CV * (softcap / temperature), (1 - tanh_CV.square()) * (scale / temperature)


def token_logprobs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    temperature: float = 1.0,
    bias_V: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(logprobs_T, entropy_T, correct_T, collision_T)` of softmax(logits / temperature), never holding [T, V].

    The logits are (hidden head^T + bias) * scale, under `softcap` softcap * tanh of that / softcap.
    Log-prob of each target and entropy (nats) of each distribution, in float32 (or float64), gradients through both;
    whether the target is the most likely token; and log sum_v p_v^2, the log-prob that two draws agree.

    Of hidden states and a head in bfloat16 the logits are float32 all the same, as the engine's are: that is where
    sampling and scoring would part first. Their gradient is rounded to bfloat16 before it meets either of the two.
    """
    if hidden_TD.dtype == torch.bfloat16:
        bias_V = None if bias_V is None else bias_V.float()
    return _TokenLogprobs.apply(hidden_TD, head_VD, bias_V, targets_T, temperature, scale, softcap)


# ---- of a rollout ----


@torch.no_grad()
def with_logprobs(
    minibatches: list[list[PackedBatch]],
    temperature: float,
    *,
    old: nn.Module | None = None,
    ref: nn.Module | None = None,
) -> list[list[PackedBatch]]:
    """Return the micro-batches with log-probs that stay fixed while the policy learns from them: `old_logprobs_T` and
    `old_entropy_T` of the policy `old`, `ref_logprobs_T` of the frozen model `ref`; None adds nothing. Collective."""
    for model, names in ((old, ("old_logprobs_T", "old_entropy_T")), (ref, ("ref_logprobs_T",))):
        if model is not None:
            minibatches = [
                [mb.with_streams(**dict(zip(names, model(mb, temperature=temperature), strict=False))) for mb in mbs]
                for mbs in minibatches
            ]
            model.reshard()  # a forward without backward leaves the root whole
    return minibatches


@torch.no_grad()
def with_values(minibatches: list[list[PackedBatch]], value_model: nn.Module) -> list[list[PackedBatch]]:
    """Return the micro-batches with `values_T` of the value model before it learns from them. Collective."""
    minibatches = [[mb.with_streams(values_T=value_model(mb)) for mb in mbs] for mbs in minibatches]
    value_model.reshard()
    return minibatches


# ---- of a data set ----


def weighted_logps(mb: PackedBatch, logprobs_T: Tensor) -> Tensor:
    """Log-prob of each completion, in nats, [N] float64; tokens weighted by the stream `weights`, if there is one."""
    return mb.sequence_sums(logprobs_T if mb.weights_T is None else logprobs_T * mb.weights_T)
