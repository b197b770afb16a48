"""The tests of a row, for code_reward.py. Their forms are recognised by their columns:

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
from dataclasses import dataclass

from common.rewards import functions


@dataclass(frozen=True)
class StdinTest:
    """The program's stdout on `input` must be `output`, except for white space at the ends of
    lines, blank last lines and the last digits of floats."""

    input: str
    output: str


@dataclass(frozen=True)
class CallTest:
    """`function(*args, **kwargs)` must be the same (see `same`) as one of `results`."""

    function: str
    args: list
    kwargs: dict
    results: list
    is_leetcode: bool = False
    """whether the function may be a method of the program's class `Solution`"""


@dataclass(frozen=True)
class AssertTest:
    """`source` must run without an exception after `setup`. Names that neither defines, and
    `candidate`, are names of the program. Only HumanEval has a candidate; its setup is the start of
    the program."""

    source: str
    setup: str = ""
    candidate: str | None = None


Test = StdinTest | CallTest | AssertTest


def tested_names(tests: list[Test]) -> set[str]:
    """Return names of which the program must define one, as far as they show in the tests; none for
    tests of stdin."""
    names: set[str] = set()
    for test in tests:
        if isinstance(test, AssertTest):
            names |= {test.candidate} if test.candidate else called_names(test.source)
        elif isinstance(test, CallTest):
            is_name = test.function.isidentifier()
            names |= {test.function} if is_name else called_names(test.function)
    return names


def called_names(source: str) -> set[str]:
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def parse_tests(row: dict) -> list[Test]:
    """Return the tests of a row, at least one. Raises `ValueError` naming the row if they are
    malformed."""
    parsers = {
        "input_output": parse_apps,
        "tests": parse_list,
        "test_list": parse_mbpp,
        "test": parse_humaneval,
    }
    column = next((column for column in parsers if row.get(column) is not None), None)
    try:
        require(column is not None, f"no tests: expected one of the columns {', '.join(parsers)}")
        tests = parsers[column](row)
        require(len(tests) > 0, f"{column} is empty")
    except ValueError as error:
        raise ValueError(f"{row['_source']}: {error}") from None
    return tests


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def parse_list(row: dict) -> list[Test]:
    items = from_json(row["tests"], "tests")
    require(isinstance(items, list), f"tests is a {type(items).__name__}, not a list")
    return [parse_item(item, f"tests[{i}]") for i, item in enumerate(items)]


def parse_item(item: object, place: str) -> Test:
    if isinstance(item, str):
        return parse_assert(item, place)
    is_dict = isinstance(item, dict)
    require(is_dict, f"{place} is a {type(item).__name__}, not an object or a string")
    if item.get("testtype", item.get("type")) in ("stdin", "stdin_stdout"):  # LiveCodeBench
        item = {key: value for key, value in item.items() if key not in ("testtype", "type")}
    # A table gives every object the keys of all.
    keys = {key for key, value in item.items() if value is not None}
    if "function" in keys:
        keys |= item.keys() & {"result"}  # which may be None
        types = dict(function=str, args=list, kwargs=dict, result=object)
        missing = {"function", "result"} - keys
    else:
        types = dict(input=str, output=str)
        missing = types.keys() - keys
    unknown = keys - types.keys()
    require(not unknown, f"{place} has unknown keys {', '.join(sorted(map(str, unknown)))}")
    require(not missing, f"{place} lacks {', '.join(sorted(missing))}")
    for key in keys:
        kind = types[key]
        require(isinstance(item[key], kind), f"{place}: {key} is not a {kind.__name__}")
    if "function" not in keys:
        return StdinTest(item["input"], item["output"])
    parse_python(item["function"], f"{place}: function", "eval")
    args = item.get("args") or []
    return CallTest(item["function"], args, item.get("kwargs") or {}, [item["result"]])


def parse_apps(row: dict) -> list[Test]:
    data = from_json(row["input_output"], "input_output")
    require(isinstance(data, dict), f"input_output is a {type(data).__name__}, not an object")
    inputs = data.get("inputs")
    outputs = data.get("outputs")
    function = data.get("fn_name")
    are_lists = isinstance(inputs, list) and isinstance(outputs, list)
    require(are_lists, "input_output needs lists inputs and outputs")
    lengths = f"{len(inputs)} inputs and {len(outputs)} outputs"
    require(len(inputs) == len(outputs), f"input_output has {lengths}")
    if function is None:
        texts = [text_of(data, f"inputs[{i}]") for i, data in enumerate(inputs)]
        expected = [text_of(data, f"outputs[{i}]") for i, data in enumerate(outputs)]
        return list(map(StdinTest, texts, expected))
    is_name = isinstance(function, str) and function.isidentifier()
    require(is_name, "input_output: fn_name is not a name")
    are_arguments = all(isinstance(args, list) for args in inputs)
    require(are_arguments, "input_output: with fn_name, inputs are lists of arguments")
    # APPS wraps each result in a list. Where all look wrapped, they may also be lists themselves.
    are_wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    return [
        CallTest(function, args, {}, [output, *output] if are_wrapped else [output], True)
        for args, output in zip(inputs, outputs, strict=True)
    ]


def text_of(data: object, place: str) -> str:
    lines = data if isinstance(data, list) else [data]
    are_text = all(isinstance(line, str) for line in lines)
    require(are_text, f"input_output: {place} is neither text nor a list of lines")
    return "\n".join(lines)


def parse_mbpp(row: dict) -> list[Test]:
    setup = row.get("test_setup_code") or ""
    imports = functions.from_json(row.get("test_imports")) or []
    tests = functions.from_json(row["test_list"])
    require(isinstance(setup, str), "test_setup_code is not a string")
    for name, column in (("test_imports", imports), ("test_list", tests)):
        is_right = isinstance(column, list) and all(isinstance(line, str) for line in column)
        require(is_right, f"{name} is not a list of strings")
    setup = "\n".join([*imports, setup])
    parse_python(setup, "test_setup_code")
    return [parse_assert(test, f"test_list[{i}]", setup) for i, test in enumerate(tests)]


def parse_humaneval(row: dict) -> list[Test]:
    test = row["test"]
    name = row.get("entry_point")
    require(isinstance(test, str), "test is not a string")
    require(isinstance(name, str) and name.isidentifier(), "entry_point is not a name")
    body = parse_python(test, "test").body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    require("check" in functions, "test does not define check(candidate)")
    return [AssertTest(f"{test}\n\ncheck({name})\n", stub(row.get("prompt"), name), name)]


def stub(prompt: object, name: str) -> str:
    """Return the prompt, if it is the start of a program that defines the name, as source that
    parses; else ""."""
    if not isinstance(prompt, str):
        return ""
    for source in (prompt, prompt + "\n    pass\n"):
        try:
            body = parse_python(source, "").body
        except ValueError:
            continue
        if any(getattr(node, "name", None) == name for node in body):
            return source
    return ""  # prose


def parse_assert(source: str, place: str, setup: str = "") -> AssertTest:
    tree = parse_python(source, place)
    require(any(isinstance(node, ast.Assert) for node in ast.walk(tree)), f"{place} has no assert")
    return AssertTest(source, setup)


def parse_python(source: str, place: str, mode: str = "exec") -> ast.AST:
    try:
        return ast.parse(source, mode=mode)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{place} does not parse as Python: {error}") from None


def from_json(data: object, place: str) -> object:
    if not isinstance(data, str):
        return data
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
