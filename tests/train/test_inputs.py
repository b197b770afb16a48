"""A resumed run knows what it reads by its content: other rows and frozen weights are refused,
other code and held-out rows are told."""

import json
import os
import shutil
from pathlib import Path

import pytest
from helpers import write_rows
from processes import one_error, run

import distill
import dpo
import ppo
from common.config.groups import TrainArgs
from common.config.online import OnlineArgs
from common.model.tiny import tiny_model
from common.train import inputs
from common.train.run_folder import begin_run, prepare_output_dir, unlock

STEP = ("--eval_every", 0, "--trace_every", 0, "--batch_size", 4)
ROWS = [dict(prompt=f"{i}+1=", completion=str(i + 1)) for i in range(20)]
OTHERS = [*ROWS[:-1], dict(prompt="1+1=", completion="3")]


def begin(folder: Path, kind: type, rows=(), held_out=(), **flags) -> None:
    """Begin or resume a run up to its first checkpoint."""
    args = kind(output_dir=str(folder / "run"), **flags)
    prepare_output_dir(args)
    begin_run(args, rows, held_out)
    (folder / "run" / "checkpoints" / "step_000001").mkdir(exist_ok=True)
    unlock()


def write_inputs(folder: Path) -> None:
    shutil.copytree(tiny_model(), folder / "m")
    shutil.copytree(folder / "m", folder / "step_000001" / "hf")
    for name in ("state.json", "checksums.json"):
        (folder / "step_000001" / name).touch()
    (folder / "r.py").write_text("def f(completion, row): return 0.0\nclass E: pass\n")
    (folder / "t.jinja").write_text("{{ messages }}")


