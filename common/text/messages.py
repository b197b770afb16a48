"""Read the columns of a row that hold text, messages, tools and calls: check them, and bring the
many forms in which data sets write messages into one. Mostly the encoder calls this."""

import contextlib
import json
import re
from itertools import takewhile
from typing import Annotated, Literal, NotRequired, Required

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs this one below Python 3.12

from common.parallel.process import brief

IMAGE = "\ufffc"  # object replacement character: marks the place of an image in a text
IMAGE_TYPES = ("image", "image_url")  # a message part of one of these types is an image
IMAGE_KEYS = ("image", "url", "path", "image_url")  # one of these keys of the part has the image
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # a message may have its thought here
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= dict(human="user") | dict.fromkeys(("gpt", "chatgpt", "bot", "model", "bard"), "assistant")
RESULTS = ("observation", "tool_response", "ipython")  # other names of the role tool
CALLS = "function_call"  # ShareGPT's role of a turn that consists of calls only, written as JSON
SYSTEM = ("system", "developer")
CONVERSATIONS = ("messages", "conversations")  # columns of whole conversations; ShareGPT's is last


def bad_row(row: dict, problem: str) -> ValueError:
    """Return an error of one line that begins with the place of the row."""
    return ValueError(f"{row.get('_source')}: {brief(' '.join(problem.splitlines()))}")


# ---- text ----


def text_field(row: dict, column: str) -> str:
    """Return the text in a column. Raises `ValueError`, with file and row number, if it is none."""
    value = row.get(column)
    if not isinstance(value, str):
        problem = "is missing" if value is None else f"is {type(value).__name__}, expected a string"
        raise bad_row(row, f"column {column} {problem}")
    require_characters(row, column, value)
    return value


def require_characters(row: dict, column: str, value: object) -> None:
    """Raise `ValueError` if a value from JSON has half a surrogate pair: UTF-8 cannot write it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        problem = "contains a lone surrogate, which is not a character"
        raise bad_row(row, f"column {column} {problem}")


# ---- messages ----


def arguments_of(value: object) -> object:
    """Return the arguments of a call as an object. They may be JSON text, or missing. Raises
    `ValueError` for text that is not JSON."""
    while isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments are not JSON: {error}") from error
    return {} if value is None or isinstance(value, str) else value


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    type: Literal["image", "image_url"]


class Parts(TypedDict):
    content: list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class Function(TypedDict):
    name: str
    arguments: Annotated[dict, BeforeValidator(arguments_of)]


class Call(TypedDict):
    function: Function
    id: NotRequired[str | int | None]


class Message(TypedDict, total=False):
    role: Required[str]
    content: Required[str]
    reasoning_content: str
    tool_calls: list[Call]
    tool_call_id: str | int
    weight: bool
    """whether the model's turn is trained, in OpenAI's format for fine-tuning"""
    train: bool
    """the same in Axolotl's format"""


class Schema(TypedDict):
    name: str


class Tool(TypedDict):
    function: Schema


_PARTS = TypeAdapter(Parts)
_MESSAGE = TypeAdapter(Message)
_TOOLS = TypeAdapter(list[Tool | Schema])


def messages_field(row: dict, column: str) -> list[dict] | None:
    """Return a column as a list of messages in one form; None if it holds neither such a list nor
    its JSON text. Raises `ValueError` for a malformed message.

    In this form the content is a string, the arguments of calls are objects, a thought stands in
    `reasoning_content`, and roles have their usual names. In the data, the content may be a list of
    parts, and a turn with calls may have none."""
    value = given_messages(row, column)
    if value is None:
        return None
    messages = []
    for number, message in enumerate(value, 1):
        try:
            messages.append(_in_one_form(message))
        except RecursionError:
            raise bad_row(row, f"column {column}: turn {number}: nested too deeply") from None
        except ValueError as error:
            problem = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                problem = first["msg"].removeprefix("Value error, ")
                problem = ": ".join(filter(None, [".".join(map(str, first["loc"])), problem]))
            raise bad_row(row, f"column {column}: turn {number}: {problem}") from None
    require_characters(row, column, messages)
    return messages


