"""Types for flags. A type says which values are valid (pydantic checks that), which other flags the
flag needs (`Needs`), and whether a resumed run may change it (`MayChange`). Examples:

`lr: Positive[float]`, `max_steps: MayChange[Positive[int] | None]`, `reward: Several[str]`,
`clip_low: Annotated[BelowOne, Needs(loss="clip")]`.

At the end are functions that read values with a form of their own: `name=value` pairs, weighted
data sets, named held-out sets, folders of adapters."""

import contextlib
import json
import os
import re
import shlex
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from common.parallel.process import first_line

T = TypeVar("T")

# Settings of pydantic for all classes of flags: unknown names are errors, also when a class is
# called in Python; defaults are checked too; and no flag can be changed after parsing.
STRICT = ConfigDict(
    extra="forbid", validate_default=True, coerce_numbers_to_str=True, defer_build=True, frozen=True
)
MAX_FLOAT = 3e38
JSON = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
FILE_KINDS = ".jsonl, .json (these also as .gz or .zst), .parquet, .csv or .tsv"
JUDGE_KINDS = ("judge:", "rank:")  # rewards that ask a chat model
MODEL_KINDS = ("model:", *JUDGE_KINDS)  # rewards by a model


class Limit(NamedTuple):
    """How many tokens fit into a sequence, or into several together, and what sets this limit."""

    tokens: int
    flag: str
    """what errors name: the flag that sets the limit, or `the model's context of 4096 tokens`"""

    def require(self, max_length: int | None, sequences: int = 1) -> None:
        """Raise `ValueError` unless this many `sequences` of `--max_length` tokens fit together."""
        if max_length and sequences * max_length > self.tokens:
            count = "a sequence" if sequences == 1 else f"{sequences} sequences"
            raise ValueError(f"--max_length {max_length}: {count} must fit in {self.flag}")


def _in_float32(number: T) -> T:
    """Return `number`. Raise `ValueError` for NaN, infinity, and numbers too large for float32, the
    dtype of our tensors."""
    if not abs(number) <= MAX_FLOAT:
        raise ValueError("must be finite in float32")
    return number


