"""What scripts that sample share: penalties, missing rewards, loads of weights, first forwards."""

import importlib

import pytest
import torch
from helpers import assert_close_metrics, assert_same_weights, metrics, write

import bok
import grpo
import reinforce
import rloo
from common.model import scoring
from common.rollout.transformers_engine import TransformersEngine
from common.train.run import Run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_kl_is_logged_without_a_penalty_and_changes_no_weight(main, script, online, tmp_path):
    flags = (*online, "--prompts_per_step", 4, "--lr", 3e-3)
    if script != "grpo":
        flags += ("--beta", 0)
    main(script, *flags, "--output_dir", tmp_path / "without")
    main(script, *flags, "--log_kl", "--output_dir", tmp_path / "with")
    assert_same_weights(tmp_path / "with", tmp_path / "without")
    name = "objective/kl" if script == "ppo" else "kl"
    seen, unseen = ([line.get(name) for line in metrics(tmp_path / run)] for run in
                    ("with", "without"))  # fmt: skip
    assert unseen == [None, None] and seen[0] is not None and seen[1] > 0.01


@pytest.mark.parametrize(
    ("script", "function", "beta"),
    [
        (reinforce, "with_advantages", 0),  # its KL is no part of the reward
        (rloo, "advantages", 3),
        (bok, "best", 3),
    ],
    ids=["reinforce", "rloo", "bok"],
)
def test_rewards_are_scores_minus_penalty_and_kl(
    script, function, beta, online, main, tmp_path, monkeypatch
):
    """The KL is that of a whole completion."""
    seen, original = [], getattr(script, function)

    def look(*given):
        (rewards_BG,) = (x for x in given if isinstance(x, torch.Tensor))
        seen.append(rewards_BG.mean().item())
        return original(*given)

    monkeypatch.setattr(script, function, look)
    flags = (*online, "--missing_eos_penalty", 0.1, "--beta", beta, "--lr", 1e-3)
    main(script.__name__, *flags, "--output_dir", tmp_path)
    for line, mean in zip(metrics(tmp_path), seen, strict=True):
        kl = line.get("kl", 0)
        penalty = 0.1 * line["completions/clipped_ratio"]
        assert mean == pytest.approx(line["reward"] - penalty - beta * kl, abs=1e-6)
    assert beta * abs(kl) > 1e-4 or script is reinforce


UNSCORED = """
def first_three(completions, row):
    return [sum(map(ord, text)) % 7 for text in completions[:3]] + [None] * len(completions[3:])
"""
TRAINED = (
    "loss", "grad_norm", "entropy", "kl", "objective/", "value_", "policy/", "clip_ratio/",
    "ratio", "sampling/", "reward", "kept/reward", "pairs/", "explained_variance",
)  # fmt: skip
REGULARISED = ("--entropy_coef", 0.1)
IN_LOSS = ("--beta", 0.5)


@pytest.mark.parametrize(
    "script, extra",
    [
        ("grpo", (*REGULARISED, *IN_LOSS)),
        ("grpo", (*REGULARISED, *IN_LOSS, "--reduction", "sequence")),
        ("dapo", ("--log_kl", "--missing_eos_penalty", 0.5)),
        ("reinforce", (*REGULARISED, *IN_LOSS)),
        ("reinforce", (*REGULARISED, "--kl_in", "loss", *IN_LOSS)),
        ("rloo", IN_LOSS),
        ("ppo", (*REGULARISED, *IN_LOSS)),
        ("online_dpo", ()),
        ("bok", ()),
    ],
)
def test_a_completion_without_a_reward_is_not_trained_on(script, extra, online, main, tmp_path):
    """If one of four completions has no reward, the run is as with the other three."""
    reward = write(tmp_path / "reward.py", UNSCORED)
    flags = (*online, *extra, "--reward", f"{reward}:first_three", "--prompts_per_step", 4)
    for samples in (3, 4):
        own = ("--samples_per_prompt", samples, "--output_dir", tmp_path / str(samples))
        main(script, *flags, *own)
    assert_close_metrics(tmp_path / "3", tmp_path / "4", ["loss", "grad_norm"], 1e-5)
    names = [name for name in metrics(tmp_path / "3")[0] if name.startswith(TRAINED)]
    assert_close_metrics(tmp_path / "3", tmp_path / "4", names, 1e-4, floor=0.1)


