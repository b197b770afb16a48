"""Runs of the scripts on pictures: ranks, resume, exports, the limit of pixels."""

import json
import math

import pytest
import torch
from helpers import (
    assert_close_metrics,
    assert_resumes_exactly,
    metrics,
    stored,
    weights,
    write_rows,
)
from processes import run

from common.model.hub import resolve_model
from extras.images.reader import reader

FLAGS = (
    "--batch_size", 4, "--max_steps", 4, "--save_every", 2, "--lr", 1e-2, "--eval_every", 0,
    "--pack_tokens", 512, "--resume", "auto", "--trace_every", 0,
)  # fmt: skip


@pytest.fixture(scope="module")
def data(checkpoints, pictures):
    """Rows of which few have a picture: of four rows in a step, one rank often has none."""
    path = checkpoints("qwen3_vl")
    lines = pictures.read_text().splitlines(True)
    file = pictures.with_name("few.jsonl")
    file.write_text("".join([lines[1], *lines[-1:] * 6]))
    return "--model", path, "--dataset", file, *FLAGS


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory, main):
    """A run that also trains the tower."""
    folder = tmp_path_factory.mktemp("images") / "run"
    main("sft", *data, "--vision", "train", "--keep_last", 2, "--output_dir", folder)
    return folder


def test_ranks_without_pictures_change_nothing(trained, data, tmp_path):
    run(2, "sft.py", *data, "--vision", "train", "--output_dir", tmp_path)
    assert_close_metrics(trained, tmp_path, ("loss", "grad_norm", "num_tokens"), rel=1e-5)


def test_run_on_pictures_resumes_bitwise(trained, data, main):
    flags = (*data, "--vision", "train", "--keep_last", 2)
    assert_resumes_exactly(main, "sft", *flags, folder=trained, finished=4)


def test_export_has_the_trained_tower(trained, checkpoints):
    """hf/ and a checkpoint as a model have the weights of the base's names, all of them trained,
    and transformers loads them whole."""
    from transformers import AutoModelForImageTextToText

    base = checkpoints("qwen3_vl")
    exported = weights(trained)
    assert exported.keys() == stored(base).keys()
    found = stored(resolve_model(str(trained / "checkpoints" / "step_000004")))
    assert all(torch.equal(exported[name], found[name]) for name in exported)
    whole = AutoModelForImageTextToText.from_pretrained(trained / "hf", dtype=torch.float32)
    before = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    pairs = zip(whole.model.visual.parameters(), before.model.visual.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)


def require_limit_of_pixels(folder, base) -> None:
    """Check that a program that reads an export of `--max_pixels 1024` makes the same pixels."""
    whole, limited = (reader(str(base), limit).layout(70, 70) for limit in (None, 1024))
    assert reader(str(folder / "hf"), None).layout(70, 70) == limited != whole


def test_adapters_and_a_frozen_tower_leave_its_weights_alone(data, checkpoints, tmp_path, main):
    flags = ("--max_steps", 1, "--lora_rank", 2, "--vision", "frozen", "--max_pixels", 1024)
    main("sft", *data, *flags, "--output_dir", tmp_path)
    base, exported = stored(checkpoints("qwen3_vl")), weights(tmp_path)
    changed = {name for name, weight in exported.items() if not torch.equal(weight, base[name])}
    assert changed and all(name.startswith("model.language_model.layers.") for name in changed)
    require_limit_of_pixels(tmp_path, checkpoints("qwen3_vl"))


def test_dpo_on_pictures(checkpoints, pictures, tmp_path, main):
    """The first loss is that of a policy which equals the reference."""
    rows = [json.loads(line) for line in pictures.read_text().splitlines()[:4]]
    rejected = [dict(role="assistant", content="It is 9.")]
    pairs = [dict(images=row["images"], prompt=row["prompt"], chosen=row["completion"],
                  rejected=rejected) for row in rows]  # fmt: skip
    file = pictures.with_name("pairs.jsonl")
    write_rows(file, pairs)
    flags = ("--dataset", file, "--vision", "frozen", "--max_steps", 1, "--max_pixels", 1024)
    main("dpo", "--model", checkpoints("idefics3"), *FLAGS, *flags, "--output_dir", tmp_path)
    assert metrics(tmp_path)[0]["loss"] == pytest.approx(math.log(2), rel=1e-4)
    require_limit_of_pixels(tmp_path, checkpoints("idefics3"))
