"""Checkpoints that a run resumes from, and the Hugging Face export. `Run` (run.py) calls both.

The folder `checkpoints/step_000100/` has the model and the optimizer as safetensors, which all
ranks write together and any number of ranks can load; `state.json`, with the step and the position
in the data; `checksums.json`, with the size and CRC of these files; and `hf/`, an export of the
model at this step, which `--model .../step_000100` loads. A save writes to a temporary folder and
renames it at the end, so that no run loads half a checkpoint. All ranks must see the same
folder."""

import json
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from common import durable
from common.config.groups import TrainArgs, flags_of, script_of
from common.model.hub import STATE, checkpoints_in
from common.model.loading import base_dtype, hub_weights, load_config, named_errors, whole
from common.model.policy import PackedModel, ScalarModel
from common.parallel import distributed
from common.text.tokenizer import eos_token_ids, format_of
from common.train.export_files import config_file, generation_file, tokenizer_files

CARD = "README.md"
CHECKSUM = b"<!-- CRC %08x: a later export replaces this card unless it is edited -->\n"
BYTES_PER_FILE = 2**30  # of a checkpoint file: a rank has its whole file in memory to write it
BYTES_PER_EXPORT = 5 * 10**9  # of a weights file in hf/, for the same reason on rank 0
PATHS = re.compile(r"(?<![^\s=:'\"])[~/]\S*/(?=[^/\s])")  # an absolute path without its last name


