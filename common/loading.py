"""Weights of a checkpoint folder -> sharded parameters of a model that was built on meta."""

import contextlib
import json

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from common import distributed


def load_weights(hf: nn.Module, path: str, what: str, device: torch.device) -> Tensor | None:
    """Fill the sharded parameters of a meta model from safetensors: each rank reads its own slices.

    Returns the scalar head if the checkpoint has none, to be filled by the caller.
    Raises `ValueError` if the checkpoint's names or shapes are not the model's.
    """
    hf.to_empty(device=device)
    # Buffers that no checkpoint holds (rotary frequencies): NaN until their module computes them again. What else the
    # module has (Gemma's embedding) is marked, or it would be drawn at random first.
    for parameter in hf.parameters():
        parameter._is_hf_initialized = True
    for name, buffer in list(hf.named_non_persistent_buffers()):
        buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
        with torch.no_grad():
            hf._init_weights(hf.get_submodule(name.rpartition(".")[0]))
    if any(buffer.isnan().any() for _, buffer in hf.named_non_persistent_buffers()):
        raise ValueError(f"{what}: {hf.config.model_type} keeps buffers that cannot be rebuilt")
    wanted = {name: tensor for name, tensor in hf.state_dict().items() if ".lora_" not in name}
    for name in hf.all_tied_weights_keys:
        wanted.pop(name, None)  # the tied head is the embedding, and checkpoints need not list it
    reader = HuggingFaceStorageReader(path)
    with one_line_errors(what):
        stored = {name: list(meta.size) for name, meta in reader.read_metadata().state_dict_metadata.items()}
    if "score.weight" in stored and not hasattr(hf, "score"):
        raise ValueError(f"{what}: a reward model (it has score.weight), not a language model")
    new_head = wanted.pop("score.weight", None) if "score.weight" not in stored else None
    for name, tensor in wanted.items():
        if stored.get(name) != list(tensor.shape):
            found = f"shape {stored[name]}" if name in stored else "no such weight"
            raise ValueError(f"{what}: {name} {list(tensor.shape)} expected, the checkpoint has {found}")
    unused = stored.keys() - hf.state_dict().keys() - {"lm_head.weight"}  # a scalar model has no use for that one
    if unused and distributed.is_main():
        print(f"{len(unused)} weights of {path} are not used by {hf.config.model_type}, {min(unused)} for one")
    with one_line_errors(what):
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(path))
    return new_head


@contextlib.contextmanager
def one_line_errors(what: str):
    """Unreadable files become a ValueError that names them."""
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (OSError, EOFError, json.JSONDecodeError, SafetensorError, CheckpointException) as error:
        raise ValueError(f"{what}: cannot read the checkpoint: {distributed.first_line(error)}") from error
