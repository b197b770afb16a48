"""completions.jsonl of eval.py: one line per prompt, with its completions and their rewards.

    {"source": "rows.jsonl:1", "completions": [{"text": "2", "reward": 1.0, "ids": [9, 353], ...},
    ...]}

eval.py appends to it while it samples, and continues it after a kill. Files of other programs need
only the texts. Every rank has all lines, and samples or scores its share of the prompts.

Shapes: P prompts on this rank, S completions of each.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.online import SamplingArgs
from common.data.sample import Completion, Group
from common.metrics.meter import Meter
from common.model.policy import load_policy
from common.parallel import distributed, durable, process
from common.rewards.total import Rewards
from common.rollout.engine import Engine
from common.rollout.engines import make_engine
from common.rollout.episodes import Episodes, PromptRequest
from common.rollout.prompts import Prompts
from common.rollout.weights import whole_weights


@dataclass
class StoredCompletion:
    """A completion in the file. Without `ids` it has those of its text and an EOS."""

    text: str
    answer_at: NonNegativeInt = 0  # start of the answer in the text, behind the thoughts
    greedy: bool = False
    score: float | None = None  # the first of the rewards; None: none
    reward: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    finish_reason: str = "stop"
    ids: list[NonNegativeInt] = field(default_factory=list)
    sampled: list[Literal[0, 1]] = field(default_factory=list)  # 0: tokens of an environment
    turns: int = 1
    turn_rewards: list[tuple[int, float]] | None = None
    error: str = ""


def as_object(value: object) -> object:
    """A text alone stands for a completion with this text."""
    return dict(text=value) if isinstance(value, str) else value


def as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


@dataclass
class Line:
    """A line of the file. Files of other programs may have one `completion`."""

    completions: Annotated[
        list[Annotated[StoredCompletion, BeforeValidator(as_object)]],
        BeforeValidator(as_list),
        Field(min_length=1, validation_alias=AliasChoices("completions", "completion")),
    ]
    source: str | None = None


LINE = TypeAdapter(Line)

# ---- sampling ----


def sample_completions(
    file: Path, lines: list[dict], prompts: Prompts, episodes: Episodes, rewards: Rewards,
    args: SamplingArgs, batch_size: int,
) -> list[dict]:  # fmt: skip
    """Sample the prompts that `lines`, read from `file`, lack, append their lines to the file in
    batches and return all lines; fewer than there are prompts if the run is to stop. Each prompt
    has a greedy completion, then the sampled ones. Collective.

    Every prompt has a seed of its own, so samples depend neither on the number of ranks nor on
    stops."""
    process.note_signals()
    lines = list(lines)
    while len(lines) < len(prompts) and not distributed.stop_requested():
        start = len(lines)
        end = min(start + batch_size, len(prompts))
        own = distributed.share_of(range(start, end))
        groups: list[Group] = [[] for _ in own]
        for samples, temperature in ((1, 0.0), (args.samples_per_prompt, args.temperature)):
            seeds = [distributed.fold_seed(args.seed, i) for i in own]
            requests = [
                PromptRequest(i, *prompts[i], seed, samples, temperature)
                for i, seed in zip(own, seeds, strict=True)
            ]
            for group, more in zip(groups, episodes.generate(requests), strict=True):
                group += more
        batch = Prompts(prompts.ids[start:end], prompts.rows[start:end])
        lines += make_lines(groups, batch, rewards, greedy=True)
        if distributed.is_main():
            with file.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps(line) + "\n" for line in lines[start:])
            print(f"{len(lines)} of {len(prompts)} prompts sampled", flush=True)
    return lines


def make_lines(groups: list[Group], prompts: Prompts, rewards: Rewards, greedy: bool) -> list[dict]:
    """Return the lines of `prompts` with the rewards of their completions. `groups` is this rank's
    share of them, and `greedy` says whether the first completion of each is greedy. Collective."""
    own = distributed.share_of(range(len(prompts)))
    rewards_PS, parts, numbers = rewards(groups, Meter())
    firsts_PS = rewards.first(parts)
    lines = {}
    for j, (i, group) in enumerate(zip(own, groups, strict=True)):
        completions = [
            dict(text=s.text, answer_at=len(s.text) - len(rewards.thoughts.answer(s)),
                 greedy=greedy and k == 0,
                 score=_null(firsts_PS[j, k]), reward=_null(rewards_PS[j, k]),
                 rewards={name: _null(part_PS[j, k]) for name, part_PS in parts.items()}
                 | {name: float(x_PS[j, k]) for name, x_PS in numbers.items()
                    if not x_PS[j, k].isnan()},
                 finish_reason=s.finish_reason, ids=s.completion_ids,
                 sampled=[int(m) for m in s.loss_mask[s.prompt_length :]],
                 turns=s.turns, turn_rewards=s.turn_rewards, error=s.error)
            for k, s in enumerate(group)
        ]  # fmt: skip
        lines[i] = dict(source=prompts.rows[i]["_source"], completions=completions)
    lines = distributed.gather_dict(lines)
    return [lines[i] for i in range(len(prompts))]


def _null(x: Tensor) -> float | None:
    return None if x.isnan() else float(x)


def load_engine(
    engine: Engine | None, path: str, args: SamplingArgs, tokenizer, device: torch.device
) -> Engine:
    """Return an engine with the model in folder `path`. A process can have only one engine: a given
    one is reused with the new weights. Collective."""
    if engine is None:
        return make_engine(path, args, tokenizer, device, trained=False)
    model = load_policy(path, args, device, trainable=False)
    engine.load_weights(whole_weights(model, engine.dtype))
    return engine


# ---- stored completions ----


def _restore(lines: list[dict], prompts: Prompts, indices: Iterable[int]) -> list[Group]:
    """Return the completions of some of the lines."""
    groups: list[Group] = []
    for i in indices:
        ids, row = prompts[i]
        groups.append([])
        for stored in lines[i]["completions"]:
            mask = [False] * len(ids) + [bool(sampled) for sampled in stored["sampled"]]
            names = ("finish_reason", "text", "turns", "turn_rewards", "error")
            fields = {name: stored[name] for name in names}
            groups[-1].append(Completion(ids + stored["ids"], mask, len(ids), row, **fields))
    return groups


def reward_again(lines: list[dict], prompts: Prompts, rewards: Rewards) -> list[dict]:
    """Return the lines with the rewards of the present flags. Collective."""
    groups = _restore(lines, prompts, distributed.share_of(range(len(lines))))
    return make_lines(groups, prompts, rewards, lines[0]["completions"][0]["greedy"])


def score_stored(
    lines: list[dict], score: Callable[[list[Group]], list], prompts: Prompts
) -> list[list]:
    """Return the results of `score`, which maps groups to one result per completion, for the
    completions of prompts. Collective."""
    own = distributed.share_of(range(len(lines)))
    groups = _restore(lines, prompts, own)
    results = iter(score(groups))
    of_prompt = {i: [next(results) for _ in group] for i, group in zip(own, groups, strict=True)}
    of_prompt = distributed.gather_dict(of_prompt)
    return [of_prompt[i] for i in range(len(lines))]


# ---- files ----


def read_completions(
    flag: str, path: Path, prompts: Prompts, tokenizer, *, own: bool = False,
    episodes: bool = False,
) -> list[dict]:  # fmt: skip
    """Return the lines of a file, line i for prompt i. A run's `own` file may lack the last ones,
    and a line that a kill has truncated is removed from it. `episodes`: with the rewards of an
    environment. Collective: rank 0 reads, and raises `ValueError` naming the line that is not
    valid."""
    if not distributed.is_main():
        return distributed.from_main(None)
    try:
        text = path.read_text(encoding="utf-8") if not own or path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path}: {distributed.first_line(error)}") from error
    if own and text[-1:] not in ("", "\n"):
        text = text[: text.rfind("\n") + 1]
        durable.write_text(path, text)
    texts = [line for line in text.split("\n") if line.strip()]
    if len(texts) != len(prompts) and not (own and len(texts) < len(prompts)):
        raise ValueError(f"{flag} {path}: {len(texts)} lines for {len(prompts)} rows of data")
    lines: list[dict] = []
    for i, text in enumerate(texts):
        try:
            line = _parsed(text, prompts.rows[i])
            if len(line["completions"]) != len((lines or [line])[0]["completions"]):
                raise ValueError("another number of completions than in the first line")
            for stored in line["completions"]:
                if episodes and stored["turn_rewards"] is None:
                    raise ValueError("completion: turn_rewards is missing")
                _complete(stored, tokenizer, None if own else len(tokenizer))
            lines.append(line)
        except ValueError as error:
            raise ValueError(f"{flag} {path}, line {i + 1}: {error}") from error
    return distributed.from_main(lines)


def _parsed(text: str, row: dict) -> dict:
    """Return the line of a row of the data. Raises `ValueError`."""
    try:
        line = asdict(LINE.validate_json(text))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{place}: {problem['msg']}".removeprefix(": ")) from error
    if line["source"] not in (None, row["_source"]):
        source = f"`source` is {line['source']}"
        raise ValueError(f"{source}, but this row of the data is {row['_source']}")
    return line


def _complete(stored: dict, tokenizer, vocabulary: int | None) -> None:
    """Fill in the tokens of a completion of which only the text is known. Raises `ValueError` for
    ids that are not below `vocabulary`; a head may have more rows than the tokenizer has tokens."""
    if not stored["ids"]:
        ids = tokenizer(stored["text"], add_special_tokens=False)["input_ids"]
        stored["ids"] = [*ids, tokenizer.eos_token_id]
    stored["sampled"] = stored["sampled"] or [1] * len(stored["ids"])
    stored["turn_rewards"] = stored["turn_rewards"] or []
    if len(stored["ids"]) != len(stored["sampled"]):
        raise ValueError("completion: `ids` and `sampled` must have the same length")
    if vocabulary is not None and max(stored["ids"]) >= vocabulary:
        what = f"completion: `ids` must be below {vocabulary}"
        raise ValueError(f"{what}, the size of the vocabulary")
