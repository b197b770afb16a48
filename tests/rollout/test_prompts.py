"""Prompts of rows: prompts that fit, the row of each, and errors that name the row."""

import dataclasses
import importlib

import pytest
from helpers import tiny_tokenizer, write_rows
from in_process import Args

from common.config.flags import Limit
from common.rollout.prompts import (
    encode_prompts,
    load_prompts,
    prompt_columns,
    say_not_named,
    show_first,
)
from common.text.encode import Encoder

TOKENIZER = tiny_tokenizer()
LIMIT = Limit(2048, "the model's context")


def encode(rows: list[dict], room: int = 400, **flags):
    args, rows = Args(**flags), [dict(row) for row in rows]
    limit = Limit(room + args.max_new_tokens, "--pack_tokens 9")
    return encode_prompts(rows, prompt_columns(args, rows), Encoder(TOKENIZER, args), limit, args)


def test_long_prompts_are_refused_or_dropped():
    rows = [dict(prompt="a" * n, answer="", _source=f"rows.jsonl:{n}") for n in (3, 9, 5)]
    words = (
        r"rows.jsonl:9: the prompt has 9 tokens, "
        "--pack_tokens 9 leaves 5 beside --max_new_tokens 256"
    )
    with pytest.raises(ValueError, match=words):
        encode(rows, 5)
    prompts = encode(rows, 5, overlong="drop")
    assert [len(ids) for ids in prompts.ids] == [3, 5] and prompts.rows == [rows[0], rows[2]]
    assert (len(prompts), prompts.dropped, str(prompts)) == (2, 1, "2 prompts (1 too long)")
    assert encode(rows, 5, on_bad_row="skip") == prompts
    rows[1]["answer"] = None  # no reward reads it
    assert encode(rows, 5, overlong="drop") == prompts
    words = "no prompt has at most 2 tokens: see --max_new_tokens and --pack_tokens 9"
    with pytest.raises(ValueError, match=words):
        encode(rows, 2, overlong="drop")
    for overlong in ("error", "drop"):
        with pytest.raises(ValueError, match="--max_new_tokens 256 leaves no room for a prompt in"):
            encode(rows, 0, overlong=overlong)
    args = Args()  # no held-out rows
    assert len(encode_prompts([], ("prompt",), Encoder(TOKENIZER, args), LIMIT, args)) == 0


def test_first_prompt_controls_no_terminal(capsys):
    show_first(encode([dict(prompt="a\x1b[2J", answer="")]), TOKENIZER)
    assert capsys.readouterr().out.endswith("\na\\x1b[2J\n")


@pytest.mark.parametrize(("problem", "prompt"), [("empty", ""), ("missing", None)])
def test_prompts_without_text_are_refused_by_name(problem, prompt):
    rows = [dict(prompt=text, answer="2", _source=f"a:{n}") for n, text in ((1, "1="), (2, prompt))]
    with pytest.raises(ValueError, match=f"a:2: column prompt is {problem}"):
        encode(rows)
    assert encode(rows, on_bad_row="skip").rows == rows[:1]


WORLD = """
class World:
    def reset(self, row):
        return [dict(role="user", content="?" * row["level"])]
    def step(self, completion): ...
"""


def test_dropped_rows_are_reported_by_reason(tmp_path, capsys):
    """Rows that the template, the environment or a reward cannot use are treated like other bad
    rows."""
    good = dict(prompt="1+1=", answer="2", level=1)
    changes = [dict(answer=None), {}, dict(level=None), dict(prompt=""), dict(answer=None)]
    rows = [good | each | dict(_source=f"a:{n}") for n, each in enumerate(changes, 1)]
    rewards = ("gsm8k", None, "gsm8k", "x")
    named = [good | dict(reward=name, _source=f"b:{n}") for n, name in enumerate(rewards)]
    named[2]["answer"] = None
    (tmp_path / "own.py").write_text(WORLD)
    template = dict(prompt_template="{prompt} of level {level}")
    world = dict(environment=f"{tmp_path}/own.py:World", reward=("environment",))
    for given, flags, left, reports in (
        (rows, template, ["a:2", "a:4"], [
            "2 left out, such as a:1: --reward exact_match reads column answer; the row has"
            " prompt, level",
            "1 left out, such as a:3: --prompt_template: no column level",
        ]),
        (rows, world, ["a:1", "a:2", "a:4", "a:5"], ["1 left out, such as a:3: --environment"]),
        (named, dict(reward=("by_row",)), ["b:0"], [
            "b:1: column reward is None, and there are", "b:2: ", "b:3: column reward is 'x'",
        ]),
    ):  # fmt: skip
        prompts = encode(given, **flags, on_bad_row="skip")
        assert [row["_source"] for row in prompts.rows] == left
        said = capsys.readouterr().out
        assert said.count("--on_bad_row skip: ") == len(reports)
        assert all(report in said for report in reports)
    with pytest.raises(ValueError, match="^a:3: --prompt_template: no column level$"):
        encode(rows[1:], **template)
    with pytest.raises(ValueError, match="^a:3: --environment .*World fails in reset: TypeError"):
        encode(rows, **world)
    words = r"^all 2 rows, such as a:1, are left out \(--on_bad_row skip\)$"
    with pytest.raises(ValueError, match=words):
        encode([rows[0], rows[2]], **template, on_bad_row="skip")


