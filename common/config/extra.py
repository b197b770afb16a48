"""How common/ and the scripts import a feature from extras/ when a flag switches it on. A user may
delete any folder of extras/: then the flag is refused in one line."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, flag: str) -> Iterator[None]:
    """Turn a failed import into an error of one line. Put the import of a feature that `flag`
    switches on inside this context: it comes from extras/<name>, or from the package <name>.

    Raises `ValueError` if the folder has been deleted, or if it needs a package that is not
    installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package, _, rest = (error.name or "").partition(".")
        if package in ("", "common"):
            raise
        missing = f"the Python package {package}, which is not installed"
        if package == "extras":  # it may be an extra that this one imports
            missing = f"extras/{rest.partition('.')[0] or name}, which is not here"
        raise ValueError(f"{flag} needs {missing}") from None


def load_named(target: str, flag: str) -> Callable:
    """Import the function or class `module:name` for a feature that `flag` switches on. Raises
    `ValueError` like `extra` if it belongs to an extra that cannot be imported."""
    module, name = target.split(":")
    with extra(module.split(".")[1], flag):
        return getattr(importlib.import_module(module), name)


def has_extra(name: str) -> bool:
    """Return whether the folder extras/<name> is here."""
    try:
        importlib.import_module(f"extras.{name}")
    except ModuleNotFoundError:
        return False
    return True
