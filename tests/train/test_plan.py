"""`--dry_run`: the checks of a run and its plan, without weights and files; and the table of
docs/recipes.md."""

import json
import re
import shutil
from pathlib import Path

import pytest
from config.test_groups import ALGORITHMS
from helpers import ROOT, run

from bench.recipes import example, plans, rows
from common.model.tiny import tiny_model


@pytest.fixture
def no_weights(tmp_path) -> Path:
    """Return a folder of a model that has no weights."""
    return Path(
        shutil.copytree(
            tiny_model(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
        )
    )


def dry(ranks: int, script: str, *flags: object, code: int = 0):
    return run(ranks, f"{script}.py", *flags, "--max_steps", 4, "--dry_run", "8x80GB", code=code)


SLOW = pytest.mark.slow
QUICK = ("grpo", "dpo")


@pytest.mark.parametrize(
    "script", [s if s in QUICK else pytest.param(s, marks=SLOW) for s in ALGORITHMS if s != "eval"]
)
def test_dry_run_needs_no_weights_and_leaves_no_files(script, no_weights, sums, tmp_path):
    model = ["--model", no_weights, "--dataset", sums, "--output_dir", tmp_path / "run"]
    model += ["--teacher", no_weights] if script == "distill" else []
    model += ["--hint", "answer"] if script == "self_distill" else []
    done = dry(2 if script in QUICK else 1, script, *model)
    assert re.search(r"memory per training rank: [0-9.]+ GiB of 74.5 \(", done.stdout)
    assert (
        done.stdout.count("dry run: no weights were loaded, nothing was written") == 1
    )  # on one of the ranks
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("script", "flags", "lines"), [
    (
        "grpo",
        "--prompts_per_step 16 --samples_per_prompt 4 --max_new_tokens 10 --minibatches 2 "
        "--reward characters format --epochs_per_rollout 3 --eval_every 2 --rollout_ranks 4 "
        "--save_every 1",
        [
            "step: 16 prompts x 4 completions = 64 sequences, at most ",
            "optimizer steps: --minibatches 2 x --epochs_per_rollout 3 = 6\n",
            "optimizer step on each of 4 training ranks, 4 only generate: 8 sequences, ",
            "run: 4 steps, 3 evaluations of 256 rows\n", "disk: checkpoints 3 x ",
            "reward characters, mean of 10 rows: 1 for column answer, 0 for empty completions\n",
            "warning: reward format: column answer scores no better than empty completions\n",
            "memory of an engine per GPU: 67.1 GiB (weights 0.0, cache at most 67.1); 4 engines ",
            "all 16 completions of a step run at a time", "time of a step: ", "time of the run: ",
            "rates: H100, assumed by its memory", "rewards measured here on ten rows",
        ],
    ),
    (
        "dpo", "--batch_size 16 --eval_every 0 --eval_generate 0",
        [
            "step: 16 rows x 2 = 32 sequences, ", "on each of 8 training ranks: 4 sequences, ",
            "run: 4 steps, 0 evaluations of 0 rows\n", "⟦", "disk: checkpoints 1 x ",
            "time of the run: ", "4 steps; no evaluations; without start and saves",
        ],
    ),
])  # fmt: skip
def test_plan_has_the_sizes_of_a_step(script, flags, lines):
    text = dry(1, script, "--model", "tiny", *flags.split()).stdout
    assert [line for line in lines if line not in text] == []


@pytest.mark.slow
def test_plans_without_gpus_and_without_a_number_of_rows(sums):
    """A CPU has no limit of memory, and the rows of a stream are not counted."""
    text = run(1, "dpo.py", "--max_steps", 4, "--dry_run", "true").stdout
    assert "the reference scores all rows once" in text and "rates: this CPU: " in text
    text = dry(1, "sft", "--dataset", sums, "--streaming", "true", "--eval_every", 0).stdout
    assert "time of the run: " in text


def test_tokens_of_a_step_are_those_of_its_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "12", "completion": "345"}\n' * 16
    )  # and EOS: 6 tokens
    text = dry(
        1, "sft", "--dataset", tmp_path / "rows.jsonl", "--batch_size", 8, "--eval_every", 0
    ).stdout
    assert "step: 8 rows x 1 = 8 sequences, 48 tokens" in text
    assert "12⟦345<|eos|>⟧" in text


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (
            ["--reward", "REWARD:raises"],
            "rewards could not be computed .* rows.jsonl:[0-9]+: ZeroDivisionError",
        ),
        (
            ["--reward", "REWARD:fine", "--pack_tokens", "90000000"],
            "--dry_run: needs .* GiB of 74.5 .* on each GPU",
        ),
        (
            ["--reward", "exact_match"],
            "--reward exact_match reads column answer; the dataset has prompt",
        ),
        (
            ["--reward", "REWARD:fine", "--environment", "calculator"],
            "--environment and --reward environment need",
        ),
        (
            ["--reward", "REWARD:fine", "--model", "absent/absent"],
            "--model absent/absent: no such folder",
        ),
        (["--reward", "model:absent"], "--reward model:absent|--reward absent"),
    ],
)
def test_dry_run_refuses_what_the_run_refuses(flags, what, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(dict(prompt=f"{i}+1=")) + "\n" for i in range(64))
    )
    code = (
        "def raises(completion, row):\n    return 1 / 0\n\n\ndef fine(completion, row):\n"
        "    return 1.0\n"
    )
    (tmp_path / "mine.py").write_text(code)
    flags = [flag.replace("REWARD", str(tmp_path / "mine.py")) for flag in flags]
    data = ["--dataset", tmp_path / "rows.jsonl", "--max_new_tokens", 8, "--eval_every", 0]
    done = dry(1, "grpo", *data, *flags, code=1 if "could not" in what else 2)  # 1: as in the run
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(what, line) and "Traceback" not in done.stderr


def test_table_of_recipes_is_the_prediction(tmp_path):
    listed = [
        line for line in (ROOT / "docs/recipes.md").read_text().splitlines() if "`torchrun" in line
    ]
    assert listed == list(rows(tmp_path))
    page = (ROOT / "docs/planning.md").read_text().splitlines()
    printed = list(plans(tmp_path))
    assert len(printed) == 5 and [line for line in page if line in printed] == printed
    assert "\n".join(example(tmp_path)) in "\n".join(page)
