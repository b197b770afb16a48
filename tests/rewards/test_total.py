"""Several rewards at once, and failing functions."""

import math
import re
import sys

import pytest
import torch
from helpers import write
from in_process import Args

from common.metrics.meter import Meter
from common.packs.sample import Completion
from common.parallel.distributed import RunError
from common.rewards.functions import REWARDS
from common.rewards.registry import BUILT_IN, load_reward, row_check
from tests.rewards.scored import ROW, groups, make

# ---- several rewards at once ----


def test_total_reward_is_the_weighted_sum():
    rewards = make(("gsm8k", "format"), (2.0, 0.25))
    total, parts, _ = rewards.wait(groups(["#### 18", "#### 7"], ["18", "A: 18 apples"]), Meter())
    assert list(parts) == ["gsm8k", "format"] and total.dtype == torch.float64
    assert parts["gsm8k"].tolist() == [[1, 0], [0, 1]]
    assert parts["format"].tolist() == [[1, 1], [0, 0]]
    assert total.tolist() == [[2.25, 0.25], [0, 2]]


def test_failing_rewards_are_nan_and_limited_in_number(tmp_path):
    code = """
def odd(completion, row):
    if completion == "raise": raise KeyError("oops")
    odd = {"nan": float("nan"), "inf": 10**400, "text": "x", "large": -1e308}
    return odd.get(completion, 1.0)
"""
    names, meter = (f"{write(tmp_path / 'mine.py', code)}:odd", "format"), Meter()
    batch = groups(["raise", "nan", "inf", "text", "large", "fine", "#### 1"])
    total, parts, _ = make(names, max_errors=0.5).wait(batch, meter)
    assert total[0].isnan().tolist() == parts["odd"][0].isnan().tolist() == [True] * 5 + [False] * 2
    assert total[0, 5:].tolist() == [1, 2] and not parts["format"].isnan().any()
    assert meter.reduce() == {"reward/error_fraction": 5 / 14, "reward/timeout_fraction": 0}
    many = r"5 of 14 rewards.*--max_reward_errors 0.3.*odd on rows.jsonl:1: KeyError"
    with pytest.raises(RunError, match=many):
        make(names, max_errors=0.3).wait(batch, Meter())


def test_first_failed_reward_is_said_once(tmp_path, capsys):
    code = "def fails(completion, row): return 1 / len(completion)"
    rewards = make((f"{write(tmp_path / 'mine.py', code)}:fails",), max_errors=0.5)
    for _ in range(2):
        rewards.wait(groups(["a", "b", ""]), Meter())
    said = capsys.readouterr().out
    assert said.count("warning: 1 of 3 rewards could not be computed") == 1
    assert "the first: fails on rows.jsonl:1: ZeroDivisionError" in said


def test_failed_rewards_are_a_fraction_of_those_of_the_step(tmp_path):
    """dapo.py may draw a few prompts more, of which one fails; a step ends with `reduce`."""
    code = "def fails(completion, row): return 1 / len(completion)"
    rewards, meter = make((f"{write(tmp_path / 'mine.py', code)}:fails",), max_errors=0.1), Meter()
    rewards.wait(groups(["a"] * 18), meter)
    rewards.wait(groups(["", "b"]), meter)
    with pytest.raises(RunError, match="3 of 22 rewards"):
        rewards.wait(groups(["", ""]), meter)
    meter.reduce()
    with pytest.raises(RunError, match="1 of 2 rewards"):
        rewards.wait(groups(["", "b"]), meter)


def test_none_is_excluded_from_the_sum_and_is_no_error(tmp_path):
    code = "def some(text, row): return None if text == 'skip' else len(text) + len(row['answer'])"
    names, meter = (f"{write(tmp_path / 'mine.py', code)}:some", "format"), Meter()
    total, parts, _ = make(names, weights=(1.0, -1.0)).wait(
        groups(["skip", "abc", "#### 1"]), meter
    )
    assert total.tolist() == [[0, 5, 7]]
    assert parts["some"][0, 0].isnan() and parts["some"][0, 1:].tolist() == [5, 8]
    total, _, _ = make(names[:1]).wait(groups(["skip", "abc"]), meter)  # no reward applies
    assert total[0, 0].isnan() and total[0, 1] == 5 and meter.reduce()["reward/error_fraction"] == 0


