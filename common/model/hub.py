"""A model by its name (`--model`): its local folder, its tokenizer and its maximum length."""

import contextlib
import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from common import durable
from common.config.flags import ADAPTER_CONFIG, Limit
from common.config.groups import BUILT_IN_MODELS, ModelArgs, TrainArgs
from common.model.loading import (
    files_of,
    load_config,
    method_of_quantization,
    named_errors,
    require_unchanged,
)
from common.parallel import distributed

BESIDE_WEIGHTS = ["*.json", "*.jinja", "*.txt", "*.model"]  # config and tokenizer
GENERATION_CONFIG = "generation_config.json"
STATE = "state.json"  # a checkpoint of a run has this file
MOST_CHARACTERS = 100  # a tokenizer may make so many of one character; more could fill the memory
Args = TypeVar("Args", bound=TrainArgs)


def resolve_model(model: str, flag: str = "--model", weights: bool = True) -> str:
    """Return the local folder of `model`: a built-in model, a folder, or a Hugging Face id, also as
    `id@revision`. For a checkpoint of a run it is `hf/` in it. The folder has config.json, a
    tokenizer and, if `weights`, safetensors; else `ValueError`, naming `flag`. Collective."""
    if model in BUILT_IN_MODELS:
        from common.model.tiny import tiny_model

        return tiny_model(model)
    if not model:
        raise ValueError(f"{flag} '': the name is empty; leave the flag out, or name a model")
    with named_errors(f"{flag} {model}"):
        folder = Path(os.path.expanduser(model))
        if not folder.is_dir():
            folder = _from_hub(model, weights)
        if _is_checkpoint(folder):
            folder = folder / "hf"
        files = [folder / "config.json", folder / "tokenizer_config.json"]
        for file in files + (files_of(folder) if weights else []):
            if not file.is_file():
                refuse_adapter(model, flag, folder)
                trained = folder / "hf"  # if `folder` is that of a run
                advice = f"; name the model in it, {trained}" if trained.is_dir() else ""
                raise ValueError(f"the folder has no {file.name}{advice}")
        with named_errors("config.json"):
            config = load_config(folder)
        # We would read quantized weights without their scales.
        methods = {method_of_quantization(part) for part in (config, config.get_text_config())}
        if methods - {None, "mxfp4"}:
            raise ValueError("config.json: its weights are quantized; name the base")
        if weights:
            require_unchanged(folder)
    return str(folder)


def refuse_adapter(model: str, flag: str, folder: Path) -> None:
    """If the folder has an adapter, raise a `ValueError` that says what to name instead."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    base = fields_of(str(folder), ADAPTER_CONFIG).get("base_model_name_or_path")
    merged = folder.parent / ("best" if folder.name == "best_adapter" else "hf")
    advice = f"name the merged model{f', {merged}' if merged.is_dir() else ''}"
    if flag == "--model":
        advice = f"train it on with --model {base} --adapter {model}, or {advice}"
    raise ValueError(f"an adapter of {base}, not a model; {advice}")


def _from_hub(model: str, weights: bool) -> Path:
    """Return the folder of a hub's model in the local cache, which one rank of each machine fills.
    Further copies of the weights, in other formats, are not downloaded. Collective."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    repo_id, _, revision = model.partition("@")
    is_path = repo_id.startswith((".", "/", "~")) or repo_id.count("/") > 1
    if is_path or Path(model).exists():
        raise ValueError("no such folder")

    def download() -> Path:
        options = dict(revision=revision or None, allow_patterns=BESIDE_WEIGHTS)
        try:
            folder = Path(snapshot_download(repo_id, **options))
            if weights:  # from the same commit, which is the folder's name
                names = [file.name for file in files_of(folder)]
                snapshot_download(repo_id, revision=folder.name, allow_patterns=names)
            return folder
        except Exception as error:
            problem, advice = "no such folder, and not on the hub", ""
            if not isinstance(error, HfHubHTTPError | HFValidationError):  # the hub gave no answer
                problem = "no such folder, and the hub cannot be reached"
                advice = "; name a folder (a dry run needs config.json and tokenizer files alone)"
            raise ValueError(f"{problem}: {distributed.first_line(error)}{advice}") from error

    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        download()
    distributed.barrier()
    return download()


