"""Images as data URLs, for pages."""

import base64
import io
import os
import stat
from pathlib import Path

from PIL import ImageOps

from extras.images.image_files import digest, opened, readable

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
    """Return a small picture of an image. The run may come from somebody else: what the file is,
    is looked at before it is read, and its digest before it is decoded."""
    with readable(file):
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise ValueError("no regular file")
        content = Path(file).read_bytes()
    if digest(content) != expected:
        raise ValueError(f"{file}: it has changed since the run read it")
    with readable(file), opened(io.BytesIO(content)) as image:
        picture = ImageOps.exif_transpose(image).convert("RGB")
    picture.thumbnail((EDGE, EDGE))
    out = io.BytesIO()
    picture.save(out, "webp", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(out.getvalue()).decode()}"