# ---- functions of a group or of ids, and their metrics ----


def test_group_function_gets_all_completions_of_a_prompt(tmp_path):
    code = """
def rank(completions, row, ids):
    assert row["answer"] == "18"
    lengths = sorted(map(len, completions))
    return [lengths.index(len(text)) + 10 * len(i) for text, i in zip(completions, ids)]
"""
    batch = groups(["aaa", "a"], ["b", "bb"])
    batch[1][0].ids, batch[1][0].loss_mask = [1, 2, 3], [False, True, True]
    names = (f"{write(tmp_path / 'mine.py', code)}:rank", "format")
    total, parts, _ = make(names).wait(batch, Meter())
    assert parts["rank"].tolist() == total.tolist() == [[11, 10], [20, 11]]


def test_reward_function_gets_the_sampled_ids_of_all_turns_and_branches(tmp_path):
    code = "def f(text, row, ids):\n    return ids[-1] if ids == [3, 2, 6] else len(ids)\n"
    batch = groups(["x", "x"])
    mask = [False, True, False, True]  # a prompt, and an answer of the environment
    batch[0][0].ids, batch[0][0].loss_mask = [1, 3, 4, 2], mask
    batch[0][0].branches = [Completion(ids=[5, 6], loss_mask=[False, True])]
    rewards = make((f"{write(tmp_path / 'mine.py', code)}:f",))
    assert rewards.wait(batch, Meter())[0].tolist() == [[6, 1]]


FORMS = """
import numpy as np
import torch
def one(completion, row):
    return eval(completion)

def all(completions, row):
    return eval(completions[0])

def some(completions, row):
    for text in completions:
        yield len(text)
"""
RESULTS = [
    "{'score': 0.5}", "{'reward': 0.5, 'words': 7}", "{'score': 0.5, 'pred': '18', 'words': True}",
    "np.float32(0.5)", "np.array(0.5)", "np.array([0.5])", "torch.tensor(0.5)",
    "torch.full((1, 1), 0.5)", "torch.tensor(0.5, requires_grad=True)", "[0.5]",
    "(0.5, {'words': np.int64(7)})",
    "(torch.tensor(0.5), {'words': torch.tensor(7)})", "(x for x in [0.5])", "[0.5, {'words': 7}]",
]  # fmt: skip
RESULTS_OF_GROUPS = [
    "np.array([1, 2])", "torch.tensor([1.0, 2.0])", "torch.tensor([[1], [2]])",
    "(x for x in (1, 2))", "map(int, '12')", "{'a': 1, 'b': 2}.values()",
    "[np.float32(1), torch.tensor(2)]",
    "{'rewards': torch.tensor([1, 2]), 'words': [7, 8]}", "[{'score': 1}, (2, {'words': 3})]",
]  # fmt: skip
NO_RESULTS = {
    "{'value': 1}": "a dict with the keys 'value', not a number; return a number, None, (number",
    "{'score': 1, 'reward': 2}": "a dict with the keys 'score', 'reward', not a number",
    "(1.0, 'good')": "a tuple of 2 values, not a number", "np.ones(3)": "a ndarray of shape (3,)",
    "'1.0'": "'1.0', not a number", "1j": "a complex, not a number", "[]": "a list of 0 values",
    "{'score': 'high'}": "'high', not a number",
}  # fmt: skip


def test_common_forms_of_a_result_are_read(tmp_path):
    file = write(tmp_path / "mine.py", FORMS)
    total, _, numbers = make((f"{file}:one",)).wait(groups(RESULTS), Meter())
    assert total[0].tolist() == [0.5] * len(RESULTS)
    words = [7 if "7" in text else 1 if "': True" in text else math.nan for text in RESULTS]
    assert repr(numbers["one/words"][0].tolist()) == repr([float(x) for x in words])
    batch = groups(*([text, ""] for text in RESULTS_OF_GROUPS))
    assert make((f"{file}:all",)).wait(batch, Meter())[0].tolist() == [[1, 2]] * len(batch)
    assert make((f"{file}:some",)).wait(groups(["a", "bb"]), Meter())[0].tolist() == [[1, 2]]


