"""`--compile`: transformer blocks that torch compiles."""

import torch
from torch import nn


def compile_blocks(blocks: nn.ModuleList) -> None:
    """Compile each transformer block, except its experts."""
    # A block has variants: with a graph or not, with shared prefixes or not, of fixed or any sizes.
    torch._dynamo.config.recompile_limit = 32
    for block in blocks:
        for name, module in block.named_modules():
            # The router decides the sizes of experts, and inductor fails to compile them in float32
            # (torch 2.13).
            if name.endswith("experts"):
                module.forward = torch.compiler.disable(module.forward)
        block.compile()
