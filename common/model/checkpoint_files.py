"""Files of resumable checkpoints (train/checkpoint.py)."""

import pickle
import re
from pathlib import Path

import torch

STATE = "state.json"  # the file beside those of PyTorch


def load_tensors(tensors: dict, folder: Path) -> None:
    """Load a checkpoint's tensors in place. PyTorch's own reader and planner unpickle, and would
    run a program that lies in the files; raises `UnpicklingError` for one. Collective."""
    import torch.distributed.checkpoint as dcp
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
        known_files = Unpickler(file).load()  # here: inside of `load` torch would log a traceback

    class Reader(dcp.FileSystemReader):
        def read_metadata(self):  # with arguments torch would also read that of one rank
            known_files.storage_meta.load_id = self.load_id
            return known_files

    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item, value) -> None:
            """Skip what is no tensor: flags of the optimizer, which the script sets."""

    dcp.load(tensors, storage_reader=Reader(folder), planner=Planner())


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, newest first."""
    paths = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{1,15}", path.name)]
    folders = [path for path in paths if path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)
