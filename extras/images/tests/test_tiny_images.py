"""The built-in model of images and text has the same files everywhere, and a token for each cell of
a picture of the task `squares`."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from common.data.tasks import squares_rows
from extras.images.reader import reader
from extras.images.tiny_images import build_image_model, build_image_tokenizer, tiny_images


def test_weights_are_the_same_everywhere_and_a_cell_is_a_token(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    folder = Path(tiny_images())
    assert torch.equal(torch.get_rng_state(), state) and tiny_images() == str(folder)
    stored = load_file(folder / "model.safetensors")
    again = build_image_model(build_image_tokenizer()).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in stored.items())
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert 1e6 < model.num_parameters() < 1.5e6

    found = reader(str(folder), None)
    picture = squares_rows("test")[0]["images"][0]
    shown = found.process(picture)["pixel_values"][0]
    colors = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(32, 32, 3)
    # neither scaled nor cut
    assert torch.equal(((shown + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0), colors)
    assert found.layout(*picture.size).placeholders == 16
    assert found.text(found.layout(*picture.size), "<image>").count("<image>") == 16


def test_chat_template_takes_parts_and_texts():
    tokenizer = build_image_tokenizer()
    parts = [dict(type="image"), dict(type="text", text="How many?")]
    shown = tokenizer.apply_chat_template([dict(role="user", content=parts)], tokenize=False)
    assert shown == "<|turn|>user\n<image>How many?<|end_of_turn|>\n"
    text = [dict(role="user", content="<image>How many?")]
    assert tokenizer.apply_chat_template(text, tokenize=False) == shown
