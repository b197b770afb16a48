"""reinforce.py: what is whitened, one gradient whatever the ranks, exact resume with an adapted beta, learning."""

import inprocess
import pytest
import torch
from conftest import talkative
from helpers import assert_close_metrics, metrics, run
from test_grpo import REWARD, samples

import reinforce
from common.data.packing import Sample
from common.rollout import statistics

main = inprocess.main
SAME = ("grad_norm", "reward", "reward_std", "entropy", "completions/mean_length", "num_tokens", "epoch", "beta")

# ---- advantages ----


def completion(sampled: int, said: int = 0) -> Sample:
    """Of so many tokens of the model's own, behind the first of which an environment said some."""
    mask = [False] * 2 + [True] + [False] * said + [True] * (sampled - 1)
    return Sample([0] * len(mask), mask, prompt_length=2)


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++_baseline"])
def test_what_an_environment_said_counts_in_no_statistic(name):
    rewards_PG = torch.tensor([[1.0, 0.0, 3.0], [0.5, 2.0, 0.0]], dtype=torch.float64)
    plain = [[completion(4), completion(9), completion(2)], [completion(5), completion(1), completion(7)]]
    played = [[completion(4, 30), completion(9), completion(2, 50)], [completion(5, 3), completion(1), completion(7)]]
    assert not torch.equal(statistics.lengths(plain), statistics.lengths(played))
    estimate = reinforce.ADVANTAGES[name]
    got_PG = estimate(rewards_PG, statistics.trained_counts(played))
    assert torch.equal(got_PG, estimate(rewards_PG, statistics.trained_counts(plain)))
    assert not torch.allclose(got_PG, estimate(rewards_PG, statistics.lengths(played)), rtol=1e-2)
    tokens = torch.cat([x.repeat(sum(s.loss_mask)) for x, s in zip(got_PG.flatten(), sum(played, []), strict=True)])
    assert tokens.mean().item() == pytest.approx(0, abs=1e-9) and tokens.std().item() == pytest.approx(1, rel=1e-5)


def test_every_advantage_is_another_one():
    rewards_PG = torch.tensor([[1.0, 0.0, 3.0], [0.5, 2.0, 0.0]], dtype=torch.float64)
    counts_PG = torch.tensor([[4, 9, 2], [5, 1, 7]])
    got = [estimate(rewards_PG, counts_PG) for estimate in reinforce.ADVANTAGES.values()]
    assert not any(torch.allclose(a, b, rtol=1e-2) for i, a in enumerate(got) for b in got[:i])


# ---- as a whole ----


@pytest.fixture(scope="module")
def flags(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    (folder / "reward.py").write_text(REWARD)
    return (
        *small, "--model", talkative(folder / "talkative", small[1]), "--reward", f"{folder / 'reward.py'}:digits",
        "--max_steps", 3, "--prompts_per_step", 8, "--samples_per_prompt", 3, "--minibatches", 2,
        "--max_new_tokens", 12, "--lr", 1e-4, "--eval_every", 0, "--log_every", 1, "--max_logprob_difference", 1e-4,
        "--engine", "transformers",
    )  # fmt: skip


@pytest.fixture(scope="module")
def everything(flags):
    """KL in the reward, of which beta makes what it likes, the clip, penalties and the correction of completions."""
    return (
        *flags, "--preset", "reinforce++", "--kl_target", 0.01, "--kl_horizon", 100, "--entropy_coef", 0.01,
        "--missing_eos_penalty", 0.1, "--reward_scale", 2, "--correction", "sequence",
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(everything, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run(2, "reinforce.py", *everything, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_one_gradient_whatever_the_ranks_and_packing_also_when_resumed(two_ranks, everything, main, tmp_path, capsys):
    """Beta goes on from what it had become."""
    flags = (*everything, "--pack_tokens", 60, "--output_dir", tmp_path)
    main("reinforce", *flags, "--max_steps", 2)
    main("reinforce", *flags)
    assert "resuming from" in capsys.readouterr().out
    for one, other in zip(samples(two_ranks, 1), samples(tmp_path, 1), strict=True):
        assert one | dict(advantage=0) == other | dict(advantage=0)  # the same completions and rewards
        assert one["advantage"] == pytest.approx(other["advantage"], abs=1e-5)  # the KL is the reference's float32
    assert_close_metrics(two_ranks, tmp_path, ("loss", "kl"), rel=1e-5, floor=0.1)
    assert_close_metrics(two_ranks, tmp_path, SAME, rel=1e-5)
    lines = metrics(two_ranks)
    assert abs(lines[0]["kl"]) < 1e-6 < abs(lines[-1]["kl"])
    assert lines[0]["beta"] == 0.01 and len({line["beta"] for line in lines}) > 2, "beta adapts"


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["reinforce", "reinforce++_baseline"])
def test_learns(preset, flags, main, tmp_path):
    """From scratch, to write digits."""
    extra = ("--preset", preset, "--max_steps", 12, "--prompts_per_step", 16, "--samples_per_prompt", 8)
    extra += ("--minibatches", 1, "--lr", 5e-3, "--max_new_tokens", 4, "--output_dir", tmp_path)
    main("reinforce", *flags, *extra)
    lines = metrics(tmp_path)
    assert lines[0]["reward"] < 0.2 and lines[-1]["reward"] > 0.5, [
        line["reward"] for line in lines
    ]  # 0.8 is to be had
    assert ("kl" in lines[-1]) == (preset != "reinforce")
