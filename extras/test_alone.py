"""Any extra can be deleted: the others and all scripts do not need it, and its flags answer in one
line."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers import ROOT

import extras
from bench.models import checkpoint

EXTRAS = sorted(path.name for path in Path(__file__).parent.iterdir() if (path / "tests").is_dir())
SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
# Extras that need another one, as course/reading_order.md says: modules that import it.
USES = dict(
    code={"extras.tools.python_tool"},
    tools={"extras.agents.agents"},
    images={"extras.trace.pictures", "extras.trace.replay", "extras.trace.view"},
)


def forget() -> dict[str, ModuleType]:
    """Remove the extras and the scripts from the imported modules, and return them."""
    names = [name for name in sys.modules if name.startswith("extras.") or name in SCRIPTS]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def without():
    """`without("images")` makes imports fail as if the folder were not there."""
    before = forget()

    def delete(name: str) -> None:
        vars(extras).pop(name, None)
        sys.modules[f"extras.{name}"] = None

    yield delete
    forget()
    sys.modules.update(before)
    for name, module in before.items():  # imports have set the new ones
        parent, _, child = name.rpartition(".")
        if parent and module is not None:
            setattr(sys.modules[parent], child, module)


def modules(name: str) -> list[str]:
    files = Path(__file__).parent.joinpath(name).rglob("*.py")
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in files]
    return [".".join(each).removesuffix(".__init__") for each in parts if "tests" not in each]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTRAS)
def test_the_others_and_the_scripts_do_not_need_an_extra(name, without, main, small, tmp_path):
    without(name)
    needs = USES.get(name, set())
    for other in EXTRAS:
        for module in modules(other) if other != name else ():
            if module not in needs and not module.startswith("extras.code.sandbox"):
                importlib.import_module(module)
    for script in SCRIPTS:
        importlib.import_module(script)
    few = ("--max_steps", 1, "--eval_every", 0, "--output_dir")
    main("sft", *small, "--batch_size", 2, *few, tmp_path / "sft")
    online = ("--prompts_per_step", 2, "--samples_per_prompt", 2, "--max_new_tokens", 4)
    main("grpo", *small, "--engine", "transformers", *online, *few, tmp_path / "grpo")


AGENT = "async def run(row, base_url, api_key):\n    pass\n"
GRPO = ("grpo", "--max_new_tokens", 4)
CASES = [
    ("images", "--vision frozen", ("sft", "--model", "tiny-sft", "--vision", "frozen")),
    ("images", "--model tiny-images", ("sft", "--model", "tiny-images")),
    ("images", "--dataset squares", ("sft", "--dataset", "squares")),
    ("tools", "--tools python", (*GRPO, "--tools", "python", "--prompt_format", "chat")),
    ("agents", "--agent .*agent.py:run",
     (*GRPO, "--agent", "agent.py:run", "--prompt_format", "chat")),
    ("tools", "--agent .*agent.py:run",
     (*GRPO, "--agent", "agent.py:run", "--prompt_format", "chat")),
    ("code", "--tools python",
     (*GRPO, "--tools", "python", "--chat_template", "configs/templates/tiny_tools.jinja",
      "--prompt_format", "chat")),
    ("judges", "--reward judge:tiny-sft",
     (*GRPO, "--reward", "judge:tiny-sft", "--rubric", "It is right.", "--on_bad_row", "skip")),
    ("code", "--reward code", (*GRPO, "--reward", "code")),
    ("graders", "--reward countdown", (*GRPO, "--reward", "countdown")),
    ("streaming", "--streaming",
     ("sft", "--streaming", "true", "--eval_every", 0, "--max_steps", 1)),
    ("plan", "--dry_run", ("sft", "--dry_run", "true")),
    ("trace", "--trace_every", ("sft", "--trace_every", 1, "--eval_every", 0)),
    ("teachers", "--teacher_logprobs stored",
     ("distill", "--teacher", "tiny-sft", "--teacher_logprobs", "stored",
      "--on_policy_fraction", 0, "--top_k", 4)),
    ("architectures", ".*qwen3_next", ("sft", "--model", "QWEN3_NEXT")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "flag", "words"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_flag_of_a_deleted_extra_answers_in_one_line(
    name, flag, words, without, main, tmp_path, monkeypatch
):
    (tmp_path / "agent.py").write_text(AGENT)
    if words[-1] == "QWEN3_NEXT":
        words = (*words[:-1], checkpoint("qwen3_next", tmp_path / "model"))
    words = [str(word).replace("agent.py", f"{tmp_path}/agent.py") for word in words]
    without(name)
    with pytest.raises(ValueError, match=f"{flag} needs extras/{name}, which is not here$"):
        main(*words, "--output_dir", tmp_path / "run")
