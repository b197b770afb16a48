"""Prompts from templates: solved examples, which rows and in which order, and bad flags."""

import importlib
import json

import pytest

from common.rollout import prompts
from common.rollout.prompts import template_maker
from common.text.rows import load_rows

Args = importlib.import_module("eval").Args  # `import eval` would hide the builtin


def args_of(folder, **flags) -> Args:
    """Return flags for a folder with eight examples of two subjects in the split dev."""
    for split, count in (("dev", 8), ("test", 2)):
        rows = [dict(question=f"{split}{i}", subject="ab"[i % 2], answer=i) for i in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)
    flags = dict(shots=2, shot_template="{question}={answer}\n") | flags
    flags = dict(prompt_template="{shots}{question}=", dataset=(str(folder),)) | flags
    return Args(**flags)


def maker(args: Args):
    return template_maker(args, shot_args=args)


ROW = dict(question="7", subject="b", _source="test.jsonl:1")


@pytest.mark.parametrize(
    "flags, prompt",
    [
        (dict(), "dev0=0\ndev1=1\n7="),
        (dict(shots_by="subject"), "dev1=1\ndev3=3\n7="),
        (dict(shots=4, shots_by="subject"), "dev1=1\ndev3=3\ndev5=5\ndev7=7\n7="),
        (dict(shots=0), "7="),
        (dict(dataset_split="train"), "dev0=0\ndev1=1\n7="),
    ],
)
def test_examples_are_the_first_rows_of_the_split(flags, prompt, tmp_path):
    assert maker(args_of(tmp_path, **flags))(dict(ROW)) == prompt


def test_a_row_is_no_example_of_itself(tmp_path):
    """Two files may have one name."""
    (tmp_path / "b").mkdir()
    args_of(tmp_path / "b")
    two = tuple(f"{tmp_path}/{name}test.jsonl" for name in ("", "b/"))
    args = args_of(tmp_path, shots=3, dataset=two, shots_split="train")
    for row in load_rows("--dataset", two[0], "train", args):
        prompt = maker(args)(row)
        assert prompt.count("test0=0") + prompt.count("test1=1") == 3
        assert prompt.count(f"{row['question']}={row['answer']}") == 1


def test_no_more_examples_are_looked_at_than_are_shown(tmp_path, monkeypatch):
    """With all examples compared for each row, 8,000 rows took minutes."""

    class Counted(dict):
        """A row that counts how often its place is read."""

        reads = 0

        def get(self, key, default=None):
            Counted.reads += key == "_source"
            return super().get(key, default)

    rows = [Counted(question=str(i), answer=i, _source=f"dev.jsonl:{i}") for i in range(300)]
    monkeypatch.setattr(prompts, "rows_of_split", lambda *_: rows)
    make = maker(args_of(tmp_path))
    for row in rows[:100]:
        make(row)
    assert 0 < Counted.reads < 1000


@pytest.mark.parametrize(
    "flags, problem",
    [
        (dict(prompt_template="{question}"), "--shots 2 needs {shots} in --prompt_template"),
        (dict(shot_template=None), "--shots 2 needs --shot_template"),
        (dict(shots_split="absent"), "has no split 'absent': see --shots_split, or set --shots 0"),
        (dict(shot_template="{level}"), "dev.jsonl:1: --shot_template: no column level"),
        (dict(shot_template="{"), "--shot_template: "),
        (dict(shots=9), "test.jsonl:1: --shots 9: --shots_split dev has 8 other rows"),
        (dict(shots=5, shots_by="subject"), "dev has 4 other rows with subject 'b'"),
        (dict(shots_by="level"), "dev.jsonl:1: --shots_by level: no column level"),
    ],
)
def test_unusable_examples_are_refused(flags, problem, tmp_path):
    with pytest.raises(ValueError) as error:
        maker(args_of(tmp_path, **flags))(dict(ROW))
    assert problem in str(error.value)
