"""What both samplers have: the interface for scripts, the queue of prompts, the complete groups."""

from collections.abc import Callable, Iterable
from itertools import chain

import torch

from common.config.online import OnlineArgs
from common.data.order import Order
from common.data.sample import Group
from common.metrics.meter import Meter
from common.model.policy import Policy
from common.parallel import distributed
from common.rewards.total import Rewards
from common.rollout.episode import PromptRequest
from common.rollout.measure import trained_count
from common.rollout.prompt_queue import PromptQueue
from common.rollout.prompts import Prompts


class Sampler:
    """Interface for scripts, and the common parts of `LocalSampler` and `RemoteSampler`: a queue of
    prompts and the complete groups of this rank."""

    def __init__(
        self,
        policy: Policy,
        prompts: Prompts,
        args: OnlineArgs,
        rewards: Rewards,
        order: Order,
        steps_ahead: int = 0,
    ):
        self.policy = policy
        self.prompts = prompts
        self.args = args
        self.rewards = rewards
        rank = torch.distributed.get_rank()
        ranks = torch.distributed.get_world_size()
        self.queue = PromptQueue(order, args.prompts_per_step, rank, ranks, steps_ahead)
        # the run's position
        self.state_dict = self.queue.state_dict
        self.load_state_dict = self.queue.load_state_dict
        # complete groups that are not taken yet, by prompt number
        self.groups: dict[int, Group] = {}
        self.next_urgent = 0  # prompts of `sample_now` have negative numbers, so they come first

    # ---- interface for scripts ----

    def rollout(
        self, step: int, total_steps: int, meter: Meter, size: int | None = None
    ) -> list[Group] | None:
        """Return this rank's share of the completions for step `step` (from 0): groups of
        `samples_per_prompt`, in the order of `positions`. A share may be empty. Return None if the
        run must stop; a resumed run then samples the prompts of this step again.

        `size`: number of prompts on all ranks, by default `--prompts_per_step`. Collective."""
        self._request(self._begin(step, total_steps, size), step, meter)
        self._wait_for_step(meter)
        groups = [self.groups.pop(number) for number in self.queue.own]
        meter.sum("sampled", sum(map(trained_count, chain(*groups))))
        if self.args.rollout_ranks:
            measure_staleness(meter, groups, step)
        if distributed.stop_requested():
            self.queue.undo_step()
            return None
        return groups

    def sample_now(
        self, step: int, prompts: Prompts, seeds: list[int], n: int, temperature: float
    ) -> list[Group]:
        """Return `n` completions of each prompt in this rank's share, sampled from the weights
        after `step` steps. The share is every `ranks`-th prompt, starting with number `rank`.
        Collective."""
        # The first number belongs to rank 0.
        self.next_urgent -= len(prompts) + -len(prompts) % self.queue.ranks
        requests = [
            PromptRequest(self.next_urgent + i, *prompts[i], seed, n, temperature)
            for i, seed in enumerate(seeds)
        ]
        numbers = [request.number for request in self._share(requests)]
        self._request(requests, step, Meter())
        self._wait(lambda: self.groups.keys() >= set(numbers), Meter())
        return [self.groups.pop(number) for number in numbers]

    def close(self) -> None:
        """Shut down, before `distributed.cleanup`. Collective."""
        raise NotImplementedError

    @property
    def positions(self) -> list[int]:
        """Indices of this rank's groups in the last rollout of all ranks."""
        return self.queue.positions

    @property
    def data_rows(self) -> list[int]:
        """Indices of the data rows of the last rollout of all ranks: `data_rows[i]` is that of
        position i."""
        return self.queue.rows

    @property
    def cursor(self) -> dict:
        """State of the row order before the oldest prompt that is not taken yet."""
        return self.queue.cursor

    # ---- parts of a rollout ----

    def _begin(self, step: int, total_steps: int, size: int | None) -> list[PromptRequest]:
        """Return requests for the prompts of all ranks whose sampling begins now. A seed depends on
        the position of its prompt in the run, not on the rank."""
        args = self.args
        requests = []
        for number in self.queue.take(step, total_steps, size):
            ids, row = self.prompts[self.queue.row(number)]
            seed = distributed.fold_seed(args.seed, *divmod(number, args.prompts_per_step))
            requests.append(
                PromptRequest(number, ids, row, seed, args.samples_per_prompt, args.temperature)
            )
        return requests

    def _share(self, requests: Iterable[PromptRequest]) -> list[PromptRequest]:
        """Return the requests for this rank's prompts."""
        return [request for request in requests if self.queue.is_here(request.number)]

    def _request(self, requests: list[PromptRequest], step: int, meter: Meter) -> None:
        """Start sampling for the requests of all ranks, from the weights after `step` steps."""
        raise NotImplementedError

    def _wait(self, is_ready: Callable[[], bool], meter: Meter) -> None:
        """Collect complete groups until `is_ready`, and begin their rewards. Collective."""
        raise NotImplementedError

    def _wait_for_step(self, meter: Meter) -> None:
        """Wait until the prompts of the step are complete. Collective."""
        self._wait(lambda: self.groups.keys() >= {*self.queue.own}, meter)


def measure_staleness(meter: Meter, groups: list[Group], step: int) -> None:
    """Log the age in steps of the weights that sampled the completions of step `step`."""
    for completion in chain(*(sample.sequences for sample in chain(*groups))):
        ages = [step - version for version in completion.versions if version >= 0]
        spread = max(ages) - min(ages)
        meter.mean("sampling/staleness/mean", sum(ages), len(ages))
        meter.max("sampling/staleness/max", max(ages))
        meter.mean("sampling/version_spread/mean", spread)
        meter.max("sampling/version_spread/max", spread)
