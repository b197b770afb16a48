"""The flags that scripts share; and what the files of the project promise about flags and size."""

import ast
import dataclasses
import importlib
import typing
from collections import Counter
from dataclasses import dataclass

import pytest
from helpers import ROOT

from common.config import groups
from common.config.flags import BaseArgs, Bound, may_change
from common.config.groups import OnlineArgs, PreferenceArgs, SamplingArgs, TrainArgs
from common.config.parse import GROUPS
from common.data import streaming
from common.data.streaming import StreamArgs
from common.model import lora
from common.model.lora import LoRAArgs
from common.objectives import importance, shaping
from common.objectives.importance import CorrectionArgs
from common.objectives.shaping import RewardArgs

SCRIPTS = sorted(ROOT.glob("*.py"))
MODULES = sorted(ROOT.glob("common/**/*.py"))
GROUPED = [groups, importance, lora, shaping, streaming]  # the modules with groups of flags
SHARED = {
    cls for module in GROUPED for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, BaseArgs)
}


def tree(path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


ALGORITHMS = [p.stem for p in SCRIPTS if any(isinstance(n, ast.ClassDef) and n.name == "Args" for n in tree(p).body)]


@pytest.fixture(params=ALGORITHMS)
def args_class(request) -> type[BaseArgs]:
    return importlib.import_module(request.param).Args


@dataclass
class Args(CorrectionArgs, RewardArgs, OnlineArgs, SamplingArgs, LoRAArgs, TrainArgs):
    """As a script composes them."""


# ---- groups ----


def own(cls: type) -> list[str]:
    flags = {field.name for field in dataclasses.fields(cls)}  # not TINY_DEFAULTS, and what else belongs to the class
    return [name for name in cls.__annotations__ if name in flags]


def test_groups_inherit_the_base_alone_and_share_no_flag():
    of_training = {TrainArgs, LoRAArgs, OnlineArgs, CorrectionArgs, RewardArgs, PreferenceArgs, StreamArgs}
    assert {BaseArgs, SamplingArgs} | of_training == SHARED
    assert all(cls.__bases__ == (BaseArgs,) for cls in SHARED if cls is not BaseArgs)
    names = Counter(name for cls in SHARED for name in own(cls))
    assert [name for name, count in names.items() if count > 1] == ["beta"]  # of the two no script takes both


def test_scripts_stand_at_most_on_the_third_level(args_class):
    assert args_class.__bases__ == (BaseArgs,) or {base.__bases__ for base in args_class.__bases__} == {(BaseArgs,)}
    assert set(args_class.__mro__) <= {args_class, *SHARED, object}
    assert max(Counter(name for cls in args_class.__bases__ for name in own(cls)).values()) == 1
    order = args_class.__mro__
    if OnlineArgs in order:  # it says which of the ranks generate
        assert order.index(OnlineArgs) < order.index(SamplingArgs)


def test_every_shared_flag_is_in_one_group_of_the_help():
    grouped = Counter(name for names in GROUPS.values() for name in names)
    assert set(grouped.values()) == {1}
    assert set(grouped) == {name for cls in SHARED for name in own(cls)}
    assert list(GROUPS) == ["model", "data", "sampling", "objective", "optimisation", "run"]


def bounds(hint) -> list[Bound]:
    parts = typing.get_args(hint)
    return [part for part in parts if isinstance(part, Bound)] + [bound for part in parts for bound in bounds(part)]


def test_a_default_declared_anew_keeps_a_bound(args_class):
    hints = typing.get_type_hints(args_class, include_extras=True)
    for cls in args_class.__bases__:
        shared = typing.get_type_hints(cls, include_extras=True)
        for name in set(own(args_class)) & set(shared):
            assert bool(bounds(hints[name])) == bool(bounds(shared[name])), name


def test_numbers_have_bounds():
    without = set()
    for cls in SHARED:
        hints, plain = typing.get_type_hints(cls, include_extras=True), typing.get_type_hints(cls)
        without |= {name for name in hints if plain[name] in (int, float) and not bounds(hints[name])}
    assert without == {"seed", "f_alpha", "simpo_gamma"}


def test_what_may_change_between_a_run_and_its_continuation():
    assert may_change(Args) == {
        "max_steps", "epochs", "pack_tokens", "save_every", "eval_every", "log_every", "keep_last", "resume", "log",
        "keep_best", "early_stop", "nccl_timeout", "check_every", "shard_ranks", "offload",
        "activation_checkpointing", "compile", "context_ranks", "output_dir", "rollout_ranks", "reward_timeout",
        "reward_workers", "max_reward_errors", "environment_timeout", "partial_rollouts",
    }  # fmt: skip


def test_what_may_change_between_two_runs_of_eval():
    own_flags = {"prompts_per_batch", "ks", "domain_column", "bootstrap_samples", "reward_model", "perplexity_model",
                 "against"}  # fmt: skip
    assert may_change(importlib.import_module("eval").Args) - may_change(Args) == own_flags


# ---- rules between flags ----


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(lr=-1), "--lr -1 must be greater than 0"),
        (dict(max_grad_norm=float("inf")), "--max_grad_norm inf must be a finite number"),
        (dict(max_steps=0), "--max_steps 0 must be greater than 0"),
        (dict(warmup_steps=-1), "--warmup_steps -1 must not be negative"),
        (dict(adam_beta1=1.0), r"--adam_beta1 1.0 must be in \[0, 1\)"),
        (dict(reward=()), "--reward needs at least one name"),
        (dict(reward_weights=(1.0, 2.0)), "--reward_weights has 2 values for 1 rewards"),
        (dict(reward_weights=(float("nan"),)), "--reward_weights nan must be a finite number"),
        (dict(environment="calculator"), "--environment and --reward environment, what it gives, belong together"),
        (dict(reward=("environment",)), "--environment and --reward environment, what it gives, belong together"),
        (dict(environment="x", reward=("environment",), prompt_template="y"), "--prompt_template y would not be read"),
        (dict(max_turns=3), "--max_turns 3 would not be read: there is no --environment"),
        (dict(environment_timeout=3.0), "--environment_timeout 3.0 would not be read: there is no --environment"),
        (dict(tensor_parallel_size=2, engine="transformers"), "--tensor_parallel_size needs --engine vllm"),
        (dict(max_new_tokens=100, pack_tokens=100), "--max_new_tokens 100 leaves no prompt in --pack_tokens 100"),
        (dict(gpu_memory_utilization=1.0), r"--gpu_memory_utilization 1.0 must be in \(0, 1\)"),
        (dict(minibatches=3), r"--prompts_per_step 64 is not a multiple of --minibatches \(3\)"),
        (dict(max_staleness=2), "--max_staleness 2 would not be read: --rollout_ranks is 0 and --oversample 1"),
        (dict(partial_rollouts=False), "--partial_rollouts False would not be read: --rollout_ranks is 0"),
        (dict(oversample=2.5), r"--oversample 2.5 must be in \[1, 2\]"),
        (dict(oversample=1.5, max_staleness=0), "--oversample 1.5 needs --max_staleness 1 or more, for what a step"),
        (dict(oversample=1.5, rollout_ranks=1), "--oversample 1.5 needs --max_staleness 2 or more, or rollout ranks"),
        (dict(rollout_ranks=-1), "--rollout_ranks -1 must not be negative"),
        (dict(max_logprob_difference=0.0), "--max_logprob_difference 0.0 must be greater than 0"),
        (dict(correction_low=2.0), "--correction_low and --correction_high: the bounds 2 and 2 cross"),
        (dict(correction_filter=(1.0, 0.5)), "--correction_filter: the bounds 1 and 0.5 cross"),
        (dict(correction_filter=(-1.0, 0.5)), "--correction_filter -1.0 must not be negative"),
        (dict(correction="none", correction_high=3.0), "--correction_high 3.0 would not be read: --correction is none"),
        (dict(kl_target=0.1), "--kl_target adapts --beta: start it above 0"),
        (dict(beta=0.1, kl_horizon=3), "--kl_horizon 3 would not be read: --kl_target is 0"),
        (dict(lora_rank=-1), "--lora_rank -1 must not be negative"),
        (dict(lora_alpha=8.0), "--lora_alpha 8.0 would not be read: --lora_rank is 0"),
        (dict(adapter="there"), "--adapter there would not be read: --lora_rank is 0"),
        (dict(lora_rank=2, lora_targets=()), "--lora_targets needs at least one name"),
        (dict(reward_scale=0.0), "--reward_scale 0.0 must be greater than 0"),
    ],
)
def test_flags_that_do_not_go_together(changed, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        Args(**changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(loss=("kto",)), "--loss kto: it is a script of its own, kto.py"),
        (dict(loss=("sigmoid", "dop")), "--loss dop: unknown; there are sigmoid, robust"),
        (dict(loss=()), "--loss needs at least one name, and each once; here: None"),
        (dict(loss=("ipo", "ipo")), "--loss needs at least one name, and each once; here: ipo ipo"),
        (dict(loss_weights=(1.0, 2.0)), "--loss_weights has 2 values for 1 losses"),
        (dict(loss_weights=(-1.0,)), "--loss_weights -1.0 must not be negative"),
        (dict(sft_weight=-1.0), "--sft_weight -1.0 must not be negative"),
        (dict(beta=0.0), "--beta 0.0 must be greater than 0"),
        (dict(label_smoothing=0.5), r"--label_smoothing 0.5 must be in \[0, 0.5\)"),
        (dict(loss=("discopop",), discopop_tau=2.0), r"--discopop_tau 2.0 must be in \(0, 1\]"),
        (dict(loss=("exo_pair",)), "--loss exo_pair needs --label_smoothing above 0"),
        (dict(loss=("ipo",), label_smoothing=0.1), "--label_smoothing 0.1 would not be read: --loss is ipo"),
        (dict(loss=("ipo",), f_divergence="js"), "--f_divergence js would not be read: --loss is ipo"),
        (dict(loss=("ipo", "hinge"), label_smoothing=0.1), "--label_smoothing 0.1 would .* --loss is ipo hinge"),
        (dict(length_normalize=False), "--length_normalize False would not be read: --loss is sigmoid"),
        (dict(simpo_gamma=1.0), "--simpo_gamma 1.0 would not be read: --loss is sigmoid"),
        (dict(discopop_tau=0.1), "--discopop_tau 0.1 would not be read: --loss is sigmoid"),
        (dict(f_alpha=0.1), "--f_alpha 0.1 would not be read: --f_divergence is reverse_kl"),
        (dict(sft_length_normalize=False), "--sft_length_normalize False would not be read: --sft_weight is 0"),
        (dict(loss=("sigmoid", "simpo"), simpo_gamma=1.0, label_smoothing=0.1), None),
        (dict(loss=("ipo",), length_normalize=False), None),
        (dict(loss=("hinge",), f_divergence="alpha", f_alpha=0.1), None),
    ],
)
def test_objectives_of_pairs(changed, words):
    if words is None:
        PreferenceArgs(**changed)
        return
    with pytest.raises(ValueError, match=f"^{words}"):
        PreferenceArgs(**changed)


