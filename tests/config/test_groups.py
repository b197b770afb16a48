"""Groups of flags that scripts share, and the project's rules for flags and file size."""

import ast
import dataclasses
import importlib
import typing
from collections import Counter

import pytest
from helpers import ROOT
from pydantic.dataclasses import dataclass, is_pydantic_dataclass
from pydantic.fields import FieldInfo

from common.config import (
    groups,
    objectives,
    online,
    preference_flags,
    sampling,
    teacher_flags,
    training,
)
from common.config.flags import check_needs, needs_of, union_members
from common.config.groups import BaseArgs, TrainArgs, check_ranks, may_change
from common.config.objectives import CorrectionArgs, LogKLArgs
from common.config.online import OnlineArgs, SamplingArgs
from common.config.parse import one_line, texts

SCRIPTS = sorted(ROOT.glob("*.py"))
MODULES = sorted([*ROOT.glob("common/**/*.py"), *ROOT.glob("extras/*/*.py")])


def defined(module) -> set[type]:
    classes = [cls for cls in vars(module).values() if is_pydantic_dataclass(cls)]
    return {cls for cls in classes if cls.__module__ == module.__name__}


SHARED = (training, sampling, objectives, preference_flags, teacher_flags)
GROUPS = set().union(*map(defined, SHARED))
UNIONS = defined(groups) | defined(online)


