"""The flags that scripts share, as flat dataclasses.

A script's `Args` inherits one of them, overrides defaults and adds its own flags. `common/cli.py` reads them.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from common import distributed

MAX_FLOAT = 3e38  # tensors are float32


@dataclass
class BaseArgs:
    """Flags of every script. A path may be absolute or relative to where the command runs."""

    # Flags of the scripts that train, and of those that play. Without annotation: else they would be fields here.
    activation_checkpointing = compile = False
    environment = None

    model: str = "tiny"
    """Hugging Face id or folder of the starting model; `tiny` is a built-in randomly initialised 1M-parameter Qwen3"""
    dataset: str = "arithmetic"
    """Hugging Face id, a .jsonl/.json/.parquet/.csv file, a folder of them, or a built-in task: `arithmetic`,
    `calculator`, `guess_number`, `sliding_puzzle`"""
    dataset_split: str = "train"
    """split to train on (files without splits are one split, `train`)"""
    dataset_config: str | None = None
    """configuration of a Hugging Face dataset that has several; default: `main`, if that is one of them"""
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    """chat: prompts become user turns of the chat template; plain: text goes in as it is; auto: chat for message lists
    and `question` columns (where the tokenizer has a template), plain for other strings"""
    system_prompt: str | None = None
    """system turn put before every prompt in chat format"""
    output_dir: str = "runs/run"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    pack_tokens: int = 8192
    """tokens per forward pass on one rank: the memory knob. It never changes the gradient"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """compute dtype; master weights, gradients' reduction and the loss are always float32. auto: bfloat16 on CUDA"""
    seed: int = 0
    """seeds data order and sampling"""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on with what an earlier run left in output_dir (its newest checkpoint), if it did; must: fail if it did
    not; never: start over and delete what is there"""

    def __post_init__(self) -> None:
        self.require_positive("pack_tokens")

    def require_positive(self, *flags: str) -> None:
        for flag in flags:
            if not getattr(self, flag) > 0:
                raise ValueError(f"--{flag} {getattr(self, flag)} must be greater than 0")

    def require_not_negative(self, *flags: str) -> None:
        for flag in flags:
            if not 0 <= getattr(self, flag) <= MAX_FLOAT:
                raise ValueError(f"--{flag} {getattr(self, flag)} must be a finite number and not negative")

    def require_finite(self, *flags: str) -> None:
        for flag in flags:
            if not abs(getattr(self, flag)) <= MAX_FLOAT:
                raise ValueError(f"--{flag} {getattr(self, flag)} must be a finite number")

    def require_multiple(self, flag: str, divisor: int, of: str) -> None:
        """A global size must split evenly: over the ranks, over the minibatches."""
        if getattr(self, flag) % divisor:
            raise ValueError(f"--{flag} {getattr(self, flag)} is not a multiple of {of} ({divisor})")

    def require_read(self, flag: str, unless: bool, why: str) -> None:
        """A flag that was set, but that nothing would read `unless` something else is said."""
        if not unless and getattr(self, flag) != type(self).__dataclass_fields__[flag].default:
            raise ValueError(f"--{flag} {getattr(self, flag)} would not be read: {why}")

    def to_dict(self) -> dict:
        """Plain YAML types, in field order."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


