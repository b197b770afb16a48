"""distill.py: the objective by hand, runs that equal others, and refused input."""

import json
import math
import re
import shutil

import pytest
import torch
from helpers import metrics, read_rows, write_rows
from in_process import REWARD, write_teacher

import distill
from common.config.groups import TrainArgs
from common.model.distill import Comparison, Teacher
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.rollout.prompts import Prompts
from common.text.encode import Encoder
from common.text.tokenizer import load_tokenizer

SAME = (
    "loss", "grad_norm", "reverse_kl", "data/reverse_kl", "agreement", "data/agreement", "entropy",
    "teacher_entropy", "completions/mean_length", "num_tokens", "epoch", "reward",
)  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "hf")


@pytest.fixture(scope="module")
def flags(teacher, small, tmp_path_factory):
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)
    return (
        "--teacher", teacher, *small, "--reward", f"{reward}:digits", "--max_steps", 3,
        "--save_every", 2, "--prompts_per_step", 8, "--samples_per_prompt", 2, "--minibatches", 2,
        "--epochs_per_rollout", 2, "--on_policy_fraction", 0.5, "--divergence", "jsd",
        "--temperature", 0.8, "--max_new_tokens", 12, "--lr", 1e-4,
        "--warmup_steps", 0, "--eval_every", 0, "--max_logprob_difference", 1e-4,
        "--engine", "transformers", "--share_prefix", 1,
    )  # fmt: skip


# ---- the objective ----


def both(divergence, logprobs, teacher) -> Comparison:
    """Return student and teacher on tokens with these numbers; all other numbers are 0."""
    tensors = dict(divergence_T=divergence, logprobs_T=logprobs, teacher_logprobs_T=teacher)
    found = {name: torch.tensor(x, dtype=torch.float64) for name, x in tensors.items()}
    return Comparison(**dict.fromkeys(Comparison._fields, torch.zeros(len(logprobs))) | found)


MASK, SEQUENCES = torch.tensor([True, True, True, False]), torch.tensor([0, 0, 1, 1])


def test_full_loss_is_the_mean_divergence_of_the_global_minibatch():
    student = both([0.5, 2.0, 1.0, 9.0], [-1.0] * 4, [-2.0] * 4)
    args, old_T = distill.Args(), torch.zeros(4)
    share_T, logged = distill.loss(student, old_T, None, MASK, SEQUENCES, torch.tensor(10), args)
    assert share_T.sum().item() == pytest.approx(3.5 / 10) and logged == {}


def test_cross_entropy_is_added_on_completions_of_the_data():
    student, old_T = both([0.5, 2.0, 1.0, 9.0], [-1.0, -2.0, -3.0, -4.0], [0.0] * 4), torch.zeros(4)
    args, tokens = distill.Args(sft_weight=0.5, on_policy_fraction=0.5), torch.tensor(10)
    rest = (MASK, SEQUENCES, tokens, args)
    on_data_T, logged = distill.loss(student, old_T, None, *rest)
    assert on_data_T.sum().item() == pytest.approx((3.5 + 0.5 * 6) / 10)
    assert logged["data/cross_entropy"].tolist() == [1, 2, 3, 4]
    own_T, _ = distill.loss(student, old_T, old_T, *rest)
    assert own_T.sum().item() == pytest.approx(3.5 / 10)


def test_sampled_loss_equals_a_calculation_by_hand():
    """The second token's ratio is above its bound. For the third token the engine's probability was
    half of the trainer's."""
    student = both([0.0] * 4, [-1.0, -1.0, -2.0, -1.0], [-0.5, -1.5, -4.0, -1.0])
    student.logprobs_T.requires_grad_()
    old_T, rollout_T = torch.tensor(
        [[-1.0, -2.0, -2.0, -1.0], [-1.0, -2.0, -2.0 + math.log(0.5), -1.0]]
    ).double()
    args = distill.Args(estimator="sampled", correction_high=1.5)
    share_T, logged = distill.loss(
        student, old_T, rollout_T, MASK, SEQUENCES, torch.tensor(10), args
    )
    share_T.sum().backward()
    A = [0.5, 0.5, -2.0]
    assert share_T.sum().item() == pytest.approx((-A[0] - 1.2 * A[1] - 1.5 * A[2]) / 10)
    assert student.logprobs_T.grad.tolist() == pytest.approx([-A[0] / 10, 0, -1.5 * A[2] / 10, 0])
    assert logged["clip_ratio/region_mean"].tolist()[:3] == [False, True, False]


# ---- whole runs ----

SAMPLED = "--divergence reverse_kl --estimator sampled --on_policy_fraction 1".split()


@pytest.fixture(scope="module")
def domains(sums, tmp_path_factory):
    """Return flags for rows of `sums` in two domains, `usual` and `rare`."""
    rows = read_rows(sums)
    for i, row in enumerate(rows):
        row["domain"] = "rare" if i % 5 == 0 else "usual"
    file = tmp_path_factory.mktemp("domains") / "sums.jsonl"
    write_rows(file, rows)
    return ("--dataset", file, "--teacher_column", "domain")


