"""The model that a flag names as a local folder, its tokenizer and its limits."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config.extra import extra
from common.config.groups import BUILT_IN_MODELS, BaseArgs, TrainArgs
from common.data.chat import end_of_turn, use_template
from common.model.loading import load_config
from common.model.model_folder import find_model, library_errors
from common.model.tiny import tiny_model
from common.parallel import distributed


def resolve_model(
    model: str,
    flag: str = "--model",
    weights: bool = True,
    rope_factor: float | None = None,
) -> str:
    """Return the local folder of a built-in model, a folder or a Hugging Face id, also as
    `id@revision`: config.json, tokenizer and, unless `weights` is false, safetensors. With
    `rope_factor`, return a folder of the same model with scaled rotary embeddings.

    The model of a resumable checkpoint is `hf/` in it. One rank of each machine downloads.
    Collective. Raises `ValueError` naming `flag` for a model that is not found."""
    if not model:
        raise ValueError(f"{flag}: the name is empty")
    if rope_factor is not None:
        with extra("architectures", f"--rope_factor {rope_factor:g}"):
            from extras.architectures.rope import scaled_folder
        return scaled_folder(resolve_model(model, flag, weights), rope_factor)
    if model == "tiny-images":
        with extra("images", "--model tiny-images"):
            from extras.images.tiny_images import tiny_images
        return tiny_images()
    if model in BUILT_IN_MODELS:
        return tiny_model(model)
    return find_model(model, f"{flag} {model}", weights)


def load_tokenizer(path: str, args: BaseArgs | None = None, flag: str = "--model"):
    """Return the tokenizer of a checkpoint, with the `--chat_template` of `args` if given; without
    it, `prompt_format` of the tokenizer is the `--prompt_format` of `args`, where auto is chat for
    a chat model. Raises `ValueError` if the tokenizer cannot be loaded, has no EOS, which ends
    completions, or has more tokens than the model."""
    from transformers import PreTrainedTokenizerFast

    label = f"{flag} {path}"
    with library_errors(f"{label}: the tokenizer cannot be loaded"):
        # Not AutoTokenizer: for some model types, such as qwen2, transformers 5 chooses a class
        # with other ids than those of tokenizer.json.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{label}: the tokenizer has no EOS token")
    size = load_config(path).get_text_config().vocab_size
    beyond = {i for i in tokenizer.get_vocab().values() if i >= size}
    if beyond - tokenizer.added_tokens_decoder.keys():
        raise ValueError(
            f"{label}: the model's vocabulary of {size} is smaller than its tokenizer's"
        )
    if beyond:  # Gemma 3 of text has no embedding for the tokenizer's image token
        tokenizer.model_vocab_size = size
    if args is None:
        return tokenizer
    last_id = max(args.stop_token_ids, default=0)
    if last_id >= size:
        raise ValueError(f"--stop_token_ids {last_id}: the ids of the model end at {size - 1}")
    tokenizer.prompt_format = args.prompt_format
    if args.chat_template is not None:
        use_template(tokenizer, args.chat_template)
    elif (end := chat_end(path, tokenizer)) and args.prompt_format != "chat":
        if args.prompt_format == "auto":
            tokenizer.prompt_format = "chat"
        warning = "warning: " if args.prompt_format == "plain" else ""
        chosen = f"--prompt_format {tokenizer.prompt_format}"
        distributed.say(f"{warning}{chosen}: a chat model, it ends its turns with {end}")
    return tokenizer


def chat_end(path: str, tokenizer) -> str | None:
    """Return the token that ends the turns of a chat model: the chat template writes it, and it is
    an EOS of the model. None for a base model, and for a model that was trained by onefile in
    another format, which its export records."""
    end = _template_end(tokenizer)
    if end is None or end not in eos_token_ids(path, tokenizer, "plain"):
        return None
    if recorded_format(path) not in (None, "chat"):
        return None
    return tokenizer.convert_ids_to_tokens(end)


def _template_end(tokenizer) -> int | None:
    """Return the token that ends a turn in the chat template, if there is one."""
    return None if tokenizer.chat_template is None else end_of_turn(tokenizer)


def recorded_format(path: str) -> str | None:
    """Return the `--prompt_format` of the run that exported a model; None for other models."""
    return load_generation_config(path).get("prompt_format")


def load_generation_config(path: str) -> dict:
    """Return the fields of generation_config.json, none without the file."""
    return _fields(path, "generation_config.json")


def _fields(path: str, name: str) -> dict:
    file = Path(path) / name
    if not file.is_file():
        return {}
    with library_errors(f"{file}: no JSON object"):
        return {**json.loads(file.read_text(encoding="utf-8"))}


def require_same_tokenizer(flag: str, path: str, tokenizer, otherwise: str = "") -> None:
    """Raise `ValueError` unless the model in `path` has the policy's vocabulary."""
    vocabulary = tokenizer.get_vocab().items()
    differing = load_tokenizer(path, flag=flag).get_vocab().items() ^ vocabulary
    if differing:
        raise ValueError(
            f"{flag} {path}: another tokenizer than --model's, {len(differing)} entries differ;"
            f" name a model of the same family, with the same tokenizer{otherwise}"
        )


def eos_token_ids(
    path: str, tokenizer, prompt_format: str = "auto", stop_token_ids: Sequence[int] = ()
) -> list[int]:
    """Return all tokens that end a completion: the EOS of generation config (chat models often have
    two), config and tokenizer, `--stop_token_ids` and, unless `--prompt_format plain`, the tokens
    that end a turn in the chat template, without and with tool calls. For base models with a
    template they often differ from the EOS."""
    ids = {tokenizer.eos_token_id, *stop_token_ids}
    if prompt_format != "plain" and tokenizer.chat_template is not None:
        ids |= {_template_end(tokenizer), end_of_turn(tokenizer, calls=True)}
    for name in ("generation_config.json", "config.json"):
        eos = _fields(path, name).get("eos_token_id")
        if isinstance(eos, int | None):
            eos = [eos]
        if not (isinstance(eos, list) and all(isinstance(i, int | None) for i in eos)):
            raise ValueError(f"{path}/{name}: eos_token_id {eos!r} is no token id, nor a list")
        ids.update(eos)
    return sorted(ids - {None})


def context_length(path: str, args: BaseArgs, sequences: int = 1) -> int:
    """Return the maximum length of prompt and completion together: the model's context, or what a
    pack holds of `sequences` that share it."""
    config = load_config(path).get_text_config()
    longest = args.pack_capacity // sequences + 1
    return min(getattr(config, "max_position_embeddings", longest), longest)


def fit_max_length(
    args: TrainArgs, path: str, earlier: dict[str, Any], sequences: int = 1
) -> TrainArgs:
    """Return the flags with `--max_length`. If it is not given, a resumed run has that of its
    `earlier` flags; others have 2048, or less if the model's context or a pack with so many
    `sequences` is smaller. Raises `ValueError` for one that is too large for either."""
    max_length = args.max_length or earlier.get("max_length")
    context = context_length(path, args)
    if max_length is None:
        max_length = min(2048, context, args.pack_capacity // sequences)
        if max_length < 2048:
            what = "the maximum for the model's context and --pack_tokens"
            distributed.say(f"--max_length {max_length}: {what}")
    args.require_fit(max_length, sequences)
    if max_length > context:
        raise ValueError(
            f"--max_length {max_length}: the model's context has only {context} tokens"
        )
    return replace(args, max_length=max_length)  # pyrefly: ignore[unexpected-keyword]
