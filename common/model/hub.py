"""Checkpoints: a built-in model, a folder or a Hugging Face id -> a local folder, its tokenizer and its limits."""

import json
import os
from pathlib import Path

from common.config.groups import BUILT_IN_MODELS, BaseArgs
from common.data import durable
from common.data.chat import end_of_turn, use_template
from common.model.convert import as_model, checkpoints_in, is_checkpoint
from common.model.loading import load_config, one_line_errors, require_unchanged
from common.model.tiny import tiny_model
from common.parallel import distributed

# Largest sizes in a config.json that are not taken for a damaged file.
SIZES = dict(vocab_size=1 << 24, hidden_size=1 << 18, intermediate_size=1 << 20, num_hidden_layers=1 << 10,
             num_attention_heads=1 << 12, num_key_value_heads=1 << 12, head_dim=1 << 14)  # fmt: skip


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

    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(f"{label}: {_adapter_advice(folder)}")
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ValueError(f"{label}: the folder has no {name}")
    if weights and not any(folder.glob("*.safetensors")):
        raise ValueError(f"{label}: the folder has no *.safetensors weights")
    for file in sorted(folder.glob("*.json")):
        try:
            content = durable.parse_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{label}: {file.name} is not valid JSON: {distributed.first_line(error)}") from error
        if file.name == "config.json" and not (
            isinstance(content, dict) and isinstance(content.get("model_type"), str)
        ):
            raise ValueError(f"{label}: config.json names no model_type")
        if file.name in ("tokenizer_config.json", "generation_config.json") and not isinstance(content, dict):
            raise ValueError(f"{label}: {file.name} is not an object")
        if file.name == "generation_config.json" and not _is_eos(content.get("eos_token_id")):
            problem = f"eos_token_id {content['eos_token_id']!r} is no token id, nor a list"
            raise ValueError(f"{label}: {file.name}: {problem}")
    try:
        config = load_config(folder)
    except StrictDataclassError as error:  # its first line has the field, its second the problem
        raise ValueError(f"{label}: config.json: {' '.join(str(error).split())}") from error
    except (OSError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError(f"{label}: config.json: {distributed.first_line(error)}") from error
    for name, most in SIZES.items():
        size = getattr(config.get_text_config(), name, None)
        if isinstance(size, int) and not 0 < size <= most:
            raise ValueError(f"{label}: config.json: {name} {size} must be in 1 to {most}")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{label}: {config.model_type} is not a causal language model")
    if getattr(config, "quantization_config", None):  # the weights would be read without their scales
        raise ValueError(f"{label}: config.json: its weights are quantized; name the model that it was made from")
    if weights:
        require_unchanged(label, folder)
        _require_single_weights(label, folder)


def _is_eos(value: object) -> bool:
    """Return whether a value is one token id, a list of them, or None."""
    return value is None or all(type(one) is int for one in (value if isinstance(value, list) else [value]))


def _require_single_weights(label: str, folder: Path) -> None:
    """Raise `ValueError` if two files have a weight of the same name, of which an arbitrary one would be read."""
    from safetensors import safe_open

    places: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with one_line_errors(label), safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name in places:
                    both = f"{places[name]} and {file.name} both have {name}"
                    raise ValueError(f"{label}: {both}; delete one of the files")
                places[name] = file.name


def _adapter_advice(folder: Path) -> str:
    """Return what to use in place of a folder that has only an adapter."""
    try:
        config = durable.parse_json((folder / "adapter_config.json").read_text(encoding="utf-8"))
        base, rank = config["base_model_name_or_path"], config["r"]
    except (OSError, ValueError, KeyError, TypeError):
        base, rank = "BASE", "R"
    merged = folder.parent / "hf"
    merged = f"name {merged}, which has it merged, or " if (merged / "config.json").is_file() else ""
    return (
        f"an adapter, not a model; {merged}train it further with --model {base} --lora_rank {rank} --adapter {folder}"
    )


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
        if not _reads_its_file(tokenizer, path):
            tokenizer = _tokenizer_of_file(tokenizer, path, flag)
    # KeyError: a tokenizer.json of another kind; ImportError: a slow tokenizer that needs further packages
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{flag} {path}: the tokenizer cannot be loaded: {distributed.first_line(error)}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{flag} {path}: {type(tokenizer).__name__} has no places of tokens; save a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{flag} {path}: the tokenizer has no EOS token")
    size = load_config(path).get_text_config().vocab_size
    beyond = {i for i in tokenizer.get_vocab().values() if i >= size}
    if beyond - tokenizer.added_tokens_decoder.keys():
        raise ValueError(f"{flag} {path}: the model's vocabulary of {size} is smaller than its tokenizer's")
    if beyond:  # Gemma 3 of text has no embedding for the tokenizer's image token
        tokenizer.model_vocab_size = size
    if args is not None and args.chat_template is not None:
        use_template(tokenizer, args.chat_template)
    elif args is not None and (end := chat_end(path, tokenizer)):
        if args.prompt_format != "chat":
            flag = "warning: --prompt_format plain" if args.prompt_format == "plain" else "--prompt_format chat"
            distributed.say(f"{flag}: a chat model, it ends its turns with {end}")
        args.prompt_format = "plain" if args.prompt_format == "plain" else "chat"
    return tokenizer


def _reads_its_file(tokenizer, path: str) -> bool:
    """Return whether the tokenizer gives a text the ids that its tokenizer.json gives it. Transformers 5 chooses the
    class of some model types, such as qwen2, whatever the file is."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = Path(path) / "tokenizer.json"
    has_other_class = getattr(tokenizer, "is_fast", False) and type(tokenizer) is not PreTrainedTokenizerFast
    if not (file.is_file() and has_other_class):
        return True
    text = "It's 12,345.6 é\n\n  {x: 字}\tEND"
    ids = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    return tokenizer(text, add_special_tokens=False)["input_ids"] == ids


def _tokenizer_of_file(tokenizer, path: str, flag: str):
    """Return the tokenizer of tokenizer.json in place of `tokenizer`, and say so."""
    from transformers import PreTrainedTokenizerFast

    name = type(tokenizer).__name__
    distributed.say(f"{flag} {path}: its tokenizer.json is used; {name}, transformers' choice, has other ids")
    return PreTrainedTokenizerFast.from_pretrained(path)


def chat_end(path: str, tokenizer) -> str | None:
    """Return the token that ends the turns of a chat model: the chat template writes it, and it is an EOS of the model.
    None for a base model, and for a model that was trained by onefile in another format, which its export records."""
    end = end_of_turn(tokenizer) if tokenizer.chat_template is not None else None
    if end is None or end not in eos_token_ids(path, tokenizer, "plain"):
        return None
    return tokenizer.convert_ids_to_tokens(end) if recorded_format(path) in (None, "chat") else None


def recorded_format(path: str) -> str | None:
    """Return the `--prompt_format` of the run that exported a model; None for other models."""
    return load_generation_config(path).get("prompt_format")


def load_generation_config(path: str) -> dict:
    """Return the fields of generation_config.json, none without the file."""
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
    if prompt_format != "plain" and tokenizer.chat_template is not None and (end := end_of_turn(tokenizer)) is not None:
        ids.add(end)
    return sorted(ids - {None})


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
