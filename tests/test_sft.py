"""sft.py: a gradient independent of ranks, exact resume, several nodes, and real data."""

import json
import math
import random
import shutil

import helpers
import pytest
from helpers import (
    ROOT,
    assert_close_metrics,
    assert_resumes_exactly,
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

# rows of mixed lengths, like GSM8K, so that a wrong denominator is detected
TEN_STEPS = (
    "--max_steps", 10, "--batch_size", 8, "--lr", 1e-3, "--eval_every", 0, "--save_every", 5,
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
    run(2, "sft.py", *TEN_STEPS, *data, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_gradient_does_not_depend_on_ranks_or_packing(two_ranks, data, tmp_path, main):
    flags = ("--pack_tokens", 2048, "--max_length", 2048, *data, "--output_dir", tmp_path)
    main("sft", *TEN_STEPS, *flags)
    assert_close_metrics(two_ranks, tmp_path, SAME, rel=1e-5)


@pytest.mark.slow
def test_dft_gradient_does_not_depend_on_ranks_and_evaluation_uses_nll(rows, data, tmp_path, main):
    """The metrics of several held-out sets are equal on any number of ranks."""
    (tmp_path / "one.jsonl").write_text(
        rows.read_text().splitlines(keepends=True)[0]
    )  # fewer rows than ranks
    flags = (
        *data, "--loss", "dft", "--max_steps", 3, "--batch_size", 8, "--eval_size", 6, "--lr", 1e-3,
        "--eval_dataset", rows, f"short={tmp_path}/one.jsonl",
    )  # fmt: skip
    run(2, "sft.py", *flags, "--output_dir", tmp_path / "two")
    main(
        "sft", *flags, "--pack_tokens", 2048, "--max_length", 2048, "--output_dir", tmp_path / "one"
    )
    of_sets = [
        f"eval_{name}{end}" for name in ("loss", "entropy") for end in ("", "/rows", "/short")
    ]
    assert_close_metrics(tmp_path / "two", tmp_path / "one", (*SAME, *of_sets), rel=1e-5)
    for loss in ("nll", "dft"):
        still = ("--max_steps", 1, "--lr", 1e-12, "--loss", loss, "--output_dir", tmp_path / loss)
        main("sft", *flags, *still)
    ((nll,), (dft,)) = (metrics(tmp_path / loss) for loss in ("nll", "dft"))
    assert (
        nll["eval_loss"] == pytest.approx(dft["eval_loss"], rel=1e-6)
        and dft["loss"] < nll["loss"] / 100
    )


@pytest.mark.slow
def test_denominator_per_rank_is_detected(two_ranks, data, tmp_path):
    """Negative control of the test above: the same script with a token count per rank."""
    source = (ROOT / "sft.py").read_text()
    count = "distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in micro_batches))"
    assert source.count(count) == 1
    wrong = tmp_path / "sft.py"
    wrong.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        + source.replace(count, "sum(mb.loss_mask_T.sum() for mb in micro_batches) * world_size")
    )
    run(2, wrong, *TEN_STEPS, *data, "--output_dir", tmp_path / "out")
    with pytest.raises(AssertionError, match="grad_norm"):
        assert_close_metrics(two_ranks, tmp_path / "out", ("grad_norm",), rel=1e-5)


@pytest.mark.slow
def test_killed_run_resumes_bitwise(two_ranks, data, tmp_path):
    """`kill -9` of launcher and ranks comes after the first checkpoint. With ten steps it might
    come too late on a busy machine, so this run has a thousand steps, and its checkpoints after the
    first are deleted."""
    flags = (*TEN_STEPS, *data, "--output_dir", tmp_path)
    longer = ("--max_steps", 1000, "--keep_last", 1000)
    helpers.run_and_kill(
        2, "sft.py", *flags, *longer, folder=tmp_path, after_step=6, at="torch.optim.AdamW.step"
    )
    for checkpoint in (tmp_path / "checkpoints").glob("step_*"):
        if checkpoint.name > "step_000005" and checkpoint.suffix == "":
            shutil.rmtree(checkpoint)
    assert (tmp_path / "checkpoints" / "step_000005").is_dir() and not (tmp_path / "hf").exists()
    assert "resuming from" in run(2, "sft.py", *flags).stdout
    assert_same_weights(two_ranks, tmp_path)
    assert_close_metrics(two_ranks, tmp_path, SAME, rel=0)


def without_the_end(run_folder, folder):
    """Return a copy of a finished run that has only its first checkpoint."""
    return shutil.copytree(run_folder, folder, ignore=lambda *_: ["hf", "step_000010"])


@pytest.mark.slow
def test_run_resumes_on_another_number_of_ranks(two_ranks, data, tmp_path, main):
    folder = without_the_end(two_ranks, tmp_path / "run")
    main("sft", *TEN_STEPS, *data, "--output_dir", folder)
    assert [line["step"] for line in metrics(folder)] == list(range(1, 11))
    assert_close_metrics(
        two_ranks, folder, ("epoch", "num_tokens"), rel=0
    )  # the same data in the same order
    assert_close_metrics(two_ranks, folder, ("loss",), rel=1e-4)


@pytest.mark.slow
def test_two_ranks_set_a_damaged_checkpoint_aside(two_ranks, data, tmp_path):
    """For either rank that checks the damaged file, both resume from the previous checkpoint."""
    folder = shutil.copytree(two_ranks, tmp_path / "run")
    shutil.rmtree(folder / "hf")
    for shard in (folder / "checkpoints" / "step_000010").glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:-1])
    done = run(2, "sft.py", *TEN_STEPS, *data, "--output_dir", folder)
    assert (
        done.stdout.count("step_000010 is damaged (") == 1
        and "was changed after it was written" in done.stdout
    )
    assert "step_000005 (step 5)" in done.stdout
    assert_same_weights(two_ranks, folder)


