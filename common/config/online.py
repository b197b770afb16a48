"""Groups of flags (see groups.py) for completions, rewards, engines and rollouts. Their unions are
`SamplingArgs`, for every script that samples, and `OnlineArgs`, for every script that trains on its
own samples."""

from os.path import isfile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import (
    JUDGE_KINDS,
    MODEL_KINDS,
    STRICT,
    Fraction,
    MayChange,
    NamesCode,
    NamesModels,
    Needs,
    NotNegative,
    Positive,
    Real,
    Several,
    values_of,
)
from common.config.groups import CHAT, BaseArgs, EvalSampleArgs, PrefixArgs, TrainArgs

# How many requests an engine runs at the same time. Their float32 logits, 156 MB with a vocabulary
# of 151,936, exist several times in memory.
SLOTS = 256
# Shares of a GPU's memory.
USABLE = 0.92  # plans may use this much; CUDA graphs and the allocator need the rest
ALONE = 0.9  # an engine on a rank that only samples takes this much
# Default of --max_logprob_difference by compute dtype.
LOGPROB_DIFFERENCE = dict(float32=1e-3, bfloat16=0.5, float16=0.1)


def stop_string(text: str) -> str:
    """Read one value of `--stop`: \\n and \\t stand for line feed and tab."""
    if not text:
        raise ValueError("is empty")
    return text.replace("\\n", "\n").replace("\\t", "\t")


def read_if_file(value: str | None) -> str | None:
    """If `value` is the name of a file, return the text in it, else the value itself."""
    is_file = value is not None and isfile(value)
    return Path(value).read_text(encoding="utf-8") if is_file else value


EPISODE = Needs(environment=True, tools=True, agent=True)


@dataclass(config=STRICT)
class CompletionArgs:
    """Prompts, completions and environments"""

    prompt_template: Annotated[str | None, Needs(environment=None), Needs(agent=None)] = None
    """make the prompt from this text, with columns of the data in braces, e.g. `{problem} Put the
    answer in \\boxed{{}}.`; default: the column prompt, or question"""
    overlong: Annotated[Literal["error", "drop"], Needs(agent=None)] = "error"
    """handle prompts that, together with max_new_tokens, are too long for the model's context or a
    pack. error: end the run; drop: leave them out"""
    samples_per_prompt: Positive[int] = 8
    """sample this many completions for each prompt (G)"""
    max_new_tokens: Positive[int] = 256
    """limit a completion to this many tokens"""
    thinking_budget: Annotated[Positive[int] | None, Needs(agent=None), Needs(stop=None)] = None
    """end a thought in a turn after this many tokens: the mark that ends thoughts is appended,
    without loss, and the model goes on with its answer; default: no limit"""
    temperature: Positive[float] = 1.0
    """sample at this temperature; the trainer divides its logits by it too"""
    stop_token_ids: Several[NotNegative[int]] = ()
    """stop at these token ids as well as at the EOS tokens"""
    stop: Several[Annotated[str, AfterValidator(stop_string)]] = ()
    """stop at these texts, after the token that completes one; \\n: newline, \\t: tab"""
    environment: Annotated[str | None, NamesCode(makes="_prompt")] = None
    """let this environment answer the model between its turns: calculator, or your own as
    path/to/file.py:Class; needs `--reward environment`"""
    agent: Annotated[str | None, CHAT, NamesCode()] = None
    """let this async function play an episode through an endpoint for chat completions, as
    path/to/file.py:function (extras/agents/README.md)"""
    tools: Annotated[Several[str], CHAT, NamesCode(makes="tools")] = ()
    """let the model call these tools between its turns: path/to/file.py (its functions with a
    docstring), path/to/file.py:name (a function, or a class whose methods are tools), python, or
    mcp:COMMAND, a server of the Model Context Protocol (extras/tools/README.md)"""
    tool_parser: Annotated[str | None, Needs(tools=True, agent=True)] = None
    """read the calls in a completion with this parser: hermes, openai, or the name of a tool parser
    of vLLM; default: the one that fits the chat template"""
    max_turns: Annotated[Positive[int], EPISODE] = 8
    """limit a completion to this many turns of the model (max_new_tokens is the limit of all turns
    together); limit an agent's episode to this many requests"""
    environment_timeout: Annotated[MayChange[Positive[float] | None], EPISODE] = None
    """wait this many seconds for one answer of an environment, one call of a tool, or an agent's
    episode; default: 10, for an agent 300. An episode whose environment or agent exceeds it has no
    reward; a call that exceeds it returns an error, and so do the calls after it in its turn"""

    @property
    def answer_seconds(self) -> float:
        """Seconds that an environment, a tool or an agent's episode may take."""
        return self.environment_timeout or (10.0 if self.agent is None else 300.0)

    @model_validator(mode="after")
    def _check_episodes(self) -> Self:
        if self.tools and self.environment is not None:
            raise ValueError("--tools and --environment exclude each other; give one of them")
        return self


