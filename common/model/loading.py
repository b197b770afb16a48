"""Read a model's folder: build the model on meta (without memory), then let each rank read its own
slices of the weights. Also gives weights the names that they have in files.

transformers' own rules rename, stack and split weights. For example, files on the hub have three
matrices for each expert, and the model has two tensors for all of them. The functions for this are
not public (transformers 5.16 to 5.19), so only this file calls them."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from common import durable
from common.config.extra import extra
from common.model.attention import packed_attention
from common.model.flops import num_delta_nets
from common.parallel import distributed
from common.parallel.process import is_lost_rank


def load_config(path: str | Path):
    """Return the config of the model in a folder. Code in the folder does not run."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=False)


def has_images(config) -> bool:
    """Return whether a config is that of a model of images and text, not of a language model."""
    return "text_config" in config.sub_configs


def model_class(config):
    """Return transformers' auto class for the whole model of a folder, with its vision tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if has_images(config) else AutoModelForCausalLM


def method_of_quantization(config) -> str | None:
    """Return the method by which the weights in the files are quantized; None if they are not."""
    fields = getattr(config, "quantization_config", None)
    return fields.get("quant_method", "unknown") if fields else None


def open_model(path: str | Path, dtype: torch.dtype, **options) -> nn.Module:
    """Load the whole model of a folder on the host, with transformers. Weights in MXFP4 become
    floats. `options` are those of `from_pretrained`."""
    from transformers.utils.quantization_config import Mxfp4Config

    config = load_config(path)
    options |= dict(dtype=dtype, trust_remote_code=False)
    if method_of_quantization(config) == "mxfp4":
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    return model_class(config).from_pretrained(path, **options)


def files_of(path: str | Path) -> list[Path]:
    """Return the files with a folder's weights. If there is an index, they are those that it names:
    the folder may have others, such as `consolidated.safetensors`. Raises `ValueError` if there is
    also a model.safetensors, because transformers would read that one instead."""
    index, alone = Path(path) / "model.safetensors.index.json", Path(path) / "model.safetensors"
    if not index.is_file():
        return [alone]
    with named_errors(index.name):
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        durable.require_inside(names)
    files = [Path(path) / name for name in sorted(set(names))]
    if alone.is_file() and alone not in files:
        raise ValueError(f"{alone.name} and {index.name} are two sets of weights; delete one")
    return files


def base_dtype(path: str | Path) -> torch.dtype:
    """Return the dtype of the weights that the folder's config names; float32 if it names none."""
    config = load_config(path)
    # pyrefly: ignore[bad-return]  # transformers declares `str` too, the name in the file
    return config.dtype or config.get_text_config().dtype or torch.float32


def require_unchanged(folder: Path) -> None:
    """Raise `ValueError` if a file of an export is damaged. One rank per machine reads them."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and (folder / durable.CHECKSUMS).is_file():
        if name := durable.changed_file(folder):
            advice = f"use another copy, or delete {durable.CHECKSUMS} if you changed it yourself"
            raise ValueError(f"{name} is not as it was written; {advice}")


# ---- folder -> model on meta ----


def model_on_meta(path: str, dtype: torch.dtype, scalar: bool) -> tuple[nn.Module, list]:
    """Build the model of a folder on meta, without memory for weights; if `scalar`, as a sequence
    classifier with one label. Weights are of `dtype`, buffers float32; there is no dropout. Also
    return transformers' rules, which turn names in files into names of the model."""
    from transformers import AttentionInterface, AutoModelForSequenceClassification
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.utils import logging

    logging.disable_progress_bar()
    AttentionInterface.register("packed", packed_attention)
    config = load_config(path)
    text = config.get_text_config()
    # A model may have one set of fields for all layers, or one for each type of layer.
    rope = getattr(text, "rope_parameters", None) or {}
    for fields in (rope, *rope.values()):
        kind = fields.get("rope_type") if isinstance(fields, dict) else None
        if kind in ("dynamic", "longrope"):
            raise ValueError(f"{kind} rotary embeddings mix packed sequences")
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is None:
            continue
        for name in vars(part):
            if name.endswith(("dropout", "pdrop", "jitter_noise")):
                setattr(part, name, 0.0)
    text.output_router_logits = False  # we do not read them
    if method_of_quantization(config) is not None:
        del config.quantization_config  # weights in MXFP4 are read as floats
    auto_class, kind = model_class(config), "language model"
    if scalar:
        auto_class, kind = AutoModelForSequenceClassification, "sequence classifier"
        config.num_labels = 1
    attention: str | dict[str, str] = "packed"
    if has_images(config):
        attention = dict.fromkeys(config.sub_configs, "sdpa") | dict(text_config="packed")
    options = dict(attn_implementation=attention, dtype=torch.float32, trust_remote_code=False)
    # Falcon, for example, has its own table of attention functions.
    with named_errors(f"transformers has no {kind} of {config.model_type} with packed attention"):
        with torch.device("meta"):
            hf = auto_class.from_config(config, **options)
        assert not scalar or isinstance(hf.score, nn.Linear), "the head is not linear"
        if num_delta_nets(text):
            with extra("architectures", config.model_type):
                from extras.architectures.delta_net import keep_sequences_apart
            keep_sequences_apart(hf)
    if not isinstance(getattr(hf.get_decoder(), "layers", None), nn.ModuleList):
        raise ValueError(f"{config.model_type} does not keep its blocks in `layers`")
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype)
    return hf, get_model_conversion_mapping(hf)  # it reads names of classes; FSDP changes them


