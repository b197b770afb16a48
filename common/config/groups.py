"""The flags that scripts share, in groups: flat dataclasses, each of which inherits `BaseArgs` and nothing else.

A script's `Args` inherits some groups, overrides defaults and adds its own flags; `parse.py` reads them. Bounds
stand in the types (`flags.py`): `__post_init__` refuses what does not go together, and `check_ranks` what the
number of ranks does not allow. Groups that one module reads stand there: `CorrectionArgs`, `RewardArgs`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Interval

from common.config.flags import (
    BaseArgs,
    BelowOne,
    Fraction,
    MayChange,
    NotNegative,
    OpenFraction,
    Positive,
    PositiveFraction,
    eval_sets_of,
    require_read_by,
)


@dataclass
class TrainArgs(BaseArgs):
    """Flags of every script that trains."""

    TINY_DEFAULTS: ClassVar[dict] = dict(lr=3e-3, warmup_steps=10, max_steps=100, eval_every=20)
    """defaults for the built-in model and task, which take other rates than real ones; groups and scripts add to it"""
    eval_dataset: tuple[str, ...] | None = None
    """held-out data, as `dataset`; each of several is a set of its own: `a.jsonl hard=b.jsonl` gives eval_loss, that is
    of all rows, eval_loss/a and eval_loss/hard. Default: the split `eval_split` of `dataset`, or rows set aside where
    it has no such split"""
    eval_split: str = "test"
    """held-out split of `eval_dataset`, or of `dataset`"""
    eval_size: Positive[int] = 256
    """most rows to evaluate on, of each of several sets; also how many are set aside from the training rows when there
    is no held-out split"""
    max_steps: MayChange[Positive[int] | None] = None
    """optimizer (sft) or rollout (RL) steps; default: as many as `epochs` gives"""
    epochs: MayChange[Positive[float]] = 1.0
    """passes over the training data, when max_steps is not given"""
    lr: Positive[float] = 1e-5
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after warmup: stay, or decay to `min_lr_ratio` of the peak by the end"""
    warmup_steps: NotNegative[int] = 0
    """steps of linear warmup from 0"""
    min_lr_ratio: Fraction = 0.0
    """learning rate at the end of a linear or cosine schedule, as a fraction of the peak"""
    adam_beta1: BelowOne = 0.9
    """AdamW beta1"""
    adam_beta2: BelowOne = 0.95
    """AdamW beta2"""
    weight_decay: NotNegative[float] = 0.0
    """AdamW weight decay, on matrices only (not on norms and biases)"""
    max_grad_norm: Positive[float] = 1.0
    """gradients are scaled down to this global norm; 1e9: they stay as they are"""
    activation_checkpointing: MayChange[bool | None] = None
    """recompute block activations in backward: far less memory, about a third more compute; default: on CUDA"""
    offload: MayChange[Literal["none", "optimizer", "all"]] = "none"
    """what lives in the host's memory: optimizer: Adam's moments, which come to the GPU parameter by parameter within
    its step; all: weights and gradients too, and the step is made on the host. Never changes the gradient"""
    save_every: MayChange[Positive[int]] = 100
    """steps between checkpoints (one is always written at the end)"""
    eval_every: MayChange[NotNegative[int]] = 100
    """steps between evaluations (one is always made at the end); 0: never"""
    keep_last: MayChange[Positive[int]] = 2
    """checkpoints to keep"""
    keep_best: MayChange[str | None] = None
    """metric of the evaluations, e.g. eval/pass_at_1 or eval_loss/hard: best/ is the model where it was best so far, in
    the form of hf/; the lowest is best if the metric's name ends with loss or perplexity, else the highest"""
    early_stop: MayChange[NotNegative[int]] = 0
    """the run is done after so many evaluations without gain in `keep_best`; 0: never before its last step"""
    log: MayChange[tuple[Literal["wandb", "tensorboard"], ...]] = ()
    """more places for metrics, beside metrics.jsonl: wandb (WANDB_MODE=offline works), tensorboard"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.eval_dataset, str):  # as one may write it in Python
            self.eval_dataset = (self.eval_dataset,)
        if self.eval_dataset is not None:
            eval_sets_of(self.eval_dataset)
        if self.keep_best is not None and not self.eval_every:
            raise ValueError(f"--keep_best {self.keep_best} needs evaluations: --eval_every above 0")
        if self.early_stop and self.keep_best is None:
            raise ValueError(f"--early_stop {self.early_stop} needs --keep_best, the metric that is to gain")


@dataclass
class SamplingArgs(BaseArgs):
    """Flags of every script that samples completions and rewards them."""

    prompt_template: str | None = None
    """text of the prompt with the data's columns in it, e.g. `{problem} Put the answer in \\boxed{{}}.`; default: the
    column prompt, or question"""
    overlong_prompts: Literal["error", "drop"] = "error"
    """what to do with a prompt that leaves no room for max_new_tokens in the context or in pack_tokens"""
    samples_per_prompt: Positive[int] = 8
    """completions sampled for each prompt (G)"""
    max_new_tokens: Positive[int] | None = None
    """longest completion, in tokens; default: 256, or half of what one pack holds if that is less"""
    temperature: Positive[float] = 1.0
    """sampling temperature; the trainer divides its logits by it too"""
    environment: str | None = None
    """what answers the model between its turns: calculator, guess_number, sliding_puzzle, or your own as
    `path/to/file.py:Class`; its rewards are `--reward environment`"""
    max_turns: Positive[int] = 8
    """with --environment: how often the model may speak; max_new_tokens bounds all turns of a completion together"""
    environment_timeout: MayChange[Positive[float]] = 10.0
    """seconds that an environment of your own may take for one answer; one that takes longer costs its episode"""
    reward: tuple[str, ...] = ("exact_match",)
    """exact_match, gsm8k, math, ... (docs/rewards.md has them all); your own as `path/to/file.py:function`; reward
    models as `model:PATH`; by_row: what the column `reward` names; several are added up"""
    reward_weights: tuple[float, ...] = ()
    """weight of each reward; default: all 1"""
    max_reward_errors: MayChange[Fraction] = 0.1
    """stop when more than this fraction of a step's rewards could not be computed"""
    reward_timeout: MayChange[Positive[float]] = 10.0
    """seconds that math, code and your own rewards may take for one completion; those of a group for as many"""
    reward_workers: MayChange[Positive[int]] = 4
    """processes of each rank that compute them"""
    unsafe_code_execution: bool = False
    """code: run programs also on machines that cannot confine them (no Landlock, no seccomp)"""
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """what generates: auto is vllm where it is installed, else the slower transformers engine"""
    tensor_parallel_size: Positive[int] = 1
    """ranks that share one vLLM engine; must divide the number of ranks"""
    gpu_memory_utilization: OpenFraction | None = None
    """fraction of each GPU's memory for vLLM's weights and KV cache, given back while training; default: 0.4 on ranks
    that train too, 0.9 on others"""
    batch_invariant: bool = False
    """CUDA: kernels of vLLM whose results do not depend on what else is in the batch, so that completions do not depend
    on the number of ranks; slower, and what it sets for matrix products holds for the trainer too"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens is None:
            self.max_new_tokens = min(256, max(1, self.room // 2))
        if not self.reward and type(self).reward:  # a script whose default is none does without
            raise ValueError("--reward needs at least one name")
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            raise ValueError(f"--reward_weights has {len(self.reward_weights)} values for {len(self.reward)} rewards")
        if ("environment" in self.reward) != (self.environment is not None):
            raise ValueError("--environment and --reward environment, what it gives, belong together")
        self.require_read("prompt_template", self.environment is None, "the --environment says what is asked")
        for flag in ("max_turns", "environment_timeout"):
            self.require_read(flag, self.environment is not None, "there is no --environment")
        self.require_read("batch_invariant", self.engine != "transformers", "--engine is transformers")
        if self.tensor_parallel_size > 1 and self.engine == "transformers":
            raise ValueError("--tensor_parallel_size needs --engine vllm")
        if self.max_new_tokens >= self.room:
            raise ValueError(f"--max_new_tokens {self.max_new_tokens} leaves no prompt in {self.room_flags}")

    def check_ranks(self, ranks: int) -> None:
        if (generators := self.ranks_that_generate(ranks)) % (size := self.tensor_parallel_size):
            raise ValueError(f"--tensor_parallel_size {size} does not divide the {generators} ranks that generate")
        super().check_ranks(ranks)

    def ranks_that_generate(self, ranks: int) -> int:
        """Of the launch's."""
        return ranks


