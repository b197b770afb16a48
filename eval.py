r"""Measure a checkpoint: prompts solved, pass@k, majority vote, reward-model score, win rate,
perplexity.

    torchrun --nproc_per_node 8 eval.py --model runs/grpo/hf --config configs/eval_gsm8k.yaml \
        --template_kwargs enable_thinking=false

Every prompt gets one greedy completion and `--samples_per_prompt` sampled ones, with the engine,
sampling and rewards of training. A completion solves its prompt if its first reward is at least 1.
pass@k is the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374); intervals are 95%
bootstraps over prompts. Completions are stored in batches, and the same command continues an
interrupted run. It writes `results.json` and prints a table; with `--model runs/x/checkpoints` it
does so for each checkpoint, and draws a curve.

Shapes: P prompts, S samples of each, B bootstrap draws.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic.dataclasses import dataclass

from common import durable
from common.config.flags import MayChange, Needs, NotNegative, Positive
from common.config.groups import ImageArgs
from common.config.online import SamplingArgs
from common.config.parse import parse
from common.evaluate import checkpoint_curve, completions_file
from common.evaluate.completions_file import Line, StoredCompletion
from common.evaluate.estimators import (
    final_answer,
    majority_at_k,
    mean_and_interval,
    pass_at_k,
    shown_ks,
    wins,
)
from common.model.hub import longest_sequence, require_same_tokenizer, resolve_model
from common.model.policy import load_policy
from common.model.scoring import log_likelihoods
from common.parallel import distributed
from common.parallel.process import visible
from common.rewards.reward_model import load_model, path_of
from common.rewards.total import Rewards
from common.rollout.engine import Engine, EngineOptions, TruncationArgs
from common.rollout.engines import make_engine
from common.rollout.episodes import Episodes
from common.rollout.prompts import (
    Prompts,
    ShotArgs,
    encode_prompts,
    prompt_columns,
    say_not_named,
    show_first,
)
from common.rollout.weights import sync_weights, whole_weights
from common.text.encode import Encoder
from common.text.rows import rows_of_split
from common.text.tokenizer import load_tokenizer
from common.train.run_folder import begin_run, prepare_output_dir

OWN_FILE = "completions.jsonl"


@dataclass
class Args(ImageArgs, ShotArgs, TruncationArgs, SamplingArgs):
    model: str = "tiny-sft"
    """evaluate this model: Hugging Face id or folder, or the folder of a run's checkpoints, which
    are evaluated one by one and drawn as a curve; tiny, tiny-sft: built-in models"""
    dataset_split: str = "test"
    """evaluate on this split; a file, which has no splits, is taken whole"""
    output_dir: str = ""
    """write args.yaml, completions.jsonl and results.json to this folder; default: runs/eval"""
    eval_size: Positive[int] | None = None
    """evaluate on this many prompts, the first rows of the data; default: all"""
    samples_per_prompt: NotNegative[int] = 4
    """sample this many completions for each prompt besides the greedy one (S); 0: none"""
    prompts_per_step: MayChange[Positive[int]] = 256
    """write to completions.jsonl after every N sampled prompts, over all ranks"""
    completions: Annotated[str | None, Needs(agent=None)] = None
    """evaluate the completions of this file instead of sampling: JSONL with a line per row of the
    data and the column completions (list of texts, or of objects as in completions.jsonl) or
    completion (one text)"""
    against: Annotated[MayChange[str | None], Needs(agent=None)] = None
    """report the win rate over the completions in this file, read like --completions"""
    reward_model: Annotated[MayChange[str | None], Needs(agent=None)] = None
    """report the mean score by this reward model, or by a chat model as judge:PATH or, for pairs,
    rank:PATH. It decides the win rate too; by default `reward` does"""
    perplexity_model: Annotated[MayChange[str | None], Needs(agent=None)] = None
    """report the perplexity of the completions under this language model"""

    def __post_init__(self) -> None:
        if self.vision == "train":
            raise ValueError("--vision train: eval.py trains nothing; use frozen")
        if (self.reward_model or "").startswith("rank:") and self.against is None:
            raise ValueError(
                f"--reward_model {self.reward_model} compares two models; set --against"
            )

    @property
    def completions_per_prompt(self) -> int:
        return 1 + self.samples_per_prompt  # the greedy one


# ---- measurements ----


def vote_of(completion: StoredCompletion) -> str | None:
    if completion.vote == "":  # an earlier version wrote the file
        return final_answer(completion.text[completion.answer_at :])
    return completion.vote


def measure(args: Args, lines: list[Line]) -> dict:
    """Return the results of these prompts: the numbers of `overall` or of one domain in
    results.json."""
    interval = partial(mean_and_interval, seed=args.seed)
    everything = [line.completions for line in lines]
    greedy = [[c for c in group if c.greedy] for group in everything]
    sampled = [[c for c in group if not c.greedy and c.solves is not None] for group in everything]

    def mean_of(groups: list[list[StoredCompletion]], number: Callable) -> dict[str, float]:
        numbers = [[x for c in group if (x := number(c)) is not None] for group in groups]
        return interval([sum(x) for x in numbers], [len(x) for x in numbers])

    out = dict(
        prompts=len(lines),
        failed=sum(bool(c.reward_errors) for c in chain(*everything)),
        unscored=sum(c.solves is None for c in chain(*everything)),
        solved=mean_of(greedy, lambda c: c.solves),
        reward=mean_of(greedy, lambda c: c.reward),
        pass_at_k={},
        majority_at_k={},
    )
    right = [[bool(c.solves) for c in group] for group in sampled]
    rng = np.random.default_rng(distributed.fold_seed(args.seed))
    votes = [
        majority_at_k(
            [vote_of(c) for c in group], [None if c.score is None else c.solves for c in group], rng
        )
        for group in sampled
    ]
    for k in range(1, max(map(len, right)) + 1):
        # A reward may be missing.
        enough = [i for i, right_G in enumerate(right) if len(right_G) >= k]
        passes = [pass_at_k(len(right[i]), sum(right[i]), k) for i in enough]
        out["pass_at_k"][k] = interval(passes, [1] * len(enough))
        out["majority_at_k"][k] = interval([votes[i][k - 1] for i in enough], [1] * len(enough))
    names = dict.fromkeys(name for c in chain(*everything) for name in c.rewards)
    out["rewards"] = {
        name: mean_of(everything, lambda c, name=name: c.rewards.get(name)) for name in names
    }
    out["truncated"] = mean_of(everything, lambda c: c.finish_reason == "length")
    out["mean_length"] = mean_of(everything, lambda c: sum(c.sampled))
    out["mean_turns"] = mean_of(everything, lambda c: c.turns)
    return out


def print_results(results: dict) -> None:
    """Print a table of all prompts, with intervals, and one of the domains."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    overall = results["overall"]
    ks = shown_ks(len(overall["pass_at_k"]))

    def shown(m: dict) -> dict[str, tuple[dict, float]]:
        """Return the columns: name -> (mean and interval, scale)."""
        out = dict(solved=(m["solved"], 100.0), reward=(m["reward"], 1.0)) | {
            f"pass@{k}": (m["pass_at_k"].get(k), 100.0) for k in ks
        }
        out |= {f"majority@{k}": (m["majority_at_k"].get(k), 100.0) for k in ks if k > 2}
        out |= dict(truncated=(m["truncated"], 100.0), tokens=(m["mean_length"], 1.0))
        return {name: (x, scale) for name, (x, scale) in out.items() if x}

    dropped = f" ({results['too_long']} too long)" if results["too_long"] else ""
    title = f"{results['model']} on {overall['prompts']} prompts{dropped} of {results['dataset']}"
    table = Table("", "", "95%", title=Text(visible(title)))
    optional = checkpoint_curve.OPTIONAL_RESULTS
    lines = shown(overall) | {name: (results[name], 1.0) for name in optional if results.get(name)}
    for name, (x, scale) in lines.items():
        unit = " %" if scale == 100 else ""
        table.add_row(
            name + unit,
            f"{scale * x['mean']:.4g}",
            f"{scale * x['low']:.4g} to {scale * x['high']:.4g}",
        )
    Console().print(table)
    if results["domains"]:
        columns = [name for name in shown(overall) if not name.startswith("majority")]
        table = Table("prompts", *columns, "domain")
        for name, m in results["domains"].items():
            cells = {c: f"{scale * x['mean']:.4g}" for c, (x, scale) in shown(m).items()}
            table.add_row(
                str(m["prompts"]),
                *(cells.get(column, "") for column in columns),
                Text(visible(name)),
            )
        Console().print(table)


