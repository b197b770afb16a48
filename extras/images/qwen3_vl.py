"""The language model of Qwen3-VL with a head, which transformers has in no class of its own."""

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLPreTrainedModel,
    Qwen3VLTextModel,
)


class Qwen3VLForCausalLM(Qwen3VLPreTrainedModel):
    config: Qwen3VLTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    @classmethod
    def from_config(cls, config, trust_remote_code: bool = False, **options):
        """Return a model with random weights, like transformers' auto classes."""
        return cls._from_config(config, **options)

    def __init__(self, config: Qwen3VLTextConfig):
        super().__init__(config)
        self.model = Qwen3VLTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, **inputs) -> CausalLMOutput:
        hidden: torch.Tensor = self.model(**inputs).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))
