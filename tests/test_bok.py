"""bok.py: which completions are kept, and one round with eval.py and sft.py."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from helpers import ROOT, metrics, read_rows, samples, write_rows
from in_process import REWARD, talkative
from processes import run

from bok import Args, best, loss

NAN = math.nan


def kept(args: Args, *ranking: float) -> list[int]:
    (kept_G,) = best(torch.tensor([ranking], dtype=torch.float64), args.keep)
    return kept_G.nonzero().flatten().tolist()


def test_best_completions_are_kept_by_reward_then_order():
    assert kept(Args(), 0.1, 0.9, 0.9, -1.0) == [1]
    assert kept(Args(keep=3), 0.1, 0.9, NAN, 0.9) == [0, 1, 3]
    assert kept(Args(keep=2), 0.5, 0.9, 0.5, 0.5) == [0, 1]
    assert kept(Args(keep=3), NAN, NAN, NAN, 0.2) == [3]
    assert kept(Args(keep=2), NAN, NAN, NAN, NAN) == []
    assert kept(Args(), 0.3, 0.1 + 0.2, 0.1) == [0]  # a tie, but for rounding


def test_loss_is_the_mean_over_the_tokens_of_the_global_minibatch():
    logprobs_T = torch.tensor([-1.0, -2.0, -7.0, -3.0], requires_grad=True)
    total = loss(logprobs_T, torch.tensor([True, True, False, True]), torch.tensor(12)).sum()
    total.backward()
    assert total.item() == pytest.approx((1 + 2 + 3) / 12)
    assert logprobs_T.grad.tolist() == pytest.approx([-1 / 12, -1 / 12, 0, -1 / 12])
    assert not loss(logprobs_T, torch.zeros(4).bool(), torch.tensor(0)).any()


# ---- one round, offline ----


@pytest.mark.slow
def test_one_round_with_eval_and_sft_is_that_of_the_page(small, main, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [dict(prompt=f"{100 + i}+7=", answer=str(107 + i)) for i in range(12)]
    write_rows(Path("prompts.jsonl"), rows)
    Path("reward.py").write_text(REWARD)
    model = (*small[:2], "--prompt_format", "plain")
    flags = (
        "--dataset", "prompts.jsonl", "--reward", "reward.py:digits", "--samples_per_prompt", 4,
        "--max_new_tokens", 12, "--engine", "transformers",
    )  # fmt: skip
    main("eval", *model, *flags, "--output_dir", "runs/raft")
    page = (ROOT / "docs/bok.md").read_text()
    exec(re.search("```python\n(.*?)```", page, re.DOTALL)[1], {})
    best = read_rows(Path("best.jsonl"))
    lines = map(json.loads, Path("runs/raft/completions.jsonl").read_text().splitlines())
    for row, chosen, line in zip(rows, best, lines, strict=True):
        sampled = [c for c in line["completions"] if not c["greedy"]]
        assert chosen["prompt"] == row["prompt"] and len(sampled) == 4
        rewards = {c["text"]: c["reward"] for c in sampled}
        assert rewards[chosen["completion"]] == max(rewards.values())
    main("sft", *model, "--dataset", "best.jsonl", "--batch_size", 4, "--max_steps", 2)


# ---- environments ----


AGAIN = """
class Again:
    def reset(self, example):
        return [{"role": "user", "content": example["prompt"]}]
    def step(self, completion):
        size = len(completion)
        return [{"role": "user", "content": "again!"}], size % 2, size % 5 == 0
"""


@pytest.mark.slow
def test_episodes_are_trained(small, main, tmp_path):
    """Episodes have several turns, and engine and trainer agree on their tokens."""
    (tmp_path / "again.py").write_text(AGAIN)
    write_rows(tmp_path / "rows.jsonl", [dict(prompt="?")] * 8)
    flags = (
        "--model", talkative(tmp_path / "model", small[1]), "--dataset", tmp_path / "rows.jsonl",
        "--environment", f"{tmp_path}/again.py:Again", "--reward", "environment",
        "--max_turns", 3,
        "--max_new_tokens", 120, "--max_steps", 2, "--prompts_per_step", 8,
        "--samples_per_prompt", 2, "--eval_every", 0, "--lr", 1e-4,
        "--max_logprob_difference", 1e-4, "--engine", "transformers",
    )  # fmt: skip
    main("bok", *flags, "--output_dir", tmp_path / "run")
    assert metrics(tmp_path / "run")[0]["completions/mean_turns"] > 1
    assert any("again!" in s["completion"] for s in samples(tmp_path / "run", 1))


# ---- no completion kept ----


@pytest.mark.slow
def test_step_without_kept_completions_does_not_update(online, tmp_path):
    (tmp_path / "none.py").write_text("def none(completion, row):\n    return None\n")
    flags = (*online, "--reward", f"{tmp_path}/none.py:none")
    run(2, "bok.py", *flags, "--output_dir", tmp_path)
    assert all(line["kept/fraction"] == 0 and "grad_norm" not in line for line in metrics(tmp_path))


@pytest.mark.slow
def test_run_with_a_truncated_distribution_is_not_compared_with_the_trainer(
    online, main, tmp_path, capsys
):
    """With top-p the engine's log-probs are of another distribution: comparing would end the
    run."""
    main("bok", *online, "--max_steps", 1, "--top_k", 2, "--top_p", 0.9, "--output_dir", tmp_path)
    assert "engine and trainer are not compared" in capsys.readouterr().out
    for line in metrics(tmp_path):
        assert not any(name.startswith("sampling/sampling_logp") for name in line)
