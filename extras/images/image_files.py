"""The images of a row: their files, and marks in the messages where they stand.

A row has images in the columns `images` or `image`, or as parts of its messages. An image is a path
in the folder of the data, bytes, a data URL or a picture of PIL. What is no file yet is stored in a
cache on this machine, under the digest of its content. After that a row only has paths: `images`
lists them, for rewards too, and `Image.open` of PIL reads them."""

import base64
import hashlib
import io
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from common.config.flags import as_tuple
from common.packs.sample import PLACEHOLDER
from common.parallel.distributed import first_line
from common.text.messages import IMAGE

# For some other formats PIL would start another program.
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
PIXELS = 90_000_000  # most pixels of a picture: a small file may unpack to any number of them
Image.MAX_IMAGE_PIXELS = PIXELS


def take_images(row: dict, messages: list[dict]) -> list[dict]:
    """Return messages with a mark for each image of a row, and set the row's `images` to paths.

    Parts of the messages say where images stand; a part that names no image takes the next one of
    the row's columns. Else images stand at each `<image>` in the user's texts, or all in front of
    the user's first text. Raises `ValueError`, beginning with the row's source, for images that are
    missing, refused or not where they belong, and if there are not as many places as images."""
    label = row["_source"]
    given = [*chain(*(as_tuple(row.get(name)) or () for name in ("images", "image")))]
    for number, message in enumerate(messages, 1):
        parts = message.get("images", [])
        if parts and message["role"] == "assistant":
            problem = "has an image; images belong in prompts, in front of the model's turns"
            raise ValueError(f"{label}: turn {number} (assistant) {problem}")
        if (given or parts) and message["content"].count(IMAGE) != len(parts):
            problem = "contains U+FFFC, the mark of an image; take it out"
            raise ValueError(f"{label}: turn {number} ({message['role']}) {problem}")
    parts = [*chain(*(message.get("images", []) for message in messages))]
    texts = [message for message in messages if message["role"] == "user"]
    places = sum(message["content"].count(PLACEHOLDER) for message in texts)
    is_taken = "_images" in row  # by the other completion of a pair
    if parts:
        places = len(parts) if is_taken else parts.count(None)
    elif places:
        messages = [
            m | dict(content=m["content"].replace(PLACEHOLDER, IMAGE)) if m["role"] == "user" else m
            for m in messages
        ]
    elif given:
        if not texts:
            problem = f"no turn of the user for its {len(given)} images; add one"
            raise ValueError(f"{label}: {problem}")
        first = messages.index(texts[0])
        marked = texts[0] | dict(content=IMAGE * len(given) + texts[0]["content"])
        messages = [*messages[:first], marked, *messages[first + 1 :]]
        places = len(given)
    if places != len(given):
        problem = f"{places} places for images, the row has {len(given)} images"
        raise ValueError(f"{label}: {problem}; give as many")
    folder = row.get("_folder")
    if is_taken and parts:
        for file, part in zip(given, parts, strict=True):
            if part is not None and _file(f"{label}: an image", part, folder) != file:
                problem = "chosen and rejected show different images; give both the same"
                raise ValueError(f"{label}: {problem}")
    if not is_taken and (parts or given):
        rest = iter(given)
        images = [next(rest) if part is None else part for part in parts] or given
        files = [_file(f"{label}: image {n}", image, folder) for n, image in enumerate(images, 1)]
        row.pop("image", None)
        row.update(images=files, _images=[])
    return [{k: v for k, v in message.items() if k != "images"} for message in messages]


# ---- files ----


