"""Rows -> token ids with loss masks, and the order in which rows are drawn.

What a row is for follows from its columns, as in TRL. The order never depends on the number of ranks: each takes its
share of every batch.
"""

import random
from collections import Counter
from collections.abc import Callable

from common import distributed
from common.config import BaseArgs
from common.packing import Sample


def text_field(row: dict, column: str) -> str:
    """A column that must be a string. Raises `ValueError` with file and row number."""
    value = row.get(column)
    if not isinstance(value, str):
        problem = "is missing" if value is None else f"is {type(value).__name__}, expected a string"
        raise ValueError(f"{row['_source']}: column {column} {problem}")
    return _valid(row, column, value)


def _valid(row: dict, column: str, text: str) -> str:
    """JSON may hold half of a surrogate pair, which is no character and has no UTF-8."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{row['_source']}: column {column} holds a lone surrogate, which is not a character")
    return text


def is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _messages(row: dict, column: str) -> list[dict] | None:
    """The column as a message list, None if it is not a list. Raises `ValueError` for a malformed one."""
    value = row.get(column)
    if not isinstance(value, list):
        return None
    for message in value:
        if not is_message(message):
            raise ValueError(f"{row['_source']}: column {column} must list objects with string role and content")
        _valid(row, column, message["content"])
    return value


def _split_prompt(row: dict) -> dict:
    """`prompt`, `chosen` and `rejected` of a row whose chosen and rejected both begin with the prompt: what they share,
    whole messages, or of strings up to the last white space before they part. Raises `ValueError` if that is nothing.
    """
    chosen, rejected = _messages(row, "chosen"), _messages(row, "rejected")
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


class Encoder:
    """Rows -> ids, in the one way training and sampling share: text is cut where a completion starts and ends and the
    pieces are tokenised apart, so the prompt's ids in training are exactly those the engine is given."""

    def __init__(self, tokenizer, args: BaseArgs):
        self.tokenizer, self.prompt_format, self.system_prompt = tokenizer, args.prompt_format, args.system_prompt
        if args.prompt_format == "chat" and tokenizer.chat_template is None:
            raise ValueError("--prompt_format chat: the tokenizer has no chat template")
        if args.system_prompt and (tokenizer.chat_template is None or args.prompt_format == "plain"):
            raise ValueError("--system_prompt needs chat format: a tokenizer with a template, no --prompt_format plain")
        self.has_template = tokenizer.chat_template is not None and args.prompt_format != "plain"

    def prompt(self, row: dict, columns: tuple[str, ...]) -> list[int]:
        """Prompt ids of an RL row, up to where the model is to speak."""
        messages = self._prompt_messages(row, columns[0])
        if messages is None:
            return self._plain_prompt(row, columns[0])
        return self._ids(self._render(row, messages, add_generation_prompt=True))

    def as_asked(self, row: dict, column: str) -> list[dict] | str:
        """The prompt as the messages or, without a chat template, the text that it is: for another tokenizer."""
        messages = self._prompt_messages(row, column)
        return text_field(row, column) + ("\n" if column == "question" else "") if messages is None else messages

    def reply(self, messages: list[dict]) -> list[int]:
        """What stands between two assistant turns, of which the first ended with an EOS: the ids of `messages` in the
        chat template, from behind that EOS up to where the model is to speak again."""
        mark = "(here the model spoke)"  # templates may trim a turn or look at those before it, so it is one like any
        before = [dict(role="user", content="?"), dict(role="assistant", content=mark)]
        text = self._render(dict(_source="the environment's messages"), before + messages, add_generation_prompt=True)
        return self._ids(text[self._end_of_turn(text, text.index(mark) + len(mark)) :])

    def sft(self, row: dict, columns: tuple[str, ...], train_on_all: bool = False) -> Sample:
        """Ids and loss mask of a supervised row. Trained: the completion, or every assistant turn, with its EOS; with
        `train_on_all` everything."""
        if columns == ("text",):
            pieces = [(self._ids(text_field(row, "text"), special=True) + [self.tokenizer.eos_token_id], True)]
        elif columns == ("messages",):
            if not (messages := _messages(row, "messages")):
                raise ValueError(f"{row['_source']}: column messages must be a list of messages")
            if not self.has_template:
                raise ValueError(f"{row['_source']}: column messages needs a chat template, not plain")
            pieces = self._conversation(row, self._with_system(messages), first_trained=0)
        else:
            pieces = self._prompt_completion(row, *columns)
        return _sample(pieces, row, train_on_all)

    def completion(self, row: dict, prompt: str, completion: str) -> Sample:
        """A prompt with one of its completions, for the objectives that score whole completions: `sft` up to the last
        trained token. Raises `ValueError` for a completion without text."""
        value = row.get(completion)
        last = _messages(row, completion)[-1:] if isinstance(value, list) else [dict(content=value)]
        if not last or (isinstance(last[0]["content"], str) and not last[0]["content"].strip()):
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
        """[chosen, rejected] of a preference row, the prompt in a column of its own or in front of both (message lists
        that do not start with an assistant turn have it in front, whatever the column `prompt` says)."""
        lists = [_messages(row, side) for side in ("chosen", "rejected")]
        if columns == ("chosen", "rejected") or all(m and m[0]["role"] != "assistant" for m in lists):
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
        answer = _messages(row, completion) or [dict(role="assistant", content=text_field(row, completion))]
        return self._conversation(row, messages + answer, first_trained=len(messages))

    def _prompt_messages(self, row: dict, column: str) -> list[dict] | None:
        """The prompt as messages, or None if it goes in as plain text."""
        messages = _messages(row, column)
        if messages is None:
            if not self.has_template or (self.prompt_format == "auto" and column != "question"):
                if self.system_prompt:
                    raise ValueError(f"--system_prompt: column {column} is plain text; --prompt_format chat wraps it")
                return None
            messages = [dict(role="user", content=text_field(row, column))]
        elif not self.has_template:
            raise ValueError(f"{row['_source']}: column {column} lists messages, which need a chat template")
        return self._with_system(messages)

    def _with_system(self, messages: list[dict]) -> list[dict]:
        if not self.system_prompt or (messages and messages[0]["role"] == "system"):
            return messages
        return [dict(role="system", content=self.system_prompt), *messages]

    def _plain_prompt(self, row: dict, column: str) -> list[int]:
        return self._ids(text_field(row, column) + ("\n" if column == "question" else ""), special=True)

    def _conversation(self, row: dict, messages: list[dict], first_trained: int) -> list[tuple[list[int], bool]]:
        """(ids, trained) pieces: from where an assistant turn starts to its end-of-turn token."""
        text, done, pieces = self._render(row, messages), 0, []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i < first_trained:
                continue
            start = len(self._render(row, messages[:i], add_generation_prompt=True))
            content = text.find(message["content"].strip(), start)
            if text[:start] != self._render(row, messages[:i], add_generation_prompt=True) or content < 0:
                raise ValueError(f"{row['_source']}: turn {i + 1} does not come out of the chat template as it went in")
            end = content + len(message["content"].strip())
            # The template's end-of-turn token is trained, whatever stands before it ("\n", say): without it a model
            # would never learn to stop.
            if (eos := self._end_of_turn(text, end)) is None:
                raise ValueError(f"{row['_source']}: the chat template puts no end-of-turn token after turn {i + 1}")
            pieces += [(self._ids(text[done:start]), False), (self._ids(text[start:eos]), True)]
            done = eos
        return pieces + [(self._ids(text[done:]), False)]

    def _end_of_turn(self, text: str, start: int) -> int | None:
        """Where the first special token at or after `start` ends. Some tokenizers have it among the added ones only."""
        tokens = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        found = [(at, at + len(token)) for token in tokens if (at := text.find(token, start)) >= 0]
        return min(found)[1] if found else None

    def _render(self, row: dict, messages: list[dict], add_generation_prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise ValueError(f"{row['_source']}: the chat template refuses the messages: {error}") from error

    def _ids(self, text: str, special: bool = False) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids[:-1] if special and ids and ids[-1] == self.tokenizer.eos_token_id else ids


def encode_pairs(
    rows: list[dict], encode: Callable[[dict], list[Sample]], max_length: int, overlong: str, identical_pairs: str
) -> tuple[list[list[Sample]], Counter]:
    """What `encode` makes of each row, [chosen, rejected] or a single completion, none longer than `max_length` tokens;
    and how many rows something was done to, by what. `overlong` and `identical_pairs` are as the flags say.

    Raises `ValueError` naming the row.
    """
    pairs, counts = [], Counter()
    for row in rows:
        pair = encode(row)
        if (length := max(len(sample.ids) for sample in pair)) > max_length:
            if overlong == "error":
                raise ValueError(f"{row['_source']} has {length} tokens, more than --max_length (--overlong)")
            if overlong == "drop" or max(sample.prompt_length for sample in pair) >= max_length:
                counts["dropped as too long (--max_length)"] += 1
                continue
            counts["truncated (--max_length)"] += 1
            pair = [cut(sample, max_length) for sample in pair]
        if len(pair) == 2 and pair[0].ids == pair[1].ids:
            if identical_pairs == "error":
                raise ValueError(f"{row['_source']}: chosen and rejected are the same (--identical_pairs)")
            counts["with chosen = rejected (--identical_pairs)"] += 1
            if identical_pairs == "drop":
                continue
        pairs.append(pair)
    return pairs, counts


def cut(sample: Sample, length: int) -> Sample:
    """The sample without its tokens beyond so many."""
    sample.ids, sample.loss_mask = sample.ids[:length], sample.loss_mask[:length]
    return sample


# ---- order ----


class RowOrder:
    """An endless stream of row indices, each epoch a new permutation. Its state, (epoch, index), is every rank's."""

    def __init__(self, num_rows: int, seed: int):
        self.num_rows, self.seed = num_rows, seed
        self.epoch = self.index = 0
        self._shuffle()

    def _shuffle(self) -> None:
        self._order = list(range(self.num_rows))
        random.Random(distributed.fold_seed(self.seed, self.epoch)).shuffle(self._order)

    def draw(self, count: int) -> list[int]:
        """The next `count` rows; goes on into the next epoch where this one ends."""
        rows: list[int] = []
        while len(rows) < count:
            if self.index == self.num_rows:
                self.epoch, self.index = self.epoch + 1, 0
                self._shuffle()
            taken = self._order[self.index : self.index + count - len(rows)]
            self.index += len(taken)
            rows += taken
        return rows

    @property
    def epochs_done(self) -> float:
        return self.epoch + self.index / self.num_rows

    def state_dict(self) -> dict:
        return dict(epoch=self.epoch, index=self.index, num_rows=self.num_rows)

    def load_state_dict(self, state: dict) -> None:
        """Raises `ValueError` if the order was of another number of rows: the data has changed."""
        if state["num_rows"] != self.num_rows:
            was, now = state["num_rows"], self.num_rows
            raise ValueError(f"the checkpoint is of {was} training rows, now there are {now}: other data or flags")
        self.epoch, self.index = state["epoch"], state["index"]
        self._shuffle()
