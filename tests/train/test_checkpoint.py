"""The run's folder and its checkpoints, whole or damaged; exports equal the trained weights."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from helpers import ROOT
from huggingface_hub import ModelCard, save_torch_state_dict
from model.checkpoints import ARCHITECTURES, ARGS, write_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import sft
from common import durable
from common.config.groups import TrainArgs, flags_of
from common.config.parse import parse
from common.model.hub import checkpoints_in, resolve_model
from common.model.loading import whole
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import (
    Checkpointer,
    export_hf,
    exported_weights,
    hf_files,
    model_card,
    warn_of_rounding,
    write_model,
)
from common.train.optim import adamw
from common.train.run_folder import begin_run, prepare_output_dir, unlock

# ---- export ----


@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_of_an_untrained_model_equals_the_checkpoint(dtype, computed, tmp_path, device):
    """Names, dtype and weights are equal, and transformers opens the files. A float32 weight is
    exported as it is, also under bfloat16 compute. tests/test_coverage.py has all families."""
    path = write_checkpoint(ARCHITECTURES["qwen3"](), tmp_path / "source", dtype)
    args = dataclasses.replace(ARGS, dtype=computed)
    export_hf(load_policy(path, args, device), AutoTokenizer.from_pretrained(path), tmp_path / "hf")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "hf"))
    assert before.keys() == after.keys()
    assert all(after[n].dtype == dtype and torch.equal(after[n], before[n]) for n in after)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (path, tmp_path / "hf")]
    assert models[1].dtype == dtype
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(*(model(ids).logits for model in models))
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (path, tmp_path / "hf")]
    assert tokenizers[0]("1+1=\u00e9") == tokenizers[1]("1+1=\u00e9")
    assert not list(tmp_path.glob("*.tmp"))


def test_large_export_is_written_in_files_as_they_fill(tmp_path, device):
    """Files and index are those of the hub's library, in which transformers finds every weight."""
    path = write_checkpoint(ARCHITECTURES["qwen3"](), tmp_path / "source", torch.bfloat16)
    policy = load_policy(path, ARGS, device)
    files = hf_files(policy, AutoTokenizer.from_pretrained(path), "auto")
    whole_size = sum(x.nbytes for x in load_file(f"{path}/model.safetensors").values())
    for limit in (whole_size, whole_size - 1, 60_000, 1):
        write_model(policy, files, tmp_path / str(limit), limit)
        theirs = tmp_path / f"theirs_{limit}"
        theirs.mkdir()
        save_torch_state_dict(dict(exported_weights(policy, torch.bfloat16)), theirs,
                              max_shard_size=limit)  # fmt: skip
        names = {file.name for file in theirs.iterdir()}
        assert len(names) == 1 if limit == whole_size else "model.safetensors.index.json" in names
        extra = {*files, durable.CHECKSUMS}
        assert {file.name for file in (tmp_path / str(limit)).iterdir()} == names | extra
        for name in names:
            ours = tmp_path / str(limit) / name
            assert ours.read_bytes() == (theirs / name).read_bytes(), (limit, name)
            if name.endswith(".safetensors"):
                assert ours.stat().st_mode == (ours.parent / "config.json").stat().st_mode
        resolve_model(str(tmp_path / str(limit)))  # checks the checksums
        models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (path, ours.parent)]
        before, after = (model.state_dict() for model in models)
        assert all(torch.equal(after[name], before[name]) for name in before | after)


