"""reinforce.py: the objective by naive formulas, rewards, learning."""

import copy
import itertools
import math
import statistics as naive
import typing
from functools import cache

import pytest
import torch
from helpers import metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import talkative
from test_grpo import REWARD

import reinforce
from common.data.packing import PackedBatch, pack_minibatches
from common.data.sample import Completion
from common.objectives.kl import kl_estimate
from common.rollout.environments import on_turns

CPU, NAN = torch.device("cpu"), math.nan
NAMES = typing.get_args(typing.get_type_hints(reinforce.Args)["advantage"])
REWARDS = torch.tensor([[1.0, 0.0, 3.0], [0.5, 2.0, 0.0]], dtype=torch.float64)


def double(x):
    return torch.as_tensor(x, dtype=torch.float64)


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


def completion(sampled: int, said: int = 0) -> Completion:
    """Return a completion with `sampled` tokens of the model; an environment's reply follows the
    first of them."""
    mask = [False] * 2 + [True] * min(sampled, 1) + [False] * said + [True] * (sampled - 1)
    mask = mask if sampled else [False] * 3
    return Completion([0] * len(mask), mask, prompt_length=2)


def packs(groups, pack_tokens=10_000) -> list[list[PackedBatch]]:
    return pack_minibatches(groups, range(len(groups)), 1, pack_tokens, CPU)


def on_trained_tokens(minibatches) -> list[list[float]]:
    """Return the advantages of the trained tokens of each completion."""
    found = {}
    for mb in itertools.chain(*minibatches):
        assert (mb.advantages_T[~mb.loss_mask_T] == 0).all()
        for n, index in enumerate(mb.index_N.tolist()):
            trained_T = mb.loss_mask_T & (mb.sequence_ids_T == n)
            found[index] = mb.advantages_T[trained_T].tolist()
    return [found[index] for index in sorted(found)]


def advantages(name, rewards, groups) -> list[list[float]]:
    args = reinforce.Args(advantage=name)
    minibatches = packs(groups)
    return on_trained_tokens(reinforce.with_advantages(minibatches, double(rewards), args))


@given(groups, st.booleans(), st.lists(st.integers(0, 7), min_size=12, max_size=12))
def test_rewards_are_whitened_over_trained_tokens(device, rewards, baseline, trained):
    """A completion without trained tokens or without a reward counts in no statistic of tokens."""
    values = [r for group in rewards for r in (naive_centred(group) if baseline else group)]
    trained = trained[: len(values)]
    counts = [0 if math.isnan(x) else count for x, count in zip(values, trained, strict=True)]
    whitened = iter(
        naive_whiten([x for x, count in zip(values, counts, strict=True) for _ in range(count)])
    )
    expected = [[next(whitened) for _ in range(count)] for count in counts]
    expected = [x or [0.0] * count for x, count in zip(expected, trained, strict=True)]
    name = "reinforce++_baseline" if baseline else "reinforce++"
    made = iter(map(completion, trained))
    got = advantages(name, rewards, [[next(made) for _ in group] for group in rewards])
    for a, b in zip(got, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-4)


@given(groups)
def test_leave_one_out_baseline_is_the_mean_of_the_others(rewards):
    for group, got in zip(
        rewards, reinforce.less_baseline("leave_one_out", double(rewards)), strict=True
    ):
        for i, r in enumerate(group):
            others = [x for j, x in enumerate(group) if j != i and not math.isnan(x)]
            expected = 0.0 if math.isnan(r) or not others else r - naive.fmean(others)
            assert got[i].item() == pytest.approx(expected, abs=1e-9)


PLAIN = [
    [completion(4), completion(9), completion(2)],
    [completion(5), completion(1), completion(7)],
]


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++_baseline"])
def test_replies_of_an_environment_count_in_no_statistic(device, name):
    played = [
        [completion(4, 30), completion(9), completion(2, 50)],
        [completion(5, 3), completion(1), completion(7)],
    ]
    got = advantages(name, REWARDS, played)
    assert got == advantages(name, REWARDS, PLAIN)
    tokens = torch.tensor(sum(got, []))
    assert tokens.mean().item() == pytest.approx(
        0, abs=1e-6
    ) and tokens.std().item() == pytest.approx(1, rel=1e-5)


