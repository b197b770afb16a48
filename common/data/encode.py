"""Rows -> token ids with loss masks. The columns of a row determine its use, as in TRL."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from common.config.groups import BaseArgs
from common.data.chat import ChatTemplate
from common.data.messages import messages_field, text_field
from common.data.pieces import pieces_of
from common.data.rows import usable
from common.data.sample import Sample
from common.data.turns import Rendering, conversation_of, prompt_of
from common.parallel import distributed


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


def _plain_text(row: dict, column: str) -> str:
    """Return a prompt without a chat template. A question ends with a line break."""
    return text_field(row, column) + ("\n" if column == "question" else "")


class Encoder:
    """Encoder of rows for training and sampling. The ids are those of the whole text; a prompt has the same ids in
    training as in sampling."""

    def __init__(self, tokenizer, args: BaseArgs):
        self.tokenizer, self.prompt_format, self.system_prompt = tokenizer, args.prompt_format, args.system_prompt
        has_template = tokenizer.chat_template is not None and args.prompt_format != "plain"
        if args.prompt_format == "chat" and not has_template:
            raise ValueError("--prompt_format chat: the tokenizer has no chat template; set --chat_template")
        if args.system_prompt and not has_template:
            raise ValueError("--system_prompt needs a tokenizer with a chat template, and no --prompt_format plain")
        if args.template_kwargs and not has_template:
            raise ValueError("--template_kwargs: the tokenizer has no chat template; set --chat_template")
        self.chat = ChatTemplate(tokenizer, args.template_kwargs) if has_template else None
        self.added = tokenizer.added_tokens_decoder  # built at each call
        self.ends = {tokenizer.eos_token, self.chat and self.chat.end and self.chat.end.token} - {None, ""}
        self.special_text = args.special_text
        tokens = {str(token) for token in self.added.values() if token.special} - {""}
        self.special_tokens = sorted(tokens, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, self.special_tokens)) or r"(?!)")
        self.reported = False

    # ---- prompts ----

    def prompt(self, row: dict, columns: tuple[str, ...]) -> list[int]:
        """Return the prompt ids of an RL row, up to the start of the reply. A turn of the model at the end of the
        prompt is continued."""
        messages = self._prompt_messages(row, columns[0])
        if messages is None:
            (ids,) = self._pieces(row, self._read(row, self._plain_prompt(row, columns[0])), [], special=True)
            return ids
        return self._chat_sample(row, prompt_of(self.chat, row, self._read_messages(row, messages))).ids

    def as_asked(self, row: dict, column: str) -> list[dict] | str:
        """Return the prompt for another tokenizer: messages or, without a chat template, text."""
        messages = self._prompt_messages(row, column)
        return _plain_text(row, column) if messages is None else messages

    def reply(self, messages: list[dict]) -> list[int]:
        """Return the ids of `messages` between two assistant turns: from the EOS of the first to the start of the
        second."""
        if self.chat.end is None:
            raise ValueError("the chat template does not show the text of the model's turns")
        end = self.chat.end.token
        _, ids = pieces_of(self.tokenizer, end + self.chat.reply(messages), [len(end)])
        return ids

    # ---- samples ----

    def sft(self, row: dict, columns: tuple[str, ...], train_on_all: bool = False) -> Sample:
        """Encode a supervised row. The completion or every assistant turn is trained, with its EOS; with `train_on_all`
        everything."""
        if columns == ("text",):
            (ids,) = self._pieces(row, self._read(row, text_field(row, "text"), own_end=True), [], special=True)
            ids = self._with_eos(ids)
            sample = Sample(ids, [True] * len(ids), row=row)
        elif columns == ("messages",):
            if not (messages := messages_field(row, "messages")):
                raise ValueError(f"{row['_source']}: column messages must be a list of messages")
            if self.chat is None:
                raise ValueError(f"{row['_source']}: column messages needs a chat template, not plain")
            messages = self._read_messages(row, self._with_system(messages))
            sample = self._chat_sample(row, conversation_of(self.chat, row, messages, first_trained=0))
        else:
            sample = self._prompt_completion(row, *columns)
        return replace(sample, loss_mask=[True] * len(sample.ids)) if train_on_all else sample

    def completion(self, row: dict, prompt: str, completion: str) -> Sample:
        """Encode a prompt and a completion up to the last trained token, for objectives that score completions. Raises
        `ValueError` for a completion without text, or one with a turn that is not trained."""
        value = row.get(completion)
        last = messages_field(row, completion)[-1:] if isinstance(value, list) else [dict(content=value)]
        text = last[0]["content"] if last and not last[0].get("tool_calls") else None
        if not last or (isinstance(text, str) and not text.strip()):
            raise ValueError(f"{row['_source']}: column {completion} is empty")
        sample = self._prompt_completion(row, prompt, completion)
        if not any(sample.loss_mask):
            raise ValueError(f"{row['_source']}: column {completion} has no assistant turn")
        if not sample.prompt_length:
            raise ValueError(f"{row['_source']}: column {prompt} is empty")
        if sample.context_turns:
            problem = "the chat template shows an earlier turn in another form than the sampled one"
            raise ValueError(f"{row['_source']}: column {completion}: {problem}")
        return truncate(sample, len(sample.ids) - sample.loss_mask[::-1].index(True))

    def pair(self, row: dict, columns: tuple[str, ...]) -> list[Sample]:
        """Encode [chosen, rejected] of a preference row. The prompt has its own column or is the start of both. Message
        lists that do not start with an assistant turn contain the prompt, even if the row has a column `prompt`."""
        lists = [messages_field(row, side) for side in ("chosen", "rejected")]
        if "prompt" not in columns:
            row = _split_prompt(row)
        elif all(m and m[0]["role"] != "assistant" for m in lists):
            given = messages_field(row, "prompt") or []
            if any(side[: len(given)] != given for side in lists):
                raise ValueError(f"{row['_source']}: chosen and rejected do not begin with column prompt")
            row = _split_prompt(row)
        return [self.completion(row, "prompt", side) for side in ("chosen", "rejected")]

    def _prompt_completion(self, row: dict, prompt: str, completion: str) -> Sample:
        messages = self._prompt_messages(row, prompt)
        if messages is not None:
            answer = messages_field(row, completion) or [dict(role="assistant", content=text_field(row, completion))]
            conversation = self._read_messages(row, messages + answer)
            return self._chat_sample(row, conversation_of(self.chat, row, conversation, first_trained=len(messages)))
        if isinstance(row.get(completion), list):
            where = f"{row['_source']}: column {completion} lists messages, column {prompt} is text"
            raise ValueError(f"{where}; --prompt_format chat makes that a user turn")
        asked = self._read(row, self._plain_prompt(row, prompt))
        answered = self._read(row, text_field(row, completion), own_end=True)
        prompt_ids, ids = self._pieces(row, asked + answered, [len(asked)], special=True)
        ids = self._with_eos(ids)
        mask = [False] * len(prompt_ids) + [True] * len(ids)
        return Sample(prompt_ids + ids, mask, prompt_length=len(prompt_ids), row=row)

    def _chat_sample(self, row: dict, rendering: Rendering) -> Sample:
        ids: list[int] = []
        mask: list[bool] = []
        cuts = [cut for turn in rendering.turns for cut in (turn.start, turn.end)]
        trained = [of_piece for turn in rendering.turns for of_piece in (False, turn.trained)]
        for piece, of_piece in zip(self._pieces(row, rendering.text, cuts), [*trained, False], strict=True):
            ids += piece
            mask += [of_piece] * len(piece)
        prompt_length = mask.index(True) if True in mask else len(ids)
        return Sample(ids, mask, prompt_length, row, context_turns=rendering.context_turns)

    # ---- messages and text ----

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
        if not self.system_prompt or (messages and messages[0]["role"] in ("system", "developer")):
            return messages
        return [dict(role="system", content=self.system_prompt), *messages]

    def _plain_prompt(self, row: dict, column: str) -> str:
        if row.get("tools"):
            raise ValueError(f"{row['_source']}: column tools needs chat format, column {column} is plain text")
        return _plain_text(row, column)

    def _read_messages(self, row: dict, messages: list[dict]) -> list[dict]:
        return [self._read_message(row, message) for message in messages]

    def _read_message(self, row: dict, message: dict) -> dict:
        own_end = message["role"] == "assistant"
        values = {key: self._read(row, value, own_end, own_start=False) for key, value in message.items()}
        return values | dict(role=message["role"])

    def _read(self, row: dict, value: object, own_end: bool = False, own_start: bool = True) -> object:
        """Return a text of the data, or a value with texts, as `--special_text` reads it: report the first special
        token in it, or keep it as text. With `own_end`, the token that ends turns, or EOS, may end a text; with
        `own_start`, BOS may begin one."""
        if isinstance(value, dict):
            return {key: self._read(row, item, own_start=False) for key, item in value.items()}
        if isinstance(value, list):
            return [self._read(row, item, own_start=False) for item in value]
        if not isinstance(value, str):
            return value
        bos = self.tokenizer.bos_token or ""
        start = len(bos) if own_start and value.startswith(bos) else 0
        end = len(value) - max((len(e) for e in self.ends if own_end and value.endswith(e)), default=0)
        inner = value[start:end]
        if self.special_text == "text":
            from common.data.literals import hidden

            return value[:start] + hidden(row["_source"], inner, self.special_tokens) + value[end:]
        found = self.special_pattern.search(inner)
        if found and not self.reported:
            what = f"{row.get('_source')}: the text {found[0]} in the data is read as this special token"
            distributed.say(f"{what}; --special_text text reads it as text")
            self.reported = True
        return value

    def _with_eos(self, ids: list[int]) -> list[int]:
        """Return the ids with one EOS at the end, also if the text has its own."""
        return ids if ids[-1:] == [self.tokenizer.eos_token_id] else [*ids, self.tokenizer.eos_token_id]

    def _pieces(self, row: dict, text: str, cuts: list[int], special: bool = False) -> list[list[int]]:
        """Return the ids of the pieces of a text. Raises `ValueError` for a token that the model lacks."""
        try:
            if self.special_text == "text":
                from common.data.literals import pieces_with_literals

                pieces = pieces_with_literals(self.tokenizer, text, cuts, special, self.added, self.special_tokens)
            else:
                pieces = pieces_of(self.tokenizer, text, cuts, special, self.added)
        except ValueError as error:
            raise ValueError(f"{row['_source']}: {error}") from error
        if limit := getattr(self.tokenizer, "model_vocab_size", None):
            largest = max((token for piece in pieces for token in piece), default=0)
            if largest >= limit:
                token = self.tokenizer.convert_ids_to_tokens(largest)
                raise ValueError(f"{row['_source']}: the model has no embedding for the token {token!r}; take it out")
        return pieces


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
