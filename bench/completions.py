"""Sampling completions of plain prompts, for benchmarks and for tests of engines."""

from common.metrics.meter import Meter
from common.packs.sample import Group
from common.rollout.engine import Engine
from common.rollout.episodes import Episodes, PromptRequest, in_order


def complete(
    engine: Engine, prompts: list[list[int]], n: int, seeds: list[int], temperature: float
) -> list[Group]:
    """Return `n` completions for each prompt of this rank, in order. `seeds` has one seed per
    prompt. No other requests may be in flight. Collective with tensor parallelism."""
    requests = [
        PromptRequest(i, ids, {}, seed, n, temperature)
        for i, (ids, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    episodes = Episodes(engine, engine.args)
    groups = in_order(episodes.generate(requests, Meter()))
    episodes.close()
    return groups
