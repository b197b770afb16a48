"""Run folder as data of extras/trace/doctor.py, and its rules about metrics and samples.

A rule takes a `Case`. It returns None, or `Seen` with the numbers that it saw, and raises
`Unchecked` if the run lacks what it reads. Its docstring is a row of docs/troubleshooting.md: the
symptom after "Find", the threshold with its source, the remedy. Means "at the end" are over the
last third of the steps, those "at the start" over the first third."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from common.config.sampling import LOGPROB_DIFFERENCE

LEAST = 10  # steps below which a mean says nothing
NOT_HERE = "do not apply"
OF_GROUPS = ("grpo", "gspo", "dapo", "rloo", "online_dpo", "bok")  # scripts that compare a group


class Seen(NamedTuple):
    text: str
    step: int = 0  # 0: the run as a whole
    examples: tuple[str, ...] = ()


class Unchecked(Exception):
    """Reason for which a rule cannot be checked."""


@dataclass
class Case:
    """A run folder. `traces`: header and groups of each trace that is read, by step; `samples`:
    lines of samples.jsonl."""

    flags: dict
    script: str
    metrics: dict[str, dict[int, float]]
    samples: list[dict]
    traces: list[list[dict]]
    folder: str = ""

    def flag(self, name: str, default=0):
        value = self.flags.get(name)
        return default if value is None else value

    def curve(self, name: str, least: int = LEAST) -> dict[int, float]:
        """Return the finite values of a metric by step. Raises `Unchecked` below `least` steps."""
        steps = {s: x for s, x in self.metrics.get(name, {}).items() if math.isfinite(x)}
        if not steps:
            raise Unchecked(NOT_HERE)
        if len(steps) < least:
            raise Unchecked("too few steps")
        return dict(sorted(steps.items()))

    def early(self, name: str, least: int = LEAST) -> float:
        values = [*self.curve(name, least).values()]
        return fmean(values[: max(1, len(values) // 3)])

    def late(self, name: str, least: int = LEAST) -> float:
        values = [*self.curve(name, least).values()]
        return fmean(values[-max(1, len(values) // 3) :])

    def falls(self, name: str) -> bool:
        """Return whether the end is below the start by more than 5% of it."""
        before = self.early(name)
        return self.late(name) < before - 0.05 * abs(before)

    @property
    def last(self) -> int:
        return max((step for of in self.metrics.values() for step in of), default=0)

    def traced(self) -> Iterator[tuple[dict, dict, dict]]:
        """Yield header, group and completion of all traces that are read."""
        if not self.traces:
            raise Unchecked("no traces")
        for header, *groups in self.traces:
            for group in groups:
                yield from ((header, group, completion) for completion in group["completions"])

    def groups(self) -> list[list[dict]]:
        """Return groups of completions with a reward and an advantage, of traces or samples."""
        found = [group["completions"] for _, *groups in self.traces for group in groups]
        found = found if self.traces else samples_by_prompt(self)
        both = [[c for c in group if numbers(c)] for group in found]
        if not any(both):
            raise Unchecked(NOT_HERE)
        return [group for group in both if len(group) > 1]

    def texts(self, wanted=lambda sample: True) -> tuple[str, ...]:
        """Return up to three completions, of samples for which `wanted` is true."""
        chosen = [sample for sample in self.samples if wanted(sample)][-3:]
        return tuple(f"{s['prompt']} -> {s['completion']}" for s in chosen)


def numbers(completion: dict) -> bool:
    """Return whether a completion has a reward and an advantage."""
    pair = (completion.get("reward"), completion.get("advantage"))
    return all(isinstance(x, int | float) and math.isfinite(x) for x in pair)


# ---- rewards and groups ----


def never_pays(case: Case) -> Seen | None:
    """Find the same reward for all completions of the run.

    Threshold: `reward` constant and `reward_std` 0 in at least 3 steps (exact: no advantage).
    Remedy: the column and the form of the answer that `--reward` reads, with `samples.jsonl`:
    `--prompt_template`, `--system_prompt`, or a less strict reward (`gsm8k_flexible` for `gsm8k`);
    for code of your own, its arguments."""
    rewards = case.curve("reward", 3)
    spread = max(case.curve("reward_std", 3).values())
    if spread > 1e-9 or max(rewards.values()) - min(rewards.values()) > 1e-9:
        return None
    value = next(iter(rewards.values()))
    text = f"every completion of {len(rewards)} steps has reward {value:g}"
    return Seen(text, case.last, case.texts())


def reward_falls(case: Case) -> Seen | None:
    """Find a reward that falls.

    Threshold: `reward` at the end below half of its start, which is positive (our choice).
    Remedy: a lower `--lr`, the sign of the advantage, and for `self_distill.py` a model that reads
    hints."""
    before, after = case.early("reward"), case.late("reward")
    text = f"reward was {before:.3g} at the start and is {after:.3g} at the end"
    return Seen(text, case.last, case.texts()) if 0 < before and after < 0.5 * before else None


def equal_rewards(case: Case) -> Seen | None:
    """Find groups whose rewards are all equal.

    Threshold: `frac_reward_zero_std` at the end at least 0.9 (the warning of
    common/rollout/measure.py).
    Remedy: easier or harder prompts, more `--samples_per_prompt`, `--temperature`; a script
    that samples until enough groups differ."""
    if case.flag("samples_per_prompt") == 1 or case.script not in OF_GROUPS:
        raise Unchecked(NOT_HERE)
    equal = case.late("frac_reward_zero_std", 6)
    text = f"in {equal:.0%} of the groups all rewards are equal, so that their advantages are 0"
    return Seen(text, case.last, case.texts()) if equal >= 0.9 else None


def truncated(case: Case) -> Seen | None:
    """Find truncated completions.

    Threshold: `completions/clipped_ratio` at the end above 0.5 (the warning of
    common/rollout/measure.py).
    Remedy: a higher `--max_new_tokens`; `--template_kwargs enable_thinking=false`; if
    `samples.jsonl` has no end-of-turn token, `--chat_template` and `--prompt_format`, or rows with
    that token for `sft.py`."""
    cut = case.late("completions/clipped_ratio", 1)
    text = f"{cut:.0%} of the completions reach --max_new_tokens {case.flag('max_new_tokens')}"
    examples = case.texts(lambda sample: sample.get("finish_reason") == "length")
    return Seen(text, case.last, examples) if cut > 0.5 else None


def length_drift(case: Case) -> Seen | None:
    """Find a length that changes while the reward falls.

    Threshold: `completions/mean_length` at the end beyond 1.5 times or below half of that at the
    start, `reward` below 95% of its start (length bias of the loss, arXiv:2503.20783).
    Remedy: `--missing_eos_penalty`, in `dapo.py` `--overlong_buffer`, in `grpo.py` another
    `--reduction`."""
    before = case.early("completions/mean_length")
    after = case.late("completions/mean_length")
    text = f"completions had {before:.1f} tokens at the start and have {after:.1f} at the end"
    drifts = case.falls("reward") and not 0.5 < after / before < 1.5
    return Seen(text, case.last, case.texts()) if drifts else None


def likes_length(case: Case) -> Seen | None:
    """Find a reward that follows the length of the completion.

    Threshold: correlation of reward and characters within groups above 0.7, of at least 64
    completions that ended (half of the variance; arXiv:2310.03716).
    Remedy: `samples.jsonl`: are long completions better? `--reward`, and its judge or model; a
    penalty of length."""
    pairs = []
    for group in samples_by_prompt(case):
        ended = [s for s in group if s.get("finish_reason") == "stop"]
        pairs += centred([(len(s["completion"]), s["reward"]) for s in ended])
    if len(pairs) < 64:
        raise Unchecked("too few samples")
    r = correlation(pairs)
    longest = sorted(case.samples, key=lambda s: -len(s["completion"]))[:3]
    examples = tuple(f"reward {s['reward']:.3g}: {s['completion']}" for s in longest)
    return Seen(f"correlation of reward and length is {r:.2f}", 0, examples) if r > 0.7 else None


def samples_by_prompt(case: Case) -> list[list[dict]]:
    """Return the groups of samples.jsonl. Raises `Unchecked` without any."""
    found: dict[tuple, list[dict]] = {}
    for sample in filter(numbers, case.samples):
        found.setdefault((sample["step"], str(sample["prompt"])), []).append(sample)
    if not found:
        raise Unchecked(NOT_HERE)
    return [*found.values()]


def centred(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the pairs less their means."""
    means = [fmean(column) for column in zip(*pairs, strict=True)]
    return [(x - means[0], y - means[1]) for x, y in pairs]


