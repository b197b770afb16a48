"""bok.py: which completions are kept, one gradient whatever the ranks, exact resume, the offline set written once."""

import json
import math

import helpers
import pytest
import torch
from helpers import assert_close_metrics, assert_same_weights, metrics, run
from test_grpo import REWARD, samples

from bok import Args, choose, sample_offline
from common.hub import load_tokenizer, resolve_model
from common.packing import Sample

NAN = math.nan
SAME = ("grad_norm", "reward", "kept/reward", "kept/fraction", "entropy", "num_tokens", "epoch")


def kept(args: Args, *ranking: float) -> list[int]:
    group = [Sample(ids=[i], loss_mask=[True]) for i in range(len(ranking))]
    (best,) = choose(args, [group], torch.tensor([ranking], dtype=torch.float64))
    return [sample.ids[0] for sample in best]


def test_the_best_are_kept_the_first_of_equals_and_never_one_without_a_reward():
    assert kept(Args(), 0.1, 0.9, 0.9, -1.0) == [1]
    assert kept(Args(keep=3), 0.1, 0.9, NAN, 0.9) == [1, 3, 0]
    assert kept(Args(keep=3), NAN, NAN, NAN, 0.2) == [3]
    assert kept(Args(keep=2), NAN, NAN, NAN, NAN) == []
    assert kept(Args(keep_above=0.5), 0.5, 0.6, NAN, 2.0) == [3, 1]
    assert kept(Args(keep_above=3), 0.5, 0.6, NAN, 2.0) == []


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)
    return (
        "--reward", f"{reward}:digits", "--max_steps", 6, "--prompts_per_step", 8, "--samples_per_prompt", 3,
        "--minibatches", 2, "--max_new_tokens", 12, "--lr", 1e-4, "--eval_every", 0, "--log_every", 1,
        "--save_every", 2, "--max_logprob_difference", 1e-4, "--engine", "transformers",
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run(2, "bok.py", *flags, "--keep", 2, "--beta", 0.3, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_one_gradient_whatever_the_ranks_and_packing(two_ranks, flags, tmp_path):
    run(1, "bok.py", *flags, "--keep", 2, "--beta", 0.3, "--pack_tokens", 40, "--output_dir", tmp_path)
    assert samples(two_ranks, 1) == samples(tmp_path, 1)
    assert_close_metrics(two_ranks, tmp_path, (*SAME, "loss"), rel=1e-5)
    assert_close_metrics(two_ranks, tmp_path, ("kl",), rel=1e-5, floor=0.1)
    assert metrics(tmp_path)[0]["kl"] == 0 and metrics(tmp_path)[-1]["kl"] != 0
    assert all(line["kept/reward"] > line["reward"] for line in metrics(tmp_path))


@pytest.mark.slow
def test_killed_and_resumed_is_bitwise_the_uninterrupted_run(two_ranks, flags, tmp_path):
    flags = (*flags, "--keep", 2, "--beta", 0.3, "--output_dir", tmp_path)
    helpers.run_and_kill(2, "bok.py", *flags, folder=tmp_path, after_step=3, delay=0)
    assert not (tmp_path / "hf").exists(), "killed too late"
    assert "resuming from" in run(2, "bok.py", *flags).stdout
    assert_same_weights(two_ranks, tmp_path)
    assert_close_metrics(two_ranks, tmp_path, (*SAME, "loss", "kl"), rel=0)


@pytest.mark.slow
def test_the_offline_set_is_written_once_and_is_all_that_is_trained_on(flags, tmp_path):
    """20 prompts in rounds of 8: the same file and weights on one rank as on two, and when the file was cut short."""
    rows = [dict(prompt=f"{100 + i}+7=", answer=str(107 + i)) for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (*flags, "--dataset", tmp_path / "rows.jsonl", "--offline", "--keep_above", 0.1)
    run(2, "bok.py", *flags, "--output_dir", tmp_path / "two")
    written = tmp_path / "two" / "completions.jsonl"
    lines = written.read_text().splitlines(True)
    assert len(lines) == 20 and len({tuple(json.loads(line)["prompt"]) for line in lines}) == 20
    texts = {c["text"] for line in lines for c in json.loads(line)["completions"] if c["reward"] > 0.1}
    trained = [s["completion"] for step in range(1, 7) for s in samples(tmp_path / "two", step) if s["advantage"]]
    assert trained and set(trained) <= texts
    cut = tmp_path / "one" / "completions.jsonl"
    cut.parent.mkdir()
    cut.write_text("".join(lines[:11]) + lines[11][:40])  # as a kill leaves it
    run(1, "bok.py", *flags, "--output_dir", cut.parent)
    for one, other in zip(map(json.loads, lines), map(json.loads, cut.read_text().splitlines()), strict=True):
        for c, d in zip(one["completions"], other["completions"], strict=True):
            assert c.pop("logprobs") == pytest.approx(d.pop("logprobs"), abs=1e-4)
        assert one == other
    assert_close_metrics(tmp_path / "two", cut.parent, ("loss", "grad_norm", "reward", "epoch"), rel=1e-5)
    good = "".join(lines)
    tokenizer = load_tokenizer(resolve_model("tiny"))
    rows = [row | dict(_source="row") for row in rows]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    args = Args(output_dir=str(cut.parent), samples_per_prompt=3, prompts_per_step=8)
    assert [json.loads(line)["prompt"] for line in lines] == prompts
    groups, scores = sample_offline(args, prompts, rows, None, None)
    assert scores.shape == (20, 3) and groups[7][2].ids[: len(prompts[7])] == prompts[7]
    for damaged in (
        good.replace('"reward"', '"rewarded"', 1), good.replace('"reward": 0', '"reward": null, "x": 0', 1),
        good.replace('"ids": [', '"ids": ["a", ', 1), good.replace('"logprobs": [', '"logprobs": [0.1, ', 1),
        "[]\n" + good, "\udcff\n" + good,
    ):  # fmt: skip
        cut.write_text(damaged, errors="surrogateescape")
        with pytest.raises(ValueError, match=r"completions.jsonl, line 1 is damaged; mend or delete the file"):
            sample_offline(args, prompts, rows, None, None)
    cut.write_text(good)
    with pytest.raises(ValueError, match="line 1 is damaged"):
        sample_offline(Args(output_dir=str(cut.parent), samples_per_prompt=2), prompts, rows, None, None)
    with pytest.raises(ValueError, match="line 20 is of another prompt"):
        sample_offline(args, prompts[:19], rows[:19], None, None)


@pytest.mark.slow
def test_where_nothing_is_good_enough_nothing_is_learned(flags, tmp_path):
    run(2, "bok.py", *flags, "--keep_above", 2, "--max_steps", 2, "--output_dir", tmp_path)
    assert all(line["kept/fraction"] == 0 and "grad_norm" not in line for line in metrics(tmp_path))