def test_other_results_are_refused_in_a_line_that_says_what_came(tmp_path):
    rewards = make((f"{write(tmp_path / 'mine.py', FORMS)}:one",))
    for text, words in NO_RESULTS.items():
        with pytest.raises(RunError, match=f"one on .*: TypeError: returned {re.escape(words)}"):
            rewards.wait(groups([text]), Meter())
    rewards = make((f"{tmp_path}/mine.py:all",))
    for text, words in (
        ("torch.ones(3)", "a Tensor of shape (3,)"), ("{'a': 1}", "a dict with the keys 'a'"),
        ("np.array(1.0)", "a ndarray of shape ()"), ("'12'", "'12'"),
    ):  # fmt: skip
        line = re.escape(f"all on rows.jsonl:1: returned no list of 2 values but {words}")
        with pytest.raises(RunError, match=line):
            rewards.wait(groups([text, ""]), Meter())


def test_group_with_a_wrong_number_of_values_has_no_rewards(tmp_path):
    code = """
def f(completions, row):
    if completions[0] == "raise": raise KeyError("oops")
    wrong = {"number": 2.0, "dict": dict(a=1, b=2)}
    values = {"fine": [1, None], "short": [1], "odd": [1, "x"], **wrong}
    return values[completions[0]]
"""
    names = (f"{write(tmp_path / 'mine.py', code)}:f",)
    texts = ("fine", "odd", "short", "number", "dict", "raise")
    meter = Meter()
    total, _, _ = make(names, max_errors=0.9).wait(groups(*([text, ""] for text in texts)), meter)
    assert total.isnan().tolist() == [[False, True]] * 2 + [[True] * 2] * 4
    assert meter.reduce()["reward/error_fraction"] == 9 / 11  # None is no error
    for text, what in (
        ("short", "returned no list of 2 values"),
        ("odd", "TypeError: returned 'x', not a number"),
        ("raise", "KeyError: 'oops'"),
    ):
        with pytest.raises(RunError, match=f"the first: f on rows.jsonl:1: {what}"):
            make(names).wait(groups([text, ""]), Meter())


@pytest.mark.slow
@pytest.mark.parametrize("start", ["def", "async def"])
def test_group_time_limit_is_the_sum_over_its_completions(tmp_path, start):
    wait = "await asyncio.sleep(9999)" if start == "async def" else "pass"
    code = f"""
import asyncio
{start} f(completions, row):
    while completions[0] == 'late': {wait}
    return [1] * 3
"""
    rewards = make((f"{write(tmp_path / 'mine.py', code)}:f",), max_errors=0.5, seconds=0.5)
    meter = Meter()
    total, _, _ = rewards.wait(groups(["a", "", ""], ["late", "", ""]), meter)
    assert total[0].tolist() == [1, 1, 1] and total[1].isnan().all()
    assert meter.reduce()["reward/timeout_fraction"] == 1 / 2
    with pytest.raises(RunError, match="the first: f on rows.jsonl:1: no answer within 1.5 s"):
        rewards.wait(groups(["late", "", ""]), Meter())


NUMBERS = """
def f(completion, row):
    if completion == "none": return None, dict(words=10)
    if completion == "bad": return 1.0, dict(words=float("nan"))
    if completion == "mean": return 1.0, dict(mean=1)
    rare = {"rare": True} if completion == "a b c" else {}
    return 0.5, dict(words=len(completion.split())) | rare
"""


