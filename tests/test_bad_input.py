"""Bad input: one line that starts with `error: ` and names the flag, the file, the row or the column; exit code 2."""

import importlib
import json
import os
import shutil
import sys

import pytest

import bok
import dpo
import grpo
import online_dpo
import ppo
import rloo
import rm
import sft
from common.cli import parse
from common.config import RolloutArgs
from common.data import Encoder
from common.hub import load_tokenizer, require_same_tokenizer, resolve_model
from common.prompts import encode_prompts
from common.rewards.scoring import Rewards, load_reward
from common.rows import PROMPT_COLUMNS, SFT_COLUMNS, load_rows, require_columns, train_and_eval_rows
from common.tiny import tiny_model
from tests.helpers import run

evaluation = importlib.import_module("eval")  # `import eval` would hide the builtin


def the_error(stderr: str) -> str:
    """The one line we print; torchrun's own summary comes after it."""
    ours = stderr.split("torch/distributed/elastic")[0]
    assert "Traceback" not in ours, ours
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


# ---- flags ----

NOT_YAML = {
    "list.yaml": "- lr",
    "broken.yaml": "lr: [1\nseed: {",
    "nested.yaml": "lr: {peak: 1}",
    "unknown.yaml": "lrr: 1",
}
CONFIG_ERRORS = [
    ("absent.yaml", "absent.yaml: No such file"),
    ("list.yaml", "list.yaml: expected `flag: value` lines"),
    ("broken.yaml", "broken.yaml: not valid YAML"),
    ("nested.yaml", "nested.yaml: lr must be a plain value"),
    ("unknown.yaml", "unknown.yaml: unknown key lrr (did you mean lr?)"),
    ("bytes.yaml", "bytes.yaml: not valid YAML"),
]
FLAG_ERRORS = [
    (sft, "--leraning_rate 1", "unknown flag --leraning_rate"),
    (sft, "--sed 1", "unknown flag --sed (did you mean --seed?)"),
    (sft, "stray", "stray"),
    (sft, "--lr fast", "--lr: could not convert string to float: 'fast'"),
    (sft, "--lr", "Missing value for argument '--lr'"),
    (sft, "--max_steps 1.5", "--max-steps"),
    (sft, "--max_steps 0", "--max_steps 0 must be at least 1"),
    (sft, "--resume maybe", "invalid choice 'maybe' for argument '--resume'"),
    (sft, "--compile perhaps", "'--compile'"),
    (sft, "--log paper", "invalid choice 'paper' for argument '--log'"),
    (sft, "--lr 0", "--lr 0.0 must be greater than 0"),
    (sft, "--lr inf", "--lr inf must be a finite number"),
    (sft, "--epochs inf", "--epochs inf must be a finite number"),
    (sft, "--weight_decay nan", "--weight_decay nan must be a finite number"),
    (sft, "--warmup_steps -1", "--warmup_steps -1 must be a finite number and not negative"),
    (sft, "--adam_beta2 1", "--adam_beta2 1.0 must be in [0, 1)"),
    (sft, "--keep_last 0", "--keep_last 0 must be greater than 0"),
    (sft, "--max_length 9000", "--max_length 9000 does not fit in --pack_tokens 8192"),
    (sft, "--batch_size 7", "--batch_size 7 is not a multiple of the number of ranks (2)"),
    (grpo, "--samples_per_prompt 1", "--samples_per_prompt 1: GRPO compares samples"),
    (grpo, "--prompts_per_step 7", "--prompts_per_step 7 is not a multiple of the number of ranks that train (2)"),
    (grpo, "--prompts_per_step 8 --minibatches 3", "--prompts_per_step 8 is not a multiple of --minibatches (3)"),
    (grpo, "--prompts_per_step 6 --minibatches 2", "not a multiple of the ranks that train times --minibatches (4)"),
    (grpo, "--tensor_parallel_size 3", "--tensor_parallel_size 3 does not divide the 2 ranks that generate"),
    (grpo, "--max_new_tokens 9000", "--max_new_tokens 9000 leaves no prompt in --pack_tokens 8192"),
    (grpo, "--temperature 0", "--temperature 0.0 must be greater than 0"),
    (grpo, "--reward", "--reward needs at least one name"),
    (grpo, "--reward_weights 1 2", "--reward_weights has 2 values for 1 rewards"),
    (grpo, "--reward_weights nan", "--reward_weights nan must be finite"),
    (grpo, "--max_reward_errors 7", "--max_reward_errors 7.0 must be in [0, 1]"),
    (grpo, "--reward_timeout 0", "--reward_timeout 0.0 must be greater than 0"),
    (grpo, "--reward_timeout inf", "--reward_timeout inf must be a finite number"),
    (grpo, "--reward_workers 0", "--reward_workers 0 must be greater than 0"),
    (grpo, "--environment calculator", "--environment and --reward environment, what it gives, belong together"),
    (grpo, "--reward environment", "--environment and --reward environment, what it gives, belong together"),
    (bok, "--reward environment", "--environment and --reward environment, what it gives, belong together"),
    (bok, "--environment calculator", "unknown flag --environment"),
    (grpo, "--max_turns 3", "--max_turns 3 would not be read: there is no --environment"),
    (grpo, "--environment calculator --reward environment --max_turns 0", "--max_turns 0 must be greater than 0"),
    (evaluation, "--ks 1 5", "--ks 5: 1 to 4, that is --samples_per_prompt"),
    (evaluation, "--ks 0", "--ks 0: 1 to 4, that is --samples_per_prompt"),
    (evaluation, "--greedy false --samples_per_prompt 0", "--samples_per_prompt 0 leaves no completion"),
    (evaluation, "--samples_per_prompt -1", "--samples_per_prompt -1 must be a finite number and not negative"),
    (evaluation, "--max_prompts 0", "--max_prompts 0 must be greater than 0"),
    (evaluation, "--lr 1", "unknown flag --lr"),
    (evaluation, "--prompts_per_batch 0", "--prompts_per_batch 0 must be greater than 0"),
    (evaluation, "--environment calculator --reward environment --prompt_template x", "--prompt_template x would not"),
    (grpo, "--clip_low 1", "--clip_low 1.0 must be below 1"),
    (grpo, "--loss gspo", "--loss gspo is of whole completions: --reduction sequence, not token"),
    (grpo, "--loss cispo --clip_low 0.1", "--clip_low 0.1 would not be read: --loss is cispo"),
    (grpo, "--dual_clip 0.5", "--dual_clip 0.5 must be above 1, or 0 for none"),
    (grpo, "--sapo_tau_negative 2", "--sapo_tau_negative 2.0 would not be read: --loss is clip"),
    (grpo, "--preset dapo --loss cispo", "--loss cispo contradicts --preset dapo: loss is clip"),
    (grpo, "--preset gspo --clip_high 0.28", "--clip_high 0.28 contradicts --preset gspo: clip_high is 0.0004"),
    (grpo, "--preset dapoo", "--preset dapoo: unknown; there are grpo, dr_grpo, dapo"),
    (grpo, "--kl_in reward", "--kl_in reward would not be read: --beta is 0"),
    (grpo, "--kl_target 0.1", "--kl_target adapts --beta: start it above 0"),
    (grpo, "--advantage gdpo --reward_clip 1", "--advantage gdpo normalises each reward: no --reward_scale, _clip"),
    (grpo, "--advantage leave_one_out --samples_per_prompt 1", "--samples_per_prompt 1: GRPO compares samples"),
    (grpo, "--top_entropy 0", "--top_entropy 0.0 is a fraction of the tokens"),
    (grpo, "--clip_high 1e308", "--clip_high 1e+308 must be a finite number and not negative"),
    (grpo, "--loss sapo --sapo_tau_positive inf", "--sapo_tau_positive inf must be a finite number"),
    (grpo, "--correction_high nan", "--correction_low and --correction_high: the bounds 0 and nan cross"),
    (grpo, "--max_logprob_difference nan", "--max_logprob_difference nan must be greater than 0"),
    (grpo, "--loss gspo --reduction sequence", "--loss gspo is of whole completions: --correction sequence or none"),
    (grpo, "--preset gspo --top_entropy 0.5", "--loss gspo is of whole completions: --top_entropy 1.0, not 0.5"),
    (grpo, "--mask_truncated --kl_in reward --beta 1", "--mask_truncated: a completion that is masked has no KL"),
    (grpo, "--max_draws -1", "--max_draws -1 must be a finite number and not negative"),
    (grpo, "--correction_low 3", "--correction_low and --correction_high: the bounds 3 and 2 cross"),
    (grpo, "--correction_filter 1 0.5", "--correction_filter: the bounds 1 and 0.5 cross"),
    (grpo, "--correction none --correction_high 3", "--correction_high 3.0 would not be read: --correction is none"),
    (grpo, "--overlong_buffer 2", "--overlong_buffer 2.0 is a fraction of max_new_tokens"),
    (grpo, "--overlong_penalty 2", "--overlong_penalty 2.0 would not be read: --overlong_buffer is 0"),
    (grpo, "--missing_eos_penalty -1", "--missing_eos_penalty -1.0 must be a finite number and not negative"),
    (grpo, "--reward_scale inf", "--reward_scale inf must be a finite number"),
    (rloo, "--correction token", "invalid choice 'token' for argument '--correction'"),
    (ppo, "--prompts_per_step 6 --minibatches 4", "--prompts_per_step 6 is not a multiple of --minibatches (4)"),
    (ppo, "--gae_lambda 1.5", "--gae_lambda 1.5 must be in [0, 1]"),
    (ppo, "--gamma -1", "--gamma -1.0 must be in [0, 1]"),
    (ppo, "--value_warmup_steps 5 --max_steps 5", "--value_warmup_steps 5 leaves no step of --max_steps"),
    (ppo, "--minibatches 1 --kl_stop 0.1", "--kl_stop 0.1 would not be read: a rollout has one update only"),
    (ppo, "--reward_scale 0", "--reward_scale 0.0 must be greater than 0"),
    (ppo, "--value_lr 0", "--value_lr 0.0 must be greater than 0"),
    (ppo, "--value_clip -1", "--value_clip -1.0 must be a finite number and not negative"),
    (ppo, "--clip_low 1", "--clip_low 1.0 must be below 1"),
    (ppo, "--beta 0 --kl_clamp 1", "--kl_clamp 1.0 would not be read: --beta is 0"),
    (ppo, "--lambda_alpha 0.05 --value_lambda 1 --gae_lambda 0.9", "--gae_lambda 0.9 would not be read"),
    (rloo, "--samples_per_prompt 1", "--samples_per_prompt 1: the baseline is the others, it needs at least 2"),
    (rloo, "--prompts_per_step 6 --minibatches 2", "not a multiple of the ranks that train times --minibatches (4)"),
    (rloo, "--beta -1", "--beta -1.0 must be a finite number and not negative"),
    (rloo, "--clip_low 1", "--clip_low 1.0 must be below 1"),
    (dpo, "--beta 0", "--beta 0.0 must be greater than 0"),
    (dpo, "--beta nan", "--beta nan must be greater than 0"),
    (dpo, "--loss dop", "--loss dop: unknown; there are sigmoid, robust"),
    (dpo, "--loss", "--loss needs at least one name, and each once; here: None"),
    (dpo, "--loss ipo ipo", "--loss needs at least one name, and each once; here: ipo ipo"),
    (dpo, "--loss_weights 1 2", "--loss_weights has 2 values for 1 losses"),
    (dpo, "--loss_weights -1", "--loss_weights and --sft_weight must be finite and not negative"),
    (dpo, "--sft_weight -1", "--loss_weights and --sft_weight must be finite and not negative"),
    (dpo, "--label_smoothing 0.5", "--label_smoothing 0.5 must be in [0, 0.5)"),
    (dpo, "--loss ipo --label_smoothing 0.1", "--label_smoothing 0.1 would not be read: --loss ipo"),
    (dpo, "--loss exo_pair", "--loss exo_pair needs --label_smoothing above 0"),
    (dpo, "--loss ipo --f_divergence js", "--f_divergence js would not be read: --loss ipo"),
    (dpo, "--length_normalize false", "--length_normalize False would not be read: --loss sigmoid"),
    (dpo, "--loss discopop --discopop_tau 2", "--discopop_tau 2.0 must be at most 1"),
    (dpo, "--simpo_gamma 1", "--simpo_gamma 1.0 would not be read: --loss sigmoid"),
    (dpo, "--f_alpha 0.1", "--f_alpha 0.1 would not be read"),
    (dpo, "--discopop_tau 0.1", "--discopop_tau 0.1 would not be read"),
    (dpo, "--sft_length_normalize false", "--sft_length_normalize False would not be read"),
    (dpo, "--loss kto sigmoid", "--loss kto is of single completions"),
    (dpo, "--loss kto --sft_weight 1", "--loss kto is of single completions"),
    (dpo, "--desirable_weight 2", "--desirable_weight and --undesirable_weight have no meaning in --loss sigmoid"),
    (dpo, "--loss simpo --reference_model x", "--loss simpo has no reference"),
    (dpo, "--loss orpo --reference_logprobs online", "--loss orpo has no reference"),
    (dpo, "--ld_alpha 1.5", "--ld_alpha 1.5 must be in [0, 1]"),
    (dpo, "--loss simpo --ld_alpha 0.5", "--ld_alpha is for summed log-ratios of pairs"),
    (dpo, "--max_length 4098", "two sequences of --max_length 4098 exceed --pack_tokens 8192"),
    (grpo, "--rollout_ranks 2", "--rollout_ranks 2: of 2 ranks 0 to 1 may only generate"),
    (ppo, "--rollout_ranks -1", "--rollout_ranks -1: of 2 ranks 0 to 1 may only generate"),
    (rloo, "--rollout_ranks 1 --max_staleness -1", "--max_staleness -1 must be a finite number and not negative"),
    (rloo, "--max_staleness 2", "--max_staleness 2 would not be read: --rollout_ranks is 0"),
    (bok, "--rollout_ranks 1 --tensor_parallel_size 2", "--tensor_parallel_size 2 does not divide the 1 ranks that"),
    (online_dpo, "--samples_per_prompt 1", "--samples_per_prompt 1: a pair needs at least 2"),
    (online_dpo, "--loss kto", "--loss kto looks at single completions: it is for dpo.py"),
    (online_dpo, "--loss sigmoid aot", "--loss aot looks at all pairs of a batch at once: it is for dpo.py"),
    (online_dpo, "--loss simpo --f_divergence js", "--f_divergence js would not be read"),
    (online_dpo, "--missing_eos_penalty -1", "--missing_eos_penalty -1.0 must be a finite number and not negative"),
    (bok, "--samples_per_prompt 1", "--samples_per_prompt 1: the best of k needs at least 2"),
    (bok, "--keep 4", "--keep 4: 1 to 3 of --samples_per_prompt"),
    (bok, "--keep 0", "--keep 0: 1 to 3 of --samples_per_prompt"),
    (bok, "--keep 2 --keep_above 0.5", "--keep 2 would not be read: --keep_above replaces it"),
    (bok, "--keep_above nan", "--keep_above nan must be a finite number"),
    (bok, "--offline --beta 0.1", "--beta 0.1 would not be read: with --offline"),
    (bok, "--offline --rollout_ranks 1", "--rollout_ranks 1 would not be read: with --offline"),
    (dpo, "--batch_size 7", "--batch_size 7 is not a multiple of the number of ranks (2)"),
    (rm, "--center_coefficient -1", "--center_coefficient -1.0 must not be negative"),
    (rm, "--max_length 4097", "two sequences of --max_length 4097 exceed --pack_tokens 8192"),
    (rm, "--relabel out.csv", "--relabel out.csv must end in .jsonl"),
]