def _written_as(form: str, words: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(form, text):
            raise ValueError(f"must be {words}")
        return text

    return AfterValidator(check)


def as_tuple(value: Any) -> Any:
    """Make a tuple of a single value, for `Args(reward="math")` or `reward: math` in a file."""
    return value if value is None or isinstance(value, list | tuple) else (value,)


Real = Annotated[float, AfterValidator(_in_float32)]
Positive = Annotated[T, Field(gt=0), AfterValidator(_in_float32)]
NotNegative = Annotated[T, Field(ge=0), AfterValidator(_in_float32)]
AtLeast2 = Annotated[int, Field(ge=2)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Gpus = Annotated[str, _written_as(r"[1-9]\d*x\w+", "a number and a kind of GPUs, such as 8xH100")]
TRACKERS = r"wandb|tensorboard|.+\.py:\w+"
Tracker = Annotated[str, _written_as(TRACKERS, "wandb, tensorboard or path/to/file.py:Class")]
Several = Annotated[tuple[T, ...], BeforeValidator(as_tuple)]

# Marks a flag that a resumed run may change, because it says how long, where or how often a run
# works, and not what a step computes. Two exceptions change what a step computes: `max_steps`
# stretches a decaying learning rate, and turning `rollout_ranks` on or off changes how old the
# weights of samples are.
MAY_CHANGE = object()
MayChange = Annotated[T, MAY_CHANGE]

# Marks a flag that names models: a resumed run stops if their files have changed.
NAMES_MODELS = object()
NamesModels = Annotated[T, NAMES_MODELS]


class NamesCode:
    """Marks a flag that may name files of the user's code. `makes`: the column of a row that this
    code fills, such as `_prompt`. A resumed run compares its data with the earlier run's, but not
    this column."""

    def __init__(self, makes: str | None = None) -> None:
        self.makes = makes


class Needs:
    """Marks a flag that has an effect only together with another flag.

        Needs(loss="clip")            only with --loss clip
        Needs(loss=("clip", "gspo"))  with one of these values
        Needs(reward="judge:")        with a value that begins so, among several
        Needs(beta=True)              with any value except 0, false, none and an empty list
        Needs(agent=None)             only without --agent
        Needs(tools=True, agent=True) with one of these flags, or both

    If a flag has two `Needs`, both must be met."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def is_met(self, args: Any) -> bool:
        """Return whether one of the needed flags has its value, or the script has none of them."""
        known = {name: wanted for name, wanted in self.values.items() if hasattr(args, name)}
        return not known or any(fits(getattr(args, name), x) for name, x in known.items())

    def unmet(self, args: Any) -> str:
        """Return why the flag has no effect, for a message: `with --loss cispo`."""
        given = {name: getattr(args, name, None) for name in self.values}
        present = {name: value for name, value in given.items() if value not in (None, ())}
        if not present:
            return f"without {either(given)}"
        return "with " + " and ".join(f"--{name} {shown(x)}" for name, x in present.items())

    def text(self, flags: Container[str]) -> str:
        """Return the condition for --help: `only with --loss clip`. `flags`: those of the script.
        The text is empty if the script has none of the needed ones."""
        known = {name: wanted for name, wanted in self.values.items() if name in flags}
        if not known:
            return ""
        if [*known.values()] == [None]:
            return f"only without {either(known)}"
        forms = [name if x is True else f"{name} {shown(x, ', ')}" for name, x in known.items()]
        return f"only with {either(forms)}"


def fits(value: Any, wanted: Any) -> bool:
    """Return whether the value of a flag is what a member of `Needs` asks for."""
    if wanted is True or not wanted:
        return bool(value) == bool(wanted)
    return any(
        member == choice or str(choice).endswith(":") and str(member).startswith(choice)
        for member in as_tuple(value) or (None,)
        for choice in as_tuple(wanted)
    )


def either(names: Iterable[str]) -> str:
    """Join flags for a message: `--a, --b or --c`."""
    *others, last = [f"--{name}" for name in names]
    return f"{', '.join(others)} or {last}" if others else last


def shown(value: Any, comma: str = " ") -> str:
    """Return a value as a user would write it on the command line."""
    if isinstance(value, tuple | list):
        return comma.join(shown(member) for member in value if member is not None)
    return f"{value:g}" if isinstance(value, float) else str(public(value))


@cache
def marks_of(args_class: type) -> dict[str, list]:
    """Return the marks of each flag, such as `Needs`. A flag whose default a script changes keeps
    the marks that its group gives it."""
    found: dict[str, list] = {}
    for cls in args_class.__mro__:
        for name, field in vars(cls).get("__pydantic_fields__", {}).items():
            marks = found.setdefault(name, [])
            marks += [mark for mark in field.metadata if mark not in marks]
    return found


def marked(args: Any, kind: Any) -> Iterator[tuple[str, tuple, Any]]:
    """Yield the name, the values and the mark of each flag that is set and has the mark `kind` or,
    if `kind` is a class, a mark of this class."""
    for flag, marks in marks_of(type(args)).items():
        values = as_tuple(getattr(args, flag)) or ()
        for mark in marks:
            if values and (mark is kind or type(mark) is kind):
                yield flag, values, mark


def needs_of(args_class: type, flag: str) -> list[Needs]:
    return [mark for mark in marks_of(args_class).get(flag, ()) if isinstance(mark, Needs)]


def check_needs(args: Any) -> None:
    """Raise `ValueError` for a flag that is set and has no effect."""
    for field in fields(args):
        flag, value = field.name, getattr(args, field.name)
        if value in (field.default, args.TINY_DEFAULTS.get(flag, field.default)):
            continue
        for need in needs_of(type(args), flag):
            if not need.is_met(args):
                raise ValueError(f"--{flag} {shown(value)} has no effect {need.unmet(args)}")


def union_members(kind: Any) -> tuple:
    """Return the members of a union type; for another type, a tuple of this type alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


class TreeLoader(yaml.SafeLoader):
    """Reads YAML without aliases. An alias could stand for its own parent, or aliases of aliases
    could blow a small file up to a billion values."""

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            problem = "aliases (*name) are not read; write the value again"
            raise yaml.MarkedYAMLError(None, None, problem, mark)
        try:
            return super().compose_node(parent, index)
        except RecursionError:
            raise yaml.YAMLError("nested too deeply") from None


# Texts that YAML 1.2 does not read as strings. Left out are numbers like 0042: they may be names.
SCALARS = dict(
    null="~|null|Null|NULL",
    bool="true|True|TRUE|false|False|FALSE",
    int="[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+",
    float=r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
)


class ValueLoader(TreeLoader):
    """Reads YAML 1.2. The library reads YAML 1.1, in which `no` is false and `12:30` is 750."""

    yaml_implicit_resolvers: ClassVar[dict] = {}


for tag, pattern in SCALARS.items():
    ValueLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"({pattern})$"), None)


