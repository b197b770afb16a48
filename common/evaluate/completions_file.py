"""The file completions.jsonl of eval.py: one line per prompt, with its completions and their
rewards.

    {"source": "rows.jsonl:1", "completions": [{"text": "2", "reward": 1.0, "ids": [9, 353], ...},
    ...]}

eval.py appends to it while it samples, and continues it when it is started again after a kill. In a
file that another program wrote (`--completions`) only the texts are needed. Every rank has all
lines, and samples or scores its part of the prompts.

Shapes: P prompts on this rank, G completions of each."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Field,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)
from torch import Tensor

from common import durable
from common.config.online import SamplingArgs
from common.evaluate.estimators import SOLVED, final_answer
from common.metrics.meter import Meter
from common.packs.sample import Completion, Group
from common.parallel import distributed, process
from common.rewards.registry import BUILT_IN, load_reward
from common.rewards.total import Rewards
from common.rollout.episodes import Episodes, PromptRequest, in_order
from common.rollout.prompts import Prompts
from common.workers.worker import Result


@dataclass
class StoredCompletion:
    """A completion in the file. If it has no `ids`, its text is tokenised and an EOS is added."""

    text: str
    finish_reason: str = "stop"
    turns: int = 1
    turn_rewards: list[tuple[int, float]] | None = None
    error: str = ""
    answer_at: NonNegativeInt = 0  # start of the answer in the text, after the thoughts
    greedy: bool = False
    vote: str | None = ""  # the answer that it votes for, None: no vote; "": not stored
    reward_errors: dict[str, str] = field(default_factory=dict)  # reward's name -> why it failed
    score: float | None = None  # the first of --reward, if it could be computed
    reward: float | None = None  # the weighted sum
    rewards: dict[str, float | None] = field(default_factory=dict)
    ids: list[NonNegativeInt] = field(default_factory=list)
    sampled: list[Literal[0, 1]] = field(default_factory=list)  # 0: tokens of an environment

    @property
    def solves(self) -> bool | None:
        """Whether it solves its prompt. One whose reward failed does not; None: no reward
        applies."""
        if self.score is None:
            return False if self.reward_errors else None
        return self.score >= SOLVED


def as_objects(value: object) -> list:
    """Return one completion, or a list of them, as a list of objects. A completion may be just a
    text."""
    values = value if isinstance(value, list) else [value]
    return [dict(text=each) if isinstance(each, str) else each for each in values]


@dataclass
class Line:
    """A line of the file. Other programs may write a single `completion`."""

    completions: Annotated[
        list[StoredCompletion],
        BeforeValidator(as_objects),
        Field(min_length=1, validation_alias=AliasChoices("completions", "completion")),
    ]
    source: str | None = None

    def as_json(self) -> str:
        stored = [asdict(completion) for completion in self.completions]
        return json.dumps(dict(source=self.source, completions=stored))


LINE = TypeAdapter(Line)
# Fields that are copied to and from a `Completion`.
AS_SAMPLED = ("text", "finish_reason", "turns", "turn_rewards", "error")

# ---- sampling ----


def sample_completions(
    file: Path, lines: list[Line], prompts: Prompts, episodes: Episodes, rewards: Rewards,
    args: SamplingArgs, batch_size: int,
) -> list[Line]:  # fmt: skip
    """Sample the prompts that `lines`, the content of `file`, do not have yet. Append them in
    batches, and return all lines: fewer than prompts if the run must stop. Each prompt has a greedy
    completion, then the sampled ones. Collective.

    Every prompt has its own seed, so samples depend neither on the number of ranks nor on stops."""
    process.note_signals()
    lines = list(lines)
    while len(lines) < len(prompts) and not distributed.stop_requested():
        start = len(lines)
        own = distributed.items_of_rank(range(start, min(start + batch_size, len(prompts))))
        greedy = sampled_groups(own, prompts, episodes, args.seed, 1, temperature=0.0)
        sampled = sampled_groups(
            own, prompts, episodes, args.seed, args.samples_per_prompt, args.temperature
        )
        if distributed.all_max(len(sampled) < len(own)):  # a signal has stopped some rank
            break
        groups = [one + others for one, others in zip(greedy, sampled, strict=True)]
        lines += make_lines(groups, rewards, greedy=True)
        if distributed.is_main():
            with file.open("a", encoding="utf-8") as out:
                out.writelines(line.as_json() + "\n" for line in lines[start:])
            print(f"{len(lines)} of {len(prompts)} prompts sampled", flush=True)
    return lines


def sampled_groups(
    own: Sequence[int], prompts: Prompts, episodes: Episodes, seed: int, n: int, temperature: float
) -> list[Group]:
    """Return `n` completions of each of the prompts with these numbers; fewer prompts if a signal
    stops the run."""
    requests = [
        PromptRequest(i, *prompts[i], distributed.fold_seed(seed, i), n, temperature) for i in own
    ]
    return in_order(episodes.generate(requests, Meter()))


def make_lines(groups: list[Group], rewards: Rewards, greedy: bool) -> list[Line]:
    """Compute the rewards of this rank's `groups` and return the lines of all prompts, in order.
    `greedy`: whether the first completion of each group is the greedy one. Collective."""
    rewards_PG, parts, numbers = rewards.wait(groups, Meter())
    firsts_PG = rewards.first(parts)

    def stored(p: int, g: int, c: Completion) -> StoredCompletion:
        named = {name: _null(part_PG[p, g]) for name, part_PG in parts.items()}
        more = {name: _null(x_PG[p, g]) for name, x_PG in numbers.items()}
        return StoredCompletion(
            **{name: getattr(c, name) for name in AS_SAMPLED},
            answer_at=len(c.text) - len(rewards.thoughts.answer(c)),
            greedy=greedy and g == 0,
            vote=vote_of(c, rewards),
            reward_errors=c.reward_errors,
            score=_null(firsts_PG[p, g]),
            reward=_null(rewards_PG[p, g]),
            rewards=named | {name: x for name, x in more.items() if x is not None},
            ids=c.completion_ids,
            sampled=[int(m) for m in c.loss_mask[c.prompt_length :]],
        )

    own = [
        Line([stored(p, g, c) for g, c in enumerate(group)], group[0].row["_source"])
        for p, group in enumerate(groups)
    ]
    return _of_all_ranks(own)


def vote_of(sample: Completion, rewards: Rewards) -> str | None:
    """Return the answer with which a completion takes part in a majority vote, or None if it does
    not. A built-in first reward votes with the answer that it reads; else it is `final_answer`."""
    name = rewards.args.reward[0]
    name = sample.row["reward"] if name == "by_row" else name
    function = load_reward(name) if name in BUILT_IN else None
    if not hasattr(function, "vote"):
        return final_answer(rewards.thoughts.answer(sample))
    answer = function.vote(rewards.thoughts.read_by(function, sample), sample.row)
    return None if answer in (None, "") else str(answer)[:200]


def _null(x: Tensor) -> float | None:
    return None if x.isnan() else float(x)


def _of_all_ranks(values: list) -> list:
    """Return the values of all prompts in their order. `values` are those of this rank's share,
    which has every `world_size`-th prompt. Collective."""
    in_order = chain(*zip_longest(*distributed.gather_objects(values)))
    return [value for value in in_order if value is not None]


# ---- stored completions ----


def restored(lines: list[Line], prompts: Prompts) -> list[Group]:
    """Return the stored completions of this rank's part of the prompts as `Completion`s."""
    groups: list[Group] = []
    for i in distributed.items_of_rank(range(len(lines))):
        ids, row = prompts[i]
        groups.append([])
        for stored in lines[i].completions:
            mask = [False] * len(ids) + [bool(is_sampled) for is_sampled in stored.sampled]
            fields = {name: getattr(stored, name) for name in AS_SAMPLED}
            groups[-1].append(Completion(ids + stored.ids, mask, len(ids), row, **fields))
    return groups


