"""Judges (`--reward judge:PATH` and `rank:PATH`): a frozen chat model is asked about a completion.
The reward is the probability that it gives to one of two answers; nothing is sampled."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, permutations
from typing import Annotated, Required

import torch
from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    with_config,
)
from typing_extensions import TypedDict  # before Python 3.12 pydantic needs this one

from common.config.flags import as_tuple
from common.config.online import SamplingArgs, ScoringArgs
from common.model.policy import load_policy
from common.model.scoring import log_likelihoods, require_length
from common.packs.sample import Completion, Group, Sample
from common.parallel import distributed
from common.rewards.answers import from_json
from common.text.columns import PROMPT_COLUMNS, choose_columns
from common.text.encode import Encoder
from common.text.filler import template_filler
from common.text.messages import opened_thought
from common.text.thoughts import Thoughts
from common.text.tokenizer import load_tokenizer
from common.workers.worker import Result

ABOUT_ONE = "Prompt:\n{prompt}\n\nAnswer:\n{completion}\n\nCriterion: {criterion}\n\n"
YES_OR_NO = "Does the answer meet the criterion? Reply with one word: yes or no."
ABOUT_TWO = "Prompt:\n{prompt}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\n"
WHICH = "Criterion: {criterion}\n\nWhich answer is better? Reply with one letter: A or B."
QUESTIONS = dict(  # kind -> the question, and the spellings of its two answers
    judge=(ABOUT_ONE + YES_OR_NO, [("yes", "Yes"), ("no", "No")]),
    rank=(ABOUT_TWO + WHICH, [("A",), ("B",)]),
)
BEST = ("overall quality", 1.0)  # the criterion for pairs if there is no rubric
OFF = ("enable_thinking", "thinking")  # variables by which chat templates switch thoughts off
GROUPS_AT_ONCE = 16  # so many groups of a rank have their questions in memory

# ---- rubrics ----


@with_config(extra="forbid")
class Criterion(TypedDict, total=False):
    criterion: Required[Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]]
    weight: Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)] | None


OneOrText = Annotated[
    Criterion, BeforeValidator(lambda x: dict(criterion=x) if isinstance(x, str) else x)
]
RUBRIC = TypeAdapter(Annotated[list[OneOrText], Field(min_length=1), BeforeValidator(as_tuple)])


def criteria_of(row: dict, args: ScoringArgs) -> list[tuple[str, float]]:
    """Return the criteria of a row with their weights, from its column `rubric` or else from
    `--rubric`. Raises `ValueError` naming the row for a malformed rubric."""
    if row.get("rubric") is None:
        return [(text, 1.0) for text in args.rubric]
    label = f"{row.get('_source')}: column rubric"
    try:
        rubric = RUBRIC.validate_python(from_json(row["rubric"]))
    except ValidationError as error:
        problem = error.errors()[0]
        places = [f"criterion {x + 1}" if isinstance(x, int) else x for x in problem["loc"]]
        raise ValueError(": ".join([label, *places, problem["msg"]])) from error
    criteria = [(one["criterion"], one.get("weight")) for one in rubric]
    criteria = [(text, 1.0 if weight is None else weight) for text, weight in criteria]
    if not any(weight for _, weight in criteria):
        raise ValueError(f"{label}: all weights are 0; give a criterion a positive weight")
    return criteria


# ---- judges ----


class Judge:
    """A frozen chat model, sharded over the ranks, that is asked about completions. Call it with
    groups of samples. Collective."""

    def __init__(
        self, flag: str, kind: str, path: str, args: SamplingArgs, rows: list[dict],
        policy_tokenizer, device: torch.device | None,
    ):  # fmt: skip
        """Check the question about each row, and load the model unless `device` is None. `kind`:
        `judge` asks about each completion, `rank` about pairs of a group. Raises `ValueError`."""
        self.label = f"{flag} {kind}:{path}"
        self.args = args
        self.device = device
        self.ranks = kind == "rank"
        template, answers = QUESTIONS[kind]
        self._prepare_questions(args.judge_prompt or template, rows, policy_tokenizer)
        self._prepare_answers(answers, load_tokenizer(path, flag=flag))
        if device is not None:
            self.model = load_policy(path, args, device, trainable=False, flag=flag)

    def _prepare_questions(self, template: str, rows: list[dict], policy_tokenizer) -> None:
        needed = ("{first}", "{second}") if self.ranks else ("{completion}", "{transcript}")
        found = [name in template for name in needed]
        if not (all(found) if self.ranks else any(found)):
            names = (" and " if self.ranks else " or ").join(needed)
            raise ValueError(f"--judge_prompt has no {names}; {self.label} needs it")
        self.fill = template_filler("--judge_prompt", template)
        self.reads_criteria = "{criterion}" in template
        self.reads_prompt = "{prompt}" in template
        self.column = "_prompt"
        if self.reads_prompt and "_prompt" not in rows[0]:
            self.column = choose_columns("--dataset", rows, PROMPT_COLUMNS)[0]
        self.policy_encoder = Encoder(policy_tokenizer, self.args)
        self.thoughts = Thoughts(policy_tokenizer, cut=self.args.thoughts == "cut")
        for row in rows:
            nothing = Completion([], [], row=row)
            self._question(self._criteria(row)[0][0], nothing, nothing)

    def _prepare_answers(self, answers: list[tuple[str, ...]], tokenizer) -> None:
        """Keep the token ids of each spelling of each answer, as the model would sample them."""
        if tokenizer.chat_template is None:
            raise ValueError(f"{self.label}: its tokenizer has no chat template; name a chat model")
        args = replace(
            self.args, prompt_format="chat", system_prompt=None, special_text="text",
            template_kwargs=(),
        )  # fmt: skip
        variables = Encoder(tokenizer, args).chat.variables
        args = replace(args, template_kwargs=[f"{name}=false" for name in OFF if name in variables])
        self.encoder = Encoder(tokenizer, args)
        chat = self.encoder.chat
        if opened_thought(chat.header) or chat.end is None:
            problem = "opens a thought" if chat.end else "does not show the text of an answer"
            advice = "name a model that answers at once"
            raise ValueError(f"{self.label}: its chat template {problem}; {advice}")
        end = tokenizer(chat.end.last, add_special_tokens=False)["input_ids"]
        self.answers: list[list[list[int]]] = []
        for spellings in answers:
            self.answers.append([])
            for text in spellings:
                row = dict(prompt=asked("?"), completion=text, _source=self.label)
                ids = [*self.encoder.completion(row, "prompt", "completion").completion_ids]
                if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids:
                    self.answers[-1].append(ids[: len(ids) - len(end)])
        written = list(chain(*self.answers))
        if not all(self.answers) or len(set(map(tuple, written))) < len(written):
            names = ", ".join(text for text, *_ in answers)
            raise ValueError(f"{self.label}: its tokenizer does not distinguish {names}")
        self.room = max(map(len, written)) + len(end)

    def __call__(self, groups: list[Group]) -> list[Result]:
        """Return a result for each sample. For `judge` it is the weighted mean over the criteria;
        for `rank` the mean probability to win against another completion of the group, and none in
        a group of one. A second number, `mass`, is the probability of both answers together."""
        if not self.ranks:
            return self._ask([[(sample,) for sample in group] for group in groups])
        return self._compare(groups, [[*permutations(range(len(group)), 2)] for group in groups])

    def duels(self, groups: list[Group]) -> list[Result]:
        """Compare each sample of a group with the one at the same place in the group's other half,
        and return a result for each. Collective."""
        orders = []
        for group in groups:
            pairs = [(k, k + len(group) // 2) for k in range(len(group) // 2)]
            orders.append(pairs + [(other, one) for one, other in pairs])
        return self._compare(groups, orders)

    def _compare(self, groups: list[Group], orders: list[list[tuple[int, int]]]) -> list[Result]:
        """Return a result for each sample, from questions about pairs, given by their indices in a
        group. `orders` has each pair in both orders: their mean has no bias to the first.
        Collective."""
        pairs = [
            [(group[one], group[other]) for one, other in of_group]
            for group, of_group in zip(groups, orders, strict=True)
        ]
        answers = iter(self._ask(pairs))
        results = []
        for group, of_group in zip(groups, orders, strict=True):
            by_order = {order: next(answers) for order in of_group}
            results += [_mean_of_duels(by_order, index) for index in range(len(group))]
        return results

    # ---- questions ----

    def _ask(self, items: list[list[tuple[Completion, ...]]]) -> list[Result]:
        """Return a result for each question, about one completion or two. Questions of a group
        share their prefix. Collective; a rank may have no groups."""
        results = []
        for start in range(0, int(distributed.all_max(len(items))), GROUPS_AT_ONCE):
            groups = items[start : start + GROUPS_AT_ONCE]
            prompts = [[self._prompts_or_error(samples) for samples in group] for group in groups]
            # Ask equal questions once. Log-probs depend a little on the place in a pack, and equal
            # completions must have equal rewards, bit for bit.
            distinct = [
                dict.fromkeys(chain(*(found for found in group if isinstance(found, list))))
                for group in prompts
            ]
            questions = [list(chain(*map(self._with_answers, group))) for group in distinct]
            logps = iter(log_likelihoods(self.model, questions, self.args.pack_tokens))
            for of_group, found_of_group, group in zip(groups, prompts, distinct, strict=True):
                numbers = {ids: self._probability(logps) for ids in group}
                pairs = zip(of_group, found_of_group, strict=True)
                results += [self._result(one[0].row, found, numbers) for one, found in pairs]
        return results

    def _prompts_or_error(self, samples: tuple[Completion, ...]) -> list[tuple[int, ...]] | str:
        """Return the judge's prompt for each criterion, or why there is none: it is too long, or
        has a character that the judge's tokenizer cannot read."""
        prompts = []
        try:
            for criterion, _ in self._criteria(samples[0].row):
                text = self._question(criterion, samples[0], samples[-1])
                row = dict(prompt=asked(text), _source=self.label)
                prompts.append(tuple(self.encoder.prompt(row, ("prompt",))))
                length = len(prompts[-1]) + self.room
                require_length(self.model, length)
                limit = self.args.pack_limit
                if length > limit.tokens:
                    problem = f"a question of {length} tokens is longer than {limit.flag}"
                    raise ValueError(f"{self.label}: {problem}")
        except ValueError as error:
            return distributed.first_line(error)
        return prompts

    def _criteria(self, row: dict) -> list[tuple[str, float]]:
        """Return the criteria of a row, at least one. Raises `ValueError` for a row without any,
        and for a rubric if `--judge_prompt` has no place for it."""
        criteria = criteria_of(row, self.args)
        if self.reads_criteria and (criteria or self.ranks):
            return criteria or [BEST]
        if self.reads_criteria:
            raise ValueError(f"{row['_source']}: no rubric; add a column rubric, or set --rubric")
        if criteria:
            problem = "--judge_prompt has no {criterion} for the rubric"
            raise ValueError(f"{row['_source']}: {problem}")
        return [("", 1.0)]

    def _question(self, criterion: str, first: Completion, second: Completion) -> str:
        prompt = ""
        if self.reads_prompt:
            prompt = self.policy_encoder.as_asked(first.row, self.column)
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]["content"]
        elif isinstance(prompt, list):
            prompt = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
        answers = [self.thoughts.answer(sample) for sample in (first, second)]
        values = dict(first=answers[0], second=answers[1], completion=answers[0])
        values |= dict(transcript=self._transcript(first), prompt=prompt)
        return self.fill(first.row | values | dict(criterion=criterion))

    def _transcript(self, sample: Completion) -> str:
        """Return all turns of a sample as text. Completions from a file are not decoded yet."""
        if sample.transcript or sample.turns == 1:
            return sample.transcript or sample.text
        return self.policy_encoder.tokenizer.decode(sample.completion_ids)

    # ---- answers ----

    def _with_answers(self, prompt: tuple[int, ...]) -> Iterator[Sample]:
        """Yield the prompt followed by each spelling of each answer."""
        for answer in chain(*self.answers):
            mask = [False] * len(prompt) + [True] * len(answer)
            yield Sample([*prompt, *answer], mask, len(prompt))

    def _result(
        self, row: dict, prompts: list[tuple[int, ...]] | str,
        numbers: dict[tuple[int, ...], tuple[float, float]],
    ) -> Result:  # fmt: skip
        """Return the weighted mean over the criteria. `numbers` has the numbers of each prompt."""
        if isinstance(prompts, str):
            return Result(error=prompts)
        weights = [weight for _, weight in self._criteria(row)]
        value, mass = (
            math.fsum(w * x for w, x in zip(weights, column, strict=True)) / math.fsum(weights)
            for column in zip(*(numbers[prompt] for prompt in prompts), strict=True)
        )
        return Result((value, dict(mass=mass)))

    def _probability(self, logps: Iterator[tuple[float, int]]) -> tuple[float, float]:
        """Return the probability of the first answer among the two, p_1 / (p_1 + p_2), and p_1 +
        p_2. p_a is the sum over the spellings of answer a."""
        logps_of = [[next(logps)[0] for _ in spellings] for spellings in self.answers]
        largest = max(chain(*logps_of))
        first, second = (math.fsum(math.exp(logp - largest) for logp in one) for one in logps_of)
        return first / (first + second), (first + second) * math.exp(largest)


def asked(text: str) -> list[dict]:
    return [dict(role="user", content=text)]


def _mean_of_duels(by_order: dict[tuple[int, int], Result], index: int) -> Result:
    """Return the mean result of a sample over its duels, each asked in both orders."""
    duels = []
    error = None
    for (one, other), ahead in by_order.items():
        behind = by_order[other, one]
        if one == index and not (ahead.error or behind.error):
            win, of_win = ahead.value
            loss, of_loss = behind.value
            mass = (of_win["mass"] + of_loss["mass"]) / 2
            duels.append(((win + (1 - loss)) / 2, (win + loss) / 2 - 0.5, mass))
        elif one == index:
            error = error or ahead.error or behind.error
    if not duels:
        return Result(error=error)
    win, bias, mass = (math.fsum(numbers) / len(duels) for numbers in zip(*duels, strict=True))
    return Result((win, dict(position_bias=bias, mass=mass)))
