"""Completions of plain prompts, for benchmarks and tests of engines."""

from common.data.sample import Group
from common.rollout.engine import Engine
from common.rollout.episode import PromptRequest
from common.rollout.episodes import Episodes


def complete(
    engine: Engine, prompts: list[list[int]], n: int, seeds: list[int], temperature: float
) -> list[Group]:
    """Return `n` completions for each prompt of this rank, in order; `seeds` has one seed per
    prompt. Nothing else may be in flight. Collective with tensor parallelism."""
    requests = [
        PromptRequest(i, ids, {}, seed, n, temperature)
        for i, (ids, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    return Episodes(engine, engine.args).generate(requests)
