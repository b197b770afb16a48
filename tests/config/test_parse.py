"""The command line, its file, its presets and its help."""

import dataclasses
import importlib
import random
import re
import runpy
import subprocess
import sys
import typing
from collections.abc import Iterator
from typing import ClassVar, Literal

import pytest
import yaml
from config.test_groups import ALGORITHMS
from helpers import ROOT
from pydantic.dataclasses import dataclass

import eval as evaluation
import grpo
import ppo
from common.config.flags import AtLeast2, MayChange, Positive
from common.config.groups import check_ranks, flags_of
from common.config.names import ELSEWHERE, flag_for
from common.config.objectives import CorrectionArgs, RewardArgs
from common.config.online import OnlineArgs
from common.config.parse import adapted_defaults, is_valid, parse, valid


@dataclass
class Args(CorrectionArgs, RewardArgs, OnlineArgs):
    """Flags composed as in a script."""

    PRESETS: ClassVar[dict[str, dict]] = {
        "gspo": dict(algorithm="gspo", clip_high=4e-4, correction="sequence"),
        "cispo": dict(algorithm="cispo", max_draws=0),
    }
    MOVED: ClassVar[dict[str, dict[str, str]]] = {"preset": {"dapo": "python dapo.py"}}
    TINY_DEFAULTS: ClassVar[dict] = {}
    lr: Positive[float] = 1e-6
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
    """Return the message of a command line that is refused with exit code 2, on one line."""
    with pytest.raises(SystemExit) as exit:
        parse(args_class, argv)
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message


# ---- the file ----

EVERY_KIND = dict(
    model="some/model", dataset_config="main",
    system_prompt="Line one.\n- two: 'quoted' \"twice\" # no comment", max_steps=7, epochs=0.5,
    lr=1e-6, compile=True, reward=("gsm8k", "a/b.py:f"), reward_weights=(1.0, -0.25),
    log=("wandb", "tensorboard"), mask_truncated=True, correction_filter=(0.5, 2.0),
    max_logprob_difference=1e-4, lr_schedule="cosine", max_grad_norm=1e9, seed=-1,
)  # fmt: skip


def round_trip(args, tmp_path) -> None:
    (tmp_path / "args.yaml").write_text(yaml.safe_dump(flags_of(args), sort_keys=False))
    assert parse(type(args), ["--config", str(tmp_path / "args.yaml")]) == args


@pytest.mark.parametrize("script", ALGORITHMS)
def test_defaults_survive_a_round_trip_through_a_file(script, tmp_path):
    round_trip(importlib.import_module(script).Args(), tmp_path)


@pytest.mark.parametrize(
    "flags", [{}, EVERY_KIND, dict(system_prompt=""), dict(system_prompt="- be brief")]
)
def test_values_of_every_type_survive_a_round_trip_through_a_file(flags, tmp_path):
    round_trip(Args(**flags), tmp_path)


@pytest.mark.parametrize("value", ["--rules", "-x", "-h", "--help", "a b", "a=b"])
def test_ambiguous_strings_survive_a_round_trip_through_a_file(value, tmp_path):
    try:
        round_trip(Args(system_prompt=value), tmp_path)
    except SystemExit as error:
        raise AssertionError from error


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "lr: 1e-3\nmax_steps: 5\nreward: [gsm8k, format]\ncompile: true\nsystem_prompt: null\n"
    )
    config = f"--config={tmp_path / 'c.yaml'}"
    for argv in (["--max_steps", "9", config], [config, "--max_steps", "9"]):
        args = parse(Args, argv)
        assert (args.lr, args.max_steps, args.reward, args.compile) == (
            1e-3,
            9,
            ("gsm8k", "format"),
            True,
        )
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
        ("correction_filter: 1\n", "--correction_filter 1 must be a valid tuple"),
        ("lr: {a: 1}\n", "--lr {'a': 1} must be a valid number"),
        ("lr: fast\n", "--lr fast must be a valid number"),
        ("lr: 0\n", "--lr 0 must be greater than 0"),
        ("preset: gsp\n", "--preset gsp must be 'gspo', 'cispo' or 'dapo'"),
        ("3: 4\n", "unknown key 3"),
        ("top_k: 5\n", "unknown key top_k: only eval.py and bok.py truncate the distribution"),
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
def test_bools_parse_all_spellings(argv, value):
    assert parse(Args, argv).compile is value


