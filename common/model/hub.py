"""Finding a checkpoint: `tiny`, a folder or a Hugging Face id -> a local folder and its tokenizer."""

import copy
import json
import os
from pathlib import Path

from common.config.groups import BaseArgs
from common.data.chat import end_of_turn, use_template
from common.model.convert import as_model, checkpoints_in, is_checkpoint
from common.model.tiny import tiny_model
from common.parallel import distributed


def resolve_model(model: str, flag: str = "--model") -> str:
    """`tiny`, a folder or a Hugging Face id -> a local folder with config.json, safetensors and a tokenizer.

    A folder may be a resumable checkpoint: then it is `hf/` in it, written if there is none. One rank of each machine
    writes or downloads, the others wait. Raises `ValueError` naming `flag` if there is no such model
    here or there.
    """
    if model == "tiny":
        return tiny_model()
    if not model:
        raise ValueError(f"{flag}: an empty name")
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise ValueError(f"{flag} {model}: no such folder")
        patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
        folder = Path(download(f"{flag} {model}", model, "model", patterns))
    if is_checkpoint(folder):
        folder = as_model(f"{flag} {model}", folder)
    found = checkpoints_in(folder) or checkpoints_in(folder / "checkpoints")
    if found and not (folder / "config.json").exists():
        raise ValueError(f"{flag} {model}: a folder of checkpoints; name one of them, such as {found[0]}")
    _require_checkpoint(f"{flag} {model}", folder)
    return str(folder)


def _require_checkpoint(flag: str, folder: Path) -> None:
    """The files that everything later takes for granted; damaged ones would fail deep inside a library."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ValueError(f"{flag}: the folder has no {name}")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{flag}: the folder has no *.safetensors weights")
    for file in sorted(folder.glob("*.json")):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{flag}: {file.name} is not valid JSON: {distributed.first_line(error)}") from error
    try:
        config = AutoConfig.from_pretrained(folder)
    except StrictDataclassError as error:  # its first line names the field, its second says what is wrong with it
        raise ValueError(f"{flag}: config.json: {' '.join(str(error).split())}") from error
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{flag}: config.json: {distributed.first_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{flag}: {config.model_type} is not a causal language model")


def download(flag: str, repo_id: str, repo_type: str, patterns: list[str] | None = None) -> str:
    """Fetch a repository from the hub, or find it in the local cache. Raises `ValueError` naming `flag`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch() -> str | ValueError:
        try:
            return snapshot_download(repo_id, repo_type=repo_type, allow_patterns=patterns)
        except (LocalEntryNotFoundError, OSError) as error:
            if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500:
                return ValueError(f"{flag}: no such folder, and no such {repo_type} on the hub that you may read")
            return ValueError(f"{flag}: no such folder, not in the local cache, and the hub cannot be reached")
        except HFValidationError:
            return ValueError(f"{flag}: no such folder, and not a valid Hugging Face id")

    answer = fetch() if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None
    distributed.gather_objects(None)  # the others of this machine find it in the cache
    answer = answer or fetch()
    if isinstance(answer, ValueError):
        raise answer
    return answer


def load_tokenizer(path: str, args: BaseArgs | None = None, flag: str = "--model"):
    """The checkpoint's tokenizer, of the policy with the `--chat_template` of its `args`. Raises `ValueError` if it
    cannot be loaded, has no EOS, without which no completion ends, or has more tokens than the model knows."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    # a KeyError is a tokenizer.json of another kind; an ImportError a slow tokenizer that needs packages of its own
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{flag} {path}: the tokenizer cannot be loaded: {distributed.first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{flag} {path}: the tokenizer has no EOS token")
    size = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    if size <= max(tokenizer.get_vocab().values()):
        raise ValueError(f"{flag} {path}: its vocabulary of {size} is too small for its own tokenizer")
    if args is not None and args.chat_template is not None:
        use_template(tokenizer, args.chat_template)
    return tokenizer


def require_same_tokenizer(flag: str, path: str, tokenizer) -> None:
    """Raises `ValueError` unless the model in `path` reads the policy's token ids as the policy does."""
    theirs = load_tokenizer(path, flag=flag)
    if theirs.get_vocab() != tokenizer.get_vocab():
        ours, others = (set(t.get_vocab().items()) for t in (tokenizer, theirs))
        what = f"another tokenizer than --model's, {len(ours ^ others)} entries differ"
        raise ValueError(f"{flag} {path}: {what}; name a model with the same one, of the same family")


def eos_token_ids(path: str, tokenizer, prompt_format: str = "auto") -> list[int]:
    """Every token that ends a completion: the generation config's (chat models often have two), the config's, the
    tokenizer's and, unless `--prompt_format plain`, the one that ends a turn in the chat template: base models often
    have a template and another EOS."""
    ids = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (file := Path(path) / name).is_file():
            listed = json.loads(file.read_text()).get("eos_token_id")
            ids.update(listed if isinstance(listed, list) else [listed])
    if prompt_format != "plain" and tokenizer.chat_template is not None and (end := end_of_turn(tokenizer)):
        ids.add(end[0])
    return sorted(ids - {None})


def save_ends(path: str, tokenizer, prompt_format: str, folder: Path) -> None:
    """The tokenizer and generation_config.json of an export of the checkpoint `path`, such that sampling from it ends
    where training does: all of `eos_token_ids`, and where the chat template's is new among them, it is the EOS."""
    own, ends = Path(path) / "generation_config.json", eos_token_ids(path, tokenizer, prompt_format)
    generation = json.loads(own.read_text()) if own.is_file() else {}
    (folder / own.name).write_text(json.dumps(generation | dict(eos_token_id=ends), indent=2) + "\n")
    if new := set(ends) - set(eos_token_ids(path, tokenizer, "plain")):
        tokenizer = copy.deepcopy(tokenizer)  # the run goes on with its own
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(new.pop())
    tokenizer.save_pretrained(folder)


def context_length(path: str, args: BaseArgs) -> int:
    """Most tokens a sequence may have, prompt and completion together: the model's context, or what one pack holds."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config()
    return min(getattr(config, "max_position_embeddings", args.room + 1), args.room + 1)


def fit_max_length(args: BaseArgs, path: str, room: int) -> None:
    """`--max_length`, where it was not given, becomes 2048, or as much as the model's context and the `room` that
    `--pack_tokens` leaves a sequence allow, in one line. Raises `ValueError` for one that is beyond the context."""
    context = context_length(path, args)
    if args.max_length is None:
        args.max_length = min(2048, context, room)
        if args.max_length < 2048 and distributed.is_main():
            print(f"--max_length {args.max_length}: all that the model's context and --pack_tokens have room for")
    if args.max_length > context:
        raise ValueError(f"--max_length {args.max_length} is beyond the model's context, {context} tokens")