def test_model_card_repeats_the_run_without_absolute_paths(main, sums, tmp_path, monkeypatch):
    monkeypatch.chdir(sums.parent)
    flags = ("--max_steps", 2, "--batch_size", 8, "--eval_size", 16, "--lr", 1e-3)
    flags = (*flags, "--lora_rank", 2, "--warmup_steps", 1, "--eval_every", 0)
    text = ("--system_prompt", "a: |b|\n`c`", "--prompt_format", "chat")
    base = shutil.copytree(tiny_model(), tmp_path / "base")
    given = [str(x) for x in ("--dataset", sums.name, *flags, *text)]
    main("sft", *given, "--model", base, "--output_dir", tmp_path / "run")
    card = ModelCard.load(tmp_path / "run/hf/README.md")
    assert card.data.library_name == "transformers" and card.data.tags == ["onefile"]
    assert "sft.py" in card.text and str(tmp_path) not in card.content
    in_card = yaml.safe_load(re.search("```yaml\n(.*?)```", card.text, re.DOTALL)[1])
    assert in_card.pop("model") == "base"
    (tmp_path / "flags.yaml").write_text(yaml.safe_dump(in_card))
    again = flags_of(parse(sft.Args, ["--config", str(tmp_path / "flags.yaml")]))
    before = flags_of(parse(sft.Args, given))
    before["max_length"] = again["max_length"]  # the run has set it
    assert again == before
    of_hub = ModelCard(model_card(sft.Args(model="Qwen/Qwen3-0.6B@main"), 1).decode())
    assert of_hub.data.base_model == "Qwen/Qwen3-0.6B" and card.data.base_model is None


def test_model_card_is_that_of_the_last_step_until_it_is_edited(main, small, tmp_path):
    command = ("sft", *small, "--batch_size", 8, "--eval_size", 16, "--output_dir", tmp_path)
    card = tmp_path / "hf" / "README.md"
    for steps, length in enumerate(("1 step on 1 rank", "2 steps on 1 rank"), 1):
        main(*command, "--keep_last", 1, "--max_steps", steps)
        assert f"trained for {length}\nwith" in card.read_text()
        assert f"max_steps: {steps}\n" in card.read_text()
    with card.open("a") as file:
        file.write("mine\n")
    edited = card.read_text()
    resolve_model(str(tmp_path / "hf"))  # raises if a file with a checksum was changed
    main(*command, "--keep_last", 1, "--max_steps", 3)
    assert card.read_text() == edited
    whole = tmp_path / "checkpoints" / "step_000003" / "hf" / "README.md"
    assert "trained for 3 steps" in whole.read_text()


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32], ids=str)
def test_weights_are_rounded_to_the_dtype_of_the_base(base, tmp_path, device, capsys):
    """A step that is too small for bfloat16 stays in float32, in hf/ and in the checkpoint as a
    model."""
    path = write_checkpoint(ARCHITECTURES["qwen3"](), tmp_path / "source", base)
    args = dataclasses.replace(ARGS, output_dir=str(tmp_path / "run"))
    policy = load_policy(path, args, device)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.0001)
    run = Checkpointer(args, policy, adamw(policy, args), AutoTokenizer.from_pretrained(path))
    warning = "warning: hf/ has bfloat16, training float32: small updates are rounded away; start "
    warning += "from a float32 copy of --model (docs/after.md)\n"
    assert (warning in capsys.readouterr().out) == (base == torch.bfloat16)
    run.export_hf(1)
    run.save(1)
    before = load_file(tmp_path / "source" / "model.safetensors")
    for folder in ("run/hf", "run/checkpoints/step_000001"):
        after = load_file(f"{resolve_model(str(tmp_path / folder))}/model.safetensors")
        for name, weight in before.items():
            expected = (weight * 1.0001).to(base) if base == torch.float32 else weight
            assert after[name].dtype == base and torch.equal(after[name], expected), name


def test_command_of_the_page_makes_a_float32_copy(tmp_path, device, monkeypatch, capsys):
    path = shutil.copytree(tiny_model(), tmp_path / "source")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    page = (ROOT / "docs" / "after.md").read_text()
    (code,) = re.findall("python -c '(.*)' MODEL COPY", page)
    monkeypatch.setattr("sys.argv", ["-c", str(path), str(tmp_path / "copy")])
    exec(code, {})
    capsys.readouterr()
    before, after = (load_policy(str(x), ARGS, device) for x in (path, tmp_path / "copy"))
    warn_of_rounding(before)
    assert "rounded away" in capsys.readouterr().out
    warn_of_rounding(after)
    assert not capsys.readouterr().out
    weights = after.state_dict()
    assert all(torch.equal(x, weights[name]) for name, x in before.state_dict().items())
    vocabularies = [load_tokenizer(str(x)).get_vocab() for x in (path, tmp_path / "copy")]
    assert vocabularies[0] == vocabularies[1]


