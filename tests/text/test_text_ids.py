"""A prompt has the tokens that an engine gets, and what follows it the tokens of the whole text
where these do not change the prompt's."""

import json
from pathlib import Path

import pytest
from helpers import tiny_tokenizer
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
@given(texts=st.lists(TEXT, max_size=4))
def test_a_text_has_the_tokens_of_the_tokenizer(tokenizer, texts):
    """Also if it begins as the text before it, whose parts are kept."""
    text_ids = TextIds(tokenizer)
    for text in ("<s>".join(texts[:n]) for n in range(len(texts) + 1)):
        assert text_ids.ids(text).tolist() == ids(tokenizer, text)
        assert text_ids.ids(text + "4<s>").tolist() == ids(tokenizer, text + "4<s>")


@settings(max_examples=200, derandomize=True)
@given(prompt=TEXT, completion=TEXT)
def test_prompt_and_completion_have_the_text_of_both(tokenizer, prompt, completion):
    text_ids = TextIds(tokenizer)
    before, after = text_ids.ids(prompt), text_ids.after(prompt, completion)
    if prompt:
        both = ids(tokenizer, prompt + completion)
        assert tokenizer.decode([*before, *after]) == tokenizer.decode(both)


@settings(max_examples=100, derandomize=True)
@given(words=st.lists(st.sampled_from(["a", "4", "é", "x."]), min_size=2, max_size=5))
def test_what_follows_a_special_token_has_the_tokens_of_the_whole_text(tokenizer, words):
    prompt = "<s>".join(words[:-1]) + "<s>"
    text_ids = TextIds(tokenizer)
    whole = text_ids.ids(prompt) + text_ids.after(prompt, words[-1])
    assert whole.tolist() == ids(tokenizer, prompt + words[-1])


@pytest.mark.parametrize("option", ["lstrip", "single_word", "normalized", "in another"])
def test_a_token_that_depends_on_the_text_before_it_parts_no_text(option):
    """It takes blanks, is no token in a word, or is read with the normaliser's text around it."""
    from tokenizers import AddedToken, normalizers

    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("b")
    options = {option: True} if option != "in another" else {}
    tokenizer.add_tokens([AddedToken("<m>", special=True, **dict(normalized=False) | options)])
    if option == "in another":
        tokenizer.add_tokens([AddedToken("a<m>", special=False, normalized=False)])
    for text in ("a <m> a", "<s> <m>4", "4a<m>x<s>", "4<m>", "<s><m><m>a", "<m>"):
        assert TextIds(tokenizer).ids(text).tolist() == ids(tokenizer, text)


@pytest.mark.parametrize(
    ("prompt", "completion"), [("Q\n\n", "4"), ("a  ", "b"), ("4", "4"), ("it'", "s"), ("a", "b")]
)
def test_continuation_cannot_change_the_prompt(prompt, completion):
    """GPT-2's rules split the last of several blanks off if a word follows, and these pairs are one
    token."""
    tokenizer = byte_level()
    before, after = ids(tokenizer, prompt), TextIds(tokenizer).after(prompt, completion).tolist()
    assert tokenizer.decode(after) == completion
    assert before + after != ids(tokenizer, prompt + completion)


def test_continuation_begins_with_a_blank_only_if_the_text_has_one(tmp_path):
    """SentencePiece puts a blank in front of a text that is tokenised alone."""
    tokenizer = sentence_piece(False, tmp_path)
    for completion, tokens in (("4", "4"), (" 4", "▁ 4"), ("The", "The"), (" The", "▁The")):
        after = TextIds(tokenizer).after("A:", completion).tolist()
        assert tokenizer.convert_ids_to_tokens(after) == tokens.split()


def test_a_text_that_no_token_parts_from_the_prompt_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"{before}x" for before in "qa\n."])
    with pytest.raises(ValueError, match="^the tokenizer cannot separate 'x' from the text before"):
        TextIds(tokenizer).after("q", "x")
