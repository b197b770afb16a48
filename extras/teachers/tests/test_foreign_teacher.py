"""A teacher with another tokenizer: tokens as bytes, spans that both tokenizers cut, log-probs of
plain forwards, and completions that are left out."""

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from helpers import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

import distill
from common.metrics.meter import Meter
from common.model.distill import Student
from common.model.logprobs import TokenStats
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.packs.packing import pack_minibatches
from common.packs.sample import Completion
from common.text.encode import Encoder
from common.text.text_ids import TextIds
from common.text.tokenizer import load_tokenizer
from extras.teachers.foreign import ForeignTeacher, Spans, bytes_of_tokens, common_spans

TEXT = st.text(alphabet="a4bx \n'.é字🙂", min_size=1, max_size=8)


def byte_level():
    """Return a tokenizer with a token for each byte, and some tokens of two bytes, which may cut a
    character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "Ġ"), ("a", "b"), ("4", "4"), ("'", "s"), ("å", "Ń"), ("Ċ", "Ã")]
    vocabulary = {token: i for i, token in enumerate([*bytes_, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<s>", clean_up_tokenization_spaces=False
    )


TOKENIZERS = dict(characters=tiny_tokenizer, byte_level=byte_level)
ROW = dict(prompt="12+5=", _source="a:1")


def write_foreign_teacher(folder):
    """Write a Qwen3 with a byte-level tokenizer that has tokens of two characters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_level()
    config = AutoConfig.from_pretrained(tiny_model())
    config.hidden_size, config.num_hidden_layers, config.vocab_size = 64, 1, len(tokenizer)
    config.layer_types = config.layer_types[:1]
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        hf = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        hf.get_input_embeddings().weight.mul_(10)
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ---- tokens and spans ----


@pytest.mark.parametrize("tokenizer", [make() for make in TOKENIZERS.values()], ids=[*TOKENIZERS])
@given(text=TEXT)
def test_bytes_of_the_tokens_are_those_of_the_text(tokenizer, text):
    ids = TextIds(tokenizer).after("", text)
    bytes_of = bytes_of_tokens(tokenizer)
    assert b"".join(bytes_of[i] for i in ids) == text.encode()
    assert not bytes_of.keys() & set(tokenizer.all_special_ids)


def test_tokenizer_without_bytes_is_refused():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordPiece({"a": 0, "##b": 1}))
    words.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="the tokens of its tokenizer are no bytes .WordPiece"):
        bytes_of_tokens(PreTrainedTokenizerFast(tokenizer_object=words))


LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=8)


@given(ours=LENGTHS, theirs=LENGTHS)
def test_spans_are_the_shortest_parts_that_both_cut(ours, theirs):
    """Spans of both have the same bytes, no span can be divided, and sums over spans are those of
    the whole."""
    theirs.append(max(0, sum(ours) - sum(theirs)))
    ours.append(sum(theirs) - sum(ours))
    ends = [[*accumulate(lengths)] for lengths in (ours, theirs)]
    spans = common_spans(*ends)
    assert all(numbers == sorted(numbers) for numbers in spans)
    assert {*spans[0]} == {*spans[1]} == {*range(max(spans[0]) + 1)}
    sizes = [
        [sum(n for n, s in zip(lengths, numbers, strict=True) if s == span) for span in {*numbers}]
        for lengths, numbers in zip((ours, theirs), spans, strict=True)
    ]
    assert sizes[0] == sizes[1] and sum(sizes[0]) == sum(ours)
    inner = [
        {end for end, number in zip(e, numbers, strict=True)} - {*accumulate(sizes[0])}
        for e, numbers in zip(ends, spans, strict=True)
    ]
    assert not inner[0] & inner[1]


def test_each_token_of_a_span_has_an_equal_share_of_its_difference():
    """There are two sequences, with spans of two, one and three tokens."""
    old_T = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0, -2.0, -9.0]).double()
    starts_T = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    teacher = torch.tensor([-1.0, -0.25, -9.0, -4.0]).double()
    shares_T = torch.tensor([-0.5, -0.5, -0.25, -3.0, -3.0, -3.0, -4.0]).double()
    stats = TokenStats(old_T.clone().requires_grad_(), old_T, None)
    found = Spans(starts_T, shares_T).compare(stats, None)
    wanted = [(-1.0 + 3) / 2] * 2 + [-0.25 + 0.5] + [(-9.0 + 6) / 3] * 3 + [-4.0 + 9]
    assert (found.teacher_logprobs_T - old_T).tolist() == wanted
    assert torch.equal(found.reverse_kl_T, old_T - found.teacher_logprobs_T)
    total = found.teacher_logprobs_T.sum()
    torch.testing.assert_close(total, teacher.sum())
    assert not found.teacher_logprobs_T.requires_grad and found.divergence_T is None


