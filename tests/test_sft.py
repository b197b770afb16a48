"""sft.py: the objective, datasets and lengths."""

import json
import math
import random
import shutil
from itertools import chain

import pytest
from helpers import assert_close_metrics, metrics, write_rows
from hypothesis import given
from hypothesis import strategies as st
from in_process import words
from naive import check
from processes import run
from text.chats import ASKED, END, HEAD, loop, said

import sft
from common.model.tiny import tiny_model
from common.text.encode import Encoder
from common.text.tokenizer import load_tokenizer

# Earlier turns lose their thoughts.
REWRITING = loop(HEAD + "{{ m.thinking if loop.last and m.thinking }}{{ m.content }}" + END)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of very different lengths."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [dict(question=words(rng, 3), answer=words(rng, rng.randint(1, 40))) for _ in range(60)]
    return write_rows(path, rows)


@pytest.fixture(scope="module")
def data(small, rows):
    return *small[:2], "--dataset", rows


@pytest.mark.slow
def test_bfloat16_loss_is_close_to_float32(data, tmp_path, main):
    flags = ("--max_steps", 2, "--batch_size", 8, "--eval_every", 0, *data, "--lr", 1e-3)
    main("sft", *flags, "--output_dir", tmp_path / "float32")
    main("sft", *flags, "--output_dir", tmp_path / "bfloat16", "--dtype", "bfloat16")
    assert_close_metrics(tmp_path / "float32", tmp_path / "bfloat16", ("loss",), rel=2e-2)


@pytest.mark.slow
def test_evaluation_uses_nll_with_every_loss(rows, data, tmp_path, main):
    found = {}
    for loss in ("nll", "dft"):
        main("sft", *data, "--loss", loss, "--max_steps", 1, "--batch_size", 8, "--eval_size", 6,
             "--lr", 1e-12, "--output_dir", tmp_path / loss)  # fmt: skip
        (found[loss],) = metrics(tmp_path / loss)
    assert found["nll"]["eval_loss"] == pytest.approx(found["dft"]["eval_loss"], rel=1e-6)
    assert found["dft"]["loss"] < found["nll"]["loss"] / 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "extra", "length", "limit"),
    [
        (512, (), 512, "the model's context of 512 tokens"),
        (2048, ("--pack_tokens", 300), 300, "--pack_tokens 300"),
    ],
)
def test_default_max_length_adapts_to_context_and_pack(
    context, extra, length, limit, data, tmp_path, main, capsys
):
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | dict(max_position_embeddings=context)
    (model / "config.json").write_text(json.dumps(config))
    flags = (*data, "--model", model, "--max_steps", 1, "--batch_size", 4, "--eval_every", 0)
    main("sft", *flags, *extra, "--output_dir", tmp_path / "run")
    said = f"--max_length {length}: the limit of {limit}"
    assert said in capsys.readouterr().out


# ---- the objective ----


@pytest.mark.parametrize("name", ["nll", "dft"])
@given(st.lists(st.tuples(st.floats(-700, 0)), min_size=1, max_size=8))
def test_loss_and_gradient_equal_naive_code(name, rows):
    """For a probability p with a constant weight w: d(-w log p)/dlogp = -w."""

    def naive(logp):
        weight = math.exp(logp) if name == "dft" else 1.0
        return -weight * logp, -weight

    check(lambda logprobs: sft.loss(name, logprobs), naive, rows)


def test_cost_of_a_template_that_rewrites_turns_is_said_once(small, tmp_path):
    """The line has the tokens of whole sequences, and those left if prefixes count once."""
    (tmp_path / "rewriting.jinja").write_text(REWRITING)
    chats = [[*[ASKED, said(x, thinking="hm")] * n] for n, x in enumerate(["2", "two", "II"], 1)]
    file = write_rows(tmp_path / "chats.jsonl", [dict(messages=chat) for chat in chats])
    args = sft.Args(prompt_format="chat", chat_template=str(tmp_path / "rewriting.jinja"))
    encoder = Encoder(load_tokenizer(str(small[1]), args), args)
    rows = [encoder.sft(dict(_source="x:1", messages=chat), ("messages",)) for chat in chats]
    whole = sum(len(sample.ids) for sample in chain(*rows))
    prefixes = [
        {tuple(s.ids[:n]) for s in row for n in range(len(s.ids) + 1)} - {()} for row in rows
    ]
    template = ("--prompt_format", "chat", "--chat_template", args.chat_template)
    flags = (*small[:2], "--dataset", file, *template, "--max_steps", 1, "--eval_every", 0)
    done = run(2, "sft.py", *flags, "--share_prefix", 0, "--output_dir", tmp_path / "run")
    counts = f"{whole / 3:,.0f} tokens a row are computed in place of"
    assert done.stdout.count(f"{counts} {sum(map(len, prefixes)) / 3:,.0f};") == 1
    assert done.stdout.count("the chat template rewrites earlier turns") == 1
