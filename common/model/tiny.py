"""Built-in models of a million parameters, made by tools/make_tiny.py, for tests and first steps on
a CPU. Each character is a token. `tiny` is a Qwen3 with random weights. `tiny-sft` is `tiny` after
sft.py on the task `arithmetic` (common/text/tasks.py); it solves 0.4 of it, a start for RL.
`tiny-images` is an Idefics3 with random weights, which reads a picture as 16 tokens; its files are
in extras/images."""

from pathlib import Path

from common.config.extra import has_extra

BUILT_IN = Path(__file__).with_name("built_in")
TINY_IMAGES = Path(__file__).parents[2] / "extras" / "images" / "tiny-images"


def tiny_model(name: str = "tiny") -> str:
    """Return the folder of a built-in model."""
    if name == "tiny-images" and not has_extra("images"):
        raise ValueError(f"--model {name} needs extras/images, which is not here")
    return str(TINY_IMAGES if name == "tiny-images" else BUILT_IN / name)
