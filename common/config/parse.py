"""The command line: flags and `--help` by tyro, values checked by pydantic, `--config FILE.yaml`, `--preset NAME`.

Precedence: default < default for the built-in model or LoRA < preset < file < command line. An error is one line.
"""

import contextlib
import dataclasses
import functools
import io
import re
import sys
import typing
from collections.abc import Sequence
from itertools import combinations, takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar

import docstring_parser
import tyro
import yaml
from pydantic import ValidationError
from pydantic.dataclasses import is_pydantic_dataclass
from tyro import _errors as refusals  # private, hence the pinned version: what tyro refuses, before it prints a box
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from common.config.flags import as_tuple
from common.config.groups import BUILT_IN_MODELS, BaseArgs, TrainArgs
from common.config.launch import check_ranks
from common.config.names import name_here, similar
from common.parallel import distributed

ArgsT = TypeVar("ArgsT", bound=BaseArgs)
CONFIG_HELP = "file of `flag: value` lines, such as a run's args.yaml; flags on the command line win"
FIRST_SECTIONS = ("ModelArgs", "DataArgs", "ScoringArgs")
registry = ConstructorRegistry()


def parse(args_class: type[ArgsT], argv: Sequence[str] | None = None) -> ArgsT:
    """Read the command line (and `--config FILE.yaml`) into `args_class`. On bad input print one line and exit with
    code 2."""
    try:
        given = read_command_line(args_class, list(sys.argv[1:] if argv is None else argv))
        if (path := given.pop("config", None)) is not None:
            given = read_yaml(args_class, path) | given
        require_not_moved(args_class, given)
        preset = args_class.PRESETS.get(str(given.get("preset")), {})
        why, adapted = adapted_defaults(args_class, preset | given)
        args = valid(args_class, adapted | preset | given)
        for name, value in preset.items():
            if (got := getattr(args, name)) != value:
                raise ValueError(f"--{name} {got} contradicts --preset {given['preset']}, which sets {value}")
    except ValueError as error:
        distributed.fail(one_line(error), code=2)
    if adapted:
        distributed.say(f"defaults for {why}: {' '.join(f'--{name} {value}' for name, value in adapted.items())}")
    if getattr(args, "max_new_tokens", 256) < 256 and "max_new_tokens" not in adapted | given:
        distributed.say(f"--max_new_tokens {args.max_new_tokens}: half of {args.room_flags}")
    return args


def one_line(error: ValueError) -> str:
    """Return the message of an error; of pydantic's several, the first: `--lr -1.0 must be greater than 0`."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
    return f"--{first['loc'][0]} {first['input']} {message}" if first["loc"] else message


# ---- where values come from ----


def read_yaml(args_class: type, path: str) -> dict[str, Any]:
    """Return the flags of a file of `flag: value` lines."""
    try:
        flags = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(flags, dict):
        raise ValueError(f"--config {path}: expected `flag: value` lines")
    known = [field.name for field in dataclasses.fields(args_class)]
    for name in flags:
        if name not in known:
            raise ValueError(f"--config {path}: unknown key {name}{similar(str(name), known)}")
    return flags


def require_not_moved(args_class: type[BaseArgs], given: dict[str, Any]) -> None:
    """Raise `ValueError` for a value that is a script of its own."""
    for flag, commands in args_class.MOVED.items():
        for value in map(str, as_tuple(given.get(flag)) or ()):
            if value in commands:
                raise ValueError(f"--{flag} {value} is another script; run {commands[value]}")


def valid(args_class: type[ArgsT], values: dict[str, Any]) -> ArgsT:
    """Return the flags with these values. Raises `ValueError` if they contradict each other or the launch."""
    args = args_class(**values)
    planned = args.planned if isinstance(args, TrainArgs) else None
    check_ranks(args, planned[0] if planned else distributed.world_size())
    return args


def is_valid(args_class: type[BaseArgs], values: dict[str, Any]) -> bool:
    try:
        valid(args_class, values)
    except ValueError:
        return False
    return True


def adapted_defaults(args_class: type[BaseArgs], given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the defaults that depend on the `given` flags, without those that are given or would contradict them, and
    what they are for: the built-in models and task, or LoRA, which needs a higher learning rate (docs/lora.md)."""
    fields, found, why = args_class.__dataclass_fields__, {}, ""
    model = str(given.get("model", fields["model"].default))
    if model in BUILT_IN_MODELS or trained_from(model) in BUILT_IN_MODELS:
        on_task = tuple(as_tuple(given.get("dataset", "arithmetic")) or ()) == ("arithmetic",)
        built_in_task = on_task and model in BUILT_IN_MODELS
        why = "the built-in model and task" if built_in_task else "the built-in model"
        found = {name: x for name, x in args_class.TINY_DEFAULTS.items() if built_in_task or name.endswith("lr")}
    elif "lora_rank" in fields and str(given.get("lora_rank", 0)) != "0":
        why, found = "LoRA", dict(lr=float(f"{10 * fields['lr'].default:g}"))
    found = {name: value for name, value in found.items() if name not in given}
    for count in range(4):
        for left_out in combinations(found, count):
            kept = {name: value for name, value in found.items() if name not in left_out}
            if is_valid(args_class, kept | given):
                return why, kept
    return why, found


