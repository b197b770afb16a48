"""sft.py: the objective, datasets and lengths."""

import json
import math
import random
import shutil

import pytest
from helpers import assert_close_metrics, metrics, write_rows
from hypothesis import given
from hypothesis import strategies as st
from in_process import words
from naive import check

import sft
from common.model.tiny import tiny_model


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of very different lengths."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [dict(question=words(rng, 3), answer=words(rng, rng.randint(1, 40))) for _ in range(60)]
    return write_rows(path, rows)


@pytest.fixture(scope="module")
def data(small, rows):
    return *small[:2], "--dataset", rows


@pytest.mark.slow
def test_bfloat16_loss_is_close_to_float32(data, tmp_path, main):
    flags = ("--max_steps", 2, "--batch_size", 8, "--eval_every", 0, *data, "--lr", 1e-3)
    main("sft", *flags, "--output_dir", tmp_path / "float32")
    main("sft", *flags, "--output_dir", tmp_path / "bfloat16", "--dtype", "bfloat16")
    assert_close_metrics(tmp_path / "float32", tmp_path / "bfloat16", ("loss",), rel=2e-2)


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
    said = f"--max_length {length}: the limit of context and --pack_tokens"
    assert said in capsys.readouterr().out


# ---- the objective ----


@pytest.mark.parametrize("name", ["nll", "dft"])
@given(st.lists(st.tuples(st.floats(-700, 0)), min_size=1, max_size=8))
def test_loss_and_gradient_equal_naive_code(name, rows):
    """For a probability p with a constant weight w: d(-w log p)/dlogp = -w."""

    def naive(logp):
        weight = math.exp(logp) if name == "dft" else 1.0
        return -weight * logp, -weight

    check(lambda logprobs: sft.loss(name, logprobs), naive, rows)
