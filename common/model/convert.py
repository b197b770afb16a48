"""A resumable checkpoint as a model: what is missing in `checkpoints/step_000100/` is written beside, as `hf/` in it.

A checkpoint has PyTorch's shards of float32 weights and moments, config.json and the tokenizer. Safetensors are written
when it is first named as a model. The run it is of may still go on, and may delete it any time (`--keep_last`).
"""

import json
import os
import shutil
import socket
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from common.model.loading import hub_name, hub_weights
from common.model.lora import merge
from common.parallel import distributed

STATE, MANIFEST, WEIGHTS = "state.json", "manifest.json", "weights.json"  # beside PyTorch's and Hugging Face's files
ADAPTED = "adapted.json"  # if it has adapters alone: of which model, and how they are merged


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    return sorted((p for p in folder.glob("step_*") if p.suffix == "" and p.is_dir()), reverse=True)


def is_checkpoint(folder: Path) -> bool:
    """Whether it is one of ours, whole or not."""
    ours = any((folder / name).exists() for name in (STATE, MANIFEST)) or any(folder.glob("*.distcp"))
    return ours and not any(folder.glob("*.safetensors"))


def fingerprint(path: Path) -> list[int]:
    """[size in bytes, CRC-32]: finds truncated and damaged files at the speed of the disk."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def damage(folder: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """What is wrong with a checkpoint's files, of which every `ranks`-th is looked at; None: nothing."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"{MANIFEST}: {getattr(error, 'strerror', None) or distributed.first_line(error)}"
    if not isinstance(manifest, dict) or STATE not in manifest:
        return f"{MANIFEST} does not list the checkpoint's files"
    for name, expected in sorted(manifest.items())[rank::ranks]:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if fingerprint(folder / name) != expected:
            return f"{name} is not what was written"
    return None


def as_model(flag: str, folder: Path) -> Path:
    """`hf/` in a checkpoint, written when there is none: by rank 0, and then by one rank of each machine that does not
    see it. Collective. Raises `ValueError` on every rank for a checkpoint that is not whole."""
    hf, local_rank = folder / "hf", int(os.environ.get("LOCAL_RANK", 0))
    of_ranks = distributed.gather_objects((socket.gethostname(), local_rank))
    first_here = local_rank == min(rank for host, rank in of_ranks if host == socket.gethostname())
    for writes in (int(os.environ.get("RANK", 0)) == 0, first_here):
        problem = _write_hf(folder, hf) if writes and not hf.is_dir() else None
        if problem := next(filter(None, distributed.gather_objects(problem)), None):
            raise ValueError(f"{flag}: {problem}")
    return hf


def _write_hf(folder: Path, hf: Path) -> str | None:
    """Built under another name and renamed: it is whole, or not there. Returns what is wrong, None: nothing."""
    if problem := damage(folder):
        return f"not a whole checkpoint: {problem}"
    if not (folder / WEIGHTS).is_file():
        return "a checkpoint of an older version, without config.json; resume its run, and its next one can be named"
    work = folder / f"hf.{socket.gethostname()}.{os.getpid()}.tmp"  # several jobs may be at it
    try:
        work.mkdir()
        for name in json.loads((folder / MANIFEST).read_text()):
            if name not in (STATE, WEIGHTS, ADAPTED, ".metadata") and not name.endswith(".distcp"):
                (work / name).parent.mkdir(exist_ok=True)
                shutil.copy(folder / name, work / name)
        write_safetensors(read_weights(folder), work)
        if not hf.is_dir():
            work.rename(hf)
            if distributed.is_main():
                print(f"{folder} is a checkpoint: its weights are in {hf} now", flush=True)
    except (OSError, CheckpointException) as error:
        if not hf.is_dir():  # else another one was faster
            gone = "it was deleted meanwhile, by its run's --keep_last"
            return f"cannot write {hf}: {distributed.first_line(error)}" if folder.is_dir() else gone
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return None


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The model's weights of a checkpoint in the dtype of its config, without the optimizer's moments. One is read at
    a time, in this process alone."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    stored, weights = FileSystemReader(folder).read_metadata().state_dict_metadata, {}
    adapted = json.loads((folder / ADAPTED).read_text()) if (folder / ADAPTED).is_file() else {}

    def read(name: str) -> torch.Tensor:
        key = f"model.hf.{name}"
        whole = torch.empty(stored[key].size, dtype=stored[key].properties.dtype)
        with warnings.catch_warnings():  # it says that it reads in a single process
            warnings.simplefilter("ignore", UserWarning)
            dcp.load({key: whole}, checkpoint_id=folder, no_dist=True)
        return whole

    for name in json.loads((folder / WEIGHTS).read_text()):
        if f"model.hf.{name}" in stored:
            parts = hub_weights(config.model_type, name, read(name))
        else:  # frozen; what was trained with was in the compute dtype
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
    """A weight, or those of a layer's experts, of the model that the adapters of a checkpoint belong to."""
    from safetensors import safe_open

    wanted, found = hub_name(model_type, name), {}
    experts = wanted.rpartition(".")[0] + "." if ".experts." in wanted else wanted
    for path in sorted(Path(base).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys() if key == wanted or key.startswith(experts)}  # noqa: SIM118
    if not found:
        raise FileNotFoundError(f"the model that its adapters belong to, {base}, has no {name}")
    return found


def write_safetensors(weights: dict[str, torch.Tensor], folder: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(weights, folder)
