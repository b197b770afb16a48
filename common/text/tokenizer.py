"""The tokenizer with its chat template, and the tokens that end completions."""

from collections.abc import Sequence

from common.config.groups import BaseArgs
from common.model.hub import GENERATION_CONFIG, fields_of, ids_of_eos, read_tokenizer
from common.model.loading import load_config
from common.parallel import distributed
from common.text.chat import end_of_turn, use_template


def load_tokenizer(path: str, args: BaseArgs | None = None, flag: str = "--model"):
    """Return the tokenizer of a folder. With `args` it has the `--chat_template` and, as
    `prompt_format`, the `--prompt_format`, where auto is chat for a chat model."""
    tokenizer = read_tokenizer(path, flag)
    if args is None:
        return tokenizer
    size = load_config(path).get_text_config().vocab_size
    if any(i >= size for i in args.stop_token_ids):
        raise ValueError(f"--stop_token_ids: the ids of the model end at {size - 1}")
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
    """Return the token that ends the turns of a chat model: its template writes it, and it is an
    EOS of the model. None for a base model, and for an export of a run in another format."""
    trained_on = fields_of(path, GENERATION_CONFIG).get("prompt_format")
    if tokenizer.chat_template is None or trained_on not in (None, "chat"):
        return None
    end = end_of_turn(tokenizer)
    is_eos = end in eos_token_ids(path, tokenizer, "plain")
    return tokenizer.convert_ids_to_tokens(end) if is_eos else None


def eos_token_ids(
    path: str, tokenizer, prompt_format: str = "auto", stop_token_ids: Sequence[int] = ()
) -> list[int]:
    """Return all tokens that end a completion: the EOS of tokenizer, config and generation config
    (chat models often have two), `--stop_token_ids` and, unless `--prompt_format plain`, the tokens
    by which the chat template ends a turn without and with tool calls."""
    ids = {tokenizer.eos_token_id, *stop_token_ids}
    if prompt_format != "plain" and tokenizer.chat_template is not None:
        ids |= {end_of_turn(tokenizer), end_of_turn(tokenizer, calls=True)}
    return sorted((ids | ids_of_eos(path)) - {None})
