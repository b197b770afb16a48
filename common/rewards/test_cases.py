"""The tests of a row, for code_reward.py. Their forms are recognised by their columns:

- `tests`: a list, or a JSON string of one, of `{"input": stdin, "output": stdout}`, of
  `{"function": name, "args": [...], "kwargs": {...}, "result": value}`, or of strings of Python with asserts
- `input_output` (APPS, TACO): `{"inputs": [...], "outputs": [...], "fn_name": name}`, or a JSON string of it
- `test_list` (MBPP): strings of Python with asserts; `test_setup_code`, `test_imports`
- `test` and `entry_point` (HumanEval): Python that defines `check(candidate)`; `prompt`, the start of the program
"""

import ast
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class StdinTest:
    """The program's stdout on `input` must be `output`, except for white space at the ends of lines, blank last lines
    and the last digits of floats."""

    input: str
    output: str


@dataclass(frozen=True)
class CallTest:
    """`function(*args, **kwargs)` must be the same (see `same`) as one of `results`."""

    function: str
    args: list
    kwargs: dict
    results: list


@dataclass(frozen=True)
class AssertTest:
    """`source` must run without an exception after `setup`. Names that neither defines, and `candidate`, are names of
    the program."""

    source: str
    setup: str = ""
    candidate: str | None = None


Test = StdinTest | CallTest | AssertTest


def stub(row: dict) -> str:
    """Return the prompt, if it is the start of a program, as source that parses; else ""."""
    prompt = row.get("prompt")
    if tests_column(row) != "test" or not isinstance(prompt, str):
        return ""
    for source in (prompt, prompt + "\n    pass\n"):
        try:
            body = parse_python(source, "").body
        except ValueError:
            continue
        if any(getattr(node, "name", None) == row["entry_point"] for node in body):
            return source
    return ""  # prose


def tested_names(row: dict) -> set[str]:
    """Return names of which the program must define one, as far as they show in the tests; none for tests of stdin."""
    names, column = set(), tests_column(row)
    if column == "test":
        return {row["entry_point"]}
    if column == "input_output":
        return {name} if (name := from_json(row[column], column).get("fn_name")) else set()
    for test in parse_tests(row):
        source = test.source if isinstance(test, AssertTest) else test.function if isinstance(test, CallTest) else ""
        calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        names |= {source} if source.isidentifier() else {name.id for name in calls if isinstance(name, ast.Name)}
    return names


def tests_column(row: dict) -> str | None:
    columns = ("input_output", "tests", "test_list", "test")
    return next((column for column in columns if row.get(column) is not None), None)


def parse_tests(row: dict) -> list[Test]:
    """Return the tests of a row, at least one. Raises `ValueError` naming the row if they are malformed."""
    parsers = {"input_output": parse_apps, "tests": parse_list, "test_list": parse_mbpp, "test": parse_humaneval}
    column = tests_column(row)
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


def parse_item(item: object, where: str) -> Test:
    if isinstance(item, str):
        return parse_assert(item, where)
    require(isinstance(item, dict), f"{where} is a {type(item).__name__}, not an object or a string")
    # A table gives every object the keys of all.
    item = {k: v for k, v in item.items() if v is not None or (k == "result" and item.get("function") is not None)}
    call, stdin = {"function", "args", "kwargs", "result"}, {"input", "output"}
    known, needed = (call, {"function", "result"}) if "function" in item else (stdin, stdin)
    require(not (unknown := item.keys() - known), f"{where} has unknown keys {', '.join(sorted(map(str, unknown)))}")
    require(not (missing := needed - item.keys()), f"{where} lacks {', '.join(sorted(missing))}")
    for key, kind in {"input": str, "output": str, "function": str, "args": list, "kwargs": dict}.items():
        require(isinstance(item.get(key, kind()), kind), f"{where}: {key} is not a {kind.__name__}")
    if known is stdin:
        return StdinTest(**item)
    parse_python(item["function"], f"{where}: function", "eval")
    return CallTest(item["function"], item.get("args", []), item.get("kwargs", {}), [item["result"]])


def parse_apps(row: dict) -> list[Test]:
    data = from_json(row["input_output"], "input_output")
    require(isinstance(data, dict), f"input_output is a {type(data).__name__}, not an object")
    inputs, outputs, function = data.get("inputs"), data.get("outputs"), data.get("fn_name")
    require(isinstance(inputs, list) and isinstance(outputs, list), "input_output needs lists inputs and outputs")
    require(len(inputs) == len(outputs), f"input_output has {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    if function is None:
        return [StdinTest(text_of(i, f"inputs[{n}]"), text_of(o, f"outputs[{n}]")) for n, (i, o) in enumerate(pairs)]
    require(isinstance(function, str) and function.isidentifier(), "input_output: fn_name is not a name")
    require(all(isinstance(args, list) for args in inputs), "input_output: with fn_name, inputs are lists of arguments")
    # A method of LeetCode's class, or a function.
    target = f"getattr(Solution(), {function!r}) if 'Solution' in globals() else {function}"
    # APPS wraps each result in a list. Where all look wrapped, they may also be lists themselves.
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    return [CallTest(target, args, {}, [output, *output] if wrapped else [output]) for args, output in pairs]


def text_of(data: object, where: str) -> str:
    lines = data if isinstance(data, list) else [data]
    require(all(isinstance(line, str) for line in lines), f"input_output: {where} is neither text nor a list of lines")
    return "\n".join(lines)


def parse_mbpp(row: dict) -> list[Test]:
    setup, imports, tests = row.get("test_setup_code") or "", row.get("test_imports") or [], row["test_list"]
    require(isinstance(setup, str), "test_setup_code is not a string")
    for name, column in (("test_imports", imports), ("test_list", tests)):
        ok = isinstance(column, list) and all(isinstance(line, str) for line in column)
        require(ok, f"{name} is not a list of strings")
    setup = "\n".join([*imports, setup])
    parse_python(setup, "test_setup_code")
    return [parse_assert(test, f"test_list[{i}]", setup) for i, test in enumerate(tests)]


def parse_humaneval(row: dict) -> list[Test]:
    test, name = row["test"], row.get("entry_point")
    require(isinstance(test, str), "test is not a string")
    require(isinstance(name, str) and name.isidentifier(), "entry_point is not a name")
    functions = [node.name for node in parse_python(test, "test").body if isinstance(node, ast.FunctionDef)]
    require("check" in functions, "test does not define check(candidate)")
    return [AssertTest(f"{test}\n\ncheck({name})\n", stub(row), name)]


def parse_assert(source: str, where: str, setup: str = "") -> AssertTest:
    tree = parse_python(source, where)
    require(any(isinstance(node, ast.Assert) for node in ast.walk(tree)), f"{where} has no assert")
    return AssertTest(source, setup)


def parse_python(source: str, where: str, mode: str = "exec") -> ast.AST:
    try:
        return ast.parse(source, mode=mode)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where} does not parse as Python: {error}") from None


def from_json(data: object, where: str) -> object:
    if not isinstance(data, str):
        return data
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
