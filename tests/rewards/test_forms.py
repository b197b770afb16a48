"""The parameters of a user's reward determine how it is called."""

import pytest

from common.rewards.in_processes import reward_form


async def waits(completions, row, ids): ...


async def yields(completions, row):
    yield 1


class Judge:
    def __call__(self, text, example): ...


@pytest.mark.parametrize(("function", "form"), [
    (lambda completion, row: 0, (False, False)),
    (lambda text, example, scale=1: 0, (False, False)),
    (lambda *anything: 0, (False, False)),
    (lambda completion, row, ids=None: 0, (False, True)),
    (lambda completions, row, **more: 0, (True, False)),
    (lambda text, _row: 0, (False, False)), (lambda c, r: 0, (False, False)),
    (lambda response, item, *more: 0, (False, False)),
    (waits, (True, True)), (Judge(), (False, False)),
])  # fmt: skip
def test_parameters_determine_the_form(function, form):
    assert reward_form("mine.py:f", function) == form


@pytest.mark.parametrize(("function", "words"), [
    (lambda completion: 0, "too many positional arguments"),
    (lambda completion, row, tokenizer: 0, "missing a required argument: 'tokenizer'"),
    (lambda completion, row, *, scale: 0, "missing a required.* argument: 'scale'"),
    (lambda prompts, completions, **more: 0, "'completions' stands elsewhere"),
    (lambda completion, ids, row: 0, "'ids' stands elsewhere"),
    (Judge, "it is a class; name a function, or an object that can be called"),
    (lambda completion, answer: 0, "'answer' gets the whole row; call it row, and read row"),
    # the forms of other tools: TRL, verl, OpenRLHF
    (lambda completions, prompts, **more: 0, "'prompts' gets the whole row; call it row"),
    (lambda completions, completion_ids, **more: 0, "'completion_ids' gets the whole row"),
    (lambda completions, ground_truth, **more: 0, "'ground_truth' gets the whole row"),
    (lambda completions, **more: 0, "too many positional arguments"),
    (lambda completions, row, completion_ids=None: 0, "'completion_ids' gets nothing; call it ids"),
    (lambda completions, row, answer=None: 0, "'answer' gets nothing; read the row"),
    (lambda solution_str, ground_truth, extra_info=None: 0, "'ground_truth' gets the whole row"),
    (lambda data_source, solution_str, ground_truth, extra_info=None: 0, "'data_source' gets"),
    (lambda queries, prompts, labels: 0, "'queries' gets the text of one completion; call it comp"),
    (lambda responses, row: 0, "'responses' gets the text of one completion; call it completion"),
    (lambda completion, label: 0, "'label' gets the whole row"),
    (lambda answer, row: 0, "'answer' gets the text of one completion; call it completion"),
    (lambda samples, row: 0, "'samples' gets the text of one completion; call it completion"),
    (lambda completions, rows: 0, "'rows' gets the whole row"),
    (yields, "it is an async generator; return a number or a list"),
])  # fmt: skip
def test_unknown_parameters_are_refused(function, words):
    form = f"^--reward mine.py:f: .*or \\(completions, row\\).*: {words}"
    with pytest.raises(ValueError, match=form) as error:
        reward_form("mine.py:f", function, ("prompt", "answer"))
    assert "\n" not in str(error.value)
