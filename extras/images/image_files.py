"""Images of a row -> files, and marks in the row's texts where the images stand.

A row has images in the columns `images` or `image`, or as parts of its messages. An image is a path
in the folder of the data, bytes, a data URL or a picture of PIL. What is no file becomes one, in
the cache of this machine, named by the digest of its content. From then on a row has paths, for
rewards too: `images` lists them, `Image.open` of PIL reads them, and the character `IMAGE` stands
in the texts where an image belongs."""

import base64
import binascii
import hashlib
import io
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from common.data.messages import IMAGE, PLACEHOLDER

COLUMNS = ("images", "image")
PAIR = ("chosen", "rejected")
# PIL would start another program for some others.
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
MOST_PIXELS = 89_478_485  # above, PIL warns of a decompression bomb
PLACES = "images belong in prompts, in front of the model's turns"


def take_images(row: dict, columns: Sequence[str]) -> None:
    """Set `images` of a row to paths, `_images` to no places yet, and put marks in the prompts
    among its `columns`. Raises `ValueError`, which begins with the row's source, for images that
    are missing, refused or not where they belong."""
    source = row["_source"]
    given = [*_listed(row.get("images")), *_listed(row.get("image"))]
    prompts = _prompts(row, columns)
    for column in columns:
        if column not in prompts and isinstance(row.get(column), list):
            if any(_image_parts(row[column])):
                raise ValueError(f"{source}: column {column} has an image; {PLACES}")
    marked = {column: _marked(source, column, row[column], given) for column in prompts}
    images = [images for _, images in marked.values()] or [given]
    if any(other != images[0] for other in images):
        raise ValueError(f"{source}: {' and '.join(prompts)} have different images")
    folder = row.pop("_folder", None)
    files = [
        _file(f"{source}: image {number}", image, folder)
        for number, image in enumerate(images[0], 1)
    ]
    row.pop("image", None)
    row.update({column: value for column, (value, _) in marked.items()}, images=files, _images=[])


def _prompts(row: dict, columns: Sequence[str]) -> list[str]:
    """Return the columns that begin with the prompt: the first one, and preferences that repeat it
    or have no other. A prompt of text is ignored beside those that repeat it."""
    pair = [column for column in PAIR if column in columns]
    if "prompt" in columns:
        pair = [column for column in pair if _has_prompt(row.get(column))]
    others = [column for column in columns[:1] if column not in PAIR]
    return pair if pair and isinstance(row.get("prompt"), str) else others + pair


def _has_prompt(value: object) -> bool:
    """Return whether the value lists messages, of which the first is not the model's."""
    return isinstance(value, list) and any(
        isinstance(message, dict) and message.get("role") != "assistant" for message in value[:1]
    )


def _listed(value: object) -> list:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def image_of_part(part: object) -> object:
    """Return the image of a part of a message, in the forms of Qwen and of OpenAI; an empty text if
    the row's columns have it, None if the part is none."""
    if not isinstance(part, dict) or part.get("type") not in ("image", "image_url"):
        return None
    image = next((part[key] for key in ("image", "url", "path", "image_url") if part.get(key)), "")
    return image.get("url", "") if isinstance(image, dict) and "url" in image else image


def _image_parts(messages: Iterable) -> Iterator[dict]:
    """Yield the parts of messages that are images."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from (part for part in content if image_of_part(part) is not None)


def _marked(source: str, column: str, value: object, given: list) -> tuple[object, list]:
    """Return a prompt with a mark for each image, and its images: those of its parts or, for parts
    without one and for `<image>` in texts, the `given` ones in order. Without a place for them,
    images stand in front of the first text of the user."""
    label = f"{source}: column {column}"
    messages = value if isinstance(value, list) else [dict(role="user", content=value)]
    if any(IMAGE in (_text(message) or "") for message in messages):
        raise ValueError(f"{label} contains U+FFFC, the mark of an image; take it out")
    if any(_image_parts(filter(_is_reply, messages))):
        raise ValueError(f"{label}: a turn of the model has an image; {PLACES}")
    parts = [image_of_part(part) for part in _image_parts(messages)]
    if parts:
        rest = iter(given)
        images = [next(rest, None) if part == "" else part for part in parts]
        _require_as_many(label, parts.count(""), len(given))
        return [_with_marked_parts(message) for message in messages], images
    asked = [m for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    count = sum((_text(message) or "").count(PLACEHOLDER) for message in asked)
    if count:
        _require_as_many(label, count, len(given))
        messages = [_with_marks(m) if m in asked else m for m in messages]
    else:
        messages = _with_marks_in_front(label, messages, len(given))
    return messages if isinstance(value, list) else messages[0]["content"], given


def _require_as_many(label: str, places: int, images: int) -> None:
    if places != images:
        problem = f"{places} places for images, the row has {images} images"
        raise ValueError(f"{label} has {problem}; give as many")


def _text(message: object) -> str | None:
    """Return the text of a message; None if it has other parts, such as videos, which are refused
    later."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        return "".join(texts) if is_text else None
    return content if isinstance(content, str) else None


