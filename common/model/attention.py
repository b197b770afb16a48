"""Attention over packed sequences. Shapes: T packed tokens."""

import math
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from common.parallel.placement import Tokens, exchange

GQA = dict(enable_gqa=True) if torch.__version__ >= "2.13" else {}  # whether varlen_attn accepts fewer key heads


def packed_inputs(tokens: Tokens) -> dict:
    """Return the keyword arguments of a Hugging Face model whose attention is `packed_attention`."""
    return dict(
        input_ids=tokens.input_ids_T[None],
        position_ids=tokens.position_ids_T[None],
        use_cache=False,
        cu_seq_lens_q=tokens.cu_seqlens_N1,
        max_length_q=tokens.max_seqlen,
        pack=tokens,  # not its list of offsets: torch.compile would compile the block again for each list
    )


@exchange
def packed_attention(module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, **kwargs):
    """Compute causal attention within each sequence of the pack, without memory quadratic in T.

    `query` is [1, heads, T, head_dim], `key` and `value` may have fewer heads (grouped-query attention); the offsets
    come through the model's keyword arguments. CUDA has FlashAttention's varlen kernel, other devices one SDPA call
    for neighbours of one length. Neither has a `softcap` on the scores (Gemma 2), which `capped_attention` computes.
    Raises `NotImplementedError` for unsupported variants of attention, which loading reports in one line.
    """
    for variant in ("s_aux", "position_bias"):  # s_aux: attention sinks
        if kwargs.get(variant) is not None:
            raise NotImplementedError(f"{type(module).__name__} needs {variant} in attention")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} attends to later tokens")
    cu_seqlens_N1, max_seqlen = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]  # a KeyError is caught at load
    if query.is_cuda and query.dtype != torch.float32 and softcap is None:
        from torch.nn.attention.varlen import varlen_attn

        window = (-1 if sliding_window is None else sliding_window - 1, 0)  # (-1, 0) is plain causal
        if not GQA:
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        bounds = cu_seqlens_N1, cu_seqlens_N1, max_seqlen, max_seqlen  # of queries and of keys
        return varlen_attn(q, k, v, *bounds, scale=scaling, window_size=window, **GQA)[None], None
    return attention_by_length(query, key, value, kwargs["pack"], scaling, sliding_window, softcap), None


# torch.compile would compile it again for every list of offsets. Like torch.compiler.disable, but imports when called.
@torch._disable_dynamo
def attention_by_length(
    query: Tensor, key: Tensor, value: Tensor, pack: Tokens, scaling: float, sliding_window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Compute `packed_attention` with one call for all neighbours of one length: [1, T, heads, head_dim]."""
    lengths = [end - begin for begin, end in pairwise(pack.offsets)]
    # Packs are sorted: equal lengths are neighbours. One split: the gradient of a slice would be as large as the pack.
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    sides = (x.squeeze(0).split([length * count for length, count in runs], dim=1) for x in (query, key, value))
    outputs = []
    for (length, count), *parts in zip(runs, *sides, strict=True):
        # [heads, count * length, head_dim] -> [count, heads, length, head_dim]
        q, k, v = (x.unflatten(1, (count, length)).transpose(0, 1) for x in parts)
        mask = None
        if sliding_window is not None and length > sliding_window:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
        if softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
        else:
            out = capped_attention(q, k, v, mask, scaling, softcap)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [count * length, heads, head_dim]
    return torch.cat(outputs)[None]


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    """Compute causal attention with scores `softcap * tanh(scores / softcap)` for sequences of one length: query
    [count, heads, length, head_dim], mask [length, length] or None. All scores exist at a time, count * heads *
    length^2: long sequences need `--activation_checkpointing`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, -math.inf).softmax(-1, dtype=torch.float32).to(value.dtype) @ value
