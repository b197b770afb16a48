"""Rows -> token ids with loss masks. The columns of a row determine its use, as in TRL."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from common.config.groups import BaseArgs
from common.data.chat import ChatTemplate, messages_field, text_field
from common.data.rows import usable
from common.data.sample import Sample


def _split_prompt(row: dict) -> dict:
    """Return the row with the shared start of `chosen` and `rejected` as `prompt`: whole messages, or text up to the
    last white space before they differ. Raises `ValueError` if they share nothing."""
    chosen, rejected = messages_field(row, "chosen"), messages_field(row, "rejected")
    if (chosen is None) != (rejected is None):
        raise ValueError(f"{row['_source']}: one of chosen and rejected lists messages, the other does not")
    if chosen is None:
        chosen, rejected = text_field(row, "chosen"), text_field(row, "rejected")
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if shared is None:
        shared = min(len(chosen), len(rejected)) - (len(chosen) == len(rejected) and isinstance(chosen, list))
    if isinstance(chosen, str):
        shared = max((i + 1 for i in range(shared) if chosen[i].isspace() and chosen[: i + 1].strip()), default=0)
    answers = [side[shared] for side in (chosen, rejected) if isinstance(side, list) and len(side) > shared]
    if not shared or any(message["role"] != "assistant" for message in answers):
        raise ValueError(f"{row['_source']}: chosen and rejected do not begin with the same prompt")
    return row | dict(prompt=chosen[:shared], chosen=chosen[shared:], rejected=rejected[shared:])


def _sample(pieces: list[tuple[list[int], bool]], row: dict, train_on_all: bool = False) -> Sample:
    ids = [i for piece, _ in pieces for i in piece]
    mask = [trained or train_on_all for piece, trained in pieces for _ in piece]
    return Sample(ids=ids, loss_mask=mask, prompt_length=next((i for i, m in enumerate(mask) if m), len(ids)), row=row)


def _plain_text(row: dict, column: str) -> str:
    """Return a prompt without a chat template. A question ends with a line break."""
    return text_field(row, column) + ("\n" if column == "question" else "")


class Encoder:
    """Encoder of rows for training and sampling. Text is cut at the start and the end of a completion, and each piece
    is tokenised separately, so that a prompt has the same ids in training as in sampling."""

    def __init__(self, tokenizer, args: BaseArgs):
        self.tokenizer, self.prompt_format, self.system_prompt = tokenizer, args.prompt_format, args.system_prompt
        has_template = tokenizer.chat_template is not None and args.prompt_format != "plain"
        if args.prompt_format == "chat" and not has_template:
            raise ValueError("--prompt_format chat: the tokenizer has no chat template; set --chat_template")
        if args.system_prompt and not has_template:
            raise ValueError("--system_prompt needs a tokenizer with a chat template, and no --prompt_format plain")
        if args.template_kwargs and not has_template:
            raise ValueError("--template_kwargs: the tokenizer has no chat template; set --chat_template")
        self.chat = ChatTemplate(tokenizer, args) if has_template else None

    def prompt(self, row: dict, columns: tuple[str, ...]) -> list[int]:
        """Return the prompt ids of an RL row, up to the start of the reply."""
        messages = self._prompt_messages(row, columns[0])
        if messages is None:
            return self._plain_prompt(row, columns[0])
        pieces = self.chat.pieces(row, messages, len(messages), add_generation_prompt=True)
        return [i for text, _ in pieces for i in self._ids(text)]

    def as_asked(self, row: dict, column: str) -> list[dict] | str:
        """Return the prompt for another tokenizer: messages or, without a chat template, text."""
        messages = self._prompt_messages(row, column)
        return _plain_text(row, column) if messages is None else messages

    def reply(self, messages: list[dict]) -> list[int]:
        """Return the ids of `messages` between two assistant turns: from the EOS of the first to the start of the
        second."""
        return self._ids(self.chat.reply(messages))

    def sft(self, row: dict, columns: tuple[str, ...], train_on_all: bool = False) -> Sample:
        """Encode a supervised row. The completion or every assistant turn is trained, with its EOS; with `train_on_all`
        everything."""
        if columns == ("text",):
            pieces = [(self._ids(text_field(row, "text"), special=True) + [self.tokenizer.eos_token_id], True)]
        elif columns == ("messages",):
            if not (messages := messages_field(row, "messages")):
                raise ValueError(f"{row['_source']}: column messages must be a list of messages")
            if self.chat is None:
                raise ValueError(f"{row['_source']}: column messages needs a chat template, not plain")
            pieces = self._conversation(row, self._with_system(messages), first_trained=0)
        else:
            pieces = self._prompt_completion(row, *columns)
        return _sample(pieces, row, train_on_all)

    def completion(self, row: dict, prompt: str, completion: str) -> Sample:
        """Encode a prompt and a completion up to the last trained token, for objectives that score completions. Raises
        `ValueError` for a completion without text."""
        value = row.get(completion)
        last = messages_field(row, completion)[-1:] if isinstance(value, list) else [dict(content=value)]
        text = last[0]["content"] if last and not last[0].get("tool_calls") else None
        if not last or (isinstance(text, str) and not text.strip()):
            raise ValueError(f"{row['_source']}: column {completion} is empty")
        sample = _sample(self._prompt_completion(row, prompt, completion), row)
        if not any(sample.loss_mask):
            raise ValueError(f"{row['_source']}: column {completion} has no assistant turn")
        if not sample.prompt_length:
            raise ValueError(f"{row['_source']}: column {prompt} is empty")
        end = len(sample.ids) - sample.loss_mask[::-1].index(True)
        sample.ids, sample.loss_mask = sample.ids[:end], sample.loss_mask[:end]
        return sample

    def pair(self, row: dict, columns: tuple[str, ...]) -> list[Sample]:
        """Encode [chosen, rejected] of a preference row. The prompt has its own column or is the start of both. Message
        lists that do not start with an assistant turn contain the prompt, even if the row has a column `prompt`."""
        lists = [messages_field(row, side) for side in ("chosen", "rejected")]
        if "prompt" not in columns or all(m and m[0]["role"] != "assistant" for m in lists):
            row = _split_prompt(row)
        return [self.completion(row, "prompt", side) for side in ("chosen", "rejected")]

    def _prompt_completion(self, row: dict, prompt: str, completion: str) -> list[tuple[list[int], bool]]:
        messages = self._prompt_messages(row, prompt)
        if messages is None:
            if isinstance(row.get(completion), list):
                where = f"{row['_source']}: column {completion} lists messages, column {prompt} is text"
                raise ValueError(f"{where}; --prompt_format chat makes that a user turn")
            answer = self._ids(text_field(row, completion)) + [self.tokenizer.eos_token_id]
            return [(self._plain_prompt(row, prompt), False), (answer, True)]
        answer = messages_field(row, completion) or [dict(role="assistant", content=text_field(row, completion))]
        return self._conversation(row, messages + answer, first_trained=len(messages))

    def _prompt_messages(self, row: dict, column: str) -> list[dict] | None:
        """Return the prompt as messages, None for plain text."""
        messages = messages_field(row, column)
        if messages is None:
            if self.chat is None or (self.prompt_format == "auto" and column != "question"):
                if self.system_prompt:
                    raise ValueError(f"--system_prompt: column {column} is plain text; set --prompt_format chat")
                return None
            messages = [dict(role="user", content=text_field(row, column))]
        elif self.chat is None:
            raise ValueError(f"{row['_source']}: column {column} lists messages, which need a chat template")
        return self._with_system(messages)

    def _with_system(self, messages: list[dict]) -> list[dict]:
        if not self.system_prompt or (messages and messages[0]["role"] == "system"):
            return messages
        return [dict(role="system", content=self.system_prompt), *messages]

    def _plain_prompt(self, row: dict, column: str) -> list[int]:
        if row.get("tools"):
            raise ValueError(f"{row['_source']}: column tools needs chat format, column {column} is plain text")
        return self._ids(_plain_text(row, column), special=True)

    def _conversation(self, row: dict, messages: list[dict], first_trained: int) -> list[tuple[list[int], bool]]:
        return [(self._ids(text), trained) for text, trained in self.chat.pieces(row, messages, first_trained)]

    def _ids(self, text: str, special: bool = False) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids[:-1] if special and ids and ids[-1] == self.tokenizer.eos_token_id else ids


PAIR_FLAGS = ("max_length", "overlong", "identical_pairs")  # that `encode_pairs` reads


def encode_pairs(
    rows: list[dict], encode: Callable[[dict], list[Sample]], args: BaseArgs
) -> tuple[list[list[Sample]], Counter]:
    """Encode rows to [chosen, rejected] or [completion] of at most `--max_length` tokens, and count the rows that were
    dropped or changed, by reason. `--overlong` and `--identical_pairs` apply; with `--on_bad_row skip` their errors are
    drops. Raises `ValueError` naming the row."""
    pairs, counts, strict = [], Counter(), args.on_bad_row == "error"
    for row, pair in usable(rows, encode, args.on_bad_row):
        if (length := max(len(sample.ids) for sample in pair)) > args.max_length:
            if args.overlong == "error" and strict:
                what = f"{row['_source']}: {length} tokens exceed --max_length {args.max_length}"
                raise ValueError(f"{what}; set --overlong drop or truncate")
            if args.overlong != "truncate" or max(sample.prompt_length for sample in pair) >= args.max_length:
                counts["dropped as too long (--max_length)"] += 1
                continue
            counts["truncated (--max_length)"] += 1
            pair = [truncate(sample, args.max_length) for sample in pair]
        if len(pair) == 2 and pair[0].ids == pair[1].ids:
            if args.identical_pairs == "error" and strict:
                raise ValueError(f"{row['_source']}: chosen and rejected are the same (--identical_pairs)")
            counts["with chosen = rejected (--identical_pairs)"] += 1
            if args.identical_pairs != "keep":
                continue
        pairs.append(pair)
    return pairs, counts


def truncate(sample: Sample, length: int) -> Sample:
    """Return the first `length` tokens of a sample."""
    return replace(sample, ids=sample.ids[:length], loss_mask=sample.loss_mask[:length])
