"""Solved examples in front of a prompt (few-shot): the text of `{shots}` in `--prompt_template`."""

from collections import defaultdict
from collections.abc import Callable

from common.config.groups import SamplingArgs
from common.config.specs import weights_of
from common.data.rows import rows_of_split


def examples_maker(args: SamplingArgs, fill: Callable[[dict], str]) -> Callable[[dict], str]:
    """Return the function row -> text of its `--shots` examples, the first of `--shots_split` with
    its value in `--shots_by`. A row is no example of itself. `fill` fills `--shot_template`.

    Raises `ValueError` if the data has no such split; the function raises it for a row with too few
    examples."""
    examples = defaultdict(list)
    datasets = list(weights_of(args.dataset))  # without weights
    rows = rows_of_split("--dataset", datasets, "--shots_split", args.shots_split, args)
    for example in rows:
        examples[value_of(example, args.shots_by)].append(example)

    def make(row: dict) -> str:
        value = value_of(row, args.shots_by)
        others = [one for one in examples[value] if one["_source"] != row["_source"]]
        if len(others) < args.shots:
            kind = f" with {args.shots_by} {value!r:.80}" if args.shots_by else ""
            problem = f"--shots_split {args.shots_split} has {len(others)} other rows{kind}"
            raise ValueError(f"{row['_source']}: --shots {args.shots}: {problem}")
        return "".join(map(fill, others[: args.shots]))

    return make


def value_of(row: dict, column: str | None) -> object:
    """Return the value of `--shots_by`, None without it. Raises `ValueError` if it is missing."""
    if column is None:
        return None
    if not isinstance(row.get(column), str | int | float):
        raise ValueError(f"{row['_source']}: --shots_by {column}: no text or number in this column")
    return row[column]
