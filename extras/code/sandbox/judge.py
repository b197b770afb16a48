"""The judge: runs the tests of a row in a confined process of its own. Only this process has the
expected values. A function that a test calls is a stand-in, which asks the program's process."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import marshal
import os
import symtable
import sys

import child  # which imported this module

TYPE_CHECKING = False  # an import of typing would cost every run milliseconds
if TYPE_CHECKING:
    import types
    from collections.abc import Callable
    from typing import BinaryIO

broken: list[str] = []  # why the present test cannot run with any program


class Ended(BaseException):
    """The program has ended, or what it sent is no answer."""


class Program:
    """The program's process. What it sends can only be a value or an exception."""

    def __init__(self, questions: BinaryIO, answers: BinaryIO, limit: int):
        self.questions = questions
        self.answers = answers
        self.limit = limit  # bytes of an answer
        self.has_ended = False  # after its end every test fails, whatever it catches
        self.has_answered = False  # during this test
        self.unhandled: set[BaseException] = set()  # exceptions that this test has not caught

    def ask(self, question: dict) -> object:
        self.has_answered = True
        try:
            self.questions.write(json.dumps(question).encode() + b"\n")
            self.questions.flush()
            return self.answer()
        except BrokenPipeError:
            self.has_ended = True
            raise Ended from None

    def answer(self) -> object:
        try:
            line = self.answers.readline(self.limit)
            reply = json.loads(line if line.endswith(b"\n") else b"")
            if reply.keys() == {"value"}:
                return child.decode(reply["value"], StandIn)
            ((key, (types, message)),) = reply.items()
            error = exception(types, message)
        except Exception:
            self.has_ended = True
            raise Ended from None
        self.unhandled.add(error)
        raise error


program: Program  # of this process


class StandIn:
    """Stands for a function or an object of the program, which an expression refers to. It is only
    equal to itself: no code of the program decides whether values are equal."""

    def __init__(self, expression: str):
        self.__dict__["_expression"] = expression

    def __call__(self, *args: object, **kwargs: object) -> object:
        arguments = child.encode(list(args), pass_on)
        named = child.encode(kwargs, pass_on)
        return program.ask({"call": self._expression, "args": arguments, "kwargs": named})

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return program.ask({"call": f"{self._expression}.{name}"})
        except AttributeError as error:
            handled(error)  # hasattr may catch this: the program may say what an object has
            raise

    def __setattr__(self, name: str, value: object) -> None:
        StandIn("setattr")(self, name, value)


def pass_on(value: object) -> object:
    """Encode a value that is not plain, to pass it to the program. If that is impossible, the test
    cannot run; but if the program has already answered, it may be the cause, and the test fails."""
    if isinstance(value, StandIn):
        return {"object": value._expression}
    is_iterator = isinstance(value, child.ITERATORS) or hasattr(type(value), "__next__")
    if is_iterator and (items := child.few_items(value)) is not None:
        return {"iterator": child.encode(items, pass_on)}
    problem = f"a {type(value).__name__} cannot be passed to the program"
    if not program.has_answered:
        broken.append(problem)
    raise TypeError(problem)


def exception(types: list[str], message: str) -> BaseException:
    """Return an exception of the most special of these classes that is built in."""
    for name in types:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception | SystemExit):
            try:
                return kind(message)
            except TypeError:  # needs more arguments
                continue
    return RuntimeError(message)


def main(tests: bytes, output: int, questions: int, answers: int) -> None:
    """Print a line of JSON for each test: whether it passes, or why no program could pass it."""
    global program
    limit, *cases = marshal.loads(tests)
    with open(questions, "wb") as to_program, open(answers, "rb") as from_program:
        program = Program(to_program, from_program, limit)
        try:
            program.answer()  # that its source has run
        except BaseException:
            program.has_ended = True
        for case in cases:
            os.write(output, json.dumps(verdict(*case)).encode() + b"\n")


def verdict(kind: str, *test: object) -> bool | str:
    broken.clear()
    program.has_answered = False
    program.unhandled.clear()
    try:
        passed = dict(call=call, run=run)[kind](*test)
    except BaseException as error:
        # An exception is the fault of the program or of its results, unless an import of the test
        # fails.
        if isinstance(error, ImportError) and last_file(error) == "<test>":
            broken.append(f"{type(error).__name__}: {error}")
        passed = False
    if program.has_ended or program.unhandled:
        return False
    return broken[0] if broken else passed


def last_file(error: BaseException) -> str:
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename


# ---- tests of a call ----


def call(function: str, args: list, kwargs: dict, results: list) -> bool:
    value = StandIn(function)(*args, **kwargs)
    return any(same(value, result) for result in results)


def same(value: object, expected: object) -> bool:
    """Return whether two values are equal as JSON. A tuple is a list, an int may equal a float, but
    a bool is no number. Two NaN are equal."""
    if isinstance(expected, list):
        are_lists = isinstance(value, list | tuple) and len(value) == len(expected)
        return are_lists and all(map(same, value, expected))
    if isinstance(expected, dict):
        has_keys = isinstance(value, dict) and value.keys() == expected.keys()
        return has_keys and all(same(value[key], expected[key]) for key in expected)
    if type(expected) in (int, float):
        are_nan = value != value and expected != expected
        return type(value) in (int, float) and (value == expected or are_nan)
    return type(value) is type(expected) and value == expected


# ---- tests with asserts ----


def run(source: str, setup: str, candidate: str | None) -> bool:
    """Return True unless `source` raises an exception."""
    names = stand_ins(setup, source, candidate)
    if broken:
        return False
    exec(compiled(setup), names)
    if candidate is not None:  # the setup defines its stub
        names[candidate] = StandIn(candidate)
    exec(compiled(source), names)
    return True


