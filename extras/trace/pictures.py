"""Images as small data URLs, for the viewer's page."""

import base64
import io
import os
import stat
from pathlib import Path

from PIL import ImageOps

from extras.images.image_files import digest, opened, readable

EDGE = 384  # longest edge, in pixels


def pictures_of(images: dict[str, str]) -> dict[str, dict]:
    """Return what the page shows for each image: its picture as `url`, or what is wrong as
    `problem`. `images` and the result have the digest of the content as key."""
    found = {}
    for expected, file in images.items():
        try:
            found[expected] = dict(url=_url(file, expected))
        except ValueError as error:
            found[expected] = dict(problem=str(error))
    return found


def _url(file: str, expected: str) -> str:
    """Return a small picture of an image. The run may come from somebody else, so the file must be
    a regular one before it is read, and have the `expected` digest before it is decoded."""
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
