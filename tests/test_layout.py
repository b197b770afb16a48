"""Rules of the layout: packages of common/ form layers without cycles, extras/ enters only at named
seams. `test_sums` bounds the lines of common/, extras/, scripts, bench/ and tools/, the modules
that sft.py and grpo.py reach, and the flags. Whoever adds must delete."""

import ast
import dataclasses
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from helpers import ROOT
from scripts import SCRIPTS, all_flags

from common.config.groups import BaseArgs
from common.config.online import SamplingArgs
from common.objectives.importance import CorrectionArgs
from common.objectives.preference import READS

LAYERS = [
    "parallel",
    "config workers",
    "objectives packs",
    "model metrics",
    "text",
    "rewards",
    "rollout",
    "evaluate",
    "train",
]
# Modules of common/ that only a flag loads: they are imported in the functions that read the flag.
# What every run needs is imported at the top of a file.
DOORS = {
    "common.evaluate.generation": "--eval_generate",
    "common.model.lora": "--lora_rank",
    "common.model.tiny": "--model tiny",
    "common.parallel.context": "--context_ranks",
    "common.rewards.in_processes": "--reward math, --reward FILE:FUNCTION",
    "common.rewards.reward_model": "--reward model:PATH",
    "common.rollout.environments": "--environment",
    "common.rollout.remote": "--rollout_ranks",
    "common.rollout.thinking": "--thinking_budget",
    "common.rollout.transformers_engine": "--engine transformers",
    "common.text.filler": "--prompt_template",
    "common.text.folders": "--dataset FOLDER",
    "common.text.tables": "--dataset NAME",
}
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages.split()}
FILES = sorted([*SCRIPTS.values(), *ROOT.glob("common/**/*.py")])
PACKAGES = sorted(path for path in FILES if path.name == "__init__.py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {dotted(path) for path in FILES}


@cache
def imported(path: Path) -> set[str]:
    """Return the project's modules that a file imports, at its top or inside functions."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found & NAMES - {"common", dotted(path)}


def package(name: str) -> str:
    return name.split(".")[1]


def test_training_knows_neither_rollouts_nor_rewards():
    names = {name for path in ROOT.glob("common/train/*.py") for name in imported(path)}
    assert {package(name) for name in names if name.count(".") == 2}.isdisjoint(
        {"rollout", "rewards"}
    )


def test_package_imports_only_from_lower_layers():
    assert {package(dotted(path)) for path in PACKAGES if dotted(path) != "common"} == LEVEL.keys()
    edges = {
        (dotted(path), name)
        for path in FILES
        if dotted(path).count(".") == 2
        for name in imported(path)
    }
    wrong = {
        (one, other)
        for one, other in edges
        if other.count(".") == 2
        and package(one) != package(other)
        and LEVEL[package(one)] <= LEVEL[package(other)]
    }
    assert wrong == set()


def test_reading_order_lists_a_package_below_those_that_it_imports():
    page = (ROOT / "course/reading_order.md").read_text(encoding="utf-8")
    order = re.findall(r"^\| \[(\w+)\]\(\.\./common/\w+\) ", page, re.MULTILINE)
    assert set(order) == LEVEL.keys() and len(order) == len(LEVEL)
    assert [LEVEL[name] for name in order] == sorted(LEVEL.values())


def test_imports_have_no_cycle_and_no_script_is_imported():
    """Imports inside functions count, too."""
    graph = {dotted(path): imported(path) for path in FILES}
    TopologicalSorter(graph).prepare()
    scripts = {name for name in NAMES if "." not in name}
    assert {name: found & scripts for name, found in graph.items() if found & scripts} == {}


@cache
def seams(path: Path) -> list[str]:
    """Return the extras that a file imports within `with extra(...)`. Every other import of common/
    or extras/ inside a function gives an empty name, except that of a door (`DOORS`)."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.With) and "extra(" in ast.unparse(node.items[0].context_expr):
            found += [x.module.split(".")[1] for x in node.body if isinstance(x, ast.ImportFrom)]
    inside = [
        node
        for function in ast.walk(tree(path))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom)
        and node.module.split(".")[0] in ("common", "extras")
        and node.module not in DOORS
    ]
    return found + [""] * (len(set(map(id, inside))) - len(found))


def test_extras_enter_at_the_seams_alone():
    """The reading order lists them. Rewards, tasks and environments enter by names in tables."""
    found = {dotted(path): names for path in FILES if (names := seams(path))}
    page = (ROOT / "course/reading_order.md").read_text(encoding="utf-8")
    missing = [
        name for name in found if f"{name.removeprefix('common.').replace('.', '/')}.py" not in page
    ]
    assert missing == [] and "" not in sum(found.values(), [])
    at_the_top = {
        dotted(path)
        for path in FILES
        for node in tree(path).body
        if isinstance(node, ast.ImportFrom) and node.module.startswith("extras")
    }
    assert at_the_top == set()


def test_a_door_opens_by_its_flag_alone():
    """The reading order lists the doors, each as `module.py` with its flag."""
    page = " ".join((ROOT / "course/reading_order.md").read_text(encoding="utf-8").split())
    for door, flag in DOORS.items():
        assert f"{door.split('.')[-1]}.py (`{flag.split(',')[0]}`)" in page, door
    assert not DOORS.keys() & {name for script in ("sft", "grpo") for name in reached(script)}
    inside = {
        node.module
        for path in FILES
        for function in ast.walk(tree(path))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom)
    }
    assert DOORS.keys() <= inside, "a door that nothing opens"