# An exception of the program must not steer a test: `all(map(f, xs))` would take a StopIteration of
# `f` for the end of `xs`. So a test fails unless its own code catches each exception.


def compiled(source: str) -> types.CodeType:
    """Compile a test, changed so that it says which exceptions it catches."""
    tree = ast.fix_missing_locations(Catches().visit(ast.parse(source)))
    return compile(tree, "<test>", "exec")


class Catches(ast.NodeTransformer):
    """Marks what catches exceptions: `except`, `with` (contextlib.suppress) and `assertRaises`."""

    def visit_ExceptHandler(self, handler: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(handler)
        handler.body = [ast.With([ast.withitem(called("__handler__"))], handler.body)]
        return handler

    def visit_With(self, statement: ast.With) -> ast.AST:
        self.generic_visit(statement)
        for item in statement.items:
            item.context_expr = called("__manager__", item.context_expr)
        return statement

    def visit_Call(self, call: ast.Call) -> ast.AST:
        self.generic_visit(call)
        if getattr(call.func, "attr", "") in ("assertRaises", "assertRaisesRegex"):
            call.func = called("__asserted__", call.func)
        return call


def called(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [*args], [])


def handled(error: BaseException | None) -> None:
    """Mark an exception, and those that led to it, as caught."""
    found = [error]
    for each in found:  # which grows
        if each is not None:
            program.unhandled.discard(each)
            more = (each.__cause__, each.__context__, *getattr(each, "exceptions", ()))
            found += [other for other in more if other not in found]


class Handler:
    """The body of an `except` clause. It has caught its exception unless it raises it again."""

    def __enter__(self) -> None:
        self.caught = sys.exception()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not self.caught:
            handled(self.caught)


class Manager:
    """A context manager of a test, which may catch an exception."""

    def __init__(self, manager: object):
        self.manager = manager

    def __enter__(self) -> object:
        return type(self.manager).__enter__(self.manager)

    def __exit__(self, kind: type, error: BaseException | None, trace: object) -> bool:
        is_caught = bool(type(self.manager).__exit__(self.manager, kind, error, trace))
        if is_caught:
            handled(error)
        return is_caught


def asserted(assert_raises: Callable) -> Callable:
    """Return unittest's assertRaises. It may call the function itself, and then it has caught the
    exceptions of that call."""

    def call_it(*args: object, **kwargs: object) -> object:
        before = program.unhandled.copy()
        value = assert_raises(*args, **kwargs)
        program.unhandled &= before
        return value

    return call_it


HELPERS = dict(__handler__=Handler, __manager__=Manager, __asserted__=asserted)


def stand_ins(setup: str, source: str, candidate: str | None) -> dict:
    """Return the names that a test uses and does not define: modules of the standard library, and
    stand-ins for names of the program."""
    used, defined = symbols(setup)
    used_in_source, defined_in_source = symbols(source)
    defined |= defined_in_source
    free = (used | used_in_source) - defined - set(dir(builtins)) - {"__file__"}
    tree = ast.parse(source)
    nodes = [*ast.walk(tree)]
    objects = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    modules = {node.id for node in objects if isinstance(node, ast.Name)} & free
    modules &= sys.stdlib_module_names
    free -= modules
    if not free and candidate is None:
        free = tested_builtin(tree) - defined
        if not free:
            broken.append("it calls no function of the program")
    replaced = {id(part) for node in nodes for part in uses_of_objects(node)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in free and id(node) not in replaced:
            broken.append(f"it needs the value of {node.id}, which it does not define")
    names = {name: importlib.import_module(name) for name in modules}
    return {"__name__": "test"} | HELPERS | names | {name: StandIn(name) for name in free}


def tested_builtin(tree: ast.AST) -> set[str]:
    """Return the name of a tested function that is also the name of a built-in one, as in MBPP's
    `sum(10, 15)`: the first innermost call left of a comparison; else an empty set.

    Other built-in names stay: a program that defines `set` must not decide what sets are."""
    comparisons = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    for side in (*(each.left for each in comparisons[:1]), tree):
        calls = [call for call in calls_in(side) if isinstance(call.func, ast.Name)]
        innermost = [call for call in calls if len(calls_in(call)) == 1]
        if innermost:
            return {min(innermost, key=lambda call: (call.lineno, call.col_offset)).func.id}
    return set()


def calls_in(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def uses_of_objects(node: ast.AST) -> list[ast.AST]:
    """Return the nodes in which a stand-in can replace an object: where it is called, passed on, or
    has an attribute taken. It cannot in `except Name` or `isinstance(x, Name)`."""
    if isinstance(node, ast.Attribute):
        return [node.value]
    if isinstance(node, ast.Assign | ast.Return | ast.List | ast.Tuple | ast.Dict):
        return list(ast.iter_child_nodes(node))
    is_call = isinstance(node, ast.Call)
    if not is_call or getattr(node.func, "id", "") in ("isinstance", "issubclass"):
        return []
    return [node.func, *node.args, *(keyword.value for keyword in node.keywords)]


def symbols(source: str) -> tuple[set[str], set[str]]:
    """Return the global names that the scopes of a source use, and those that they define."""
    top = symtable.symtable(source, "<test>", "exec")
    used: set[str] = set()
    defined: set[str] = set()
    scopes = [top]
    for scope in scopes:  # which grows
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_referenced() and (scope is top or symbol.is_global()):
                used.add(symbol.get_name())
            if symbol.is_assigned() and (scope is top or symbol.is_declared_global()):
                defined.add(symbol.get_name())
    return used, defined
