"""An independent check of encoded conversations, from the rendering and tokenising of transformers
alone."""

import re
import unicodedata
from itertools import pairwise, product

from field.families import Family

from common.text.encode import Encoder

# Text between a turn's thought, its answer and its end. White space is removed before.
MARKUP = r"(?:<[^<>]*>|\[/?THINK\]|analysis|final|assistant|thought|to=self|to=user|:)*"
THOUGHTS = ("given", "reasoning_content", "thinking", "reasoning", "inline")


class Wrong(AssertionError):
    """A conversation that was encoded, but not as its model would sample it."""


def require(holds: bool, problem: str) -> None:
    if not holds:
        raise Wrong(problem)


def squeezed(text: str) -> str:
    """Return a text without white space, which templates and tokenizers trim, in the normal form of
    Qwen."""
    return "".join(unicodedata.normalize("NFC", text).split())


def thought_and_answer(message: dict) -> tuple[str, str]:
    thought, content = message.get("reasoning_content") or "", message["content"]
    if not thought and "</think>" in content:
        thought, _, content = content.partition("</think>")
        thought = thought.replace("<think>", "")
    return squeezed(thought), squeezed(content)


def has_thought(message: dict) -> bool:
    return bool(message.get("reasoning_content")) or "</think>" in message["content"]


def in_form(message: dict, key: str, developer: str, parts: bool) -> dict:
    """Return a message with its thought under another key or in its text, and another role of a
    developer."""
    made = dict(message)
    if made["role"] == "developer":
        made["role"] = developer
    inline = re.fullmatch(r"\s*<think>\n?(.*?)\n?</think>\s*(.*)", made["content"], re.DOTALL)
    if key != "given" and made["role"] == "assistant" and (inline or made.get("reasoning_content")):
        thought = inline[1] if inline else made.pop("reasoning_content")
        answer = inline[2] if inline else made["content"]
        made["content"] = f"<think>\n{thought}\n</think>\n\n{answer}" if key == "inline" else answer
        made |= {} if key == "inline" else {key: thought}
    return made | (dict(content=[dict(type="text", text=made["content"])]) if parts else {})