def test_script_gets_training_and_held_out_prompts(tmp_path):
    """Prompts leave room for the completion in the model's context."""
    path = tmp_path / "rows.jsonl"
    rows = [dict(prompt=f"{n}+1=", answer=str(n + 1)) for n in range(10, 40)]
    write_rows(path, rows)
    args = Args(dataset=str(path), eval_size=4, max_new_tokens=8)
    prompts, held_out = load_prompts(args, TOKENIZER, LIMIT)
    assert (len(prompts), len(held_out)) == (26, 4)
    for ids, row in zip(prompts.ids + held_out.ids, prompts.rows + held_out.rows, strict=True):
        assert TOKENIZER.decode(ids) == row["prompt"] and row["_source"].startswith("rows.jsonl:")
    with pytest.raises(ValueError, match="the prompt has 5 tokens, .* 4 beside --max_new_tokens 8"):
        load_prompts(args, TOKENIZER, Limit(12, "--pack_tokens 11"))
    args = dataclasses.replace(args, prompt_template="Q: {prompt}")
    texts = {TOKENIZER.decode(ids) for ids in load_prompts(args, TOKENIZER, LIMIT)[0].ids}
    assert texts <= {f"Q: {row['prompt']}" for row in rows} and len(texts) == 26


OWN = """
def judged(completion, row):
    return 1.0
judged.columns = ("context",)

def anything(completion, row):
    return 1.0
"""
READ = "columns that neither the prompt nor a reward reads: "


@pytest.mark.parametrize(
    ("flags", "unread"),
    [
        (dict(), "rubric, level, extra"),
        (dict(reward=("exact_match", "format")), "rubric, level, extra"),
        (dict(reward=("judge:x",)), "answer, level, extra"),
        (dict(reward=("judge:x",), judge_prompt="{completion} {level}"), "answer, extra"),
        (dict(reward=("model:x",)), "answer, rubric, level, extra"),
        (dict(reward=("by_row",)), "rubric, level, extra"),  # of row a:1 is exact_match
        (dict(prompt_template="{level} {extra[0]}"), "prompt, rubric"),
        (dict(prompt_template="{shots}", shots=1, shots_by="level", shot_template="{extra}"),
         "prompt, rubric"),
        (dict(reward=("own.py:judged",)), "answer, rubric, level, extra"),
        # these may read any column
        (dict(reward=("own.py:judged", "own.py:anything")), None),
        (dict(reward=("environment",), environment="own.py:World"), None),
    ],
)  # fmt: skip
def test_columns_that_nothing_reads_are_named(flags, unread, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN + WORLD)
    row = dict(prompt="1+1=", answer="2", rubric="r", level=1, extra=["x"], _source="a:1", _id=3)
    if flags.get("reward") == ("by_row",):
        row["reward"] = "exact_match"
    with_shots = importlib.import_module("eval").Args
    args = (with_shots if "shots" in flags else Args)(**flags)
    shots = dict(shot_args=args) if "shots" in flags else {}
    say_not_named(args, [row], prompt_columns(args, [row]), **shots)
    assert capsys.readouterr().out == (f"{READ}{unread}\n" if unread else "")


def test_parts_of_a_prompt_are_read_or_refused(tmp_path, monkeypatch):
    """A reward, a template or an environment may read them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN + WORLD)
    rows = [dict(prompt="Who?", context="Paris", answer="2", _source="a:1")]
    words = r"^--dataset .*: nothing reads context \(a:1\) beside prompt; join it with the prompt, "
    for reward in ("exact_match", "own.py:anything"):
        with pytest.raises(ValueError, match=words):
            prompt_columns(Args(reward=(reward,)), rows)
    assert prompt_columns(Args(reward=("own.py:judged",)), rows) == ("prompt",)
    assert prompt_columns(Args(), rows, also_read=["context"]) == ("prompt",)
    assert prompt_columns(Args(prompt_template="{prompt}"), rows) == ("_prompt",)


def test_columns_that_nothing_reads_are_named_at_the_start(tmp_path, capsys):
    rows = [dict(prompt=f"{n}+1=", answer="2", level=n) for n in range(20)]
    args = Args(dataset=str(write_rows(tmp_path / "rows.jsonl", rows)), eval_size=2)
    load_prompts(args, TOKENIZER, LIMIT)
    assert f"{READ}level\n" in capsys.readouterr().out
