"""grpo.py with one change: a step drops the remaining prompts of `--oversample` and starts other prompts in their
place.

This is the counter-example of `bench/stream.py --workload lengths`. It prefers short completions.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpo
from common.config.parse import parse
from common.rollout import remote_sampler, sampler


class Discarding(sampler.Rollouts):
    def submit(self, step: int, total_steps: int) -> None:
        self.used |= self.in_flight.keys()
        self.in_flight.clear()
        self.engine.waiting.clear()
        self.engine.ours.clear()
        self.episodes.speaking.clear()
        super().submit(step, total_steps)


if __name__ == "__main__":
    remote_sampler.Rollouts = Discarding
    grpo.main(parse(grpo.Args))
