"""Files that survive a crash, and checks that they are as they were written.

A kill or a power cut leaves the old file or the new one. Sizes and CRC-32 show damage."""

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKSUMS = "checksums.json"  # in checkpoints and exports: the fingerprints of their files
UNCHECKED = ("README.md",)  # the model card, which users may edit
OLD = ".old.tmp"  # end of the name of a folder while a new one takes its place


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def replace(work: Path, final: Path) -> None:
    """Give a complete file or folder its name, and delete the old one when the new one is on the
    disk."""
    for path in (*sorted(work.rglob("*"), reverse=True), work):  # contents before their names
        sync(path)
    old = final.with_name(f"{final.name}{OLD}")
    if final.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    work.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(final: Path) -> None:
    """Undo an interrupted `replace` of a folder, and delete what is unfinished."""
    work, old = (final.with_name(f"{final.name}{end}") for end in (".tmp", OLD))
    if old.is_dir() and not final.exists():
        old.rename(final)
    for unfinished in (work, old):
        shutil.rmtree(unfinished, ignore_errors=True)


def require_inside(names: Iterable[str]) -> None:
    """Raise `ValueError` for a name, from a file in a folder, that leaves the folder."""
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name!r}: outside of the folder; name files in it alone")


def write_text(path: Path, text: str) -> None:
    """Replace a file."""
    work = path.with_name(f"{path.name}.tmp")
    work.write_text(text, encoding="utf-8")
    replace(work, path)


def write_json(path: Path, value: dict) -> None:
    """Replace a file by a JSON object with a checksum, `crc`."""
    write_text(path, json.dumps(value | dict(crc=_crc(value))))


def read_json(path: Path) -> dict:
    """Return the object of `write_json`. Raises `ValueError` or `RecursionError` otherwise."""
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict) or value.pop("crc", None) != _crc(value):
        raise ValueError("it was changed after it was written")
    return value


def _crc(value: dict) -> int:
    return zlib.crc32(json.dumps(value).encode())


def fingerprint(path: Path) -> list[int]:
    """Return [size in bytes, CRC-32] of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            size = size + len(block)
            crc = zlib.crc32(block, crc)
    return [size, crc]


def fingerprints(folder: Path, names: Sequence[str]) -> dict[str, list[int]]:
    """Return the fingerprints of files in a folder, read in parallel."""
    with ThreadPoolExecutor() as pool:
        values = pool.map(fingerprint, [folder / name for name in names])
    return dict(zip(names, values, strict=True))


def write_checksums(folder: Path) -> None:
    """Write the fingerprints of a folder's files, except `UNCHECKED`, beside them."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    checked = [name for name in names if name not in UNCHECKED]
    write_json(folder / CHECKSUMS, fingerprints(folder, checked))


def changed_file(folder: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """Return the name of a file that is missing or differs from the checksums in its folder; None
    if none does. This rank checks every `ranks`-th file. Raises `OSError` for a file that cannot be
    read."""
    try:
        written = read_json(folder / CHECKSUMS)
        require_inside(written)
    except (FileNotFoundError, ValueError, RecursionError):
        return CHECKSUMS
    names = sorted(written)[rank::ranks]
    now = fingerprints(folder, [name for name in names if (folder / name).is_file()])
    return next((name for name in names if now.get(name) != written[name]), None)
