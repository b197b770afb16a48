"""Rows with images as token ids: those of transformers' processors, on every way of the data."""

import copy
import io

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

import eval as evaluation
import sft
from common.model.tiny import tiny_model
from common.text.encode import Encoder
from common.text.tokenizer import load_tokenizer
from extras.images.image_files import digest, take_images
from extras.images.reader import ORIENTATION, as_served, reader
from extras.images.tests.checkpoints import picture

# ---- ids ----

SIZES = [(1, 1), (1, 199), (300, 4), (16, 16), (60, 40), (33, 95)]


@pytest.mark.parametrize("template", [None, DEFAULT_CHAT_TEMPLATE], ids=["ours", "SmolVLM"])
def test_ids_are_those_of_the_processor_of_idefics3(template, checkpoints, tmp_path):
    path = str(checkpoints("idefics3"))
    args = sft.Args(model=path, dataset=["-"], vision="frozen")
    tokenizer = load_tokenizer(path, args)
    tokenizer.add_tokens(["<|im_start|>", "<end_of_utterance>"], special_tokens=True)
    tokenizer.chat_template = template or tokenizer.chat_template
    processor = Idefics3Processor(
        AutoImageProcessor.from_pretrained(path, backend="pil"), copy.deepcopy(tokenizer), 4
    )
    encoder = Encoder(tokenizer, args, image_args=args)
    encoder.ids_end = len(tokenizer)
    images = [picture(*size, i) for i, size in enumerate(SIZES)]
    for shown in (images[:1], images[2:4], images):
        text = [dict(type="text", text="Which?")]
        messages = [dict(role="user", content=[dict(type="image")] * len(shown) + text)]
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        (expected,) = processor(text=asked, images=shown, add_special_tokens=False)["input_ids"]
        row = dict(_source="x:1", images=shown, prompt=messages)
        assert [*encoder.prompt(row, ("prompt",))] == expected