class Checkpointer:
    """Saves and loads a model with its optimizer. It also saves further objects (`stateful`)
    through their `state_dict`, which must be small and the same on every rank.

    `value` is the value model and its optimizer. `moving` is a model without an optimizer that
    follows the policy (`move_towards`). In the export, `stop_token_ids` end a completion as the EOS
    does."""

    def __init__(
        self, args: TrainArgs, model: PackedModel, optimizer: Optimizer, tokenizer, value=None,
        moving: nn.Module | None = None, stop_token_ids: Sequence[int] = (), **stateful,
    ):  # fmt: skip
        self.args = args
        self.folder = Path(args.output_dir)
        self.checkpoints = self.folder / "checkpoints"
        self.model = model
        self.stateful = stateful
        self.moving = moving
        self.trained = {"": (model, optimizer)}
        if value is not None:
            self.trained["value_"] = value
        self.files: dict[str, bytes] = {}
        if distributed.is_main():
            warn_of_rounding(model)
            self.files = hf_files(model, tokenizer, format_of(tokenizer, args), stop_token_ids)

    def load_latest(self) -> int:
        """Load the newest intact checkpoint. Return the number of steps that it had finished, or 0
        if there is none. A damaged one is reported and renamed to `step_N.corrupt`, and the one
        before it is tried. Raises `ValueError` if all are damaged, or if a file cannot be read.
        Collective."""
        import torch.distributed.checkpoint as dcp

        names = distributed.from_main([path.name for path in checkpoints_in(self.checkpoints)])
        for name in names:
            path = self.checkpoints / name
            if any(path.glob("*.distcp")):
                advice = "start over with --resume never"
                raise ValueError(f"{path}: an earlier version of onefile wrote it; {advice}")
            with named_errors(f"{path}: cannot be read, and stays as it is"):
                changed = durable.changed_file(path, distributed.rank(), distributed.world_size())
            damaged = [name for name in distributed.gather_objects(changed) if name]
            if not damaged:
                break
            problem = f"{damaged[0]} is missing or not as it was written"
            distributed.say(f"checkpoint {path} is damaged ({problem}): loading the previous one")
            if distributed.is_main():
                shutil.rmtree(path.with_suffix(".corrupt"), ignore_errors=True)
                path.rename(path.with_suffix(".corrupt"))
        else:
            if names or any(self.checkpoints.glob("*.corrupt")):  # renamed earlier
                advice = "start over with --resume never"
                raise ValueError(f"{self.checkpoints}: all checkpoints are damaged; {advice}")
            return 0
        with named_errors(f"{path}: cannot read the checkpoint"):
            reader = dcp.HuggingFaceStorageReader(path)
            reader.read_metadata()  # within `load` torch would log a traceback of an error
            dcp.load(self._tensors(), storage_reader=reader)
            state = json.loads((path / STATE).read_text())
        for name, item in self.stateful.items():
            item.load_state_dict(state[name])
        distributed.say(f"resuming from {path} (step {state['step']})")
        return state["step"]

    def _tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds, by name: trained weights with their optimizer states,
        buffers, and the weights of `moving`. Loading fills these tensors in place. Frozen weights
        are missing here because a resumed run reads them from `--model`."""
        tensors = {}
        for prefix, (model, optimizer) in self.trained.items():
            weights = dict(model.named_parameters(remove_duplicate=False))
            state = model.state_dict()  # FSDP reshards what a forward has gathered
            tensors |= {f"{prefix}model.{n}": x for n, x in state.items() if n not in weights}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    tensors[f"{prefix}model.{name}"] = parameter.detach()
                    for key, x in optimizer.state[parameter].items():
                        tensors[f"{prefix}optimizer.{name}.{key}"] = x
        if self.moving is not None:
            tensors |= {f"moving.{n}": x.detach() for n, x in self.moving.named_parameters()}
        return tensors

    def save(self, step: int) -> None:
        """Write the checkpoint after `step` steps; one of the same step is replaced. Then delete
        all but the newest `--keep_last`. Collective."""
        import torch.distributed.checkpoint as dcp

        final = self.checkpoints / f"step_{step:06d}"
        work = final.with_suffix(".tmp")
        if distributed.is_main():
            work.mkdir(parents=True)
        distributed.barrier()
        tensors = self._tensors()
        sizes = (x.numel() * x.element_size() for x in tensors.values())
        limit = BYTES_PER_FILE * distributed.world_size()
        file_of = {n: 1 + end // limit for n, end in zip(tensors, accumulate(sizes), strict=True)}
        writer = dcp.HuggingFaceStorageWriter(str(work), file_of, save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
        if distributed.is_main():
            state = {name: item.state_dict() for name, item in self.stateful.items()}
            (work / STATE).write_text(json.dumps(dict(step=step) | state))
        write_model(self.model, self.files | {CARD: model_card(self.args, step)}, work / "hf")
        names = sorted(file.name for file in work.iterdir() if file.is_file())  # hf/ has its own
        own = durable.fingerprints(work, distributed.items_of_rank(names))
        checksums = distributed.gather_dict(own)
        if distributed.is_main():
            durable.write_json(work / durable.CHECKSUMS, checksums)
            durable.replace(work, final)
            for old in checkpoints_in(self.checkpoints)[self.args.keep_last :]:
                dropped = old.with_suffix(".dropped.tmp")  # a kill leaves no half checkpoint
                old.rename(dropped)
                shutil.rmtree(dropped)
        distributed.barrier()

    def export_hf(self, step: int, name: str = "hf", saved: bool = False) -> None:
        """Write the model after `step` steps to the folder `name` (hf or best): safetensors in the
        dtype of the base model, config, tokenizer and model card. With `saved` the checkpoint of
        this step already has an export, which is copied. A model card that the user edited is kept.
        LoRA adapters are merged into the weights, and also written alone to `adapter/` or
        `best_adapter/`. Collective."""
        folder = self.folder / name
        work = folder.with_suffix(".tmp")
        if not saved:
            write_model(self.model, self.files | {CARD: model_card(self.args, step)}, work)
        if distributed.is_main():
            if saved:
                shutil.copytree(self.checkpoints / f"step_{step:06d}" / "hf", work)
            if (folder / CARD).is_file() and is_edited((folder / CARD).read_bytes()):
                shutil.copy(folder / CARD, work)
            durable.replace(work, folder)
        distributed.barrier()
        if self.args.lora_rank:
            adapter = self.folder / ("adapter" if name == "hf" else f"{name}_adapter")
            from common.model.lora import save_adapter

            save_adapter(self.model.hf, self.model.path, self.args, adapter)


def export_hf(model: PackedModel, tokenizer, folder: Path) -> None:
    """Write a model to a new folder, in the dtype of its base model. Collective."""
    files = hf_files(model, tokenizer, "auto") if distributed.is_main() else {}
    write_model(model, files, folder)


def warn_of_rounding(model: PackedModel) -> None:
    """Warn if exports, which have the base model's dtype, are narrower than the training dtype."""
    dtypes = base_dtype(model.path), model.compute_dtype
    if torch.promote_types(*dtypes) != dtypes[0]:
        narrow, wide = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        loss = f"hf/ has {narrow}, training {wide}: small updates are rounded away"
        distributed.say(f"warning: {loss}; start from a {wide} copy of --model (docs/after.md)")


def hf_files(
    model: PackedModel, tokenizer, prompt_format: str, stop_token_ids: Sequence[int] = ()
) -> dict[str, bytes]:
    """Return all files of an export except the weights, by name: config.json,
    generation_config.json and the tokenizer's files. A run reads them when it starts, because
    `--model` may be a checkpoint that another run deletes later."""
    path = model.path
    changes: dict[str, object] = {}
    if isinstance(model, ScalarModel):
        # transformers scores the last token that is not padding, so an EOS must not be the padding.
        ends = eos_token_ids(path, tokenizer, prompt_format)
        changes = dict(
            architectures=[type(model.hf).__name__],
            id2label={"0": "LABEL_0"},
            label2id={"LABEL_0": 0},
            scored_at="end_of_turn",  # where rewards/reward_model.py reads the score
            pad_token_id=None if tokenizer.pad_token_id in ends else tokenizer.pad_token_id,
        )
    files = tokenizer_files(path, tokenizer, prompt_format)
    if model.images is not None:
        model.images.limit_exported(files)
    return {
        "config.json": config_file(path, base_dtype(path), changes),
        "generation_config.json": generation_file(path, tokenizer, prompt_format, stop_token_ids),
    } | files


