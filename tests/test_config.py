"""The command line and its file; and what the files of the project promise about flags and size."""

import ast
import dataclasses
import importlib

import pytest
import yaml
from helpers import ROOT

import grpo
import sft
from common.cli import parse
from common.config import OnlineArgs, RolloutArgs, RunArgs
from common.online import PolicyGradientArgs
from common.preference_losses import PreferenceArgs

SCRIPTS = sorted(ROOT.glob("*.py"))
MODULES = sorted(ROOT.glob("common/**/*.py"))


def tree(path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


ALGORITHMS = [p.stem for p in SCRIPTS if any(isinstance(n, ast.ClassDef) and n.name == "Args" for n in tree(p).body)]


def refused(capsys, args_class, *argv) -> str:
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
    lr_schedule="cosine", max_grad_norm=float("inf"),
)  # fmt: skip


@pytest.mark.parametrize("script", ALGORITHMS)
def test_defaults_go_through_a_file(script, tmp_path):
    round_trip(importlib.import_module(script).Args(), tmp_path)


@pytest.mark.parametrize("flags", [EVERY_KIND, dict(system_prompt=""), dict(system_prompt="- be brief")])
def test_every_kind_of_value_goes_through_a_file(flags, tmp_path):
    round_trip(grpo.Args(**flags), tmp_path)


@pytest.mark.parametrize("value", ["--rules", "-x", "a b"])
def test_strings_that_look_like_something_else_go_through_a_file(value, tmp_path):
    try:
        round_trip(grpo.Args(system_prompt=value), tmp_path)
    except SystemExit as error:
        raise AssertionError from error


def round_trip(args, tmp_path):
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(args.to_dict(), sort_keys=False))
    assert parse(type(args), ["--config", str(tmp_path / "args.yaml")]) == args


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "lr: 1e-3\nmax_steps: 5\nreward: [gsm8k, format]\ncompile: true\nsystem_prompt: null\n"
    )
    config = f"--config={tmp_path / 'c.yaml'}"
    for argv in (["--max_steps", "9", config], [config, "--max_steps", "9"]):
        args = parse(grpo.Args, argv)
        assert (args.lr, args.max_steps, args.reward, args.compile) == (1e-3, 9, ("gsm8k", "format"), True)
        assert args.seed == 0 and args.system_prompt is None
    args = parse(grpo.Args, [config, "--reward", "boxed", "--compile", "false", "--max_steps", "None"])
    assert (args.reward, args.compile, args.max_steps) == (("boxed",), False, None)


@pytest.mark.parametrize(
    "text, what",
    [
        ("max_step: 3\n", "unknown key max_step (did you mean max_steps?)"),
        ("- a\n", "expected `flag: value` lines"),
        ("a: [\n", "not valid YAML"),
        ("reward: gsm8k\n", "reward must be a list"),
        ("lr: {a: 1}\n", "lr must be a plain value or a list"),
        ("lr: fast\n", "--lr"),
        (None, "No such file"),
    ],
)
def test_bad_files_are_refused(text, what, tmp_path, capsys):
    if text is not None:
        (tmp_path / "c.yaml").write_text(text)
    assert what in refused(capsys, grpo.Args, "--config", str(tmp_path / "c.yaml"))


# ---- the command line ----


@pytest.mark.parametrize(
    "argv, value",
    [
        (["--compile"], True), (["--compile", "--seed", "3"], True), (["--compile", "True"], True),
        (["--compile", "true"], True), (["--compile=TRUE"], True), (["--compile", "False"], False),
        (["--compile=false"], False), (["--compile", "--compile", "false"], False), ([], False),
    ],
)  # fmt: skip
def test_bools(argv, value):
    assert parse(sft.Args, argv).compile is value


def test_dashes_lists_none_and_equals_signs():
    assert parse(sft.Args, ["--max-steps", "3", "--pack-tokens=4096"]).pack_tokens == 4096
    args = parse(grpo.Args, ["--reward", "gsm8k", "format", "--reward-weights", "1", "-0.5", "--log", "wandb"])
    assert (args.reward, args.reward_weights, args.log) == (("gsm8k", "format"), (1.0, -0.5), ("wandb",))
    assert parse(sft.Args, ["--max_steps", "None", "--system_prompt=a=b"]).system_prompt == "a=b"


