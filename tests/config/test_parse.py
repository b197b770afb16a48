"""The command line, its file, its presets and its help."""

import dataclasses
import importlib
import re
import sys
from collections import Counter
from typing import Annotated, ClassVar, Literal

import pytest
import yaml
from helpers import ROOT
from pydantic.dataclasses import dataclass
from scripts import ALGORITHMS

import grpo
import ppo
import sft
from common.config.flags import AtLeast2, MayChange, Needs, Positive, needs_of
from common.config.groups import check_ranks, flags_of
from common.config.online import OnlineArgs
from common.config.parse import UsualArgs, parse
from common.objectives.importance import CorrectionArgs
from common.objectives.kl import LogKLArgs
from common.parallel import process


@dataclass
class Args(CorrectionArgs, LogKLArgs, OnlineArgs):
    """Flags composed as in a script."""

    PRESETS: ClassVar[dict[str, dict]] = {
        "gspo": dict(algorithm="gspo", clip_high=4e-4, correction="sequence"),
        "cispo": dict(algorithm="cispo", max_draws=0),
    }
    TINY_DEFAULTS: ClassVar[dict] = {}
    lr: Positive[float] = 1e-6
    samples_per_prompt: AtLeast2 = 8
    """completions, at least two"""
    output_dir: MayChange[str] = "runs/cli"
    """where everything goes"""
    preset: Literal["gspo", "cispo"] | None = None
    """the flags of a published variant"""
    algorithm: Literal["clip", "gspo", "cispo"] = "clip"
    """what is minimised"""
    clip_high: Annotated[Positive[float], Needs(algorithm=("clip", "gspo"))] = 0.28
    """upper bound
    of the ratio"""
    max_draws: int = 0
    """an own flag without bounds"""
    mask_truncated: bool = False
    """an own switch"""


def refused(capsys, *argv) -> str:
    """Return the message of a command line that is refused with exit code 2, on one line."""
    with pytest.raises(SystemExit) as exit:
        parse(Args, argv)
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message


# ---- the file ----

EVERY_KIND = dict(
    model="some/model", dataset_config="main",
    system_prompt="Line one.\n- two: 'quoted' \"twice\" # no comment", max_steps=7, epochs=0.5,
    lr=1e-6, compile=True, reward=("gsm8k", "a/b.py:f"), reward_weights=(1.0, -0.25),
    log_to=("wandb", "tensorboard"), mask_truncated=True,
    max_logprob_difference=1e-4, lr_schedule="cosine", max_grad_norm=1e9, seed=-1,
)  # fmt: skip


def round_trip(args, tmp_path) -> None:
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(flags_of(args), sort_keys=False))
    assert parse(type(args), ["--config", str(tmp_path / "args.yaml")]) == args


def from_file(text: str, tmp_path, *argv: str):
    (tmp_path / "c.yaml").write_text(text)
    return parse(Args, ["--config", str(tmp_path / "c.yaml"), *argv])


def test_values_survive_a_round_trip_through_a_file(tmp_path):
    for text in ("", "- be brief", "--rules", "-h", "--help", "a=b", "null", "yes", "0042"):
        round_trip(Args(system_prompt=text), tmp_path)
    round_trip(Args(**EVERY_KIND), tmp_path)


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path):
    text = "lr: 1e-3\nmax_steps: 5\nreward: [gsm8k, format]\ncompile: true\nsystem_prompt: null\n"
    args = from_file(text, tmp_path, "--max_steps", "9")
    assert (args.lr, args.max_steps, args.reward) == (1e-3, 9, ("gsm8k", "format"))
    assert (args.compile, args.seed, args.system_prompt) == (True, 0, None)
    flags = ("--reward", "boxed", "--compile", "false", "--max_steps", "None")
    args = from_file(text, tmp_path, *flags)
    assert (args.reward, args.compile, args.max_steps) == (("boxed",), False, None)
    assert from_file("reward: gsm8k\n", tmp_path).reward == ("gsm8k",)


