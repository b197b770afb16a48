"""Say in plain words what is wrong with a run, finished or running.

    python extras/trace/doctor.py runs/demo/grpo
    python extras/trace/doctor.py --page                    # writes the table of docs/troubleshooting.md

It reads args.yaml, metrics.jsonl, samples.jsonl and traces, and recomputes from a trace what the
flags say. Each rule is a function with its threshold and the source of the threshold; those about
metrics and samples are in extras/trace/doctor_rules.py, those about traces here."""

import json
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from safetensors import SafetensorError

from common.parallel.console import print_any_text, visible
from extras.trace import doctor_rules
from extras.trace import file as trace_file
from extras.trace.doctor_rules import NOT_HERE, Case, Seen, Unchecked, centred, correlation
from extras.trace.formulas import SCRIPTS, evaluate, formulas, kl
from tools.compare import read_run
from tools.options import Options

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
MARKERS = ("<!-- rules: python extras/trace/doctor.py --page -->", "<!-- end of rules -->")
TOKENS = 32  # of a completion that are recomputed, and up to twice as many
TRACES = 6  # traces that are read: the first, the last, and others between
SAMPLE_BYTES = 20_000_000  # end of samples.jsonl that is read
LARGEST_MODEL = 500_000_000  # bytes of a reward model that is loaded to score again


class Finding(NamedTuple):
    rule: str
    seen: Seen
    remedy: str

    def lines(self) -> list[str]:
        at = f", step {self.seen.step}" if self.seen.step else ""
        examples = [f"    {text[:200]!r}" for text in self.seen.examples[:3]]
        return [f"{self.rule}{at}: {self.seen.text}", *examples, f"    look at: {self.remedy}"]


class Report(NamedTuple):
    findings: list[Finding]
    checked: int
    unchecked: Counter  # reasons

    def lines(self) -> list[str]:
        """Return the report; its first line is the most urgent finding, or what was checked."""
        reasons = [*self.unchecked.items()]
        said = {why: why if why == NOT_HERE else f"unchecked ({why})" for why, _ in reasons}
        left = "".join(f", {count} {said[why]}" for why, count in sorted(reasons))
        summary = f"{self.checked} rules checked{left}"
        found = [line for finding in self.findings for line in finding.lines()]
        return [*found, summary] if found else [f"nothing found: {summary}"]


# ---- read a run ----


def read_case(folder: Path) -> Case:
    """Read a run. Raises `ValueError` if a file is missing or damaged."""
    run = read_run(folder)
    if not run.metrics:
        raise ValueError(f"{folder / 'metrics.jsonl'}: no finished step; wait for the first one")
    traces = read_traces(folder)
    script = next((header["script"] for header, *_ in traces), run.script.stem)
    return Case(run.flags, script, run.metrics, read_samples(folder), traces, str(folder))


def read_samples(folder: Path) -> list[dict]:
    """Return the last lines of samples.jsonl, without an unfinished one."""
    path = folder / "samples.jsonl"
    if not path.is_file():
        return []
    with path.open("rb") as file:
        before = file.seek(max(0, path.stat().st_size - SAMPLE_BYTES))
        lines = file.read().split(b"\n")[before > 0 : -1]
    try:
        found = [json.loads(line) for line in lines]
        [(line["step"], line["prompt"], line["completion"]) for line in found]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: damaged; delete it") from error
    return found


def read_traces(folder: Path) -> list[list[dict]]:
    """Return header and groups of the first, the last and a few other traces, by step."""
    paths = sorted((folder / "trace").glob("step_*.jsonl.gz"))
    every = max(1, math.ceil((len(paths) - 1) / (TRACES - 1)))
    found = []
    for path in sorted({*paths[::every], *paths[-1:]}):
        try:
            header, *groups = trace_file.read(path)
            [(c["start"], c["mask"], c["updates"]) for g in groups for c in g["completions"]]
            found.append([header, *groups])
            header["step"], header["script"], header["flags"], header["tokens"]
        except (OSError, EOFError, ValueError, zlib.error, LookupError, TypeError) as error:
            if "schema" in str(error):
                raise
            raise ValueError(f"{path}: damaged; delete it") from error
    return found


