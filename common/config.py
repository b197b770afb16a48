"""The flags every script shares, and the command line: flat dataclasses, `--config FILE.yaml`, errors in one line.

A script's `Args` inherits `RunArgs`, overrides defaults and adds its own flags. Precedence: default < file < flag.
"""

import contextlib
import dataclasses
import difflib
import io
import math
import re
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import tyro
import yaml

from common import distributed


@dataclass
class RunArgs:
    """Flags of every script. A path may be absolute or relative to where the command runs."""

    model: str = "tiny"
    """Hugging Face id or folder of the starting model; `tiny` is a built-in randomly initialised 1M-parameter Qwen3"""
    dataset: str = "arithmetic"
    """Hugging Face id, a .jsonl/.json/.parquet/.csv file, a folder of them, or the built-in task `arithmetic`"""
    dataset_split: str = "train"
    """split to train on (files without splits are one split, `train`)"""
    dataset_config: str | None = None
    """configuration of a Hugging Face dataset that has several; default: `main`, if that is one of them"""
    eval_dataset: str | None = None
    """held-out data; default: the split `eval_split` of `dataset`, or rows set aside where it has no such split"""
    eval_split: str = "test"
    """held-out split of `eval_dataset`, or of `dataset`"""
    eval_size: int = 256
    """most rows to evaluate on; also how many are set aside from the training rows when there is no held-out split"""
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    """chat: prompts become user turns of the chat template; plain: text goes in as it is; auto: chat for message lists
    and `question` columns (where the tokenizer has a template), plain for other strings"""
    system_prompt: str | None = None
    """system turn put before every prompt in chat format"""
    output_dir: str = "runs/run"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    max_steps: int | None = None
    """optimizer (sft) or rollout (RL) steps; default: as many as `epochs` gives"""
    epochs: float = 1.0
    """passes over the training data, when max_steps is not given"""
    pack_tokens: int = 8192
    """tokens per forward pass on one rank: the memory knob. It never changes the gradient"""
    lr: float = 1e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after warmup: stay, or decay to `min_lr_ratio` of the peak by the end"""
    warmup_steps: int = 0
    """steps of linear warmup from 0"""
    min_lr_ratio: float = 0.0
    """learning rate at the end of a linear or cosine schedule, as a fraction of the peak"""
    adam_beta1: float = 0.9
    """AdamW beta1"""
    adam_beta2: float = 0.95
    """AdamW beta2"""
    weight_decay: float = 0.0
    """AdamW weight decay, on matrices only (not on norms and biases)"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this global norm"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """compute dtype; master weights, gradients' reduction and the loss are always float32. auto: bfloat16 on CUDA"""
    activation_checkpointing: bool = False
    """recompute block activations in backward: less memory, about a third more compute"""
    compile: bool = False
    """torch.compile every transformer block"""
    seed: int = 0
    """seeds data order and sampling"""
    save_every: int = 100
    """steps between checkpoints (one is always written at the end)"""
    eval_every: int = 100
    """steps between evaluations (one is always made at the end); 0: never"""
    keep_last: int = 2
    """checkpoints to keep"""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue from the newest checkpoint in output_dir if there is one; must: fail without one; never: start
    over and delete what an earlier run left there"""
    log: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """more places for metrics, beside metrics.jsonl: wandb (WANDB_MODE=offline works), tensorboard"""

    def __post_init__(self) -> None:
        self.require_positive("eval_size", "pack_tokens", "epochs", "lr", "max_grad_norm", "save_every")
        self.require_positive("keep_last")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"--max_steps {self.max_steps} must be at least 1")
        self.require_finite("epochs", "lr", "weight_decay", "min_lr_ratio")
        for flag in ("warmup_steps", "weight_decay", "eval_every", "min_lr_ratio"):
            if getattr(self, flag) < 0:
                raise ValueError(f"--{flag} {getattr(self, flag)} must not be negative")
        if self.min_lr_ratio > 1:
            raise ValueError(f"--min_lr_ratio {self.min_lr_ratio} must be at most 1")
        for flag in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, flag) < 1:
                raise ValueError(f"--{flag} {getattr(self, flag)} must be in [0, 1)")

    def require_positive(self, *flags: str) -> None:
        for flag in flags:
            if not getattr(self, flag) > 0:
                raise ValueError(f"--{flag} {getattr(self, flag)} must be greater than 0")

    def require_finite(self, *flags: str) -> None:
        for flag in flags:
            if not math.isfinite(getattr(self, flag)):
                raise ValueError(f"--{flag} {getattr(self, flag)} must be a finite number")

    def require_multiple(self, flag: str, divisor: int, of: str) -> None:
        """A global size must split evenly: over the ranks, over the minibatches."""
        if getattr(self, flag) % divisor:
            raise ValueError(f"--{flag} {getattr(self, flag)} is not a multiple of {of} ({divisor})")

    def to_dict(self) -> dict:
        """Plain YAML types, in field order."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


