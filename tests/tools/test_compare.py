"""The comparison of runs: its groups, bands, intervals and differences against numbers by hand, and
its errors."""

import json
import math
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers import ROOT, write_rows
from in_process import call_main
from PIL import Image

COMPARE = ROOT / "tools" / "compare.py"
module = runpy.run_path(str(COMPARE), run_name="compare")
T2, T4 = 4.302652730, 2.776445105  # 97.5% quantiles of Student's t for 2 and 4 degrees of freedom


def write(
    folder: Path,
    scores: Sequence[float],
    flags: dict,
    script: str = "/x/grpo.py",
    name: str = "eval/solved",
):
    """Write a run whose metric has these values at steps 1, 2, ..., and return its folder."""
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, name: score}) + "\n" for step, score in enumerate(scores, 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    text = yaml.safe_dump(flags | dict(output_dir=str(folder)))
    (folder / "args.yaml").write_text(f"# {script}\n{text}")
    return folder


def groups_of(*folders: Path) -> tuple[list[list[str]], list[str]]:
    """Return the folders' names by group, and the labels of the groups."""
    groups = module["group_runs"]([module["read_run"](folder) for folder in folders])
    return [[run.folder.name for run in group] for group in groups], module["label_groups"](groups)


@pytest.fixture
def compare(monkeypatch, capsys, tmp_path) -> Callable[..., tuple[list[list[str]], str]]:
    """`compare(*options)` returns the rows of the table and stderr."""

    def compare(*options: object, code: int = 0) -> tuple[list[list[str]], str]:
        out = [] if "--out" in options else ["--out", tmp_path / "compare.png"]
        shown, errors = call_main(
            module["main"], [COMPARE, *options, *out], code, monkeypatch, capsys
        )
        lines = [line.split("│")[1:-1] for line in shown.splitlines() if line.startswith("│")]
        return [[cell.strip() for cell in line] for line in lines], errors

    return compare


def test_runs_that_differ_in_seed_and_names_only_are_a_group(tmp_path):
    folders = [
        write(tmp_path / f"{name}{seed}", [0.5], dict(lr=lr, seed=seed, resume=resume))
        for name, lr, resume in (("a", 0.003, "auto"), ("b", 4e-4, "never"))
        for seed in (0, 1, 2)
    ]
    expected = [["a0", "a1", "a2"], ["b0", "b1", "b2"]]
    assert groups_of(*folders) == (expected, ["lr 0.003", "lr 0.0004"])
    assert groups_of(*folders[::-1])[1] == ["lr 0.0004", "lr 0.003"]


def test_another_script_other_code_or_a_repeated_seed_is_another_group(tmp_path):
    folders = [
        write(
            tmp_path / f"{name}{seed}", [0.5], dict(seed=seed), f"/x{seed}/{name}.py\n# code {code}"
        )
        for seed, name, code in [(0, "grpo", 1), (1, "grpo", 1), (2, "grpo", 2), (0, "rloo", 1)]
    ]
    assert groups_of(*folders)[0] == [["grpo0", "grpo1"], ["grpo2"], ["rloo0"]]
    again = write(tmp_path / "again", [0.5], dict(seed=0), "/y/grpo.py\n# code 1")
    assert groups_of(*folders[:2], again)[0] == [["grpo0"], ["grpo1"], ["again"]]


def test_band_is_drawn_over_the_steps_that_all_seeds_have(tmp_path, compare, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda _: None)
    folders = [
        write(tmp_path / "a", [0.1, 0.3, 0.9], dict(lr=1, seed=0)),
        write(tmp_path / "b", [0.3, 0.2], dict(lr=1, seed=1)),
        write(tmp_path / "c", [0.7, 0.8], dict(lr=2, seed=0)),
    ]
    rows, _ = compare(*folders)
    figure = plt.gcf()
    monkeypatch.undo()
    plt.close("all")
    lines = [line.get_xydata().ravel().tolist() for line in figure.axes[0].lines]
    assert lines == [pytest.approx([1, 0.2, 2, 0.25]), [1, 0.7, 2, 0.8]]
    edge = {
        tuple(np.round(point, 9)) for point in figure.axes[0].collections[0].get_paths()[0].vertices
    }
    assert edge == {(1, 0.1), (1, 0.3), (2, 0.2), (2, 0.3)}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "lr 1 (2 seeds)",
        "lr 2 (1 seed)",
    ]
    with Image.open(tmp_path / "compare.png") as picture:
        assert picture.width > 400
    assert rows == [
        # The mean of 0.3 and 0.2, and 12.7062 times 0.05.
        ["eval/solved", "lr 1", "2", "2", "0.2 -> 0.25", "[-0.3853, 0.8853]", ""],
        ["eval/solved", "lr 2", "1", "2", "0.7 -> 0.8", "needs 2 seeds", "+0.55"],
    ]


