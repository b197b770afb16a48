"""What every training script does around its steps.

    run = Run(args, model, optimizer, total_steps, show=..., curves=..., order=order)
    for step in run.steps():          resumes; between steps saves, and stops when told to
        ...                           a step, measured with run.meter
        run.log(step + 1, run.reduce(samples, lr=lr))
    run.end(tokenizer)                stopped: a checkpoint; done: hf/

Plain methods, and nothing here knows an algorithm.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from common import distributed
from common.checkpoint import Checkpointer
from common.config import TrainArgs
from common.metrics import Meter, RunLogger
from common.models import PackedModel
from common.optim import learning_rate
from common.packing import Sample


class Run:
    """A run of `total_steps` steps, going on with what `--output_dir` has of it."""

    def __init__(
        self,
        args: TrainArgs,
        model: PackedModel,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        *,
        show: Sequence[str],
        curves: Sequence[str],
        value: tuple[PackedModel, torch.optim.Optimizer] | None = None,
        **stateful,
    ):
        """Restores the newest whole checkpoint into the model, the optimizer and all of `stateful` (what has
        `state_dict`; one of them also says how many `epochs_done`). `value` is a second model with its optimizer.
        `show`: metrics beside the progress bar; `curves`: those drawn. Collective.

        Raises `ValueError` if there are checkpoints and none is whole.
        """
        self.args, self.total_steps, self.meter = args, total_steps, Meter()
        self.data = next(part for part in stateful.values() if hasattr(part, "epochs_done"))
        self.num_tokens, self.latest = 0, {}
        self.checkpointer = Checkpointer(args, model, optimizer, value=value, totals=self, **stateful)
        self.first_step = self.finished = self.saved = self.checkpointer.load_latest()
        self.logger = RunLogger(args, self.first_step, total_steps, show=show, curves=curves)
        self.told_to_stop = False

    def state_dict(self) -> dict:
        return dict(num_tokens=self.num_tokens)

    def load_state_dict(self, state: dict) -> None:
        self.num_tokens = state["num_tokens"]

    # ---- around steps ----

    def steps(self) -> Iterator[int]:
        """The steps that are left, counted from 0. A step that the loop breaks off counts as never begun."""
        for step in range(self.first_step, self.total_steps):
            yield step
            self.finished = step + 1
            self.told_to_stop = distributed.stop_requested()
            if self.told_to_stop:
                return
            if self.finished % self.args.save_every == 0 or self.finished == self.total_steps:
                self._save()

    def _save(self) -> None:
        with self.meter.time("save"):  # counted in the next step's line
            self.checkpointer.save(self.finished)
        self.saved = self.finished
        self.logger.draw_curves()

    def learning_rate(self, step: int) -> float:
        return learning_rate(step, self.total_steps, self.args)

    def evaluates(self, finished: int) -> bool:
        """Whether it is time to, after so many steps."""
        every = self.args.eval_every
        return every > 0 and (finished % every == 0 or finished == self.total_steps)

    # ---- what it tells ----

    def reduce(self, samples: Iterable[Sample], **known: float) -> dict[str, float]:
        """The metrics of a step: what the meter got on all ranks, this rank's `samples` counted, and what is `known`.
        Collective."""
        tokens = int(distributed.all_sum(sum(sample.num_targets for sample in samples)))
        self.num_tokens += tokens
        metrics = self.meter.reduce() | known
        metrics |= dict(epoch=self.data.epochs_done, num_tokens=self.num_tokens)
        return metrics | dict(tokens_per_second=tokens / metrics["time/step"])

    def message(self, text: str) -> None:
        """A line for people."""
        self.logger.message(text)

    def log(self, finished: int, metrics: dict[str, float]) -> None:
        """A line of metrics.jsonl after so many steps."""
        self.latest = metrics
        self.logger.log(finished, metrics)

    def show_samples(self, finished: int, groups: list[list[Sample]], positions: Sequence[int]) -> None:
        """All ranks' completions to samples.jsonl and a few on the console, every `--log_every` steps. Collective."""
        if finished % self.args.log_every == 0 or finished == self.total_steps:
            self.logger.samples(finished, groups, positions)

    def end(self, tokenizer, summary: str = "") -> None:
        """Behind the loop: of a run that was told to stop a checkpoint, of one that is done hf/ and a `summary` for
        people. Collective."""
        if self.told_to_stop or self.finished < self.total_steps:
            if self.finished > self.saved:
                self._save()
            self.message(f"told to stop after step {self.finished}; the same command goes on from there")
        else:
            self.checkpointer.export_hf(tokenizer)
            if summary:
                self.message(summary)
            self.message(f"done: {self.args.output_dir}/hf")
        self.logger.close()
