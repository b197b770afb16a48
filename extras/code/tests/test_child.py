"""Values are exchanged exactly between a program and its parent, and calls are served inside."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple

import pytest
from helpers import PATIENCE
from hypothesis import given, settings
from hypothesis import strategies as st

from extras.code.sandbox import program
from extras.code.sandbox.child import decode, encode
from extras.code.sandbox.program import Limits, Program, ProgramError

pytestmark = pytest.mark.slow  # processes

confined = pytest.mark.skipif(program.problem() is not None, reason=str(program.problem()))
LIMITS = Limits(seconds=PATIENCE)


class Text(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__

    def __len__(self):
        return 10**9


class Whole(int):
    def __index__(self):
        return 7

    __int__ = __index__


class Items(list):
    def __iter__(self):
        return iter([1])


Point = namedtuple("Point", "x y")
VALUES = [
    0, -1, 2**63, -(2**63), -(2**63) - 1, 10**5000, True, False, None, 0.5, -0.0, math.inf,
    -math.inf, 1e-320, 1j, complex(-0.0, 1), "", "é𝒳", "\ud800", "\udc00\ud800", "\ud83d\ude00",
    "\x00\n\u2028", '"\\', b"", b"\xff\x00", [], (), set(), frozenset(), {}, [1, (2, [3])],
    {1: "a", "1": "b", (1, 2): [3], None: 4, 2.5: 5, frozenset({1}): 6, b"x": 7},
    {(1, (2,)), frozenset({3})}, {"value": 1}, {"tuple": [1]}, {"error": [[], ""]}, [[[[]]]],
    list(range(1000)),
]  # fmt: skip


def identical(a: object, b: object) -> bool:
    """Return whether values are equal, with equal types at every level."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, dict):
        return all(identical(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, set | frozenset):
        return a == b and Counter(map(type, a)) == Counter(map(type, b))
    return repr(a) == repr(b) if isinstance(a, float | complex) else a == b


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
)


@settings(max_examples=50)
@given(PLAIN)
def test_decode_inverts_encode(value):
    assert identical(decode(json.loads(json.dumps(encode(value)))), value)


def test_subclasses_are_encoded_as_their_built_in_base():
    given = [
        Text("ab"),
        Whole(5),
        Items([1, 2]),
        Point(1, 2),
        OrderedDict(a=1),
        defaultdict(list, a=[1]),
        Counter("aab"),
    ]
    crossed = decode(json.loads(json.dumps(encode(given))))
    assert identical(crossed, ["ab", 5, [1, 2], (1, 2), {"a": 1}, {"a": [1]}, {"a": 2, "b": 1}])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(
                [
                    "tuple",
                    "set",
                    "frozenset",
                    "dict",
                    "int",
                    "str",
                    "bytes",
                    "complex",
                    "object",
                    "x",
                ]
            ),
            inner,
        )
    ),
)


@settings(max_examples=50)
@given(JSON)
def test_decode_raises_only_value_error_and_type_error(data):
    try:
        decode(data)
    except (ValueError, TypeError):
        pass


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
def test_colliding_keys_are_refused(kind):
    """The parent would need minutes for them: the hash of k * (2**61 - 1) is 0."""
    keys = [{"int": hex(k * (2**61 - 1))} for k in range(1, 9_000)]
    with pytest.raises(ValueError, match="too many equal hashes"):
        decode({kind: [[key, 0] for key in keys] if kind == "dict" else keys})


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
def test_many_keys_with_selectable_hashes_are_refused(kind):
    for count, what in ((10_000, int), (20_000, str)):
        keys = [what(i) for i in range(count)]
        assert len(decode({kind: [[key, 0] for key in keys] if kind == "dict" else keys})) == count
    keys = list(range(10_001))
    with pytest.raises(ValueError, match="too many keys that are not strings"):
        decode({kind: [[key, 0] for key in keys] if kind == "dict" else keys})


# ---- in a program ----


@confined
def test_values_are_exchanged_exactly():
    with Program("def f(x): return x", LIMITS) as program:
        for value in VALUES:
            assert identical(program.call("f", [value]), value), value
        assert math.isnan(program.call("f", [math.nan]))
        assert program.call("f", kwargs=dict(x=(1,))) == (1,)


@confined
@pytest.mark.parametrize("result, value", [
    ("(i for i in (1, 2))", [1, 2]), ("map(str, [1])", ["1"]), ("range(3)", [0, 1, 2]),
    ("{1: 2}.items()", [(1, 2)]), ("{1: 2}.keys()", [1]), ("{1: 2}.values()", [2]),
    ("__import__('collections').deque([1])", [1]), ("zip('a', 'b')", [("a", "b")]),
    ("range(100_000)", list(range(100_000))),
])  # fmt: skip
def test_iterable_results_are_iterators(result, value):
    """Such a result equals no list, as in the program."""
    with Program(f"def f(): return {result}", LIMITS) as program:
        assert program.call("f") != value and identical(list(program.call("f")), value)


@confined
def test_bytearrays_become_bytes():
    with Program("def f(): return bytearray(b'a')", LIMITS) as program:
        assert identical(program.call("f"), b"a")


@confined
def test_errors_name_the_raised_exception():
    source = "class Own(KeyError): pass\ndef f(x): raise Own('no', x)"
    with Program(source, LIMITS) as program, pytest.raises(ProgramError) as error:
        program.call("f", [1])
    assert (
        error.value.types[:3] == ("Own", "KeyError", "LookupError")
        and error.value.message == "('no', 1)"
    )
    assert str(error.value) == "raised: Own: ('no', 1)"


@confined
def test_key_of_a_key_error_is_relayed_unchanged():
    with Program("def f(x): raise KeyError(x)", LIMITS) as program:
        for key, message in (("k", "k"), (1, "1")):
            with pytest.raises(ProgramError) as error:
                program.call("f", [key])
            assert error.value.message == message


@confined
def test_module_keeps_its_state_and_may_use_standard_streams():
    source = """
import sys, dataclasses, typing
print("hello")
print("there", file=sys.stderr)
rest = sys.stdin.read()
@dataclasses.dataclass
class A:
    x: "int"
n = 0
def f():
    global n
    n += 1
    print(n)
    return n, rest, typing.get_type_hints(A)["x"] is int
if __name__ == "__main__":
    n = 100
"""
    with Program(source, LIMITS) as program:
        assert program.call("f") == (1, "", True)
        assert program.call("f") == (2, "", True)
        assert program.call("lambda x: x + n", [1]) == 3
