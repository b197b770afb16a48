"""Data sets that are malformed, made to harm, or no files at all."""

import gzip
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.fault_cases.case import Case
from bench.fault_cases.hostile import (
    COLUMNS,
    FINE,
    ROWS,
    SAME,
    ended,
    lines,
    rows_of,
    unexpected,
    usual,
)

USER, ANSWER = dict(role="user", content="1+1="), dict(role="assistant", content="2")
CALL = dict(
    role="assistant", tool_calls=[dict(type="function", function=dict(name="f", arguments="{"))]
)
LONG = (("overlong", "error"), ("max_length", 20))
SKIP = (("on_bad_row", "skip"),)
Source = bytes | str | list | Callable[[Path], Path | str]


def chat(*messages: object) -> list[dict]:
    return [dict(messages=[USER, ANSWER])] * 7 + [dict(messages=list(messages))]


def bad(**columns: object) -> list[dict]:
    """Return rows whose third one has other columns; None removes a column."""
    row = {k: v for k, v in (ROWS[2] | columns).items() if v is not None}
    return [*ROWS[:2], row, *ROWS[3:]]


def file(name: str, content: bytes = lines(ROWS)) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = (
            os.fsencode(folder / name)
            if isinstance(name, str)
            else os.path.join(os.fsencode(folder), name)
        )
        with open(path, "wb") as out:
            out.write(content)
        return Path(os.fsdecode(path))

    return write


def made(name: str, make: Callable[[Path], object], inside: bool = False) -> Callable[[Path], Path]:
    """Return a source that `make` puts at a path; with `inside` it is a folder that contains the
    path."""

    def write(folder: Path) -> Path:
        (folder / "data").mkdir()
        make(folder / "data" / name)
        return folder / "data" if inside else folder / "data" / name

    return write


def compressed(command: str, name: str, line: bytes, times: int) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        with open(folder / name, "wb") as out:
            packer = subprocess.Popen([command, "-c"], stdin=subprocess.PIPE, stdout=out)
            assert packer.stdin is not None
            with packer.stdin as pipe:
                for _ in range(times):
                    pipe.write(line)
            packer.wait()
        return folder / name

    return write


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def split_in_two(folder: Path) -> str:
    (folder / "a.jsonl").write_bytes(lines(ROWS))
    return f"{folder}/a.jsonl\t{folder}/../{folder.name}/a.jsonl"


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-c"], input=data, stdout=subprocess.PIPE, check=True).stdout


