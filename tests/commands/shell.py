"""Runs printed commands with stand-ins, in a folder that has what a checkout has."""

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import fields
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path

from commands.collect import Command
from commands.stand_ins import FILES, HUB, LOCAL_MODELS, MADE, MODELS, READS, hub, write_file
from helpers import ROOT
from processes import Ranks, finished
from scripts import ALGORITHMS, SCRIPTS

IN_SANDBOX = ROOT / "tests" / "commands" / "in_sandbox.py"
COPIED = ("course", *(path.name for path in SCRIPTS.values()))  # commands write beside them


def values(command: Command) -> list[str]:
    """All words of a command and its recipe, without names, kinds of rewards and weights of data in
    front of or behind a path."""
    words = [*command.words, *sum(command.flags().values(), [])]
    return [re.sub(r"^(model|judge|rank):|^\w+=|(?<=\.py):\w+$|:[0-9.]+$", "", x) for x in words]


def like(command: Command) -> str:
    """The name of the script that it runs, or of which it runs a copy."""
    name = Path(command.script).stem
    return dict(mine="grpo").get(name, name)


def ranks_of(command: Command) -> int:
    return min(command.ranks, 4)


AT_MOST = dict(
    max_steps=2, batch_size=8, eval_size=4, eval_generate=4, samples_per_prompt=3, max_new_tokens=16
)  # fmt: skip
OF_TOOLS = {
    "extras/trace/replay.py": ["--step", "2"],
    "tools/chat.py": ["--max_new_tokens", "8"],
    "course/lessons/best_of_n.py": ["--max_steps", "2", "--samples", "4", "--prompts", "8"],
}
WITH_VLLM = (
    "python grpo.py",
    "torchrun --nproc_per_node 2 ppo.py --config configs/demo_ppo.yaml",
    "torchrun --nproc_per_node 8 eval.py --config configs/eval_math500.yaml --model ./grpo/hf",
)


