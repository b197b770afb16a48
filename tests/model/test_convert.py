"""A checkpoint is a model with the weights of its step's export, for every script; damaged ones are
refused."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from helpers import run
from model.test_policy import ARCHITECTURES, write_checkpoint
from safetensors.torch import load_file

from common.config.groups import TrainArgs
from common.data import durable
from common.model import convert
from common.model.hub import load_tokenizer, resolve_model
from common.model.policy import load_policy, load_scalar_model
from common.model.tiny import tiny_model
from common.train.checkpoint import Checkpointer
from common.train.optim import adamw
from common.train.run_folder import prepare_output_dir


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name not in durable.UNCHECKED
    }


def saved(folder: Path, device, path: str = "", load=load_policy, **flags) -> Checkpointer:
    """Return a run with a checkpoint after step 1."""
    args = TrainArgs(output_dir=str(folder), dtype="float32", **flags)
    prepare_output_dir(args)
    model = load(path or tiny_model(), args, device)
    run = Checkpointer(args, model, adamw(model, args), load_tokenizer(tiny_model()))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.01 * number)
    run.save(1)
    return run


@pytest.fixture(scope="module")
def finished(device, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    saved(folder, device)
    return folder


@pytest.fixture
def checkpoint(finished, tmp_path) -> Path:
    return shutil.copytree(finished, tmp_path / "run") / "checkpoints" / "step_000001"


@pytest.mark.parametrize(
    ("name", "dtype", "load"),
    [
        ("qwen3", torch.bfloat16, load_policy),
        pytest.param("llama", torch.float32, load_policy, marks=pytest.mark.slow),
        pytest.param("llama", torch.float32, load_scalar_model, marks=pytest.mark.slow),
        pytest.param("gemma3", torch.bfloat16, load_policy, marks=pytest.mark.slow),
    ],
)
def test_checkpoint_converts_to_the_export_of_its_step(name, dtype, load, tmp_path, device):
    """The bytes of weights, config, generation config and tokenizer are equal."""
    path = write_checkpoint(ARCHITECTURES[name](), tmp_path / "source", dtype)
    run = saved(tmp_path / "run", device, path, load)
    run.export_hf()
    shutil.rmtree(
        path
    )  # the starting model may be another run's checkpoint: conversion does not read it again
    run.save(2)
    run.export_hf()
    for step in (1, 2):
        found = resolve_model(str(tmp_path / f"run/checkpoints/step_00000{step}"))
        assert files(Path(found)) == files(tmp_path / "run" / "hf"), step
    assert load_file(f"{found}/model.safetensors").popitem()[1].dtype == dtype
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= files(Path(found)).keys()


@pytest.mark.slow
def test_converted_checkpoint_is_written_once_and_deleted_with_its_checkpoint(
    tmp_path, device, capsys
):
    run = saved(tmp_path, device, keep_last=1)
    path = tmp_path / "checkpoints" / "step_000001"
    capsys.readouterr()
    hf = resolve_model(str(path))
    assert (
        hf == f"{path}/hf"
        and f"{path} is a checkpoint: its weights are in {path}/hf now" in capsys.readouterr().out
    )
    written = (path / "hf/model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(path)) == resolve_model(hf) == hf and capsys.readouterr().out == ""
    assert (path / "hf/model.safetensors").stat().st_mtime_ns == written
    assert [p.name for p in path.iterdir() if "hf" in p.name] == ["hf"]
    assert run.load_latest() == 1  # hf/ does not disturb it
    run.save(2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]


@pytest.mark.slow
def test_run_may_delete_a_checkpoint_during_its_conversion(tmp_path, device, monkeypatch):
    """The run continues, and the conversion ends with a one-line error."""
    run = saved(tmp_path, device, keep_last=1)
    read = convert.read_weights

    def read_while_the_run_saves(folder: Path) -> dict:
        weights = read(folder)
        run.save(2)
        return weights

    monkeypatch.setattr(convert, "read_weights", read_while_the_run_saves)
    path, remove = tmp_path / "checkpoints/step_000001", shutil.rmtree

    def remove_renamed(folder: Path, **flags) -> None:
        assert not path.is_dir(), "a file that is written now would prevent the removal"
        remove(folder, **flags)

    monkeypatch.setattr(shutil, "rmtree", remove_renamed)
    with pytest.raises(
        ValueError, match=f"^--model {path}: deleted in the meantime by the --keep_last of its run$"
    ):
        resolve_model(str(path))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]


# ---- bad input ----


def cut(folder: Path) -> None:
    shard = next(folder.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])


def older(folder: Path) -> None:
    """Turn a checkpoint into one of an older version, without config and tokenizer."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in [
        name for name in manifest if not name.endswith(("distcp", ".metadata", "state.json"))
    ]:
        (folder / name).unlink()
        del manifest[name]
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, r"not a complete checkpoint: __0_0.distcp was changed after it was written"),
        (
            lambda folder: (folder / ".metadata").unlink(),
            "not a complete checkpoint: .metadata is missing",
        ),
        (
            lambda folder: (folder / "config.json").unlink(),
            "not a complete checkpoint: config.json is missing",
        ),
        (
            lambda folder: (folder / "manifest.json").unlink(),
            "not a complete checkpoint: manifest.json: No such file",
        ),
        (
            lambda folder: (folder / "manifest.json").write_text("[]"),
            "not a complete checkpoint: manifest.json does not list",
        ),
        (
            older,
            "a checkpoint of an older version, without config.json; resume its run, "
            "and name the next checkpoint",
        ),
    ],
)
def test_damaged_checkpoint_is_refused(damage, words, checkpoint):
    damage(checkpoint)
    with pytest.raises(ValueError, match=f"^--reference_model {checkpoint}: {words}") as error:
        resolve_model(str(checkpoint), "--reference_model")
    assert "\n" not in str(error.value) and not list(checkpoint.glob("*hf*"))


