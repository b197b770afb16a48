"""Thoughts are no answers: the built-in rewards, `--thoughts`, and the marks of the chat templates
of common models."""

import pytest
import torch
from helpers import tiny_tokenizer
from in_process import Args
from processes import PATIENCE

from common.metrics.meter import Meter
from common.packs.sample import Completion
from common.rewards.registry import BUILT_IN, OTHERS, load_reward
from common.rewards.total import Rewards
from common.rollout.engine import empty_completion
from common.text.thoughts import Thoughts, answer_of
from tests.rewards.scored import RIGHT, require_no_answers_in_thoughts, rows_of


@pytest.mark.parametrize(("text", "inside", "answer"), [
    ("18", False, "18"), ("<think>7</think> 18", False, " 18"), ("<think>18", False, ""),
    ("<think>18", True, ""), ("7</think> 18", True, " 18"), ("7</think> 18", False, " 18"),
    ("18", True, ""), ("", False, ""), ("<think>18</think>", False, ""),
    ("<think>a<think>b</think>c</think>18", False, "18"),
    ("<think>7</think> 8 <think>no</think> 18", False, " 18"),
    ("<think>7</think> 18 <think>no", False, ""), ("7\n</think>\n\n    18\n", False, "    18\n"),
    ("\n18", False, "\n18"), ("18 <think>or not", False, ""),
    ("if a < think > b", False, "if a < think > b"),
])  # fmt: skip
def test_answer_is_behind_the_last_thought(text, inside, answer):
    assert answer_of(text, inside) == answer


# ---- built-in rewards ----


TEXTS = {
    "exact_match": "18", "gsm8k": "#### 18", "gsm8k_flexible": "18",
    "boxed": RIGHT, "math": RIGHT, "format": "#### 18",
}  # fmt: skip
FOUND_ANYWHERE = ("gsm8k", "gsm8k_flexible", "boxed", "math")  # in `<think>` too


@pytest.mark.parametrize("name", TEXTS)
def test_thoughts_are_no_answers(name):
    require_no_answers_in_thoughts(name, TEXTS[name], name in FOUND_ANYWHERE)


def test_every_builtin_reward_reads_the_answer_or_says_what_it_reads():
    """tests/ of the extras have the others."""
    names = {name for name in BUILT_IN if not OTHERS.get(name, "").startswith("extras.")}
    form = {name for name in names if hasattr(load_reward(name), "reads")}
    assert form == {"tag_format"} and set(TEXTS) == names - form


def test_user_defined_reward_reads_all_of_the_text(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from common.text.thoughts import answer_of\n"
        "def f(completion, row): return len(completion), dict(answer=len(answer_of(completion)))\n"
    )
    text = "<think>7</think>18"
    args = Args(reward=(f"{file}:f",), reward_timeout=PATIENCE, reward_workers=1)
    rewards = Rewards(args, [dict(_source="rows:1")], tiny_tokenizer(), torch.device("cpu"))
    sample = Completion([1, 2], [False, True], text=text, row=dict(_source="rows:1"))
    _, parts, numbers = rewards.wait([[sample]], Meter())
    assert parts["f"].item() == len(text) and numbers["f/answer"].item() == 2


# ---- chat templates ----

USER = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
# template, prompt, the mark that it opens, completion with a thought: its answer is " 18"
TEMPLATES = {
    "none": (None, "?", "", "<think>7</think> 18"),
    "R1": (
        USER + "{{ '<|turn|>\n<think>\n' }}", "?<|turn|>\n<think>\n", "<think>", "7\n</think> 18",
    ),
    "Qwen3 without thoughts": (
        USER + "<think>\n\n</think>\n\n", "?<think>\n\n</think>\n\n", "", " 18",
    ),
    "Seed": ("<seed:think></seed:think>", "?", "", "<seed:think>7</seed:think> 18"),
    "EXAONE": ("<thought>\n", "?<thought>\n", "<thought>", "7</thought> 18"),
    "K2": ("</ifm|think_fast>", "?", "", "<ifm|think_fast>7</ifm|think_fast> 18"),
    "Mistral": ("{{ '[THINK]' + t + '[/THINK]' }}", "[INST]?[/INST]", "", "[THINK]7[/THINK] 18"),
    "gpt-oss": (
        "<|start|>assistant<|channel|>final<|message|>", "?<|start|>assistant", "",
        "<|channel|>analysis<|message|>7<|end|><|start|>assistant<|channel|>final<|message|> 18",
    ),
    "gpt-oss, opened": (
        "<|channel|>analysis<|message|>", "?<|channel|>analysis<|message|>",
        "<|channel|>analysis<|message|>", "7<|channel|>final<|message|> 18",
    ),
    "Gemma": ("<|channel>thought\n<channel|>", "?", "", "<|channel>thought\n7<channel|> 18"),
    "Command": (
        "<|END_THINKING|>", "?<|START_THINKING|>", "<|START_THINKING|>", "7<|END_THINKING|> 18",
    ),
    "named templates": (dict(default="", tool_use="[THINK]"), "?", "", "[THINK]7[/THINK] 18"),
}  # fmt: skip


def sample_of(tokenizer, prompt: str, text: str) -> Completion:
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return Completion([*ids, 5], [False] * len(ids) + [True], len(ids), rows_of("boxed"), text=text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_are_those_of_the_chat_template(name):
    template, prompt, opened, text = TEMPLATES[name]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    thoughts = Thoughts(tokenizer, cut=True)
    assert thoughts.answer(sample_of(tokenizer, prompt, text)) == " 18"
    assert Thoughts(tokenizer, cut=False).answer(sample_of(tokenizer, prompt, text)) == text
    assert thoughts.opened(sample_of(tokenizer, prompt, text)) == opened
    thought, seven, _ = text.partition("7")
    if seven:
        assert thoughts.answer(sample_of(tokenizer, prompt, thought + seven)) == ""


def test_tag_that_the_prompt_opens_counts_as_written():
    tokenizer, text = tiny_tokenizer(), "9 + 9</think>\n<answer>18</answer>"
    args = Args(reward=("tag_format",))
    rewards = Rewards(args, [rows_of("")], tokenizer, torch.device("cpu"))
    samples = [
        sample_of(tokenizer, prompt, text)
        for prompt in ("?\n<think>\n", "? Use <think>.\n", "?</think>")
    ]
    parts = rewards.wait([samples], Meter()).by_name
    assert parts["tag_format"].tolist() == [[1, 0, 0]]


def test_last_turn_of_an_episode_is_opened_by_its_own_prompt():
    tokenizer = tiny_tokenizer()
    thoughts = Thoughts(tokenizer, cut=True)
    first, reply = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("?", "on\n<think>")
    )
    mask = [False] * len(first) + [True] + [False] * len(reply) + [True]
    sample = Completion([*first, 5, *reply, 5], mask, len(first), text="18", turns=2)
    assert thoughts.opened(sample) == "<think>" and thoughts.answer(sample) == ""
    sample.text = "7</think>18"
    assert thoughts.answer(sample) == "18"


def test_a_forced_mark_is_part_of_the_turn():
    """--thinking_budget in the second turn of an episode, whose prompt opens a thought."""
    tokenizer = tiny_tokenizer()
    prompt, reply = (tokenizer(text)["input_ids"] for text in ("1+1?<think>", "no<think>"))
    sample = empty_completion(prompt)
    sample.append_forced(tokenizer("2")["input_ids"])
    sample.append_reply(reply)
    sample.append_forced(tokenizer("a</think>b")["input_ids"])
    assert Thoughts(tokenizer, cut=True).opened(sample) == "<think>"
