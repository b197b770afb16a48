"""The command line: flat dataclasses as flags, `--config FILE.yaml`, `--preset NAME`, `--help`, errors in one line.

Precedence: default < for the built-in model < preset < file < flag.
"""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import TypeVar

import tyro
import yaml

from common.config.flags import BaseArgs
from common.parallel import distributed

BOOLEAN = (bool, bool | None)
ArgsT = TypeVar("ArgsT", bound=BaseArgs)

# The flags that scripts share as --help shows them, after the script's own.
GROUPS: dict[str, tuple[str, ...]] = {
    "model": ("model", "dtype", "compile", "activation_checkpointing", "pack_tokens", "context_ranks", "shard_ranks",
              "offload", "lora_rank", "lora_alpha", "lora_targets", "lora_rslora", "adapter"),
    "data": ("dataset", "dataset_split", "dataset_config", "eval_dataset", "eval_split", "eval_size", "columns",
             "on_bad_row", "prompt_format", "prompt_template", "system_prompt", "chat_template", "template_kwargs",
             "overlong_prompts", "streaming", "shuffle_buffer"),
    "sampling": ("prompts_per_step", "samples_per_prompt", "max_new_tokens", "temperature", "environment", "max_turns",
                 "environment_timeout", "reward", "reward_weights", "max_reward_errors", "reward_timeout",
                 "reward_workers", "unsafe_code_execution", "engine", "tensor_parallel_size", "gpu_memory_utilization",
                 "batch_invariant", "rollout_ranks", "max_staleness", "oversample", "partial_rollouts",
                 "max_logprob_difference", "check_every"),
    "objective": ("loss", "loss_weights", "beta", "label_smoothing", "length_normalize", "f_divergence", "f_alpha",
                  "simpo_gamma", "discopop_tau", "sft_weight", "sft_length_normalize", "kl_target", "kl_horizon",
                  "reward_scale", "reward_clip", "missing_eos_penalty", "correction", "correction_mode",
                  "correction_low", "correction_high", "correction_filter"),
    "optimisation": ("max_steps", "epochs", "minibatches", "epochs_per_rollout", "lr", "lr_schedule", "warmup_steps",
                     "min_lr_ratio", "adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm"),
    "run": ("output_dir", "resume", "seed", "save_every", "keep_last", "keep_best", "eval_every", "early_stop", "log",
            "log_every", "nccl_timeout"),
}  # fmt: skip


def parse(args_class: type[ArgsT], argv: Sequence[str] | None = None) -> ArgsT:
    """Read the command line (and `--config FILE.yaml`) into `args_class`; on bad input one line and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(argv):
        width = min(shutil.get_terminal_size().columns, 120)
        sys.stdout.write("".join(f"{line}\n" for line in help_lines(args_class, width)))  # at once: `| head` may close
        sys.exit(0)
    try:
        argv, config_path = _take_config_flag(argv)
        argv = _canonical(args_class, argv)
        if config_path is not None:
            argv = _yaml_to_argv(args_class, config_path) + argv  # the last occurrence of a flag wins
        presets = getattr(args_class, "PRESETS", {})
        argv = _preset_to_argv(presets, getattr(args_class, "RENAMED_PRESETS", {}), argv) + argv
        argv = (for_tiny := _tiny_to_argv(args_class, argv)) + argv
        console = io.StringIO()
        with contextlib.redirect_stderr(console):
            # tyro's own validation stops at types; __post_init__ raises ValueError for flags that conflict
            args = tyro.cli(args_class, args=argv, config=(tyro.conf.FlagConversionOff,))
        for flag, value in presets.get(getattr(args, "preset", None), {}).items():
            if getattr(args, flag) != value:
                got = getattr(args, flag)
                raise ValueError(f"--{flag} {got} contradicts --preset {args.preset}: {flag} is {value}")
        args.check_ranks(distributed.world_size())
        if for_tiny and distributed.is_main():
            print(f"for the built-in model and task, unless given: {' '.join(for_tiny)}", flush=True)
        adapted = "max_new_tokens" not in _given(argv) and getattr(args, "max_new_tokens", 256) < 256
        if adapted and distributed.is_main():
            print(f"--max_new_tokens {args.max_new_tokens}: half of {args.room_flags}", flush=True)
        return args
    except ValueError as error:
        distributed.fail(str(error), code=2)
    except SystemExit:  # tyro's
        distributed.fail(_unframe(console.getvalue()), code=2)


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


def _declares(script: Path, flag: str) -> bool:
    """Whether it is one of the script's own flags."""
    return re.search(rf"^    {re.escape(flag)}: .* = ", script.read_text(encoding="utf-8"), re.MULTILINE) is not None


