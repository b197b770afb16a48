"""Groups of flags that scripts share, and the rules between flags."""

import dataclasses
import importlib
import re
import typing
from itertools import chain

import pytest
from helpers import ROOT
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from scripts import ALGORITHMS, all_flags
from torch.distributed.run import get_args_parser

from common.config.flags import as_tuple, needs_of
from common.config.groups import BaseArgs, GenerateArgs, check_ranks, may_change
from common.config.online import OnlineArgs
from common.config.parse import one_line, texts
from common.objectives.importance import CorrectionArgs
from common.objectives.kl import LogKLArgs


def args_of(script: str) -> type[BaseArgs]:
    return importlib.import_module(script).Args


@pytest.fixture(params=ALGORITHMS)
def args_class(request) -> type[BaseArgs]:
    return args_of(request.param)


@dataclass
class Args(CorrectionArgs, LogKLArgs, OnlineArgs):
    """Flags composed as in a script."""


def test_output_folder_has_the_name_of_the_script():
    for script in ALGORITHMS:
        assert args_of(script)().output_dir == f"runs/{script}"


def is_bounded(hint) -> bool:
    parts = typing.get_args(hint)
    return any(isinstance(part, FieldInfo) or is_bounded(part) for part in parts)


def test_numeric_flags_have_bounds(args_class):
    """Also where a script declares a flag anew with another default."""
    plain = typing.get_type_hints(args_class)
    hints = typing.get_type_hints(args_class, include_extras=True)
    for name in (field.name for field in dataclasses.fields(args_class)):
        types = {plain[name], *typing.get_args(plain[name])}
        if {int, float} & types and name != "seed":  # any integer
            assert "AfterValidator" in repr(hints[name]) or is_bounded(hints[name]), name


MAY_CHANGE = {
    "max_steps", "epochs", "pack_tokens", "save_every", "save_minutes", "eval_every",
    "trace_every", "keep_last", "resume", "log_to", "keep_best", "shard_ranks", "offload",
    "activation_checkpointing", "compile", "context_ranks", "output_dir", "rollout_ranks",
    "reward_timeout", "reward_workers", "max_reward_errors", "environment_timeout",
    "eval_generate", "eval_samples", "eval_temperature", "dry_run", "share_prefix",
}  # fmt: skip


def test_resumed_run_may_change_only_the_listed_flags(args_class):
    expected = MAY_CHANGE & {field.name for field in dataclasses.fields(args_class)}
    if args_class is args_of("eval"):
        expected |= {"prompts_per_step", "reward_model", "perplexity_model", "against"}
    if issubclass(args_class, GenerateArgs):
        expected |= {"reward", "max_new_tokens"}
    assert may_change(args_class(), {}) == expected | {"max_staleness"}


def test_max_staleness_may_change_unless_both_runs_depend_on_it():
    now = Args(rollout_ranks=1, max_staleness=2)
    assert "max_staleness" not in may_change(now, dict(rollout_ranks=1))
    assert "max_staleness" in may_change(now, dict(rollout_ranks=0))
    assert "max_staleness" in may_change(Args(), dict(rollout_ranks=1))


