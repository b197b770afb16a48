"""Encoding the images of rows: marks in the messages become the token ids that show them."""

from array import array
from functools import lru_cache
from pathlib import Path

from common.packs.sample import ImageSpan
from common.text.messages import IMAGE
from extras.images.image_files import digest, readable, take_images
from extras.images.reader import reader


class ImageEncoder:
    """Encodes the images of rows for one model."""

    def __init__(self, tokenizer, max_pixels: int | None):
        """Raises `ValueError` for a model that reads no images."""
        self.tokenizer = tokenizer
        self.reader = reader(tokenizer.name_or_path, max_pixels)
        self.token = tokenizer.convert_ids_to_tokens(self.reader.image_id)
        self.take = take_images
        self._shown = lru_cache(maxsize=1024)(self._show)  # by file

    def _show(self, file: str) -> tuple[list[int], ImageSpan]:
        """Return the ids that show an image in a prompt, and its span in these ids."""
        content = Path(file).read_bytes()
        layout = self.reader.layout_of(content)
        text = self.reader.text(layout, self.token)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        places = [place for place, token in enumerate(ids) if token == self.reader.image_id]
        span = ImageSpan(file, digest(content), places[0], places[-1] + 1, layout.patches)
        return ids, span

    def in_plain_text(self, text: str) -> str:
        """Return a text with an image's placeholder for each mark, as chat templates write it."""
        return text.replace(IMAGE, self.reader.around(self.token, self.tokenizer))

    def expanded(self, row: dict, ids: array, files: list[str]) -> tuple[array, list[ImageSpan]]:
        """Replace each placeholder in a row's ids by the ids that show its image, one of `files` in
        order. Return the ids and the images in them. Raises `ValueError` unless there is one for
        each image."""
        found = ids.count(self.reader.image_id)
        if found != len(files):
            what = f"{found} placeholders of images ({self.token!r}) for {len(files)} images"
            advice = "take the mark out of texts (--special_text text reads it as text)"
            if found < len(files):
                advice = "set --chat_template to one of images and text"
            raise ValueError(f"{row['_source']}: the prompt has {what}; {advice}")
        rest = iter(files)
        spans: list[ImageSpan] = []
        longer = array("i")
        for token in ids:
            shown = [token]
            if token == self.reader.image_id:
                file = next(rest)
                with readable(f"{row['_source']}: the image {file}"):
                    shown, span = self._shown(file)
                start, end = len(longer) + span.start, len(longer) + span.end
                spans.append(span._replace(start=start, end=end))
            longer.extend(shown)
        return longer, spans
