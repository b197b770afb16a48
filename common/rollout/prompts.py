"""Rows -> prompts for the scripts that sample: where they come from, and as token ids."""

import copy
import re
import string
from collections.abc import Callable
from dataclasses import dataclass

from common.config.groups import SamplingArgs
from common.data.chat import is_message
from common.data.encode import Encoder
from common.data.rows import PROMPT_COLUMNS, require_columns, require_held_out, train_and_eval_rows, usable
from common.parallel import distributed
from common.rewards.registry import row_check
from common.rollout.environments import load_environment


def prompt_columns(args: SamplingArgs, rows: list[dict]) -> tuple[str, ...]:
    """The columns that prompts come from: as `PROMPT_COLUMNS` has them or, with `--prompt_template` or
    `--environment`, a column `_prompt`. Raises `ValueError` for columns that the data lacks."""
    if args.environment is not None or args.prompt_template is not None:
        return ("_prompt",)
    return require_columns(args.dataset_flag, rows, PROMPT_COLUMNS, args.on_bad_row)


def asking(args: SamplingArgs) -> Callable[[dict], None]:
    """What puts the column `_prompt` into a row, with `--prompt_template` or `--environment`. It raises `ValueError`
    naming the row if that lacks a column, or the environment does not take it."""
    if args.environment is not None:
        environment = load_environment(args.environment)

        def ask(row: dict) -> None:
            where = f"{row['_source']}: --environment {args.environment}"
            try:
                row["_prompt"] = environment().reset(copy.deepcopy(row))
            except (Exception, SystemExit) as error:  # whatever a user's code raises, it is named
                what = f"{type(error).__name__}: {distributed.first_line(error)}"
                raise ValueError(f"{where} fails in reset: {what}") from error
            if not (isinstance(row["_prompt"], list) and row["_prompt"] and all(map(is_message, row["_prompt"]))):
                raise ValueError(f"{where}: reset returns no list of messages with role and content, both text")

        return ask
    if (template := args.prompt_template) is None:
        return lambda row: None
    columns = [re.split(r"[.\[]", field)[0] for field in fields_of(template)]

    def write(row: dict) -> None:
        if missing := [column for column in columns if row.get(column) is None]:
            raise ValueError(f"{row['_source']}: --prompt_template: no column {missing[0]}")
        try:
            row["_prompt"] = template.format_map(row)
        except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
            raise ValueError(f"{row['_source']}: --prompt_template: {distributed.first_line(error)}") from error

    return write


def fields_of(template: str) -> list[str]:
    """What stands in the braces. Raises `ValueError` if they do not match, or are empty."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ValueError(f"--prompt_template: {error}") from error
    if "" in fields:
        raise ValueError("--prompt_template: {} names no column")
    return fields


@dataclass
class Prompts:
    """What an online script samples from: token ids, and the data row of each, for environments and rewards."""

    ids: list[list[int]]
    rows: list[dict]
    dropped: int = 0
    """rows whose prompt was too long"""

    def __len__(self) -> int:
        return len(self.ids)

    def __str__(self) -> str:
        return f"{len(self)} prompts ({self.dropped} too long)"


def load_prompts(args: SamplingArgs, tokenizer, context: int) -> tuple[Prompts, Prompts]:
    """The prompts of the training rows and the held-out ones, each with room for `--max_new_tokens` in the context.

    Raises `ValueError` naming the flag or the row.
    """
    row_check(args)  # knows the names of rewards, before anything slow
    rows, held_out = train_and_eval_rows(args)
    columns, encoder = prompt_columns(args, rows), Encoder(tokenizer, args)
    room = context - args.max_new_tokens
    prompts, asked = (encode_prompts(these, columns, encoder, room, args) for these in (rows, held_out))
    require_held_out(held_out, asked.rows, f", {asked.dropped} are too long: see --max_new_tokens and --pack_tokens")
    return prompts, asked


def encode_prompts(
    rows: list[dict], columns: tuple[str, ...], encoder: Encoder, room: int, args: SamplingArgs
) -> Prompts:
    """Prompts of at most `room` tokens. Raises `ValueError` for a longer one with `--overlong_prompts error`, unless
    bad rows are skipped, and if no row is left. Those that a reward cannot be computed of are skipped with them; else
    `Rewards` names the first."""
    ask, check = asking(args), row_check(args) if args.on_bad_row == "skip" else None

    def encode(row: dict) -> list[int]:
        ask(row)
        if check is not None:
            check(row)
        if not (prompt := encoder.prompt(row, columns)):
            raise ValueError(f"{row['_source']}: column {columns[0]} is empty")
        return prompt

    if rows and room < 1:
        raise ValueError(f"--max_new_tokens {args.max_new_tokens} leaves the context no room for a prompt")
    found = list(usable(rows, encode, args.on_bad_row))
    if rows and not found:
        raise ValueError(f"all {len(rows)} rows, such as {rows[0]['_source']}, are left out (--on_bad_row skip)")
    for row, prompt in found:
        if len(prompt) > room and args.overlong_prompts == "error" and args.on_bad_row == "error":
            raise ValueError(
                f"{row['_source']}: a prompt of {len(prompt)} tokens, the context (or --pack_tokens) has {room} beside "
                f"--max_new_tokens {args.max_new_tokens}; --overlong_prompts drop leaves such rows out"
            )
    kept = [(prompt, row) for row, prompt in found if len(prompt) <= room]
    if rows and not kept:
        raise ValueError(f"no prompt has at most {room} tokens: see --max_new_tokens and --pack_tokens")
    return Prompts([prompt for prompt, _ in kept], [row for _, row in kept], len(found) - len(kept))