class Planted:
    """Object whose pickle creates a file when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_a_checkpoint_runs_no_code(checkpoint, tmp_path, device):
    """Neither as a model nor in a run that resumes: the run continues from the checkpoint before
    it, here from none."""
    mark = tmp_path / "mark"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Planted(mark)))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest[".metadata"] = durable.fingerprint(checkpoint / ".metadata")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    words = (
        r"not a complete checkpoint: .metadata: it names pathlib.Path.touch, "
        r"which is in no checkpoint"
    )
    with pytest.raises(ValueError, match=words):
        resolve_model(str(checkpoint))
    run = saved(checkpoint.parent.parent.with_name("other"), device)
    run.checkpoints = checkpoint.parent
    with pytest.raises(ValueError, match="all checkpoints are damaged"):
        run.load_latest()
    assert not mark.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "checksums.json"])
def test_damaged_export_is_refused(name, checkpoint, tmp_path):
    """A flipped bit in a weight would load without an error."""
    hf = shutil.copytree(resolve_model(str(checkpoint)), tmp_path / "copy")
    assert resolve_model(str(hf)) == str(hf)
    content = bytearray((hf / name).read_bytes())
    content[-20] ^= 1
    (hf / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^--model {hf}: {name} is not "):
        resolve_model(str(hf))
    (hf / "checksums.json").unlink()
    assert resolve_model(str(hf)) == str(hf)


def test_a_model_folder_runs_no_code(tmp_path, monkeypatch):
    """Transformers would ask on the terminal whether the code may run."""
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    custom = config | dict(
        model_type="custom",
        auto_map=dict(AutoConfig="code.Config", AutoModelForCausalLM="code.Model"),
    )
    (folder / "config.json").write_text(json.dumps(custom))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question to the user"))
    with pytest.raises(ValueError, match="^--model .*: config.json: ") as error:
        resolve_model(str(folder))
    assert "\n" not in str(error.value) and not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_checkpoint_of_an_older_version_resumes(tmp_path, device):
    run = saved(tmp_path, device)
    older(tmp_path / "checkpoints/step_000001")
    assert run.load_latest() == 1


def test_folder_of_checkpoints_is_refused(checkpoint):
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        with pytest.raises(
            ValueError,
            match=f"^--model {folder}: a folder of checkpoints; .* such as {checkpoint}$",
        ):
            resolve_model(str(folder))
    checkpoint.rename(checkpoint.with_suffix(".tmp"))
    with pytest.raises(ValueError, match="the folder has no config.json"):
        resolve_model(str(checkpoint.parent))


# ---- every script ----


@pytest.mark.slow
def test_scripts_start_from_a_checkpoint(main, small, tmp_path):
    """Two ranks write and read the checkpoint; the last step's checkpoint equals hf/ bit for bit. A
    checkpoint of rm.py is a reward model."""
    row = dict(prompt="1+1=", answer="2", completion="2", chosen="2", rejected="3")
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    data = ("--dataset", tmp_path / "rows.jsonl")
    short = (*data, "--batch_size", 2, "--max_steps", 2, "--eval_every", 0, "--save_every", 1)
    run(2, "sft.py", *small[:2], *short, "--output_dir", tmp_path / "sft")
    model = tmp_path / "sft/checkpoints/step_000002"
    done = run(2, "rm.py", "--model", model, *short, "--output_dir", tmp_path / "rm")
    assert done.stdout.count("is a checkpoint: its weights are in") == 1
    assert files(model / "hf") == files(tmp_path / "sft/hf")
    judge = tmp_path / "rm/checkpoints/step_000001"
    main("dpo", "--model", model, *short, "--output_dir", tmp_path / "dpo")
    rollouts = (
        "--prompts_per_step",
        2,
        "--samples_per_prompt",
        2,
        "--max_new_tokens",
        4,
        "--engine",
        "transformers",
    )
    main(
        "grpo",
        "--model",
        model,
        *data,
        *rollouts,
        *short[4:],
        "--reward",
        f"model:{judge}",
        "--output_dir",
        tmp_path / "grpo",
    )
    named = (
        "--reward_model",
        judge,
        "--perplexity_model",
        model,
        "--against",
        tmp_path / "dpo/checkpoints/step_000001",
    )
    main("eval", "--model", tmp_path / "grpo/checkpoints/step_000002", *data, *rollouts[2:], *named,
         "--output_dir", tmp_path / "eval")  # fmt: skip
    found = json.loads((tmp_path / "eval/results.json").read_text())
    assert {"win_rate", "reward_model", "perplexity"} <= found.keys()
    assert (judge / "hf").is_dir() and (tmp_path / "dpo/checkpoints/step_000001/hf").is_dir()