@pytest.mark.parametrize("text", ["0042", "3.10", "1_000", "no", "0x1f", "2024-01-01", "None"])
def test_text_in_a_file_means_what_it_means_on_the_command_line(text, tmp_path):
    value = from_file(f"dataset_config: {text}\n", tmp_path).dataset_config
    assert value == parse(Args, ["--dataset_config", text]).dataset_config
    assert value == (None if text == "None" else text)


BILLION = "dataset:\n- &a0 [" + "x, " * 10 + "]\n"
BILLION += "".join(f"- &a{i} [{f'*a{i - 1}, ' * 10}]\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("max_step: 3\n", "unknown key max_step (did you mean max_steps?)"),
        ("- a\n", "expected `flag: value` lines"),
        ("a: [\n", "not valid YAML"),
        ("lr: 1e-5\nlr: 1e-3\n", "lr is given twice"),
        ("lr: {a: 1}\n", "--lr {'a': '1'} must be a valid number"),
        ("lr: fast\n", "--lr fast must be a valid number"),
        ("preset: gsp\n", "--preset gsp must be 'gspo' or 'cispo'"),
        ("3: 4\n", "unknown key 3"),
        ("config: other.yaml\n", "unknown key config"),
        ("null: 1\n", "unknown key null"),
        ("model: &a [*a]\n", "not valid YAML: aliases (*name) are not read; write the value again"),
        (BILLION, "not valid YAML: aliases (*name) are not read"),
        ("&a model: *a\n", "not valid YAML: aliases (*name) are not read"),
        ("<<: {a: 1}\n", "unknown key <<"),
        ("model: " + "[" * 2000, "not valid YAML: nested too deeply"),
        ("model: " + "{a: " * 2000, "not valid YAML: nested too deeply"),
        (f"max_steps: {'9' * 10_000}\n", "exceeded maximum size"),
        ("? " + "x" * 10_000 + "\n: 1\n", "unknown key xxx"),
        (b"\xff\xfe", "c.yaml: not valid YAML"),
    ],
)
def test_bad_files_are_refused(text, what, tmp_path, capsys):
    assert "No such file" in refused(capsys, "--config", str(tmp_path / "c.yaml"))
    (tmp_path / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refused(capsys, "--config", str(tmp_path / "c.yaml"))
    assert what in message and len(message) < 1100


# ---- the command line ----


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        *((flags, dict(compile=True)) for flags in (
            "--compile", "--compile --seed 3", "--compile True", "--compile=TRUE")),
        *((flags, dict(compile=False)) for flags in ("--compile False", "--compile=false")),
        ("", dict(compile=None)),  # on CUDA true
        ("--max-steps 3 --pack-tokens=4096", dict(max_steps=3, pack_tokens=4096)),
        ("--max_steps None --system_prompt=-a=b", dict(max_steps=None, system_prompt="-a=b")),
        ("--reward gsm8k format --reward-weights 1 -5e-1 --log_to wandb",
         dict(reward=("gsm8k", "format"), reward_weights=(1.0, -0.5), log_to=("wandb",))),
        # a list that is given twice is joined
        ("--dataset a b --seed 1 --dataset c --reward x.py:f --reward math",
         dict(dataset=("a", "b", "c"), reward=("x.py:f", "math"))),
    ],
)  # fmt: skip
def test_flags_are_read(flags, values):
    args = parse(Args, flags.split())
    assert {name: getattr(args, name) for name in values} == values


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        ("--lr 1 --lr 2", "--lr is given twice"),
        ("--max_step 3", "unknown flag --max_step (did you mean --max_steps?)"),
        ("--rewrad=3", "unknown flag --rewrad (did you mean --reward?)"),
        ("--zzz=3", "unknown flag --zzz\n"),  # without a guess
        ("--max_steps many", "--max_steps many must be a valid integer"),
        ("--max_steps", "--max_steps: a value is missing"),
        ("--lr nan", "--lr nan must be greater than 0"),
        ("--lr 1 2", "--lr 1 2 must be a valid number"),
        (
            "--log_to wandb stdout",
            "--log_to stdout must be wandb, tensorboard or path/to/file.py:Class",
        ),
        ("--compile maybe", "--compile maybe must be a valid boolean"),
        ("--config", "--config: a value is missing"),
        ("stray", "unknown flag stray"),
        ("--output_dir runs/\udcff", r"--output_dir runs/\udcff: not UTF-8; rename the file"),
        ("--dataset a b\udcff", r"--dataset a b\udcff: not UTF-8; rename the file"),
    ],
)
def test_bad_flags_are_refused_in_one_line(argv, what, capsys, monkeypatch):
    """tyro's own messages are coloured boxes in a terminal."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert refused(capsys, *argv.split()).startswith(f"error: {what}")


def test_stop_strings_have_newlines_and_survive_a_file(tmp_path):
    args = parse(Args, ["--stop", r"\nUser:", "###", r"a\tb"])
    assert args.stop == ("\nUser:", "###", "a\tb")
    round_trip(args, tmp_path)


def test_line_breaks_in_other_texts_are_explained(capsys):
    assert parse(Args, ["--prompt_template", r"{a}\nAnswer:"]).prompt_template == r"{a}\nAnswer:"
    assert r"--prompt_template: the \n in it is not a line break; " in capsys.readouterr().out
    given = ("--prompt_template", "{a}\n", "--template_kwargs", "a=b\nc", "d=e")
    parse(Args, given)
    assert capsys.readouterr().out == ""
    parse(Args, ["--template_kwargs", "a=b", r"d=e\nf"])
    assert r"--template_kwargs: the \n in it is not a line break; " in capsys.readouterr().out


def test_paths_from_home_are_those_of_the_shell(tmp_path, monkeypatch):
    """A file and quotes keep `~` from the shell."""
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "f.yaml").write_text("output_dir: ~/runs/a\ndataset: [~/a.jsonl, b~/c.jsonl]")
    args = parse(Args, ["--config", str(tmp_path / "f.yaml"), "--model", "~/m"])
    assert args.output_dir == "/home/me/runs/a" and args.model == "/home/me/m"
    assert args.dataset == ("/home/me/a.jsonl", "b~/c.jsonl")


# ---- presets ----


def test_presets_override_defaults_and_refuse_contradicting_flags(tmp_path, capsys):
    gspo = parse(Args, ["--preset", "gspo"])
    assert (gspo.algorithm, gspo.clip_high, gspo.correction) == ("gspo", 4e-4, "sequence")
    round_trip(gspo, tmp_path)
    args = from_file("preset: gspo\nlr: 1e-3\n", tmp_path)
    assert (args.algorithm, args.clip_high, args.lr) == ("gspo", 4e-4, 1e-3)
    assert from_file("preset: gspo\n", tmp_path, "--preset=cispo").algorithm == "cispo"
    assert parse(Args, ["--preset", "gspo", "--algorithm", "gspo", "--lr", "1"]).clip_high == 4e-4
    assert parse(Args, ["--preset", "None"]).algorithm == "clip"
    message = refused(capsys, "--preset", "cispo", "--algorithm", "gspo")
    assert "--algorithm gspo contradicts --preset cispo, which sets cispo" in message
    # A flag at its default also contradicts a preset with another value.
    message = refused(capsys, "--preset", "gspo", "--clip_high", "0.28")
    assert "--clip_high 0.28 contradicts" in message


@pytest.mark.parametrize("script", ALGORITHMS)
def test_defaults_and_every_preset_of_a_script_are_a_valid_set_of_flags(script, tmp_path):
    args_class = importlib.import_module(script).Args
    round_trip(args_class(), tmp_path)
    for preset, flags in args_class.PRESETS.items():
        args = parse(args_class, ["--preset", preset])
        assert args.preset == preset and {name: getattr(args, name) for name in flags} == flags
        round_trip(args, tmp_path)


# ---- help ----


def help_of(args_class, capsys, *argv) -> str:
    with pytest.raises(SystemExit) as exit:
        parse(args_class, argv or ["--help"])
    assert exit.value.code == 0
    return "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines())


def test_help_has_a_section_for_each_group(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    text = help_of(Args, capsys, "--help", "all")
    assert text.startswith("usage: test_parse.py [-h] [OPTIONS]\n\nThe command line, its file")
    titles = re.findall(r"^ (\w+) options$", text, re.MULTILINE)
    assert titles[:3] == ["file", "model", "data"] and titles[-1] == "test_parse"
    blocks = re.split(r"^ \w* ?options$", text, flags=re.MULTILINE)[1:]
    flags = [re.findall(r"^  --(\w+)", block, re.MULTILINE) for block in blocks]
    own = ["preset", "algorithm", "clip_high", "max_draws", "mask_truncated"]
    assert (flags[1], flags[-1]) == (["config"], own)
    names = [field.name for field in dataclasses.fields(Args)]
    assert sorted(sum(flags[2:], [])) == sorted(names)
    text = help_of(grpo.Args, capsys)
    assert text.startswith("usage: grpo.py")
    assert text.split("\n\n")[1].split()[:3] == grpo.__doc__.split()[:3]
    assert re.findall(r"^ (\w+) options$", text, re.MULTILINE) == ["usual", "grpo"]
    explained = re.findall(r"^  --(\w+)", text, re.MULTILINE)
    named = re.findall(r"--(\w+)", text[text.index("Flags in a file: --config") :])
    usual = explained[: explained.index("preset")]
    assert usual[:2] == ["model", "dataset"] and {*usual} < {*UsualArgs.names}
    assert "loss" in explained and "seed" in named and text.count("\n") < 150
    names = [field.name for field in dataclasses.fields(grpo.Args)]
    assert sorted([*explained, *named]) == sorted([*names, "config"])


def test_help_begins_with_the_flags_that_most_recipes_set(capsys):
    """Most of the recipes whose script has a usual flag set it."""
    could, do = Counter(), Counter()
    for recipe in (ROOT / "configs").glob("*.yaml"):
        text = recipe.read_text()
        args_class = importlib.import_module(re.search(r"(\w+)\.py --config", text)[1]).Args
        names = {x.name for x in dataclasses.fields(args_class) if not needs_of(args_class, x.name)}
        could.update(names)
        do.update(names & yaml.safe_load(text).keys())
    assert all(do[name] > could[name] / 2 for name in UsualArgs.names)
    nearly_all = {name for name in do if could[name] > 10 and do[name] > 0.75 * could[name]}
    assert nearly_all <= {*UsualArgs.names}
    explained = re.findall(r"^  --(\w+)", help_of(sft.Args, capsys), re.MULTILINE)
    assert "batch_size" in explained[:8] and "reward" not in explained  # --eval_generate needs it


def test_help_says_type_text_and_default(capsys):
    text = " ".join(help_of(Args, capsys, "--max_steps", "3", "-h", "all").split())
    for words in (
        # text of the group, default of the script
        "--lr FLOAT train with this peak learning rate of AdamW (default: 1e-06)",
        "--samples_per_prompt INT completions, at least two (default: 8)",
        "--algorithm {clip,gspo,cispo} what is minimised (default: clip)",
        "upper bound of the ratio; only with --algorithm clip, gspo (default: 0.28)",
        # a default that the text explains is not repeated
        "; default: computed from `epochs` --epochs FLOAT",
        "--reward [STR [STR ...]] add up these rewards",
        "tensorboard (default: none)",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["UPPER", "ratio"], ["clip_high"]),  # of its text, in any order and case
        (["clip-high"], ["clip_high"]),
        (["args.yaml", "win"], ["config"]),
        (["an", "own", "switch", "--lr", "3"], ["mask_truncated"]),
    ],
)
def test_help_with_words_lists_the_flags_that_have_all_of_them(words, flags, capsys):
    text = help_of(Args, capsys, "--help", *words)
    assert re.findall(r"^  --(\w+)", text, re.MULTILINE) == flags
    problem = "--help stalness: no flag has this in its name or text\n"
    assert problem in refused(capsys, "--help", "stalness")


# ---- the built-in model and task, LoRA, small packs ----


def test_bare_command_uses_and_prints_the_values_for_the_built_in_model(capsys):
    bare = parse(grpo.Args, [])
    assert (bare.lr, bare.model, bare.max_steps) == (4e-4, "tiny-sft", 60)
    said = capsys.readouterr().out
    assert said.startswith("defaults for the built-in model: --lr 0.0004 ")
    assert said.count("\n") == 1
    given = parse(grpo.Args, ["--lr", "0.1", "--max_steps=7", "--model", "tiny"])
    assert (given.lr, given.max_steps, given.prompts_per_step) == (0.1, 7, bare.prompts_per_step)
    assert "--lr " not in capsys.readouterr().out


def test_built_in_model_with_other_data_keeps_its_learning_rates(capsys):
    args = parse(ppo.Args, ["--dataset", "rows.jsonl", "--lr", "1e-4"])
    said = f"defaults for the built-in model: --value_lr {args.value_lr}\n"
    assert capsys.readouterr().out == said
    assert args.value_lr == ppo.Args.TINY_DEFAULTS["value_lr"]
    assert args.lr == 1e-4 and args.max_steps is None


def test_other_models_have_the_usual_defaults(capsys, tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: other\n")
    recipe = ["--config", str(tmp_path / "recipe.yaml")]
    for argv in (["--model", "other"], recipe):
        assert parse(grpo.Args, argv).lr == grpo.Args().lr
        assert capsys.readouterr().out == ""
    assert parse(grpo.Args, [*recipe, "--model", "tiny"]).lr == 4e-4


# ---- recipes ----


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_recipe_is_valid_for_the_script_in_its_launch_line(recipe, monkeypatch):
    """The launch line in the recipe's comment names the script and the number of ranks."""
    launch = re.search(
        r"torchrun --nproc_per_node (\d+) (\w+)\.py --config configs/([\w.]+)\.yaml",
        recipe.read_text(),
    )
    ranks, script, name = launch.groups()
    assert name == recipe.stem
    monkeypatch.setenv("WORLD_SIZE", ranks)  # bounds --rollout_ranks
    args = parse(importlib.import_module(script).Args, ["--config", str(recipe)])
    check_ranks(args, int(ranks))
    for flag, value in yaml.safe_load(recipe.read_text()).items():
        assert flags_of(args)[flag] in (value, [value])


