"""The command line: flat dataclasses as flags, `--config FILE.yaml`, `--preset NAME`, errors in one line.

Precedence: default < preset < file < flag.
"""

import contextlib
import dataclasses
import difflib
import io
import re
import sys
import types
import typing
from collections.abc import Sequence
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import TypeVar

import tyro
import yaml

from common import distributed
from common.config import BaseArgs

ArgsT = TypeVar("ArgsT", bound=BaseArgs)


def parse(args_class: type[ArgsT], argv: Sequence[str] | None = None) -> ArgsT:
    """Read the command line (and `--config FILE.yaml`) into `args_class`; on bad input one line and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        argv, config_path = _take_config_flag(argv)
        argv = _canonical(args_class, argv)
        if config_path is not None:
            argv = _yaml_to_argv(args_class, config_path) + argv  # the last occurrence of a flag wins
        presets = getattr(args_class, "PRESETS", {})
        argv = _preset_to_argv(presets, argv) + argv
        console = io.StringIO()
        with contextlib.redirect_stderr(console):
            # tyro's own validation stops at types; __post_init__ raises ValueError for flags that conflict
            args = tyro.cli(
                args_class, args=argv, description=_summary(args_class), config=(tyro.conf.FlagConversionOff,)
            )
        for flag, value in presets.get(getattr(args, "preset", None), {}).items():
            if getattr(args, flag) != value:
                got = getattr(args, flag)
                raise ValueError(f"--{flag} {got} contradicts --preset {args.preset}: {flag} is {value}")
        return args
    except ValueError as error:
        distributed.fail(str(error), code=2)
    except SystemExit as done:
        if done.code == 0:  # --help
            raise
        distributed.fail(_unframe(console.getvalue()), code=2)


def _summary(args_class: type) -> str:
    """The first paragraph of the script's docstring."""
    return (sys.modules[args_class.__module__].__doc__ or "").split("\n\n")[0]


def _take_config_flag(argv: list[str]) -> tuple[list[str], str | None]:
    for i, arg in enumerate(argv):
        if arg == "--config":
            if i + 1 == len(argv):
                raise ValueError("--config needs a file name")
            return argv[:i] + argv[i + 2 :], argv[i + 1]
        if arg.startswith("--config="):
            return argv[:i] + argv[i + 1 :], arg.removeprefix("--config=")
    return argv, None


def _fields(args_class: type) -> dict[str, type]:
    hints = typing.get_type_hints(args_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(args_class)}


def _unknown(name: str, known: Sequence[str], where: str) -> ValueError:
    close = difflib.get_close_matches(name, known, n=1)
    return ValueError(f"{where}{name}{f' (did you mean {close[0]}?)' if close else ''}")


def _canonical(args_class: type, argv: list[str]) -> list[str]:
    """Snake case, `--flag=value` split, `--compile` = `--compile True`, `true` = `True`; refuses unknown flags."""
    known, out = _fields(args_class), []
    for i, arg in enumerate(argv):
        if arg in ("-h", "--help"):
            return ["--help"]
        if not arg.startswith("--"):
            previous = out[-1].removeprefix("--") if out else ""
            out.append(arg.capitalize() if known.get(previous) is bool else arg)
            continue
        name, equals, value = arg[2:].partition("=")
        name = name.replace("-", "_")
        if name not in known:
            raise _unknown(f"--{name}", [f"--{k}" for k in known], "unknown flag ")
        out.append(f"--{name}")
        if equals:
            out.append(value.capitalize() if known[name] is bool else value)
        elif known[name] is bool and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            out.append("True")
    return out


def _preset_to_argv(presets: dict[str, dict], argv: list[str]) -> list[str]:
    """What `--preset` sets."""
    joined = [flag.split("=", 1) for flag in argv if flag.startswith("--preset=")]
    given = joined + [[flag, value] for flag, value in pairwise(argv) if flag == "--preset"]
    if not given or given[-1][1] == "None":
        return []
    if (name := given[-1][1]) not in presets:
        raise ValueError(f"--preset {name}: unknown; there are {', '.join(presets)}")
    return [f"--{flag}={value}" for flag, value in presets[name].items()]


def _yaml_to_argv(args_class: type, path: str) -> list[str]:
    try:
        config = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config {path}: expected `flag: value` lines")
    known, argv = _fields(args_class), []
    for name, value in config.items():
        if name not in known:
            raise _unknown(str(name), list(known), f"--config {path}: unknown key ")
        if isinstance(value, dict):
            raise ValueError(f"--config {path}: {name} must be a plain value or a list")
        values = value if isinstance(value, list) else [value]
        if not isinstance(value, list) and _is_list(known[name]) and value is not None:
            raise ValueError(f"--config {path}: {name} must be a list")
        argv += [f"--{name}", *map(str, values)] if isinstance(value, list) else [f"--{name}={value}"]
    return argv


def _is_list(hint: type) -> bool:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return any(typing.get_origin(option) in (list, tuple) for option in options)


def _unframe(console: str) -> str:
    """The message inside tyro's box, on one line. The box has colours in a terminal, and is drawn with - and | where
    stdout is not UTF-8."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", console)
    lines = [line.strip("│╭╮╰╯─|+ ") for line in plain.splitlines()]
    lines = ["" if not line.strip("-") else line for line in lines]
    # Before the message its title, behind it a rule and hints.
    message = list(takewhile(bool, dropwhile(lambda line: not line, lines[1:])))
    text = " ".join(message) or " ".join(filter(None, lines))
    return re.sub(r"^Error parsing \w+: ", "", text)  # from __post_init__, which names the flag itself
