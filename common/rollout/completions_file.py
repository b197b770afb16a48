"""completions.jsonl: one line per prompt, with its completions and their rewards.

    {"source": "rows.jsonl:1", "completions": [{"text": "2", "reward": 1.0, "ids": [9, 353], ...},
    ...]}

eval.py appends to it while it samples, and continues it after a kill. Files of other programs need
only the texts.

Every rank has all lines, and samples or scores its share of the prompts.

Shapes: P prompts on this rank, S completions of each.
"""

import json
import zlib
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, Required

import torch
from pydantic import BeforeValidator, Field, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict  # before Python 3.12 pydantic needs this one

from common.config.online import SamplingArgs
from common.data.sample import Completion, Group, Sample
from common.metrics.meter import Meter
from common.model.hub import eos_token_ids
from common.model.loading import load_config
from common.model.policy import load_policy
from common.parallel import distributed, durable, process
from common.rewards.total import Rewards
from common.rollout.engine import Engine
from common.rollout.engines import make_engine
from common.rollout.episodes import Episodes, PromptRequest
from common.rollout.prompts import Prompts
from common.rollout.weights import whole_weights

CRC = ', "crc": '  # ends the lines that this module writes


class StoredCompletion(TypedDict, total=False):
    """A completion in the file. A text alone stands for one with this text."""

    text: Required[str]
    answer_at: NonNegativeInt  # start of the answer in the text, behind the thoughts
    greedy: bool
    score: float | None  # the first of the rewards; null: none
    reward: float | None
    rewards: dict[str, float | None]
    finish_reason: str
    ids: Annotated[list[NonNegativeInt], Field(min_length=1)]
    sampled: list[Literal[0, 1]]  # 0: tokens of an environment
    turns: int
    turn_rewards: list[tuple[int, float]]
    error: str


Stored = Annotated[
    StoredCompletion, BeforeValidator(lambda x: dict(text=x) if isinstance(x, str) else x)
]


class StoredLine(TypedDict, total=False):
    """A line of the file. Files of other programs may have a `completion` in place of
    `completions`."""

    source: str
    images: dict[str, str]  # digest of each file
    completion: Stored
    completions: Annotated[list[Stored], Field(min_length=1)]


LINE = TypeAdapter(StoredLine)


def own_share(count: int) -> range:
    """Return which of `count` prompts belong to this rank."""
    return distributed.share_of(range(count))


# ---- sampling ----


