"""Data rows -> prompts as token ids, for eval.py and for scripts that train on their samples."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Self

import pydantic
from pydantic import model_validator

from common.config.flags import STRICT, Limit, NotNegative, weights_of
from common.config.groups import NO_IMAGES, ImageArgs
from common.config.online import OnlineArgs, SamplingArgs
from common.packs.sample import Sample
from common.parallel import distributed
from common.rewards.registry import columns_of_rewards, row_check
from common.rollout.episodes import partner_of
from common.text.columns import PROMPT_COLUMNS, Columns, require_columns, unread_columns
from common.text.encode import Encoder
from common.text.rows import encode_each, require_held_out, rows_of_split, train_and_eval_rows


@pydantic.dataclasses.dataclass(config=STRICT)
class ShotArgs:
    """Solved examples in prompts"""

    shots: NotNegative[int] = 0
    """show this many solved examples, the first rows of shots_split, at {shots} in
    prompt_template"""
    shots_split: str = "dev"
    """read the examples from this split of the data"""
    shots_by: str | None = None
    """show only examples that have the prompt's value in this column, such as subject"""
    shot_template: str | None = None
    """write each example as this text, with columns of its row in braces"""

    @model_validator(mode="after")
    def _check_shots(self) -> Self:
        if self.shots and "{shots}" not in (self.prompt_template or ""):
            raise ValueError(f"--shots {self.shots} needs {{shots}} in --prompt_template")
        if self.shots and self.shot_template is None:
            raise ValueError(f"--shots {self.shots} needs --shot_template")
        return self


NO_SHOTS = ShotArgs()


@dataclass
class Prompts:
    """Prompts as token ids, and the data row of each."""

    ids: list[array]
    rows: list[dict]
    dropped: int = 0
    """rows whose prompt was too long"""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> tuple[list[int], dict]:
        return [*self.ids[i]], self.rows[i]

    def __str__(self) -> str:
        return f"{len(self)} prompts ({self.dropped} too long)"


def load_prompts(
    args: OnlineArgs,
    tokenizer,
    limit: Limit,
    also_read: Sequence[str] = (),
    image_args: ImageArgs = NO_IMAGES,
) -> tuple[Prompts, Prompts]:
    """Read the data. Return the prompts of the training rows and those of the held-out rows, made
    by `encode_prompts`. `also_read`: columns that the script itself reads, beside the prompt and
    the rewards. Raises `ValueError` naming the flag or the row."""
    row_check(args)  # refuses unknown rewards before anything slow
    rows, held_out_rows = train_and_eval_rows(args)
    columns = prompt_columns(args, [*rows, *held_out_rows], also_read)
    say_not_named(args, rows, columns, also_read)
    encoder = Encoder(tokenizer, args, image_args)
    prompts, held_out = (
        encode_prompts(each, columns, encoder, limit, args) for each in (rows, held_out_rows)
    )
    too_long = f", {held_out.dropped} are too long: see --max_new_tokens and {limit.flag}"
    require_held_out(held_out_rows, held_out.rows, too_long)
    show_first(prompts, tokenizer)
    return prompts, held_out


def show_first(prompts: Prompts, tokenizer) -> None:
    """Print the first prompt as the model will read it, on rank 0. An agent writes it later."""
    ids, row = prompts[0]
    text = Sample(ids, [], row=row).decoded(tokenizer, ids) if ids else "written by the agent"
    if len(text) > 2000:
        text = f"{text[:1000]} ... {text[-1000:]}"
    distributed.say(f"the first prompt:\n{text}")


def prompt_columns(args: SamplingArgs, rows: list[dict], also_read: Sequence[str] = ()) -> Columns:
    """Return the column that holds the prompts, as a tuple. With `--prompt_template` or
    `--environment` it is `_prompt`, which `encode_prompts` fills; else the data must have one of
    `PROMPT_COLUMNS`. The tuple is empty with `--agent`: an agent writes its prompts itself. Raises
    `ValueError` if there is no such column, or if nothing reads one whose name says that it belongs
    to the prompt."""
    if args.agent is not None:
        partner_of(args).load(args.agent)  # refuses a bad file before anything slow
        return ()
    if args.environment is not None or args.prompt_template is not None:
        return ("_prompt",)
    named = {*columns_of_rewards(args, rows)[0], *also_read}
    return require_columns(args.dataset_flag, rows, PROMPT_COLUMNS, named)


def say_not_named(
    args: SamplingArgs, rows: list[dict], columns: Columns, also_read: Sequence[str] = (),
    shot_args: ShotArgs = NO_SHOTS,
) -> None:  # fmt: skip
    """Print the columns that nothing reads, unless the user's code may read them."""
    named, is_all = columns_of_rewards(args, rows)
    template: set[str | None] = set()  # columns that the prompt template reads
    if args.prompt_template:
        from common.text.filler import columns_of

        template |= columns_of("--prompt_template", args.prompt_template)
        if shot_args.shots:
            shot = columns_of("--shot_template", shot_args.shot_template)
            template |= {shot_args.shots_by} | shot
    if args.environment is not None or args.agent is not None or "lettered_options" in template:
        return
    unread = unread_columns(rows, (*columns, *named, *template, *also_read))
    if unread and is_all:
        distributed.say(f"columns that neither the prompt nor a reward reads: {', '.join(unread)}")


