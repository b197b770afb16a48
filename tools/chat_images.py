"""Images of a chat: files, rows as in training, and transformers' whole model, which reads them."""

import shlex
from pathlib import Path

import torch
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT
from common.config.groups import BaseArgs
from common.config.training import ImageArgs
from common.data.sample import Sample
from extras.images.image_files import require_image, stored
from extras.images.reader import Reader


@dataclass(config=STRICT)
class ChatArgs(ImageArgs, BaseArgs):
    """Flags of a model that chats about images"""


def attach(name: str) -> str:
    """Return the copy of an image in the cache of this machine, which stays as it is during the
    chat. Raises `ValueError` for a file that is no image."""
    file = Path(name).expanduser()
    words = shlex.split(name) if not file.exists() and name.count("'") != 1 else []
    if len(words) == 1:  # a terminal quotes a file that is dropped on it
        file = Path(words[0]).expanduser()
    if not file.is_file():
        raise ValueError(f"/image {name}: no such file")
    require_image(f"/image {name}", str(file))
    try:
        return stored(file.read_bytes())
    except OSError as error:
        raise ValueError(f"/image {name}: {error.strerror}") from error


def in_message(text: str, images: list[str]) -> list[dict]:
    """Return the content of a message with images in front of its text, as rows have them."""
    parts = [dict(type="image", image=image) for image in images]
    return [*parts, dict(type="text", text=text)]


def images_in(messages: list[dict]) -> list[str]:
    """Return the images of a conversation."""
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def as_row(row: dict) -> dict:
    """Return a row with absolute paths as the rows of a file are read."""
    return row | dict(_folder="/")


def inputs_of(row: dict, ids: list[int], reader: Reader, device: torch.device) -> dict:
    """Return the arguments of the whole model's `generate` for the images of a prompt."""
    pixels = [reader.pixels(image.file, image.digest) for image in Sample(ids, [], row=row).images]
    arguments = reader.generation_arguments(pixels, torch.tensor([ids]))
    return {name: x.to(device) for name, x in arguments.items()}
