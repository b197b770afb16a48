"""grpo.py with one change: a step drops the remaining prompts of `--oversample` and starts other
prompts in their place.

This is the counter-example of `bench/stream.py --workload lengths`. It prefers short completions.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpo
from common.config.parse import parse
from common.metrics.meter import Meter
from common.rollout import sampler


class DiscardingSampler(sampler.LocalSampler):
    def rollout(self, step: int, total_steps: int, meter: Meter, size: int | None = None):
        self.queue.used |= self.queue.in_flight.keys()
        self.queue.in_flight.clear()
        self.groups.clear()
        self.engine.waiting.clear()
        self.engine.in_flight.clear()
        self.episodes.sampling.clear()
        self.episodes.groups.clear()
        return super().rollout(step, total_steps, meter, size)


if __name__ == "__main__":
    sampler.LocalSampler = DiscardingSampler
    grpo.main(parse(grpo.Args))