def encode_prompts(
    rows: list[dict], columns: Columns, encoder: Encoder, limit: Limit, args: SamplingArgs,
    shot_args: ShotArgs = NO_SHOTS,
) -> Prompts:  # fmt: skip
    """Return the prompts of `rows` as token ids. `--on_bad_row skip` leaves out rows that the
    template, the environment or a reward cannot use. `--overlong drop`, and skip too, leaves out
    prompts that together with `--max_new_tokens` are longer than the `limit`. Raises `ValueError`
    for such a row without these flags, and if no row is left."""
    if any(i >= encoder.ids_end for i in args.stop_token_ids):
        raise ValueError(f"--stop_token_ids: the ids of the model end at {encoder.ids_end - 1}")
    room = limit.tokens - args.max_new_tokens
    if rows and room < 1:
        problem = f"--max_new_tokens {args.max_new_tokens} leaves no room for a prompt"
        raise ValueError(f"{problem} in {limit.flag}; lower it")
    makers = column_makers(args, encoder, shot_args)
    encode = partial(prompt_ids, columns, encoder, makers, row_check(args), room)
    prompts = Prompts([], [])
    for row, ids in encode_each(rows, encode, args.on_bad_row):
        if len(ids) <= room:
            prompts.ids.append(ids)
            prompts.rows.append(row)
        elif args.overlong == "drop" or args.on_bad_row == "skip":
            prompts.dropped += 1
        else:
            raise ValueError(
                f"{row['_source']}: the prompt has {len(ids)} tokens, {limit.flag} leaves {room}"
                f" beside --max_new_tokens {args.max_new_tokens}; --overlong drop leaves such rows"
                " out"
            )
    if prompts.dropped and not prompts:
        problem = f"no prompt has at most {room} tokens"
        raise ValueError(f"{problem}: see --max_new_tokens and {limit.flag}")
    if rows and not prompts:
        example = f"all {len(rows)} rows, such as {rows[0]['_source']}"
        raise ValueError(f"{example}, are left out (--on_bad_row skip)")
    return prompts


def column_makers(
    args: SamplingArgs, encoder: Encoder, shot_args: ShotArgs
) -> dict[str, Callable[[dict], object]]:
    """Return the functions that compute a column from the row, by the name of the column."""
    makers: dict[str, Callable[[dict], object]] = {}
    if args.environment is not None:
        from common.rollout.environments import prompt_maker_of_environment

        makers["_prompt"] = prompt_maker_of_environment(args)
    elif args.prompt_template is not None:
        makers["_prompt"] = template_maker(args, shot_args)
    if args.tools:
        makers["tools"] = partner_of(args).tools_of_rows(args, encoder.tokenizer)
    return makers


def prompt_ids(
    columns: Columns, encoder: Encoder, makers: dict[str, Callable[[dict], object]],
    check: Callable[[dict], None], room: int, row: dict,
) -> array:  # fmt: skip
    """Write the columns of `makers` into the row, and return its prompt. One that is longer than
    the `room` is dropped, so its row need not pass the `check`."""
    for column, make in makers.items():
        row[column] = make(row)
    ids = encoder.prompt(row, columns)
    if columns and not ids:
        raise ValueError(f"{row['_source']}: column {columns[0]} is empty")
    if len(ids) <= room:
        check(row)
    return ids


# ---- --prompt_template, with solved examples (few-shot) ----

PLACE = ("_folder", "_source")  # identify a row: files in two folders may have the same name


def template_maker(args: SamplingArgs, shot_args: ShotArgs) -> Callable[[dict], str]:
    """Return a function that makes the prompt of a data row. `{shots}` in the template stands for
    the first `--shots` rows of `--shots_split`; with `--shots_by`, the first that have the row's
    value in this column. A row is never an example for itself.

    Raises `ValueError` if the data has no such split. The function raises it if the template cannot
    use the row, or if there are too few examples for it."""
    from common.text.filler import template_filler

    fill = template_filler("--prompt_template", args.prompt_template)
    if not shot_args.shots:
        return lambda row: fill(dict(shots="") | row)
    fill_shot = template_filler("--shot_template", shot_args.shot_template)
    column = shot_args.shots_by
    group_of = template_filler(f"--shots_by {column}", f"{{{column}}}" if column else "")
    datasets = list(weights_of(args.dataset))  # the names without the weights
    advice = "--shots_split, or set --shots 0"
    examples = defaultdict(list)
    for example in rows_of_split("--dataset", datasets, advice, shot_args.shots_split, args):
        examples[group_of(example)].append(example)

    def make(row: dict) -> str:
        kind = group_of(row)
        others = (x for x in examples[kind] if any(x.get(key) != row.get(key) for key in PLACE))
        found = [*islice(others, shot_args.shots)]
        if len(found) < shot_args.shots:
            of_kind = f" with {column} {kind!r:.80}" if column else ""
            problem = f"--shots_split {shot_args.shots_split} has {len(found)} other rows{of_kind}"
            raise ValueError(f"{row['_source']}: --shots {shot_args.shots}: {problem}")
        return fill(row | dict(shots="".join(map(fill_shot, found))))

    return make
