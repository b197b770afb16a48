"""docs/flags.md is the output of bench/flags_page.py, and every flag is explained on another
page."""

import dataclasses
import re

import pytest
from config.test_groups import ALGORITHMS, args_of
from helpers import ROOT

from bench.flags_page import PAGE, SCRIPTS, SHOWN, sections, tables

FLAGS = {
    script: {field.name for field in dataclasses.fields(args_of(script))} for script in ALGORITHMS
}


@pytest.mark.slow
def test_page_equals_the_output_of_the_bench():
    head, found, rest = PAGE.read_text(encoding="utf-8").partition("## ")
    assert found + rest == tables(), "run python bench/flags_page.py"


def test_page_covers_every_script():
    assert sorted(SCRIPTS) == ALGORITHMS


def test_every_flag_occurs_on_another_page():
    found = {flag for *_, heading, _, flags in sections() for flag in heading + flags}
    assert set().union(*FLAGS.values()) - found == set()


def test_places_that_show_flags_exist():
    links, tests = {link for _, link, *_ in sections()}, set()
    for path in ROOT.glob("tests/**/test_*.py"):
        names = re.findall(r"^def test_(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        tests.update(f"{path.relative_to(ROOT / 'tests')}::{name}" for name in names)
    assert set(SHOWN) - links - tests == set()
    flags = {
        flag for script, own in FLAGS.items() for name in own for flag in (name, f"{script}.{name}")
    }
    assert set(" ".join(SHOWN.values()).split()) - flags == set()
