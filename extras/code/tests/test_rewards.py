# ruff: noqa: E501 (the programs)
"""The code rewards: every form of tests, and programs that try to forge a verdict. Each verdict is
that of a real judge and a real program."""

import gc
import itertools
import json
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from in_process import Args
from processes import PATIENCE, descendants, kill, until

from common.metrics.meter import Meter
from common.packs.sample import Completion
from common.rewards.registry import OTHERS
from common.rewards.total import Rewards
from extras.code import reward as code_reward
from extras.code.cases import CallTest, StdinTest, parse_tests
from extras.code.program_text import extract_program
from extras.code.reward import fraction, same_output
from extras.code.sandbox import program
from extras.code.sandbox.program import Limits, Outcome
from tests.rewards.scored import require_no_answers_in_thoughts

pytestmark = pytest.mark.skipif(program.problem() is not None, reason=str(program.problem()))
LIMITS = Limits(seconds=PATIENCE)
SHORT = Limits(seconds=0.2)  # for endless programs


def fenced(code: str) -> str:
    return f"Let me think.\n```python\n{code}\n```\nDone."


def row(**columns) -> dict:
    return dict(_source="train.jsonl:7", **columns)


def asserts(*tests: str) -> dict:
    return row(tests=[*tests])


def passes(*arguments, **limits) -> float:
    reward, _ = code_reward.passes(*arguments, **limits)
    return reward


# ---- every form: (columns, a program that passes, one that does not) ----