def correlation(pairs: list[tuple[float, float]]) -> float:
    """Return the correlation of centred pairs; 0 if a side is constant."""
    both = math.fsum(x * y for x, y in pairs)
    squares = math.fsum(x * x for x, _ in pairs) * math.fsum(y * y for _, y in pairs)
    return both / math.sqrt(squares) if squares > 1e-18 else 0.0


# ---- the policy and its engine ----


def engine_differs(case: Case) -> Seen | None:
    """Find an engine whose log-probs differ from the trainer's.

    Threshold: `sampling/sampling_logp_difference/mean` in a step above a tenth of
    `--max_logprob_difference` or, if that is off, of its default, without rollout ranks
    and `--old_logprobs engine` (common/rollout/agreement.py).
    Remedy: `--dtype float32`: if the difference stays, the engine reads the weights differently
    ([models.md](models.md)); else it is rounding: raise `--max_logprob_difference`."""
    if case.flag("rollout_ranks"):
        raise Unchecked("old weights sampled a part")
    if case.flag("old_logprobs", "") == "engine":  # then of updated weights too
        raise Unchecked(NOT_HERE)
    auto = "bfloat16" if "memory/device_peak_gb" in case.metrics else "float32"
    dtype = case.flag("dtype", "bfloat16")
    default = LOGPROB_DIFFERENCE[auto if dtype == "auto" else dtype]
    limit = case.flag("max_logprob_difference", default)
    limit = (default if limit >= 1e9 else limit) / 10  # 1e9: off
    gaps = case.curve("sampling/sampling_logp_difference/mean", 1)
    step = max(gaps, key=lambda s: gaps[s])
    text = f"engine and trainer differ by {gaps[step]:.3g} nats per token"
    return Seen(text, step) if gaps[step] > limit else None