def test_metrics_of_a_reward_are_means_over_the_completions_that_have_them(tmp_path):
    names, meter = (f"{write(tmp_path / 'mine.py', NUMBERS)}:f",), Meter()
    total, _, numbers = make(names, max_errors=0.5).wait(
        groups(["a b c", "none"], ["a", "bad"]), meter
    )
    assert total[0, 0] == 0.5 and total[0, 1].isnan() and total[1, 1].isnan()
    metrics = meter.reduce()
    assert metrics["rewards/f/words"] == pytest.approx(14 / 3) and metrics["rewards/f/rare"] == 1
    assert metrics["reward/error_fraction"] == 1 / 3
    expected = {
        "f/words": [[3.0, 10.0], [1.0, math.nan]],
        "f/rare": [[1.0, math.nan], [math.nan, math.nan]],
    }
    assert repr({name: number_PG.tolist() for name, number_PG in numbers.items()}) == repr(expected)
    with pytest.raises(RunError, match="its number 'words' is nan"):
        make(names).wait(groups(["bad"]), meter)
    with pytest.raises(RunError, match="the name of its number 'mean' is reserved; rename it"):
        make(names).wait(groups(["mean"]), meter)


def test_feedback_of_a_reward_is_a_text_of_the_completion(tmp_path):
    source = """
def f(completion, row):
    return 0.5, dict(words=1, feedback="too short") if completion == "a" else {}
"""
    made = groups(["a", "b"])
    total, _, numbers = make((f"{write(tmp_path / 'mine.py', source)}:f",)).wait(made, Meter())
    assert total.tolist() == [[0.5, 0.5]] and list(numbers) == ["f/words"]
    assert [sample.feedback for sample in made[0]] == ["too short", ""]


def test_exception_in_a_user_check_is_bad_input(tmp_path):
    code = "def f(completion, row): return 1.0\ndef check(row): row['gone']\nf.check = check\n"
    with pytest.raises(ValueError, match=r"rows.jsonl:1: 'gone' \(--reward .*:f\)"):
        row_check(Args(reward=(f"{write(tmp_path / 'mine.py', code)}:f",)))(ROW)


@pytest.mark.slow
def test_async_functions_run_concurrently_and_time_out_separately(tmp_path):
    code = """
import asyncio
here, together = 0, asyncio.Event()
async def meet(completion, row):
    global here
    here += 1
    if here == 3: together.set()
    await together.wait()
    if completion == "late": await asyncio.sleep(9999)
    return 1.0
"""
    rewards = make((f"{write(tmp_path / 'mine.py', code)}:meet",), max_errors=0.5, seconds=1)
    total, _, _ = rewards.wait(groups(["a", "late", "b"]), meter := Meter())
    assert total[0, [0, 2]].tolist() == [1, 1] and total[0, 1].isnan()
    assert meter.reduce() == {"reward/error_fraction": 1 / 3, "reward/timeout_fraction": 1 / 3}


def test_row_selects_its_reward():
    answers = dict(gsm8k="18", math=r"\frac{1}{2}", exact_match="three")
    rows = [dict(reward=name, answer=text, _source="a:1") for name, text in answers.items()]
    texts = ("#### 18", r"so \boxed{0.5}", "three")
    batch = [[Completion([0], [True], text=text, row=row) for text in texts] for row in rows]
    rewards, meter = make(("by_row", "format"), weights=(2.0, 1.0), rows=rows), Meter()
    total, parts, _ = rewards.wait(batch, meter)
    assert list(parts) == ["exact_match", "gsm8k", "math", "format"]
    assert [*rewards.weights.values()] == [2, 2, 2, 1]
    assert parts["gsm8k"][0].tolist() == [1, 0, 0] and parts["gsm8k"][1:].isnan().all()
    assert parts["math"][1].tolist() == [0, 1, 0] and parts["exact_match"][2].tolist() == [0, 0, 1]
    assert total.tolist() == [[3, 0, 0], [1, 2, 0], [1, 0, 2]]
    assert rewards.first(parts).tolist() == torch.eye(3).tolist()
    assert meter.reduce()["reward/error_fraction"] == 0
    for name in ("gsm9k", None, [1], "a.py:f"):
        with pytest.raises(ValueError, match=f"a:4: column reward is {re.escape(repr(name))}, and"):
            make(("by_row",), rows=[*rows, dict(reward=name, answer="1", _source="a:4")])
    with pytest.raises(ValueError, match="reads column answer"):
        row_check(Args(reward=("by_row",)))(dict(reward="gsm8k", _source="a:5"))


