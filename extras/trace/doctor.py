"""Say what is wrong with a run, finished or still running.

    python extras/trace/doctor.py runs/demo/grpo

Twelve rules read metrics.jsonl and args.yaml. A rule looks only at metrics, whichever script logged
them; if a run lacks them, the rule is not checked. "At the start" and "at the end" are means over
the first and the last third of the steps."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.config.online import LOGPROB_DIFFERENCE
from common.config.options import Options
from common.metrics.runs import Run, read_run
from common.parallel.process import counted, print_any_text, visible

LEAST = 10  # with fewer steps a mean over a third of them says nothing


class Missing(Exception):
    """The run lacks a metric that a rule reads, or has too few steps for it."""


def curve(run: Run, name: str, least: int = LEAST) -> list[float]:
    """Return the finite values of a metric, by step."""
    values = [x for _, x in sorted(run.metrics.get(name, {}).items()) if math.isfinite(x)]
    if len(values) < least:
        raise Missing(name)
    return values


def early(run: Run, name: str, least: int = LEAST) -> float:
    values = curve(run, name, least)
    return fmean(values[: max(1, len(values) // 3)])


def late(run: Run, name: str, least: int = LEAST) -> float:
    values = curve(run, name, least)
    return fmean(values[-max(1, len(values) // 3) :])


def reward_falls(run: Run) -> bool:
    """Return whether the reward at the end is more than 5% below that at the start."""
    before = early(run, "reward")
    return late(run, "reward") < before - 0.05 * abs(before)


# ---- rules: each returns what it saw, or None. Its docstring says what to try ----


def not_finite(run: Run) -> str | None:
    """try: a lower `--lr`, a lower `--max_grad_norm`, `--dtype float32`; a reward that returns
    NaN"""
    for name in ("loss", "grad_norm", "value_loss", "reward", "kl", "entropy"):
        steps = [step for step, x in run.metrics.get(name, {}).items() if not math.isfinite(x)]
        if steps:
            count = counted(len(steps), "step")
            return f"{name} is not finite in {count}, first in step {min(steps)}"
    return None


def explodes(run: Run) -> str | None:
    """try: a lower `--lr`, `--warmup_steps`, a lower `--max_grad_norm`; with samples `--minibatches
    1`"""
    norms = [x for x in curve(run, "grad_norm") if x > 0] or [0.0]
    before, after = fmean(norms[: max(1, len(norms) // 3)]), late(run, "grad_norm")
    if 0 < 20 * before < after:
        return f"grad_norm was {before:.3g} at the start and is {after:.3g} at the end"
    if "reward" in run.metrics:  # the loss of a policy gradient has no direction
        return None
    losses = curve(run, "loss")
    width = max(5, len(losses) // 10)
    lowest = min(fmean(losses[i : i + width]) for i in range(len(losses) - width + 1))
    if late(run, "loss") > 1.2 * lowest + 0.05:
        return f"loss was {lowest:.3g} and is {late(run, 'loss'):.3g} at the end"
    return None


def entropy_collapses(run: Run) -> str | None:
    """try: a lower `--lr`, a positive `--beta`, `--entropy_coef`, a higher `--clip_high`"""
    before, after = early(run, "entropy"), late(run, "entropy")
    if after < 0.1 * before and reward_falls(run):  # arXiv:2505.22617 trades reward for entropy
        return f"entropy fell from {before:.3g} to {after:.3g} nats per token, and the reward fell"
    return None


def engine_differs(run: Run) -> str | None:
    """try: `--dtype float32`. If the difference stays, the engine reads the weights differently
    (docs/models.md); if not, it is rounding: raise `--max_logprob_difference`"""
    stale = max(run.metrics.get("sampling/staleness/mean", {}).values(), default=0.0)
    if stale > 0 or run.flags.get("old_logprobs") == "engine":
        raise Missing("the present weights did not sample")
    dtype = run.flags.get("dtype", "auto")
    if dtype == "auto":
        dtype = "bfloat16" if "memory/device_peak_gb" in run.metrics else "float32"
    limit = run.flags.get("max_logprob_difference") or LOGPROB_DIFFERENCE[dtype]
    limit = (LOGPROB_DIFFERENCE[dtype] if limit >= 1e9 else limit) / 10  # 1e9: off
    gap = max(curve(run, "sampling/sampling_logp_difference/mean", 1))
    return f"engine and trainer differ by {gap:.3g} nats per token" if gap > limit else None


def equal_rewards(run: Run) -> str | None:
    """try: easier or harder prompts, more `--samples_per_prompt`, a higher `--temperature`. If the
    reward never changes: the column and the form of the answer that it reads (samples.jsonl)"""
    rewards, spreads = curve(run, "reward", 3), curve(run, "reward_std", 3)
    if max(spreads) < 1e-9 and max(rewards) - min(rewards) < 1e-9:
        return f"every completion of {len(rewards)} steps has reward {rewards[0]:g}"
    others = [x for x in run.metrics if x.endswith(("value_loss", "teacher_entropy"))]
    if run.flags.get("samples_per_prompt") == 1 or others:
        return None  # advantages do not compare the group
    equal = late(run, "frac_reward_zero_std", 6)
    return f"in {equal:.0%} of the groups all rewards are equal" if equal >= 0.9 else None


def truncated(run: Run) -> str | None:
    """try: a higher `--max_new_tokens`, `--template_kwargs enable_thinking=false`; if the samples
    have no end token: `--chat_template`, `--prompt_format`, or sft.py on rows with that token"""
    cut = late(run, "completions/clipped_ratio", 1)
    return f"{cut:.0%} of the completions reach --max_new_tokens" if cut > 0.5 else None


def kl_grows(run: Run) -> str | None:
    """try: a higher `--beta`, `--keep_best` with a held-out metric"""
    kl = late(run, "kl")
    if kl > 1 and reward_falls(run):
        return f"KL to the reference is {kl:.3g} nats, and the reward fell"
    return None


def clips_often(run: Run) -> str | None:
    """try: a lower `--lr`, `--minibatches 1`, fewer `--epochs_per_rollout`, a lower
    `--max_grad_norm`"""
    clipped = late(run, "clip_ratio/region_mean", 3)
    return f"{clipped:.0%} of the tokens are clipped, without gradient" if clipped > 0.5 else None


def reward_errors(run: Run) -> str | None:
    """try: the reward function and its `--reward_timeout`; samples.jsonl has the completions"""
    errors = late(run, "reward/error_fraction", 1)
    return f"{errors:.1%} of the rewards could not be computed" if errors > 0.01 else None


def length_drifts(run: Run) -> str | None:
    """try: `--missing_eos_penalty`, another `--reduction` (a mean over sequences favours long wrong
    answers, arXiv:2503.20783), a penalty of length in the reward"""
    before = early(run, "completions/mean_length")
    after = late(run, "completions/mean_length")
    if reward_falls(run) and not 0.5 < after / before < 1.5:
        return f"completions had {before:.1f} tokens and have {after:.1f}, and the reward fell"
    return None


def held_out_falls(run: Run) -> str | None:
    """try: samples.jsonl, whether the reward has a hole; a higher `--beta`, `--keep_best
    eval/solved`, a higher `--eval_size`"""
    before, after = early(run, "reward"), late(run, "reward")
    solved, errors = (curve(run, f"eval/solved{end}", 2) for end in ("", "_stderr"))
    change, half = solved[-1] - solved[0], 1.96 * math.hypot(errors[0], errors[-1])
    if after < before + 0.05 * abs(before) or change > -half / 2 or change == 0:
        return None
    fell = f"eval/solved fell from {solved[0]:.3g} to {solved[-1]:.3g}"
    what = f"reward rose from {before:.3g} to {after:.3g}, and {fell}"
    if change < -half:
        return what
    interval = f"{change - half:.3g} to {change + half:.3g}"
    chance = f"the 95% interval of the change is {interval}; evaluate more rows"
    return f"{what}, which may be chance: {chance}"


def overfits(run: Run) -> str | None:
    """try: fewer `--epochs`, a lower `--lr`, `--keep_best eval_loss`"""
    held_out = curve(run, "eval_loss", 3)
    if late(run, "loss") < early(run, "loss") and held_out[-1] > 1.1 * min(held_out):
        return f"eval_loss was {min(held_out):.3g} and is {held_out[-1]:.3g}, while loss falls"
    return None


RULES = (
    not_finite, explodes, truncated, equal_rewards, reward_errors, engine_differs,
    entropy_collapses, kl_grows, clips_often, length_drifts, held_out_falls, overfits,
)  # fmt: skip


# ---- report ----


def examine(run: Run) -> dict[Callable, str | None]:
    """Return, for each rule that applies to the run, what it saw: None if all is well."""
    seen = {}
    for rule in RULES:
        try:
            seen[rule] = rule(run)
        except Missing:
            pass
    return seen


def main() -> None:
    print_any_text()
    parser = Options(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder of a run")
    try:
        run = read_run(parser.parse_args().run)
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    seen = examine(run)
    found = {rule: what for rule, what in seen.items() if what is not None}
    for rule, what in found.items():
        print(visible(f"{rule.__name__}: {what}\n    {' '.join(rule.__doc__.split())}"))
    count = counted(len(found), "finding") if found else "no findings"
    print(f"{count}; {len(seen)} of {len(RULES)} rules checked")


if __name__ == "__main__":
    main()
