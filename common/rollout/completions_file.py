"""completions.jsonl: a line per prompt with its completions and what they were rewarded.

    {"source": "rows.jsonl:1", "completions": [{"text": "2", "reward": 1.0, "ids": [9, 353], ...}, ...]}

eval.py and bok.py --offline write it as completions come, and after a kill go on from there. What is to be trained on
has `prompt_ids` beside, and of each completion the engine's `logprobs`. Files by others may hold the texts alone.

Every rank has all lines and samples, rewards or scores its share of the completions.

Shapes: P prompts on this rank, S completions of each.
"""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from common.config.groups import SamplingArgs
from common.data.packing import Sample
from common.metrics.meter import Meter
from common.model.hub import eos_token_ids
from common.model.policy import load_policy
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout.engine import Engine
from common.rollout.engines import make_engine, whole_weights
from common.rollout.episodes import Episodes
from common.rollout.prompts import Prompts

# Prompts and a seed for each -> the completions of this rank's share of them. Collective.
Generate = Callable[[Prompts, list[int]], list[list[Sample]]]


def share_of(count: int) -> range:
    """Which of so many prompts are this rank's."""
    return range(torch.distributed.get_rank(), count, torch.distributed.get_world_size())


# ---- sampled ----


def rewarded(
    groups: list[list[Sample]], prompts: Prompts, rewards: Rewards, greedy: bool = False, to_train_on: bool = False
) -> list[dict]:
    """The lines of `prompts`, with the rewards of their completions, of which `groups` are this rank's share. `greedy`
    says of what kind the first of each is. `score` is the first of the rewards, null is none. Collective."""
    mine = share_of(len(prompts))
    for i, group in zip(mine, groups, strict=True):
        for sample in group:
            sample.row = prompts.rows[i]
    rewards_PS, parts = rewards(groups, Meter())
    firsts_PS, lines = rewards.first(parts), {}
    for j, (i, group) in enumerate(zip(mine, groups, strict=True)):
        lines[i] = dict(source=prompts.rows[i]["_source"]) | (dict(prompt_ids=prompts.ids[i]) if to_train_on else {})
        lines[i]["completions"] = [
            dict(text=s.text, greedy=greedy and k == 0, score=_null(firsts_PS[j, k]), reward=_null(rewards_PS[j, k]),
                 rewards={name: _null(part_PS[j, k]) for name, part_PS in parts.items()} | s.numbers,
                 finish_reason=s.finish_reason, ids=s.completion_ids,
                 sampled=[int(m) for m in s.loss_mask[s.prompt_length :]],
                 turns=s.turns, turn_rewards=s.turn_rewards, error=s.error)
            | (dict(logprobs=s.rollout_logprobs[s.prompt_length :]) if to_train_on else {})
            for k, s in enumerate(group)
        ]  # fmt: skip
    lines = distributed.gather_dict(lines)
    return [lines[i] for i in range(len(prompts))]


def _null(x: Tensor) -> float | None:
    return None if x.isnan() else float(x)


def sample_completions(
    file: Path,
    lines: list[dict],
    prompts: Prompts,
    generate: Generate,
    rewards: Rewards,
    *,
    batch_size: int,
    seed: int,
    greedy: bool = False,
    to_train_on: bool = False,
) -> list[dict]:
    """The `lines` that `file` has and the rest, appended to it a batch of prompts at a time; fewer than there are
    prompts if the run is told to stop. Collective.

    Every prompt has a seed of its own: neither the number of ranks nor a stop changes what is sampled.
    """
    lines = list(lines)
    if distributed.is_main() and len(lines) < len(prompts):  # without what a kill cut
        _write(file.with_suffix(".tmp"), "w", lines)
        file.with_suffix(".tmp").rename(file)
    while len(lines) < len(prompts) and not distributed.stop_requested():
        batch = range(len(lines), min(len(lines) + batch_size, len(prompts)))
        asked = Prompts([prompts.ids[i] for i in batch], [prompts.rows[i] for i in batch])
        groups = generate(asked, [distributed.fold_seed(seed, i) for i in batch])
        new = rewarded(groups, asked, rewards, greedy, to_train_on)
        lines += new
        if distributed.is_main():
            _write(file, "a", new)
            print(f"{len(lines)} of {len(prompts)} prompts sampled", flush=True)
    return lines


