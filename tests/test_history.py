""".githooks/commit-msg refuses messages of another form, or without a reason."""

import subprocess

import pytest
from helpers import ROOT


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("# a comment\n\npacking.py: num_samples, because count was two\n\nwhy: x\n", 0),
        ("Merge branch 'other'\n", 0),
        ("one of these days: " + "x" * 53 + "\n\nBecause it is long.\n", 0),
        ("README: because " + "x" * 57, 1),
        ("Mend the count of samples\n\npacking.py: because it was two things\n", 1),
        (": nothing, because\n", 1),
        ("packing.py: num_samples\n\nwhy: x\n# because\n", 1),
    ],
)
def test_message_has_a_place_72_characters_and_a_reason(message, code, tmp_path):
    (tmp_path / "message").write_text(message)
    command = ["sh", ROOT / ".githooks" / "commit-msg", tmp_path / "message"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code
    subject = next(line for line in message.splitlines() if line.strip("# ") and line[0] != "#")
    assert done.stderr.count("\n") == code and (not code or f"subject '{subject}'" in done.stderr)