def test_advantage_estimators_differ_and_give_zero_for_equal_rewards(device):
    got = {name: torch.tensor(sum(advantages(name, REWARDS, PLAIN), [])) for name in NAMES}
    assert not any(
        torch.allclose(got[a], got[b], rtol=1e-2) for a, b in itertools.combinations(NAMES, 2)
    )
    for equal in (torch.full((2, 3), 0.1).double(), torch.full((2, 3), NAN).double()):
        for name in NAMES:
            assert {x for tokens in advantages(name, equal, PLAIN) for x in tokens} == {0.0}


# ---- the KL to come ----


@cache
def turn_args(credit: str, **flags) -> reinforce.Args:
    return reinforce.Args(
        turn_credit=credit, environment="guess_number", reward=("environment",), **flags
    )


def with_logprobs(groups, pack_tokens=10_000) -> list[list[PackedBatch]]:
    """Return packs with random log-probs of the old policy and of the reference, which depend on
    the completion alone."""

    def random_logprobs(mb: PackedBatch, seed: int) -> torch.Tensor:
        each = zip(mb.index_N.tolist(), mb.lengths, strict=True)
        seeds = [(torch.Generator().manual_seed(10 * i + seed), size) for i, size in each]
        return torch.cat([torch.randn(size, generator=generator) for generator, size in seeds])

    return [
        [
            mb.with_streams(
                old_logprobs_T=random_logprobs(mb, 0), ref_logprobs_T=random_logprobs(mb, 1)
            )
            for mb in mbs
        ]
        for mbs in packs(groups, pack_tokens)
    ]


PLAYED = [
    [completion(4, 3), completion(9), completion(2, 5)],
    [completion(5, 2), completion(1), completion(7, 1)],
]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_to_come_is_that_of_the_later_trained_tokens(device, estimator):
    """At the first trained token it is the KL of the completion."""
    for mb in with_logprobs(PLAYED, pack_tokens=20)[0]:
        kl_T = kl_estimate(mb.old_logprobs_T, mb.ref_logprobs_T, estimator)
        got_T = reinforce.kl_to_come(kl_T, mb.loss_mask_T, mb.sequence_ids_T)
        for t in range(len(kl_T)):
            later = [
                kl_T[s].item()
                for s in range(t, len(kl_T))
                if mb.loss_mask_T[s] and mb.sequence_ids_T[s] == mb.sequence_ids_T[t]
            ]
            assert got_T[t].item() == pytest.approx(math.fsum(later), abs=1e-9)
        for n, total in enumerate(mb.sequence_sums(kl_T).tolist()):
            first = (mb.loss_mask_T & (mb.sequence_ids_T == n)).nonzero()[0, 0]
            assert got_T[first].item() == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pack_tokens", [10_000, 24])
