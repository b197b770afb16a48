"""The log of a run: rank 0 writes the metrics and samples of each step to the output folder, the
console and the trackers of `--log_to`."""

import json
import math
import time
from collections.abc import Sequence
from itertools import chain, groupby
from pathlib import Path

from torch import Tensor

from common import durable
from common.config.extra import extra
from common.config.groups import TrainArgs
from common.metrics.curves import draw_curves, read_metrics
from common.packs.sample import PLACEHOLDER, Completion, Group, Sample
from common.parallel import distributed
from common.parallel.process import visible

LINES = ("metrics.jsonl", "samples.jsonl")  # each step appends to them
TABLE = 4  # completions in the table of a step
SPEEDS = ("time/", "tokens_per_second")  # their change says nothing about the model
DRAW_EVERY = 60  # seconds between drawings of curves.png, or 20 times as long as the last one took


class RunLogger:
    """Writes the log on rank 0 and does nothing on other ranks. The console shows the metrics
    `show`, curves.png draws the metrics `curves`."""

    def __init__(
        self, args: TrainArgs, first_step: int, total_steps: int, show: Sequence[str],
        curves: Sequence[str],
    ):  # fmt: skip
        """Delete the lines of steps after `first_step`: a resumed run takes these steps again."""
        self.active = distributed.is_main()
        self.folder = Path(args.output_dir)
        self.total_steps = total_steps
        self.show = show
        self.curves = curves
        self.shown: dict[str, tuple[float, float]] = {}  # first and latest value of these metrics
        self.errors: dict[str, float] = {}  # latest standard error, of a mean over held-out rows
        self.trackers = []
        self.draw_at = time.monotonic() + DRAW_EVERY
        if not self.active:
            return
        from rich.console import Console

        self.console = Console()
        for name in LINES:
            _keep_until(self.folder / name, first_step or -1)  # -1: a new run logs step 0 too
        for line in read_metrics(self.folder / "metrics.jsonl"):
            self._remember(line)
        if args.log_to:
            with extra("trackers", f"--log_to {' '.join(args.log_to)}"):
                from extras.trackers.trackers import start_trackers
            self.trackers = start_trackers(args, self.folder, first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics after `step` finished steps."""
        if not self.active:
            return
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(dict(step=step) | metrics) + "\n")
        for tracker in self.trackers:
            tracker.log(step, metrics)
        self._remember(metrics)
        # A terminal shows every step; a file gets about 20 steps, evaluations and the last step.
        every = 1 if self.console.is_terminal else max(1, self.total_steps // 20)
        is_evaluation = any(name.startswith("eval") for name in metrics)
        if step % every == 0 or is_evaluation or step == self.total_steps:
            shown = visible("  ".join(self._value(name) for name in self.show if name in metrics))
            print(f"step {step}/{self.total_steps}  {shown}", flush=True)
        if time.monotonic() > self.draw_at:
            self.draw_curves()

    def _remember(self, metrics: dict[str, float]) -> None:
        for name in metrics.keys() & set(self.show):
            first, _ = self.shown.get(name, (metrics[name], None))
            self.shown[name] = first, metrics[name]
            self.errors[name] = metrics.get(f"{name}_stderr", 0.0)

    def _value(self, name: str) -> str:
        """Return a metric as text: `reward 0.4 -> 0.8`, its first and its latest value. Speeds, and
        values that have not changed, have only one. `±` half of the 95% interval follows, if it is
        known."""
        first, latest = (f"{value:.3g}" for value in self.shown[name])
        is_single = name.startswith(SPEEDS) or first == latest
        values = latest if is_single else f"{first} -> {latest}"
        half = 1.96 * self.errors[name]
        return f"{name} {values} ±{half:.2g}" if half else f"{name} {values}"

    def summary(self) -> str:
        """Return the first and the latest value of each metric shown, except speeds. Rank 0
        only."""
        names = [name for name in self.show if name in self.shown and not name.startswith(SPEEDS)]
        return ", ".join(map(self._value, names))

    def message(self, *lines: str) -> None:
        if not self.active:
            return
        for line in lines:
            self.console.print(visible(line), markup=False, highlight=False, soft_wrap=True)

    def preview(self, sample: Sample, tokenizer, of: int = 1) -> None:
        """Print one decoded sample, the last of the `of` sequences that its row has."""
        if self.active:
            preview(sample, tokenizer, self.console, of)

    def samples(
        self, step: int, groups: list[Group], positions: Sequence[int], rewards_PG: Tensor,
        advantages_PG: Tensor,
    ) -> None:  # fmt: skip
        """Append the groups of all ranks to samples.jsonl, in their order in the step
        (`positions`), and print a table of a few completions. Collective."""
        columns = (groups, rewards_PG.tolist(), advantages_PG.tolist())
        lines_at = {}  # keys are positions
        for position, group, rewards_G, advantages_G in zip(positions, *columns, strict=True):
            samples = zip(group, rewards_G, advantages_G, strict=True)
            lines_at[position] = [_line(step, *sample) for sample in samples]
        lines_at = distributed.gather_dict(lines_at)
        if not self.active:
            return
        lines = [*chain(*(lines_at[position] for position in sorted(lines_at)))]
        with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        for tracker in self.trackers:
            tracker.log_samples(step, lines)
        from rich.table import Table

        table = Table("prompt", "completion", "reward", title=f"step {step}", title_justify="left")
        for line in lines[:: max(1, len(lines) // TABLE)][:TABLE]:
            reward = "none" if line["reward"] is None else f"{line['reward']:.2f}"
            table.add_row(_brief(str(line["prompt"])), _brief(line["completion"]), reward)
        self.console.print(table)

    def sync(self) -> None:
        """Wait until all lines are on the disk. A checkpoint calls this first: a run that resumes
        from it must find the lines of all earlier steps."""
        if self.active:
            for path in filter(Path.is_file, (self.folder / name for name in LINES)):
                durable.sync(path)
            durable.sync(self.folder)

    def draw_curves(self) -> None:
        """Draw curves.png from metrics.jsonl, which also has the steps before a resumption."""
        if self.active:
            began = time.monotonic()
            draw_curves([self.folder / "metrics.jsonl"], self.curves, self.folder / "curves.png")
            ended = time.monotonic()
            self.draw_at = ended + max(DRAW_EVERY, 20 * (ended - began))

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


def _line(step: int, sample: Completion, reward: float, advantage: float) -> dict:
    """Return the line of a completion in samples.jsonl."""
    line: dict = dict(
        step=step,
        prompt=asked(sample.row),
        completion=sample.transcript or sample.text,
        reward=None if math.isnan(reward) else reward,  # NaN is no JSON
        advantage=advantage,
        finish_reason=sample.finish_reason,
        version=sample.version,
    )
    if sample.images:
        line["images"] = [image.file for image in sample.images]
    if "advantages" in sample.streams:
        line["advantages"] = sample.streams["advantages"][sample.prompt_length :]
    return line


def preview(sample: Sample, tokenizer, console, of: int = 1) -> None:
    """Print a decoded sample with its trained tokens in colour, or between ⟦ ⟧ if the output is no
    terminal. `of`: see `RunLogger.preview`."""
    from rich.text import Text

    text = Text()
    position = 0
    for trained, tokens in groupby(sample.loss_mask):
        length = len(list(tokens))
        piece = visible(sample.decoded(tokenizer, sample.ids[position : position + length]))
        position += length
        plain = f"⟦{piece}⟧" if trained and not console.is_terminal else piece
        text.append(plain, style="bold green" if trained else "dim")
    which = f"a sample, the last of {of} sequences of its row" if of > 1 else "a sample"
    console.print(Text(f"{which} (trained tokens in green or ⟦ ⟧):"), text, sep="\n")


def asked(row: dict) -> str | None:
    """Return the prompt of a row as text: its last message, if it has several. An image is
    `<image>`."""
    prompt = row.get("_prompt") or row.get("prompt") or row.get("question")
    text = prompt[-1]["content"] if isinstance(prompt, list) else prompt
    if isinstance(text, list):
        text = "".join(part.get("text") or PLACEHOLDER for part in text)
    return text


def _brief(text: str, limit: int = 160):
    from rich.text import Text

    text = visible(text).replace("\n", "⏎")
    return Text(text if len(text) <= limit else text[: limit // 2] + " … " + text[-limit // 2 :])


def _keep_until(path: Path, last_step: int) -> None:
    if path.is_file():
        # A kill may cut the last line. Not `splitlines`, which also splits at U+2028 inside a text.
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        try:
            kept = [line + "\n" for line in lines if json.loads(line)["step"] <= last_step]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged; repair or delete it: {error}") from error
        durable.write_text(path, "".join(kept))
