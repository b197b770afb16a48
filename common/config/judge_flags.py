"""The check of the flags of judges."""

from collections.abc import Sequence
from os.path import isfile
from pathlib import Path


def check_judges(args, named: Sequence[str]) -> None:
    """Check the flags of the judges among the names of rewards, and read `--judge_prompt` if it is
    a file. Raises `ValueError`."""
    ranks = [name for name in args.reward if name.startswith("rank:")]
    if not all(map(str.strip, args.rubric)):
        raise ValueError("--rubric: a criterion is empty")
    if ranks and args.samples_per_prompt + getattr(args, "greedy", False) < 2:
        raise ValueError(f"--reward {ranks[0]} needs --samples_per_prompt 2 or more")
    if named[-1].startswith("rank:") and getattr(args, "against", "") is None:
        raise ValueError(f"--reward_model {named[-1]} compares two models; set --against")
    if args.judge_prompt is not None and isfile(args.judge_prompt):
        args.judge_prompt = Path(args.judge_prompt).read_text(encoding="utf-8")
