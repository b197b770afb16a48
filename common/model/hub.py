"""Checkpoints: a built-in model, a folder or a Hugging Face id -> a local folder, its tokenizer and its limits."""

import copy
import json
import os
from pathlib import Path

from common.config.groups import BUILT_IN_MODELS, BaseArgs
from common.data import durable
from common.data.chat import end_of_turn, use_template
from common.model.convert import as_model, checkpoints_in, is_checkpoint
from common.model.loading import load_config, require_unchanged
from common.model.tiny import tiny_model
from common.parallel import distributed


def resolve_model(model: str, flag: str = "--model", weights: bool = True) -> str:
    """Return the local folder of a built-in model, a folder or a Hugging Face id: config.json, tokenizer and, unless
    `weights` is false, safetensors.

    The model of a resumable checkpoint is `hf/` in it, which is written if it does not exist. One rank of each machine
    writes or downloads. Collective. Raises `ValueError` naming `flag` for a model that is not found.
    """
    if model in BUILT_IN_MODELS:
        return tiny_model(model)
    if not model:
        raise ValueError(f"{flag}: the name is empty")
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise ValueError(f"{flag} {model}: no such folder")
        patterns = ["*.json", "*.jinja", "*.txt", "*.model", *["*.safetensors"] * weights]
        folder = Path(download(f"{flag} {model}", model, patterns))
    if weights and is_checkpoint(folder):
        folder = as_model(f"{flag} {model}", folder)
    found = checkpoints_in(folder) or checkpoints_in(folder / "checkpoints")
    if found and not (folder / "config.json").exists():
        raise ValueError(f"{flag} {model}: a folder of checkpoints; name one of them, such as {found[0]}")
    _require_files(f"{flag} {model}", folder, weights)
    return str(folder)


def _require_files(label: str, folder: Path, weights: bool) -> None:
    """Check the files of a model, before a library fails on them. Raises `ValueError` if one is missing or damaged."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ValueError(f"{label}: the folder has no {name}")
    if weights and not any(folder.glob("*.safetensors")):
        raise ValueError(f"{label}: the folder has no *.safetensors weights")
    for file in sorted(folder.glob("*.json")):
        try:
            durable.parse_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{label}: {file.name} is not valid JSON: {distributed.first_line(error)}") from error
    try:
        config = load_config(folder)
    except StrictDataclassError as error:  # its first line has the field, its second the problem
        raise ValueError(f"{label}: config.json: {' '.join(str(error).split())}") from error
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{label}: config.json: {distributed.first_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{label}: {config.model_type} is not a causal language model")
    if weights:
        require_unchanged(label, folder)


def download(label: str, repo_id: str, patterns: list[str]) -> str:
    """Return the folder of a model of the hub, downloaded or in the local cache. Collective. Raises `ValueError`
    that begins with `label`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch() -> str | ValueError:
        try:
            return snapshot_download(repo_id, allow_patterns=patterns)
        except (LocalEntryNotFoundError, OSError) as error:
            if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500:
                return ValueError(f"{label}: no such folder, and no readable model of this name on the hub")
            problem = "no such folder, not in the local cache, and the hub cannot be reached"
            if "*.safetensors" not in patterns:
                problem += "; --dry_run needs only its config.json and tokenizer in a folder"
            return ValueError(f"{label}: {problem}")
        except HFValidationError:
            return ValueError(f"{label}: no such folder, and not a valid Hugging Face id")

    answer = fetch() if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None
    distributed.gather_objects(None)  # other ranks of this machine find it in the cache
    answer = answer or fetch()
    if isinstance(answer, ValueError):
        raise answer
    return answer


