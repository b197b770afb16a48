"""The judge: runs the tests of a dataset and relays their calls to the program under test. Source for `Program`."""

import ast
import builtins
import importlib
import symtable
import sys

import child  # it runs this module

broken: list[str] = []  # why the test cannot run


class Remote:
    """A function or an object of the program under test, referred to by an expression. Compares by identity: no code of
    the program decides whether values are equal."""

    def __init__(self, expression: str):
        self.__dict__["_expression"] = expression

    def __call__(self, *args: object, **kwargs: object) -> object:
        kwargs = {name: child.encode(value, pass_on) for name, value in kwargs.items()}
        return ask({"call": self._expression, "args": child.encode(list(args), pass_on), "kwargs": kwargs})

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask({"call": f"{self._expression}.{name}"})

    def __setattr__(self, name: str, value: object) -> None:
        Remote("setattr")(self, name, value)


def pass_on(value: object) -> object:
    if isinstance(value, Remote):
        return {"object": value._expression}
    broken.append(f"a {type(value).__name__} cannot be passed to the program")
    raise TypeError(broken[-1])


def ask(question: dict) -> object:
    reply = __ask__(question)  # noqa: F821
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
    try:
        names = stand_ins(setup, source, candidate)
        if not broken:
            exec(compile(setup, "<test>", "exec"), names)
            if candidate is not None:  # the setup defines its stub
                names[candidate] = Remote(candidate)
            exec(compile(source, "<test>", "exec"), names)
    except BaseException as error:
        # An exception is the fault of the program or of its results, unless an import of the test fails.
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
    """Return the names that the test uses and does not define: modules of the standard library, and stand-ins."""
    used, defined = set(), set()
    for text in (setup, source):
        for use, definition in symbols(text):
            used |= use
            defined |= definition
    tree = ast.parse(source)
    free = used - defined - set(dir(builtins)) - {"__file__"}
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    modules = {value.id for value in values if isinstance(value, ast.Name)} & free & sys.stdlib_module_names
    free -= modules
    if not free and candidate is None:
        # A function with the name of a built-in one, as MBPP's `sum(10, 15)`: the first innermost call, left of a
        # comparison. The others stay built in: a program that defines `set` must not decide what sets are.
        sides = [node.left for node in ast.walk(tree) if isinstance(node, ast.Compare)][:1] + [tree]
        calls = next(filter(None, map(named_calls, sides)), [])
        inner = [c for c in calls if not any(isinstance(n, ast.Call) and n is not c for n in ast.walk(c))]
        inner.sort(key=lambda call: (call.lineno, call.col_offset))
        free = {call.func.id for call in inner[:1]} - defined
        if not free:
            broken.append("it calls no function of the program")
    callees = {id(name) for node in ast.walk(tree) for name in uses_of_objects(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in free and id(node) not in callees:
            broken.append(f"it needs the value of {node.id}, which it does not define")
    return {"__name__": "test"} | {n: importlib.import_module(n) for n in modules} | {n: Remote(n) for n in free}


def named_calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]


def uses_of_objects(node: ast.AST) -> list[ast.AST]:
    """Return the nodes in which a stand-in can replace an object: where it is called, passed on, or has an attribute
    taken. In `except Name` and `isinstance(x, Name)`, for example, it cannot."""
    if isinstance(node, ast.Attribute):
        return [node.value]
    if isinstance(node, ast.Assign | ast.Return | ast.List | ast.Tuple | ast.Dict):
        return list(ast.iter_child_nodes(node))
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") in ("isinstance", "issubclass"):
        return []
    return [node.func, *node.args, *(keyword.value for keyword in node.keywords)]


def symbols(source: str):
    """Yield, for every scope, the global names that it uses and those that it defines."""
    top = symtable.symtable(source, "<test>", "exec")
    scopes = [top]
    for scope in scopes:
        scopes += scope.get_children()
        at_top = scope is top
        each = scope.get_symbols()
        used = {s.get_name() for s in each if s.is_referenced() and (at_top or s.is_global())}
        yield used, {s.get_name() for s in each if s.is_assigned() and (at_top or s.is_declared_global())}
