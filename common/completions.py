"""completions.jsonl: a line per prompt with its completions and what they were rewarded.

eval.py writes it and reads it; files by others may hold the texts alone.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from common import distributed
from common.metrics import Meter
from common.packing import Sample
from common.rewards.scoring import Rewards


def share_of(count: int) -> range:
    """Which of so many prompts are this rank's."""
    return range(torch.distributed.get_rank(), count, torch.distributed.get_world_size())


def rewarded(
    groups: list[list[Sample]], mine: Sequence[int], rows: list[dict], rewards: Rewards, greedy: bool
) -> dict[int, dict]:
    """All ranks' completions with their rewards, by the number of their prompt: the lines of the file. This rank's
    `groups` are of the prompts `mine`, whose data are `rows`; `greedy` says of what kind the first of each is. `score`
    is the first of the rewards, null is none. Collective."""
    for group, row in zip(groups, rows, strict=True):
        for sample in group:
            sample.row = row
    rewards_PS, parts = rewards(groups, Meter())
    firsts_PS, lines = rewards.first(parts), {}
    for j, (i, group) in enumerate(zip(mine, groups, strict=True)):
        completions = [
            dict(text=s.text, greedy=greedy and k == 0, score=_null(firsts_PS[j, k]), reward=_null(rewards_PS[j, k]),
                 rewards={name: _null(part_PS[j, k]) for name, part_PS in parts.items()},
                 finish_reason=s.finish_reason, ids=s.completion_ids,
                 sampled=[int(m) for m in s.loss_mask[s.prompt_length :]],
                 turns=s.turns, turn_rewards=s.turn_rewards, error=s.error)
            for k, s in enumerate(group)
        ]  # fmt: skip
        lines[i] = dict(source=group[0].row["_source"], completions=completions)
    return distributed.gather_dict(lines)


def _null(x: Tensor) -> float | None:
    return None if x.isnan() else float(x)


def as_sample(completion: dict, prompt: list[int], tokenizer) -> Sample:
    """The sample that a stored completion was. One that is only a text is what the model would have sampled for it."""
    ids = completion.get("ids")
    if ids is None:
        ids = [*tokenizer(completion["text"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    mask = [bool(m) for m in completion.get("sampled", [1] * len(ids))]
    return Sample(
        prompt + ids, [False] * len(prompt) + mask, prompt_length=len(prompt), text=completion["text"],
        finish_reason=completion.get("finish_reason", "stop"), turns=completion.get("turns", 1),
        turn_rewards=[tuple(pair) for pair in completion.get("turn_rewards", [])], error=completion.get("error", ""),
    )  # fmt: skip


def read_completions(
    flag: str, path: Path, rows: list[dict], tokenizer, own: bool = False, episodes: bool = False
) -> list[dict]:
    """The file's lines, each of the row with its number: all of them or, of a run's `own` file, those that are there.
    With `episodes` what the environment gave must be there too. Collective.

    Raises `ValueError` with the line for one that is not as it must be.
    """
    try:
        text = path.read_text(encoding="utf-8") if distributed.is_main() and (not own or path.is_file()) else ""
    except (OSError, UnicodeDecodeError) as error:
        text = error
    text = distributed.gather_objects(text)[0]
    if isinstance(text, Exception):
        raise ValueError(f"{flag} {path}: {distributed.first_line(text)}") from text
    lines = text.split("\n")[:-1] if own else text.split("\n")  # a kill may cut the last
    lines = [line for line in lines if line.strip()]
    if not own and len(lines) != len(rows):
        raise ValueError(f"{flag} {path}: {len(lines)} lines for {len(rows)} rows of data")
    records: list[dict] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if number > len(rows) or record.get("source", rows[number - 1]["_source"]) != rows[number - 1]["_source"]:
                raise ValueError("of another row than the data has there")
            found = record.get("completions", [record["completion"]] if "completion" in record else None)
            if not isinstance(found, list) or not found:
                raise ValueError("neither a `completion` nor a list of `completions`")
            record["completions"] = [c if isinstance(c, dict) else dict(text=c) for c in found]
            if not all(_is_completion(c, len(tokenizer)) for c in record["completions"]):
                raise ValueError("a completion is a text, or an object with a text as eval.py writes it")
            if own and not all("score" in c and "rewards" in c for c in record["completions"]):
                raise ValueError("not as it was written; mend or delete it")
            if episodes and not all("turn_rewards" in c for c in record["completions"]):
                raise ValueError("no turn_rewards: of an --environment only what eval.py wrote can be measured again")
            if records and len(found) != len(records[0]["completions"]):
                raise ValueError("another number of completions than the lines before")
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{flag} {path}, line {number}: {distributed.first_line(error)}") from error
        records.append(record)
    return records


def _is_completion(c: dict, vocabulary: int) -> bool:
    """Whether the fields that are read have the types they must have."""
    text, ids, sampled = c.get("text"), c.get("ids"), c.get("sampled")
    if not isinstance(text, str) or any("\ud800" <= x <= "\udfff" for x in text):
        return False
    if ids is not None and not (ids and all(type(i) is int and 0 <= i < vocabulary for i in ids)):
        return False
    if sampled is not None and (ids is None or len(sampled) != len(ids) or not set(sampled) <= {0, 1}):
        return False
    pairs = c.get("turn_rewards", [])
    numbers = all(type(i) is int and isinstance(r, int | float) for i, r in pairs)
    return numbers and type(c.get("turns", 1)) is int and isinstance(c.get("error", ""), str)