def test_dashes_lists_none_and_equals_signs_are_parsed():
    assert parse(Args, ["--max-steps", "3", "--pack-tokens=4096"]).pack_tokens == 4096
    args = parse(
        Args, ["--reward", "gsm8k", "format", "--reward-weights", "1", "-0.5", "--log", "wandb"]
    )
    assert (args.reward, args.reward_weights, args.log) == (
        ("gsm8k", "format"),
        (1.0, -0.5),
        ("wandb",),
    )
    assert parse(Args, ["--max_steps", "None", "--system_prompt=a=b"]).system_prompt == "a=b"


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--max_step", "3"], "unknown flag --max_step (did you mean --max_steps?)"),
        (
            ["--num_generations", "3"],
            "unknown flag --num_generations; here it is --samples_per_prompt",
        ),
        (
            ["--batch-size", "3"],
            "unknown flag --batch_size: it is a flag of dpo.py, kto.py, rm.py, sft.py; "
            "here it is --prompts_per_step\n",
        ),
        (["--zzz=3"], "unknown flag --zzz\n"),
        (["--max_steps", "many"], "--max_steps many must be a valid integer"),
        (["--max_steps", "1.5"], "--max_steps 1.5 must be a valid integer"),
        (["--max_steps", "0"], "--max_steps 0 must be greater than 0"),
        (["--lr", "-1"], "--lr -1 must be greater than 0"),
        (["--lr", "nan"], "--lr nan must be greater than 0"),
        (["--lr"], "--lr: expected FLOAT\n"),
        (["--dtype", "float16"], "--dtype float16 must be 'auto', 'float32' or 'bfloat16'"),
        (["--log", "wandb", "stdout"], "--log stdout must be 'wandb' or 'tensorboard'"),
        (["--compile", "maybe"], "--compile maybe must be a valid boolean"),
        (["--config"], "--config: expected"),
        (["stray"], "stray"),
        (
            ["--samples_per_prompt", "1"],
            "--samples_per_prompt 1 must be greater than or equal to 2",
        ),
        (
            ["--top_p", "0.9"],
            "--top_p: only eval.py and bok.py truncate the distribution; training",
        ),
        (["--stop", "###", ""], "--stop: a stop string is empty"),
        (["--stop_token_ids", "-1"], "--stop_token_ids -1 must be greater than or equal to 0"),
        (["--rope_scaling", "yarn"], "--rope_scaling and --rope_factor need each other"),
        (["--rope_factor", "4"], "--rope_scaling and --rope_factor need each other"),
        (["--rope_factor", "1"], "--rope_factor 1 must be greater than 1"),
        (["--rope_scaling", "dynamic"], "--rope_scaling dynamic must be 'yarn' or 'linear'"),
        (["--minibatches", "3"], "--prompts_per_step 64 must be a multiple of --minibatches (3)"),
        (
            ["--reward", "gsm8k", "--reward_weights", "1", "2"],
            "--reward_weights has 2 values for 1 rewards",
        ),
        (["--max_new_tokens", "100", "--pack_tokens", "100"], "--max_new_tokens 100"),
        (["--correction_filter", "1"], "--correction_filter: expected {None}|{FLOAT FLOAT}"),
        (
            ["--correction_filter", "-1", "1"],
            "--correction_filter -1 must be greater than or equal to 0",
        ),
    ],
)
def test_bad_flags_are_refused_in_one_line(argv, what, capsys):
    assert what in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--top_p", "0"], "--top_p 0 must be greater than 0"),
        (["--top_p", "1.5"], "--top_p 1.5 must be less than or equal to 1"),
        (["--top_k", "-1"], "--top_k -1 must be greater than or equal to 0"),
        (["--min_p", "2"], "--min_p 2 must be less than or equal to 1"),
    ],
)
def test_bad_truncation_is_refused_in_one_line(argv, what, capsys):
    assert what in refused(capsys, *argv, args_class=evaluation.Args)


