"""Engine for machines without vLLM: `model.generate` of transformers, which is slower."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from common.metrics.meter import Meter
from common.model.loading import open_model
from common.rollout.engine import COMPARED, Engine, Request, SampledTurn

BATCH = 64  # requests that `generate` samples together


class TransformersEngine(Engine):
    """`model.generate` on a second, whole copy of the policy (the replica). It cannot be
    interrupted, so one round samples each request to its end."""

    keeps_weights = True

    def _start(self) -> None:
        from transformers import GenerationConfig

        model = open_model(self.path, self.dtype)
        for parameter in model.parameters():  # experts stored as MXFP4 are read as bfloat16
            parameter.data = parameter.data.to(self.dtype)
        self.replica = model.to(self.device).eval()
        self.replica.generation_config = GenerationConfig()  # the checkpoint's may have penalties

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int = 0) -> None:
        self.version = version
        replica_weights = self.replica.state_dict()
        with torch.no_grad():
            for name, whole in weights:
                replica_weights[name].copy_(whole)

    def held_weights(self) -> Iterator[tuple[str, tuple, Callable[[], Tensor]]]:
        for name, weight in self.replica.state_dict().items():
            part = (..., slice(COMPARED)) if weight.ndim else (...,)
            yield name, part, partial(weight.__getitem__, part)

    def _step(self, meter: Meter) -> list[tuple[str, SampledTurn]]:
        """Sample whole turns for the next `BATCH` requests."""
        first = sorted(self.running.items(), key=lambda item: item[1].priority)[:BATCH]
        first.sort(key=lambda item: item[1].start)  # stable: equal lengths stay in their order
        turns: list[tuple[str, SampledTurn]] = []
        for temperature in {request.temperature for _, request in first}:
            same = {name: x for name, x in first if x.temperature == temperature}
            turns += zip(same, self._sample(list(same.values()), temperature), strict=True)
        return turns

    @torch.no_grad()
    def _sample(self, requests: list[Request], temperature: float) -> list[SampledTurn]:
        prompts = [request.completion.ids for request in requests]
        pad = self.eos_ids[0]
        longest = max(map(len, prompts))
        padded = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        input_ids = torch.tensor(padded, device=self.device)
        of_images: dict[str, Tensor] = {}
        if self.images is not None:
            completions = [request.completion for request in requests]
            of_images = self.images.generation_arguments(completions, input_ids)
        truncation = (self.truncation or {}) if temperature > 0 else {}
        seeds = [request.seed for request in requests]
        size = self.support if temperature > 0 else 0
        sampler = _SeededSampler(seeds, temperature, truncation, size, self.device)
        stopped: dict[int, int] = {}  # by request: length of a turn that a stop string has ended

        def are_stopped(input_ids: Tensor, scores: Tensor, **_) -> Tensor:
            for i, ids in enumerate(input_ids[:, longest:].tolist()):
                text = self.text_of(ids, cut=False)
                if any(string in text for string in self.args.stop):
                    stopped.setdefault(i, len(ids))
            return torch.tensor([i in stopped for i in range(len(requests))], device=self.device)

        out = self.replica.generate(
            input_ids,
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=max(request.max_tokens for request in requests),
            eos_token_id=self.eos_ids,
            pad_token_id=pad,
            do_sample=False,
            logits_processor=[sampler],
            stopping_criteria=[are_stopped] if self.args.stop else [],
            **{name: x.to(self.device) for name, x in of_images.items()},
        )
        logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
        support = torch.stack(sampler.support, 1).cpu().numpy() if size else [()] * len(requests)
        turns = []
        for i, tokens in enumerate(out[:, longest:].tolist()):
            ends = [k + 1 for k, token in enumerate(tokens) if token in self.eos_ids]
            ends += [stopped[i]] if i in stopped else []
            length = min([requests[i].max_tokens, *ends])
            versions = [self.version] * length
            reason = "stop" if length in ends else "length"
            turn = SampledTurn(tokens[:length], logprobs[i][:length], versions, reason)
            turns.append(turn._replace(support=support[i][:length]))
        return turns


class _SeededSampler:
    """Logits processor with which greedy `generate` samples: argmax(log p + Gumbel noise) has the
    distribution p. `generate` itself would draw the whole batch from one generator. Here each
    completion has its own, so a sample does not depend on the batch or the rank that it is in."""

    def __init__(self, seeds: list[int], temperature: float, truncation: dict, size: int, device):
        """`truncation`: values of `TruncationArgs`, by name. `size`: sample from this many most
        likely ids and keep them as the support of each token; 0: keep none."""
        from transformers.generation import logits_process as hf

        self.temperature = temperature
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.logprobs: list[Tensor] = []
        self.size, self.support = size, list[Tensor]()  # [requests, K] for each token
        # Each warper sets the logits of the tokens that it leaves out to -inf. They are in vLLM's
        # order (vllm/v1/sample/sampler.py).
        self.truncate = hf.LogitsProcessorList()
        if (min_p := truncation.get("min_p", 0.0)) > 0:
            self.truncate.append(hf.MinPLogitsWarper(min_p))
        if (top_k := truncation.get("top_k", 0)) > 0:
            self.truncate.append(hf.TopKLogitsWarper(top_k))
        if (top_p := truncation.get("top_p", 1.0)) < 1:
            self.truncate.append(hf.TopPLogitsWarper(top_p))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = torch.log_softmax(scores.float() / (self.temperature or 1.0), dim=-1)
        if self.truncate:
            logprobs = self.truncate(input_ids, logprobs).log_softmax(dim=-1)
        if self.size:
            best = logprobs.topk(min(self.size, logprobs.shape[-1]))
            kept = torch.full_like(logprobs, -torch.inf).scatter(1, best.indices, best.values)
            logprobs = kept.log_softmax(dim=-1)  # top_k keeps more ids if logits are equal
            ids = best.indices.where(best.values > -torch.inf, best.indices[:, :1])
            self.support.append(ids.int())
        chosen = logprobs
        if self.temperature > 0:
            noise = [
                torch.empty_like(logprobs[0]).exponential_(generator=generator)
                for generator in self.generators
            ]
            chosen = logprobs - torch.stack(noise).log()
            chosen = chosen.masked_fill(logprobs == -torch.inf, -torch.inf)  # even if noise is 0
        self.logprobs.append(logprobs.gather(-1, chosen.argmax(-1, keepdim=True))[:, 0])
        return chosen