def left_out(results: dict, lines: list[Line]) -> list[str]:
    """Return lines about completions that were cut off, failed (not solved), or have no reward."""
    everything = [(line.source, c) for line in lines for c in line.completions]
    said = []
    if failed := results["overall"]["failed"]:
        errors = (
            f"{name} on {source}: {error}"
            for source, c in everything
            for name, error in c.reward_errors.items()
        )
        problem = f"{failed} of {len(everything)} completions have a reward that failed"
        said.append(f"{problem} and count as not solved; the first: {next(errors)}")
    if unscored := results["overall"]["unscored"]:
        problem = f"{unscored} of {len(everything)} completions have no reward (None)"
        said.append(f"{problem} and are in no fraction")
    if (cut := results["overall"]["truncated"]["mean"]) > 0.1:
        cause = "before they could answer: see --max_new_tokens"
        said.append(f"{cut:.0%} of the completions were truncated, perhaps {cause}")
    if pairs := results.get("not_compared"):
        said.append(f"{pairs} of {len(everything)} pairs are not compared: one has no reward")
    return said


@dataclasses.dataclass
class Task:
    """Prompts and judges, the same for every checkpoint."""

    prompts: Prompts
    tokenizer: Any
    rewards: Rewards
    device: torch.device
    folders: dict[str, str]  # folders of further models by flag: reward_model, perplexity_model
    files: dict[str, list[Line]]  # completions from a file by flag: completions, against