# ---- rules about the texts of a trace ----

SPECIAL = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]|\[\|\w+\|\]")  # text of a special token


def mask_of(completion: dict) -> list[int]:
    """Return whether each token of prompt and completion is trained."""
    return [0] * completion["start"] + completion["mask"]


def in_rows(case: Case, is_wrong: Callable[[dict, dict], bool | None], what: str) -> Seen | None:
    """Return a finding if `is_wrong` is true of half of the traced rows for which it is not None.
    It gets a group and a completion."""
    rows = [(header["step"], c, is_wrong(group, c)) for header, group, c in case.traced()]
    rows = [row for row in rows if row[2] is not None]
    if not rows:
        raise Unchecked(NOT_HERE)
    wrong = [(step, c) for step, c, is_wrong in rows if is_wrong]
    if len(wrong) < len(rows) / 2:
        return None
    examples = []  # trained tokens in brackets
    for _, c in wrong[:3]:
        pairs = zip(c["tokens"], mask_of(c), strict=True)
        examples.append("".join(f"[{token}]" if on else token for token, on in pairs))
    return Seen(f"{what} in {len(wrong)} of {len(rows)} rows", wrong[0][0], tuple(examples))


def prompt_trained(case: Case) -> Seen | None:
    """Find a mask that trains the prompt.

    Threshold: a trained token inside the text of the prompt, in half of the traced rows, unless
    `--train_on all` (exact).
    Remedy: the mask in common/data/encode.py, the trace in `extras/trace/view.py`."""
    if case.flag("train_on", "") == "all":
        raise Unchecked(NOT_HERE)

    def is_trained(group: dict, c: dict) -> bool | None:
        prompt = group.get("prompt") or ""
        begin = "".join(c["tokens"]).find(prompt)
        if len(prompt) < 4 or begin < 0:
            return None
        ends = accumulate(map(len, c["tokens"]))
        spans = [(e - len(text), e) for e, text in zip(ends, c["tokens"], strict=True)]
        inside = [begin <= first and end <= begin + len(prompt) for first, end in spans]
        return any(on and there for on, there in zip(mask_of(c), inside, strict=True))

    return in_rows(case, is_trained, "prompt tokens are trained")


def no_end(case: Case) -> Seen | None:
    """Find rows of data whose end token is not trained.

    Threshold: the last trained token is no special one, in half of the traced rows that are shorter
    than `--max_length` (exact).
    Remedy: the end token in common/data/encode.py, `--chat_template`, `eos_token` of the
    tokenizer. A model that trains on such rows does not end its completions."""
    limits = [header["flags"].get("max_length") for header, *_ in case.traces]
    longest = next(filter(None, limits), math.inf)

    def lacks_end(group: dict, c: dict) -> bool | None:
        is_cut = len(c["ids"]) >= longest
        if "finish_reason" in c or c["start"] < 2 or is_cut or not any(c["mask"]):
            return None
        last = max(i for i, on in enumerate(mask_of(c)) if on)
        return not SPECIAL.fullmatch(c["tokens"][last].strip())

    return in_rows(case, lacks_end, "the last trained token is no end token")


def special_twice(case: Case) -> Seen | None:
    """Find a special token that is repeated.

    Threshold: the same special token twice in a row before the sampled tokens, padding and images
    apart, in half of the traced rows (exact).
    Remedy: `--chat_template` and the tokenizer: both may add a BOS."""

    def is_repeated(group: dict, c: dict) -> bool:
        end = c["start"] if "finish_reason" in c else len(c["ids"]) - 1
        pairs = zip(c["tokens"][:end], c["tokens"][1:end], strict=False)
        twice = [a for a, b in pairs if a == b and SPECIAL.fullmatch(a)]
        return any(not re.search("pad|image|vision|video", token) for token in twice)

    return in_rows(case, is_repeated, "a special token is repeated")