STDIN = row(tests=[dict(input="1 2\n", output="3\n"), dict(input="5 5", output="10")])
CALLS = row(tests=json.dumps([
    dict(function="pairs", args=[[3, 1]], result=[[1, 3], {"n": 2}]),
    dict(function="pairs", args=[], kwargs=dict(values=[2]), result=[[2], {"n": 1}]),
]))  # fmt: skip
APPS_STDIN = row(input_output=json.dumps(dict(inputs=["2\n", ["3", ""]], outputs=["4\n", ["9"]])))
APPS_CALL = row(input_output=dict(inputs=[[2], [3]], outputs=[[4], [9]], fn_name="square"))
MBPP = row(
    text="Write a function to find the similar elements.",
    test_list=[
        "assert set(similar((3, 4, 5), (5, 4))) == {4, 5}",
        "assert similar((1,), (2,)) == ()",
        "assert math.isclose(sum(similar((0.5,), (0.5,))), half)",
    ],
    test_setup_code="half = 0.5",
    test_imports=["import math"],
    challenge_test_list=[],
)
HUMANEVAL_PROMPT = '''import math


def poly(xs: list, x: float):
    return xs[0] + xs[1] * x


def find_zero(xs: list):
    """Finds x such that poly(x) = 0."""
'''
HUMANEVAL = row(
    prompt=HUMANEVAL_PROMPT,
    entry_point="find_zero",
    test="""
def check(candidate):
    import random

    for coeffs in ([random.randint(1, 9), random.randint(1, 9)] for _ in range(20)):
        assert math.fabs(poly(coeffs, candidate(list(coeffs)))) < 1e-4
    try:
        candidate([])
        assert False, "expected an IndexError"
    except IndexError:
        pass
""",
)
ROOT_OF_LINE = "    return -xs[0] / xs[1]\n"
FORMS = {
    "stdin": (STDIN, "print(sum(map(int, input().split())))", "print(3)"),
    "long stdout": (row(tests=[dict(input="", output="x" * 1_500_000)]), "print('x' * 1_500_000)", "print('x')"),
    "calls": (CALLS, "def pairs(values): return (tuple(sorted(values)), {'n': float(len(values))})",
              "def pairs(values): return (values, {'n': len(values)})"),
    "apps stdin": (APPS_STDIN, "print(int(input()) ** 2, end='  \\n\\n')", "print(4)"),
    "apps call": (APPS_CALL, "def square(x: List[int]): return x * x", "def square(x): return 4"),
    "apps method with names of typing": (
        APPS_CALL, "from __future__ import annotations\nimport typing\nclass Solution:\n"
        "    def square(self, x: List[int]) -> Optional[int]: return typing.cast(int, x * x)",
        "class Solution:\n    def square(self, x: Listt[int]): return x * x"),
    "mbpp": (MBPP, "def similar(a, b): return tuple(set(a) & set(b))", "def similar(a, b): return set(a) & set(b)"),
    "mbpp built-in name": (
        row(test_list=["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"]),
        "def sum(a, b): return __builtins__['sum'](d for d in range(1, min(a, b)) if a % d == b % d == 0)",
        "def sum(a, b): return 6"),
    "built-in name on one side": (
        row(test_list=["assert set(filter([1, 2])) == set([1])", "assert [3] == filter([3, 4])"]),
        "def filter(x): return x[:1]", "def filter(x): return x\ndef set(x): return 0"),
    "humaneval body": (HUMANEVAL, ROOT_OF_LINE, "    return 0\n"),
    "humaneval function": (HUMANEVAL, fenced("def find_zero(xs):\n" + ROOT_OF_LINE), fenced("def f(): pass")),
    "humaneval from __future__": (
        HUMANEVAL, fenced("from __future__ import (\n    annotations,\n)\ndef find_zero(xs: Listt):\n" + ROOT_OF_LINE),
        fenced("from __future__ import annotations\ndef find_zero(xs): pass")),
    "humaneval stub without a body": (
        row(prompt="def f(x):\n    # adds one\n", entry_point="f", test="def check(c):\n    assert c(1) == 2\n"),
        fenced("def f(x):\n    return x + 1"), fenced("def f(x): return x")),
    "humaneval helper of the stub": (
        row(prompt="def twice(x): return 2 * x\ndef f(x):\n", entry_point="f",
            test="def check(c):\n    assert twice(c(1)) == 4\n"), "    return 2", "    return 3\ndef twice(x): return 4"),
    "humaneval prose behind": (HUMANEVAL, ROOT_OF_LINE + "\nIt's the root of a line.\nFor others not.", "It's -xs[0] / xs[1]"),
    "humaneval cut off": (HUMANEVAL, ROOT_OF_LINE + "\n\ndef other(x):\n    if x ==", "    return 1\n\n\ndef other(x):"),
    "type of LiveCodeBench": (row(tests=[dict(input="3\n", output="6", testtype="stdin")]), "print(2 * int(input()))", "print(3)"),
    "state, prints and main": (
        asserts("assert f() == (1, '')", "assert f() == (2, '')"),
        "import dataclasses, sys\nprint('hello')\nn = 0\nrest = sys.stdin.read()\n"
        "@dataclasses.dataclass\nclass A: x: 'int'\ndef f():\n    global n\n    n += A(1).x\n    print(n)\n    return n, rest\n"
        "if __name__ == '__main__': n = 100", "def f(): return 1, ''"),
    "mixed": (
        row(tests=["assert f(1) == 2", dict(function="f", args=[2], result=3), dict(input="", output="")]),
        "def f(x): return x + 1", "def f(x): return 2"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_right_program_passes_and_wrong_program_fails(form):
    columns, right, wrong = FORMS[form]
    assert passes(right, columns, LIMITS) == 1, "the right program fails"
    assert passes(wrong, columns, LIMITS) == 0, "the wrong program passes"
    if form in ("stdin", "calls", "humaneval body"):
        assert passes("", columns, LIMITS) == passes("no ( program", columns, LIMITS) == 0


def test_nulls_of_a_table_are_ignored():
    """A table gives every row all columns, and every test the keys of all tests."""
    empty = dict(function=None, args=None, kwargs=None, result=None, input=None, output=None)
    tests = [empty | dict(input="1", output="2"), empty | dict(function="f", args=[1])]
    columns = dict.fromkeys(["input_output", "test_list", "test"]) | dict(tests=tests)
    assert parse_tests(row(**columns)) == [StdinTest("1", "2"), CallTest("f", [1], {}, [None])]


# ---- what a test may do: (test, a program that passes, one that does not) ----

TESTS = {
    **{f"exception, as the special built-in {name}": (
        f"try:\n    raises{i}()\nexcept BaseException as e:\n    kind = type(e).__name__\nassert kind == {name!r}",
        f"def raises{i}(): raise {error}", f"def raises{i}(): raise IndexError")
       for i, (name, error) in enumerate((
           ("KeyError", "type('Own', (KeyError,), {})('x')"), ("UnicodeError", "type('Wide', (UnicodeDecodeError,), {})('utf-8', b'', 0, 1, 'x')"),
           ("Exception", "type('Any', (Exception,), {})('x')"), ("StopIteration", "StopIteration('x')"), ("SystemExit", "SystemExit(0)")))},
    "KeyError": (
        "try:\n    look('k')\nexcept KeyError as e:\n    args = e.args\nassert args == ('k',)",
        "def look(x): return {}[x]", "def look(x): return {}[x + 'k']"),
    "helpers": (
        "def twice(x):\n    return minus(minus(x))\nassert all(twice(i) == i for i in range(5)) and {minus(1): 2}[-1] == 2",
        "def minus(x): return -x", "def minus(x): return x + 1"),
    "arguments are copies": (
        "x = [2, 1]\nassert ordered(x) == [1, 2] and x == [2, 1]",
        "def ordered(x):\n    x.sort()\n    return x", "def ordered(x):\n    x.clear()\n    return x"),
    "classes": (
        "s = Stack(3)\ns.push(4)\ns.push(s.items[0])\nassert s.pop() == 3 and s.items == [3, 4] and both([s, s], more=s) == 21",
        "class Stack:\n    def __init__(self, x): self.items = [x]\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\ndef both(stacks, more): return sum(sum(s.items) for s in [*stacks, more])",
        "class Stack:\n    def __init__(self, x): self.items = []\n    push = pop = print"),
    "objects are equal to themselves": (
        "a = thing(1)\nassert a == a and a != thing(2) and thing(3) == 4", "def thing(x): return 4 if x == 3 else object()",
        "def thing(x): return 4"),
    "method of a result": (
        "assert run(make().get) == 1", "class make:\n    def get(self): return 1\ndef run(f): return f()",
        "def make(): return {}\ndef run(f): return 1"),
    "a range is no list": ("assert up_to(3) == [0, 1, 2]", "def up_to(n): return list(range(n))", "def up_to(n): return range(n)"),
    "a generator is no JSON list": (
        dict(function="listed", args=[2], result=[0, 1]), "def listed(n): return [0, 1]", "def listed(n): yield from [0, 1]"),
    **{f"{name} passed on": (f"assert total_{name}({name}s(4)) == 2", f"def {name}s(n): return {code}\ndef total_{name}(xs): return sum(xs)",
                             f"def {name}s(n): return {code}\ndef total_{name}(xs): return 0")
       for name, code in dict(generator="(i for i in range(n) if i % 2 == 0)", range="range(0, n, 2)", map="map(int, ['0', '2'])",
                              key="{0: 1, 2: 1}.keys()", iterator="iter([0, 2])").items()},
    "a subclass is its built-in type": (
        "assert [type(x) for x in special()] == [dict, tuple, bytes, str]", "from collections import *\nText = type('Text', (str,), {})\n"
        "def special(): return [Counter('a'), namedtuple('P', 'x')(1), bytearray(b'a'), Text('a')]", "def special(): return [{}, (), b'', 1]"),
    "exception passed on": (
        "try:\n    same(1)\nexcept ValueError as error:\n    same(error)\nassert same(2) == 2",
        "def same(x): return x", "def same(x): raise ValueError"),
    "long questions": ("x = list(range(300_000))\nassert sum(few(x)) == 0", "def few(x): return [0, 0]", "def few(x): return x"),
    "long answers": (f"assert long() == '{'x' * 1_500_000}'", "def long(): return 'x' * 1_500_000", "def long(): return 'x'"),
}  # fmt: skip


def test_each_test_has_its_own_verdict():
    """One program has the functions of all tests. The last test shows that it has not ended."""
    tests, right, wrong = zip(*TESTS.values(), strict=True)
    for programs, passed in ((right, True), (wrong, False)):
        source = "\n".join([*programs, "def lives(): return True"])
        found = code_reward.results(source, row(tests=[*tests, "assert lives()"]), LIMITS, False)
        verdicts = dict(zip([*TESTS, "lives"], (verdict for _, verdict in found), strict=True))
        assert verdicts == dict.fromkeys(TESTS, passed) | dict(lives=True)


# ---- exceptions of the program ----

RAISES = """
def stop(*args): raise StopIteration
def stop_first(x):
    if x == 1: raise StopIteration
    return x
class Own(StopIteration): pass
def own(*args): raise Own(1)
def stop_async(*args): raise StopAsyncIteration
def close(*args): raise GeneratorExit
def exits(*args): raise SystemExit(0)
def index(*args): raise IndexError
def key(*args): raise KeyError(1)
def attribute(*args): raise AttributeError
def kind(*args): raise TypeError
def value(*args): raise ValueError("no")
class Stack:
    def __init__(self): self.items = []
    def pop(self): return self.items.pop()
    @property
    def top(self): raise StopIteration
def lives(): return True
"""
STEERED = [  # tests that an exception of the program would end early, or give a default
    "assert all(map(stop, [1, 2, 3]))", "assert not any(map(stop, [1, 2]))", "assert all(map(own, [1]))",
    "assert all(map(stop_first, [1, 2]))", "for y in map(stop, [1, 2]):\n    assert y == 99",
    "assert all(a == b for a, b in zip(map(stop, [1, 2]), [2, 3]))", "assert next(map(stop, [1]), None) is None",
    "assert list(filter(stop, [1, 2])) == []", "assert sum(map(stop, [1])) == 0", "assert [*map(stop, [1])] == []",
    "assert dict(zip([1], map(stop, [1]))) == {}", "assert max(map(stop, [1]), default=3) == 3", "assert sorted(map(stop, [2])) == []",
    "assert {*map(stop, [1])} == set()", "assert ''.join(map(stop, [1])) == ''", "assert list(enumerate(map(stop, [1]))) == []",
    "assert 5 not in map(stop, [1])", "assert not [x for x in map(stop, [1]) if x != 2]", "assert all(x for x in map(stop, [1]))",
    "for y in iter(stop, 7):\n    assert y == 1", "assert list(iter(lambda: stop(1), 7)) == []",
    "import itertools\nassert all(itertools.starmap(stop, [(1,)]))", "import itertools\nassert list(itertools.takewhile(stop, [1])) == []",
    "import itertools\nassert list(itertools.accumulate([1, 2], stop)) == [1]", "import itertools\nassert not list(itertools.groupby([1], stop))",
    "import functools\nassert all(map(functools.partial(stop, 1), [1]))", "def helper(x):\n    return stop(x) == 2\nassert all(map(helper, [1]))",
    "assert all(map(lambda x: stop(x) == 2, [1]))", "s = Stack()\nassert all(map(lambda x: s.top == x, [1]))",
    "class It:\n    def __iter__(self): return self\n    __next__ = stop\nassert list(It()) == []",
    "class It:\n    def __iter__(self): return self\n    def __next__(self): return stop()\nfor x in It():\n    assert x == 1",
    "class Seq:\n    def __getitem__(self, i): return index(i)\nassert all(x == 1 for x in Seq())",
    "class Seq:\n    def __getitem__(self, i): return index(i)\nassert list(reversed(type('S', (Seq,), dict(__len__=lambda s: 2))())) == []",
    "class Seq:\n    def __getitem__(self, i): return stop(i)\nassert 3 not in Seq()",
    "class Sized:\n    def __length_hint__(self): return kind()\n    def __iter__(self): return iter([1])\nassert list(Sized()) == [1]",
    "class T:\n    v = property(lambda self: attribute())\nassert getattr(T(), 'v', 3) == 3 and not hasattr(T(), 'v')",
    "class T:\n    v = property(lambda self: attribute())\n    def __getattr__(self, name): return 3\nassert T().v == 3",
    "import collections.abc\nclass M(collections.abc.Mapping):\n    __getitem__ = lambda self, k: key(k)\n    __iter__ = __len__ = None\nassert M().get(1, 2) == 2 and 1 not in M()",
    "import collections\nclass D(dict):\n    def __missing__(self, k): return key(k)\nassert collections.ChainMap(D(), {1: 2})[1] == 2",
    "import asyncio\nclass A:\n    def __aiter__(self): return self\n    async def __anext__(self): return stop_async()\n"
    "async def go():\n    async for x in A():\n        assert x == 1\ngo = go()\ntry:\n    go.send(None)\nexcept StopIteration:\n    pass",
    "import threading\nt = threading.Thread(target=value)\nt.start()\nt.join()\nassert True",
    "class G:\n    def __del__(self): assert value() == 1\ng = G()\ndel g\nassert True",
    "def f():\n    try:\n        return value()\n    finally:\n        return 1\nassert f() == 1",
    "def again(x):\n    try:\n        return stop(x)\n    except ValueError:\n        return 1\nassert all(map(again, [1]))",
    "def again(x):\n    try:\n        return stop(x)\n    except Exception:\n        raise\nassert all(map(again, [1]))",
    "def again(x):\n    try:\n        return stop(x)\n    except Exception as error:\n        raise error\nassert all(map(again, [1]))",
    "import contextlib\ndef again(x):\n    with contextlib.suppress(ValueError):\n        return stop(x)\nassert all(map(again, [1]))",
    "import contextlib\nwith contextlib.suppress(ValueError):\n    assert all(map(stop, [1]))",
    "try:\n    assert all(map(stop, [1]))\nexcept ValueError:\n    pass",
    "try:\n    assert all(map(stop, [1])) and value()\nexcept ValueError:\n    pass",
    "assert all(map(close, [1]))", "assert all(map(exits, [1]))", "assert all(map(stop_async, [1]))",
]  # fmt: skip
CAUGHT = [  # tests that expect an exception
    "try:\n    value(-1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'",
    "try:\n    index()\nexcept (KeyError, IndexError):\n    pass\nelse:\n    assert False", "try:\n    key()\nexcept:\n    pass\nassert True",
    "def raises(kind, call, *args):\n    try:\n        call(*args)\n    except kind:\n        return True\n    return False\nassert raises(ValueError, value, 1) and raises(LookupError, index)",
    "import contextlib\nwith contextlib.suppress(ValueError):\n    value()\n    assert False",
    "import contextlib\n@contextlib.contextmanager\ndef raises(kind):\n    try:\n        yield\n    except kind:\n        return\n    assert False\n"
    "with raises(ValueError):\n    value()\nwith raises(StopIteration):\n    stop()",
    "import contextlib\nwith contextlib.ExitStack() as stack:\n    stack.enter_context(contextlib.suppress(KeyError))\n    key()\nassert True",
    "class Raises:\n    def __enter__(self): return self\n    def __exit__(self, kind, error, trace):\n        self.error = error\n        return True\n"
    "with Raises() as caught:\n    kind()\nassert type(caught.error) is TypeError",
    "import unittest\ncase = unittest.TestCase()\nwith case.assertRaises(ValueError) as caught:\n    value()\nassert str(caught.exception) == 'no'",
    "import unittest\ncase = unittest.TestCase()\ncase.assertRaises(ValueError, value, -1)\ncase.assertRaisesRegex(ValueError, 'n.', lambda: value())\nassert True",
    "try:\n    all(stop(x) for x in [1])\n    assert False\nexcept RuntimeError:\n    pass", "try:\n    value()\nexcept* ValueError:\n    pass\nassert True",
    "n = 0\nwhile n < 3:\n    try:\n        stop()\n    except StopIteration:\n        n += 1\n        continue\nassert n == 3",
    "try:\n    try:\n        value()\n    except ValueError as error:\n        raise KeyError(1) from error\nexcept KeyError:\n    pass\nassert True",
    "try:\n    try:\n        value()\n    except ValueError:\n        raise\nexcept Exception:\n    pass\nassert True",
    "def f(x):\n    for i in range(3):\n        try:\n            value()\n        except ValueError:\n            return i\nassert [*map(f, [1, 2])] == [0, 0]",
    "s = Stack()\nassert hasattr(s, 'items') and not hasattr(s, 'thing') and getattr(s, 'thing', 3) == 3",
    "s = Stack()\ntry:\n    s.pop()\nexcept IndexError as error:\n    problem = error\nassert 'pop' in str(problem)",
    "import concurrent.futures\nwith concurrent.futures.ThreadPoolExecutor(1) as pool:\n    future = pool.submit(value)\n"
    "try:\n    future.result()\nexcept ValueError:\n    pass\nassert True",
]  # fmt: skip


def test_exceptions_of_the_program_do_not_steer_tests():
    """Each of them fails a test that does not catch it itself."""
    tests = asserts(*STEERED, *CAUGHT, "assert lives()")
    verdicts = [passed for _, passed in code_reward.results(RAISES, tests, LIMITS, False)]
    passed = {test for test, verdict in zip(tests["tests"], verdicts, strict=True) if verdict}
    assert passed == {*CAUGHT, "assert lives()"}


def test_first_failing_test_is_the_feedback():
    """Tests of stdin run first."""
    columns, right, wrong = FORMS["mixed"]
    assert code_reward.passes(right, columns, LIMITS) == (1, {})
    reward, beside = code_reward.passes(wrong, columns, LIMITS)
    assert reward == 0 and "CallTest(function='f', args=[2]" in beside["feedback"]
    _, beside = code_reward.passes("print(1)", columns, LIMITS)
    assert beside["feedback"].startswith("it fails StdinTest(input='', output=''")


def test_fraction_counts_passed_tests():
    assert fraction("print(3)", STDIN, LIMITS) == 0.5
    assert fraction("def similar(a, b): return ()", MBPP, LIMITS) == pytest.approx(1 / 3)
    exits = "import os\ndef square(x): return 4 if x == 2 else os._exit(0)"
    assert fraction(exits, APPS_CALL, LIMITS) == 0.5


def test_program_that_exited_passes_no_later_test():
    tests = ["try:\n    f(0)\nexcept:\n    pass\nassert True", "assert f(1) == 2"]
    program = "import os\ndef f(x): return os._exit(0) if x == 0 else 2"
    assert fraction(program, row(tests=tests), LIMITS) == 0
    assert fraction(program, row(tests=tests[1:] + tests), LIMITS) == pytest.approx(1 / 3)


# ---- values ----

VALUES = r"""[
    0, -1, 2**63, -(2**63), -(2**63) - 1, 10**5000, True, False, None, 0.5, -0.0, float("inf"), float("-inf"),
    float("nan"), 1e-320, 1j, complex(-0.0, 1), "", "é𝒳", "\ud800", "\udc00\ud800", "\x00\n\u2028", '"\\', b"",
    b"\xff\x00", [], (), {}, [1, (2, [3])], {1: "a", "1": "b", (1, 2): [3], None: 4, 2.5: 5, frozenset({1}): 6, b"x": 7},
    {"value": 1}, {"tuple": [1]}, {"error": [[], ""]}, [[[[]]]],
]"""


def test_values_cross_exactly_in_both_directions():
    same = f"for x in {VALUES}:\n    y = f(x)\n    assert type(y) is type(x) and repr(y) == repr(x)"
    sets = "for x in (set(), frozenset(), {(1, (2,)), frozenset({3})}):\n    assert type(f(x)) is type(x) and f(x) == x"
    assert passes("def f(x): return x", asserts(same, sets), LIMITS) == 1


def test_results_of_calls_are_compared_as_json():
    """A tuple is a list, an int may equal a float, a bool is no number."""
    same = [(1, 1), (1, 1.0), (1.0, 1), (True, True), (None, None), ("a", "a"), ((1, (2,)), [1, [2]]),
            ({"a": (1,)}, {"a": [1]}), (float("nan"), float("nan"))]  # fmt: skip
    other = [(True, 1), (1, True), (0, False), (None, False), ("1", 1), (b"a", "a"), ([1], [1, 2]), ({1}, [1]),
             ([True], [1]), ({1: 2}, {"1": 2}), ({"a": 1}, {"a": 1, "b": 2}), ({}, []), (0.1 + 0.2, 0.3),
             (10**400, 1e300), (1j, 1), ("", None), ([], None), (frozenset(), []), (2**53 + 1, float(2**53))]  # fmt: skip
    pairs = [*same, *other]
    program = f"nan = float('nan')\nvalues = {[value for value, _ in pairs]!r}\ndef f(i): return values[i]"
    tests = [dict(function="f", args=[i], result=expected) for i, (_, expected) in enumerate(pairs)]
    verdicts = [x for _, x in code_reward.results(program, row(tests=tests), LIMITS, False)]
    assert [pair for pair, passed in zip(pairs, verdicts, strict=True) if passed] == same


# ---- time ----


def test_tests_share_one_time_limit(monkeypatch):
    given = []

    def run(source, stdin, limits, unsafe):
        """Every input takes half a second."""
        given.append(limits.seconds)
        if limits.seconds > 0.5:
            return Outcome("ok", stdin, 0.5)
        return Outcome("time limit", "", limits.seconds)

    monkeypatch.setattr(code_reward, "run_program", run)
    tests = [dict(input=str(i), output=str(i)) for i in range(6)]
    assert fraction("", row(tests=tests), Limits(seconds=1.4)) == pytest.approx(2 / 6)
    assert given == pytest.approx([1.4, 0.9, 0.4])
    assert passes("", row(tests=tests[:2]), Limits(seconds=1.4)) == 1
    mixed = [*tests[:3], "assert f(1) == 1", dict(function="f", args=[1], result=1)]
    identity = "def f(x): return x"
    assert fraction(identity, row(tests=mixed), Limits(seconds=1.4)) == pytest.approx(2 / 5)


def test_program_is_watched_while_the_judge_computes():
    """The limit on files ends the program in the middle of a long test."""
    source = """
import threading
def work():
    for i in range(1000): open(str(i), "w").close()
def f(x):
    threading.Thread(target=work).start()
    return x
"""
    test = "import time\nassert f(1) == 1\ntime.sleep({})"
    assert passes(source, asserts(test.format(9999)), LIMITS) == 0
    assert passes(source.replace("1000", "10"), asserts(test.format(0.1)), LIMITS) == 1


# ---- stdout ----


@pytest.mark.parametrize(("text", "expected", "same"), [
    ("1 2 \n3\n\n", "1 2\n3", 1), ("1  2", "1 2", 0), ("1\n2", "1 2", 0), ("x", "X", 0),
    ("0.33333333", "0.3333333", 1), ("0.3333", "0.3333333", 0), ("a 1e3\nb", "a 1000.0005\nb", 1),
    ("0", "1e-7", 1), ("1000000.5", "1000000.9", 1), ("1000000.5", "1000003.9", 0),
    ("-0.0", "0.0", 1), ("2", "2.0", 1), ("2.0", "2", 0), ("2", "3.0", 0), ("1_0.0", "10.0", 0),
    ("nan", "nan", 1), ("nan", "1.0", 0), ("0.5", "half", 0), ("1e999", "2e999", 0),
    ("0.5 0.5", "0.5", 0), ("1  \n2\n\n\n", "1\n2", 1), ("1\r\n2", "1\n2", 1), (" 1", "1", 0),
    ("1\n\n2", "1\n2", 0), ("\n1", "1", 0), ("", "", 1), ("é\u202e𝒳", "é\u202e𝒳", 1), ("1", "", 0),
])  # fmt: skip
def test_stdout_equals_the_expected_one_up_to_blanks_at_ends_and_last_digits(text, expected, same):
    assert same_output(text, expected) == same


# ---- which block is the program ----


def program_in(completion: str, columns: dict) -> str:
    return extract_program(completion, columns, parse_tests(columns))


@pytest.mark.parametrize("completion, program", [
    ("x = 1", "x = 1"), (fenced("x = 1"), "x = 1\n"), ("```\nx = 1\n```", "x = 1\n"),
    ("first\n```python\nx = 1\n```\nbetter\n```python\nx = 2\n```\n", "x = 2\n"),
    ("```json\n{}\n```\nso\n```python\nx = 1\n```", "x = 1\n"), ("so ```python\nx = 1", "x = 1"),
    ("```python\ns = '```'\nx = 1\n```", "s = '```'\nx = 1\n"),
    ("use `x` or ```x``` here", "use `x` or ```x``` here"), ("", ""),
    ("```python\nx = 1\n```\nExample output:\n```\n6\n```\n", "x = 1\n"),
    ("```\nx = 1\n```\nExample output:\n```\nno Python\n```\n", "x = 1\n"),
    ("```python\nx = 1\n```\nand\n```python\n...no Python\n```\n", "x = 1\n"),
    ("```python3.11 title='a.py'\nx = 1\n```", "x = 1\n"),
    ("- ```python\n  x = 1\n  y = 2\n  ```", "x = 1\ny = 2\n"),
])  # fmt: skip
def test_program_is_extracted_from_the_completion(completion, program):
    assert program_in(completion, STDIN) == program


@pytest.mark.parametrize("columns, name", [
    (HUMANEVAL, "find_zero"), (APPS_CALL, "square"), (CALLS, "pairs"), (MBPP, "similar"),
    (asserts("assert Stack(1).pop() == 1"), "Stack"),
])  # fmt: skip
def test_block_that_defines_a_tested_name_is_extracted(columns, name):
    solution, usage = f"def {name}(*args): return 1\n", f"from main import {name}\nprint({name}(1))"
    for code in (
        solution,
        solution.replace(name, "helper") + f"{name} = helper\n",
        f"class Solution:\n    {solution}",
    ):
        program = program_in(fenced(code) + "\nUse it so:\n" + fenced(usage), columns)
        assert program.strip().endswith(code.strip()) and usage not in program
    assert usage in program_in(fenced("x = 1") + fenced(usage), columns)


READS = "a, b = map(int, input().split())\nprint(a + b)"
SOLVES = "import sys\n\ndef solve(text):\n    return sum(map(int, text.split()))\n\nprint(solve(sys.stdin.read()))"
NO_PROGRAMS = {  # a program, and a block behind it that is none
    "call": (SOLVES, 'print(solve("1 2"))'),
    "replaced stdin": (
        SOLVES,
        "import io, sys\nsys.stdin = io.StringIO('1 2')\nprint(solve(sys.stdin.read()))",
    ),
    "test function": (SOLVES, "def test():\n    assert solve('1 2') == 3\n\ntest()"),
    "other program": (READS, "print(1 + 2)"),
    "loop over cases": (
        READS,
        "for text, result in [('1 2', 3)]:\n    assert sum(map(int, text.split())) == result",
    ),
    "renamed input": ("import sys\ninput = sys.stdin.readline\n" + READS, "print(3)"),
}


@pytest.mark.parametrize("kind", NO_PROGRAMS)
def test_program_for_stdin_is_no_test_or_example_behind_it(kind):
    program, other = NO_PROGRAMS[kind]
    assert program_in(fenced(program) + fenced(other), STDIN) == program + "\n"
    assert program_in(fenced(READS) + fenced(program) + fenced(other), STDIN) == program + "\n"
    assert program_in(fenced(other) + fenced(program), STDIN) == program + "\n"
    assert program_in(fenced(other), STDIN) == other + "\n"


def test_the_last_block_that_is_a_program_is_extracted():
    """The tests do not show a name that the program must define."""
    prints, silent = "def f():\n    return 7\n\nprint(f())", row(tests=[dict(input="", output="7")])
    assert program_in(fenced(prints) + fenced("print(7)"), silent) == "print(7)\n"
    for other in ("assert f() == 7", "7", "# 7", "result = 7"):
        assert program_in(fenced(prints) + fenced(other), silent) == prints + "\n"
    columns = row(tests=[dict(function="A.f", args=[], result=1)])
    assert program_in(fenced("class A: f = int") + fenced("A.f("), columns) == "class A: f = int\n"


def test_prompt_is_prepended_only_if_it_is_a_stub():
    body, message = "    return 0", [dict(role="user", content="x")]
    assert program_in(body, HUMANEVAL) == HUMANEVAL_PROMPT + "\n" + body
    for prompt in ("Write find_zero.", message, "def other():\n    pass\n", None):
        assert program_in(body, HUMANEVAL | dict(prompt=prompt)) == body
    assert program_in(body, STDIN | dict(prompt=HUMANEVAL_PROMPT)) == body


@pytest.mark.parametrize("text", [
    " " * 100_000 + "x", "\t" * 100_000, "- " * 50_000, "1" * 100_000, (" " * 1000 + "\n") * 100,
    "```\n" * 30_000, " ```x\n" * 20_000,
])  # fmt: skip
def test_blocks_are_found_in_linear_time(text):
    """In quadratic time this would take minutes."""
    program_in(text, STDIN)
    same_output(text, text + "x")


@pytest.mark.parametrize("name", [n for n, place in OTHERS.items() if ".code." in place])
def test_thoughts_are_no_answers(name):
    require_no_answers_in_thoughts(name, "```python\nprint(18)\n```", found_anywhere=True)


# ---- tests that are malformed or cannot run ----


@pytest.mark.parametrize("columns, message", [
    ({}, "no tests: expected one of the columns input_output, tests, test_list, test"),
    (dict(tests="[]"), "tests: empty"), (dict(tests="[{"), "tests: "),
    (dict(tests="[" * 100_000), "tests: "), (dict(tests=3), "tests: 'int' object is not iterable"),
    (dict(tests=["assert f(1) == 1", 3]), "source: Input should be a valid string"),
    (dict(tests=["assert f(1) == "]), "tests: invalid syntax"), (dict(tests=["f(1)"]), "no assert"),
    (dict(tests=["assert f('\0')"]), "null bytes"),
    (dict(tests=[dict(input="1", output="1", testtype="functional")]), "testtype: Unexpected"),
    (dict(tests=[dict(input="1")]), "output: Field required"),
    (dict(tests=[dict(function="f", args=[1])]), "lacks result"),
    (dict(tests=[dict(function="f(", args=[], result=1)]), "tests: '\\(' was never closed"),
    (dict(input_output="x"), "input_output: "), (dict(input_output=[]), "input_output: "),
    (dict(input_output=dict(inputs=["1"], outputs=[])), "input_output: zip"),
    (dict(input_output=dict(inputs=[1], outputs=[1], fn_name="f")), "args: Input should be"),
    (dict(input_output=dict(inputs=[[1]], outputs=[1], fn_name="f()")), "'f\\(\\)' is not a name"),
    (dict(test_list=["assert f(1"]), "test_list: "),
    (dict(test_list=["assert f(1)"], test_setup_code="x ="), "test_list: invalid syntax"),
    (dict(test_list=["assert f(1)"], test_imports="import math"), "test_list: "),
    (dict(test="def check(candidate): pass"), "None is not a name"),
    (dict(test="assert f(1)", entry_point="f"), r"does not define check\(candidate\)"),
])  # fmt: skip
def test_malformed_rows_are_refused_by_name(columns, message):
    with pytest.raises(ValueError, match=f"^train.jsonl:7: .*{message}"):
        parse_tests(row(**columns))


@pytest.mark.parametrize("columns, message", [
    (dict(tests=["assert 1 == 1"]), "it calls no function of the program"),
    (dict(tests=["import nothing_like_this\nassert f(1)"]), "ModuleNotFoundError"),
    (dict(tests=["assert f(1) == y"]), "it needs the value of y, which it does not define"),
    (dict(tests=["assert isinstance(f(1), Thing)"]), "it needs the value of Thing"),
    (dict(tests=["try:\n    f(1)\nexcept Own:\n    pass\nassert 1"]), "it needs the value of Own"),
    (dict(tests=["assert f(lambda x: x) == 1"]), "a function cannot be passed to the program"),
    (dict(tests=["try:\n    f(open)\nexcept TypeError:\n    pass\nassert 1"]), "cannot be passed to the program"),
    (dict(test_list=["assert f(1)"], test_setup_code="import nothing_like_this"), "ModuleNotFoundError"),
])  # fmt: skip
def test_malformed_tests_are_errors(columns, message):
    with pytest.raises(ValueError, match=f"^train.jsonl:7: the test cannot run: .*{message}"):
        passes("def f(x): return x", row(**columns), LIMITS)


# ---- hostile programs ----

FORGED = json.dumps({"value": True})
HOSTILE = {
    "prints the right answer and fails": "print(7, flush=True)\n1 / 0",
    "prints the right answer and never ends": "print(7, flush=True)\nwhile True: pass",
    "exits hard": "import os\nos._exit(0)",
    "exits when called": "import os, sys\ndef f(x): sys.exit(0)",
    "prints": "print('all tests passed')\nprint('OK')\ndef f(x): print('passed')",
    "equals everything": """
class All(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __gt__ = __le__ = __ge__ = __eq__
    def __hash__(self): return 0
    def __bool__(self): return True
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
    def __sub__(self, other): return All()
    __abs__ = __rsub__ = __sub__
def f(x): return All()
print(All())
""",
    "a string that equals everything": """
class All(str):
    def __eq__(self, other): return True
    def __str__(self): return '8'
    def __len__(self): return 7
    __hash__ = str.__hash__
def f(x): return All()
print(All('x'))
""",
    "an object that equals everything": """
class All:
    def __eq__(self, other): return True
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
def f(x): return All()
""",
    "a list that equals everything": """
class All(list):
    def __eq__(self, other): return True
    def __len__(self): return 1
    def __iter__(self): return iter([7])
    def __getitem__(self, i): return 7
def f(x): return All()
""",
    "patched built-ins": """
import builtins
builtins.AssertionError = type('Quiet', (Exception,), {})
builtins.isinstance = lambda *a: True
builtins.all = builtins.any = builtins.set = lambda *a: True
builtins.abs = lambda x: 0
builtins.print = lambda *a: None
import math, json, sys
math.isclose = lambda *a, **k: True
json.dumps = lambda *a, **k: '{"value": true}'
json.loads = lambda *a, **k: {"call": "f"}
def abs(x): return 0
def isclose(*a, **k): return True
def f(x): return 0
""",
    "patched server": """
import child, sys
child.encode = lambda *a: True
def f(x): return 0
""",
    "own check": "def check(candidate): pass\ndef judge(*a): return True\nclass StandIn: pass\n"
    "def f(x): return 0",
    "a forged question": """
import os
def f(x): return __ask__({"call": "judge"})
""",
    "a forged verdict of a broken test": """
def f(x): raise NameError("name 'f' is not defined in the test")
""",
    "an exception to be counted as the test's": "def f(x):\n    import nothing_like_this",
    "reads its own requests": """
import os, sys
def f(x):
    for fd in range(3, 64):
        try: os.set_blocking(fd, False); print(os.read(fd, 1 << 16))
        except OSError: pass
    return 0
""",
    "walks the stack": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for name in list(frame.f_locals): frame.f_locals[name] = True
        frame.f_globals['decode'] = frame.f_globals['encode'] = lambda *a: True
        frame = frame.f_back
    return 0
""",
    "deletes the answer": "import gc, sys\ndef f(x):\n    for o in gc.get_objects():\n"
    "        if type(o) is dict and 'send' in o: o.clear()\n    return 0",
    "a thread that answers": f"""
import os, threading, time
def work():
    while True:
        for fd in range(3, 20):
            try: os.write(fd, b'{FORGED}\\n')
            except OSError: pass
threading.Thread(target=work, daemon=True).start()
def f(x): return 0
""",
    "answers that are no values": """
import itertools, os
bodies = itertools.cycle([b'{"set": [[]]}', b'{"a": 1}', b'{"int": "x"}', b'{"complex": [1, 2, 3]}', b'{"dict": [1]}',
                          b'{"object": 1, "b": 2}', b'{"object": 7}'])
def f(x):
    for fd in range(3, 64):
        try: os.write(fd, b'{"value": ' + next(bodies) + b'}\\n')
        except OSError: pass
    return 0
""",
    "a long answer of brackets": """
import os
def f(x):
    for fd in range(3, 64):
        try: os.write(fd, b'[' * 1_000_000 + b'\\n')
        except OSError: pass
    return 0
""",
    "keys that collide": "def f(x): return dict.fromkeys(k * (2**61 - 1) for k in range(1, 3_000))",
    "a list in itself": "def f(x):\n    x = [7]\n    x.append(x)\n    return x",
    "names of the judge": "def f(x): raise type('Ended', (BaseException,), {})(7)",
    "sleeps when called": "import time\ndef f(x): time.sleep(9999)",
    "has f as an instance": "class F:\n    def __call__(self, x): return self\n"
    "    def __eq__(self, o): return True\nf = F()",
}
KINDS = {  # several tests share the processes of a program and its judge
    "stdin": row(tests=[dict(input="5\n", output="7\n")]),
    "calls": row(
        tests=[
            dict(function="f", args=[5], result=7),
            dict(function="f", args=[5], result=[7]),
            "assert f(5) == 7",
            "assert abs(f(5) - 7) < 1e-6",
            "assert not f(5) != 7 and set([f(5)]) == {7}",
        ]
    ),
    "humaneval": row(
        entry_point="f",
        prompt='def f(x):\n    """Gives 7."""\n',
        test="def check(candidate):\n    assert candidate(5) == 7\n",
    ),
}


ENDLESS = {"prints the right answer and never ends", "sleeps when called"}


@pytest.fixture(scope="session")
def hostile_rewards() -> dict[tuple[str, str], float]:
    """All hostile programs on all kinds of tests, run at once: the endless ones wait together."""

    def reward_of(case: tuple[str, str]) -> float:
        name, kind = case
        return fraction(HOSTILE[name], KINDS[kind], SHORT if name in ENDLESS else LIMITS)

    cases = list(itertools.product(HOSTILE, KINDS))
    with ThreadPoolExecutor(6) as pool:
        return dict(zip(cases, pool.map(reward_of, cases), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_pass_no_test(name, hostile_rewards):
    assert {kind: hostile_rewards[name, kind] for kind in KINDS} == dict.fromkeys(KINDS, 0)


def test_honest_program_passes_the_tests_of_hostile_ones():
    program = "def f(x): return x + 2\nif __name__ == '__main__': print(f(int(input())))"
    passed = {kind: fraction(program, KINDS[kind], LIMITS) for kind in KINDS}
    assert passed == dict(stdin=1, calls=4 / 5, humaneval=1)  # one result is a list
    assert fraction("def f(x): return [x + 2]", KINDS["calls"], LIMITS) == 1 / 5


def test_program_receives_no_expected_value():
    """It finds its argument, but not the result, in all that it can read."""
    program = """
import os, sys
def f(x):
    texts = []
    for fd in range(3, 64):
        try:
            os.set_blocking(fd, False)
            texts.append(str(os.read(fd, 1 << 20)))
        except BlockingIOError:
            os.set_blocking(fd, True)
        except OSError:
            pass
    frame = sys._getframe().f_back
    while frame:
        texts += [str(frame.f_locals), str(frame.f_globals)]
        frame = frame.f_back
    found = [any(str(y) in text for text in texts) for y in (x, x + 2)]
    return x + 2 if found == [True, False] else 0
"""
    tests = [dict(function="f", args=[31335], result=31337), "assert f(31335) == 31337"]
    assert fraction(program, row(tests=tests), LIMITS) == 1


# ---- in a run ----


def samples_of(row: dict, *texts: str) -> list[Completion]:
    return [Completion([0], [True], text=text, row=row) for text in texts]


def make(rows: list[dict], name: str = "code", **flags) -> Rewards:
    args = Args(reward=(name,), reward_timeout=PATIENCE, **flags)
    return Rewards(args, rows, None, torch.device("cpu"))


def test_code_reward_requires_confinement_or_a_flag(monkeypatch):
    row = dict(tests=["assert f() == 1"], _source="a:1")
    monkeypatch.setattr(program, "problem", lambda: "the kernel has no Landlock")
    with pytest.raises(ValueError, match="^--reward code: the kernel has no Landlock; --unsafe_co"):
        make([row])
    rewards = make([row], unsafe_code_execution=True)
    batch = [samples_of(row, "def f(): return 1", "def f(): return 2")]
    assert rewards.wait(batch, Meter())[0].tolist() == [[1, 0]]


def test_a_run_waits_for_no_program_and_leaves_no_thread(tmp_path, monkeypatch):
    """That programs end with their parent is in test_sandbox.py."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads, children = set(threading.enumerate()), set(descendants(os.getpid()))
    row = dict(tests=[dict(input="", output="1")], _source="a:1")
    rewards = make([row])
    endless = samples_of(row, "open('began', 'w')\nwhile True: pass")
    rewards.begin(endless)
    until(lambda: any(tmp_path.glob("*/began")))
    assert all(thread.daemon for thread in set(threading.enumerate()) - threads)
    kill(*set(descendants(os.getpid())) - children)
    assert rewards.wait([endless, samples_of(row, "print(1)")], Meter())[0].tolist() == [[0], [1]]
    del rewards
    gc.collect()
    until(lambda: not set(threading.enumerate()) - threads)
