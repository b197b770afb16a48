"""Traces have the numbers of the update, and change nothing."""

import gzip
import math
from pathlib import Path

import pytest
import torch
from helpers import assert_same_weights, metrics
from hypothesis import given
from hypothesis import strategies as st
from processes import run

from extras.trace import trace
from extras.trace.file import read
from extras.trace.trace import choose, fingerprint

SAMPLING = (
    "--engine", "transformers", "--prompts_per_step", 4, "--samples_per_prompt", 3,
    "--max_new_tokens", 12, "--minibatches", 2, "--epochs_per_rollout", 2,
)  # fmt: skip
SCRIPTS = {
    "sft": (),
    "dpo": ("--sft_weight", 0.5),
    "kto": (),
    "rm": (),
    "grpo": (
        *(*SAMPLING, "--beta", 0.1, "--entropy_coef", 0.01),
        *("--old_logprobs", "engine", "--correction", "none"),
    ),
    "dapo": SAMPLING,
    "reinforce": SAMPLING,
    "rloo": SAMPLING,
    "ppo": SAMPLING,
    # A minibatch has any number of pairs, and the metric is their mean.
    "online_dpo": (*SAMPLING, "--minibatches", 1),
    "bok": SAMPLING,
    "distill": (*SAMPLING, "--teacher", "tiny", "--on_policy_fraction", 0.5),
    "self_distill": (*SAMPLING, "--hint", "answer"),
}
REWARD = "def digits(completion, row): return sum(map(str.isdigit, completion)) / 5"


def traces(folder: Path) -> dict[int, list[dict]]:
    """Return the lines of all traces of a run, by step."""
    return {lines[0]["step"]: lines for lines in map(read, sorted(folder.glob("trace/*.gz")))}


