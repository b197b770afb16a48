"""Rows -> prompts as token ids, for the scripts that sample."""

from dataclasses import dataclass

from common.config.online import OnlineArgs, SamplingArgs
from common.data.encode import Encoder
from common.data.rows import (
    PROMPT_COLUMNS,
    Columns,
    encode_each,
    require_columns,
    require_held_out,
    train_and_eval_rows,
)
from common.data.sample import Sample
from common.parallel import distributed
from common.rewards.registry import row_check
from common.rollout.environments import prompt_maker_of_environment
from common.rollout.partner import partner_of
from common.rollout.templates import template_maker


@dataclass
class Prompts:
    """Prompts as token ids, and the data row of each for environments and rewards."""

    ids: list[list[int]]
    rows: list[dict]
    dropped: int = 0
    """rows whose prompt was too long"""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> tuple[list[int], dict]:
        return self.ids[i], self.rows[i]

    def __str__(self) -> str:
        return f"{len(self)} prompts ({self.dropped} too long)"


def load_prompts(args: OnlineArgs, tokenizer, context: int) -> tuple[Prompts, Prompts]:
    """Return the prompts of the training rows and of the held-out ones, each with room for
    `--max_new_tokens` in the context. Raises `ValueError` naming the flag or the row."""
    row_check(args)  # finds unknown names of rewards before anything slow
    rows, held_out_rows = train_and_eval_rows(args)
    columns = prompt_columns(args, rows)
    encoder = Encoder(tokenizer, args)
    room = context - args.max_new_tokens
    prompts, held_out = (
        encode_prompts(each, columns, encoder, room, args) for each in (rows, held_out_rows)
    )
    too_long = f", {held_out.dropped} are too long: see --max_new_tokens and --pack_tokens"
    require_held_out(held_out_rows, held_out.rows, too_long)
    show_first(prompts, tokenizer)
    return prompts, held_out


def show_first(prompts: Prompts, tokenizer) -> None:
    """Print the first prompt as the model reads it, on rank 0. An agent writes its own."""
    ids, row = prompts[0]
    text = Sample(ids, [], row=row).decoded(tokenizer, ids) if ids else "written by the agent"
    if len(text) > 2000:
        text = f"{text[:1000]} ... {text[-1000:]}"
    distributed.say(f"the first prompt:\n{text}")


def prompt_columns(args: SamplingArgs, rows: list[dict]) -> Columns:
    """Return the columns that prompts are made from: those of `PROMPT_COLUMNS` that the data has
    or, with `--prompt_template` or `--environment`, a column `_prompt`. Raises `ValueError` for
    columns that the data lacks. Without columns (`--agent`) prompts are empty."""
    if args.agent is not None:
        partner_of(args).load(args.agent)  # before anything slow
        return ()
    if args.environment is not None or args.prompt_template is not None:
        return ("_prompt",)
    return require_columns(args.dataset_flag, rows, PROMPT_COLUMNS)


def encode_prompts(
    rows: list[dict], columns: Columns, encoder: Encoder, room: int, args: SamplingArgs
) -> Prompts:
    """Return the prompts of `rows` that have at most `room` tokens. With `--on_bad_row skip` rows
    that a reward cannot use are left out too. Raises `ValueError` for such a row, for a longer
    prompt with `--overlong error`, unless bad rows are skipped, and if no row is left."""
    make_prompt = None
    if args.environment is not None:
        make_prompt = prompt_maker_of_environment(args)
    elif args.prompt_template is not None:
        make_prompt = template_maker(args)
    select_tools = partner_of(args).tools_of_rows(args, encoder.tokenizer) if args.tools else None
    check = row_check(args)

    def encode(row: dict) -> list[int]:
        if make_prompt is not None:
            row["_prompt"] = make_prompt(row)
        if select_tools is not None:
            row["tools"] = select_tools(row)
        ids = encoder.prompt(row, columns)
        if columns and not ids:
            raise ValueError(f"{row['_source']}: column {columns[0]} is empty")
        if len(ids) <= room:
            check(row)
        return ids

    prompts = Prompts([], [])
    for row, ids in encode_each(rows, encode, args.on_bad_row):
        if len(ids) <= room:
            prompts.ids.append(ids)
            prompts.rows.append(row)
        elif args.overlong == "drop" or args.on_bad_row == "skip":
            prompts.dropped += 1
        else:
            raise ValueError(
                f"{row['_source']}: the prompt has {len(ids)} tokens, the context (or"
                f" --pack_tokens) {room} beside --max_new_tokens {args.max_new_tokens};"
                " --overlong drop leaves such rows out"
            )
    if prompts.dropped and not prompts:
        problem = f"no prompt has at most {room} tokens"
        raise ValueError(f"{problem}: see --max_new_tokens and --pack_tokens")
    if rows and not prompts:
        example = f"all {len(rows)} rows, such as {rows[0]['_source']}"
        raise ValueError(f"{example}, are left out (--on_bad_row skip)")
    return prompts