def trained_from(model: str) -> str | None:
    """Return the first `--model` of the runs that led to the export in the folder `model`; None for other models."""
    flags = Path(model).expanduser().parent / "args.yaml"
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError, yaml.YAMLError):
        base = str(yaml.safe_load(flags.read_text()).get("model"))
        return base if base == model else trained_from(base) or base
    return None


def read_command_line(args_class: type, argv: list[str]) -> dict[str, Any]:
    """Return the flags on the command line, `config` among them. For `--help` print it and exit."""
    assert is_pydantic_dataclass(args_class), "Args needs the decorator of pydantic.dataclasses"
    console, helps = io.StringIO(), {}
    description = (sys.modules[args_class.__module__].__doc__ or "").partition("\n\n")[0]
    if at := next((i for i, word in enumerate(argv, 1) if word in ("-h", "--help")), 0):
        helps, words = texts(args_class), list(takewhile(lambda word: not word.startswith("-"), argv[at:]))
        if words:
            helps, argv, description = with_words(helps, words), ["--help"], f"The flags with: {' '.join(words)}"
        else:
            description += f"\n`{script_of(args_class).name} --help WORD ...` lists only the flags with these words."
    refuse = functools.partial(raise_refusal, args_class)
    try:
        with contextlib.redirect_stdout(console), refusals.on_parse_error(refuse):
            parsed = tyro.cli(
                flag_type(args_class, helps),
                prog=script_of(args_class).name,
                args=argv,
                description=description,
                use_underscores=True,
                registry=registry,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
            )
    except SystemExit:  # after the help
        sys.stdout.write(console.getvalue())  # at once: `| head` may close the pipe
        raise
    values = dict(config=parsed.config)
    for group in vars(parsed).values():
        values |= vars(group) if dataclasses.is_dataclass(group) else {}
    named = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return {name: value for name, value in values.items() if name in named}


# ---- tyro ----


