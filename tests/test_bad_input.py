"""Bad input ends a script with exit code 2 and one line. It starts with `error: ` and names the
flag, the file, the row or the column. The errors of common/ have tests of their own; this file is
about the scripts and the output of whole runs."""

import importlib
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from helpers import write_rows
from processes import one_error, the_error

import distill
import dpo
import kto
import rm
import sft
from common.config.parse import parse
from common.model.hub import resolve_model
from common.model.tiny import tiny_model
from common.parallel.distributed import RunError
from common.text.columns import SFT_COLUMNS, require_columns
from common.text.encode import Encoder
from common.text.load import encode_all
from common.text.rows import load_rows
from common.text.tokenizer import load_tokenizer

# ---- rules of one script; tests/config has those of shared flags, and flags without effect ----

FLAG_ERRORS = """
sft --max_length 9000 -> --max_length 9000: a sequence must fit in --pack_tokens 8192
sft --batch_size 7 -> --batch_size 7 must be a multiple of the number of training ranks (2)
sft --model x --streaming true --eval_every 0 -> the number of rows is unknown; set --max_steps
sft --streaming true --max_steps 3 -> sets no rows aside; name an --eval_dataset, or set --eval_ev
sft --streaming true --max_steps 3 --eval_every 0 --dataset a:1 b:2 -> omit the weights
sft --quantize nf4 -> --quantize nf4 has no effect with --lora_rank 0
dpo --max_length 4098 -> --max_length 4098: 2 sequences must fit in --pack_tokens 8192
grpo --rubric a -> --rubric a has no effect with --reward exact_match
grpo --reward judge:x --rubric ' ' -> --rubric: a criterion is empty
reinforce --reward rank:x --samples_per_prompt 1 -> needs --samples_per_prompt 2 or more
grpo --tools python --prompt_format plain -> --tools python has no effect with --prompt_format pl
grpo --max_turns 3 -> --max_turns 3 has no effect without --environment, --tools or --agent
grpo --tool_parser hermes -> --tool_parser hermes has no effect without --tools or --agent
grpo --old_logprobs engine -> --correction must be none with --old_logprobs engine
grpo --loss gspo -> --loss gspo --reduction token: a loss by completion needs sequence
grpo --preset gspo --correction token -> --correction token: a completion has one weight; use seq
reinforce --samples_per_prompt 1 --advantage leave_one_out -> set --samples_per_prompt above 1
grpo --top_p 0.9 -> --top_p 0.9 --min_p 0.0: training keeps what each token could be; g
grpo --top_k 9 --agent x.py:f -> --top_k 9 --agent: not for agents; leave out --top_k
rloo --correction token -> --correction token: a completion has one weight
grpo --preset gspo --correction token_mask -> a completion has one weight; use sequence_mask
grpo --preset grpo --kl_estimator k1 -> --kl_estimator k1 contradicts --preset grpo, which sets k3
grpo --correction sequence_mask --correction_high 0.9 -> --correction_high 0.9: sequence_mask keeps
ppo --prompts_per_step 6 --minibatches 4 -> --prompts_per_step 6 must be a multiple of --minibatch
ppo --value_warmup_steps 5 --max_steps 5 -> --value_warmup_steps 5 must be below --max_steps
distill --estimator sampled --on_policy_fraction 0.5 -> sampled is for the student's own samples
distill --teacher a b -> --teacher a b: several need --teacher_column
distill --teacher a --teacher_column x -> --teacher_column x has no effect without several --teac
distill --teacher_logprobs stored --top_k 5 -> --teacher_logprobs stored needs --on_policy_fracti
distill --reward --on_policy_fraction 0 --rollout_ranks 1 -> --rollout_ranks 1 has no effect with
distill --on_policy_fraction 0.001 -> of --prompts_per_step 256 is 0; use
self_distill --hint feedback --reward -> --hint feedback needs --reward
self_distill --hint sibling --samples_per_prompt 1 -> --hint sibling needs --samples_per_prompt
self_distill --hint_template {prompt} -> --hint_template '{prompt}': {hint} is missing
self_distill --context_ranks 2 -> --context_ranks 2 has no effect
bok --samples_per_prompt 4 --keep 4 -> --keep 4 must be at most 3, below --samples_per_prompt
sft --keep_best eval_logps/chosen -> the name does not tell which is best; add the better end, ev
eval --vision train -> --vision train: eval.py trains nothing; use frozen
eval --reward_model rank:x -> --reward_model rank:x compares two models; set --against
""".strip().splitlines()
FLAG_ERRORS.append(
    "distill --teacher a b --teacher_column x --teacher_logprobs stored --on_policy_fraction 0"
    " --top_k 5 -> several need --teacher_logprobs live"
)


