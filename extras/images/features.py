"""Images for the engines: transformers and vLLM both get the pixels that the trainer makes.

vLLM's own image processing is not used: it would make other pixels, and would expand the
placeholders of a prompt a second time."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from common.packs.sample import Completion
from extras.images.reader import reader

OPTIONS: dict[str, object] = dict(
    skip_tokenizer_init=False,  # vLLM's processors need a tokenizer
    mm_device_do_normalize=False,  # pixels are normalised already
    skip_mm_profiling=True,
    mm_processor_cache_gb=0,
    limit_mm_per_prompt=dict(image=1, video=0),  # only for memory budgets; prompts may have more
)


class EngineImages:
    """The part of an engine that reads images. Both engines have one."""

    def __init__(self, path: str, max_pixels: int | None):
        self.reader = reader(path, max_pixels)

    def generation_arguments(self, completions: list[Completion], ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments of transformers' `generate` for the images of these completions.
        `ids`: their padded prompts, [batch, tokens]."""
        spans = [span for completion in completions for span in completion.images]
        pixels = [self.reader.recent_pixels(span.file, span.digest) for span in spans]
        return self.reader.generation_arguments(pixels, ids) if pixels else {}

    def vllm_options(self, architecture: str) -> dict[str, object]:
        """Register vLLM's model of images and text, and return options of `LLM`."""
        register_model(architecture)
        return OPTIONS

    def vllm_input(self, completion: Completion) -> dict:
        """Return a prompt with images as vLLM's `MultiModalInput`, for `add_request`. An image is
        named by the digest of its content, so that vLLM's caches recognise it."""
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import (
            MultiModalFieldConfig,
            MultiModalKwargsItems,
            PlaceholderRange,
        )

        items, places = [], []
        for span in completion.images:
            ids = torch.tensor(completion.ids[span.start : span.end])
            is_embed = ids == self.reader.image_id
            others = None if is_embed.all() else is_embed
            places.append(PlaceholderRange(span.start, len(ids), others))
            pixels = self.reader.recent_pixels(span.file, span.digest)
            count = torch.tensor([len(pixels["pixel_values"])])  # of tiles, or of patches
            whole = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
            fields = dict.fromkeys(pixels, MultiModalFieldConfig.flat_from_sizes("image", count))
            fields |= dict(num_patches=whole, image_grid_thw=whole)
            data = pixels | dict(num_patches=count)
            items += MultiModalKwargsItems.from_hf_inputs(data, fields)["image"]
        digests = dict(image=[span.digest for span in completion.images])
        return mm_input([*completion.ids], dict(image=items), digests, dict(image=places))

    def after_vllm_load(self, llm) -> None:
        """Clear what vLLM keeps beside the weights, after these were loaded."""
        llm.collective_rpc(zero_deepstack)


def register_model(architecture: str) -> None:
    """Make vLLM's model of images and text usable without its image processor."""
    from vllm import ModelRegistry

    if architecture not in ModelRegistry.models:  # vLLM's error lists those that it has
        return
    with _stand_in_for_torchvision():
        model_class = ModelRegistry.models[architecture].load_model_cls()
    # A class that is not loaded yet vLLM would inspect in another process, without the stand-in.
    ModelRegistry.register_model(architecture, model_class)
    # To find the largest number of placeholders of an image, vLLM would build a processor of
    # transformers, which needs torchvision for videos (vllm/multimodal/encoder_budget.py).
    info = model_class._processor_factory.info
    info.get_mm_max_tokens_per_item = lambda self, seq_len, mm_counts: dict(image=seq_len)


@contextlib.contextmanager
def _stand_in_for_torchvision() -> Iterator[None]:
    """Put empty modules in the place of torchvision if it is missing, as it is beside a CPU torch:
    the package index only has builds for CUDA. vLLM's qwen3_vl.py imports a function for sizes from
    transformers' image_processing_qwen2_vl.py, which imports torchvision. Pixels do not need it."""
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():  # transformers keeps the answer
        yield
        return
    logger = logging.getLogger("transformers.utils.import_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)  # else it advises to install torchvision
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    names.append("torchvision.transforms.v2.functional")
    sys.modules.update((name, ModuleType(name)) for name in names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        logger.setLevel(level)


def zero_deepstack(worker) -> None:
    """Zero the buffers of Qwen3-VL that hold features of images; they lose their content when vLLM
    sleeps at level 2. vLLM adds them to every token, and expects zeros in steps without images
    (vllm/model_executor/models/qwen3_vl.py)."""
    for buffer in getattr(worker.get_model(), "deepstack_input_embeds", ()):
        buffer.zero_()
