"""Models that vLLM does not take as they are: gpt-oss, whose weights may be in MXFP4, and the
language models in checkpoints of images and text, where vLLM's class for the whole imports packages
that text does not need.

vLLM gets the config of the language model and no weights. The trainer's weights follow, under the
names of that model."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from common.model.loading import has_images, method_of_quantization, model_class
from extras.architectures import gpt_oss_weights

# transformers and vLLM have no class for these language models alone. On text they compute what
# another type does: rotary embeddings of images have three positions, which are equal for text.
SAME_ON_TEXT = dict(qwen3_vl_text="qwen3", qwen2_5_vl_text="qwen2", qwen2_vl_text="qwen2")
OF_IMAGES = ("mrope_section", "mrope_interleaved")


class LanguageModel:
    """What vLLM loads in place of a folder: only its language model, with float weights."""

    def __init__(self, config, whole: nn.Module, tensor_parallel_size: int):
        """`config`: of the folder; `whole`: its whole model on meta."""
        self.is_gpt_oss = config.model_type == "gpt_oss"
        if self.is_gpt_oss and tensor_parallel_size > 1:
            raise ValueError("--tensor_parallel_size above 1 is not supported for gpt_oss")
        self.config = language_config(config)
        with torch.device("meta"):
            self.model = model_class(self.config).from_config(self.config)
        self.prefix, self.prefix_in_vllm = (
            next(f"{name}." for name, part in hf.named_modules() if part is hf.get_decoder())
            for hf in (whole, self.model)
        )
        self.others: dict[str, Tensor] = {}  # weights that vLLM's reload forgets

    def vllm_options(self, overrides: dict) -> dict:
        """Return options of `LLM`. `overrides`: fields of the config that only vLLM gets."""
        self.config.architectures = [type(self.model).__name__]
        for name, value in overrides.items():
            setattr(self.config, name, value)
        return dict(hf_overrides=lambda _: self.config, load_format="dummy")

    def weights_for_vllm(
        self, weights: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the language model's weights under its own names, without those of towers."""
        for name, weight in weights:
            if self.is_gpt_oss and (".experts." in name or name.endswith(".sinks")):
                self.others[name] = weight
            elif name.startswith(self.prefix):
                yield self.prefix_in_vllm + name.removeprefix(self.prefix), weight
            elif name.startswith("lm_head."):
                yield name, weight

    def after_vllm_load(self, llm) -> None:
        """Load the weights that vLLM's reload forgets, and which were kept until now."""
        if self.others:
            llm.collective_rpc(gpt_oss_weights.copy_weights, args=(self.others,))
            self.others = {}


def language_config(config):
    """Return the config of a folder's language model, with float weights."""
    if method_of_quantization(config) is not None:
        del config.quantization_config
    if not has_images(config):
        return config
    text = config.get_text_config()
    if text.model_type in SAME_ON_TEXT:
        from transformers import AutoConfig

        fields = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        rope = fields["rope_parameters"].items()
        fields["rope_parameters"] = {name: x for name, x in rope if name not in OF_IMAGES}
        text = AutoConfig.for_model(SAME_ON_TEXT[text.model_type], **fields)
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    text.dtype = config.dtype or text.dtype
    return text