@dataclass
class OnlineArgs(BaseArgs):
    """Flags of every script that trains on what it samples. Stands before `SamplingArgs` among a script's bases: it
    says which of the ranks generate."""

    TINY_DEFAULTS: ClassVar[dict] = dict(
        reward="characters", prompts_per_step=16, samples_per_prompt=16, max_new_tokens=5, max_steps=60
    )
    prompts_per_step: Positive[int] = 64
    """prompts per rollout, over all ranks"""
    minibatches: Positive[int] = 1
    """optimizer steps per pass over a rollout; the prompts of a rollout are divided among them"""
    epochs_per_rollout: Positive[int] = 1
    """passes over each rollout"""
    missing_eos_penalty: NotNegative[float] = 0.0
    """subtracted from the reward, after its scale and clip, of a completion that max_new_tokens cut off"""
    rollout_ranks: MayChange[NotNegative[int]] = 0
    """the last so many ranks only generate, the others only train, both at the same time; 0: every rank does both in
    turn"""
    max_staleness: NotNegative[int] = 1
    """with --rollout_ranks or --oversample: how many steps old the weights may be that sampled a token that a step
    learns from; 0: the two kinds of ranks take turns, more than 1: more prompts in work"""
    oversample: Annotated[float, Interval(ge=1, le=2)] = 1.0
    """so many times the prompts of a step are in work, and it takes the oldest of those that are complete; the others
    go on into the next one, by its weights; 1: it waits for the oldest"""
    partial_rollouts: MayChange[bool] = True
    """with --rollout_ranks: completions in work go on with new weights when there are any; false: they are ended with
    the old ones first"""
    max_logprob_difference: Positive[float] | None = None
    """stop if engine and trainer differ by more nats on one of a thousand sampled tokens, or by a tenth of it on
    average; default: 1e-3 in float32, 0.5 in bfloat16; 1e9: go on whatever they do"""
    check_every: MayChange[Positive[int]] = 20
    """steps between these comparisons; the first rollout of a run is always compared"""
    log_every: MayChange[Positive[int]] = 10
    """steps between tables of samples on the console and in samples.jsonl"""

    def __post_init__(self) -> None:
        super().__post_init__()
        mixed = self.rollout_ranks > 0 or self.oversample > 1
        self.require_read("max_staleness", mixed, "--rollout_ranks is 0 and --oversample 1")
        self.require_read("partial_rollouts", self.rollout_ranks > 0, "--rollout_ranks is 0")
        if self.oversample > 1 and self.max_staleness < (least := 1 + (self.rollout_ranks > 0)):
            why = "or rollout ranks have nothing to do while a step trains" if least == 2 else "for what a step leaves"
            raise ValueError(f"--oversample {self.oversample:g} needs --max_staleness {least} or more, {why}")
        self.require_multiple("prompts_per_step", self.minibatches, "--minibatches")

    def check_ranks(self, ranks: int) -> None:
        if self.rollout_ranks >= ranks:
            raise ValueError(
                f"--rollout_ranks {self.rollout_ranks}: of {ranks} ranks 0 to {ranks - 1} may only generate"
            )
        trainers = self.ranks_that_train(ranks)
        self.require_multiple("prompts_per_step", trainers, "the number of ranks that train")
        self.require_multiple(
            "prompts_per_step", trainers * self.minibatches, "the ranks that train times --minibatches"
        )
        super().check_ranks(ranks)

    @property
    def updates_per_rollout(self) -> int:
        return self.minibatches * self.epochs_per_rollout

    def ranks_that_train(self, ranks: int) -> int:
        return ranks - self.rollout_ranks

    def ranks_that_generate(self, ranks: int) -> int:
        return self.rollout_ranks or ranks

    def may_change(self, then: dict) -> set[str]:
        read_then = then.get("rollout_ranks", 0) > 0 or then.get("oversample", 1) > 1
        both_read_it = read_then and (self.rollout_ranks > 0 or self.oversample > 1)
        return super().may_change(then) | (set() if both_read_it else {"max_staleness"})


