"""Resumable checkpoints as models: `hf/` is written into `checkpoints/step_000100/` when a flag
first names it.

The run of a checkpoint may still be active, and may delete it at any time (`--keep_last`)."""

import json
import os
import shutil
import socket
import warnings
from pathlib import Path

import torch
from torch import Tensor

from common.data import durable
from common.model.checkpoint_files import (
    ADAPTED,
    BASE,
    MANIFEST,
    STATE,
    WEIGHTS,
    checkpoint_reader,
    damage,
    write_safetensors,
)
from common.model.experts import hub_name
from common.model.loading import hub_weights, load_text_config
from common.parallel import distributed


def as_model(flag: str, folder: Path) -> Path:
    """Return `hf/` in a checkpoint. If there is none, rank 0 writes it, and then one rank of each
    machine that does not share the folder. Collective. Raises `ValueError` on every rank for an
    incomplete checkpoint."""
    hf = folder / "hf"
    host = socket.gethostname()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    places = distributed.gather_objects((host, local_rank))
    first_here = min(rank for other, rank in places if other == host)
    for writes in (int(os.environ.get("RANK", 0)) == 0, local_rank == first_here):
        problem = _write_hf(folder, hf) if writes and not hf.is_dir() else None
        problems = [each for each in distributed.gather_objects(problem) if each]
        if problems:
            raise ValueError(f"{flag}: {problems[0]}")
    return hf


def _write_hf(folder: Path, hf: Path) -> str | None:
    """Write `hf/` under another name and rename it when it is complete. Return what is wrong, None
    if nothing is."""
    from torch.distributed.checkpoint.api import CheckpointException

    problem = damage(folder)
    if problem:
        return f"not a complete checkpoint: {problem}"
    if not (folder / WEIGHTS).is_file():
        return (
            "a checkpoint of an older version, without config.json; resume its run, and name the"
            " next checkpoint"
        )
    work = folder / f"hf.{socket.gethostname()}.{os.getpid()}.tmp"  # several jobs may write it
    try:
        work.mkdir()
        for name in json.loads((folder / MANIFEST).read_text()):
            if name not in (STATE, WEIGHTS, ADAPTED, BASE, ".metadata") and not name.endswith(
                ".distcp"
            ):
                (work / name).parent.mkdir(exist_ok=True)
                shutil.copy(folder / name, work / name)
        write_safetensors(read_weights(folder), work)
        if not hf.is_dir():
            durable.rename(work, hf)
            distributed.say(f"{folder} is a checkpoint: its weights are in {hf} now")
    # ValueError: a config that names code
    except (OSError, ValueError, CheckpointException) as error:
        if hf.is_dir():
            return None  # another job was faster
        if not folder.is_dir():
            return "deleted in the meantime by the --keep_last of its run"
        return f"cannot write {hf}: {distributed.first_line(error)}"
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint's model by their names on the hub, in the dtype of its
    config. They are read one at a time, in this process alone."""
    import torch.distributed.checkpoint as dcp

    config = load_text_config(folder)
    base = json.loads((folder / BASE).read_text()) if (folder / BASE).is_file() else None
    names = base["names"] if base else {}
    reader = checkpoint_reader(folder)
    stored = reader.read_metadata().state_dict_metadata
    adapted = json.loads((folder / ADAPTED).read_text()) if (folder / ADAPTED).is_file() else {}

    def read(name: str) -> Tensor:
        key = f"model.hf.{name}"
        tensor = torch.empty(stored[key].size, dtype=stored[key].properties.dtype)
        with warnings.catch_warnings():  # about reading in a single process
            warnings.simplefilter("ignore", UserWarning)
            dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
        return tensor

    weights = {}
    for name in json.loads((folder / WEIGHTS).read_text()):
        stored_name = names.get(name, name)
        if f"model.hf.{name}" in stored:
            by_hub_name = dict(hub_weights(config.model_type, stored_name, read(name)))
        else:  # a frozen weight, which was used in the compute dtype
            dtype = getattr(torch, adapted["dtype"])
            frozen = _read_base(adapted["base"], config.model_type, stored_name)
            by_hub_name = {key: weight.to(dtype) for key, weight in frozen.items()}
        layer = name.removesuffix(".weight")
        if f"model.hf.{layer}.lora_A" in stored:
            from common.model.lora import merge

            ((key, weight),) = by_hub_name.items()
            a_RI = read(f"{layer}.lora_A").to(weight.dtype)
            b_OR = read(f"{layer}.lora_B").to(weight.dtype)
            by_hub_name[key] = merge(weight, a_RI, b_OR, adapted["scale"])
        for key, weight in by_hub_name.items():
            # A file has no views.
            weights[key] = weight.to(config.dtype or torch.float32, copy=True)
    if base:
        from common.model import text_part

        left_out = weights.keys() | set(names.values())
        weights |= text_part.read_weights(base["path"], left_out)
    return weights


def _read_base(base: str, model_type: str, name: str) -> dict[str, Tensor]:
    """Return a weight, or those of a layer's experts, of the model under a checkpoint's
    adapters."""
    from safetensors import safe_open

    wanted = hub_name(model_type, name)
    experts = wanted.rpartition(".")[0] + "." if ".experts." in wanted else wanted
    weights = {}
    for path in sorted(Path(base).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                if key == wanted or key.startswith(experts):
                    weights[key] = file.get_tensor(key)
    if not weights:
        raise FileNotFoundError(f"the model under its adapters, {base}, has no {name}")
    return weights