def load_task(args: Args, path: str, device: torch.device) -> Task:
    """Load and check the inputs of all flags, before anything slow. `path` is the model's
    folder."""
    tokenizer = load_tokenizer(path, args)
    rows = rows_of_split(
        "--dataset", args.dataset, "--dataset_split", args.dataset_split, args, whole_file=True
    )
    rows = rows[: args.eval_size]
    columns = prompt_columns(args, rows, also_read=["domain"])
    say_not_named(args, rows, columns, also_read=["domain"], shot_args=args)
    encoder = Encoder(tokenizer, args, image_args=args)
    limit = longest_sequence(path, args)
    prompts = encode_prompts(rows, columns, encoder, limit, args, shot_args=args)
    show_first(prompts, tokenizer)
    rewards = Rewards(args, prompts.rows, tokenizer, device)
    files = {}
    for flag, name in dict(completions=args.completions, against=args.against).items():
        if name is not None:
            files[flag] = completions_file.read_completions(
                f"--{flag}", Path(name), prompts, tokenizer, episodes=args.environment is not None
            )
    if args.against is not None:
        own, other = files.get("completions"), len(files["against"][0].completions)
        count = args.completions_per_prompt if own is None else len(own[0].completions)
        if other != count:
            difference = f"{other} completions of a prompt, there are {count} here"
            raise ValueError(f"--against {args.against} has {difference}")
    folders = {}
    if args.reward_model is not None:
        folders["reward_model"] = resolve_model(path_of(args.reward_model), "--reward_model")
    if args.perplexity_model is not None:
        folders["perplexity_model"] = resolve_model(args.perplexity_model, "--perplexity_model")
        require_same_tokenizer("--perplexity_model", folders["perplexity_model"], tokenizer)
    return Task(prompts, tokenizer, rewards, device, folders, files)


def answers(
    args: Args, task: Task, engine: Engine | None, path: str, file: Path
) -> tuple[list[Line], Engine | None]:
    """Return the completions of --model, read from or sampled into `file`: a line per prompt, or
    fewer after a stop. Also return the engine, which is started when needed. Collective."""
    if "completions" in task.files:
        lines = task.files["completions"]
        return completions_file.reward_again(lines, task.prompts, task.rewards), engine
    lines = completions_file.read_completions(
        "--output_dir", file, task.prompts, task.tokenizer, own=True
    )
    if len(lines) < len(task.prompts):
        if engine is None:
            options = EngineOptions(image_args=args, truncation_args=args)
            engine = make_engine(path, args, task.tokenizer, task.device, False, options)
        else:  # a process can have only one: it gets other weights
            policy = load_policy(path, args, task.device, trainable=False, image_args=args)
            sync_weights(engine, whole_weights(policy, engine.dtype))
        episodes = Episodes(engine, args)
        lines = completions_file.sample_completions(
            file, lines, task.prompts, episodes, task.rewards, args, args.prompts_per_step
        )
        episodes.close()
        engine.sleep()  # frees memory for the judges
    return lines, engine


