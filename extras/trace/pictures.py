"""Images as data URLs of a bounded size, for pages."""

import base64
import io
from pathlib import Path

from PIL import Image, ImageOps

from extras.images.image_files import digest

EDGES = (512, 384, 256, 128, 64, 32)  # longest edges to try, in pixels
LIMIT = 60_000  # bytes of a picture
LIMIT_OF_PAGE = 20_000_000  # bytes of all pictures, unless there are more than 5,000


def pictures_of(images: dict[str, str]) -> dict[str, dict]:
    """Return the picture of each image, by the digest of its content, as `url`; what is wrong with
    it as `problem`. `images`: files by digest."""
    limit = max(4000, min(LIMIT, LIMIT_OF_PAGE // max(1, len(images))))
    found = {}
    for expected, file in images.items():
        try:
            found[expected] = dict(url=_url(Path(file).read_bytes(), expected, limit))
        except OSError as error:  # PIL raises it too, without `strerror`
            found[expected] = dict(problem=error.strerror or str(error))
        except (SyntaxError, ValueError, Image.DecompressionBombError) as error:
            found[expected] = dict(problem=str(error))
    return found


def _url(content: bytes, expected: str, limit: int) -> str:
    """Return an image as the model reads it, upright and in RGB, scaled down to `limit` bytes."""
    if digest(content) != expected:
        raise ValueError("the file has changed since the run read it")
    with Image.open(io.BytesIO(content)) as image:
        whole = ImageOps.exif_transpose(image).convert("RGB")
    for edge in EDGES:
        small = whole.copy()
        small.thumbnail((edge, edge))
        for kind in ("png", "jpeg"):
            out = io.BytesIO()
            small.save(out, kind, quality=80)
            url = f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
            if len(url) <= limit:
                return url
    raise ValueError(f"no picture of it has at most {limit} bytes")