def _canonical(args_class: type, argv: list[str]) -> list[str]:
    """Snake case, `--flag=value` split, `--compile` = `--compile True`, `true` = `True`; refuses unknown flags."""
    known, out = _fields(args_class), []
    for i, arg in enumerate(argv):
        if not arg.startswith("--"):
            previous = out[-1].removeprefix("--") if out else ""
            out.append(arg.capitalize() if known.get(previous) in BOOLEAN else arg)
            continue
        name, equals, value = arg[2:].partition("=")
        name = name.replace("-", "_")
        if name not in known:
            if owners := [path.name for path in sorted(distributed.PROJECT.glob("*.py")) if _declares(path, name)]:
                raise ValueError(f"unknown flag --{name}: it is a flag of {', '.join(owners)}")
            raise _unknown(f"--{name}", [f"--{k}" for k in known], "unknown flag ")
        out.append(f"--{name}")
        if equals:
            out.append(value.capitalize() if known[name] in BOOLEAN else value)
        elif known[name] in BOOLEAN and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            out.append("True")
    return out


def _given(argv: list[str]) -> dict[str, str]:
    """The last value of each flag, `--flag=value` or `--flag value`; of several values the first."""
    given = {}
    for flag, following in pairwise([*argv, ""]):
        if flag.startswith("--"):
            name, equals, joined = flag.removeprefix("--").partition("=")
            given[name] = joined if equals else following
    return given


def _preset_to_argv(presets: dict[str, dict], moved: dict[str, str], argv: list[str]) -> list[str]:
    """What `--preset` sets."""
    if (name := _given(argv).get("preset", "")) in ("", "None"):
        return []
    if name in moved:
        raise ValueError(f"--preset {name} is a script of its own now: {moved[name]}")
    if name not in presets:
        raise ValueError(f"--preset {name}: unknown; there are {', '.join(presets)}")
    return [f"--{flag}={value}" for flag, value in presets[name].items()]


def _tiny_to_argv(args_class: type, argv: list[str]) -> list[str]:
    """What `TINY_DEFAULTS` sets and is not given, where the model and the task are the built-in ones."""
    given = _given(argv)
    if (given.get("model", "tiny"), given.get("dataset", "arithmetic")) != ("tiny", "arithmetic"):
        return []
    flags = {
        name: value
        for cls in reversed(args_class.__mro__)
        for name, value in vars(cls).get("TINY_DEFAULTS", {}).items()
    }
    return [f"--{name}={value}" for name, value in flags.items() if name not in given]


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
    """Of a fixed number of values, so that one of them alone would not do."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return any(typing.get_origin(option) is tuple and ... not in typing.get_args(option) for option in options)


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


# ---- --help ----


def help_lines(args_class: type, width: int) -> Iterator[str]:
    """What the script is; its own flags; those it shares with others, in groups. Of each its type, default and text."""
    module = sys.modules[args_class.__module__]
    script = Path(module.__file__).name
    yield f"usage: {script} [--flag value ...]"
    yield from ["", *textwrap.wrap(" ".join((module.__doc__ or "").split("\n\n")[0].split()), width)]
    hints, docs = _fields(args_class), _docs(args_class)
    defaults = {field.name: field.default for field in dataclasses.fields(args_class)}
    inherited = {field.name for cls in args_class.__bases__ for field in dataclasses.fields(cls)}
    grouped = {group: [name for name in names if name in inherited] for group, names in GROUPS.items()}
    own = [name for name in defaults if name not in sum(grouped.values(), [])]
    for group, names in {script: own, **grouped}.items():
        yield from ["", group] if names else []
        for name in names:
            default = " ".join(map(str, d)) or "none" if isinstance(d := defaults[name], tuple) else d
            yield from _wrap(f"  --{name} ", f"{_kind(hints[name])} (default: {default})", width)
            yield from _wrap(" " * 6, docs.get(name, ""), width)
    yield "  --config FILE.yaml"
    yield from _wrap(" " * 6, "flags from a file, such as a run's args.yaml; flags on the command line win", width)


def _wrap(first: str, text: str, width: int) -> list[str]:
    indents = dict(initial_indent=first, subsequent_indent=" " * 6)
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False, **indents)


def _kind(hint: type) -> str:
    """`int`, `{clip, gspo}`, `float ...`, `int or None`."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return f"{{{', '.join(map(str, parts))}}}"
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(_kind, parts))
    if typing.get_origin(hint) is tuple:
        return " ".join("..." if part is ... else _kind(part) for part in parts)
    return "None" if hint is type(None) else hint.__name__


def _docs(args_class: type) -> dict[str, str]:
    """The text under each field, on one line; the nearest class's where several have one."""
    docs = {}
    for cls in args_class.__mro__[-2::-1]:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        for field, after in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                docs[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return docs
