"""The built-in model `--model tiny-images`, an Idefics3 with 1.2M random weights and the tokenizer
of `tiny`. A picture is 16 tokens, one for each cell of the task `squares` (pictures.py).
tools/make_tiny.py makes it."""

from pathlib import Path


def tiny_images() -> str:
    """Return the folder of the model."""
    return str(Path(__file__).with_name("tiny-images"))
