"""Write the tables of docs/flags.md: all flags, the section that explains each, and the place that
shows its effect.

    python bench/flags_page.py

Types, defaults and texts are those of the scripts. A section explains a flag if it has `--flag`
between backticks. bench/flags_shown.yaml lists sections with a picture or table for several values
of a flag, and tests of its effect."""

import importlib
import re
import sys
import typing
from collections import Counter
from dataclasses import asdict, fields
from functools import cache
from itertools import chain
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.config import (
    objectives,
    preference_flags,
    sampling,
    teacher_flags,
    training,
    truncation_flags,
)
from common.config.help import texts

ROOT = Path(__file__).resolve().parent.parent
PAGE, SHOWN = ROOT / "docs/flags.md", yaml.safe_load((ROOT / "bench/flags_shown.yaml").read_text())
SCRIPTS = (
    "sft dpo kto rm grpo gspo dapo reinforce rloo ppo online_dpo bok distill self_distill eval"
).split()
GROUPS = [
    cls
    for module in (
        training,
        sampling,
        truncation_flags,
        objectives,
        preference_flags,
        teacher_flags,
    )
    for cls in vars(module).values()
    if getattr(cls, "__module__", "") == module.__name__ and isinstance(cls, type)
]
# Pages that explain a flag, the first one first, where no heading has the flag and more than three
# scripts have it.
PAGES = (
    "sft lora corrections grpo multinode scaling recipes rewards environments agents data memory "
    "asynchronous trace "
    "troubleshooting"
)
EXPLAINED = {
    "reward": "rewards.md",
    "temperature": "grpo.md#details",
    "engine": "grpo.md#details",
    "compile": "gpu.md",
    "judge_prompt": "judges.md#the-question",
}
EXPLAINED |= dict.fromkeys(
    ("environment", "environment_timeout", "max_turns", "max_new_tokens"), "environments.md"
)
EXPLAINED |= dict(agent="agents.md")
EXPLAINED |= dict.fromkeys(("tools", "tool_parser"), "tools.md")
EXPLAINED |= dict.fromkeys(("top_p", "top_k", "min_p"), "eval.md#sampling-as-a-model-card-asks")
NAMES = {str: "text", int: "integer", float: "number", bool: "true, false"}
WORDS = {"None": "", "True": "true", "False": "false"}
SIGNS = dict(gt="above", ge="at least", lt="below", le="at most")
HEAD = (
    "| flag | values | default | meaning | explained | shown |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def values(kind: typing.Any) -> str:
    """Return the choices of a flag, or its type and bounds."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is typing.Annotated:
        bounds = chain.from_iterable(getattr(part, "metadata", ()) for part in parts[1:])
        ends = [f"{SIGNS[name]} {end:g}" for bound in bounds for name, end in asdict(bound).items()]
        return " ".join([values(parts[0]), ", ".join(ends)]).strip()
    if origin is tuple:
        return f"{'several' if parts[1] is ... else len(parts)}: {values(parts[0])}"
    return NAMES.get(kind) or " or ".join(values(part) for part in parts if part is not type(None))


@cache
def sections() -> list[tuple[str, str, list[str], list[str], list[str]]]:
    """Return page and link of each section, and its flags: in the heading, in front of lines,
    between backticks."""
    found = []
    for path in sorted({*ROOT.glob("docs/*.md")} - {PAGE}):
        for i, section in enumerate(
            re.split(r"^##? ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        ):
            heading, *lines = section.splitlines()
            anchor = "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") if i else ""
            text = "\n".join(["", *(line for line in lines if not line.startswith("    "))])
            starts = re.findall(r"\n(?:\n|- |\| )\**`--[^`]+`(?:, `--[^`]+`)*", text)
            code = re.findall(r"`[^`]+`", text)
            of_heading, of_starts, of_code = (
                re.findall(r"--(\w+)", level) for level in (heading, *map(" ".join, (starts, code)))
            )
            found.append((path.stem, path.name + anchor, of_heading, of_starts, of_code))
    return found


def explained(flag: str, scripts: list[str]) -> str:
    """Return a link to the section that explains a flag; empty if no other page has the flag."""
    order = (
        (scripts if len(scripts) <= 3 else []) + PAGES.split() + [page for page, *_ in sections()]
    )
    found = [
        (flag not in title, order.index(page), flag not in starts, i, EXPLAINED.get(flag, place))
        for i, (page, place, title, starts, code) in enumerate(sections())
        if flag in title + code
    ]
    return f"[{min(found)[-1].partition('.')[0]}]({min(found)[-1]})" if found else ""


def shown(flag: str, scripts: list[str]) -> str:
    """Return a link to the place that shows a flag; empty if there is none."""
    place = next(
        (x for x, flags in SHOWN.items() if {flag, f"{scripts[0]}.{flag}"} & set(flags.split())), ""
    )
    file, _, test = place.partition("::")
    text = test.replace("_", " ") or file.partition(".")[0]
    return f"[{text}]({'../tests/' * bool(test)}{file})" if place else ""


def row(flag: str, text: str, kind: typing.Any, defaults: dict[str, typing.Any]) -> str:
    """Return the table row of a flag with its defaults by script."""
    words = {
        x: WORDS.get(str(x), " ".join(map(str, x)) if isinstance(x, tuple) else x)
        for x in defaults.values()
    }
    said = {x: f"`{word}`".replace("``", "none") for x, word in words.items()}
    usual, scripts = Counter(defaults.values()).most_common(1)[0][0], list(defaults)
    others = [
        f"{', '.join(s for s in scripts if defaults[s] == x)}: {said[x]}"
        for x in said
        if x != usual
    ]
    text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", re.sub(r"(?<!`)--\w+", r"`\g<0>`", text)).replace(
        "|", "\\|"
    )
    cells = [f"`--{flag}`", values(kind), "; ".join([said[usual], *others]), text]
    return f"| {' | '.join([*cells, explained(flag, scripts), shown(flag, scripts)])} |"


def scripts_with(names: set[str]) -> str:
    """Return the scripts in `names` as text."""
    missing = [script for script in SCRIPTS if script not in names]
    if len(missing) <= 1:
        return "All scripts" + "".join(f" except {script}" for script in missing)
    return ", ".join(script for script in SCRIPTS if script in names)


def tables() -> str:
    """Return a section for each group of flags, then one for each script with flags of its own."""
    found, group_texts = (
        {key: {} for key in [*GROUPS, *SCRIPTS]},
        {cls: texts(cls) for cls in GROUPS},
    )
    hints = {cls: typing.get_type_hints(cls, include_extras=True) for cls in GROUPS}
    for script in SCRIPTS:
        args = importlib.import_module(script).Args
        owners = {
            name: cls for cls in args.__mro__ for name in vars(cls).get("__annotations__", ())
        }
        own_texts, own_hints = texts(args), typing.get_type_hints(args, include_extras=True)
        for field in fields(args):
            name, text, owner = field.name, own_texts[field.name], owners[field.name]
            shared = text == group_texts.get(owner, {}).get(name)
            kind = hints[owner][name] if shared else own_hints[name]
            found[owner if shared else script].setdefault(name, (text, kind, {}))[2][script] = (
                field.default
            )
    parts = []
    for key, flags in found.items():
        names = set(chain.from_iterable(defaults for _, _, defaults in flags.values()))
        title = f"{key}.py" if key in SCRIPTS else f"{key.__doc__}\n\n{scripts_with(names)}:"
        parts.append(
            "\n".join(
                [f"## {title}\n\n{HEAD}", *(row(name, *flag) for name, flag in flags.items())]
            )
        )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(
        PAGE.read_text(encoding="utf-8").partition("## ")[0] + tables(), encoding="utf-8"
    )
