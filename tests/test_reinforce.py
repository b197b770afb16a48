"""reinforce.py: the objective by naive formulas, a gradient independent of ranks, exact resume with
an adapted beta, learning."""

import itertools
import math
import statistics as naive
import typing

import pytest
import torch
from conftest import talkative
from helpers import assert_close_metrics, metrics, run
from hypothesis import given
from hypothesis import strategies as st
from test_grpo import REWARD, samples

import reinforce
from common.data.sample import Sample
from common.rollout.measure import lengths, trained_counts

NAN = math.nan
NAMES = typing.get_args(typing.get_type_hints(reinforce.Args)["advantage"])
SAME = (
    "grad_norm",
    "reward",
    "reward_std",
    "entropy",
    "completions/mean_length",
    "num_tokens",
    "epoch",
    "beta",
)
REWARDS = torch.tensor([[1.0, 0.0, 3.0], [0.5, 2.0, 0.0]], dtype=torch.float64)


def double(x):
    return torch.tensor(x, dtype=torch.float64)


# ---- advantages ----

reward = st.floats(-100, 100).map(lambda x: round(x, 3)) | st.just(NAN)
groups = st.lists(st.lists(reward, min_size=3, max_size=3), min_size=1, max_size=4)


def naive_whiten(values):
    if len(values) < 2 or len(set(values)) == 1:
        return [0.0] * len(values)
    mean, std = naive.fmean(values), naive.stdev(values)
    return [(x - mean) / (std + 1e-6) for x in values]


def naive_centred(group):
    present = [r for r in group if not math.isnan(r)]
    return [
        NAN if math.isnan(r) else 0.0 if len(set(present)) == 1 else r - naive.fmean(present)
        for r in group
    ]


@given(groups, st.booleans(), st.lists(st.integers(0, 7), min_size=12, max_size=12))
def test_rewards_are_whitened_over_trained_tokens(rewards, baseline, trained):
    """A completion without trained tokens or without a reward counts in no statistic of the batch
    and gets 0."""
    values = [r for group in rewards for r in (naive_centred(group) if baseline else group)]
    trained = trained[: len(values)]
    counts = [0 if math.isnan(x) else count for x, count in zip(values, trained, strict=True)]
    whitened = iter(
        naive_whiten([x for x, count in zip(values, counts, strict=True) for _ in range(count)])
    )
    expected = [[next(whitened) for _ in range(count)][0] if count else 0.0 for count in counts]
    name = "reinforce++_baseline" if baseline else "reinforce++"
    got = reinforce.advantages(name, double(rewards), torch.tensor(trained).view(-1, 3))
    assert got.flatten().tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(groups)
def test_leave_one_out_baseline_is_the_mean_of_the_others(rewards):
    for group, got in zip(
        rewards, reinforce.advantages("leave_one_out", double(rewards), torch.ones(1)), strict=True
    ):
        for i, r in enumerate(group):
            others = [x for j, x in enumerate(group) if j != i and not math.isnan(x)]
            expected = 0.0 if math.isnan(r) or not others else r - naive.fmean(others)
            assert got[i].item() == pytest.approx(expected, abs=1e-9)


def completion(sampled: int, said: int = 0) -> Sample:
    """Return a completion with `sampled` tokens of the model; an environment's reply follows the
    first of them."""
    mask = [False] * 2 + [True] + [False] * said + [True] * (sampled - 1)
    return Sample([0] * len(mask), mask, prompt_length=2)


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++_baseline"])
def test_replies_of_an_environment_count_in_no_statistic(name):
    plain = [
        [completion(4), completion(9), completion(2)],
        [completion(5), completion(1), completion(7)],
    ]
    played = [
        [completion(4, 30), completion(9), completion(2, 50)],
        [completion(5, 3), completion(1), completion(7)],
    ]
    assert not torch.equal(lengths(plain), lengths(played))
    got_PG = reinforce.advantages(name, REWARDS, trained_counts(played))
    assert torch.equal(got_PG, reinforce.advantages(name, REWARDS, trained_counts(plain)))
    assert not torch.allclose(
        got_PG, reinforce.advantages(name, REWARDS, lengths(played)), rtol=1e-2
    )
    tokens = torch.cat(
        [x.repeat(sum(s.loss_mask)) for x, s in zip(got_PG.flatten(), sum(played, []), strict=True)]
    )
    assert tokens.mean().item() == pytest.approx(
        0, abs=1e-9
    ) and tokens.std().item() == pytest.approx(1, rel=1e-5)


