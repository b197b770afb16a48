"""Flags in YAML files: `--config`, and the args.yaml of a run."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import yaml

from common.config.names import REFUSED, similar


def read_yaml(args_class: type, path: str) -> dict[str, Any]:
    """Return the flags of a file of `flag: value` lines."""
    try:
        flags = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"--config {path}: not valid YAML: {problem}") from error
    if not isinstance(flags, dict):
        raise ValueError(f"--config {path}: expected `flag: value` lines")
    known = [field.name for field in dataclasses.fields(args_class)]
    for name in flags:
        if name not in known:
            reason = f": {REFUSED[name]}" if name in REFUSED else similar(str(name), known)
            raise ValueError(f"--config {path}: unknown key {name}{reason}")
    return flags


def trained_from(model: str) -> str | None:
    """Return the first `--model` of the runs that led to the export in the folder `model`; None for
    other models."""
    flags = Path(model).expanduser().parent / "args.yaml"
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError):
        base = str(yaml.safe_load(flags.read_text()).get("model"))
        return base if base == model else trained_from(base) or base
    return None
