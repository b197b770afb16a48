"""The files of an export besides its weights (config, generation config, tokenizer): those of the
base model, with the changes of the run. checkpoint.py writes them.

Many programs still use transformers 4. If the base model's files are in the form of transformers 5,
the export repeats their fields under the names of transformers 4 (4.57)."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from common.model.hub import GENERATION_CONFIG, fields_of
from common.model.loading import load_config
from common.text.tokenizer import eos_token_ids

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
# Some tokenizer classes of transformers ignore tokenizer.json. They cut this text differently.
PROBE = "It's 12,345.6 é\n\n  {x: 字}\tEND"
TOKENIZER_FILES = (  # and those of the image processor
    "tokenizer* special_tokens_map.json added_tokens.json vocab.* merges.txt *.model *.tiktoken"
    f" tekken.json *processor_config.json {TEMPLATE} {MORE_TEMPLATES}/*.jinja"
).split()


def config_file(path: str, dtype: torch.dtype, changes: dict[str, object]) -> bytes:
    """Return the base's config.json with `dtype` and `changes`, readable by transformers 4 and
    5."""
    fields = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    config = load_config(path)
    fields.pop("auto_map", None)  # it names Python files, which are not exported
    fields.pop("quantization_config", None)  # weights are exported as floats
    text = fields.get("text_config")
    if isinstance(text, dict):  # the folder has a model of images and text
        fields["text_config"] = _in_both_forms(text, config.get_text_config(), dtype)
    return _json(_in_both_forms(fields, config, dtype) | changes)


def _in_both_forms(fields: dict, config, dtype: torch.dtype) -> dict[str, object]:
    """Return a config's fields in a form that both transformers 4 and 5 read."""
    if "rope_parameters" in fields:  # transformers 5 wrote the file
        fields = fields | fields_of_transformers_4(config)
    name = str(dtype).removeprefix("torch.")
    return fields | dict(dtype=name, torch_dtype=name)


def fields_of_transformers_4(config) -> dict[str, object]:
    """Return the fields that transformers 5 renamed or moved, under their old names."""
    saved = config.to_dict()
    fields = {old: saved[new] for old, new in config.attribute_map.items() if new in saved}
    layers = saved.get("rope_parameters") or {}
    rope = layers.get("full_attention") or layers  # layer types may have different fields
    # The model has no rotary embeddings, or a kind that transformers 4 does not know.
    if "rope_theta" not in rope or rope["rope_type"] == "proportional":
        return fields
    moved = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in moved}
    fields |= moved
    # Qwen3-VL has the default type and further fields, which must stay.
    fields["rope_scaling"] = None if scaling == dict(rope_type="default") else scaling
    if config.model_type == "gpt_neox":
        fields |= dict(rotary_emb_base=rope["rope_theta"], rotary_pct=rope["partial_rotary_factor"])
    if "sliding_attention" in layers:  # Gemma 3
        fields["rope_local_base_freq"] = layers["sliding_attention"]["rope_theta"]
    return fields


def generation_file(
    path: str, tokenizer, prompt_format: str, stop_token_ids: Sequence[int] = ()
) -> bytes:
    """Return the base model's generation_config.json. It lists all tokens that ended a completion
    in training, so that other programs stop there too, and the `prompt_format` for later runs."""
    ends = eos_token_ids(path, tokenizer, prompt_format, stop_token_ids)
    fields = fields_of(path, GENERATION_CONFIG)
    return _json(fields | dict(eos_token_id=ends, prompt_format=prompt_format))


def tokenizer_files(path: str, tokenizer, prompt_format: str) -> dict[str, bytes]:
    """Return the base model's tokenizer files by name, with these changes: the run's chat template;
    the EOS, if only the chat template ends a turn with it; names that transformers 4 does not know;
    no references to Python files, which are not exported; and another class if the named one
    ignores the ids of tokenizer.json."""
    from transformers import AutoTokenizer

    folder = Path(path)
    files = {}
    for pattern in TOKENIZER_FILES:
        for file in sorted(folder.glob(pattern)):
            if file.is_file() and file.suffix != ".py":
                files[str(file.relative_to(folder))] = file.read_bytes()
    stored = json.loads(files[TOKENIZER_CONFIG])
    changes: dict[str, object] = {}
    if stored.get("tokenizer_class") == "TokenizersBackend":  # transformers 4 does not know it
        changes["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(special := stored.get("extra_special_tokens"), list):  # a dict in version 4
        changes |= dict(extra_special_tokens=None, additional_special_tokens=special)
    named = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if named.encode(PROBE) != tokenizer.encode(PROBE):
        changes["tokenizer_class"] = "PreTrainedTokenizerFast"
        changes["model_input_names"] = list(named.model_input_names)
    for name in [name for name in files if name.endswith("_config.json")]:
        change(files, name, dict(auto_map=None))  # it names Python files, which are not exported
    template = tokenizer.chat_template
    if template != named.chat_template:
        files = {name: files[name] for name in files if not name.startswith(MORE_TEMPLATES)}
        changes["chat_template"] = None if TEMPLATE in files else template
        if TEMPLATE in files:
            files[TEMPLATE] = template.encode()
    ends, own_ends = (eos_token_ids(path, tokenizer, x) for x in (prompt_format, "plain"))
    for end in {*ends} - {*own_ends}:
        changes["eos_token"] = tokenizer.convert_ids_to_tokens(end)
        change(files, SPECIAL_TOKENS, dict(eos_token=changes["eos_token"]))
    change(files, TOKENIZER_CONFIG, changes)
    return files


def change(files: dict[str, bytes], name: str, changes: dict[str, object]) -> None:
    """Change fields of a JSON file. If no value changes, the file keeps its exact bytes."""
    if name in files:
        before = json.loads(files[name])
        after = changed(before, changes)
        if after != before:
            files[name] = _json(after)


def changed(fields: dict, changes: dict[str, object]) -> dict:
    """Return the fields with the changes applied. A change to None removes the field."""
    removed = {key for key, value in changes.items() if value is None}
    return {key: value for key, value in (fields | changes).items() if key not in removed}


def _json(value: dict) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
