"""`parse`, which every script calls first: reads the command line (with tyro), `--config FILE.yaml`
and `--preset NAME`, and checks the flags (with pydantic). An error is one line.

If several places give a flag, the last of these wins: the default, the default for the built-in
model, the file, the command line. A preset's flags may only be given with its values."""

import contextlib
import dataclasses
import difflib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypedDict, TypeVar, get_args, get_type_hints

import docstring_parser
import tyro
import yaml
from pydantic import ValidationError

from common.config.flags import TreeLoader, fits, needs_of, shown, union_members
from common.config.groups import BUILT_IN_MODELS, BaseArgs, TrainArgs, check_ranks, script_of
from common.parallel import distributed, process

ArgsT = TypeVar("ArgsT", bound=BaseArgs)


class FileArgs:
    """Flags in a file"""

    config: str
    """read flags from this file of `flag: value` lines, such as a run's args.yaml; flags on the
    command line win"""


class UsualArgs:
    """What most runs set"""

    names = """model dataset output_dir max_steps lr eval_every batch_size max_length reward
    prompts_per_step samples_per_prompt max_new_tokens""".split()


def parse(args_class: type[ArgsT], argv: Sequence[str] | None = None) -> ArgsT:
    """Return the flags of the command line. On bad input print one line and exit with code 2."""
    try:
        given = read_command_line(args_class, list(sys.argv[1:] if argv is None else argv))
        process.require_torchrun()
        given = (read_file(args_class, given.pop("config")) if "config" in given else {}) | given
        given = {name: from_home(value) for name, value in given.items()}
        require_utf8(given)
        preset = args_class.PRESETS.get(str(given.get("preset")), {})
        built_in = built_in_defaults(args_class, preset | given)
        args = args_class(**built_in | preset | given)
        for name, value in preset.items():
            if (other := getattr(args, name)) != value:
                source = f"--preset {args.preset}, which sets {value}"
                raise ValueError(f"--{name} {other} contradicts {source}")
        planned = args.planned_ranks if isinstance(args, TrainArgs) else None
        check_ranks(args, planned or distributed.world_size())
    except ValueError as error:
        distributed.fail(one_line(error))
    for name, value in given.items():
        words = value if isinstance(value, tuple) else (value,)
        if any("\\n" in str(x) for x in words) and name not in ("stop", "hint_template"):
            advice = "a line break is $'\\n' in bash and \"\\n\" in a file"
            distributed.say(f"--{name}: the \\n in it is not a line break; {advice}")
    if isinstance(args, TrainArgs) and args.max_steps and args.epochs != TrainArgs.epochs:
        distributed.say(f"--epochs {args.epochs:g} has no effect with --max_steps {args.max_steps}")
    if built_in:
        flags = " ".join(f"--{name} {value}" for name, value in built_in.items())
        distributed.say(f"defaults for the built-in model: {flags}")
    return args


def from_home(value: Any) -> Any:
    """Expand `~/` at the start of paths. The shell does that on the command line, but not within
    quotes, and nobody does it in a file."""
    if isinstance(value, list | tuple):
        return tuple(map(from_home, value))
    return os.path.expanduser(value) if str(value).startswith("~/") else value


def require_utf8(given: dict[str, Any]) -> None:
    """Raise `ValueError` for text that is not UTF-8, such as a strange file name: a run writes its
    flags to files."""
    for name, value in given.items():
        text = shown(value).encode(errors="backslashreplace").decode()
        if text != shown(value):
            raise ValueError(f"--{name} {text}: not UTF-8; rename the file or folder")


