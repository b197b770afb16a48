"""Files of resumable checkpoints (train/checkpoint.py)."""

import pickle
import re
from pathlib import Path

import torch

STATE = "state.json"  # the file beside those of PyTorch

# Classes and functions in the `.metadata` of a checkpoint, by module.
METADATA = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if type(value) is torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name not in METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is in no checkpoint")
        return super().find_class(module, name)


def require_safe_metadata(folder: Path) -> None:
    """Raise `UnpicklingError` if `.metadata`, a pickle that PyTorch trusts, would run a program."""
    with (folder / ".metadata").open("rb") as file:
        MetadataUnpickler(file).load()


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, newest first."""
    paths = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{1,15}", path.name)]
    folders = [path for path in paths if path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)