@pytest.mark.parametrize(("script", "flags", "words"), FLAG_ERRORS, ids=[flags for _, flags, _ in FLAG_ERRORS])
def test_flags(script, flags, words, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as done:
        parse(script.Args, flags.split())
    assert done.value.code == 2
    message = the_error(capsys.readouterr().err)
    assert words in message and "full helptext" not in message


def test_the_message_is_plain_in_a_terminal_too(capsys, monkeypatch):
    """Where tyro draws its box in colour."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    for flags, message in (
        (["--dual_clip", "1"], "--dual_clip 1.0 must be above 1, or 0 for none"),
        (["--lr", "fast"], "Error parsing --lr: could not convert string to float: 'fast'"),
    ):
        with pytest.raises(SystemExit):
            parse(grpo.Args, flags)
        assert the_error(capsys.readouterr().err) == message


@pytest.mark.parametrize(("name", "words"), CONFIG_ERRORS, ids=[name for name, _ in CONFIG_ERRORS])
def test_config_file(name, words, tmp_path, capsys):
    for file, text in NOT_YAML.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit) as done:
        parse(sft.Args, ["--config", str(tmp_path / name)])
    assert done.value.code == 2
    error = the_error(capsys.readouterr().err)
    assert error.startswith("--config") and words in error


# ---- models ----


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/absent/folder", "no such folder"),
        ("./absent", "no such folder"),
        (__file__, "no such folder"),
        ("nobody/nothing", "not in the local cache, and the hub cannot be reached"),
        ("no body", "not a valid Hugging Face id"),
    ],
)
def test_model_not_found(model, words, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as error:
        resolve_model(model)
    assert str(error.value).startswith(f"--model {model}: ") and words in str(error.value)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.json", None, "the folder has no config.json"),
        ("tokenizer_config.json", None, "the folder has no tokenizer_config.json"),
        ("model.safetensors", None, "the folder has no *.safetensors weights"),
        ("config.json", "{oops", "config.json is not valid JSON"),
        ("tokenizer.json", "{oops", "tokenizer.json is not valid JSON"),
        ("tokenizer.json", "{}", "the tokenizer cannot be loaded"),
        ("tokenizer.json", None, "the tokenizer cannot be loaded"),
        ("config.json", '{"model_type": "nonesuch"}', "config.json: "),
        ("config.json", '{"model_type": "qwen3", "num_hidden_layers": "four"}', "num_hidden_layers"),
        ("config.json", '{"model_type": "clip"}', "clip is not a causal language model"),
    ],
)
def test_model_folder(file, text, words, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(ValueError) as error:
        load_tokenizer(resolve_model(str(folder)))
    assert str(error.value).startswith(f"--model {folder}: ") and words in str(error.value)


# ---- data ----

GOOD = dict(prompt="1+1=", completion="2", answer="2")
FILE_ERRORS = [
    ("empty.jsonl", "", "empty.jsonl is empty"),
    ("blank.jsonl", "\n\n", "blank.jsonl is empty"),
    ("broken.jsonl", '{"prompt": "a"}\n\n{"prompt": oops\n', "line 3 is not valid JSON"),
    ("broken.json", '[{"prompt": "a"},\n {"prompt":}]', "line 2 is not valid JSON"),
    ("list.jsonl", '{"prompt": "a"}\n[1, 2]\n', "list.jsonl:2 is not an object"),
    ("number.json", '[{"prompt": "a"}, 3]', "number.json:2 is not an object"),
    ("bytes.jsonl", b"\xff\xfe", "can't decode"),
    ("rows.txt", "a", "expected a .jsonl, .json, .parquet or .csv file"),
    ("rows.parquet", "not parquet", "cannot be read"),
    ("empty.csv", "", "cannot be read"),
]


@pytest.mark.parametrize(("name", "text", "words"), FILE_ERRORS, ids=[name for name, _, _ in FILE_ERRORS])
def test_data_file(name, text, words, tmp_path):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as error:
        load_rows("--dataset", str(path), "train")
    assert str(error.value).startswith(f"--dataset {path}: ") and words in str(error.value)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("/absent.jsonl", "no such file"),
        ("absent.csv", "no such file"),
        ("nobody/nothing", "no such file or folder, and not found on the hub"),
        ("a/b/c", "no such file or folder, and not found on the hub"),
    ],
)
def test_dataset_not_found(dataset, words, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as error:
        load_rows("--eval_dataset", dataset, "train")
    assert str(error.value).startswith(f"--eval_dataset {dataset}: ") and words in str(error.value)


def test_empty_folder(tmp_path):
    with pytest.raises(ValueError, match="--dataset .*: no .jsonl, .json, .parquet or .csv files in it"):
        load_rows("--dataset", str(tmp_path), "train")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(dataset_split="validation"), "--dataset arithmetic has no split 'validation'"),
        (dict(eval_split="validation", eval_size=20000), "--eval_size 20000 leaves no training rows of 15952"),
        (dict(eval_dataset="/absent.jsonl"), "--eval_dataset /absent.jsonl: no such file"),
    ],
)
def test_splits(flags, words):
    with pytest.raises(ValueError) as error:
        train_and_eval_rows(sft.Args(**flags))
    assert words in str(error.value)


@pytest.mark.parametrize("choices", [SFT_COLUMNS, PROMPT_COLUMNS])
def test_columns(choices):
    with pytest.raises(ValueError, match="--dataset x has the columns foo, bar; needed: .*prompt"):
        require_columns("--dataset x", [dict(foo="a", bar="b", _source="x:1")], choices)


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
        (dict(messages=[USER, "2"]), "column messages must list objects with string role and content"),
        (dict(messages=[USER, dict(role="assistant")]), "column messages must list objects"),
        (dict(messages=[USER, dict(role=1, content="2")]), "column messages must list objects"),
    ],
)
def test_a_bad_row_is_named(bad, words, tokenizer, tmp_path):
    good = dict(messages=[USER, ANSWER]) if "messages" in bad else GOOD
    path = tmp_path / "deep.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*[good] * 298, bad, good]))
    rows, args = load_rows("--dataset", str(path), "train"), sft.Args()
    columns = require_columns("--dataset", rows, SFT_COLUMNS)
    with pytest.raises(ValueError) as error:
        sft.encode_rows(rows, columns, Encoder(tokenizer, args), args)
    assert str(error.value).startswith("deep.jsonl:299: ") and words in str(error.value)


PAIR, Q, A, B = dict(prompt="1+1=", chosen="2", rejected="3"), "1+1=", [ANSWER], [dict(ANSWER, content="3")]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dict(prompt=Q, chosen="2"), "column rejected is missing"),
        (dict(prompt=Q, rejected="2"), "column chosen is missing"),
        (dict(prompt=Q, chosen="2", rejected=A), "column rejected lists messages, column prompt is text"),
        (dict(prompt=Q, chosen="2", rejected=3), "column rejected is int, expected a string"),
        (dict(prompt=Q, chosen="", rejected="3"), "column chosen is empty"),
        (dict(prompt=Q, chosen="2", rejected=" \n"), "column rejected is empty"),
        (dict(prompt="", chosen="2", rejected="3"), "column prompt is empty"),
        (dict(chosen="1+1=2", rejected="2+1=3"), "chosen and rejected do not begin with the same prompt"),
        (dict(chosen="2", rejected="3"), "chosen and rejected do not begin with the same prompt"),
        (dict(chosen=A, rejected=B), "chosen and rejected do not begin with the same prompt"),
        (dict(chosen=[USER, *A], rejected=[dict(USER, content="3"), *B]), "do not begin with the same prompt"),
        (dict(chosen=[USER, *A], rejected="1+1=3"), "one of chosen and rejected lists messages"),
        (dict(chosen=[USER, *A], rejected=[USER]), "column rejected is empty"),
        (dict(chosen=[USER, *A], rejected=[USER, dict(ANSWER, content="")]), "column rejected is empty"),
        (dict(chosen=[USER, "2"], rejected=[USER, *B]), "column chosen must list objects"),
    ],
)
@pytest.mark.parametrize("script", [dpo, rm])
def test_a_bad_pair_is_named(bad, words, script, tokenizer):
    args = script.Args()
    rows = [row | dict(_source=f"pairs.jsonl:{i}") for i, row in enumerate([PAIR, bad], 1)]
    columns = ("prompt", "chosen", "rejected") if "prompt" in bad else ("chosen", "rejected")
    rows[0] = rows[0] if "prompt" in bad else dict(chosen="1+1= 2", rejected="1+1= 3", _source="pairs.jsonl:1")
    with pytest.raises(ValueError) as error:
        script.encode_rows(rows, columns, Encoder(tokenizer, args), args)
    assert str(error.value).startswith("pairs.jsonl:2: ") and words in str(error.value)


@pytest.mark.parametrize("script", [dpo, rm])
def test_identical_pairs_are_counted_and_dropped(script, tokenizer):
    rows = [dict(PAIR, _source="x:1"), dict(prompt=Q, chosen="2", rejected="2", _source="x:2")]

    def encode(**flags):
        args = script.Args(**flags)
        return script.encode_rows(rows, tuple(PAIR), Encoder(tokenizer, args), args)

    cut, counts = encode(max_length=6, overlong="truncate")  # 1+1=2 and 1+1=3 keep their difference, 1+1= does not
    assert len(cut) == 1
    cut, counts = encode(max_length=4, overlong="truncate")
    assert not cut and counts == {"dropped as too long (--max_length)": 2}
    pairs, counts = encode()
    assert len(pairs) == 1 and counts == {"with chosen = rejected (--identical_pairs)": 1}
    assert len(encode(identical_pairs="keep")[0]) == 2
    with pytest.raises(ValueError, match="x:2: chosen and rejected are the same"):
        encode(identical_pairs="error")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("2", True), ("3", True)], "rows with label false; all are True"),
        ([("2", True), ("3", "no")], "x:1: column label must be true or false"),
        ([("2", True), ("3", None)], "x:1: column label must be true or false"),
        ([("2", True), ("", False)], "x:1: column completion is empty"),
    ],
)
def test_bad_kto_rows(rows, words, tokenizer):
    args = dpo.Args(loss=("kto",))
    rows = [
        dict(prompt=f"{i}+1=", completion=completion, label=label, _source=f"x:{i}")
        for i, (completion, label) in enumerate(rows)
    ]
    with pytest.raises(ValueError, match=words):
        groups, _ = dpo.encode_rows(rows, ("prompt", "completion", "label"), Encoder(tokenizer, args), args)
        dpo.require_both_labels(groups)
    del rows[1]["label"]
    with pytest.raises(ValueError, match="x:1: column label"):
        dpo.encode_rows(rows, ("prompt", "completion", "label"), Encoder(tokenizer, args), args)
    with pytest.raises(ValueError, match="--loss kto needs rows with different prompts"):
        dpo.encode_rows([dict(PAIR, _source="x:1")], tuple(PAIR), Encoder(tokenizer, args), args)


@pytest.mark.parametrize("margin", ["1", None, float("nan"), True])
@pytest.mark.parametrize("first", [0, 1])
def test_bad_margins(margin, first, tokenizer):
    rows = [dict(PAIR, margin=1), dict(PAIR, margin=margin)] if first else [dict(PAIR), dict(PAIR, margin=1)]
    rows = [row | dict(_source=f"x:{i}") for i, row in enumerate(rows)]
    with pytest.raises(ValueError, match=f"x:{first}: column margin is .*, expected a finite number"):
        rm.encode_rows(rows, tuple(PAIR), Encoder(tokenizer, args := rm.Args()), args)


def test_a_reference_file_that_is_damaged(tmp_path, device):
    args = dpo.Args(output_dir=str(tmp_path))
    for text in ("{", "[]", '{"logps": []}', "null"):
        (tmp_path / "reference_logps.json").write_text(text)
        with pytest.raises(ValueError, match="reference_logps.json is damaged, delete it"):
            dpo.store_reference_logps([], tiny_model(), None, args, device)


@pytest.mark.parametrize("relabel", ["/proc/out.jsonl", "folder.jsonl", "pairs.jsonl"])
def test_relabelling_to_where_nothing_can_be_written(relabel, tokenizer, tmp_path, monkeypatch, device):
    """Before the model is loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "pairs.jsonl").write_text(json.dumps(PAIR) + "\n")
    args = rm.Args(relabel=relabel, dataset="pairs.jsonl", output_dir=str(tmp_path))
    with pytest.raises(ValueError, match=f"--relabel {relabel}"):
        rm.score_dataset(args, "/absent", Encoder(tokenizer, args), device, 0, 1)


