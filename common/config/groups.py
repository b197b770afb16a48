"""Groups of flags that the scripts share.

A group, such as `OptimArgs`, is a pydantic dataclass and a section of --help. A union joins groups:
`BaseArgs` for every script, `TrainArgs` for every script that trains, `OfflineArgs` for policies
that train on data alone (online.py has those of scripts that sample). A script's `Args` inherits
the unions and groups that it needs, in any order, overrides defaults and adds flags of its own. The
type of a flag says which values are valid (flags.py). A rule between flags is a validator of their
group or union; pydantic runs the validators of all bases. Rules of one script are in its
`__post_init__`.

A group that only some scripts have stands beside the code that reads it (`CorrectionArgs` in
objectives/importance.py), or here if several packages read it (`ImageArgs`). Functions take just
the group, or the settings, that they read; the script hands it to them."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from common.config.flags import (
    MAY_CHANGE,
    MODEL_KINDS,
    STRICT,
    BelowOne,
    Gpus,
    Limit,
    MayChange,
    NamesCode,
    NamesModels,
    Needs,
    NotNegative,
    Positive,
    Several,
    Tracker,
    best_of,
    better_end,
    check_needs,
    eval_sets_of,
    flags_of_adapter,
    marks_of,
    pairs_of,
    public,
    weights_of,
)

CHAT = Needs(prompt_format=("auto", "chat"))
LORA = Needs(lora_rank=True, adapter=True)


@dataclass(config=STRICT)
class ModelArgs:
    """Model and compute"""

    model: NamesModels[str] = "tiny"
    """start from this model: Hugging Face id, id@revision, or folder; tiny: a built-in Qwen3 with
    1M random parameters; tiny-sft: the same after supervised fine-tuning on the task arithmetic;
    tiny-images: a built-in Idefics3 of images and text with 1M random parameters"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """run forward and backward passes in this data type; master weights, gradient reduction and the
    loss are always float32. auto: bfloat16 on CUDA, float32 elsewhere. float16 has more digits but
    a smaller range than bfloat16: gradients are scaled, and a step whose gradients overflow is
    skipped"""
    compile: MayChange[bool | None] = None
    """compile every transformer block and the log-probs with torch.compile: faster steps, but the
    first ones take longer; default: on CUDA"""
    pack_tokens: MayChange[Positive[int]] = 8192
    """compute at most this many tokens per forward pass on one rank. This bounds memory and the
    length of a sequence, also in the engine, and does not change the gradient; a small value lowers
    the default of max_length"""
    context_ranks: MayChange[Positive[int]] = 1
    """divide each pack among this many neighbouring ranks: a sequence may have pack_tokens x
    context_ranks tokens"""

    @property
    def pack_limit(self) -> Limit:
        """The most tokens of a pack, and so of sequences that must be in one pack."""
        times = f" x --context_ranks {self.context_ranks}" if self.context_ranks > 1 else ""
        flag = f"--pack_tokens {self.pack_tokens}{times}"
        return Limit(self.pack_tokens * self.context_ranks, flag)


@dataclass(config=STRICT)
class PrefixArgs:
    """Shared prefixes"""

    share_prefix: MayChange[NotNegative[int]] = 16
    """compute the prefix that the samples of a group share, such as their prompt, only once if it
    has at least this many tokens; never changes the gradient; 0: off (docs/memory.md)"""


# Flags of features that cannot read images.
TEXT_FLAGS = ("environment", "agent", "tools", "shots", "reward_model", "perplexity_model")


@dataclass(config=STRICT)
class ImageArgs:
    """Images (extras/images/README.md)"""

    vision: Literal["frozen", "train"] | None = None
    """read the images in rows, with a model that has a vision tower. frozen: do not train the
    tower; train: train it too; default: read text only, and train the language model"""
    max_pixels: Positive[int] | None = None
    """scale a larger image down to this many pixels, so that it has fewer tokens; default: the
    limit of the model's image processor"""

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        if self.vision is None:
            return self
        flags = vars(self)  # all flags of the script, which may lack some of these
        if self.vision == "train" and flags.get("lora_rank"):
            raise ValueError("--vision train: adapters are for the language model; use frozen")
        if flags.get("context_ranks", 1) > 1:
            raise ValueError(f"--vision {self.vision} needs --context_ranks 1")
        models = [name for name in flags.get("reward", ()) if name.startswith(MODEL_KINDS)]
        unread = [f"reward {name}" for name in models] + [x for x in TEXT_FLAGS if flags.get(x)]
        if unread:
            raise ValueError(f"--vision {self.vision}: --{unread[0]} does not support images")
        return self


