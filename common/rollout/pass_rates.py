"""Pass rates of prompts: numbers of completions that solve them, from a rollout for `--draw
difficulty` (data/difficulty.py), or from the file of `--pass_rates`.

A completion solves its prompt if its first reward is at least 1.

Shapes: P prompts on this rank; 2: completions that solve the prompt, and the others."""

from pathlib import Path

import torch
from torch import Tensor

from common.data.difficulty import DifficultyOrder
from common.data.sample import Group
from common.metrics.meter import Meter
from common.parallel import distributed
from common.rewards.total import Rewards, read
from common.rollout.completions_file import LINE
from common.rollout.prompt_queue import PromptQueue


def learn(queue: PromptQueue, rewards: Rewards, groups: list[Group] | None, meter: Meter) -> None:
    """Add the results of the last rollout, with this rank's `groups`, to the order of the queue.
    None: a stop was requested, and the step is undone. Collective."""
    order = queue.order
    assert isinstance(order, DifficultyOrder), "--draw difficulty with another order"
    if groups is None:
        return order.undo_step(queue.step)
    with meter.time("reward"):
        counts_P2 = count_solved(rewards, groups)
    order.learn(queue.step, queue.rows, distributed.gather_rows(counts_P2, queue.positions))
    for name, value in order.metrics().items():
        meter.mean(name, value)


def count_solved(rewards: Rewards, groups: list[Group]) -> Tensor:
    """Return the numbers of completions of each group, [P, 2] int64, without those that have no
    reward. Waits for the rewards, which have begun. Collective."""
    rewards.ask_models(groups)
    counts_P2 = torch.zeros(len(groups), 2, dtype=torch.int64)
    for counts_2, group in zip(counts_P2, groups, strict=True):
        begun = rewards.begun[id(group[0])]
        begun.functions_done.result()  # waits
        for results in zip(*(begun.results[name] for name in rewards.first_names), strict=True):
            values = [read(result)[0].value for result in results]
            for value in values:  # with by_row, those of other rows are None
                if value is not None:
                    counts_2[0 if value >= 1 else 1] += 1
    return counts_P2


def with_pass_rates(rows: list[dict], file: str, bounds: tuple[float, float] | None) -> list[dict]:
    """Return the rows whose pass rate in the `file` of eval.py is within the `bounds`, all rows
    without bounds. Their column `_pass_counts` has the numbers of sampled completions, [2].

    Raises `ValueError` for a file that is not valid or lacks a row, and if no row is left."""
    counts: dict[str, tuple[int, int]] = {}
    flag = f"--pass_rates {file}"
    try:
        for text in filter(str.strip, Path(file).read_text(encoding="utf-8").split("\n")):
            line = LINE.validate_json(text)
            scores = [c["score"] for c in line["completions"] if not c["greedy"]]
            solved = [score >= 1 for score in scores if score is not None]
            if line["source"] in counts:
                raise ValueError(f"two lines of {line['source']}")
            counts[line["source"]] = sum(solved), len(solved) - sum(solved)
    except (OSError, ValueError, KeyError) as error:
        problem = f"no completions.jsonl of eval.py ({distributed.first_line(error)})"
        raise ValueError(f"{flag}: {problem}") from error
    if missing := [row["_source"] for row in rows if row["_source"] not in counts]:
        what = f"{len(missing)} of {len(rows)} training rows are not in it, such as {missing[0]}"
        raise ValueError(f"{flag}: {what}; run eval.py on this --dataset and --dataset_split")
    rows = [row | dict(_pass_counts=counts[row["_source"]]) for row in rows]
    low, high = bounds or (0, 1)
    tried = [(row, *row["_pass_counts"]) for row in rows if any(row["_pass_counts"])]
    kept = [row for row, solved, failed in tried if low <= solved / (solved + failed) <= high]
    if not kept:
        raise ValueError(f"{flag}: no training row has a pass rate from {low:g} to {high:g}")
    kept = rows if bounds is None else kept
    distributed.say(f"{flag}: {len(kept)} of {len(rows)} training rows are kept")
    return kept