@pytest.mark.slow
def test_two_nodes_give_the_metrics_of_one_node(two_ranks, data, tmp_path):
    """Each rank is the only one of its machine; tests/parallel/test_nodes.py has a torchrun for
    each machine."""
    (tmp_path / "node.py").write_text(
        "import os, runpy, sys\nos.environ |= dict(LOCAL_RANK='0', LOCAL_WORLD_SIZE='1')\n"
        "runpy.run_path('sft.py', run_name='__main__')\n"
    )
    run(2, tmp_path / "node.py", *TEN_STEPS, *data, "--output_dir", tmp_path)
    assert_same_weights(two_ranks, tmp_path)
    assert_close_metrics(two_ranks, tmp_path, SAME, rel=0)


@pytest.mark.slow
def test_bfloat16_loss_is_close_to_float32(data, tmp_path, main):
    flags = ("--max_steps", 2, "--batch_size", 8, "--eval_every", 0, *data, "--lr", 1e-3)
    main("sft", *flags, "--output_dir", tmp_path / "float32")
    main("sft", *flags, "--output_dir", tmp_path / "bfloat16", "--dtype", "bfloat16")
    assert_close_metrics(tmp_path / "float32", tmp_path / "bfloat16", ("loss",), rel=2e-2)


@pytest.mark.slow
def test_run_with_held_out_rows_resumes_exactly(data, tmp_path, main):
    flags = (
        "--max_steps",
        4,
        "--batch_size",
        4,
        "--eval_size",
        4,
        "--eval_every",
        3,
        "--save_every",
        2,
        *data,
    )
    main("sft", *flags, "--output_dir", tmp_path / "run")
    assert [line["step"] for line in metrics(tmp_path / "run") if "eval_loss" in line] == [3, 4]
    assert_resumes_exactly(main, "sft", *flags, folder=tmp_path / "run", finished=4)


@pytest.mark.slow
def test_datasets_are_drawn_by_their_weights(small, rows, tmp_path, main):
    """The draws do not depend on ranks or a resume; the loss of each dataset is that of its
    rows."""
    lines = rows.read_text().splitlines(keepends=True)
    (tmp_path / "short.jsonl").write_text("".join(sorted(lines, key=len)[:20]))
    (tmp_path / "long.jsonl").write_text("".join(sorted(lines, key=len)[20:]))
    datasets = [f"{tmp_path}/{name}.jsonl:{weight}" for name, weight in (("short", 3), ("long", 1))]
    flags = (
        *small[:2], "--dataset", *datasets, "--batch_size", 8, "--max_steps", 4, "--save_every", 2,
        "--eval_every", 3, "--eval_size", 6, "--lr", 1e-3,
    )  # fmt: skip
    main("sft", *flags, "--output_dir", tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert lines[-1]["epoch/short"] == pytest.approx(24 / 17) and lines[-1][
        "epoch/long"
    ] == pytest.approx(8 / 37)
    for line in lines:
        low, high = sorted((line["loss/short"], line["loss/long"]))
        assert low < line["loss"] < high
    assert {"eval_loss/short", "eval_loss/long"} <= lines[-1].keys()
    assert_resumes_exactly(main, "sft", *flags, folder=tmp_path / "run", finished=4)
    run(2, "sft.py", *flags, "--output_dir", tmp_path / "two")
    same = (*SAME, "loss/short", "loss/long", "epoch/short", "epoch/long")
    assert_close_metrics(tmp_path / "run", tmp_path / "two", same, rel=1e-4)


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
        f"--max_length {length}: the maximum for the model's context and --pack_tokens"
        in capsys.readouterr().out
    )


@pytest.mark.curve
@needs_gsm8k
def test_model_learns_gsm8k(main, tmp_path):
    """The recipe's 200 steps reach 1.95 nats per character (docs/sft.md); 20 small steps reach less
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
