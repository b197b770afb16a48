"""Weights of a checkpoint folder -> sharded parameters of a model built on meta; names of weights in checkpoints."""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from common.data import durable
from common.parallel import distributed

# Supported mixtures of experts: names in checkpoints of the module, and of an expert's gate, up and down matrices.
EXPERTS = dict(
    qwen3_moe=("mlp", "gate_proj", "up_proj", "down_proj"),
    olmoe=("mlp", "gate_proj", "up_proj", "down_proj"),
    mixtral=("block_sparse_moe", "w1", "w3", "w2"),
)


def load_config(path: str | Path):
    """Return the config of the model in a folder. Code in the folder does not run."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=False)


def require_unchanged(label: str, folder: Path) -> None:
    """Raise `ValueError` if a file of an export is damaged. One rank of each machine reads the files."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0 and (name := durable.changed_file(folder)):
        why = f"{name} is not as it was written; use another copy"
        raise ValueError(f"{label}: {why}, or delete {durable.CHECKSUMS} if you changed it yourself")


def hub_name(model_type: str, name: str) -> str:
    """Return the name in hub checkpoints of a module or weight of transformers' model; the experts stay together."""
    return name.replace(".mlp.", f".{EXPERTS[model_type][0]}.") if model_type in EXPERTS else name


def hub_weights(model_type: str, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight of transformers' model under its names in hub checkpoints.

    Names differ only for mixtures of experts: transformers 5 has the experts of a layer in two parameters
    [experts, ...], checkpoints have three matrices per expert. The matrices are views. A sharded parameter gives the
    matrices of this rank, which are complete because FSDP divides the first dimension.
    """
    name = hub_name(model_type, name)
    stem, _, kind = name.rpartition(".")
    if model_type not in EXPERTS or not stem.endswith(".experts"):
        yield name, weight
        return
    (_, gate, up, down), first = EXPERTS[model_type], 0
    if hasattr(weight, "to_local"):  # a DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, (first, *_) = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        weight = weight.to_local()
    matrices = dict(gate_up_proj=(gate, up), down_proj=(down,))[kind]
    for number, expert in enumerate(weight, start=first):
        for matrix, rows in zip(matrices, expert.chunk(len(matrices)), strict=True):
            yield f"{stem}.{number}.{matrix}.weight", rows


def load_weights(hf: nn.Module, path: str, label: str, device: torch.device) -> Tensor | None:
    """Fill the sharded parameters of a meta model from safetensors: each rank reads its own slices.

    Returns the scalar head for the caller to fill, if the checkpoint has none. Raises `ValueError` if names or shapes
    of the checkpoint are not those of the model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(path)
    with one_line_errors(label):
        stored = {name: list(meta.size) for name, meta in reader.read_metadata().state_dict_metadata.items()}
    if "score.weight" in stored and not hasattr(hf, "score"):
        raise ValueError(f"{label}: a reward model (it has score.weight), not a language model")

    def as_stored(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        return iter([(name, tensor)]) if name in stored else hub_weights(hf.config.model_type, name, tensor)

    # Every rank checks all names and shapes before it takes memory, and reads those of its own shards.
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in _loaded(hf, stored).items()}
    shapes = dict(each for name, tensor in shapes.items() for each in as_stored(name, tensor))
    for name, tensor in shapes.items():
        if stored.get(name) != list(tensor.shape):
            found = f"shape {stored[name]}" if name in stored else "no such weight"
            raise ValueError(f"{label}: {name} {list(tensor.shape)} expected, the checkpoint has {found}")
    known = shapes.keys() | hf.state_dict().keys()
    unused = stored.keys() - known - {"lm_head.weight"}  # a scalar model does not need it
    if unused:
        distributed.say(
            f"{len(unused)} weights of {path} are not used by {hf.config.model_type}, for example {min(unused)}"
        )
    hf.to_empty(device=device)
    # Modules recompute the buffers that no checkpoint has (rotary frequencies); a remaining NaN shows a failure. The
    # mark keeps parameters of such a module (Gemma's embedding) from random initialisation.
    for parameter in hf.parameters():
        parameter._is_hf_initialized = True
    for name, buffer in list(hf.named_non_persistent_buffers()):
        buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
        with torch.no_grad():
            hf._init_weights(hf.get_submodule(name.rpartition(".")[0]))
    if any(buffer.isnan().any() for _, buffer in hf.named_non_persistent_buffers()):
        raise ValueError(f"{label}: {hf.config.model_type} keeps buffers that cannot be rebuilt")
    wanted = dict(each for name, tensor in _loaded(hf, stored).items() for each in as_stored(name, tensor))
    with one_line_errors(label):
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(path))
    return None if "score.weight" in stored else hf.state_dict().get("score.weight")


def _loaded(hf: nn.Module, stored: Iterable[str]) -> dict[str, Tensor]:
    """Return the weights that are read from the checkpoint: not those of adapters, nor a tied head, which checkpoints
    need not list, nor a scalar head if none is stored."""
    state = {name: tensor for name, tensor in hf.state_dict().items() if ".lora_" not in name}
    new = {*hf.all_tied_weights_keys, *({"score.weight"} - set(stored))}
    return {name: tensor for name, tensor in state.items() if name not in new}


def draw_head(head: Tensor, seed: int) -> None:
    """Fill a scalar head [1, D] from N(0, 1 / (D + 1)), the same on any number of ranks. Collective."""
    from torch.distributed.tensor import distribute_tensor

    width, generator = head.shape[1], torch.Generator().manual_seed(seed)
    drawn = torch.randn(1, width, generator=generator) / math.sqrt(width + 1)
    head.copy_(distribute_tensor(drawn.to(head.device), head.device_mesh, head.placements))


@contextlib.contextmanager
def one_line_errors(label: str):
    """Turn errors of unreadable files into a ValueError with `label`."""
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (OSError, EOFError, json.JSONDecodeError, SafetensorError, CheckpointException) as error:
        if isinstance(error, CheckpointException):
            ((error, _), *_) = error.failures.values()
        raise ValueError(f"{label}: cannot read the checkpoint: {distributed.first_line(error)}") from error
