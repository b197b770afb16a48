"""The run's folder: who owns it, resumable checkpoints, and the Hugging Face export.

`checkpoints/step_000100/` holds PyTorch's distributed checkpoint of model and optimizer (resharded on load, so another
number of ranks may resume), `state.json` (step and data cursor), config and tokenizer, with which it is a model
(`model/convert.py`), and `manifest.json` (size and CRC of every file). It is written under another name and renamed
once everything is on disk, so a killed save is never picked up. The folder must be one that all ranks see.
"""

import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from common.config.groups import BaseArgs, TrainArgs
from common.model import lora
from common.model.convert import (
    ADAPTED,
    MANIFEST,
    STATE,
    WEIGHTS,
    checkpoints_in,
    damage,
    fingerprint,
    write_safetensors,
)
from common.model.hub import eos_token_ids, save_ends
from common.model.loading import hub_weights
from common.model.policy import PackedModel, ScalarModel
from common.parallel import distributed

# What every run keeps in its folder; scripts name what else they own.
FILES = ("args.yaml", "metrics.jsonl", "samples.jsonl", "completions.jsonl", "curves.png", "wandb_id")
FOLDERS = ("checkpoints", "hf", "best", "adapter", "best_adapter", "tensorboard", "timeline")


def prepare_output_dir(args: BaseArgs, owned: Sequence[str] = ()) -> None:
    """Make `--output_dir` this run's, before anything slow. `owned`: files that are the script's own (glob patterns).
    Collective.

    Raises `ValueError` on every rank if it cannot be written, is not one folder for all machines or holds a run with
    other flags; with `--resume never` that run's files are deleted, with `--resume must` there has to be one.
    """
    folder, problem = Path(args.output_dir), None
    # A name that no machine has looked up before: network file systems remember what was not there.
    mark = folder / "checkpoints" / f"step_{secrets.token_hex(8)}.tmp"
    if distributed.is_main():
        try:
            problem = _claim(folder, args, owned)
            if not problem:
                mark.mkdir()
        except (OSError, yaml.YAMLError) as error:
            problem = f"--output_dir {folder}: {distributed.first_line(error)}"
    problem, name = distributed.gather_objects((problem, mark.name))[0]
    if problem:
        raise ValueError(problem)
    mark = mark.with_name(name)
    blind = [host for host in distributed.gather_objects(None if mark.is_dir() else socket.gethostname()) if host]
    if distributed.is_main():
        mark.rmdir()
    if blind:
        raise ValueError(
            f"--output_dir {folder}: {blind[0]} does not see what rank 0 writes there; "
            "it must be a folder that all machines share"
        )


def _claim(folder: Path, args: BaseArgs, owned: Sequence[str]) -> str | None:
    flags = folder / "args.yaml"
    if args.resume == "never":
        for flag in ("model", "adapter"):
            start = getattr(args, flag, None)
            if start and Path(start).exists() and folder.resolve() in Path(start).resolve().parents:
                return f"--{flag} {start}: --resume never would delete it"
        for file in (file for name in (*FILES, *owned) for file in folder.glob(name)):
            file.unlink()
        for old in (folder / name for name in FOLDERS):
            shutil.rmtree(old, ignore_errors=True)
        for old in checkpoints_in(folder):  # what eval.py says of each
            shutil.rmtree(old)
    # eval.py and bok.py go on from there
    sampled = any(file for place in ("", "step_*/") for file in folder.glob(f"{place}completions.jsonl"))
    if args.resume == "must" and not checkpoints_in(folder / "checkpoints") and not sampled:
        return f"--resume must: {folder} has no checkpoint"
    begun = sampled or (folder / "metrics.jsonl").is_file()
    if flags.is_file() and (checkpoints_in(folder / "checkpoints") or begun):  # not if it never began
        then, now = yaml.safe_load(flags.read_text()) or {}, args.to_dict()
        if not isinstance(then, dict):
            return f"--output_dir {folder}: args.yaml in it is not one of ours"
        then = type(args)().to_dict() | then  # a flag that is newer than that run had its default
        then |= {k: [v] for k, v in then.items() if isinstance(v, str) and isinstance(now.get(k), list)}  # or took one
        free = args.may_change(then)
        changed = [k for k in then if then.get(k) != now.get(k) and k not in free]
        if changed:
            what = ", ".join(f"{key} was {then.get(key)}, is {now.get(key)}" for key in changed[:3])
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            return (
                f"--output_dir {folder} holds a run with other flags ({what}{more}): "
                "name another folder, or --resume never to delete that run and start over"
            )
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    unfinished = ("checkpoints/step_*.tmp", *(f"{name}.tmp" for name in FOLDERS))
    for stale in [path for name in unfinished for path in folder.glob(name)]:
        shutil.rmtree(stale)
    flags.write_text(yaml.safe_dump(args.to_dict(), sort_keys=False))
    return None


