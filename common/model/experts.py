"""Names of the weights of mixtures of experts in hub checkpoints.

Transformers 5 has the experts of a layer in two parameters [experts, ...], checkpoints have three
matrices per expert."""

from collections.abc import Iterator

from torch import Tensor

# Names in checkpoints of the module, and of an expert's gate, up and down matrices.
USUAL = ("mlp", "gate_proj", "up_proj", "down_proj")
NAMES = dict(
    qwen3_moe=USUAL,
    olmoe=USUAL,
    qwen3_next=USUAL,
    qwen3_5_moe_text=USUAL,
    glm4_moe=USUAL,
    mixtral=("block_sparse_moe", "w1", "w3", "w2"),
)
# Types whose experts are stacked in hub checkpoints too, with other names of these parts.
STACKED: dict[str, dict[str, str]] = dict(
    gpt_oss={},
    granitemoe={
        ".experts.gate_up_proj": ".input_linear.weight",
        ".experts.down_proj": ".output_linear.weight",
        ".router.weight": ".router.layer.weight",
    },
)


def hub_name(model_type: str, name: str) -> str:
    """Return the name in hub checkpoints of a module or weight of transformers' model; the experts
    stay together."""
    for part, other in STACKED.get(model_type, {}).items():
        name = name.replace(part, other)
    return name.replace(".mlp.", f".{NAMES[model_type][0]}.") if model_type in NAMES else name


def expert_weights(model_type: str, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight of transformers' model under its names in hub checkpoints. The matrices are
    views. A sharded parameter gives the matrices of this rank, which are complete because FSDP
    divides the first dimension."""
    name = hub_name(model_type, name)
    stem, _, kind = name.rpartition(".")
    if not stem.endswith(".experts") or model_type in STACKED:
        yield name, weight
        return
    first, weight = local_rows(weight)
    _, gate, up, down = NAMES[model_type]
    matrices = dict(gate_up_proj=(gate, up), down_proj=(down,))[kind]
    for number, expert in enumerate(weight, start=first):
        for matrix, rows in zip(matrices, expert.chunk(len(matrices)), strict=True):
            yield f"{stem}.{number}.{matrix}.weight", rows


def local_rows(weight: Tensor) -> tuple[int, Tensor]:
    """Return this rank's rows of a parameter, all without shards, and the number of the first."""
    if not hasattr(weight, "to_local"):  # no DTensor
        return 0, weight
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = weight.device_mesh
    _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
    return offset[0], weight.to_local()