def tree(path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


ALGORITHMS = [
    p.stem
    for p in SCRIPTS
    if any(isinstance(n, ast.ClassDef) and n.name == "Args" for n in tree(p).body)
]


def args_of(script: str) -> type[BaseArgs]:
    return importlib.import_module(script).Args


@pytest.fixture(params=ALGORITHMS)
def args_class(request) -> type[BaseArgs]:
    return args_of(request.param)


@dataclass
class Args(CorrectionArgs, LogKLArgs, OnlineArgs):
    """Flags composed as in a script."""


def refused(args_class: type, flags: dict) -> str | None:
    """Return the error of these flags on one line, or None."""
    try:
        args_class(**flags)
    except ValueError as error:
        return one_line(error)
    return None


# ---- groups ----


def own(cls: type) -> list[str]:
    flags = {field.name for field in dataclasses.fields(cls)}  # without PRESETS and others
    return [name for name in vars(cls).get("__annotations__", ()) if name in flags]


def test_groups_have_no_base_and_disjoint_flags_and_unions_add_none():
    assert all(cls.__bases__ == (object,) for cls in GROUPS)
    assert UNIONS == {BaseArgs, TrainArgs, SamplingArgs, OnlineArgs}
    assert [name for cls in UNIONS for name in own(cls)] == ["model"]  # another default for RL
    names = Counter(name for cls in GROUPS for name in own(cls))
    twice = [name for name, count in names.items() if count > 1]
    assert sorted(twice) == ["loss", "max_new_tokens", "reward", "top_k"]  # in no script both


def test_scripts_inherit_only_groups_and_unions(args_class):
    assert set(args_class.__mro__) <= {args_class, *GROUPS, *UNIONS, object}
    assert is_pydantic_dataclass(args_class)


@pytest.mark.parametrize("script", ALGORITHMS)
def test_flags_do_not_depend_on_the_order_of_bases(script):
    args_class = args_of(script)
    special = ("__annotations__", "__post_init__")
    body = {
        name: value
        for name, value in vars(args_class).items()
        if name in special or not name.startswith("__")
    }
    bases = args_class.__bases__
    rotated = [bases[i:] + bases[:i] for i in range(len(bases))]
    for bases in [*rotated, *(order[::-1] for order in rotated)]:
        permuted = dataclass(type("Args", bases, body | dict(__module__=script)))
        assert dataclasses.asdict(permuted()) == dataclasses.asdict(args_class())
        assert may_change(permuted(), {}) == may_change(args_class(), {})


def test_output_folder_has_the_name_of_the_script():
    assert [args_of(script)().output_dir for script in ALGORITHMS] == [
        f"runs/{script}" for script in ALGORITHMS
    ]


def bounds(hint) -> list:
    parts = typing.get_args(hint)
    return [part for part in parts if isinstance(part, FieldInfo)] + [
        bound for part in parts for bound in bounds(part)
    ]


def test_redeclared_default_keeps_its_bound(args_class):
    hints = typing.get_type_hints(args_class, include_extras=True)
    for cls in args_class.__bases__:
        shared = typing.get_type_hints(cls, include_extras=True)
        for name in set(own(args_class)) & set(shared):
            assert bool(bounds(hints[name])) == bool(bounds(shared[name])), name


def test_numeric_flags_have_bounds(args_class):
    without = set()
    hints = typing.get_type_hints(args_class, include_extras=True)
    for name, plain in typing.get_type_hints(args_class).items():
        numbers = {int, float} & {plain, *typing.get_args(plain)}
        checked = "AfterValidator" in repr(hints[name]) or bounds(hints[name])
        without |= {name} if numbers and not checked else set()
    assert without <= {"seed"}  # any integer


MAY_CHANGE = {
    "max_steps", "epochs", "pack_tokens", "save_every", "eval_every", "trace_every",
    "keep_last", "resume", "log", "keep_best", "shard_ranks", "offload",
    "activation_checkpointing", "compile", "context_ranks", "output_dir", "rollout_ranks",
    "reward_timeout", "reward_workers", "max_reward_errors", "environment_timeout",
    "eval_generate", "eval_samples", "eval_temperature", "dry_run", "share_prefix",
}  # fmt: skip


def test_resumed_run_may_change_only_the_listed_flags(args_class):
    flags = {field.name for field in dataclasses.fields(args_class)}
    expected = MAY_CHANGE & flags
    if args_class is args_of("eval"):
        expected |= {"prompts_per_step", "reward_model", "perplexity_model", "against"}
    if issubclass(args_class, training.GenerateArgs):
        expected |= {"reward", "max_new_tokens"}
    assert may_change(args_class(), {}) == expected | {"max_staleness"}


def test_max_staleness_may_change_unless_both_runs_depend_on_it():
    now = Args(rollout_ranks=1, max_staleness=2)
    assert "max_staleness" not in may_change(now, dict(rollout_ranks=1))
    assert "max_staleness" in may_change(now, dict(rollout_ranks=0))
    assert "max_staleness" in may_change(Args(), dict(rollout_ranks=1))


# ---- rules between flags ----


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(reward=()), "--reward needs at least one value"),
        (dict(reward_weights=(1.0, 2.0)), "--reward_weights has 2 values for 1 rewards"),
        (dict(environment="x"), "--environment and --reward environment need each other"),
        (dict(reward=("environment",)), "--environment and --reward environment need each other"),
        (dict(agent="x", tools="y"), "--agent excludes --environment and --tools; give one"),
        (dict(environment="x", tools="y"), "--tools and --environment exclude each other"),
        (dict(agent="x", prompt_format="plain"), "--agent x has no effect with --prompt_format"),
        (
            dict(agent="x", overlong="drop"),
            "--overlong drop has no effect with --a",
        ),
        (
            dict(max_turns=3),
            "--max_turns 3 has no effect without --environment, --tools or --agent",
        ),
        (dict(shots=2), "--shots 2 needs {shots} in --prompt_template"),
        (dict(shots=2, prompt_template="{shots}"), "--shots 2 needs --shot_template"),
        (dict(stop=("###", "")), "--stop is empty"),
        (
            dict(max_new_tokens=9, pack_tokens=9),
            "--max_new_tokens 9 leaves no room for a prompt in",
        ),
        (dict(minibatches=3), "--prompts_per_step 64 must be a multiple of --minibatches (3)"),
        (
            dict(correction_filter=(1.0, 0.5)),
            "--correction_filter 1 0.5: the lower bound must be below the upper one",
        ),
        (dict(lora_alpha=8.0), "--lora_alpha 8.0 has no effect with --lora_rank 0"),
        (dict(lora_rank=2, lora_targets=()), "--lora_targets needs at least one value"),
        (dict(columns=("a",)), "--columns a: expected name=value"),
        (dict(columns="a="), "--columns a=: expected name=value"),
        (dict(template_kwargs=("a=1", "a=2")), "--template_kwargs a=2: a is given twice"),
        (dict(dataset=("a", "a")), "--dataset a: a is given twice"),
        (dict(dataset=()), "--dataset needs at least one value"),
        (dict(dataset=("a:1", "b")), "--dataset a:1 b: only some have a weight; give all of them"),
        (dict(dataset="a:0"), "--dataset a:0: the weight must be greater than 0"),
        (dict(eval_dataset="=a"), "--eval_dataset =a: expected name=dataset"),
        (dict(eval_dataset=()), "--eval_dataset needs at least one value"),
    ],
)
def test_conflicting_flags_are_refused(changed, words):
    assert refused(Args, changed).startswith(words)


