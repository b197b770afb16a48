"""Model folders as a program sees them that opens them by transformers' automatic classes.

Tests import this module. As a program of its own, with another transformers on the path, it reads
several folders: `PYTHONPATH=build/field/transformers4 python tests/field/reader.py RESULTS FOLDER
...`"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
OLD = ROOT / "build" / "field" / "transformers4"
TEXT = "Q: 1+1=\u00e9?\n<|turn|>user\n 2  3<|end_of_turn|>\n"
CHAT = [dict(role="user", content="1+1="), dict(role="assistant", content="2")]


@torch.no_grad()
def read(folder: str) -> dict[str, object]:
    """Return logits, weights' names and dtype, end tokens, token ids, text and chat of a folder, by
    their names."""
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    # Eager: the SDPA of transformers below 5.22 leaves out Gemma 2's softcap.
    options = dict(dtype="auto", attn_implementation="eager", output_loading_info=True)
    model, info = model_class.from_pretrained(folder, **options)
    ids = torch.arange(3, 67)[None] * 5 % 350  # longer than the sliding windows
    return dict(
        logits=model.eval()(ids, use_cache=False).logits.float(),
        dtype=str(model.dtype),
        names={kind: sorted(info[kind]) for kind in ("missing_keys", "unexpected_keys")},
        ends=model.generation_config.eos_token_id if model.can_generate() else None,
        tokens=tokenizer(TEXT)["input_ids"],
        text=tokenizer.decode(tokenizer(TEXT)["input_ids"], skip_special_tokens=True),
        special=(tokenizer.eos_token, tokenizer.pad_token),
        chat=tokenizer.chat_template and tokenizer.apply_chat_template(CHAT, tokenize=False),
    )


def read_with_old(folders: list[str], results: Path) -> dict[str, dict]:
    """Return `read` of each folder by transformers 4, in one process for all."""
    environment = os.environ | dict(PYTHONPATH=str(OLD), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    command = [sys.executable, __file__, str(results), *folders]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(results)


if __name__ == "__main__":
    assert Path(transformers.__file__).is_relative_to(OLD), transformers.__file__
    results = {}
    for folder in sys.argv[2:]:
        print(folder, file=sys.stderr)  # in front of an error
        results[folder] = read(folder)
    torch.save(results, sys.argv[1])