def test_truncation_is_none_only_if_it_changes_nothing():
    assert parse(evaluation.Args, []).truncation is None
    args = parse(evaluation.Args, ["--top_p", "0.9"])
    assert args.truncation == dict(top_p=0.9, top_k=0, min_p=0)


def test_stop_strings_have_newlines_and_survive_a_file(tmp_path):
    args = parse(Args, ["--stop", r"\nUser:", "###", r"a\tb"])
    assert args.stop == ("\nUser:", "###", "a\tb")
    round_trip(args, tmp_path)


MISSPELLED = """
    max_step:max_steps max_new_token:max_new_tokens promtps_per_step:prompts_per_step
    sample_per_prompt:samples_per_prompt learningrate:lr eval_evry:eval_every save_evry:save_every
    lr_scheduler:lr_schedule outputdir:output_dir output:output_dir warmup:warmup_steps
    weightdecay:weight_decay sytem_prompt:system_prompt data:dataset datasets:dataset
    dataset_splits:dataset_split rewards:reward rewrad:reward temprature:temperature epoch:epochs
    lorarank:lora_rank lora_r:lora_rank grad_norm:max_grad_norm pack_token:pack_tokens
    eval_data:eval_dataset resum:resume modell:model max_prompts:eval_size kl_coef:beta
    num_generations:samples_per_prompt""".split()
NONSENSE = """
    zzz foo bar verbose debug fast quick help_me xyz123 potato use_magic threads color fp8 yes final
    nothing gpu ui banana""".split()


def test_misspelled_flags_have_the_right_guess_and_nonsense_has_none(capsys):
    for name, right in [pair.split(":") for pair in MISSPELLED]:
        message = refused(capsys, f"--{name}=3")
        assert f"did you mean --{right}?" in message or message.endswith(
            f"here it is --{right}\n"
        ), message
    for name in NONSENSE:
        assert refused(capsys, f"--{name}=3") == f"error: unknown flag --{name}\n"
    assert "here it is --max_prompts\n" in refused(
        capsys, "--eval_size", "3", args_class=evaluation.Args
    )


def test_names_of_other_libraries_are_flags_here_by_another_name():
    fields = {
        field.name
        for script in ALGORITHMS
        for field in dataclasses.fields(importlib.import_module(script).Args)
    }
    assert set(ELSEWHERE) <= fields
    for script in ALGORITHMS:
        known = [field.name for field in dataclasses.fields(importlib.import_module(script).Args)]
        assert all(
            flag_for(name, known) in {None, *known} - {name}
            for name in " ".join(ELSEWHERE.values()).split()
        )


def test_flags_that_do_not_fit_the_ranks_are_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (
        "--prompts_per_step 64 must be a multiple of the number of training ranks (3)"
        in refused(capsys)
    )
    assert parse(Args, ["--prompts_per_step", "6"]).prompts_per_step == 6


# ---- presets ----


def test_presets_override_defaults_and_refuse_contradicting_flags(tmp_path, capsys):
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
    assert "--algorithm gspo contradicts --preset cispo, which sets cispo" in message
    # A flag at its default also contradicts a preset with another value.
    assert "--clip_high 0.28 contradicts" in refused(
        capsys, "--preset", "gspo", "--clip_high", "0.28"
    )


def test_unknown_presets_and_names_of_other_scripts_are_refused(tmp_path, capsys):
    assert "--preset gsp must be 'gspo', 'cispo' or 'dapo'\n" in refused(capsys, "--preset", "gsp")
    (tmp_path / "c.yaml").write_text("preset: dapo\n")
    for argv in (["--preset", "dapo"], ["--preset=dapo"], ["--config", str(tmp_path / "c.yaml")]):
        message = refused(capsys, *argv)
        assert message == "error: --preset dapo is another script; run python dapo.py\n"
    (tmp_path / "c.yaml").write_text("preset: [gspo]\n")
    assert "--preset ['gspo'] must be 'gspo'" in refused(
        capsys, "--config", str(tmp_path / "c.yaml")
    )


