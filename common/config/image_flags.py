"""Flags of scripts that take images."""

from typing import Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, Positive


@dataclass(config=STRICT)
class ImageArgs:
    """Images (extras/images/README.md)"""

    takes_images = True  # no flag
    vision: Literal["frozen", "train"] | None = None
    """vision tower of a model of images and text, for rows with images. frozen: keep its weights;
    train: train it too; default: the language model is trained alone"""
    max_pixels: Positive[int] | None = None
    """maximum number of pixels of an image, which is scaled down to it and thus has fewer tokens;
    default: that of the model's image processor"""

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        if self.vision == "train" and getattr(self, "lora_rank", 0):
            raise ValueError("--vision train: adapters are for the language model; use frozen")
        if self.vision is not None and getattr(self, "context_ranks", 1) > 1:
            raise ValueError(f"--vision {self.vision} needs --context_ranks 1")
        return self
