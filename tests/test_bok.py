"""bok.py: the kept completions, a gradient independent of ranks, exact resume, and the offline set,
which is written once, in eval.py's format, and trained on as sampled."""

import json
import math
import re
import shutil

import pytest
import torch
from helpers import assert_close_metrics, assert_same_weights, metrics, run
from in_process import talkative
from test_grpo import REWARD, samples

from bok import Args, best, loss, sample_offline
from common.data.sample import Completion, Sample
from common.model.hub import load_tokenizer
from common.model.tiny import tiny_model
from common.rewards.thoughts import Thoughts
from common.rollout.completions_file import make_lines, read_completions, samples_to_train_on
from common.rollout.prompts import Prompts

NAN = math.nan
SAME = ("grad_norm", "reward", "kept/reward", "kept/fraction", "entropy", "num_tokens", "epoch")


def kept(args: Args, *ranking: float) -> list[int]:
    (kept_G,) = best(
        torch.tensor([ranking], dtype=torch.float64), keep=args.keep, keep_above=args.keep_above
    )
    return kept_G.nonzero().flatten().tolist()


def test_best_completions_are_kept_by_reward_then_order():
    assert kept(Args(), 0.1, 0.9, 0.9, -1.0) == [1]
    assert kept(Args(keep=3), 0.1, 0.9, NAN, 0.9) == [0, 1, 3]
    assert kept(Args(keep=2), 0.5, 0.9, 0.5, 0.5) == [0, 1]
    assert kept(Args(keep=3), NAN, NAN, NAN, 0.2) == [3]
    assert kept(Args(keep=2), NAN, NAN, NAN, NAN) == []
    assert kept(Args(keep_above=0.5), 0.5, 0.6, NAN, 2.0) == [1, 3]
    assert kept(Args(keep_above=3), 0.5, 0.6, NAN, 2.0) == []


def test_loss_is_the_mean_over_the_tokens_of_the_global_minibatch():
    logprobs_T = torch.tensor([-1.0, -2.0, -7.0, -3.0], requires_grad=True)
    total = loss(logprobs_T, torch.tensor([True, True, False, True]), torch.tensor(12)).sum()
    total.backward()
    assert total.item() == pytest.approx((1 + 2 + 3) / 12)
    assert logprobs_T.grad.tolist() == pytest.approx([-1 / 12, -1 / 12, 0, -1 / 12])
    assert not loss(logprobs_T, torch.zeros(4).bool(), torch.tensor(0)).any()