# ---- rules about advantages ----


def reversed_pairs(case: Case, of: Callable, least: int, limit: float, what: str) -> Seen | None:
    """Return a finding if more than `limit` of the pairs of a prompt, those for which `of` is true
    and whose advantages differ, have the lower advantage first."""
    both = chain(*(product(group, group) for group in case.groups()))
    pairs = [(a, b) for a, b in both if of(a, b) and a["advantage"] != b["advantage"]]
    if len(pairs) < least:
        raise Unchecked("too few completions that differ")
    wrong = [(a, b) for a, b in pairs if a["advantage"] < b["advantage"]]
    if len(wrong) <= limit * len(pairs):
        return None
    examples = tuple(f"reward {x['reward']:.3g}, advantage {x['advantage']:.3g}" for x in wrong[0])
    return Seen(f"{what} in {len(wrong)} of {len(pairs)} pairs of a prompt", 0, examples)


def advantage_sign(case: Case) -> Seen | None:
    """Find advantages with the wrong sign.

    Threshold: the completion with the higher reward has the lower advantage in over 90% of at
    least 8 pairs of a prompt (exact for one reward; penalties and KL disturb a few).
    Remedy: `advantages` of the script; the colour *advantage* in `extras/trace/view.py`."""
    penalty = case.flag("missing_eos_penalty")

    def better(a: dict, b: dict) -> bool:
        cut = penalty and "length" in (a["finish_reason"], b["finish_reason"])
        return a["reward"] > b["reward"] + 1e-9 and not cut

    what = "the higher reward has the lower advantage"
    return reversed_pairs(case, better, 8, 0.9, what)


def penalty_sign(case: Case) -> Seen | None:
    """Find a penalty of truncated answers that is added.

    Threshold: with `--missing_eos_penalty`, the truncated one of two completions with equal reward
    has the higher advantage in over half of at least 4 pairs of a prompt (exact; not for ppo.py,
    which subtracts a value).
    Remedy: `truncation_penalties` in common/rollout/measure.py."""
    if not case.flag("missing_eos_penalty") or case.script == "ppo":
        raise Unchecked(NOT_HERE)

    def ended_and_cut(a: dict, b: dict) -> bool:
        reasons = (a["finish_reason"], b["finish_reason"])
        return reasons == ("stop", "length") and abs(a["reward"] - b["reward"]) < 1e-9

    what = "the truncated answer has the higher advantage"
    return reversed_pairs(case, ended_and_cut, 4, 0.5, what)


def no_baseline(case: Case) -> Seen | None:
    """Find advantages without a baseline.

    Threshold: no advantage below 0, or none above, in 90% of at least 4 groups with different
    rewards, of scripts that compare a group (exact: their mean is 0).
    Remedy: `centre_groups` in `advantages` of the script, `--advantage`."""
    if case.script not in ("grpo", "gspo", "dapo", "rloo"):
        raise Unchecked(NOT_HERE)
    unequal = [group for group in case.groups() if len({c["reward"] for c in group}) > 1]
    groups = [[c["advantage"] for c in group] for group in unequal]
    if len(groups) < 4:
        raise Unchecked("too few completions that differ")
    wrong = [A for A in groups if min(A) > -1e-9 or max(A) < 1e-9]
    text = f"in {len(wrong)} of {len(groups)} groups all advantages have one sign"
    examples = tuple(" ".join(f"{x:.3g}" for x in A) for A in wrong[:3])
    return Seen(text, 0, examples) if len(wrong) >= 0.9 * len(groups) else None


# ---- rules that recompute the numbers of a trace ----