# ---- the folder ----


def begin(folder, kind: type[TrainArgs] = TrainArgs, **flags) -> None:
    """Prepare a folder up to its first checkpoint."""
    args = kind(output_dir=str(folder), **flags)
    prepare_output_dir(args, args.dry_run)
    if args.dry_run:
        return
    begin_run(args)
    (folder / "checkpoints" / "step_000001").mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


def test_folder_belongs_to_the_run_with_its_flags(tmp_path, capsys):
    begin(tmp_path)
    begin(tmp_path, max_steps=9, save_every=1, resume="must")  # may change
    before = (tmp_path / "args.yaml").read_text()
    words = r"a run with other flags \(seed was 0, is 1, lr was 1e-05, is 1.0\); name another"
    begin(tmp_path, dry_run=True, lr=1.0, seed=1)
    assert re.match(f"^warning: --output_dir {tmp_path}: .*{words}", capsys.readouterr().out)
    with pytest.raises(ValueError, match=f"^--output_dir {tmp_path}: .*{words}"):
        begin(tmp_path, lr=1.0, seed=1)
    assert (tmp_path / "args.yaml").read_text() == before
    for damaged in (
        "",
        "- 1\n",
        "lr: [",
        "lr: &a [*a]",
        f"lr: {'[' * 2000}",
        before[: len(before) // 2] + "\x00",
    ):
        (tmp_path / "args.yaml").write_text(damaged)
        with pytest.raises(ValueError, match="/args.yaml is damaged; delete it to resume with the"):
            begin(tmp_path)


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("process 7 on another"), file.flush(), print("locked", flush=True)
sys.stdin.read()
"""


def test_second_run_in_a_folder_is_refused(tmp_path):
    begin(tmp_path)
    unlock()
    (tmp_path / "lock").unlink()
    command = [sys.executable, "-c", HOLDER, tmp_path / "lock"]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout.readline() == "locked\n"
        for resume in ("auto", "never"):
            with pytest.raises(ValueError, match="process 7 on another uses it; wait for it or na"):
                begin(tmp_path, resume=resume)
        holder.stdin.close()
    begin(tmp_path)


def test_checkpoints_are_ordered_by_number_and_have_exact_names(tmp_path):
    names = ["step_1000000", "step_999900", "step_000004"]
    for name in (*names, "step_000004_backup", "step_000005.tmp", "step_x"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000009").touch()
    assert [path.name for path in checkpoints_in(tmp_path)] == names


def test_run_without_a_checkpoint_does_not_claim_the_folder(tmp_path):
    prepare_output_dir(TrainArgs(output_dir=str(tmp_path)))
    prepare_output_dir(TrainArgs(output_dir=str(tmp_path), lr=1.0))
    with pytest.raises(ValueError, match=f"^--resume must: {tmp_path} has no checkpoint"):
        prepare_output_dir(TrainArgs(output_dir=str(tmp_path), resume="must"))


# ---- checkpoints ----


class Cursor:
    """Object with a state."""

    at = 0

    def state_dict(self) -> dict:
        return dict(at=self.at)

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


@pytest.fixture
def checkpointer(tmp_path, device):
    """Return a checkpointer that saves after each of three steps and keeps all checkpoints."""
    args = TrainArgs(output_dir=str(tmp_path), keep_last=3, dtype="float32")
    model = load_policy(tiny_model(), args, device)
    made = Checkpointer(
        args, model, adamw(model, args), load_tokenizer(tiny_model()), cursor=Cursor()
    )
    for step in (1, 2, 3):
        fill(made, step)
        made.save(step)
    fill(made, 0)
    return made


def fill(made: Checkpointer, value: float) -> None:
    """Set weights, moments and cursor to those of a step."""
    model, optimizer = made.trained[""]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None
        with torch.no_grad():
            parameter.fill_(value)
        optimizer.state[parameter]["exp_avg"].fill_(value)
    made.stateful["cursor"].at = value


def is_of_step(made: Checkpointer, value: float) -> bool:
    model, optimizer = made.trained[""]
    same = all((whole(p) == value).all() and (whole(optimizer.state[p]["exp_avg"]) == value).all()
               for p in model.parameters())  # fmt: skip
    return same and made.stateful["cursor"].at == value


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_newest_checkpoint_is_loaded(checkpointer, tmp_path, capsys):
    assert checkpointer.load_latest() == 3 and is_of_step(checkpointer, 3)
    assert f"resuming from {tmp_path}/checkpoints/step_000003 (step 3)" in capsys.readouterr().out
    assert json.loads((tmp_path / "checkpoints/step_000003/state.json").read_text()) == dict(
        step=3, cursor=dict(at=3)
    )
    checkpointer.args = dataclasses.replace(checkpointer.args, keep_last=2)
    fill(checkpointer, 30)
    checkpointer.save(3)  # a second save replaces the checkpoint of that step
    assert steps_in(tmp_path) == ["step_000002", "step_000003"]
    assert checkpointer.load_latest() == 3 and is_of_step(checkpointer, 30)


def test_damaged_checkpoints_are_set_aside_until_one_is_whole(checkpointer, tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    shard = next((folder / "step_000003").glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    (folder / "step_000002" / "checksums.json").write_text("{}")
    shutil.copytree(folder / "step_000001", folder / "step_000009.tmp")  # a save that was killed
    assert checkpointer.load_latest() == 1 and is_of_step(checkpointer, 1)
    said = capsys.readouterr().out
    for name, file in (("step_000003", shard.name), ("step_000002", "checksums.json")):
        problem = f"{file} is missing or not as it was written"
        assert f"{name} is damaged ({problem}): loading the previous one" in said
    assert [name for name in steps_in(tmp_path) if "." not in name] == ["step_000001"]
    next((folder / "step_000001").glob("*.safetensors")).unlink()
    for _ in range(2):  # the second time too, when it has been set aside
        with pytest.raises(ValueError, match=f"{folder}: all checkpoints are damaged; start over"):
            checkpointer.load_latest()


def test_checkpoint_that_cannot_be_read_is_no_damaged_one(checkpointer, tmp_path, monkeypatch):
    """It stays, as do those of an earlier version, which are named whatever else they lack."""
    folder = tmp_path / "checkpoints"
    before = steps_in(tmp_path)
    checksums = folder / "step_000003" / "checksums.json"
    checksums.unlink()
    checksums.mkdir()
    words = f"^{folder}/step_000003: cannot be read, and stays as it is: .*"
    with pytest.raises(ValueError, match=f"{words}Is a directory"):
        checkpointer.load_latest()
    checksums.rmdir()
    shutil.copy(folder / "step_000002" / "checksums.json", checksums)
    with monkeypatch.context() as patch:  # a network disk
        gone = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        patch.setattr(durable, "fingerprint", mock.Mock(side_effect=gone))
        with pytest.raises(ValueError, match=f"{words}Stale file handle"):
            checkpointer.load_latest()
    (folder / "step_000003" / "__0_0.distcp").touch()
    with pytest.raises(ValueError, match=f"^{folder}/step_000003: an earlier version of onefile"):
        checkpointer.load_latest()
    assert steps_in(tmp_path) == before


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_interrupted_replacement_leaves_the_old_folder_or_the_new_one(
    renames, tmp_path, monkeypatch
):
    final, work, done = tmp_path / "hf", tmp_path / "hf.tmp", []
    for folder in (final, work):
        folder.mkdir()
        (folder / folder.name).touch()
    rename = Path.rename

    def interrupted(path: Path, to: Path) -> None:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(rename(path, to))

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(Path, "rename", interrupted)
        durable.replace(work, final)
    durable.recover(final)
    assert [path.name for path in final.iterdir()] == ["hf" if renames < 2 else "hf.tmp"]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
