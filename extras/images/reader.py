"""Readers of images, one class per family of models: from a file to pixels as the model takes them,
and to the text with which a prompt shows an image.

transformers' PIL processors make the pixels: they need no torchvision, and give the same numbers on
every machine. The layout of an image, which decides how many tokens it takes, depends only on its
size, so a blank image of that size is processed to find it."""

import io
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageOps
from torch import Tensor

from common.packs.sample import ImageSpan
from extras.images.image_files import digest, opened, readable

Pixels = dict[str, Tensor]  # arguments of transformers' `get_image_features`, for one image
ORIENTATION = 0x0112  # the EXIF tag that says how a photograph was turned


class Layout(NamedTuple):
    """How a model reads an image of a certain size."""

    rows: int
    columns: int
    """of its tiles, or of its placeholders"""
    placeholders: int
    patches: int


class Features(NamedTuple):
    """What a vision tower returns, one row for each placeholder of the images."""

    embeds: Tensor  # [placeholders, D], in place of the embeddings of the placeholders
    deepstack: list[Tensor]  # [placeholders, D] each, added to the outputs of the first layers


class Reader:
    """What the readers of all families share. Each family adds: `limit`, which bounds the pixels of
    an image; `process`, from an RGB picture to pixels; `text`, which shows an image in a prompt in
    place of its placeholder; and, for the images of several sequences in order, `arguments` of
    transformers' models and `features` of its vision tower."""

    def __init__(self, path: str, config, max_pixels: int | None):
        from transformers import AutoImageProcessor

        self.config = config
        self.processor = AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=False
        )
        self.image_id: int = config.image_token_id
        self.max_pixels = max_pixels
        if max_pixels is not None:
            self.limit(max_pixels)
        self.layout = cache(self._layout)  # by width and height
        # The completions of a prompt have the same images.
        self.recent_pixels = lru_cache(maxsize=8)(self.pixels)

    @property
    def placeholder_ids(self) -> list[int]:
        """Ids of the tokens that stand for images and videos. No completion may contain them."""
        ids = (self.image_id, getattr(self.config, "video_token_id", None))
        return [i for i in ids if i is not None]

    @property
    def size(self) -> dict[str, int]:
        """The limits of the image processor, as in its file."""
        edges = ("shortest_edge", "longest_edge")
        size = {name: self.processor.size.get(name) for name in edges}
        return {name: edge for name, edge in size.items() if edge}

    def pixels(self, file: str, expected: str) -> Pixels:
        """Decode an image whose content has the digest `expected`. Raises `ValueError` if it
        cannot be decoded, or has changed."""
        with readable(file):
            content = Path(file).read_bytes()
            with opened(io.BytesIO(content)) as image:
                picture = as_served(image)
        if digest(content) != expected:
            problem = "the image has changed since it was tokenised"
            raise ValueError(f"{file}: {problem}; restore it")
        return self.process(picture)

    def layout_of(self, content: bytes) -> Layout:
        """Return the layout of the image in a file with this content, from its size. For a PNG this
        decodes the pixels, because PIL looks for EXIF data behind them."""
        with opened(io.BytesIO(content)) as image:
            width, height = image.size
            # PIL turns a TIFF upright itself.
            if image.format != "TIFF" and image.getexif().get(ORIENTATION) in range(5, 9):
                width, height = height, width  # the photograph lies on its side
        return self.layout(width, height)

    # ---- of a family, unless it has its own ----

    def around(self, text: str, tokenizer) -> str:
        """Return the placeholder of an image and what a chat template writes around it."""
        return text

    def generation_arguments(self, pixels: list[Pixels], ids: Tensor) -> Pixels:
        """Return the arguments of transformers' `generate` for the images of prompts `ids`."""
        return self.arguments(pixels)

    def positions(self, positions_T: Tensor, images: list[tuple[ImageSpan, Pixels]]) -> Tensor:
        """Return the positions of a sequence's tokens for rotary embeddings: [T], or [3, T] for
        time, row and column. `positions_T`: places in the sequence."""
        return positions_T


def as_served(image: Image.Image) -> Image.Image:
    """Return a picture as a model's server would see it: upright, in RGB, on a white background."""
    upright = ImageOps.exif_transpose(image)
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    upright = upright.convert("RGBA")
    ground = Image.new("RGB", upright.size, "white")
    ground.paste(upright, mask=upright.getchannel("A"))
    return ground


