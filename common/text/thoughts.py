"""Thoughts before an answer, such as `<think>...</think>`: find them, and cut them from what a
reward reads.

A thought may contain a wrong number, a box or a program. None of it is the answer, which begins
after the last thought. If that thought is unfinished, there is no answer."""

import re
from collections.abc import Callable, Sequence

from common.packs.sample import Completion

# Tags that a chat template names: <think>, </think>, <seed:think>, <thought>, <think_fast>, ...
TAG = re.compile(r"</?((?:\w+[:|])?\w*(?:think|thought|reason)\w*(?::\w+)?)>")
# Other marks: the start and the end of a thought, as regular expressions.
OTHERS = (
    (r"\[THINK\]", r"\[/THINK\]"),  # Mistral
    (  # gpt-oss
        r"<\|channel\|>(?:analysis|commentary)[^<]*(?:<\|message\|>)?",
        r"<\|channel\|>final<\|message\|>",
    ),
    (r"<\|channel>\w*", r"<channel\|>"),  # Gemma 4
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),  # Command A
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),  # OpenThinker
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),  # Apertus
    (r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>"),  # Kimi K3
    (r"◁think▷", r"◁/think▷"),  # Kimi-VL
)
TAIL = 32  # look for the start of a thought in this many last tokens of a prompt


def answer_of(
    text: str, inside: bool = False, start: str = "<think>", end: str = "</think>"
) -> str:
    """Return the part of `text` after its last thought; "" if a thought is unfinished. Line breaks
    between the two are dropped.

    `inside`: whether the text begins inside a thought, because the prompt has opened it. `start`
    and `end`: regular expressions of the marks."""
    ends = [match.end() for match in re.finditer(end, text)]
    if inside and not ends:
        return ""
    answer = text[ends[-1] :].lstrip("\r\n") if ends else text
    return "" if re.search(start, answer) else answer


def pairs_of_marks(template: str) -> list[tuple[str, str]]:
    """Return (start mark, end mark) for each kind of thought, as regular expressions: the kinds
    that the chat template mentions, and <think>, which a prompt may ask for."""
    names = {"think", *TAG.findall(template)}
    pairs = [(re.escape(f"<{name}>"), re.escape(f"</{name}>")) for name in sorted(names)]
    return pairs + [pair for pair in OTHERS if any(re.search(mark, template) for mark in pair)]


def thought_marks(template: str) -> tuple[str, str]:
    """Return one regular expression for the start mark of any kind of thought, one for the end."""
    starts, ends = zip(*pairs_of_marks(template), strict=True)
    return "|".join(starts), "|".join(ends)


def template_text(tokenizer) -> str:
    """Return the source of the tokenizer's chat template, or of all its templates; "" if none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


class Thoughts:
    """Cuts the thoughts of one model from samples, by the marks in its chat template."""

    def __init__(self, tokenizer, cut: bool):
        """`cut`: whether thoughts are cut at all (`--thoughts`)."""
        self.tokenizer = tokenizer
        self.cut = cut
        self.start, self.end = thought_marks(template_text(tokenizer))

    def opened(self, sample: Completion) -> str:
        """Return the mark if the sample's prompt ends with one that starts a thought, else ""."""
        prompt = before_last_turn(sample)[-TAIL:]
        text = self.tokenizer.decode(prompt) if prompt and self.tokenizer is not None else ""
        mark = re.search(rf"(?:{self.start})\s*\Z", text)
        return mark[0].strip() if mark else ""

    def answer(self, sample: Completion) -> str:
        """Return the text to score: the answer or, with `--thoughts keep`, the whole text."""
        if not self.cut:
            return sample.text
        return answer_of(sample.text, bool(self.opened(sample)), self.start, self.end)

    def read_by(self, reward: Callable, sample: Completion) -> str:
        """Return the text that a built-in reward reads: the answer or, if the reward has the
        attribute `reads = "turn"`, the whole turn, with the start mark if the prompt has it."""
        if getattr(reward, "reads", "answer") == "turn":
            return self.opened(sample) + sample.text
        return self.answer(sample)


def before_last_turn(sample: Completion) -> Sequence[int]:
    """Return the ids before the model's last turn."""
    if sample.turns == 1:
        return sample.prompt_ids
    if sample.turn_start:
        return sample.ids[: sample.turn_start]
    return sample.ids[: len(sample.loss_mask) - sample.loss_mask[::-1].index(False)]