# ---- files -> shards ----


def towers_of(hf: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that are not its language model, such as the vision tower."""
    base, decoder = hf.base_model, hf.get_decoder()
    return [] if base is decoder else [part for part in base.children() if part is not decoder]


@torch.no_grad()
def read_weights(
    hf: nn.Module, path: str, rules: list, home: torch.device, device: torch.device,
    change: Callable[[dict], dict] = dict,
) -> bool:  # fmt: skip
    """Fill a sharded model on meta from the files of a folder. Each rank reads only its own slices,
    to the device `home`. `change` may first replace slices (a dict by name), then transformers'
    `rules` convert them. Buffers go to `device`. Adapters, and a scalar head that the folder lacks,
    get memory but no values. Return whether it lacks one."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    set_buffers(hf, lambda x: torch.full_like(x, unfilled(x), device=home))
    with named_errors("cannot read the checkpoint"), contextlib.ExitStack() as opened:
        slices = change(slices_of(path, opened))
        # If the model ties its head, a head in the files would become a second parameter.
        tied = tuple(hf.all_tied_weights_keys)
        _require_tied(hf, slices)
        slices = {name: x for name, x in slices.items() if not name.endswith(tied)}
        # Parameters stay on meta until they are read: FSDP would keep what `to_empty` makes.
        options = LoadStateDictConfig(device_map={"": home}, weight_mapping=rules)
        found, _ = convert_and_load_state_dict_in_model(hf, slices, options)
    unread = {name for name, x in hf.named_parameters() if x.is_meta}
    _require_all(hf, found, unread)
    for name in unread:
        module, _, key = name.rpartition(".")
        parameter = hf.get_parameter(name)
        shard = torch.empty_like(parameter, device=home)
        setattr(hf.get_submodule(module), key, nn.Parameter(shard, parameter.requires_grad))
    hf.tie_weights()
    for parameter in hf.parameters():
        parameter._is_hf_initialized = True
    hf.initialize_weights()  # only the buffers that no file has, such as rotary frequencies
    if any((x != x).any() or (x == unfilled(x)).any() for x in hf.buffers()):
        raise ValueError(f"{hf.config.model_type} keeps buffers that cannot be rebuilt")
    set_buffers(hf, lambda x: x.to(device))
    unused = found.unexpected_keys - {"lm_head.weight"}  # a scalar model does not need it
    if unused:
        what = f"{len(unused)} weights are not used by {hf.config.model_type}"
        distributed.say(f"{path}: {what}, for example {min(unused)}")
    return "score.weight" in found.missing_keys


def slices_of(path: str | Path, opened: contextlib.ExitStack) -> dict:
    """Return a lazy slice of each tensor in a folder's files: nothing is read yet."""
    from safetensors import safe_open

    slices = {}
    for file in files_of(path):
        tensors = opened.enter_context(safe_open(file, "pt"))
        names = tensors.keys()
        if twice := slices.keys() & names:
            problem = f"another file has {min(twice)} too; delete one of the two"
            raise ValueError(f"{file.name}: {problem}")
        slices |= {name: tensors.get_slice(name) for name in names}
    if any(name.endswith("_blocks") for name in slices):
        with extra("architectures", f"{path}: its weights in MXFP4"):
            from extras.architectures.mxfp4 import unpacked
        slices = unpacked(slices)
    return slices


def _require_tied(hf: nn.Module, slices: dict) -> None:
    """Raise `ValueError` if config.json ties two weights that differ in the files: transformers
    would then keep both, and vLLM drop one. Each rank compares a part of the rows."""
    advice = "config.json ties them; set tie_word_embeddings to false there to keep both"
    for target, source in hf.all_tied_weights_keys.items():
        source = ".".join(source.split(".")[-2:])  # files may have another prefix
        sources = [name for name in slices if name.endswith(source)]
        for head in [name for name in slices if name.endswith(target)]:
            if sources and not any(_are_equal(slices[head], slices[name]) for name in sources):
                raise ValueError(f"{head} is not {sources[0]}, but {advice}")


def _are_equal(one, other) -> bool:
    """Compare this rank's rows of two slices, 4096 at a time to save memory."""
    if (shape := one.get_shape()) != other.get_shape():
        return False
    starts = distributed.items_of_rank(range(0, shape[0], 4096))
    return all(torch.equal(*(x[i : i + 4096].float() for x in (one, other))) for i in starts)


def _require_all(hf, found, unread: set[str]) -> None:
    """Raise `ValueError` unless transformers `found` all weights of the model in the files.
    `unread`: parameters that no file has filled."""
    if "score.weight" in found.unexpected_keys:
        raise ValueError("a reward model (it has score.weight), not a language model")
    first = next(hf.parameters())
    if first.to_local().shape != first.shape:
        _require_exact_slices(hf)
    if found.mismatched_keys:
        name, has, wants = min(found.mismatched_keys)
        needs = f"the model needs {list(wants)}"
        raise ValueError(f"{name}: the files have {list(has)} on this rank, {needs}")
    # A rank may hold none of a layer's experts: then it reads none, and none is missing.
    has_part = {name for name in unread if hf.get_parameter(name).to_local().numel()}
    missing = {n for n in has_part if ".lora_" not in n} - {*hf.all_tied_weights_keys}
    if missing := missing - {"score.weight"}:
        name = min(missing)
        failure = found.conversion_errors.get(name, "no such weight in the files")
        # The error is a traceback, which ends with two messages.
        raise ValueError(f"{name}: {failure.splitlines()[-2:][0]}")


def _require_exact_slices(hf) -> None:
    """Raise `ValueError` if a conversion of weights needs more than this rank's slice. transformers
    slices the first dimension and then converts, which is exact unless that dimension changes."""
    for rule in hf._weight_conversions:
        for operation in getattr(rule, "operations", None) or ():
            kind = type(operation).__name__
            if kind != "MergeModulelist" and getattr(operation, "dim", 0) == 0:
                problem = f"{hf.config.model_type} needs {kind}"
                raise ValueError(f"{problem}, which is not exact on several ranks")


def unfilled(buffer: Tensor) -> float:
    """Return the value that marks a buffer as not yet filled: NaN, or -1 for integers."""
    return math.nan if buffer.is_floating_point() else -1


def set_buffers(hf: nn.Module, change) -> None:
    """Replace every buffer by `change(buffer)`."""
    for module in hf.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = change(buffer)


@torch.no_grad()
def fill(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, which all ranks have, into a sharded parameter. Collective."""
    from torch.distributed.tensor import distribute_tensor

    value = value.to(parameter.device)
    parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))


# ---- models -> files ----


def whole(tensor: Tensor) -> Tensor:
    """Gather all shards of a tensor. Collective if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def hub_weights(hf: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename whole weights to the names in the files that this model was loaded from, or, for a
    model on meta, to the names on the hub."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(hf, weights)


@contextlib.contextmanager
def named_errors(label: str, kind: type[BaseException] = BaseException) -> Iterator[None]:
    """Turn errors of bad input into a `ValueError` of one line that begins with `label`. With
    `kind` ValueError, turn only those, and only if they do not begin with a flag already."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.distributed.DistError, KeyboardInterrupt, SystemExit):
        raise  # not the fault of the input
    except kind as error:  # PyTorch's CheckpointException is not an Exception
        if is_lost_rank(error) or kind is ValueError and str(error).startswith("--"):
            raise
        failures = getattr(error, "failures", None)  # a CheckpointException has one for each rank
        cause, *_ = next(iter(failures.values())) if failures else (error,)
        raise ValueError(f"{label}: {distributed.first_line(cause)}") from error