class Idefics3Reader(Reader):
    """Idefics3 and SmolVLM: the model gets equal tiles of an image, and the whole image."""

    def limit(self, max_pixels: int) -> None:
        tile = self.processor.max_image_size["longest_edge"]
        edge = int(max_pixels**0.5) // tile * tile
        size = self.processor.size
        size["longest_edge"] = min(size["longest_edge"], max(edge, tile))

    def process(self, image: Image.Image) -> Pixels:
        made = self.processor([image], return_tensors="pt", return_row_col_info=True)
        return dict(
            pixel_values=made["pixel_values"][0],
            pixel_attention_mask=made["pixel_attention_mask"][0],
            grid=torch.tensor([made["rows"][0][0], made["cols"][0][0]]),
        )

    @property
    def patches_per_placeholder(self) -> int:
        return self.config.scale_factor**2

    def _layout(self, width: int, height: int) -> Layout:
        pixels = self.process(blank(width, height))
        vision = self.config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2 * len(pixels["pixel_values"])
        rows, columns = pixels["grid"].tolist()
        return Layout(rows, columns, patches // self.patches_per_placeholder, patches)

    def text(self, layout: Layout, token: str) -> str:
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        tile = layout.placeholders // (layout.rows * layout.columns + 1)
        around = "<fake_token_around_image>"
        return get_image_prompt_string(
            layout.rows, layout.columns, tile, around, token, "<global-img>"
        )

    def arguments(self, pixels: list[Pixels]) -> Pixels:
        names = ("pixel_values", "pixel_attention_mask")
        return {name: torch.cat([each[name] for each in pixels])[None] for name in names}

    def features(self, tower, pixels: list[Pixels]) -> Features:
        found = tower.get_image_features(**self.arguments(pixels), return_dict=True)
        # [images, tokens, D]; from transformers 5.20 on a list with the tokens of each sample
        return Features(torch.cat([*found.pooler_output]), [])


class QwenReader(Reader):
    """Qwen3-VL and Qwen3.5: an image is a grid of patches. Positions have its rows and columns."""

    def limit(self, max_pixels: int) -> None:
        size = self.processor.size
        size["longest_edge"] = min(size["longest_edge"], max(max_pixels, size["shortest_edge"]))

    def process(self, image: Image.Image) -> Pixels:
        return dict(self.processor([image], return_tensors="pt"))

    @property
    def patches_per_placeholder(self) -> int:
        return self.processor.merge_size**2

    def grid(self, pixels: Pixels) -> tuple[int, int]:
        """Return how many rows and columns of placeholders an image has."""
        _, height, width = pixels["image_grid_thw"][0].tolist()
        merge = self.processor.merge_size
        return height // merge, width // merge

    def _layout(self, width: int, height: int) -> Layout:
        pixels = self.process(blank(width, height))
        rows, columns = self.grid(pixels)
        return Layout(rows, columns, rows * columns, len(pixels["pixel_values"]))

    def text(self, layout: Layout, token: str) -> str:
        return token * layout.placeholders

    def around(self, text: str, tokenizer) -> str:
        ids = (self.config.vision_start_token_id, self.config.vision_end_token_id)
        return text.join(tokenizer.convert_ids_to_tokens(ids))

    def arguments(self, pixels: list[Pixels]) -> Pixels:
        names = ("pixel_values", "image_grid_thw")
        return {name: torch.cat([each[name] for each in pixels]) for name in names}

    def generation_arguments(self, pixels: list[Pixels], ids: Tensor) -> Pixels:
        """Also mark the tokens of images: transformers makes positions of three dimensions
        there."""
        return self.arguments(pixels) | dict(mm_token_type_ids=(ids == self.image_id).int())

    def features(self, tower, pixels: list[Pixels]) -> Features:
        found = tower.get_image_features(**self.arguments(pixels), return_dict=True)
        deepstack = getattr(found, "deepstack_features", None) or []
        return Features(torch.cat(found.pooler_output), [torch.cat([*x]) for x in deepstack])

    def positions(self, positions_T: Tensor, images: list[tuple[ImageSpan, Pixels]]) -> Tensor:
        """An image begins at the next position p. Its placeholders all have time p; row and column
        count on from p. The text after it continues after the longer side."""
        found = positions_T.expand(3, -1).clone()
        for span, pixels in images:
            rows, columns = self.grid(pixels)
            inside_T = (positions_T >= span.start) & (positions_T < span.end)
            place_t = positions_T[inside_T] - span.start
            offsets = torch.stack([0 * place_t, place_t // columns, place_t % columns])
            found[:, inside_T] += offsets - place_t
            found[:, positions_T >= span.end] += max(rows, columns) - (span.end - span.start)
        return found


def blank(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), (1, 2, 3))


FAMILIES = {
    "idefics3": Idefics3Reader,
    "smolvlm": Idefics3Reader,
    "qwen3_vl": QwenReader,
    "qwen3_5": QwenReader,
}


@lru_cache(maxsize=4)
def reader(path: str, max_pixels: int | None) -> Reader:
    """Return the reader of the model in a folder. Raises `ValueError` for a model without images,
    or of a family that has no reader."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if config.model_type not in FAMILIES:
        families = ", ".join(FAMILIES)
        problem = f"{config.model_type} reads no images here; models of the types {families} do"
        raise ValueError(f"--model {path}: {problem}")
    try:
        return FAMILIES[config.model_type](path, config, max_pixels)
    except (OSError, ValueError) as error:
        problem = f"its image processor cannot be loaded: {str(error).splitlines()[0]}"
        raise ValueError(f"--model {path}: {problem}") from error