def flags(small, script: str, folder: Path, *more: object) -> tuple:
    folder.mkdir(exist_ok=True)
    (folder.parent / "reward.py").write_text(REWARD)
    is_online = SAMPLING[0] in SCRIPTS[script]
    reward = ("--reward", f"{folder.parent / 'reward.py'}:digits") if is_online else ()
    return (
        *small, *SCRIPTS[script], *reward, "--max_steps", 2, "--eval_every", 0, "--save_every", 100,
        "--dtype", "float32", "--trace_every", 1, "--output_dir", folder, *more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_shares_of_all_tokens_add_up_to_the_loss(main, script, small, tmp_path, monkeypatch):
    """Every sample of the step is in the trace, whether it was sampled or comes from the data."""
    monkeypatch.setattr(trace, "GROUPS", 1000)
    main(script, *flags(small, script, tmp_path, "--max_steps", 1))
    logged = {row["step"]: row for row in metrics(tmp_path)}
    for step, (header, *groups) in traces(tmp_path).items():
        updates = len(header["loss"])
        mean = sum(header["loss"]) / updates
        assert mean == pytest.approx(logged[step]["loss"], rel=1e-5, abs=1e-7)
        traced = [0.0] * updates
        completions = [c for group in groups for c in group["completions"]]
        for update in (update for c in completions for update in c["updates"]):
            traced[update["update"]] += sum(update.get("share", []))
            traced[update["update"]] += update.get("row", {}).get("share", 0.0)
        assert traced == pytest.approx(header["loss"], rel=1e-5, abs=1e-6) and any(traced)
        assert sorted(group["group"] for group in groups) == [*range(len(groups))]
    assert sorted(traces(tmp_path)) == [1]


@pytest.mark.slow
def test_trace_changes_no_weight_and_counts_updates_of_the_value_model_alone(main, small, tmp_path):
    more = ("--epochs_per_rollout", 1, "--value_warmup_steps", 1)
    for name, every in (("with", 1), ("without", 0)):
        main("ppo", *flags(small, "ppo", tmp_path / name, *more, "--trace_every", every))
    assert_same_weights(tmp_path / "with", tmp_path / "without")
    assert not (tmp_path / "without" / "trace").exists()
    losses = [lines[0]["loss"] for lines in traces(tmp_path / "with").values()]
    assert [len(each) for each in losses] == [2, 2]  # --minibatches 2


NAMES = ("logprobs", "ratio", "clip_ratio/region_mean", "share", "logprobs_gradient")
LARGE_STEPS = ("--lr", 3e-3, "--warmup_steps", 0)  # after which ratios are clipped


@pytest.mark.slow
def test_streams_of_a_token_fit_together(main, small, tmp_path):
    """Without KL and entropy the derivative by a log-prob is the share itself, and 0 where the
    ratio is clipped."""
    main("grpo", *flags(small, "reinforce", tmp_path, *LARGE_STEPS))
    seen = set()
    for _, *groups in traces(tmp_path).values():
        for completion in (c for group in groups for c in group["completions"]):
            ids, start = completion["ids"], completion["start"]
            assert len(completion["tokens"]) == len(ids)
            assert len(completion["mask"]) == len(ids) - start
            old = completion["fixed"]["old_logprobs"]
            for update in completion["updates"]:
                assert len(update["logprobs"]) == len(ids) - start
                columns = [update[name] for name in NAMES]
                for new, ratio, is_clipped, share, gradient, old_logprob in zip(
                    *columns, old, strict=True
                ):
                    assert ratio == pytest.approx(math.exp(new - old_logprob), rel=1e-4)
                    expected = 0.0 if is_clipped else share
                    assert gradient == pytest.approx(expected, rel=1e-4, abs=1e-7)
                    seen.add((is_clipped, completion["advantage"] > 0))
    assert len(seen) >= 3


def test_gradients_of_float16_have_no_loss_scale(main, small, tmp_path):
    found = []
    for dtype in ("float32", "float16"):
        main("sft", *flags(small, "sft", tmp_path / dtype, "--dtype", dtype, "--max_steps", 1))
        (_, group, *_), *_ = traces(tmp_path / dtype).values()
        found.append(group["completions"][0]["updates"][0]["logprobs_gradient"])
    assert any(found[0]) and found[1] == pytest.approx(found[0], rel=1e-2)


@pytest.mark.slow
def test_four_ranks_trace_what_one_rank_traces(main, small, tmp_path):
    """Only for the first step: weights of later steps differ by rounding."""
    more = (*LARGE_STEPS, "--minibatches", 1, "--max_steps", 1)
    main("grpo", *flags(small, "reinforce", tmp_path / "one", *more))
    run(4, "grpo.py", *flags(small, "reinforce", tmp_path / "four", *more))
    (one, *groups), (four, *others) = (traces(tmp_path / name)[1] for name in ("one", "four"))
    assert (len(one["weights"]), len(four["weights"])) == (1, 4)
    assert one["loss"] == pytest.approx(four["loss"], rel=1e-4, abs=1e-6)
    for group, other in zip(groups, others, strict=True):
        assert all(group[name] == other[name] for name in ("group", "chosen", "prompt"))
        for x, y in zip(group["completions"], other["completions"], strict=True):
            assert x["ids"] == y["ids"] and x["reward"] == y["reward"]
            for u, v in zip(x["updates"], y["updates"], strict=True):
                assert u["share"] == pytest.approx(v["share"], rel=1e-3, abs=1e-6)


@given(
    st.dictionaries(st.integers(0, 30), st.tuples(st.floats(-3, 3), st.floats(0, 3)), min_size=1),
    st.integers(1, 9),
)
def test_chosen_groups_have_reasons_and_are_as_many_as_asked(values, count):
    chosen = choose(values, count)
    assert len(chosen) == min(count, len(values))
    assert "first" in chosen[min(values)]
    for reason, i in ((reason, i) for i, reasons in chosen.items() for reason in reasons):
        worse = dict(best=0, disputed=1).get(reason)
        assert worse is None or values[i][worse] == max(value[worse] for value in values.values())


def test_fingerprint_shows_any_changed_weight():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    seen = {fingerprint(model)}
    with torch.no_grad():
        for weight in model.parameters():
            weight.view(-1)[0] += 1e-6
            seen.add(fingerprint(model))
        model[0].weight.data, model[1].weight.data = model[1].weight.data, model[0].weight.data
    assert len(seen | {fingerprint(model)}) == 6


def test_trace_of_another_schema_and_a_damaged_one_are_refused(tmp_path):
    path = tmp_path / "step.jsonl.gz"
    for content, words in (
        (gzip.compress(b'{"schema": 0}\n'), "schema 0, expected 2"),
        (gzip.compress(b'{"schema": 2}\n')[:-9], "damaged; delete it"),
        (gzip.compress(b""), "damaged; delete it"),
        (b"no gzip", "damaged; delete it"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{path}: {words}"):
            read(path)