@pytest.mark.parametrize("script", ALGORITHMS)
def test_every_preset_of_a_script_is_a_valid_set_of_flags(script, tmp_path):
    args_class = importlib.import_module(script).Args
    moved = {
        value: command
        for commands in args_class.MOVED.values()
        for value, command in commands.items()
    }
    assert not set(moved) & set(args_class.PRESETS)
    assert all((ROOT / command.split()[1]).is_file() for command in moved.values())
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


def test_help_has_a_section_for_each_group_in_the_order_of_need(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    text = help_of(Args, capsys)
    assert text.startswith(
        "usage: test_parse.py [-h] [OPTIONS]\n\nThe command line, its file, its presets and"
    )
    titles = re.findall(r"^ (\w+) options$", text, re.MULTILINE)
    assert titles == [
        "model", "data", "scoring", "test_parse", "run", "heldout", "optim", "checkpoint", "lora",
        "prefix", "completion", "engine", "rollout", "reward", "correction",
    ]  # fmt: skip
    blocks = re.split(r"^ \w* ?options$", text, flags=re.MULTILINE)[1:]
    flags = [re.findall(r"^  --(\w+)", block, re.MULTILINE) for block in blocks]
    assert [flags[0], flags[4]] == [
        ["config"],
        ["preset", "algorithm", "clip_high", "max_draws", "mask_truncated"],
    ]
    assert sorted(sum(flags[1:], [])) == sorted(field.name for field in dataclasses.fields(Args))
    assert [line for line in text.splitlines() if len(line) > 90] == []


def test_help_says_type_text_and_default(capsys):
    text = " ".join(help_of(Args, capsys, "--max_steps", "3", "-h").split())
    for words in (
        # text of the group, default of the script
        "--lr FLOAT peak learning rate of AdamW (default: 1e-06)",
        "--samples_per_prompt INT completions, at least two (default: 8)",
        "--algorithm {clip,gspo,cispo} what is minimised (default: clip)",
        "--clip_high FLOAT upper bound of the ratio (default: 0.28)",
        # a default that the text explains is not repeated
        "; default: computed from `epochs` --epochs FLOAT",
        "--compile [{true,false}] torch.compile for every transformer block and for the "
        "log-probs (default: false)",
        "--reward [STR [STR ...]] rewards",
        "tensorboard (default: none)",
        "--correction_filter {None}|{FLOAT FLOAT} two bounds",
        "--config {None}|STR file of",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["UPPER", "ratio"], ["clip_high"]),  # of its text, in any order and case
        (["clip-high"], ["clip_high"]),
        (["lora_rank"], ["lora_rank", "lora_alpha", "lora_rslora"]),  # name or text
        (["args.yaml", "win"], ["config"]),
        (["nccl", "--lr", "3"], ["nccl_timeout"]),
    ],
)
def test_help_with_words_lists_the_flags_that_have_all_of_them(words, flags, capsys):
    text = help_of(Args, capsys, "--help", *words)
    assert sorted(re.findall(r"^  --(\w+)", text, re.MULTILINE)) == sorted(flags)
    titles = re.findall(r"^ (\w+) options$", text, re.MULTILINE)
    assert len(titles) == (flags != ["config"])


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (
            ["stalness"],
            "--help stalness: no flag has this word in its name or text (did you mean "
            "staleness?)\n",
        ),
        (["nccl", "reward"], "--help nccl reward: no flag has all words in its name or text\n"),
    ],
)
def test_help_without_a_match_is_one_line(words, what, capsys):
    assert what in refused(capsys, "--help", *words)


@pytest.mark.slow
def test_help_survives_a_closed_pipe():
    """Both texts fit in the pipe's buffer, so an interpreter that finds the pipe closed prints
    nothing."""
    done = subprocess.run(
        f"{sys.executable} grpo.py --help | head -n 3",
        shell=True,
        capture_output=True,
        cwd=ROOT,
    )
    assert done.stdout.startswith(b"usage: ") and done.stderr == b""