# ---- values with a form of their own ----

HIDDEN = "***"

ADAPTER_CONFIG = "adapter_config.json"  # in an adapter's folder, in the format of the PEFT library
# An adapter with one of these fields is not plain LoRA: not weight + lora_alpha / r B A.
OTHER_ADAPTERS = (
    "alora_invocation_tokens", "alpha_pattern", "fan_in_fan_out", "layer_replication", "lora_bias",
    "rank_pattern", "use_dora", "use_rslora",
)  # fmt: skip


def public(value: Any) -> Any:
    """Hide secrets in the value of a flag, so that it may be stored and printed. A command of
    `--tools` may set some in its environment: `mcp:env KEY=*** python shop.py`."""
    if not isinstance(value, str) or not value.startswith("mcp:"):
        return value
    try:
        words = shlex.split(value.removeprefix("mcp:"))
    except ValueError:  # a quotation mark is not closed
        return re.sub("(?s)=.*", f"={HIDDEN}", value)
    variable = re.compile(r"((?:^|\s|^-e|^--\w+=)[A-Za-z_]\w*=).+", re.DOTALL)
    hidden = [variable.sub(rf"\1{HIDDEN}", word) for word in words]
    if hidden == words:
        return value
    return "mcp:" + " ".join(word if " " not in word else shlex.quote(word) for word in hidden)


