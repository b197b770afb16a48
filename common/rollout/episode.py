"""One completion of a prompt, in flight."""

from dataclasses import dataclass

from common.data.sample import Completion
from common.parallel import distributed
from common.rollout.engine import SEED_SPACING, Request


@dataclass
class PromptRequest:
    """A prompt and the number of completions to sample."""

    number: int
    """name of the prompt; those with smaller numbers are sampled first"""
    ids: list[int]
    row: dict
    """data row, for environments and rewards"""
    seed: int
    samples: int
    temperature: float


@dataclass(eq=False)
class Episode:
    """One completion of a prompt, in flight."""

    prompt: PromptRequest
    index: int
    """among the completions of the prompt"""
    number: int
    """among all episodes"""
    completion: Completion

    def turn(self, max_tokens: int) -> Request:
        """Return the request for the next turn."""
        prompt = self.prompt
        seed = self.seed(self.completion.turns - 1)
        return Request(self.completion, max_tokens, seed, prompt.temperature, prompt.number)

    def seed(self, number: int) -> int:
        """Return the seed of a turn, numbered from 0."""
        if number == 0:
            return self.prompt.seed * SEED_SPACING + self.index
        seed = distributed.fold_seed(self.prompt.seed, self.index)
        return distributed.fold_seed(seed, number) * SEED_SPACING


def row_for_engine(row: dict) -> dict:
    """Return what an engine reads of the row of a prompt: the places of its images."""
    return {name: row[name] for name in ("_images",) if name in row}