@pytest.mark.slow
def test_held_out_loss_equals_the_training_loss(main, flags, tmp_path):
    """Training and held-out rows are the same. The training loss is taken before the step, so it
    equals the held-out loss of the step before."""
    rows = [dict(prompt=f"{i}+1=", completion=str(i + 1), answer=str(i + 1)) for i in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ("--dataset", tmp_path / "a.jsonl", "--eval_dataset", tmp_path / "a.jsonl")
    data += ("--eval_every", 2)
    alone = "--on_policy_fraction 0 --samples_per_prompt 1 --minibatches 1 --epochs_per_rollout 1"
    main("distill", *flags, *data, *alone.split(), "--reward", "--output_dir", tmp_path / "data")
    lines = metrics(tmp_path / "data")
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 2, 3]
    for before, trained in ((lines[0], lines[1]), (lines[2], lines[3])):
        assert before["eval_loss"] == pytest.approx(trained["loss"], rel=1e-5)
        assert before["eval/reverse_kl"] == pytest.approx(trained["data/reverse_kl"], rel=1e-5)
        assert before["eval/agreement"] == pytest.approx(trained["data/agreement"])
    main("distill", *flags, *data, *SAMPLED, "--output_dir", tmp_path / "sampled")
    line = metrics(tmp_path / "sampled")[-1]
    assert line["eval_loss"] == line["eval/reverse_kl"] > 0 and "eval/solved" in line


@pytest.mark.slow
def test_held_out_rows_without_completions_have_no_eval_loss(main, flags, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 9)
    data = ("--dataset", tmp_path / "a.jsonl", "--eval_size", 1, "--eval_every", 1)
    data += ("--max_steps", 1)
    main("distill", *flags, *data, *SAMPLED, "--output_dir", tmp_path / "run")
    assert "no eval_loss: the held-out rows have no completions" in capsys.readouterr().out
    for line in metrics(tmp_path / "run"):
        assert "eval_loss" not in line and "eval/solved" in line


@pytest.mark.slow
def test_student_as_its_teacher_has_zero_divergence_without_a_reward(main, flags, small, tmp_path):
    # One step only: the gradient is not exactly 0, and a step would change the policy.
    own = "--max_steps 1 --eval_every 1 --eval_size 50 --minibatches 1 --epochs_per_rollout 1"
    own = (*own.split(), "--teacher", small[1], "--reward")
    main("distill", *flags, *own, "--output_dir", tmp_path)
    before, line = metrics(tmp_path)
    assert before["step"] == 0 and before["eval_loss"] == pytest.approx(0, abs=1e-6)
    assert line["eval_loss"] > -1e-6  # rounding
    assert line["reverse_kl"] == pytest.approx(0, abs=1e-6)
    assert before["eval/agreement"] == line["agreement"] == line["data/agreement"] == 1
    assert not {"reward", "eval/solved"} & line.keys() and line["completions/mean_length"] > 0


def test_given_completions_are_truncated_to_max_new_tokens():
    tokenizer = load_tokenizer(tiny_model())
    args = distill.Args(max_new_tokens=3)
    rows = [dict(prompt="1+1=", completion=text, _source="a:1") for text in ("2", "12345")]
    prompts = Prompts([tokenizer("1+1=")["input_ids"]] * 2, rows)
    short, long = distill.read_samples(prompts.rows, Encoder(tokenizer, args), args)
    assert [*short.completion_ids] == tokenizer("2")["input_ids"] + [tokenizer.eos_token_id]
    assert tokenizer.decode(long.completion_ids) == "123"
    assert [*long.loss_mask] == [False] * 4 + [True] * 3
    assert [*short.prompt_ids] == prompts.ids[0]


# ---- bad input ----


ROW = '{"prompt": "1+1=", "completion": "2", "answer": "2", "domain": "other"}\n'


@pytest.mark.parametrize(
    ("row", "extra", "words"),
    [
        (ROW, ("--teacher", "other"), "--teacher .*: another tokenizer than --model's, 2 entries "
         "differ; name a model of the same family"),
        (ROW, ("--teacher", "usual=first", "rare=same", "--teacher_column", "domain"),
         "^a.jsonl:1: --teacher_column domain: 'other' is no name of --teacher .usual, rare."),
        (ROW, ("--teacher",), "^--teacher: there is none; name a folder or a Hugging Face id"),
        (ROW, ("--teacher", "./absent"), "^--teacher ./absent: no such folder"),
        (ROW.replace("completion", "x"), (), "--dataset .*a.jsonl.*(prompt|completion)"),
    ],
)  # fmt: skip
def test_bad_teachers_and_rows_are_refused(
    row, extra, words, main, flags, small, teacher, tmp_path
):
    folder = shutil.copytree(tiny_model(), tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["é"] = tokenizer["model"]["vocab"].pop("0")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "a.jsonl").write_text(row * 9)
    data = ("--dataset", tmp_path / "a.jsonl", "--eval_size", 1, "--output_dir", tmp_path / "run")
    names = dict(same=small[1], first=teacher, other=folder)
    extra = [re.sub("(same|first|other)$", lambda m: str(names[m[0]]), word) for word in extra]
    with pytest.raises(ValueError, match=words):
        main("distill", *flags, *data, *extra)


def load_teacher(path: str, device) -> Teacher:
    args = TrainArgs(dtype="float32")
    return load_policy(path, args, device, trainable=False, kind=Teacher)