@pytest.mark.parametrize(
    ("kind", "flags", "file"),
    [
        (OnlineArgs, dict(model="m"), "m/model.safetensors"),
        (OnlineArgs, dict(model="m"), "m/tokenizer.json"),
        (OnlineArgs, dict(chat_template="t.jinja"), "t.jinja"),
        (OnlineArgs, dict(reward=("exact_match", "model:m")), "m/model.safetensors"),
        (OnlineArgs, dict(model="step_000001"), "step_000001/hf/model.safetensors"),
        (dpo.Args, dict(reference_model="m"), "m/model.safetensors"),
        (ppo.Args, dict(value_model="m"), "m/model.safetensors"),
        (distill.Args, dict(teacher=("x=m",)), "m/model.safetensors"),
    ],
)
def test_another_model_or_template_is_refused(kind, flags, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    begin(tmp_path, kind, **flags)
    whole = Path(file).read_bytes()
    os.utime(file, (1, 1))  # as after a copy
    begin(tmp_path, kind, **flags)
    Path(file).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    advice = "restore it, use --resume never, or delete .*/run/inputs.json to go on with it"
    words = rf"{Path(file).name} is not what the run in .*/run began with; {advice}$"
    with pytest.raises(ValueError, match=words):
        begin(tmp_path, kind, **flags)
    (tmp_path / "run" / "inputs.json").unlink()
    begin(tmp_path, kind, **flags)


@pytest.mark.parametrize(
    "flags",
    [
        dict(reward="r.py:f"),
        dict(reward="environment", environment="r.py:E"),
        dict(tools="r.py:f"),
        dict(agent="r.py:f"),
        dict(reward="by_row"),
    ],
)
def test_other_code_is_told(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    rows = [dict(prompt="1", reward="r.py:f", _source="a.jsonl:1")]
    for _ in range(2):
        begin(tmp_path, OnlineArgs, rows, **flags)
        assert "not what the run" not in capsys.readouterr().out
    (tmp_path / "r.py").write_text("def f(completion, row): return 1.0\nclass E: pass\n")
    if flags.keys() & {"environment", "tools"}:  # columns that this code fills
        rows[0] |= dict(tools="[]") if "tools" in flags else dict(_prompt="what reset says now")
    begin(tmp_path, OnlineArgs, rows, **flags)
    said = "r.py is not what the run in"
    assert said in capsys.readouterr().out


def test_rows_are_known_by_their_columns(tmp_path, capsys):
    rows = [row | dict(_source=f"a.jsonl:{i}", _folder="x") for i, row in enumerate(OTHERS, 1)]
    moved = [row | dict(_folder="y") for row in rows]
    begin(tmp_path, TrainArgs, rows, rows)
    begin(tmp_path, TrainArgs, moved, rows[::-1][::-1])
    with pytest.raises(ValueError, match=r"^--dataset arithmetic: a\.jsonl is not what the run in"):
        begin(tmp_path, TrainArgs, rows[::-1], rows)
    with pytest.raises(ValueError, match=r"^--dataset arithmetic: b\.jsonl is not what the run in"):
        begin(tmp_path, TrainArgs, [*rows, dict(_source="b.jsonl:1")], rows)
    assert "warning" not in capsys.readouterr().out
    begin(tmp_path, TrainArgs, rows, rows[:5])
    assert "warning: held-out rows: a.jsonl is not what the run in" in capsys.readouterr().out
    begin(tmp_path, TrainArgs, rows, [])  # --eval_every 0
    assert "warning" not in capsys.readouterr().out


def test_files_of_one_name_in_two_folders_are_two(tmp_path):
    files = [tmp_path / name / "x.py" for name in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text(str(file))
    assert [*inputs._of_files(files)] == ["a/x.py", "b/x.py"]
    assert [*inputs._of_files(files[:1])] == ["x.py"]


def test_images_are_known_by_their_content(tmp_path):
    def rows(file: str, content: str) -> list[dict]:
        return [dict(images=[file], _images=[(file, content, 0, 1, 1)], _source="a.jsonl:1")]

    begin(tmp_path, TrainArgs, rows("cache/a.png", "d1"))
    begin(tmp_path, TrainArgs, rows("another/b.png", "d1"))
    with pytest.raises(ValueError, match="a.jsonl is not what the run"):
        begin(tmp_path, TrainArgs, rows("another/b.png", "d2"))


def test_secrets_of_tools_are_not_stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    begin(tmp_path, OnlineArgs, tools="mcp:env KEY=s3cret python r.py")
    written = (tmp_path / "run" / "inputs.json").read_text()
    assert "mcp:env KEY=*** python r.py" in written and "s3cret" not in written


def test_damaged_digests_are_refused(tmp_path):
    begin(tmp_path, TrainArgs)
    (tmp_path / "run" / "inputs.json").write_text("{")
    with pytest.raises(ValueError, match="inputs.json is damaged; delete it to resume"):
        begin(tmp_path, TrainArgs)


def test_a_large_file_is_known_by_its_size_and_blocks_all_over_it(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "BLOCK", 10)
    file = tmp_path / "x"
    digests = []
    for place in (None, 0, 1000, 1999, 300):  # the last one is between the blocks
        content = bytearray(2000)
        if place is not None:
            content[place] = 1
        file.write_bytes(content)
        digests.append(inputs.digest_of_file(file, blocks=3))
    assert len({*digests}) == 4 and digests[0] == digests[4]


def test_edited_rows_are_refused(main, small, pairs, tmp_path):
    data = tmp_path / "a.jsonl"
    for script in ("sft", "dpo"):
        rows = ROWS if script == "sft" else [json.loads(x) for x in pairs.read_text().splitlines()]
        write_rows(data, rows)
        flags = (*small, "--dataset", data, *STEP, "--output_dir", tmp_path / script)
        main(script, *flags, "--max_steps", 1)
        others = [*rows[:-1], rows[-1] | dict(prompt="other")]
        write_rows(data, others)
        unlock()
        words = r"^--dataset .*: a\.jsonl is not what the run in .* began with; restore"
        with pytest.raises(ValueError, match=words):
            main(script, *flags, "--max_steps", 2)
        unlock()
        write_rows(data, rows)
        main(script, *flags, "--max_steps", 2)


def test_two_ranks_refuse_another_base_in_one_message(small, tmp_path):
    model, data = shutil.copytree(small[1], tmp_path / "m"), write_rows(tmp_path / "a.jsonl", ROWS)
    flags = ("--model", model, "--dataset", data, *STEP, "--lora_rank", 2, "--max_steps", 1)
    run(2, "sft.py", *flags, "--output_dir", tmp_path / "run")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | dict(rms_norm_eps=0.1)))
    error = one_error(2, "sft.py", *flags, "--output_dir", tmp_path / "run")
    assert error.startswith(f"--model {model}: config.json is not what the run in")


def test_eval_says_that_stored_rewards_are_of_an_earlier_file(main, small, tmp_path, capsys):
    reward = tmp_path / "my.py"
    flags = ("--eval_size", 2, "--samples_per_prompt", 1, "--max_new_tokens", 2)
    flags += ("--engine", "transformers", "--reward", f"{reward}:s", "--output_dir", tmp_path / "e")
    said = []
    for value in (0.0, 1.0, 1.0):
        reward.write_text(f"def s(completion, row): return {value}\n")
        main("eval", *small, *flags)
        unlock()
        said.append(capsys.readouterr().out)
    again = f"--completions {tmp_path}/e/completions.jsonl and another --output_dir compute them"
    assert "my.py is not what the run" not in said[0]
    for text in said[1:]:
        assert f"warning: --reward {reward}:s: my.py is not what the run in" in text
        assert f"stored completions keep their rewards; {again} anew" in text


def test_each_checkpoint_of_a_folder_is_a_model(main, small, tmp_path, capsys):
    """New ones are no change of the others."""
    flags = ("--eval_size", 1, "--samples_per_prompt", 1, "--max_new_tokens", 2, "--model")
    flags += (tmp_path / "checkpoints", "--engine", "transformers", "--output_dir", tmp_path / "e")
    steps = [tmp_path / "checkpoints" / f"step_00000{step}" for step in (1, 2)]
    for step in steps:
        shutil.copytree(small[1], step / "hf")
        for name in ("state.json", "checksums.json"):
            (step / name).touch()
        main("eval", *small[2:], *flags)
        unlock()
    weights = steps[0] / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    with pytest.raises(ValueError, match=r"^--model .*/step_000001: model.safetensors is not what"):
        main("eval", *small[2:], *flags)