def make_lines(groups: list[Group], prompts: Prompts, rewards: Rewards, greedy: bool) -> list[dict]:
    """Return the lines of `prompts` with the rewards of their completions. `groups` is this rank's
    share of them, and `greedy` says whether the first completion of each is greedy. Collective."""
    own = own_share(len(prompts))
    rewards_PS, parts, numbers = rewards(groups, Meter())
    firsts_PS = rewards.first(parts)
    lines = {}
    for j, (i, group) in enumerate(zip(own, groups, strict=True)):
        lines[i] = dict(source=prompts.rows[i]["_source"])
        if group[0].images:
            lines[i]["images"] = {span.file: span.digest for span in group[0].images}
        lines[i]["completions"] = [
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
    lines = distributed.gather_dict(lines)
    return [lines[i] for i in range(len(prompts))]


def _null(x: Tensor) -> float | None:
    return None if x.isnan() else float(x)


def sample_completions(
    file: Path, lines: list[dict], prompts: Prompts, episodes: Episodes, rewards: Rewards,
    args: SamplingArgs, batch_size: int,
) -> list[dict]:  # fmt: skip
    """Sample the prompts that `lines`, read from `file`, lack, append their lines to the file in
    batches and return all lines; fewer than there are prompts if the run is to stop. Collective.

    Every prompt has a seed of its own, so samples depend neither on the number of ranks nor on
    stops."""
    process.note_signals()
    lines = list(lines)
    if distributed.is_main() and len(lines) < len(prompts):
        # removes a line that a kill has truncated
        durable.write_text(file, "".join(map(_as_text, lines)))
    while len(lines) < len(prompts) and not distributed.stop_requested():
        start = len(lines)
        end = start + batch_size
        batch = Prompts(prompts.ids[start:end], prompts.rows[start:end])
        seeds = [distributed.fold_seed(args.seed, start + i) for i in range(len(batch))]
        groups = greedy_and_sampled(episodes, batch, seeds, args)
        new = make_lines(groups, batch, rewards, greedy=True)
        lines += new
        if distributed.is_main():
            with file.open("a", encoding="utf-8") as out:
                out.writelines(map(_as_text, new))
            print(f"{len(lines)} of {len(prompts)} prompts sampled", flush=True)
    return lines


def _as_text(line: dict) -> str:
    body = json.dumps(line).removesuffix("}")
    return f"{body}{CRC}{zlib.crc32(body.encode())}}}\n"


def greedy_and_sampled(
    episodes: Episodes, prompts: Prompts, seeds: list[int], args: SamplingArgs
) -> list[Group]:
    """Return this rank's share of the groups: a greedy completion, then the sampled ones.
    Collective with tensor parallelism."""
    own = own_share(len(prompts))
    groups: list[Group] = [[] for _ in own]
    for samples, temp in ((1, 0.0), (args.samples_per_prompt, args.temperature)):
        if samples:
            requests = [PromptRequest(i, *prompts[i], seeds[i], samples, temp) for i in own]
            new = episodes.generate(requests)
            groups = [group + more for group, more in zip(groups, new, strict=True)]
    return groups


def load_engine(
    engine: Engine | None, path: str, args: SamplingArgs, tokenizer, device: torch.device, flag: str
) -> Engine:
    """Return an engine with the model in folder `path`, which `flag` names. A process can have only
    one engine: a given one is reused with the new weights. Collective."""
    eos_ids = eos_token_ids(path, tokenizer, args.prompt_format, args.stop_token_ids)
    if engine is None:
        return make_engine(path, args, eos_ids, tokenizer, device, trained=False)
    engine.end_at(eos_ids)
    model = load_policy(path, args, device, trainable=False, flag=flag)
    engine.wake()
    engine.load_weights(whole_weights(model, engine.dtype))
    return engine


def require_same_architecture(path: str, other: str) -> None:
    """Raise `ValueError` unless the model in folder `other` fits into an engine that was made for
    that in `path`."""
    # As transformers reads them: an export has its fields in two forms.
    fields, others = (load_config(folder).to_dict() for folder in (path, other))
    for config in (fields, others):
        config.get("text_config", {}).pop("dtype", None)
    differing = {name for name in fields | others if fields.get(name) != others.get(name)}
    if differing - {"dtype", "transformers_version", "architectures", "_name_or_path"}:
        what = f"--against {other}: another architecture than --model"
        raise ValueError(f"{what}; evaluate it alone and pass its completions.jsonl")


# ---- stored completions ----


def _completion(stored: StoredCompletion, prompt: list[int], row: dict) -> Completion:
    mask = [False] * len(prompt) + [bool(sampled) for sampled in stored["sampled"]]
    names = ("finish_reason", "text", "turns", "turn_rewards", "error")
    fields = {name: stored[name] for name in names}
    return Completion(prompt + stored["ids"], mask, len(prompt), row, **fields)


def _restore(lines: list[dict], prompts: Prompts, indices: Iterable[int]) -> list[Group]:
    return [
        [_completion(stored, *prompts[i]) for stored in lines[i]["completions"]] for i in indices
    ]


def reward_again(lines: list[dict], prompts: Prompts, rewards: Rewards) -> list[dict]:
    """Return the lines with the rewards of the present flags. Collective."""
    greedy = bool(lines[0]["completions"][0].get("greedy"))
    groups = _restore(lines, prompts, own_share(len(lines)))
    return make_lines(groups, prompts, rewards, greedy)


def score_stored(
    lines: list[dict], score: Callable[[list[Group]], list], prompts: Prompts, room: int
) -> list[list]:
    """Return the results of `score`, which maps groups to one result per completion, for the
    completions of prompts. Collective. Raises `ValueError` for a completion of more than `room`
    tokens, which fits in no pack."""
    own = own_share(len(lines))
    groups = _restore(lines, prompts, own)
    for completion in chain(*groups):
        if completion.num_targets > room:
            size = completion.num_targets
            source = completion.row["_source"]
            what = f"prompt and completion have {size} tokens"
            raise ValueError(f"{source}: {what}, a pack holds {room}")
    results = iter(score(groups))
    of_prompt = {i: [next(results) for _ in group] for i, group in zip(own, groups, strict=True)}
    of_prompt = distributed.gather_dict(of_prompt)
    return [of_prompt[i] for i in range(len(lines))]


# ---- files ----


def read_completions(
    flag: str, path: Path, prompts: Prompts, tokenizer, *, own: bool = False,
    episodes: bool = False,
) -> list[dict]:  # fmt: skip
    """Return the lines of a file, line i for prompt i. In a run's `own` file the last lines may be
    missing. `episodes`: with the rewards of an environment. Collective: rank 0 reads, and raises
    `ValueError` naming the line that is not valid."""
    if not distributed.is_main():
        return distributed.from_main(None)
    try:
        text = path.read_text(encoding="utf-8") if not own or path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path}: {distributed.first_line(error)}") from error
    lines = text.split("\n")[: -1 if own else None]  # a kill may have truncated the last one
    lines = [line for line in lines if line.strip()]
    if not own and len(lines) != len(prompts):
        raise ValueError(f"{flag} {path}: {len(lines)} lines for {len(prompts)} rows of data")
    required = {"score", "reward", "rewards", "ids", "sampled"} if own else set()
    required |= {"turn_rewards"} if episodes else set()
    records: list[dict] = []
    for i, line in enumerate(lines):
        try:
            body, crc, value = line.rpartition(CRC)
            if own and crc and value != f"{zlib.crc32(body.encode())}}}":
                raise ValueError("it was changed after it was written")
            record = _parse_line(line, i, prompts)
            record["completions"] = [
                _whole(stored, required, tokenizer, own) for stored in record["completions"]
            ]
            records.append(record)
            if len(record["completions"]) != len(records[0]["completions"]):
                raise ValueError("another number of completions than in the first line")
        except ValueError as error:
            advice = "; delete the file to sample again" if own else ""
            raise ValueError(f"{flag} {path}, line {i + 1}: {error}{advice}") from error
    return distributed.from_main(records)


