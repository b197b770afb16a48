"""The part of a policy that reads images (`--vision`): features of the vision tower take the place
of the embeddings of placeholders.

A policy's `hf` is transformers' model of images and text. Without `--vision` its tower is loaded
only to be exported; with it, the tower belongs to the root of FSDP.

Shapes: T packed tokens, D hidden size."""

import io
import json

import torch
from PIL import Image
from torch import Tensor, nn

from common.config.groups import ImageArgs
from common.model.attention import packed_inputs
from common.model.loading import towers_of
from common.packs.packing import pack_groups
from common.packs.sample import ImageSpan, Sample
from common.packs.tokens import ModelTokens
from common.train.export_files import change, changed
from extras.images.image_files import digest, stored
from extras.images.packed import images_of
from extras.images.reader import reader


class Images:
    """The part of a policy that reads images."""

    def __init__(self, hf: nn.Module, path: str, args: ImageArgs, trainable: bool):
        """The tower is trained if the model is `trainable` and the flag is `--vision train`."""
        self.hf = hf
        self.path = path
        self.reader = reader(path, args.max_pixels)
        self.is_trained = trainable and args.vision == "train"

    def kept_numbers(self) -> int:
        """Return how many numbers the tower keeps for its backward, per placeholder of an image. A
        frozen tower has no backward: it keeps one block at a time."""
        vision = self.hf.config.vision_config
        depth = getattr(vision, "num_hidden_layers", None) or vision.depth
        of_block = 10 * vision.hidden_size + 2 * vision.intermediate_size
        return self.reader.patches_per_placeholder * of_block * (depth if self.is_trained else 1)

    def inputs(self, tokens: ModelTokens) -> dict:
        """Return the language model's arguments for a pack. If it has images, they have the
        embeddings of the tokens in place of their ids."""
        inputs = packed_inputs(tokens)
        images = images_of(tokens)
        if images is None and not self.is_trained:
            return inputs
        ids_T = tokens.input_ids_T
        embeds_TD = self.hf.get_input_embeddings()(ids_T)
        if images is not None:
            device = ids_T.device
            decoded = images.decode(self.reader)
            pixels = [{name: x.to(device) for name, x in each.items()} for each in decoded]
            with torch.set_grad_enabled(self.is_trained and torch.is_grad_enabled()):
                features = self.reader.features(self.hf.base_model, pixels)
            is_image_T = images.is_placeholder(ids_T, self.reader.image_id)
            assert is_image_T.sum() == len(features.embeds), "placeholders differ from features"
            embeds_TD = embeds_TD.masked_scatter(is_image_T[:, None], features.embeds.to(embeds_TD))
            positions = images.positions(tokens.position_ids_T, decoded, self.reader)
            inputs["position_ids"] = positions[..., None, :]
            if features.deepstack:
                inputs["visual_pos_masks"] = is_image_T[None]
                inputs["deepstack_visual_embeds"] = [x.to(embeds_TD) for x in features.deepstack]
        if self.is_trained:
            # FSDP reduces the gradients that exist, so every weight needs one on every rank, images
            # or not.
            embeds_TD = embeds_TD + 0.0 * self._touch()
        inputs["input_ids"] = None
        return inputs | dict(inputs_embeds=embeds_TD[None])

    def _touch(self) -> Tensor | int:
        """Return a number that depends on every trained weight of the tower."""
        weights = (p for tower in towers_of(self.hf) for p in tower.parameters())
        return sum(p.flatten()[0] for p in weights if p.requires_grad)

    @torch.no_grad()
    def check(self, model: nn.Module, first: list[int], second: list[int]) -> None:
        """Refuse a model that reads images in a pack wrongly: an image must change the log-probs of
        its own sequence and of no other. `first` and `second` are token ids. Collective. Raises
        `ValueError`."""
        usual = self.reader
        self.reader = small = reader(self.path, 1)  # as few patches as possible
        packs = []
        for seed in (0, 1):
            content = noise(seed)
            file = stored(content)
            span = ImageSpan(file, digest(content), 1, 1, 0)
            count = small.layout_of(content).placeholders
            ids = [first[0], *[small.image_id] * count, *first[1:]]
            row = dict(_images=[span._replace(end=1 + count)])
            group = [Sample(ids, [True] * len(ids), row=row), Sample(second, [True] * len(second))]
            packs += pack_groups([group], 1 << 20, model.device)
        x_T, y_T = (model(mb).logprobs_T for mb in packs)
        model.reshard()
        self.reader = usual
        differs_T = (x_T - y_T).abs()
        n = len(second) - 1
        if not differs_T[-n:].max() < 1e-4:
            raise ValueError("an image of one packed sequence changes another sequence")
        if not differs_T[:-n].max() > 0:
            raise ValueError("another image does not change the log-probs after it")

    def limit_exported(self, files: dict[str, bytes]) -> None:
        """Write `--max_pixels` into the exported `files` of the image processor: into its own file,
        or into its part of another."""
        if self.reader.max_pixels is None:
            return
        changes: dict[str, object] = dict(size=self.reader.size, min_pixels=None, max_pixels=None)
        change(files, "preprocessor_config.json", changes)
        whole = "processor_config.json"
        part = json.loads(files.get(whole, b"{}")).get("image_processor")
        if part is not None:
            change(files, whole, dict(image_processor=changed(part, changes)))


def noise(seed: int) -> bytes:
    """Return a PNG of 64 x 64 random pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (64, 64, 3), generator=generator, dtype=torch.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(content, "PNG")
    return content.getvalue()