def turned() -> Image.Exif:
    """Return the note of a camera that lay on its side."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return exif


@pytest.mark.parametrize("max_pixels", [None, 1024])
@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_pixels_agree_with_the_placeholders(family, max_pixels, encoder_of, tmp_path):
    """They agree for many sizes and kinds of files, also with a limit on pixels."""
    images = {f"{i}.png": (picture(*size, i), {}) for i, size in enumerate(SIZES)}
    images["turned.jpg"] = (picture(90, 30, 1), dict(exif=turned()))
    for mode in ("P", "RGBA", "1", "LA"):
        images[f"{mode}.png"] = (picture(40, 70, 2).convert(mode), {})
    images |= {"I16.png": (Image.new("I;16", (40, 70)), {})}
    images |= {"CMYK.jpg": (picture(40, 70, 2).convert("CMYK"), {})}
    encoder = encoder_of(family, max_pixels=max_pixels)
    found = reader(encoder.tokenizer.name_or_path, max_pixels)
    for name, (image, options) in images.items():
        image.save(tmp_path / name, **options)
        row = dict(_source="x:1", image=name, _folder=str(tmp_path), prompt="a?")
        ids = encoder.prompt(row, ("prompt",))
        (span,) = row["_images"]
        pixels = found.pixels(span.file, span.digest)
        patches = len(pixels["pixel_values"])
        if family == "idefics3":
            assert patches in (1, 1 + pixels["grid"].prod())
            patches *= 16  # of a tile
        assert ids.count(found.image_id) == span.patches / 4 == patches / 4, name
        assert ids[span.start] == ids[span.end - 1] == found.image_id
        is_thin = max(image.size) > 4 * min(image.size)  # a side has two patches or more
        if max_pixels and family == "qwen3_vl" and not is_thin:
            assert patches * 64 <= max_pixels


def test_a_picture_is_seen_as_a_server_sees_it(encoder_of, tmp_path):
    """vLLM turns photographs, puts what is transparent on white, and cuts 16 bits off at 255."""
    pytest.importorskip("vllm")
    from vllm.multimodal.media.image import ImageMediaIO

    grey = torch.tensor([[30, 300, 15300]]).to(torch.uint16)
    clear = picture(12, 9, 1).convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize((12, 9)))
    palette = picture(12, 9, 1).quantize(8)
    made = dict(
        turned=(picture(12, 9, 1), dict(exif=turned())),
        grey=(Image.fromarray(grey.numpy()), {}),
        rgba=(clear, {}),
        la=(clear.convert("LA"), {}),
        p=(palette, dict(transparency=3)),
    )
    for name, (image, options) in made.items():
        image.save(tmp_path / f"{name}.png", **options)
        content = (tmp_path / f"{name}.png").read_bytes()
        served = ImageMediaIO().load_bytes(content).media
        with Image.open(tmp_path / f"{name}.png") as image:
            assert as_served(image).tobytes() == served.convert("RGB").tobytes(), name


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
@pytest.mark.parametrize("prompt_format", ["chat", "plain"])
def test_text_of_a_placeholder_is_no_image(family, prompt_format, encoder_of):
    """It stays text with --special_text text; else it is refused, as the two look alike."""
    row = dict(_source="x:1", image=picture(9, 9, 1))
    token = dict(idefics3="<image>", qwen3_vl="<|image_pad|>")[family]
    parts = [dict(type="text", text=f"a {token} b"), dict(type="image")]
    row["prompt"] = [dict(role="user", content=parts)]
    if prompt_format == "plain":
        row["prompt"] = f"<image> {token if token != '<image>' else ''}"
    encoder = encoder_of(family, special_text="text", prompt_format=prompt_format)
    kept = dict(row)
    ids = encoder.prompt(kept, ("prompt",))
    (span,) = kept["_images"]
    assert ids.count(encoder.images.reader.image_id) == span.patches // 4
    if prompt_format == "chat":
        before = encoder.tokenizer.decode(ids[: span.start])
        assert f"a {token} b" in before
        with pytest.raises(ValueError, match="x:1: the prompt has 2 placeholders .* for 1 images;"):
            encoder_of(family).prompt(row, ("prompt",))


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "flags"),
    [("environment", dict(environment="x", reward="environment")), ("agent", dict(agent="x")),
     ("tools", dict(tools="x")), ("reward model:x", dict(reward="model:x")),
     ("shots", dict(shots=2, prompt_template="{shots}", shot_template="x")),
     ("reward_model", dict(reward_model="x")), ("perplexity_model", dict(perplexity_model="x"))],
)  # fmt: skip
def test_flags_without_support_are_refused(name, flags):
    with pytest.raises(ValueError, match=f"--vision frozen: --{name} does not support images"):
        evaluation.Args(model="m", dataset=["-"], vision="frozen", **flags)
    with pytest.raises(ValueError, match="--vision frozen needs --context_ranks 1"):
        sft.Args(model="m", dataset=["-"], vision="frozen", context_ranks=2)


@pytest.mark.parametrize("shown", ["{{ m['content'] }}", "{{ m['content'] + '' }}"])
def test_template_without_images_is_refused(shown, encoder_of, checkpoints):
    path = str(checkpoints("idefics3"))
    args = sft.Args(model=path, dataset=["-"], vision="frozen")
    tokenizer = load_tokenizer(path, args)
    turn = "{{ '<|turn|>' + m['role'] }}" + shown + "{{ '<|end_of_turn|>' }}"
    tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    row = dict(_source="x:1", image=picture(9, 9, 1), prompt=[dict(role="user", content="?")])
    words = "^x:1.* (0 placeholders of|the row has images, the chat templ)"
    with pytest.raises(ValueError, match=words):
        Encoder(tokenizer, args, image_args=args).prompt(row, ("prompt",))


def chat(*parts: dict | str, said: str = "yes") -> list[dict]:
    parts = [part if isinstance(part, dict) else dict(type="text", text=part) for part in parts]
    return [dict(role="user", content=parts), dict(role="assistant", content=said)]


PAD = "<|image_pad|>"
UNREADABLE = {
    "video": (dict(video="a.mp4", messages=chat("?")), "column video: only text and images"),
    "sounds": (dict(audios=["a"], messages=chat("?")), "column audios: only text and images"),
    "part": (dict(messages=chat("?", dict(type="video"))), "turn 1: .*'video' .* 'text', 'image'"),
    "thin": (dict(image=picture(804, 4, 0), messages=chat("?")), "aspect ratio must be smaller"),
    "asked": (dict(messages=chat(PAD)), "1 placeholders of images .* for 0 images; take the mark"),
    "said": (dict(image=picture(8, 8, 0), messages=chat("?", said=PAD)), "1 placeholders .* 0 im"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_is_refused(kind, encoder_of):
    row, words = UNREADABLE[kind]
    with pytest.raises(ValueError, match=f"^x:1: .*{words}") as error:
        encoder_of("qwen3_vl").sft(row | dict(_source="x:1"), ("messages",))
    assert "\n" not in str(error.value)


def test_images_without_the_flag_or_a_model_that_reads_them_are_refused():
    flags = dict(model="tiny", dataset=["-"])
    tokenizer = load_tokenizer(tiny_model())
    row = dict(_source="x:1", images=["no.png"], prompt="?", completion="!")
    with pytest.raises(ValueError, match="x:1: the row has images; set --vision frozen"):
        Encoder(tokenizer, sft.Args(**flags)).sft(row, ("prompt", "completion"))
    with pytest.raises(ValueError, match="^--model .*: qwen3 reads no images here; models of"):
        args = sft.Args(**flags, vision="frozen")
        Encoder(tokenizer, args, image_args=args)


def test_image_that_changes_or_vanishes_is_reported(encoder_of, tmp_path):
    file = tmp_path / "a.png"
    picture(9, 9, 1).save(file)
    row = dict(_source="x:1", image="a.png", _folder=str(tmp_path), prompt="?")
    encoder = encoder_of("qwen3_vl")
    encoder.prompt(row, ("prompt",))
    (span,) = row["_images"]
    picture(9, 9, 2).save(file)
    with pytest.raises(ValueError, match=r"a.png: the image has changed .*; restore it"):
        encoder.images.reader.pixels(span.file, span.digest)
    file.unlink()
    with pytest.raises(ValueError, match="a.png: cannot be read: No such file or directory"):
        encoder.images.reader.pixels(span.file, span.digest)


def spoiled() -> dict[str, bytes]:
    """Return pictures whose header is right, and that PIL cannot decode."""
    found = {}
    for kind, options in dict(PNG={}, TIFF=dict(compression="tiff_lzw")).items():
        file = io.BytesIO()
        Image.effect_noise((64, 64), 50).save(file, kind, **options)
        found[kind] = file.getvalue()[:400] + bytes(len(file.getvalue()) - 400)
    return found


@pytest.mark.parametrize("kind", spoiled())
def test_a_broken_picture_is_named(kind, encoder_of, recwarn, tmp_path, monkeypatch):
    """With its row, or when its pixels are needed. PIL prints nothing on the terminal."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    encoder = encoder_of("idefics3")
    content = spoiled()[kind]
    row = dict(_source="x:2", images=[content], prompt="?")
    with pytest.raises(ValueError, match="cannot be read: ") as caught:
        encoder.prompt(row, ("prompt",))
        found = reader(encoder.tokenizer.name_or_path, None)
        found.pixels(row["images"][0], digest(content))
    assert "\n" not in str(caught.value) and not recwarn.list


def test_pictures_of_pil_stand_upright(encoder_of):
    """So do a TIFF, which PIL turns itself, and a picture of PIL with an orientation."""
    exif = turned()
    content = io.BytesIO()
    picture(40, 20, 0).save(content, "TIFF", exif=exif)
    found = reader(encoder_of("idefics3").tokenizer.name_or_path, None)
    assert found.layout_of(content.getvalue()) == found.layout(20, 40)
    content = io.BytesIO()
    picture(40, 20, 0).save(content, "JPEG", exif=exif)
    row = dict(_source="x:1", image=Image.open(content), prompt="?")
    take_images(row, [dict(role="user", content="?")])
    assert Image.open(row["images"][0]).size == (20, 40)
    row = dict(_source="x:1", image=picture(8, 8, 0).convert("CMYK"), prompt="?")
    take_images(row, [dict(role="user", content="?")])