def stale(case: Case) -> Seen | None:
    """Find stale samples.

    Threshold: `sampling/staleness/mean` at the end above 4 steps or, if it is above 0,
    `sampling/kept_fraction` below 0.5 (our choice; arXiv:2505.24298 compares ages).
    Remedy: a lower `--max_staleness`, fewer `--rollout_ranks`."""
    age = case.late("sampling/staleness/mean", 1)
    kept = case.late("sampling/kept_fraction", 1)
    text = f"tokens are {age:.1f} steps old, and {kept:.0%} of them are trained"
    return Seen(text, case.last) if age > 4 or (age > 0 and kept < 0.5) else None


def clipped_often(case: Case) -> Seen | None:
    """Find an update that clips too often.

    Threshold: `clip_ratio/region_mean` at the end above 0.3 (our choice: a third of the
    tokens without gradient; clipping is meant for few, arXiv:1707.06347).
    Remedy: a lower `--lr`, `--minibatches 1`, fewer `--epochs_per_rollout`, a lower
    `--max_grad_norm`."""
    if case.script in ("gspo", "rloo"):  # their bounds are for whole completions
        raise Unchecked(NOT_HERE)
    clipped = case.late("clip_ratio/region_mean", 3)
    text = f"{clipped:.0%} of the tokens are clipped and have no gradient"
    return Seen(text, case.last) if clipped > 0.3 else None


def entropy_collapse(case: Case) -> Seen | None:
    """Find an entropy that collapses while the reward falls.

    Threshold: `entropy` at the end below a tenth of its start, `reward` below 95% of its start
    (arXiv:2505.22617: reward is traded for entropy).
    Remedy: a lower `--lr`, a positive `--beta`, `--entropy_coef`, a higher `--clip_high`."""
    before = case.early("entropy")
    after = case.late("entropy")
    falls = case.falls("reward")
    text = f"entropy fell from {before:.3g} to {after:.3g} nats per token"
    return Seen(text, case.last, case.texts()) if after < 0.1 * before and falls else None


def value_lags(case: Case) -> Seen | None:
    """Find a value model that lags behind the returns.

    Threshold: `explained_variance` at the end below -0.2 (below 0 is worse than a constant;
    healthy runs of bench/doctor.py end above -0.05).
    Remedy: a higher `--value_lr`, `--value_warmup_steps`, a lower `--lr`."""
    explained = case.late("explained_variance")
    text = f"the value model explains {explained:.2f} of the variance of the returns"
    return Seen(text, case.last) if explained < -0.2 else None


# ---- learning rate and loss ----

LIKELIHOOD = ("sft", "dpo", "kto", "rm", "distill")  # scripts whose loss should fall


