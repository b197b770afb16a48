"""sft.py: several nodes, a damaged checkpoint, datasets, lengths, and real data."""

import json
import math
import random
import shutil

import helpers
import pytest
from helpers import (
    ROOT,
    assert_close_metrics,
    assert_same_weights,
    metrics,
    needs_gsm8k,
    run,
)
from hypothesis import given
from hypothesis import strategies as st
from naive import check

import sft
from common.model.tiny import tiny_model

STEPS = (
    "--max_steps", 4, "--batch_size", 8, "--lr", 1e-3, "--eval_every", 0, "--save_every", 2,
    "--lr_schedule", "constant",
)  # fmt: skip
SAME = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "epoch", "lr")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of very different lengths."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("data") / "rows.jsonl"
    words = [rng.choice(["apples", "7", "and", "pears", "sold", "12", "left"]) for _ in range(4000)]
    rows = [
        dict(
            question=" ".join(words[:3]), answer=" ".join(rng.choices(words, k=rng.randint(1, 40)))
        )
        for _ in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(small, rows):
    return *small[:2], "--dataset", rows


@pytest.fixture(scope="module")
def two_ranks(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run(2, "sft.py", *STEPS, *data, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_evaluation_uses_nll_with_every_loss(rows, data, tmp_path, main):
    found = {}
    for loss in ("nll", "dft"):
        main("sft", *data, "--loss", loss, "--max_steps", 1, "--batch_size", 8, "--eval_size", 6,
             "--lr", 1e-12, "--output_dir", tmp_path / loss)  # fmt: skip
        (found[loss],) = metrics(tmp_path / loss)
    assert found["nll"]["eval_loss"] == pytest.approx(found["dft"]["eval_loss"], rel=1e-6)
    assert found["dft"]["loss"] < found["nll"]["loss"] / 100


@pytest.mark.slow
def test_two_ranks_set_a_damaged_checkpoint_aside(two_ranks, data, tmp_path):
    """For either rank that checks the damaged file, both resume from the previous checkpoint."""
    folder = shutil.copytree(two_ranks, tmp_path / "run")
    shutil.rmtree(folder / "hf")
    for shard in (folder / "checkpoints" / "step_000004").glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:-1])
    done = run(2, "sft.py", *STEPS, *data, "--output_dir", folder)
    assert (
        done.stdout.count("step_000004 is damaged (") == 1
        and "is missing or not as it was written" in done.stdout
    )
    assert "step_000002 (step 2)" in done.stdout
    assert_same_weights(two_ranks, folder)


@pytest.mark.slow
def test_two_nodes_give_the_metrics_of_one_node(two_ranks, data, tmp_path):
    """Each rank is the only one of its machine; tests/parallel/test_nodes.py has a torchrun for
    each machine."""
    (tmp_path / "node.py").write_text(
        "import os, runpy, sys\nos.environ |= dict(LOCAL_RANK='0', LOCAL_WORLD_SIZE='1')\n"
        "runpy.run_path('sft.py', run_name='__main__')\n"
    )
    flags = ("--shard_ranks", 2, "--output_dir", tmp_path)  # one copy: the same order of sums
    run(2, tmp_path / "node.py", *STEPS, *data, *flags)
    assert_same_weights(two_ranks, tmp_path)
    assert_close_metrics(two_ranks, tmp_path, SAME, rel=0)


@pytest.mark.slow
def test_bfloat16_loss_is_close_to_float32(data, tmp_path, main):
    flags = ("--max_steps", 2, "--batch_size", 8, "--eval_every", 0, *data, "--lr", 1e-3)
    main("sft", *flags, "--output_dir", tmp_path / "float32")
    main("sft", *flags, "--output_dir", tmp_path / "bfloat16", "--dtype", "bfloat16")
    assert_close_metrics(tmp_path / "float32", tmp_path / "bfloat16", ("loss",), rel=2e-2)


@pytest.mark.slow
def test_datasets_are_drawn_by_their_weights(small, rows, tmp_path, main):
    """The loss of each dataset is that of its rows."""
    lines = rows.read_text().splitlines(keepends=True)
    (tmp_path / "short.jsonl").write_text("".join(sorted(lines, key=len)[:20]))
    (tmp_path / "long.jsonl").write_text("".join(sorted(lines, key=len)[20:]))
    datasets = [f"{tmp_path}/{name}.jsonl:{weight}" for name, weight in (("short", 3), ("long", 1))]
    flags = (
        *small[:2], "--dataset", *datasets, "--batch_size", 8, "--max_steps", 4, "--eval_every", 3,
        "--eval_size", 6, "--lr", 1e-3,
    )  # fmt: skip
    main("sft", *flags, "--output_dir", tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert lines[-1]["epoch/short"] == pytest.approx(24 / 17) and lines[-1][
        "epoch/long"
    ] == pytest.approx(8 / 37)
    for line in lines:
        low, high = sorted((line["loss/short"], line["loss/long"]))
        assert low < line["loss"] < high
    evaluated = [line["step"] for line in lines if {"eval_loss/short", "eval_loss/long"} <= {*line}]
    assert evaluated == [3, 4]


@pytest.mark.slow
def test_overlong_rows_are_counted(data, tmp_path, main, capsys):
    flags = (*data, "--max_steps", 1, "--batch_size", 4, "--eval_every", 0, "--max_length", 120)
    main("sft", *flags, "--output_dir", tmp_path / "drop")
    dropped = capsys.readouterr().out
    main("sft", *flags, "--output_dir", tmp_path / "cut", "--overlong", "truncate")
    cut = capsys.readouterr().out
    count = int(dropped.split(" training rows dropped as too long")[0].split()[-1])
    assert 0 < count < 60 and f"{60 - count} training rows, 0 held out" in dropped
    assert f"{count} training rows truncated" in cut and "60 training rows, 0 held out" in cut


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "extra", "length"), [(512, (), 512), (2048, ("--pack_tokens", 300), 300)]
)
def test_default_max_length_adapts_to_context_and_pack(
    context, extra, length, data, tmp_path, main, capsys
):
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | dict(max_position_embeddings=context)
    (model / "config.json").write_text(json.dumps(config))
    flags = (*data, "--model", model, "--max_steps", 1, "--batch_size", 4, "--eval_every", 0)
    main("sft", *flags, *extra, "--output_dir", tmp_path / "run")
    assert (
        f"--max_length {length}: the limit of context and --pack_tokens" in capsys.readouterr().out
    )


