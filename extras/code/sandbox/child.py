"""What a confined process does: it confines itself, then runs a program, answers calls of a
program's functions, or judges a program (judge.py).

process.py starts it in a fresh interpreter, `python -I -S -B -X utf8`, with an empty environment,
in an empty directory and in a session of its own."""

from __future__ import annotations

import _sitebuiltins
import builtins
import itertools
import os
import sys
import types
from _collections import deque

TYPE_CHECKING = False  # an import of typing would cost every run milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable

MEMORY_EXIT = 101  # the exit code after a MemoryError
READY = b"ready\n"


def main(
    confine: Callable, mode: str, parent: str, source: str, output: str, pipes: str, *limits: str
) -> None:
    """Confine this process, then run in one of three modes: `program` (stdin to stdout),
    `functions` (answers calls) or `judge` (asks for calls). `source`, `output` and the two `pipes`
    are file descriptors. `output` first tells the parent that the process is confined; then it has
    what a program or the judge prints."""
    if mode == "judge":
        __import__("judge")  # now: the file cannot be read later
    del sys.path[0]
    with open(int(source), "rb") as file:
        text = file.read()
    try:
        confine(int(parent), *map(int, limits))
    except OSError as error:
        os.write(int(output), str(error).encode())
        return
    for name in ("exit", "quit"):  # -S left them out
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    os.write(int(output), READY)
    if mode == "judge":
        __import__("judge").main(text, int(output), *map(int, pipes.split()))
    elif mode == "functions":
        os.close(int(output))
        Functions(*map(int, pipes.split())).serve(text)
    else:
        os.dup2(int(output), 1)
        os.close(int(output))
        run(text)


def run(text: bytes) -> None:
    """Run the source as `python program.py` would."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["program.py"]
    try:
        exec(compile(text, "program.py", "exec", dont_inherit=True), module.__dict__)
    except MemoryError:
        sys.exit(MEMORY_EXIT)


class Functions:
    """Runs the source as a module named `program`, which skips the code under `if __name__ ==
    "__main__":`, and answers calls of its functions, each a line of JSON."""

    def __init__(self, requests: int, answers: int):
        import json

        self.json = json
        self.requests = requests
        self.answers = answers
        self.objects: list[object] = []  # results that are not plain stay here
        module = sys.modules["program"] = types.ModuleType("program")
        self.names = module.__dict__
        self.names["__objects__"] = self.objects

    def serve(self, text: bytes) -> None:
        """Answer whether the source ran, then answer requests: `{"call": "f", "args": [...],
        "kwargs": {...}}` calls a function, and one without `args` asks for the value of `f`
        itself."""
        self.answer(self.execute, text)
        with open(self.requests, "rb") as requests:
            for line in requests:
                self.answer(self.call, line)

    def execute(self, text: bytes) -> None:
        exec(compile(text, "program.py", "exec", dont_inherit=True), self.names)

    def evaluate(self, expression: str) -> object:
        return eval(expression, self.names)

    def call(self, line: bytes) -> object:
        request = self.json.loads(line)
        value = self.evaluate(request["call"])
        if "args" not in request:
            return value
        args = decode(request["args"], self.evaluate)
        return value(*args, **decode(request["kwargs"], self.evaluate))

    def answer(self, function: Callable[[bytes], object], argument: bytes) -> None:
        """Send `{"value": ...}` or `{"error": [[names of the exception's classes], message]}`."""
        try:
            line = self.json.dumps({"value": encode(function(argument), self.keep)})
        except BaseException as error:  # whatever the program raises is its answer
            names = [kind.__name__ for kind in type(error).__mro__]
            try:
                is_key_error = type(error) is KeyError and len(error.args) == 1  # its str is a repr
                message = str(error.args[0] if is_key_error else error)[:1000]
            except BaseException:  # its __str__ raises too
                message = ""
            line = self.json.dumps({"error": [names, message]})
        data = memoryview(line.encode() + b"\n")
        while data:
            data = data[os.write(self.answers, data) :]

    def keep(self, value: object) -> object:
        """Encode a value that is not plain: an iterator that is not too long as its items, anything
        else as an expression that refers to it."""
        if isinstance(value, ITERATORS) and (items := few_items(value)) is not None:
            return {"iterator": encode(items, self.keep)}
        self.objects.append(value)
        return {"object": f"__objects__[{len(self.objects) - 1}]"}


# ---- plain values as JSON ----

VIEWS = tuple(type(view) for view in ({}.keys(), {}.values(), {}.items()))
GENERATORS = (range, map, filter, zip, enumerate, reversed, types.GeneratorType, deque)
ITERATORS = (*GENERATORS, *VIEWS)  # passed as iterators
CONTAINERS: dict = dict(set=set, frozenset=frozenset, tuple=tuple, dict=dict, iterator=iter)
ITEMS = 100_000  # longest iterator that can be passed


def few_items(value: object) -> list | None:
    """Return the items of an iterable, or None if it has more than `ITEMS`."""
    items = list(itertools.islice(value, ITEMS + 1))
    return items if len(items) <= ITEMS else None


def encode(value: object, other: Callable[[object], object]) -> object:
    """Return `value` as JSON. A list is an array. Other containers, and values that JSON lacks, are
    objects whose only key is their type. Subclasses of plain types become the plain type, and
    `other` encodes everything else."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        value = int.__index__(value)
        return value if abs(value) < 2**63 else {"int": hex(value)}  # decimals are slow
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, dict):
        return {"dict": [[encode(x, other) for x in pair] for pair in dict.items(value)]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items = [encode(item, other) for item in kind.__iter__(value)]
            return items if kind is list else {kind.__name__: items}
    if isinstance(value, bytes | bytearray):
        return {"bytes": memoryview(value).hex()}
    if isinstance(value, complex):
        return {"complex": [complex.real.__get__(value), complex.imag.__get__(value)]}
    return other(value)


def decode(data: object, other: Callable[[str], object]) -> object:
    """Return the value that `encode` turned into `data`; `other` decodes those that were not plain.
    Raises an `Exception` for other data."""
    if isinstance(data, list):
        return [decode(item, other) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, body),) = data.items()
    if kind == "object":
        return other(body)
    if kind == "int":
        return int(body, 16)
    if kind == "bytes":
        return bytes.fromhex(body)
    if kind == "complex":
        return complex(*body)
    return CONTAINERS[kind](decode(item, other) for item in body)