def test_token_advantages_equal_naive_code(device, name, pack_tokens):
    """The third completion has no reward. First turns have the advantage -1, later ones 0."""
    rewards = [[1.0, 0.0, NAN], [0.5, 2.0, 0.0]]
    played = copy.deepcopy(PLAYED)
    for sample in itertools.chain(*played):
        spans = itertools.groupby(sample.loss_mask)
        numbers = [[-float(k < 2)] * len([*span]) for k, (_, span) in enumerate(spans)]
        sample.streams["advantages"] = sum(numbers, [])
    minibatches, beta = with_logprobs(played, pack_tokens), 0.3
    args = turn_args("turn", advantage=name, kl_estimator="k1", beta=beta)
    present = [r for r in rewards[0] + rewards[1] if not math.isnan(r)]
    less = {"reinforce++": [[r - naive.fmean(present) for r in group] for group in rewards]}
    less["reinforce++_baseline"] = [naive_centred(group) for group in rewards]
    sizes = [2, 3]
    less["leave_one_out"] = [
        [r * n / (n - 1) for r in group]
        for group, n in zip(less["reinforce++_baseline"], sizes, strict=True)
    ]
    raw = {}
    for mb in itertools.chain(*minibatches):
        for n, index in enumerate(mb.index_N.tolist()):
            trained = (mb.loss_mask_T & (mb.sequence_ids_T == n)).nonzero()[:, 0].tolist()
            gaps = [(mb.old_logprobs_T[t] - mb.ref_logprobs_T[t]).item() for t in trained]
            reward = less[name][index // 3][index % 3]
            has_one_turn = index in (1, 4)
            raw[index] = [
                reward - (t == 0 or has_one_turn) - beta * math.fsum(gaps[t:])
                for t in range(len(gaps))
            ]
    unscored = raw.pop(2)
    expected = [x for index in sorted(raw) for x in raw[index]]
    expected = expected if name == "leave_one_out" else naive_whiten(expected)
    got = on_trained_tokens(
        reinforce.with_advantages(minibatches, torch.tensor(rewards).double(), args)
    )
    assert got.pop(2) == [0.0] * len(unscored)
    assert sum(got, []) == pytest.approx(expected, rel=1e-5, abs=1e-5)


# ---- turns ----


@st.composite
def episodes(draw) -> tuple[list[Completion], list[float]]:
    """Return a group of episodes and its scores. The first may be truncated before its first
    answer, and another have no score."""
    group, scores = [], []
    for i in range(4):
        turns = draw(st.integers(1, 4))
        lengths = draw(st.lists(st.integers(1, 3), min_size=turns, max_size=turns))
        ids, mask, ends = [0, 0], [False, False], []
        for length in lengths:
            ids += [1] * length + [2] * 2
            mask += [True] * length + [False] * 2
            ends.append(len(ids) - 3)
        rewards = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=turns, max_size=turns))
        states = ["start", *draw(st.lists(st.sampled_from("ab"), min_size=turns, max_size=turns))]
        if i == 0 and turns == 1 and draw(st.booleans()):
            states, rewards = [], []
        sample = Completion(ids[:-2], mask[:-2], prompt_length=2, turns=turns, states=states)
        sample.turn_rewards = list(zip(ends, rewards, strict=False))
        group.append(sample)
        scores.append(NAN if draw(st.integers(0, 5)) == 0 else 2 * sum(rewards) - 0.25)
    return group, scores


@settings(max_examples=40)
@given(episodes(), st.sampled_from(["group", "turn", "state"]))
def test_turn_advantages_equal_naive_code(played, credit):
    """The environment's rewards count twice; -0.25 belongs to the last turn."""
    group, scores = played
    turns = []  # (completion, turn, key, return)
    for i, (sample, score) in enumerate(zip(group, scores, strict=True)):
        rewards = [2 * reward for _, reward in sample.turn_rewards] or [0.0]
        rewards[-1] -= 0.25
        for k in range(sample.turns if not math.isnan(score) else 0):
            value = sum(0.95**n * reward for n, reward in enumerate(rewards[k:]))
            state = sample.states[k] if sample.states else "start"
            turns.append((i, k, dict(group=0, turn=k, state=state)[credit], value))
    expected = [[0.0] * sample.turns for sample in group]
    for i, k, key, value in turns:
        expected[i][k] = value - naive.fmean([v for _, _, other, v in turns if other == key])
    got = reinforce.turn_advantages(group, scores, 2.0, credit)
    for a, b in zip(got, expected, strict=True):
        assert a == pytest.approx(b, abs=1e-9)


@settings(max_examples=20)
@given(episodes())
def test_numbers_of_turns_stand_on_their_trained_tokens(played):
    for sample in played[0]:
        numbers = on_turns(sample, [*range(sample.turns)])
        spans = itertools.groupby(zip(sample.loss_mask, numbers, strict=True))
        assert [n for (trained, n), _ in spans if trained] == [*range(sample.turns)]


def played(rewards_of_turns: list[list[float]], states: list[list[str]]) -> list[Completion]:
    """Return episodes whose turns have one token each."""
    group = []
    for rewards, of_turns in zip(rewards_of_turns, states, strict=True):
        count = len(rewards)
        mask = [False] + [True, False] * count
        sample = Completion([0] * 2 * count, mask[:-1], prompt_length=1, turns=count)
        sample.turn_rewards = [(2 * k + 1, reward) for k, reward in enumerate(rewards)]
        sample.states = of_turns
        group.append(sample)
    return group