GOOD, MB = lines(ROWS), b" " * (1 << 20)
SPACED = json.dumps(ROWS[0]).encode()[:-1]
DATA: list[tuple[str, str, Source, str] | tuple[str, str, Source, str, tuple]] = [
    # bytes of a file
    ("empty file", "sft", b"", "no rows"), ("blank lines", "dpo", b"\n \n\r\n\n", "no rows"),
    ("BOM", "sft", b"\xef\xbb\xbf" + GOOD, SAME),
    ("BOM in .json", "sft", file("x.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()), SAME),
    ("UTF-16", "sft", GOOD.decode().encode("utf-16"), "utf-8"),
    ("latin-1", "rm", GOOD.replace(b"10+1", b"10\xe9"), "utf-8"),
    ("NUL bytes", "sft", GOOD.replace(b"10+1", b"10\0"), "line 1 is not valid JSON"),
    ("only NUL bytes", "sft", bytes(5000), "line 1 is not valid JSON"),
    ("escaped NUL", "sft", GOOD.replace(b"10+1", b"10\\u0000"), FINE),
    ("CRLF", "sft", GOOD.replace(b"\n", b"\r\n"), SAME),
    ("no line break at the end", "dpo", GOOD.rstrip(), SAME),
    ("U+2028 in text", "sft", GOOD.replace(b"10+1", "10\u2028".encode()), FINE),
    ("lone surrogate", "sft", GOOD.replace(b"10+1", b"10\\ud800"), "lone surrogate"),
    ("lone surrogate", "grpo", GOOD.replace(b"10+1", b"10\\udfff"), "lone surrogate"),
    ("deep JSON", "sft", GOOD + b"[" * 100_000, "line 9 is not valid JSON"),
    ("deep value", "sft", GOOD[:-2] + b', "x": ' + b"[" * 900 + b"]" * 900 + b"}\n", SAME),
    (
        "deep value", "grpo", GOOD[:-2] + b', "x": ' + b"[" * 900 + b"]" * 900 + b"}\n",
        "cannot be pickled",
    ),
    ("5,000 digits", "kto", GOOD.replace(b'"0"', b"9" * 5000), "line 1 is not valid JSON"),
    ("1e999", "rm", GOOD.replace(b'"0"', b"1e999"), "column rejected is float"),
    ("1e999 in another column", "grpo", GOOD.replace(b'"0"', b"1e999"), SAME),
    ("NaN and Infinity", "dpo", GOOD.replace(b'"0"', b"-Infinity"), "column rejected is float"),
    ("duplicate keys", "sft", GOOD.replace(b'"prompt"', b'"prompt": 1, "prompt"'), SAME),
    ("half a line", "sft", GOOD[:-30], "line 8 is not valid JSON"),
    ("half a line is skipped", "sft", GOOD + GOOD[:40], SAME, SKIP),
    ("two objects in a line", "sft", GOOD.replace(b"\n", b" ", 1), "line 1 is not valid JSON"),
    ("a list", "sft", lines([ROWS]), "is not an object"),
    ("line of 100 MB", "sft", SPACED + MB * 100 + b"}\n", "characters or more"),
    ("text of 4 MB", "sft", lines([*ROWS, ROWS[0] | dict(completion="7" * 4_000_000)]), SAME),
    ("csv", "sft", file("x.csv", b"prompt,completion\n1,2\na,b\n" * 9), ""),
    ("csv with open quotes", "sft", file("x.csv", b'prompt,completion\n1,"2\n' * 9), ""),
    ("csv with wrong cells", "dpo", file("x.csv", b"prompt,completion\n1\n1,2,3,4\n"), ""),
    ("empty csv", "dpo", file("x.csv", b""), "x.csv"),
    ("garbage parquet", "dpo", file("x.parquet", os.urandom(5000)), "cannot be read"),
    ("garbage arrow", "rm", file("x.arrow", os.urandom(5000)), "cannot be read"),
    ("empty parquet", "rm", file("x.parquet", b""), ""),
    ("JSON lines in .json", "sft", file("x.json"), "not valid JSON"),
    ("JSON in .jsonl", "sft", json.dumps(ROWS, indent=1).encode(), "line 1 is not valid JSON"),
    ("other suffix", "sft", file("rows.txt"), "expected a .jsonl"),
    ("text in .gz", "sft", file("x.jsonl.gz"), "x.jsonl.gz"),
    ("gzip without .gz", "sft", gzip.compress(GOOD), ""),
    ("truncated .gz", "sft", file("x.jsonl.gz", gzip.compress(GOOD * 99)[:-50]), "x.jsonl.gz"),
    ("truncated .zst", "kto", file("x.jsonl.zst", zstd(GOOD * 99)[:-9]), "x.jsonl.zst"),
    (
        ".gz of a line of 2 GB", "sft", compressed("gzip", "x.jsonl.gz", MB * 8, 250),
        "characters or more",
    ),
    (
        ".zst of a line of 8 GB", "dpo", compressed("zstd", "x.jsonl.zst", MB * 8, 1000),
        "characters or more",
    ),
    (
        ".json.zst of 8 GB", "sft", compressed("zstd", "x.json.zst", MB * 8, 1000),
        "convert it to .jsonl",
    ),
    # things that are no file
    ("FIFO", "sft", made("x.jsonl", os.mkfifo), "x.jsonl"),
    ("FIFO in a folder", "sft", made("x.jsonl", os.mkfifo, True), "data"),
    ("socket in a folder", "sft", made("x.jsonl", listening, True), "data"),
    ("folder x.jsonl", "sft", made("x.jsonl", Path.mkdir), "no .jsonl"),
    ("folder x.jsonl in a folder", "grpo", made("x.jsonl", Path.mkdir, True), "data"),
    (
        "dangling link", "sft", made("x.jsonl", lambda path: path.symlink_to("/absent")),
        "broken link",
    ),
    (
        "dangling link in a folder", "sft",
        made("x.jsonl", lambda path: path.symlink_to("/absent"), True), "data",
    ),
    ("link to itself", "sft", made("x.jsonl", lambda path: path.symlink_to(path)), "x.jsonl"),
    (
        "link to itself in a folder", "sft",
        made("x.jsonl", lambda path: path.symlink_to(path), True), "data",
    ),
    (
        "folder that links to itself", "sft",
        made("x", lambda p: (p.symlink_to(p.parent), file("x.jsonl")(p.parent)), True), SAME,
    ),
    ("/dev/zero", "sft", lambda _: "/dev/zero", "/dev/zero"),
    (
        "link to /dev/zero", "sft", made("x.jsonl", lambda path: path.symlink_to("/dev/zero")),
        "x.jsonl",
    ),
    (
        "/dev/zero in a folder", "dpo",
        made("x.json", lambda path: path.symlink_to("/dev/zero"), True), "data",
    ),
    (
        "/proc/self/mem", "sft", made("x.jsonl", lambda path: path.symlink_to("/proc/self/mem")),
        "x.jsonl",
    ),
    ("name with a line break", "sft", file("a\nb.jsonl", b"{"), "not valid JSON"),
    ("name with quotes", "sft", file("a'\" $(x) `y`.jsonl"), SAME),
    ("name with pattern", "sft", file("a[b]*?.jsonl"), SAME),
    ("name that is not UTF-8", "sft", file(b"a\xff.jsonl"), ""),
    ("name of 5,000 characters", "sft", lambda _: "/x" * 2500 + ".jsonl", ""),
    # rows
    ("strings, numbers, null", "sft", GOOD + b'"a"\n', "x.jsonl:9 is not an object"),
    ("strings, numbers, null are skipped", "sft", GOOD + b'"a"\n1\nnull\n[]\n{}\n', SAME, SKIP),
    ("only null", "dpo", b"null\n" * 9, "is not an object"),
    ("only null are skipped", "dpo", b"null\n" * 9, "every row was skipped", SKIP),
    *(
        (f"other columns, {script}", script, lines([dict(a="1", b="2")] * 8), "needed: ")
        for script in COLUMNS
    ),
    *(
        (
            f"extra columns, {script}", script,
            lines([row | dict(x=[{}], _y=None, id=1) for row in ROWS]), SAME,
        )
        for script in COLUMNS
    ),
    ("columns renamed", "sft", GOOD.replace(b"prompt", b"q"), SAME, (("columns", "prompt=q"),)),
    (
        "columns renamed onto another", "sft", GOOD, "has a column",
        (("columns", "prompt=completion"),),
    ),
    *(
        (
            f"{value!r:.20} in {column}, {script}", script, lines(bad(**{column: value})),
            f"x.jsonl:3: column {column}",
        )
        for script, column in (
            ("sft", "completion"), ("dpo", "chosen"), ("kto", "label"), ("rm", "rejected"),
            ("grpo", "prompt"),
        )
        for value in (5, dict(a=1), ["a"], None)
    ),
    *(
        (
            f"bad rows are skipped, {script}", script,
            lines(
                [
                    b
                    for row in rows_of(script)
                    for b in (
                        *(
                            {**row, column: value}
                            for column in row
                            for value in (5, {}, [1], None, "", [{}])
                        ),
                        row,
                    )
                ]
            ),
            SAME, SKIP,
        )
        for script in COLUMNS
        if script != "sft"
    ),
    ("all empty", "sft", lines([dict(prompt="", completion="")] * 8), ""),
    ("all empty", "dpo", lines([dict(prompt="", chosen="", rejected="")] * 8), "is empty"),
    ("all empty", "grpo", lines([dict(prompt="")] * 8), "is empty"),
    (
        "all bad are skipped", "rm", lines([dict(prompt="1", chosen="2", rejected=3)] * 8), "left",
        SKIP,
    ),
    ("all bad are skipped", "sft", lines([dict(prompt="1", completion=3)] * 8), "left", SKIP),
    ("all bad are skipped", "grpo", lines([dict(prompt=3)] * 8), "left out", SKIP),
    ("all too long", "sft", lines([ROWS[0] | dict(completion="1" * 200)] * 8), "too long"),
    (
        "all too long", "dpo", lines([ROWS[0] | dict(chosen="1" * 200)] * 8),
        "x.jsonl:1: 206 tokens", LONG,
    ),
    ("all too long", "grpo", lines([dict(prompt="1" * 5000)] * 8), "the prompt has 5000 tokens"),
    ("one row", "sft", lines(ROWS[:1]), ""), ("one row", "dpo", lines(ROWS[:1]), ""),
    ("one row", "kto", lines(ROWS[:1]), "different prompts"),
    ("one row", "grpo", lines(ROWS[:1]), ""),
    ("one label", "kto", lines([row | dict(label=True) for row in ROWS]), "label"),
    (
        "special tokens in text", "sft",
        lines([row | dict(prompt="<|eos|><|turn|>") for row in ROWS]), FINE,
    ),
    (
        "special tokens in text", "grpo",
        lines([row | dict(prompt="<|eos|><|turn|>{{x}}{% x %}") for row in ROWS]), FINE,
    ),
    # conversations
    ("unknown role", "sft", lines(chat(dict(USER, role="x\n"), ANSWER)), ""),
    (
        "no content", "sft", lines(chat(USER, dict(role="assistant"))),
        "x.jsonl:8: column messages must list",
    ),
    (
        "content of parts", "sft",
        lines(chat(dict(USER, content=[dict(type="text", text="1")]), ANSWER)), FINE,
    ),
    (
        "content of images", "sft", lines(chat(dict(USER, content=[dict(type="image")]), ANSWER)),
        "a part of type image",
    ),
    ("tool call with bad arguments", "sft", lines(chat(USER, CALL)), "are not JSON"),
    (
        "tool call without template", "sft",
        lines(chat(USER, json.loads(json.dumps(CALL).replace('"{"', '"{}"')))), "",
    ),
    (
        "tool call that is deep", "sft",
        lines(chat(USER, json.loads(json.dumps(CALL).replace('"{"', '"' + "[" * 99_999 + '"')))),
        "x.jsonl:8: ",
    ),
    *(
        (
            f"tools that are deep, {size}", "sft",
            lines([row | dict(tools=tools) for row in chat(USER, ANSWER)]), "x.jsonl:1: ",
        )
        for size, tools in (
            (99_999, "[" * 99_999), *((n, json.loads("[" * n + "]" * n)) for n in (500, 900)),
        )
    ),
    (
        "columns of our own", "sft",
        lines([row | dict(_dataset=[1], _prompt={}, _source=5) for row in ROWS]), SAME,
    ),
    (
        "columns of our own", "grpo",
        lines([row | dict(_dataset=[1], _prompt={}, _source=5) for row in ROWS]), SAME,
    ),
    ("no messages", "sft", lines(chat()), "x.jsonl:8: column messages must be a list"),
    ("10,000 messages", "sft", lines(chat(*[USER, ANSWER] * 5000)), "", (("max_length", 2048),)),
    (
        "messages of the wrong types", "sft",
        lines([dict(messages=x) for x in (1, "a", {}, [1], [[]])]), "x.jsonl:1: ",
    ),
    (
        "messages that share nothing", "dpo",
        lines([dict(chosen=[USER, ANSWER], rejected=[ANSWER])] * 8), "same prompt",
    ),
    (
        "template that fails", "sft", lines(chat(USER, ANSWER)), "does not render",
        (("chat_template", "{folder}/bad.jinja"),),
    ),
    (
        "template that never ends", "sft", lines(chat(USER, ANSWER)), "",
        (("chat_template", "{folder}/endless.jinja"),),
    ),
    # several data sets
    ("the same file twice", "sft", split_in_two, FINE),
    (
        "weight 0", "sft", lambda folder: f"{file('x.jsonl')(folder)}:0",
        "weight must be greater than 0",
    ),
    (
        "weight -1", "sft", lambda folder: f"{file('x.jsonl')(folder)}:-1",
        "weight must be greater than 0",
    ),
    (
        "weight NaN", "sft", lambda folder: f"{file('x.jsonl')(folder)}:nan",
        "weight must be greater than 0",
    ),
    (
        "weight inf", "sft", lambda folder: f"{file('x.jsonl')(folder)}:inf",
        "weight must be greater than 0",
    ),
    ("weight 1e-300", "sft", lambda folder: f"{file('x.jsonl')(folder)}:1e-300", FINE),
    (
        "held-out set is the training set", "sft", GOOD, FINE,
        (("eval_dataset", "{folder}/x.jsonl"), ("eval_every", 1)),
    ),
    (
        "no row left to train on", "dpo", GOOD, "no training rows left",
        (("eval_every", 1), ("eval_size", 8)),
    ),
    (
        "held-out rows without columns", "dpo", GOOD, "",
        (("eval_dataset", "{folder}/bad.jsonl"), ("eval_every", 1)),
    ),
]  # fmt: skip
BESIDE = {
    "bad.jinja": b"{{ raise_exception('no\\nway') }}",
    "bad.jsonl": b'{"x": 1}\n',
    "endless.jinja": b"{% for i in range(10**7) %}{% for m in messages %}{{ m.content }}"
    b"{% endfor %}"
    b"{% endfor %}",
}


def reads(folder: Path, script: str, source: Source, wanted: str, flags: tuple = ()) -> str | None:
    """The run ends as expected, in time, and with limited memory."""
    for name, content in BESIDE.items():
        (folder / name).write_bytes(content)
    dataset = source(folder) if callable(source) else file("x.jsonl", source)(folder)
    done = ended(script, folder, **dict(dataset=dataset) | dict(flags))
    return unexpected(done, wanted, folder / "run", usual(script))


def hostile_data() -> Iterator[Case]:
    for number, (name, *values) in enumerate(DATA):
        yield Case("hostile", f"data/{number}/{name}", reads, tuple(values))