def _write(file: Path, mode: str, lines: Iterable[dict]) -> None:
    with file.open(mode, encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def greedy_and_sampled(
    episodes: Episodes,
    prompts: Prompts,
    seeds: list[int],
    *,
    greedy: bool,
    samples_per_prompt: int,
    temperature: float,
) -> list[list[Sample]]:
    """One completion at temperature 0, if it is to be, and then so many samples of each prompt in this rank's share.
    Collective with tensor parallelism."""
    mine = share_of(len(prompts))
    ids, rows, seeds = ([of_all[i] for i in mine] for of_all in (prompts.ids, prompts.rows, seeds))
    groups: list[list[Sample]] = [[] for _ in mine]
    for n, at_temperature in ((int(greedy), 0.0), (samples_per_prompt, temperature)):
        if n:
            more = episodes.generate(ids, rows, seeds, n, at_temperature)
            groups = [[*group, *new] for group, new in zip(groups, more, strict=True)]
    return groups


def load_engine(
    engine: Engine | None, path: str, args: SamplingArgs, tokenizer, device: torch.device, flag: str
) -> Engine:
    """The engine with the model in folder `path`, that `flag` names. There can be one engine in a process, so a second
    model goes into the first one's. Collective."""
    eos_ids = eos_token_ids(path, tokenizer, args.prompt_format)
    if engine is None:
        return make_engine(path, args, eos_ids, tokenizer, device, trained=False)
    engine.eos_ids = eos_ids
    model = load_policy(path, args, device, trainable=False, flag=flag)
    engine.wake()
    engine.load_weights(whole_weights(model, engine.dtype))
    return engine


def require_same_architecture(path: str, other: str) -> None:
    """Raises `ValueError` unless the model in folder `other` fits into an engine made for that in `path`."""
    ours, theirs = (json.loads((Path(p) / "config.json").read_text()) for p in (path, other))
    if {k for k in ours | theirs if ours.get(k) != theirs.get(k)} - {"dtype", "torch_dtype", "transformers_version"}:
        raise ValueError(
            f"--against {other}: another architecture than --model; measure it alone, and name its completions.jsonl"
        )


# ---- stored ----


def as_sample(completion: dict, prompt: list[int], tokenizer, row: dict) -> Sample:
    """The sample that a stored completion was. One that is only a text is what the model would have sampled for it."""
    ids = completion.get("ids")
    if ids is None:
        ids = [*tokenizer(completion["text"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    mask = [bool(m) for m in completion.get("sampled", [1] * len(ids))]
    return Sample(
        prompt + ids, [False] * len(prompt) + mask, prompt_length=len(prompt), text=completion["text"],
        finish_reason=completion.get("finish_reason", "stop"), turns=completion.get("turns", 1),
        turn_rewards=[tuple(pair) for pair in completion.get("turn_rewards", [])], error=completion.get("error", ""),
        row=row,
    )  # fmt: skip


def samples_to_train_on(lines: list[dict], prompts: Prompts, tokenizer, episodes: bool) -> list[list[Sample]]:
    """All completions as a rollout would have them, with their rewards; `episodes` with their transcripts."""
    groups = []
    for line, ids, row in zip(lines, prompts.ids, prompts.rows, strict=True):
        groups.append([as_sample(completion, ids, tokenizer, row) for completion in line["completions"]])
        for sample, completion in zip(groups[-1], line["completions"], strict=True):
            reward = completion["reward"]
            sample.reward = math.nan if reward is None else reward
            sample.rollout_logprobs = [0.0] * len(ids) + completion["logprobs"]
            sample.versions = [0 if sampled else -1 for sampled in sample.loss_mask]
            sample.transcript = tokenizer.decode(sample.completion_ids) if episodes else ""
    return groups


def _my_groups(lines: list[dict], prompts: Prompts, tokenizer) -> list[list[Sample]]:
    mine = share_of(len(lines))
    return [[as_sample(c, prompts.ids[i], tokenizer, prompts.rows[i]) for c in lines[i]["completions"]] for i in mine]


def reward_again(lines: list[dict], prompts: Prompts, tokenizer, rewards: Rewards) -> list[dict]:
    """The same lines with the rewards of now. Collective."""
    greedy = bool(lines[0]["completions"][0].get("greedy"))
    return rewarded(_my_groups(lines, prompts, tokenizer), prompts, rewards, greedy)


def numbers_of(
    lines: list[dict], score: Callable[[list[Sample]], list], prompts: Prompts, tokenizer, room: int
) -> list[list]:
    """What `score`, a function of some completions, says of every completion of every prompt. Collective.

    Raises `ValueError` for a completion that fits in no pack."""
    mine, groups = share_of(len(lines)), _my_groups(lines, prompts, tokenizer)
    for i, group in zip(mine, groups, strict=True):
        if (size := max(sample.num_targets for sample in group)) > room:
            where = prompts.rows[i]["_source"]
            raise ValueError(f"{where}: a completion of {size} tokens with its prompt, more than one pack holds")
    found = iter(score([sample for group in groups for sample in group]))
    of_prompt = {i: [next(found) for _ in group] for i, group in zip(mine, groups, strict=True)}
    of_prompt = distributed.gather_dict(of_prompt)
    return [of_prompt[i] for i in range(len(lines))]


# ---- files ----


def read_completions(
    flag: str, path: Path, prompts: Prompts, tokenizer, *, own: bool = False, to_train_on: bool = False,
    episodes: bool = False,
) -> list[dict]:  # fmt: skip
    """The file's lines, each of the prompt with its number: all of them or, of a run's `own` file, those that are
    there. `to_train_on`: with what only the engine knows. `episodes`: with what the environment gave. Collective.

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
    if not own and len(lines) != len(prompts):
        raise ValueError(f"{flag} {path}: {len(lines)} lines for {len(prompts)} rows of data")
    vocabulary = math.inf if own else len(tokenizer)  # a head may have more rows than there are tokens
    records: list[dict] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            _check_prompt(record, prompts, number - 1)
            found = record.get("completions", [record["completion"]] if "completion" in record else None)
            if not isinstance(found, list) or not found:
                raise ValueError("neither a `completion` nor a list of `completions`")
            record["completions"] = [c if isinstance(c, dict) else dict(text=c) for c in found]
            for completion in record["completions"]:
                _check_completion(completion, vocabulary, own, to_train_on, episodes)
            if records and len(found) != len(records[0]["completions"]):
                raise ValueError("another number of completions than the lines before")
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{flag} {path}, line {number}: {distributed.first_line(error)}") from error
        records.append(record)
    return records


def _check_prompt(record: dict, prompts: Prompts, i: int) -> None:
    """Raises `ValueError` if a line says that it is of another row or prompt than number `i`."""
    if not isinstance(record, dict):
        raise ValueError("not an object")
    if i >= len(prompts) or record.get("source", prompts.rows[i]["_source"]) != prompts.rows[i]["_source"]:
        raise ValueError("of another row than the data has there")
    if record.get("prompt_ids", prompts.ids[i]) != prompts.ids[i]:
        raise ValueError("of another prompt than the data has there")


def _check_completion(c: dict, vocabulary: float, own: bool, to_train_on: bool, episodes: bool) -> None:
    """Raises `ValueError` for what `read_completions` refuses."""
    if not _has_types(c, vocabulary):
        raise ValueError("a completion is a text, or an object with a text as eval.py writes it")
    if to_train_on and "logprobs" not in c:
        raise ValueError("no logprobs: only what bok.py --offline wrote can be trained on")
    if own and not {"score", "reward", "rewards", "ids", "sampled"} <= c.keys():
        raise ValueError("not as it was written; mend or delete it")
    if to_train_on:
        numbers = [*c["logprobs"], 0.0 if c["reward"] is None else c["reward"]]
        if len(numbers) != len(c["ids"]) + 1 or not all(isinstance(x, int | float) for x in numbers):
            raise ValueError("not as it was written; mend or delete it")
    if episodes and "turn_rewards" not in c:
        raise ValueError("no turn_rewards: of an --environment only what eval.py wrote can be measured again")


def _has_types(c: dict, vocabulary: float) -> bool:
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
