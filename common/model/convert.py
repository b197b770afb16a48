"""Resumable checkpoints as models: `hf/` is written into `checkpoints/step_000100/` when a flag
first names it.

The run of a checkpoint may still be active, and may delete it at any time (`--keep_last`)."""

import json
import os
import shutil
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from common.data import durable
from common.model import mxfp4, text_part
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
from common.model.text_part import TOWER, TOWER_IN_FILES, FileNames
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
    reader = checkpoint_reader(folder)
    stored = reader.read_metadata().state_dict_metadata
    base = _read_json(folder / BASE)
    names = FileNames(**base["names"]) if base else None
    adapted = _read_json(folder / ADAPTED)
    names_under_adapters = FileNames(**adapted["names"]) if adapted.get("names") else None
    files_under_adapters = text_part.names_in(adapted["base"]) if adapted else {}

    def read(key: str) -> Tensor:
        tensor = torch.empty(stored[key].size, dtype=stored[key].properties.dtype)
        with warnings.catch_warnings():  # about reading in a single process
            warnings.simplefilter("ignore", UserWarning)
            dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
        return tensor

    weights = {}
    dtypes = json.loads((folder / WEIGHTS).read_text())  # of buffers; None: that of the config
    for name in dtypes:
        if f"model.hf.{name}" in stored:
            by_hub_name = dict(
                hub_weights(config.model_type, name, read(f"model.hf.{name}"), names)
            )
        else:  # a frozen weight, which was used in the compute dtype
            dtype = getattr(torch, adapted["dtype"])
            by_hub_name = {}
            frozen = _read_base(
                adapted["base"], files_under_adapters, config.model_type, name, names_under_adapters
            )
            for key, weight in frozen:
                if names_under_adapters is not None and names is None:  # a model of text alone
                    key = names_under_adapters.in_model(key)
                by_hub_name[key] = weight.to(dtype)
        layer = name.removesuffix(".weight")
        if f"model.hf.{layer}.lora_A" in stored:
            from common.model.lora import merge

            ((key, weight),) = by_hub_name.items()
            a_RI = read(f"model.hf.{layer}.lora_A").to(weight.dtype)
            b_OR = read(f"model.hf.{layer}.lora_B").to(weight.dtype)
            by_hub_name[key] = merge(weight, a_RI, b_OR, adapted["scale"])
        for key, weight in by_hub_name.items():
            # A file has no views.
            dtype = getattr(torch, dtypes[name]) if dtypes[name] else config.dtype
            weights[key] = weight.to(dtype or torch.float32, copy=True)
    if names is not None:
        for name in names.passengers:  # a trained vision tower is in the checkpoint (tower.py)
            key = f"model.{TOWER}{name.removeprefix(TOWER_IN_FILES)}"
            if key in stored:
                weights[name] = read(key).to(config.dtype or torch.float32)
        others = set(names.passengers) - weights.keys()
        weights |= dict(text_part.read_weights(base["path"], sorted(others)))
    return weights


def _read_json(file: Path) -> dict:
    return json.loads(file.read_text()) if file.is_file() else {}


def _read_base(
    base: str, files: dict[str, Path], model_type: str, name: str, names: FileNames | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight, or those of a layer's experts, of the model under a checkpoint's adapters, by
    their names there. `files`: see `names_in`."""
    wanted = hub_name(model_type, name if names is None else names.of(name))
    if wanted + mxfp4.BLOCKS in files:
        packed = (wanted + mxfp4.BLOCKS, wanted + mxfp4.SCALES)
        yield wanted, mxfp4.unpack(*(text_part.read_weight(files, name) for name in packed))
        return
    experts = wanted.rpartition(".")[0] + "." if ".experts." in wanted else wanted
    keys = [wanted] if wanted in files else [key for key in files if key.startswith(experts)]
    if not keys:
        raise FileNotFoundError(f"the model under its adapters, {base}, has no {name}")
    for key in keys:
        yield key, text_part.read_weight(files, key)
