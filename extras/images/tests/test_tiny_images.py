"""The built-in model of images and text has the same files everywhere, and a token for each cell of
a picture of the task `squares`."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from common.data.tasks import squares_rows
from common.model.tiny import TINY_IMAGES
from extras.images.reader import reader
from tools import make_tiny


def test_tool_makes_the_folder(tmp_path):
    with torch.random.fork_rng():
        make_tiny.write("tiny-images", tmp_path)
    files = {file.name for file in Path(TINY_IMAGES).iterdir()}
    assert files == {file.name for file in tmp_path.iterdir()}
    stored, made = (load_file(Path(x, "model.safetensors")) for x in (TINY_IMAGES, tmp_path))
    assert made.keys() == stored.keys()
    assert all(torch.allclose(made[name], x, atol=1e-6) for name, x in stored.items())


def test_a_cell_is_a_token():
    folder = TINY_IMAGES
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert 1e6 < model.num_parameters() < 1.5e6
    found = reader(folder, None)
    picture = squares_rows("test")[0]["images"][0]
    shown = found.process(picture)["pixel_values"][0]
    colors = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(32, 32, 3)
    # neither scaled nor cut
    assert torch.equal(((shown + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0), colors)
    assert found.layout(*picture.size).placeholders == 16
    assert found.text(found.layout(*picture.size), "<image>").count("<image>") == 16
