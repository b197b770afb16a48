"""The result of one reward for one completion, or of one call of a user's code."""

from typing import Any, NamedTuple


class Result(NamedTuple):
    """Value that a call returned, or one line with the reason why it returned none."""

    value: Any = None
    error: str | None = None
    timed_out: bool = False
    feedback: str = ""  # text about the completion