@pytest.mark.parametrize("case", FLAG_ERRORS)
def test_conflicting_flags_are_refused(case, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    command, _, words = case.partition(" -> ")
    script, *flags = shlex.split(command)
    with pytest.raises(SystemExit) as done:
        parse(importlib.import_module(script).Args, flags)
    assert done.value.code == 2 and words in the_error(capsys.readouterr().err)


def test_error_is_plain_text_in_a_terminal(capsys, monkeypatch):
    """In a terminal, tyro would draw a coloured box."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    for flags, message in (
        (["--max_length", "9000"], "--max_length 9000: a sequence must fit in --pack_tokens 8192"),
        (["--lr", "fast"], "--lr fast must be a valid number"),
    ):
        with pytest.raises(SystemExit):
            parse(sft.Args, flags)
        assert the_error(capsys.readouterr().err).startswith(message)


def test_binary_config_file_is_refused(tmp_path, capsys):
    (tmp_path / "c.yaml").write_bytes(b"\x80\x81model: tiny")
    with pytest.raises(SystemExit):
        parse(sft.Args, ["--config", str(tmp_path / "c.yaml")])
    assert f"--config {tmp_path}/c.yaml: not valid YAML" in the_error(capsys.readouterr().err)


def test_distill_prompts_must_divide_over_the_ranks():
    args = distill.Args(on_policy_fraction=0.42, teacher="x")
    args.check_launch(3)
    with pytest.raises(
        ValueError,
        match="--on_policy_fraction 0.42 of --prompts_per_step 64 is 27; it must be a mult",
    ):
        args.check_launch(2)


# ---- data ----

GOOD = dict(prompt="1+1=", completion="2", answer="2")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("tiny"))


USER, ANSWER = dict(role="user", content="1+1="), dict(role="assistant", content="2")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(prompt="1+1="), "column completion is missing"),
        (dict(prompt=None, completion="2"), "column prompt is missing"),
        (dict(prompt="1+1=", completion=2), "column completion is int, expected a string"),
        (dict(messages="hi"), "column messages must be a list of messages"),
        (dict(messages=[USER, "2"]), "column messages: turn 2: Input should be a valid dict"),
        (dict(messages=[USER, dict(role="assistant")]), "turn 2: content: Field required"),
        (dict(messages=[USER, dict(role=1, content="2")]), "turn 2: role: Input should be a"),
    ],
)
def test_bad_row_is_refused_by_name(bad, words, tokenizer, tmp_path):
    good = dict(messages=[USER, ANSWER]) if "messages" in bad else GOOD
    path = tmp_path / "deep.jsonl"
    write_rows(path, [*[good] * 298, bad, good])
    args = sft.Args(max_length=2048)
    rows = load_rows("--dataset", str(path), "train", args)
    columns = require_columns("--dataset", rows, SFT_COLUMNS)
    with pytest.raises(ValueError) as error:
        encode_all(sft.encode_row, rows, columns, Encoder(tokenizer, args), args)
    assert str(error.value).startswith("deep.jsonl:299: ") and words in str(error.value)


PAIR = dict(prompt="1+1=", chosen="2", rejected="3")
Q, A, B = "1+1=", [ANSWER], [dict(ANSWER, content="3")]
APART = "chosen and rejected do not begin with the same prompt"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(prompt=Q, chosen="2"), "column rejected is missing"),
        (dict(prompt=Q, chosen="2", rejected=A),
         "column rejected lists messages, column prompt is text"),
        (dict(prompt=Q, chosen="2", rejected=3), "column rejected is int, expected a string"),
        (dict(prompt=Q, chosen="2", rejected=" \n"), "column rejected is empty"),
        (dict(prompt="", chosen="2", rejected="3"), "column prompt is empty"),
        (dict(chosen="2", rejected="3"), "column prompt is missing"),
        (dict(chosen="1+1=2", rejected="2+1=3"), APART),
        (dict(chosen=A, rejected=B), APART),
        (dict(chosen=[USER, *A], rejected=[dict(USER, content="3"), *B]), APART),
        (dict(chosen=[USER, *A], rejected="1+1=3"), "one of chosen and rejected lists messages"),
        (dict(chosen=[USER, *A], rejected=[USER]), APART),
        (dict(chosen=[USER, *A], rejected=[USER, dict(ANSWER, content="")]),
         "column rejected is empty"),
        (dict(chosen=[USER, "2"], rejected=[USER, *B]), "column chosen: turn 2: Input should be"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("script", [dpo, kto, rm])
def test_bad_pair_is_refused_by_name(bad, words, script, tokenizer):
    args = script.Args(max_length=2048)
    has_prompt = "column prompt" in words or "prompt" in bad
    columns = ("prompt", "chosen", "rejected") if has_prompt else ("chosen", "rejected")
    good = PAIR if has_prompt else dict(chosen="1+1= 2", rejected="1+1= 3")
    rows = [row | dict(_source=f"pairs.jsonl:{i}") for i, row in enumerate([good, bad], 1)]
    with pytest.raises(ValueError) as error:
        encode_all(script.encode_row, rows, columns, Encoder(tokenizer, args), args)
    assert str(error.value).startswith("pairs.jsonl:2: ") and words in str(error.value)


def encoded(script, rows: list[dict], columns: tuple[str, ...], tokenizer, **flags):
    """Return the samples of these rows, named x:0, x:1, ..., and the counts of dropped rows."""
    args = script.Args(**dict(max_length=2048) | flags)
    rows = [row | dict(_source=f"x:{i}") for i, row in enumerate(rows)]
    return args, *encode_all(script.encode_row, rows, columns, Encoder(tokenizer, args), args)


KTO = ("prompt", "completion", "label")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [("2", True), ("3", 1.0)],
            "kto.py needs rows with label true and rows with label false; all are True",
        ),
        ([("2", True), ("3", "no")], "x:1: column label is 'no', expected true or false"),
        ([("2", True), ("3", None)], "x:1: column label is None, expected true or false"),
        ([("2", True), ("3", 0.5)], "x:1: column label is 0.5, expected true or false"),
        ([("2", True), ("", False)], "x:1: column completion is empty"),
        ([("2", True), ("3", 10**400)], "x:1: column label is 10{49}, expected true or false"),
        ([("2", True)], "--loss kto: all rows have one prompt, the baseline needs completions of"),
    ],
)
def test_bad_kto_rows_are_refused(rows, words, tokenizer):
    rows = [dict(prompt=f"{i}+1=", completion=x, label=y) for i, (x, y) in enumerate(rows)]
    with pytest.raises(ValueError, match=words):
        args, found, _ = encoded(kto, rows, KTO, tokenizer)
        kto.with_mismatches(found, args)
        kto.describe_labels(found, args)


@pytest.mark.parametrize("margin", ["x", "nan", None, float("nan"), True, 10**400, "1e300"])
def test_bad_margins_are_refused(margin, tokenizer):
    for rows, bad in (([{}, dict(margin=1)], 0), ([dict(margin="1"), dict(margin=margin)], 1)):
        with pytest.raises(ValueError, match=f"x:{bad}: column margin is .*, expected a finite"):
            encoded(rm, [PAIR | row for row in rows], (*PAIR, "margin"), tokenizer)


# ---- whole runs ----

FLAGS = ["--batch_size", 4, "--eval_every", 0]


@pytest.mark.slow
def test_two_ranks_name_a_bad_row_once(tmp_path):
    rows = [GOOD] * 299 + [dict(prompt="1+1=")]
    write_rows(tmp_path / "deep.jsonl", rows)
    flags = ["--dataset", tmp_path / "deep.jsonl", "--output_dir", tmp_path / "run"]
    assert one_error(2, "sft.py", *FLAGS, *flags) == "deep.jsonl:300: column completion is missing"


@pytest.mark.slow
def test_two_ranks_refuse_a_flag_once():
    assert "unknown flag --bach_size" in one_error(2, "sft.py", "--bach_size", 4)


@pytest.mark.slow
def test_bad_input_gives_exit_code_2(tmp_path):
    error = one_error(1, "sft.py", "--max_length", 4096, "--output_dir", tmp_path)
    assert error == "--max_length 4096: the model's context has 2048 tokens"


@pytest.mark.slow
def test_two_ranks_refuse_truncated_weights(tmp_path):
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    os.truncate(model / "model.safetensors", 100_000)
    flags = ("--model", model, "--dataset", few_rows(tmp_path), "--output_dir", tmp_path / "run")
    error = one_error(2, "sft.py", *FLAGS, *flags)
    assert error.startswith(f"--model {model}: cannot read the checkpoint")


def few_rows(folder) -> Path:
    """Write twelve questions in a form that every script of supervised learning accepts."""
    rows = [
        dict(prompt=f"{n}+1=", completion=f"{n + 1}", chosen=f"{n + 1}", rejected="0")
        for n in range(10, 22)
    ]
    return write_rows(folder / "rows.jsonl", rows)


def test_diverging_run_stops_before_the_optimizer_step(main, tmp_path):
    flags = ["--lr", 1e30, "--lr_schedule", "constant", "--max_steps", 5, "--output_dir", tmp_path]
    with pytest.raises(RunError, match="is nan: stopped before the optimizer step"):
        main("sft", *FLAGS, *flags, "--dataset", few_rows(tmp_path))
    assert not list((tmp_path / "checkpoints").iterdir()) and not (tmp_path / "hf").exists()


@pytest.mark.slow
def test_failing_rewards_stop_two_ranks(tmp_path):
    (tmp_path / "rewards.py").write_text("def fails(completion, row): raise KeyError('score')")
    flags = [
        "--reward", f"{tmp_path}/rewards.py:fails", "--prompts_per_step", 2,
        "--samples_per_prompt", 2, "--max_new_tokens", 4, "--eval_every", 0,
        "--engine", "transformers", "--dataset", few_rows(tmp_path),
        "--output_dir", tmp_path / "run",
    ]  # fmt: skip
    error = one_error(2, "grpo.py", *flags)
    problem = "4 of 4 rewards could not be computed (--max_reward_errors 0.1)"
    assert f"{problem}; the first: fails on rows.jsonl" in error


NONE_LEFT = "rows.jsonl: no rows are left: 12 dropped as too long (--max_length)"
DATA_ERRORS = [
    ("sft", "--overlong error --max_length 5",
     "rows.jsonl:1: 8 tokens exceed --max_length 5; set --overlong drop or"),
    *((script, "--max_length 3", NONE_LEFT) for script in ("sft", "dpo", "kto", "rm")),
    *((script, "--reference_model /absent", "--reference_model /absent: no such folder")
      for script in ("dpo", "kto")),
    *((script, f"--{flag} ''", f"--{flag} '': the name is empty")  # of an unset shell variable
      for script, flag in (("sft", "model"), ("dpo", "reference_model"))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "flags", "words"), DATA_ERRORS, ids=[f"{s} {f}" for s, f, _ in DATA_ERRORS]
)
def test_started_script_refuses_bad_input_without_a_checkpoint(
    script, flags, words, main, tmp_path
):
    flags = (*shlex.split(flags), "--dataset", few_rows(tmp_path), "--output_dir", tmp_path)
    with pytest.raises(ValueError) as error:
        main(script, *flags, "--eval_every", 0)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.glob("checkpoints/*"))


def test_data_of_bad_rows_alone_says_so(main, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [dict(prompt="1+1=", chosen=" ", rejected="3")])
    with pytest.raises(ValueError, match=r"rows\.jsonl: no rows are left: all are bad$"):
        main("dpo", "--dataset", data, "--on_bad_row", "skip", "--eval_every", 0,
             "--output_dir", tmp_path)  # fmt: skip
