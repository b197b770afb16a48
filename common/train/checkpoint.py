"""Resumable checkpoints, and the Hugging Face export.

`checkpoints/step_000100/` contains PyTorch's distributed checkpoint of model and optimizer, which
any number of ranks can load; `state.json` (step and data cursor); `checksums.json` (size and CRC of
these files); and `hf/`, the model of this step, which `--model .../step_000100` loads. A save
writes to a temporary folder and renames it at the end, so that an interrupted save is ignored. All
ranks must share the folder."""

import json
import re
import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.optim import Optimizer

from common.config.groups import TrainArgs, flags_of, script_of
from common.data.encode import format_of
from common.model import checkpoint_files
from common.model.checkpoint_files import checkpoints_in
from common.model.export_files import config_file, generation_file, tokenizer_files
from common.model.hub import eos_token_ids
from common.model.loading import (
    base_dtype,
    hub_weights,
    load_config,
    named_errors,
    persistent_buffers,
    whole,
)
from common.model.lora import merged_weight, save_adapter
from common.model.policy import PackedModel, ScalarModel
from common.parallel import distributed, durable

CARD = "README.md"
PATHS = re.compile(r"(?<![^\s=:'\"])[~/]\S*/(?=[^/\s])")  # an absolute path up to its last name


class Checkpointer:
    """Saving and loading of model, optimizer and other objects with a `state_dict` (small, the same
    on every rank).

    `value` is a second model with its optimizer, `moving` a frozen one that moves."""

    def __init__(
        self, args: TrainArgs, model: PackedModel, optimizer: Optimizer, tokenizer, value=None,
        moving: nn.Module | None = None, **stateful,
    ):  # fmt: skip
        self.args = args
        self.folder = Path(args.output_dir)
        self.checkpoints = self.folder / "checkpoints"
        self.model = model
        self.stateful = stateful
        self.saved = 0  # step of the last checkpoint that this process wrote
        self.moving = moving
        self.trained = {"": (model, optimizer)}
        if value is not None:
            self.trained["value_"] = value
        self.files: dict[str, bytes] = {}
        if distributed.is_main():
            dtype = export_dtype(model)
            prompt_format = format_of(tokenizer, args)
            self.files = hf_files(model, tokenizer, prompt_format, dtype, args.stop_token_ids)
            self.files[CARD] = model_card(args)

    def load_latest(self) -> int:
        """Load the newest intact checkpoint and return its number of finished steps; 0 without
        checkpoints. Collective.

        A damaged checkpoint is reported, renamed to `step_N.corrupt` and replaced by the previous
        one. Raises `ValueError` if all checkpoints are damaged."""
        names = distributed.from_main([path.name for path in checkpoints_in(self.checkpoints)])
        for name in names:
            path = self.checkpoints / name
            changed = durable.changed_file(path, dist.get_rank(), dist.get_world_size())
            damaged = [name for name in distributed.gather_objects(changed) if name]
            if not damaged:
                return self._load(path)
            problem = f"{damaged[0]} is missing or not as it was written"
            distributed.say(f"checkpoint {path} is damaged ({problem}): loading the previous one")
            if distributed.is_main():
                shutil.rmtree(path.with_suffix(".corrupt"), ignore_errors=True)
                path.rename(path.with_suffix(".corrupt"))
        if names or any(self.folder.glob("checkpoints/*.corrupt")):  # also after a second start
            raise ValueError(
                f"{self.checkpoints}: all checkpoints are damaged; start over with --resume never"
            )
        return 0

    def _load(self, path: Path) -> int:
        # In place: `set_state_dict` would move offloaded moments to the weights' device. The rest
        # of an optimizer's state are flags, and its learning rate is set at each step.
        with named_errors(f"{path}: cannot read the checkpoint"):
            checkpoint_files.load_tensors(self._tensors(), path)
            state = json.loads((path / checkpoint_files.STATE).read_text())
        for name, item in self.stateful.items():
            item.load_state_dict(state[name])
        distributed.say(f"resuming from {path} (step {state['step']})")
        return state["step"]

    def _tensors(self) -> dict[str, dict]:
        """Return the state of the moving weights, and of the trained ones with their optimizers.
        Frozen weights are read from `--model`."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        tensors = {}
        options = StateDictOptions(ignore_frozen_params=True)
        for prefix, (model, optimizer) in self.trained.items():
            weights, moments = get_state_dict(model, optimizer, options=options)
            tensors[f"{prefix}model"] = weights
            tensors[f"{prefix}optimizer"] = moments
        if self.moving is not None:
            tensors["moving"] = {n: x.detach() for n, x in self.moving.named_parameters()}
        return tensors

    def save(self, step: int) -> None:
        """Write the checkpoint after `step` steps, then delete all but the newest `--keep_last`.
        Collective.

        An earlier checkpoint of the same step is replaced."""
        import torch.distributed.checkpoint as dcp

        final = self.checkpoints / f"step_{step:06d}"
        work = final.with_suffix(".tmp")
        if distributed.is_main():
            work.mkdir(parents=True)
        distributed.barrier()
        dcp.save(self._tensors(), checkpoint_id=work)
        if distributed.is_main():
            state = {name: item.state_dict() for name, item in self.stateful.items()}
            (work / checkpoint_files.STATE).write_text(json.dumps(dict(step=step) | state))
        write_model(self.model, self.files, work / "hf")
        names = sorted(file.name for file in work.iterdir() if file.is_file())  # hf/ has its own
        share = durable.fingerprints(work, distributed.share_of(names))
        checksums = distributed.gather_dict(share)
        if distributed.is_main():
            durable.write_json(work / durable.CHECKSUMS, checksums)
            durable.replace(work, final)
            for old in checkpoints_in(self.checkpoints)[self.args.keep_last :]:
                _delete(old)
        distributed.barrier()
        self.saved = step

    def export_hf(self, step: int, name: str = "hf") -> None:
        """Write `hf/`, the model after `step` steps: safetensors in the base's dtype, config,
        tokenizer and model card. Adapters are merged, and also written alone to `adapter/`
        (`best_adapter/` for `best/`). Collective.

        The new folder replaces the old one at the end, except for a model card, which the user may
        have edited."""
        folder = self.folder / name
        work = folder.with_suffix(".tmp")
        if step != self.saved:
            write_model(self.model, self.files, work)
        elif distributed.is_main():
            shutil.copytree(self.checkpoints / f"step_{step:06d}" / "hf", work)
        if distributed.is_main():
            if (folder / CARD).is_file():
                shutil.copy(folder / CARD, work)
            durable.replace(work, folder)
        distributed.barrier()
        if self.args.lora_rank:
            adapter = self.folder / ("adapter" if name == "hf" else f"{name}_adapter")
            save_adapter(self.model.hf, self.model.path, self.args, adapter)


def export_hf(model: PackedModel, tokenizer, folder: Path, prompt_format: str = "auto") -> None:
    """Write a model to a new folder, in the dtype of its base. Collective."""
    files: dict[str, bytes] = {}
    if distributed.is_main():
        files = hf_files(model, tokenizer, prompt_format, base_dtype(model.path))
    write_model(model, files, folder)


def export_dtype(model: PackedModel) -> torch.dtype:
    """Return the dtype of the base, and warn if it is narrower than the compute dtype."""
    dtype = base_dtype(model.path)
    if torch.promote_types(dtype, model.compute_dtype) != dtype:
        narrow = str(dtype).removeprefix("torch.")
        wide = str(model.compute_dtype).removeprefix("torch.")
        loss = f"hf/ has {narrow}, training {wide}: small updates are rounded away"
        distributed.say(f"warning: {loss}; start from a {wide} copy of --model to keep them")
    return dtype


def hf_files(
    model: PackedModel, tokenizer, prompt_format: str, dtype: torch.dtype, stops: Sequence[int] = ()
) -> dict[str, bytes]:
    """Return the files of an export besides the weights, by name: config.json,
    generation_config.json (`stops`: more EOS tokens) and those of the tokenizer. A run reads them
    at start: its model may be a checkpoint that another run deletes later."""
    path = model.path
    changes: dict[str, object] = {}
    if isinstance(model, ScalarModel):
        changes |= dict(architectures=[type(model.hf).__name__])
        changes |= dict(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})  # one score
        # rewards/reward_model.py: the token with a trained score
        changes["scored_at"] = "end_of_turn"
        # Transformers scores the last token that is not padding: an EOS must not also be the
        # padding.
        ends = eos_token_ids(path, tokenizer, prompt_format)
        changes["pad_token_id"] = None if tokenizer.pad_token_id in ends else tokenizer.pad_token_id
    files = tokenizer_files(path, tokenizer, prompt_format)
    if model.images is not None:
        model.images.limit_exported(files)
    return {
        "config.json": config_file(path, dtype, changes),
        "generation_config.json": generation_file(path, tokenizer, prompt_format, stops),
    } | files


def model_card(args: TrainArgs) -> bytes:
    """Return README.md of an export: base, script, and the flags that differ from their defaults.
    Absolute paths are cut to their last name."""
    script = script_of(type(args)).name
    defaults = flags_of(type(args)())
    flags = {name: x for name, x in flags_of(args).items() if x != defaults[name]}
    flags.pop("output_dir", None)
    metadata = dict(library_name="transformers", tags=["onefile"])
    hub_id = re.fullmatch(r"([\w-]+/[\w.-]+)(@.+)?", args.model)
    if hub_id and not Path(args.model).exists():
        metadata["base_model"] = hub_id[1]
    text = f"""---
{yaml.safe_dump(metadata)}---
# {Path(args.output_dir).resolve().name}

