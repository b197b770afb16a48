"""`--help`, printed by tyro: a section for each group of flags."""

import contextlib
import dataclasses
import functools
import io
import sys
import typing
from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, NoReturn

import docstring_parser
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from common.config.flags import metavar_of
from common.config.groups import script_of
from common.config.names import similar

CONFIG_HELP = (
    "file of `flag: value` lines, such as a run's args.yaml; flags on the command line win"
)
FIRST_SECTIONS = ("ModelArgs", "DataArgs", "ScoringArgs")
registry = ConstructorRegistry()


def print_help(args_class: type, argv: list[str]) -> NoReturn:
    """Print the flags or, for `--help WORD ...`, those with all words, and exit. Raises
    `ValueError` if no flag has them."""
    script = script_of(args_class)
    helps = texts(args_class)
    start = next(i for i, word in enumerate(argv, 1) if word in ("-h", "--help"))
    words = list(takewhile(lambda word: not word.startswith("-"), argv[start:]))
    if words:
        helps = with_words(helps, words)
        description = f"The flags with: {' '.join(words)}"
    else:
        summary = (sys.modules[args_class.__module__].__doc__ or "").partition("\n\n")[0]
        search = f"`{script.name} --help WORD ...` lists only the flags with these words."
        description = f"{summary}\n{search}"
    console = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(console):
        tyro.cli(
            sections(args_class, helps),
            prog=script.name,
            args=["--help"],
            description=description,
            use_underscores=True,
            registry=registry,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
        )
    sys.stdout.write(console.getvalue())  # at once: `| head` may close the pipe
    sys.exit(0)


@registry.primitive_rule
def shown(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Show booleans, whose value is optional, and their defaults as in a file."""
    if info.type in (bool, bool | str):
        metavar = "[{true,false}]" if info.type is bool else "[GPUSxGB]"
    elif typing.get_origin(info.type) is typing.Literal or info.type in (int, float):
        metavar = metavar_of(info.type)
    else:
        return None
    return PrimitiveConstructorSpec(
        nargs="*" if info.type in (bool, bool | str) else 1,
        metavar=metavar,
        instance_from_str=" ".join,
        is_instance=lambda value: isinstance(value, int | float | str),
        str_from_instance=lambda value: [str(value).lower()],
    )


def sections(args_class: type, helps: dict[str, str]) -> type:
    """Return a dataclass of dataclasses, one for each section of --help: `FIRST_SECTIONS`, the
    script's own, others. It has the flags in `helps`."""
    types = typing.get_type_hints(args_class)
    owners = {
        name: cls for cls in args_class.__mro__ for name in vars(cls).get("__annotations__", ())
    }
    groups: dict[type, list] = {args_class: []}
    for field in dataclasses.fields(args_class):
        if field.name in helps:
            text = helps[field.name]
            hint = functools.partial(default_hint, text)
            kind = types[field.name]
            if text:
                kind = Annotated[kind, tyro.conf.arg(help=text, help_behavior_hint=hint)]
            flag = (field.name, kind, dataclasses.field(default=field.default))
            groups.setdefault(owners[field.name], []).append(flag)
    fields = []
    if "config" in helps:
        metadata = dict(help=CONFIG_HELP)
        config = dataclasses.field(default=None, metadata=metadata)
        fields.append(("config", str | None, config))
    for group in sorted(groups, key=lambda group: group.__name__ not in FIRST_SECTIONS):
        if groups[group]:
            title = group.__name__.removesuffix("Args").lower()
            text = group.__doc__ if title else ""
            title = title or script_of(group).stem
            section = dataclasses.make_dataclass(title, groups[group])
            field = dataclasses.field(default_factory=section, metadata=dict(help=text))
            fields.append((title, section, field))
    return dataclasses.make_dataclass("Flags", fields)


def default_hint(text: str, default: str) -> str:
    """Return what --help appends to the text of a flag: the default, unless the text explains
    it."""
    return "" if "; default: " in text else f"(default: {default or 'none'})"


def texts(args_class: type) -> dict[str, str]:
    """Return the text of each flag: the script's own, or that of the group."""
    described = {}
    for cls in reversed(args_class.__mro__[:-1]):
        for flag in docstring_parser.parse_from_object(cls).params:
            described[flag.arg_name] = " ".join(flag.description.split())
    names = [field.name for field in dataclasses.fields(args_class)]
    return {name: described.get(name, "") for name in names} | dict(config=CONFIG_HELP)


def with_words(helps: dict[str, str], words: Sequence[str]) -> dict[str, str]:
    """Return the flags whose name or text contains all words. Raises `ValueError` if there is
    none."""
    searched = {name: f"{name} {text}".lower().replace("-", "_") for name, text in helps.items()}
    wanted = [word.lower().replace("-", "_") for word in words]
    matching = {
        name: helps[name] for name, text in searched.items() if all(word in text for word in wanted)
    }
    if matching:
        return matching
    everything = " ".join(searched.values())
    missing = next((word for word in wanted if word not in everything), "")
    known = sorted({part for name in helps for part in (name, *name.split("_"))})
    number = "all words" if words[1:] else "this word"
    problem = f"no flag has {number} in its name or text"
    raise ValueError(f"--help {' '.join(words)}: {problem}{similar(missing, known)}")