def local_folder(model: str) -> Path | None:
    """Return the folder of a model, or of the local cache if it is a model of the hub, without
    downloading. None for a built-in model, or if there is no such folder."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        return folder / "hf" if _is_checkpoint(folder) else folder
    repo_id, _, revision = model.partition("@")
    if model in BUILT_IN_MODELS or repo_id.count("/") != 1:
        return None
    file = None
    with contextlib.suppress(ValueError):  # not a valid name of a repository
        file = try_to_load_from_cache(repo_id, "config.json", revision=revision or None)
    return Path(file).parent if isinstance(file, str) else None


def _is_checkpoint(folder: Path) -> bool:
    return (folder / STATE).is_file() and (folder / durable.CHECKSUMS).is_file()


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a run's `checkpoints/`, newest first."""
    paths = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{1,15}", path.name)]
    folders = [path for path in paths if path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def fields_of(path: str, name: str) -> dict:
    """Return the fields of a JSON file in a folder; {} if there is no such file."""
    file = Path(path) / name
    if not file.is_file():
        return {}
    with named_errors(f"{file}: no JSON object"):
        return {**json.loads(file.read_text(encoding="utf-8"))}


# ---- the tokenizer ----


def read_tokenizer(path: str, flag: str = "--model"):
    """Return the tokenizer of a folder. Raises `ValueError` if it does not fit the model."""
    from transformers import PreTrainedTokenizerFast

    with named_errors(f"{flag} {path}"):
        with named_errors("the tokenizer cannot be loaded"):
            # For some model types, such as qwen2, AutoTokenizer of transformers 5 chooses a class
            # that ignores the ids of tokenizer.json.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        if normalizer := tokenizer.backend_tokenizer.normalizer:
            longest = _growth(json.loads(normalizer.__getstate__()))
            if longest > MOST_CHARACTERS:
                problem = f"its normalizer may make {longest} characters of one"
                raise ValueError(f"tokenizer.json: {problem}; take its replacements out")
        with named_errors("the tokenizer cannot be used"):  # its config may have any values
            tokenizer.decode(tokenizer("a")["input_ids"])
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no EOS token")
        size = vocabulary_size(path)
        beyond = {i for i in tokenizer.get_vocab().values() if i >= size}
        if beyond - tokenizer.added_tokens_decoder.keys():
            raise ValueError(f"its vocabulary of {size} is smaller than its tokenizer's")
        ids_of_eos(path)  # refuses bad ones now, not at the first save
    return tokenizer


def vocabulary_size(path: str) -> int:
    """Return the number of token ids that the model in a folder has."""
    return load_config(path).get_text_config().vocab_size


def _growth(normalizer: dict) -> int:
    """Return how many characters a normalizer in tokenizer.json can at most make of one."""
    if normalizer["type"] == "Sequence":
        return math.prod(map(_growth, normalizer["normalizers"]))
    added = normalizer.get("content", normalizer.get("prepend", ""))
    replaced = normalizer.get("pattern", {}).get("String") or "x"
    return math.ceil(max(1, len(added)) / len(replaced))


def ids_of_eos(path: str) -> set[int]:
    """Return the EOS tokens of config.json and generation_config.json; chat models often have two.
    Raises `ValueError` for ids beyond the vocabulary."""
    ids: set[int] = set()
    size = vocabulary_size(path)
    for name in (GENERATION_CONFIG, "config.json"):
        eos = fields_of(path, name).get("eos_token_id")
        eos = eos if isinstance(eos, list) else [eos]
        if not all(i is None or type(i) is int and 0 <= i < size for i in eos):
            problem = f"eos_token_id {eos} are no token ids of the model, which end at {size - 1}"
            raise ValueError(f"{name}: {problem}")
        ids.update(i for i in eos if i is not None)
    return ids


def require_same_tokenizer(flag: str, path: str, tokenizer) -> None:
    """Raise `ValueError` unless the model in `path` has the policy's vocabulary."""
    vocabulary = tokenizer.get_vocab().items()
    if differing := read_tokenizer(path, flag).get_vocab().items() ^ vocabulary:
        problem = f"another tokenizer than --model's, {len(differing)} entries differ"
        advice = "name a model of the same family, with the same tokenizer"
        raise ValueError(f"{flag} {path}: {problem}; {advice}")


def model_limit(path: str) -> Limit:
    """Return the length of the model's context as a limit that messages can name."""
    config = load_config(path).get_text_config()
    tokens = getattr(config, "max_position_embeddings", sys.maxsize)
    return Limit(tokens, f"the model's context of {tokens} tokens")


def longest_sequence(path: str, args: ModelArgs, sequences: int = 1) -> Limit:
    """Return how long a sequence may be: as long as the model's context or, if that is shorter, as
    its part of a pack, which it shares with `sequences` - 1 others."""
    tokens, flag = args.pack_limit
    # A pack counts targets, and the first token of a sequence is not a target.
    return min(model_limit(path), Limit(tokens // sequences + 1, flag))


def fit_max_length(args: Args, path: str, earlier: dict[str, Any]) -> Args:
    """Return the flags, with `--max_length` of `LengthArgs` filled in. If it is not given, a
    resumed run keeps the one in its `earlier` flags. A new run takes 2048, or less if the model's
    context is shorter or the sequences of a row would not fit in a pack."""
    max_length = args.max_length or earlier.get("max_length")
    context, pack = model_limit(path), args.pack_limit
    if max_length is None:
        limit = min(context, Limit(pack.tokens // args.SEQUENCES_TOGETHER, pack.flag))
        max_length = min(2048, limit.tokens)
        if max_length < 2048:
            distributed.say(f"--max_length {max_length}: the limit of {limit.flag}")
    pack.require(max_length, args.SEQUENCES_TOGETHER)
    if max_length > context.tokens:
        problem = f"the model's context has {context.tokens} tokens"
        raise ValueError(f"--max_length {max_length}: {problem}")
    return replace(args, max_length=max_length)  # pyrefly: ignore[unexpected-keyword]