def model_card(args: TrainArgs, step: int) -> bytes:
    """Return the README.md of an export after `step` steps: the base model, the script, the flags
    that are not at their defaults, and a checksum for `is_edited`. Absolute paths are cut to their
    last name."""
    script = script_of(type(args)).name
    defaults = flags_of(type(args)())
    flags = {name: x for name, x in flags_of(args).items() if x != defaults[name]}
    flags.pop("output_dir", None)
    metadata = dict(library_name="transformers", tags=["onefile"])
    hub_id = re.fullmatch(r"([\w-]+/[\w.-]+)(@.+)?", args.model)
    if hub_id and not Path(args.model).exists():
        metadata["base_model"] = hub_id[1]
    ranks = distributed.counted(distributed.world_size(), "rank")
    text = f"""---
{yaml.safe_dump(metadata)}---
# {Path(args.output_dir).resolve().name}

{args.model}, trained for {distributed.counted(step, "step")} on {ranks}
with `{script} --config flags.yaml` of onefile, where flags.yaml is:

```yaml
{yaml.safe_dump(flags, sort_keys=False, allow_unicode=True)}```

"""
    card = PATHS.sub("", text).encode()
    return card + CHECKSUM % zlib.crc32(card)


def is_edited(card: bytes) -> bool:
    """Return whether somebody has changed a model card since `model_card` wrote it."""
    text, start, _ = card.rpartition(CHECKSUM[:5])
    return not start or card != text + CHECKSUM % zlib.crc32(text)


def write_model(
    model: PackedModel, files: dict[str, bytes], folder: Path, limit: int = BYTES_PER_EXPORT
) -> None:
    """Write `files` and a model's weights to a new folder: safetensors of at most `limit` bytes
    each, in the dtype of config.json, an index if there are several, and checksums. Collective."""
    dtype = None
    if distributed.is_main():
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        dtype = load_config(folder).dtype
    weights = exported_weights(model, distributed.from_main(dtype) or torch.float32)
    if distributed.is_main():
        write_weights(weights, folder, limit)
        for file in folder.glob("*.safetensors"):
            shutil.copymode(folder / "config.json", file)  # safetensors lets only the owner read
        durable.write_checksums(folder)
    for _ in weights:  # the other ranks only take part in gathering
        pass
    distributed.barrier()


def exported_weights(model: PackedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each exported weight, on the CPU. Only rank 0 yields any;
    the other ranks must iterate too, because shards are gathered, one block of the model at a time.

    Weights are cast to `dtype`, LoRA adapters are merged into them, and a head tied to the
    embedding is left out. Buffers keep their dtype: GLM-4.5's router bias does not fit in bfloat16.
    Collective."""
    hf = model.hf
    buffers = dict(hf.named_buffers())
    names = [n for n in hf.state_dict() if n not in hf.all_tied_weights_keys and ".lora_" not in n]
    # `hub_weights` renames, splits and joins weights, but only within a block.
    for _, block in groupby(names, lambda name: re.match(r"(\D*\.\d+\.)?", name)[0]):
        tensors = {}
        for name in block:
            module, _, kind = name.rpartition(".")
            layer = hf.get_submodule(module)
            if hasattr(layer, "lora_A") and kind == "weight":
                tensors[name] = layer.merged(model.compute_dtype).to(dtype)
            else:
                tensor = getattr(layer, kind).detach()
                tensors[name] = whole(tensor if name in buffers else tensor.to(dtype))
        if distributed.is_main():
            for name, tensor in hub_weights(hf, tensors).items():
                yield name, tensor.to("cpu", copy=True).contiguous()


def write_weights(weights: Iterator[tuple[str, Tensor]], folder: Path, limit: int) -> None:
    """Write the weights to safetensors files, named as transformers expects. A file is written as
    soon as the next weight would make it larger than `limit`."""
    files: list[list[str]] = []  # names of the weights in each
    tensors: dict[str, Tensor] = {}  # for the next file
    total = 0

    def write() -> None:
        save_file(tensors, folder / f"{len(files)}.tmp", metadata=dict(format="pt"))
        files.append([*tensors])
        tensors.clear()

    for name, tensor in weights:
        if tensors and sum(x.nbytes for x in [*tensors.values(), tensor]) > limit:
            write()
        tensors[name] = tensor
        total += tensor.nbytes
    write()
    if len(files) == 1:
        (folder / "0.tmp").rename(folder / "model.safetensors")
        return
    file_of = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"{number}.tmp").rename(folder / file)
        file_of |= dict.fromkeys(names, file)
    index = dict(metadata=dict(total_size=total), weight_map=file_of)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
