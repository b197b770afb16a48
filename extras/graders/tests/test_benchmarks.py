"""The named benchmarks: eval.py with each recipe on rows that have the columns of its data."""

import json
from pathlib import Path

import pytest
from helpers import ROOT, write_rows

AIME = dict(problem="What is $2 + 2$?", answer="4")
MMLU_PRO = dict(question_id=7, question="Which is even?", options=["1", "2", "3", "N/A"])
MMLU_PRO |= dict(answer="B", answer_index=1, cot_content="", category="math", src="made up")
GPQA = {"Question": "Which is even?", "Correct Answer": "2 \n", "Incorrect Answer 1": "1"}
GPQA |= {"Incorrect Answer 2": "3", "Incorrect Answer 3": "5", "High-level domain": "Physics"}
ARC = dict(id="x", question="Which is even?", answerKey="2")
ARC |= dict(choices=dict(text=["1", "2", "3"], label=["1", "2", "3"]))
IFEVAL = dict(key=1, prompt="Write without commas.", instruction_id_list=["punctuation:no_comma"])
LANGUAGE = dict(key=2, prompt="Write in Hindi.", kwargs=[dict(language="hi")])
LANGUAGE |= dict(instruction_id_list=["language:response_language"])
MATH = dict(problem="Halve $1$.", level="Level 1", type="Algebra", solution=r"It is $\boxed{0.5}$.")
# recipe -> a row, other columns of a second row, a right completion, a wrong one
BENCHMARKS = dict(
    mmlu=(
        dict(question="Even?", subject="math", choices=["1", "2", "3", "5"], answer=1),
        dict(subject="logic"), r"Two. \boxed{B}", r"\boxed{A}",
    ),
    mmlu_pro=(MMLU_PRO, dict(category="law"), "The answer is (B).", "The answer is (C)."),
    gpqa_diamond=(GPQA, {"High-level domain": "Biology"}, "**Answer:** 2", "The answer is 3."),
    arc=(ARC, dict(id="y"), r"\boxed{\text{B}}", "A"),
    math=(MATH, dict(type="Geometry"), r"So \boxed{\frac{1}{2}}.", r"\boxed{2}"),
    aime24=(dict(AIME, id=60, solution="", url="", year="2024"), {}, r"\boxed{4}", r"\boxed{5}"),
    aime25=(AIME, {}, r"\boxed{4}", r"\boxed{5}"),
    aime26=(dict(AIME, answer=4), {}, r"\boxed{4}", r"\boxed{5}"),
    ifeval=(dict(IFEVAL, kwargs=[{}]), {}, "None here.", "One, here."),
    bbh=(
        dict(input="not True is", target="False", config="boolean_expressions"),
        dict(config="web_of_lies"), r"\boxed{False}", r"\boxed{True}",
    ),
)  # fmt: skip


SHOTS = dict(mmlu="dev", mmlu_pro="validation")  # split


def write(path: Path, rows: list[dict]) -> Path:
    write_rows(path, rows)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_recipe_measures_rows_with_the_columns_of_its_data(name, main, tmp_path, capsys):
    """Completions from a file have known results; the model `tiny` samples others."""
    row, changes, right, wrong = BENCHMARKS[name]
    rows = [row, row | changes]
    texts = [right, f"<think>{right}</think>\n{wrong}"]
    lines = [dict(completion=text) for text in texts]
    flags = ["--config", ROOT / f"configs/eval_{name}.yaml", "--model", "tiny"]
    if name == "ifeval":
        rows.append(LANGUAGE)
    (tmp_path / "data").mkdir()
    data = write(tmp_path / "data/test.jsonl", rows)
    if name in SHOTS:
        others = [row | changes | dict(question=f"shot {i}") for i in range(6)]
        shots = data.with_name(f"{SHOTS[name]}.jsonl")
        write(shots, [row | dict(question="mine")] * 5 + others)
        data = data.parent
    flags += ["--dataset", data, "--max_new_tokens", 4, "--pack_tokens", 2048]
    flags += ["--engine", "transformers", "--reward_workers", 1]
    file = write(tmp_path / "completions.jsonl", lines)
    main("eval", *flags, "--completions", file, "--output_dir", tmp_path / "file")
    found = json.loads((tmp_path / "file/results.json").read_text())
    assert found["overall"]["prompts"] == 2
    (reward,) = found["overall"]["rewards"].values()
    assert reward["mean"] == 0.5 and reward["low"] <= 0.5 <= reward["high"]
    solved = [domain["rewards"] for domain in found["domains"].values()]
    assert len(solved) == (2 if changes and "id" not in changes else 0)
    said = capsys.readouterr().out
    assert ("language detector" in said) == (name == "ifeval")
    assert said.count("Question: mine") == (5 if name in SHOTS else 0)  # of the subject

    if name not in SHOTS:
        return
    samples = ["--samples_per_prompt", 1, "--output_dir", tmp_path / "sampled"]
    main("eval", *flags, *samples)
    lines = (tmp_path / "sampled/completions.jsonl").read_text().splitlines()
    counts = [len(json.loads(line)["completions"]) for line in lines]
    assert counts == [2, 2]
    assert "solved" in json.loads((tmp_path / "sampled/results.json").read_text())["overall"]