def test_without_matplotlib_the_table_stands_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = write(tmp_path / "a", [0.1, 0.3], dict(lr=1))
    shown, _ = call_main(module["main"], [COMPARE, folder], 0, monkeypatch, capsys)
    said = "compare.png is not drawn: matplotlib is not installed; pip install '.[plots]'\n"
    assert said in shown and "0.1 -> 0.3" in shown and "curves:" not in shown
    assert not (tmp_path / "compare.png").exists()


def seeds(tmp_path: Path, lr: float, ends: dict[int, float], **kwargs) -> list[Path]:
    """Write a run for each seed, with its last value."""
    return [
        write(tmp_path / f"{lr}_{s}", [0, end], dict(lr=lr, seed=s), **kwargs)
        for s, end in ends.items()
    ]


def test_difference_is_paired_for_equal_seeds_and_welch_for_others(tmp_path, compare):
    first = seeds(tmp_path, 1, {0: 1.0, 1: 3.0, 2: 8.0})
    paired = seeds(tmp_path, 2, {2: 10.0, 0: 2.0, 1: 6.0})  # differences 1, 3, 2: variance 1
    unpaired = seeds(tmp_path, 3, {0: 1.0, 1: 3.0, 5: 8.0})
    rows, _ = compare(*first, *paired, *unpaired)
    half, paired_half = T2 * math.sqrt(13 / 3), T2 / math.sqrt(3)
    welch = T4 * math.sqrt(2 * 13 / 3)  # equal variances and sizes: 4 degrees of freedom
    assert rows[0][4:] == ["0 -> 4", f"[{4 - half:.4g}, {4 + half:.4g}]", ""]
    assert rows[1][6] == f"+2 [{2 - paired_half:.4g}, {2 + paired_half:.4g}] paired"
    assert rows[2][6] == f"+0 [{-welch:.4g}, {welch:.4g}] Welch"


def test_two_seeds_have_a_wide_interval(tmp_path, compare):
    first, other = (seeds(tmp_path, lr, {0: 1.0 + lr, 1: 3.0 + 2 * lr}) for lr in (1, 2))
    assert compare(*first, *other)[0][1][6] == "+1.5 [-4.853, 7.853] paired"


# ---- evaluations ----


def evaluation(folder: Path, scores: Sequence[Sequence[float | None]]) -> Path:
    """Write what eval.py writes: the first score of a question is that of the greedy answer."""
    folder.mkdir()
    (folder / "results.json").write_text("{}")
    lines = [
        dict(
            source=f"x:{i}",
            completions=[
                dict(greedy=g == 0, score=score, reward_errors={}) for g, score in enumerate(group)
            ],
        )
        for i, group in enumerate(scores, 1)
    ]
    write_rows(folder / "completions.jsonl", lines)
    return folder