@pytest.mark.slow
def test_math_timeout_is_wrong_and_unparsable_gold_answer_is_an_error():
    """math-verify's time-outs are signals, which two of the three hanging answers ignore."""
    rows = [dict(answer="2", _source="a:1"), dict(answer="?", _source="a:2")]
    hanging = ("9^{9^{9^9}}", "(10^8)!", r"\sum_{i=1}^{10^9} \frac{1}{i^2+1}")
    texts = [rf"\boxed{{{answer}}}" for answer in ("2", *hanging)]
    batch = [[Completion([0], [True], text=text, row=row) for text in texts] for row in rows]
    rewards = make(("math",), max_errors=0.5, rows=rows, seconds=2)
    total, _, _ = rewards.wait(batch, meter := Meter())
    assert total[0].tolist() == [1, 0, 0, 0] and total[1].isnan().all()
    assert meter.reduce() == {"reward/error_fraction": 0.5, "reward/timeout_fraction": 3 / 8}


def test_environment_rewards_and_errors_are_counted():
    rewards = make(("environment", "format"), max_errors=0.5, environment="calculator")
    meter = Meter()
    ((one, two, three),) = batch = groups(["#### 1", "", ""])
    one.turn_rewards, two.turn_rewards = [(3, 0.5), (9, 1.0)], [(3, math.inf)]
    three.error = "step 2: KeyError: 'x'"
    total, parts, _ = rewards.wait(batch, meter)
    assert parts["environment"][0, 0] == 1.5 and total[0, 0] == 2.5 and total[0, 1:].isnan().all()
    assert meter.reduce()["reward/error_fraction"] == 3 / 6


def test_failed_episode_counts_in_the_rewards_of_its_row_only():
    rows = [dict(reward=name, answer="1", _source="a:1") for name in ("gsm8k", "exact_match")]
    batch = [[Completion([0], [True], text=t, row=row) for t in "12"] for row in rows]
    batch[0][1].error = batch[1][1].error = "the agent died"
    rewards, meter = make(("by_row",), rows=rows, max_errors=0.5), Meter()
    rewards.wait(batch, meter)
    assert meter.reduce()["reward/error_fraction"] == 2 / 4


def test_rank_without_groups_returns_empty_rewards():
    total, parts, _ = make(("gsm8k",)).wait([], Meter())
    assert total.numel() == 0 and parts["gsm8k"].numel() == 0


def test_bad_names_are_refused(tmp_path):
    with_columns = "\ndef f(completion, row): return 1.0\nf.columns = 'answer'\n"
    file = write(tmp_path / "mine.py", f"x = 1{with_columns}")
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name\n")
    for name, what in (
        ("gsm9k", f"unknown; there are {', '.join(BUILT_IN)}, by_row, environment"),
        (f"{tmp_path}/none.py:f", "no file"),
        (f"{tmp_path}/mine.py", r"unknown; there are .*, path/to/file.py:function, model:PATH"),
        (f"{file}:x", "has no function x"),
        (f"{file}:f", "its attribute columns is 'answer'; write a tuple of names"),
        (f"{broken}:f", "fails to import"),
    ):
        with pytest.raises(ValueError, match=what):
            load_reward(name)
    with pytest.raises(ValueError, match="a:1: --reward gsm8k reads column answer; the row has "):
        row_check(Args(reward=("gsm8k",)))(dict(prompt="", _source="a:1"))
    with pytest.raises(ValueError, match="the names must differ"):
        make(("gsm8k", "gsm8k"))


def test_only_math_needs_math_verify(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    lacking = r"--reward math needs .* math-verify, .* not installed; pip install '\.\[math\]'$"
    row = dict(answer="18", reward="math", format="<a>", _source="a:1")
    with pytest.raises(ValueError, match=f"^{lacking}"):
        row_check(Args(reward=("exact_match", "math")))
    with pytest.raises(ValueError, match=lacking):
        row_check(Args(reward=("by_row",)))(row)
    others = [*REWARDS]
    row_check(Args(reward=others))(row)
    batch = [[Completion([0], [True], text="#### 18", row=row)]]
    total, parts, _ = make(others, rows=[row]).wait(batch, Meter())
    assert list(parts) == others and total.item() >= 1
