"""flags.txt lists every flag with its default under the scripts that have it."""

import dataclasses
from collections import defaultdict

from config.test_groups import ALGORITHMS, args_of
from helpers import ROOT


def listing() -> str:
    """Return the text that flags.txt should have: a paragraph for each set of scripts, those of
    most scripts first."""
    scripts_of, flags_of, tiny = (
        defaultdict(list),
        defaultdict(list),
        ["[for the built-in model and task]"],
    )
    for script in ALGORITHMS:
        args_class = args_of(script)
        for field in dataclasses.fields(args_class):
            scripts_of[f"{field.name} = {field.default!r}"].append(script)
        if defaults := args_class.TINY_DEFAULTS:
            tiny.append(
                f"{script}: "
                + " ".join(f"{name}={value!r}" for name, value in sorted(defaults.items()))
            )
    for flag, scripts in sorted(scripts_of.items()):
        flags_of[tuple(scripts)].append(flag)
    in_order = sorted(flags_of, key=lambda scripts: (-len(scripts), scripts))
    paragraphs = [[f"[{' '.join(scripts)}]", *flags_of[scripts]] for scripts in in_order]
    return "\n\n".join("\n".join(lines) for lines in [*paragraphs, tiny]) + "\n"


def test_flags_equal_the_snapshot():
    """After an intended change, write `listing()` to flags.txt."""
    assert listing() == (ROOT / "tests/config/flags.txt").read_text()