NO_IMAGES = ImageArgs()


@dataclass(config=STRICT)
class DataArgs:
    """Data and prompt format"""

    dataset: Several[str] = ("arithmetic",)
    """read this data: Hugging Face id, file (.jsonl or .json, also .gz or .zst; .parquet, .csv,
    .tsv), glob ('data/*.jsonl'), folder of files, or built-in task (arithmetic, calculator,
    products, squares). Several are joined, or sampled by weight: a.jsonl:0.6 b/c:0.4"""
    dataset_split: str = "train"
    """train on this split; a file without splits is the split train"""
    dataset_config: str | None = None
    """read this configuration of a Hugging Face data set, or of a folder with a README.md that
    lists some; default: the one named default or main, if there are several; *: all (hub only)"""
    columns: Several[str] = ()
    """rename columns of training and held-out rows, as new=old: prompt=problem
    answer=reward_model.ground_truth"""
    on_bad_row: Literal["error", "skip"] = "error"
    """handle rows that are malformed, empty, too long (where this is an error), or unusable by a
    prompt template, environment or reward. error: end the run; skip: leave them out, and report
    their number and the reasons"""
    prompt_format: Literal["auto", "chat", "plain"] = "auto"
    """write prompts in this format. chat: as a turn of the user, by the chat template; plain: the
    text as it is; auto: chat for chat models, lists of messages and `question` columns, if there is
    a template; else plain"""
    system_prompt: Annotated[str | None, Needs(agent=None)] = None
    """add this system turn to conversations without one; needs chat format"""
    chat_template: Annotated[str | None, CHAT] = None
    """use the chat template in this Jinja file in place of the tokenizer's, and export it"""
    template_kwargs: Annotated[Several[str], CHAT] = ()
    """pass these variables to the chat template, as name=value: enable_thinking=false"""
    special_text: Literal["token", "text"] = "token"
    """read a special token, such as <|im_end|>, that is written out in a message or a prompt.
    token: as this token (one line reports the first); text: as plain text"""

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        weights_of(self.dataset)
        pairs_of("columns", self.columns)
        pairs_of("template_kwargs", self.template_kwargs)
        return self

    @property
    def dataset_flag(self) -> str:
        """The flag with its values, for messages."""
        return f"--dataset {' '.join(self.dataset)}"


@dataclass(config=STRICT)
class RunArgs:
    """Ranks, output and resume"""

    shard_ranks: MayChange[Positive[int] | None] = None
    """share one copy of each model among this many neighbouring ranks (FSDP); gradients are
    averaged over the copies; default: the ranks of a machine, or all ranks if machines differ"""
    output_dir: MayChange[str] = ""
    """write all files of the run to this folder: args.yaml, metrics.jsonl, samples.jsonl,
    curves.png, checkpoints/, hf/; default: runs/ and the name of the script"""
    seed: int = 0
    """draw data order and samples from this seed"""
    resume: MayChange[Literal["auto", "never", "must"]] = "auto"
    """resume an earlier run in output_dir. auto: from its newest checkpoint, if there is one; must:
    fail if there is none; never: move it to `<output_dir>.old-1` and start over"""

    @model_validator(mode="after")
    def _check_output_dir(self) -> Self:
        script = getattr(sys.modules.get(type(self).__module__), "__file__", None) or "run"
        object.__setattr__(self, "output_dir", self.output_dir or f"runs/{Path(script).stem}")
        return self