@dataclass
class RolloutArgs(RunArgs):
    """Flags of every script that samples from the model it trains."""

    prompts_per_step: int = 64
    """prompts per rollout, over all ranks"""
    samples_per_prompt: int = 8
    """completions sampled for each prompt (G)"""
    log_every: int = 10
    """steps between tables of samples on the console and in samples.jsonl"""
    max_new_tokens: int = 256
    """longest completion, in tokens"""
    overlong_prompts: Literal["error", "drop"] = "error"
    """what to do with a prompt that leaves no room for max_new_tokens in the context or in pack_tokens"""
    temperature: float = 1.0
    """sampling temperature; the trainer divides its logits by it too"""
    reward: tuple[str, ...] = ("exact_match",)
    """reward functions (see common/rewards.py), or your own as `path/to/file.py:function`; several are added up"""
    reward_weights: tuple[float, ...] = ()
    """weight of each reward; default: all 1"""
    max_reward_errors: float = 0.1
    """stop when more than this fraction of a step's rewards could not be computed"""
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """what generates: auto is vllm where it is installed, else the slower transformers engine"""
    tensor_parallel_size: int = 1
    """ranks that share one vLLM engine; must divide the number of ranks"""
    gpu_memory_utilization: float = 0.4
    """fraction of each GPU's memory for vLLM's weights and KV cache, given back while training"""
    max_logprob_difference: float | None = None
    """stop if engine and trainer differ by more on any token of the first rollout; default: 1e-3 in float32, 1 in
    bfloat16"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("prompts_per_step", "samples_per_prompt", "max_new_tokens", "temperature", "log_every")
        self.require_positive("tensor_parallel_size")
        self.require_finite("temperature")
        self.require_multiple("prompts_per_step", distributed.world_size(), "the number of ranks")
        if not self.reward:
            raise ValueError("--reward needs at least one name")
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            raise ValueError(f"--reward_weights has {len(self.reward_weights)} values for {len(self.reward)} rewards")
        if not all(map(math.isfinite, self.reward_weights)):
            raise ValueError(f"--reward_weights {' '.join(map(str, self.reward_weights))} must be finite numbers")
        if not 0 <= self.max_reward_errors <= 1:
            raise ValueError(f"--max_reward_errors {self.max_reward_errors} must be in [0, 1]")
        if distributed.world_size() % self.tensor_parallel_size:
            size, ranks = self.tensor_parallel_size, distributed.world_size()
            raise ValueError(f"--tensor_parallel_size {size} does not divide the {ranks} ranks")
        if not 0 < self.gpu_memory_utilization < 1:
            raise ValueError(f"--gpu_memory_utilization {self.gpu_memory_utilization} must be between 0 and 1")
        if self.max_new_tokens >= self.pack_tokens:
            raise ValueError(
                f"--max_new_tokens {self.max_new_tokens} leaves no prompt in --pack_tokens {self.pack_tokens}"
            )


ArgsT = TypeVar("ArgsT", bound=RunArgs)


def parse(args_class: type[ArgsT], argv: Sequence[str] | None = None) -> ArgsT:
    """Read the command line (and `--config FILE.yaml`) into `args_class`; on bad input one line and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        argv, config_path = _take_config_flag(argv)
        argv = _canonical(args_class, argv)
        if config_path is not None:
            argv = _yaml_to_argv(args_class, config_path) + argv  # the last occurrence of a flag wins
        console = io.StringIO()
        with contextlib.redirect_stderr(console):
            # tyro's own validation stops at types; __post_init__ raises ValueError for flags that conflict
            return tyro.cli(
                args_class, args=argv, description=_summary(args_class), config=(tyro.conf.FlagConversionOff,)
            )
    except ValueError as error:
        distributed.fail(str(error), code=2)
    except SystemExit as done:
        if done.code == 0:  # --help
            raise
        distributed.fail(_unframe(console.getvalue()), code=2)