@pytest.mark.parametrize("flags", ["--model x --max_steps 10", "--max_steps 10"])
def test_epochs_beside_max_steps_are_told(flags, capsys):
    parse(grpo.Args, [*flags.split(), "--epochs", "20"])
    assert "--epochs 20 has no effect with --max_steps 10\n" in capsys.readouterr().out
    assert parse(grpo.Args, ["--epochs", "20"]).max_steps is None  # not the built-in model's
    assert "no effect" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ("SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS 2: "),
        ("SLURM_STEP_ID=0 SLURM_NTASKS=2", "SLURM_STEP_NUM_TASKS 2: "),
        ("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE 2: "),
        ("PMI_SIZE=2 PMI_RANK=0", "PMI_SIZE 2: "),
        ("PMI_SIZE=2 PMI_RANK=1", ""),  # the first one says it
        ("SLURM_STEP_ID=0 SLURM_NTASKS=2 RANK=0", None),  # a torchrun on each machine
        ("SLURM_STEP_ID=0 SLURM_NTASKS=1", None),
        ("SLURM_NTASKS=8 SLURM_PROCID=0", None),  # salloc, or a batch script
        ("SLURM_STEP_ID=4294967290 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1", None),
    ],
)
def test_processes_without_ranks_are_refused(variables, refused, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(process.time, "sleep", lambda _: None)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    if refused is None:
        parse(grpo.Args, [])
        return
    with pytest.raises(SystemExit) as done:
        parse(grpo.Args, [])
    said = capsys.readouterr().err
    assert done.value.code == 2 and said.startswith(refused and f"error: {refused}one of 2 proc")
    assert ("start one torchrun on each machine" in said) == bool(refused)