@dataclass
class RunArgs(BaseArgs):
    """Flags of every script that trains."""

    eval_dataset: str | None = None
    """held-out data; default: the split `eval_split` of `dataset`, or rows set aside where it has no such split"""
    eval_split: str = "test"
    """held-out split of `eval_dataset`, or of `dataset`"""
    eval_size: int = 256
    """most rows to evaluate on; also how many are set aside from the training rows when there is no held-out split"""
    max_steps: int | None = None
    """optimizer (sft) or rollout (RL) steps; default: as many as `epochs` gives"""
    epochs: float = 1.0
    """passes over the training data, when max_steps is not given"""
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
    activation_checkpointing: bool = False
    """recompute block activations in backward: less memory, about a third more compute"""
    compile: bool = False
    """torch.compile every transformer block"""
    save_every: int = 100
    """steps between checkpoints (one is always written at the end)"""
    eval_every: int = 100
    """steps between evaluations (one is always made at the end); 0: never"""
    keep_last: int = 2
    """checkpoints to keep"""
    log: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """more places for metrics, beside metrics.jsonl: wandb (WANDB_MODE=offline works), tensorboard"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("eval_size", "epochs", "lr", "max_grad_norm", "save_every", "keep_last")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"--max_steps {self.max_steps} must be at least 1")
        self.require_finite("epochs", "lr", "weight_decay", "min_lr_ratio")
        self.require_not_negative("warmup_steps", "weight_decay", "eval_every", "min_lr_ratio")
        if self.min_lr_ratio > 1:
            raise ValueError(f"--min_lr_ratio {self.min_lr_ratio} must be at most 1")
        for flag in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, flag) < 1:
                raise ValueError(f"--{flag} {getattr(self, flag)} must be in [0, 1)")


@dataclass
class SamplingArgs(BaseArgs):
    """Flags of every script that samples completions and rewards them."""

    prompt_template: str | None = None
    """text of the prompt with the data's columns in it, e.g. `{problem} Put the answer in \\boxed{{}}.`; default: the
    column prompt, or question"""
    samples_per_prompt: int = 8
    """completions sampled for each prompt (G)"""
    max_new_tokens: int = 256
    """longest completion, in tokens"""
    overlong_prompts: Literal["error", "drop"] = "error"
    """what to do with a prompt that leaves no room for max_new_tokens in the context or in pack_tokens"""
    temperature: float = 1.0
    """sampling temperature; the trainer divides its logits by it too"""
    reward: tuple[str, ...] = ("exact_match",)
    """exact_match, gsm8k, math, ... (docs/rewards.md has them all); your own as `path/to/file.py:function`; a reward
    model as `model:PATH`; by_row: what the column `reward` names; several are added up"""
    reward_weights: tuple[float, ...] = ()
    """weight of each reward; default: all 1"""
    max_reward_errors: float = 0.1
    """stop when more than this fraction of a step's rewards could not be computed"""
    reward_timeout: float = 10.0
    """seconds that math, code and your own rewards may take for one completion"""
    reward_workers: int = 4
    """processes of each rank that compute them"""
    unsafe_code_execution: bool = False
    """code: run programs also on machines that cannot confine them (no Landlock, no seccomp)"""
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """what generates: auto is vllm where it is installed, else the slower transformers engine"""
    tensor_parallel_size: int = 1
    """ranks that share one vLLM engine; must divide the number of ranks"""
    gpu_memory_utilization: float = 0.4
    """fraction of each GPU's memory for vLLM's weights and KV cache, given back while training (not on ranks that only
    generate: 0.9 is right there)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("samples_per_prompt", "max_new_tokens", "temperature", "tensor_parallel_size")
        self.require_positive("reward_timeout", "reward_workers")
        self.require_finite("temperature", "reward_timeout")
        if not self.reward:
            raise ValueError("--reward needs at least one name")
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            raise ValueError(f"--reward_weights has {len(self.reward_weights)} values for {len(self.reward)} rewards")
        if not all(map(math.isfinite, self.reward_weights)):
            raise ValueError(f"--reward_weights {' '.join(map(str, self.reward_weights))} must be finite numbers")
        if not 0 <= self.max_reward_errors <= 1:
            raise ValueError(f"--max_reward_errors {self.max_reward_errors} must be in [0, 1]")
        if ("environment" in self.reward) != (self.environment is not None):
            raise ValueError("--environment and --reward environment, what it gives, belong together")
        self.require_read("prompt_template", self.environment is None, "the --environment says what is asked")
        generators = self.ranks()[1]
        if generators % (size := self.tensor_parallel_size):
            raise ValueError(f"--tensor_parallel_size {size} does not divide the {generators} ranks that generate")
        if self.tensor_parallel_size > 1 and self.engine == "transformers":
            raise ValueError("--tensor_parallel_size needs --engine vllm")
        if not 0 < self.gpu_memory_utilization < 1:
            raise ValueError(f"--gpu_memory_utilization {self.gpu_memory_utilization} must be between 0 and 1")
        if self.max_new_tokens >= self.pack_tokens:
            raise ValueError(
                f"--max_new_tokens {self.max_new_tokens} leaves no prompt in --pack_tokens {self.pack_tokens}"
            )

    def ranks(self) -> tuple[int, int]:
        """How many ranks train and how many generate, before `distributed.setup`: here each does both."""
        return distributed.world_size(), distributed.world_size()


@dataclass
class EnvironmentArgs(SamplingArgs):
    """Flags of the scripts whose completions may have several turns."""

    environment: str | None = None
    """what answers the model between its turns: calculator, guess_number, sliding_puzzle, or your own as
    `path/to/file.py:Class`; its rewards are `--reward environment`"""
    max_turns: int = 8
    """with --environment: how often the model may speak; max_new_tokens bounds all turns of a completion together"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("max_turns")
        self.require_read("max_turns", self.environment is not None, "there is no --environment")


@dataclass
class RolloutArgs(RunArgs, SamplingArgs):
    """Flags of every script that samples from the model it trains."""

    prompts_per_step: int = 64
    """prompts per rollout, over all ranks"""
    log_every: int = 10
    """steps between tables of samples on the console and in samples.jsonl"""
    max_logprob_difference: float | None = None
    """stop if engine and trainer differ by more on any token of the first rollout; default: 1e-3 in float32, 1 in
    bfloat16"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("prompts_per_step", "log_every")
        if self.max_logprob_difference is not None:
            self.require_positive("max_logprob_difference")
        self.require_multiple("prompts_per_step", self.ranks()[0], "the number of ranks that train")


@dataclass
class OnlineArgs(RolloutArgs):
    """Flags of every script that learns from what it samples."""

    minibatches: int = 1
    """optimizer steps per pass over a rollout; the prompts of a rollout are divided among them"""
    epochs_per_rollout: int = 1
    """passes over each rollout"""
    missing_eos_penalty: float = 0.0
    """subtracted from the reward, scaled and clipped, of a completion that max_new_tokens cut off"""
    rollout_ranks: int = 0
    """the last so many ranks only generate, the others only train, both at the same time; 0: every rank does both in
    turn"""
    max_staleness: int = 1
    """with --rollout_ranks: how many steps old the weights may be that sampled what a step learns from; 0: the two
    kinds of ranks take turns, more than 1: a longer queue"""

    def __post_init__(self) -> None:
        ranks = distributed.world_size()
        if not 0 <= self.rollout_ranks < ranks:
            raise ValueError(
                f"--rollout_ranks {self.rollout_ranks}: of {ranks} ranks 0 to {ranks - 1} may only generate"
            )
        self.require_not_negative("max_staleness")
        self.require_read("max_staleness", self.rollout_ranks > 0, "--rollout_ranks is 0")
        super().__post_init__()
        self.require_positive("minibatches", "epochs_per_rollout")
        self.require_not_negative("missing_eos_penalty")
        self.require_multiple("prompts_per_step", self.minibatches, "--minibatches")
        trainers = self.ranks()[0]
        self.require_multiple(
            "prompts_per_step", trainers * self.minibatches, "the ranks that train times --minibatches"
        )

    def ranks(self) -> tuple[int, int]:
        trainers = distributed.world_size() - self.rollout_ranks
        return trainers, self.rollout_ranks or trainers
