"""The built-in tasks `calculator`, for the environment of this name, and `products`, for `--tools
python`: multiply a three-digit and a two-digit number, too hard for the tiny model without help.

A row has `prompt`, `answer` and `messages`, a demonstration for sft.py."""

import random
from collections.abc import Callable

CODE = "the program; what it prints and the value of its last expression are returned"
PYTHON_TOOL = dict(  # the schema of `--tools python`
    type="function",
    function=dict(
        name="python",
        description="Run a Python program. Variables and functions stay for later calls.",
        parameters=dict(
            type="object",
            properties=dict(code=dict(type="string", description=CODE)),
            required=["code"],
        ),
    ),
)


def calculator_rows(split: str) -> list[dict]:
    """Return products, whose demonstrations ask the environment `calculator` by `<calc>`."""

    def solve(product: str, result: str) -> list[dict]:
        return [
            dict(role="assistant", content=f"<calc>{product}</calc>"),
            dict(role="tool", content=f"{product}={result}"),
            dict(role="assistant", content=f"{product}={result}"),
        ]

    return _product_rows(split, 1 / 7, solve)


def products_rows(split: str) -> list[dict]:
    """Return products, whose demonstrations call the tool in the chat template's format."""

    def solve(product: str, result: str) -> list[dict]:
        function = dict(name="python", arguments=dict(code=product))
        call = dict(type="function", id="call00000", function=function)
        return [
            dict(role="assistant", content="", tool_calls=[call]),
            dict(role="tool", name="python", tool_call_id="call00000", content=result),
            dict(role="assistant", content=f"{product}={result}"),
        ]

    rows = _product_rows(split, 1 / 3, solve)
    return [row | dict(tools=[PYTHON_TOOL]) for row in rows]


def _product_rows(split: str, share: float, solve: Callable[[str, str], list[dict]]) -> list[dict]:
    """Return 500 rows for `test`, else 12,000. The demonstrations solve a `share` of them with a
    tool, and estimate the others, mostly wrongly."""
    rng = random.Random(0)
    rows = []
    for _ in range(12_500):
        a = rng.randint(100, 999)
        b = rng.randint(12, 99)
        prompt = [dict(role="user", content=f"{a}*{b}?")]
        turns = [dict(role="assistant", content=f"{a}*{b}~{float(f'{a * b:.1e}'):.0f}")]
        if rng.random() < share:
            turns = solve(f"{a}*{b}", str(a * b))
        rows.append(dict(prompt=prompt, answer=str(a * b), messages=prompt + turns))
    return rows[:500] if split == "test" else rows[500:]
