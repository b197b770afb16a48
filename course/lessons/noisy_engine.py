"""reinforce.py with a noisy engine: each weight that the engine receives is multiplied by 1 + noise
x N(0, 1).

    python course/lessons/noisy_engine.py --config configs/course_rl.yaml --noise 0.2 \\
        --max_logprob_difference 100

The noise of a weight is the same at every step, like the error of an engine that rounds its weights
to few bits."""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

import reinforce
from common.config.flags import NotNegative
from common.config.parse import parse
from common.parallel import distributed
from common.rollout import sampler


@dataclass
class Args(reinforce.Args):
    noise: NotNegative[float] = 0.0
    """standard deviation of the engine's relative error in each weight"""


def noisy(weights: Iterator[tuple[str, Tensor]], noise: float) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights:
        error = torch.randn(weight.shape, generator=generator).to(weight)
        if name.endswith("embed_tokens.weight"):
            of_embedding = error
        if name == "lm_head.weight":  # the same weight
            error = of_embedding
        yield name, weight * (1 + noise * error)


def main(args: Args) -> None:
    exact = sampler.whole_weights
    sampler.whole_weights = lambda policy, dtype: noisy(exact(policy, dtype), args.noise)
    reinforce.main(args)


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
