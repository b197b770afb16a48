"""Any extra can be deleted: the others need it in three places only (`USES`), whose tests are then
skipped, and its flags answer in one line."""

import ast
import sys
from pathlib import Path

import pytest
from scripts import SCRIPTS

import extras
from bench.models import checkpoint

HERE = Path(__file__).parents[1]  # extras/
EXTRAS = sorted(path.name for path in HERE.iterdir() if (path / "tests").is_dir())
# Extras that need another one, as course/reading_order.md says.
USES = {
    ("tools/python_tool.py", "code"), ("agents/agents.py", "tools"), ("trace/pictures.py", "images")
}  # fmt: skip


def test_no_other_extra_is_imported_at_the_top_of_a_file():
    """tests/test_layout.py has the same for common/ and the scripts."""
    found = set()
    for path in HERE.glob("*/**/*.py"):
        file = path.relative_to(HERE)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            match (getattr(node, "module", None) or "").split("."):
                case ["extras", name, *_] if name != file.parts[0] and "tests" not in file.parts:
                    found.add((file.as_posix(), name))
    assert found == {(path, x) for path, x in USES if (HERE / path).is_file()}


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


AGENT = "async def run(row, base_url, api_key):\n    pass\n"
GRPO = ("grpo", "--max_new_tokens", 4)
CASES = [
    ("images", "--vision frozen", ("sft", "--model", "tiny-sft", "--vision", "frozen")),
    ("images", "--model tiny-images", ("sft", "--model", "tiny-images")),
    ("images", "--dataset squares", ("sft", "--dataset", "squares")),
    ("tools", "--tools python", (*GRPO, "--tools", "python", "--prompt_format", "chat")),
    ("tools", "--dataset products", ("sft", "--dataset", "products")),
    ("tools", "--environment calculator",
     (*GRPO, "--environment", "calculator", "--reward", "environment", "--prompt_format", "chat")),
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
    ("trackers", "--log_to wandb", ("sft", "--log_to", "wandb", "--eval_every", 0)),
    ("trackers", "--log_to mine.py:Mine", ("sft", "--log_to", "mine.py:Mine", "--eval_every", 0)),
    ("trace", "--trace_every", ("sft", "--trace_every", 1, "--eval_every", 0)),
    ("teachers", "--teacher_logprobs stored",
     ("distill", "--teacher", "tiny-sft", "--teacher_logprobs", "stored",
      "--on_policy_fraction", 0, "--top_k", 4)),
    ("quantized", "--quantize nf4",
     ("sft", "--quantize", "nf4", "--lora_rank", 2, "--eval_every", 0)),
    ("architectures", ".*qwen3_next", ("sft", "--model", "QWEN3_NEXT")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "flag", "words"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_flag_of_a_deleted_extra_answers_in_one_line(
    name, flag, words, without, main, small, tmp_path
):
    first = {"--agent": "agents", "--tools": "tools"}  # the extra that such a flag asks for first
    if gone := [e for w in words if (e := first.get(str(w), name)) not in (*EXTRAS, name)]:
        pytest.skip(f"without extras/{gone[0]}")
    (tmp_path / "agent.py").write_text(AGENT)
    if words[-1] == "QWEN3_NEXT":
        words = (*words[:-1], checkpoint("qwen3_next", tmp_path / "model"))
    words = [str(word).replace("agent.py", f"{tmp_path}/agent.py") for word in words]
    without(name)
    with pytest.raises(ValueError, match=f"{flag} needs extras/{name}, which is not here$"):
        main(words[0], *small, *words[1:], "--output_dir", tmp_path / "run")
