"""Kinds of GPUs that `--dry_run 8xH100` plans for."""

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """A kind of GPU by the numbers of its manufacturer."""

    name: str
    gigabytes: int
    size: float  # bytes that torch reports
    flops: float  # per second, dense, bfloat16
    bandwidth: float  # bytes per second of its memory
    link: float  # bytes per second in one direction: NVLink, or 16 lanes of PCIe 4

    def is_named(self, text: str) -> bool:
        """Return whether a text, such as a name in CUDA, has the name of this kind as a word."""
        return re.search(rf"\b{self.name}\b", text.upper()) is not None


# An unnamed GPU is of the first kind with the nearest memory.
GPUS = (
    Gpu("H100", 80, 79.1 * 2**30, 989e12, 3.35e12, 450e9),
    Gpu("A100", 80, 79.1 * 2**30, 312e12, 2.04e12, 300e9),
    Gpu("A100", 40, 39.4 * 2**30, 312e12, 1.555e12, 300e9),
    Gpu("H200", 141, 139.8 * 2**30, 989e12, 4.8e12, 450e9),
    Gpu("B200", 180, 178 * 2**30, 2250e12, 8e12, 900e9),
    Gpu("L40S", 48, 44.4 * 2**30, 362e12, 0.864e12, 32e9),
    Gpu("4090", 24, 23.5 * 2**30, 165e12, 1.008e12, 32e9),
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
    mean: int | None = None  # tokens of a completion, if the plan names them

    def times(self, factor: int) -> str:
        """Return the `--dry_run` of so many times the GPUs."""
        count = self.ranks * factor
        gpu = kind_of(self.name, self.size)
        is_of_kind = self.name and self.size == int(gpu.size)
        kind = f"{gpu.gigabytes if is_of_kind else self.size // 10**9}GB"
        if self.name:
            is_usual = is_of_kind and gpu == kind_of(self.name, 0)
            kind = self.name if is_usual else f"{self.name}-{kind}"
        mean = f"@{self.mean}" if self.mean else ""
        if self.machine == MACHINE:
            return f"{count}x{kind}{mean}"
        return f"{count // self.machine}x{self.machine}x{kind}{mean}"


def kind_of(name: str, size: float) -> Gpu:
    """Return the kind of GPU with so many bytes (0: unknown) and a name in CUDA, which may have no
    kind."""
    named = [gpu for gpu in GPUS if gpu.is_named(name)] or GPUS
    return min(named, key=lambda gpu: abs(gpu.size - size)) if size else named[0]


def planned_gpus(text: str) -> Planned:
    """Return the GPUs of `8x80GB`, `8xH100`, `8xA100-40GB`, or of `4x8xH100`, 4 machines of 8; with
    `8xH100@900` for completions of 900 tokens on average. Raises `ValueError` for another text."""
    names = "|".join(KINDS)
    count = r"[1-9]\d{0,5}"
    gigabytes = r"([1-9]\d{0,3})"
    each = rf"(?:({names})(?:-{gigabytes}GB)?|{gigabytes}(?:GB)?)"
    match = re.fullmatch(rf"(?:({count})X)?({count})X{each}(?:@({count}))?", text.upper())
    if match is None:
        expected = "expected GPUs with their memory, such as 8x80GB, or their kind: 8xH100,"
        raise ValueError(f"--dry_run {text}: {expected} 4x8xA100-40GB ({', '.join(KINDS)})")
    machines, ranks, name, *sizes, mean = match.groups()
    size = next((int(size) * 10**9 for size in sizes if size), 0)
    if name:
        gpu = kind_of(name, size)
        is_of_kind = size in (0, gpu.gigabytes * 10**9)
        size = int(gpu.size) if is_of_kind else size
    machine = int(ranks) if machines else MACHINE
    ranks = int(machines or 1) * int(ranks)
    return Planned(ranks, size, name or "", machine, mean and int(mean))
