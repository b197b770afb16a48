"""Measure a checkpoint: greedy score, pass@k, majority vote, reward-model score, win rate, perplexity.

    torchrun --nproc_per_node 8 eval.py --model runs/grpo/hf --config configs/eval_gsm8k.yaml --samples_per_prompt 16

Every prompt gets one greedy completion and `--samples_per_prompt` sampled ones, by the engine, the sampling and the
rewards of training. A completion solves its prompt if its first reward is at least 1. pass@k is the unbiased estimator
of Chen et al. 2021 (arXiv:2107.03374); intervals are 95% bootstraps over prompts. Completions are written as they come:
the same command goes on where it stopped. Results: `results.json` and a table.

Shapes: P prompts, S samples of each, B bootstrap draws.
"""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from common import distributed
from common.checkpoint import prepare_output_dir
from common.cli import parse
from common.config import SamplingArgs
from common.data import Encoder
from common.flags import MayChange, NotNegative, OpenFraction, Positive, with_flags
from common.hub import context_length, load_tokenizer, require_same_tokenizer, resolve_model
from common.models import Policy, load_policy, load_scalar_model
from common.packing import Sample, pack
from common.prompts import encode_prompts, prompt_columns
from common.rewards.functions import final_answers, last_boxed, to_number
from common.rewards.scoring import Rewards, require_context, score
from common.rollout import completions
from common.rollout.episodes import Episodes
from common.rows import load_rows

PERMUTATIONS = 64  # of the samples, over which a majority vote is averaged
OWN_FILE, THEIR_FILES = "completions.jsonl", "against_*.jsonl"


