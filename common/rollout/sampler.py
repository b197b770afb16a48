"""Where completions come from while a script trains.

    rollouts.submit(step, total_steps)       draws the prompts of a step
    groups = rollouts.collect(step, meter)   their completions, this rank's share

A step may do both several times, with fewer prompts each time where it says how many.

Here the engine is in the training process and `collect` does the work; in `remote.py` other ranks do it. Rewards that
can be computed apart are begun the moment that a prompt's completions are there.

Prompts are numbered as they are drawn. Number d belongs to the d % ranks-th of the ranks that train, and a step takes
the oldest. With `--oversample` more are in work than a step needs, and it takes the oldest of those that are complete,
as many of each rank. What it leaves goes on into the next step, and nothing is left so long that a token of it would be
older than `--max_staleness` steps. So every prompt that is drawn is learned from, once, and over a run no length of
completions is favoured.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from common.config.groups import OnlineArgs
from common.data.order import make_order
from common.metrics.meter import Meter
from common.model.hub import eos_token_ids
from common.model.policy import Policy
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout.engines import make_engine, whole_weights
from common.rollout.episodes import Episodes, Group
from common.rollout.prompts import Prompts


@dataclass
class Batch:
    """As many prompts as a step takes, of all ranks, and what it takes to draw them again."""

    number: int
    """of the batches drawn in this run, from 0"""
    cursor: dict
    """where the order of the rows was before"""
    drawn: list[int]
    """rows"""

    @property
    def numbers(self) -> range:
        """Of its prompts."""
        return range(self.number * len(self.drawn), (self.number + 1) * len(self.drawn))


@dataclass
class Prompt:
    """What is asked for a number of completions."""

    number: int
    ids: list[int]
    row: dict
    seed: int
    samples: int
    temperature: float


class Rollouts:
    """Completions from an engine in the same process, by the weights that are about to be trained."""

    ahead = 0  # steps whose prompts may be in work beside those of the present one

    def __init__(
        self,
        model: Policy,
        prompts: Prompts,
        args: OnlineArgs,
        tokenizer,
        device: torch.device,
        rewards: Rewards | None = None,
    ):
        self.model, self.prompts, self.args, self.device, self.rewards = model, prompts, args, device, rewards
        self.order, self.next_number = make_order(prompts.rows, args), 0
        self.pending: deque[Batch] = deque()  # drawn, and not all of their prompts collected before the present step
        self.used: set[int] = set()  # those of their prompts that were
        self.in_flight: dict[int, int] = {}  # those that were begun: in which step
        self.collected: list[int] = []  # in the present step
        self.step = -1
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.size = args.prompts_per_step  # prompts that the next `collect` takes, of all ranks
        self.positions: Sequence[int] = range(self.rank, self.size, self.ranks)
        """of this rank's groups among those that were collected last"""
        self.rows: dict[int, dict] = {}  # of this rank's prompts in work, urgent ones too
        self.done: dict[int, Group] = {}  # those of them that are complete
        self.urgent = 0  # minus the number of prompts that went before all that were drawn
        self._start(tokenizer)

    def _start(self, tokenizer) -> None:
        eos_ids = eos_token_ids(self.model.path, tokenizer, self.args.prompt_format)
        self.engine = make_engine(self.model.path, self.args, eos_ids, tokenizer, self.device)
        self.episodes = Episodes(self.engine, self.args, tokenizer)

    def __str__(self) -> str:
        return type(self.engine).__name__

    # ---- what scripts call ----

    def submit(self, step: int, total_steps: int, size: int | None = None) -> None:
        """Draw what step `step` (from 0) takes next, `size` prompts of all ranks (default: `--prompts_per_step`), and
        those that may be in work beside them. With `--oversample` `size` is rounded up to a multiple of the ranks."""
        a_step, left = self.args.prompts_per_step, max(0, total_steps - step - 1)
        self.size = size or a_step
        self.size += -self.size % self.lanes
        beside = min(round((self.ahead + self.args.oversample - 1) * a_step), left * a_step)
        in_flight = Counter(number % self.lanes for number in self.in_flight)
        missing = {lane: (self.size + beside) // self.lanes - in_flight[lane] for lane in range(self.lanes)}
        fresh, numbers = [], self._numbers()
        while any(count > 0 for count in missing.values()):
            number = next(numbers)
            if number not in self.used and number not in self.in_flight and missing[number % self.lanes] > 0:
                missing[number % self.lanes] -= 1
                fresh.append(number)
        self.in_flight |= dict.fromkeys(fresh, step)
        self._ask([self._prompt(number) for number in fresh])

    def rollout(self, step: int, total_steps: int, meter: Meter, size: int | None = None) -> list[Group] | None:
        """`submit` and `collect`."""
        self.submit(step, total_steps, size)
        return self.collect(step, meter)

    def collect(self, step: int, meter: Meter) -> list[Group] | None:
        """`samples_per_prompt` completions for this rank's share of what was submitted, perhaps none, in the order of
        `positions`. Each knows its row and the versions of the weights that sampled it. Collective.

        None if the run was told to stop meanwhile: what this step has collected counts as never drawn, so that the
        resumed run samples it again.
        """
        if step != self.step:
            self.step, self.collected = step, []
            while self.pending and self.used.issuperset(self.pending[0].numbers):
                self.used.difference_update(self.pending.popleft().numbers)
        self._sample(step, meter)
        chosen = self._chosen(step)
        self.positions = range(self.rank, self.size, self.ranks)
        if self.args.oversample == 1:  # they need not be equally many of each rank
            self.positions = [i for i, number in enumerate(self._candidates()) if self._is_mine(number)]
        groups = [self._take(number) for number in chosen]
        for number in chain(*distributed.gather_objects(chosen)):
            del self.in_flight[number]
            self.used.add(number)
            self.collected.append(number)
        self._measure(step, groups, meter)
        if distributed.stop_requested():
            self.used.difference_update(self.collected)
            return None
        return groups

    def sample_now(self, step: int, prompts: Prompts, seeds: list[int], n: int, temperature: float) -> list[Group]:
        """`n` completions by the weights after `step` steps, for this rank's share of the prompts of all ranks: every
        `ranks`-th from the `rank`-th. Each knows its row. Collective."""
        self.urgent -= len(prompts) + -len(prompts) % self.ranks  # the first one's belongs to rank 0
        asked = [
            Prompt(self.urgent + i, prompts.ids[i], prompts.rows[i], seeds[i], n, temperature)
            for i in range(len(prompts))
        ]
        self._ask(asked)
        mine = [prompt.number for prompt in asked if self._is_mine(prompt.number)]
        self._sample_all(step, mine)
        return [self._take(number) for number in mine]

    def state_dict(self) -> dict:
        """The data cursor: prompts that were drawn and not trained on are drawn again, and sampled again."""
        oldest = next((batch for batch in self.pending if not self.used.issuperset(batch.numbers)), None)
        if oldest is None:
            return dict(number=self.next_number, order=self.order.state_dict())
        used = sorted(number for number in self.used if number >= oldest.numbers.start)
        return dict(number=oldest.number, order=oldest.cursor) | (dict(used=used) if used else {})

    def load_state_dict(self, state: dict) -> None:
        self.next_number, self.used = state["number"], set(state.get("used", ()))
        self.order.load_state_dict(state["order"])

    @property
    def cursor(self) -> dict:
        """The state of the order, without what is drawn and not collected."""
        return self.state_dict()["order"]

    def close(self) -> None:
        """Shut the engine down, before `distributed.cleanup`. Collective."""
        self.episodes.close()
        self.engine.close()

    # ---- prompts ----

    def _numbers(self) -> Iterator[int]:
        """Of all prompts that are pending, and then of more, which are drawn when they are asked for."""
        for batch in self.pending:
            yield from batch.numbers
        while True:
            drawn = Batch(self.next_number, self.order.state_dict(), self.order.draw(self.args.prompts_per_step))
            self.next_number += 1
            self.pending.append(drawn)
            yield from drawn.numbers

    def _prompt(self, number: int) -> Prompt:
        """Its seed is of its position in the batch: completions do not depend on the number of ranks."""
        args, (batch, position) = self.args, divmod(number, self.args.prompts_per_step)
        row = self.pending[batch - self.pending[0].number].drawn[position]
        seed = distributed.fold_seed(args.seed, batch, position)
        return Prompt(
            number, self.prompts.ids[row], self.prompts.rows[row], seed, args.samples_per_prompt, args.temperature
        )

    def _is_mine(self, number: int) -> bool:
        return number % self.ranks == self.rank

    def _arrived(self, number: int, group: Group) -> Group:
        """A group that is complete, and whose rewards can be begun."""
        for sample in group:
            sample.row = self.rows[number]
        if self.rewards is not None:
            self.rewards.begin([group], number)  # what a step needs first goes first
        return group

    @property
    def lanes(self) -> int:
        """The oldest prompts of each of so many are taken. With `--oversample` every rank chooses among its own."""
        return self.ranks if self.args.oversample > 1 else 1

    def _candidates(self) -> list[int]:
        """The prompts of all ranks that may be taken now, oldest first: without `--oversample` all of them will be."""
        return sorted(self.in_flight)[: None if self.args.oversample > 1 else self.size]

    def _progress(self) -> tuple[list[int], list[int], int]:
        """This rank's candidates; those that are complete; how many of them will be taken."""
        candidates = list(filter(self._is_mine, self._candidates()))
        complete = [number for number in candidates if number in self.done]
        return candidates, complete, self.size // self.ranks if self.args.oversample > 1 else len(candidates)

    def _chosen(self, step: int) -> list[int] | None:
        """Which are taken, oldest first. None while too few are complete, or one that is left could then not be learned
        from in time."""
        candidates, complete, count = self._progress()
        if len(complete) == len(candidates):
            return complete[:count]
        if len(complete) < count:
            return None
        chosen, per_step = complete[:count], self.args.prompts_per_step // self.ranks
        left = [number for number in candidates if number not in chosen]
        late = any(self.in_flight[x] + self.args.max_staleness < step + 1 + i // per_step for i, x in enumerate(left))
        return None if late else chosen

    def _take(self, number: int) -> Group:
        del self.rows[number]
        return self.done.pop(number)

    def _measure(self, step: int, groups: list[Group], meter: Meter) -> None:
        """How many tokens were sampled and how old the weights were, in steps."""
        meter.sum("sampled", sum(sum(sample.loss_mask) for group in groups for sample in group))
        if not self.args.rollout_ranks and self.args.oversample == 1:
            return
        for sample in chain(*groups):
            versions = Counter(sample.versions)
            del versions[-1]
            meter.mean("sampling/staleness/mean", sum((step - v) * n for v, n in versions.items()), versions.total())
            meter.max("sampling/staleness/max", step - min(versions))
            meter.mean("sampling/version_spread/mean", max(versions) - min(versions))
            meter.max("sampling/version_spread/max", max(versions) - min(versions))

    # ---- what differs where the engine is elsewhere ----

    def _ask(self, prompts: list[Prompt]) -> None:
        """Put prompts, of all ranks, in work."""
        for prompt in prompts:
            if self._is_mine(prompt.number):
                self.rows[prompt.number] = prompt.row
                self.episodes.begin(*vars(prompt).values())

    def _sample(self, step: int, meter: Meter) -> None:
        """Until what the step takes is complete."""
        with meter.time("sync"):
            self._wake(step)
        with meter.time("rollout"):
            self._advance(lambda: self._chosen(step) is not None, meter)

    def _sample_all(self, step: int, numbers: list[int]) -> None:
        """Until these are complete, by the weights after `step` steps."""
        self._wake(step)
        self._advance(lambda: all(number in self.done for number in numbers), Meter())

    def _wake(self, step: int) -> None:
        self.engine.wake()
        self.engine.load_weights(whole_weights(self.model, self.engine.dtype), step)

    def _advance(self, until: Callable[[], bool], meter: Meter) -> None:
        while self.engine.any_rank(not until()):
            self.done |= {number: self._arrived(number, group) for number, group in self.episodes.step()}
            for name, value in self.engine.occupancy().items():
                meter.mean(f"engine/{name}", value)
        self.engine.interrupt()
        self.engine.sleep()  # hand weights and KV-cache memory back to the trainer