class Checkpointer:
    """Saves and restores model, optimizer and whatever else has `state_dict` (small, the same on every rank).

    `value` is a second model with its optimizer.
    """

    def __init__(
        self,
        args: TrainArgs,
        model: PackedModel,
        optimizer: torch.optim.Optimizer,
        tokenizer,
        value: tuple[PackedModel, torch.optim.Optimizer] | None = None,
        **stateful,
    ):
        self.args, self.folder, self.keep_last = args, Path(args.output_dir), args.keep_last
        self.checkpoints = self.folder / "checkpoints"
        self.model, self.stateful = model, stateful
        self.trained = {"": (model, optimizer)} | ({"value_": value} if value else {})
        self.files = hf_files(model, tokenizer, args.prompt_format) if distributed.is_main() else {}

    def load_latest(self) -> int:
        """Restore the newest checkpoint that is whole; returns the step to go on with, 0 without any. Collective.

        A damaged one is set aside as `step_N.corrupt` and the one before it is tried, with a line that says so.
        Raises `ValueError` if there were checkpoints and none is whole.
        """
        found = distributed.gather_objects([path.name for path in checkpoints_in(self.checkpoints)])[0]
        for name in found:
            path = self.checkpoints / name
            found_here = damage(path, dist.get_rank(), dist.get_world_size())
            problems = [p for p in distributed.gather_objects(found_here) if p]
            if not problems:
                return self._load(path)
            if distributed.is_main():
                print(f"checkpoint {path} is damaged ({problems[0]}): trying the one before it")
                shutil.rmtree(path.with_suffix(".corrupt"), ignore_errors=True)
                path.rename(path.with_suffix(".corrupt"))
        if found or any(self.folder.glob("checkpoints/*.corrupt")):  # also when the run is started once more
            raise ValueError(f"no checkpoint in {self.checkpoints} is whole: --resume never starts over")
        return 0

    def _load(self, path: Path) -> int:
        # In place, wherever weights and moments are: `set_state_dict` would bring moments to the weights' device. The
        # rest of an optimizer's state are flags, and its learning rate is set at each step.
        dcp.load(self._tensors(), checkpoint_id=path)
        state = json.loads((path / STATE).read_text())
        for name, part in self.stateful.items():
            part.load_state_dict(state[name])
        if distributed.is_main():
            print(f"resuming from {path} (step {state['step']})")
        return state["step"]

    def _tensors(self) -> dict[str, dict]:
        """Of what is trained: a model under adapters is read from `--model`."""
        out, options = {}, StateDictOptions(ignore_frozen_params=True)
        for prefix, (model, optimizer) in self.trained.items():
            out[f"{prefix}model"], out[f"{prefix}optimizer"] = get_state_dict(model, optimizer, options=options)
        return out

    def save(self, step: int) -> None:
        """Write a checkpoint that resumes with `step` steps done, then drop all but the newest `--keep_last`.

        Collective. It replaces an earlier one of the same step.
        """
        final = self.checkpoints / f"step_{step:06d}"
        work = final.with_suffix(".tmp")
        if distributed.is_main():
            work.mkdir(parents=True)
        distributed.barrier()
        dcp.save(self._tensors(), checkpoint_id=work)
        if distributed.is_main():
            state = dict(step=step) | {name: part.state_dict() for name, part in self.stateful.items()}
            (work / STATE).write_text(json.dumps(state))
            (work / WEIGHTS).write_text(json.dumps(exported_names(self.model)))
            if (scale := lora.scale_of(self.model.hf)) is not None:
                dtype, base = str(self.model.compute_dtype).removeprefix("torch."), str(Path(self.model.path).resolve())
                (work / ADAPTED).write_text(json.dumps(dict(base=base, scale=scale, dtype=dtype)))
            write_files(self.files, work)
        distributed.barrier()
        files = sorted(f for f in work.rglob("*") if f.is_file())[dist.get_rank() :: dist.get_world_size()]
        shares = distributed.gather_objects({str(f.relative_to(work)): fingerprint(f) for f in files})
        if distributed.is_main():
            manifest = {name: expected for share in shares for name, expected in share.items()}
            (work / MANIFEST).write_text(json.dumps(manifest))
            if final.is_dir():
                _delete(final)
            work.rename(final)
            for old in checkpoints_in(self.checkpoints)[self.keep_last :]:
                _delete(old)
        distributed.barrier()

    def export_hf(self, name: str = "hf") -> None:
        """Write `hf/`: safetensors in the wider of `--dtype` and the starting dtype, config and tokenizer; adapters
        merged, and alone in `adapter/` (of `best/` in `best_adapter/`). Collective.

        Weights are gathered one at a time and kept on rank 0's host alone. The old folder stays until the new one is
        whole.
        """
        _export(self.model, self.files, self.folder / name)
        if lora.has_adapters(self.args):
            adapter = self.folder / ("adapter" if name == "hf" else f"{name}_adapter")
            lora.save_adapter(self.model.hf, self.model.path, self.args, adapter)


