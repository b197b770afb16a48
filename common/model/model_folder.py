"""The folder of a model that is not built in: it is found or downloaded, and checked before a
library fails on it."""

import contextlib
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

from common.model.checkpoint_files import MANIFEST, checkpoints_in
from common.model.loading import (
    INDEX,
    files_of,
    load_config,
    method_of_quantization,
    model_class,
    require_unchanged,
)
from common.parallel import distributed

BESIDE_WEIGHTS = ["*.json", "*.jinja", "*.txt", "*.model"]  # config and tokenizer


@contextlib.contextmanager
def library_errors(label: str) -> Iterator[None]:
    """Turn any error of a library about a model's files into a ValueError of one line."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{label}: {textwrap.shorten(str(error), 300)}") from error


def find_model(model: str, label: str, weights: bool) -> str:
    """Return the local folder of a model: see `hub.resolve_model`. `label` begins errors.
    Collective."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        name, _, revision = model.partition("@")
        if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ValueError(f"{label}: no such folder")
        # On each machine one rank downloads, and the others find the files in the cache.
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            _download(label, name, revision or None, weights)
        distributed.barrier()
        folder = _download(label, name, revision or None, weights)
    if (folder / MANIFEST).is_file():  # a checkpoint of a run
        folder = folder / "hf"
    _require_files(label, folder, weights)
    _require_supported(label, folder)
    if weights:
        require_unchanged(label, folder)
    return str(folder)


def _download(label: str, repo_id: str, revision: str | None, weights: bool) -> Path:
    """Return the folder of a model of the hub, downloaded or in the local cache. A repository may
    have further copies of the weights, which stay there."""
    from huggingface_hub import snapshot_download

    with library_errors(f"{label}: no such folder, and not on the hub"):
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=BESIDE_WEIGHTS))
        if weights:  # of the same commit, which is the folder's name
            names = [file.name for file in files_of(folder)]
            snapshot_download(repo_id, revision=folder.name, allow_patterns=names)
    return folder


def _require_files(label: str, folder: Path, weights: bool) -> None:
    """Raise `ValueError` if a file of a model is missing."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ValueError(f"{label}: an adapter; name its base, and this folder as --adapter")
        if checkpoints := checkpoints_in(folder) or checkpoints_in(folder / "checkpoints"):
            one = f"name one of them, such as {checkpoints[0]}"
            raise ValueError(f"{label}: a folder of checkpoints; {one}")
    needed = ["config.json", "tokenizer_config.json"]
    with library_errors(f"{label}: {INDEX}"):
        needed += [file.name for file in files_of(folder)] if weights else []
    for name in needed:
        if not (folder / name).is_file():
            raise ValueError(f"{label}: the folder has no {name}")


def _require_supported(label: str, folder: Path) -> None:
    """Raise `ValueError` if config.json does not describe a causal language model of floats."""
    label = f"{label}: config.json"
    with library_errors(label):
        config = load_config(folder)
    if type(config) not in model_class(config)._model_mapping:
        raise ValueError(f"{label}: {config.model_type} is not a causal language model")
    # The weights would be read without their scales.
    methods = [method_of_quantization(part) for part in (config, config.get_text_config())]
    if any(method not in (None, "mxfp4") for method in methods):
        raise ValueError(f"{label}: its weights are quantized; name the base")
