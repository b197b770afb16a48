"""The language model in a checkpoint that holds more than it, or that names it otherwise.

A checkpoint of images and text has a language model, whose weights have a prefix of their own in
the files, such as `language_model.model.` (Gemma 3). It alone is built and trained. All other
weights, such as those of the vision tower, are passengers: an export copies them unchanged."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.model import mxfp4
from common.model.loading import has_other_parts, hub_weights, is_plain, load_config

# Language models without a causal class in transformers: on text alone they have the numbers of
# another type. Rotary embeddings of images have three positions, which are equal for text.
SAME_ON_TEXT = dict(qwen3_vl_text="qwen3", qwen2_5_vl_text="qwen2", qwen2_vl_text="qwen2")
OF_IMAGES = ("mrope_section", "mrope_interleaved")
# Prefix of the vision tower's weights in a policy (tower.py) and in files.
TOWER = "tower.parts."
TOWER_IN_FILES = "model."


def load_text_config(path: str | Path):
    """Return the config of the language model in a folder: that of the model, or a part of it."""
    config = load_config(path)
    if is_plain(config):
        return config
    return text_config(config)


def load_options(path: str) -> dict:
    """Return options with which `from_pretrained` loads the language model of a folder alone."""
    if is_plain(load_config(path)):
        return {}
    return text_options(path)


def load_file_names(hf: nn.Module, path: str):
    """Return the names of a language model's weights in its files, None if they are those of
    transformers' model."""
    if is_plain(load_config(path)):
        return None
    return file_names(hf, path)


def text_config(config):
    """Return the config of the language model in that of a folder. It has no quantization: weights
    in MXFP4 are read as floats."""
    if method_of_quantization(config) == "mxfp4":
        del config.quantization_config
    if not has_other_parts(config):
        return config
    text = config.get_text_config()
    if text.model_type in SAME_ON_TEXT:
        from transformers import AutoConfig

        fields = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        rope = fields["rope_parameters"].items()
        fields["rope_parameters"] = {name: x for name, x in rope if name not in OF_IMAGES}
        text = AutoConfig.for_model(SAME_ON_TEXT[text.model_type], **fields)
    return with_fields_of_whole(text, config)


def with_fields_of_whole(text, config):
    """Return the config of a language model with what only that of the whole model may have."""
    # Some models, such as CLIP, have no head.
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    text.dtype = config.dtype or text.dtype
    return text


def method_of_quantization(config) -> str | None:
    """Return the method by which the weights in the files are quantized, None if they are not."""
    fields = getattr(config, "quantization_config", None)
    return fields.get("quant_method", "unknown") if fields else None


