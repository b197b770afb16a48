"""Logits and their gradients, for one chunk of tokens at a time: the logits of a whole pack, [T,
V], are never stored.

Shapes: T packed tokens, C tokens of one chunk, D hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

CPU_CHUNK = 256  # tokens of a chunk: 256 * 151,936 logits * 4 bytes = 156 MB
CUDA_CHUNK = 1024  # at least as many on CUDA, and as many as fit in CUDA_BYTES
CUDA_BYTES = 2**30


def chunk_size(vocabulary: int, on_cuda: bool) -> int:
    """Return the number of tokens in a chunk."""
    return max(CUDA_CHUNK, CUDA_BYTES // (4 * vocabulary)) if on_cuda else CPU_CHUNK


class Logits(NamedTuple):
    """Factors of the logits of T tokens: z = (hidden head^T + bias) * scale, or softcap * tanh(z /
    softcap)."""

    hidden_TD: Tensor
    head_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the logits: at least float32."""
        return torch.promote_types(self.hidden_TD.dtype, torch.float32)

    def chunks(self, extra: int = 0) -> list[slice]:
        """Return the chunks of the T tokens. `extra`: numbers per token that are stored beside the
        logits."""
        size = chunk_size(len(self.head_VD) + extra, self.hidden_TD.is_cuda)
        return [slice(start, start + size) for start in range(0, len(self.hidden_TD), size)]

    def chunk(self, c: slice, temperature: float) -> tuple[Tensor, Tensor | float]:
        """Return the logits / temperature of a chunk, [C, V], and their derivative with respect to
        hidden head^T: a number, or [C, V] with a softcap."""
        logits_CV = product(self.hidden_TD[c], self.head_VD.T)
        if self.bias_V is not None:
            logits_CV += self.bias_V
        derivative = self.scale / temperature
        if self.softcap is None:
            return multiply_(logits_CV, derivative), derivative
        tanh_CV = logits_CV.mul_(self.scale / self.softcap).tanh_()
        return tanh_CV * (self.softcap / temperature), (1 - tanh_CV.square()) * derivative


def logits_of(hf: nn.Module, hidden_TD: Tensor) -> Logits:
    """Return the logits that a Hugging Face model computes from its last hidden states."""
    head = hf.get_output_embeddings()
    config = hf.config.get_text_config()
    # Names of Cohere, Granite and Gemma 2. `check_packing` refuses models with other operations on
    # logits.
    multiplier = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    softcap = getattr(config, "final_logit_softcapping", None)
    return Logits(hidden_TD, head.weight, head.bias, multiplier / divisor, softcap)


class LogitsGradient:
    """Gradients with respect to hidden states, head and bias, summed over chunks from the gradients
    of the logits."""

    def __init__(self, logits: Logits, head_is_trained: bool):
        self.logits = logits
        self.hidden_TD = torch.empty_like(logits.hidden_TD)
        self.head_VD = None
        self.bias_V = None
        if head_is_trained:
            self.head_VD = torch.zeros_like(logits.head_VD, dtype=logits.dtype)
        if logits.bias_V is not None:
            self.bias_V = torch.zeros_like(logits.bias_V, dtype=logits.dtype)

    def add(self, c: slice, gradient_CV: Tensor, derivative: Tensor | float) -> None:
        """Add the gradient of a chunk's logits, which is overwritten. `derivative`: second result
        of `Logits.chunk`."""
        multiply_(gradient_CV, derivative)
        if self.bias_V is not None:
            self.bias_V += gradient_CV.sum(0)
        head_VD = self.logits.head_VD
        gradient_CV = gradient_CV.to(head_VD.dtype)
        if self.head_VD is not None:
            add_product_(self.head_VD, gradient_CV.T, self.logits.hidden_TD[c])
        self.hidden_TD[c] = product(gradient_CV, head_VD)

    def result(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, head and bias, in their dtypes."""
        head_VD = None if self.head_VD is None else self.head_VD.to(self.logits.head_VD.dtype)
        bias_V = None if self.bias_V is None else self.bias_V.to(self.logits.bias_V.dtype)
        return self.hidden_TD, head_VD, bias_V


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product a b. For bfloat16 matrices, sum and result are float32, in which
    the product of two bfloat16 numbers is exact."""
    if a.dtype != torch.bfloat16:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # a CPU has no such kernel


def add_product_(sum_VD: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `product` to a float32 sum, without a second tensor of its size where there is a
    kernel."""
    if a.dtype != torch.bfloat16:
        sum_VD.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(sum_VD, a, b, out_dtype=torch.float32, out=sum_VD)
    else:
        sum_VD += product(a, b)


def multiply_(x_CV: Tensor, factor: Tensor | float) -> Tensor:
    """Multiply in place, but skip a factor of 1, because a GPU spends its time on reading and
    writing [C, V]."""
    return x_CV if not isinstance(factor, Tensor) and factor == 1 else x_CV.mul_(factor)
