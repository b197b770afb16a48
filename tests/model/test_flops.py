"""The counted FLOPs are those of the forward."""

import pytest
import torch
from model.checkpoints import ARCHITECTURES, write_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from common.config.groups import TrainArgs
from common.model.flops import forward_flops
from common.model.policy import load_policy
from common.packs.packing import pack
from common.packs.sample import Sample


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_flops_count_the_matrix_products_and_attention(tmp_path, device, architecture):
    """Models have a tied or a separate head, or experts of which the chosen ones count; a training
    forward includes its backward."""
    path = write_checkpoint(ARCHITECTURES[architecture](), tmp_path / "model")
    policy = load_policy(path, TrainArgs(dtype="float32"), device)
    policy.hf.set_experts_implementation("eager")  # torch does not count grouped products
    # 5 and 3 targets
    (mb,) = pack([Sample([*range(3, 3 + n)], [True] * n) for n in (6, 4)], 100, device)
    policy.flops = 0.0
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        policy(mb)
    by_operation = counter.get_flop_counts()["Global"].items()
    products = sum(flops for operation, flops in by_operation if "mm" in str(operation))
    config = policy.hf.config
    pairs = 5 * 6 / 2 + 3 * 4 / 2  # for a query and a key
    heads = config.num_hidden_layers * config.num_attention_heads
    attention = heads * 2 * 2 * config.head_dim * pairs
    assert policy.flops == products + attention
    assert policy.flops == forward_flops(policy.hf.config, policy.matrix_weights, mb)
    policy(mb)[0].sum().backward()
    assert policy.flops == 4 * (products + attention)
