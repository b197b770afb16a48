"""The images of a pack: where they stand among its tokens, and their pixels. Pixels of the next
pack are decoded while the model computes this one.

Shapes: T tokens of the pack, P placeholders in it."""

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from common.packs.sample import ImageSpan
from common.packs.tokens import ModelTokens
from extras.images.reader import Pixels, Reader

_thread = ThreadPoolExecutor(1, "images")


class PackedImages:
    """The images of the sequences of a pack. A plain class, like `ModelTokens`."""

    def __init__(self, tokens: ModelTokens):
        sequences = tokens.image_sequences or []
        self.next = tokens.next
        # `truncate` cuts no image in two: an image that it left out ends after the sequence.
        self.images = [[i for i in s.images if i.end <= s.num_targets] for s in sequences]
        self.shared = [sequence.shared for sequence in sequences]  # first tokens, not computed
        computed = (sequence.num_targets - sequence.shared for sequence in sequences)
        self.offsets = [0, *accumulate(computed)]
        self._decoded: Future | None = None

    @property
    def spans(self) -> list[ImageSpan]:
        """The images whose placeholders the pack computes, in order: none of a shared prefix."""
        found = []
        for spans, prefix in zip(self.images, self.shared, strict=True):
            found += [span for span in spans if span.start >= prefix]
        return found

    def is_placeholder(self, ids_T: Tensor, image_id: int) -> Tensor:
        """Return which tokens stand for images, bool [T]. A sampled token never does."""
        found_T = torch.zeros_like(ids_T, dtype=torch.bool)
        for spans, prefix, offset in zip(self.images, self.shared, self.offsets, strict=False):
            for span in spans:
                if span.start >= prefix:
                    start = offset + span.start - prefix
                    found_T[start : start + span.end - span.start] = True
        return found_T & (ids_T == image_id)

    def decode(self, reader: Reader) -> list[Pixels]:
        """Return the pixels of `spans`, and begin to decode those of the next pack in a thread.
        Raises `ValueError` for an image that cannot be decoded."""
        begun = self._begin(reader)
        self._decoded = None  # to save memory: a later forward decodes them again
        pixels = begun.result()
        following = None if self.next is None else images_of(self.next)
        if following is not None:
            following._begin(reader)
        return pixels

    def _begin(self, reader: Reader) -> Future:
        if self._decoded is None:
            files = [(span.file, span.digest) for span in self.spans]
            self._decoded = _thread.submit(lambda: [reader.pixels(*file) for file in files])
        return self._decoded

    def positions(self, positions_T: Tensor, pixels: list[Pixels], reader: Reader) -> Tensor:
        """Return the positions of the tokens for rotary embeddings, [T] or [3, T]. `positions_T`:
        place of each token in its sequence."""
        layouts = {span.digest: each for span, each in zip(self.spans, pixels, strict=True)}
        parts = []
        for spans, (start, end) in zip(self.images, pairwise(self.offsets), strict=True):
            known = [(span, layouts[span.digest]) for span in spans]
            parts.append(reader.positions(positions_T[start:end], known))
        rest_T = positions_T[self.offsets[-1] :]  # padding
        parts.append(reader.positions(rest_T, []))
        return torch.cat(parts, dim=-1)


def images_of(tokens: ModelTokens) -> PackedImages | None:
    """Return the images of a pack, or None if it has none to compute."""
    if tokens.images is None and tokens.image_sequences is not None:
        tokens.images = PackedImages(tokens)
    return tokens.images if tokens.images and tokens.images.spans else None
