"""Any extra can be deleted: the others and all scripts do not need it, and its flags answer in one
line."""

import importlib
import sys
from pathlib import Path

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


@pytest.fixture
def without(monkeypatch):
    """`without("images")` makes imports fail as if the folder were not there."""

    def delete(name: str) -> None:
        for module in [*sys.modules]:
            if module.startswith("extras.") or module in SCRIPTS:
                monkeypatch.delitem(sys.modules, module)
        for each in EXTRAS:  # imports set them anew
            monkeypatch.delattr(extras, each, raising=False)
        monkeypatch.setitem(sys.modules, f"extras.{name}", None)

    return delete


def modules(name: str) -> list[str]:
    files = Path(__file__).parent.joinpath(name).rglob("*.py")
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in files]
    return [".".join(each).removesuffix(".__init__") for each in parts if "tests" not in each]


@pytest.mark.parametrize("name", EXTRAS)
def test_the_others_and_the_scripts_do_not_need_an_extra(name, without):
    """`make test` runs the scripts without any of them."""
    without(name)
    needs = USES.get(name, set())
    for other in EXTRAS:
        for module in modules(other) if other != name else ():
            if module not in needs and not module.startswith("extras.code.sandbox"):
                importlib.import_module(module)
    for script in SCRIPTS:
        importlib.import_module(script)


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
    name, flag, words, without, main, small, tmp_path
):
    (tmp_path / "agent.py").write_text(AGENT)
    if words[-1] == "QWEN3_NEXT":
        words = (*words[:-1], checkpoint("qwen3_next", tmp_path / "model"))
    words = [str(word).replace("agent.py", f"{tmp_path}/agent.py") for word in words]
    without(name)
    with pytest.raises(ValueError, match=f"{flag} needs extras/{name}, which is not here$"):
        main(words[0], *small, *words[1:], "--output_dir", tmp_path / "run")
