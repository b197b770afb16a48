"""The built-in models: their tokenizer restores every text, and `tiny-sft` can improve."""

import torch
from helpers import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from common.model.tiny import tiny_model
from common.text.tasks import arithmetic_rows

TOKENIZER = tiny_tokenizer()
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(texts)
def test_decoding_restores_every_text(text):
    """Characters outside the vocabulary become bytes."""
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text and None not in ids


def test_tiny_sft_solves_two_of_five_held_out_questions():
    rows = arithmetic_rows("test")
    model = AutoModelForCausalLM.from_pretrained(tiny_model("tiny-sft"))
    ids = torch.tensor([TOKENIZER(row["prompt"])["input_ids"] for row in rows])
    texts = TOKENIZER.batch_decode(
        model.generate(ids, max_new_tokens=4)[:, 6:], skip_special_tokens=True
    )
    solved = [text == row["answer"] for text, row in zip(texts, rows, strict=True)]
    assert 0.35 < sum(solved) / len(solved) < 0.5