@registry.primitive_rule
def unconverted(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Leave numbers, booleans and choices to pydantic, which checks text as in a file. `--compile` alone is true."""
    if typing.get_origin(info.type) is typing.Literal:
        metavar = "{" + ",".join(typing.get_args(info.type)) + "}"
    elif info.type in (bool, bool | str, int, float):
        metavar = {bool: "[{true,false}]", bool | str: "[GPUSxGB]"}.get(info.type) or info.type.__name__.upper()
    else:
        return None
    return PrimitiveConstructorSpec(
        nargs="*" if info.type in (bool, bool | str) else 1,
        metavar=metavar,
        instance_from_str=lambda words: " ".join(words) or True,
        is_instance=lambda value: isinstance(value, int | float | str),
        str_from_instance=lambda value: [str(value).lower()],
    )


def flag_type(args_class: type, helps: dict[str, str]) -> type:
    """Return a dataclass of dataclasses, one for each section of --help: `FIRST_SECTIONS`, the script's own, others."""
    types = typing.get_type_hints(args_class)
    owners = {name: cls for cls in args_class.__mro__ for name in vars(cls).get("__annotations__", ())}
    groups: dict[type, list] = {args_class: []}
    for field in dataclasses.fields(args_class):
        kind = types[field.name]
        if helps and field.name not in helps:  # of --help WORD
            continue
        if text := helps.get(field.name):
            kind = Annotated[kind, tyro.conf.arg(help=text, help_behavior_hint=functools.partial(default_hint, text))]
        flag = field.name, kind, dataclasses.field(default=field.default)
        groups.setdefault(owners[field.name], []).append(flag)
    config = [("config", str | None, dataclasses.field(default=None, metadata=dict(help=CONFIG_HELP)))]
    sections = config if not helps or "config" in helps else []
    for group in sorted(groups, key=lambda group: group.__name__ not in FIRST_SECTIONS):
        if not (flags := groups[group]):
            continue
        name = group.__name__.removesuffix("Args").lower()
        title, text = (name, group.__doc__) if name else (script_of(group).stem, "")
        section = dataclasses.make_dataclass(title, flags)
        sections.append((title, section, dataclasses.field(default_factory=section, metadata=dict(help=text))))
    return dataclasses.make_dataclass("Flags", sections)


def script_of(args_class: type) -> Path:
    return Path(sys.modules[args_class.__module__].__file__)


def default_hint(text: str, default: str) -> str:
    """Return what --help appends to the text of a flag: the default, unless the text explains it."""
    return "" if "; default: " in text else f"(default: {default or 'none'})"


def texts(args_class: type) -> dict[str, str]:
    """Return the text of each flag: the script's own, or that of the group."""
    parsed = [docstring_parser.parse_from_object(cls) for cls in reversed(args_class.__mro__[:-1])]
    flags = {flag.arg_name: " ".join(flag.description.split()) for docstring in parsed for flag in docstring.params}
    names = [field.name for field in dataclasses.fields(args_class)]
    return {name: flags.get(name, "") for name in names} | dict(config=CONFIG_HELP)


def with_words(helps: dict[str, str], words: Sequence[str]) -> dict[str, str]:
    """Return the flags whose name or text contains all words. Raises `ValueError` if there is none."""
    found = {name: f"{name} {text}".lower().replace("-", "_") for name, text in helps.items()}
    wanted = [word.lower().replace("-", "_") for word in words]
    if hits := {name: helps[name] for name, text in found.items() if all(word in text for word in wanted)}:
        return hits
    known = {part for name in found for part in (name, *name.split("_"))}
    missing = next((word for word in wanted if not any(word in text for text in found.values())), "")
    what = f"no flag has {'all words' if words[1:] else 'this word'} in its name or text"
    raise ValueError(f"--help {' '.join(words)}: {what}{similar(missing, sorted(known))}")


def raise_refusal(args_class: type, event: refusals.ParseErrorEvent) -> None:
    """Raise `ValueError` for what tyro refuses."""
    known = [field.name for field in dataclasses.fields(args_class)]
    match event:
        case refusals.UnrecognizedArgs(tokens=[word, *_]):
            name = word.partition("=")[0].replace("-", "_").removeprefix("__")
            flag = f"--{name}" if word.startswith("--") else word
            scripts = [path.name for path in sorted(distributed.PROJECT.glob("*.py")) if declares(path, name)]
            hint = f": it is a flag of {', '.join(scripts)}" if scripts else ""
            here = name_here(name, known)
            hint += f"; here it is --{here}" if here else ""
            raise ValueError(f"unknown flag {flag}{hint or similar(name, known, '--')}")
        case refusals.BadValue(argument=argument) | refusals.InstantiationFailure(argument=argument):
            raise ValueError(f"--{argument.field.intern_name}: expected {argument.lowered.metavar}")


def declares(script: Path, flag: str) -> bool:
    """Return whether a script declares the flag."""
    return re.search(rf"^    {re.escape(flag)}: .* = ", script.read_text(encoding="utf-8"), re.MULTILINE) is not None
