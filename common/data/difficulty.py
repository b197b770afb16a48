"""`--draw difficulty`: prompts drawn by estimates of their difficulty.

The estimate of a prompt is a Beta posterior of the probability p that a completion solves it, with
a uniform prior and counts that fade (MoPPS, arXiv:2507.04632). A prompt is drawn in proportion to
the posterior mean of p (1 - p), the variance of a reward of 0 or 1 (arXiv:2502.12272).

Shapes: N rows, B rows of a rollout; 2: completions that solve the prompt, and the others."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.data.order import RowOrder
from common.parallel import distributed


class DifficultyOrder(RowOrder):
    """Infinite sequence of row numbers, drawn by difficulty. Every rank has the same state."""

    def __init__(self, rows: Sequence[dict], seed: int, floor: float, half_life: float):
        """`floor`: fraction of uniform draws; `half_life`: age at which a result counts half, in
        epochs. The column `_pass_counts` of a row has earlier results, [2]."""
        super().__init__(len(rows), seed)
        self.floor = floor
        self.fading = 0.5 ** (1 / (half_life * len(rows)))  # per sampled prompt
        counts = [row.get("_pass_counts", (0, 0)) for row in rows]
        self.counts_N2 = torch.tensor(counts, dtype=torch.float64)
        self.step = -1
        self.before_N2 = self.counts_N2  # before this step

    def probabilities(self) -> Tensor:
        """Return the probability of each row, [N] float64, at least floor / N."""
        posterior_N2 = 1 + self.counts_N2  # parameters of Beta
        total_N = posterior_N2.sum(1)
        variance_N = posterior_N2.prod(1) / (total_N * (total_N + 1))  # mean of p (1 - p)
        return (1 - self.floor) * variance_N / variance_N.sum() + self.floor / self.num_rows

    def draw(self, count: int) -> list[int]:
        """Return `count` rows: each count x probability times on average, rounded down or up."""
        drawn = self.epoch * self.num_rows + self.index
        random = torch.Generator().manual_seed(distributed.fold_seed(self.seed, drawn))
        rows_N = torch.randperm(self.num_rows, generator=random)
        offset = float(torch.rand((), dtype=torch.float64, generator=random))
        self.epoch, self.index = divmod(drawn + count, self.num_rows)
        return rows_N[systematic(self.probabilities()[rows_N], count, offset)].tolist()

    def learn(self, step: int, rows: Sequence[int], counts_B2: Tensor) -> None:
        """Add the results of a rollout, of which a step may have several."""
        if step != self.step:
            self.step = step
            self.before_N2 = self.counts_N2.clone()
        self.counts_N2 *= self.fading ** len(rows)
        self.counts_N2.index_add_(0, torch.tensor(rows), counts_B2.double())

    def undo_step(self, step: int) -> None:
        if step == self.step:
            self.counts_N2 = self.before_N2

    def metrics(self) -> dict[str, float]:
        solved_N, failed_N = self.counts_N2.unbind(1)
        is_seen_N = solved_N + failed_N > 0
        is_solved_N = is_seen_N & (solved_N >= 9 * failed_N)
        return {
            "draw/success": float(((1 + solved_N) / (2 + solved_N + failed_N)).mean()),
            "draw/effective_prompts": 1 / float(self.probabilities().square().sum()),
            "draw/solved_fraction": float(is_solved_N.sum() / is_seen_N.sum().clamp(min=1)),
        }

    @property
    def cursor(self) -> dict:
        return super().state_dict()

    def state_dict(self) -> dict:
        return self.cursor | dict(counts=self.counts_N2.tolist())

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.counts_N2 = torch.tensor(state["counts"], dtype=torch.float64)


def systematic(weights_N: Tensor, count: int, offset: float) -> Tensor:
    """Return the indices, [count], at which equally spaced points fall among the cumulated weights.
    `offset` of the first point, in spacings, is in [0, 1)."""
    ends_N = weights_N.cumsum(0)
    points = (torch.arange(count, dtype=torch.float64) + offset) / count * ends_N[-1]
    return torch.searchsorted(ends_N, points, right=True).clamp(max=len(ends_N) - 1)
