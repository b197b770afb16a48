"""Weights of a checkpoint folder -> sharded parameters of a model built on meta; names of weights
in checkpoints."""

import contextlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from common.model.experts import expert_weights
from common.parallel import distributed, durable

# Supported mixtures of experts, by model type (experts.py).
EXPERTS = ["qwen3_moe", "olmoe", "mixtral", "gpt_oss", "glm4_moe", "granitemoe"]
EXPERTS += ["qwen3_next", "qwen3_5_moe_text"]
# Types whose head has another name in files than in transformers.
OWN_HEADS = ("gpt_neox",)


def load_config(path: str | Path):
    """Return the config of the model in a folder. Code in the folder does not run."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=False)


def has_other_parts(config) -> bool:
    """Return whether a model is more than a language model, such as one of images and text."""
    return "text_config" in config.sub_configs


def is_plain(config) -> bool:
    """Return whether a folder has a language model alone, by transformers' names and as floats:
    see text_part.py."""
    is_whole = not has_other_parts(config) and config.model_type not in OWN_HEADS
    return is_whole and getattr(config, "quantization_config", None) is None


def require_unchanged(label: str, folder: Path) -> None:
    """Raise `ValueError` if a file of an export is damaged. One rank of each machine reads the
    files."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        return
    name = durable.changed_file(folder)
    if name:
        raise ValueError(
            f"{label}: {name} is not as it was written; use another copy, or delete"
            f" {durable.CHECKSUMS} if you changed it yourself"
        )


def hub_weights(
    model_type: str, name: str, weight: Tensor, names=None
) -> Iterable[tuple[str, Tensor]]:
    """Return a weight of transformers' model under its names in hub checkpoints: by `names` of
    `load_file_names`, and under several for experts."""
    if names is not None:
        name = names.of(name)
    if model_type not in EXPERTS or (names is not None and names.has_stacked_experts):
        return [(name, weight)]
    return expert_weights(model_type, name, weight)


