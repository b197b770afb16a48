"""Errors of a full, read-only or failing disk, and of files that vanish, as one line."""

import errno
import os
import re

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}


def disk_error(error: BaseException) -> str | None:
    """Return a line about the disk if an exception comes from an error of the disk, however deep, else None.

    Libraries raise other errors while they handle the disk's, and PyTorch's checkpoints collect the errors of all ranks
    in `failures`.
    """
    pending, seen, intact = [error], set(), "files that were complete before are intact"
    while pending:
        one = pending.pop()
        if isinstance(one, OSError) and one.errno in DISK:
            where = f" ({one.filename})" if one.filename else ""
            return f"writing to the disk failed: {os.strerror(one.errno)}{where}; {intact}"
        if (number := re.search(r"\(os error (\d+)\)", str(one))) and int(number[1]) in DISK:  # a library in Rust
            return f"writing to the disk failed: {os.strerror(int(number[1]))}; {intact}"
        if isinstance(one, RuntimeError) and "inline_container" in str(one):  # PyTorch's writer hides the error
            return f"writing to the disk failed: it is full or damaged; {intact}"
        if isinstance(one, BaseException) and id(one) not in seen:
            seen.add(id(one))
            pending += [one.__cause__, one.__context__, *_failures(one)]
    return next(filter(None, map(_vanished, (error, *_failures(error)))), None)


def _failures(error: BaseException) -> list[BaseException]:
    return [failure for failure, *_ in (getattr(error, "failures", None) or {}).values()]


def _vanished(error: BaseException) -> str | None:
    """Return a line if a path with a folder does not exist, else None. Libraries handle such errors all the time: the
    causes of other errors do not count. A name without a folder may be a program that is not installed."""
    if not isinstance(error, FileNotFoundError):
        return None
    if error.filename is None:  # of os.getcwd
        return "the working directory was deleted"
    if "/" not in str(error.filename):
        return None
    return f"{error.filename}: it was deleted or moved during the run, or its folder was; the run cannot continue"