JUDGES = Needs(reward=JUDGE_KINDS, reward_model=JUDGE_KINDS)


@dataclass(config=STRICT)
class ScoringArgs:
    """Rewards"""

    reward: Annotated[NamesModels[Several[str]], NamesCode()] = ("exact_match",)
    """add up these rewards: exact_match, gsm8k, math, ... (docs/rewards.md lists all); your own as
    path/to/file.py:function; reward models as model:PATH; chat models that judge a completion as
    judge:PATH, or pairs as rank:PATH; by_row: the function in the row's column `reward`"""
    reward_weights: Several[Real] = ()
    """multiply each reward by its weight; default: all 1"""
    rubric: Annotated[Several[str], JUDGES] = ()
    """judge rows without a column `rubric` by these criteria; without any, rank:PATH judges overall
    quality"""
    judge_prompt: Annotated[str | None, AfterValidator(read_if_file), JUDGES] = None
    """ask judges this question, a text or a file, with {criterion}, {prompt}, {completion} or
    {transcript} (rank:PATH: {first} and {second}) or columns in braces; default:
    extras/judges/README.md"""
    thoughts: Literal["cut", "keep"] = "cut"
    """cut thoughts of the model, such as `<think>...</think>`, from what built-in rewards and votes
    read. cut: an answer is the text after the last finished thought; keep: thoughts are part of the
    answer"""
    max_reward_errors: MayChange[Fraction] = 0.1
    """stop the run if more than this fraction of a step's rewards could not be computed"""
    reward_timeout: MayChange[Positive[float]] = 10.0
    """give math, code and user-defined rewards this many seconds per completion; a function that
    scores a whole group gets them for each completion in it"""
    reward_workers: MayChange[Positive[int]] = 4
    """compute math, code and user-defined rewards in this many processes per rank"""
    unsafe_code_execution: bool = False
    """execute programs (code rewards) even on machines that cannot confine them, without Landlock
    or seccomp"""

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if not self.reward and type(self).__dataclass_fields__["reward"].default:
            raise ValueError("--reward needs at least one value")
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            count = len(self.reward_weights)
            raise ValueError(f"--reward_weights has {count} values for {len(self.reward)} rewards")
        return self


VLLM = Needs(engine=("auto", "vllm"))


@dataclass(config=STRICT)
class EngineArgs:
    """Inference engine"""

    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """sample with this inference engine. auto: vllm if it is installed, else transformers, which is
    slower; on a CPU also for gated delta nets"""
    tensor_parallel_size: Annotated[Positive[int], VLLM] = 1
    """share one vLLM engine among this many ranks; must divide the number of generating ranks"""
    engine_args: Annotated[Several[str], VLLM] = ()
    """pass these options to vLLM as name=value, by vLLM's names: max_num_seqs=64
    gpu_memory_utilization=0.5 (default: what is free, at most 0.9); see docs/grpo.md"""

    @property
    def engine_options(self) -> dict[str, Any]:
        """The options of `--engine_args` by name."""
        return values_of("engine_args", self.engine_args)

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        memory = self.engine_options.get("gpu_memory_utilization", ALONE)
        if not (isinstance(memory, float) and 0 < memory < 1):
            problem = "must be greater than 0 and less than 1"
            raise ValueError(f"--engine_args gpu_memory_utilization={memory}: {problem}")
        return self


