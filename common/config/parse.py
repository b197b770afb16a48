"""The command line: words -> flags, checked by pydantic; `--config FILE.yaml`, `--preset NAME`.

Precedence: default < default for the built-in model or LoRA < preset < file < command line. An
error is one line."""

import dataclasses
import sys
import typing
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.dataclasses import is_pydantic_dataclass

from common.config.flags import as_tuple, from_words
from common.config.groups import BUILT_IN_MODELS, BaseArgs, check_ranks
from common.parallel import distributed

ArgsT = TypeVar("ArgsT", bound=BaseArgs)


def parse(args_class: type[ArgsT], argv: Sequence[str] | None = None) -> ArgsT:
    """Read the command line (and `--config FILE.yaml`) into `args_class`. On bad input print one
    line and exit with code 2."""
    try:
        given_flags = read_command_line(args_class, list(sys.argv[1:] if argv is None else argv))
        path = given_flags.pop("config", None)
        if path is not None:
            from common.config.flag_files import read_yaml

            given_flags = read_yaml(args_class, path) | given_flags
        require_not_moved(args_class, given_flags)
        preset = args_class.PRESETS.get(str(given_flags.get("preset")), {})
        reason, adapted = adapted_defaults(args_class, preset | given_flags)
        args = valid(args_class, adapted | preset | given_flags)
        for name, value in preset.items():
            if getattr(args, name) != value:
                problem = f"contradicts --preset {given_flags['preset']}, which sets {value}"
                raise ValueError(f"--{name} {getattr(args, name)} {problem}")
    except ValueError as error:
        distributed.fail(one_line(error), code=2)
    if adapted:
        flags = " ".join(f"--{name} {value}" for name, value in adapted.items())
        distributed.say(f"defaults for {reason}: {flags}")
    if args.samples and args.max_new_tokens < 256 and "max_new_tokens" not in adapted | given_flags:
        distributed.say(f"--max_new_tokens {args.max_new_tokens}: half of {args.pack_flags}")
    return args


def one_line(error: ValueError) -> str:
    """Return the message of an error; of pydantic's several, the first: `--lr -1.0 must be greater
    than 0`."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
    return f"--{first['loc'][0]} {first['input']} {message}" if first["loc"] else message


# ---- where values come from ----


def read_command_line(args_class: type[BaseArgs], argv: list[str]) -> dict[str, Any]:
    """Return the flags on the command line, `config` among them, as text. For `--help` print it and
    exit. Raises `ValueError` for an unknown flag, and for one with too few values."""
    assert is_pydantic_dataclass(args_class), "Args needs the decorator of pydantic.dataclasses"
    if "-h" in argv or "--help" in argv:
        from common.config.help import print_help

        print_help(args_class, argv)
    fields = [field.name for field in dataclasses.fields(args_class)]
    types = typing.get_type_hints(args_class)
    types["config"] = str
    values = {}
    for flag, words in flags_with_words(argv):
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in (*fields, "config"):
            from common.config.names import hint

            label = f"--{name}" if flag.startswith("--") else flag
            raise ValueError(f"unknown flag {label}{hint(name, fields)}")
        values[name] = from_words(name, types[name], words)
    return values


def flags_with_words(argv: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words after it. Negative numbers are words."""
    words: list[str] = []
    flag = None
    for word in argv:
        if word.startswith("-") and not is_number(word):
            if flag is not None:
                yield flag, words
            flag, equals, value = word.partition("=")
            words = [value] if equals else []
        elif flag is None:
            yield word, []
        else:
            words.append(word)
    if flag is not None:
        yield flag, words


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def require_not_moved(args_class: type[BaseArgs], given_flags: dict[str, Any]) -> None:
    """Raise `ValueError` for a value that is a script of its own."""
    for flag, commands in args_class.MOVED.items():
        for value in map(str, as_tuple(given_flags.get(flag)) or ()):
            if value in commands:
                command = commands[value].format(value)
                raise ValueError(f"--{flag} {value} is another script; run {command}")


def valid(args_class: type[ArgsT], values: dict[str, Any]) -> ArgsT:
    """Return the flags with these values. Raises `ValueError` if they contradict each other or the
    launch."""
    args = args_class(**values)
    ranks = distributed.world_size()
    if args.planned:
        ranks, *_ = args.planned
    check_ranks(args, ranks)
    return args


def is_valid(args_class: type[BaseArgs], values: dict[str, Any]) -> bool:
    try:
        valid(args_class, values)
    except ValueError:
        return False
    return True


def adapted_defaults(
    args_class: type[BaseArgs], given_flags: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return the defaults that depend on `given_flags`, without those that are given or would
    contradict them, and their reason: the built-in models and task, or LoRA, which needs a higher
    learning rate (docs/lora.md)."""
    fields = args_class.__dataclass_fields__
    model = str(given_flags.get("model", fields["model"].default))
    defaults: dict[str, Any] = {}
    reason = ""
    base: str | None = model
    if model not in BUILT_IN_MODELS:
        from common.config.flag_files import trained_from

        base = trained_from(model)
    if base in BUILT_IN_MODELS:
        reason = "the built-in model"
        defaults = args_class.TINY_DEFAULTS
        dataset = as_tuple(given_flags.get("dataset", "arithmetic")) or ()
        if model in BUILT_IN_MODELS and tuple(dataset) == ("arithmetic",):
            reason += " and task"
        else:
            defaults = {name: value for name, value in defaults.items() if name.endswith("lr")}
    elif "lora_rank" in fields and str(given_flags.get("lora_rank", 0)) != "0":
        reason = "LoRA"
        defaults = dict(lr=float(f"{10 * fields['lr'].default:g}"))
    defaults = {name: value for name, value in defaults.items() if name not in given_flags}
    for count in range(4):
        for left_out in combinations(defaults, count):
            kept = {name: value for name, value in defaults.items() if name not in left_out}
            if is_valid(args_class, kept | given_flags):
                return reason, kept
    return reason, defaults