@pytest.fixture(scope="module")
def flags(small, tmp_path_factory):
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)
    return (
        *small, "--reward", f"{reward}:digits", "--max_steps", 4, "--prompts_per_step", 8,
        "--samples_per_prompt", 3, "--minibatches", 2, "--max_new_tokens", 12, "--lr", 1e-4,
        "--eval_every", 0, "--save_every", 2, "--max_logprob_difference", 1e-4,
        "--engine", "transformers", "--share_prefix", 1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run(2, "bok.py", *flags, "--keep", 2, "--beta", 0.3, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_gradient_does_not_depend_on_ranks_or_packing(two_ranks, flags, main, tmp_path):
    main(
        "bok",
        *flags,
        "--keep",
        2,
        "--beta",
        0.3,
        "--share_prefix",
        0,
        "--pack_tokens",
        40,
        "--output_dir",
        tmp_path,
    )
    assert samples(two_ranks, 1) == samples(tmp_path, 1)
    assert_close_metrics(two_ranks, tmp_path, (*SAME, "loss"), rel=1e-5)
    assert_close_metrics(two_ranks, tmp_path, ("kl",), rel=1e-5, floor=0.1)
    assert metrics(tmp_path)[0]["kl"] == 0 and metrics(tmp_path)[-1]["kl"] != 0
    assert all(line["kept/reward"] > line["reward"] for line in metrics(tmp_path))


@pytest.mark.slow
def test_resumed_run_equals_the_uninterrupted_run_bitwise(two_ranks, flags, tmp_path):
    again = shutil.copytree(two_ranks, tmp_path / "again", ignore=lambda *_: ["hf", "step_000004"])
    done = run(2, "bok.py", *flags, "--keep", 2, "--beta", 0.3, "--output_dir", again)
    assert "resuming from" in done.stdout
    assert_same_weights(two_ranks, again)
    assert_close_metrics(two_ranks, again, (*SAME, "loss", "kl"), rel=0)


# ---- offline ----


ROWS = [dict(prompt=f"{100 + i}+7=", answer=str(107 + i)) for i in range(20)]


@pytest.fixture(scope="module")
def offline_flags(flags, tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return (*flags, "--dataset", file, "--offline", "--keep_above", 0.1)


@pytest.fixture(scope="module")
def offline(offline_flags, tmp_path_factory):
    """20 prompts in rounds of 8, by two ranks."""
    folder = tmp_path_factory.mktemp("offline")
    run(2, "bok.py", *offline_flags, "--output_dir", folder)
    return folder


def lines_of(folder) -> list[str]:
    return (folder / "completions.jsonl").read_text().splitlines(True)


@pytest.mark.slow
def test_offline_set_is_written_once_and_is_the_only_training_data(
    offline, offline_flags, main, tmp_path, capsys
):
    """One rank gives the same file and weights as two, also from a truncated file."""
    lines = lines_of(offline)
    tokenizer = load_tokenizer(tiny_model())
    prompt_ids = [tokenizer(row["prompt"])["input_ids"] for row in ROWS]
    assert [json.loads(line)["source"] for line in lines] == [
        f"rows.jsonl:{i}" for i in range(1, 21)
    ]
    assert [json.loads(line)["prompt_ids"] for line in lines] == prompt_ids
    texts = {
        c["text"] for line in lines for c in json.loads(line)["completions"] if c["reward"] > 0.1
    }
    trained = [
        s["completion"] for step in range(1, 5) for s in samples(offline, step) if s["advantage"]
    ]
    assert trained and set(trained) <= texts
    cut = tmp_path / "completions.jsonl"
    cut.write_text("".join(lines[:11]) + lines[11][:40])  # the result of a kill
    main("bok", *offline_flags, "--output_dir", tmp_path)
    assert "20 of 20 prompts sampled" in capsys.readouterr().out
    for one, other in zip(map(json.loads, lines), map(json.loads, lines_of(tmp_path)), strict=True):
        for c, d in zip(one["completions"], other["completions"], strict=True):
            assert c.pop("logprobs") == pytest.approx(d.pop("logprobs"), abs=1e-4)
        assert one | dict(crc=0) == other | dict(crc=0)
    assert_close_metrics(offline, tmp_path, ("loss", "grad_norm", "reward", "epoch"), rel=1e-5)


@pytest.mark.slow
def test_unusable_offline_sets_are_refused(offline, tmp_path):
    """One of them is a file of eval.py, which has no log-probs."""
    lines = [
        re.sub(r', "crc": \d+', "", line) for line in lines_of(offline)
    ]  # as in a file of an older version
    tokenizer, file = load_tokenizer(tiny_model()), tmp_path / "completions.jsonl"
    records, good = [json.loads(line) for line in lines], "".join(lines)
    prompts = Prompts(
        [r["prompt_ids"] for r in records], [dict(_source=r["source"]) for r in records]
    )

    def read(
        text: str, prompts: Prompts = prompts, samples_per_prompt: int = 3
    ) -> tuple[list[list[Sample]], torch.Tensor]:
        file.write_text(text)
        args = Args(output_dir=str(tmp_path), samples_per_prompt=samples_per_prompt)
        return sample_offline(args, prompts, None, None, tokenizer)

    groups, rewards_PG = read(good)
    assert rewards_PG.tolist() == [
        [c["reward"] for c in record["completions"]] for record in records
    ]
    assert len(groups) == 20 and groups[7][2].ids[: groups[7][2].prompt_length] == prompts.ids[7]
    by_eval = records[0] | dict(completions=[dict(c) for c in records[0]["completions"]])
    for completion in by_eval["completions"]:
        del completion["logprobs"]
    for text, words in (
        (json.dumps(by_eval) + "\n", "line 1: completion: logprobs is missing"),
        (good.replace('"reward"', '"rewarded"', 1), "line 1: completion: reward is missing"),
        (good.replace('"reward": 0', '"reward": [], "x": 0', 1), "line 1: completions.0.reward: "),
        (
            good.replace('"logprobs": [', '"logprobs": [0.1, ', 1),
            "line 1: completion: `ids`, `sampled` ",
        ),
        (
            good.replace('"logprobs": [', '"logprobs": ["a", ', 1),
            "line 1: completions.0.logprobs.0: ",
        ),
        (good.replace('"ids": [', '"ids": ["a", ', 1), "line 1: completions.0.ids.0: "),
        ("[]\n" + good, "line 1: Input should be an object"),
        ("x\n" + good, "line 1: Invalid JSON"),
        (
            good.replace('rows.jsonl:1"', 'rows.jsonl:3"', 1),
            "line 1: `source` is rows.jsonl:3, but",
        ),
    ):
        with pytest.raises(ValueError) as error:
            read(text)
        assert str(error.value).startswith(f"--output_dir {file}, {words}") and "\n" not in str(
            error.value
        )
    with pytest.raises(ValueError, match="3 completions of a prompt, --samples_per_prompt is 2"):
        read(good, samples_per_prompt=2)
    with pytest.raises(
        ValueError, match="line 20: `source` is rows.jsonl:20, but this row of the data is missing"
    ):
        read(good, Prompts(prompts.ids[:19], prompts.rows[:19]))
    with pytest.raises(ValueError, match="line 1: `prompt_ids` are not the prompt"):
        read(good, Prompts([[1], *prompts.ids[1:]], prompts.rows))


@pytest.mark.slow
def test_eval_measures_the_offline_set(offline, offline_flags, main, tmp_path):
    """The format is the same: recomputed rewards equal the stored ones."""
    flags = offline_flags[: offline_flags.index("--max_steps")]
    dataset = offline_flags[offline_flags.index("--offline") - 1]
    main("eval", *flags, "--dataset", dataset, "--max_new_tokens", 12, "--engine", "transformers",
        "--completions", offline / "completions.jsonl", "--output_dir", tmp_path)  # fmt: skip
    found = json.loads((tmp_path / "results.json").read_text())["overall"]
    stored = [
        c["reward"] for line in map(json.loads, lines_of(offline)) for c in line["completions"]
    ]
    assert (
        found["rewards"]["digits"]["mean"] == pytest.approx(sum(stored) / 60)
        and len(found["pass_at_k"]) == 3
    )


# ---- environments ----


def test_episodes_are_stored_as_sampled(device, tmp_path):
    """A sample read from the file equals the one written, including a missing reward."""
    tokenizer, ids = load_tokenizer(tiny_model()), [7, 8, 9]
    prompts = Prompts([ids], [dict(_source="rows:1")])

    def episode(completion: list[int], mask: list[int], **fields) -> Completion:
        return Completion(
            ids + completion, [False] * 3 + [bool(m) for m in mask], prompt_length=3,
            row=prompts.rows[0], text="9", rollout_logprobs=[0.0] * 3 + [-0.1 * m for m in mask],
            versions=[-1] * 3 + [m - 1 for m in mask], transcript=tokenizer.decode(completion),
            **fields,
        )  # fmt: skip

    group = [
        episode(
            [4, 5, 6, 7],
            [1, 0, 0, 1],
            finish_reason="stop",
            turns=2,
            turn_rewards=[(3, 0.5), (6, 1.0)],
        ),
        episode([4, 5], [1, 1], finish_reason="length"),
        episode([6], [1], finish_reason="stop", error="step 1: ValueError: no"),
    ]

    class Rewarded:
        thoughts = Thoughts(tokenizer, cut=True)

        def __call__(self, groups, meter):
            rewards_PG = torch.tensor([[1.5, 0.0, NAN]], dtype=torch.float64)
            return rewards_PG, dict(environment=rewards_PG), {}

        def first(self, parts):
            return parts["environment"]

    (line,) = make_lines([group], prompts, Rewarded(), greedy=False, to_train_on=True)
    (tmp_path / "c.jsonl").write_text(json.dumps(line) + "\n")
    lines = read_completions(
        "--output_dir", tmp_path / "c.jsonl", prompts, tokenizer, own=True, to_train_on=True
    )
    ((one, two, three),) = samples_to_train_on(lines, prompts, tokenizer, episodes=True)
    assert [one, two] == group[:2] and lines[0]["completions"][2]["reward"] is None
    assert three == group[2]


@pytest.mark.slow
def test_episodes_train_online_and_offline(small, main, tmp_path):
    """The episodes have several turns. Offline, the first loss is that of the stored log-probs of
    the sampled tokens only; online, engine and trainer agree on them."""
    rows = [dict(prompt="?", number=n) for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (
        "--model", talkative(tmp_path / "model", small[1]), "--dataset", tmp_path / "rows.jsonl",
        "--environment", "guess_number", "--reward", "environment", "--max_turns", 3,
        "--max_new_tokens", 120, "--keep_above", -1, "--max_steps", 2, "--prompts_per_step", 8,
        "--samples_per_prompt", 2, "--eval_every", 0, "--lr", 1e-4,
        "--max_logprob_difference", 1e-4, "--engine", "transformers",
    )  # fmt: skip
    run(2, "bok.py", *flags, "--offline", "--output_dir", tmp_path / "offline")
    main("bok", *flags, "--output_dir", tmp_path / "online")
    stored = [
        c for line in map(json.loads, lines_of(tmp_path / "offline")) for c in line["completions"]
    ]
    assert any(0 in c["sampled"] for c in stored)
    logprobs = [
        x for c in stored for x, sampled in zip(c["logprobs"], c["sampled"], strict=True) if sampled
    ]
    first = metrics(tmp_path / "offline")[0]
    assert first["loss"] == pytest.approx(-sum(logprobs) / len(logprobs), rel=1e-5)
    assert first["completions/mean_turns"] == sum(c["turns"] for c in stored) / 16 > 1
    for folder in (tmp_path / "offline", tmp_path / "online"):
        assert metrics(folder)[0]["completions/mean_turns"] > 1
        assert any("a number!" in s["completion"] for s in samples(folder, 1))


# ---- no completion kept ----


@pytest.mark.slow
def test_step_without_kept_completions_does_not_update(flags, tmp_path):
    run(2, "bok.py", *flags, "--keep_above", 2, "--max_steps", 2, "--output_dir", tmp_path)
    assert all(line["kept/fraction"] == 0 and "grad_norm" not in line for line in metrics(tmp_path))


@pytest.mark.slow
def test_run_with_a_truncated_distribution_is_not_compared_with_the_trainer(
    flags, main, tmp_path, capsys
):
    """The engine has log-probs of another distribution, so a comparison would end the run."""
    main("bok", *flags, "--top_k", 2, "--top_p", 0.9, "--output_dir", tmp_path)
    assert "engine and trainer are not compared" in capsys.readouterr().out
    for line in metrics(tmp_path):
        assert not any(name.startswith("sampling/sampling_logp") for name in line)
