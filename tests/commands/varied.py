"""A reward that a random model earns: it differs among completions."""

import zlib


def varied(completion: str, row: dict) -> float:
    return float(zlib.crc32(completion.encode()) % 97)


varied.reads = "turn"