@dataclass(config=STRICT)
class RolloutArgs:
    """Rollouts"""

    prompts_per_step: Positive[int] = 64
    """sample completions of this many prompts per rollout, over all ranks"""
    minibatches: Positive[int] = 1
    """divide a rollout into this many minibatches, with one optimizer step each in every epoch"""
    epochs_per_rollout: Positive[int] = 1
    """train on each rollout for this many epochs"""
    missing_eos_penalty: NotNegative[float] = 0.0
    """subtract this penalty from the reward of a truncated completion"""
    rollout_ranks: MayChange[NotNegative[int]] = 0
    """dedicate this many ranks to generation, the last ones; 0: every rank alternates between
    generation and training"""
    max_staleness: Annotated[NotNegative[int], Needs(rollout_ranks=True)] = 1
    """train on tokens sampled by weights that are at most this many steps old; above 1: more
    prompts in flight; 0: rollout ranks and training ranks take turns"""
    max_logprob_difference: Positive[float] | None = None
    """stop the run if the log-probs of engine and trainer differ by more than this, in nats, at the
    99.9th percentile of sampled tokens, or by more than a tenth of it on average; default: 1e-3 in
    float32, 0.5 in bfloat16, 0.1 in float16; 1e9: off"""

    @model_validator(mode="after")
    def _check_rollouts(self) -> Self:
        if self.prompts_per_step % self.minibatches:
            what = f"--prompts_per_step {self.prompts_per_step}"
            raise ValueError(f"{what} must be a multiple of --minibatches ({self.minibatches})")
        return self


# ---- unions ----


def refuse_agent(agent: str | None) -> None:
    """Raise `ValueError` for `--agent`. For scripts in which a completion must be one sequence: the
    conversations of an agent's episode may branch."""
    if agent is not None:
        raise ValueError("--agent: this script cannot train on the branches of an episode")


# Defaults for the built-in models and task, as in groups.py.
TINY_ONLINE = dict(lr=4e-4, lr_schedule="linear", max_steps=60, eval_every=10, prompts_per_step=16,
                   samples_per_prompt=16, max_new_tokens=5, prompt_format="plain")  # fmt: skip


@dataclass(config=STRICT)
class SamplingArgs(EngineArgs, ScoringArgs, CompletionArgs, PrefixArgs, BaseArgs):
    """Flags of every script that samples completions."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.agent is not None and (self.environment is not None or self.tools):
            raise ValueError("--agent excludes --environment and --tools; give one of them")
        has_reward = "environment" in self.reward
        if self.agent is None and has_reward != (self.environment is not None):
            problem = "--environment and --reward environment need each other"
            raise ValueError(f"{problem}; give both or neither")
        if self.tools or self.agent is not None:
            # No message: `CHAT` refuses plain, and without a template there are no turns.
            object.__setattr__(self, "prompt_format", "chat")
        if self.max_new_tokens >= self.pack_limit.tokens:
            flag = f"--max_new_tokens {self.max_new_tokens}"
            raise ValueError(f"{flag} leaves no room for a prompt in {self.pack_limit.flag}")
        ranks = [name for name in self.reward if name.startswith("rank:")]
        if not all(map(str.strip, self.rubric)):
            raise ValueError("--rubric: a criterion is empty")
        if ranks and self.completions_per_prompt < 2:
            raise ValueError(f"--reward {ranks[0]} needs --samples_per_prompt 2 or more")
        return self

    @property
    def completions_per_prompt(self) -> int:
        """How many completions of a prompt there are to compare."""
        return self.samples_per_prompt

    @property
    def reward_models(self) -> list[str]:
        """Reward models and judges in `--reward`, with their kinds: `model:PATH`."""
        return [name for name in self.reward if name.startswith(MODEL_KINDS)]

    @property
    def has_turns(self) -> bool:
        """Whether a completion may have several turns of the model (an episode)."""
        return self.environment is not None or self.agent is not None or bool(self.tools)


@dataclass(config=STRICT)
class OnlineArgs(RolloutArgs, SamplingArgs, EvalSampleArgs, TrainArgs):
    """Flags of every script that trains on its own samples."""

    TINY_DEFAULTS: ClassVar[dict] = TINY_ONLINE
    ROWS_FLAG: ClassVar[str] = "prompts_per_step"
    model: str = "tiny-sft"

    @property
    def live_rollout_ranks(self) -> int:
        """Number of ranks of this launch that only generate: none in a dry run."""
        return 0 if self.dry_run else self.rollout_ranks

    @property
    def updates_per_rollout(self) -> int:
        """Number of optimizer steps per rollout."""
        return self.minibatches * self.epochs_per_rollout