def test_a_reference_with_another_tokenizer_or_vocabulary(tokenizer, tmp_path):
    for name, edit in (
        ("tokenizer.json", ('"0":0', '"é":0')),
        ("config.json", ('"vocab_size": 356', '"vocab_size": 9')),
    ):
        folder = tmp_path / name
        shutil.copytree(tiny_model(), folder)
        text = (folder / name).read_text()
        compact = text if edit[0] in text else text.replace('"0": 0', '"0":0')
        assert edit[0] in compact
        (folder / name).write_text(compact.replace(*edit))
        with pytest.raises(ValueError, match="--reference_model .*(another tokenizer|its vocabulary of 9)"):
            require_same_tokenizer("--reference_model", str(folder), tokenizer)


def test_overlong_rows(tokenizer):
    args = sft.Args(max_length=5, overlong="error")
    with pytest.raises(ValueError, match="a:1 has 6 tokens, --max_length is 5"):
        sft.encode_rows([GOOD | dict(_source="a:1")], ("prompt", "completion"), Encoder(tokenizer, args), args)


@pytest.mark.parametrize(
    ("prompt", "flags", "words"),
    [
        ("9" * 50, {}, "a:2: a prompt of 50 tokens, the context (or --pack_tokens) has 40"),
        ("", {}, "a:2: column prompt is empty"),
        (None, {}, "a:2: column prompt is missing"),
    ],
)
def test_prompts(prompt, flags, words, tokenizer):
    args = grpo.Args(**flags)
    rows = [GOOD | dict(_source="a:1"), dict(prompt=prompt, _source="a:2")]
    with pytest.raises(ValueError) as error:
        encode_prompts(rows, ("prompt",), Encoder(tokenizer, args), 40, args)
    assert words in str(error.value)


