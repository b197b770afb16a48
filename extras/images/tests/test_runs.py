"""Runs of the scripts on pictures: ranks, resume, exports."""

import json
import math

import pytest
import torch
from helpers import assert_close_metrics, assert_resumes_exactly, metrics, run, stored, weights

from common.data.sample import Sample
from common.model.hub import resolve_model
from common.model.scoring import digest_of
from extras.images.reader import reader

FLAGS = (
    "--batch_size", 4, "--max_steps", 4, "--save_every", 2, "--lr", 1e-2, "--eval_every", 0,
    "--pack_tokens", 512, "--resume", "auto", "--trace_every", 0,
)  # fmt: skip


@pytest.fixture(scope="module")
def data(checkpoints, pictures):
    """One of two ranks often has no picture: four rows of a step, of which few have any."""
    path = checkpoints("qwen3_vl")
    lines = pictures.read_text().splitlines(True)
    file = pictures.with_name("few.jsonl")
    file.write_text("".join([lines[1], *lines[-1:] * 6]))
    return "--model", path, "--dataset", file, *FLAGS


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run on two ranks that trains the tower too."""
    folder = tmp_path_factory.mktemp("images") / "two_ranks"
    run(2, "sft.py", *data, "--vision", "train", "--output_dir", folder)
    return folder


def test_ranks_without_pictures_change_nothing(trained, data, tmp_path, main):
    main("sft", *data, "--vision", "train", "--output_dir", tmp_path)
    assert_close_metrics(trained, tmp_path, ("loss", "grad_norm", "num_tokens"), rel=1e-5)


def test_run_on_pictures_resumes_bitwise(data, tmp_path, main):
    flags = (*data, "--vision", "train", "--keep_last", 2)
    main("sft", *flags, "--output_dir", tmp_path / "run")
    assert_resumes_exactly(main, "sft", *flags, folder=tmp_path / "run", finished=4)


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


def test_adapters_and_a_frozen_tower_leave_its_weights_alone(data, checkpoints, tmp_path, main):
    main("sft", *data, "--lora_rank", 2, "--vision", "frozen", "--output_dir", tmp_path)
    base = stored(checkpoints("qwen3_vl"))
    changed = {
        name for name, weight in weights(tmp_path).items() if not torch.equal(weight, base[name])
    }
    assert changed and all(name.startswith("model.language_model.layers.") for name in changed)


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_export_has_the_limit_of_pixels(family, data, checkpoints, tmp_path, main):
    """A program that reads the export makes the same pixels without a flag."""
    flags = (*data[2:], "--max_steps", 1, "--vision", "frozen", "--max_pixels", 1024)
    main("sft", "--model", checkpoints(family), *flags, "--output_dir", tmp_path)
    layouts = []
    for path, limit in ((tmp_path / "hf", None), (checkpoints(family), 1024)):
        layouts.append(reader(str(path), limit).layout(70, 70))
    assert layouts[0] == layouts[1] != reader(str(checkpoints(family)), None).layout(70, 70)


def test_dpo_on_pictures(checkpoints, pictures, tmp_path, main):
    """The first loss is that of a policy that equals the reference."""
    rows = [json.loads(line) for line in pictures.read_text().splitlines()]
    pairs = [
        dict(images=row["images"], prompt=row["prompt"], chosen=row["completion"],
             rejected=[dict(role="assistant", content="It is 9.")])
        for row in rows[:4]
    ]  # fmt: skip
    file = pictures.with_name("pairs.jsonl")
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = ("--model", checkpoints("idefics3"), "--dataset", file, "--vision", "frozen",
             "--batch_size", 4, "--max_steps", 2, "--lr", 1e-2, "--eval_every", 0,
             "--trace_every", 0)  # fmt: skip
    main("dpo", *flags, "--output_dir", tmp_path)
    assert metrics(tmp_path)[0]["loss"] == pytest.approx(math.log(2), rel=1e-4)


def test_stored_reference_is_that_of_these_pictures():
    rows = [dict(_images=[["a.png", digest, 1, 3, 4]]) for digest in ("aa", "bb")]
    one, other = (digest_of([Sample([1, 2], [True] * 2, row=row)], "model", []) for row in rows)
    assert one != other