def renderings(tokenizer, messages: list[dict], **options: object) -> set[str]:
    """Return the texts of a conversation in all forms that a template may read."""
    texts = set()
    thoughts = THOUGHTS if any(map(has_thought, messages)) else THOUGHTS[:1]
    has_developer = any(message["role"] == "developer" for message in messages)
    roles = ("developer", "system") if has_developer else ("",)
    for form in product(thoughts, roles, (False, True)):
        try:
            made = [in_form(message, *form) for message in messages]
            texts.add(tokenizer.apply_chat_template(made, tokenize=False, **options))
        except Exception:  # templates raise anything
            continue
    return texts


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def spans_of(mask: list[bool]) -> list[tuple[int, int]]:
    edges = [i for i, (a, b) in enumerate(pairwise([False, *mask, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def is_prompt(tokenizer, ids: list[int], prompts: list[set[str]]) -> bool:
    """Return whether the ids are those of the last of `prompts`, the texts after which each turn is
    sampled.

    Exception: where one token of the whole text would cover the end of an earlier prompt, the text
    there has other tokens, as the model saw and sampled them. Its characters are the same."""
    return any(
        ids == (whole := ids_of(tokenizer, text))
        or decoded_alike(tokenizer, ids, whole, prompts[:-1])
        for text in prompts[-1]
    )


def _covers_a_cut(tokenizer, whole: list[int], earlier: list[set[str]]) -> bool:
    prompts = (ids_of(tokenizer, text) for texts in earlier for text in texts)
    return any(whole[: len(ids)] != ids and _starts(tokenizer, whole, ids) for ids in prompts)


def _starts(tokenizer, whole: list[int], ids: list[int]) -> bool:
    return tokenizer.decode(whole).startswith(tokenizer.decode(ids))


def is_turn(family: Family, tokenizer, ids: list[int], message: dict) -> bool:
    """Return whether the ids are the thought, the answer and the end of a turn, each once and
    nothing else."""
    tokens = tokenizer.convert_ids_to_tokens(ids)
    ends = [token for token in tokens if token in family.ends]
    if len(ends) != 1 or tokens[-1] != ends[0]:
        return False
    thought, answer = map(re.escape, thought_and_answer(message))
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    call = "".join(f".*{re.escape(name)}.*" for name in names)
    said = squeezed(tokenizer.decode(ids[:-1]))
    # Gemma 4 writes calls first
    orders = (answer + MARKUP + call, call + answer) if call else (answer + MARKUP,)
    return any(re.fullmatch(MARKUP + thought + MARKUP + order, said, re.DOTALL) for order in orders)


def check_shown(tokenizer, ids: list[int], messages: list[dict]) -> None:
    """Require that all messages but thoughts stand in the text: questions and answers in their
    order, other messages at any place."""
    text, place = squeezed(tokenizer.decode(ids)), 0
    for number, message in enumerate(messages, 1):
        _, content = thought_and_answer(message)
        in_order = message["role"] in ("user", "assistant") and "tool_calls" not in message
        at = text.find(content, place if in_order else 0)
        require(at >= 0, f"message {number} ({message['role']}) is not in the text")
        place = at + len(content) if in_order else place


def check_whole(
    family: Family, tokenizer, ids: list[int], texts: set[str], prompts: list[set[str]]
) -> None:
    """Require the ids of the template's whole text. Exceptions: the token that ends a turn is
    appended where the template leaves it out; one token of the whole text would cover the end of a
    prompt; the last prompt opens a thought that the template leaves out of the turn."""
    wholes = [ids_of(tokenizer, text + end) for text in texts for end in ("", *family.ends)]
    if any(ids == whole or decoded_alike(tokenizer, ids, whole, prompts) for whole in wholes):
        return
    continued = any(text.startswith(prompt) for text in texts for prompt in prompts[-1])
    require(not continued, f"the ids are not those of the text: {tokenizer.decode(ids)!r}")


def decoded_alike(tokenizer, ids: list[int], whole: list[int], prompts: list[set[str]]) -> bool:
    """Return whether the ids differ from the whole text's only because a token of it covers the end
    of a prompt."""
    is_same_text = tokenizer.decode(ids) == tokenizer.decode(whole)
    return is_same_text and _covers_a_cut(tokenizer, whole, prompts)


def check_sft(family: Family, encoder: Encoder, messages: list[dict], **row: object) -> int:
    """Encode a conversation that ends with a turn of the model and check it. Return the number of
    turns that are context. Raises `Wrong`, or the encoder's `ValueError`."""
    tokenizer = encoder.tokenizer
    sample = encoder.sft(dict(messages=messages, _source="x:1", **row), ("messages",))
    ids, spans = sample.ids, spans_of(sample.loss_mask)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    check_shown(tokenizer, ids, messages)
    require(0 < len(spans) <= len(turns), f"{len(spans)} trained spans for {len(turns)} turns")
    require(sample.context_turns == len(turns) - len(spans), "context turns are counted wrong")
    tools = row.get("tools")
    options = dict(add_generation_prompt=True, tools=tools)
    prompts = [renderings(tokenizer, messages[:i], **options) for i in turns]
    check_whole(family, tokenizer, ids, renderings(tokenizer, messages, tools=tools), prompts)
    left = list(turns)
    for start, end in spans:
        text = tokenizer.decode(ids[start:end])
        said = [i for i in left if is_turn(family, tokenizer, ids[start:end], messages[i])]
        require(bool(said), f"trained span is no turn of the model: {text!r}")
        said = [i for i in said if is_prompt(tokenizer, ids[:start], prompts[: turns.index(i) + 1])]
        require(bool(said), f"trained span does not follow its prompt: {text!r}")
        i = said[0]
        left = [later for later in left if later > i]
        if i:
            asked = encoder.prompt(dict(prompt=messages[:i], _source="x:1", **row), ("prompt",))
            require(asked == ids[:start], f"prompt of sampling differs from that of turn {i + 1}")
    text = squeezed(tokenizer.decode(ids[end:], skip_special_tokens=True))
    require(i != turns[-1] or not text, f"text follows the last turn: {text}")
    return sample.context_turns
