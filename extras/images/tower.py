"""The vision tower of a model of images and text, beside its language model (`--vision`).

A policy's `hf` is the language model, as without images. Its `tower` is all that transformers'
model has besides: the vision tower and the projection of its outputs. The tower belongs to the FSDP
root. Without `--vision` it is neither built nor loaded (text_part.py).

Shapes: T packed tokens, D hidden size."""

import io
import json

import torch
from PIL import Image
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from common.config.groups import BaseArgs
from common.data.packing import pack_groups
from common.data.sample import ImageSpan, Sample
from common.data.tokens import Tokens
from common.model.attention import packed_inputs
from common.model.export_files import change, changed
from common.model.loading import load_config, one_line_errors, rebuild_buffers
from common.model.packable import build_on_meta, packable_config
from common.model.text_part import TOWER_IN_FILES, with_fields_of_whole
from extras.images.image_files import digest, stored
from extras.images.packed import images_of, to_device
from extras.images.qwen3_vl import Qwen3VLForCausalLM
from extras.images.reader import reader

LANGUAGE_MODELS = ("language_model", "text_model")  # its names in transformers' base models


class Tower(nn.Module):
    """`parts`: transformers' base model without its language model."""

    def __init__(self, path: str, args: BaseArgs, dtype: torch.dtype, trainable: bool):
        """Build it without memory, with weights of `dtype`, which are trained with `--vision train`
        if the model is `trainable`."""
        from transformers import AutoModelForImageTextToText

        super().__init__()
        self.path = path
        self.reader = reader(path, args.max_pixels)
        with torch.device("meta"):
            whole = AutoModelForImageTextToText.from_config(
                load_config(path), attn_implementation="sdpa", dtype=torch.float32
            )
        self.parts = whole.base_model
        for name in LANGUAGE_MODELS:
            if hasattr(self.parts, name):
                delattr(self.parts, name)
        for parameter in self.parts.parameters():
            parameter.data = parameter.data.to(dtype)
        self.parts.requires_grad_(trainable and args.vision == "train")

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parts.parameters())

    @property
    def weights(self) -> int:
        return sum(parameter.numel() for parameter in self.parts.parameters())

    def kept_numbers(self) -> int:
        """Return the numbers that the tower keeps for its backward per placeholder of an image; if
        it is frozen, those of one block at a time."""
        vision = self.parts.config.vision_config
        depth = getattr(vision, "num_hidden_layers", None) or vision.depth
        of_block = 10 * vision.hidden_size + 2 * vision.intermediate_size
        return self.reader.patches_per_placeholder * of_block * (depth if self.is_trained else 1)

    def weights_in_files(self) -> list[tuple[str, Tensor]]:
        """Return the sharded weights by their names in files."""
        return [(TOWER_IN_FILES + name, weight) for name, weight in self.parts.state_dict().items()]

    def load(self, stored: dict[str, list[int]], label: str, device: torch.device) -> list[str]:
        """Fill the sharded weights: each rank reads its own slices. Return their names in files.
        Raises `ValueError` unless the files have them: `stored` has the shapes by name."""
        for name, weight in self.weights_in_files():
            if stored.get(name) != list(weight.shape):
                has = stored.get(name, "no such weight")
                raise ValueError(f"{label}: {name} {list(weight.shape)} expected, got {has}")
        self.parts.to_empty(device=device)
        rebuild_buffers(self.parts, label)
        wanted = dict(self.weights_in_files())
        with one_line_errors(label):
            dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(self.path))
        return list(wanted)

    def inputs(self, hf: nn.Module, tokens: Tokens) -> dict:
        """Return the arguments of the language model `hf` for a pack: with images, the embeddings
        of the tokens in place of their ids."""
        inputs = packed_inputs(tokens)
        images = images_of(tokens)
        if images is None and not self.is_trained:
            return inputs
        ids_T = tokens.input_ids_T
        embeds_TD = hf.get_input_embeddings()(ids_T)
        if images is not None:
            device = ids_T.device
            decoded = images.decode(self.reader)
            pixels = [{name: x.to(device) for name, x in each.items()} for each in decoded]
            with torch.set_grad_enabled(self.is_trained and torch.is_grad_enabled()):
                features = to_device(self.reader.features(self.parts, pixels), embeds_TD)
            is_image_T = images.is_placeholder(ids_T, self.reader.image_id)
            assert is_image_T.sum() == len(features.embeds), "placeholders differ from features"
            embeds_TD = embeds_TD.masked_scatter(is_image_T[:, None], features.embeds)
            positions = images.positions(tokens.position_ids_T, decoded, self.reader)
            inputs["position_ids"] = positions[..., None, :]
            if features.deepstack:
                inputs["visual_pos_masks"] = is_image_T[None]
                inputs["deepstack_visual_embeds"] = features.deepstack
        if self.is_trained:
            # FSDP reduces the gradients that exist: all ranks must have the same ones.
            embeds_TD = embeds_TD + 0.0 * self._touch()
        inputs["input_ids"] = None
        return inputs | dict(inputs_embeds=embeds_TD[None])

    def _touch(self) -> Tensor:
        """Return a number that depends on every weight."""
        return sum(p.flatten()[0] for p in self.parts.parameters() if p.requires_grad)

    @torch.no_grad()
    def check(self, model: nn.Module, label: str, first: Sample, second: Sample) -> None:
        """Refuse a model in which an image in one sequence of a pack changes another, or does
        not change its own. `first` and `second` are samples without images. Collective. Raises
        `ValueError`."""
        usual = self.reader
        self.reader = small = reader(self.path, 1)  # few patches
        packs = []
        for seed in (0, 1):
            content = noise(seed)
            file = stored(content)
            span = ImageSpan(file, digest(content), 1, 1, 0)
            count = small.layout_of(content).placeholders
            ids = [first.ids[0], *[small.image_id] * count, *first.ids[1:]]
            row = dict(_images=[span._replace(end=1 + count)])
            sample = Sample(ids, [True] * len(ids), row=row)
            packs += pack_groups([[sample, second]], 1 << 20, model.device)
        x_T, y_T = (model(mb).logprobs_T for mb in packs)
        model.reshard()
        self.reader = usual
        differs_T = (x_T - y_T).abs()
        n = second.num_targets
        if not differs_T[-n:].max() < 1e-4:
            raise ValueError(f"{label}: an image of one packed sequence changes another sequence")
        if not differs_T[:-n].max() > 0:
            raise ValueError(f"{label}: another image does not change the log-probs behind it")

    def limit_exported(self, files: dict[str, bytes]) -> None:
        """Set `--max_pixels` in the exported `files` of the image processor, which has a file or a
        part of one."""
        if self.reader.max_pixels is None:
            return
        changes: dict[str, object] = dict(size=self.reader.size, min_pixels=None, max_pixels=None)
        change(files, "preprocessor_config.json", changes)
        whole = "processor_config.json"
        part = json.loads(files.get(whole, b"{}")).get("image_processor")
        if part is not None:
            change(files, whole, dict(image_processor=changed(part, changes)))


def noise(seed: int) -> bytes:
    """Return a picture of 64 x 64 random pixels, as PNG."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (64, 64, 3), generator=generator, dtype=torch.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(content, "PNG")
    return content.getvalue()


def language_model_on_meta_with_images(path: str, label: str, dtype: torch.dtype) -> nn.Module:
    """Return the language model in a model of images and text, with rotary embeddings for images:
    see `build_on_meta`. The class is that of transformers' `AutoModelForCausalLM`, or ours for
    Qwen3-VL, which has none."""
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    text = with_fields_of_whole(config.get_text_config(), config)
    own = text.model_type == "qwen3_vl_text"
    auto_class = Qwen3VLForCausalLM if own else AutoModelForCausalLM
    return build_on_meta(auto_class, packable_config(text, label), label, dtype)