def test_advantage_estimators_differ_and_give_zero_for_equal_rewards():
    counts_PG = torch.tensor([[4, 9, 2], [5, 1, 7]])
    got = {name: reinforce.advantages(name, REWARDS, counts_PG) for name in NAMES}
    assert not any(
        torch.allclose(got[a], got[b], rtol=1e-2) for a, b in itertools.combinations(NAMES, 2)
    )
    for equal in (torch.full((2, 3), 0.1).double(), torch.full((2, 3), NAN).double()):
        assert all((reinforce.advantages(name, equal, counts_PG) == 0).all() for name in NAMES)


# ---- the loss ----

# Two completions, the first with tool output in its middle, and a third one without trained tokens.
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0]).bool()
IDS = torch.tensor([0] * 7 + [1] * 4 + [2] * 2)
ADVANTAGES = double([1.5] * 7 + [-0.7] * 4 + [2.0] * 2)
TOKENS, SEQUENCES, BETA = (
    torch.tensor(17),
    torch.tensor(5),
    0.3,
)  # number of trained tokens of the global minibatch


def streams() -> list[torch.Tensor]:
    """Return log-probs of the policy, with gradient, the old policy, the engine and the reference,
    and entropies."""
    generator = torch.Generator().manual_seed(4)
    new, *drifts = torch.randn(5, len(MASK), generator=generator, dtype=torch.float64)
    new = -2 + 0.5 * new
    old = new + 0.4 * drifts[0]
    return [
        new.requires_grad_(),
        old,
        old + 0.9 * drifts[1],
        new.detach() + drifts[2],
        drifts[3].abs(),
    ]


@pytest.mark.parametrize("loss", ["clip", "reinforce"])
@pytest.mark.parametrize("reduction", ["token", "sequence_sum"])
@pytest.mark.parametrize(("kl_in", "entropy_coef"), [("loss", 0.0), ("loss", 0.2), ("reward", 0.2)])
def test_loss_and_gradient_equal_naive_code(loss, reduction, kl_in, entropy_coef):
    args = reinforce.Args(
        loss=loss, reduction=reduction, kl_in=kl_in, kl_estimator="k2", entropy_coef=entropy_coef
    )
    new, old, engine, ref, entropy = streams()
    entropy.requires_grad_()
    expected, slopes, clipped = 0.0, [0.0] * len(MASK), []
    for t in MASK.nonzero()[:, 0].tolist():
        a, ratio = ADVANTAGES[t].item(), (new[t] - old[t]).exp().item()
        weight, d = min(math.exp(old[t] - engine[t]), 2.0), (new[t] - ref[t]).item()
        clipped.append((a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8))
        value, slope = (
            -min(ratio * a, min(max(ratio, 0.8), 1.2) * a),
            0.0 if clipped[-1] else -ratio * a,
        )
        if loss == "reinforce":
            value, slope = -a * new[t].item(), -a
        kl, kl_slope = (BETA * d * d / 2, BETA * d) if kl_in == "loss" else (0.0, 0.0)
        count = (TOKENS if reduction == "token" else SEQUENCES).item()
        expected += (weight * value + kl - entropy_coef * entropy[t].item()) / count
        slopes[t] = (weight * slope + kl_slope) / count
    share_T, logged = reinforce.loss(
        new, old, engine, ref, entropy, ADVANTAGES, MASK, IDS, TOKENS, SEQUENCES, BETA, args
    )  # fmt: skip
    of_new, of_entropy = torch.autograd.grad(share_T.sum(), (new, entropy), materialize_grads=True)
    assert share_T.sum().item() == pytest.approx(expected, rel=1e-6)
    assert of_new.tolist() == pytest.approx(slopes, rel=1e-6)
    assert of_entropy.tolist() == pytest.approx((-entropy_coef / count * MASK).tolist(), rel=1e-6)
    assert 0 < sum(clipped) < len(clipped)
    assert ("kl" in logged) == (kl_in == "loss")
    if loss == "clip":
        assert logged["clip_ratio/region_mean"][MASK].tolist() == clipped


