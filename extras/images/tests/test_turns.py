"""Images in several turns of a conversation, also where the template rewrites earlier turns."""

import copy
import json

import pytest
import torch
from helpers import assert_close_metrics, write_rows
from PIL import Image
from processes import run
from transformers import AutoImageProcessor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from common.model.policy import load_policy
from common.packs.packing import pack_groups
from common.packs.sample import Sample
from common.text.columns import SFT_COLUMNS
from common.text.load import load_samples
from common.text.tokenizer import load_tokenizer
from common.train.inputs import digests_of_rows
from extras.images.tests.checkpoints import picture, rewriting
from sft import Args, encode_row

FILES = [f"{i}.png" for i in range(3)]
PART = dict(type="image")


def asked(*parts: dict | str) -> dict:
    parts = [dict(type="text", text=part) if isinstance(part, str) else part for part in parts]
    return dict(role="user", content=parts)


def said(text: str, thought: str = "hm") -> dict:
    return dict(role="assistant", content=f"<think>{thought}</think>{text}")


CHATS = {
    "in each turn": (
        [asked(PART, "What is it?"), said("A cat."), asked("And ", PART, PART), said("Dogs.")],
        FILES,
    ),
    "later": ([asked("Hi!"), said("Hi."), asked("And ", PART, "?"), said("A dog.")], FILES[:1]),
    "the same again": (
        [asked(PART), said("A cat."), asked(PART), said("The same."), asked("Sure?"), said("Y")],
        [FILES[0], FILES[0]],
    ),
    "none": ([asked("Hi!"), said("Hi."), asked("Sure?"), said("Yes.")], []),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with three pictures, two of them with equal tokens, and the chats as rows."""
    folder = tmp_path_factory.mktemp("chats")
    for i, size in enumerate([(60, 40), (60, 40), (90, 30)]):
        picture(*size, i).save(folder / FILES[i])
    rows = [dict(messages=messages, images=files) for messages, files in CHATS.values()]
    write_rows(folder / "rows.jsonl", rows)
    return folder


def template(family: str, checkpoint, folder) -> str:
    """Write a template of a family that drops the thoughts of earlier turns."""
    file = folder / f"{family}.jinja"
    file.write_text(rewriting(load_tokenizer(str(checkpoint)).chat_template))
    return str(file)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("rewrites", [True, False])
@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_each_sequence_has_the_images_up_to_its_last_prompt(
    family, rewrites, chat, checkpoints, encoder_of, folder
):
    """Its ids and the places of its images are those of the prompt that asks for its last turn."""
    path = checkpoints(family)
    flags = dict(chat_template=template(family, path, folder)) if rewrites else {}
    encoder = encoder_of(family, **flags)
    messages, files = CHATS[chat]
    row = dict(_source="x:1", _folder=str(folder), messages=messages, images=files)
    group = encoder.sft(dict(row), ("messages",))
    shown = [folder / file for file in files]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(group) == (len(turns) if rewrites else 1)
    for sample, i in zip(group, turns[-len(group) :], strict=True):
        count = json.dumps(messages[:i]).count('"image"')
        prompt = dict(row, prompt=messages[:i], images=files[:count])
        ids = encoder.prompt(prompt, ("prompt",))
        assert sample.ids[: len(ids)] == ids
        if family == "idefics3":
            assert [*ids] == ids_of_the_processor(path, encoder.tokenizer, messages[:i], shown)
        assert [*map(tuple, sample.images)] == [*map(tuple, prompt.get("_images", []))]
        assert [span.file for span in sample.images] == [*map(str, shown[:count])]
        for span in sample.images:
            placeholders = sample.ids[span.start : span.end]
            assert placeholders.count(encoder.images.reader.image_id) == span.patches // 4
        text = encoder.tokenizer.decode(sample.ids[len(ids) :])
        assert text == messages[i]["content"] + "<|end_of_turn|>"
        assert all(sample.loss_mask[len(ids) :])


def ids_of_the_processor(path, tokenizer, messages: list[dict], files: list) -> list[int]:
    made = AutoImageProcessor.from_pretrained(path, backend="pil")
    processor = Idefics3Processor(made, copy.deepcopy(tokenizer), 4)
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    images = [Image.open(file) for file in files[: asked.count("<image>")]] or None
    return processor(text=[asked], images=images, add_special_tokens=False)["input_ids"][0]


def train_flags(family: str, vision: str, checkpoints, folder) -> dict:
    path = checkpoints(family)
    data = dict(model=str(path), dataset=[str(folder / "rows.jsonl")], eval_every=0, max_length=512)
    return data | dict(vision=vision, chat_template=template(family, path, folder))


@pytest.mark.parametrize("vision", ["frozen", "train"])
@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_loss_and_gradient_of_shared_prefixes_are_those_of_whole_sequences(
    family, vision, checkpoints, folder, device
):
    args = Args(**train_flags(family, vision, checkpoints, folder))
    tokenizer = load_tokenizer(args.model, args)
    (samples, _), _ = load_samples(
        encode_row, SFT_COLUMNS, tokenizer, args, apart=True, image_args=args
    )
    assert [len(group) for group in samples] == [2, 2, 3, 2]
    policy = load_policy(args.model, args, device, image_args=args)
    found = []
    for share_prefix in (0, 1):
        policy.zero_grad()
        losses = []
        packs = pack_groups([*samples], 512, device, share_prefix, together=False)
        for mb in packs:
            losses.append(-(policy(mb).logprobs_T * mb.loss_mask_T).sum() / 100)
            losses[-1].backward()
        computed = sum(len(mb.model_tokens.targets_T) for mb in packs)
        gradient = [p.grad.full_tensor() for p in policy.parameters() if p.grad is not None]
        found.append((computed, sum(losses).item(), gradient))
    (whole, loss, gradient), (shared, same_loss, same_gradient) = found
    assert shared < 0.75 * whole and same_loss == pytest.approx(loss, rel=1e-6)
    norm = max(x.abs().max() for x in gradient)
    for one, other in zip(gradient, same_gradient, strict=True):
        assert (one - other).abs().max() < 1e-5 * norm


@pytest.mark.parametrize(("family", "vision"), [("idefics3", "train"), ("qwen3_vl", "train")])
def test_two_ranks_train_turns_with_images_like_one(
    family, vision, checkpoints, folder, main, tmp_path
):
    given = train_flags(family, vision, checkpoints, folder) | dict(dataset=folder / "rows.jsonl")
    flags = [x for name, value in given.items() for x in (f"--{name}", value)]
    flags += ["--max_steps", 1, "--batch_size", 4, "--pack_tokens", 512, "--trace_every", 0]
    main("sft", *flags, "--share_prefix", 0, "--output_dir", tmp_path / "one")
    run(2, "sft.py", *flags, "--share_prefix", 1, "--output_dir", tmp_path / "two")
    names = ("loss", "grad_norm", "num_tokens")
    assert_close_metrics(tmp_path / "one", tmp_path / "two", names, rel=1e-5)


@pytest.mark.parametrize("ends", [("a", "a", "a"), ("ab", "a", "ab"), ("", "ab", "abc")])
@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_an_image_is_shared_whole_or_not_at_all(
    family, ends, checkpoints, encoder_of, folder, device
):
    """With a user's template, nothing may stand between an image and the text after it. One
    sequence ends with another image of as many tokens."""
    encoder = encoder_of(family)
    group = []
    for end, last in zip(ends, (FILES[0], *FILES[:2]), strict=True):
        ids, spans = [5], []
        for file in (FILES[0], last):
            shown, span = encoder.images._show(str(folder / file))
            spans.append(span._replace(start=len(ids) + span.start, end=len(ids) + span.end))
            ids += shown[: span.end]
        said = encoder.tokenizer.convert_tokens_to_ids([*end])
        mask = [False] * len(ids) + [True] * len(said)
        group.append(Sample(ids + said, mask, row=dict(_images=spans)))
    path = checkpoints(family)
    args = Args(model=str(path), vision="frozen")
    policy = load_policy(str(path), args, device, image_args=args)
    found = []
    for share_prefix in (0, 1):
        (mb,) = pack_groups([group], 512, device, share_prefix)
        found.append(policy(mb).logprobs_T[mb.loss_mask_T])
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


def loaded(family: str, checkpoints, folder, **flags) -> list[list[Sample]]:
    """Return the samples of the chats as sft.py draws them."""
    args = Args(**train_flags(family, "frozen", checkpoints, folder) | dict(epochs=1.0) | flags)
    tokenizer = load_tokenizer(args.model, args)
    (samples, _), _ = load_samples(
        encode_row,
        SFT_COLUMNS,
        tokenizer,
        args,
        stream=args.streaming,
        apart=True,
        image_args=args,
    )
    order = samples.order(args)
    groups = [samples[i] for i in order.draw(len(CHATS))]
    return sorted(groups, key=lambda group: [sample.ids for sample in group])


def test_a_row_that_is_cut_within_an_image_is_refused(checkpoints, folder):
    """A cut between images is allowed, and a sequence without trained tokens is left out."""
    groups = loaded("qwen3_vl", checkpoints, folder)
    (two,) = (group for group in groups if len(group[-1].images) == 3)
    _, second, _ = two[-1].images
    for length in (second.start + 1, second.end):
        with pytest.raises(ValueError, match=r"^rows.jsonl:1: its first \d+ tokens end within an"):
            loaded("qwen3_vl", checkpoints, folder, overlong="truncate", max_length=length)
    groups = loaded("qwen3_vl", checkpoints, folder, overlong="truncate", max_length=second.end + 1)
    assert [two[0].ids] in [[sample.ids for sample in group] for group in groups]


def test_stream_has_the_images_of_data_in_memory(checkpoints, folder):
    pytest.importorskip("extras.streaming")
    found = []
    for flags in ({}, dict(streaming=True, max_steps=1)):
        groups = loaded("idefics3", checkpoints, folder, **flags)
        found.append([[([*s.ids], s.images) for s in group] for group in groups])
    assert found[0] == found[1] and [len(group) for group in found[0]].count(2) == 3


def test_a_picture_of_any_turn_that_changed_is_noticed_when_a_run_goes_on(checkpoints, tmp_path):
    rows = [dict(messages=messages, images=files) for messages, files in CHATS.values()]
    write_rows(tmp_path / "rows.jsonl", rows)
    digests = []
    for last in (2, 2, 3):
        for file, seed in zip(FILES, (0, 1, last), strict=True):
            picture(60, 40, seed).save(tmp_path / file)
        args = Args(**train_flags("qwen3_vl", "frozen", checkpoints, tmp_path))
        tokenizer = load_tokenizer(args.model, args)
        (samples, _), _ = load_samples(
            encode_row, SFT_COLUMNS, tokenizer, args, apart=True, image_args=args
        )
        digests.append(digests_of_rows(samples.rows))
    assert digests[0] == digests[1] != digests[2]
