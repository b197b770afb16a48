"""What a flag is: its bounds, said in its type and checked in one place; who reads it; and the flags of every script.

`lr: Positive[float]`, `max_steps: MayChange[Positive[int] | None]`: the bounds are those of `annotated_types`.
"""

import dataclasses
import operator
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Interval, Le, Lt

T = TypeVar("T")
Bound = Gt | Ge | Lt | Le | Interval

Positive = Annotated[T, Gt(0)]
NotNegative = Annotated[T, Ge(0)]
AtLeast2 = Annotated[int, Ge(2)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
PositiveFraction = Annotated[float, Interval(gt=0, le=1)]
BelowOne = Annotated[float, Interval(ge=0, lt=1)]
OpenFraction = Annotated[float, Interval(gt=0, lt=1)]

# Of a flag that may differ between the run that made a checkpoint and the one that resumes it: it changes how long,
# where or how often, never what is computed at a step. (`max_steps` also stretches a decaying learning rate, and
# `rollout_ranks` from or to 0 changes how old samples are.)
_MAY_CHANGE = object()
MayChange = Annotated[T, _MAY_CHANGE]

MAX_FLOAT = 3e38  # tensors are float32
_RULES = {
    "gt": (operator.gt, "be greater than"),
    "ge": (operator.ge, "be at least"),
    "lt": (operator.lt, "be below"),
    "le": (operator.le, "be at most"),
}


def check_bounds(args: Any) -> None:
    """Every float must be a finite number and every bound must hold. `ValueError` names the flag and the value."""
    hints = typing.get_type_hints(type(args), include_extras=True)
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, float) and not abs(item) <= MAX_FLOAT:
                raise ValueError(f"--{field.name} {item} must be a finite number")
        for number, bound in _bounded(hints[field.name], value):
            for rule, (holds, _) in _RULES.items():
                limit = getattr(bound, rule, None)
                if limit is not None and not holds(number, limit):
                    raise ValueError(f"--{field.name} {number} must {_describe(bound)}")


