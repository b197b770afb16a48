"""Attention over packed sequences. transformers' models call it in place of their own function
(loading.py registers it), so that no sequence of a pack sees another.

Shapes: T computed tokens, A attended keys. A is T, or more if prefixes are shared: each sequence
then gets a copy of the keys of its prefix."""

import math
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from common.packs.tokens import ModelTokens

VARLEN_HAS_GQA = torch.__version__ >= "2.13"  # varlen_attn accepts fewer key heads


def packed_inputs(tokens: ModelTokens) -> dict:
    """Return the keyword arguments with which a Hugging Face model runs a pack. transformers passes
    those that it does not know on to `packed_attention`."""
    keys = tokens.keys or tokens
    device = tokens.input_ids_T.device
    return dict(
        input_ids=tokens.input_ids_T[None],
        position_ids=tokens.position_ids_T[None],
        use_cache=False,
        cu_seq_lens_q=tokens.cu_seqlens_N1,
        max_length_q=tokens.max_seqlen,
        key_places_A=None if tokens.keys is None else tokens.keys.places_A,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        cu_seq_lens_k=keys.cu_seqlens_N1,
        max_length_k=keys.max_seqlen,
        # An object: for a list of offsets, torch.compile would compile the block again each time.
        pack=tokens,
    )


def packed_attention(
    module, query, key, value, attention_mask, scaling, sliding_window=None, softcap=None, **kwargs
):
    """Compute causal attention within each sequence of the pack.

    `query` is [1, heads, T, head_dim]; `key` and `value` may have fewer heads (grouped-query
    attention). The offsets of the sequences come through the model's keyword arguments. Queries
    after a shared prefix attend to the keys of the prefix and to their own. Prefix and queries are
    consecutive tokens, so causal masks and windows are exact if the last query is aligned with the
    last key. FlashAttention's varlen kernel does that. Without it (`has_flash_kernel`), or for a
    `softcap` on the scores (Gemma 2) or sinks (`s_aux`, gpt-oss), which it lacks, neighbours of the
    same length are computed together (`attention_by_length`)."""
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError(f"{type(module).__name__} needs position_bias in attention")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} attends to later tokens")
    places_A = kwargs["key_places_A"]  # KeyError: the model drops these arguments, so it is refused
    group, sinks_H = kwargs["pack"].context_group, kwargs.get("s_aux")
    if group is not None:
        query, key, value, sinks_H = group.divide_heads(query, key, value, sinks_H)
    if places_A is not None:
        key, value = (GatherKeys.apply(x, places_A) for x in (key, value))
    is_plain = softcap is None and sinks_H is None
    widths = query.shape[-1], value.shape[-1]
    if is_plain and has_flash_kernel(kwargs["capability"], query.dtype, *widths):
        out = varlen_attention(query, key, value, scaling, sliding_window, kwargs)
    else:
        variant = (scaling, sliding_window, softcap, sinks_H)
        out = attention_by_length(query, key, value, kwargs["pack"], variant)
    if group is not None:  # [1, all tokens, H / R, d] -> [1, t, H, d]
        out = group.exchange(out[0])[None]
    return out, None


def has_flash_kernel(
    capability: tuple[int, int], dtype: torch.dtype, key_width: int, value_width: int
) -> bool:
    """Return whether FlashAttention's varlen kernel can compute heads of these widths on a GPU of
    this compute capability (0, 0 is a CPU). Not all models qualify: some heads of Gemma 4 are 512
    wide, and DeepSeek V3 has keys of width 192 and values of 128."""
    has_width = key_width == value_width <= 256 and key_width % 8 == 0
    return capability >= (8, 0) and has_width and dtype in (torch.bfloat16, torch.float16)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None,
    offsets: dict,
) -> Tensor:  # fmt: skip
    """Compute `packed_attention` with FlashAttention's varlen kernel: [1, T, heads, head_dim]."""
    from torch.nn.attention.varlen import varlen_attn

    before = -1 if sliding_window is None else sliding_window - 1  # -1 means all earlier keys
    options = dict(scale=scaling, window_size=(before, 0))
    if VARLEN_HAS_GQA:
        options["enable_gqa"] = True
    else:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    # pyrefly: ignore[bad-index]  # a pair only with `return_aux`
    return varlen_attn(q, k, v, *(offsets[name] for name in names), **options)[None]


class GatherKeys(torch.autograd.Function):
    """Give every sequence the keys (or values) that it attends to: [1, heads, T, head_dim] ->
    [1, heads, A, head_dim]. A row of a shared prefix is copied to several sequences; its gradients
    add up in float32."""

    @staticmethod
    def forward(ctx, x: Tensor, places_A: Tensor) -> Tensor:
        ctx.save_for_backward(places_A)
        ctx.shape = x.shape
        return x.index_select(2, places_A)

    @staticmethod
    def backward(ctx, grad: Tensor):
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.shape, dtype=wide)
        return total.index_add_(2, ctx.saved_tensors[0], grad.to(wide)).to(grad.dtype), None


# torch.compile would compile this function again for every list of offsets.
@torch._disable_dynamo
def attention_by_length(
    query: Tensor, key: Tensor, value: Tensor, pack: ModelTokens, variant: tuple
) -> Tensor:
    """Compute `packed_attention` with one call for each run of neighbouring sequences of the same
    length: [1, T, heads, head_dim]. `variant`: the other arguments of `causal_attention`."""
    lengths = zip(pack.lengths, (pack.keys or pack).lengths, strict=True)
    runs = [(*pair, len(list(run))) for pair, run in groupby(lengths)]
    key_rows = [num_keys * count for _, num_keys, count in runs]
    # `split` and not slices: the gradient of each slice would be as large as the pack.
    queries = query.squeeze(0).split([length * count for length, _, count in runs], dim=1)
    keys = key.squeeze(0).split(key_rows, dim=1)
    values = value.squeeze(0).split(key_rows, dim=1)
    outputs = []
    for (*_, count), *slices in zip(runs, queries, keys, values, strict=True):
        # [heads, count * length, head_dim] -> [count, heads, length, head_dim]
        q, k, v = (x.unflatten(1, (count, -1)).transpose(0, 1) for x in slices)
        out = causal_attention(q, k, v, *variant)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [count * length, heads, head_dim]
    return torch.cat(outputs)[None]


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding_window: int | None,
    softcap: float | None, sinks_H: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute attention in sequences of the same length, [count, heads, length, head_dim]. The last
    query is aligned with the last key.

    With a softcap, scores become `softcap * tanh(scores / softcap)`. A sink is the score of one
    more key in each head, whose value is 0. Both need memory for all scores."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    before = num_keys - num_queries
    window = sliding_window or num_keys
    is_plain = softcap is None and sinks_H is None
    mask = None
    if not is_plain or before or num_keys > window:
        mask = query.new_ones(num_queries, num_keys, dtype=torch.bool)
        mask = mask.tril(before).triu(before + 1 - window)
    # On CUDA, no kernel for float32 or for wide heads accepts fewer key heads than query heads.
    if query.is_cuda or not is_plain:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if is_plain:
        options = dict(is_causal=mask is None, scale=scaling, enable_gqa=not query.is_cuda)
        return F.scaled_dot_product_attention(query, key, value, mask, **options)
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks_H is not None:
        sinks = sinks_H[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., :num_keys]
    return weights.to(value.dtype) @ value
