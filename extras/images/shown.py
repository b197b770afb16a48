"""Samples with images as texts for people."""

import re
from collections.abc import Sequence

from extras.images.image_files import IMAGE, PLACEHOLDER
from extras.images.reader import ImageSpan


def decoded(tokenizer, sample_ids: list[int], images: list[ImageSpan], ids: Sequence[int]) -> str:
    """Decode some ids of a sample with images: `[<image> x 64]` stands for 64 placeholders in a
    row."""
    text = tokenizer.decode(ids)
    start = images[0].start
    if start >= len(sample_ids):  # the images are cut off
        return text
    mark = tokenizer.decode([sample_ids[start]])
    runs = f"(?:{re.escape(mark)}){{2,}}"
    return re.sub(runs, lambda run: f"[{mark} x {len(run[0]) // len(mark)}]", text)


def with_placeholders(prompt: str | list[dict] | None) -> str | None:
    """Return a prompt, or the content of its last message, with `<image>` for each image."""
    if isinstance(prompt, list):  # parts
        prompt = "".join(part["text"] for part in prompt)
    return prompt and prompt.replace(IMAGE, PLACEHOLDER)