def _is_reply(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _with_marks(message: object) -> object:
    """Return a message with marks in place of `<image>`."""
    text = _text(message)
    return message | dict(content=text.replace(PLACEHOLDER, IMAGE)) if text else message


def _with_marked_parts(message: dict) -> dict:
    """Return a message with a text part for each part that is an image."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = [
        part if image_of_part(part) is None else dict(type="text", text=IMAGE)
        for part in message["content"]
    ]
    return message | dict(content=parts)


def _with_marks_in_front(label: str, messages: list, count: int) -> list:
    for place, message in enumerate(messages):
        text = _text(message)
        if text is not None and message.get("role") == "user":
            first = message | dict(content=IMAGE * count + text)
            return [*messages[:place], first, *messages[place + 1 :]]
    raise ValueError(f"{label} has no turn of the user for its {count} images; add one")


# ---- files ----


def _file(label: str, image: object, folder: str | None) -> str:
    """Return the path of an image. Raises `ValueError` that begins with `label`."""
    if isinstance(image, dict):  # as `datasets` and parquet files have it
        image = image.get("bytes") or image.get("path")
    if isinstance(image, Image.Image):
        image = ImageOps.exif_transpose(image)
        if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):  # those of a PNG
            image = image.convert("RGB")
        content = io.BytesIO()
        image.save(content, "PNG")
        image = content.getvalue()
    if isinstance(image, str) and image.startswith("data:"):
        image = _bytes_of_url(label, image)
    if isinstance(image, bytes):
        path = stored(image)
    elif isinstance(image, str) and image:
        path = _path_in_folder(label, image, folder)
    else:
        kind = "missing" if image in (None, "") else f"of type {type(image).__name__}"
        raise ValueError(f"{label} is {kind}; give a path, bytes, a data URL or a picture of PIL")
    require_image(label, path)
    return path


def _bytes_of_url(label: str, url: str) -> bytes:
    head, _, content = url.partition(",")
    if not head.endswith(";base64"):
        raise ValueError(f"{label}: a data URL in another form; write it in base64")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ValueError(
            f"{label}: a data URL that is no base64 ({error}); encode it again"
        ) from error


def _path_in_folder(label: str, path: str, folder: str | None) -> str:
    if "://" in path:
        raise ValueError(f"{label}: {path[:80]!r} is not fetched; download it, and give its path")
    if folder is None:
        advice = "only data in files may name paths; store the images in the table"
        raise ValueError(f"{label}: {path[:80]!r}: {advice}")
    try:
        whole = os.path.realpath(os.path.join(folder, path))
    except ValueError:  # no name of a file
        whole = ""
    if whole and not Path(whole).is_relative_to(os.path.realpath(folder)):
        problem = f"outside of the data's folder {folder}; copy it there"
        raise ValueError(f"{label}: {path[:80]!r} is {problem}")
    if not os.path.isfile(whole):
        raise ValueError(f"{label}: {path[:80]!r}: no such file in {folder}; correct the path")
    return whole


def stored(content: bytes) -> str:
    """Return the file with this content in the cache of this machine, which is written if it does
    not exist. Raises `ValueError` if the disk refuses it."""
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
            os.replace(work, file)  # other ranks may write the same
    except OSError as error:
        problem = f"cannot write images to {cache} ({error.strerror}); set XDG_CACHE_HOME"
        raise ValueError(problem) from error
    return str(file)


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def require_image(label: str, path: str) -> None:
    """Raise `ValueError` that begins with `label` for a file that is no single picture of a usual
    size. The header is read, not the pixels."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=FORMATS) as image:
            width, height = image.size
            # The first picture of an MPO, from some phones, is the whole one.
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
            image.verify()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, UnidentifiedImageError):
            empty = os.path.getsize(path) == 0
            error = ValueError("it is empty" if empty else "no image, or of an unknown format")
        raise ValueError(f"{label}: cannot be read: {error}; replace it") from error
    if frames > 1:
        raise ValueError(f"{label}: an animation of {frames} pictures; give one picture")
    if width * height > MOST_PIXELS:
        limit = f"more than {MOST_PIXELS:,} pixels"
        raise ValueError(f"{label}: {width} x {height}, {limit}; make it smaller")
    if max(width, height) > 200 * min(width, height):
        raise ValueError(f"{label}: {width} x {height}, an aspect ratio above 200; cut it")
