"""Where completions come from while a script trains.

    rollouts.submit(step, total_steps)       draws the prompts of a step
    groups = rollouts.collect(step, meter)   their completions, this rank's share

Here the engine is in the training process and `collect` does the work; in `remote.py` other ranks do it.
"""

from collections import deque
from dataclasses import dataclass

import torch

from common import distributed
from common.config import OnlineArgs
from common.hub import eos_token_ids
from common.meter import Meter
from common.models import Policy
from common.order import make_order
from common.packing import Sample
from common.prompts import Prompts
from common.rollout.engine import make_engine, whole_weights
from common.rollout.episodes import Episodes

Group = list[Sample]


@dataclass
class Batch:
    """Prompts that were drawn, of all ranks, and what it takes to draw them again."""

    number: int
    """of the batches drawn in this run, from 0"""
    cursor: dict
    """where the order of the rows was before"""
    drawn: list[int]
    """rows"""


class Rollouts:
    """Completions from an engine in the same process, by the weights that are about to be trained."""

    ahead = 0  # batches that may be drawn beyond the one a step needs

    def __init__(
        self,
        model: Policy,
        prompts: Prompts,
        args: OnlineArgs,
        tokenizer,
        device: torch.device,
    ):
        self.model, self.prompts, self.args, self.device = model, prompts, args, device
        self.order, self.next_number = make_order(prompts.rows, args), 0
        self.pending: deque[Batch] = deque()  # drawn and not collected
        self.collected: list[Batch] = []  # in the present step
        self.step = -1
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.positions = range(self.rank, args.prompts_per_step, self.ranks)
        """of this rank's groups in a batch"""
        self._start(tokenizer)

    def _start(self, tokenizer) -> None:
        eos_ids = eos_token_ids(self.model.path, tokenizer, self.args.prompt_format)
        self.engine = make_engine(self.model.path, self.args, eos_ids, tokenizer, self.device)
        self.episodes = Episodes(self.engine, self.args, tokenizer)

    def __str__(self) -> str:
        return type(self.engine).__name__

    def submit(self, step: int, total_steps: int) -> None:
        """Draw the prompts of step `step` (from 0), and of later steps that may be sampled by weights as old."""
        while len(self.pending) <= min(self.ahead, total_steps - step - 1):
            batch = Batch(self.next_number, self.order.state_dict(), self.order.draw(self.args.prompts_per_step))
            self.next_number += 1
            self._send(batch, needed_at=step + len(self.pending))
            self.pending.append(batch)

    def collect(self, step: int, meter: Meter) -> list[Group] | None:
        """`samples_per_prompt` completions for each of this rank's prompts in the oldest batch, in the order of
        `positions`. Each knows its row and the version of the weights that sampled it. Collective.

        None if the run was told to stop meanwhile: what this step has collected counts as never drawn, so that the
        resumed run samples it again.
        """
        if step != self.step:
            self.step, self.collected = step, []
        batch = self.pending.popleft()
        self.collected.append(batch)
        groups = self._sampled(batch, step, meter)
        for i, group in zip(self.positions, groups, strict=True):
            for sample in group:
                sample.row = self.prompts.rows[batch.drawn[i]]
        meter.sum("sampled", sum(sum(sample.loss_mask) for group in groups for sample in group))
        if distributed.stop_requested():
            self.pending.extendleft(reversed(self.collected))
            return None
        return groups

    def sample_now(self, step: int, prompts: Prompts, seeds: list[int], n: int, temperature: float) -> list[Group]:
        """`n` completions by the weights after `step` steps, for this rank's share of the prompts of all ranks: every
        `ranks`-th from the `rank`-th. Each knows its row. Collective."""
        groups = self._sampled_now(step, prompts, seeds, n, temperature)
        for group, row in zip(groups, prompts.rows[self.rank :: self.ranks], strict=True):
            for sample in group:
                sample.row = row
        return groups

    def state_dict(self) -> dict:
        """The data cursor: batches that were drawn and not trained on are drawn again, and sampled again."""
        if self.pending:
            return dict(number=self.pending[0].number, order=self.pending[0].cursor)
        return dict(number=self.next_number, order=self.order.state_dict())

    def load_state_dict(self, state: dict) -> None:
        self.next_number = state["number"]
        self.order.load_state_dict(state["order"])

    @property
    def cursor(self) -> dict:
        """The state of the order, without what is drawn and not collected."""
        return self.state_dict()["order"]

    def close(self) -> None:
        """Shut the engine down, before `distributed.cleanup`. Collective."""
        self.engine.close()

    # ---- what differs where the engine is elsewhere ----

    def _send(self, batch: Batch, needed_at: int) -> None:
        """The batch is known; step `needed_at` is the last that may be the one to collect it."""

    def _seeds(self, batch: Batch, positions: range) -> list[int]:
        """A seed per prompt, from its position in the whole batch: completions do not depend on the number of ranks."""
        return [distributed.fold_seed(self.args.seed, batch.number, i) for i in positions]

    def _wake(self) -> None:
        self.engine.wake()
        self.engine.load_weights(whole_weights(self.model, self.engine.dtype))

    def _sampled_now(self, step: int, prompts: Prompts, seeds: list[int], n: int, temperature: float) -> list[Group]:
        mine = slice(self.rank, None, self.ranks)
        self._wake()
        groups = self.episodes.generate(prompts.ids[mine], prompts.rows[mine], seeds[mine], n, temperature)
        self.engine.sleep()
        return groups

    def _sampled(self, batch: Batch, step: int, meter: Meter) -> list[Group]:
        with meter.time("sync"):
            self._wake()
        with meter.time("rollout"):
            drawn = [batch.drawn[i] for i in self.positions]
            prompts, rows = ([x[row] for row in drawn] for x in (self.prompts.ids, self.prompts.rows))
            seeds, args = self._seeds(batch, self.positions), self.args
            groups = self.episodes.generate(prompts, rows, seeds, args.samples_per_prompt, args.temperature)
            self.engine.sleep()  # hand weights and KV-cache memory back to the trainer
        for sample in (sample for group in groups for sample in group):
            sample.version = step
        return groups