def pairs_of(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    """Read `--flag name=value ...`. Raises `ValueError` for another form or a repeated name."""
    out: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not name or not value:
            raise ValueError(f"--{flag} {pair}: expected name=value")
        if name in out:
            raise ValueError(f"--{flag} {pair}: {name} is given twice")
        out[name] = value
    return out


def values_of(flag: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Read `--flag name=value ...` with values as in YAML 1.2: true, 3, 0.5, null, `{"a": 1}`, and
    "3" in quotation marks. Everything else stays text: no, 12:30, 0042, 2026-11-28."""
    values: dict[str, Any] = {}
    for name, text in pairs_of(flag, pairs).items():
        values[name] = text
        if text[0] in "[{\"'" or re.fullmatch("|".join(SCALARS.values()), text):
            with contextlib.suppress(yaml.YAMLError, ValueError):  # an integer may be too long
                values[name] = yaml.load(text, ValueLoader)
    return values


def weights_of(datasets: Sequence[str]) -> dict[str, float | None]:
    """Read `--dataset a.jsonl:0.6 b/c:0.4`: return each data set with its weight, None if it has
    none. Raises `ValueError` for an invalid weight, for a repeated data set, and if only some data
    sets have a weight."""
    out: dict[str, float | None] = {}
    for spec in datasets:
        dataset, _, end = spec.rpartition(":")
        try:
            weight = float(end) if dataset else None
        except ValueError:  # the colon belongs to the name
            weight = None
        dataset = spec if weight is None else dataset
        if weight is not None and not 0 < weight <= MAX_FLOAT:
            raise ValueError(f"--dataset {spec}: the weight must be greater than 0")
        if dataset in out:
            raise ValueError(f"--dataset {spec}: {dataset} is given twice")
        out[dataset] = weight
    if len(out) > 1 and len({weight is None for weight in out.values()}) > 1:
        problem = "only some have a weight; give all of them one, or none"
        raise ValueError(f"--dataset {' '.join(datasets)}: {problem}")
    if not out:
        raise ValueError("--dataset needs at least one value")
    return out


def kind_of(path: Path) -> str:
    """Return the suffix of a data file that we can read, such as .jsonl.gz; "" for other files."""
    kinds = (*JSON, *SEPARATORS, ".parquet")
    return next((kind for kind in kinds if path.name.endswith(kind)), "")


def sources_of(datasets: Sequence[str]) -> dict[str, tuple[list[str], float]]:
    """Return the sources from which training rows are drawn: for each name in metrics, the datasets
    and the weight. A dataset with a weight is a source of its own. Datasets without weights form
    one source, with an empty name."""
    weights = weights_of(datasets)
    given = {dataset: weight for dataset, weight in weights.items() if weight is not None}
    if len(weights) == 1 or len(given) < len(weights):
        return {"": (list(weights), 1.0)}
    names = datasets_by_name(dict.fromkeys(weights))
    return {name: ([dataset], given[dataset]) for name, dataset in names.items()}


def datasets_by_name(datasets: dict[str, str | None]) -> dict[str, str]:
    """Return datasets by their names in metrics. `datasets`: each with the name that the user gave
    it, or None. Without one, the name is the last part of the dataset's path, or the whole path if
    two names would be the same."""
    names = []
    for dataset, name in datasets.items():
        path = Path(dataset)
        names.append(name or path.name.removesuffix(kind_of(path)))
    if len(set(names)) < len(names) or not all(names):
        names = [name or dataset for dataset, name in datasets.items()]
    return dict(zip(names, datasets, strict=True))


def eval_sets_of(datasets: Sequence[str], flag: str = "eval_dataset") -> dict[str, str | None]:
    """Read `--eval_dataset a.jsonl hard=b.jsonl`, or another `flag` of this form: return each data
    set with its name, None if it has none. The part before the first `=` is a name unless it
    contains a `/`: `./x=1.jsonl` is a file.

    Raises `ValueError` for a repeated data set or name, and for a name without a data set."""
    out: dict[str, str | None] = {}
    for spec in datasets:
        name, equals, dataset = spec.partition("=")
        name, dataset = (name, dataset) if equals and "/" not in name else (None, spec)
        if name == "" or not dataset:
            raise ValueError(f"--{flag} {spec}: expected name={flag.removeprefix('eval_')}")
        earlier_names = {set_name or set_dataset for set_dataset, set_name in out.items()}
        if twice := {dataset} & out.keys() | {name or dataset} & earlier_names:
            raise ValueError(f"--{flag} {spec}: {min(twice)} is given twice")
        out[dataset] = name
    if not out:
        raise ValueError(f"--{flag} needs at least one value")
    return out


BETTER = dict(highest=1, lowest=-1)
HIGHEST = ("solved", "reward", "score", "accuracy", "accuracies", "margin", "margins", "agreement")
LOWEST = ("loss", "nll", "perplexity", "kl", "entropy", "divergence", "error", "errors")


def best_of(keep_best: str) -> tuple[str, str | None]:
    """Read `--keep_best NAME` or `NAME:lowest`: the metric, and `highest` or `lowest` if given."""
    name, _, end = keep_best.rpartition(":")
    return (name, end) if name and end in BETTER else (keep_best, None)


def better_end(metric: str) -> str | None:
    """Guess from the last word of its name whether the `highest` or the `lowest` value of a metric
    is best; None if the word does not tell."""
    if re.search(r"(^|/)pass_at_\d+$|(^|/)rewards/.+/mean$", metric):
        return "highest"
    word = re.split("[/_]", metric)[-1]
    return "highest" if word in HIGHEST else "lowest" if word in LOWEST else None


def flags_of_adapter(folder: str) -> dict[str, Any]:
    """Return the flags that `--adapter` sets (rank, alpha, targets), from its adapter_config.json.
    Raises `ValueError` if the adapter is not plain LoRA."""
    label = f"--adapter {folder}: {ADAPTER_CONFIG}"
    try:
        file = Path(os.path.expanduser(folder)) / ADAPTER_CONFIG
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{label}: {first_line(error)}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{label} is not that of a LoRA adapter (peft_type LORA)")
    unsupported = [key for key in OTHER_ADAPTERS if config.get(key)]
    # Other initialisations (such as PiSSA) also change the weights of the layer under the adapter.
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):
        unsupported.append("init_lora_weights")
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets != "all-linear":  # a regular expression
        unsupported.append("target_modules")
    if unsupported:
        key = unsupported[0]
        raise ValueError(f"{label}: its {key} is {config[key]}, which is not supported")
    flags = dict(lora_rank="r", lora_alpha="lora_alpha", lora_targets="target_modules")
    return {flag: config.get(key) for flag, key in flags.items()}
