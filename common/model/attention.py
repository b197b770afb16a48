"""Attention over packed sequences.

Shapes: T computed tokens, K keys: more than T if prefixes are shared, because each sequence has a copy of the keys of
its prefix.
"""

import math
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from common.parallel.context import exchange
from common.parallel.placement import Tokens

LONG = 512  # queries from which padding them by the prefix's length is faster than a mask in SDPA (on a CPU)
GQA = dict(enable_gqa=True) if torch.__version__ >= "2.13" else {}  # whether varlen_attn accepts fewer key heads


def packed_inputs(tokens: Tokens) -> dict:
    """Return the keyword arguments of a Hugging Face model whose attention is `packed_attention`."""
    return dict(
        input_ids=tokens.input_ids_T[None],
        position_ids=tokens.position_ids_T[None],
        use_cache=False,
        cu_seq_lens_q=tokens.cu_seqlens_N1,
        max_length_q=tokens.max_seqlen,
        key_rows_K=tokens.keys and tokens.keys.rows_K,
        cu_seq_lens_k=tokens.keys and tokens.keys.cu_seqlens_N1,
        max_length_k=tokens.keys and tokens.keys.max_seqlen,
        pack=tokens,  # not its list of offsets: torch.compile would compile the block again for each list
    )


@exchange
def packed_attention(module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, **kwargs):
    """Compute causal attention within each sequence of the pack.

    `query` is [1, heads, T, head_dim], `key` and `value` may have fewer heads (grouped-query attention); the offsets
    come through the model's keyword arguments. Queries behind a shared prefix attend to the keys of the prefix and
    their own. They are consecutive tokens: masks and windows are exact if the last query is aligned with the last key.
    CUDA has FlashAttention's varlen kernel, which aligns them so and needs no memory quadratic in T; other devices have
    one SDPA call for neighbours of one length. Neither has a `softcap` on the scores (Gemma 2), which
    `capped_attention` computes. Raises `NotImplementedError` for unsupported variants of attention, which loading
    reports in one line.
    """
    for variant in ("s_aux", "position_bias"):  # s_aux: attention sinks
        if kwargs.get(variant) is not None:
            raise NotImplementedError(f"{type(module).__name__} needs {variant} in attention")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} attends to later tokens")
    of_queries = of_keys = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]  # a KeyError is caught at load
    if (rows_K := kwargs["key_rows_K"]) is not None:
        key, value = GatherKeys.apply(key, rows_K), GatherKeys.apply(value, rows_K)
        of_keys = kwargs["cu_seq_lens_k"], kwargs["max_length_k"]
    if query.is_cuda and query.dtype != torch.float32 and softcap is None:
        from torch.nn.attention.varlen import varlen_attn

        window = (-1 if sliding_window is None else sliding_window - 1, 0)  # (-1, 0) is plain causal
        if not GQA:
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        bounds = of_queries[0], of_keys[0], of_queries[1], of_keys[1]
        return varlen_attn(q, k, v, *bounds, scale=scaling, window_size=window, **GQA)[None], None
    return attention_by_length(query, key, value, kwargs["pack"], scaling, sliding_window, softcap), None


class GatherKeys(torch.autograd.Function):
    """Rows of keys or values, [1, heads, T, head_dim] -> [1, heads, K, head_dim]. The gradients of a row that is taken
    several times are added up in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, rows_K: Tensor) -> Tensor:
        ctx.save_for_backward(rows_K)
        ctx.length = x.shape[2]
        return x.index_select(2, rows_K)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (rows_K,) = ctx.saved_tensors
        (_, heads, _, head_dim), wide = gradient.shape, torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.new_zeros(1, heads, ctx.length, head_dim, dtype=wide)
        return total.index_add_(2, rows_K, gradient.to(wide)).to(gradient.dtype), None


# torch.compile would compile it again for every list of offsets. Like torch.compiler.disable, but imports when called.
@torch._disable_dynamo
def attention_by_length(
    query: Tensor, key: Tensor, value: Tensor, pack: Tokens, scaling: float, sliding_window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Compute `packed_attention` with one call for all neighbours with as many queries and keys: [1, T, heads,
    head_dim]."""
    # Equal lengths are mostly neighbours. One split: the gradient of a slice would be as large as the pack.
    of_sequences = zip(pack.lengths, (pack.keys or pack).lengths, strict=True)
    runs = [(*lengths, len(list(run))) for lengths, run in groupby(of_sequences)]
    queries = query.squeeze(0).split([num_queries * count for num_queries, _, count in runs], dim=1)
    keys, values = (x.squeeze(0).split([num_keys * count for _, num_keys, count in runs], dim=1) for x in (key, value))
    outputs = []
    for (num_queries, num_keys, count), *parts in zip(runs, queries, keys, values, strict=True):
        # [heads, count * length, head_dim] -> [count, heads, length, head_dim]
        q, k, v = (x.unflatten(1, (count, -1)).transpose(0, 1) for x in parts)
        mask, before = None, num_keys - num_queries
        windowed = sliding_window is not None and num_keys > sliding_window
        if 0 < before < num_queries >= LONG and not windowed:  # more rows cost less than a mask
            q = F.pad(q, (0, 0, before, 0))
        elif before or windowed:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(before)
            mask = mask if sliding_window is None else mask.triu(before + 1 - sliding_window)
        if softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
        else:
            out = capped_attention(q, k, v, mask, scaling, softcap)
        # [count * num_queries, heads, head_dim]
        outputs.append(out[:, :, -num_queries:].transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float
) -> Tensor:
    """Compute causal attention with scores `softcap * tanh(scores / softcap)` for sequences of one length: query
    [count, heads, queries, head_dim], mask [queries, keys] or None. All scores exist at a time, count * heads *
    queries * keys: long sequences need `--activation_checkpointing`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, -math.inf).softmax(-1, dtype=torch.float32).to(value.dtype) @ value