def load_tokenizer(path: str, args: BaseArgs | None = None, flag: str = "--model"):
    """Return the tokenizer of a checkpoint, with the `--chat_template` of `args` if given; without it, choose the
    `--prompt_format` of `args`. Raises `ValueError` if the tokenizer cannot be loaded, has no EOS, which ends
    completions, or has more tokens than the model."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    # KeyError: a tokenizer.json of another kind; ImportError: a slow tokenizer that needs further packages
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{flag} {path}: the tokenizer cannot be loaded: {distributed.first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{flag} {path}: the tokenizer has no EOS token")
    size = load_config(path).get_text_config().vocab_size
    if size <= max(tokenizer.get_vocab().values()):
        raise ValueError(f"{flag} {path}: the model's vocabulary of {size} is smaller than its tokenizer's")
    if args is not None and args.chat_template is not None:
        use_template(tokenizer, args.chat_template)
    elif args is not None and (end := chat_end(path, tokenizer)):
        if args.prompt_format != "chat":
            flag = "warning: --prompt_format plain" if args.prompt_format == "plain" else "--prompt_format chat"
            distributed.say(f"{flag}: a chat model, it ends its turns with {end}")
        args.prompt_format = "plain" if args.prompt_format == "plain" else "chat"
    return tokenizer


def chat_end(path: str, tokenizer) -> str | None:
    """Return the token that ends the turns of a chat model: the chat template writes it, and it is an EOS of the model.
    None for a base model, and for a model that was trained by onefile in another format, which its export records."""
    end = end_of_turn(tokenizer) if tokenizer.chat_template is not None else None
    if end is None or end[0] not in eos_token_ids(path, tokenizer, "plain"):
        return None
    return tokenizer.convert_ids_to_tokens(end[0]) if recorded_format(path) in (None, "chat") else None


def recorded_format(path: str) -> str | None:
    """Return the `--prompt_format` of the run that exported a model; None for other models."""
    return _generation_config(path).get("prompt_format")


def _generation_config(path: str) -> dict:
    file = Path(path) / "generation_config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def require_same_tokenizer(flag: str, path: str, tokenizer) -> None:
    """Raise `ValueError` unless the model in `path` has the policy's vocabulary."""
    theirs = load_tokenizer(path, flag=flag)
    if theirs.get_vocab() != tokenizer.get_vocab():
        ours, others = (set(t.get_vocab().items()) for t in (tokenizer, theirs))
        problem = f"another tokenizer than --model's, {len(ours ^ others)} entries differ"
        raise ValueError(f"{flag} {path}: {problem}; name a model of the same family, with the same tokenizer")


def eos_token_ids(path: str, tokenizer, prompt_format: str = "auto") -> list[int]:
    """Return all tokens that end a completion: the EOS of generation config (chat models often have two), config and
    tokenizer and, unless `--prompt_format plain`, the token that ends a turn in the chat template. For base models with
    a template the two often differ."""
    ids = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (file := Path(path) / name).is_file():
            listed = json.loads(file.read_text()).get("eos_token_id")
            ids.update(listed if isinstance(listed, list) else [listed])
    if prompt_format != "plain" and tokenizer.chat_template is not None and (end := end_of_turn(tokenizer)):
        ids.add(end[0])
    return sorted(ids - {None})


def save_ends(path: str, tokenizer, prompt_format: str, folder: Path) -> None:
    """Write the tokenizer and generation_config.json for an export of the checkpoint `path`. Sampling from the export
    ends at all of `eos_token_ids`, as in training, and later runs find the `prompt_format`. An end-of-turn token that
    only the template has becomes the EOS."""
    ends = eos_token_ids(path, tokenizer, prompt_format)
    generation = _generation_config(path) | dict(eos_token_id=ends, prompt_format=prompt_format)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if new := set(ends) - set(eos_token_ids(path, tokenizer, "plain")):
        tokenizer = copy.deepcopy(tokenizer)  # the run keeps its own
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(new.pop())
    tokenizer.save_pretrained(folder)


def context_length(path: str, args: BaseArgs) -> int:
    """Return the maximum length of prompt and completion together: the model's context, or the capacity of a pack."""
    config = load_config(path).get_text_config()
    return min(getattr(config, "max_position_embeddings", args.room + 1), args.room + 1)


def fit_max_length(args: BaseArgs, path: str, room: int) -> None:
    """Set `--max_length`, if it was not given, to at most 2048, the model's context, and `room`: the tokens of a
    sequence that `--pack_tokens` allows. Raises `ValueError` for a `--max_length` beyond the context."""
    context = context_length(path, args)
    if args.max_length is None:
        args.max_length = min(2048, context, room)
        if args.max_length < 2048:
            distributed.say(f"--max_length {args.max_length}: the maximum for the model's context and --pack_tokens")
    if args.max_length > context:
        raise ValueError(f"--max_length {args.max_length}: the model's context has only {context} tokens")
