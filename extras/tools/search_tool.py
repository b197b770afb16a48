"""`--tools search:FILE.jsonl`: BM25 search over the texts of a file, by the library bm25s."""

import importlib.util
import json
from functools import cache
from pathlib import Path

COLUMNS = ("text", "contents", "content")  # of the text of a row


class SearchIndex:
    """Index of a file, which all episodes share."""

    def __init__(self, label: str, file: str):
        """Raises `ValueError` with `label` if the file or the library is missing."""
        if not file.endswith((".jsonl", ".json")) or not Path(file).expanduser().is_file():
            problem = f"no file {file}" if file else "it names no file"
            raise ValueError(f"{label}: {problem}; give search:FILE.jsonl")
        if importlib.util.find_spec("bm25s") is None:
            raise ValueError(f"{label}: bm25s is not installed; pip install bm25s")
        self.label = label
        self.file = Path(file).expanduser()
        if not self._read():
            raise ValueError(f"{label}: the file has no row")

    def __call__(self) -> "SearchIndex":
        return self

    def build(self) -> None:
        """Build the index."""
        import bm25s

        self.texts = self._read()
        self.index = bm25s.BM25()
        self.index.index(bm25s.tokenize(self.texts, show_progress=False), show_progress=False)

    def search(self, query: str, count: int = 3) -> str:
        """Search a collection of texts, and return the best ones.

        Args:
            query: words to search for
            count: number of texts
        """
        import bm25s

        tokens = bm25s.tokenize(query, show_progress=False)
        count = min(max(1, count), len(self.texts))
        found, scores = self.index.retrieve(tokens, k=count, show_progress=False)
        hits = [self.texts[i] for i, score in zip(found[0], scores[0], strict=True) if score > 0]
        return "\n\n".join(hits) or "nothing found"

    def _read(self) -> list[str]:
        """Return the text of each row. Raises `ValueError` for a row without one."""
        with self.file.open(encoding="utf-8") as lines:
            return [self._text(i, line) for i, line in enumerate(lines, 1) if line.strip()]

    def _text(self, number: int, line: str) -> str:
        """Return the text of a row, with its title in front. Raises `ValueError` without one."""
        label = f"{self.label}: row {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{label} is not JSON: {error}") from error
        values = [row.get(name) for name in COLUMNS] if isinstance(row, dict) else []
        text = next((value for value in values if isinstance(value, str)), None)
        if text is None:
            raise ValueError(f"{label} has no column {', '.join(COLUMNS[:-1])} or {COLUMNS[-1]}")
        title = row.get("title")
        return f"{title}\n{text}" if isinstance(title, str) else text


@cache
def search_index(label: str, file: str) -> SearchIndex:
    """Return the index of a file, which is checked once. Raises as `SearchIndex` does."""
    return SearchIndex(label, file)
