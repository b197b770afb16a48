"""Data rows -> token ids with loss masks: prompts to sample from, and samples to train on. As in
TRL, the columns of a row say how it is used."""

import re
from array import array
from dataclasses import replace
from typing import Any

from common.config.extra import extra
from common.config.groups import NO_IMAGES, DataArgs, ImageArgs
from common.model.hub import vocabulary_size
from common.packs.sample import Sample
from common.parallel import distributed
from common.text.chat import SAID, ChatTemplate, any_of
from common.text.messages import (
    CONVERSATIONS,
    IMAGE,
    ROLES,
    SYSTEM,
    bad_row,
    given_messages,
    messages_field,
    prompt_apart,
    text_field,
    unread_keys,
)
from common.text.text_ids import TextIds
from common.text.tokenizer import format_of, model_of
from common.text.turns import is_wanted, prompt_of, reply_of, template_form, turns_of, whole_of

COLUMNS_OF_CHATS = ("tools", "chat_template_kwargs", "system", "system_prompt")


class Encoder:
    """Encodes rows for training and for sampling. A prompt has the same ids in both. Ids of
    samples are `array("i")`, masks `bytes`."""

    def __init__(
        self, tokenizer, args: DataArgs, image_args: ImageArgs = NO_IMAGES,
        prompt_format: str | None = None,
    ):  # fmt: skip
        """`prompt_format`: the format of another model. A teacher with its own tokenizer reads the
        prompts in the student's format. Default: the format by the flags and the tokenizer."""
        self.tokenizer = tokenizer
        self.prompt_format = prompt_format or format_of(tokenizer, args)
        # Not the tokenizer's size: Gemma 3 without images has no embedding for the image token.
        path = model_of(tokenizer)
        self.ids_end = len(tokenizer) if path is None else vocabulary_size(path)
        self.system_prompt = args.system_prompt
        self.special_text = args.special_text
        self.chat = None
        if tokenizer.chat_template is not None and args.prompt_format != "plain":
            self.chat = ChatTemplate(tokenizer, args.template_kwargs)
        else:
            names = ["system_prompt", "template_kwargs"]
            flags = [name for name in names if getattr(args, name)]
            if args.prompt_format == "chat":
                flags = ["prompt_format chat"]
            if flags:
                problem = "the tokenizer has no chat template, or --prompt_format plain"
                raise ValueError(f"--{flags[0]}: {problem} does not use it; set --chat_template")
        self.ends = {tokenizer.eos_token} - {None, ""}  # texts of the tokens that end a completion
        if self.chat and self.chat.end and self.chat.end.token:
            self.ends.add(self.chat.end.token)
        self._no_text = re.compile(rf"<think>\s*</think>|{any_of(self.ends).pattern}")
        self.text_ids = TextIds(tokenizer, self.ends, reads_hidden=args.special_text == "text")
        self.said: dict[str, str] = {}  # notes that have been printed, one of each kind
        self.images = None
        if image_args.vision is not None:
            with extra("images", f"--vision {image_args.vision}"):
                from extras.images.encoder import ImageEncoder
            self.images = ImageEncoder(tokenizer, image_args.max_pixels)

    # ---- prompts ----

    def prompt(self, row: dict, columns: tuple[str, ...]) -> array:
        """Return the prompt ids of an RL row, up to the start of the reply. If the prompt ends with
        a turn of the model, the model continues this turn. Without columns the prompt is empty.
        The places of images in it are added to the row."""
        if not columns:
            return array("i")
        asked = self.as_asked(row, columns[0])
        if isinstance(asked, str):
            ids = self._ids(row, self._plain(row, asked), adds_bos=True)
        else:
            messages = self._with_special_text(row, asked)
            template_row, messages = template_form(self.chat, row, messages)
            ids = self._ids(row, prompt_of(self.chat, template_row, messages))
        ids, shown = self._shown(row, ids)
        row.update(shown)
        return ids

    def as_asked(self, row: dict, column: str) -> list[dict] | str:
        """Return what is asked in `column`: messages, or text if no chat template is used. A text
        from the column `question` gets a line break at its end."""
        messages = self._messages(row, column)
        asked = messages
        if messages is None:
            asked = [dict(role="user", content=text_field(row, column))]
        if not asked or (asked[-1]["role"] == "user" and self._is_blank(row, asked[-1])):
            raise bad_row(row, f"column {column} is empty")
        if messages is None:
            text = asked[0]["content"]
            if self.chat is None or (self.prompt_format == "auto" and column != "question"):
                of_chats = [f"column {name}" for name in COLUMNS_OF_CHATS if row.get(name)]
                if self.system_prompt:
                    of_chats.append("--system_prompt")
                if of_chats:
                    problem = f"{of_chats[0]} needs chat format, column {column} is plain text"
                    raise bad_row(row, f"{problem}; set --prompt_format chat")
                return text + ("\n" if column == "question" else "")
        elif self.chat is None:
            raise bad_row(row, f"column {column} lists messages, which need a chat template")
        return self._with_system(row, asked)

    def reply(
        self,
        messages: list[dict],
        last_token: int | None = None,
        calls: list[dict] | None = None,
        tools: list[dict] | None = None,
    ) -> list[int]:
        """Return the ids that stand between two turns of the model: `messages`, such as results of
        tools, and the start of the second turn. If the first turn stopped at another `last_token`
        than the template's end token, the end token comes before them. `calls`: tool calls of the
        first turn."""
        row = dict(_source="the messages between two turns", tools=tools, messages=messages)
        if (messages := messages_field(row, "messages")) is None:
            raise bad_row(row, "they are no list")
        turn = SAID | dict(content="", tool_calls=calls) if calls else SAID
        end, text = reply_of(self.chat, row, turn, self._with_special_text(row, messages))
        if last_token not in (None, self.tokenizer.convert_tokens_to_ids(end)):
            last = end if calls else self.chat.end.last
            return [*self._ids(row, last + text)]
        return [*self._ids(row, text, after=end)]

    # ---- samples ----

    def sft(
        self, row: dict, columns: tuple[str, ...], train_on: str = "completion"
    ) -> list[Sample]:
        """Encode a supervised row as one sequence, or as several if the chat template rewrites
        earlier turns. `train_on` says what is trained. `completion`: the completion, or every turn
        of the model with its end token; `last`: only the last turn of the model; `all`: everything
        but images, always in one sequence."""
        if len(columns) == 1 and columns[0] in CONVERSATIONS:
            messages = self._messages(row, columns[0])
            if self.chat is None:
                raise bad_row(row, f"column {columns[0]} needs a chat template, not plain")
            if not messages:
                raise bad_row(row, f"column {columns[0]} must be a list of messages")
            self._require_text(row, messages, 0, train_on)
            messages = self._with_special_text(row, self._with_system(row, messages))
            return self._conversation(row, messages, 0, train_on)
        if columns == ("text",):
            for name in COLUMNS_OF_CHATS:
                if row.get(name):
                    note = f"not used in training: {name}, beside the column text"
                    self.say_once(note, kind=f"column {name}")
            text = self._plain(row, self._text(row, "text"), has_end=True)
            ids, row = self._shown(row, self._with_eos(self._ids(row, text, adds_bos=True)))
            return [all_trained(Sample(ids, bytes(len(ids)), row=row))]
        return self._prompt_completion(row, *columns, train_on=train_on)

    def completion(self, row: dict, prompt: str, completion: str) -> Sample:
        """Encode a prompt and a completion, for scripts such as dpo.py that score completions.
        Raises `ValueError` if the completion has no text, or is not a single sequence."""
        samples = self._prompt_completion(row, prompt, completion)
        if not samples:
            raise bad_row(row, f"column {completion}: no turn of the model is trained (weight 0)")
        if not samples[0].prompt_length:
            raise bad_row(row, f"column {prompt} is empty")
        if samples[0].turns_left_out:
            raise bad_row(row, f"column {completion}: {samples[0].turns_left_out[0]}")
        if len(samples) > 1:
            problem = "the chat template rewrites its earlier turns, so it is no single sequence"
            advice = "let the prompt end before its last turn"
            raise bad_row(row, f"column {completion}: {problem}; {advice}")
        return samples[0]

    def _prompt_completion(
        self, row: dict, prompt: str, completion: str, train_on: str = "completion"
    ) -> list[Sample]:
        row = prompt_apart(row, prompt, (completion,)) if self.chat else row
        asked = self.as_asked(row, prompt)
        if not isinstance(asked, str):
            answer = self._messages(row, completion)
            if answer is None:
                answer = [dict(role="assistant", content=self._text(row, completion))]
            if not answer or (len(answer) == 1 and self._is_blank(row, answer[0])):
                raise bad_row(row, f"column {completion} is empty")
            self._require_text(row, asked + answer, len(asked), train_on)
            messages = self._with_special_text(row, asked + answer)
            return self._conversation(row, messages, len(asked), train_on)
        if given_messages(row, completion) is not None:
            problem = f"column {completion} lists messages, column {prompt} is text"
            raise bad_row(row, f"{problem}; --prompt_format chat makes that a user turn")
        asked = self._plain(row, asked)
        answered = self._special_text(row, self._text(row, completion), has_end=True, has_bos=True)
        prompt_ids, row = self._shown(row, self._ids(row, asked, adds_bos=True))
        ids = self._ids(row, answered, after=asked) if asked else self._ids(row, answered)
        ids = self._with_eos(ids)
        mask = [False] * len(prompt_ids) + [True] * len(ids)
        sample = Sample(prompt_ids + ids, bytes(mask), len(prompt_ids), row)
        return [all_trained(sample) if train_on == "all" else sample]

    def _conversation(
        self, row: dict, messages: list[dict], first_trained: int, train_on: str
    ) -> list[Sample]:
        """Return the sequences on which the model's turns from message `first_trained` on are
        trained. If the prompt of a turn begins with the whole sequence before, the turn is appended
        to that sequence."""
        template_row, messages = template_form(self.chat, row, messages)
        if train_on == "all":
            text = whole_of(self.chat, template_row, messages, first_trained)
            ids, row = self._shown(row, self._ids(row, text))
            return [all_trained(Sample(ids, bytes(len(ids)), row=row))]
        is_last = train_on == "last"
        turns, errors = turns_of(self.chat, template_row, messages, first_trained, is_last)
        start = rf"{re.escape(str(row['_source']))}: (turn \d+ \(\w+\): )?"
        reasons = tuple(re.sub(f"^{start}", "", str(error)) for error in errors)
        samples: list[Sample] = []
        for turn in turns:
            marks = sum(message["content"].count(IMAGE) for message in messages[: turn.number])
            prompt, shown = self._shown(row, self._ids(row, turn.prompt), marks)
            said = self._ids(row, turn.text, after=turn.prompt)
            mask, length = bytes(len(prompt)), len(prompt)
            if samples and prompt[: len(samples[-1].ids)] == samples[-1].ids:
                last = samples.pop()
                mask, length = last.loss_mask + mask[len(last.ids) :], last.prompt_length
            mask += bytes([True]) * len(said)
            samples.append(Sample(prompt + said, mask, length, shown, turns_left_out=reasons))
        return samples

    # ---- messages and text ----

    def _messages(self, row: dict, column: str) -> list[dict] | None:
        """Return a column as messages; None if it holds something else. Prints keys of messages
        that nothing reads, and unknown roles."""
        messages = messages_field(row, column)
        if messages and self.chat:
            for key in sorted(unread_keys(given_messages(row, column), self.chat.words)):
                self.say_once(f"not used: the key {key} of messages", kind=key)
            roles = {self.chat.role(message["role"]) for message in messages}
            for role in sorted(roles - {*ROLES.values()} - self.chat.words):
                note = f"the role {role} of messages is unknown; its turns are context"
                self.say_once(f"{row.get('_source')}: {note}", kind=f"role {role}")
        return messages

    def _text(self, row: dict, column: str) -> str:
        """Return a column as a text to train on. Raises `ValueError` if it is empty."""
        text = text_field(row, column)
        if self._is_blank(row, dict(role="assistant", content=text)):
            raise bad_row(row, f"column {column} is empty")
        return text

    def _require_text(
        self, row: dict, messages: list[dict], first_trained: int, train_on: str
    ) -> None:
        """Raise `ValueError` if a turn of the model that is trained, or the question before it, is
        empty."""
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and is_wanted(m)]
        trained = [i for i in answers if i >= first_trained]
        for i in trained[-1:] if train_on == "last" else trained:
            asked = [i - 1] if i > 0 and messages[i - 1]["role"] == "user" else []
            for number in [*asked, i]:
                if self._is_blank(row, messages[number]):
                    turn = f"turn {number + 1} ({messages[number]['role']})"
                    raise bad_row(row, f"{turn}: it is empty")

    def _is_blank(self, row: dict, message: dict) -> bool:
        """Return whether a message is empty: no text but end tokens, no call, thought or image."""
        has_image = message["role"] == "user" and (row.get("image") or row.get("images"))
        if has_image or message.get("tool_calls") or message.get("reasoning_content"):
            return False
        return not self._no_text.sub("", message["content"]).strip()

    def _with_system(self, row: dict, messages: list[dict]) -> list[dict]:
        """Put the system text of the row, or else that of `--system_prompt`, before the messages.
        Messages that have a system text keep theirs."""
        columns = [column for column in ("system", "system_prompt") if row.get(column)]
        own, *other = [text_field(row, column) for column in columns] or [None]
        if other not in ([], [own]):
            raise bad_row(row, "the columns system and system_prompt differ; take one out")
        if messages and messages[0]["role"] in SYSTEM:
            if own not in (None, messages[0]["content"]):
                raise bad_row(row, "it has a system text, its messages begin with another one")
            return messages
        system = own or self.system_prompt
        return [dict(role="system", content=system), *messages] if system else messages

    def _with_special_text(self, row: dict, messages: list[dict]) -> list[dict]:
        """Return the messages with a mark for each image, and with `--special_text` applied."""
        applied = []
        for message in self._with_images(row, messages):
            has_end = message["role"] == "assistant"
            texts = {key: self._special_text(row, value, has_end) for key, value in message.items()}
            applied.append(texts | dict(role=message["role"]))
        return applied

    def _special_text(
        self, row: dict, value: object, has_end: bool = False, has_bos: bool = False
    ) -> Any:
        """Apply `--special_text` to a text of the data, or to the texts in a value: print a note
        about the first special token, or hide all of them, so that they are tokenised as plain
        text. BOS at the start (`has_bos`) and an end token at the end (`has_end`) stay tokens."""
        if isinstance(value, dict):
            return {key: self._special_text(row, item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._special_text(row, item) for item in value]
        if not isinstance(value, str):
            return value
        bos = self.tokenizer.bos_token or ""
        start = len(bos) if has_bos and value.startswith(bos) else 0
        ends = [len(end) for end in self.ends if has_end and value.endswith(end)]
        end = max(start, len(value) - max(ends, default=0))
        if self.special_text == "text":
            return value[:start] + self.text_ids.hidden(row, value[start:end]) + value[end:]
        if token := self.text_ids.special.search(value[start:end]):
            problem = f"the text {token[0]} in the data is read as this special token"
            advice = "--special_text text reads it as text"
            self.say_once(f"{row.get('_source')}: {problem}; {advice}", kind="special text")
        return value

    def say_once(self, note: str, kind: str) -> None:
        if kind not in self.said:
            self.said[kind] = note
            distributed.say(note)

    def _with_eos(self, ids: array) -> array:
        """Append EOS unless the ids already end with it."""
        eos = array("i", [self.tokenizer.eos_token_id])
        return ids if ids[-1:] == eos else ids + eos

    def _ids(self, row: dict, text: str, adds_bos: bool = False, after: str | None = None) -> array:
        """Tokenise a text; with `after`, into the ids that the model samples for it after this
        prompt. Raises `ValueError` for a token that the model has no embedding for, and for an
        image in a turn of the model."""
        try:
            if after is None:
                ids = self.text_ids.ids(text, adds_bos)
            else:
                ids = self.text_ids.after(after, text)
        except ValueError as error:
            raise bad_row(row, str(error)) from error
        if (largest := max(ids, default=0)) >= self.ids_end:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            problem = f"the model has no embedding for the token {token!r}; take it out"
            raise bad_row(row, problem)
        if after is not None and self.images is not None:
            self.images.expanded(row, ids, [])
        return ids

    # ---- images ----

    def _with_images(self, row: dict, messages: list[dict]) -> list[dict]:
        """Return messages with a mark for each image, and store the images as files. Raises
        `ValueError` for videos and sounds, and for images in a run without `--vision`."""
        for name in ("video", "videos", "audio", "audios"):
            if row.get(name):
                advice = f"only text and images are supported; --columns _{name}={name} ignores it"
                raise bad_row(row, f"column {name}: {advice}")
        if self.images is not None:
            return self.images.take(row, messages)
        if row.get("images") or row.get("image") or any("images" in m for m in messages):
            advice = "--vision frozen, or --vision train to train the vision tower too"
            scripts = "sft.py, dpo.py, grpo.py and eval.py have it"
            raise bad_row(row, f"the row has images; set {advice} ({scripts})")
        return messages

    def _shown(self, row: dict, ids: array, count: int | None = None) -> tuple[array, dict]:
        """Replace the marks of the first `count` images of the row by the tokens that stand for
        them. Return the ids, and the row with the places of the images in `_images`."""
        if self.images is None:
            return ids, row
        ids, spans = self.images.expanded(row, ids, (row.get("images") or [])[:count])
        return ids, row | dict(_images=spans) if spans else row

    def _plain(self, row: dict, text: str, has_end: bool = False) -> str:
        """Prepare a prompt without a chat template for the tokenizer: images, and special text."""
        (message,) = self._with_images(row, [dict(role="user", content=text)])
        text = self._special_text(row, message["content"], has_end, has_bos=True)
        return text if self.images is None else self.images.in_plain_text(text)


def all_trained(sample: Sample) -> Sample:
    """Return the sample with a loss mask that trains all ids except those of images."""
    mask = bytearray([True]) * len(sample.ids)
    for span in sample.images:
        mask[span.start : span.end] = bytes(span.end - span.start)
    return replace(sample, loss_mask=bytes(mask))


def truncate(sample: Sample, length: int) -> Sample:
    """Return the first `length` tokens of a sample. Raises `ValueError` if an image is cut."""
    # The model does not read the last id, so an image that ends there is cut, too.
    if any(span.start < length <= span.end for span in sample.images):
        problem = f"its first {length} tokens end within an image; set --overlong drop"
        raise bad_row(sample.row, problem)
    return replace(sample, ids=sample.ids[:length], loss_mask=sample.loss_mask[:length])