@pytest.mark.parametrize("script", ALGORITHMS)
def test_help_begins_with_a_summary_and_lists_the_flags(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    text = capsys.readouterr().out
    module = importlib.import_module(script)
    assert exit.value.code == 0 and text.startswith(f"usage: {script}.py")
    assert module.__doc__.split()[:3] == text.split("\n\n")[1].split()[:3]
    listed = re.findall(r"^  (--\w+)", text, re.MULTILINE)
    assert sorted(listed) == sorted(
        [*(f"--{field.name}" for field in dataclasses.fields(module.Args)), "--config"]
    )


def test_scripts_import_no_slow_library_but_torch():
    """--help waits for these imports. torch.distributed's submodules take as long as torch
    itself."""
    slow = [
        "vllm", "wandb", "datasets", "transformers", "matplotlib", "tensorboard", "sympy",
        "torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint",
    ]  # fmt: skip
    code = f"import sys, {', '.join(ALGORITHMS)}; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == "[]\n"


# ---- the built-in model and task ----


def test_bare_command_uses_and_prints_the_values_for_the_built_in_model(capsys):
    bare = parse(grpo.Args, [])
    assert (bare.lr, bare.model, bare.max_steps) == (4e-4, "tiny-sft", 60)
    said = capsys.readouterr().out
    assert (
        said.startswith("defaults for the built-in model and task: --lr 0.0004 ")
        and said.count("\n") == 1
    )
    given = parse(grpo.Args, ["--lr", "0.1", "--max_steps=7", "--model", "tiny"])
    assert (given.lr, given.max_steps, given.prompts_per_step) == (0.1, 7, bare.prompts_per_step)
    assert "--lr " not in capsys.readouterr().out


def test_built_in_model_with_other_data_keeps_its_learning_rates(capsys):
    args = parse(ppo.Args, ["--dataset", "rows.jsonl", "--lr", "1e-4"])
    assert (
        capsys.readouterr().out == f"defaults for the built-in model: --value_lr {args.value_lr}\n"
    )
    assert (
        args.value_lr == ppo.Args.TINY_DEFAULTS["value_lr"]
        and args.lr == 1e-4
        and args.max_steps is None
    )


def test_export_of_a_run_from_a_built_in_model_keeps_the_learning_rates(capsys, tmp_path):
    """Also after a second run; other defaults are those of any model."""
    for run, model in (("one", "tiny"), ("two", tmp_path / "one" / "hf"), ("other", "some/model")):
        (tmp_path / run).mkdir()
        (tmp_path / run / "args.yaml").write_text(f"model: {model}\n")
    for run in ("one", "two"):
        args = parse(grpo.Args, ["--model", str(tmp_path / run / "hf")])
        assert args.lr == grpo.Args.TINY_DEFAULTS["lr"] and args.max_steps is None
    assert parse(grpo.Args, ["--model", str(tmp_path / "other" / "hf")]).lr == grpo.Args().lr


def test_lora_has_ten_times_the_learning_rate(capsys):
    lora = ["--model", "other", "--lora_rank", "8"]
    assert parse(grpo.Args, lora).lr == pytest.approx(10 * grpo.Args().lr)
    assert capsys.readouterr().out == "defaults for LoRA: --lr 1e-05\n"
    assert parse(grpo.Args, [*lora, "--lr", "3e-6"]).lr == 3e-6
    assert parse(grpo.Args, [*lora[:2], "--lora_rank=0"]).lr == grpo.Args().lr


@pytest.mark.parametrize("argv", [["--model", "other"], ["--model=other"]])
def test_defaults_apply_to_other_models_and_data(argv, capsys, tmp_path):
    args, defaults = parse(grpo.Args, argv), grpo.Args()
    assert (args.lr, args.reward, args.max_steps) == (defaults.lr, defaults.reward, None)
    (tmp_path / "recipe.yaml").write_text("model: other\n")
    recipe = ["--config", str(tmp_path / "recipe.yaml")]
    assert parse(grpo.Args, recipe).lr == defaults.lr
    assert capsys.readouterr().out == ""
    assert (
        parse(grpo.Args, [*recipe, "--model", "tiny"]).lr != defaults.lr
    )  # flags override the file
    (tmp_path / "recipe.yaml").write_text("model: tiny\n")
    assert parse(grpo.Args, [*recipe, "--model", "other"]).lr == defaults.lr


def candidates(args_class) -> Iterator[tuple[str, object]]:
    """Yield flags with values of their types, of which some are out of bounds."""
    types = typing.get_type_hints(args_class)
    for field in dataclasses.fields(args_class):
        text = str(types[field.name])
        numbers = [0, 1, 2, 3, 7, 100, 0.5] if "int" in text or "float" in text else []
        words = [*re.findall(r"'(\w+)'", text), "x"] if "Literal" in text or "str" in text else []
        yield from (
            (field.name, value)
            for value in [*numbers, *words, *([True, False] if "bool" in text else [])]
        )


@pytest.mark.parametrize("script", ALGORITHMS)
def test_adapted_defaults_do_not_contradict_what_is_given(script):
    """Flags that are valid with the usual defaults are valid on the built-in model too, and keep
    their values. So are flags that only its defaults allow."""
    args_class, draw = importlib.import_module(script).Args, random.Random(0)
    flags = list(candidates(args_class))
    for given in [*([flag] for flag in flags), *(draw.sample(flags, 2) for _ in range(300))]:
        given = dict(given)
        if is_valid(args_class, given):
            adapted = adapted_defaults(args_class, given)[1]
            usual, args = valid(args_class, given), valid(args_class, adapted | given)
            assert {name: getattr(args, name) for name in given} == {
                name: getattr(usual, name) for name in given
            }


@pytest.mark.parametrize(
    ("script", "argv", "values"),
    [
        ("sft", "--eval_every 0", dict(eval_every=0, eval_generate=0, warmup_steps=10)),
        ("dpo", "--eval_generate 0", dict(eval_generate=0, eval_new_tokens=256, sft_weight=1.0)),
        (
            "kto",
            "--eval_reward gsm8k --system_prompt x --template_kwargs a=b",
            dict(eval_generate=256, prompt_format="auto"),
        ),
        ("sft", "--pack_tokens 5", dict(pack_tokens=5, eval_generate=0, warmup_steps=10)),
        ("grpo", "--minibatches 64", dict(minibatches=64, prompts_per_step=64, max_new_tokens=5)),
    ],
)
def test_defaults_that_contradict_a_flag_are_left_out(script, argv, values, capsys):
    args = parse(importlib.import_module(script).Args, argv.split())
    assert {name: getattr(args, name) for name in values} == values
    said = capsys.readouterr().out
    assert (
        said.startswith("defaults for the built-in model and task: --lr ")
        and "--eval_every 0" not in said
    )


def test_preset_overrides_the_values_for_the_built_in_model():
    @dataclass
    class Presets(grpo.Args):
        PRESETS: ClassVar[dict] = dict(fast=dict(lr=1.0))
        preset: str | None = None

    assert parse(Presets, ["--preset", "fast"]).lr == 1.0


# ---- recipes ----


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_recipe_is_valid_for_the_script_in_its_launch_line(recipe, monkeypatch):
    """The launch line in the recipe's comment names the script and the number of ranks."""
    launch = re.search(
        r"torchrun --nproc_per_node (\d+) (\w+)\.py --config configs/(\w+)\.yaml",
        recipe.read_text(),
    )
    ranks, script, name = launch.groups()
    assert name == recipe.stem
    monkeypatch.setenv("WORLD_SIZE", ranks)  # bounds --rollout_ranks
    args = parse(importlib.import_module(script).Args, ["--config", str(recipe)])
    check_ranks(args, int(ranks))
    for flag, value in yaml.safe_load(recipe.read_text()).items():
        assert flags_of(args)[flag] in (value, [value])


@pytest.mark.parametrize(
    "argv, tokens, said",
    [
        ([], 256, ""),
        (["--pack_tokens", "100"], 50, "--max_new_tokens 50: half of --pack_tokens 100\n"),
        (["--pack_tokens", "100", "--max_new_tokens", "99"], 99, ""),
    ],
)
def test_default_max_new_tokens_adapts_to_a_small_pack(argv, tokens, said, capsys):
    import grpo

    assert parse(grpo.Args, ["--model", "other", *argv]).max_new_tokens == tokens
    assert capsys.readouterr().out == said
