"""Trackers to which rank 0 sends a run's metrics, beside the run's own files (`--log_to`)."""

import os
import re
import time
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

from common.config.extra import extra
from common.config.groups import TrainArgs, flags_of
from common.parallel.process import RunError, first_line
from common.workers.user_code import load_callable
from common.workers.worker import one_line


class Wandb:
    """The wandb run of an output folder. A resumed run continues it."""

    def __init__(self, args: TrainArgs, folder: Path, first_step: int):
        """Raises `ValueError` without a key, for which wandb would ask, or if wandb refuses the
        run."""
        with extra("wandb", "--log_to wandb"):
            import wandb
        file = folder / "wandb_id"
        try:
            is_online = os.environ.get("WANDB_MODE", "online") == "online"
            if is_online and not wandb.login(prompt=False, verify=False):
                advice = "run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
                raise ValueError(f"--log_to wandb: no key; {advice}")
            if not file.is_file():
                name = re.sub("[:;,#?/']", "-", folder.name)  # wandb refuses these
                file.write_text(f"{name}-{time.time_ns():x}")
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "onefile"),
                dir=folder,
                config=flags_of(args),
                resume="allow",
                id=file.read_text(),
            )
        except wandb.Error as error:
            raise ValueError(f"--log_to wandb: {first_line(error)}") from error
        self.table = wandb.Table

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def log_samples(self, step: int, lines: list[dict]) -> None:
        columns = list(dict.fromkeys(chain(*lines)))  # only some have images
        rows = [[line.get(name) for name in columns] for line in lines]
        self.run.log(dict(samples=self.table(columns=columns, data=rows)), step=step)

    def close(self) -> None:
        self.run.finish()


class Tensorboard:
    """Writes metrics to `tensorboard/` in the output folder."""

    def __init__(self, args: TrainArgs, folder: Path, first_step: int):
        try:
            with extra("tensorboard", "--log_to tensorboard"):
                from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:  # the package is too old; torch says so
            raise ValueError(f"--log_to tensorboard: {first_line(error)}") from error
        self.writer = SummaryWriter(folder / "tensorboard", purge_step=first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def log_samples(self, step: int, lines: list[dict]) -> None:
        """Tensorboard gets metrics alone."""

    def close(self) -> None:
        self.writer.close()


TRACKERS = dict(wandb=Wandb, tensorboard=Tensorboard)


def start_trackers(args: TrainArgs, folder: Path, first_step: int) -> list:
    """Return the trackers of `--log_to`, each once."""
    starts = {name: TRACKERS.get(name) or partial(_own, name) for name in args.log_to}
    return [start(args, folder, first_step) for start in starts.values()]


def _own(spec: str, args: TrainArgs, folder: Path, first_step: int) -> SimpleNamespace:
    """Return a user's tracker. If it raises, the run ends with that error in one line."""

    def guarded(function, *given):
        try:
            return function(*given)
        except Exception as error:
            problem = one_line(error, spec.rpartition(":")[0])
            raise RunError(f"--log_to {spec}: {problem}") from error

    tracker = guarded(load_callable("--log_to", spec), args, folder, first_step)
    methods = ("log", "log_samples", "close")
    found = {name: partial(guarded, guarded(getattr, tracker, name)) for name in methods}
    return SimpleNamespace(**found)