@pytest.mark.curve
@needs_gsm8k
def test_model_learns_gsm8k(main, tmp_path):
    """The recipe's 200 steps reach 1.95 nats per character (docs/log.md); 20 small steps reach less
    than 3.5, from ln 356."""
    some = tmp_path / "some.jsonl"  # each rank would encode all of the data
    some.write_text("".join(helpers.GSM8K.open().readlines()[:400]))
    main(
        "sft", "--config", ROOT / "configs/gsm8k_sft.yaml", "--dataset", some,
        "--output_dir", tmp_path / "run", "--max_steps", 20, "--batch_size", 4, "--eval_every", 20,
        "--eval_size", 16,
    )  # fmt: skip
    last = metrics(tmp_path / "run")[-1]
    assert last["eval_loss"] < 3.5, last


# ---- the objective ----


@pytest.mark.parametrize("name", ["nll", "dft"])
@given(st.lists(st.tuples(st.floats(-700, 0)), min_size=1, max_size=8))
def test_loss_and_gradient_equal_naive_code(name, rows):
    """For a probability p with a constant weight w: d(-w log p)/dlogp = -w."""

    def naive(logp):
        weight = math.exp(logp) if name == "dft" else 1.0
        return -weight * logp, -weight

    check(lambda logprobs: sft.loss(name, logprobs), naive, rows)