def test_clipped_loss_has_the_gradient_of_reinforce_on_policy():
    gradients = []
    for loss in ("clip", "reinforce"):
        new, _, engine, ref, entropy = streams()
        args = reinforce.Args(loss=loss)
        share_T, _ = reinforce.loss(
            new,
            new.detach(),
            engine,
            ref,
            entropy,
            ADVANTAGES,
            MASK,
            IDS,
            TOKENS,
            SEQUENCES,
            BETA,
            args,
        )
        gradients.append(torch.autograd.grad(share_T.sum(), new)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("preset", reinforce.Args.PRESETS)
def test_presets_have_a_finite_objective(preset):
    args = reinforce.Args(preset=preset, **reinforce.Args.PRESETS[preset])
    share_T, _ = reinforce.loss(*streams(), ADVANTAGES, MASK, IDS, TOKENS, SEQUENCES, BETA, args)
    assert share_T.isfinite().all()


# ---- whole runs ----


@pytest.fixture(scope="module")
def flags(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    (folder / "reward.py").write_text(REWARD)
    return (
        *small, "--model", talkative(folder / "talkative", small[1]),
        "--reward", f"{folder / 'reward.py'}:digits", "--max_steps", 3, "--prompts_per_step", 8,
        "--samples_per_prompt", 3, "--minibatches", 2, "--max_new_tokens", 12, "--lr", 1e-4,
        "--eval_every", 0, "--log_every", 1, "--max_logprob_difference", 1e-4,
        "--engine", "transformers", "--share_prefix", 1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def everything(flags):
    """Return flags with KL in the reward, an adapted beta, the clip, penalties and normalised
    importance weights of completions."""
    return (
        *flags, "--preset", "reinforce++", "--kl_target", 0.01, "--kl_horizon", 100,
        "--entropy_coef", 0.01, "--missing_eos_penalty", 0.1, "--reward_scale", 2,
        "--correction", "sequence", "--correction_normalize",
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(everything, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run(2, "reinforce.py", *everything, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_gradient_does_not_depend_on_ranks_packing_or_resume(
    two_ranks, everything, main, tmp_path, capsys
):
    """A resumed run continues with the adapted beta."""
    flags = (*everything, "--share_prefix", 0, "--pack_tokens", 60, "--output_dir", tmp_path)
    main("reinforce", *flags, "--max_steps", 2)
    main("reinforce", *flags)
    assert "resuming from" in capsys.readouterr().out
    for one, other in zip(samples(two_ranks, 1), samples(tmp_path, 1), strict=True):
        assert one | dict(advantage=0) == other | dict(
            advantage=0
        )  # the same completions and rewards
        assert one["advantage"] == pytest.approx(
            other["advantage"], abs=1e-5
        )  # the reference's log-probs are float32
    assert_close_metrics(two_ranks, tmp_path, ("loss", "kl"), rel=1e-5, floor=0.1)
    assert_close_metrics(two_ranks, tmp_path, SAME, rel=1e-5)
    lines = metrics(two_ranks)
    assert abs(lines[0]["kl"]) < 1e-6 < abs(lines[-1]["kl"])
    assert lines[0]["beta"] == 0.01 and len({line["beta"] for line in lines}) > 2, "beta adapts"


@pytest.mark.slow
def test_rewards_are_scaled_scores_minus_penalty_and_kl(everything, main, tmp_path, monkeypatch):
    seen, advantages = [], reinforce.advantages

    def look(name, rewards_BG, tokens_BG):
        seen.append(rewards_BG.mean().item())
        return advantages(name, rewards_BG, tokens_BG)

    monkeypatch.setattr(reinforce, "advantages", look)
    extra = ("--max_steps", 2, "--prompts_per_step", 4, "--kl_target", 0, "--kl_horizon", 10_000)
    main("reinforce", *everything, *extra, "--preset", "reinforce++", "--output_dir", tmp_path)
    for line, mean in zip(metrics(tmp_path), seen, strict=True):
        kl = line["kl"] * line["completions/mean_length"]  # of a completion
        penalty = 0.1 * line["completions/clipped_ratio"]
        assert mean == pytest.approx(2 * line["reward"] - penalty - line["beta"] * kl, abs=1e-6)
    assert line["beta"] * abs(kl) > 1e-5


@pytest.mark.slow
def test_policy_learns_to_write_digits(flags, main, tmp_path):
    """Training starts from the untrained model."""
    extra = ("--preset", "reinforce++_baseline", "--max_steps", 12, "--prompts_per_step", 16)
    extra += ("--samples_per_prompt", 8, "--minibatches", 1, "--lr", 5e-3, "--max_new_tokens", 4)
    main("reinforce", *flags, *extra, "--output_dir", tmp_path)
    lines = metrics(tmp_path)
    assert lines[0]["reward"] < 0.2 and lines[-1]["reward"] > 0.5, [
        line["reward"] for line in lines
    ]  # the maximum is 0.8
    assert "kl" in lines[-1]