def export_hf(model: PackedModel, tokenizer, folder: Path, prompt_format: str = "auto") -> None:
    """`Checkpointer.export_hf` to any folder."""
    _export(model, hf_files(model, tokenizer, prompt_format) if distributed.is_main() else {}, folder)


def hf_files(model: PackedModel, tokenizer, prompt_format: str) -> dict[str, bytes]:
    """What stands beside the weights, by name: config.json, generation_config.json and the tokenizer's files. A run
    reads them when it starts: the model it starts from may be another run's checkpoint, and deleted before it ends."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model.path)  # as it was: ours has another attention and dtype
    config.architectures = [type(model.hf).__name__]
    # Not narrower than what was computed with: bfloat16 loses most of what some dozen small steps have changed.
    config.dtype = torch.promote_types(config.dtype or torch.float32, model.compute_dtype)
    if isinstance(model, ScalarModel):
        config.num_labels = 1
        config.scored_at = "end_of_turn"  # rewards/models.py: where its numbers mean something
        # Transformers scores the last token that is not padding; an EOS that also pads would never be the one.
        ends = eos_token_ids(model.path, tokenizer, prompt_format)
        config.pad_token_id = None if tokenizer.pad_token_id in ends else tokenizer.pad_token_id
    with tempfile.TemporaryDirectory() as work:
        config.save_pretrained(work)
        save_ends(model.path, tokenizer, prompt_format, Path(work))
        return {str(f.relative_to(work)): f.read_bytes() for f in Path(work).rglob("*") if f.is_file()}


def write_files(files: dict[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def exported_names(model: PackedModel) -> list[str]:
    """The weights that an export has: a tied head is the embedding, adapters are in what they are added to."""
    tied = model.hf.all_tied_weights_keys
    return [name for name in model.hf.state_dict() if name not in tied and ".lora_" not in name]


def _export(model: PackedModel, files: dict[str, bytes], folder: Path) -> None:
    from transformers import AutoConfig

    state, weights = model.hf.state_dict(), {}
    work = folder.with_suffix(".tmp")
    if distributed.is_main():
        work.mkdir(parents=True)
        write_files(files, work)
        dtype = AutoConfig.from_pretrained(work).dtype or torch.float32
    for name in exported_names(model):
        whole = lora.merged_weight(model.hf, name, lora.whole(state[name]), model.compute_dtype)
        if distributed.is_main():
            for hub_name, weight in hub_weights(model.hf.config.model_type, name, whole):
                weights[hub_name] = weight.to("cpu", dtype, copy=True)
    if distributed.is_main():
        write_safetensors(weights, work)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(work, folder)
    distributed.barrier()


def _delete(checkpoint: Path) -> None:
    """Renamed first: another job may be writing `hf/` into it, and could then not be done."""
    dropped = checkpoint.with_suffix(".dropped.tmp")
    checkpoint.rename(dropped)
    shutil.rmtree(dropped)