{args.model}, trained on {distributed.world_size()} ranks with `{script} --config flags.yaml` of
onefile, where flags.yaml is:

```yaml
{yaml.safe_dump(flags, sort_keys=False, allow_unicode=True)}```
"""
    return PATHS.sub("", text).encode()


def write_model(model: PackedModel, files: dict[str, bytes], folder: Path) -> None:
    """Write a model's `files` and weights to a new folder: safetensors of at most 5 GB in the dtype
    of config.json, an index if there are several, and checksums. Weights are gathered one block at
    a time, to rank 0's host only; adapters are merged into their base, and a tied head is the
    embedding. Buffers keep their dtype: a router's bias (GLM-4.5) does not fit in bfloat16.
    Collective."""
    hf = model.hf
    weights = {}
    if distributed.is_main():
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        dtype = load_config(folder).dtype or torch.float32
    buffers = persistent_buffers(hf)
    names = [n for n in hf.state_dict() if n not in hf.all_tied_weights_keys and ".lora_" not in n]
    for _, block in groupby(names, block_of):
        tensors = {}
        for name in block:
            tensor = whole(hf.get_buffer(name) if name in buffers else hf.get_parameter(name))
            if name not in buffers:
                tensor = merged_weight(hf, name, tensor.detach(), model.compute_dtype)
            if distributed.is_main():
                tensors[name] = tensor if name in buffers else tensor.to(dtype)
        for name, tensor in hub_weights(hf, tensors).items():
            weights[name] = tensor.to("cpu", copy=True)
    if distributed.is_main():
        save_torch_state_dict(weights, folder)
        for file in folder.glob("*.safetensors"):
            shutil.copymode(folder / "config.json", file)  # safetensors writes 0600
        durable.write_checksums(folder)
    distributed.barrier()


def block_of(name: str) -> str:
    """Return the name of the block that a weight belongs to. Only weights of one block share a
    tensor in files."""
    return re.match(r"(\D*\.\d+\.)?", name)[0]


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first: another job that writes `hf/` into it would block
    the deletion."""
    dropped = checkpoint.with_suffix(".dropped.tmp")
    checkpoint.rename(dropped)
    shutil.rmtree(dropped)
