"""`--prompt_template`: prompts from the columns of a row, with solved examples (few-shot)."""

from collections import defaultdict
from collections.abc import Callable

from common.config.online import SamplingArgs
from common.config.specs import weights_of
from common.data.rows import rows_of_split
from common.rewards.filler import template_filler


def template_maker(args: SamplingArgs) -> Callable[[dict], str]:
    """Return the function row -> prompt. It raises `ValueError` naming a row that the template
    cannot use."""
    fill = template_filler("--prompt_template", args.prompt_template)
    if not args.shots:
        return lambda row: fill(dict(shots="") | row)
    examples = examples_maker(args)
    return lambda row: fill(row | dict(shots=examples(row)))


def examples_maker(args: SamplingArgs) -> Callable[[dict], str]:
    """Return the function row -> text of its `--shots` examples, the first of `--shots_split` with
    its value in `--shots_by`. A row is no example of itself.

    Raises `ValueError` if the data has no such split; the function raises it for a row with too few
    examples."""
    fill = template_filler("--shot_template", args.shot_template)
    datasets = list(weights_of(args.dataset))  # without weights
    advice = "--shots_split, or set --shots 0"
    examples = defaultdict(list)
    for example in rows_of_split("--dataset", datasets, advice, args.shots_split, args):
        examples[value_of(example, args.shots_by)].append(example)

    def make(row: dict) -> str:
        value = value_of(row, args.shots_by)
        others = [one for one in examples[value] if place_of(one) != place_of(row)]
        if len(others) < args.shots:
            kind = f" with {args.shots_by} {value!r:.80}" if args.shots_by else ""
            problem = f"--shots_split {args.shots_split} has {len(others)} other rows{kind}"
            raise ValueError(f"{row['_source']}: --shots {args.shots}: {problem}")
        return "".join(map(fill, others[: args.shots]))

    return make


def place_of(row: dict) -> tuple[str | None, str]:
    """Files in several folders may have one name."""
    return row.get("_folder"), row["_source"]


def value_of(row: dict, column: str | None) -> object:
    """Return the value of `--shots_by`, None without it. Raises `ValueError` if it is missing."""
    if column is None:
        return None
    if not isinstance(row.get(column), str | int | float):
        raise ValueError(f"{row['_source']}: --shots_by {column}: no text or number in this column")
    return row[column]
