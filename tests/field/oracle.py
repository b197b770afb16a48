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
        assert at >= 0, f"message {number} ({message['role']}) is not in the text"
        place = at + len(content) if in_order else place


def check_sft(family: Family, encoder: Encoder, messages: list[dict], **row: object) -> int:
    """Encode a conversation that ends with a turn of the model and check its sequences: each turn
    is in one of them or counted, a whole turn after the ids of its rendered prompt. Return the
    number of turns that are left out. Raises the encoder's `ValueError`."""
    tokenizer, row = encoder.tokenizer, row | dict(_source="x:1")
    samples = encoder.sft(row | dict(messages=messages), ("messages",))
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    options = dict(add_generation_prompt=True, tools=row.get("tools"))
    prompts = {
        i: [ids_of(tokenizer, text) for text in renderings(tokenizer, messages[:i], **options)]
        for i in turns
    }
    left = list(turns)
    for sample in samples:
        ids, spans = sample.ids.tolist(), spans_of([*map(bool, sample.loss_mask)])
        assert spans and spans[-1][1] == len(ids), "text follows the last turn"
        assert sample.prompt_length == spans[0][0], "another length of the prompt"
        for start, end in spans:
            text = tokenizer.decode(ids[start:end])
            said = [i for i in left if is_turn(family, tokenizer, ids[start:end], messages[i])]
            assert said, f"trained span is no turn of the model: {text!r}"
            said = [i for i in said if ids[:start] in prompts[i]]
            assert said, f"trained span does not follow its prompt: {text!r}"
            i = said[0]
            left = [turn for turn in left if turn != i]
            if messages[i - 1]["role"] != "assistant":  # else it would be continued
                asked = encoder.prompt(row | dict(prompt=messages[:i]), ("prompt",))
                assert asked.tolist() == ids[:start], f"prompt differs from that of turn {i + 1}"
        check_shown(tokenizer, ids, messages[: i + 1])
    for before, after in pairwise(samples):
        assert after.ids[: len(before.ids)] != before.ids, "two sequences could be one"
    assert len(samples[0].turns_left_out) == len(left), "turns are counted wrong"
    return len(left)
