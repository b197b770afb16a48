"""`--eval_generate`: scores are those of greedy decoding from the present weights, and training
does not change."""

import pytest
import torch
from helpers import assert_same_weights, metrics, write, write_rows
from processes import run
from transformers import AutoModelForCausalLM, AutoTokenizer

import sft
from common.evaluate import generation
from common.evaluate.generation import first_of_each_set
from common.text.rows import train_and_eval_rows

pytestmark = pytest.mark.slow
FLAGS = ["--model", "tiny-sft", "--max_steps", 2, "--batch_size", 16, "--lr", 3e-3,
         "--eval_every", 2, "--eval_size", 60]  # fmt: skip


def solved(folder: str, rows: list[dict]) -> float:
    """Return the fraction of rows that plain transformers solves."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer(row["prompt"])["input_ids"] for row in rows])
    answers = model.generate(ids, max_new_tokens=4)[:, ids.shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def test_generation_scores_the_present_weights_and_changes_no_weight(sums, tmp_path):
    """Every held-out set is answered, also those that no training set is named like."""
    lines = sums.read_text().splitlines(keepends=True)
    parts = dict(a=lines[:40], b=lines[40:80], c=lines[80:83])
    sets = [
        f"{name}={write(tmp_path / f'{name}.jsonl', ''.join(some))}" for name, some in parts.items()
    ]
    flags, alone, with_it = [*FLAGS, "--dataset", sums], tmp_path / "alone", tmp_path / "with"
    flags += ["--eval_dataset", *sets, "--max_new_tokens", 5]
    run(2, "sft.py", *flags, "--output_dir", alone, "--eval_generate", 0)
    done = run(2, "sft.py", *flags, "--output_dir", with_it, "--eval_generate", 50)
    assert_same_weights(alone, with_it)
    args = sft.Args(dataset=(str(sums),), eval_dataset=tuple(sets), eval_size=60)
    rows = first_of_each_set(train_and_eval_rows(args)[1], 50)
    first, _, last = metrics(with_it)
    assert (first["step"], last["step"]) == (0, 2) and "eval_loss" in last
    assert last["eval/solved"] == last["eval/reward"] == pytest.approx(solved(with_it / "hf", rows))
    assert {f"eval/solved/{name}" for name in "abc"} <= last.keys()
    assert first["eval/solved"] > 0.2 and "eval/solved" not in metrics(alone)[-1]
    assert f"eval/solved {first['eval/solved']:.3g} -> " in done.stdout


def test_answered_rows_are_the_first_of_each_set():
    counts = dict(a=9, b=9, c=1)
    named = [dict(_dataset=name, n=n) for name, count in counts.items() for n in range(count)]
    chosen = first_of_each_set(named, 7)
    assert "".join(f"{row['_dataset']}{row['n']}" for row in chosen) == "a0a1a2b0b1b2c0"
    assert first_of_each_set([dict(n=n) for n in range(9)], 3) == [dict(n=n) for n in range(3)]


def test_prompts_that_are_too_long_are_counted_before_the_engine_starts(
    small, main, tmp_path, monkeypatch, capsys
):
    rows = [
        dict(prompt="1+" * (3000 if i == 2 else 1), completion="2", answer="2") for i in range(9)
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    flags = ("--dataset", data, "--eval_dataset", data, "--eval_generate", 4, "--max_steps", 1)
    flags += (
        "--max_length",
        99,
        "--max_new_tokens",
        5,
        "--overlong",
        "drop",
        "--batch_size",
        2,
        "--eval_every",
        1,
    )
    monkeypatch.setattr(generation, "ColocatedEngine", lambda *_, **__: pytest.fail())
    with pytest.raises(pytest.fail.Exception):
        main("sft", *small, *flags, "--prompt_format", "plain", "--output_dir", tmp_path / "run")
    assert "--eval_generate 4 answers 3 prompts (1 too long)" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["sft", "dpo", "kto"])
def test_held_out_rows_are_read_once(script, small, main, tmp_path, monkeypatch, capsys):
    """Those that train nothing are answered too."""
    pairs = [("2", "3")] * 3 + [("2" * 200, "3")]
    rows = [
        dict(prompt=f"1+{i}=", completion=right, chosen=right, rejected=wrong, answer="2")
        for i, (right, wrong) in enumerate(pairs)
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    data.write_text(data.read_text() + "{\n")
    flags = ("--eval_dataset", data, "--eval_generate", 9, "--eval_every", 1, "--max_steps", 1)
    flags += ("--max_new_tokens", 5, "--max_length", 99, "--on_bad_row", "skip")
    flags += ("--prompt_format", "plain", "--output_dir", tmp_path / "run")
    monkeypatch.setattr(generation, "ColocatedEngine", lambda *_, **__: pytest.fail())
    with pytest.raises(pytest.fail.Exception):
        main(script, *small, *flags)
    said = capsys.readouterr().out
    assert said.count("is not valid JSON") == 1
    assert "--eval_generate 9 answers 4 prompts" in said


def test_prompts_that_cannot_be_scored_are_refused(main, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n' * 20)
    flags = ("--dataset", rows, "--eval_generate", 4, "--output_dir", tmp_path / "run")
    with pytest.raises(ValueError, match="needed: prompt, or question, or input"):
        main("sft", *flags)
