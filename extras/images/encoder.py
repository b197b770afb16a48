"""Prompts with images -> texts that show them, and their places among the ids."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

from common.data.messages import IMAGE
from common.data.sample import ImageSpan
from extras.images.image_files import digest, take_images
from extras.images.reader import expanded, reader

NO_IMAGES = (
    "environment", "agent", "tools", "shots", "reward_models", "reward_model", "perplexity_model",
    "rope_factor",
)  # fmt: skip


class ImageEncoder:
    """Encoder of the images of rows for one model."""

    def __init__(self, tokenizer, args):
        """Raises `ValueError` for a model that reads no images, and for flags without support for
        them."""
        for name in NO_IMAGES:
            value = getattr(args, name, None)
            if value:
                flag = f"reward {value[0]}" if name == "reward_models" else name
                raise ValueError(f"--vision {args.vision}: --{flag} does not support images")
        self.tokenizer = tokenizer
        self.reader = reader(tokenizer.name_or_path, args.max_pixels)
        self.token = tokenizer.convert_ids_to_tokens(self.reader.image_id)
        self.shown = lru_cache(maxsize=1024)(self._shown)  # by file

    def _shown(self, file: str) -> tuple[str, ImageSpan]:
        """Return the text that shows an image in a prompt, and the image at place 0."""
        content = Path(file).read_bytes()
        layout = self.reader.layout_of(content)
        span = ImageSpan(file, digest(content), 0, layout.placeholders, layout.patches)
        return self.reader.text(layout, self.tokenizer), span

    def take(self, row: dict, columns: Sequence[str]) -> None:
        """Store the images of a row as files: see `take_images`."""
        take_images(row, columns)

    def expand(
        self, row: dict, text: str, cuts: list[int], has_template: bool
    ) -> tuple[str, list[int]]:
        """Return a prompt with the text of each image of the row in place of its placeholder, and
        its cuts. Raises `ValueError` if it has another number of placeholders than the row has
        images."""
        mark = self.token if has_template else IMAGE
        shown = [self.shown(file)[0] for file in row["images"]]
        if not has_template:
            shown = [self.reader.around(each, self.tokenizer) for each in shown]
        found = text.count(mark)
        if found != len(shown):
            what = f"{found} placeholders of images ({mark!r}) for {len(shown)} images"
            advice = "take the mark out of texts (--special_text text reads it as text)"
            if found < len(shown):
                advice = "set --chat_template to one of images and text"
            raise ValueError(f"{row['_source']}: the prompt has {what}; {advice}")
        return expanded(text, cuts, mark, shown)

    def require_no_placeholder(self, row: dict, ids: Sequence[int]) -> None:
        """Raise `ValueError` if a row without images has a placeholder."""
        if self.reader.image_id in ids:
            problem = f"the text has {self.token}, the placeholder of an image, but no image"
            advice = "add the image, or --special_text text, which reads it as text"
            raise ValueError(f"{row['_source']}: {problem}; {advice}")

    def spans(self, row: dict, ids: Sequence[int]) -> list[ImageSpan]:
        """Return the images of a row with their places among the ids."""
        places = iter([place for place, token in enumerate(ids) if token == self.reader.image_id])
        spans = []
        for file in row["images"]:
            _, span = self.shown(file)
            own = [*islice(places, span.end)]
            spans.append(span._replace(start=own[0], end=own[-1] + 1))
        assert next(places, None) is None, "a placeholder without an image"
        return spans