def reward_again(lines: list[Line], prompts: Prompts, rewards: Rewards) -> list[Line]:
    """Return the lines with rewards computed anew, by the flags of this run. Collective."""
    is_greedy = lines[0].completions[0].greedy
    return make_lines(restored(lines, prompts), rewards, is_greedy)


def score_stored(
    lines: list[Line], score: Callable[[list[Group]], list], prompts: Prompts
) -> list[list]:
    """Return a score for each stored completion, per prompt. `score` is called once, with the
    groups of this rank, and returns one score per completion. Collective."""
    groups = restored(lines, prompts)
    results = iter(score(groups))
    return _of_all_ranks([[next(results) for _ in group] for group in groups])


def scores_of_outputs(
    model: Callable[[list[Group]], list[Result]], outputs: list[list[Line]], prompts: Prompts
) -> list[list[list[float]]]:
    """Score the completions of one or two outputs (files of lines) with a reward model or a judge.
    A judge of pairs compares completion i of one output with completion i of the other; the score
    is the probability to win. Collective. Raises `ValueError` naming the row of an unscored
    completion."""

    def scores(groups: list[Group], results: list[Result]) -> list[float]:
        for sample, result in zip(chain(*groups), results, strict=True):
            if result.error:
                raise ValueError(f"{sample.row['_source']}: {result.error}")
        values = [result.value for result in results]
        # a judge returns (score, further numbers)
        return [value[0] if isinstance(value, tuple) else value for value in values]

    if not getattr(model, "ranks", False):
        return [score_stored(lines, lambda x: scores(x, model(x)), prompts) for lines in outputs]

    pairs = zip(*outputs, strict=True)
    both = [Line(one.completions + other.completions) for one, other in pairs]
    count = len(outputs[0][0].completions)
    found = score_stored(both, lambda x: scores(x, model.duels(x)), prompts)
    return [[group[:count] for group in found], [group[count:] for group in found]]


