"""Transformers 4.57 reads exports as transformers 5 does: logits, token ids, end tokens, chat
template and dtype.

`make field` installs transformers 4.57 into a folder of its own and runs this test.
"""

import json
from pathlib import Path

import pytest
import torch
from field.reader import OLD, read, read_with_old

from bench.models import ARCHITECTURES, ARGS, checkpoint
from common.model.policy import load_policy, load_scalar_model
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import export_hf

pytestmark = pytest.mark.skipif(
    not OLD.is_dir(), reason="transformers 4.57 is not installed: run make field"
)
UNKNOWN_THERE = ("qwen3_5", "gemma4")  # families that only transformers 5 has
# Not models of images and text: transformers 5 saves the towers of these bases, which exports leave
# as they are, under names that transformers 4 does not read.
FAMILIES = [
    name
    for name, fields in ARCHITECTURES.items()
    if not name.startswith(UNKNOWN_THERE) and "text_config" not in fields
]
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0)
# Exports beside those of the families: fields of config.json that replace those of a family.
OTHERS = dict(
    yarn=("llama", dict(rope_parameters=YARN)),
    bfloat16=("qwen3", dict(dtype="bfloat16")),
    reward_model=("qwen3", {}),
)


def write_base(name: str, folder: Path) -> str:
    """Write a tiny base with a rotary base frequency that is no default."""
    family, fields = OTHERS.get(name, (name, {}))
    path = checkpoint(family, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    rope = config["rope_parameters"]
    if "rope_theta" in rope:
        rope["rope_theta"] = 70000.0
    else:  # one for each type of layer
        rope["full_attention"]["rope_theta"] = 70000.0
        # OLMo 3 has one of both in transformers 4.
        rope["sliding_attention"]["rope_theta"] = 70000.0 if family == "olmo3" else 300.0
    file.write_text(json.dumps(config))
    if family == "qwen2":  # transformers 5 always opens this family with this class
        qwen2_tokenizer().save_pretrained(folder)
    return path


def qwen2_tokenizer():
    """Return a tokenizer of bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    return Qwen2Tokenizer(
        vocab=vocabulary, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


@pytest.fixture(scope="module")
def exports(tmp_path_factory, device) -> dict[str, Path]:
    """Return a folder for each export, with the folders base/ and hf/."""
    folders = {name: tmp_path_factory.mktemp(name) for name in [*FAMILIES, *OTHERS]}
    for name, folder in folders.items():
        path = write_base(name, folder / "base")
        load = load_scalar_model if name == "reward_model" else load_policy
        export_hf(load(path, ARGS, device), load_tokenizer(path), folder / "hf")
    return folders


@pytest.fixture(scope="module")
def old(exports, tmp_path_factory) -> dict[str, dict]:
    hf = [str(folder / "hf") for folder in exports.values()]
    found = read_with_old(hf, tmp_path_factory.mktemp("old") / "results.pt")
    return dict(zip(exports, found.values(), strict=True))


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_transformers_4_reads_an_export_as_transformers_5(name, exports, old):
    here, there = read(str(exports[name] / "hf")), old[name]
    assert here["logits"].abs().max() > 0.01
    if name != "reward_model":  # its base has no such head
        assert torch.equal(here["logits"], read(str(exports[name] / "base"))["logits"])
    torch.testing.assert_close(there.pop("logits"), here.pop("logits"), atol=1e-5, rtol=0)
    assert there == here
    assert there["names"] == dict(missing_keys=[], unexpected_keys=[])