# ---- ranks ----


@pytest.mark.parametrize(
    ("ranks", "changed", "words"),
    [
        (3, {}, r"--prompts_per_step 64 is not a multiple of the number of ranks that train \(3\)"),
        (2, dict(prompts_per_step=6, minibatches=2), r"of the ranks that train times --minibatches \(4\)"),
        (2, dict(rollout_ranks=2), "--rollout_ranks 2: of 2 ranks 0 to 1 may only generate"),
        (2, dict(tensor_parallel_size=4), "--tensor_parallel_size 4 does not divide the 2 ranks that generate"),
        (4, dict(tensor_parallel_size=2, rollout_ranks=3, prompts_per_step=1), "does not divide the 3 ranks that gene"),
        (4, dict(tensor_parallel_size=2, rollout_ranks=2), None),
        (4, dict(shard_ranks=3), "--shard_ranks 3 does not divide the 4 ranks that train"),
        (4, dict(shard_ranks=2, rollout_ranks=2), None),
        (4, dict(shard_ranks=2, rollout_ranks=1, prompts_per_step=3), "--shard_ranks 2 does not divide the 3 ranks"),
        (7, dict(rollout_ranks=5), None),
        (4, dict(minibatches=16), None),
    ],
)
def test_every_group_checks_the_ranks(ranks, changed, words):
    if words is None:
        Args(**changed).check_ranks(ranks)
        return
    with pytest.raises(ValueError, match=words):
        Args(**changed).check_ranks(ranks)


