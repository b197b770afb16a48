"""Prompts of rows: prompts that fit, the row of each, and errors that name the row."""

import dataclasses
import json

import pytest
from helpers import tiny_tokenizer
from in_process import Args

from common.data.encode import Encoder
from common.rollout.prompts import encode_prompts, load_prompts, prompt_columns, show_first

TOKENIZER = tiny_tokenizer()


def encode(rows: list[dict], room: int, **flags):
    args = Args(**flags)
    return encode_prompts(rows, prompt_columns(args, rows), Encoder(TOKENIZER, args), room, args)


def test_long_prompts_are_refused_or_dropped():
    rows = [dict(prompt="a" * n, answer="", _source=f"rows.jsonl:{n}") for n in (3, 9, 5)]
    words = (
        r"rows.jsonl:9: the prompt has 9 tokens, "
        r"the context \(or --pack_tokens\) 5 beside --max_new_tokens 256"
    )
    with pytest.raises(ValueError, match=words):
        encode(rows, 5)
    prompts = encode(rows, 5, overlong="drop")
    assert [len(ids) for ids in prompts.ids] == [3, 5] and prompts.rows == [rows[0], rows[2]]
    assert (len(prompts), prompts.dropped, str(prompts)) == (2, 1, "2 prompts (1 too long)")
    assert encode(rows, 5, on_bad_row="skip") == prompts
    with pytest.raises(
        ValueError, match="no prompt has at most 2 tokens: see --max_new_tokens and --pack_tokens"
    ):
        encode(rows, 2, overlong="drop")
    args = Args()
    assert (
        len(encode_prompts([], ("prompt",), Encoder(TOKENIZER, args), 2, args)) == 0
    )  # no held-out rows


def test_first_prompt_controls_no_terminal(capsys):
    show_first(encode([dict(prompt="a\x1b[2J", answer="")], 64), TOKENIZER)
    assert capsys.readouterr().out.endswith("\na\\x1b[2J\n")


@pytest.mark.parametrize("problem", ["empty", "missing"])
def test_prompts_without_text_are_refused_by_name(problem):
    rows = [
        dict(prompt=prompt, answer="2", _source=f"a:{n}")
        for n, prompt in enumerate(("1+1=", ""), 1)
    ]
    rows[1]["prompt"] = "" if problem == "empty" else None
    with pytest.raises(ValueError, match=f"a:2: column prompt is {problem}"):
        encode(rows, 40)
    assert encode(rows, 40, on_bad_row="skip").rows == rows[:1]


def test_dropped_rows_are_reported_by_reason(tmp_path, capsys):
    """Rows that the template, the environment or a reward cannot use are treated like other bad
    rows."""
    good = dict(prompt="1+1=", answer="2", level=1)
    rows = [
        good | dict(answer=None),
        good,
        good | dict(level=None),
        good | dict(prompt=""),
        good | dict(answer=None),
    ]
    rows = [row | dict(_source=f"a:{n}") for n, row in enumerate(rows, 1)]
    flags = dict(prompt_template="{prompt} of level {level}")

    def asked(rows: list[dict], **flags) -> list[str]:
        return [row["_source"] for row in encode([dict(row) for row in rows], 400, **flags).rows]

    assert asked(rows, **flags, on_bad_row="skip") == ["a:2", "a:4"]
    assert capsys.readouterr().out.splitlines() == [
        "--on_bad_row skip: 2 left out, such as a:1: --reward exact_match reads column answer; "
        "the row has prompt, level",
        "--on_bad_row skip: 1 left out, such as a:3: --prompt_template: no column level",
    ]
    with pytest.raises(ValueError, match="^a:3: --prompt_template: no column level$"):
        asked(rows[1:], **flags)
    with pytest.raises(
        ValueError, match=r"^all 2 rows, such as a:1, are left out \(--on_bad_row skip\)$"
    ):
        asked([rows[0], rows[2]], **flags, on_bad_row="skip")
    named = [
        good | dict(reward=name, _source=f"b:{n}")
        for n, name in enumerate(("gsm8k", None, "gsm8k", "x"))
    ]
    named[2]["answer"] = None
    assert asked(named, reward=("by_row",), on_bad_row="skip") == ["b:0"]
    said = capsys.readouterr().out
    assert (
        "b:1: column reward is None, and there are" in said
        and "b:3: column reward is 'x', and there are" in said
        and "b:2: " in said
    )
    (tmp_path / "own.py").write_text(
        "class World:\n"
        "    def reset(self, row):\n"
        "        return [dict(role='user', content='?' * row['level'])]\n"
        "    def step(self, completion): ...\n"
    )
    world = dict(environment=f"{tmp_path}/own.py:World", reward=("environment",))
    assert asked(rows, **world, on_bad_row="skip") == ["a:1", "a:2", "a:4", "a:5"]
    assert "1 left out, such as a:3: --environment" in capsys.readouterr().out
    with pytest.raises(ValueError, match="^a:3: --environment .*World fails in reset: TypeError"):
        asked(rows, **world)


def test_script_gets_training_and_held_out_prompts(tmp_path):
    """Prompts leave room for the completion in the model's context."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps(dict(prompt=f"{n}+1=", answer=str(n + 1))) + "\n" for n in range(10, 40))
    )
    args = Args(dataset=str(path), eval_size=4, max_new_tokens=8)
    prompts, held_out = load_prompts(args, TOKENIZER, 2048)
    assert (len(prompts), len(held_out)) == (26, 4)
    for ids, row in zip(prompts.ids + held_out.ids, prompts.rows + held_out.rows, strict=True):
        assert TOKENIZER.decode(ids) == row["prompt"] and eval(row["prompt"][:-1]) == int(
            row["answer"]
        )
    with pytest.raises(ValueError, match="the prompt has 5 tokens, .* 4 beside --max_new_tokens 8"):
        load_prompts(args, TOKENIZER, 12)
    args = dataclasses.replace(args, prompt_template="Q: {prompt}")
    assert {TOKENIZER.decode(ids[:6]) for ids in load_prompts(args, TOKENIZER, 2048)[0].ids} <= {
        f"Q: {n}+" for n in range(10, 40)
    }
