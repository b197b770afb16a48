"""Reader of PyTorch's checkpoint shards that runs no code of their folder.

Import it in functions: torch.distributed.checkpoint takes as long to import as torch.
"""

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

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


class CheckpointReader(FileSystemReader):
    """`FileSystemReader` that does not trust `.metadata`, a pickle."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = MetadataUnpickler(file).load()
        metadata.storage_meta.load_id = self.load_id
        return metadata
