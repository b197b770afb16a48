"""The judge: runs the tests of a dataset and relays their calls to the program under test. Source
for `Program`."""

import ast
import builtins
import importlib
import itertools
import symtable
import sys

import child  # it runs this module

broken: list[str] = []  # why the test cannot run
answers: list[bool] = []  # whether the program has answered this test


class Remote:
    """A function or an object of the program under test, referred to by an expression. Compares by
    identity: no code of the program decides whether values are equal."""

    def __init__(self, expression: str):
        self.__dict__["_expression"] = expression

    def __call__(self, *args: object, **kwargs: object) -> object:
        arguments = child.encode(list(args), pass_on)
        named = {name: child.encode(value, pass_on) for name, value in kwargs.items()}
        return ask({"call": self._expression, "args": arguments, "kwargs": named})

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask({"call": f"{self._expression}.{name}"})

    def __setattr__(self, name: str, value: object) -> None:
        Remote("setattr")(self, name, value)


def pass_on(value: object) -> object:
    """Encode a value that is not plain for the program. If that is impossible, the test cannot run;
    after an answer of the program, which may be the cause, it fails."""
    if isinstance(value, Remote):
        return {"object": value._expression}
    if isinstance(value, child.PASSED_AS_ITERATORS) or hasattr(type(value), "__next__"):
        items = list(itertools.islice(value, child.ITEMS + 1))
        if len(items) <= child.ITEMS:
            return {"iterator": child.encode(items, pass_on)}
    problem = f"a {type(value).__name__} cannot be passed to the program"
    if not answers:
        broken.append(problem)
    raise TypeError(problem)


def ask(question: dict) -> object:
    reply = __ask__(question)  # noqa: F821  # pyrefly: ignore  # a global of the child
    answers[:] = [True]
    try:
        if "value" in reply:
            return child.decode(reply["value"], Remote)
        error = exception(*reply["error"])
    except (ValueError, TypeError, KeyError) as malformed:
        error = RuntimeError(str(malformed))
    raise error


def exception(types: list[str], message: str) -> BaseException:
    """Return an exception of the most special class that is built in."""
    for name in types:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception | SystemExit):
            try:
                return kind(message)
            except TypeError:  # needs more arguments
                continue
    return RuntimeError(message)


def judge(source: str, setup: str, candidate: str | None) -> bool | str:
    """Return whether the test passes, or why it cannot run with any program."""
    broken.clear()
    answers.clear()
    try:
        names = stand_ins(setup, source, candidate)
        if not broken:
            exec(compile(setup, "<test>", "exec"), names)
            if candidate is not None:  # the setup defines its stub
                names[candidate] = Remote(candidate)
            exec(compile(source, "<test>", "exec"), names)
    except BaseException as error:
        # An exception is the fault of the program or of its results, unless an import of the test
        # fails.
        if isinstance(error, ImportError) and last_file(error) == "<test>":
            broken.append(f"{type(error).__name__}: {error}")
        return broken[0] if broken else False
    return broken[0] if broken else True


def last_file(error: BaseException) -> str:
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename


def stand_ins(setup: str, source: str, candidate: str | None) -> dict:
    """Return the names that the test uses and does not define: modules of the standard library, and
    stand-ins."""
    used, defined = symbols(setup)
    used_in_source, defined_in_source = symbols(source)
    defined |= defined_in_source
    free = (used | used_in_source) - defined - set(dir(builtins)) - {"__file__"}
    tree = ast.parse(source)
    objects = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    modules = {node.id for node in objects if isinstance(node, ast.Name)} & free
    modules &= sys.stdlib_module_names
    free -= modules
    if not free and candidate is None:
        free = tested_builtin(tree) - defined
        if not free:
            broken.append("it calls no function of the program")
    replaceable: set[int] = set()
    for node in ast.walk(tree):
        replaceable.update(map(id, uses_of_objects(node)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in free and id(node) not in replaceable:
            broken.append(f"it needs the value of {node.id}, which it does not define")
    names: dict = {"__name__": "test"}
    names |= {name: importlib.import_module(name) for name in modules}
    return names | {name: Remote(name) for name in free}


def tested_builtin(tree: ast.AST) -> set[str]:
    """Return the name of a tested function that has the name of a built-in one, as in MBPP's
    `sum(10, 15)`: the first innermost call, left of a comparison; else an empty set.

    The others stay built in: a program that defines `set` must not decide what sets are."""
    comparisons = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    sides = [comparisons[0].left] if comparisons else []
    for side in (*sides, tree):
        calls = [call for call in calls_in(side) if isinstance(call.func, ast.Name)]
        if calls:
            innermost = [call for call in calls if len(calls_in(call)) == 1]
            innermost.sort(key=lambda call: (call.lineno, call.col_offset))
            return {call.func.id for call in innermost[:1]}
    return set()


def calls_in(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def uses_of_objects(node: ast.AST) -> list[ast.AST]:
    """Return the nodes in which a stand-in can replace an object: where it is called, passed on, or
    has an attribute taken. In `except Name` and `isinstance(x, Name)`, for example, it cannot."""
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
