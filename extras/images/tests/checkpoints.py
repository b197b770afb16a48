"""Tiny random models of images and text with our character tokenizer, one of each family, and
pictures."""

import json
from functools import cache
from pathlib import Path

import torch
from helpers import tiny_tokenizer, write_rows
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from common.packs.sample import ImageSpan
from extras.images.reader import reader

TEMPLATE = (
    "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|end_of_turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def rewriting(template: str) -> str:
    """Return `TEMPLATE` so that it drops the thoughts of earlier turns."""
    shown = "(TEXT if m is sameas(messages[-1]) else TEXT.split('</think>')[-1])"
    for text in ("m['content']", "p['text']"):
        template = template.replace(f"{{{{ {text} }}}}", f"{{{{ {shown.replace('TEXT', text)} }}}}")
    return template


VISION = dict(hidden_size=32, intermediate_size=64, patch_size=8)
TEXT = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, bos_token_id=None,
    tie_word_embeddings=True,
)  # fmt: skip
MEAN = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)


def tokenizer(special: list[str], image: str):
    made = tiny_tokenizer()
    made.add_special_tokens(dict(extra_special_tokens=special), replace_extra_special_tokens=False)
    made.chat_template = TEMPLATE.replace("IMAGE", image)
    made.model_max_length = 1024
    return made


def save(folder: Path, family: str, made, fields: dict, processor: dict) -> Path:
    ends = [made.convert_tokens_to_ids(t) for t in ("<|eos|>", "<|end_of_turn|>")]
    config = AutoConfig.for_model(family, **fields, tie_word_embeddings=True, dtype="float32")
    for each in (config, config.get_text_config()):
        each.eos_token_id, each.pad_token_id = ends, made.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():  # larger than usual, so that images matter
            if parameter.ndim > 1:
                parameter.data *= 4
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=made.pad_token_id)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | MEAN))
    return folder


def idefics3(folder: Path, family: str = "idefics3", name: str = "Idefics3") -> Path:
    tiles = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    special = ["<fake_token_around_image>", "<image>", "<global-img>", *tiles]
    made = tokenizer(special, "<image>")
    sizes = dict(num_hidden_layers=2, num_attention_heads=2, image_size=32)
    fields = dict(
        image_token_id=made.convert_tokens_to_ids("<image>"), scale_factor=2,
        pad_token_id=made.pad_token_id, vision_config=VISION | sizes,
        text_config=TEXT | dict(model_type="llama", vocab_size=len(made)),
    )  # fmt: skip
    edges = dict(size=dict(longest_edge=64), max_image_size=dict(longest_edge=32))
    processor = dict(image_processor_type=f"{name}ImageProcessor", resample=1) | edges
    return save(folder, family, made, fields, processor)


def smolvlm(folder: Path) -> Path:
    return idefics3(folder, "smolvlm", "SmolVLM")


def _qwen(folder: Path, family: str, vision: dict, text: dict, rope: dict) -> Path:
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    made = tokenizer(special, "<|vision_start|><|image_pad|><|vision_end|>")
    start, end, image, video = made.convert_tokens_to_ids(special)
    patches = dict(patch_size=8, temporal_patch_size=2)
    vision |= VISION | patches | dict(
        depth=2, num_heads=2, spatial_merge_size=2, out_hidden_size=64, num_position_embeddings=64
    )  # fmt: skip
    rope |= dict(rope_type="default", rope_theta=1e4, mrope_interleaved=True)
    fields = dict(
        image_token_id=image, video_token_id=video, vision_start_token_id=start,
        vision_end_token_id=end, vision_config=vision,
        text_config=TEXT | dict(vocab_size=len(made), rope_parameters=rope) | text,
    )  # fmt: skip
    edges = dict(size=dict(shortest_edge=256, longest_edge=4096), merge_size=2)
    processor = dict(image_processor_type="Qwen2VLImageProcessor") | patches | edges
    return save(folder, family, made, fields, processor)


def qwen3_vl(folder: Path) -> Path:
    vision = dict(deepstack_visual_indexes=[0, 1])
    return _qwen(folder, "qwen3_vl", vision, {}, dict(mrope_section=[6, 5, 5]))


def qwen3_5(folder: Path) -> Path:
    text = dict(
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32,
    )  # fmt: skip
    rope = dict(mrope_section=[2, 1, 1], partial_rotary_factor=0.25)
    return _qwen(folder, "qwen3_5", {}, text, rope)


FAMILIES = dict(idefics3=idefics3, smolvlm=smolvlm, qwen3_vl=qwen3_vl, qwen3_5=qwen3_5)


@cache
def whole_model(path: str):
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def whole_logits(path: Path, ids: list[int], images: list[ImageSpan]) -> torch.Tensor:
    """Return the logits of transformers' whole model, alone and without a cache, [tokens, V]."""
    read = reader(str(path), None)
    ids_1T = torch.tensor([ids])
    pixels = [read.pixels(span.file, span.digest) for span in images]
    inputs = read.generation_arguments(pixels, ids_1T) if pixels else {}
    return whole_model(str(path))(input_ids=ids_1T, **inputs).logits[0]


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Return a picture of noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def dataset(folder: Path) -> Path:
    """Write rows with no, one and two pictures of several sizes."""
    sizes = [(60, 40), (40, 64), (90, 30), (16, 16), (70, 70)]
    rows = []
    for i, size in enumerate(sizes):
        picture(*size, i).save(folder / f"{i}.png")
        files = [f"{i}.png", f"{(i + 1) % len(sizes)}.png"][: 1 + i % 2]
        ask = [dict(role="user", content=f"What is number {i}?")]
        say = [dict(role="assistant", content=f"It is {7 * i}.")]
        rows.append(dict(images=files, prompt=ask, completion=say))
    ask = [dict(role="user", content="Which number?")]
    rows.append(dict(prompt=ask, completion=[dict(role="assistant", content="None.")]))
    return write_rows(folder / "pictures.jsonl", rows)
