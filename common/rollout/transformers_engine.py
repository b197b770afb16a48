"""The fallback engine, `model.generate` on an unsharded replica: for machines without vLLM."""

from collections.abc import Iterator

import torch
from torch import Tensor

from common.rollout.engine import Engine

BATCH = 64  # completions that `generate` samples together


class TransformersEngine(Engine):
    """`model.generate` on an unsharded replica: for machines without vLLM."""

    def _start(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.replica = AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype).to(self.device).eval()
        self.replica.generation_config = GenerationConfig()  # not the model's own penalties

    def _advance(self):
        """Some of those that are running, those with the shortest prompts, to their ends."""
        chosen = sorted(self.running.values(), key=lambda c: len(c.prompt + c.ids))[:BATCH]
        for temperature in {c.temperature for c in chosen}:
            batch = [c for c in chosen if c.temperature == temperature]
            rows = [(c.prompt + c.ids, c.piece_seed, c.limit - len(c.ids)) for c in batch]
            for completion, said in zip(batch, self._batch(rows, temperature), strict=True):
                self._said(completion, *said)

    @torch.no_grad()
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

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
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
