"""Resumable checkpoints as models: `hf/` is written into `checkpoints/step_000100/` when a flag first names it.

A checkpoint has PyTorch's shards of float32 weights and moments, config.json and the tokenizer, but no safetensors. Its
run may still be active, and may delete it at any time (`--keep_last`).
"""

import json
import os
import pickle
import re
import shutil
import socket
import warnings
from pathlib import Path

import torch

from common.data import durable
from common.model.loading import hub_name, hub_weights, load_config
from common.model.lora import merge
from common.parallel import distributed

STATE, MANIFEST, WEIGHTS = "state.json", "manifest.json", "weights.json"  # beside PyTorch's and Hugging Face's files
ADAPTED = "adapted.json"  # in a checkpoint of adapters: their model, scale and dtype

# Classes and functions in the `.metadata` of a checkpoint, by module.
METADATA = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING", "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
        "StorageMeta", "TensorProperties", "TensorStorageMetadata",
    },
    "pathlib": {"PosixPath"}, "pathlib._local": {"PosixPath"},
}  # fmt: skip


class MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name not in METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is in no checkpoint")
        return super().find_class(module, name)


def checkpoint_reader(folder: Path):
    """Return a reader of PyTorch's shards that does not trust `.metadata`, a pickle, as torch does."""
    from torch.distributed.checkpoint import FileSystemReader

    class CheckpointReader(FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            with (Path(self.path) / ".metadata").open("rb") as file:
                metadata = MetadataUnpickler(file).load()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return CheckpointReader(folder)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, newest first."""
    steps = {path: int(path.name[5:]) for path in folder.glob("step_*") if re.fullmatch(r"step_[0-9]{1,15}", path.name)}
    return sorted((path for path in steps if path.is_dir()), key=steps.__getitem__, reverse=True)


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of this project, complete or not."""
    ours = any((folder / name).exists() for name in (STATE, MANIFEST)) or any(folder.glob("*.distcp"))
    return ours and not any(folder.glob("*.safetensors"))


def damage(folder: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """Return what is wrong with a checkpoint's files, None if nothing is. This rank checks every `ranks`-th file."""
    try:
        manifest = durable.parse_json((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"{MANIFEST}: {getattr(error, 'strerror', None) or distributed.first_line(error)}"
    if not isinstance(manifest, dict) or STATE not in manifest:
        return f"{MANIFEST} does not list the checkpoint's files"
    for name, expected in sorted(manifest.items())[rank::ranks]:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if durable.fingerprint(folder / name) != expected:
            return f"{name} was changed after it was written"
    try:
        checkpoint_reader(folder).read_metadata()
    except (OSError, pickle.UnpicklingError) as error:
        return f".metadata: {getattr(error, 'strerror', None) or distributed.first_line(error)}"
    return None


def as_model(flag: str, folder: Path) -> Path:
    """Return `hf/` in a checkpoint. If there is none, rank 0 writes it, and then one rank of each machine that does not
    share the folder. Collective. Raises `ValueError` on every rank for an incomplete checkpoint."""
    hf, local_rank = folder / "hf", int(os.environ.get("LOCAL_RANK", 0))
    ranks = distributed.gather_objects((socket.gethostname(), local_rank))
    first_here = local_rank == min(rank for host, rank in ranks if host == socket.gethostname())
    for writes in (int(os.environ.get("RANK", 0)) == 0, first_here):
        problem = _write_hf(folder, hf) if writes and not hf.is_dir() else None
        if problem := next(filter(None, distributed.gather_objects(problem)), None):
            raise ValueError(f"{flag}: {problem}")
    return hf


def _write_hf(folder: Path, hf: Path) -> str | None:
    """Write `hf/` under another name and rename it when it is complete. Return what is wrong, None if nothing is."""
    from torch.distributed.checkpoint.api import CheckpointException

    if problem := damage(folder):
        return f"not a complete checkpoint: {problem}"
    if not (folder / WEIGHTS).is_file():
        return "a checkpoint of an older version, without config.json; resume its run, and name the next checkpoint"
    work = folder / f"hf.{socket.gethostname()}.{os.getpid()}.tmp"  # several jobs may write it
    try:
        work.mkdir()
        for name in json.loads((folder / MANIFEST).read_text()):
            if name not in (STATE, WEIGHTS, ADAPTED, ".metadata") and not name.endswith(".distcp"):
                (work / name).parent.mkdir(exist_ok=True)
                shutil.copy(folder / name, work / name)
        write_safetensors(read_weights(folder), work)
        if not hf.is_dir():
            durable.rename(work, hf)
            distributed.say(f"{folder} is a checkpoint: its weights are in {hf} now")
    except (OSError, ValueError, CheckpointException) as error:  # ValueError: a config that names code
        if not hf.is_dir():  # otherwise another job was faster
            gone = "deleted in the meantime by the --keep_last of its run"
            return f"cannot write {hf}: {distributed.first_line(error)}" if folder.is_dir() else gone
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return None


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint's model by their names on the hub, in the dtype of its config. They are read
    one at a time, in this process alone."""
    import torch.distributed.checkpoint as dcp

    config = load_config(folder)
    reader, weights = checkpoint_reader(folder), {}
    stored = reader.read_metadata().state_dict_metadata
    adapted = json.loads((folder / ADAPTED).read_text()) if (folder / ADAPTED).is_file() else {}

    def read(name: str) -> torch.Tensor:
        key = f"model.hf.{name}"
        whole = torch.empty(stored[key].size, dtype=stored[key].properties.dtype)
        with warnings.catch_warnings():  # about reading in a single process
            warnings.simplefilter("ignore", UserWarning)
            dcp.load({key: whole}, storage_reader=reader, no_dist=True)
        return whole

    for name in json.loads((folder / WEIGHTS).read_text()):
        if f"model.hf.{name}" in stored:
            parts = hub_weights(config.model_type, name, read(name))
        else:  # a frozen weight, which was used in the compute dtype
            found = _read_base(adapted["base"], config.model_type, name)
            parts = [(part, weight.to(getattr(torch, adapted["dtype"]))) for part, weight in found.items()]
        layer = name.removesuffix(".weight")
        if f"model.hf.{layer}.lora_A" in stored:
            ((part, weight),) = parts
            a_RI, b_OR = (read(f"{layer}.lora_{which}").to(weight.dtype) for which in "AB")
            parts = [(part, merge(weight, a_RI, b_OR, adapted["scale"]))]
        for part, weight in parts:
            weights[part] = weight.to(config.dtype or torch.float32, copy=True)  # a file has no views
    return weights


def _read_base(base: str, model_type: str, name: str) -> dict[str, torch.Tensor]:
    """Return a weight, or those of a layer's experts, of the model under a checkpoint's adapters."""
    from safetensors import safe_open

    wanted, found = hub_name(model_type, name), {}
    experts = wanted.rpartition(".")[0] + "." if ".experts." in wanted else wanted
    for path in sorted(Path(base).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys() if key == wanted or key.startswith(experts)}  # noqa: SIM118
    if not found:
        raise FileNotFoundError(f"the model under its adapters, {base}, has no {name}")
    return found


def write_safetensors(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write safetensors files of at most 5 GB, an index if there are several, and the checksums of all files there."""
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(weights, folder)
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors writes 0600
    durable.write_checksums(folder)