def built_in_defaults(args_class: type[BaseArgs], given: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults for the built-in model; {} for another model. Flags that are given are
    left out, and so are values with which a given flag would have no effect. With other data than
    the built-in task, only the learning rates remain."""
    fields = args_class.__dataclass_fields__
    if given.get("model", fields["model"].default) not in BUILT_IN_MODELS:
        return {}
    is_built_in_task = given.get("dataset", "arithmetic") in ("arithmetic", ("arithmetic",))
    needs = [need for name in given for need in needs_of(args_class, name)]
    return {
        name: value
        for name, value in args_class.TINY_DEFAULTS.items()
        if name not in given
        and not (name == "max_steps" and "epochs" in given)
        and (is_built_in_task or name.endswith("lr"))
        and all(fits(value, need.values[name]) for need in needs if name in need.values)
    }


# ---- the command line and the file, as text ----


def types_of(args_class: type[BaseArgs]) -> dict[str, Any]:
    """Return the types of all flags and of `--config`, without bounds."""
    hints = get_type_hints(args_class)
    types = {field.name: hints[field.name] for field in dataclasses.fields(args_class)}
    return types | dict(config=str)


def read_command_line(args_class: type[BaseArgs], argv: list[str]) -> dict[str, Any]:
    """Return the given flags as text, with `config` among them. For --help, print it and exit."""
    types = types_of(args_class)
    if helps := {"-h", "--help"} & {*argv}:
        start = min(map(argv.index, helps)) + 1
        words = takewhile(lambda word: not word.startswith("-"), argv[start:])
        print_help(args_class, list(words))
    flags = [(name, list[list[str]], dataclasses.field(default_factory=list)) for name in types]
    given, unknown = tyro.cli(
        dataclasses.make_dataclass("Flags", flags),
        args=argv,
        return_unknown_args=True,
        use_underscores=True,
        config=(tyro.conf.UseAppendAction, tyro.conf.FlagConversionOff),
        console_outputs=distributed.is_main(),
    )
    if unknown:
        flag, _, _ = unknown[0].partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        raise ValueError(f"unknown flag {flag}{similar(name, [*types], '--')}")
    out = {}
    for name, kind in types.items():
        uses = getattr(given, name)
        members = union_members(kind)
        is_list = any(get_args(member)[-1:] == (...,) for member in members)
        if len(uses) > 1 and not is_list:
            raise ValueError(f"--{name} is given twice")
        if uses == [[]] and not is_list and bool not in members:
            raise ValueError(f"--{name}: a value is missing")
        if uses:
            out[name] = value_of(sum(uses, []), kind)
    return out


def value_of(words: list[str], kind: Any) -> Any:
    """Turn the words after a flag into a value for pydantic: the word, or a tuple of several words.
    `None` is null if the flag may be null. A switch without a word is true."""
    members = union_members(kind)
    if words == ["None"] and type(None) in members:
        return None
    return words[0] if len(words) == 1 else tuple(words) or (True if bool in members else ())


class TextLoader(TreeLoader):
    """Reads all values of YAML except null as text. Refuses a key that is given twice."""

    yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in resolvers if tag.endswith(":null")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"{key} is given twice")
        return super().construct_mapping(node, deep)


def read_file(args_class: type[BaseArgs], path: str) -> dict[str, Any]:
    """Return the flags in a file of `flag: value` lines. A value means what it means on the command
    line."""
    try:
        flags = yaml.load(Path(path).read_text(), TextLoader)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"--config {path}: not valid YAML: {problem}") from error
    if not isinstance(flags, dict):
        raise ValueError(f"--config {path}: expected `flag: value` lines")
    types = {name: kind for name, kind in types_of(args_class).items() if name != "config"}
    if unknown := [name for name in flags if name not in types]:
        key = "null" if unknown[0] is None else unknown[0]
        raise ValueError(f"--config {path}: unknown key {key}{similar(key, [*types])}")
    return {
        name: value_of([value], types[name]) if isinstance(value, str) else value
        for name, value in flags.items()
    }


# What other libraries call our flags.
ELSEWHERE = dict(
    learning_rate="lr", model_name="model", model_name_or_path="model", dataset_name="dataset",
    per_device_train_batch_size="batch_size", num_generations="samples_per_prompt",
    max_completion_length="max_new_tokens", max_seq_length="max_length", report_to="log_to",
    num_train_epochs="epochs", gradient_checkpointing="activation_checkpointing",
    save_steps="save_every", eval_steps="eval_every", reward_funcs="reward", lora_r="lora_rank",
)  # fmt: skip


def similar(name: str, known: list[str], mark: str = "") -> str:
    """Return ` (did you mean --lr?)` for a misspelled or another library's name, or ""."""
    close = difflib.get_close_matches(ELSEWHERE.get(name, name), known, n=1, cutoff=0.7)
    return f" (did you mean {mark}{close[0]}?)" if close else ""


def one_line(error: ValueError) -> str:
    """Return the message of an error; of pydantic's error, its first message in our form: `--lr -1
    must be greater than 0`."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    message = re.sub(r"^\w+ should", "must", first["msg"].removeprefix("Value error, "))
    if not first["loc"]:
        return message
    return " ".join(filter(None, [f"--{first['loc'][0]}", shown(first["input"]), message]))


# ---- --help ----


def print_help(args_class: type[BaseArgs], words: list[str]) -> NoReturn:
    """Print help and exit. Without `words`: the usual flags, the script's own, and the names of the
    others; with `all`: all flags; else: those that have all `words` in their name or text."""
    script = script_of(args_class).name
    summary, *_ = (sys.modules[args_class.__module__].__doc__ or "").partition("\n\n")
    lines = [summary, f"`{script} --help WORD` lists the flags with this word, `--help all` all."]
    groups, others = groups_of(args_class, words), {}
    if not words:
        others = groups
        groups = {cls: others.pop(cls) for cls in (UsualArgs, args_class) if cls in others}
    console = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(console):
        tyro.cli(
            sections(groups, script.removesuffix(".py")),
            args=["--help"],
            prog=script,
            description="\n".join(lines),
            use_underscores=True,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
        )
    for cls, flags in others.items():
        names = f"{cls.__doc__}: --{' --'.join(flags)}"
        console.write(textwrap.fill(names, shutil.get_terminal_size().columns) + "\n\n")
    if distributed.is_main():
        sys.stdout.write(console.getvalue())  # at once: `| head` may close the pipe
    sys.exit(0)


def groups_of(args_class: type[BaseArgs], words: Sequence[str]) -> dict[type, dict[str, Any]]:
    """Return the flags that have all `words` (or `all` flags), each with a type for tyro, by their
    group. The script's own flags come last. Without words, usual flags are a group of their own."""
    types = types_of(args_class)
    groups: dict[type, dict[str, Any]] = {}
    wanted = [] if words == ["all"] else [word.lower().replace("-", "_") for word in words]
    for name, (owner, text) in texts(args_class).items():
        needs = [need.text(types) for need in needs_of(args_class, name)]
        if name in UsualArgs.names and not (words or needs):
            owner = UsualArgs
        text = "; ".join(sentence for sentence in [text, *needs] if sentence)
        if all(word in f"{name} {text}".lower().replace("-", "_") for word in wanted):
            default = shown(getattr(args_class, name, None))
            hint = "" if "; default: " in text else f"(default: {default or 'none'})"
            flag = Annotated[types[name], tyro.conf.arg(help=text, help_behavior_hint=hint)]
            groups.setdefault(owner, {})[name] = flag
    if not groups:
        raise ValueError(f"--help {' '.join(words)}: no flag has this in its name or text")
    return groups


def sections(groups: dict[type, dict[str, Any]], script: str) -> type:
    """Return a type that tyro shows as help: one section for each group of flags."""
    parts = {
        cls.__name__.removesuffix("Args").lower() or script: Annotated[
            TypedDict("Part", group, total=False),  # pyrefly: ignore[invalid-annotation]
            tyro.conf.arg(help=cls.__doc__),
        ]
        for cls, group in groups.items()
    }
    return TypedDict("Flags", parts)


def texts(args_class: type[BaseArgs]) -> dict[str, tuple[type, str]]:
    """Return the group of each flag, and its help text. A script may replace the text of a flag."""
    types = types_of(args_class)
    found: dict[str, tuple[type, str]] = {}
    for cls in (FileArgs, *args_class.__mro__[-2::-1]):
        for flag in docstring_parser.parse_from_object(cls).params:
            if flag.arg_name in types:
                owner, _ = found.get(flag.arg_name, (cls, ""))
                found[flag.arg_name] = owner, " ".join(flag.description.split())
    # In a user's copy of a script, a flag may have no text.
    return found | {name: (args_class, "") for name in types if name not in found}