@dataclass
class Args(SamplingArgs):
    model: str = "tiny"
    """Hugging Face id or folder of the model to measure; `tiny` is a built-in untrained one"""
    dataset_split: str = "test"
    """split to evaluate on; a file, which has no splits, is taken whole"""
    output_dir: str = "runs/eval"
    """where everything goes: args.yaml, completions.jsonl, results.json"""
    max_prompts: Positive[int] | None = None
    """only the first so many rows of the data"""
    samples_per_prompt: NotNegative[int] = 4
    """completions sampled for each prompt beside the greedy one, S; 0: none"""
    greedy: bool = True
    """one greedy completion of each prompt"""
    ks: MayChange[tuple[int, ...]] = ()
    """the k of pass@k and majority@k that the table shows; default: 1, 2, 4, ... up to S. results.json has all"""
    prompts_per_batch: MayChange[Positive[int]] = 256
    """prompts sampled between two writes to completions.jsonl, over all ranks"""
    gpu_memory_utilization: OpenFraction = 0.8
    """fraction of each GPU's memory for vLLM's weights and KV cache"""
    domain_column: MayChange[str] = "domain"
    """column by which the table is divided, where the data has it"""
    completions: str | None = None
    """measure what is in this file instead of sampling: JSONL, a line per row of the data, with `completions` (a list
    of texts, or of objects as eval.py writes them) or `completion` (one text)"""
    against: MayChange[str | None] = None
    """win rate against another model, or against the completions in a .jsonl file"""
    reward_model: MayChange[str | None] = None
    """reward model whose mean score is reported, and which judges the win rate; default judge: `--reward`"""
    perplexity_model: MayChange[str | None] = None
    """language model under which the perplexity of the completions is reported"""
    bootstrap_samples: MayChange[Positive[int]] = 1000
    """bootstrap draws of the prompts, B"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.completions is None:
            if not (self.greedy or self.samples_per_prompt):
                raise ValueError("--greedy False --samples_per_prompt 0 leaves no completion")
            for k in self.ks:
                if not 1 <= k <= self.samples_per_prompt:
                    raise ValueError(f"--ks {k}: 1 to {self.samples_per_prompt}, that is --samples_per_prompt")
        for flag in ("completions", "against"):
            file = Path(getattr(self, flag) or "")
            if self.resume == "never" and file.is_file() and file.resolve().parent == Path(self.output_dir).resolve():
                raise ValueError(f"--{flag} {file}: --resume never would delete it")


# ---- estimators ----


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that one of k samples, drawn without replacement from n of which c are right, is right:
    1 - C(n - c, k) / C(n, k) (arXiv:2107.03374 Eq. 1). Raises `ValueError` if k is not in 1..n."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def final_answer(text: str) -> str | None:
    """What a completion votes for: its last boxed answer, its last `####` number or, of a short one, all of it."""
    answer = last_boxed(text) or (final_answers(text) or [text])[-1]
    number = to_number(answer)
    return str(number) if number is not None else "".join(answer.split())[:200] or None


def majority_at_k(answers: list[str | None], right: list[bool], rng: np.random.Generator) -> list[float]:
    """For k = 1..S, how often the most frequent answer of k samples is right, over random choices of the k. The first
    of equally frequent ones wins; a sample without an answer does not vote."""
    totals = np.zeros(len(answers))
    for _ in range(PERMUTATIONS):
        votes: Counter = Counter()
        is_right, leader = {None: False}, None
        for k, i in enumerate(rng.permutation(len(answers))):
            if (answer := answers[i]) is not None:
                votes[answer] += 1
                is_right.setdefault(answer, right[i])
                if votes[answer] > votes[leader]:
                    leader = answer
            totals[k] += is_right[leader]
    return (totals / PERMUTATIONS).tolist()


def mean_and_interval(totals_P: list[float], counts_P: list[float], draws: int, seed: int) -> dict[str, float]:
    """sum of totals / sum of counts, with its 95% interval by bootstrap over the prompts."""
    totals, counts = np.array(totals_P, dtype=float), np.array(counts_P, dtype=float)
    if not counts.sum():
        return {}
    rng, means = np.random.default_rng(distributed.fold_seed(seed)), []
    while len(means) < draws:
        chosen = rng.integers(0, len(totals), len(totals))
        if counts[chosen].sum():
            means.append(totals[chosen].sum() / counts[chosen].sum())
    low, high = np.quantile(means, [0.025, 0.975])
    return dict(mean=float(totals.sum() / counts.sum()), low=float(low), high=float(high))


# ---- measurements ----


def measure(args: Args, lines: list[dict]) -> dict:
    """What results.json says of these prompts."""
    interval = partial(mean_and_interval, draws=args.bootstrap_samples, seed=args.seed)

    def mean_of(value_of, groups: list[list[dict]]) -> dict[str, float]:
        values = [[value for c in group if (value := value_of(c)) is not None] for group in groups]
        return interval([sum(v) for v in values], [len(v) for v in values])

    everything = [line["completions"] for line in lines]
    sampled = [[c for c in group if not c["greedy"] and c["score"] is not None] for group in everything]
    right = [[c["score"] >= 1 for c in group] for group in sampled]
    rng = np.random.default_rng(distributed.fold_seed(args.seed))
    votes = [
        majority_at_k([final_answer(c["text"]) for c in group], right_S, rng)
        for group, right_S in zip(sampled, right, strict=True)
    ]
    out = dict(prompts=len(lines), greedy=mean_of(lambda c: c["score"] if c["greedy"] else None, everything))
    out |= dict(pass_at_k={}, majority_at_k={})
    for k in range(1, max(map(len, right)) + 1):
        enough = [i for i, right_S in enumerate(right) if len(right_S) >= k]  # a reward may be missing
        passes = [pass_at_k(len(right[i]), sum(right[i]), k) for i in enough]
        out["pass_at_k"][k] = interval(passes, [1] * len(enough))
        out["majority_at_k"][k] = interval([votes[i][k - 1] for i in enough], [1] * len(enough))
    names = everything[0][0]["rewards"]
    out["rewards"] = {name: mean_of(lambda c, name=name: c["rewards"][name], everything) for name in names}
    out["truncated"] = mean_of(lambda c: c["finish_reason"] == "length", everything)
    out["mean_length"] = mean_of(lambda c: sum(c["sampled"]), everything)
    out["mean_turns"] = mean_of(lambda c: c["turns"], everything)
    return out


@torch.no_grad()
def log_likelihoods(
    model: Policy, samples: list[Sample], pack_tokens: int, device: torch.device
) -> list[tuple[float, int]]:
    """The model's log-prob of each completion, in nats, and its tokens. Collective.

    Raises `ValueError` for a sequence that is longer than the model's context."""
    require_context(model, max((len(sample.ids) for sample in samples), default=0))
    for mb in pack(samples, pack_tokens, device):
        logprobs_T, *_ = model(mb, temperature=1.0)
        mb.to_samples(logp=mb.sequence_sums(logprobs_T))
    return [(sample.logp, sum(sample.loss_mask)) for sample in samples]


