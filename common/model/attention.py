"""Attention over a packed stream of sequences.

Shapes: T packed tokens.
"""

import math
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from common.parallel.placement import Stream, exchange

GQA = dict(enable_gqa=True) if torch.__version__ >= "2.13" else {}  # whether varlen_attn takes fewer heads of keys


def packed_inputs(stream: Stream) -> dict:
    """Keyword arguments of a Hugging Face model whose attention is `packed_attention`."""
    return dict(
        input_ids=stream.input_ids_T[None],
        position_ids=stream.position_ids_T[None],
        use_cache=False,
        cu_seq_lens_q=stream.cu_seqlens_N1,
        max_length_q=stream.max_seqlen,
        pack=stream,  # not its list of offsets: a compiled block would be compiled anew for each
    )


@exchange
def packed_attention(module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, **kwargs):
    """Causal attention within each sequence of the pack; nothing crosses a boundary and nothing is quadratic in T.

    `query` is [1, heads, T, head_dim], `key` and `value` may have fewer heads (grouped-query attention); the offsets
    come through the model's keyword arguments. FlashAttention's varlen kernel on CUDA, one SDPA call per sequence
    elsewhere. Neither has a `softcap` on the scores (Gemma 2): these sequences go through `capped_attention`, on CUDA
    too. Raises `NotImplementedError` for variants of attention it does not compute; loading says it in one line.
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
        out = varlen_attn(
            q, k, v, cu_seqlens_N1, cu_seqlens_N1, max_seqlen, max_seqlen, scale=scaling, window_size=window, **GQA
        )
        return out[None], None
    return attention_by_length(query, key, value, kwargs["pack"], scaling, sliding_window, softcap), None


@torch.compiler.disable  # it would be compiled anew for every list of offsets
def attention_by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Stream,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """`packed_attention` by one call for all neighbours of one length: [1, T, heads, head_dim]."""
    lengths = [end - begin for begin, end in pairwise(pack.offsets)]
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]  # packs are sorted: one call for equals
    # One split, not slices: the gradient of each slice would be as large as the whole pack.
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
    """Causal attention with scores `softcap * tanh(scores / softcap)`, of sequences of one length: query [count, heads,
    length, head_dim], mask [length, length] or None. Scores exist whole, count * heads * length^2: long sequences need
    `--activation_checkpointing`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, -math.inf).softmax(-1, dtype=torch.float32).to(value.dtype) @ value
