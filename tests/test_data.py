"""Rows become exactly the ids and masks they should, in an order that resumes; every kind of file loads."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import RolloutArgs, RunArgs
from common.data import Encoder, RowOrder
from common.prompts import encode_prompts
from common.rows import PAIR_COLUMNS, PROMPT_COLUMNS, SFT_COLUMNS, load_rows, require_columns, train_and_eval_rows
from common.tasks import arithmetic_rows
from common.tiny import build_tokenizer

TOKENIZER = build_tokenizer()
MESSAGES, PAIR, QA, TEXT = SFT_COLUMNS
EOT, EOS = "<|end_of_turn|>", "<|eos|>"


def turn(role: str, content: str) -> dict:
    return dict(role=role, content=content)


def encoder(tokenizer=TOKENIZER, **flags) -> Encoder:
    return Encoder(tokenizer, RunArgs(**flags))


def encode(row: dict, columns: tuple[str, ...], train_on_all: bool = False, **flags) -> tuple[str, list[str]]:
    """The whole text, and the stretches of it that are trained."""
    sample = encoder(**flags).sft(row | dict(_source="rows.jsonl:3"), columns, train_on_all)
    assert len(sample.ids) == len(sample.loss_mask)
    stretches, previous = [], False
    for token, trained in zip(sample.ids, sample.loss_mask, strict=True):
        if trained:
            stretches += [[]] if not previous else []
            stretches[-1].append(token)
        previous = trained
    return TOKENIZER.decode(sample.ids), [TOKENIZER.decode(ids) for ids in stretches]


# ---- what is trained ----


def test_text_is_trained_whole_with_its_end():
    assert encode(dict(text="abc"), TEXT) == ("abc" + EOS, ["abc" + EOS])


def test_prompt_and_completion():
    row = dict(prompt="1+1=", completion="2")
    assert encode(row, PAIR) == ("1+1=2" + EOS, ["2" + EOS])
    start = "<|turn|>user\n1+1=" + EOT + "\n<|turn|>assistant\n"
    assert encode(row, PAIR, prompt_format="chat") == (start + "2" + EOT + "\n", ["2" + EOT])
    row = dict(prompt=[turn("user", "1+1=")], completion=[turn("assistant", "2")])
    assert encode(row, PAIR) == (start + "2" + EOT + "\n", ["2" + EOT])
    assert encode(row | dict(completion="2"), PAIR) == (start + "2" + EOT + "\n", ["2" + EOT])


# ---- preferences ----


def pair(row: dict, columns: tuple[str, ...], **flags) -> list[tuple[str, str]]:
    """(prompt, completion) of chosen and rejected; everything trained is completion and the other way round."""
    samples = encoder(**flags).pair(row | dict(_source="rows.jsonl:3"), columns)
    for s in samples:
        assert s.loss_mask == [i >= s.prompt_length for i in range(len(s.ids))]
    return [(TOKENIZER.decode(s.ids[: s.prompt_length]), TOKENIZER.decode(s.completion_ids)) for s in samples]


EXPLICIT, IMPLICIT = PAIR_COLUMNS


def test_pairs_with_a_prompt_of_their_own():
    row = dict(prompt="1+1=", chosen="2", rejected="3")
    assert pair(row, EXPLICIT) == [("1+1=", "2" + EOS), ("1+1=", "3" + EOS)]
    start = "<|turn|>user\n1+1=" + EOT + "\n<|turn|>assistant\n"
    expected = [(start, "2" + EOT), (start, "3" + EOT)]  # nothing after the end of the turn
    assert pair(row, EXPLICIT, prompt_format="chat") == expected
    row = dict(prompt=[turn("user", "1+1=")], chosen=[turn("assistant", "2")], rejected=[turn("assistant", "3")])
    assert pair(row, EXPLICIT) == expected
    whole = dict(prompt="1+1=", chosen=row["prompt"] + row["chosen"], rejected=row["prompt"] + row["rejected"])
    assert pair(whole, EXPLICIT) == expected  # UltraFeedback's form


def test_pairs_that_share_a_prompt():
    row = dict(chosen="Q: 1+1? A: it is 2", rejected="Q: 1+1? A: it was 3")
    prompt = "Q: 1+1? A: it "
    assert pair(row, IMPLICIT) == [(prompt, "is 2" + EOS), (prompt, "was 3" + EOS)]
    row = dict(chosen="Q: 1+1? A: two", rejected="Q: 1+1? A: twelve")  # a word is not cut in two
    assert pair(row, IMPLICIT) == [("Q: 1+1? A: ", "two" + EOS), ("Q: 1+1? A: ", "twelve" + EOS)]
    context = [turn("user", "hi"), turn("assistant", "ho"), turn("user", "1+1=")]
    row = dict(chosen=context + [turn("assistant", "2")], rejected=context + [turn("assistant", "3")])
    (prompt, chosen), (same, rejected) = pair(row, IMPLICIT)
    assert prompt == same and prompt.endswith("1+1=" + EOT + "\n<|turn|>assistant\n") and "ho" in prompt
    assert (chosen, rejected) == ("2" + EOT, "3" + EOT)
    assert pair(dict(chosen=row["chosen"], rejected=row["chosen"]), IMPLICIT)[0] == (prompt, "2" + EOT)


def test_question_and_answer_are_a_chat_where_there_is_a_template():
    row = dict(question="Why?", answer="So.")
    assert encode(row, QA) == ("<|turn|>user\nWhy?" + EOT + "\n<|turn|>assistant\nSo." + EOT + "\n", ["So." + EOT])
    assert encode(row, QA, prompt_format="plain") == ("Why?\nSo." + EOS, ["So." + EOS])


def test_every_assistant_turn_is_trained_with_its_end_of_turn_and_nothing_else():
    row = dict(messages=[turn("system", "S"), turn("user", "a"), turn("assistant", "b"), turn("user", "b"),
                         turn("assistant", " b c\n")])  # fmt: skip
    text, trained = encode(row, MESSAGES)
    assert text == TOKENIZER.apply_chat_template(row["messages"], tokenize=False)
    assert trained == ["b" + EOT, " b c\n" + EOT]
    assert encode(row, MESSAGES, train_on_all=True) == (text, [text])


def test_turns_of_the_prompt_are_not_trained():
    row = dict(prompt=[turn("user", "a"), turn("assistant", "b"), turn("user", "c")], completion="d")
    assert encode(row, PAIR)[1] == ["d" + EOT]


def test_system_prompt_goes_before_every_chat_that_has_none():
    for row, columns in (
        (dict(messages=[turn("user", "a"), turn("assistant", "b")]), MESSAGES),
        (dict(question="a", answer="b"), QA),
        (dict(prompt=[turn("user", "a")], completion="b"), PAIR),
    ):
        text, trained = encode(row, columns, system_prompt="S")
        assert text.startswith("<|turn|>system\nS" + EOT + "\n<|turn|>user\na") and trained == ["b" + EOT]
    row = dict(messages=[turn("system", "mine"), turn("user", "a"), turn("assistant", "b")])
    assert encode(row, MESSAGES, system_prompt="S") == encode(row, MESSAGES)


def test_a_template_that_adds_text_to_the_turn_and_strips_it():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m.content | trim + '<|end_of_turn|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
    )
    row = dict(messages=[turn("user", "a"), turn("assistant", " b\n"), turn("user", "c"), turn("assistant", "d ")])
    sample = encoder(tokenizer).sft(row, MESSAGES)
    trained = [i for i, mask in zip(sample.ids, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == "b" + EOT + "<think>\n\n</think>\n\nd" + EOT


def test_a_template_that_rewrites_turns_names_the_row():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TOKENIZER.chat_template.replace("message['content']", "message['content'] | upper")
    with pytest.raises(ValueError, match="rows.jsonl:3: turn 2"):
        encoder(tokenizer).sft(
            dict(messages=[turn("user", "a"), turn("assistant", "b")], _source="rows.jsonl:3"), MESSAGES
        )


@pytest.mark.parametrize("special", [True, False])
def test_the_end_of_turn_is_trained_when_the_tokenizer_does_not_name_it(special):
    """Gemma 3 has <end_of_turn> among its added tokens alone; many ChatML models mark theirs as not special."""
    from tokenizers import AddedToken

    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=special, normalized=False)])
    tokenizer.chat_template = TOKENIZER.chat_template.replace(EOT, "<|im_end|>")
    sample = encoder(tokenizer).sft(dict(messages=[turn("user", "a"), turn("assistant", "b")]), MESSAGES)
    trained = [i for i, mask in zip(sample.ids, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == "b<|im_end|>"


# ---- the prompt in training is the prompt in sampling ----

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(texts, texts, st.sampled_from(["auto", "chat", "plain"]), st.sampled_from([None, "Be brief."]))
def test_the_prompt_is_the_same_in_training_and_in_sampling(prompt, completion, prompt_format, system_prompt):
    coder = encoder(prompt_format=prompt_format, system_prompt=system_prompt if prompt_format == "chat" else None)
    rows = [(dict(prompt=prompt, completion=completion), PAIR), (dict(question=prompt, answer=completion), QA)]
    if prompt_format != "plain":
        history = [turn("user", "x"), turn("assistant", "y"), turn("user", prompt)]
        rows.append((dict(prompt=history, completion=completion), PAIR))
    for row, columns in rows:
        sample = coder.sft(row, columns)
        assert sample.ids[: sample.prompt_length] == coder.prompt(row, columns[:1])
        assert not any(sample.loss_mask[: sample.prompt_length]) and sample.loss_mask[sample.prompt_length]


def test_only_what_follows_the_end_of_turn_is_left_out():
    sample = encoder().sft(dict(question="a", answer="b"), QA)
    assert [TOKENIZER.decode([i]) for i in sample.completion_ids] == ["b", EOT, "\n"]
    assert sample.loss_mask[-3:] == [True, True, False]


@given(texts)
def test_every_text_survives_the_tiny_tokenizer(text):
    """Characters outside the alphabet go in as bytes."""
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text and None not in ids


def test_malformed_rows_are_named():
    for row, columns, what in (
        (dict(prompt="a", completion=3), PAIR, "completion is int"),
        (dict(prompt="a", completion=None), PAIR, "completion is missing"),
        (dict(messages="a"), MESSAGES, "messages must be a list"),
        (dict(messages=[dict(role="user")]), MESSAGES, "string role and content"),
    ):
        with pytest.raises(ValueError, match=f"rows.jsonl:7.*{what}"):
            encoder().sft(row | dict(_source="rows.jsonl:7"), columns)


def test_overlong_prompts_are_refused_or_dropped():
    rows = [dict(prompt="a" * n, _source=f"rows.jsonl:{n}") for n in (3, 9, 5)]
    coder = encoder()
    with pytest.raises(ValueError, match="rows.jsonl:9: a prompt of 9 tokens"):
        encode_prompts(rows, ("prompt",), coder, 5, RolloutArgs())
    prompts, kept, dropped = encode_prompts(rows, ("prompt",), coder, 5, RolloutArgs(overlong_prompts="drop"))
    assert [len(p) for p in prompts] == [3, 5] and kept == [rows[0], rows[2]] and dropped == 1
    with pytest.raises(ValueError, match="no prompt has at most 2 tokens"):
        encode_prompts(rows, ("prompt",), coder, 2, RolloutArgs(overlong_prompts="drop"))


# ---- the order of rows ----


@given(st.integers(1, 30), st.integers(0, 3))
def test_every_epoch_is_a_permutation(num_rows, seed):
    order = RowOrder(num_rows, seed)
    epochs = [order.draw(num_rows) for _ in range(3)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert order.epochs_done == 3
    if num_rows > 10:
        assert epochs[0] != epochs[1] and epochs[0] != RowOrder(num_rows, seed + 1).draw(num_rows)


@given(st.integers(1, 12), st.lists(st.integers(1, 30), max_size=8))
def test_draws_do_not_depend_on_how_they_are_chunked(num_rows, counts):
    chunked, order = RowOrder(num_rows, 5), RowOrder(num_rows, 5)
    assert [i for count in counts for i in chunked.draw(count)] == order.draw(sum(counts))


@given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 40))
def test_order_resumes_exactly(num_rows, before, after):
    order = RowOrder(num_rows, 5)
    order.draw(before)
    state = json.loads(json.dumps(order.state_dict()))
    expected, resumed = order.draw(after), RowOrder(num_rows, 5)
    resumed.load_state_dict(state)
    assert resumed.draw(after) == expected and resumed.epochs_done == order.epochs_done


# ---- files ----


def load(path, split: str = "train") -> list[dict] | None:
    rows = load_rows("--dataset", str(path), split)
    return rows and [{k: v for k, v in row.items() if k != "_source"} for row in rows]


ROWS = [dict(prompt="a\u2028b", completion="c\x85d"), dict(prompt="\u00e9", completion="\n")]


def test_jsonl_breaks_lines_at_newlines_only(tmp_path):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    assert load(tmp_path / "rows.jsonl") == ROWS
    assert [row["_source"] for row in load_rows("--dataset", str(tmp_path / "rows.jsonl"), "train")] == [
        "rows.jsonl:1", "rows.jsonl:3",
    ]  # fmt: skip
    assert load(tmp_path / "rows.jsonl", "test") is None


def test_json_parquet_and_csv(tmp_path):
    import datasets

    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.to_csv(tmp_path / "rows.csv", index=False)
    for name in ("rows.json", "rows.parquet", "rows.csv"):
        assert load(tmp_path / name) == ROWS, name


def test_a_folder_with_files_of_several_splits(tmp_path):
    import datasets

    for name, row in (("train-00000-of-00002", 0), ("train-00001-of-00002", 1), ("test", 1)):
        datasets.Dataset.from_list([ROWS[row]]).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "README.md").touch()
    assert load(tmp_path) == ROWS and load(tmp_path, "test") == [ROWS[1]] and load(tmp_path, "validation") is None


def test_a_folder_without_splits_is_all_training(tmp_path):
    for n, row in enumerate(ROWS):
        (tmp_path / f"part{n}.jsonl").write_text(json.dumps(row))
    assert load(tmp_path) == ROWS and load(tmp_path, "test") is None


def test_bad_files_are_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, what in (
        ("bad.jsonl", "line 2 is not valid JSON"), ("list.jsonl", "list.jsonl:1 is not an object"),
        ("empty.jsonl", "empty"), ("none.jsonl", "no such file"), ("none.parquet", "no such file"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=what):
            load(tmp_path / name)


def test_columns_are_recognised_or_refused():
    assert require_columns("--dataset", [dict(text="", messages=[], _source="")], SFT_COLUMNS) == ("messages",)
    assert require_columns("--dataset", [dict(prompt="", completion="", answer="")], SFT_COLUMNS) == PAIR
    assert require_columns("--dataset", [dict(question="", answer="")], PROMPT_COLUMNS) == ("question",)
    with pytest.raises(ValueError, match="--dataset x has the columns foo; needed: messages, or prompt and completion"):
        require_columns("--dataset x", [dict(foo=1, _source="")], SFT_COLUMNS)


# ---- held-out rows ----


def numbered(path, count: int, start: int = 0):
    path.write_text("".join(json.dumps(dict(text=str(start + n))) + "\n" for n in range(count)))
    return str(path)


def test_rows_set_aside_are_disjoint_and_do_not_depend_on_the_seed(tmp_path):
    file = numbered(tmp_path / "rows.jsonl", 50)
    train, held_out = train_and_eval_rows(RunArgs(dataset=file, eval_size=8))
    assert len(train) == 42 and len(held_out) == 8
    assert {row["text"] for row in train + held_out} == {str(n) for n in range(50)}
    assert train_and_eval_rows(RunArgs(dataset=file, eval_size=8, seed=1)) == (train, held_out)
    train, held_out = train_and_eval_rows(RunArgs(dataset=file, eval_every=0))
    assert len(train) == 50 and held_out == []
    with pytest.raises(ValueError, match="--eval_size 50 leaves no training rows"):
        train_and_eval_rows(RunArgs(dataset=file, eval_size=50))


def test_a_held_out_split_or_file_is_used_and_capped(tmp_path):
    (tmp_path / "data").mkdir()
    numbered(tmp_path / "data" / "train.jsonl", 5)
    numbered(tmp_path / "data" / "test.jsonl", 30, start=100)
    other = numbered(tmp_path / "other.jsonl", 30, start=200)
    for flags, first in ((dict(), 100), (dict(eval_dataset=other), 200)):
        train, held_out = train_and_eval_rows(RunArgs(dataset=str(tmp_path / "data"), eval_size=7, **flags))
        assert [row["text"] for row in train] == list("01234")
        assert len({row["text"] for row in held_out}) == 7 and all(int(row["text"]) >= first for row in held_out)


def test_a_split_that_is_not_there_is_refused(tmp_path):
    file = numbered(tmp_path / "rows.jsonl", 5)
    with pytest.raises(ValueError, match="no split 'other': see --dataset_split"):
        train_and_eval_rows(RunArgs(dataset=file, dataset_split="other"))


def test_training_on_the_held_out_split_sets_rows_aside():
    train, held_out = train_and_eval_rows(RunArgs(dataset_split="test"))
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}


def test_an_eval_dataset_without_the_split_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    numbered(tmp_path / "data" / "validation.jsonl", 5)
    with pytest.raises(ValueError, match="--eval_split"):
        train_and_eval_rows(RunArgs(eval_dataset=str(tmp_path / "data")))


# ---- the built-in task ----


def test_arithmetic_rows():
    train, test = arithmetic_rows("train"), arithmetic_rows("test")
    assert arithmetic_rows("train") == train
    assert len({row["prompt"] for row in test}) == len(test) == 500
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert set(Counter(row["prompt"] for row in train).values()) == {4}
    for row in train + test:
        assert str(eval(row["prompt"].rstrip("="))) == row["answer"] == row["chosen"] != row["rejected"]
    solved = sum(row["completion"] == row["answer"] for row in train) / len(train)
    assert 0.3 < solved < 0.7  # something is learned by imitation, and something is left for rewards
