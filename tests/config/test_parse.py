"""The command line, its file, its presets and its help."""

import dataclasses
import importlib
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import yaml
from config.test_groups import ALGORITHMS
from helpers import ROOT

import grpo
from common.config.flags import AtLeast2, MayChange, Positive
from common.config.groups import OnlineArgs, PreferenceArgs, SamplingArgs, TrainArgs
from common.config.parse import GROUPS, parse
from common.objectives.importance import CorrectionArgs
from common.objectives.shaping import RewardArgs


@dataclass
class Args(CorrectionArgs, RewardArgs, OnlineArgs, SamplingArgs, TrainArgs):
    """As a script composes them."""

    PRESETS: ClassVar[dict[str, dict]] = {
        "gspo": dict(algorithm="gspo", clip_high=4e-4, correction="sequence"),
        "cispo": dict(algorithm="cispo", max_draws=0),
    }
    """what `--preset` may name"""
    RENAMED_PRESETS: ClassVar[dict[str, str]] = {"dapo": "python dapo.py"}
    """what it could name once"""
    lr: Positive[float] = 1e-6
    """peak learning rate, declared anew"""
    samples_per_prompt: AtLeast2 = 8
    """completions, at least two"""
    output_dir: MayChange[str] = "runs/cli"
    """where everything goes"""
    preset: Literal["gspo", "cispo", "dapo"] | None = None
    """the flags of a published variant"""
    algorithm: Literal["clip", "gspo", "cispo"] = "clip"
    """what is minimised"""
    clip_high: Positive[float] = 0.28
    """upper bound
    of the ratio"""
    max_draws: int = 0
    """an own flag without bounds"""
    mask_truncated: bool = False
    """an own switch"""


def refused(capsys, *argv, args_class=Args) -> str:
    """The message of a command line that is refused with exit code 2, on one line."""
    with pytest.raises(SystemExit) as exit:
        parse(args_class, argv)
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message


# ---- the file ----

EVERY_KIND = dict(
    model="some/model", dataset_config="main", system_prompt="Line one.\n- two: 'quoted' \"twice\" # no comment",
    max_steps=7, epochs=0.5, lr=1e-6, compile=True, reward=("gsm8k", "a/b.py:f"), reward_weights=(1.0, -0.25),
    log=("wandb", "tensorboard"), mask_truncated=True, correction_filter=(0.5, 2.0), max_logprob_difference=1e-4,
    lr_schedule="cosine", max_grad_norm=1e9, seed=-1,
)  # fmt: skip


def round_trip(args, tmp_path) -> None:
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(args.to_dict(), sort_keys=False))
    assert parse(type(args), ["--config", str(tmp_path / "args.yaml")]) == args


@pytest.mark.parametrize("script", ALGORITHMS)
def test_defaults_go_through_a_file(script, tmp_path):
    round_trip(importlib.import_module(script).Args(), tmp_path)


@pytest.mark.parametrize("flags", [{}, EVERY_KIND, dict(system_prompt=""), dict(system_prompt="- be brief")])
def test_every_kind_of_value_goes_through_a_file(flags, tmp_path):
    round_trip(Args(**flags), tmp_path)


@pytest.mark.parametrize("value", ["--rules", "-x", "-h", "--help", "a b", "a=b"])
def test_strings_that_look_like_something_else_go_through_a_file(value, tmp_path):
    try:
        round_trip(Args(system_prompt=value), tmp_path)
    except SystemExit as error:
        raise AssertionError from error


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "lr: 1e-3\nmax_steps: 5\nreward: [gsm8k, format]\ncompile: true\nsystem_prompt: null\n"
    )
    config = f"--config={tmp_path / 'c.yaml'}"
    for argv in (["--max_steps", "9", config], [config, "--max_steps", "9"]):
        args = parse(Args, argv)
        assert (args.lr, args.max_steps, args.reward, args.compile) == (1e-3, 9, ("gsm8k", "format"), True)
        assert args.seed == 0 and args.system_prompt is None
    (tmp_path / "one.yaml").write_text("reward: gsm8k\n")  # one alone, as on the command line
    assert parse(Args, ["--config", str(tmp_path / "one.yaml")]).reward == ("gsm8k",)
    args = parse(Args, [config, "--reward", "boxed", "--compile", "false", "--max_steps", "None"])
    assert (args.reward, args.compile, args.max_steps) == (("boxed",), False, None)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("max_step: 3\n", "unknown key max_step (did you mean max_steps?)"),
        ("- a\n", "expected `flag: value` lines"),
        ("a: [\n", "not valid YAML"),
        ("correction_filter: 1\n", "correction_filter must be a list"),
        ("lr: {a: 1}\n", "lr must be a plain value or a list"),
        ("lr: fast\n", "--lr"),
        ("lr: 0\n", "--lr 0.0 must be greater than 0"),
        (None, "No such file"),
    ],
)
def test_bad_files_are_refused(text, what, tmp_path, capsys):
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    assert what in refused(capsys, "--config", str(tmp_path / "c.yaml"))


