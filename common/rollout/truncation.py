"""`--top_p`, `--top_k`, `--min_p` for the transformers engine: the distribution that vLLM samples
from with the same flags (vllm/v1/sample/sampler.py)."""

import torch
from torch import Tensor


def truncated(logits_NV: Tensor, *, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Return the logits at the sampling temperature, [N, V], with -inf for the tokens that are not
    sampled. In the order of vLLM: min_p, top_k, then top_p of what is left. Tokens as likely as the
    `top_k`-th stay, and so does the most likely token."""
    if min_p > 0:
        probs_NV = logits_NV.softmax(dim=-1)
        least_N1 = min_p * probs_NV.amax(dim=-1, keepdim=True)
        logits_NV = logits_NV.masked_fill(probs_NV < least_N1, -torch.inf)
    if 0 < top_k < logits_NV.shape[-1]:
        least_N1 = logits_NV.topk(top_k).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < least_N1, -torch.inf)
    if top_p < 1:
        ascending_NV, tokens_NV = logits_NV.sort(dim=-1)
        is_left_out_NV = ascending_NV.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        is_left_out_NV[:, -1] = False
        ascending_NV = ascending_NV.masked_fill(is_left_out_NV, -torch.inf)
        logits_NV = torch.empty_like(logits_NV).scatter_(-1, tokens_NV, ascending_NV)
    return logits_NV
