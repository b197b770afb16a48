"""Log-probs: of target tokens from hidden states, without the logits of a whole pack ever existing; of a rollout,
before it is learned from; of a whole data set by a reference, stored.

Shapes: T packed tokens, C tokens of one chunk, D hidden size, V vocabulary, N sequences.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from common.data.packing import LazyGroups, PackedBatch, Sample, pack
from common.model.lora import LoRAArgs
from common.parallel import distributed

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
def add_logprobs(
    whose: Literal["old", "ref"], model: nn.Module, minibatches: list[list[PackedBatch]], temperature: float
) -> None:
    """Put `old_logprobs_T`, of the policy before it learns from the rollout, or `ref_logprobs_T`, of the reference,
    into every micro-batch; `old_entropy_T` with the former. Collective."""
    for mb in chain(*minibatches):
        logprobs_T, entropy_T, *_ = model(mb, temperature=temperature)
        if whose == "ref":
            mb.ref_logprobs_T = logprobs_T
        else:
            mb.old_logprobs_T, mb.old_entropy_T = logprobs_T, entropy_T
    model.reshard()  # a forward without backward leaves the root whole


@torch.no_grad()
def add_values(value_model: nn.Module, minibatches: list[list[PackedBatch]]) -> None:
    """Put `values_T`, of the value model before it learns from the rollout, into every micro-batch. Collective."""
    for mb in chain(*minibatches):
        mb.values_T = value_model(mb)
    value_model.reshard()


# ---- of a data set ----


def weighted_logps(mb: PackedBatch, logprobs_T: Tensor) -> Tensor:
    """Log-prob of each completion, in nats, [N] float64; tokens weighted by the stream `weights`, if there is one."""
    return mb.sequence_sums(logprobs_T if mb.weights_T is None else logprobs_T * mb.weights_T)


def digest_of(samples: Iterable[Sample], model_path: str, weights: list[str], *more: object) -> str:
    """Of what decides the log-probs of samples: the model, by its path and by name, size and time of the files in the
    folders of its `weights`; what `more` there is; the tokens."""
    files = [file for folder in weights for file in sorted(Path(folder).expanduser().glob("*.safetensors"))]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    hashed = hashlib.blake2b(repr((model_path, stats, *more)).encode())
    for sample in samples:
        hashed.update(repr((sample.ids, sample.loss_mask, sample.weights)).encode())
    return hashed.hexdigest()


@torch.no_grad()
def store_reference_logps(
    parts: Sequence[Sequence[list[Sample]]],
    reference_path: str,
    load_reference: Callable[[], nn.Module],
    folder: Path,
    args: LoRAArgs,
    device: torch.device,
) -> list[LazyGroups]:
    """Groups of samples, in each part all of one size, with their `ref_logp`: from `reference_logps.json` in the run's
    folder if it is of these very samples and this reference, else by one pass of the reference over them, divided among
    the ranks. Groups that are read from a disk are never all in memory. Collective.

    Raises `ValueError` for a file that is damaged.
    """
    path, weights = folder / "reference_logps.json", [part for part in (reference_path, args.adapter) if part]
    shapes = [(len(part), len(part[0]) if part else 0) for part in parts]
    ends = list(accumulate(groups * size for groups, size in shapes))
    digest, stored = "", {}
    if distributed.is_main():
        digest = digest_of(_samples(parts), reference_path, weights, args.dtype)
    if distributed.is_main() and path.is_file():
        try:
            stored = json.loads(path.read_text())
            if stored["digest"] == digest and len(stored["logps"]) != ends[-1]:
                raise ValueError("another number of samples")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged, delete it: {distributed.first_line(error)}") from error
    digest, stored = distributed.gather_objects((digest, stored))[0]  # nodes may hold copies: the first one decides
    if stored.get("digest") != digest:
        reference, rank, world_size = load_reference(), torch.distributed.get_rank(), distributed.world_size()
        mine, logps = islice(_samples(parts), rank, None, world_size), []
        for _ in range(0, ends[-1], 1024 * world_size):  # the same number of packs on every rank
            ours = list(islice(mine, 1024))
            for mb in pack(ours, args.pack_tokens, device):
                mb.to_samples(ref_logp=weighted_logps(mb, reference(mb)[0]))
            logps += [sample.ref_logp for sample in ours]
        reference.reshard()  # the root stays whole after a forward without backward
        ranks = distributed.gather_objects(logps)
        stored = dict(digest=digest, logps=[ranks[i % world_size][i // world_size] for i in range(ends[-1])])
        if distributed.is_main():
            work = path.with_suffix(".tmp")
            work.write_text(json.dumps(stored))
            work.rename(path)
    columns = np.split(np.array(stored["logps"]), ends[:-1])
    return [_scored(part, x.reshape(shape)) for part, x, shape in zip(parts, columns, shapes, strict=True)]


def _scored(groups: Sequence[list[Sample]], logps_NG: np.ndarray) -> LazyGroups:
    def make(i: int) -> list[Sample]:
        group = groups[i]
        for sample, logp in zip(group, logps_NG[i].tolist(), strict=True):
            sample.ref_logp = logp
        return group

    return LazyGroups(len(groups), make)


def _samples(parts: Sequence[Sequence[list[Sample]]]) -> Iterator[Sample]:
    return chain.from_iterable(chain.from_iterable(parts))