def load_weights(
    hf: nn.Module, path: str, label: str, device: torch.device, names=None, tower=None
) -> Tensor | None:
    """Fill the sharded parameters of a meta model from safetensors: each rank reads its own slices.
    `names`: see `load_file_names`; `tower`: of tower.py, is filled too.

    Returns the scalar head for the caller to fill, if the checkpoint has none. Raises `ValueError`
    if names or shapes of the checkpoint are not those of the model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    with one_line_errors(label):
        metadata = HuggingFaceStorageReader(path).read_metadata().state_dict_metadata
    stored = {name: list(meta.size) for name, meta in metadata.items()}
    if tower is not None:
        for name in tower.load(stored, label, device):
            del stored[name]
    if "score.weight" in stored and not hasattr(hf, "score"):
        raise ValueError(f"{label}: a reward model (it has score.weight), not a language model")
    # Every rank checks all names and shapes before it takes memory, and reads its own shards.
    weights = _weights_to_read(hf, stored).items()
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in weights}
    expected = _by_stored_name(hf, shapes, stored, names)
    if names is not None:
        expected = names.replace_packed(expected)
    _require_shapes(hf, expected, stored, label, names)
    hf.to_empty(device=device)
    rebuild_buffers(hf, label)
    wanted = _by_stored_name(hf, _weights_to_read(hf, stored), stored, names)
    if names is not None:
        wanted = {name: x for name, x in wanted.items() if name not in names.packed}
    with one_line_errors(label):
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(path))
        if names is not None:
            names.fill_packed(hf, path)
    return None if "score.weight" in stored else hf.state_dict().get("score.weight")


def _weights_to_read(hf: nn.Module, stored: Iterable[str]) -> dict[str, Tensor]:
    """Return the weights that are read from the checkpoint: not those of adapters, nor a tied head,
    which checkpoints need not list, nor a scalar head if none is stored."""
    unread = set(hf.all_tied_weights_keys)
    if "score.weight" not in stored:
        unread.add("score.weight")
    weights = hf.state_dict().items()
    return {name: x for name, x in weights if name not in unread and ".lora_" not in name}


def _by_stored_name(
    hf: nn.Module, weights: dict[str, Tensor], stored: Iterable[str], names
) -> dict[str, Tensor]:
    """Return weights under their names in the checkpoint."""
    named = {}
    for name, tensor in weights.items():
        if name in stored:
            named[name] = tensor
        else:
            named.update(hub_weights(hf.config.model_type, name, tensor, names))
    return named


def _require_shapes(
    hf: nn.Module, wanted: dict[str, Tensor], stored: dict[str, list[int]], label: str, names
) -> None:
    """Raise `ValueError` if a wanted weight is not stored, or has another shape; report stored
    weights that are not used."""
    for name, tensor in wanted.items():
        if stored.get(name) != list(tensor.shape):
            problem = f"shape {stored[name]}" if name in stored else "no such weight"
            raise ValueError(
                f"{label}: {name} {list(tensor.shape)} expected, the checkpoint has {problem}"
            )
    known = wanted.keys() | hf.state_dict().keys()
    unused = stored.keys() - known - {"lm_head.weight"}  # a scalar model does not need it
    if unused:
        use = f"are not used by {hf.config.model_type}"
        if names is not None:
            use = "beside the language model stay as they are"
        distributed.say(f"{label}: {len(unused)} weights {use}, for example {min(unused)}")


@torch.no_grad()
def rebuild_buffers(hf: nn.Module, label: str) -> None:
    """Compute the buffers that no checkpoint has, such as rotary frequencies: their modules do it.
    A remaining NaN shows a failure."""
    # The mark keeps parameters of such a module (Gemma's embedding) from random initialisation.
    for parameter in hf.parameters():
        parameter._is_hf_initialized = True
    for name, buffer in list(hf.named_non_persistent_buffers()):
        buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
        hf._init_weights(hf.get_submodule(name.rpartition(".")[0]))
    if any(buffer.isnan().any() for _, buffer in hf.named_non_persistent_buffers()):
        raise ValueError(f"{label}: {hf.config.model_type} keeps buffers that cannot be rebuilt")


def persistent_buffers(hf: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that checkpoints have, by name."""
    left_out = {name for name, _ in hf.named_non_persistent_buffers()}
    return {name: x for name, x in hf.named_buffers() if name not in left_out}


def draw_head(head: Tensor, seed: int) -> None:
    """Fill a scalar head [1, D] from N(0, 1 / (D + 1)), the same on any number of ranks.
    Collective."""
    width = head.shape[1]
    generator = torch.Generator().manual_seed(seed)
    fill(head, torch.randn(1, width, generator=generator) / math.sqrt(width + 1))


def fill(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, the same on all ranks, to a sharded one. Collective."""
    from torch.distributed.tensor import distribute_tensor

    value = value.to(parameter.device)
    parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))


def has_adapters(hf: nn.Module) -> bool:
    """Return whether layers of a model have adapters (lora.py)."""
    return any(name.endswith(".lora_A") for name, _ in hf.named_parameters())


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all its shards. Collective if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # of a DTensor


@contextlib.contextmanager
def named_errors(label: str, *kinds: type[Exception]):
    """Turn errors of these kinds into a ValueError of one line that begins with `label`."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise  # these are RuntimeErrors too
    except kinds as error:
        raise ValueError(f"{label}: {distributed.first_line(error)}") from error


@contextlib.contextmanager
def one_line_errors(label: str):
    """Turn errors of unreadable files into a ValueError with `label`."""
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    unreadable = (OSError, EOFError, json.JSONDecodeError, SafetensorError)
    with named_errors(f"{label}: cannot read the checkpoint", *unreadable):
        try:
            yield
        except CheckpointException as error:
            ((first, _), *_) = error.failures.values()
            raise OSError(str(first)) from error
