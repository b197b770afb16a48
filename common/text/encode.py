"""Rows -> token ids with loss masks. As in TRL, the columns of a row determine its use."""

from dataclasses import replace
from itertools import chain

from common.config.extra import extra
from common.config.groups import BaseArgs
from common.packs.sample import Sample
from common.parallel import distributed
from common.text.chat import SAID, ChatTemplate
from common.text.messages import bad_row, given_messages, messages_field, text_field, unread_keys
from common.text.text_ids import TextIds
from common.text.turns import ANOTHER_FORM, Rendering, conversation_of, prompt_of, reply_of


class Encoder:
    """Encoder of rows for training and sampling. A text is rendered whole before it is tokenised,
    and a prompt has the same ids in training as in sampling."""

    def __init__(self, tokenizer, args: BaseArgs):
        self.tokenizer = tokenizer
        self.prompt_format = format_of(tokenizer, args)
        self.system_prompt = args.system_prompt
        self.special_text = args.special_text
        self.chat = None
        if tokenizer.chat_template is not None and args.prompt_format != "plain":
            self.chat = ChatTemplate(tokenizer, args.template_kwargs)
        else:
            names = ["system_prompt", "template_kwargs"]
            given = [name for name in names if getattr(args, name)]
            for flag in ["prompt_format chat"] if args.prompt_format == "chat" else given:
                problem = "the tokenizer has no chat template, or --prompt_format plain"
                raise ValueError(f"--{flag}: {problem} does not use it; set --chat_template")
        self.ends = {tokenizer.eos_token} - {None, ""}  # texts that end a completion
        if self.chat and self.chat.end and self.chat.end.token:
            self.ends.add(self.chat.end.token)
        self.text_ids = TextIds(tokenizer, self.ends, reads_hidden=args.special_text == "text")
        self.said: dict[str, str] = {}  # the note of each kind that has been printed
        self.images = None
        if args.vision is not None:
            with extra("images", f"--vision {args.vision}"):
                from extras.images.encoder import ImageEncoder
            self.images = ImageEncoder(tokenizer, args)

    # ---- prompts ----

    def prompt(self, row: dict, columns: tuple[str, ...]) -> list[int]:
        """Return the prompt ids of an RL row, up to the start of the reply. A turn of the model at
        the end of the prompt is continued. Without columns there is no prompt."""
        if not columns:
            return []
        asked = self.as_asked(row, columns[0])
        if isinstance(asked, str):
            (ids,) = self._pieces(row, self._plain(row, asked), [], adds_bos=True)
            return ids
        messages = self._read_messages(row, asked)
        return self._chat_sample(row, prompt_of(self.chat, row, messages)).ids

    def as_asked(self, row: dict, column: str) -> list[dict] | str:
        """Return a prompt: messages or, without a chat template, text. A question as text ends with
        a line break."""
        messages = self._messages(row, column)
        if messages is None:
            text = text_field(row, column)
            if self.chat is None or (self.prompt_format == "auto" and column != "question"):
                names = ("tools", "chat_template_kwargs", "system", "system_prompt")
                flag = ["--system_prompt"] if self.system_prompt else []
                for name in [f"column {name}" for name in names if row.get(name)] + flag:
                    problem = f"{name} needs chat format, column {column} is plain text"
                    raise bad_row(row, f"{problem}; set --prompt_format chat")
                return text + ("\n" if column == "question" else "")
            messages = [dict(role="user", content=text)]
        elif self.chat is None:
            raise bad_row(row, f"column {column} lists messages, which need a chat template")
        return self._with_system(row, messages)

    def reply(
        self,
        messages: list[dict],
        last_token: int | None = None,
        calls: list[dict] | None = None,
        tools: list[dict] | None = None,
    ) -> list[int]:
        """Return the ids of `messages` between two turns of the model: from after the end token of
        the first turn to the start of the second. They begin with that end token if the first turn
        stopped at another `last_token`. `calls`: tool calls of the first turn."""
        row = dict(_source="the messages between two turns", tools=tools)
        turn = SAID | dict(content="", tool_calls=calls) if calls else SAID
        end, text = reply_of(self.chat, row, turn, self._read_messages(row, messages))
        if last_token not in (None, self.tokenizer.convert_tokens_to_ids(end)):
            last = end if calls else self.chat.end.last
            return self._pieces(row, last + text, [])[0]
        _, ids = self._pieces(row, end + text, [len(end)])
        return ids

    # ---- samples ----

    def sft(self, row: dict, columns: tuple[str, ...], train_on_all: bool = False) -> Sample:
        """Encode a supervised row. The completion or every assistant turn is trained, with its EOS;
        with `train_on_all` everything but images."""
        if columns in (("messages",), ("conversations",)):  # ShareGPT has conversations
            messages = self._messages(row, columns[0])
            if self.chat is None:
                raise bad_row(row, f"column {columns[0]} needs a chat template, not plain")
            if not messages:
                raise bad_row(row, f"column {columns[0]} must be a list of messages")
            messages = self._read_messages(row, self._with_system(row, messages))
            whole = conversation_of(self.chat, row, messages, train_on_all=train_on_all)
            sample = self._chat_sample(row, whole)
        elif columns == ("text",):
            text = self._plain(row, text_field(row, "text"), has_end=True)
            (ids,) = self._pieces(row, text, [], adds_bos=True)
            ids = self._with_eos(ids)
            sample = Sample(ids, [True] * len(ids), row=row)
        else:
            sample = self._prompt_completion(row, *columns)
        if not train_on_all:
            return sample
        mask = [True] * len(sample.ids)
        for span in sample.images:
            mask[span.start : span.end] = [False] * (span.end - span.start)
        return replace(sample, loss_mask=mask, context_turns=0)

    def completion(self, row: dict, prompt: str, completion: str) -> Sample:
        """Encode a prompt and a completion up to the last trained token, for objectives that score
        completions. Raises `ValueError` for a completion without text, or with a turn that cannot
        be trained."""
        messages = messages_field(row, completion)
        last = messages[-1] if messages else dict(content=str(row.get(completion, "?")))
        if not (last.get("tool_calls") or last["content"].strip()):
            raise bad_row(row, f"column {completion} is empty")
        sample = self._prompt_completion(row, prompt, completion)
        if not any(sample.loss_mask):
            raise bad_row(row, f"column {completion} has no assistant turn")
        if not sample.prompt_length:
            raise bad_row(row, f"column {prompt} is empty")
        if sample.context_turns:
            raise bad_row(row, f"column {completion}: an earlier turn: {ANOTHER_FORM}")
        return truncate(sample, len(sample.ids) - sample.loss_mask[::-1].index(True))

    def _prompt_completion(self, row: dict, prompt: str, completion: str) -> Sample:
        asked = self.as_asked(row, prompt)
        if not isinstance(asked, str):
            answer = self._messages(row, completion)
            if not answer:
                answer = [dict(role="assistant", content=text_field(row, completion))]
            elif answer[0]["role"] in ("system", "user"):  # it repeats the prompt
                given = messages_field(row, prompt) or []
                if answer[: len(given)] != given or len(answer) == len(given):
                    problem = "begins with a question, but not with the prompt"
                    raise bad_row(row, f"column {completion} {problem}")
                answer = answer[len(given) :]
            messages = self._read_messages(row, asked + answer)
            return self._chat_sample(row, conversation_of(self.chat, row, messages, len(asked)))
        if given_messages(row, completion) is not None:
            problem = f"column {completion} lists messages, column {prompt} is text"
            raise bad_row(row, f"{problem}; --prompt_format chat makes that a user turn")
        asked = self._plain(row, asked)
        answered = self._read(row, text_field(row, completion), has_end=True, has_bos=True)
        prompt_ids, ids = self._pieces(row, asked + answered, [len(asked)], adds_bos=True)
        ids = self._with_eos(ids)
        mask = [False] * len(prompt_ids) + [True] * len(ids)
        return Sample(prompt_ids + ids, mask, prompt_length=len(prompt_ids), row=row)

    def _chat_sample(self, row: dict, rendering: Rendering) -> Sample:
        cuts = [*chain(*((turn.start, turn.end) for turn in rendering.turns))]
        trained = [*chain(*((False, turn.trained) for turn in rendering.turns)), False]
        ids: list[int] = []
        mask: list[bool] = []
        for piece, is_trained in zip(self._pieces(row, rendering.text, cuts), trained, strict=True):
            ids += piece
            mask += [is_trained] * len(piece)
        prompt_length = mask.index(True) if True in mask else len(ids)
        return Sample(ids, mask, prompt_length, row, context_turns=rendering.context_turns)

    # ---- messages and text ----

    def _messages(self, row: dict, column: str) -> list[dict] | None:
        """Return a column as messages, None if it has none. Report keys that nothing reads."""
        messages = messages_field(row, column)
        if messages and self.chat:
            for key in sorted(unread_keys(given_messages(row, column), self.chat.words)):
                self.say_once(f"not used: the key {key} of messages", kind=key)
        return messages

    def _with_system(self, row: dict, messages: list[dict]) -> list[dict]:
        """Return the messages with the system text of the row, or else of `--system_prompt`."""
        columns = [column for column in ("system", "system_prompt") if row.get(column)]
        own = text_field(row, columns[0]) if columns else None
        if messages and messages[0]["role"] in ("system", "developer"):
            if own not in (None, messages[0]["content"]):
                raise bad_row(row, "it has a system text, its messages begin with another one")
            return messages
        system = own or self.system_prompt
        return [dict(role="system", content=system), *messages] if system else messages

    def _read_messages(self, row: dict, messages: list[dict]) -> list[dict]:
        """Return the messages with their texts as `_read` returns them, and marks of images."""
        read = []
        for message in self._with_images(row, messages):
            has_end = message["role"] == "assistant"
            texts = {key: self._read(row, value, has_end) for key, value in message.items()}
            read.append(texts | dict(role=message["role"]))
        return read

    def _read(
        self, row: dict, value: object, has_end: bool = False, has_bos: bool = False
    ) -> object:
        """Return a text of the data, or a value with texts, as `--special_text` reads it: report
        the first special token, or hide all so that they stay text. With `has_end`, a token that
        ends turns may end the text; with `has_bos`, BOS may begin it."""
        if isinstance(value, dict):
            return {key: self._read(row, item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._read(row, item) for item in value]
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

    def _with_eos(self, ids: list[int]) -> list[int]:
        """Return the ids with one EOS at the end, also if the text has its own."""
        eos = self.tokenizer.eos_token_id
        return ids if ids[-1:] == [eos] else [*ids, eos]

    def _pieces(
        self, row: dict, text: str, cuts: list[int], adds_bos: bool = False
    ) -> list[list[int]]:
        """Return the ids of the pieces of a text. Raises `ValueError` for a token that the model
        lacks."""
        try:
            pieces = self.text_ids.pieces(text, cuts, adds_bos)
        except ValueError as error:
            raise bad_row(row, str(error)) from error
        limit = getattr(self.tokenizer, "model_vocab_size", None)
        if limit:
            largest = max(max(piece, default=0) for piece in pieces)
            if largest >= limit:
                token = self.tokenizer.convert_ids_to_tokens(largest)
                problem = f"the model has no embedding for the token {token!r}; take it out"
                raise bad_row(row, problem)
        return pieces if self.images is None else self.images.expanded(row, pieces)

    # ---- images ----

    def _with_images(self, row: dict, messages: list[dict]) -> list[dict]:
        """Return messages with a mark for each image; images become files. Raises `ValueError` for
        videos and sounds, and for images in a run without `--vision`."""
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

    def _plain(self, row: dict, text: str, has_end: bool = False) -> str:
        """Return the text that the tokenizer gets for a prompt without a chat template."""
        (message,) = self._with_images(row, [dict(role="user", content=text)])
        text = self._read(row, message["content"], has_end, has_bos=True)
        return text if self.images is None else self.images.in_plain_text(text)


def format_of(tokenizer, args: BaseArgs) -> str:
    """Return `--prompt_format`, as `load_tokenizer` has chosen it for the policy's tokenizer."""
    return getattr(tokenizer, "prompt_format", args.prompt_format)


def truncate(sample: Sample, length: int) -> Sample:
    """Return the first `length` tokens of a sample. Raises `ValueError` if an image is cut."""
    if any(span.start < length <= span.end for span in sample.images):
        problem = f"its first {length} tokens end within an image; set --overlong drop"
        raise bad_row(sample.row, problem)
    return replace(sample, ids=sample.ids[:length], loss_mask=sample.loss_mask[:length])
