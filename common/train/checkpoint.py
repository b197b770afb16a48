"""Resumable checkpoints, and the Hugging Face export.

`checkpoints/step_000100/` contains PyTorch's distributed checkpoint of model and optimizer, which any number of ranks
can load; `state.json` (step and data cursor); config and tokenizer, which make it a model (`model/convert.py`); and
`manifest.json` (size and CRC of every file). A save writes to a temporary folder and renames it at the end, so that an
interrupted save is ignored. All ranks must share the folder.
"""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from common.config.groups import TrainArgs
from common.data import durable
from common.model import convert, lora
from common.model.convert import checkpoints_in
from common.model.export_files import base_dtype, config_file, generation_file, tokenizer_files
from common.model.hub import eos_token_ids
from common.model.loading import hub_weights, load_config, one_line_errors
from common.model.policy import PackedModel, ScalarModel
from common.parallel import distributed
from common.train.publish import card_files


class Checkpointer:
    """Saving and loading of model, optimizer and other objects with a `state_dict` (small, the same on every rank).

    `value` is a second model with its optimizer.
    """

    def __init__(self, args: TrainArgs, model: PackedModel, optimizer: Optimizer, tokenizer, value=None, **stateful):
        self.args, self.folder, self.keep_last = args, Path(args.output_dir), args.keep_last
        self.checkpoints = self.folder / "checkpoints"
        self.model, self.stateful = model, stateful
        self.trained = {"": (model, optimizer)} | ({"value_": value} if value else {})
        self.files: dict[str, bytes] = {}
        if distributed.is_main():
            dtype = export_dtype(model, args.export_dtype)
            self.files = hf_files(model, tokenizer, args.prompt_format, dtype)

    def load_latest(self) -> int:
        """Load the newest intact checkpoint and return its number of finished steps; 0 without checkpoints. Collective.

        A damaged checkpoint is reported, renamed to `step_N.corrupt` and replaced by the previous one. Raises
        `ValueError` if all checkpoints are damaged.
        """
        found = distributed.gather_objects([path.name for path in checkpoints_in(self.checkpoints)])[0]
        for name in found:
            path = self.checkpoints / name
            found_here = convert.damage(path, dist.get_rank(), dist.get_world_size())
            problems = [p for p in distributed.gather_objects(found_here) if p]
            if not problems:
                return self._load(path)
            distributed.say(f"checkpoint {path} is damaged ({problems[0]}): loading the previous one")
            if distributed.is_main():
                shutil.rmtree(path.with_suffix(".corrupt"), ignore_errors=True)
                path.rename(path.with_suffix(".corrupt"))
        if found or any(self.folder.glob("checkpoints/*.corrupt")):  # also after a second start
            raise ValueError(f"{self.checkpoints}: all checkpoints are damaged; start over with --resume never")
        return 0

    def _load(self, path: Path) -> int:
        import torch.distributed.checkpoint as dcp

        # In place: `set_state_dict` would move offloaded moments to the weights' device. The rest of an optimizer's
        # state are flags, and its learning rate is set at each step.
        with one_line_errors(str(path)):
            dcp.load(self._tensors(), storage_reader=convert.checkpoint_reader(path))
            state = durable.parse_json((path / convert.STATE).read_text())
        for name, part in self.stateful.items():
            part.load_state_dict(state[name])
        distributed.say(f"resuming from {path} (step {state['step']})")
        return state["step"]

    def _tensors(self) -> dict[str, dict]:
        """Return the state of the trained weights and their optimizers. Frozen weights are read from `--model`."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        out, options = {}, StateDictOptions(ignore_frozen_params=True)
        for prefix, (model, optimizer) in self.trained.items():
            out[f"{prefix}model"], out[f"{prefix}optimizer"] = get_state_dict(model, optimizer, options=options)
        return out

    @property
    def size(self) -> int:
        """Return the bytes of a checkpoint, nearly: those of the trained weights and two moments of each."""
        return sum(3 * p.nbytes for model, _ in self.trained.values() for p in model.parameters() if p.requires_grad)

    def free_space(self) -> int:
        """Return the free bytes of the disk with the checkpoints. Collective."""
        free = shutil.disk_usage(self.folder).free if distributed.is_main() else 0
        return distributed.gather_objects(free)[0]

    def save(self, step: int) -> None:
        """Write the checkpoint after `step` steps, then delete all but the newest `--keep_last`. Collective.

        An earlier checkpoint of the same step is replaced.
        """
        import torch.distributed.checkpoint as dcp

        final = self.checkpoints / f"step_{step:06d}"
        work = final.with_suffix(".tmp")
        if (free := self.free_space()) < self.size:
            need = f"a checkpoint needs {self.size / 1e9:.3g} GB, {free / 1e9:.3g} GB are free"
            raise distributed.RunError(f"--output_dir {self.folder}: {need}; older checkpoints are intact")
        if distributed.is_main():
            work.mkdir(parents=True)
        distributed.barrier()
        dcp.save(self._tensors(), checkpoint_id=work)
        if distributed.is_main():
            state = dict(step=step) | {name: part.state_dict() for name, part in self.stateful.items()}
            (work / convert.STATE).write_text(json.dumps(state))
            (work / convert.WEIGHTS).write_text(json.dumps(exported_names(self.model)))
            if layers := lora.layers_of(self.model.hf):
                scale = next(iter(layers.values())).scale
                dtype, base = str(self.model.compute_dtype).removeprefix("torch."), str(Path(self.model.path).resolve())
                (work / convert.ADAPTED).write_text(json.dumps(dict(base=base, scale=scale, dtype=dtype)))
            write_files(self.files, work)
        distributed.barrier()
        files = sorted(f for f in work.rglob("*") if f.is_file())[dist.get_rank() :: dist.get_world_size()]
        shares = distributed.gather_objects({str(f.relative_to(work)): durable.fingerprint(f) for f in files})
        if distributed.is_main():
            manifest = {name: expected for share in shares for name, expected in share.items()}
            (work / convert.MANIFEST).write_text(json.dumps(manifest))
            if final.is_dir():
                _delete(final)
            durable.rename(work, final)
            for old in checkpoints_in(self.checkpoints)[self.keep_last :]:
                _delete(old)
        distributed.barrier()

    def export_hf(self, name: str = "hf", curves: Sequence[str] = ()) -> None:
        """Write `hf/`: safetensors in `--export_dtype`, config and tokenizer. Adapters are merged, and also written
        alone to `adapter/` (`best_adapter/` for `best/`). A model card in both has the metrics `curves`. Collective.

        Weights are gathered one at a time, to rank 0's host only. The new folder replaces the old one at the end.
        """
        card = partial(card_files, self.args, self.model, curves) if distributed.is_main() else lambda _: {}
        _export(self.model, self.files | card(folder := self.folder / name), folder)
        if lora.has_adapters(self.args):
            adapter = self.folder / ("adapter" if name == "hf" else f"{name}_adapter")
            lora.save_adapter(self.model.hf, self.model.path, self.args, adapter, card(adapter))


def export_hf(model: PackedModel, tokenizer, folder: Path, prompt_format: str = "auto") -> None:
    """Write the export of `Checkpointer.export_hf`, without separate adapters, to any folder, in the dtype of the base.
    Collective."""
    files: dict[str, bytes] = {}
    if distributed.is_main():
        files = hf_files(model, tokenizer, prompt_format, base_dtype(model.path))
    _export(model, files, folder)


def export_dtype(model: PackedModel, name: str) -> torch.dtype:
    """Return the dtype of `--export_dtype`, and warn if it is narrower than the compute dtype."""
    dtype = base_dtype(model.path) if name == "base" else getattr(torch, name)
    if torch.promote_types(dtype, model.compute_dtype) != dtype:
        narrow, wide = (str(kind).removeprefix("torch.") for kind in (dtype, model.compute_dtype))
        loss = f"hf/ has {narrow}, training {wide}: small updates are rounded away"
        distributed.say(f"warning: --export_dtype {name}: {loss}; --export_dtype {wide} keeps them")
    return dtype


def hf_files(model: PackedModel, tokenizer, prompt_format: str, dtype: torch.dtype) -> dict[str, bytes]:
    """Return the files of an export besides the weights, by name: config.json, generation_config.json and those of the
    tokenizer. A run reads them at start: its model may be a checkpoint that another run deletes later."""
    path = model.path
    changes: dict[str, object] = dict(architectures=[type(model.hf).__name__])
    if isinstance(model, ScalarModel):
        changes |= dict(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})  # one score
        changes["scored_at"] = "end_of_turn"  # rewards/reward_model.py: the token with a trained score
        # Transformers scores the last token that is not padding: an EOS must not also be the padding.
        ends = eos_token_ids(path, tokenizer, prompt_format)
        changes["pad_token_id"] = None if tokenizer.pad_token_id in ends else tokenizer.pad_token_id
    return {
        "config.json": config_file(path, dtype, changes),
        "generation_config.json": generation_file(path, tokenizer, prompt_format),
    } | tokenizer_files(path, tokenizer, prompt_format)


def write_files(files: dict[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def exported_names(model: PackedModel) -> list[str]:
    """Return the names of exported weights. A tied head is the embedding; adapters are merged into their base."""
    tied = model.hf.all_tied_weights_keys
    return [name for name in model.hf.state_dict() if name not in tied and ".lora_" not in name]


def _export(model: PackedModel, files: dict[str, bytes], folder: Path) -> None:
    state, weights = model.hf.state_dict(), {}
    work = folder.with_suffix(".tmp")
    if distributed.is_main():
        work.mkdir(parents=True)
        write_files(files, work)
        dtype = load_config(work).dtype or torch.float32
    for name in exported_names(model):
        whole = lora.merged_weight(model.hf, name, lora.whole(state[name]), model.compute_dtype)
        if distributed.is_main():
            for hub_name, weight in hub_weights(model.hf.config.model_type, name, whole):
                weights[hub_name] = weight.to("cpu", dtype, copy=True)
    if distributed.is_main():
        convert.write_safetensors(weights, work)
        durable.replace_folder(work, folder)
    distributed.barrier()


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint. It is renamed first: another job that writes `hf/` into it would block the deletion."""
    dropped = checkpoint.with_suffix(".dropped.tmp")
    checkpoint.rename(dropped)
    shutil.rmtree(dropped)
