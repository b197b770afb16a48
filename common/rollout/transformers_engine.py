"""Engine for machines without vLLM: `model.generate` on an unsharded replica."""

from collections.abc import Iterator

import torch
from torch import Tensor

from common.rollout.engine import Engine, Request

BATCH = 64  # requests that `generate` samples together


class TransformersEngine(Engine):
    """`model.generate` on an unsharded replica of the policy. It samples each request to its end in one turn."""

    def _start(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        replica = AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype, trust_remote_code=False)
        self.replica = replica.to(self.device).eval()
        self.replica.generation_config = GenerationConfig()  # without the penalties in the model's own

    def _advance(self) -> None:
        """Sample the running requests with the shortest prompts."""
        chosen = sorted(self.running.values(), key=lambda request: len(request.completion.ids))[:BATCH]
        for temperature in {request.temperature for request in chosen}:
            self._sample([request for request in chosen if request.temperature == temperature], temperature)

    @torch.no_grad()
    def _sample(self, requests: list[Request], temperature: float) -> None:
        prompts, pad = [request.completion.ids for request in requests], self.eos_ids[0]
        limits = [request.max_tokens - request.num_sampled for request in requests]
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        sampler = _SeededSampler([request.piece_seed for request in requests], temperature, self.device)
        out = self.replica.generate(
            ids, attention_mask=mask, max_new_tokens=max(limits), eos_token_id=self.eos_ids, pad_token_id=pad,
            do_sample=False, top_p=None, top_k=None, repetition_penalty=None, logits_processor=[sampler],
        )  # fmt: skip
        logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
        for i, tokens in enumerate(out[:, longest:].tolist()):
            length = next((k + 1 for k, token in enumerate(tokens[: limits[i]]) if token in self.eos_ids), limits[i])
            reason = "stop" if tokens[length - 1] in self.eos_ids else "length"
            self.append_output(requests[i], tokens[:length], logprobs[i][:length], reason)

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        own = self.replica.state_dict()
        with torch.no_grad():
            for name, whole in weights:
                own[name].copy_(whole)


class _SeededSampler:
    """Logits processor that turns the argmax of `generate` into a sample: argmax(log p + Gumbel noise) ~ p. Each
    completion has a noise generator of its own, so that samples do not depend on batches and ranks."""

    def __init__(self, seeds: list[int], temperature: float, device: torch.device):
        self.temperature = temperature
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = torch.log_softmax(scores.float() / (self.temperature or 1.0), dim=-1)
        chosen = logprobs
        if self.temperature > 0:
            noise = [torch.empty_like(logprobs[0]).exponential_(generator=generator) for generator in self.generators]
            chosen = logprobs - torch.stack(noise).log()
        self.logprobs.append(logprobs.gather(-1, chosen.argmax(-1, keepdim=True))[:, 0])
        return chosen
