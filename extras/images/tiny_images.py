"""The built-in model `--model tiny-images`: an Idefics3 with 1.2M random weights and the tokenizer
of `tiny`.

It scales a picture to 32 x 32 pixels, which are 64 patches of its vision tower. Each 2 x 2 patches
become one token. On pictures of the task `squares` (extras/images/pictures.py) a token is a cell,
with one square or none."""

import json
from pathlib import Path

from common.model.tiny import (
    CHAT_TEMPLATE,
    END_OF_TURN,
    EOS,
    LANGUAGE_MODEL,
    build_tokenizer,
    cached_folder,
    random_model,
    save,
)

REVISION = 1  # part of the folder's name; raise it when anything below changes
SIZE = 32  # pixels
IMAGE = "<image>"
AROUND = ("<fake_token_around_image>", "<global-img>")
CONTENT = (
    "{%- if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif -%}"
)


def tiny_images() -> str:
    """Return the folder of the model, with the same weights everywhere."""
    return cached_folder(f"tiny-images-{REVISION}", "--model tiny-images", _write)


def _write(folder: Path) -> None:
    tokenizer = build_image_tokenizer()
    tokenizer.save_pretrained(folder)
    save(build_image_model(tokenizer), folder)
    processor = dict(
        image_processor_type="Idefics3ImageProcessor",
        size=dict(longest_edge=SIZE),
        max_image_size=dict(longest_edge=SIZE),
        do_image_splitting=False,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))


def build_image_tokenizer():
    """Return the tokenizer of `tiny` with tokens of images. In its chat template, contents may be
    parts."""
    tokenizer = build_tokenizer()
    special = dict(extra_special_tokens=[*AROUND, IMAGE])
    tokenizer.add_special_tokens(special, replace_extra_special_tokens=False)
    before, behind = CHAT_TEMPLATE.split(" + message['content'] + ")
    tokenizer.chat_template = f"{before} }}}}{CONTENT}{{{{ {behind}"
    return tokenizer


def build_image_model(tokenizer):
    """Return a vision tower with 2 layers of width 64 and a language model with 4 of width 128.
    Initial weights are larger than usual, with which a small model learns to count sooner."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    image_id, *end_ids = tokenizer.convert_tokens_to_ids([IMAGE, EOS, END_OF_TURN])
    ends = dict(eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id)
    vision = dict(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=4,
        initializer_range=0.06,
    )
    text = LANGUAGE_MODEL | dict(
        model_type="llama", vocab_size=len(tokenizer), initializer_range=0.06
    )
    config = Idefics3Config(
        image_token_id=image_id,
        scale_factor=2,  # 2 x 2 patches are one token
        tie_word_embeddings=True,
        vision_config=vision,
        text_config=text | ends,
        dtype="float32",
        pad_token_id=tokenizer.pad_token_id,
    )
    config.eos_token_id = end_ids
    return random_model(Idefics3ForConditionalGeneration, config, end_ids, tokenizer.pad_token_id)