def test_turns_are_compared_with_those_of_the_same_state(monkeypatch):
    """The second episode returns to its first state; the second turn of the third is alone."""
    group = played([[0, 1], [0, 0, 0], [0, 1]], [["s", "a"], ["s", "s", "a"], ["s", "b"]])
    monkeypatch.setattr(reinforce, "TURN_DISCOUNT", 0.5)
    got = reinforce.turn_advantages(group, [1, 0, 1], 1.0, "state")
    assert got == [[0.25, 0.5], [-0.25, -0.25, -0.5], [0.25, 0.0]]
    equal = played([[0, 0.1], [0, 0, 0.1]], [["s", "a"], ["s", "a", "a"]])
    monkeypatch.setattr(reinforce, "TURN_DISCOUNT", 1.0)
    for credit in ("group", "turn", "state"):
        assert reinforce.turn_advantages(equal, [0.1, 0.1], 1.0, credit) == [[0.0] * 2, [0.0] * 3]


@pytest.mark.parametrize("credit", ["group", "turn", "state"])
def test_episodes_of_one_turn_have_the_advantages_of_completions(device, credit):
    groups = [played([[r] for r in group], [["s"]] * 3) for group in REWARDS.tolist()]
    plain = advantages("reinforce++_baseline", REWARDS, groups)
    args = turn_args(credit, advantage="reinforce++_baseline")
    for group, rewards in zip(groups, REWARDS.tolist(), strict=True):
        of_group = reinforce.turn_advantages(group, rewards, 1.0, credit)
        for sample, of_turns in zip(group, of_group, strict=True):
            sample.streams["advantages"] = on_turns(sample, of_turns)
    got = on_trained_tokens(reinforce.with_advantages(packs(groups), REWARDS, args))
    assert sum(got, []) == pytest.approx(sum(plain, []), abs=1e-5)


# ---- the loss ----

# Two completions, the first with tool output in its middle, and a third one without trained tokens.
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0]).bool()
IDS = torch.tensor([0] * 7 + [1] * 4 + [2] * 2)
ADVANTAGES = double([0, 1.5, 0.4, 0, 0, 0.3, 0.9, 0, -0.7, 0.2, -1.1, 0, 0])
TOKENS, SEQUENCES = torch.tensor(17), torch.tensor(5)  # of the global minibatch
BETA = 0.3


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
        loss=loss, reduction=reduction, kl_in=kl_in, kl_estimator="k2", entropy_coef=entropy_coef,
        beta=BETA,
    )  # fmt: skip
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
        new, old, engine, ref, entropy, ADVANTAGES, MASK, IDS, TOKENS, SEQUENCES, args
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
            args,
        )
        gradients.append(torch.autograd.grad(share_T.sum(), new)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("preset", reinforce.Args.PRESETS)
def test_presets_have_a_finite_objective(preset):
    args = reinforce.Args(preset=preset, **reinforce.Args.PRESETS[preset])
    share_T, _ = reinforce.loss(*streams(), ADVANTAGES, MASK, IDS, TOKENS, SEQUENCES, args)
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
        "--eval_every", 0, "--max_logprob_difference", 1e-4,
        "--engine", "transformers", "--share_prefix", 1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def everything(flags):
    """Return flags with the KL to come in the returns, the clip, penalties and weights of
    completions."""
    return (
        *flags, "--preset", "reinforce++", "--entropy_coef", 0.01, "--missing_eos_penalty", 0.1,
        "--reward_weights", 2, "--correction", "sequence",
    )  # fmt: skip


@pytest.mark.slow
def test_rewards_are_scores_minus_penalty_and_kl(everything, main, tmp_path, monkeypatch):
    seen, less_baseline = [], reinforce.less_baseline

    def look(name, rewards_BG):
        seen.append(rewards_BG.mean().item())
        return less_baseline(name, rewards_BG)

    monkeypatch.setattr(reinforce, "less_baseline", look)
    extra = ("--max_steps", 2, "--prompts_per_step", 4)
    flags = [flag for flag in everything if flag not in ("--preset", "reinforce++")]
    main("reinforce", *flags, *extra, "--kl_in", "reward", "--output_dir", tmp_path)
    for line, mean in zip(metrics(tmp_path), seen, strict=True):
        kl = line["kl"] * line["completions/mean_length"]  # of a completion
        penalty = 0.1 * line["completions/clipped_ratio"]
        assert mean == pytest.approx(line["reward"] - penalty - 0.01 * kl, abs=1e-6)
    assert 0.01 * abs(kl) > 1e-5


@pytest.mark.curve
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