def test_evaluations_are_paired_by_question(tmp_path, compare):
    before = evaluation(tmp_path / "a", [[0, 0, 1], [0.5, 0, 0], [1, 1, 1], [1, 1, None]])
    after = evaluation(tmp_path / "b", [[1, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, None]])
    rows, _ = compare(before, after)
    # Differences of greedy answers 1, 0, 0, 0: the bootstrap's mean is 0 in 32% of draws, and above
    # 3/4 in 0.4%.
    assert rows[1][0::2] == ["greedy", "4", "[0.25, 1]", "1, 0"]
    assert rows[1][5] == "+0.25 [0, 0.75] paired" and rows[0][5:] == ["", ""]
    assert rows[3][0] == "sampled" and rows[3][5].startswith("+0 [") and rows[3][6] == "1, 1"
    fewer = evaluation(tmp_path / "c", [[1, 1, 1]])
    said = compare(before, fewer, code=2)[1]
    assert said.startswith(f"error: {fewer}: 1 greedy answers: not the questions of {before}")
    (fewer / "completions.jsonl").write_text("{}\n")
    assert "no completions of eval.py" in compare(before, fewer, code=2)[1]


def test_welch_interval_of_unequal_variances(tmp_path, compare):
    """Variances of the means 13/3 and 1/12: (53/12)^2 / ((13/3)^2 / 2 + (1/12)^2 / 3) = 2.0772
    degrees of freedom. Without any variance the interval has no width."""
    first = seeds(tmp_path, 1, {0: 1.0, 1: 3.0, 2: 8.0})
    other = seeds(tmp_path, 2, {5: 4.0, 6: 4.0, 7: 4.0, 8: 4.0 + 2 / math.sqrt(3)})
    rows, _ = compare(*first, *other)
    low, high = map(float, rows[1][6].split("[")[1].split("]")[0].split(", "))
    assert (high - low) / 2 / math.sqrt(53 / 12) == pytest.approx(4.1531, rel=5e-4)
    ones, twos = (seeds(tmp_path, 3 + i, {3 * i + n: 1 + i for n in range(3)}) for i in range(2))
    assert compare(*ones, *twos)[0][1][5:] == ["[2, 2]", "+1 [1, 1] Welch"]
    same = seeds(tmp_path, 5, {0: 1.0, 1: 3.0, 2: 8.0})
    assert compare(*first, *same)[0][1][6] == "+0 (no interval: the same for each seed)"


def test_last_value_is_a_mean_except_for_evaluations(tmp_path, compare):
    run = write(tmp_path / "a", [1, 2, 3, 4], dict(seed=0), name="reward")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 4, "eval/x": 1}\n'
            '{"step": 5, "eval/x": 7, "reward": NaN, "eval/note": "text"}\n{"step": 6, "rew'
        )
    assert [row[3:5] for row in compare(run)[0]] == [["5", "1 -> 7"], ["5", "1 -> nan"]]
    run = write(tmp_path / "b", range(1, 21), dict(seed=0), name="reward")
    assert compare(run)[0][0][:6] == ["reward", str(run), "1", "20", "1 -> 15.5", "needs 2 seeds"]
    assert compare(run, "--last", 2)[0][0][4] == "1 -> 19.5"
    assert compare(run, "--last", 99, "--metrics", "rew*")[0][0][4] == "1 -> 10.5"
    for wrong in (0, -3):
        said = f"error: --last {wrong}: must be at least 1\n"
        assert compare(run, "--last", wrong, code=2) == ([], said)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("metrics.jsonl", None, "{run}/metrics.jsonl: No such file or directory; name the output"),
        ("args.yaml", "a: [", "{run}: args.yaml or metrics.jsonl is damaged: "),
        ("metrics.jsonl", '{"step": 2, "lo\n', "{run}: args.yaml or metrics.jsonl is damaged: "),
        ("metrics.jsonl", "", "--metrics eval* reward loss: not in all runs; common: none"),
        ("metrics.jsonl", '{"step": 7, "loss": 1}\n', "{good}, {run}: no step has loss in all"),
    ],
)
def test_bad_file_is_one_line(tmp_path, compare, file, text, words):
    good, run = (write(tmp_path / f"{i}", [1, 2], dict(seed=i), name="loss") for i in range(2))
    (run / file).unlink()
    if text is not None:
        first = "# /x/grpo.py\n" if file == "args.yaml" else ""
        (run / file).write_text(first + text)
    rows, shown = compare(good, run, code=2)
    assert shown.startswith(f"error: {words.format(run=run, good=good)}")
    assert rows == [] and shown.count("\n") == 1
