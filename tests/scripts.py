"""The names of the project's scripts: those with a page in docs/. A user may have copies beside
them under other names, and no test of the project looks at these."""

import dataclasses
import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {  # files by name
    path.stem: path
    for path in sorted(ROOT.glob("*.py"))
    if path.stem == "demo" or (ROOT / "docs" / path.stem).with_suffix(".md").is_file()
}
ALGORITHMS = [name for name in SCRIPTS if name != "demo"]
TRAINING = [name for name in ALGORITHMS if name != "eval"]


def all_flags() -> set[str]:
    """Return the flags of all scripts."""
    args = [importlib.import_module(name).Args for name in ALGORITHMS]
    return {field.name for args_class in args for field in dataclasses.fields(args_class)}
