"""Load the tokenizer with its chat template. Find out which tokens end completions, and whether the
model is a chat model."""

from collections.abc import Sequence
from pathlib import Path

from common.config.groups import DataArgs
from common.model.hub import GENERATION_CONFIG, fields_of, ids_of_eos, read_tokenizer
from common.parallel import distributed
from common.text.chat import end_of_turn, use_template


def load_tokenizer(path: str, args: DataArgs | None = None, flag: str = "--model"):
    """Return the tokenizer in a folder. Give `args` for the policy's tokenizer: it then gets the
    `--chat_template`, or, if it is a chat model's, a printed line says which `--prompt_format` is
    used (as a warning if plain)."""
    tokenizer = read_tokenizer(path, flag)
    if args is None:
        return tokenizer
    if args.chat_template is not None:
        use_template(tokenizer, args.chat_template)
    elif (end := chat_end(tokenizer)) and args.prompt_format != "chat":
        warning = "warning: " if args.prompt_format == "plain" else ""
        chosen = f"--prompt_format {format_of(tokenizer, args)}"
        distributed.say(f"{warning}{chosen}: a chat model, it ends its turns with {end}")
    return tokenizer


def format_of(tokenizer, args: DataArgs) -> str:
    """Return `--prompt_format`. For a chat model with its own template, auto becomes chat."""
    is_open = args.prompt_format == "auto" and args.chat_template is None
    return "chat" if is_open and chat_end(tokenizer) else args.prompt_format


def model_of(tokenizer) -> str | None:
    """Return the folder that the tokenizer came from; None if there is no model in it."""
    folder = tokenizer.name_or_path
    return folder if (Path(folder) / "config.json").is_file() else None


def chat_end(tokenizer) -> str | None:
    """Return the token that ends the turns of a chat model: its template writes it, and it is one
    of the model's EOS tokens. None for a base model, and for a model that was exported by a run
    with another `--prompt_format`."""
    path = model_of(tokenizer)
    if tokenizer.chat_template is None or path is None:
        return None
    if fields_of(path, GENERATION_CONFIG).get("prompt_format", "chat") != "chat":
        return None
    end = end_of_turn(tokenizer)
    is_eos = end in eos_token_ids(path, tokenizer, "plain")
    return tokenizer.convert_ids_to_tokens(end) if is_eos else None


def eos_token_ids(
    path: str, tokenizer, prompt_format: str = "auto", stop_token_ids: Sequence[int] = ()
) -> list[int]:
    """Return all tokens that end a completion: the EOS tokens of tokenizer, config and generation
    config (chat models often have two), `--stop_token_ids`, and the tokens with which the chat
    template ends turns, with and without tool calls (not with `--prompt_format plain`)."""
    ids = {tokenizer.eos_token_id, *stop_token_ids}
    if prompt_format != "plain" and tokenizer.chat_template is not None:
        ids |= {end_of_turn(tokenizer), end_of_turn(tokenizer, calls=True)}
    return sorted((ids | ids_of_eos(path)) - {None})
