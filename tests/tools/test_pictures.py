"""Pictures of the pages show what exists: files, flags and metrics. Each has a page and a maker."""

import json
import re

import pytest
from helpers import ROOT, metrics
from PIL import Image
from scripts import all_flags

from tools.pictures import ARCHIVED, MADE

PAGES = {name: page for name, (page, *_) in (MADE | ARCHIVED).items()}
DRAWN = ("scripts", "ppo", "row_path", "shared_prefix", "chat_row")  # without extras and runs


def about(name: str, key: str) -> list[str]:
    with Image.open(ROOT / f"docs/{name}.png") as picture:
        return json.loads(picture.text[key])


def test_every_picture_has_a_maker_and_a_page():
    assert {path.stem for path in ROOT.glob("docs/*.png")} == PAGES.keys()
    for name, page in PAGES.items():
        if (ROOT / page).is_file() or not page.startswith("extras/"):  # an extra may be gone
            assert f"{name}.png)" in (ROOT / page).read_text(encoding="utf-8"), name


def test_files_and_flags_in_pictures_exist():
    flags = all_flags()
    for name in MADE:
        words = " ".join(about(name, "words"))
        for file in re.findall(r"[\w/]+\.(?:py|yaml|jinja)", words):
            assert (ROOT / file).is_file() or (ROOT / "common" / file).is_file(), (name, file)
        assert {flag for flag in re.findall(r"--(\w+)", words)} <= flags, name


def test_metrics_in_pictures_are_logged(main, tmp_path):
    small = ("--max_steps", 2, "--eval_size", 4, "--trace_every", 0, "--compile", "false")
    main("sft", "--eval_generate", 0, "--batch_size", 4, *small, "--output_dir", tmp_path / "sft")
    small += ("--max_new_tokens", 4, "--prompts_per_step", 4, "--engine", "transformers")
    main("grpo", "--beta", 0.1, *small, "--output_dir", tmp_path / "grpo")
    logged = {key for run in ("sft", "grpo") for line in metrics(tmp_path / run) for key in line}
    assert {metric for name in MADE for metric in about(name, "metrics")} <= logged


@pytest.mark.parametrize("name", DRAWN)
def test_diagram_is_what_its_maker_draws(name):
    from tools.pictures import words_of

    assert words_of(MADE[name][1]()) == about(name, "words")