@pytest.mark.parametrize(
    "argv, what",
    [
        (["--max_step", "3"], "unknown flag --max_step (did you mean --max_steps?)"),
        (["--max_steps", "many"], "--max-steps"),
        (["--max_steps", "0"], "--max_steps 0 must be at least 1"),
        (["--lr", "-1"], "--lr -1.0 must be greater than 0"),
        (["--lr", "nan"], "--lr nan"),
        (["--dtype", "float16"], "--dtype"),
        (["--compile", "maybe"], "--compile"),
        (["--config"], "--config needs a file name"),
        (["--samples_per_prompt", "1"], "--samples_per_prompt 1"),
        (["--minibatches", "3"], "--prompts_per_step 64 is not a multiple of --minibatches (3)"),
        (["--reward", "gsm8k", "--reward_weights", "1", "2"], "--reward_weights has 2 values for 1 rewards"),
        (["--max_new_tokens", "100", "--pack_tokens", "100"], "--max_new_tokens 100"),
    ],
)
def test_bad_flags_are_refused_in_one_line(argv, what, capsys):
    assert what in refused(capsys, grpo.Args, *argv)


def test_batches_must_split_over_the_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for script in (sft, grpo):
        with pytest.raises(ValueError, match="64 is not a multiple of the number of ranks.*3"):
            script.Args()


# ---- promises ----


def documented(path, class_name: str) -> None:
    (definition,) = [n for n in tree(path).body if isinstance(n, ast.ClassDef) and n.name == class_name]
    for field, after in zip(definition.body, definition.body[1:] + [None], strict=True):
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.dump(field.annotation):
            text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
            assert isinstance(text, str) and text.strip(), f"{path.name}: {class_name}.{field.target.id} says nothing"


def test_every_field_is_documented():
    for class_name in (
        "BaseArgs",
        RunArgs.__name__,
        "SamplingArgs",
        "EnvironmentArgs",
        RolloutArgs.__name__,
        OnlineArgs.__name__,
    ):
        documented(ROOT / "common" / "config.py", class_name)
    documented(ROOT / "common" / "preference_losses.py", PreferenceArgs.__name__)
    documented(ROOT / "common" / "online.py", PolicyGradientArgs.__name__)
    assert {"sft", "dpo", "rm", "grpo", "rloo", "ppo", "online_dpo", "bok", "eval"} <= set(ALGORITHMS)
    for script in ALGORITHMS:
        documented(ROOT / f"{script}.py", "Args")


def fields_read(path) -> set[str]:
    """`args.<name>` and `<anything>.args.<name>`, outside of the checks in `__post_init__`."""
    module = tree(path)
    checks = {
        id(node)
        for f in ast.walk(module)
        if isinstance(f, ast.FunctionDef) and f.name == "__post_init__"
        for node in ast.walk(f)
    }
    return {
        node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and id(node) not in checks
        and (getattr(node.value, "id", None) == "args" or getattr(node.value, "attr", None) == "args")
    }


@pytest.mark.parametrize("script", ALGORITHMS)
def test_every_field_is_read(script):
    fields = {field.name for field in dataclasses.fields(importlib.import_module(script).Args)}
    used = set().union(*map(fields_read, MODULES), fields_read(ROOT / f"{script}.py"))
    assert fields - used == set()


@pytest.mark.parametrize("path", [*SCRIPTS, *MODULES], ids=lambda path: path.name)
def test_files_stay_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 420 if path in SCRIPTS else lines < 300
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            assert node.end_lineno - node.lineno + 1 <= 230


def test_help_begins_with_the_script_and_lists_its_flags(capsys):
    with pytest.raises(SystemExit) as exit:
        parse(grpo.Args, ["--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0 and "GRPO and its family" in text and "samples-per-prompt" in text


def test_presets_lie_between_defaults_and_the_file_and_contradictions_are_refused(tmp_path, capsys):
    dapo = parse(grpo.Args, ["--preset", "dapo"])
    assert all(getattr(dapo, flag) == value for flag, value in grpo.PRESETS["dapo"].items())
    round_trip(dapo, tmp_path)
    (tmp_path / "c.yaml").write_text("preset: gspo\nlr: 1e-3\n")
    args = parse(grpo.Args, [f"--config={tmp_path / 'c.yaml'}"])
    assert (args.loss, args.clip_high, args.lr) == ("gspo", 4e-4, 1e-3)
    assert parse(grpo.Args, [f"--config={tmp_path / 'c.yaml'}", "--preset=cispo"]).loss == "cispo"
    assert parse(grpo.Args, ["--preset", "dapo", "--loss", "clip", "--lr", "1"]).max_draws == 10
    # Also where the flag's value is the default: what was asked for is not what the preset is.
    assert "--max_draws 0 contradicts" in refused(capsys, grpo.Args, "--preset", "dapo", "--max_draws", "0")


@pytest.mark.parametrize("preset", grpo.PRESETS)
def test_every_preset_is_a_valid_set_of_flags(preset):
    assert parse(grpo.Args, ["--preset", preset]).preset == preset