def _summary(args_class: type) -> str:
    """The first paragraph of the script's docstring."""
    return (sys.modules[args_class.__module__].__doc__ or "").split("\n\n")[0]


def _take_config_flag(argv: list[str]) -> tuple[list[str], str | None]:
    for i, arg in enumerate(argv):
        if arg == "--config":
            if i + 1 == len(argv):
                raise ValueError("--config needs a file name")
            return argv[:i] + argv[i + 2 :], argv[i + 1]
        if arg.startswith("--config="):
            return argv[:i] + argv[i + 1 :], arg.removeprefix("--config=")
    return argv, None


def _fields(args_class: type) -> dict[str, type]:
    hints = typing.get_type_hints(args_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(args_class)}


def _unknown(name: str, known: Sequence[str], where: str) -> ValueError:
    close = difflib.get_close_matches(name, known, n=1)
    return ValueError(f"{where}{name}{f' (did you mean {close[0]}?)' if close else ''}")


def _canonical(args_class: type, argv: list[str]) -> list[str]:
    """Snake case, `--flag=value` split, `--compile` = `--compile True`, `true` = `True`; refuses unknown flags."""
    known, out = _fields(args_class), []
    for i, arg in enumerate(argv):
        if arg in ("-h", "--help"):
            return ["--help"]
        if not arg.startswith("--"):
            previous = out[-1].removeprefix("--") if out else ""
            out.append(arg.capitalize() if known.get(previous) is bool else arg)
            continue
        name, equals, value = arg[2:].partition("=")
        name = name.replace("-", "_")
        if name not in known:
            raise _unknown(f"--{name}", [f"--{k}" for k in known], "unknown flag ")
        out.append(f"--{name}")
        if equals:
            out.append(value.capitalize() if known[name] is bool else value)
        elif known[name] is bool and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            out.append("True")
    return out


def _yaml_to_argv(args_class: type, path: str) -> list[str]:
    try:
        config = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config {path}: expected `flag: value` lines")
    known, argv = _fields(args_class), []
    for name, value in config.items():
        if name not in known:
            raise _unknown(str(name), list(known), f"--config {path}: unknown key ")
        if isinstance(value, dict):
            raise ValueError(f"--config {path}: {name} must be a plain value or a list")
        values = value if isinstance(value, list) else [value]
        if not isinstance(value, list) and _is_list(known[name]) and value is not None:
            raise ValueError(f"--config {path}: {name} must be a list")
        argv += [f"--{name}", *map(str, values)] if isinstance(value, list) else [f"--{name}={value}"]
    return argv


def _is_list(hint: type) -> bool:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return any(typing.get_origin(option) in (list, tuple) for option in options)


def _unframe(console: str) -> str:
    """The message inside tyro's box, on one line."""
    lines = [line.strip("│╭╮╰╯─ ") for line in console.splitlines()]
    message = []
    for line in lines[1:]:
        if not line:  # the rule that separates the message from hints
            break
        message.append(line)
    text = " ".join(message) or " ".join(filter(None, lines))
    return re.sub(r"^Error parsing \w+: ", "", text)  # from __post_init__, which names the flag itself
