"""What distillation learns from: a frozen model that scores what it is given, or what such a model said of the data's
completions, stored once.

Shapes: T own tokens, t computed ones, K most likely tokens, S = K and the rest.
"""


def require_top_k(top_k: int, path: str, teacher_path: str) -> None:
    """Raises `ValueError` for `--top_k` beyond the vocabulary that the checkpoints in the two folders share."""
    from transformers import AutoConfig

    sizes = [AutoConfig.from_pretrained(each).get_text_config().vocab_size for each in (path, teacher_path)]
    if top_k > min(sizes):
        raise ValueError(f"--top_k {top_k} is more than the {min(sizes)} tokens that --model and --teacher share")
