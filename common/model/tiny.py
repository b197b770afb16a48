"""Built-in models: Qwen3s of a million parameters with a token for each character. `tiny` has
random weights. `tiny-sft` is `tiny` after sft.py on the task `arithmetic`, of which it solves 0.4:
a start for RL.

They need no download, train in seconds on a CPU core, and use the same code as a large checkpoint.
The built-in tasks (common/data/tasks.py) are data for them. tools/make_tiny.py makes them."""

from pathlib import Path


def tiny_model(name: str = "tiny") -> str:
    """Return the folder of `tiny` or `tiny-sft`."""
    return str(Path(__file__).parent / "built_in" / name)