def _in_one_form(message: object) -> dict:
    """Return a message in the form of `messages_field`: no empty fields, ShareGPT's `from` and
    `value` renamed to role and content, and images of the parts listed under `images`. All keys of
    a call stay, in their order: templates may write a call as JSON."""
    if not isinstance(message, dict):
        raise ValueError("Input should be a valid dictionary")
    message = {key: value for key, value in message.items() if value is not None}
    if message.keys() >= {"from", "value"}:
        message["role"] = message.pop("from")
        message["content"] = message.pop("value")
        if message["role"] in RESULTS:
            message["role"] = "tool"
    if message.get("function_call"):
        raise ValueError("it has a function_call, an old form; give tool_calls")
    if message.get("role") == CALLS:
        calls = arguments_of(message.pop("content", None))
        calls = calls if isinstance(calls, list) else [calls]
        message["role"] = "assistant"
        message["tool_calls"] = [dict(type="function", function=call) for call in calls]
    if isinstance(message.get("role"), str):
        message["role"] = ROLES.get(message["role"].lower(), message["role"])
    thoughts = [message.pop(key) for key in THOUGHT_KEYS if key in message]
    if thought := next(filter(None, thoughts), None):
        message["reasoning_content"] = thought
        if str(message.get("content")).lstrip().startswith("<think>"):
            raise ValueError("it has its thought twice, in the content and beside it")
    calls = message.pop("tool_calls", [])
    if calls != []:
        if message.get("role") != "assistant":
            raise ValueError("tool_calls stand in an assistant's message only")
        message = dict(content="") | message | dict(tool_calls=calls)
    if isinstance(content := message.get("content"), list):
        parts = _PARTS.validate_python(dict(content=content))["content"]
        texts = [part["text"] if part["type"] == "text" else IMAGE for part in parts]
        message["content"] = "".join(texts)
        if images := [_image_of(part) for part in content if part["type"] in IMAGE_TYPES]:
            message["images"] = images
    checked = _MESSAGE.validate_python(message)
    # First the keys of `Message` in their order, then all others.
    message = checked | {key: message[key] for key in message if key not in checked}
    if calls != []:
        message["tool_calls"] = []
        for call in calls:
            function = call["function"]
            function = function | dict(arguments=arguments_of(function["arguments"]))
            message["tool_calls"].append(call | dict(function=function))
    return message


def _image_of(part: dict) -> object:
    """Return the image in a part, in Qwen's or OpenAI's form; None if it is in the row's column."""
    image = next((part[key] for key in IMAGE_KEYS if part.get(key)), None)
    return image["url"] if isinstance(image, dict) and "url" in image else image


# ---- messages or text ----

# For a column of answers: the column that holds the prompts.
PROMPT_OF = dict(completion="prompt", chosen="prompt", rejected="prompt", answer="question",
                 output="input")  # fmt: skip


