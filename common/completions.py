"""completions.jsonl: a line per prompt with its completions and what they were rewarded.

eval.py writes it and reads it; files by others may hold the texts alone.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from common import distributed
from common.metrics import Meter
from common.packing import Sample
from common.rewards import Rewards


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
    firsts_PS, lines = rewards.first(parts).tolist(), {}
    for j, (i, group) in enumerate(zip(mine, groups, strict=True)):
        completions = [
            dict(text=s.text, greedy=greedy and k == 0, score=_null(firsts_PS[j][k]), reward=_null(rewards_PS[j, k]),
                 rewards={name: _null(part_PS[j, k]) for name, part_PS in parts.items()}, turns=s.turns,
                 finish_reason=s.finish_reason, ids=s.completion_ids,
                 sampled=[int(m) for m in s.loss_mask[s.prompt_length :]])
            for k, s in enumerate(group)
        ]  # fmt: skip
        lines[i] = dict(source=group[0].row["_source"], completions=completions)
    return {i: line for share in distributed.gather_objects(lines) for i, line in share.items()}


def _null(x: float) -> float | None:
    return None if math.isnan(x) else float(x)


def as_sample(completion: dict, prompt: list[int], tokenizer) -> Sample:
    """The sample that a stored completion was. One that is only a text is what the model would have sampled for it."""
    ids = completion.get("ids")
    if ids is None:
        ids = [*tokenizer(completion["text"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    mask = [bool(m) for m in completion.get("sampled", [1] * len(ids))]
    return Sample(prompt + ids, [False] * len(prompt) + mask, prompt_length=len(prompt), text=completion["text"],
                  finish_reason=completion.get("finish_reason", "stop"), turns=completion.get("turns", 1))  # fmt: skip


def read_completions(flag: str, path: Path, rows: list[dict], whole: bool) -> list[dict]:
    """The file's lines, each of the row with its number; all of them there if it is to be `whole`. Collective.

    Raises `ValueError` with the line for one that is not as it must be.
    """
    try:
        text = path.read_text(encoding="utf-8") if distributed.is_main() and (whole or path.is_file()) else ""
    except (OSError, UnicodeDecodeError) as error:
        text = error
    text = distributed.gather_objects(text)[0]
    if isinstance(text, Exception):
        raise ValueError(f"{flag} {path}: {distributed.first_line(text)}") from text
    lines = text.split("\n") if whole else text.split("\n")[:-1]  # a kill may cut the last
    lines = [line for line in lines if line.strip()]
    if whole and len(lines) != len(rows):
        raise ValueError(f"{flag} {path}: {len(lines)} lines for {len(rows)} rows of data")
    records: list[dict] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if number > len(rows) or record.get("source", rows[number - 1]["_source"]) != rows[number - 1]["_source"]:
                raise ValueError("of another row than the data has there")
            found = record["completions"] if "completions" in record else [record["completion"]]
            record["completions"] = [c if isinstance(c, dict) else dict(text=c) for c in found]
            if not found or not all(map(_is_completion, record["completions"])):
                raise ValueError("a completion is a text, or an object with a text and perhaps its token ids")
            if not whole and not all("score" in c for c in record["completions"]):
                raise ValueError("not as it was written; mend or delete it")
            if records and len(found) != len(records[0]["completions"]):
                raise ValueError("another number of completions than the lines before")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{flag} {path}, line {number}: {distributed.first_line(error)}") from error
        records.append(record)
    return records


def _is_completion(completion: dict) -> bool:
    ids = completion.get("ids", [0])
    sizes = {len(completion[name]) for name in ("ids", "sampled") if name in completion}
    return (
        isinstance(completion["text"], str)
        and len(sizes) <= 1
        and bool(ids)
        and all(type(i) is int and i >= 0 for i in ids)
    )
