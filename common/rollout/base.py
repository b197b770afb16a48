"""What the engines share: settings, seeds, and the form of what they return."""

import contextlib
import random
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from common import distributed
from common.config import SamplingArgs
from common.models import compute_dtype
from common.packing import Sample

SEED_SPACING = 1 << 16  # vLLM seeds the i-th completion of a request with seed + i


class Engine:
    """What both engines share: the settings, and the form of what they return."""

    def __init__(
        self, path: str, args: SamplingArgs, eos_ids: list[int], tokenizer, device: torch.device, trained: bool
    ):
        self.args, self.eos_ids, self.tokenizer, self.device = args, eos_ids, tokenizer, device
        self.added_ids = set(tokenizer.added_tokens_decoder)
        self.dtype = compute_dtype(args, device)
        self.beside_trainer = trained and not distributed.is_rollout_rank()
        with untouched_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM walks over deprecated names of torch
            self._start(path)
            if trained:
                self.sleep()
        distributed.install_signal_handlers()  # vLLM's imports may have replaced them

    def generate(
        self, prompts: list[list[int]], n: int, seeds: list[int], temperature: float, limits: list[int] | None = None
    ) -> list[list[Sample]]:
        """`n` completions for each prompt of this rank, in order; `seeds` has one seed per prompt, `limits` the most
        tokens of its completions (default: `--max_new_tokens`).

        Sampled from softmax(logits / temperature), nothing cut off (temperature 0: greedy). `rollout_logprobs` are
        those of that distribution; an EOS ends a completion and belongs to it. Collective with tensor parallelism.
        """
        with untouched_rng():
            groups = self._generate(prompts, n, seeds, temperature, limits or [self.args.max_new_tokens] * len(prompts))
        return [
            [self._sample(prompt, ids, logprobs, finish_reason) for ids, logprobs, finish_reason in group]
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def _sample(self, prompt: list[int], ids: list[int], logprobs: list[float], finish_reason: str) -> Sample:
        # What ends a turn is none of the text; not every tokenizer marks it as special.
        said = ids[:-1] if ids[-1] in self.eos_ids and ids[-1] in self.added_ids else ids
        return Sample(
            ids=prompt + ids,
            loss_mask=[False] * len(prompt) + [True] * len(ids),
            rollout_logprobs=[0.0] * len(prompt) + logprobs,
            prompt_length=len(prompt),
            finish_reason=finish_reason,
            text=self.tokenizer.decode(said, skip_special_tokens=True),
        )

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take the policy's weights, all of them by name. Always before sampling; nothing guesses."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Give memory to the trainer, where the engine can."""

    def wake(self) -> None:
        """Take it back. `load_weights` must follow before `generate`."""

    def close(self) -> None:
        """Shut down, on every rank, before `distributed.cleanup`."""


@contextlib.contextmanager
def untouched_rng():
    """Starting an engine and sampling draw from the global generators; the trainer must not notice."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