def _bounded(hint: Any, value: Any) -> Iterator[tuple[float, Bound]]:
    """Each number in a flag's value with each bound on it in the flag's type."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        items = value if isinstance(value, tuple) else ()
        parts = parts[:1] * len(items) if parts[-1] is ... else parts
        for part, item in zip(parts, items, strict=False):
            yield from _bounded(part, item)
        return
    for part in parts:
        if not isinstance(part, Bound):
            yield from _bounded(part, value)
        elif isinstance(value, int | float):
            yield value, part


def _describe(bound: Bound) -> str:
    """What a number must: `be greater than 0`."""
    if isinstance(bound, Interval):
        low = f"[{bound.ge}" if bound.gt is None else f"({bound.gt}"
        return f"be in {low}, {f'{bound.le}]' if bound.lt is None else f'{bound.lt})'}"
    ((rule, words),) = [(rule, words) for rule, (_, words) in _RULES.items() if hasattr(bound, rule)]
    return "not be negative" if bound == Ge(0) else f"{words} {getattr(bound, rule)}"


def may_change(args_class: type) -> set[str]:
    """Names of the flags that are `MayChange`, here or in a class that this one inherits from."""

    def marked(hint: Any) -> bool:
        return _MAY_CHANGE in getattr(hint, "__metadata__", ()) or any(map(marked, typing.get_args(hint)))

    hints = [typing.get_type_hints(cls, include_extras=True) for cls in args_class.__mro__]
    return {name for declared in hints for name, hint in declared.items() if marked(hint)}


def pairs_of(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    """What `--flag name=value ...` says. Raises `ValueError` for what is no pair, and for a name that comes twice."""
    out: dict[str, str] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not name or not value:
            raise ValueError(f"--{flag} {pair}: expected name=value")
        if name in out:
            raise ValueError(f"--{flag} {pair}: {name} stands there twice")
        out[name] = value
    return out


def weights_of(datasets: Sequence[str]) -> dict[str, float | None]:
    """What `--dataset a.jsonl:0.6 b/c:0.4` says: datasets and their weights, of which all or none may be given.

    Raises `ValueError` for other weights, and for a dataset that comes twice.
    """
    out: dict[str, float | None] = {}
    for given in datasets:
        dataset, _, end = given.rpartition(":")
        try:
            weight = float(end) if dataset else None
        except ValueError:  # no weight, but what the dataset is called
            weight = None
        dataset = given if weight is None else dataset
        if weight is not None and not 0 < weight <= MAX_FLOAT:
            raise ValueError(f"--dataset {given}: a weight must be greater than 0")
        if dataset in out:
            raise ValueError(f"--dataset {given}: {dataset} stands there twice")
        out[dataset] = weight
    if len(out) > 1 and len({weight is None for weight in out.values()}) > 1:
        raise ValueError(f"--dataset {' '.join(datasets)}: give all of them weights, or none")
    if not out:
        raise ValueError("--dataset needs at least one")
    return out


def eval_sets_of(datasets: Sequence[str]) -> dict[str, str | None]:
    """What `--eval_dataset a.jsonl hard=b.jsonl` says: datasets and the names given to them. What stands before the
    first `=` is a name unless a `/` is in it: `./x=1.jsonl` is a file.

    Raises `ValueError` for what comes twice, and for a name without a dataset.
    """
    out: dict[str, str | None] = {}
    for given in datasets:
        name, equals, dataset = given.partition("=")
        name, dataset = (name, dataset) if equals and "/" not in name else (None, given)
        if name == "" or not dataset:
            raise ValueError(f"--eval_dataset {given}: expected name=dataset")
        for twice in {dataset} & out.keys() | {name or dataset} & {own or other for other, own in out.items()}:
            raise ValueError(f"--eval_dataset {given}: {twice} stands there twice")
        out[dataset] = name
    if not out:
        raise ValueError("--eval_dataset needs at least one")
    return out


# ---- flags and functions ----


def require_read_by(
    args: Any, readers: dict[str, Sequence[str]], chosen: str | Sequence[str], flag: str = "loss"
) -> None:
    """Raise `ValueError` for a flag that was set though only members of the family that `--flag` did not choose read
    it. `readers`: the flags that each member reads."""
    chosen = [chosen] if isinstance(chosen, str) else chosen
    read = {name for member in chosen for name in readers[member]}
    for name in dict.fromkeys(name for names in readers.values() for name in names):
        args.require_read(name, name in read, f"--{flag} is {' '.join(chosen)}")


# ---- the flags of every script ----


@dataclass
class BaseArgs:
    """Flags of every script. A path may be absolute or relative to where the command runs."""

    model: str = "tiny"
    """Hugging Face id or folder of the starting model; `tiny` is a built-in randomly initialised 1M-parameter Qwen3"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """compute dtype; master weights, gradients' reduction and the loss are always float32. auto: bfloat16 on CUDA"""
    compile: MayChange[bool] = False
    """torch.compile every transformer block"""
    pack_tokens: MayChange[Positive[int]] = 8192
    """tokens per forward pass on one rank: the memory knob. It never changes the gradient"""
    context_ranks: MayChange[Positive[int]] = 1
    """neighbouring ranks that run each pack together, so that a sequence may have so many times pack_tokens"""
    dataset: tuple[str, ...] = ("arithmetic",)
    """Hugging Face id, a file (.jsonl or .json, also .gz or .zst, .parquet, .arrow, .csv), several as 'data/*.jsonl', a
    folder of them, or a built-in task: `arithmetic`, `calculator`, `guess_number`, `sliding_puzzle`; several of these
    are one, or are drawn from by weights: `a.jsonl:0.6 b/c:0.4`"""
    dataset_split: str = "train"
    """split to train on (files without splits are one split, `train`)"""
    dataset_config: str | None = None
    """configuration of a Hugging Face dataset that has several; default: `main`, if that is one of them"""
    columns: tuple[str, ...] = ()
    """other names for columns of the data, training and held-out rows alike, as new=old: `prompt=problem
    answer=solution`"""
    on_bad_row: Literal["error", "skip"] = "error"
    """rows that are malformed, empty, not what a prompt template, an environment or a reward can use or, where that is
    an error, too long: end the run, or leave them out and say how many, for what reason"""
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    """chat: prompts become user turns of the chat template; plain: text goes in as it is; auto: chat for message lists
    and `question` columns (where the tokenizer has a template), plain for other strings"""
    system_prompt: str | None = None
    """system turn put before every prompt in chat format"""
    chat_template: str | None = None
    """jinja file with the chat template, in place of the tokenizer's own; it is exported with the tokenizer"""
    template_kwargs: tuple[str, ...] = ()
    """what else the chat template is told, as name=value: `enable_thinking=false`"""
    shard_ranks: MayChange[Positive[int] | None] = None
    """ranks, neighbours, that hold one copy of each model together; more ranks hold more copies, and average gradients
    over them once per step; default: those of one machine, or all where machines do not have as many each"""
    nccl_timeout: MayChange[Positive[float]] = 30.0
    """minutes after which ranks that wait for each other on CUDA give up"""
    output_dir: MayChange[str] = "runs/run"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    seed: int = 0
    """seeds data order and sampling"""
    resume: MayChange[Literal["auto", "never", "must"]] = "auto"
    """auto: go on with what an earlier run left in output_dir (its newest checkpoint), if it did; must: fail if it did
    not; never: start over and delete what is there"""

    def __post_init__(self) -> None:
        if isinstance(self.dataset, str):  # as one may write it in Python
            self.dataset = (self.dataset,)
        check_bounds(self)
        weights_of(self.dataset)
        for flag in ("columns", "template_kwargs"):
            pairs_of(flag, getattr(self, flag))
        for flag in ("chat_template", "template_kwargs"):
            self.require_read(flag, self.prompt_format != "plain", "--prompt_format is plain")

    @property
    def dataset_flag(self) -> str:
        """For messages."""
        return f"--dataset {' '.join(self.dataset)}"

    @property
    def room(self) -> int:
        """Tokens that the sequences of one micro-batch that belong together may have."""
        return self.pack_tokens * self.context_ranks

    @property
    def room_flags(self) -> str:
        """What gives that room, for messages."""
        times = f" x --context_ranks {self.context_ranks}" if self.context_ranks > 1 else ""
        return f"--pack_tokens {self.pack_tokens}{times}"

    def check_ranks(self, ranks: int) -> None:
        """`ValueError` if the flags do not fit this number of ranks."""
        trainers = self.ranks_that_train(ranks)
        for flag in ("context_ranks", "shard_ranks"):
            if (size := getattr(self, flag)) and trainers % size:
                raise ValueError(f"--{flag} {size} does not divide the {trainers} ranks that train")

    def ranks_that_train(self, ranks: int) -> int:
        """Of the launch's."""
        return ranks

    def may_change(self, then: dict) -> set[str]:
        """Flags that may differ from those of a run, `then`, that these resume."""
        return may_change(type(self))

    def require_multiple(self, flag: str, divisor: int, of: str) -> None:
        """A global size must split evenly: over the ranks, over the minibatches."""
        if getattr(self, flag) % divisor:
            raise ValueError(f"--{flag} {getattr(self, flag)} is not a multiple of {of} ({divisor})")

    def require_read(self, flag: str, unless: bool, why: str) -> None:
        """A flag that was set, but that nothing would read `unless` something else is said."""
        value = getattr(self, flag)
        if not unless and value != type(self).__dataclass_fields__[flag].default:
            given = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(f"--{flag} {given} would not be read: {why}")

    def to_dict(self) -> dict:
        """Plain YAML types, in field order."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