@dataclass
class PreferenceArgs(BaseArgs):
    """Flags of the scripts that learn from pairs."""

    TINY_DEFAULTS: ClassVar[dict] = dict(beta=1.0, sft_weight=1.0)
    loss: tuple[str, ...] = ("sigmoid",)
    """objectives (docs/dpo.md has the table); several are added up"""
    loss_weights: tuple[NotNegative[float], ...] = ()
    """weight of each objective; default: all 1"""
    beta: Positive[float] = 0.1
    """scale of the implicit rewards: how strongly the policy is held to the reference"""
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0
    """probability that a preference is the wrong way round (sigmoid, robust, exo_pair)"""
    length_normalize: bool = True
    """ipo compares log-ratios per token; false: summed, as in the paper"""
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """what holds the policy to the reference (sigmoid, robust, hinge, exo_pair, discopop)"""
    f_alpha: float = 0.5
    """order of the alpha divergence: 1 is reverse_kl, 0 is forward_kl"""
    simpo_gamma: float = 0.5
    """margin that simpo asks for, in units of its reward"""
    discopop_tau: PositiveFraction = 0.05
    """temperature at which discopop goes from the logistic to the exponential loss; above 1 it would have no bound"""
    sft_weight: NotNegative[float] = 0.0
    """weight of the chosen completion's negative log-likelihood, added to the objective (RPO)"""
    sft_length_normalize: bool = True
    """that likelihood is per token; false: summed over the completion"""

    def __post_init__(self) -> None:
        super().__post_init__()
        from common.objectives.preference import READS

        for name in self.loss:
            if name == "kto":
                raise ValueError("--loss kto: it is a script of its own, kto.py")
            if name not in READS:
                raise ValueError(f"--loss {name}: unknown; there are {', '.join(READS)}")
        if not self.loss or len(set(self.loss)) != len(self.loss):
            raise ValueError(f"--loss needs at least one name, and each once; here: {' '.join(self.loss) or None}")
        if self.loss_weights and len(self.loss_weights) != len(self.loss):
            raise ValueError(f"--loss_weights has {len(self.loss_weights)} values for {len(self.loss)} losses")
        require_read_by(self, READS, self.loss)
        self.require_read("f_alpha", self.f_divergence == "alpha", f"--f_divergence is {self.f_divergence}")
        self.require_read("sft_length_normalize", self.sft_weight > 0, "--sft_weight is 0")
        if "exo_pair" in self.loss and not self.label_smoothing:
            raise ValueError("--loss exo_pair needs --label_smoothing above 0 (its authors take 0.001)")
