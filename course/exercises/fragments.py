"""Pieces of code by their text, whatever its line breaks. The exercises and the site name places in
the scripts with them."""

import re


def pattern(code: str) -> re.Pattern:
    """Return a pattern for a piece of code that ignores spaces, line breaks and trailing commas."""
    tokens = re.findall(r"\w+|\S", re.sub(r",(?=\s*[)\]}])", "", code))
    parts = [rf"(?:,\s*)?\{token}" if token in ")]}" else re.escape(token) for token in tokens]
    first, last = tokens[0], tokens[-1]
    begin = r"(?<!\w)" if first[0].isalnum() or first[0] == "_" else ""
    end = r"(?!\w)" if last[-1].isalnum() or last[-1] == "_" else ""
    return re.compile(begin + r"\s*".join(parts) + end)


def find(code: str, text: str, place: str) -> re.Match:
    """Return the match of a piece of code in a text. Raises `ValueError` unless it is there exactly
    once; `place` names the text."""
    matches = list(pattern(code).finditer(text))
    if len(matches) != 1:
        raise ValueError(f"{place} has {len(matches)} times {code!r}, expected 1")
    return matches[0]


def replace(before: str, after: str, text: str, place: str) -> str:
    """Return the text with another piece of code in place of the one that `find` returns."""
    match = find(before, text, place)
    return text[: match.start()] + after + text[match.end() :]