@dataclass(config=STRICT)
class HeldOutArgs:
    """Held-out data"""

    eval_dataset: Several[str] | None = None
    """evaluate on this held-out data, in the forms of `dataset`; several are also evaluated one by
    one: a.jsonl hard=b.jsonl gives eval_loss (all rows), eval_loss/a and eval_loss/hard; default:
    the split `eval_split` of `dataset`, or training rows set aside if there is no such split"""
    eval_split: str = "test"
    """take held-out rows from this split of `eval_dataset`, or of `dataset`"""
    eval_size: Positive[int] | None = None
    """evaluate on at most this many rows of each held-out data set, or set aside this many training
    rows if there is none; default: 256, and of training rows at most a tenth"""

    @model_validator(mode="after")
    def _check_held_out(self) -> Self:
        if self.eval_dataset is not None:
            eval_sets_of(self.eval_dataset)
        return self


@dataclass(config=STRICT)
class OptimArgs:
    """Optimization"""

    max_steps: MayChange[Positive[int] | None] = None
    """train for this many steps, each of one batch or rollout; default: computed from `epochs`"""
    epochs: MayChange[Positive[float]] = 1.0
    """pass over the training data this many times; no effect with max_steps"""
    lr: Positive[float] = 1e-5
    """train with this peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """keep the learning rate constant after warmup, or decay it to 0 (linear, cosine)"""
    warmup_steps: NotNegative[int] = 0
    """raise the learning rate linearly from 0 over this many steps"""
    adam_beta2: BelowOne = 0.95
    """average AdamW's second moment with this decay rate (beta2)"""
    weight_decay: NotNegative[float] = 0.0
    """apply this weight decay of AdamW to matrices only (not to norms and biases)"""
    max_grad_norm: Positive[float] = 1.0
    """scale a longer gradient down to this global norm; 1e9: off"""
    activation_checkpointing: MayChange[bool | None] = None
    """recompute activations in the backward pass: far less memory, a third more compute; default:
    on CUDA, in the blocks whose activations would not fit, as extras/plan predicts"""
    offload: MayChange[Literal["none", "optimizer", "all"]] = "none"
    """keep state in host memory. optimizer: Adam moments, copied to the GPU one parameter at a
    time; all: weights and gradients too, with the step on the host. Never changes the gradient"""


@dataclass(config=STRICT)
class CheckpointArgs:
    """Evaluations, checkpoints and logs"""

    save_every: MayChange[Positive[int]] = 100
    """save a checkpoint every N steps, and after the last one"""
    save_minutes: MayChange[NotNegative[float]] = 30.0
    """also save after a step if the last checkpoint is N minutes old, by rank 0's clock; 0: off"""
    eval_every: MayChange[NotNegative[int]] = 100
    """evaluate every N steps, and after the last one; 0: off"""
    keep_last: MayChange[Positive[int]] = 2
    """keep this many of the newest checkpoints"""
    keep_best: Annotated[MayChange[str | None], Needs(eval_every=True)] = None
    """keep the model with the best value of this evaluation metric in best/ (same form as hf/),
    e.g. eval/solved or eval_loss/hard. The lowest loss, perplexity, kl, entropy, divergence or
    error is best, and the highest reward, accuracy and the like; for another metric say which:
    eval_x:lowest or eval_x:highest"""
    trace_every: Annotated[MayChange[NotNegative[int]], Needs(agent=None)] = 10
    """trace the update token by token every N steps, and at the first and the last (extras/trace);
    0: off"""
    dry_run: MayChange[Gpus | bool] = False
    """check flags, all data and the rewards of ten rows, print the first row and the predicted
    memory and time, and end without loading weights or writing files; 8xH100: for 8 of these GPUs,
    on any machine (extras/plan/README.md)"""
    log_to: MayChange[Several[Tracker]] = ()
    """log metrics to these as well as to metrics.jsonl (extras/trackers/README.md):
    path/to/file.py:Class, wandb, tensorboard"""

    @model_validator(mode="after")
    def _check_keep_best(self) -> Self:
        name, end = best_of(self.keep_best or "loss")
        parts = name.split("/")  # the last parts may be the name of a held-out set
        kinds = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        if end is None and not any(map(better_end, kinds)):
            advice = f"add the better end, {name}:highest or {name}:lowest"
            raise ValueError(f"--keep_best {name}: the name does not tell which is best; {advice}")
        return self

    @property
    def planned_ranks(self) -> int | None:
        """Number of GPUs of `--dry_run 8xH100`; without it, None."""
        return int(self.dry_run.partition("x")[0]) if isinstance(self.dry_run, str) else None


