"""A checkpoint is the model of its step, for every script; damaged ones are refused."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from model.checkpoints import ARCHITECTURES, write_checkpoint
from processes import run
from safetensors.torch import load_file

from common import durable
from common.config.groups import TrainArgs
from common.model.hub import resolve_model
from common.model.policy import load_policy, load_scalar_model
from common.model.tiny import tiny_model
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import Checkpointer
from common.train.optim import adamw
from common.train.run_folder import prepare_output_dir


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.iterdir() if path.name not in durable.UNCHECKED)
    return {path.name: path.read_bytes() for path in paths}


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
def test_checkpoint_has_the_export_of_its_step(name, dtype, load, tmp_path, device):
    """All bytes are equal."""
    path = write_checkpoint(ARCHITECTURES[name](), tmp_path / "source", dtype)
    run = saved(tmp_path / "run", device, path, load)
    (tmp_path / "run" / "hf").mkdir()
    (tmp_path / "run" / "hf" / "stale").touch()
    run.export_hf(1)
    shutil.rmtree(path)  # the starting model may be another run's checkpoint
    run.save(2)
    found = [Path(resolve_model(str(run.checkpoints / f"step_00000{step}"))) for step in (1, 2)]
    assert files(found[0]) == files(found[1]) == files(tmp_path / "run" / "hf")
    assert load_file(found[1] / "model.safetensors").popitem()[1].dtype == dtype
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= files(found[1]).keys()


# ---- bad input ----


def test_checkpoint_without_a_model_is_refused(checkpoint):
    shutil.rmtree(checkpoint / "hf")
    words = f"^--reference_model {checkpoint}: the folder has no config.json$"
    with pytest.raises(ValueError, match=words):
        resolve_model(str(checkpoint), "--reference_model")


class Planted:
    """Object whose pickle creates a file when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_a_checkpoint_runs_no_code(checkpoint, tmp_path, device, caplog):
    """PyTorch unpickles `.metadata` of its other format."""
    mark, run = tmp_path / "mark", saved(checkpoint.parent.parent.with_name("other"), device)
    run.checkpoints = checkpoint.parent
    shard = next(checkpoint.glob("*.safetensors"))
    for name in (".metadata", shard.name):
        (checkpoint / name).write_bytes(pickle.dumps(Planted(mark)))
        checksums = durable.read_json(checkpoint / "checksums.json")
        checksums[name] = durable.fingerprint(checkpoint / name)
        durable.write_json(checkpoint / "checksums.json", checksums)
        if name == ".metadata":
            assert run.load_latest() == 1
    with pytest.raises(ValueError, match="cannot read the checkpoint: .*[Hh]eader"):
        run.load_latest()
    assert not mark.exists() and "Traceback" not in caplog.text


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


# ---- every script ----


@pytest.mark.slow
def test_scripts_start_from_a_checkpoint(main, small, tmp_path):
    """Two ranks read it; the last step's checkpoint equals hf/ bit for bit. A checkpoint of rm.py
    is a reward model."""
    row = dict(prompt="1+1=", answer="2", completion="2", chosen="2", rejected="3")
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    data = ("--dataset", tmp_path / "rows.jsonl")
    short = (*data, "--batch_size", 2, "--max_steps", 2, "--eval_every", 0, "--save_every", 1)
    main("sft", *small[:2], *short, "--output_dir", tmp_path / "sft")
    model = tmp_path / "sft/checkpoints/step_000002"
    assert files(model / "hf") == files(tmp_path / "sft/hf")
    run(2, "rm.py", "--model", model, *short, "--output_dir", tmp_path / "rm")
    judge = tmp_path / "rm/checkpoints/step_000001"
    named = "--model", model, "--reward_model", judge, "--perplexity_model", model
    sampled = "--samples_per_prompt", 2, "--max_new_tokens", 4, "--engine", "transformers"
    main("eval", *named, *data, *sampled, "--output_dir", tmp_path / "eval")
    found = json.loads((tmp_path / "eval/results.json").read_text())
    assert {"reward_model", "perplexity"} <= found.keys()
