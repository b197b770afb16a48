"""The training run: resumption, checkpoints, logging and export around the steps of a script.

    run = Run(args, model, optimizer, tokenizer, total_steps, order=order, show=..., curves=...)
                                      resumes from the newest checkpoint
    for step in run.steps():          saves between steps, and stops on a signal
        ...                           a step, measured with run.meter
        run.log(step + 1, run.reduce(samples, lr=lr))
    run.end()                         writes hf/, and a checkpoint after a signal

Nothing here depends on the objective."""

import math
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from common.config.extra import extra, has_extra
from common.config.flags import BETTER, best_of, better_end
from common.config.groups import TrainArgs
from common.metrics.logger import RunLogger
from common.metrics.meter import Meter
from common.model.flops import peak_flops, peak_memory
from common.model.policy import PackedModel, Policy
from common.packs.order import Order
from common.packs.sample import Group, Sample
from common.parallel import distributed, process
from common.train.checkpoint import Checkpointer
from common.train.optim import learning_rate
from common.train.run_folder import unlock

CHECK_EVERY = 20  # steps between comparisons of engine and trainer
SAMPLES_EVERY = 10  # steps between tables of samples, on the console and in samples.jsonl


class Run:
    """Run of `total_steps` steps, resumed from the newest checkpoint in `--output_dir`."""

    def __init__(
        self, args: TrainArgs, model: PackedModel, optimizer: Optimizer, tokenizer,
        total_steps: int, *, order: Order | None = None, sampler=None, show: Sequence[str],
        curves: Sequence[str], value: tuple[PackedModel, Optimizer] | None = None,
        moving: nn.Module | None = None, frozen: Iterable[PackedModel] = (), **stateful,
    ):  # fmt: skip
        """Load the newest intact checkpoint into the model, the optimizer, and the place in the
        data: the `order` of rows, or of an online script the `sampler`, which has an order of
        prompts. distill.py has both. A script may add `stateful`, objects with a
        `state_dict`, by any name.

        `value` is a second model with its optimizer, `moving` one without: it follows the policy
        (`move_towards`). Operations of `frozen` models count in speed/tflops. The console shows the
        metrics `show`, curves.png the metrics `curves`. Collective.

        Raises `ValueError` if all checkpoints are damaged."""
        self.args = args
        self.total_steps = total_steps
        self.models = [model] if value is None else [model, value[0]]
        self.counted = [*self.models, *frozen]
        self.order = order if sampler is None else sampler.order
        self.meter = Meter()
        self.peak_flops = peak_flops(model.device, model.compute_dtype)
        self.latest: dict[str, float] = {}  # metrics of the last step
        self.stop_requested = False
        places = dict(order=order, rollouts=sampler)  # by their names in a checkpoint
        stateful |= {name: place for name, place in places.items() if place is not None}
        self.checkpointer = Checkpointer(
            args, model, optimizer, tokenizer, value, moving,
            () if sampler is None else sampler.args.stop_token_ids, totals=self, **stateful,
        )  # fmt: skip
        self._resume()
        self.logger = RunLogger(args, self.first_step, total_steps, show, curves)
        self.message = self.logger.message
        self.message(*self._changed_schedule())
        # The policy has no updates while a value model warms up.
        stepping = optimizer if value is None else value[1]
        has_agent = sampler is not None and sampler.args.agent is not None
        self.trace = self._start_trace(stepping, tokenizer, has_agent)
        self._keep_activations_that_fit()

    def _resume(self) -> None:
        """Load the newest intact checkpoint, with the totals of the run until then."""
        self.num_tokens = 0
        self.best: float | None = None  # best value of --keep_best
        self.earlier_steps = self.total_steps  # length of the run by the checkpoint
        self.first_step = self.finished = self.saved = self.checkpointer.load_latest()

    def _keep_activations_that_fit(self) -> None:
        if self.models[0].device.type == "cuda" and has_extra("plan"):
            with extra("plan", "--activation_checkpointing"):
                from extras.plan.memory import keep_activations_that_fit
            self.message(keep_activations_that_fit(self.models, self.args))

    def _start_trace(self, stepping: Optimizer, tokenizer, has_agent: bool):
        """Return the trace of `--trace_every`, None without. By default a run has one if
        extras/trace is here, but not with an agent: the branches of an episode share an index."""
        by_default = has_extra("trace") and not has_agent
        is_asked = self.args.trace_every != TrainArgs.trace_every
        if not self.args.trace_every or not (by_default or is_asked):
            return None
        with extra("trace", "--trace_every"):
            from extras.trace.trace import Trace
        trace = Trace(self.args, self.models, stepping, tokenizer)
        self.meter.keep = trace.keep
        return trace

    def state_dict(self) -> dict:
        best = dict(metric=self.args.keep_best, value=self.best)
        return dict(num_tokens=self.num_tokens, best=best, total_steps=self.total_steps)

    def load_state_dict(self, state: dict) -> None:
        self.num_tokens = state["num_tokens"]
        self.earlier_steps = state.get("total_steps", self.total_steps)
        if state["best"]["metric"] == self.args.keep_best:  # another metric has no best value yet
            self.best = state["best"]["value"]

    # ---- around steps ----

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, counted from 0. A step that the loop leaves with `break` does
        not count."""
        process.note_signals()
        last_save = time.monotonic()
        while self.finished < self.total_steps:
            for model in self.counted:
                model.flops = 0.0  # an evaluation counted its own
            if self.trace is not None:
                self.trace.begin(self.finished + 1, last=self.finished + 1 == self.total_steps)
            self.meter.start("step")
            yield self.finished
            self.finished += 1
            if self.trace is not None and self.trace.on:
                with self.meter.time("trace"):  # logged with the next step
                    self.trace.end(self.finished)
            self.stop_requested = distributed.stop_requested()
            if self.stop_requested:
                return
            minutes = distributed.from_main((time.monotonic() - last_save) / 60)
            is_due = minutes >= self.args.save_minutes > 0
            is_due |= self.finished % self.args.save_every == 0
            if is_due or self.finished == self.total_steps:
                self._save()
                last_save = time.monotonic()

    def _save(self) -> None:
        with self.meter.time("save"):  # logged with the next step
            self.logger.sync()
            self.checkpointer.save(self.finished)
        if self.saved == self.first_step:
            folder = self.checkpointer.checkpoints
            files = (folder / f"step_{self.finished:06d}").rglob("*")
            size = sum(file.stat().st_size for file in files) / 1e9
            self.message(f"{folder}: {size:.2g} GB each, --keep_last {self.args.keep_last} stay")
        self.saved = self.finished
        self.logger.draw_curves()

    def learning_rate(self, step: int) -> float:
        return learning_rate(step, self.total_steps, self.args)

    def _changed_schedule(self) -> list[str]:
        """Return a line if a resumed run has another length, and so another learning rate."""
        then, now = self.earlier_steps, self.total_steps
        lrs = [learning_rate(self.first_step, steps, self.args) for steps in (then, now)]
        if lrs[0] == lrs[1] or self.first_step == now:
            return []
        before = learning_rate(self.first_step - 1, then, self.args)
        change = f"{then} steps are now {now}: after lr {before:.3g} the next step has {lrs[1]:.3g}"
        return [f"--lr_schedule {self.args.lr_schedule}: {change}"]

    def evaluates(self, finished: int) -> bool:
        """Return whether an evaluation follows after `finished` steps."""
        every = self.args.eval_every
        return every > 0 and (finished % every == 0 or finished == self.total_steps)

    def checks_engine(self, step: int) -> bool:
        """Return whether this step compares engine and trainer: the first one of this process and
        every `CHECK_EVERY`-th."""
        return step == self.first_step or step % CHECK_EVERY == 0

    # ---- metrics ----

    def reduce(self, samples: Iterable[Sample], **known: float) -> dict[str, float]:
        """End the step and return its metrics: the meter's values over all ranks, the tokens of
        this rank's `samples` (prompts included), the `known` values, and rates, memory and FLOP/s
        of the machine. Collective."""
        self.meter.stop("step")
        sequences = chain(*(sample.sequences for sample in samples))
        self.meter.sum("targets", sum(sequence.num_targets for sequence in sequences))
        self.meter.sum("flops", sum(model.flops for model in self.counted))
        for name, gigabytes in peak_memory().items():
            self.meter.max(name, gigabytes)
        metrics = self.meter.reduce() | known
        tokens = metrics.pop("targets")
        sampled = metrics.pop("sampled", 0)
        flops = metrics.pop("flops")
        self.num_tokens += int(tokens)
        metrics |= self.order.epochs()
        metrics["num_tokens"] = self.num_tokens
        metrics["tokens_per_second"] = tokens / metrics["time/step"]
        if sampled:  # dedicated rollout ranks sample during the whole step
            duration = "time/step" if distributed.rollout_ranks else "time/rollout"
            metrics["speed/sampled_tokens_per_second"] = sampled / metrics[duration]
        seconds = metrics.get("time/train", metrics["time/step"]) + metrics.get("time/logprobs", 0)
        rate = flops / seconds / distributed.world_size()
        metrics["speed/tflops"] = rate / 1e12
        if self.peak_flops:
            metrics["speed/mfu"] = rate / self.peak_flops
        if (state := self.models[0].loss_scale) is not None:  # --dtype float16
            metrics["loss_scale"], _, metrics["skipped_steps"] = state.tolist()
        return metrics

    def log(self, finished: int, metrics: dict[str, float]) -> None:
        """Log the metrics after `finished` steps, and export `best/` if `--keep_best` has improved.
        Raises `ValueError` if the first evaluation lacks its metric. Collective."""
        if not metrics:
            return
        self.latest = metrics
        self.logger.log(finished, metrics)
        name = self.args.keep_best
        if name and self.evaluates(finished) and (finished or best_of(name)[0] in metrics):
            self._keep_best(name, finished, metrics)

    def _keep_best(self, keep_best: str, finished: int, metrics: dict[str, float]) -> None:
        name, end = best_of(keep_best)
        if name not in metrics and self.best is None:
            known = ", ".join(key for key in metrics if key.startswith("eval")) or "none"
            advice = f"choose one of the evaluation: {known}"
            raise ValueError(f"--keep_best {name}: no such metric; {advice}")
        value = metrics.get(name, math.nan)
        # The kind of a metric is its name without the name of a held-out set.
        kind = next((key for key in metrics if name.startswith(f"{key}/")), name)
        if (end := end or better_end(kind)) is None:
            advice = f"add the better end, {name}:highest or {name}:lowest"
            raise ValueError(f"--keep_best {name}: the name does not tell which is best; {advice}")
        sign = BETTER[end]
        if math.isnan(value) or (self.best is not None and sign * value <= sign * self.best):
            return
        self.best = value
        self.checkpointer.export_hf(finished, "best")
        folder = f"{self.args.output_dir}/best"
        self.message(f"best {name} so far: {value:.4g} after step {finished}, in {folder}")

    def show_samples(
        self, finished: int, groups: list[Group], positions: Sequence[int], rewards_PG: Tensor,
        advantages_PG: Tensor, named_rewards: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """Write all completions of a step to samples.jsonl and print some: of the first and the
        last step, and of every `SAMPLES_EVERY`th. `named_rewards`: [P, G] each, for the trace.
        Collective."""
        if self.trace is not None:
            numbers = dict(reward=rewards_PG, advantage=advantages_PG) | named_rewards
            self.trace.add_groups(groups, positions, numbers)
        if finished % SAMPLES_EVERY == 0 or finished in (1, self.total_steps):
            self.logger.samples(finished, groups, positions, rewards_PG, advantages_PG)

    def end(self, summary: str = "") -> None:
        """End the run after the loop: export `hf/`, after a checkpoint if the run was stopped, and
        print the `summary` of a finished run. Collective."""
        stopped = self.finished < self.total_steps
        if self.finished > self.saved:
            self._save()
        if self.finished or not stopped:  # something was trained
            self.checkpointer.export_hf(self.finished, saved=True)
        if summary and not stopped:
            self.message(summary)
        if stopped:
            self.message(f"stopped after step {self.finished}; the same command resumes from there")
        elif self.finished == self.first_step:
            problem = f"nothing to do: the run in {self.args.output_dir} has finished"
            self.message(f"{problem}; raise --max_steps, or start over with --resume never")
        else:
            self.message(*self._results())
        self.logger.close()
        unlock()

    def _results(self) -> list[str]:
        """Return the last lines of a run: what has changed, where its files are, and what to do
        next."""
        folder = self.args.output_dir
        changed = self.logger.summary()
        steps = distributed.counted(self.finished, "step")
        lines = [f"after {steps}: {changed}"] if changed else []
        names = ("curves.png", "samples.jsonl")
        files = [f"{folder}/{name}" for name in names if Path(folder, name).is_file()]
        if files:
            lines.append(f"look at {' and '.join(files)}")
        if has_extra("trace"):
            lines.append(f"doctor: python extras/trace/doctor.py {folder}")
        if isinstance(self.models[0], Policy):
            chat = ["python", "tools/chat.py", "--model", f"{folder}/hf"]
            if self.args.template_kwargs:
                chat += ["--template_kwargs", *self.args.template_kwargs]
            lines.append(f"next: {shlex.join(chat)}")
        return [*lines, f"done: {folder}/hf"]