# ---- the command line ----


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--compile"], True), (["--compile", "--seed", "3"], True), (["--compile", "True"], True),
        (["--compile", "true"], True), (["--compile=TRUE"], True), (["--compile", "False"], False),
        (["--compile=false"], False), (["--compile", "--compile", "false"], False), ([], False),
    ],
)  # fmt: skip
def test_bools(argv, value):
    assert parse(Args, argv).compile is value


def test_dashes_lists_none_and_equals_signs():
    assert parse(Args, ["--max-steps", "3", "--pack-tokens=4096"]).pack_tokens == 4096
    args = parse(Args, ["--reward", "gsm8k", "format", "--reward-weights", "1", "-0.5", "--log", "wandb"])
    assert (args.reward, args.reward_weights, args.log) == (("gsm8k", "format"), (1.0, -0.5), ("wandb",))
    assert parse(Args, ["--max_steps", "None", "--system_prompt=a=b"]).system_prompt == "a=b"


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--max_step", "3"], "unknown flag --max_step (did you mean --max_steps?)"),
        (["--max_steps", "many"], "--max-steps"),
        (["--max_steps", "1.5"], "--max-steps"),
        (["--max_steps", "0"], "--max_steps 0 must be greater than 0"),
        (["--lr", "-1"], "--lr -1.0 must be greater than 0"),
        (["--lr", "nan"], "--lr nan must be a finite number"),
        (["--lr"], "Missing value for argument '--lr'"),
        (["--dtype", "float16"], "invalid choice 'float16' for argument '--dtype'"),
        (["--compile", "maybe"], "--compile"),
        (["--config"], "--config needs a file name"),
        (["stray"], "stray"),
        (["--samples_per_prompt", "1"], "--samples_per_prompt 1 must be at least 2"),
        (["--minibatches", "3"], "--prompts_per_step 16 is not a multiple of --minibatches (3)"),
        (["--reward", "gsm8k", "--reward_weights", "1", "2"], "--reward_weights has 2 values for 1 rewards"),
        (["--max_new_tokens", "100", "--pack_tokens", "100"], "--max_new_tokens 100"),
        (["--correction_filter", "1"], "--correction-filter"),
        (["--correction_filter", "-1", "1"], "--correction_filter -1.0 must not be negative"),
    ],
)
def test_bad_flags_are_refused_in_one_line(argv, what, capsys):
    assert what in refused(capsys, *argv)


def test_flags_that_the_ranks_do_not_allow_are_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "--prompts_per_step 16 is not a multiple of the number of ranks that train (3)" in refused(capsys)
    assert parse(Args, ["--prompts_per_step", "6"]).prompts_per_step == 6


# ---- presets ----


