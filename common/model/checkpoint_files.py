"""Files of resumable checkpoints (train/checkpoint.py)."""

import pickle
import re
from pathlib import Path

import torch

STATE = "state.json"  # the file beside those of PyTorch


def require_safe_metadata(folder: Path) -> None:
    """Raise `UnpicklingError` if `.metadata`, a pickle that PyTorch trusts, could run a program."""
    from torch.distributed.checkpoint import metadata

    known = {
        "torch": {"Size", *(name for name, x in vars(torch).items() if type(x) is torch.dtype)},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.distributed.checkpoint.metadata": {*metadata.__all__, "_MEM_FORMAT_ENCODING"},
        "pathlib": {"PosixPath"},
        "pathlib._local": {"PosixPath"},
    }

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            if name not in known.get(module, ()):
                raise pickle.UnpicklingError(f"it names {module}.{name}, which is in no checkpoint")
            return super().find_class(module, name)

    with (folder / ".metadata").open("rb") as file:
        Unpickler(file).load()


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, newest first."""
    paths = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{1,15}", path.name)]
    folders = [path for path in paths if path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)
