"""Built-in models of a million parameters with a token for each character (tools/make_tiny.py).
They fit the tasks of common/text/tasks.py. `tiny` is a Qwen3 with random weights. `tiny-sft` is
`tiny` after sft.py on the task `arithmetic`, of which it solves 0.4: a start for RL. `tiny-images`
is an Idefics3 with random weights, for which a picture is 16 tokens; it lies with its extra."""

from pathlib import Path

from common.config.extra import has_extra

BUILT_IN = Path(__file__).with_name("built_in")
TINY_IMAGES = Path(__file__).parents[2] / "extras" / "images" / "tiny-images"


def tiny_model(name: str = "tiny") -> str:
    """Return the folder of a built-in model."""
    if name == "tiny-images" and not has_extra("images"):
        raise ValueError(f"--model {name} needs extras/images, which is not here")
    return str(TINY_IMAGES if name == "tiny-images" else BUILT_IN / name)