def rate_high(case: Case) -> Seen | None:
    """Find a learning rate that is too high.

    Threshold: means of `loss` over a tenth of the steps: the last third above 1.2 times the lowest,
    or the highest above 1.5 times the first loss (scripts whose loss should fall); or `grad_norm`
    above 20 times its start (healthy runs of bench/doctor.py: 1, 1 and 2 times).
    Remedy: a lower `--lr`, `--warmup_steps`, a lower `--max_grad_norm`; with samples also
    `--minibatches 1` and a positive `--beta`."""
    norms = [x for x in case.curve("grad_norm").values() if x > 0] or [0.0]
    before, after = fmean(norms[: max(1, len(norms) // 3)]), case.late("grad_norm")
    losses = [*case.curve("loss").values()]
    width = max(5, len(losses) // 10)
    means = [fmean(losses[i : i + width]) for i in range(len(losses) - width + 1)]
    first, last = max(losses[0], means[-1]), case.late("loss")
    if case.script in LIKELIHOOD and last > 1.2 * min(means) + 0.05:
        return Seen(f"loss was {min(means):.3g} and is {last:.3g} at the end", case.last)
    if case.script in LIKELIHOOD and max(means) > 1.5 * first + 0.05:
        return Seen(f"loss was {first:.3g} and rose to {max(means):.3g}", case.last)
    text = f"grad_norm was {before:.3g} at the start and is {after:.3g} at the end"
    return Seen(text, case.last) if 0 < 20 * before < after else None


def rate_low(case: Case) -> Seen | None:
    """Find a learning rate that is too low.

    Threshold: after 20 steps, `loss` at the end within 1% and `grad_norm` within 20% of the first 5
    steps, of scripts whose loss should fall; or `kl` below 1e-5 nats (in healthy runs of
    bench/doctor.py the loss changes by 4%, or the gradient by half).
    Remedy: a higher `--lr`; 1e-6 is meant for models of a billion parameters and more."""
    if case.script not in LIKELIHOOD:
        kl = case.late("kl", 20)
        text = f"KL to the reference is {kl:.2g} nats"
        return Seen(text, case.last) if abs(kl) < 1e-5 else None
    before, norm = (fmean([*case.curve(name, 20).values()][:5]) for name in ("loss", "grad_norm"))
    after, change = case.late("loss"), abs(case.late("grad_norm") / norm - 1)
    text = f"loss was {before:.4g} at the start and is {after:.4g} at the end"
    return Seen(text, case.last) if abs(after / before - 1) < 0.01 and change < 0.2 else None


def falls_unsolved(case: Case) -> Seen | None:
    """Find a loss that falls while nothing is solved.

    Threshold: the last `eval/solved` at most 0.02 with `mean_token_accuracy` at the end above 0.9
    (then (0.9)^20 = 12% of answers of 20 tokens would be right).
    Remedy: the mask and the order of the tokens in a trace, `--prompt_format`, `--chat_template`:
    generation must get the prompt in the form of the training rows."""
    accuracy = case.late("mean_token_accuracy")
    step, solved = max(case.curve("eval/solved", 1).items())
    text = f"token accuracy is {accuracy:.2f}, but {solved:.1%} of the held-out rows are solved"
    return Seen(text, step) if accuracy > 0.9 and solved <= 0.02 else None


# ---- preferences and reward models ----


def displaced(case: Case) -> Seen | None:
    """Find chosen answers that become unlikely together with the rejected ones.

    Threshold: log-prob of the chosen below that of the reference by 5 nats (150 times less likely)
    and 20%, that of the rejected below too, for losses of summed log-ratios (likelihood
    displacement, arXiv:2410.08847).
    Remedy: `--sft_weight`, a higher `--beta`, a lower `--lr`, a loss such as `apo_zero`."""
    from common.objectives.preference import PER_TOKEN, REFERENCE_FREE

    loss = next(iter(case.flag("loss", ())), "sigmoid")
    if case.script not in ("dpo", "online_dpo") or loss in REFERENCE_FREE | PER_TOKEN:
        raise Unchecked(NOT_HERE)
    beta = case.flag("beta") or 1.0
    chosen, rejected = case.late("rewards/chosen") / beta, case.late("rewards/rejected") / beta
    before = case.late("logps/chosen") - chosen  # by the reference
    text = f"log-prob of chosen answers fell by {-chosen:.3g} nats from {before:.3g}"
    text += f", of rejected ones by {-rejected:.3g}"
    fell = chosen < -max(5.0, 0.2 * abs(before)) and rejected < 0
    return Seen(text, case.last) if fell else None


def scores_equal(case: Case) -> Seen | None:
    """Find a reward model whose scores do not distinguish.

    Threshold: mean of `rewards/margins` at the end below 5% of `rewards/std` after 20 steps
    (noise of the mean of 1000 pairs is 4.5%).
    Remedy: the pairs (are chosen and rejected swapped or equal?), the token that is scored, a
    higher `--lr`."""
    if case.script != "rm":
        raise Unchecked(NOT_HERE)
    margin, spread = case.late("rewards/margins", 20), case.late("rewards/std", 20)
    text = f"margin of chosen and rejected is {margin:.3g}, standard deviation {spread:.3g}"
    return Seen(text, case.last) if margin < 0.05 * spread + 1e-6 else None


RULES = (
    truncated, never_pays, reward_falls, equal_rewards, engine_differs, rate_high,
    rate_low, falls_unsolved, scores_equal, displaced, value_lags, entropy_collapse, length_drift,
    likes_length, clipped_often, stale,
)  # fmt: skip