# ---- rules between flags; those of one script are in tests/test_bad_input.py ----


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(reward=()), "--reward needs at least one value"),
        (dict(reward_weights=(1.0, 2.0)), "--reward_weights has 2 values for 1 rewards"),
        (dict(environment="x"), "--environment and --reward environment need each other"),
        (dict(reward=("environment",)), "--environment and --reward environment need each other"),
        (dict(agent="x", tools="y"), "--agent excludes --environment and --tools; give one"),
        (dict(environment="x", tools="y"), "--tools and --environment exclude each other"),
        (dict(agent="x", overlong="drop"), "--overlong drop has no effect with --agent x"),
        (dict(stop=("###", "")), "--stop is empty"),
        (dict(max_new_tokens=9, pack_tokens=9), "--max_new_tokens 9 leaves no room for a prompt"),
        (dict(minibatches=3), "--prompts_per_step 64 must be a multiple of --minibatches (3)"),
        (dict(lora_rank=2, lora_targets=()), "--lora_targets needs at least one value"),
        (dict(columns=("a",)), "--columns a: expected name=value"),
        (dict(template_kwargs=("a=1", "a=2")), "--template_kwargs a=2: a is given twice"),
        (dict(dataset=()), "--dataset needs at least one value"),
        (dict(dataset=("a", "a")), "--dataset a: a is given twice"),
        (dict(dataset=("a:1", "b")), "--dataset a:1 b: only some have a weight; give all"),
        (dict(dataset=("a:0", "b:1")), "--dataset a:0: the weight must be greater than 0"),
        (dict(dataset="a:inf"), "--dataset a:inf: the weight must be greater than 0"),
        (dict(eval_dataset=()), "--eval_dataset needs at least one value"),
        (dict(eval_dataset=("a", "a")), "--eval_dataset a: a is given twice"),
        (dict(eval_dataset=("x=a", "x=b")), "--eval_dataset x=b: x is given twice"),
        (dict(eval_dataset=("a", "a=b")), "--eval_dataset a=b: a is given twice"),
        (dict(eval_dataset="x="), "--eval_dataset x=: expected name=dataset"),
        (dict(eval_dataset="=a"), "--eval_dataset =a: expected name=dataset"),
        (dict(keep_best="loss", eval_every=0), "--keep_best loss has no effect with --eval_every"),
        (dict(loss=()), "--loss : name at least one loss, each of them once"),
        (dict(loss=("ipo", "ipo")), "--loss ipo ipo: name at least one loss, each of them once"),
        (dict(loss_weights=(1.0, 2.0)), "--loss_weights has 2 values for 1 losses"),
        (dict(loss=("exo_pair",)), "--loss exo_pair needs --label_smoothing above 0"),
        (dict(loss="orpo", f_divergence="js"), "--f_divergence js has no effect with --loss orpo"),
    ],
)
def test_conflicting_flags_are_refused(changed, words):
    args_class = args_of("dpo") if {"loss", "loss_weights"} & {*changed} else Args
    with pytest.raises(ValueError) as error:
        args_class(**changed)
    assert one_line(error.value).startswith(words)


def test_flags_need_flags_and_choices_that_exist(args_class):
    """With a misspelled one a flag would have an effect always, or never."""
    known = all_flags()
    kinds = typing.get_type_hints(args_class)
    for flag in kinds:
        needs = needs_of(args_class, flag)
        for name, wanted in chain(*(need.values.items() for need in needs)):
            assert name in known, flag
            choices = re.findall(r"Literal\[(.*?)\]", str(kinds.get(name)))
            words = [word for word in as_tuple(wanted) or () if isinstance(word, str)]
            assert not choices or all(f"'{word}'" in choices[0] for word in words), flag


# ---- ranks ----


@pytest.mark.parametrize(
    ("ranks", "changed", "words"),
    [
        (3, {}, r"--prompts_per_step 64 must be a multiple of the number of training ranks \(3\)"),
        (2, dict(prompts_per_step=6, minibatches=2), r"training ranks times --minibatches \(4\)"),
        (2, dict(rollout_ranks=2), r"--rollout_ranks 2 must be less than the number of ranks"),
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


# ---- every flag is documented, and read ----


def test_every_flag_is_documented(args_class):
    """The text stands under the field, or under the group's whose default the script replaces."""
    helps = texts(args_class)
    names = [field.name for field in dataclasses.fields(args_class)]
    assert [name for name in names if not helps.get(name, ("", ""))[1]] == []


OF_EXTRAS = dict(  # read there
    judge_prompt="judges", rubric="judges", tool_parser="tools", unsafe_code_execution="code"
)


@pytest.mark.parametrize("script", ALGORITHMS)
def test_every_flag_is_read(script):
    files = [ROOT / f"{script}.py", *ROOT.glob("common/**/*.py"), *ROOT.glob("extras/*/*.py")]
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    read = {*re.findall(r"(?:(?<=args\.)|(?<=\bself\.))\w+", sources)}
    flags = {field.name for field in dataclasses.fields(args_of(script))}
    assert flags - read <= {x for x, e in OF_EXTRAS.items() if not (ROOT / "extras" / e).is_dir()}


def test_torchrun_leaves_every_flag_to_the_script():
    """Python 3.11's argparse ends torchrun with `ambiguous option` if a flag of the script begins
    two of torchrun's own."""
    torchrun = get_args_parser()
    for name in all_flags():
        given = torchrun.parse_args(["grpo.py", f"--{name}", "x"])
        assert given.training_script_args == [f"--{name}", "x"]
