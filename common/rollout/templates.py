"""`--prompt_template`: prompts from the columns of a row, with solved examples (few-shot)."""

from collections import defaultdict
from collections.abc import Callable

from common.config.online import SamplingArgs
from common.config.specs import weights_of
from common.data.filler import template_filler
from common.data.rows import rows_of_split


def template_maker(args: SamplingArgs) -> Callable[[dict], str]:
    """Return the function row -> prompt. `{shots}` are the first `--shots` rows of `--shots_split`
    with the row's value in `--shots_by`, but never the row itself.

    Raises `ValueError` if the data has no such split; the function raises it naming a row that the
    template cannot use, or that has too few examples."""
    fill = template_filler("--prompt_template", args.prompt_template)
    if not args.shots:
        return lambda row: fill(dict(shots="") | row)
    fill_shot = template_filler("--shot_template", args.shot_template)
    column = args.shots_by
    kind_of = template_filler(f"--shots_by {column}", f"{{{column}}}" if column else "")
    datasets = list(weights_of(args.dataset))  # without weights
    advice = "--shots_split, or set --shots 0"
    examples = defaultdict(list)
    for example in rows_of_split("--dataset", datasets, advice, args.shots_split, args):
        examples[kind_of(example)].append(example)

    def make(row: dict) -> str:
        kind = kind_of(row)
        others = [x for x in examples[kind] if place_of(x) != place_of(row)]
        if len(others) < args.shots:
            of_kind = f" with {column} {kind!r:.80}" if column else ""
            problem = f"--shots_split {args.shots_split} has {len(others)} other rows{of_kind}"
            raise ValueError(f"{row['_source']}: --shots {args.shots}: {problem}")
        return fill(row | dict(shots="".join(map(fill_shot, others[: args.shots]))))

    return make


def place_of(row: dict) -> tuple[str | None, str]:
    """Files in several folders may have one name."""
    return row.get("_folder"), row["_source"]
