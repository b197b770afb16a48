"""Logging of a run by rank 0: metrics and samples of each step, on disk and on the console.

Metrics go to `metrics.jsonl`, and to wandb and tensorboard on request."""

import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from pathlib import Path

from torch import Tensor

from common.config.groups import TrainArgs, flags_of
from common.data.messages import PLACEHOLDER
from common.data.sample import Completion, Group, Sample
from common.metrics.curves import draw_curves, read_metrics
from common.parallel import distributed, durable
from common.parallel.process import visible

LINES = ("metrics.jsonl", "samples.jsonl")  # appended to at each step
TABLE = 4  # completions in the table of a step
# Beginnings of metrics whose change says nothing about the model.
SPEEDS = ("time/", "tokens_per_second")


class RunLogger:
    """Logger of rank 0; a no-op elsewhere. `show`: metrics on the console; `curves`: metrics to
    draw."""

    def __init__(
        self, args: TrainArgs, first_step: int, total_steps: int, show: Sequence[str],
        curves: Sequence[str],
    ):  # fmt: skip
        """Delete the lines after `first_step`, which will be logged again."""
        self.active = distributed.is_main()
        self.folder = Path(args.output_dir)
        self.total_steps = total_steps
        self.show = show
        self.curves = curves
        # first and latest value of each metric in `show`, on rank 0
        self.first: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.wandb = None
        self.tensorboard = None
        self.drawn = time.monotonic()  # when curves.png was last drawn
        self.drawing_seconds = 0.0
        if not self.active:
            return
        from rich.console import Console

        self.console = Console()
        for name in LINES:
            _keep_until(self.folder / name, first_step or -1)  # a new run evaluates step 0 again
        for line in read_metrics(self.folder / "metrics.jsonl"):
            self._remember(line)
        if "wandb" in args.log:
            self.wandb = _start_wandb(args, self.folder)
        if "tensorboard" in args.log:
            with package("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter
            self.tensorboard = SummaryWriter(self.folder / "tensorboard", purge_step=first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step. `step` is the number of finished steps."""
        if not self.active:
            return
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(dict(step=step) | metrics) + "\n")
        if self.wandb is not None:
            self.wandb.log(metrics, step=step)
        if self.tensorboard is not None:
            for name, value in metrics.items():
                self.tensorboard.add_scalar(name, value, step)
        self._remember(metrics)
        if self._is_printed(step, metrics):
            shown = visible("  ".join(self._value(name) for name in self.latest if name in metrics))
            print(f"step {step}/{self.total_steps}  {shown}", flush=True)
        since = time.monotonic() - self.drawn
        is_due = step % 20 == 0 or since > 60
        if is_due and since > 20 * self.drawing_seconds:  # at most a twentieth of the time
            self.draw_curves()

    def _is_printed(self, step: int, metrics: dict[str, float]) -> bool:
        """Return whether the console shows the step: a terminal every one, a file of output about
        20 steps, evaluations and the last."""
        every = 1 if self.console.is_terminal else max(1, self.total_steps // 20)
        is_evaluation = any(name.startswith("eval") for name in metrics)
        return step % every == 0 or is_evaluation or step == self.total_steps

    def _remember(self, metrics: dict[str, float]) -> None:
        latest = self.latest | metrics
        self.latest = {name: latest[name] for name in self.show if name in latest}
        self.first = self.latest | self.first

    def _value(self, name: str) -> str:
        """Return the first and the latest value of a metric, `reward 0.4 -> 0.8`; one value of
        speeds or if they are equal."""
        first = f"{self.first[name]:.3g}"
        latest = f"{self.latest[name]:.3g}"
        is_single = name.startswith(SPEEDS) or first == latest
        return f"{name} {latest}" if is_single else f"{name} {first} -> {latest}"

    def summary(self) -> str:
        """Return the first and the latest value of each metric but speeds. Rank 0 only."""
        return ", ".join(self._value(name) for name in self.latest if not name.startswith(SPEEDS))

    def message(self, text: str) -> None:
        """Print a line on the console."""
        if self.active:
            self.console.print(visible(text), markup=False, highlight=False, soft_wrap=True)

    def preview(self, sample: Sample, tokenizer) -> None:
        """Print one decoded sample."""
        if self.active:
            preview(sample, tokenizer, self.console)

    def samples(
        self, step: int, groups: list[Group], positions: Sequence[int], rewards_PG: Tensor,
        advantages_PG: Tensor,
    ) -> None:  # fmt: skip
        """Write the groups of all ranks to samples.jsonl, in the order of their positions in the
        step, and print a few as a table. Collective."""
        columns = (groups, rewards_PG.tolist(), advantages_PG.tolist())
        lines_at = {}  # by position
        for position, group, rewards_G, advantages_G in zip(positions, *columns, strict=True):
            samples = zip(group, rewards_G, advantages_G, strict=True)
            lines_at[position] = [_line(step, *sample) for sample in samples]
        lines_at = distributed.gather_dict(lines_at)
        if not self.active:
            return
        lines = [*chain(*(lines_at[position] for position in sorted(lines_at)))]
        with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        if self.wandb is not None:
            import wandb

            columns = list(dict.fromkeys(chain(*lines)))  # only some have images
            rows_of_step = [[line.get(name) for name in columns] for line in lines]
            self.wandb.log(dict(samples=wandb.Table(columns=columns, data=rows_of_step)), step=step)
        from rich.table import Table

        table = Table("prompt", "completion", "reward", title=f"step {step}", title_justify="left")
        for line in lines[:: max(1, len(lines) // TABLE)][:TABLE]:
            reward = "none" if line["reward"] is None else f"{line['reward']:.2f}"
            table.add_row(_brief(str(line["prompt"])), _brief(line["completion"]), reward)
        self.console.print(table)

    def sync(self) -> None:
        """Bring the lines of all steps to the disk, before a checkpoint from which later runs
        continue."""
        if self.active:
            for path in filter(Path.is_file, (self.folder / name for name in LINES)):
                durable.sync(path)
            durable.sync(self.folder)

    def draw_curves(self) -> None:
        """Draw curves.png from metrics.jsonl, which includes the steps before a resumption."""
        if self.active:
            began = time.monotonic()
            draw_curves([self.folder / "metrics.jsonl"], self.curves, self.folder / "curves.png")
            self.drawn = time.monotonic()
            self.drawing_seconds = self.drawn - began

    def close(self) -> None:
        if self.wandb is not None:
            self.wandb.finish()
        if self.tensorboard is not None:
            self.tensorboard.close()


def _line(step: int, sample: Completion, reward: float, advantage: float) -> dict:
    """Return the line of samples.jsonl about a completion."""
    line = dict(
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


def preview(sample: Sample, tokenizer, console) -> None:
    """Print one decoded sample, with its trained tokens in colour, or between marks without a
    terminal."""
    from rich.text import Text

    text = Text()
    position = 0
    for trained, tokens in groupby(sample.loss_mask):
        length = len(list(tokens))
        piece = visible(sample.decoded(tokenizer, sample.ids[position : position + length]))
        position += length
        plain = f"⟦{piece}⟧" if trained and not console.is_terminal else piece
        text.append(plain, style="bold green" if trained else "dim")
    console.print(Text("a sample (trained tokens in green or ⟦ ⟧):"), text, sep="\n")


def asked(row: dict) -> str | None:
    """Return the text of a prompt, or of its last message, with `<image>` for a part of it that is
    an image."""
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
        # A kill may cut the last line; texts may contain U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        try:
            kept = [line + "\n" for line in lines if json.loads(line)["step"] <= last_step]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged; repair or delete it: {error}") from error
        durable.write_text(path, "".join(kept))


@contextmanager
def package(name: str) -> Iterator[None]:
    """Around the import of a package that `--log` names. Raises `ValueError` if it is missing."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"--log {name}: {name} is not installed; pip install {name}") from error


def _start_wandb(args: TrainArgs, folder: Path):
    """Return the wandb run of this folder. Raises `ValueError` without a key, for which wandb would
    ask, or if wandb refuses the run."""
    with package("wandb"):
        import wandb

    file = folder / "wandb_id"  # a resumed run continues the same wandb run
    try:
        is_online = os.environ.get("WANDB_MODE", "online") == "online"
        if is_online and not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "--log wandb: no key; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
            )
        if not file.is_file():
            name = re.sub("[:;,#?/']", "-", folder.name)  # wandb refuses these
            file.write_text(f"{name}-{time.time_ns():x}")
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "onefile"),
            dir=folder,
            config=flags_of(args),
            resume="allow",
            id=file.read_text(),
        )
    except wandb.Error as error:
        raise ValueError(f"--log wandb: {distributed.first_line(error)}") from error