@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_batches_must_split_over_the_ranks(script):
    with pytest.raises(ValueError, match="64 is not a multiple of the number of ranks.*3"):
        importlib.import_module(script).Args().check_ranks(3)


@pytest.mark.parametrize("cls", [Args, *sorted(SHARED, key=str)])
def test_building_shared_flags_reads_no_environment(cls, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert cls() == cls()
    cls().check_ranks(1)


def test_building_flags_reads_no_environment(args_class, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    args_class().check_ranks(1)


def test_groups_without_rules_about_ranks_pass_them_on():
    @dataclass
    class Counting(BaseArgs):
        def check_ranks(self, ranks: int) -> None:
            raise ValueError(f"reached with {ranks}")

    for cls in SHARED - {BaseArgs}:
        both = dataclass(type("Both", (cls, Counting), {}))
        with pytest.raises(ValueError, match="reached with 2"):
            both().check_ranks(2)


def test_groups_pass_on_what_they_refuse():
    @dataclass
    class Refusing(BaseArgs):
        def __post_init__(self) -> None:
            super().__post_init__()
            raise ValueError("reached")

    for cls in SHARED - {BaseArgs}:
        with pytest.raises(ValueError, match="^reached"):
            dataclass(type("Both", (cls, Refusing), {}))()


# ---- promises ----


def documented(path, class_name: str, inherited: set[str] = frozenset()) -> None:
    """Every field has a text under it; one that is inherited keeps the text of its group."""
    (definition,) = [n for n in tree(path).body if isinstance(n, ast.ClassDef) and n.name == class_name]
    for field, after in zip(definition.body, definition.body[1:] + [None], strict=True):
        assert not isinstance(field, ast.Assign), f"{path.name}: {class_name} has an attribute without a type"
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.dump(field.annotation):
            text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
            has_text = isinstance(text, str) and text.strip() or field.target.id in inherited
            assert has_text, f"{path.name}: {class_name}.{field.target.id} has no text"


def test_every_shared_field_is_documented():
    for cls in SHARED:
        documented(ROOT / (cls.__module__.replace(".", "/") + ".py"), cls.__name__)


@pytest.mark.parametrize("script", ALGORITHMS)
def test_every_field_is_documented(script):
    groups = importlib.import_module(script).Args.__mro__[1:-1]
    documented(ROOT / f"{script}.py", "Args", {name for cls in groups for name in own(cls)})


def test_the_scripts_are_found():
    assert {*LINES} - {"demo"} == set(ALGORITHMS)


def fields_read(path) -> set[str]:
    """`args.<name>` and `<anything>.args.<name>`, outside of the checks of flags."""
    module = tree(path)
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    checks = {id(node) for f in functions if f.name in ("__post_init__", "check_ranks") for node in ast.walk(f)}
    return {
        node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and id(node) not in checks
        and (getattr(node.value, "id", None) == "args" or getattr(node.value, "attr", None) == "args")
    }


@pytest.mark.parametrize("script", ALGORITHMS)
def test_every_field_is_read(script):
    path, fields = ROOT / f"{script}.py", {f.name for f in dataclasses.fields(importlib.import_module(script).Args)}
    used = set().union(*map(fields_read, [*MODULES, path]))
    assert fields - used == set()


LINES = dict(sft=200, grpo=330, dapo=330, reinforce=330, ppo=330, rloo=300, online_dpo=300, bok=300, kto=300, dpo=300,
             rm=330, distill=330, eval=330, demo=100)  # fmt: skip


@pytest.mark.parametrize("path", [*SCRIPTS, *MODULES], ids=lambda path: path.name)
def test_files_stay_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LINES[path.stem] if path in SCRIPTS else lines < 300
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            assert node.end_lineno - node.lineno + 1 <= 155


def imported(path) -> set[str]:
    """The project's modules that a file imports, as dotted names, at its top or inside of functions. An import for
    types alone is none."""
    for_types = {
        id(inner)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree(path)):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


def dotted(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_imports_make_no_circle():
    """Not even one that an import inside of a function hides: whoever reads a file can read those below it first."""
    below = {dotted(path): imported(path) for path in [*SCRIPTS, *MODULES]}
    below = {name: {other for other in names if other in below} - {name} for name, names in below.items()}
    done: set[str] = set()
    while ready := [name for name, names in below.items() if name not in done and names <= done]:
        done.update(ready)
    assert below.keys() - done == set()
    scripts = {path.stem for path in SCRIPTS}
    assert {name: names & scripts for name, names in below.items() if names & scripts} == {}  # a script is the top


@pytest.mark.parametrize("module", ["policy", "preference", "advantages", "importance", "shaping"])
def test_objectives_take_tensors_and_numbers(module):
    """No flags, no meter, no model: a reader sees what goes in."""
    body = ast.walk(tree(ROOT / f"common/objectives/{module}.py"))
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    assert functions
    for function in functions:
        arguments = function.args
        names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        assert not names & {"args", "meter", "model", "policy"} and arguments.vararg is None, function.name
    unknown = {
        "common.config.groups",
        "common.config.parse",
        "common.metrics.logger",
        "common.model.policy",
        "common.train.run",
    }
    assert not imported(ROOT / f"common/objectives/{module}.py") & unknown
