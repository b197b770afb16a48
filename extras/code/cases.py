"""The tests of a row. Their forms are recognised by their columns:

- `tests`: a list, or a JSON string of one, of `{"input": stdin, "output": stdout}`, of
  `{"function": name, "args": [...], "kwargs": {...}, "result": value}`, or of strings of Python
  with asserts
- `input_output` (APPS, TACO): `{"inputs": [...], "outputs": [...], "fn_name": name}`, or a JSON
  string of it
- `test_list` (MBPP): strings of Python with asserts; `test_setup_code`, `test_imports`
- `test` and `entry_point` (HumanEval): Python that defines `check(candidate)`; `prompt`, the start
  of the program
"""

import ast
import json
import marshal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

CONFIG = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=CONFIG)
class StdinTest:
    """The program's stdout on `input` must be `output`, except for white space at the ends of
    lines, blank last lines and the last digits of floats."""

    input: str
    output: str


@dataclass(frozen=True, config=CONFIG)
class CallTest:
    """`function(*args, **kwargs)` must equal one of `results`, as judge.py compares them."""

    function: str
    args: list = Field(default_factory=list)
    kwargs: dict = Field(default_factory=dict)
    results: list = Field(default_factory=list)
    is_leetcode: bool = False
    """whether the function may be a method of the program's class `Solution`"""


@dataclass(frozen=True, config=CONFIG)
class AssertTest:
    """`source` must run without an exception after `setup`. `candidate`, and names that neither
    defines, are the program's. Only HumanEval has a candidate; its setup is the start of the
    program."""

    source: str
    setup: str = ""
    candidate: str | None = None


@dataclass(config=CONFIG)
class AppsTests:
    inputs: list
    outputs: list
    fn_name: str | None = None


Test = StdinTest | CallTest | AssertTest


def tested_names(tests: list[Test]) -> set[str]:
    """Return names of which the program must define at least one; none for tests of stdin."""
    names: set[str] = set()
    for test in tests:
        match test:
            case AssertTest(candidate=str(name)):
                names.add(name)
            case AssertTest(source=source):
                names |= called_names(source)
            case CallTest(function=function):
                names |= called_names(f"{function}()")
    return names


def called_names(source: str) -> set[str]:
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def parse_tests(row: dict) -> list[Test]:
    """Return the tests of a row, at least one. Raises `ValueError` naming the row and the column if
    they are malformed."""
    parsers = dict(input_output=parse_apps, tests=lambda items, _: [*map(parse_item, items)])
    parsers |= dict(test_list=parse_mbpp, test=parse_humaneval)
    column = next((column for column in parsers if row.get(column) is not None), None)
    if column is None:
        problem = f"no tests: expected one of the columns {', '.join(parsers)}"
        raise ValueError(f"{row['_source']}: {problem}")
    try:
        is_json = isinstance(row[column], str) and column != "test"
        tests = parsers[column](json.loads(row[column]) if is_json else row[column], row)
        if not tests:
            raise ValueError("empty")
        marshal.dumps([vars(test) for test in tests])  # as they go to the judge
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except Exception as error:  # a row may have anything in its place
        problem = error
    else:
        return tests
    raise ValueError(f"{row['_source']}: {column}: {problem}")


def parse_item(item: object) -> Test:
    if not isinstance(item, dict):
        return parse_assert(item)
    # A table gives every object the keys of all.
    given = {key: value for key, value in item.items() if value is not None}
    if given.get("testtype", given.get("type")) in ("stdin", "stdin_stdout"):  # LiveCodeBench
        given = {key: value for key, value in given.items() if key not in ("testtype", "type")}
    if "function" not in given:
        return StdinTest(**given)
    if "result" not in item:
        raise ValueError("a test lacks result")
    test = CallTest(results=[given.pop("result", None)], **given)
    ast.parse(test.function, mode="eval")
    return test


def parse_assert(source: object, setup: str = "") -> AssertTest:
    test = AssertTest(source=source, setup=setup)
    if not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(test.source))):
        raise ValueError("a test has no assert")
    return test


def parse_apps(data: dict, row: dict) -> list[Test]:
    apps = AppsTests(**{key: data.get(key) for key in ("inputs", "outputs", "fn_name")})
    pairs = list(zip(apps.inputs, apps.outputs, strict=True))
    if apps.fn_name is None:
        return [StdinTest(input=text_of(text), output=text_of(out)) for text, out in pairs]
    require_name(apps.fn_name)
    # APPS wraps each result in a list. Where all look wrapped, they may also be lists themselves.
    are_wrapped = all(isinstance(output, list) and len(output) == 1 for output in apps.outputs)
    tests: list[Test] = []
    for args, output in pairs:
        results = [output, *output] if are_wrapped else [output]
        test = CallTest(function=apps.fn_name, args=args, results=results, is_leetcode=True)
        tests.append(test)
    return tests


def text_of(lines: object) -> object:
    return "\n".join(lines) if isinstance(lines, list) else lines


def require_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{name!r} is not a name")


def parse_mbpp(tests: list, row: dict) -> list[Test]:
    imports = row.get("test_imports") or []
    imports = json.loads(imports) if isinstance(imports, str) else imports
    setup = "\n".join([*imports, row.get("test_setup_code") or ""])
    ast.parse(setup)
    return [parse_assert(source, setup) for source in tests]


def parse_humaneval(test: str, row: dict) -> list[Test]:
    name = row.get("entry_point")
    require_name(name)
    functions = [node.name for node in ast.parse(test).body if isinstance(node, ast.FunctionDef)]
    if "check" not in functions:
        raise ValueError("it does not define check(candidate)")
    return [AssertTest(f"{test}\n\ncheck({name})\n", stub(row.get("prompt"), name), name)]


def stub(prompt: object, name: str) -> str:
    """Return the prompt as source that parses, if it is a program's start that defines the name;
    else ""."""
    if not isinstance(prompt, str):
        return ""
    for source in (prompt, prompt + "\n    pass\n"):
        try:
            body = ast.parse(source).body
        except (SyntaxError, ValueError):
            continue
        if any(getattr(node, "name", None) == name for node in body):
            return source
    return ""  # prose
