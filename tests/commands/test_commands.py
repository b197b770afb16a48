"""Every command that the project prints runs, on stand-ins (stand_ins.py), in `make commands`."""

import importlib
import json
import math
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from commands.collect import Command, collect
from commands.shell import Shell, like, makers, short
from commands.stand_ins import HUB, LOCAL_MODELS, MODELS, THINKING
from helpers import ROOT, metrics
from processes import finished
from scripts import ALGORITHMS, TRAINING

from common.config.groups import BUILT_IN_MODELS

COMMANDS = collect()
# Commands that cannot run here, by a pattern, with the reason.
CANNOT = {
    r"pip install |venv|^touch \.venv": "changes the installation",
    r"^make ": "a target, which is looked up",
    r"^hf |^vllm serve|llama\.cpp|jupyter|^srun": "needs the hub, a server or another program",
    r"mcp:npx": "starts a server of npm",
    r"bench/(gpu|gpu_report|prefix|peers)\.py": "needs a GPU, or another project",
    r"bench/(faults|seeds|models|memory_plan)\.py": "takes minutes to hours",
    r"bench/results/report\.py": "needs the runs of half an hour",
    r"lesson\.py 6 --store|mark\.py --check|one_step\.py": "takes minutes: make course-test",
}
RUNS = [x for x in COMMANDS if not any(re.search(pattern, x.text) for pattern in CANNOT)]


def identity(command: Command) -> str:
    return command.places[0].replace("configs/", "configs:")


@pytest.fixture(scope="session")
def shell(tmp_path_factory) -> Callable[[str], Shell]:
    """Return the folder of a page; recipes share one, in which others find what they read."""
    folder = tmp_path_factory.mktemp("pages")
    recipes = Shell(folder / "configs", RUNS)

    @cache
    def of_page(page: str) -> Shell:
        if page.startswith("configs/"):
            return recipes
        return Shell(folder / page.replace("/", "_"), RUNS, recipes)

    return of_page


@pytest.mark.parametrize("command", RUNS, ids=identity)
def test_command(command, shell):
    folder, done = shell(command.page).folder, shell(command.page).run(command)
    assert done.returncode == 0, "\n".join(
        [command.text, " ".join(short(command)), done.stdout[-3000:], done.stderr[-5000:]]
    )
    finished(done)
    script, output = like(command), folder / command.output_dir
    if "--dry_run" in command.words:
        return
    if script in TRAINING:
        look_at_training(output, done.stdout, sampled="stored" not in command.words)
    elif script == "eval":
        results = json.loads(next(output.rglob("results.json")).read_text())
        assert results["overall"]["prompts"] and "solved %" in done.stdout


def look_at_training(folder: Path, shown: str, sampled: bool) -> None:
    """Two steps, one with a gradient, and the end of the output."""
    lines = [line for line in metrics(folder) if line["step"] > 0]
    norms = [v for line in lines for k, v in line.items() if k.endswith("grad_norm")]
    assert [line["step"] for line in lines] == [1, 2] and all(map(math.isfinite, norms))
    assert max(norms) > 0, lines
    assert "after 2 steps: " in shown and "done: " in shown
    samples = ("\u27e6", "chosen: ", "completion ")  # a row with its trained part, a pair, a table
    assert not sampled or any(sample in shown for sample in samples), shown


# ---- rules that a random model cannot show ----

# The form of an answer that a reward reads, for which the prompt has to ask.
FORMS = dict(
    gsm8k="####", format="####", boxed="boxed", math="boxed", choice="letter|LETTER",
    stated="boxed", code="code block", code_fraction="code block", exact_match="alone",
)  # fmt: skip
SAMPLES = {x for x in ALGORITHMS if hasattr(importlib.import_module(x).Args, "max_turns")} | {
    "chat"
}


def made_by(command: Command, model: str) -> list[Command]:
    """Return the command that trained the model, unless it is one of the hub or built in."""
    model = LOCAL_MODELS.get(model, model)
    is_named = model in MODELS or model in BUILT_IN_MODELS
    return [] if is_named else makers(os.path.normpath(model), command, RUNS)


