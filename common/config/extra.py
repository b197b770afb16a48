"""Seams between common/ and extras/: features that a flag switches on and that may be deleted."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, flag: str) -> Iterator[None]:
    """Around an import from extras/<name>, which `flag` switches on.

    Raises `ValueError`, one line, if the folder has been deleted or needs a package that is not
    installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not f"{error.name}.".startswith("extras."):
            raise ValueError(f"{flag} needs {error.name}; pip install {error.name}") from error
        if "." in error.name:  # it may be an extra that this one imports
            name = error.name.split(".")[1]
        raise ValueError(f"{flag} needs extras/{name}, which is not here") from None


def has_extra(name: str) -> bool:
    """Return whether the folder extras/<name> is here."""
    try:
        importlib.import_module(f"extras.{name}")
    except ModuleNotFoundError:
        return False
    return True
