"""The confined process of program.py: confines itself, runs untrusted source, and passes inputs in
and outputs out.

Run in a fresh interpreter, `python -I -S -B -X utf8`, with an empty environment, in an empty
directory and in a session of its own. The parent imports `encode` and `decode`."""

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

# ---- plain values as JSON ----

DEPTH = 100  # nesting of a value that can be passed
VIEWS = tuple(type(view) for view in ({}.keys(), {}.values(), {}.items()))
GENERATORS = (range, map, filter, zip, enumerate, reversed, types.GeneratorType, deque)
PASSED_AS_ITERATORS = (*GENERATORS, *VIEWS)
CONTAINERS = dict(set=set, frozenset=frozenset, tuple=tuple, iterator=iter)
ITEMS = 100_000  # longest iterator that can be passed


class CannotPass(TypeError):
    """Error of a value that is not plain."""


def refuse(value: object) -> object:
    """Refuse to encode a value that is not plain."""
    raise CannotPass(f"a value of type {type(value).__name__}")


def refuse_object(name: str) -> object:
    """Refuse to decode one."""
    raise CannotPass("a value that is not plain")


def encode(value: object, other: Callable = refuse, depth: int = 0) -> object:
    """Return `value` as JSON: a list is an array; other containers, and values that JSON lacks, are
    objects whose only key is their type. Subclasses of plain types become the plain type; `other`
    encodes everything else.

    Raises `CannotPass`, also for a value that is nested too deeply, such as one that contains
    itself."""
    if value is None or value is True or value is False:
        return value
    if depth > DEPTH:
        raise CannotPass("a value that is nested too deeply")
    if isinstance(value, str):
        value = str.__str__(value)
        if has_surrogate(value):  # JSON would join two to one character
            return {"str": value.encode("utf-8", "surrogatepass").hex()}
        return value
    if isinstance(value, int):
        value = int.__index__(value)
        # hex: Python refuses to write integers of thousands of digits in decimal
        return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, dict):
        pairs = list(dict.items(value))
        return {"dict": [[encode(x, other, depth + 1) for x in pair] for pair in pairs]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items = [encode(item, other, depth + 1) for item in kind.__iter__(value)]
            return items if kind is list else {kind.__name__: items}
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    if isinstance(value, complex):
        return {"complex": [complex.real.__get__(value), complex.imag.__get__(value)]}
    return other(value)


def decode(data: object, other: Callable = refuse_object, depth: int = 0) -> object:
    """Return the value that `encode` turned into `data`. For any other data raises `ValueError` or
    `TypeError`."""
    if depth > DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(data, list):
        return [decode(item, other, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("not a value")
    ((kind, body),) = data.items()
    if kind == "object":
        return other(body)
    if not isinstance(body, str if kind in ("str", "int", "bytes") else list):
        raise ValueError("not a value")
    if kind == "int":
        return int(body, 16)
    if kind == "str":
        return bytes.fromhex(body).decode("utf-8", "surrogatepass")
    if kind == "bytes":
        return bytes.fromhex(body)
    items = [decode(item, other, depth + 1) for item in body]
    if kind == "complex" and all(isinstance(item, float) for item in items):
        return complex(*items)
    if kind == "dict":
        return dict(hashable(items, [key for key, _ in items]))
    if kind in ("set", "frozenset"):
        items = hashable(items, items)
    if kind in CONTAINERS:
        return CONTAINERS[kind](items)
    raise ValueError("not a value")


def hashable(items: list, keys: list) -> list:
    """Return `items`. Raises `ValueError` for many keys with one hash, or with hashes that may be
    chosen to collide: a table of them takes quadratic time to build."""
    if sum(not isinstance(key, str) for key in keys) > 10_000:  # hashes of strings are random
        raise ValueError("too many keys that are not strings")
    hashes = sorted(map(hash, keys))
    if any(a == b for a, b in zip(hashes, hashes[100:], strict=False)):
        raise ValueError("too many equal hashes")
    return items


def has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


# ---- running the source ----


def main(
    confine: Callable, mode: str, parent: str, source: str, requests: str, answers: str, *rest: str
) -> None:
    """Run as a process. `mode`: `program` (stdin to stdout) or `calls` (a server of function
    calls). `source`, `requests` and `answers` are file descriptors, the rest are arguments of
    `confine`."""
    with open(int(source), "rb") as file:
        text = file.read()
    try:
        confine(int(parent), *map(int, rest))
    except OSError as error:
        os.write(int(answers), str(error).encode())
        return
    for name in ("exit", "quit"):  # as without -S
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    os.write(int(answers), READY)
    if mode == "program":
        run(text)
    else:
        ProgramServer(int(requests), int(answers)).serve(text)


def run(text: bytes) -> None:
    """Run the source like `python program.py`."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["program.py"]
    try:
        exec(compile(text, "program.py", "exec", dont_inherit=True), module.__dict__)
    except MemoryError:
        sys.exit(MEMORY_EXIT)


class ProgramServer:
    """Executes the source as a module named `program`, without the code under `if __name__ ==
    "__main__":`, and answers requests, one line of JSON each."""

    def __init__(self, requests: int, answers: int):
        import json

        self.json = json
        self.requests = open(requests, "rb")
        self.answers = answers
        self.objects: list[object] = []  # results that are not plain stay here
        self.module = sys.modules["program"] = types.ModuleType("program")

    def serve(self, text: bytes) -> None:
        """Answer first whether the source ran, then the requests: `{"call": "f", "args": [...],
        "kwargs": {...}}`, or without `args` for the value of the expression itself."""
        self.module.__dict__.update(__objects__=self.objects, __ask__=self.ask)
        self.send(self.attempt(self.execute, text))
        while line := self.requests.readline():
            self.send(self.attempt(self.call, line))

    def execute(self, text: bytes) -> None:
        exec(compile(text, "program.py", "exec", dont_inherit=True), self.module.__dict__)

    def evaluate(self, expression: str) -> object:
        return eval(expression, self.module.__dict__)

    def call(self, line: bytes) -> object:
        request = self.json.loads(line)
        value = self.evaluate(request["call"])
        if "args" not in request:
            return value
        args = decode(request["args"], self.evaluate)
        kwargs = {name: decode(item, self.evaluate) for name, item in request["kwargs"].items()}
        return value(*args, **kwargs)

    def attempt(self, function: Callable[[bytes], object], argument: bytes) -> dict:
        """Return `{"value": ...}` or `{"error": [[names of the exception's classes], message]}`."""
        try:
            return {"value": encode(function(argument), self.keep)}
        except BaseException as error:  # whatever the program raises is its answer
            names = [kind.__name__ for kind in type(error).__mro__]
            try:
                return {"error": [names, message_of(error)[:1000]]}
            except BaseException:  # its __str__ raises too
                return {"error": [names, ""]}

    def keep(self, value: object) -> object:
        """Encode a value that is not plain: as an iterator, if it is one and not too long, else as
        an expression that refers to it."""
        if isinstance(value, bytearray):
            return {"bytes": value.hex()}
        if isinstance(value, PASSED_AS_ITERATORS):
            items = list(itertools.islice(value, ITEMS + 1))
            if len(items) <= ITEMS:
                return {"iterator": encode(items, self.keep)}
        self.objects.append(value)
        return {"object": f"__objects__[{len(self.objects) - 1}]"}

    def send(self, message: dict) -> None:
        data = memoryview(self.json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(self.answers, data) :]

    def ask(self, question: object) -> dict:
        """Return the parent's answer to a question of the source; see `Program.call`."""
        self.send({"ask": question})
        return self.json.loads(self.requests.readline())


def message_of(error: BaseException) -> str:
    if type(error) is KeyError and len(error.args) == 1 and isinstance(error.args[0], str):
        return str(error.args[0])  # str(KeyError) is a repr
    return str(error)