def _parse_line(text: str, i: int, prompts: Prompts) -> dict:
    """Return the line of prompt i with a list `completions`. Raises `ValueError`."""
    try:
        line = LINE.validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(
            ": ".join([".".join(map(str, problem["loc"])), problem["msg"]]).removeprefix(": ")
        ) from error
    source = prompts.rows[i]["_source"] if i < len(prompts) else "missing"
    if i >= len(prompts) or line.get("source", source) != source:
        raise ValueError(f"`source` is {line.get('source')}, but this row of the data is {source}")
    images = {span.file: span.digest for span in Sample([], [], row=prompts.rows[i]).images}
    if [*line.get("images", {}).values()] not in ([], [*images.values()]):
        raise ValueError("`images` are not those of this row: a file has changed since")
    if "completion" not in line and "completions" not in line:
        raise ValueError("expected `completion` or a list `completions`")
    return dict(completions=[line.pop("completion")]) | line if "completion" in line else line


def _whole(stored: StoredCompletion, required: set[str], tokenizer, own: bool) -> StoredCompletion:
    """Return a completion with all fields but rewards. The tokens of a text are those
    of the text and an EOS. Raises `ValueError` for a completion that is not valid or lacks
    `required` fields."""
    for name in sorted(required - stored.keys()):
        raise ValueError(f"completion: {name} is missing")
    if "ids" not in stored:
        ids = tokenizer(stored["text"], add_special_tokens=False)["input_ids"]
        stored = stored | dict(ids=[*ids, tokenizer.eos_token_id])
    defaults = dict(answer_at=0, finish_reason="stop", sampled=[1] * len(stored["ids"]))
    defaults |= dict(turns=1, turn_rewards=[], error="")
    stored = stored | {name: value for name, value in defaults.items() if name not in stored}
    if len(stored["ids"]) != len(stored["sampled"]):
        raise ValueError("completion: `ids` and `sampled` must have the same length")
    # a head may have more rows than the tokenizer has tokens
    if not own and max(stored["ids"]) >= len(tokenizer):
        what = f"completion: `ids` must be below {len(tokenizer)}"
        raise ValueError(f"{what}, the size of the vocabulary")
    return stored