# ---- models ----


def completion(ids: list[int], tokenizer=None, row: dict = ROW) -> Completion:
    tokenizer = tokenizer or tiny_tokenizer()
    prompt = [*Encoder(tokenizer, distill.Args()).prompt(row, ("prompt",))]
    mask = [False] * len(prompt) + [True] * len(ids)
    return Completion(prompt + ids, mask, len(prompt), row, rollout_logprobs=[0.0] * len(mask))


def foreign(folder, device, tokenizer=None, rows=(ROW,), **flags) -> ForeignTeacher:
    args = distill.Args(dtype="float32", estimator="sampled", prompt_format="plain", **flags)
    teacher = load_policy(str(folder), args, device, trainable=False, kind=ForeignTeacher)
    tokenizer = tokenizer or load_tokenizer(str(folder))
    teacher.set_tokenizers(tokenizer, tiny_model(), tiny_tokenizer(), [*rows], args)
    return teacher


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_foreign_teacher(tmp_path_factory.mktemp("foreign") / "hf")


def packed(groups, device):
    ((mb,),) = pack_minibatches(groups, range(len(groups)), 1, 500, device)
    return mb


def test_log_probs_of_completions_are_those_of_a_plain_forward(device, folder):
    """The advantages of a completion add up to log q(y) - log pi(y), where q reads the text in its
    own tokens: with EOS and without, with a character whose bytes are several tokens, and beside a
    completion without spans."""
    from transformers import AutoModelForCausalLM

    ours, theirs = tiny_tokenizer(), load_tokenizer(str(folder))
    eos = ours.eos_token_id
    texts = {"44 ab'sé字": [eos], "ab ab  a": [], "": [eos]}
    groups = [[completion(ours(text)["input_ids"] + end)] for text, end in texts.items()]
    groups.append([completion(ours.convert_tokens_to_ids(["4", "<0xC3>", "4"]))])
    teacher, meter = foreign(folder, device, temperature=0.7), Meter()
    mb = packed(teacher.read([[], *groups], meter)[1:], device)
    student = load_policy(tiny_model(), distill.Args(dtype="float32"), device, kind=Student)
    x = student.distill(mb, teacher.teach(mb), temperature=0.7)
    plain_T = student(mb, temperature=0.7).logprobs_T
    torch.testing.assert_close(x.logprobs_T, plain_T)
    sums = mb.sequence_sums(x.teacher_logprobs_T - x.logprobs_T.detach())
    hf = AutoModelForCausalLM.from_pretrained(folder).eval()
    for number, (text, end) in enumerate(texts.items()):
        prompt = theirs("12+5=")["input_ids"]
        ids = prompt + theirs(text)["input_ids"] + [theirs.eos_token_id] * len(end)
        with torch.no_grad():
            logits_TV = hf(torch.tensor([ids])).logits[0, :-1] / 0.7
        log_q = logits_TV.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[len(prompt) - 1 :]
        own = mb.index_N.tolist().index(number)
        log_p = mb.sequence_sums(plain_T)[own]
        assert sums[own].item() == pytest.approx((log_q.sum() - log_p).item(), abs=1e-4)
    assert meter.reduce() == dict(unaligned=0.25)


@pytest.mark.parametrize(
    "ids",
    [["<|turn|>", "a"], ["<0xC3>"], ["a", "<0xC3>", "a"], [*"<s>"], [*"a" * 40]],
    ids=["special", "half a character", "no UTF-8", "special for the teacher", "too long"],
)
def test_completion_without_spans_is_left_out_and_counted(device, folder, ids):
    ours = tiny_tokenizer()
    bad = completion([ours.convert_tokens_to_ids(token) for token in ids])
    good = completion(ours("17")["input_ids"] + [ours.eos_token_id])
    teacher, meter = foreign(folder, device, pack_tokens=30, max_new_tokens=20), Meter()
    read = teacher.read([[good, bad], [bad]], meter)
    assert [any(sample.loss_mask) for group in read for sample in group] == [True, False, False]
    assert meter.reduce()["unaligned"] == pytest.approx(2 / 3)
    assert math.isfinite(sum(read[0][1].streams["teacher_shares"]))
    assert [replace(x, streams={}, loss_mask=[]) for x in read[0]] == [
        replace(x, loss_mask=[]) for x in (good, bad)
    ]


def test_flags_that_the_teacher_cannot_follow_are_refused(device, folder):
    with pytest.raises(ValueError, match="--teacher .*: --prompt_format chat: the tokenizer has"):
        args = distill.Args(dtype="float32", estimator="sampled", prompt_format="chat")
        teacher = load_policy(str(folder), args, device, trainable=False, kind=ForeignTeacher)
        teacher.set_tokenizers(byte_level(), tiny_model(), tiny_tokenizer(), [ROW], args)
