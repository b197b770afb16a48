"""Packed attention equals attention within each sequence: FlashAttention on CUDA in bfloat16, SDPA
elsewhere."""

from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from on_gpu import HERE_AND_THERE, relative_error
from torch.utils.checkpoint import checkpoint

from common.model.attention import packed_attention, packed_inputs
from common.packs.packing import pack, pack_groups
from common.packs.sample import Sample

LENGTHS = (131, 64, 64, 37, 17, 2, 1)
# Relative norm; bfloat16 rounds by up to 2^-9 at every step.
BOUNDS = {torch.bfloat16: 1.5e-2, torch.float32: 2e-5}


def packed(query, key, value, mb, window):
    inputs = packed_inputs(mb)
    for name in ("input_ids", "position_ids", "use_cache"):
        del inputs[name]
    return packed_attention(
        torch.nn.Identity(), query, key, value, None, 0.1, sliding_window=window, **inputs
    )[0][0]


def separate(query, key, value, mb, window):
    """Return attention sequence by sequence, in float64."""
    outputs = []
    for begin, end in zip(mb.offsets, mb.offsets[1:], strict=False):
        q, k, v = (x[:, :, begin:end].double() for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        mask = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).tril()
        if window is not None:
            mask = mask.triu(1 - window)
        outputs.append(F.scaled_dot_product_attention(q, k, v, mask, scale=0.1)[0].transpose(0, 1))
    return torch.cat(outputs)


def draw(device, dtype, heads, head_dim, tokens, outputs) -> list[torch.Tensor]:
    """Return query, key and value of `tokens`, and weights of the outputs. `head_dim` is a number
    or (that of keys, that of values)."""
    width, of_values = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    generator = torch.Generator().manual_seed(width)
    shapes = [(1, heads[0], tokens, width), *((1, heads[1], tokens, w) for w in (width, of_values))]
    shapes.append((outputs, heads[0], of_values))
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def errors(
    device, dtype, heads, head_dim, window, lengths, recompute, window_there="same"
) -> list[float]:
    """Return the errors of the output and of the gradients of query, key and value, relative to
    float64."""
    samples = [Sample([1] * (n + 1), [True] * (n + 1)) for n in lengths]
    (mb,) = pack(samples, 10_000, torch.device(device))
    T = len(mb.targets_T)
    *qkv, weights = draw(device, dtype, heads, head_dim, T, T)
    results = []
    there = window if window_there == "same" else window_there
    for function, of in ((packed, window), (separate, there)):
        inputs = [x.clone().requires_grad_() for x in qkv]
        if recompute and function is packed:
            out = checkpoint(function, *inputs, mb, of, use_reentrant=False)
        else:
            out = function(*inputs, mb, of)
        assert out.shape == weights.shape and (function is separate or out.dtype == dtype)
        results.append([out, *torch.autograd.grad((out * weights.to(out.dtype)).sum(), inputs)])
    assert all(x.isfinite().all() for x in results[0])
    return [relative_error(ours, exact) for ours, exact in zip(*results, strict=True)]


@pytest.mark.parametrize(("device", "dtype"), HERE_AND_THERE)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_attention_and_its_gradient_equal_separate_attention(
    device, dtype, head_dim, window, recompute
):
    """CUDA uses another kernel than the ordinary suite, with its own conventions for grouped heads
    (four queries per key here), windows and head widths. Recomputation in the backward, as with
    --activation_checkpointing, is included."""
    found = errors(device, dtype, (8, 2), head_dim, window, LENGTHS, recompute)
    assert max(found) < BOUNDS[dtype], found


@pytest.mark.parametrize(("device", "dtype"), [*HERE_AND_THERE, ("cpu", torch.bfloat16)])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
@pytest.mark.parametrize(("head_dim", "window"), [(512, None), (512, 16), ((192, 128), None)])
def test_heads_that_flash_attention_does_not_take(device, dtype, head_dim, window, heads):
    """Those of Gemma 4 (tests/model/test_attention.py), and keys wider than values."""
    found = errors(device, dtype, heads, head_dim, window, LENGTHS, True)
    assert max(found) < BOUNDS[dtype], found


@pytest.mark.parametrize(("device", "dtype"), HERE_AND_THERE)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
def test_attention_behind_a_shared_prefix_equals_that_of_whole_sequences(
    device, dtype, heads, window
):
    """CUDA has to align masks and windows at the last query and the last key, and adds up the
    gradients of a prefix's keys: in bfloat16, their error is that of one sequence."""
    groups = [(70, (61, 1, 37, 37)), (40, (5, 90)), (1, (64, 2))]
    samples = [
        [Sample([9] * p + [i] + [8] * n, []) for i, n in enumerate(rests)] for p, rests in groups
    ]
    for sample in chain(*samples):
        sample.loss_mask = [True] * len(sample.ids)
    (mb,) = pack_groups(samples, 10_000, torch.device(device), share_prefix=1)
    tokens = mb.model_tokens
    sizes = len(tokens.targets_T), len(mb.targets_T)
    *qkv, weights = draw(device, dtype, heads, 64, *sizes)
    results = []
    for shared in (True, False):
        inputs = [x.clone().requires_grad_() for x in qkv]
        if shared:
            out = packed(*inputs, tokens, window)[tokens.places_T]
        else:
            out = separate(*(x.double()[:, :, tokens.places_T] for x in inputs), mb, window)
        results.append([out, *torch.autograd.grad((out * weights.to(out.dtype)).sum(), inputs)])
    found = [relative_error(ours, exact) for ours, exact in zip(*results, strict=True)]
    assert tokens.keys is not None and max(found) < BOUNDS[dtype], found


@pytest.mark.parametrize(("device", "dtype"), HERE_AND_THERE)
def test_window_longer_by_one_token_exceeds_the_tolerance(device, dtype):
    """Negative control of the test above: the tolerance is small enough to detect one token of a
    window."""
    found = errors(device, dtype, (8, 2), 64, 16, LENGTHS, False, window_there=17)
    assert min(found) > 2 * BOUNDS[dtype], found


@pytest.mark.parametrize(("device", "dtype"), HERE_AND_THERE)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
@pytest.mark.parametrize("window", [None, 16])
def test_attention_in_a_pack_of_one_token(device, dtype, heads, window):
    """The padding token of a rank without samples. FlashAttention may swap heads and tokens for a
    query of one token. The gradients of query and key are exactly zero, so only output and value
    are compared."""
    output, _, _, value = errors(device, dtype, heads, 128, window, (1,), False)
    assert max(output, value) < BOUNDS[dtype]
