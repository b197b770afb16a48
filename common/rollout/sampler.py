"""Sampling for the steps of a run.

    groups = rollouts.rollout(step, total_steps, meter)    this rank's share of a step's prompts,
                                                           with their completions

A step may call `rollout` several times, each time with another number of prompts. The engine is in
this process (`Local`) or, with `--rollout_ranks`, on other ranks (remote.py). When a group is
complete, its rewards start at once, if they do not need other ranks.

Prompts are numbered in the order in which their rows are drawn, and prompt n belongs to training
rank n % ranks. Seeds depend on the number alone, so samples do not depend on the ranks."""

from collections import deque
from itertools import chain

from common.config.online import OnlineArgs
from common.data.order import Order, make_order
from common.data.sample import Group
from common.metrics.meter import Meter
from common.model.policy import Policy
from common.parallel import distributed
from common.rewards.total import Rewards
from common.rollout.engines import make_engine
from common.rollout.episodes import Episodes, PromptRequest
from common.rollout.measure import trained_count
from common.rollout.prompts import Prompts
from common.rollout.remote import Remote
from common.rollout.weights import whole_weights


def make_sampler(
    policy: Policy, prompts: Prompts, args: OnlineArgs, tokenizer, rewards: Rewards
) -> "Sampler":
    """Return the sampler of `prompts` for the present flags. It begins `rewards` of complete
    groups. Call on every training rank. Raises `ValueError` for an engine that is not available."""
    order = make_order(prompts.rows, args)
    if args.rollout_ranks:
        return Sampler(prompts, args, order, Remote(policy, args, rewards))
    return Sampler(prompts, args, order, Local(policy, args, rewards, tokenizer))


class Sampler:
    """The prompts of a run, and the engine that completes them. All ranks have the same state."""

    def __init__(self, prompts: Prompts, args: OnlineArgs, order: Order, source: "Local | Remote"):
        self.prompts = prompts
        self.args = args
        self.order = order
        self.source = source
        self.rank = distributed.rank()
        self.ranks = distributed.world_size()
        self.number = 0  # of the oldest prompt that no step has taken
        self.rows: deque[int] = deque()  # the data rows of this prompt and of those after it
        self.next_to_begin = 0  # number of the first prompt that is not in flight
        self.step = -1
        self.before_step: dict = {}  # state before the present step
        self.taken = range(0)  # prompts of all ranks that were taken last
        self.data_rows: list[int] = []  # their data rows
        self.next_urgent = 0  # prompts of `sample_now` have negative numbers, so they come first

    def __str__(self) -> str:
        return str(self.source)

    def close(self) -> None:
        """Shut down, before `distributed.cleanup`. Collective."""
        self.source.close()

    def rollout(
        self, step: int, total_steps: int, meter: Meter, size: int | None = None
    ) -> list[Group] | None:
        """Return this rank's share of the completions for step `step` (from 0): groups of
        `samples_per_prompt`, in the order of `positions`. A share may be empty. Return None if the
        run must stop; a resumed run then samples the prompts of this step again.

        `size`: number of prompts on all ranks, by default `--prompts_per_step`. Collective."""
        if step != self.step:
            self.step, self.before_step = step, self.state_dict()
        size = size or self.args.prompts_per_step
        steps_ahead = max(0, min(self.source.steps_ahead, total_steps - step - 1))
        self._begin(self.number + size + steps_ahead * self.args.prompts_per_step, step, meter)
        self.taken = range(self.number, self.number + size)
        self.data_rows = [self.rows.popleft() for _ in self.taken]
        self.number += size
        own = [number for number in self.taken if number % self.ranks == self.rank]
        groups = self.source.wait(own, step, meter)
        meter.sum("sampled", sum(map(trained_count, chain(*groups))))
        if distributed.stop_requested():
            self.load_state_dict(self.before_step)
            return None
        return groups

    @property
    def positions(self) -> list[int]:
        """Indices of this rank's groups in the last rollout of all ranks."""
        return [i for i, number in enumerate(self.taken) if number % self.ranks == self.rank]

    def _begin(self, end: int, step: int, meter: Meter) -> None:
        """Have the prompts of all ranks in flight whose numbers are below `end`."""
        args = self.args
        self.rows += self.order.draw(max(0, end - self.number - len(self.rows)))
        requests = []
        for number in range(self.next_to_begin, end):
            ids, row = self.prompts[self.rows[number - self.number]]
            seed = distributed.fold_seed(args.seed, *divmod(number, args.prompts_per_step))
            requests.append(
                PromptRequest(number, ids, row, seed, args.samples_per_prompt, args.temperature)
            )
        self.next_to_begin = max(self.next_to_begin, end)
        own = [request for request in requests if request.number % self.ranks == self.rank]
        self.source.begin(requests, own, step, meter)

    def sample_now(
        self, step: int, prompts: Prompts, seeds: list[int], n: int, temperature: float
    ) -> list[Group]:
        """Return `n` completions of each prompt in this rank's share, sampled from the weights
        after `step` steps. The share is every `ranks`-th prompt, starting with number `rank`.
        Collective."""
        # The first number belongs to rank 0.
        self.next_urgent -= len(prompts) + -len(prompts) % self.ranks
        requests = [
            PromptRequest(self.next_urgent + i, *prompts[i], seed, n, temperature)
            for i, seed in enumerate(seeds)
        ]
        own = requests[self.rank :: self.ranks]
        self.source.begin(requests, own, step, Meter())
        return self.source.wait([request.number for request in own], step, Meter())

    # ---- resume ----

    @property
    def cursor(self) -> dict:
        """State of the row order, for metrics."""
        return self.order.cursor

    def state_dict(self) -> dict:
        """Return the position in the data. After a resume, prompts that were drawn but not taken
        are sampled again."""
        return dict(number=self.number, rows=[*self.rows], order=self.order.state_dict())

    def load_state_dict(self, state: dict) -> None:
        self.number = self.next_to_begin = state["number"]
        self.rows = deque(state["rows"])
        self.order.load_state_dict(state["order"])


class Local:
    """An engine in this process. Generation and training alternate."""

    steps_ahead = 0

    def __init__(self, policy: Policy, args: OnlineArgs, rewards: Rewards, tokenizer):
        self.policy = policy
        self.rewards = rewards
        self.engine = make_engine(policy.path, args, tokenizer, policy.device)
        self.episodes = Episodes(self.engine, args)

    def __str__(self) -> str:
        return type(self.engine).__name__

    def close(self) -> None:
        self.episodes.close()
        self.engine.close()

    def begin(
        self, requests: list[PromptRequest], own: list[PromptRequest], step: int, meter: Meter
    ) -> None:
        """Begin the `requests` of all ranks, of which `own` are this rank's, with the weights after
        `step` steps. Collective."""
        for request in own:
            self.episodes.add(request)
        with meter.time("sync"):
            self.engine.load_weights(whole_weights(self.policy, self.engine.dtype), step)

    def wait(self, numbers: list[int], step: int, meter: Meter) -> list[Group]:
        """Return the groups of this rank's prompts, begin the rewards of each when it is complete,
        and release the engine's memory. Collective."""
        groups: dict[int, Group] = {}
        with meter.time("rollout"):
            while self.engine.any_rank(len(groups) < len(numbers)):
                for number, group in self.episodes.advance():
                    groups[number] = group
                    self.rewards.begin(number, group)
                self.engine.measure(meter)
            self.engine.sleep()
        return [groups[number] for number in numbers]
