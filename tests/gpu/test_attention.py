"""Packed attention is attention within each sequence: FlashAttention's varlen kernel on CUDA in bfloat16, SDPA else."""

import pytest
import torch
import torch.nn.functional as F
from on_gpu import HERE_AND_THERE, relative_error
from torch.utils.checkpoint import checkpoint

from common.data.packing import Sample, pack
from common.model.attention import packed_attention, packed_inputs

LENGTHS = (131, 64, 64, 37, 17, 2, 1)
BOUNDS = {torch.bfloat16: 1.5e-2, torch.float32: 2e-5}  # of the norm; bfloat16 rounds by up to 2^-9 at every step


def packed(query, key, value, mb, window):
    inputs = packed_inputs(mb)
    for name in ("input_ids", "position_ids", "use_cache"):
        del inputs[name]
    return packed_attention(torch.nn.Identity(), query, key, value, None, 0.1, sliding_window=window, **inputs)[0][0]


def separate(query, key, value, mb, window):
    """Sequence by sequence, in float64."""
    outputs = []
    for begin, end in zip(mb.offsets, mb.offsets[1:], strict=False):
        q, k, v = (x[:, :, begin:end].double() for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        mask = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).tril()
        if window is not None:
            mask = mask.triu(1 - window)
        outputs.append(F.scaled_dot_product_attention(q, k, v, mask, scale=0.1)[0].transpose(0, 1))
    return torch.cat(outputs)


def errors(device, dtype, heads, head_dim, window, lengths, recompute, window_there="same") -> list[float]:
    """Of the output and of the gradients of query, key and value, relative to float64."""
    (mb,) = pack([Sample([1] * (n + 1), [True] * (n + 1)) for n in lengths], 10_000, torch.device(device))
    generator, T = torch.Generator().manual_seed(head_dim), len(mb.targets_T)
    query, key, value, weights = (
        torch.randn(*shape, generator=generator).to(device, dtype)
        for shape in ((1, heads[0], T, head_dim), *[(1, heads[1], T, head_dim)] * 2, (T, heads[0], head_dim))
    )
    results = []
    for function, of in ((packed, window), (separate, window if window_there == "same" else window_there)):
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        if recompute and function is packed:
            out = checkpoint(function, *inputs, mb, of, use_reentrant=False)
        else:
            out = function(*inputs, mb, of)
        assert out.shape == (T, heads[0], head_dim) and (function is separate or out.dtype == dtype)
        results.append([out, *torch.autograd.grad((out * weights.to(out.dtype)).sum(), inputs)])
    assert all(x.isfinite().all() for x in results[0])
    return [relative_error(ours, exact) for ours, exact in zip(*results, strict=True)]


@pytest.mark.parametrize(("device", "dtype"), HERE_AND_THERE)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_attention_and_its_gradient(device, dtype, head_dim, window, recompute):
    """Another kernel runs on CUDA than in the ordinary suite, with its own idea of grouped heads (four queries of one
    key here), of which tokens a window holds, and of head sizes; recomputed in backward too, as with
    --activation_checkpointing. CPU twins: the first case of each, and test_models.test_packed_equals_separate."""
    found = errors(device, dtype, (8, 2), head_dim, window, LENGTHS, recompute)
    assert max(found) < BOUNDS[dtype], found


@pytest.mark.parametrize(("device", "dtype"), HERE_AND_THERE)
def test_a_window_of_one_more_token_would_be_noticed(device, dtype):
    """The negative control of the test above: the bound is small enough to see one token of a window."""
    found = errors(device, dtype, (8, 2), 64, 16, LENGTHS, False, window_there=17)
    assert min(found) > 2 * BOUNDS[dtype], found


@pytest.mark.parametrize(("device", "dtype"), HERE_AND_THERE)
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
@pytest.mark.parametrize("window", [None, 16])
def test_a_pack_of_one_token(device, dtype, heads, window):
    """The filler of a rank that has nothing left. A FlashAttention kernel may swap heads and tokens when a query is one
    token long; the gradients of query and key are exactly zero there, so only output and value are compared."""
    output, _, _, value = errors(device, dtype, heads, 128, window, (1,), False)
    assert max(output, value) < BOUNDS[dtype]