@dataclass(config=STRICT)
class LoRAArgs:
    """LoRA adapters"""

    lora_rank: NotNegative[int] = 0
    """train only adapters of this rank on linear layers, and the head of a reward or value model;
    0: no adapters, all weights are trained"""
    lora_alpha: Annotated[Positive[float], LORA] = 32.0
    """multiply the output of adapters by lora_alpha / lora_rank"""
    lora_targets: Annotated[Several[str], LORA] = ("all-linear",)
    """put adapters on these layers: all-linear, attention, or endings of layer names such as q_proj
    v_proj"""
    quantize: Annotated[Literal["nf4"] | None, LORA] = None
    """keep the frozen weights under adapters in 4.25 bits each, as nf4 (extras/quantized)"""
    adapter: NamesModels[str | None] = None
    """start from this adapter of `model`: the folder adapter/ of a run, or one of the PEFT library;
    it sets lora_rank, lora_alpha and lora_targets"""

    @model_validator(mode="before")
    @classmethod
    def _take_adapter(cls, given: ArgsKwargs) -> ArgsKwargs:
        flags = given.kwargs or {}
        if isinstance(flags.get("adapter"), str):
            flags = flags_of_adapter(flags["adapter"]) | flags
        return ArgsKwargs(given.args, flags)

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if not self.lora_targets:
            raise ValueError("--lora_targets needs at least one value")
        if self.adapter is None:
            return self
        wanted = flags_of_adapter(self.adapter)
        for flag in ("lora_rank", "lora_alpha"):  # `read_adapter` checks the layers
            if (value := getattr(self, flag)) != wanted[flag]:
                source = f"--adapter {self.adapter}, which sets {wanted[flag]}"
                raise ValueError(f"--{flag} {value} contradicts {source}")
        return self


@dataclass(config=STRICT)
class EvalSampleArgs:
    """Sampled validation"""

    eval_samples: Annotated[
        MayChange[Positive[int]], Needs(eval_every=True), Needs(eval_generate=True)
    ] = 1
    """complete each held-out prompt this many times in an evaluation; above 1: also
    eval/pass_at_k"""
    eval_temperature: Annotated[
        MayChange[NotNegative[float]], Needs(eval_every=True), Needs(eval_generate=True)
    ] = 0.0
    """sample these completions at this temperature; 0: greedy"""

    @model_validator(mode="after")
    def _check_eval_samples(self) -> Self:
        if self.eval_samples > 1 and not self.eval_temperature:
            problem = "greedy completions are equal; set --eval_temperature above 0"
            raise ValueError(f"--eval_samples {self.eval_samples}: {problem}")
        return self


GENERATE = Needs(eval_generate=True)


@dataclass(config=STRICT)
class GenerateArgs:
    """Evaluation by generation"""

    eval_generate: Annotated[MayChange[NotNegative[int]], Needs(eval_every=True)] = 0
    """complete this many held-out prompts before training and at each evaluation, for eval/solved
    and eval/reward; 0: off"""
    reward: Annotated[MayChange[NamesModels[Several[str]]], NamesCode(), GENERATE] = (
        "exact_match",
    )
    """score these completions by these rewards (docs/rewards.md lists all)"""
    max_new_tokens: Annotated[MayChange[Positive[int]], GENERATE] = 256
    """limit these completions to this many tokens"""

    @model_validator(mode="after")
    def _check_generation(self: Any) -> Any:  # reads flags of `TrainArgs`
        if self.eval_generate and self.max_new_tokens >= self.pack_limit.tokens:
            flag = f"--max_new_tokens {self.max_new_tokens}"
            raise ValueError(f"{flag} leaves no room for a prompt in {self.pack_limit.flag}")
        return self


@dataclass(config=STRICT)
class LengthArgs:
    """Long rows"""

    SEQUENCES_TOGETHER: ClassVar[int] = 1
    """sequences of a row that have to share a pack: 2 of a pair"""
    max_length: Positive[int] | None = None
    """limit a sequence, which is a prompt with its completion, to this many tokens; default: as in
    the resumed run, else 2048, or less if context or pack_tokens is smaller"""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """handle rows with a longer sequence. drop: leave them out; truncate: cut the end of the
    sequence off (both are counted); error: end the run"""

    @model_validator(mode="after")
    def _check_length(self: Any) -> Any:  # reads flags of `ModelArgs`
        self.pack_limit.require(self.max_length, self.SEQUENCES_TOGETHER)
        return self