def test_presets_lie_between_defaults_and_the_file_and_contradictions_are_refused(tmp_path, capsys):
    gspo = parse(Args, ["--preset", "gspo"])
    assert (gspo.algorithm, gspo.clip_high, gspo.correction) == ("gspo", 4e-4, "sequence")
    round_trip(gspo, tmp_path)
    (tmp_path / "c.yaml").write_text("preset: gspo\nlr: 1e-3\n")
    args = parse(Args, [f"--config={tmp_path / 'c.yaml'}"])
    assert (args.algorithm, args.clip_high, args.lr) == ("gspo", 4e-4, 1e-3)
    assert parse(Args, [f"--config={tmp_path / 'c.yaml'}", "--preset=cispo"]).algorithm == "cispo"
    assert parse(Args, ["--preset", "gspo", "--algorithm", "gspo", "--lr", "1"]).clip_high == 4e-4
    assert parse(Args, ["--preset", "None"]).algorithm == "clip"
    message = refused(capsys, "--preset", "cispo", "--algorithm", "gspo")
    assert "--algorithm gspo contradicts --preset cispo: algorithm is cispo" in message
    # Also where the flag's value is the default: what was asked for is not what the preset is.
    assert "--clip_high 0.28 contradicts" in refused(capsys, "--preset", "gspo", "--clip_high", "0.28")


def test_presets_that_are_unknown_or_scripts_of_their_own(tmp_path, capsys):
    assert "--preset gsp: unknown; there are gspo, cispo\n" in refused(capsys, "--preset", "gsp")
    (tmp_path / "c.yaml").write_text("preset: dapo\n")
    for argv in (["--preset", "dapo"], ["--preset=dapo"], ["--config", str(tmp_path / "c.yaml")]):
        message = refused(capsys, *argv)
        assert message == "error: --preset dapo is a script of its own now: python dapo.py\n"


@pytest.mark.parametrize("script", ALGORITHMS)
def test_every_preset_of_a_script_is_a_valid_set_of_flags(script, tmp_path):
    args_class = importlib.import_module(script).Args
    moved, presets = getattr(args_class, "RENAMED_PRESETS", {}), getattr(args_class, "PRESETS", {})
    assert not set(moved) & set(presets)
    assert all((ROOT / there.split()[1]).is_file() for there in moved.values())
    for preset, flags in presets.items():
        args = parse(args_class, ["--preset", preset])
        assert args.preset == preset and {name: getattr(args, name) for name in flags} == flags
        round_trip(args, tmp_path)


# ---- help ----


def help_of(args_class, capsys, *argv) -> str:
    with pytest.raises(SystemExit) as exit:
        parse(args_class, argv or ["--help"])
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_help_groups_the_flags_with_the_scripts_own_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    text = help_of(Args, capsys)
    assert text.startswith("usage: test_parse.py [--flag value ...]\n\nThe command line, its file, its presets")
    titles = [line for line in text.splitlines()[3:] if line and not line.startswith(" ")]
    assert titles == ["test_parse.py", *GROUPS]
    blocks = dict(zip(titles, text.split("\n\n")[2:], strict=True))
    flags = {title: [line.split()[0][2:] for line in block.splitlines() if line.startswith("  --")]
             for title, block in blocks.items()}  # fmt: skip
    assert flags["test_parse.py"] == ["preset", "algorithm", "clip_high", "max_draws", "mask_truncated"]
    for group, names in GROUPS.items():
        there = [name for name in names if name in Args.__dataclass_fields__]
        assert flags[group] == there + ["config"] * (group == "run")
    assert [line for line in text.splitlines() if len(line) > 90] == []


def test_help_says_type_default_and_text(capsys):
    text = help_of(Args, capsys, "--max_steps", "3", "-h")
    for lines in (
        "  --lr float (default: 1e-06)\n      peak learning rate, declared anew\n",
        "  --algorithm {clip, gspo, cispo} (default: clip)\n      what is minimised\n",
        "  --clip_high float (default: 0.28)\n      upper bound of the ratio\n",
        "  --max_steps int or None (default: None)\n",
        "  --compile bool (default: False)\n",
        "  --reward str ... (default: exact_match)\n",
        "  --log {wandb, tensorboard} ... (default: none)\n",
        "  --correction_filter float float or None (default: None)\n",
        "  --output_dir str (default: runs/cli)\n      where everything goes\n",
        "  --config FILE.yaml\n",
    ):
        assert lines in text


