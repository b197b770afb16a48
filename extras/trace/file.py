"""The file of a trace, `trace/step_<n>.jsonl.gz`: a header, then one line for each group."""

import gzip
import json
import zlib
from pathlib import Path

SCHEMA = 2


def write(path: Path, lines: list[dict]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.parent.mkdir(exist_ok=True)
    work = path.with_name(f"{path.name}.tmp")
    work.write_bytes(gzip.compress(text.encode(), 6, mtime=0))
    work.replace(path)


def read(path: Path) -> list[dict]:
    """Return the header and the groups of a trace. Raises `ValueError` if it is damaged or of
    another schema."""
    try:
        if not path.is_file():
            raise OSError("no regular file")
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        schema = lines[0].get("schema")
    except (OSError, EOFError, ValueError, LookupError, AttributeError, zlib.error) as error:
        raise ValueError(f"{path}: damaged; delete it") from error
    if schema != SCHEMA:
        raise ValueError(
            f"{path}: schema {schema}, expected {SCHEMA}; read it with its own version"
        )
    return lines