def tokens_of(case: Case, stream: str) -> Iterator[tuple[int, dict, float]]:
    """Yield, for trained tokens of the traces that have a stream, in long completions for `TOKENS`
    or more of them, evenly spaced: the step; the names of extras/trace/formulas.py with the value of the
    stream as `recorded`; its largest size in the completion."""
    flags = {name: x for name, x in case.flags.items() if isinstance(x, int | float)}
    for header, _, c in case.traced():
        for update in (u for u in c["updates"] if stream in u):
            known = dict(old_logprobs=update.get("logprobs")) | c["fixed"] | update
            streams = {re.sub(r"\W", "_", n): x for n, x in known.items() if isinstance(x, list)}
            trained = [t for t, on in enumerate(c["mask"]) if on]
            counts = {name: header[name][update["update"]] for name in ("tokens", "sequences")}
            names = dict(length=len(trained), advantage=c.get("advantage"), update=update["update"])
            sums = {f"sum_{n}": sum(x[t] or 0.0 for t in trained) for n, x in streams.items()}
            beta = case.metrics.get("beta", {}).get(header["step"], flags.get("beta"))
            of_all = flags | counts | names | sums | dict(beta=beta)
            largest = max(abs(x or 0.0) for x in update[stream])
            here = [t for t in trained if update[stream][t] is not None]
            for t in here[:: max(1, len(here) // TOKENS)]:
                of_token = {n: x[t] for n, x in streams.items() if n != "share"}
                of_token |= dict(recorded=update[stream][t], token=c["tokens"][c["start"] + t])
                if "advantages" in of_token:  # in place of that of the completion
                    of_token["advantage"] = of_token["advantages"]
                yield header["step"], of_all | of_token, largest


def off_formula(case: Case, stream: str, lines: list[tuple[str, str]], name: str) -> Seen | None:
    """Return a finding if recorded values differ from those by formula in 2% of the tokens."""
    wrong, count = [], 0
    for step, names, largest in tokens_of(case, stream):
        try:
            value = evaluate(lines, names)[name]
        except (NameError, TypeError, SyntaxError) as error:
            raise Unchecked("a formula needs more than the trace has") from error
        if not math.isnan(value):
            count += 1
            limit = 0.01 * max(largest, abs(value)) + 1e-6 * (stream == "kl") + 1e-12
            wrong += [(step, names, value)] * (abs(value - names["recorded"]) > limit)
    if not count:
        raise Unchecked(NOT_HERE)
    if len(wrong) <= 0.02 * count:
        return None
    text = f"{stream} of {len(wrong)} of {count} tokens differs from its formula"
    examples = [f"{x['token']}: {x['recorded']:.4g}, by formula {v:.4g}" for _, x, v in wrong[:3]]
    return Seen(text, wrong[0][0], tuple(examples))


def checked_flags(case: Case) -> dict:
    """Return the flags. Raises `Unchecked` if a list that a formula quotes has an item that is no
    number."""
    lists = [case.flag(x, ()) for x in ("cispo_mask", "correction_filter", "loss_weights")]
    if not all(isinstance(x, int | float) for x in chain(*lists)):
        raise Unchecked("a flag is no number")
    return case.flags


def first_ratio(case: Case) -> Seen | None:
    """Find ratios away from 1 before the first update.

    Threshold: mean distance above 0.005 in update 0, unless `--old_logprobs engine` (exact: it is
    the same forward pass).
    Remedy: the temperature and the weights of the two forward passes of the script: `with_logprobs`
    and the policy in its update."""
    tokens = [x for _, x, _ in tokens_of(case, "ratio") if x["update"] == 0]
    if not tokens or case.flag("old_logprobs", "") == "engine":
        raise Unchecked(NOT_HERE)
    far = sorted(tokens, key=lambda x: -abs(x["recorded"] - 1))
    mean = fmean(abs(x["recorded"] - 1) for x in tokens)
    examples = tuple(f"{x['token']}: {x['recorded']:.4g}" for x in far[:3])
    return Seen(f"the ratio is {mean:.3g} away from 1", 0, examples) if mean > 0.005 else None


def clipped_gradient(case: Case) -> Seen | None:
    """Find a gradient on clipped tokens.

    Threshold: over 10% of at least 3 clipped tokens have a gradient above 1e-6 of the largest of
    their completion, without KL term and entropy bonus (exact: it is 0).
    Remedy: `min` and the bounds of the clip in the loss of the script."""
    terms = ("beta", "entropy_coef", "entropy_target", "old_beta", "positive_nll")
    if any(case.flag(name) for name in terms) or case.script not in ("grpo", "dapo", "ppo"):
        raise Unchecked(NOT_HERE)  # other terms have a gradient there
    tokens = tokens_of(case, "logprobs_gradient")
    clipped = [row for row in tokens if row[1].get("clip_ratio_region_mean") == 1]
    if len(clipped) < 3:
        raise Unchecked("too few clipped tokens in the traces")
    wrong = [row for row in clipped if abs(row[1]["recorded"]) > 1e-6 * row[2]]
    text = f"{len(wrong)} of {len(clipped)} clipped tokens have a gradient"
    examples = tuple(f"{x['token']}: {x['recorded']:.2g}" for _, x, _ in wrong[:3])
    return Seen(text, clipped[0][0], examples) if len(wrong) > 0.1 * len(clipped) else None


def kl_differs(case: Case) -> Seen | None:
    """Find a KL that its own log-probs contradict.

    Threshold: over 2% of the traced tokens differ by 1% from the estimate of `--kl_estimator`
    (exact; float32 has 1e-6).
    Remedy: `kl_estimate` in common/objectives/kl.py: the sign of its log-ratio."""
    of_engine = case.flag("unbiased_kl") and case.flag("old_logprobs", "") == "engine"
    if not case.flag("beta") or of_engine or case.script not in ("grpo", "gspo", "reinforce"):
        raise Unchecked(NOT_HERE)
    ratio = [("rho", "exp(logprobs - old_logprobs)")]
    return off_formula(case, "kl", [*ratio, *kl(checked_flags(case))], "KL")


def share_differs(case: Case) -> Seen | None:
    """Find a loss that differs from the formula of its flags.

    Threshold: over 2% of the traced tokens differ by 1% of the largest share of their completion
    from extras/trace/formulas.py (exact; float32 has 1e-5).
    Remedy: the loss of the script and its arguments: the advantage, the clip, the weight of a
    token. `extras/trace/view.py` shows the formula beside the recorded share."""
    if case.script not in SCRIPTS:
        raise Unchecked(NOT_HERE)
    lines = formulas(case.script, checked_flags(case)).get(case.script)
    if not lines:
        raise Unchecked("no formula of these flags")
    return off_formula(case, "share", lines, "share")


def judge_differs(case: Case) -> Seen | None:
    """Find rewards that differ from the scores of their reward model.

    Threshold: correlation below 0.9 of the recorded rewards and the scores of the traced ids, for a
    local model below 0.5 GB with the policy's tokenizer (our choice; rounding leaves more).
    Remedy: the ids that the reward model gets: `RewardModel` in common/rewards/reward_model.py, its
    tokenizer and chat template."""
    name, folder = reward_model(case)
    scored = {tuple(c["ids"]): c[name] for _, _, c in case.traced() if c.get(name) is not None}
    pairs = [*scored.items()][:: max(1, len(scored) // 64)]
    if len(pairs) < 8:
        raise Unchecked("too few completions that differ")
    again = scores(folder, [ids for ids, _ in pairs])
    columns = [(x, y) for (_, x), y in zip(pairs, again, strict=True)]
    if any(len(set(side)) == 1 for side in zip(*columns, strict=True)):
        raise Unchecked("equal scores")
    r = correlation(centred(columns))
    examples = tuple(f"reward {x:.3g}, scored again {y:.3g}" for x, y in columns[:3])
    text = f"correlation of rewards and scores by {folder} is {r:.2f}"
    return Seen(text, 0, examples) if r < 0.9 else None


def reward_model(case: Case) -> tuple[str, Path]:
    """Return the name in the trace and the folder of the only reward model. Raises `Unchecked` if
    it cannot be loaded here or reads other ids than the policy."""
    paths = [Path(x[6:]) for x in case.flag("reward", ()) if str(x).startswith("model:")]
    if len(paths) != 1:
        raise Unchecked(NOT_HERE)
    weights = paths[0] / "model.safetensors"
    if not weights.is_file() or weights.stat().st_size > LARGEST_MODEL:
        raise Unchecked("the reward model is large or in no folder")
    of_policy = (Path(case.folder, "hf"), Path(case.flag("model", "")))
    files = [folder / "tokenizer.json" for folder in (paths[0], *of_policy)]
    texts = [file.read_bytes() for file in files if file.is_file()]
    if not files[0].is_file() or len(texts) < 2 or texts[0] != texts[1]:
        raise Unchecked("the reward model has another tokenizer")
    return "model", paths[0]


def scores(folder: Path, sequences: list[tuple[int, ...]]) -> list[float]:
    """Return the outputs of a sequence classifier, on the CPU. Raises `Unchecked` if it cannot be
    read."""
    import torch
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        with torch.no_grad():
            model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
            return [model(torch.tensor([ids])).logits.item() for ids in sequences]
    except (OSError, RuntimeError, SafetensorError) as error:
        raise Unchecked("the reward model cannot be read") from error


RULES = (
    prompt_trained, no_end, special_twice, advantage_sign, no_baseline, penalty_sign, first_ratio,
    kl_differs, clipped_gradient, share_differs, judge_differs, *doctor_rules.RULES,
)  # fmt: skip


# ---- report and page ----


def row_of(rule: Callable) -> tuple[str, str, str]:
    """Return symptom, threshold and remedy from the docstring of a rule."""
    text = " ".join((rule.__doc__ or "").split())
    symptom, rest = text.removeprefix("Find ").split(". Threshold: ", 1)
    threshold, remedy = rest.rstrip(".").split(". Remedy: ", 1)
    return symptom, threshold, remedy


def examine(folder: Path, rules: tuple[Callable, ...] = RULES) -> Report:
    """Apply rules to a run. Raises `ValueError` if a file is missing or damaged."""
    case = read_case(folder)
    findings, unchecked = [], Counter()
    for rule in rules:
        try:
            seen = rule(case)
        except Unchecked as reason:
            unchecked[str(reason)] += 1
            continue
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # The files of a run may hold anything; the other rules still apply.
            unchecked[f"{rule.__name__}: {type(error).__name__}: {error}"] += 1
            continue
        if seen is not None:
            findings.append(Finding(rule.__name__, seen, row_of(rule)[2]))
    return Report(findings, len(rules) - unchecked.total(), unchecked)


def first_line(folder: str) -> str:
    """Return the first line about a run that ends, without scoring again. An error is a line too:
    the run is complete, whatever its files hold."""
    try:
        return examine(Path(folder), tuple(x for x in RULES if x is not judge_differs)).lines()[0]
    except (OSError, ValueError) as error:
        return " ".join(f"not possible: {error}".split())


def page(text: str) -> str:
    """Return the page with the rows of the rules between its markers."""
    before, _, rest = text.partition(MARKERS[0])
    after = rest.partition(MARKERS[1])[2]
    rows = ["| symptom | found if | remedy |", "| --- | --- | --- |"]
    rows += [f"| {' | '.join(row_of(rule))} |" for rule in RULES]
    return "\n".join([before + MARKERS[0], "", *rows, "", MARKERS[1] + after])


def main() -> None:
    print_any_text()
    parser = Options(__doc__)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("--page", action="store_true", help=f"write the table of {PAGE.name}")
    options = parser.parse_args()
    if (options.run is None) != options.page:
        parser.error("name a RUN, or --page")
    try:
        if options.page:
            PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
            return
        for line in examine(options.run).lines():
            print(visible(line))
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