def _file(label: str, image: object, folder: str | None) -> str:
    """Return the path of an image, which is stored first if it is no file. Raises `ValueError`."""
    if isinstance(image, dict):  # as `datasets` and parquet files have it
        image = image.get("bytes") or image.get("path")
    if isinstance(image, Image.Image):
        content = io.BytesIO()
        with readable(label):
            image = ImageOps.exif_transpose(image)
            if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):  # modes of a PNG
                image = image.convert("RGB")
            image.save(content, "PNG")
        image = content.getvalue()
    if isinstance(image, str) and image.startswith("data:"):
        image = _bytes_of_url(label, image)
    if isinstance(image, str) and image:
        image = _path_in_folder(label, image, folder)
    elif not isinstance(image, bytes):
        kind = "missing" if image in (None, "") else f"of type {type(image).__name__}"
        raise ValueError(f"{label} is {kind}; give a path, bytes, a data URL or a picture of PIL")
    require_image(label, image)
    return stored(image) if isinstance(image, bytes) else image


def _bytes_of_url(label: str, url: str) -> bytes:
    head, _, content = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is in another form")
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise ValueError(f"{label}: a data URL that is no base64 ({error})") from error


def _path_in_folder(label: str, path: str, folder: str | None) -> str:
    if "://" in path:
        raise ValueError(f"{label}: {path[:80]!r} is not fetched; download it, and give its path")
    if folder is None:
        advice = "only data in files may name paths; store the images in the table"
        raise ValueError(f"{label}: {path[:80]!r}: {advice}")
    try:
        whole = os.path.realpath(os.path.join(folder, path))
    except ValueError:  # it cannot be the name of a file
        whole = ""
    if whole and not Path(whole).is_relative_to(os.path.realpath(folder)):
        problem = f"outside of the data's folder {folder}; copy it there"
        raise ValueError(f"{label}: {path[:80]!r} is {problem}")
    if not os.path.isfile(whole):
        raise ValueError(f"{label}: {path[:80]!r}: no such file in {folder}; correct the path")
    return whole


def stored(content: bytes) -> str:
    """Return the file with this content in the cache of this machine; write it if it is new. Raises
    `ValueError` if the disk refuses it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onefile" / "images"
    name = digest(content)
    file = cache / name[:2] / name
    if file.exists():
        return str(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            work = Path(folder, name)
            work.write_bytes(content)
            os.replace(work, file)  # at once, because other ranks may write the same file
    except OSError as error:
        problem = f"cannot write images to {cache} ({error.strerror}); set XDG_CACHE_HOME"
        raise ValueError(problem) from error
    return str(file)


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def require_image(label: str, image: str | bytes) -> None:
    """Raise `ValueError` that begins with `label` if a file, or its content, is no single picture.
    Only the header is read, not the pixels."""
    is_content = isinstance(image, bytes)
    if (len(image) if is_content else os.path.getsize(image)) == 0:
        raise ValueError(f"{label}: cannot be read: it is empty")
    file = io.BytesIO(image) if is_content else image
    with readable(label), opened(file) as picture:
        # An MPO is a photograph with a small copy.
        frames = 1 if picture.format == "MPO" else getattr(picture, "n_frames", 1)
        if frames > 1:
            raise ValueError(f"it has {frames} pictures; give one")
        picture.verify()


def opened(file: str | io.BytesIO) -> Image.Image:
    """Open a picture of one of `FORMATS`. Raises `DecompressionBombError` for too many pixels."""
    picture = Image.open(file, formats=FORMATS)
    if picture.width * picture.height > PIXELS:
        raise Image.DecompressionBombError
    return picture


@contextmanager
def readable(label: str) -> Iterator[None]:
    """Turn whatever PIL raises about a picture into a `ValueError` of one line; drop warnings."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except UnidentifiedImageError as error:
        problem = "no image, or of an unknown format"
        raise ValueError(f"{label}: cannot be read: {problem}") from error
    except Image.DecompressionBombError as error:
        problem = f"it has more than {PIXELS:,} pixels"
        advice = "scale it down, or raise PIXELS in extras/images/image_files.py"
        raise ValueError(f"{label}: {problem}; {advice}") from error
    except Exception as error:
        problem = getattr(error, "strerror", None) or first_line(error)
        raise ValueError(f"{label}: cannot be read: {problem}") from error