class FileNames(NamedTuple):
    """Names of a language model's weights in its files: another prefix, and perhaps another name of
    the head."""

    prefix: str  # of transformers' model, such as `model.`
    prefix_in_files: str
    head_in_files: str
    has_stacked_experts: bool  # as in transformers' model
    packed: tuple[str, ...]  # names of the weights that the files have in MXFP4
    passengers: tuple[str, ...]  # names in the files of all other weights

    def of(self, name: str) -> str:
        """Return the name in the files of a weight of transformers' model."""
        if name == "lm_head.weight":
            return self.head_in_files
        inner = name.removeprefix(self.prefix)
        return name if inner == name else self.prefix_in_files + inner

    def in_model(self, name: str) -> str:
        """Return the name in transformers' model of a weight in the files, the inverse of `of`."""
        if name == self.head_in_files:
            return "lm_head.weight"
        return self.prefix + name.removeprefix(self.prefix_in_files)

    def replace_packed(self, expected: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors on meta by their names in the files, with the parts of those in MXFP4."""
        parts = {}
        for name, tensor in expected.items():
            parts |= mxfp4.parts(name, tensor) if name in self.packed else {name: tensor}
        return parts

    def fill_packed(self, hf: nn.Module, path: str) -> None:
        """Fill the parameters whose weights in the files are in MXFP4."""
        if self.packed:
            state = hf.state_dict()
            mxfp4.fill({name: state[name] for name in self.packed}, names_in(path))

    @property
    def key_mapping(self) -> dict[str, str]:
        """Patterns of names in the files, with their names in transformers' model."""
        return {
            f"^{re.escape(self.prefix_in_files)}": self.prefix,
            f"^{re.escape(self.head_in_files)}$": "lm_head.weight",
        }


def file_names(hf: nn.Module, path: str) -> FileNames:
    """Return the names that the weights of `hf` have in the files of a folder. The embedding shows
    the prefix: no other part has one of this name."""
    stored = names_in(path)
    prefix = f"{hf.base_model_prefix}."
    prefixes = _prefixes(stored, _embedding(hf))
    heads = [name for name in stored if re.fullmatch(r"(.*\.)?(lm_head|embed_out)\.weight", name)]
    names = FileNames(
        prefix,
        prefixes[0] if len(prefixes) == 1 else prefix,
        heads[0] if len(heads) == 1 else "lm_head.weight",
        any(name.endswith(".experts.gate_up_proj") for name in stored),
        packed=tuple(sorted(n for n in hf.state_dict() if n + mxfp4.BLOCKS in stored)),
        passengers=(),
    )
    known = {names.head_in_files}
    for name, weight in hf.state_dict().items():
        whole = torch.empty(weight.shape, device="meta")  # a shard has only some of the experts
        known |= dict(hub_weights(hf.config.model_type, name, whole, names)).keys()
    for name in names.packed:
        known |= {name + mxfp4.BLOCKS, name + mxfp4.SCALES}
    return names._replace(passengers=tuple(sorted(stored.keys() - known)))


def _prefixes(names: Iterable[str], ending: str) -> list[str]:
    """Return what stands before `ending` in the names that have it."""
    matches = (re.fullmatch(rf"(|.*\.){re.escape(ending)}", name) for name in names)
    return [match[1] for match in matches if match]


def _embedding(hf: nn.Module) -> str:
    """Return the name of the embedding's weight in the base model."""
    modules = dict(hf.base_model.named_modules())
    (name,) = (name for name, x in modules.items() if x is hf.get_input_embeddings())
    return f"{name}.weight"


def prefix_in_whole_model(hf: nn.Module, path: str) -> str:
    """Return the prefix of the language model `hf` in transformers' model of images and text."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(load_config(path))
    (prefix,) = _prefixes(dict(whole.named_parameters()), _embedding(hf))
    return prefix


def names_in(path: str) -> dict[str, Path]:
    """Return the names of all weights in a folder, each with its file."""
    from safetensors import safe_open

    files = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            files |= dict.fromkeys(tensors.keys(), file)
    return files


def read_weights(path: str, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of these names in a folder. Raises `FileNotFoundError` for one that is no
    longer there."""
    files = names_in(path)
    for name in names:
        if name not in files:
            raise FileNotFoundError(f"{path}, the model that was trained, has no {name} any more")
        yield name, read_weight(files, name)


def read_weight(files: dict[str, Path], name: str) -> Tensor:
    """Return a weight from one of the files of `names_in`."""
    from safetensors import safe_open

    with safe_open(files[name], "pt") as tensors:
        return tensors.get_tensor(name)


def meta_model(path: str) -> nn.Module:
    """Return the language model of a folder, without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(load_text_config(path))


def text_options(path: str) -> dict:
    """Return options with which `from_pretrained` loads the language model of a folder alone."""
    from transformers.utils import logging
    from transformers.utils.quantization_config import Mxfp4Config

    # They would list all weights that are left out.
    for module in ("modeling_utils", "distributed.tensor_parallel"):
        logging.get_logger(f"transformers.{module}").setLevel(logging.ERROR)
    if method_of_quantization(load_config(path)) is not None:
        return dict(quantization_config=Mxfp4Config(dequantize=True))
    hf = meta_model(path)
    return dict(config=hf.config, key_mapping=file_names(hf, path).key_mapping)


def text_weights(path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the language model in a folder, with the prefix of transformers' model,
    and a tied head too."""
    hf = meta_model(path)
    names = file_names(hf, path)
    tied = hf.all_tied_weights_keys.get("lm_head.weight")
    left_out = {*names.passengers, *([names.head_in_files] if tied else [])}
    files = names_in(path)
    for stored_name in files:
        if stored_name in left_out:
            continue
        name = names.in_model(stored_name)
        if name.endswith(mxfp4.SCALES):
            continue
        weight = read_weight(files, stored_name)
        if name.endswith(mxfp4.BLOCKS):
            scales = stored_name.removesuffix(mxfp4.BLOCKS) + mxfp4.SCALES
            name = name.removesuffix(mxfp4.BLOCKS)
            weight = mxfp4.unpack(weight, read_weight(files, scales))
        yield name, weight
        if name == tied:
            yield "lm_head.weight", weight