def behind(command: Command, model: str) -> str:
    """Return the model of the hub that a folder comes from."""
    model = LOCAL_MODELS.get(model, model)
    if model in MODELS or model in BUILT_IN_MODELS:
        return model
    (maker,) = made_by(command, model)
    return behind(maker, maker.flags().get("model", ["tiny"])[0])


def require_room_and_form(command: Command) -> None:
    """A model has room for an answer, and for a thought unless thinking is off. What a run trained
    is asked as in training. On data of the hub, the prompt asks for the form that the reward
    reads."""
    flags = command.flags()
    model = behind(command, flags.get("model", ["tiny"])[0])
    if flags.get("prompt_format") == ["plain"]:
        return
    switches = flags.get("template_kwargs", [])
    if model.startswith("Qwen/Qwen3-") and "VL" not in model:
        thinks = model in THINKING and "enable_thinking=false" not in switches
        room = int(flags.get("max_new_tokens", [2048 if like(command) == "chat" else 256])[0])
        assert room >= (2048 if thinks else 1024), f"{command.text}: no room"
        if flags["model"][0].startswith("runs/"):
            (maker,) = made_by(command, flags["model"][0])
            assert switches == maker.flags().get("template_kwargs", []), command.text
    asked = " ".join(flags.get(name, [""])[0] for name in ("prompt_template", "system_prompt"))
    if (model in THINKING or "Instruct" in model) and flags.get("dataset", [""])[0] in HUB:
        for reward in flags.get("reward", ["exact_match"]):
            assert re.search(FORMS.get(reward, ""), asked), f"{command.text}: no form of {reward}"


@pytest.mark.parametrize(
    "command", [x for x in COMMANDS if Path(x.script).stem in SAMPLES], ids=identity
)
def test_chat_model_can_answer(command):
    require_room_and_form(command)


ADVISED = re.compile(r"configs/(demo_\w+|squares_\w+|qwen3_1.7b_grpo|qwen3_1.7b_rm)\.yaml$")


@pytest.mark.parametrize("command", [x for x in RUNS if ADVISED.search(x.text)], ids=identity)
def test_commands_that_a_run_advises(command, shell):
    shown = shell(command.page).run(command).stdout
    advised = re.findall(r"^(?:doctor|next): (python .*)$", shown, re.M)
    assert advised, shown
    for advice in [Command(text, command.places) for text in advised]:
        finished(shell(command.page).run(advice))
        require_room_and_form(advice)


# ---- tables ----


@pytest.mark.parametrize("command", [x for x in COMMANDS if x.program == "make"], ids=identity)
def test_target_exists(command):
    target = command.words[0]
    assert re.search(rf"^{target}\b.*:", (ROOT / "Makefile").read_text(), re.M), command.places


def test_every_recipe_is_started_by_a_command():
    used = {x.printed()["config"][0] for x in COMMANDS if "--config" in x.words}
    assert {f"configs/{path.name}" for path in ROOT.glob("configs/*.yaml")} <= used


def test_table_has_no_idle_row():
    assert [p for p in CANNOT if not any(re.search(p, x.text) for x in COMMANDS)] == []


NOTEBOOK = """
import json, subprocess

def run(words, **_):
    print("launched", *words[-4:])
    return subprocess.CompletedProcess(words, 0, "", "")

subprocess.run, names = run, {}
for cell in json.load(open("demo.ipynb"))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), names)
"""


def test_notebook(shell):
    """Its launches, which are those of demo.py, and then its cells."""
    page, launches = shell("demo.ipynb"), []
    for name in ("sft", "grpo"):
        flags = f"--config configs/demo_{name}.yaml --resume never"
        launches.append(f"launched {flags}")
        text = f"torchrun --nproc_per_node 2 {name}.py {flags}"
        finished(page.run(Command(text, ["demo.ipynb:1"])))
    (page.folder / "notebook.py").write_text(NOTEBOOK)
    done = page.run(Command("MPLBACKEND=Agg python notebook.py", ["demo.ipynb:1"]))
    shown = finished(done).stdout.splitlines()
    assert [line for line in shown if line.startswith("launched")] == launches
