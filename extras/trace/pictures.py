"""Images as data URLs, for pages."""

import base64
import io
from pathlib import Path

from PIL import Image, ImageOps

from extras.images.image_files import digest, readable

EDGE = 384  # longest edge, in pixels


def pictures_of(images: dict[str, str]) -> dict[str, dict]:
    """Return the picture of each image, by the digest of its content, as `url`; what is wrong with
    it as `problem`. `images`: files by digest."""
    found = {}
    for expected, file in images.items():
        try:
            found[expected] = dict(url=_url(file, expected))
        except ValueError as error:
            found[expected] = dict(problem=str(error))
    return found


def _url(file: str, expected: str) -> str:
    with readable(file):
        content = Path(file).read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            picture = ImageOps.exif_transpose(image).convert("RGB")
    if digest(content) != expected:
        raise ValueError(f"{file}: it has changed since the run read it")
    picture.thumbnail((EDGE, EDGE))
    out = io.BytesIO()
    picture.save(out, "webp", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(out.getvalue()).decode()}"