def test_a_flag_named_like_one_of_a_group_the_script_does_not_have_is_its_own(capsys):
    @dataclass
    class Own(TrainArgs):
        loss: Literal["a", "b"] = "a"
        """of this script"""
        beta: float = 0.1
        """its weight"""

    @dataclass
    class Pairs(PreferenceArgs):
        loss: tuple[str, ...] = ("ipo",)

    text = help_of(Own, capsys)
    assert "test_parse.py\n  --loss {a, b} (default: a)\n      of this script\n  --beta float" in text
    assert "\nobjective\n" not in text and "\nsampling\n" not in text
    assert "\nobjective\n  --loss str ... (default: ipo)\n      objectives (docs" in help_of(Pairs, capsys)


@pytest.mark.parametrize("script", ALGORITHMS)
def test_help_of_a_script_begins_with_what_it_is_and_lists_its_flags(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    text = capsys.readouterr().out
    module = importlib.import_module(script)
    assert exit.value.code == 0 and text.startswith(f"usage: {script}.py")
    assert module.__doc__.split()[:3] == text.split("\n\n")[1].split()[:3]
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert sorted(listed) == sorted([*(f"--{field.name}" for field in dataclasses.fields(module.Args)), "--config"])


def test_the_command_line_imports_nothing_slow():
    slow = ["vllm", "wandb", "datasets", "transformers", "matplotlib", "tensorboard"]
    code = f"import sys, common.config.parse, common.config; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


# ---- the built-in model and task ----


def test_the_bare_command_takes_values_that_teach_the_built_in_model_and_says_so(capsys):
    bare = parse(grpo.Args, [])
    assert (bare.lr, bare.reward, bare.max_steps) == (3e-3, ("characters",), 60)
    said = capsys.readouterr().out
    assert said.startswith("for the built-in model and task, unless given: --lr=0.003 ") and said.count("\n") == 1
    given = parse(grpo.Args, ["--lr", "0.1", "--max_steps=7", "--model", "tiny"])
    assert (given.lr, given.max_steps, given.prompts_per_step) == (0.1, 7, bare.prompts_per_step)
    assert "--lr" not in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--model", "other"], ["--model=other"], ["--dataset", "rows.jsonl"]])
def test_other_models_and_data_keep_the_defaults(argv, capsys, tmp_path):
    args, defaults = parse(grpo.Args, argv), grpo.Args()
    assert (args.lr, args.reward, args.max_steps) == (defaults.lr, defaults.reward, None)
    (tmp_path / "recipe.yaml").write_text("model: other\n")
    recipe = ["--config", str(tmp_path / "recipe.yaml")]
    assert parse(grpo.Args, recipe).lr == defaults.lr
    assert capsys.readouterr().out == ""
    assert parse(grpo.Args, [*recipe, "--model", "tiny"]).lr != defaults.lr  # flags win over the file
    (tmp_path / "recipe.yaml").write_text("model: tiny\n")
    assert parse(grpo.Args, [*recipe, "--model", "other"]).lr == defaults.lr


def test_a_preset_wins_over_what_is_for_the_built_in_model():
    class Presets(Args):
        PRESETS = dict(fast=dict(lr=1.0))
        preset: str | None = None

    assert parse(dataclasses.dataclass(Presets), ["--preset", "fast"]).lr == 1.0


# ---- recipes ----


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_is_one_of_the_script_that_it_names(recipe):
    """In its comment, as a launch line; on as many ranks as that has."""
    launch = re.search(r"torchrun --nproc_per_node (\d+) (\w+)\.py --config configs/(\w+)\.yaml", recipe.read_text())
    ranks, script, name = launch.groups()
    assert name == recipe.stem
    args = parse(importlib.import_module(script).Args, ["--config", str(recipe)])
    args.check_ranks(int(ranks))
    for flag, value in yaml.safe_load(recipe.read_text()).items():
        assert args.to_dict()[flag] in (value, [value])


@pytest.mark.parametrize(
    "argv, tokens, said",
    [([], 256, ""), (["--pack_tokens", "100"], 50, "--max_new_tokens 50: half of --pack_tokens 100\n"),
     (["--pack_tokens", "100", "--max_new_tokens", "99"], 99, "")],
)  # fmt: skip
def test_completions_that_were_given_no_length_leave_room_in_a_small_pack(argv, tokens, said, capsys):
    import grpo

    assert parse(grpo.Args, ["--model", "other", *argv]).max_new_tokens == tokens
    assert capsys.readouterr().out == said