IMPORTS = """
import sys

def slow(*names):
    return [name for name in names if name in sys.modules]

import common.rewards.math_reward, common.workers.pool
print(slow("torch", "sympy", "math_verify"), common.rewards.math_reward.math.columns)
from common.rewards.registry import load_reward
load_reward("gsm8k")
print([name for name in sys.modules if name.startswith("extras.") or name == "sympy"])
import {scripts}
print(slow({slow}))
"""
SLOW = (
    "vllm", "wandb", "datasets", "transformers", "matplotlib", "tensorboard", "sympy",
    "torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint",
)  # fmt: skip


def test_slow_libraries_are_imported_where_they_are_used():
    """--help waits for the imports of a script; torch.distributed's submodules take as long as
    torch itself. Processes of rewards need no torch, and only those of `math` its library."""
    scripts = ", ".join({name for name in NAMES if "." not in name} - {"common", "demo"})
    code = IMPORTS.format(scripts=scripts, slow=repr(SLOW)[1:-1])
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] ('answer',)", "[]", "[]"]


def lines(files: Iterable[Path]) -> int:
    """Return the number of lines of files, without tests."""
    files = [path for path in files if "tests" not in path.relative_to(ROOT).parts]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def reached(script: str) -> set[str]:
    """Return the modules of common/ that a script imports at its top, or that these import."""
    paths = {dotted(path): path for path in FILES}
    found: set[str] = set()
    todo = [script]
    while todo:
        nodes = [node for node in tree(paths[todo.pop()]).body if isinstance(node, ast.ImportFrom)]
        names = {node.module for node in nodes}
        names |= {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
        new = {name for name in names & paths.keys() if not is_package(paths[name])} - found
        found |= new
        todo += new
    return found


def is_package(path: Path) -> bool:
    return path.name == "__init__.py"


def test_text_is_read_without_the_module_of_policies():
    found = {name for name in NAMES if name.startswith("common.text.")}
    assert {name for name in found if "common.model.policy" in reached(name)} == set()


def test_changelog_sends_nobody_to_a_flag_that_is_gone():
    page = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    gone = {flag for row in rows for flag in re.findall(r"--(\w+)`", row[0])}
    use = {flag for row in rows for flag in re.findall(r"--(\w+)", row[1])}
    assert len(gone) > 20 and gone & all_flags() == set() and use - all_flags() == set()


def test_sums():
    """Tests, course/ and site/ have no bound."""
    sums = dict(
        common=(lines(ROOT.glob("common/**/*.py")), 16_500),
        sft_reaches=(len(reached("sft")), 40),
        grpo_reaches=(len(reached("grpo")), 62),
        extras=(lines(ROOT.glob("extras/**/*.py")), 8_500),
        scripts=(lines(SCRIPTS.values()), 4_200),
        bench=(lines(ROOT.glob("bench/**/*.py")), 2_700),
        tools=(lines(ROOT.glob("tools/*.py")), 1_500),
        flags=(len(all_flags()), 136),
        imports_in_functions=(sum(len(seams(path)) for path in FILES), 18),
    )
    assert {name: each for name, each in sums.items() if each[0] > each[1]} == {}


def test_pages_count_the_objectives_beside_dpo():
    for name in ("README.md", "dpo.py"):
        text = (ROOT / name).read_text(encoding="utf-8")
        (number,) = re.findall(r"(\d+) other objectives", text)
        assert int(number) == len(READS) - 1, name  # `sigmoid` is DPO's own


def test_tools_and_benches_are_programs_and_no_libraries():
    """Only their own tests import them, so that each of these folders can be deleted."""
    wrong = {
        str(path.relative_to(ROOT)): found
        for folder in ("common", "extras", "course", "site")
        for path in ROOT.glob(f"{folder}/**/*.py")
        if "tests" not in path.parts
        for found in re.findall(
            r"^\s*(?:from|import) (?:tools|bench)\b.*", path.read_text("utf-8"), re.M
        )
    }
    assert wrong == {}


def test_no_loop_hides_a_condition_behind_its_iterable():
    """`for x in xs if c else ()` is an `if` that a reader overlooks."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("common", "extras")
        for path in ROOT.glob(f"{folder}/**/*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.For) and isinstance(node.iter, ast.IfExp)
        and isinstance(node.iter.orelse, ast.Tuple | ast.List) and not node.iter.orelse.elts
    ]  # fmt: skip
    assert found == []


def test_clip_is_the_same_in_every_script():
    found = {
        path.name: ast.unparse(node)
        for path in SCRIPTS.values()
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef) and node.name == "clip"
    }
    assert len(found) == 5 and found == dict.fromkeys(found, found["grpo.py"])


def test_objectives_take_tensors_and_numbers():
    wrong = set()
    for path in ROOT.glob("common/objectives/*.py"):
        for function in (
            node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)
        ):
            arguments = function.args
            names = {
                a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            }
            if names & {"args", "meter", "model", "policy"} or arguments.vararg:
                wrong.add(f"{dotted(path)}.{function.name}")
    assert wrong == set()


# ---- flags ----

READERS = [path for path in FILES if not path.is_relative_to(ROOT / "common" / "config")]
READERS += [path for path in ROOT.glob("extras/*/*.py") if path.name != "__init__.py"]
# Where a script's own flags are read that no group declares.
OWN_FLAGS = {
    "common.model.hub.fit_max_length", "common.model.policy.build_on_meta",
    "common.model.policy.load_policy", "common.model.policy.load_reference",
    "common.text.load.encode", "common.train.overview.describe_rollouts",
    "extras.plan.plan.build", "extras.plan.plan.dry_run", "extras.plan.plan.rewards_of_rows",
}  # fmt: skip


def names_of(group: type) -> set[str]:
    return {field.name for field in dataclasses.fields(group)} | {*dir(group)}


def functions_with_flags() -> Iterator[tuple[str, str, ast.AST, type]]:
    """Yield for each function with a parameter of flags its name, the parameter, the function and
    its type."""
    for path in READERS:
        for function in ast.walk(tree(path)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for argument in [*function.args.args, *function.args.kwonlyargs]:
                kind = argument.annotation and ast.unparse(argument.annotation).strip("'\"")
                if (kind or "").split(" | ")[0].endswith("Args"):
                    group = vars(importlib.import_module(dotted(path))).get(kind.split(" | ")[0])
                    if group is not None:  # else its import is for a type checker alone
                        group = getattr(group, "__bound__", group)  # of a type variable
                        yield f"{dotted(path)}.{function.name}", argument.arg, function, group


def test_function_reads_only_flags_of_the_group_that_it_takes():
    lacking = set()
    for name, parameter, function, group in functions_with_flags():
        read = {
            node.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == parameter
        }
        if read - names_of(group):
            lacking.add(name)
    assert lacking <= OWN_FLAGS


def test_no_flag_is_asked_for_that_a_script_may_lack():
    """A script hands a flag that only it has to the function that reads it."""
    asked = set()
    for path in READERS:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name):
                is_asked = node.func.id == "hasattr" or node.func.id == "getattr" and node.args[2:]
                if is_asked and ast.unparse(node.args[0]) in ("args", "self.args"):
                    asked.add(f"{dotted(path)}: {ast.unparse(node)}")
    assert asked == set()
    constants = {
        name
        for group in (BaseArgs, SamplingArgs, CorrectionArgs)
        for name, value in vars(group).items()
        if name not in group.__dataclass_fields__ and name[0] != "_" and not name.isupper()
        and not isinstance(value, property) and not callable(value)
    }  # fmt: skip
    assert constants == {"share_prefix", "offload"}  # `load_policy` reads them in every script


def test_nothing_is_set_on_a_tokenizer():
    """The exception is the chat template, which transformers reads from there."""
    found = {
        f"{dotted(path)}: {ast.unparse(target)}"
        for path in READERS
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute)
        and re.search(r"(^|\.)\w*tokenizer$", ast.unparse(target.value))
    }
    assert found == {"common.text.chat: tokenizer.chat_template"}


def test_page_of_recipes_names_every_recipe():
    page = (ROOT / "configs/README.md").read_text(encoding="utf-8")
    named = {name for line in page.splitlines() if line[:3] == "| `"
             for name in re.findall(r"`(\w[\w.]+)`", line.split("|")[1])}  # fmt: skip
    assert named == {path.stem for path in ROOT.glob("configs/*.yaml")}
