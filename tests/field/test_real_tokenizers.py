"""The converted tokenizers give the ids of the programs that their models were trained with."""

import importlib

import pytest
import sentencepiece
import tiktoken
from field.real_tokenizers import MISTRAL, PACKAGES, V1, tokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

# No two blanks: the converter of transformers 5 merges them in another order than SentencePiece.
TEXTS = [
    "Hello, world",
    "It's 12345 + 6.",
    "Ça va, 世界 🙂?",
    "a\n\nb\tc",
    "def f(x):\n\treturn x\n",
]
needs_packages = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="the tokenizers are not here; run make field"
)


def ids(name: str) -> list[list[int]]:
    return tokenizer(name)(TEXTS, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["mistral_v1", "llama2", "zephyr"])
def test_sentencepiece(name):
    original = sentencepiece.SentencePieceProcessor(model_file=str(MISTRAL / V1))
    assert ids(name) == original.encode(TEXTS)


@needs_packages  # for the time only
def test_tekken():
    original = Tekkenizer.from_file(MISTRAL / "tekken_240911.json")
    assert ids("tekken") == [original.encode(text, bos=False, eos=False) for text in TEXTS]


@needs_packages
@pytest.mark.parametrize("name", ["llama3", "llama4"])
def test_llama(name, monkeypatch):
    monkeypatch.syspath_prepend(PACKAGES)
    module = importlib.import_module(f"llama_models.{name}.tokenizer")
    original = module.Tokenizer(PACKAGES / "llama_models" / name / "tokenizer.model")
    assert ids(name) == [original.encode(text, bos=False, eos=False) for text in TEXTS]


@needs_packages
def test_qwen():
    ranks = TikTokenConverter.load_tiktoken_bpe(
        str(PACKAGES / "dashscope" / "resources" / "qwen.tiktoken")
    )
    original = tiktoken.Encoding(
        "qwen", pat_str=PRETOKENIZE_REGEX, mergeable_ranks=ranks, special_tokens={}
    )
    assert ids("qwen") == [original.encode(text) for text in TEXTS]