def all_results(args: Args, task: Task, model: str, outputs: list[list[Line]]) -> dict:
    """Return results.json of a model. `outputs`: its lines and, with --against, those of the other
    model. Collective."""
    folders = task.folders
    interval = partial(mean_and_interval, seed=args.seed)
    lines_of_domain: dict[str, list[Line]] = {}
    for line, row in zip(outputs[0], task.prompts.rows, strict=True):
        lines_of_domain.setdefault(str(row.get("domain")), []).append(line)
    domains = {name: measure(args, lines_of_domain[name]) for name in sorted(lines_of_domain)}
    if len(domains) == 1:
        domains = {}
    overall = measure(args, outputs[0])
    results: dict = dict(
        model=model, dataset=" ".join(args.dataset), too_long=task.prompts.dropped,
        overall=overall, domains=domains,
    )  # fmt: skip
    judged = [[[c.reward for c in line.completions] for line in lines] for lines in outputs]
    if "reward_model" in folders:
        judge = load_model(
            "--reward_model", args.reward_model, args, task.prompts.rows, task.tokenizer,
            task.device,
        )  # fmt: skip
        judged = completions_file.scores_of_outputs(judge, outputs, task.prompts)
        for name, scores in zip(("reward_model", "reward_model_against"), judged, strict=False):
            results[name] = interval(
                [sum(group) for group in scores], [len(group) for group in scores]
            )
    if len(outputs) == 2:
        points, pairs = wins(*judged)
        results["win_rate"] = interval(points, pairs)
        results["not_compared"] = sum(map(len, judged[0])) - sum(pairs)
    if "perplexity_model" in folders:
        scorer = load_policy(
            folders["perplexity_model"], args, task.device, trainable=False,
            flag="--perplexity_model",
        )  # fmt: skip
        nats = completions_file.score_stored(
            outputs[0], lambda x: log_likelihoods(scorer, x, args.pack_tokens), task.prompts
        )
        totals = [(-sum(x for x, _ in group), sum(n for _, n in group)) for group in nats]
        estimate = interval(*zip(*totals, strict=True))
        results["perplexity"] = {name: math.exp(value) for name, value in estimate.items()}
    return results


def main(args: Args) -> None:
    # ---- setup ----
    device, _, world_size = distributed.setup(args.seed)
    prepare_output_dir(args, replaces=())
    folder = Path(args.output_dir)

    # ---- one model, or every checkpoint of a folder ----
    models = checkpoint_curve.results_folders(args.model, folder)
    if args.completions is not None and models[0][0] != folder:
        problem = f"are of one model, --model {args.model} has {len(models)}"
        raise ValueError(f"--completions {args.completions} {problem}")
    task = load_task(args, resolve_model(models[-1][1]), device)
    begin_run(args, task.prompts.rows, keeps_rewards=True)
    distributed.say(f"{task.prompts} on {world_size} rank{'s' * (world_size > 1)}")

    # ---- completions of each, from a file or sampled by one engine; then their results ----
    engine = None
    stopped = False
    other_lines = []
    if against := task.files.get("against"):
        other_lines = [completions_file.reward_again(against, task.prompts, task.rewards)]
    for target, model in models:
        if target != folder and not checkpoint_curve.still_exists(model):
            continue
        target.mkdir(exist_ok=True)
        path = resolve_model(model)
        lines, engine = answers(args, task, engine, path, target / OWN_FILE)
        if stopped := len(lines) < len(task.prompts):
            break
        outputs = [lines, *other_lines]
        results = all_results(args, task, model, outputs)
        if distributed.is_main():
            durable.write_text(target / "results.json", json.dumps(results, indent=2) + "\n")
            print_results(results)
            for line in left_out(results, lines):
                print(visible(line), flush=True)
            if target != folder:
                checkpoint_curve.draw(folder)
    if stopped:
        distributed.say("told to stop; the same command goes on from there")

    if engine is not None:
        engine.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