def wins(ours: list[list[float]], theirs: list[list[float]]) -> tuple[list[float], list[float]]:
    """Per prompt, how many of our completions were judged better than theirs with the same number, a tie being half a
    win; and of how many."""
    pairs = [
        [(a, b) for a, b in zip(*both, strict=True) if None not in (a, b)] for both in zip(ours, theirs, strict=True)
    ]
    return [sum((a > b) + 0.5 * (a == b) for a, b in group) for group in pairs], [len(group) for group in pairs]


def print_results(args: Args, results: dict) -> None:
    """All prompts with intervals; the domains below."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    overall = results["overall"]
    ks = args.ks or [1 << i for i in range(16) if 1 << i <= len(overall["pass_at_k"])]

    def shown(m: dict) -> dict[str, tuple[dict, float]]:
        """What of it is shown: name -> (mean and interval, scale)."""
        out = dict(greedy=(m["greedy"], 100.0)) | {f"pass@{k}": (m["pass_at_k"].get(k), 100.0) for k in ks}
        out |= {f"majority@{k}": (m["majority_at_k"].get(k), 100.0) for k in ks if k > 2}
        out |= dict(truncated=(m["truncated"], 100.0), tokens=(m["mean_length"], 1.0))
        return {name: (x, scale) for name, (x, scale) in out.items() if x}

    table = Table("", "", "95%", title=escape(f"{args.model} on {overall['prompts']} prompts of {args.dataset}"))
    beside = ("reward_model", "reward_model_against", "win_rate", "perplexity")
    lines = shown(overall) | {name: (results[name], 1.0) for name in beside if results.get(name)}
    for name, (x, scale) in lines.items():
        unit = " %" if scale == 100 else ""
        table.add_row(name + unit, f"{scale * x['mean']:.4g}", f"{scale * x['low']:.4g} to {scale * x['high']:.4g}")
    Console().print(table)
    if results["domains"]:
        columns = [name for name in shown(overall) if not name.startswith("majority")]
        table = Table("prompts", *columns, escape(args.domain_column))
        for name, m in results["domains"].items():
            cells = {c: f"{scale * x['mean']:.4g}" for c, (x, scale) in shown(m).items()}
            table.add_row(str(m["prompts"]), *(cells.get(column, "") for column in columns), escape(name))
        Console().print(table)


def main(args: Args) -> None:
    # ---- setup ----
    device, _, world_size = distributed.setup(args.seed)
    prepare_output_dir(args, owned=(THEIR_FILES, "results.json"))
    folder = Path(args.output_dir)

    # ---- data: prompts as token ids, and what the rewards need beside them ----
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path, args)
    rows = load_rows("--dataset", args.dataset, args.dataset_split, args.dataset_config, args.columns)
    if rows is None and Path(args.dataset).is_file():
        rows = load_rows("--dataset", args.dataset, "train", columns=args.columns)
    if rows is None:
        raise ValueError(f"--dataset {args.dataset} has no split {args.dataset_split!r}: see --dataset_split")
    rows = rows[: args.max_prompts]
    columns, room = prompt_columns(args, rows), context_length(path, args) - args.max_new_tokens
    rewards = Rewards(args, rows, tokenizer, device)
    prompts = encode_prompts(rows, columns, Encoder(tokenizer, args), room, args)
    if distributed.is_main():
        print(f"{prompts} on {world_size} ranks")

    # ---- what else is named, before anything slow ----
    others, files, episodes = {}, {}, args.environment is not None
    named = dict(against=args.against, completions=args.completions, reward_model=args.reward_model)
    named["perplexity_model"] = args.perplexity_model
    for flag, name in ((flag, name) for flag, name in named.items() if name is not None):
        if flag == "completions" or (flag == "against" and name.endswith(".jsonl")):
            files[flag] = completions.read_completions(f"--{flag}", Path(name), prompts, tokenizer, episodes=episodes)
        else:
            others[flag] = resolve_model(name, f"--{flag}")
            require_same_tokenizer(f"--{flag}", others[flag], tokenizer)
    if "against" in others:
        completions.require_same_architecture(path, others["against"])

    # ---- completions, ours and then theirs: from a file, or sampled ----
    both: list[list[dict]] = []
    engine = None
    theirs = folder / THEIR_FILES.replace("*", re.sub(r"\W+", "_", args.against or ""))
    for flag, model, file in (("completions", path, folder / OWN_FILE), ("against", others.get("against"), theirs)):
        if flag in files:
            both.append(completions.reward_again(files[flag], prompts, tokenizer, rewards))
        elif model is not None and all(len(lines) == len(prompts) for lines in both):  # not told to stop
            lines = completions.read_completions("--output_dir", file, prompts, tokenizer, own=True)
            if len(lines) < len(prompts):
                engine = completions.load_engine(engine, model, args, tokenizer, device)
                generate = partial(with_flags(completions.greedy_and_sampled, args), Episodes(engine, args, tokenizer))
                lines = completions.sample_completions(
                    file, lines, prompts, generate, rewards,
                    batch_size=args.prompts_per_batch, seed=args.seed, greedy=args.greedy,
                )  # fmt: skip
                engine.sleep()  # what comes next may need the memory
            both.append(lines)
    counts = [len(lines[0]["completions"]) for lines in both if lines]
    if len(set(counts)) > 1:
        raise ValueError(
            f"--against {args.against} has {counts[1]} completions of a prompt, there are {counts[0]} here"
        )
    if args.completions is not None and max(args.ks, default=0) > counts[0]:
        raise ValueError(f"--ks {max(args.ks)}: there are {counts[0]} completions of a prompt")

    # ---- measure ----
    if all(len(lines) == len(prompts) for lines in both):
        interval = partial(mean_and_interval, draws=args.bootstrap_samples, seed=args.seed)
        of_completions = partial(
            completions.numbers_of, prompts=prompts, tokenizer=tokenizer, pack_tokens=args.pack_tokens
        )
        of_domain: dict[str, list[dict]] = {}
        for line, row in zip(both[0], prompts.rows, strict=True):
            of_domain.setdefault(str(row.get(args.domain_column)), []).append(line)
        domains = {name: measure(args, of_domain[name]) for name in sorted(of_domain)} if len(of_domain) > 1 else {}
        results = dict(model=args.model, dataset=args.dataset, overall=measure(args, both[0]), domains=domains)
        judged = [[[c["reward"] for c in line["completions"]] for line in lines] for lines in both]
        if "reward_model" in others:
            judge = load_scalar_model(others["reward_model"], args, device, trainable=False, flag="--reward_model")
            judged = [
                of_completions(lines, lambda samples: score(judge, [x.ids for x in samples], args.pack_tokens, device))
                for lines in both
            ]
            for name, scores in zip(("reward_model", "reward_model_against"), judged, strict=False):
                results[name] = interval([sum(group) for group in scores], [len(group) for group in scores])
        if len(both) == 2:
            results["win_rate"] = interval(*wins(*judged))
        if "perplexity_model" in others:
            likely = load_policy(others["perplexity_model"], args, device, trainable=False, flag="--perplexity_model")
            found = of_completions(both[0], lambda samples: log_likelihoods(likely, samples, args.pack_tokens, device))
            totals = [(-sum(x for x, _ in group), sum(n for _, n in group)) for group in found]
            nats = interval(*zip(*totals, strict=True))
            results["perplexity"] = {name: math.exp(value) for name, value in nats.items()}
        if distributed.is_main():
            (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
            print_results(args, results)
    elif distributed.is_main():
        print("told to stop; the same command goes on from there")

    if engine is not None:
        engine.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