def short(command: Command) -> list[str]:
    """Flags that make a run of a script small: two steps, few and short completions, few rows.
    Everything else stays as printed, but for a further reward, which a random model earns."""
    script, flags, ranks = like(command), command.flags(), ranks_of(command)
    if script not in ALGORITHMS or "dry_run" in flags:
        return [] if "step.zip" in command.words[:2] else OF_TOOLS.get(command.script, [])
    defaults = {x.name: x.default for x in fields(importlib.import_module(script).Args)}
    samples = "engine" in defaults
    found: dict[str, object] = {}
    for name, most in AT_MOST.items():
        always = samples or name in ("max_steps", "batch_size", "eval_size")
        if name in defaults and (always or name in flags):
            given = flags.get(name, [defaults[name]])[0]
            found[name] = most if given is None else min(int(given), most)
    if samples and command.text not in WITH_VLLM:
        found["engine"] = "transformers"
        found |= dict(tensor_parallel_size=1) if "tensor_parallel_size" in flags else {}
    if script == "eval":
        del found["eval_size"]  # files of completions have all rows
    elif samples:
        rollout = min(int(flags.get("rollout_ranks", [0])[0]), ranks // 2)
        minibatches = int(flags.get("minibatches", [defaults["minibatches"]])[0])
        found["rollout_ranks"] = rollout
        found["prompts_per_step"] = max(2, ranks - rollout) * minibatches
    if samples and script not in ("eval", "distill"):
        rewards = flags.get("reward", ["exact_match"])
        varied = "varied.py:varied" if "demo_grpo" in command.text else "varied"  # replay reads it
        found["reward"] = [varied, *rewards]
        found["reward_weights"] = ["1", *flags.get("reward_weights", ["1"] * len(rewards))]
    if script == "ppo":
        found["value_warmup_steps"] = 1
    lists = {name: x if isinstance(x, list) else [x] for name, x in found.items()}
    return [str(word) for name, words in lists.items() for word in (f"--{name}", *words)]


class Shell:
    """A folder in which commands run, each once."""

    def __init__(self, folder: Path, commands: Sequence[Command], makers: "Shell | None" = None):
        self.folder, self.commands, self.makers = folder, commands, makers or self
        self.done: dict[str, subprocess.CompletedProcess] = {}
        folder.mkdir()
        for path in [*ROOT.iterdir()]:
            if path.name in COPIED:
                copy = shutil.copytree if path.is_dir() else shutil.copy
                copy(path, folder / path.name)
            elif path.name not in ("runs", "build", ".git"):
                (folder / path.name).symlink_to(path)
        shutil.copy(IN_SANDBOX.with_name("varied.py"), folder)
        for path in folder.glob("course/lessons/nano_*.py"):  # they have no flags for this
            small = re.sub(
                r"P=32, G=16", "P=2, G=4", re.sub("steps=[0-9]+", "steps=2", path.read_text())
            )
            path.write_text(small)

    def run(self, command: Command) -> subprocess.CompletedProcess:
        if command.text not in self.done:
            for word in [*values(command), *READS.get(command.text, ())]:
                self.provide(word, command)
            if like(command) in ALGORITHMS:
                shutil.rmtree(self.folder / command.output_dir, ignore_errors=True)  # no resumption
            self.done[command.text] = self._start(command)
        return self.done[command.text]

    def _start(self, command: Command) -> subprocess.CompletedProcess:
        if command.program not in ("python", "torchrun"):
            variables = os.environ | dict(PATH=f"{ROOT}/.venv/bin:{os.environ['PATH']}")
            return subprocess.run(["bash", "-c", command.text], cwd=self.folder, env=variables,
                                  capture_output=True, text=True)  # fmt: skip
        words = [word.replace("/shared/", "") for word in command.words]
        words = [each for word in words for each in self._matches(word)]
        variables = [f"{name}={value}" for name, value in command.variables.items()]
        line = [self.folder, hub(), command.stdin, *variables, *words, *short(command)]
        with Ranks(ranks_of(command), IN_SANDBOX, *line) as ranks:
            return ranks.end()

    def _matches(self, pattern: str) -> list[str]:
        is_pattern = pattern.startswith("runs/") and "*" in pattern
        found = sorted(self.folder.glob(pattern)) if is_pattern else []
        return [str(path.relative_to(self.folder)) for path in found] or [pattern]

    def provide(self, word: str, reader: Command) -> None:
        """Write what a command reads: a stand-in, or the run of an earlier command."""
        if word in MODELS or word in HUB:
            hub(word)
        elif word in LOCAL_MODELS:
            shutil.copytree(hub(LOCAL_MODELS[word]), self.folder / word, dirs_exist_ok=True)
        elif name := next((x for x in (f"{reader.page}:{word}", word) if x in FILES), None):
            if not (self.folder / word).exists():
                write_file(name, self.folder / word)
        elif word == "step.zip" and "--pack" not in reader.words:
            self.run(next(x for x in self.commands if "--pack" in x.words))
        elif re.match(r"(\./|runs/)\w", word) and word != reader.output_dir:
            for maker in makers(os.path.normpath(word), reader, self.commands):
                if not (self.folder / maker.output_dir).exists():
                    self._copy_output(maker)

    def _copy_output(self, maker: Command) -> None:
        finished(self.makers.run(maker))
        for word in values(maker):
            self.provide(word, maker)
        if self.makers is not self:
            made, here = self.makers.folder / maker.output_dir, self.folder / maker.output_dir
            here.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if made.is_dir() else shutil.copy)(made, here)


def makers(path: str, reader: Command, commands: Sequence[Command]) -> list[Command]:
    """Return the command that writes what another one reads: of the same page, of `MADE`, or any;
    for a pattern, all of `MADE`."""
    made = [Command(text) for text in MADE]
    if "*" in path:
        return [x for x in made if fnmatch(x.output_dir, path) and x.script != "eval.py"]
    same = [x for x in commands if any(p.startswith(f"{reader.page}:") for p in x.places)]
    same = [*takewhile(lambda x: x.text != reader.text, same)]
    for maker in [*same, *made, *commands]:
        if maker.text != reader.text and f"{path}/".startswith(f"{maker.output_dir}/"):
            return [maker]
    raise AssertionError(f"{reader.text}: no command writes {path}")