# ---- unions ----

# Defaults for the built-in models and task: real ones need other values (parse.py uses these).
BUILT_IN_MODELS = ("tiny", "tiny-sft", "tiny-images")
TINY_TRAINING = dict(lr=3e-3, warmup_steps=10, max_steps=100, eval_every=20, prompt_format="plain")
TINY_OFFLINE = TINY_TRAINING | dict(eval_generate=256, max_new_tokens=5)


@dataclass(config=STRICT)
class BaseArgs(RunArgs, DataArgs, ModelArgs):
    """Flags of every script."""

    TINY_DEFAULTS: ClassVar[dict] = {}
    """defaults for the built-in models and task; for other data, the learning rates only"""
    PRESETS: ClassVar[dict[str, dict]] = {}
    """the flags that each value of `--preset` sets"""

    # Only some scripts have these flags, but shared code reads them in every script. So they are
    # constants here.
    share_prefix = 0
    offload = "none"

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        check_needs(self)
        return self


@dataclass(config=STRICT)
class TrainArgs(  # pyrefly: ignore[inconsistent-inheritance]
    LoRAArgs, CheckpointArgs, OptimArgs, HeldOutArgs, BaseArgs
):
    """Flags of every script that trains."""

    TINY_DEFAULTS: ClassVar[dict] = TINY_TRAINING
    ROWS_FLAG: ClassVar[str] = "batch_size"
    """the flag that says how many rows a step takes"""

    @property
    def rows_per_step(self) -> int:
        """How many rows a step takes, over all ranks."""
        return getattr(self, self.ROWS_FLAG)


@dataclass(config=STRICT)
class OfflineArgs(GenerateArgs, EvalSampleArgs, TrainArgs):
    """Flags of every policy that trains on data alone."""

    TINY_DEFAULTS: ClassVar[dict] = TINY_OFFLINE


def check_ranks(args: BaseArgs, ranks: int) -> None:
    """Raise `ValueError` if the flags do not fit this number of ranks."""
    rollout_ranks = getattr(args, "rollout_ranks", 0)
    if rollout_ranks >= ranks:
        flag = f"--rollout_ranks {rollout_ranks}"
        raise ValueError(f"{flag} must be less than the number of ranks ({ranks})")
    training = ranks - rollout_ranks
    if isinstance(args, TrainArgs):
        rows = f"--{args.ROWS_FLAG} {args.rows_per_step} must be a multiple of the number of"
        if args.rows_per_step % training:
            raise ValueError(f"{rows} training ranks ({training})")
        parts = training * getattr(args, "minibatches", 1)
        if args.rows_per_step % parts:
            raise ValueError(f"{rows} training ranks times --minibatches ({parts})")
    for flag, count, kind in (
        ("tensor_parallel_size", rollout_ranks or ranks, "generating"),
        ("context_ranks", training, "training"),
        ("shard_ranks", training, "training"),
    ):
        size = getattr(args, flag, None) or 1
        if count % size:
            raise ValueError(f"--{flag} {size} must divide the {count} {kind} ranks")


def flags_of(args: BaseArgs) -> dict[str, Any]:
    """Return the content of args.yaml: the flags by name, without secrets, in types of YAML."""
    return {
        name: [*map(public, value)] if isinstance(value, tuple) else public(value)
        for name, value in asdict(args).items()
    }


def may_change(args: BaseArgs, then: dict[str, Any]) -> set[str]:
    """Return the flags that a resumed run may change. `then`: the flags that it had. They are all
    that are marked `MayChange`, and `max_staleness` if it had no effect then or has none now."""
    free = {flag for flag, marks in marks_of(type(args)).items() if MAY_CHANGE in marks}
    has_effect = getattr(args, "rollout_ranks", 0) and then.get("rollout_ranks")
    return free if has_effect else free | {"max_staleness"}


def script_of(args_class: type) -> Path:
    """Return the file of the script that declares these flags."""
    return Path(sys.modules[args_class.__module__].__file__)