# ---- files ----


def read_completions(
    flag: str, path: Path, prompts: Prompts, tokenizer, *, own: bool = False,
    episodes: bool = False,
) -> list[Line]:  # fmt: skip
    """Read a file of completions; line i must belong to prompt i. The run's `own` file may end
    early: a last line that a kill has cut is removed from it, and missing lines are not an error.
    With `episodes` the completions must have rewards of an environment. Only rank 0 reads; it
    raises `ValueError` naming the line that is invalid. Collective."""
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
    lines: list[Line] = []
    for i, text in enumerate(texts):
        try:
            line = LINE.validate_json(text)
            if line.source not in (None, prompts.rows[i]["_source"]):
                problem = f"this row of the data is {prompts.rows[i]['_source']}"
                raise ValueError(f"`source` is {line.source}, but {problem}")
            if lines and len(line.completions) != len(lines[0].completions):
                raise ValueError("another number of completions than in the first line")
            if episodes and any(stored.turn_rewards is None for stored in line.completions):
                raise ValueError("completion: turn_rewards is missing")
            vocabulary = None if own else len(tokenizer)
            stored = [filled_in(each, tokenizer, vocabulary) for each in line.completions]
            lines.append(Line(stored, line.source))
        except ValueError as error:
            problem = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                problem = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
            raise ValueError(f"{flag} {path}, line {i + 1}: {problem}") from error
    return distributed.from_main(lines)


def filled_in(stored: StoredCompletion, tokenizer, vocabulary: int | None) -> StoredCompletion:
    """Return the completion with what it lacks; one with only a text is tokenised. Raises
    `ValueError` for ids that are not below `vocabulary`. It is None for the run's own file: a model
    may have more output rows than the tokenizer has tokens, and may have sampled one of those."""
    ids = stored.ids
    if not ids:
        ids = tokenizer(stored.text, add_special_tokens=False)["input_ids"]
        ids = [*ids, tokenizer.eos_token_id]
    sampled = stored.sampled or [1] * len(ids)
    if len(ids) != len(sampled):
        raise ValueError("completion: `ids` and `sampled` must have the same length")
    if vocabulary is not None and max(ids) >= vocabulary:
        what = f"completion: `ids` must be below {vocabulary}"
        raise ValueError(f"{what}, the size of the vocabulary")
    return replace(stored, ids=ids, sampled=sampled, turn_rewards=stored.turn_rewards or [])
