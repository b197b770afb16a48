"""The fallback engine, `model.generate` on an unsharded replica: for machines without vLLM."""

from collections.abc import Iterator

import torch
from torch import Tensor

from common.rollout.base import SEED_SPACING, Engine


class TransformersEngine(Engine):
    """`model.generate` on an unsharded replica: for machines without vLLM."""

    def _start(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.replica = AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype).to(self.device).eval()
        self.replica.generation_config = GenerationConfig()  # not the model's own penalties

    @torch.no_grad()
    def _generate(self, prompts, n, seeds, temperature, limits):
        rows = [
            (prompt, seed * SEED_SPACING + i, limit)
            for prompt, seed, limit in zip(prompts, seeds, limits, strict=True)
            for i in range(n)
        ]
        done: list = [None] * len(rows)
        by_length = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        for start in range(0, len(rows), 64):
            batch = by_length[start : start + 64]
            for i, completion in zip(batch, self._batch([rows[i] for i in batch], temperature), strict=True):
                done[i] = completion
        return [done[i : i + n] for i in range(0, len(done), n)]

    def _batch(self, rows, temperature):
        longest = max(len(prompt) for prompt, *_ in rows)
        pad = self.eos_ids[0]
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt, *_ in rows], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, *_ in rows], device=self.device)
        sampler = _SeededSampler([seed for _, seed, _ in rows], temperature, self.device)
        out = self.replica.generate(
            ids, attention_mask=mask, max_new_tokens=max(limit for *_, limit in rows),
            eos_token_id=self.eos_ids, pad_token_id=pad,
            do_sample=False, top_p=None, top_k=None, repetition_penalty=None, logits_processor=[sampler],
        )  # fmt: skip
        logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
        completions = []
        for (*_, limit), tokens, token_logprobs in zip(rows, out[:, longest:].tolist(), logprobs, strict=True):
            tokens = tokens[:limit]
            length = next((i + 1 for i, token in enumerate(tokens) if token in self.eos_ids), len(tokens))
            reason = "stop" if tokens[length - 1] in self.eos_ids else "length"
            completions.append((tokens[:length], token_logprobs[:length], reason))
        return completions

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        mine = self.replica.state_dict()
        with torch.no_grad():
            for name, whole in weights:
                mine[name].copy_(whole)


class _SeededSampler:
    """A logits processor that makes `generate`'s argmax a sample: argmax(log p + Gumbel noise) ~ p, with one noise
    generator per completion, so that batching and ranks change nothing."""

    def __init__(self, seeds: list[int], temperature: float, device: torch.device):
        self.temperature = temperature
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = torch.log_softmax(scores.float() / (self.temperature or 1.0), dim=-1)
        chosen = logprobs
        if self.temperature > 0:
            exponential = torch.stack(
                [
                    torch.empty_like(row).exponential_(generator=g)
                    for row, g in zip(logprobs, self.generators, strict=True)
                ]
            )
            chosen = logprobs - exponential.log()
        self.logprobs.append(logprobs.gather(-1, chosen.argmax(-1, keepdim=True))[:, 0])
        return chosen
