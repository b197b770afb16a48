"""Errors of a full, read-only or failing disk, as one line."""

import errno
import os
import re

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


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
            failures = getattr(one, "failures", None) or {}
            pending += [one.__cause__, one.__context__, *(failure for failure, *_ in failures.values())]
    return None