def other(kind, default):
    """Return another value of a flag than its default."""
    member = next(member for member in union_members(kind) if member is not type(None))
    if typing.get_origin(member) is typing.Literal:
        return next(choice for choice in typing.get_args(member) if choice != default)
    if typing.get_origin(member) is tuple:
        return (other(typing.get_args(member)[0], None), *(default or ()))
    return not default if member is bool else "x" if member is str else (default or 0) + 1


def met(kind, wanted):
    """Return a value of a flag that another flag needs."""
    if wanted is True or not wanted:
        return other(kind, None) if wanted else wanted
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    return (wanted,) if typing.get_origin(kind) is tuple else wanted


def unmet(kind, wanted, default):
    """Return a value of a flag with which another flag has no effect."""
    if wanted is True:
        return default and type(default)()
    if not wanted:
        return other(kind, wanted)
    choices = typing.get_args(
        typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
    )
    choices = [x for x in choices if isinstance(x, str) and x not in (wanted, *[*wanted])]
    value = next(iter(choices), "x")
    return (value,) if typing.get_origin(kind) is tuple else value


@pytest.mark.parametrize("script", ALGORITHMS)
def test_set_flag_is_refused_exactly_if_what_it_needs_is_missing(script):
    kinds = typing.get_type_hints(args_of(script))

    def refusal(flag, values) -> str:
        args = args_of(script)()
        values = {flag: other(kinds[flag], getattr(args, flag))} | values
        for name, value in values.items():
            object.__setattr__(args, name, value)
        try:
            check_needs(args)
        except ValueError as error:
            return str(error)
        return ""

    for flag, needs in needs_of(args_of(script)).items():
        known = [{n: w for n, w in need.values.items() if n in kinds} for need in needs]
        good = {n: met(kinds[n], w) for wanted in known for n, w in wanted.items()}
        assert refusal(flag, good) == ""
        for need, wanted in zip(needs, known, strict=True):
            default = args_of(script)
            bad = {n: unmet(kinds[n], w, getattr(default, n)) for n, w in wanted.items()}
            if wanted:
                assert "has no effect" in refusal(flag, good | bad), (flag, need.values)


@pytest.mark.parametrize("script", ALGORITHMS)
def test_every_choice_is_valid_or_refused_by_the_name_of_a_flag(script):
    """And another word is refused with the list of choices."""
    for flag, kind in typing.get_type_hints(args_of(script)).items():
        several = typing.get_origin(kind) is tuple
        members = typing.get_args(kind)[:1] if several else union_members(kind)
        for member in members:
            if (
                flag in args_of(script).__dataclass_fields__
                and typing.get_origin(member) is typing.Literal
            ):
                for choice in typing.get_args(member):
                    error = refused(args_of(script), {flag: choice})
                    assert error is None or error.startswith("--") and "must be '" not in error
                error = refused(args_of(script), {flag: "other"})
                assert error.startswith(f"--{flag} other must be '")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(loss=()), "--loss : name at least one loss, each of them once"),
        (dict(loss=("ipo", "ipo")), "--loss ipo ipo: name at least one loss, each of them once"),
        (dict(loss_weights=(1.0, 2.0)), "--loss_weights has 2 values for 1 losses"),
        (dict(loss=("exo_pair",)), "--loss exo_pair needs --label_smoothing above 0"),
        (
            dict(loss=("ipo", "orpo"), f_divergence="js"),
            "--f_divergence js has no effect with --lo",
        ),
    ],
)
def test_losses_on_pairs_refuse_conflicting_flags(changed, words):
    assert refused(args_of("dpo"), changed).startswith(words)


