"""Each rule of extras/trace/doctor.py names a run beyond its threshold, and is silent about one
just below it, whichever script the run is of."""

import random
from pathlib import Path

import pytest
import yaml
from helpers import write_rows
from in_process import call_main

from common.metrics.runs import read_run
from extras.trace import doctor


def run(folder: Path, flags: dict | None = None, **metrics: list[float]) -> Path:
    """Write the folder of a run. `metrics`: values from step 1 on."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"loss": [0.5], **metrics}
    lines = [
        dict(step=t + 1) | {name: values[t] for name, values in columns.items() if t < len(values)}
        for t in range(max(map(len, columns.values())))
    ]
    write_rows(folder / "metrics.jsonl", lines)
    (folder / "args.yaml").write_text(yaml.safe_dump(flags or {}))
    return folder


def found(folder: Path) -> list[str]:
    seen = doctor.examine(read_run(folder))
    return [rule.__name__ for rule, what in seen.items() if what is not None]


def steps(before: float, after: float, count: int = 30) -> list[float]:
    """Return values of which the first and the last third are constant."""
    third = count // 3
    return [before] * third + [(before + after) / 2] * (count - 2 * third) + [after] * third


FALLS = dict(reward=steps(0.5, 0.47))
RISES = dict(reward=steps(0.4, 0.9))


def solved(before: float, after: float, stderr: float) -> dict[str, list[float]]:
    """Return a reward that rises, and two evaluations."""
    return RISES | {"eval/solved": [before, after], "eval/solved_stderr": [stderr, stderr]}


GAP, CLIPPED = "sampling/sampling_logp_difference/mean", "completions/clipped_ratio"
CASES = {  # beyond the threshold, just below it
    "not_finite": (dict(loss=[1.0, float("nan")]), dict(loss=[1.0, 2.0])),
    "explodes": tuple(dict(loss=steps(0.1, 0.1), grad_norm=steps(1.0, x)) for x in (21.0, 19.0)),
    "truncated": ({CLIPPED: [0.51]}, {CLIPPED: [0.5]}),
    "equal_rewards": tuple(
        dict(reward=[0.1] * 6, reward_std=[0.1] * 6, frac_reward_zero_std=[x] * 6)
        for x in (0.9, 0.89)
    ),
    "reward_errors": ({"reward/error_fraction": [0.02]}, {"reward/error_fraction": [0.01]}),
    "engine_differs": ({GAP: [1e-6, 1.1e-4]}, {GAP: [1e-6, 0.9e-4]}),
    "entropy_collapses": tuple(FALLS | dict(entropy=steps(1.0, x)) for x in (0.09, 0.11)),
    "kl_grows": tuple(FALLS | dict(kl=steps(0.0, x)) for x in (1.1, 0.9)),
    "clips_often": tuple({"clip_ratio/region_mean": [x] * 3} for x in (0.51, 0.49)),
    "held_out_falls": (solved(0.5, 0.4, 0.03), solved(0.5, 0.46, 0.03)),
    "overfits": tuple(dict(loss=steps(1.0, 0.2), eval_loss=[1.0, 0.8, x]) for x in (0.9, 0.85)),
    "length_drifts": tuple(FALLS | {"completions/mean_length": steps(10, x)} for x in (15.1, 14.9)),
}


def test_every_rule_is_tested():
    assert {rule.__name__ for rule in doctor.RULES} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_rule_names_what_is_beyond_its_threshold(name, tmp_path):
    beyond, below = CASES[name]
    assert found(run(tmp_path / "beyond", **beyond)) == [name]
    assert found(run(tmp_path / "below", **below)) == []


def test_reward_that_never_changes_is_named(tmp_path):
    assert found(run(tmp_path, reward=[0.0] * 3, reward_std=[0.0] * 3)) == ["equal_rewards"]


def test_few_held_out_rows_are_named_where_their_answers_may_fall_by_chance(tmp_path):
    """With 12 rows, a newcomer took a fall from 0.583 to 0.333 for a broken run."""
    seen = doctor.examine(read_run(run(tmp_path, **solved(0.583, 0.333, 0.14))))
    what = "reward rose from 0.4 to 0.9, and eval/solved fell from 0.583 to 0.333, which may be "
    what += "chance: the 95% interval of the change is -0.638 to 0.138; evaluate more rows"
    assert seen[doctor.held_out_falls] == what
    assert found(run(tmp_path / "more", **solved(0.583, 0.4, 0.14))) == []
    assert found(run(tmp_path / "falls", **solved(0.5, 0.4, 0.03) | FALLS)) == []


def test_loss_that_rises_is_named_unless_the_run_has_rewards(tmp_path):
    metrics = dict(loss=steps(1.0, 2.0), grad_norm=[1.0] * 30)
    assert found(run(tmp_path / "data", **metrics)) == ["explodes"]
    assert found(run(tmp_path / "rewards", **metrics, reward=[0.5] * 30)) == []


# ---- healthy runs that look like a fault ----

EQUAL = dict(reward=[0.1] * 6, reward_std=[0.1] * 6, frac_reward_zero_std=[1.0] * 6)


@pytest.mark.parametrize(
    "flags, metrics",
    [
        (dict(samples_per_prompt=1), EQUAL),
        ({}, EQUAL | dict(value_loss=[1.0] * 6)),
        ({}, EQUAL | dict(teacher_entropy=[1.0] * 6)),
        (dict(old_logprobs="engine"), {GAP: [0.1]}),
        ({}, {GAP: [0.1], "sampling/staleness/mean": [1.0]}),
        (dict(dtype="bfloat16"), {GAP: [0.04]}),
        (dict(max_logprob_difference=1.0), {GAP: [0.04]}),
        ({}, dict(reward=steps(1.0, 1.0), entropy=steps(1.0, 0.01))),
        ({}, dict(grad_norm=[0.0] * 30 + [1.0] * 60)),
    ],
)
def test_rule_is_silent_where_it_cannot_be_right(flags, metrics, tmp_path):
    assert found(run(tmp_path, flags, **metrics)) == []


@pytest.mark.parametrize("count", [30, 300])
def test_noise_is_no_explosion(count, tmp_path):
    for seed in range(5):
        rng = random.Random(seed)
        losses = [1.2 - 0.2 * t / count + rng.gauss(0, 0.15) for t in range(count)]
        assert found(run(tmp_path / str(seed), loss=losses, grad_norm=[1.0] * count)) == []


# ---- the command ----


def test_command_prints_numbers_and_remedies_of_a_running_run(tmp_path, monkeypatch, capsys):
    folder = run(tmp_path, **{CLIPPED: [0.2, 0.8]})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    out, _ = call_main(doctor.main, ["doctor", folder], 0, monkeypatch, capsys)
    first, second, last = out.splitlines()
    assert first == "truncated: 80% of the completions reach --max_new_tokens"
    assert second.startswith("    try: a higher `--max_new_tokens`")
    assert last == "1 finding; 2 of 12 rules checked"


@pytest.mark.parametrize("name", ["metrics.jsonl", "args.yaml"])
@pytest.mark.parametrize("text", [None, "{damaged\n", "[1]\n"])
def test_missing_or_damaged_file_gives_one_line(name, text, tmp_path, monkeypatch, capsys):
    folder = run(tmp_path)
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    _, error = call_main(doctor.main, ["doctor", folder], 2, monkeypatch, capsys)
    assert error.count("\n") == 1 and str(tmp_path) in error
