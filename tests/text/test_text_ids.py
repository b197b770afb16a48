"""Pieces of a text are the tokens of the whole text; what stands before a cut has the tokens that
it has alone."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.text.text_ids import TextIds

TEXT = st.text(alphabet="a4bx \n'.<s>é字", max_size=8)


def byte_level():
    """Tokenizer with GPT-2's rules for blanks, digits and words, and a token for each pair of
    blanks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("Ġ", "a"), ("a", "b"), ("4", "4"), ("'", "s")]
    vocabulary = {token: i for i, token in enumerate([*bytes_, *(a + b for a, b in merges), "<s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<s>", clean_up_tokenization_spaces=False
    )


def sentence_piece(legacy: bool, folder: Path):
    """Llama's tokenizer: with `legacy` each text between special tokens begins with a blank."""
    from transformers import AutoTokenizer

    mistral = pytest.importorskip("mistral_common")
    model = Path(mistral.__file__).parent / "data" / "tokenizer.model.v1"
    (folder / "tokenizer.model").write_bytes(model.read_bytes())
    config = dict(tokenizer_class="LlamaTokenizer", legacy=legacy, eos_token="</s>")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=["byte level", "legacy", "not legacy"])
def tokenizer(request, tmp_path_factory):
    if request.param == "byte level":
        return byte_level()
    return sentence_piece(request.param == "legacy", tmp_path_factory.mktemp("llama"))


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=200, derandomize=True)
@given(prompt=TEXT, completion=TEXT)
def test_prompt_has_the_tokens_that_it_has_alone(tokenizer, prompt, completion):
    before, after = TextIds(tokenizer).pieces(prompt + completion, [len(prompt)])
    assert before == ids(tokenizer, prompt)
    assert tokenizer.decode(before + after) == tokenizer.decode(ids(tokenizer, prompt + completion))


@settings(max_examples=100, derandomize=True)
@given(words=st.lists(st.sampled_from(["a", "4", "é", "x."]), min_size=1, max_size=5))
def test_pieces_between_special_tokens_are_those_of_the_whole_text(tokenizer, words):
    text = "<s>".join(words)
    ends = [len("<s>".join(words[: i + 1])) for i in range(len(words) - 1)]
    cuts = [cut for end in ends for cut in (end, end + len("<s>"))]
    pieces = TextIds(tokenizer).pieces(text, cuts)
    assert [i for piece in pieces for i in piece] == ids(tokenizer, text)
    assert pieces[1::2] == [ids(tokenizer, "<s>")] * len(ends)


@pytest.mark.parametrize(
    ("prompt", "completion"), [("Q\n\n", "4"), ("a  ", "b"), ("4", "4"), ("it'", "s"), ("a", "b")]
)
def test_continuation_cannot_change_the_prompt(prompt, completion):
    """GPT-2's rules split the last of several blanks off if a word follows, and these pairs are one
    token."""
    tokenizer = byte_level()
    before, after = TextIds(tokenizer).pieces(prompt + completion, [len(prompt)])
    assert before == ids(tokenizer, prompt) and tokenizer.decode(after) == completion
    assert before + after != ids(tokenizer, prompt + completion)


def test_continuation_begins_with_a_blank_only_if_the_text_has_one(tmp_path):
    """SentencePiece puts a blank in front of a text that is tokenised alone."""
    tokenizer = sentence_piece(False, tmp_path)
    for completion, tokens in (("4", "4"), (" 4", "▁ 4"), ("The", "The"), (" The", "▁The")):
        _, after = TextIds(tokenizer).pieces(f"A:{completion}", [2])
        assert tokenizer.convert_ids_to_tokens(after) == tokens.split()
