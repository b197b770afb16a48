"""The numbers of one_step.md and one_pair.md are those of their programs."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT

NUMBER = r"-?\d+\.\d+"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_step", "one_pair"])
def test_page_has_the_numbers_of_its_program(name):
    """Names and ids are equal. Another machine may round the rest in another way."""
    command = [sys.executable, ROOT / f"course/{name}.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    printed = re.sub(r"^update \d\n", "", printed, flags=re.MULTILINE)
    page = (ROOT / f"course/{name}.md").read_text(encoding="utf-8")
    shown = "".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL))
    assert re.sub(NUMBER, "x", shown).split() == re.sub(NUMBER, "x", printed).split()
    found, expected = (list(map(float, re.findall(NUMBER, text))) for text in (printed, shown))
    assert found == pytest.approx(expected, rel=0.02, abs=2e-3)