# ---- evaluations ----


@pytest.mark.parametrize("script", ["grpo", "dapo"])
def test_weights_are_loaded_once_per_version(script, online, main, tmp_path, monkeypatch):
    """One load serves everything that is sampled from these weights: held-out prompts, a step, and
    the further draws of the step."""
    loaded, original = [], TransformersEngine.load_weights

    def load(engine, weights, version):
        loaded.append(version)
        original(engine, weights, version)

    monkeypatch.setattr(TransformersEngine, "load_weights", load)
    main(script, *online, "--eval_every", 1, "--eval_size", 5, "--output_dir", tmp_path)
    assert loaded == [0, 1, 2]
    lines = metrics(tmp_path)
    assert all("eval/solved" in line for line in lines)
    assert "engine/running" not in lines[0], "an evaluation"
    if script == "grpo":
        assert [line["engine/running"] for line in lines[1:]] == [24, 24]


@pytest.mark.parametrize(
    ("script", "flags", "passes"),
    [
        ("grpo", ("--preset", "gspo"), [1]),
        ("grpo", ("--preset", "dppo"), []),
        ("dapo", (), [1]),
        ("reinforce", ("--preset", "reinforce++_baseline"), [1, 2]),  # the reference reads all
        ("reinforce", ("--preset", "reinforce++"), [2, 2]),  # the KL before the update, too
        ("rloo", ("--beta", 0), [1]),
    ],
)
def test_first_minibatch_needs_no_pass_before_its_update(
    script, flags, passes, online, main, tmp_path, monkeypatch
):
    """Its own forward gives its old log-probs, which its second epoch uses too."""
    made, forwards = [], scoring.forwards

    def counted(model, micro_batches, **options):
        made.append(len(micro_batches := [*micro_batches]))
        return forwards(model, micro_batches, **options)

    monkeypatch.setattr(scoring, "forwards", counted)
    flags = (*online, *flags, "--minibatches", 2, "--epochs_per_rollout", 2, "--lr", 1e-3)
    flags += ("--max_steps", 1)
    main(script, *flags, "--output_dir", tmp_path / "whole")
    assert made[:1] == [2]
    made.clear()
    monkeypatch.setattr(Run, "checks_engine", lambda *_: False)
    main(script, *flags, "--output_dir", tmp_path / "part")
    assert made == passes
    assert_same_weights(tmp_path / "part", tmp_path / "whole")


TABLES = {
    ("grpo", "advantages"): (grpo.ADVANTAGES, "group"),
    ("reinforce", "less_mean"): (reinforce.LESS_BASELINE, "reinforce++"),
}
OF_SAMPLES = r"of shape \[.*\] for samples of shape \[8, 3\]; advantages"


@pytest.mark.parametrize(
    ("script", "function", "change", "words"),
    [
        ("grpo", "advantages", lambda x: x.T, OF_SAMPLES),
        ("grpo", "advantages", lambda x: x.mean(-1), OF_SAMPLES),
        ("grpo", "advantages", lambda x: x.flatten(), OF_SAMPLES),
        ("rloo", "advantages", lambda x: x.T, OF_SAMPLES),
        ("rloo", "advantages", lambda x: x.sum(), OF_SAMPLES),
        ("reinforce", "less_mean", lambda x: x.T, OF_SAMPLES),
        ("ppo", "advantages", lambda x: (x[0][:-1], x[1]), "^advantages_T: .* numbers for "),
        ("grpo", "loss", lambda x: (x[0].sum(), x[1]), r"^loss\(\): shape"),
        ("rloo", "loss", lambda x: (x[0][:, None], x[1]), r"^loss\(\): shape"),
        ("ppo", "loss", lambda x: (x[0], dict(ratio=x[0][:1])), r"^loss\(\), ratio: shape \[1\]"),
    ],
)  # fmt: skip
def test_own_function_that_returns_another_shape_is_refused(
    script, function, change, words, online, main, tmp_path, monkeypatch
):
    module = importlib.import_module(script)
    own = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *args, **kwargs: change(own(*args, **kwargs)))
    table, name = TABLES.get((script, function), ({}, ""))
    monkeypatch.setitem(table, name, getattr(module, function))
    with pytest.raises(ValueError, match=words):
        main(script, *online, "--max_steps", 1, "--output_dir", tmp_path)
