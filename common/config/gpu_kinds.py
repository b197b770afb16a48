"""Kinds of GPUs that `--dry_run 8xH100` plans for."""

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """A kind of GPU by the numbers of its manufacturer."""

    name: str
    size: float  # bytes of its memory
    flops: float  # per second, dense, bfloat16
    bandwidth: float  # bytes per second of its memory
    link: float  # bytes per second in one direction: NVLink, or 16 lanes of PCIe 4

    def is_named(self, text: str) -> bool:
        """Return whether a text, such as a name in CUDA, has the name of this kind as a word."""
        return re.search(rf"\b{self.name}\b", text.upper()) is not None


# An unnamed GPU is of the first kind with the nearest memory.
GPUS = (
    Gpu("H100", 80e9, 989e12, 3.35e12, 450e9),
    Gpu("A100", 80e9, 312e12, 2.04e12, 300e9),
    Gpu("H200", 141e9, 989e12, 4.8e12, 450e9),
    Gpu("L40S", 48e9, 362e12, 0.864e12, 32e9),
    Gpu("4090", 24e9, 165e12, 1.008e12, 32e9),
)


def kind_of(name: str, size: float) -> Gpu:
    """Return the kind of GPU with so many bytes and a name in CUDA, which may have no kind."""
    named = [gpu for gpu in GPUS if gpu.is_named(name)]
    return min(named or GPUS, key=lambda gpu: abs(gpu.size - size))


def planned_gpus(text: str) -> tuple[int, int, str] | None:
    """Return the number of GPUs in `8x80GB` or `8xH100`, the bytes of each and the name of the
    kind, empty if there is none; None for another text."""
    names = "|".join(gpu.name for gpu in GPUS)
    match = re.fullmatch(rf"([1-9]\d{{0,5}})X({names}|[1-9]\d{{0,3}}(?:GB)?)", text.upper())
    if match is None:
        return None
    each = match[2]
    if each in names.split("|"):
        return int(match[1]), int(kind_of(each, 0).size), each
    return int(match[1]), int(each.removesuffix("GB")) * 10**9, ""
