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
    Gpu("A100", 40e9, 312e12, 1.555e12, 300e9),
    Gpu("H200", 141e9, 989e12, 4.8e12, 450e9),
    Gpu("B200", 180e9, 2250e12, 8e12, 900e9),
    Gpu("L40S", 48e9, 362e12, 0.864e12, 32e9),
    Gpu("4090", 24e9, 165e12, 1.008e12, 32e9),
)
KINDS = (*dict.fromkeys(gpu.name for gpu in GPUS),)
# GPUs of a machine, if the plan does not name another number
MACHINE = 8


class Planned(NamedTuple):
    """GPUs of a plan."""

    ranks: int
    size: int  # bytes of each
    name: str  # empty: no kind is named
    machine: int  # GPUs of a machine

    def times(self, factor: int) -> str:
        """Return the `--dry_run` of so many times the GPUs."""
        count = self.ranks * factor
        kind = f"{self.size // 10**9}GB"
        if self.name:
            is_usual = self.size == kind_of(self.name, 0).size
            kind = self.name if is_usual else f"{self.name}-{kind}"
        if count <= MACHINE or self.machine == MACHINE:
            return f"{count}x{kind}"
        return f"{count // self.machine}x{self.machine}x{kind}"


def kind_of(name: str, size: float) -> Gpu:
    """Return the kind of GPU with so many bytes (0: unknown) and a name in CUDA, which may have no
    kind."""
    named = [gpu for gpu in GPUS if gpu.is_named(name)] or GPUS
    return min(named, key=lambda gpu: abs(gpu.size - size)) if size else named[0]


def planned_gpus(text: str) -> Planned:
    """Return the GPUs of `8x80GB`, `8xH100`, `8xA100-40GB`, or of `4x8xH100`, 4 machines of 8.
    Raises `ValueError` for another text."""
    names = "|".join(KINDS)
    count = r"[1-9]\d{0,5}"
    gigabytes = r"([1-9]\d{0,3})"
    each = rf"(?:({names})(?:-{gigabytes}GB)?|{gigabytes}(?:GB)?)"
    match = re.fullmatch(rf"(?:({count})X)?({count})X{each}", text.upper())
    if match is None:
        expected = "expected GPUs with their memory, such as 8x80GB, or their kind: 8xH100,"
        raise ValueError(f"--dry_run {text}: {expected} 4x8xA100-40GB ({', '.join(KINDS)})")
    machines, ranks, name, *sizes = match.groups()
    given = next((int(size) * 10**9 for size in sizes if size), None)
    size = given or int(kind_of(name, 0).size)
    machine = int(ranks) if machines else min(MACHINE, int(ranks))
    return Planned(int(machines or 1) * int(ranks), size, name or "", machine)
