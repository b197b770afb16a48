"""Which attention a model gets on a GPU, and the keys of shared prefixes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from common.model.attention import GatherKeys, causal_attention, has_flash_kernel

HOPPER, AMPERE, TURING, VOLTA = (9, 0), (8, 0), (7, 5), (7, 0)
FLASH, SDPA, SCORES = "FlashAttention", "SDPA", "all scores"
# docs/models.md, "Attention on a GPU". The families that it does not name have FlashAttention.
EXCEPTIONS = dict(gemma2={SCORES}, gpt_oss={SCORES}, gemma4_text={FLASH, SDPA})
FAMILIES = """llama mistral qwen2 qwen3 qwen3_5_text olmo2 olmo3 gemma2 gemma3_text gemma4_text phi
    phi3 smollm3 glm4 granite cohere gpt_neox qwen3_moe qwen3_next qwen3_5_moe_text mixtral olmoe
    gpt_oss glm4_moe granitemoe qwen3_vl_text qwen2_5_vl_text""".split()
PUBLISHED = dict(glm4_moe=dict(head_dim=128))  # where the class has another default


def attention_of(config, capability=HOPPER, dtype=torch.bfloat16) -> set[str]:
    """Return what the layers of a model have."""
    if getattr(config, "attn_logit_softcapping", None) or config.model_type == "gpt_oss":
        return {SCORES}
    layers = config.per_layer_config if config.model_type == "gemma4_text" else [config]
    kinds = set()
    for layer in layers:
        width = getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kinds.add(FLASH if has_flash_kernel(capability, dtype, width, width) else SDPA)
    return kinds


@pytest.mark.parametrize("model_type", FAMILIES)
def test_attention_of_each_family(model_type):
    """With the sizes that transformers has by default, which are those of a published model."""
    config = AutoConfig.for_model(model_type, **PUBLISHED.get(model_type, {})).get_text_config()
    plain = {SCORES} if EXCEPTIONS.get(model_type) == {SCORES} else {SDPA}
    assert attention_of(config) == EXCEPTIONS.get(model_type, {FLASH})
    for capability, dtype in ((AMPERE, torch.float32), (TURING, torch.float16)):
        assert attention_of(config, capability, dtype) == plain


@pytest.mark.parametrize(
    ("capability", "dtype", "key_width", "value_width", "has_kernel"),
    [
        (HOPPER, torch.bfloat16, 128, 128, True),
        (AMPERE, torch.float16, 256, 256, True),
        (HOPPER, torch.bfloat16, 264, 264, False),
        (HOPPER, torch.bfloat16, 192, 128, False),
        (HOPPER, torch.bfloat16, 42, 42, False),  # no multiple of 8
        (HOPPER, torch.float32, 128, 128, False),
        (TURING, torch.float16, 128, 128, False),  # T4
        (VOLTA, torch.float16, 128, 128, False),  # V100
        ((0, 0), torch.bfloat16, 128, 128, False),  # a CPU
    ],
)
def test_flash_attention_has_limits(capability, dtype, key_width, value_width, has_kernel):
    assert has_flash_kernel(capability, dtype, key_width, value_width) == has_kernel


def test_sdpa_on_cuda_has_as_many_key_heads_as_query_heads(monkeypatch):
    """A kernel that needs no memory for all scores takes no fewer there. On fake tensors."""
    seen, sdpa = [], F.scaled_dot_product_attention

    def recorded(query, key, value, *args, **options):
        seen.append((query.shape[1], key.shape[1], value.shape[1], options["enable_gqa"]))
        return sdpa(query, key, value, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    for device in ("cuda", "cpu"):
        with FakeTensorMode():
            query, key = (torch.empty(2, heads, 8, 64, device=device) for heads in (8, 2))
            out = causal_attention(query, key, key, 0.1, None, None, None)
        assert out.shape == query.shape and out.device.type == device
    assert seen == [(8, 8, 8, False), (8, 2, 2, True)]


# ---- keys of shared prefixes ----


def through_float32(x: Tensor, places_A: Tensor) -> Tensor:
    """The same by autograd, which adds up in the dtype of the gathered tensor."""
    return x.float().index_select(2, places_A).to(x.dtype)


def gathered(x: Tensor, places_A: Tensor) -> Tensor:
    return GatherKeys.apply(x, places_A)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "gather",
    [
        gathered,
        lambda *x: checkpoint(gathered, *x, use_reentrant=False),
        torch.compile(gathered, backend="aot_eager"),
    ],
    ids=["plain", "recomputed", "compiled"],
)
def test_gradients_of_shared_keys_add_up_in_float32(gather, dtype):
    """Bit for bit as if the keys were gathered in float32."""
    generator = torch.Generator().manual_seed(0)
    places_A = torch.tensor([0, 1, 2, 3, *[0, 1, 2] * 20, 4])
    x = torch.randn(1, 2, 5, 8, generator=generator).to(dtype)
    weights = torch.randn(1, 2, len(places_A), 8, generator=generator).to(dtype)
    found = []
    for function in (gather, through_float32):
        leaf = x.clone().requires_grad_()
        out = function(leaf, places_A)
        found.append((out.detach(), *torch.autograd.grad(out, leaf, weights)))
    assert all(map(torch.equal, *found)) and found[0][1].dtype == dtype
    if dtype == torch.bfloat16:
        narrow = torch.zeros_like(x).index_add_(2, places_A, weights)
        assert not torch.equal(found[0][1], narrow)