def given_messages(row: dict, column: str) -> list | None:
    """Return the messages in a column as the data writes them; None if the column holds plain text.
    Messages are a list or, in tables that have no lists, the JSON text of a list.

    In `messages` and `conversations` JSON text always means messages. In other columns it may be
    plain text, since a user may ask for JSON. There, all roles must be known and, in a prompt, the
    user must have a turn. An answer must repeat the prompt, unless the row has no column for the
    prompt, or the prompt is JSON text of messages too. Raises `ValueError` if only some messages
    have a known form, and for an answer in JSON text to a prompt that is a list."""
    value = row.get(column)
    if not isinstance(value, str):
        return value if isinstance(value, list) else None
    messages = _json_list(value)
    if messages is None or column in CONVERSATIONS:
        return messages
    prompt = PROMPT_OF.get(column)
    has_prompt = prompt is not None and row.get(prompt) is None  # else its own column has it
    known = [_has_known_role(message) for message in messages]
    if (column == "prompt" or has_prompt) and any(known) and not all(known):
        problem = f"message {known.index(False) + 1} has another form or an unknown role"
        raise bad_row(row, f"column {column} is JSON text of messages, but {problem}; give a list")
    if not all(known):
        return None
    if column == "prompt":
        return messages if any(role_of(message) == "user" for message in messages) else None
    if prompt is None:
        return None
    if has_prompt:
        return messages
    with contextlib.suppress(ValueError):
        if _repeated(_asked(row, prompt), messages_field(dict(messages=messages), "messages")):
            return messages
    if isinstance(row[prompt], list):
        problem = f"column {column} is JSON text of messages, column {prompt} is a list"
        raise bad_row(row, f"{problem}; make the answer a list, too")
    return None if given_messages(row, prompt) is None else messages


def _json_list(text: str) -> list | None:
    """Return the list if a text is JSON for a list whose first member is an object, else None."""
    if not re.match(r"\s*\[\s*\{", text):
        return None
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def role_of(message: dict) -> object:
    """Return the role of a message by its usual name (`user` for `human`); None if not a text."""
    role = message["role"] if "role" in message else message.get("from")
    return ROLES.get(role.lower(), role) if isinstance(role, str) else None


def _has_known_role(message: object) -> bool:
    """Return whether a value looks like a message: it has a content, and a role that we know."""
    if not isinstance(message, dict):
        return False
    forms = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
    has_form = any(message.keys() >= form for form in forms)
    return has_form and role_of(message) in {*ROLES.values(), *RESULTS, CALLS}


def prompt_apart(row: dict, prompt: str, answers: tuple[str, ...]) -> dict:
    """Cut the prompt out of the `answers`. The messages of an answer may repeat the prompt at their
    start, and add a system message that the prompt lacks: that start becomes the prompt. Raises
    `ValueError` if an answer begins with another question or system message."""
    asked = _asked(row, prompt)
    system = asked[: _begins_with_system(asked)]
    apart: dict[str, list[dict]] = {}
    for column in answers:
        answer = messages_field(row, column) or []
        own = answer[: _begins_with_system(answer)]
        repeated = _repeated(asked, answer)
        if repeated and not (own and system and own != system):
            given = [*(own or system), *answer[len(own) : repeated]]
            if given != apart.setdefault(prompt, given):
                raise bad_row(row, f"{' and '.join(answers)} do not begin with the same prompt")
            apart[column] = answer[repeated:]
        elif answer and answer[0]["role"] in ("user", *SYSTEM):
            raise bad_row(row, f"column {column} begins with a question, but not with the prompt")
        elif answer:
            apart[column] = answer
    return row | apart if prompt in apart else row


def _asked(row: dict, prompt: str) -> list[dict]:
    """Return a prompt as messages. A prompt that is text becomes a turn of the user."""
    messages = messages_field(row, prompt)
    return [dict(role="user", content=text_field(row, prompt))] if messages is None else messages


def _repeated(asked: list[dict], answer: list[dict]) -> int:
    """Return how many messages at the start of an answer repeat the prompt `asked`, with a system
    message before it; 0 if the answer does not begin with the prompt, or ends with it."""
    question = asked[_begins_with_system(asked) :]
    start = _begins_with_system(answer)
    end = start + len(question)
    is_same = all(map(_is_same, question, answer[start:end]))
    return end if question and len(answer) > end and is_same else 0


def _begins_with_system(messages: list[dict]) -> int:
    """Return 1 if the first message is a system message, else 0."""
    return int(bool(messages) and messages[0]["role"] in SYSTEM)