def test_script_without_default_reward_requires_no_reward():
    assert args_of("distill")(reward=()).reward == ()


# ---- ranks ----


@pytest.mark.parametrize(
    ("ranks", "changed", "words"),
    [
        (3, {}, r"--prompts_per_step 64 must be a multiple of the number of training ranks \(3\)"),
        (2, dict(prompts_per_step=6, minibatches=2), r"training ranks times --minibatches \(4\)"),
        (
            2,
            dict(rollout_ranks=2),
            r"--rollout_ranks 2 must be less than the number of ranks \(2\)",
        ),
        (2, dict(tensor_parallel_size=4), "must divide the 2 generating ranks"),
        (4, dict(tensor_parallel_size=2, rollout_ranks=3, prompts_per_step=1), "the 3 generating"),
        (4, dict(tensor_parallel_size=2, rollout_ranks=2), None),
        (4, dict(shard_ranks=3), "--shard_ranks 3 must divide the 4 training ranks"),
        (4, dict(shard_ranks=2, rollout_ranks=1, prompts_per_step=3), "divide the 3 training"),
        (7, dict(rollout_ranks=5), None),
    ],
)
def test_flags_that_do_not_fit_the_ranks_are_refused(ranks, changed, words):
    if words is None:
        return check_ranks(Args(**changed), ranks)
    with pytest.raises(ValueError, match=words):
        check_ranks(Args(**changed), ranks)


@pytest.mark.parametrize("script", [name for name in ALGORITHMS if name != "eval"])
def test_batches_that_do_not_divide_over_the_ranks_are_refused(script):
    with pytest.raises(
        ValueError, match=r"must be a multiple of the number of training ranks \(7\)"
    ):
        check_ranks(args_of(script)(), 7)


def test_constructor_reads_no_environment_variable(args_class, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    check_ranks(args_class(), 1)


# ---- every flag is documented, and read ----


def test_every_flag_is_documented(args_class):
    """The text stands under the field, or under the group's whose default the script replaces."""
    helps = texts(args_class)
    names = [field.name for field in dataclasses.fields(args_class)]
    assert [name for name in names if not helps.get(name, ("", ""))[1]] == []


def fields_read(path) -> set[str]:
    """Return the fields of `args.<name>` and `<anything>.args.<name>` outside the checks of
    flags, and those that properties of flags read."""
    module = tree(path)
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    checks = {id(node) for f in functions if f.name == "__post_init__" for node in ast.walk(f)}
    properties = [
        f for f in functions if [getattr(d, "id", None) for d in f.decorator_list] == ["property"]
    ]
    in_properties = {
        node.attr
        for f in properties
        for node in ast.walk(f)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "self"
    }
    return in_properties | {
        node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and id(node) not in checks
        and (
            getattr(node.value, "id", None) == "args" or getattr(node.value, "attr", None) == "args"
        )
    }


OF_EXTRAS = {"judge_prompt", "rubric", "tool_parser", "unsafe_code_execution"}  # read there


@pytest.mark.parametrize("script", ALGORITHMS)
def test_every_field_is_read(script):
    path, fields = (
        ROOT / f"{script}.py",
        {f.name for f in dataclasses.fields(importlib.import_module(script).Args)},
    )
    used = set().union(*map(fields_read, [*MODULES, path]))
    refused = {"missing_eos_penalty"} if script in ("distill", "self_distill") else set()
    of_extras = set() if (ROOT / "extras").is_dir() else OF_EXTRAS
    assert fields - used - of_extras == refused
