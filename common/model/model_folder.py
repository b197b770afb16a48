"""The folder of a model that is not built in: it is found or downloaded, and its files are checked
before a library fails on them."""

import os
from pathlib import Path

from common.model.checkpoint_files import MANIFEST, checkpoints_in
from common.model.flops import differs_by_layer
from common.model.loading import load_config, named_errors, one_line_errors, require_unchanged
from common.model.text_part import load_text_config, method_of_quantization
from common.parallel import distributed, durable

# Largest sizes in a config.json that are not taken for a damaged file.
SIZES = dict(
    vocab_size=1 << 24,
    hidden_size=1 << 18,
    intermediate_size=1 << 20,
    num_hidden_layers=1 << 10,
    num_attention_heads=1 << 12,
    num_key_value_heads=1 << 12,
    head_dim=1 << 14,
)


def find_model(model: str, label: str, weights: bool) -> str:
    """Return the local folder of a model: see `hub.resolve_model`. `label` begins errors.
    Collective."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise ValueError(f"{label}: no such folder")
        folder = _download(label, model, weights)
    if (folder / MANIFEST).is_file():  # a checkpoint of a run
        folder = folder / "hf"
    checkpoints = checkpoints_in(folder) or checkpoints_in(folder / "checkpoints")
    if checkpoints and not (folder / "config.json").exists():
        raise ValueError(
            f"{label}: a folder of checkpoints; name one of them, such as {checkpoints[0]}"
        )
    _require_files(label, folder, weights)
    _require_supported(label, folder)
    if weights:
        require_unchanged(label, folder)
        _require_single_weights(label, folder)
    return str(folder)


def _download(label: str, repo_id: str, weights: bool) -> Path:
    """Return the folder of a model of the hub, downloaded or in the local cache. One rank of each
    machine downloads. Collective. Raises `ValueError`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.jinja", "*.txt", "*.model"]
    if weights:
        patterns.append("*.safetensors")

    def fetch() -> str | ValueError:
        try:
            return snapshot_download(repo_id, allow_patterns=patterns)
        except HFValidationError:
            problem = "and not a valid Hugging Face id"
        except (LocalEntryNotFoundError, OSError) as error:
            response = error.response if isinstance(error, HfHubHTTPError) else None
            if response is not None and response.status_code < 500:
                problem = "and no readable model of this name on the hub"
            else:
                problem = "not in the local cache, and the hub cannot be reached"
                if not weights:
                    problem += "; --dry_run needs only its config.json and tokenizer in a folder"
        return ValueError(f"{label}: no such folder, {problem}")

    answer = fetch() if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None
    distributed.gather_objects(None)  # other ranks of this machine find it in the cache
    answer = answer or fetch()
    if isinstance(answer, ValueError):
        raise answer
    return Path(answer)


def _require_files(label: str, folder: Path, weights: bool) -> None:
    """Raise `ValueError` if a file of a model is missing, or no valid JSON."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(f"{label}: {_adapter_advice(folder)}")
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ValueError(f"{label}: the folder has no {name}")
    if weights and not any(folder.glob("*.safetensors")):
        raise ValueError(f"{label}: the folder has no *.safetensors weights")
    contents = {}
    for file in sorted(folder.glob("*.json")):
        with named_errors(f"{label}: {file.name} is not valid JSON", OSError, ValueError):
            contents[file.name] = durable.parse_json(file.read_text(encoding="utf-8"))
    config = contents["config.json"]
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{label}: config.json names no model_type")
    for name in ("tokenizer_config.json", "generation_config.json"):
        if not isinstance(contents.get(name, {}), dict):
            raise ValueError(f"{label}: {name} is not an object")
    eos = contents.get("generation_config.json", {}).get("eos_token_id")
    if not (eos is None or all(type(i) is int for i in (eos if isinstance(eos, list) else [eos]))):
        raise ValueError(
            f"{label}: generation_config.json: eos_token_id {eos!r} is no token id, nor a list"
        )


def _require_supported(label: str, folder: Path) -> None:
    """Raise `ValueError` if config.json does not describe a causal language model."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    label = f"{label}: config.json"
    invalid = (OSError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError)
    try:
        with named_errors(label, *invalid):
            config = load_text_config(folder)
    except StrictDataclassError as error:  # its first line has the field, its second the problem
        raise ValueError(f"{label}: {' '.join(str(error).split())}") from error
    for name, largest in SIZES.items():
        size = None if differs_by_layer(config, name) else getattr(config, name, None)
        if isinstance(size, int) and not 0 < size <= largest:
            raise ValueError(f"{label}: {name} {size} must be in 1 to {largest}")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_type = load_config(folder).model_type
        raise ValueError(f"{label}: {model_type} is not a causal language model")
    # The weights would be read without their scales.
    methods = [method_of_quantization(part) for part in (load_config(folder), config)]
    if any(method not in (None, "mxfp4") for method in methods):
        raise ValueError(
            f"{label}: its weights are quantized; name the model that it was made from"
        )


def _require_single_weights(label: str, folder: Path) -> None:
    """Raise `ValueError` if two files have a weight of the same name, of which an arbitrary one
    would be read."""
    from safetensors import safe_open

    files: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with one_line_errors(label), safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name in files:
                    raise ValueError(
                        f"{label}: {files[name]} and {file.name} both have {name}; delete one of"
                        " the files"
                    )
                files[name] = file.name


def _adapter_advice(folder: Path) -> str:
    """Return what to use in place of a folder that has only an adapter."""
    try:
        config = durable.parse_json((folder / "adapter_config.json").read_text(encoding="utf-8"))
        train = f"--model {config['base_model_name_or_path']} --lora_rank {config['r']}"
    except (OSError, ValueError, KeyError, TypeError):
        train = "--model BASE --lora_rank R"
    merged = folder.parent / "hf"
    has_merged = (merged / "config.json").is_file()
    advice = f"name {merged}, which has it merged, or " if has_merged else ""
    return f"an adapter, not a model; {advice}train it further with {train} --adapter {folder}"