def test_no_prompt_left(tokenizer):
    args = grpo.Args(overlong_prompts="drop")
    with pytest.raises(ValueError, match="no prompt has at most 2 tokens"):
        encode_prompts([GOOD | dict(_source="a:1")], ("prompt",), Encoder(tokenizer, args), 2, args)


# ---- rewards ----

REWARD_FILE = """
import random

def half(completion, row):
    if row["number"] % 2:
        raise KeyError("odd\\nsecond line")
    return 1.0

def leaves(completion, row): raise SystemExit(0)
def wrong(completion, row): return [1]
def forever(completion, row):
    while True: pass
def infinite(completion, row): return float("inf")
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exact_mach", "unknown; there are exact_match"),
        ("{}/absent.py:f", "no file"),
        ("{}/rewards.py:absent", "has no function absent"),
        ("{}/missing.py:f", "fails to import: ModuleNotFoundError: No module named 'nonesuch'"),
        ("{}/syntax.py:f", "fails to import: SyntaxError"),
        ("{}/leaves.py:f", "fails to import: SystemExit"),
    ],
)
def test_reward_name(name, words, tmp_path):
    files = {"rewards.py": REWARD_FILE, "missing.py": "import nonesuch", "syntax.py": "def f(:",
             "leaves.py": "raise SystemExit(0)"}  # fmt: skip
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    name = name.format(tmp_path)
    with pytest.raises(ValueError) as error:
        load_reward(name)
    assert str(error.value).startswith(f"--reward {name}: ") and words in str(error.value)


def test_reward_column():
    with pytest.raises(ValueError, match="--reward exact_match reads column answer; the dataset has prompt$"):
        Rewards(RolloutArgs(), [dict(prompt="a", _source="a:1")], None, None)
    with pytest.raises(ValueError, match="a:2: column answer is missing, --reward exact_match reads it"):
        Rewards(RolloutArgs(), [dict(answer="1", _source="a:1"), dict(answer=None, _source="a:2")], None, None)


@pytest.mark.parametrize(
    ("function", "limit", "words"),
    [
        (
            "half",
            0.4,
            "2 of 4 rewards could not be computed (--max_reward_errors 0.4); the first: half on a:1: KeyError",
        ),
        ("leaves", 0.9, "4 of 4 rewards could not be computed"),
        ("wrong", 0.9, "the first: wrong on a:0: TypeError"),
        ("forever", 0.9, "4 of 4 rewards could not be computed"),
        ("infinite", 0.9, "the first: infinite on a:0: returned inf"),
        ("half", 0.5, None),
    ],
)
def test_reward_errors(function, limit, words, tmp_path):
    from common.distributed import RunError
    from common.metrics import Meter
    from common.packing import Sample

    (tmp_path / "rewards.py").write_text(REWARD_FILE)
    rows = [dict(number=i, _source=f"a:{i}") for i in range(4)]
    groups = [[Sample(ids=[0], loss_mask=[True], row=row)] for row in rows]
    args = RolloutArgs(reward=(f"{tmp_path}/rewards.py:{function}",), max_reward_errors=limit, reward_timeout=0.3)
    rewards, meter = Rewards(args, rows, None, None), Meter()
    if words is None:
        total_PG, _ = rewards(groups, meter)
        assert total_PG.isnan().flatten().tolist() == [False, True, False, True] and total_PG.nansum() == 2
        return
    with pytest.raises(RunError) as error:
        rewards(groups, meter)
    metrics = meter.reduce()
    assert metrics["reward/error_fraction"] == (0.5 if function == "half" else 1.0)
    assert metrics["reward/timeout_fraction"] == float(function == "forever")
    assert words in str(error.value) and "\n" not in str(error.value)


# ---- whole runs ----

FLAGS = ["--batch_size", 4, "--eval_every", 0]


def one_error(ranks: int, script: str, *flags, code: int) -> str:
    """Exit code and message of a run that must fail, and end long before a launcher or a collective gives up."""
    done = run(ranks, script, *flags, code=1 if ranks > 1 else code, timeout=45)
    return the_error(done.stderr)


@pytest.mark.slow
def test_two_ranks_name_a_bad_row_once(tmp_path):
    rows = [GOOD] * 299 + [dict(prompt="1+1=")]
    (tmp_path / "deep.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--dataset", tmp_path / "deep.jsonl", "--output_dir", tmp_path / "run"]
    assert one_error(2, "sft.py", *FLAGS, *flags, code=2) == "deep.jsonl:300: column completion is missing"


@pytest.mark.slow
def test_two_ranks_refuse_a_flag_once(tmp_path):
    assert "unknown flag --bach_size" in one_error(2, "sft.py", "--bach_size", 4, code=2)


@pytest.mark.slow
def test_truncated_weights(tmp_path):
    shutil.copytree(tiny_model(), tmp_path / "model")
    os.truncate(tmp_path / "model" / "model.safetensors", 100_000)
    flags = ["--model", tmp_path / "model", "--output_dir", tmp_path / "run"]
    error = one_error(2, "sft.py", *FLAGS, *flags, code=2)
    assert error.startswith(f"--model {tmp_path / 'model'}: cannot read the checkpoint")


@pytest.mark.slow
def test_output_dir_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    error = one_error(2, "sft.py", *FLAGS, "--output_dir", tmp_path / "file" / "run", code=2)
    assert error.startswith(f"--output_dir {tmp_path / 'file' / 'run'}: ")


@pytest.mark.slow
def test_a_diverging_run_stops_before_the_optimizer_step(tmp_path):
    flags = ["--lr", 1e30, "--lr_schedule", "constant", "--max_steps", 5, "--output_dir", tmp_path]
    error = one_error(1, "sft.py", *FLAGS, *flags, code=1)
    assert "is nan: stopped before the optimizer step" in error
    assert not list((tmp_path / "checkpoints").iterdir()) and not (tmp_path / "hf").exists()


@pytest.mark.slow
def test_rewards_that_fail_stop_the_run(tmp_path):
    (tmp_path / "rewards.py").write_text("def fails(completion, row): raise KeyError('score')")
    flags = ["--reward", f"{tmp_path}/rewards.py:fails", "--prompts_per_step", 2, "--samples_per_prompt", 2,
             "--max_new_tokens", 4, "--eval_every", 0, "--engine", "transformers",
             "--output_dir", tmp_path / "run"]  # fmt: skip
    error = one_error(2, "grpo.py", *flags, code=1)
    assert "4 of 4 rewards could not be computed (--max_reward_errors 0.1); the first: fails on arithmetic" in error


@pytest.mark.slow
def test_damaged_checkpoints(tmp_path):
    """The newest that is whole is taken, and the others are named; with none the run stops."""
    flags = [*FLAGS, "--save_every", 1, "--output_dir", tmp_path]
    error = one_error(1, "sft.py", *flags, "--resume", "must", code=2)
    assert error == f"--resume must: {tmp_path} has no checkpoint"
    run(1, "sft.py", *flags, "--keep_last", 3, "--max_steps", 3)
    checkpoints = tmp_path / "checkpoints"
    shards = next((checkpoints / "step_000003").glob("*.distcp"))
    damaged = bytearray(shards.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shards.write_bytes(damaged)
    (checkpoints / "step_000002" / "manifest.json").write_text("{}")
    shutil.copytree(checkpoints / "step_000001", checkpoints / "step_000009.tmp")

    resumed = run(2, "sft.py", *flags, "--keep_last", 9, "--max_steps", 2).stdout
    assert f"step_000003 is damaged ({shards.name} is not what was written)" in resumed
    assert "step_000002 is damaged (manifest.json does not list the checkpoint's files)" in resumed
    assert "step_000001 (step 1)" in resumed
    whole = ["step_000001", "step_000002"]
    assert sorted(p.name for p in checkpoints.iterdir() if p.suffix == "") == whole

    error = one_error(1, "sft.py", *flags, "--max_steps", 2, "--lr", 1, code=2)
    assert f"--output_dir {tmp_path} holds a run with other flags (lr was 2e-05, is 1.0)" in error
    for name in whole:
        next((checkpoints / name).glob("*.distcp")).unlink()
    for ranks in (2, 1):  # the second time too, when they have been set aside
        error = one_error(ranks, "sft.py", *flags, "--max_steps", 2, code=2)
        assert error == f"no checkpoint in {checkpoints} is whole: --resume never starts over"


def test_a_max_length_beyond_the_context_is_refused(tmp_path):
    done = run(1, "sft.py", "--max_length", 4096, "--output_dir", tmp_path, code=2)
    assert "error: --max_length 4096 is beyond the model's context, 2048 tokens" in done.stderr
