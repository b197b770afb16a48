"""Nothing of the user's is deleted or replaced: a run that starts over moves the earlier one aside,
and a folder with files that the run would replace is refused before anything is written."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import metrics, write_rows
from processes import one_error, run

from common.train.run_folder import unlock

STEP = ("--max_steps", 1, "--eval_every", 0, "--trace_every", 0, "--batch_size", 8)


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'{{"step": 0, "text": "{name}"}}\n')


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("name", ["hf/config.json", "samples.jsonl", "adapter/a", "best/b"])
def test_files_that_no_run_wrote_are_kept(name, resume, main, tmp_path):
    """They may be the model or the data of this run."""
    write(tmp_path, name)
    before = files_in(tmp_path)
    words = f"the run would replace {name.split('/')[0]} there; name another --output_dir"
    with pytest.raises(ValueError, match=f"^--output_dir {tmp_path}: {words}"):
        main("sft", "--output_dir", tmp_path, "--resume", resume)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("sft", "--model d/hf"),
        ("sft", "--dataset d/samples.jsonl:0.5"),
        ("sft", "--dataset d/s*.jsonl"),
        ("sft", "--eval_dataset hard=d/rows.jsonl"),
        ("sft", "--model link"),
        ("grpo", "--reward model:d/hf"),
        ("grpo", "--reward d/reward.py:good"),
        ("eval", "--against d/against_x.jsonl"),
    ],
)
def test_input_in_the_folder_of_a_run_is_not_moved_aside(
    script, flags, main, tmp_path, monkeypatch
):
    """With `--resume never`. Flags are checked before models and data are read."""
    monkeypatch.chdir(tmp_path)
    names = "metrics.jsonl", "samples.jsonl", "rows.jsonl", "against_x.jsonl", "hf/config.json"
    write(tmp_path / "d", *names, "reward.py")
    (tmp_path / "link").symlink_to(tmp_path / "d" / "hf")
    before = files_in(tmp_path)
    words = flags.replace("*", ".")
    with pytest.raises(ValueError, match=f"^{words}: --resume never would move it aside; name"):
        main(script, *flags.split(), "--output_dir", "d", "--resume", "never")
    monkeypatch.chdir(tmp_path / "d")
    long_text = "字" * 100  # no name of a file
    with pytest.raises(ValueError, match="^the working folder: --resume never would move it"):
        main("sft", "--system_prompt", long_text, "--output_dir", ".", "--resume", "never")
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("inner", ["hf/x", "checkpoints"])
def test_a_run_does_not_begin_in_what_another_run_replaces(inner, main, tmp_path):
    write(tmp_path, "g/metrics.jsonl", "g/hf/config.json")
    before = files_in(tmp_path)
    words = f"the run in {tmp_path}/g writes there; name another"
    with pytest.raises(ValueError, match=f"^--output_dir {tmp_path}/g/{inner}: {words}"):
        main("sft", "--output_dir", tmp_path / "g" / inner)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("inner", ["", "run"])
def test_a_file_in_the_place_of_the_folder_is_refused(inner, main, tmp_path):
    write(tmp_path, "file")
    folder = tmp_path / "file" / inner
    with pytest.raises(ValueError, match=f"^--output_dir {folder}: .*; name another one$"):
        main("sft", "--output_dir", folder)


@pytest.fixture
def train(main, small, capsys, tmp_path) -> Callable[..., str]:
    """`train(*flags)` runs a step of sft.py in tmp_path/run, and returns what it prints."""

    def train(*flags: object) -> str:
        main("sft", *small, *STEP, "--output_dir", tmp_path / "run", *flags)
        return capsys.readouterr().out

    return train


def test_starting_over_moves_the_earlier_run_aside_once_the_new_one_is_known_to_be_good(
    train, tmp_path
):
    train()
    write(tmp_path / "run", "notes.txt")
    first = files_in(tmp_path / "run")
    with pytest.raises(ValueError, match=r"^--dataset typo\.jsonl: no such file"):
        train("--resume", "never", "--dataset", "typo.jsonl")
    assert files_in(tmp_path / "run") == first
    unlock()
    said = train("--resume", "never", "--seed", 1)
    assert f"--resume never: the earlier run is now in {tmp_path}/run.old-1\n" in said
    assert files_in(tmp_path / "run.old-1") == first
    second = files_in(tmp_path / "run")
    assert "notes.txt" not in second and second.keys() == first.keys() - {"notes.txt"}
    (tmp_path / "link").symlink_to(tmp_path / "run")
    train("--resume", "never", "--output_dir", tmp_path / "link")
    assert files_in(tmp_path / "run.old-2") == second and (tmp_path / "link").is_symlink()
    assert (tmp_path / "run" / "hf").is_dir()


def test_a_resumed_run_says_that_its_script_was_edited(train, tmp_path):
    assert "is not as it was" not in train() + train()
    file = tmp_path / "run" / "args.yaml"
    file.write_text(re.sub("# code .*", "# code 0", file.read_text()))
    assert "sft.py is not as it was in this run; --resume never starts over" in train()


def test_folder_without_a_run_stays_where_it_is(train, tmp_path):
    write(tmp_path / "run", "notes.txt", "trace/a.txt", "replay/b.txt", "rows.jsonl")
    before = files_in(tmp_path / "run")
    train("--resume", "never")
    after = files_in(tmp_path / "run")
    assert after | before == after and not list(tmp_path.glob("run.old-*"))


def test_the_run_of_another_script_is_refused_by_flags_that_only_it_has(train, main, tmp_path):
    train("--resume", "never")
    words = "a run of another script or version, which has --eval_generate, .*; name another"
    with pytest.raises(ValueError, match=words):
        main("rm", "--output_dir", tmp_path / "run")


@pytest.mark.slow
def test_two_ranks_move_once_and_refuse_in_one_message(small, tmp_path):
    flags = (*small, *STEP, "--output_dir", tmp_path / "run")
    run(2, "sft.py", *flags)
    assert run(2, "sft.py", *flags, "--resume", "never").stdout.count("run is now in") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.old-1"}
    error = one_error(2, "sft.py", *flags, "--seed", 7)
    assert "the folder has a run with other flags (seed was 0, is 7)" in error


@pytest.mark.parametrize(
    ("script", "flags", "length"),
    [
        ("sft", "--overlong truncate", 32),
        ("dpo", "--overlong drop", 16),
    ],
)
def test_default_lengths_are_those_of_the_run_that_is_resumed(
    script, flags, length, main, small, tmp_path
):
    """`--pack_tokens` may change: rows, tokens and loss are those of an uninterrupted run."""
    texts = [("2" * (40 if i % 2 else 10), "3" * 8) for i in range(32)]
    rows = [
        dict(prompt=f"{i}+1=", completion=long)
        if script == "sft"
        else dict(prompt=f"{i}+1=", chosen=long, rejected=short)
        for i, (long, short) in enumerate(texts)
    ]
    write_rows(tmp_path / "rows.jsonl", rows)

    def train(folder: str, steps: int, pack_tokens: int) -> dict:
        main(
            script, *small[:2], "--dataset", tmp_path / "rows.jsonl", *flags.split(),
            "--batch_size", 8, "--eval_every", 0, "--lr_schedule", "constant", "--max_steps", steps,
            "--pack_tokens", pack_tokens, "--output_dir", tmp_path / folder,
        )  # fmt: skip
        return metrics(tmp_path / folder)[-1]

    whole = train("whole", 4, 32)
    train("resumed", 2, 32)
    assert f"max_length: {length}\n" in (tmp_path / "resumed" / "args.yaml").read_text()
    resumed = train("resumed", 4, 64)
    assert resumed["num_tokens"] == whole["num_tokens"]
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    with pytest.raises(ValueError, match=f"^--max_length {length}: .* must fit in --pack_tokens 8"):
        train("resumed", 5, 8)
