"""The training run: resumption, checkpoints, logging and export around the steps of a script.

    run = Run(args, model, optimizer, tokenizer, total_steps, show=..., curves=..., order=order)
    for step in run.steps():          resumes; saves between steps, and stops on a signal
        ...                           a step, measured with run.meter
        run.log(step + 1, run.reduce(samples, lr=lr))
    run.end()                         writes hf/, and a checkpoint after a signal

Nothing here depends on the algorithm.
"""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor
from torch.optim import Optimizer

from common.config.groups import BUILT_IN_MODELS, TrainArgs
from common.data.order import epochs_of
from common.data.sample import Group, Sample
from common.metrics.logger import RunLogger
from common.metrics.meter import Meter
from common.metrics.timeline import Timeline
from common.model import memory
from common.model.flops import peak_flops, peak_memory
from common.model.policy import PackedModel
from common.parallel import distributed
from common.train.checkpoint import Checkpointer
from common.train.optim import learning_rate
from common.train.publish import publish
from common.train.run_folder import unlock
from common.train.trace import Trace


class Run:
    """Run of `total_steps` steps, resumed from the newest checkpoint in `--output_dir`."""

    def __init__(
        self,
        args: TrainArgs,
        model: PackedModel,
        optimizer: Optimizer,
        tokenizer,
        total_steps: int,
        *,
        show: Sequence[str],
        curves: Sequence[str],
        value: tuple[PackedModel, Optimizer] | None = None,
        **stateful,
    ):
        """Load the newest intact checkpoint into the model, the optimizer and all of `stateful`: objects with a
        `state_dict`, one of them with a data `cursor`. `value` is a second model with its optimizer. `show`: metrics
        beside the progress bar; `curves`: metrics to draw. Collective.

        Raises `ValueError` if all checkpoints are damaged.
        """
        self.args, self.total_steps, self.meter = args, total_steps, Meter()
        self.models = [model] if value is None else [model, value[0]]
        self.peak_flops = peak_flops(model.device, model.compute_dtype)
        self.data = next(part for part in stateful.values() if hasattr(part, "cursor"))
        self.num_tokens, self.latest, self.planned_steps = 0, {}, total_steps
        self.history: list[int] | None = None  # fingerprint of metrics.jsonl at the last checkpoint
        self.best: float | None = None  # best value of --keep_best
        self.best_step = self.without_gain = 0  # its step; evaluations since then
        self.checkpointer = Checkpointer(args, model, optimizer, tokenizer, value=value, totals=self, **stateful)
        self.first_step = self.finished = self.saved = self.checkpointer.load_latest()
        self.logger = RunLogger(args, self.first_step, total_steps, show=show, curves=curves, history=self.history)
        self.timeline = Timeline(args.output_dir)
        self.trace = Trace(args, [*self.models], optimizer, tokenizer)
        self.meter.keep = self.trace.keep
        self.told_to_stop = self.told = False
        if line := memory.settle(self.models, args):
            self.message(line)
        if self.planned_steps != total_steps > self.finished and args.lr_schedule != "constant":
            change = f"was planned for {self.planned_steps} steps, continues as if for {total_steps} from the start"
            self.message(f"--lr_schedule {args.lr_schedule}: {change}")
        saves = min(args.keep_last + 1, math.ceil((total_steps - self.finished) / args.save_every))
        if (free := self.checkpointer.free_space()) < (needed := saves * self.checkpointer.size):
            problem = f"{free / 1e9:.3g} GB are free, {saves} checkpoints need {needed / 1e9:.3g} GB"
            self.message(f"--output_dir {args.output_dir}: {problem}; free some, or lower --keep_last")

    def state_dict(self) -> dict:
        best = dict(metric=self.args.keep_best, value=self.best, step=self.best_step, without_gain=self.without_gain)
        known = dict(num_tokens=self.num_tokens, history=self.history, total_steps=self.total_steps)
        return known | (dict(best=best) if self.args.keep_best else {})

    def load_state_dict(self, state: dict) -> None:
        self.num_tokens, self.history = state["num_tokens"], state.get("history")
        self.planned_steps = state.get("total_steps", self.total_steps)
        best = state.get("best", {})
        if best and best["metric"] == self.args.keep_best:  # another metric starts from none
            self.best, self.best_step, self.without_gain = best["value"], best["step"], best["without_gain"]

    # ---- around steps ----

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, counted from 0. A step that the loop leaves with `break` does not count."""
        while not self.done:
            for model in self.models:
                model.flops = model.whole_flops = 0.0  # without those of evaluations
            self.trace.begin(self.finished + 1, last=self.finished + 1 == self.total_steps)
            self.meter.start("step")
            yield self.finished
            self.finished += 1
            if self.trace.on:
                with self.meter.time("trace"):  # logged with the next step
                    self.trace.end(self.finished)
            self.told_to_stop = distributed.stop_requested()
            if self.told_to_stop:
                return
            if self.finished % self.args.save_every == 0 or self.done:
                self._save()

    @property
    def done(self) -> bool:
        """Return whether no step remains, because of their number or of `--early_stop`."""
        return self.finished >= self.total_steps or 0 < self.args.early_stop <= self.without_gain

    def _save(self) -> None:
        with self.meter.time("save"):  # logged with the next step
            self.history = self.logger.sync()
            self.checkpointer.save(self.finished)
        self.saved = self.finished
        self.logger.draw_curves()

    def learning_rate(self, step: int) -> float:
        return learning_rate(step, self.total_steps, self.args)

    def evaluates(self, finished: int) -> bool:
        """Return whether an evaluation follows after `finished` steps."""
        every = self.args.eval_every
        return every > 0 and (finished % every == 0 or finished == self.total_steps)

    def checks_engine(self, step: int) -> bool:
        """Return whether this step compares engine and trainer: the first step and every `--check_every`-th."""
        return step == self.first_step or step % self.args.check_every == 0

    # ---- metrics and messages ----

    def reduce(self, samples: Iterable[Sample], **known: float) -> dict[str, float]:
        """End the step and return its metrics: meters of all ranks, trained tokens of this rank's `samples`, the
        `known` values, and rates, memory and FLOP/s of the machine. Collective."""
        self.meter.stop("step")
        self.meter.sum("trained", sum(sample.num_targets for sample in samples))
        self.meter.sum("flops", sum(model.flops for model in self.models))
        self.meter.sum("whole_flops", sum(model.whole_flops for model in self.models))
        for name, gigabytes in peak_memory().items():
            self.meter.max(name, gigabytes)
        metrics = self.meter.reduce() | known
        tokens, sampled = metrics.pop("trained"), metrics.pop("sampled", 0)
        flops, whole_flops = metrics.pop("flops"), metrics.pop("whole_flops")
        self.num_tokens += int(tokens)
        metrics |= epochs_of(self.data.cursor) | dict(num_tokens=self.num_tokens)
        metrics["tokens_per_second"] = tokens / metrics["time/step"]
        if sampled:
            apart = "idle/rollout_ranks" in metrics  # dedicated rollout ranks
            metrics["speed/sampled_tokens_per_second"] = sampled / metrics["time/step" if apart else "time/rollout"]
        seconds = metrics.get("time/train", metrics["time/step"]) + metrics.get("time/logprobs", 0)
        rate = flops / seconds / distributed.world_size()
        metrics["speed/tflops"] = rate / 1e12
        if whole_flops > 1.01 * flops:  # prefixes were shared
            metrics["speed/equivalent_tflops"] = metrics["speed/tflops"] * whole_flops / flops
        if self.peak_flops:
            metrics["speed/mfu"] = rate / self.peak_flops
        return metrics

    def message(self, *lines: str) -> None:
        """Print lines on the console."""
        for line in lines:
            self.logger.message(line)

    def message_once(self, line: str) -> None:
        """Print a line, unless another one was printed by this method."""
        if not self.told:
            self.message(line)
        self.told = True

    def log(self, finished: int, metrics: dict[str, float]) -> None:
        """Log the metrics after `finished` steps, and export `best/` if `--keep_best` has improved. Collective.

        Raises `ValueError` if the first evaluation lacks the metric of `--keep_best`.
        """
        if not metrics:
            return
        self.latest = metrics
        self.logger.log(finished, metrics)
        self.timeline.add(self.meter.spans)
        self.meter.spans = []
        if self.args.keep_best and self.evaluates(finished) and (finished or self.args.keep_best in metrics):
            self._keep_best(finished, metrics)

    def _keep_best(self, finished: int, metrics: dict[str, float]) -> None:
        name = self.args.keep_best
        if name not in metrics and self.best is None:
            there = ", ".join(key for key in metrics if key.startswith("eval")) or "none"
            raise ValueError(f"--keep_best {name}: no such metric; choose one of the evaluation: {there}")
        value = metrics.get(name, math.nan)
        whole = next((whole for whole in metrics if name.startswith(f"{whole}/")), name)  # without the name of a set
        sign = -1 if whole.endswith(("loss", "perplexity")) else 1
        if not math.isnan(value) and (self.best is None or sign * value > sign * self.best):
            self.best, self.best_step, self.without_gain = value, finished, 0
            self.checkpointer.export_hf("best", self.logger.curves)
            self.message(f"best {name} so far: {value:.4g} after step {finished}, in {self.args.output_dir}/best")
        else:
            self.without_gain += 1

    def show_samples(
        self, finished: int, groups: list[Group], positions: Sequence[int], rewards_PG: Tensor, advantages_PG: Tensor,
        parts: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """Write all completions to samples.jsonl and print some, every `--log_every` steps. `parts`: rewards by name,
        [P, G] each, for the trace. Collective."""
        self.trace.add_groups(groups, positions, dict(reward=rewards_PG, advantage=advantages_PG) | parts)
        if finished % self.args.log_every == 0 or finished == self.total_steps:
            self.logger.samples(finished, groups, positions, rewards_PG, advantages_PG)

    def end(self, summary: str = "") -> None:
        """End the run after the loop: export `hf/`, after a checkpoint if the run was stopped, and print the `summary`
        of a finished run. Collective."""
        stopped = self.told_to_stop or not self.done
        if self.finished > self.saved:
            self._save()
        if self.finished or not stopped:  # else nothing was trained
            self.checkpointer.export_hf(curves=self.logger.curves)
        if stopped:
            self.message(f"stopped after step {self.finished}; the same command resumes from there")
        else:
            if self.finished < self.total_steps:
                name, since = self.args.keep_best, f"since step {self.best_step}"
                self.message(f"no gain in {name} {since}, {self.without_gain} evaluations: ended after {self.finished}")
            if summary:
                self.message(summary)
            if self.finished == self.first_step:
                more = "raise --max_steps or --epochs to continue it, name another --output_dir, or use --resume never"
                self.message(f"nothing to do: the run in {self.args.output_dir} has finished; {more}")
            else:
                self.message(*self._results())
        self.logger.close()
        unlock()
        with distributed.signals_end_the_process():  # everything is saved
            if not stopped and (problem := publish(self.args, upload=True)):
                raise distributed.RunError(problem)

    def _results(self) -> list[str]:
        """Return the last lines of a run: what has changed, where its files are, and what to do next. Rank 0 only."""
        if not distributed.is_main():
            return []
        folder, changed = self.args.output_dir, self.logger.summary()
        files = [f"{folder}/{name}" for name in ("curves.png", "samples.jsonl") if Path(folder, name).is_file()]
        lines = [f"after {self.finished} steps: {changed}"] if changed else []
        lines += [f"look at {' and '.join(files)}"] if files else []
        built_in = self.args.model in BUILT_IN_MODELS
        if hasattr(self.args, "reward") or hasattr(self.args, "eval_reward"):  # not a reward model
            python = os.path.relpath(sys.executable)
            chat = f"{'python' if python.startswith('..') else python} tools/chat.py --model {folder}/hf"
            chat += f" --environment {self.args.environment}" if getattr(self.args, "environment", None) else ""
            lines += [f"next: {chat}{', or your own --model and --dataset' if built_in else ''}"]
        return [*lines, f"done: {folder}/hf"]