def _is_same(asked: dict, message: dict) -> bool:
    """Return whether two messages are the same but for blanks around the text, and for images that
    only the second one has."""
    text = message["content"]
    if "images" not in asked:
        text = text.replace(IMAGE, "")
        message = {key: value for key, value in message.items() if key != "images"}
    return asked | dict(content=asked["content"].strip()) == message | dict(content=text.strip())


def tools_field(row: dict) -> list[dict]:
    """Return the JSON schemas of functions in the column `tools`, which may hold them as JSON text.
    Raises `ValueError` if they are not a list of schemas with names."""
    try:
        tools = json.loads(row["tools"]) if isinstance(row["tools"], str) else row["tools"]
        _TOOLS.validate_python(tools or [])
    except (ValidationError, RecursionError):
        problem = "column tools must list JSON schemas of functions, each with a name"
        raise bad_row(row, problem) from None
    except ValueError as error:
        raise bad_row(row, f"column tools is not JSON: {error}") from error
    require_characters(row, "tools", tools)
    return tools or []


READ_KEYS = {*"role content type text tool_calls function arguments id index tool_call_id".split(),
             *"from value weight train images".split(), *THOUGHT_KEYS, *IMAGE_KEYS}  # fmt: skip


def unread_keys(messages: list[dict], template_reads: set[str]) -> set[str]:
    """Return the keys in messages, and in their parts and calls, that have a value and that neither
    we nor the chat template read."""
    keys: set[str] = set()
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for item in (message, *parts, *(message.get("tool_calls") or [])):
            # a result may repeat the name of the function: its call has it
            known = {"name"} if item.get("role") == "tool" else set()
            keys |= {key for key, value in item.items() if value is not None} - known
    return keys - READ_KEYS - template_reads


def with_results_in_order(row: dict, messages: list[dict]) -> list[dict]:
    """Put the results of calls into the order of their calls: templates that ignore ids pair them
    by their order. Raises `ValueError` if a turn with calls is not followed by one result for each
    call."""
    ordered = list(messages)
    for i, message in enumerate(messages):
        ids = [call.get("id") for call in message.get("tool_calls", ())]
        results = [*takewhile(lambda later: later["role"] == "tool", messages[i + 1 :])]
        given = [result.get("tool_call_id") for result in results]
        if not ids or not results:
            continue
        has_ids = None not in (*ids, *given)
        agree = not has_ids or ({*given} == {*ids} and len({*ids}) == len(ids))
        if len(given) != len(ids) or not agree:
            named, called = (", ".join(map(str, names)) for names in (given, ids))
            problem = f"results of the calls {named} for the calls {called}; give one for each"
            raise bad_row(row, f"turn {i + 1}: {problem}")
        if has_ids:
            results = sorted(results, key=lambda result: ids.index(result["tool_call_id"]))
            ordered[i + 1 : i + 1 + len(ids)] = results
    return ordered


# ---- images ----


def in_parts(message: dict, has_images: bool = False) -> dict:
    """Return the message with its content as a list of parts, which templates for images read: an
    image part for each mark in the text, and text parts between them."""
    texts = message["content"].split(IMAGE) if has_images else [message["content"]]
    parts = [dict(type="text", text=texts[0])]
    for text in texts[1:]:
        parts += [dict(type="image"), dict(type="text", text=text)]
    shown = [part for part in parts if part != dict(type="text", text="")]
    return message | dict(content=shown or parts)


# ---- thoughts ----


def opened_thought(prompt: str) -> str | None:
    """Return the tag if a prompt ends with one that opens a thought, such as <think>, else None."""
    match = re.search(r"(<(\w+:)?(think|thinking|thought|reasoning)>|\[THINK\])\s*$", prompt)
    return match[1] if match else None


def closing(tag: str) -> str:
    return f"{tag[0]}/{tag[1:]}"


def with_thought(thought: str, answer: str, tag: str = "<think>") -> str:
    """Join a thought in tags and the answer, as most chat templates do."""
    return f"{tag}\n{thought}\n{closing(tag)}\n\n{answer}"
