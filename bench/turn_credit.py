"""Compare the credit that reinforce.py gives to a turn with its true advantage, and train with each
credit: the numbers and the picture of docs/environments.md.

    python bench/turn_credit.py exact     # scripted players, whose values are computed exactly
    python bench/turn_credit.py sft       # a language model for guess_number: sft.py
    python bench/turn_credit.py values    # the same for it, with values by brute force
    python bench/turn_credit.py curves    # a scripted player of guess_number learns
    python bench/turn_credit.py draw      # the tables and docs/turn_credit.png

The true advantage of a turn is its reward plus the value after it, minus the value before it. By
brute force, a value is the mean reward of further episodes that the policy samples from the same
prefix; their seeds differ from those of the episodes that get credit. One rank; results stay in
runs/turn_credit, and what is there is not repeated. The intervals are 95% t intervals of the mean
over three seeds."""

import argparse
import copy
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache, partial
from itertools import chain, groupby
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import reinforce
from common.config.parse import parse
from common.data.encode import Encoder
from common.data.sample import Completion, Group
from common.data.tasks import TASKS
from common.model.hub import load_tokenizer
from common.parallel import distributed
from common.rollout.completions_file import load_engine
from common.rollout.environments import ENVIRONMENTS
from common.rollout.episodes import Episodes, PromptRequest
from common.rollout.prompts import encode_prompts, prompt_columns

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "turn_credit"
SEEDS = (0, 1, 2)
GROUPS = (4, 16, 64)
T_95 = 4.303  # two degrees of freedom
MAX_TURNS = dict(guess_number=5, calculator=3)
CREDITS = {
    "turn": dict(turn_credit="turn", turn_discount=1.0),
    "group": dict(turn_credit="group", turn_discount=1.0),
    "state": dict(turn_credit="state", turn_discount=1.0),
    "coarser state": dict(turn_credit="state", turn_discount=1.0),
    "state, discount 0.95": dict(turn_credit="state", turn_discount=0.95),
}
METHODS = ("episode", *CREDITS, "episode + 1 state", "episode + 4 state")
ARMS = ("episode", "turn", "state", "coarser state", "episode + 1 state")


def launch(folder: Path, script: str, *flags: str) -> None:
    """Run a script once, on one rank and one thread."""
    if (folder / "hf").is_dir():
        return
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, script, *flags, "--output_dir", str(folder), "--resume", "never"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def train_policy() -> None:
    launch(
        OUT / "guess_number_sft", "sft.py", "--model", "tiny", "--dataset", "guess_number",
        "--max_steps", "120", "--batch_size", "48", "--warmup_steps", "20", "--lr", "0.003",
        "--lr_schedule", "cosine", "--eval_every", "0",
    )  # fmt: skip


# ---- scripted players: exact values ----


class Guesser:
    """Player of guess_number: halves the interval roughly, like the demonstrator of the task, but
    guesses anything with probability `slip`."""

    name = "guess_number"
    slip = 0.3

    def __init__(self, rng: random.Random):
        self.row = dict(prompt="1-50?", number=rng.randint(1, 50))
        self.start = (1, 50)

    def moves(self, state: tuple[int, int]) -> dict[str, float]:
        """Return the texts of a turn and their probabilities."""
        low, high = state
        moves: dict[str, float] = defaultdict(float)
        for guess in range(1, 51):
            moves[str(guess)] += self.slip / 50
        for step in range(-2, 3):
            guess = max(low, min(high, (low + high) // 2 + step))
            moves[str(guess)] += (1 - self.slip) / 5
        return moves

    def after(self, state: tuple[int, int], text: str) -> tuple[float, tuple[int, int] | None]:
        """Return the reward of a turn, and the state after it, None at the end."""
        low, high = state
        guess = int(text)
        if guess == self.row["number"]:
            return 1.0, None
        if guess < self.row["number"]:
            return 0.0, (max(low, guess + 1), high)
        return 0.0, (low, min(high, guess - 1))


class Caller:
    """Player of the calculator: calls it, sometimes wrongly, or estimates; mostly copies what it
    was told."""

    name = "calculator"

    def __init__(self, rng: random.Random):
        a = rng.randint(100, 999)
        b = rng.randint(12, 99)
        self.product = str(a * b)
        self.call = f"<calc>{a}*{b}</calc>"
        self.row = dict(prompt=f"{a}*{b}?", answer=self.product)
        self.start = False  # whether it was told the product

    def moves(self, told: bool) -> dict[str, float]:
        if told:
            return {self.product: 0.8, "0": 0.15, self.call: 0.05}
        return {"0": 0.58, self.product: 0.02, self.call: 0.25, "<calc>": 0.15}

    def after(self, told: bool, text: str) -> tuple[float, bool | None]:
        if "<calc>" in text:
            return 0.0, told or text == self.call
        return float(text == self.product), None


def play(player, rng: random.Random) -> tuple[Completion, list[float]]:
    """Return an episode in the real environment, with a token for each turn and each reply, and the
    true advantage of each turn."""
    environment = ENVIRONMENTS[player.name]()
    environment.reset(player.row)

    @cache
    def value(state, left: int) -> float:
        if state is None or left == 0:
            return 0.0
        total = 0.0
        for text, probability in player.moves(state).items():
            reward, after = player.after(state, text)
            total += probability * (reward + value(after, left - 1))
        return total

    player.value = getattr(player, "value", value)  # one table for the episodes of a prompt
    completion = Completion([0], [False], prompt_length=1, turns=0)
    state = player.start
    truths = []
    while state is not None and completion.turns < MAX_TURNS[player.name]:
        left = MAX_TURNS[player.name] - completion.turns
        completion.states.append(environment.state())
        moves = player.moves(state)
        (text,) = rng.choices([*moves], [*moves.values()])
        _, reward, done = environment.step(text)
        expected, after = player.after(state, text)
        assert (reward, done) == (expected, after is None)
        add_turn(completion, reward)
        truths.append(reward + player.value(after, left - 1) - player.value(state, left))
        state = after
    return completion, truths


def exact_correlations(kind: type, group_size: int, prompts: int, seed: int) -> dict[str, float]:
    """Return the correlation of each credit with the true advantage, and the fraction of turns that
    share their state."""
    rng = random.Random(1000 * seed + group_size)
    columns: dict[str, list[float]] = defaultdict(list)
    for _ in range(prompts):
        player = kind(rng)
        group, truths = zip(*(play(player, rng) for _ in range(group_size)), strict=True)
        states = Counter(chain.from_iterable(completion.states for completion in group))
        found = credits_of(list(group), player.name)
        for i, completion in enumerate(group):
            columns["truth"] += truths[i]
            columns["shared"] += [float(states[state] > 1) for state in completion.states]
            for method, of_group in found.items():
                columns[method] += of_group[i]
    truth = columns.pop("truth")
    shared = fmean(columns.pop("shared"))
    return {m: correlation(x, truth) for m, x in columns.items()} | dict(shared=shared)


def measure_exactly(options: argparse.Namespace) -> dict:
    return {
        kind.name: {
            size: [exact_correlations(kind, size, options.exact_prompts, seed) for seed in SEEDS]
            for size in GROUPS
        }
        for kind in (Guesser, Caller)
    }


# ---- values by brute force ----


class Replayed:
    """An environment after the turns in the column `_played`."""

    def __init__(self, make):
        self.environment = make()
        self.step = self.environment.step
        self.state = self.environment.state

    def reset(self, example: dict) -> list:
        messages = self.environment.reset(example)
        for text in example["_played"]:
            self.step(text)
        return messages


class Values:
    """Values of prefixes under the policy, by sampling."""

    def __init__(self, name: str, engine, args: reinforce.Args, tokenizer, samples: int):
        self.name = name
        self.engine = engine
        self.args = args
        self.tokenizer = tokenizer
        self.samples = samples

        ENVIRONMENTS[f"{name}_replayed"] = partial(Replayed, ENVIRONMENTS[name])

    def of_prefixes(self, prefixes: dict[tuple[int, ...], dict]) -> dict:
        """Return the rewards of further episodes for each prefix, a tuple of ids. `prefixes` has
        its data row, with the turns that were played in the column `_played`."""
        found = {}
        for played in sorted({len(row["_played"]) for row in prefixes.values()}):
            args = copy.copy(self.args)
            args.environment = f"{self.name}_replayed"
            args.max_turns -= played
            some = {ids: row for ids, row in prefixes.items() if len(row["_played"]) == played}
            requests = [
                PromptRequest(
                    i, [*ids], row, distributed.fold_seed(77, played, i), self.samples, 1.0
                )
                for i, (ids, row) in enumerate(some.items())
            ]
            groups = Episodes(self.engine, args, self.tokenizer).generate(requests)
            for ids, group in zip(some, groups, strict=True):
                found[ids] = [score(completion) for completion in group]
        return found


def score(completion: Completion) -> float:
    return sum(reward for _, reward in completion.turn_rewards)


def turns_of(completion: Completion, text_of) -> list[tuple[tuple[int, ...], str]]:
    """Return the prefix and the text of each turn of the model."""
    turns = []
    at = 0
    for trained, span in groupby(completion.loss_mask):
        size = len([*span])
        if trained:
            ids = completion.ids[at : at + size]
            turns.append((tuple(completion.ids[:at]), text_of(ids)))
        at += size
    return turns


def how_many(state: str) -> str:
    """Return the order of magnitude of the count of numbers that are left, of `low to high`."""
    low, high = (min(50.0, float(bound)) for bound in state.split(" to "))
    return str(int(high - max(low, 1.0) + 1).bit_length())


@cache
def args_of(name: str, method: str) -> reinforce.Args:
    return reinforce.Args(environment=name, reward=("environment",), **CREDITS[method])


def credit_of(group: Group, name: str, method: str) -> list[list[float]]:
    """Return the credit of each turn of each completion."""
    scores = [score(completion) for completion in group]
    if method == "episode":
        less_1G = reinforce.less_baseline("reinforce++_baseline", torch.tensor([scores]))
        return [[x] * c.turns for c, x in zip(group, less_1G[0].tolist(), strict=True)]
    if method.startswith("episode + "):
        coef = float(method.split()[2])
        both = (credit_of(group, name, part) for part in ("episode", "state"))
        return [
            [a + coef * b for a, b in zip(one, other, strict=True)]
            for one, other in zip(*both, strict=True)
        ]
    if method == "coarser state":
        group = [copy.copy(completion) for completion in group]
        for completion in group:
            completion.states = [how_many(state) for state in completion.states]
    return reinforce.turn_advantages(group, scores, 1.0, args_of(name, method))


def credits_of(group: Group, name: str) -> dict[str, list[list[float]]]:
    methods = [m for m in METHODS if m != "coarser state" or name == "guess_number"]
    return {method: credit_of(group, name, method) for method in methods}


def measure(name: str, seed: int, options: argparse.Namespace, device: torch.device) -> list[dict]:
    """Return one line for each turn of the sampled episodes."""
    path = str(OUT / f"{name}_sft" / "hf")
    flags = [
        "--model", path, "--dataset", name, "--environment", name, "--reward", "environment",
        "--max_turns", str(MAX_TURNS[name]), "--max_new_tokens", "150", "--engine",
        "transformers", "--turn_credit", "state", "--prompt_format", "chat",
    ]  # fmt: skip
    args = parse(reinforce.Args, flags)
    tokenizer = load_tokenizer(path, args)
    rows = [dict(row, _source=f"{name}:{i}") for i, row in enumerate(TASKS[name]("test"))]
    rows = rows[seed * options.prompts :][: options.prompts]
    columns = prompt_columns(args, rows)
    prompts = encode_prompts(rows, columns, Encoder(tokenizer, args), 1000, args)
    engine = load_engine(None, path, args, tokenizer, device, "--model")
    requests = [
        PromptRequest(i, ids, row, distributed.fold_seed(seed, i), options.group, 1.0)
        for i, (ids, row) in enumerate(zip(prompts.ids, prompts.rows, strict=True))
    ]
    groups = Episodes(engine, args, tokenizer).generate(requests)

    def text_of(ids: list[int]) -> str:
        return tokenizer.decode([i for i in ids if i not in engine.silent_ids])

    prefixes = {}
    for group, row in zip(groups, prompts.rows, strict=True):
        for completion in group:
            played = []
            for prefix, text in turns_of(completion, text_of):
                prefixes[prefix] = row | dict(_played=[*played])
                played.append(text)
    values = Values(name, engine, args, tokenizer, options.samples).of_prefixes(prefixes)
    lines = []
    for number, group in enumerate(groups):
        credits = credits_of(group, name)
        states = Counter(state for c in group for state in c.states[: c.turns])
        for i, completion in enumerate(group):
            turns = turns_of(completion, text_of)
            befores = [values[prefix] for prefix, _ in turns]
            afters = [*befores[1:], [0.0] * options.samples]
            rewards = [reward for _, reward in completion.turn_rewards] + [0.0]
            for k, (before, after) in enumerate(zip(befores, afters, strict=True)):
                gains = [rewards[k] + b - a for a, b in zip(before, after, strict=True)]
                lines.append(
                    dict(prompt=number, index=k, truth=fmean(gains), halves=[fmean(gains[::2]),
                         fmean(gains[1::2])], peers=states[completion.states[k]] - 1,
                         **{m: c[i][k] for m, c in credits.items()})
                )  # fmt: skip
    engine.close()
    return lines


def correlation(xs: list[float], ys: list[float]) -> float:
    return float(torch.corrcoef(torch.tensor([xs, ys], dtype=torch.float64))[0, 1])


def interval(numbers: list[float]) -> tuple[float, float]:
    """Return mean and half of the width of its 95% t interval."""
    return fmean(numbers), T_95 * stdev(numbers) / math.sqrt(len(numbers))


def measured() -> dict[str, tuple[float, float]]:
    """Return, for the language model, the correlation of each credit with the true advantage, the
    fraction of turns that share their state, and the greatest correlation that the noise of the
    values allows, with their intervals."""
    of_seeds = []
    for seed in SEEDS:
        lines = json.loads((OUT / f"values_{seed}.json").read_text())
        truth = [line["truth"] for line in lines]
        half = correlation(*zip(*(line["halves"] for line in lines), strict=True))
        found = {m: correlation([line[m] for line in lines], truth) for m in METHODS}
        found["shared"] = fmean(line["peers"] > 0 for line in lines)
        of_seeds.append(found | {"limit": math.sqrt(2 * half / (1 + half))})
    return {m: interval([found[m] for found in of_seeds]) for m in of_seeds[0]}


def measured_exactly(name: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the same for a scripted player, by the size of the group."""
    of_sizes = json.loads((OUT / "exact.json").read_text())[name]
    return {
        size: {m: interval([found[m] for found in of_seeds]) for m in of_seeds[0]}
        for size, of_seeds in of_sizes.items()
    }


# ---- training ----


def learn(arm: str, seed: int, steps: int, prompts: int = 8, group_size: int = 16) -> list[float]:
    """Return the mean reward at each step of REINFORCE on guess_number with the credit `arm`. The
    player draws its guess from the interval that is left, at first uniformly; it has a logit for
    each place in an interval of each width. Advantages are whitened over all turns."""
    rng = random.Random(seed)
    logits = torch.zeros(51, 50, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    inside = torch.arange(50) < torch.arange(51)[:, None]
    inside[0, 0] = True  # no interval has this width
    rewards = []
    for _ in range(steps):
        logprobs = logits.masked_fill(~inside, -math.inf).log_softmax(-1)
        tables = [row[:width] for width, row in enumerate(logprobs.exp().tolist())]
        places, credits, scores = [], [], []
        for _ in range(prompts):
            number = rng.randint(1, 50)
            group = []
            for _ in range(group_size):
                completion, of_turns = guess(number, tables, rng)
                group.append(completion)
                places += of_turns
            scores += map(score, group)
            credits += chain(*credit_of(group, "guess_number", arm))
        rewards.append(fmean(scores))
        A = torch.tensor(credits)
        A = (A - A.mean()) / (A.std() + 1e-6)
        rows, columns = torch.tensor(places).unbind(1)
        optimizer.zero_grad()
        (-A * logprobs[rows, columns]).mean().backward()
        optimizer.step()
    return rewards


def guess(
    number: int, tables: list[list[float]], rng: random.Random
) -> tuple[Completion, list[tuple[int, int]]]:
    """Return an episode, and the width of the interval and the place in it of each guess."""
    environment = ENVIRONMENTS["guess_number"]()
    environment.reset(dict(prompt="1-50?", number=number))
    completion = Completion([0], [False], prompt_length=1, turns=0)
    places = []
    done = False
    while not done and completion.turns < MAX_TURNS["guess_number"]:
        low = max(1, environment.low)
        width = int(min(50, environment.high)) - low + 1
        (place,) = rng.choices(range(width), tables[width])
        places.append((width, place))
        completion.states.append(environment.state())
        _, reward, done = environment.step(str(low + place))
        add_turn(completion, reward)
    return completion, places


def add_turn(completion: Completion, reward: float) -> None:
    """Add a token of a turn, and one of a reply."""
    completion.ids += [1, 2]
    completion.loss_mask += [True, False]
    completion.turn_rewards.append((len(completion.ids) - 2, reward))
    completion.turns += 1


SHOWN = ("episode", "turn", "state", "coarser state", "episode + 1 state")


def draw() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for axis, name in zip(axes, MAX_TURNS, strict=False):
        of_sizes = measured_exactly(name)
        for color, method in enumerate(SHOWN):
            if method in of_sizes["4"]:
                means, errors = zip(*(found[method] for found in of_sizes.values()), strict=True)
                axis.errorbar(
                    [*of_sizes], means, errors, color=f"C{color}", label=method, capsize=3
                )
        axis.set_title(f"{name}: correlation with the true advantage", fontsize=9)
        axis.set_xlabel("episodes of a group", fontsize=8)
        axis.set_ylim(0, 1)
    axes[0].legend(fontsize=7, ncols=2, loc="upper left")
    for color, (arm, curves) in enumerate(json.loads((OUT / "curves.json").read_text()).items()):
        runs = torch.tensor(curves, dtype=torch.float64).unfold(1, 10, 1).mean(-1)
        steps = range(10, 10 + runs.shape[1])
        axes[2].plot(steps, runs.mean(0), color=f"C{color}", label=arm)
        axes[2].fill_between(steps, runs.amin(0), runs.amax(0), color=f"C{color}", alpha=0.15)
    axes[2].set_title("guess_number: reward in training", fontsize=9)
    axes[2].set_xlabel("step; mean of ten steps; bands: range of three seeds", fontsize=8)
    axes[2].legend(fontsize=7)
    for axis in axes:
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(ROOT / "docs" / "turn_credit.png", dpi=110)


def report() -> None:
    columns = {f"{name}, {size}": found for name in MAX_TURNS
               for size, found in measured_exactly(name).items()}  # fmt: skip
    columns["language model"] = measured()
    print("| credit |", " | ".join(columns), "|\n|", " --- |" * (1 + len(columns)))
    for method in columns["language model"]:
        cells = (found.get(method) for found in columns.values())
        cells = ("" if x is None else f"{x[0]:.2f} +- {x[1]:.2f}" for x in cells)
        print(f"| {method} | {' | '.join(cells)} |")
    for name, of_sizes in json.loads((OUT / "exact.json").read_text()).items():
        for size, of_seeds in of_sizes.items():
            for method in of_seeds[0].keys() - {"episode", "shared"}:
                gains = interval([found[method] - found["episode"] for found in of_seeds])
                print(f"{name}, {size}: {method} less episode {gains[0]:+.3f} +- {gains[1]:.3f}")
    curves = json.loads((OUT / "curves.json").read_text())
    print("| credit | first 10 steps | last 20 steps | last 20 steps less `episode` |")
    for arm, runs in curves.items():
        first = [fmean(run[:10]) for run in runs]
        last = [fmean(run[-20:]) for run in runs]
        pairs = zip(last, curves["episode"], strict=True)
        gains = [one - fmean(other[-20:]) for one, other in pairs]
        cells = ("{:.3f} +- {:.3f}".format(*interval(x)) for x in (first, last, gains))
        print(f"| {arm} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["exact", "sft", "values", "curves", "draw"])
    parser.add_argument("--exact_prompts", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--group", type=int, default=12, help="episodes of each prompt")
    parser.add_argument("--samples", type=int, default=16, help="further episodes of each prefix")
    parser.add_argument("--steps", type=int, default=150, help="of training")
    options = parser.parse_args()
    match options.what:
        case "exact":
            (OUT / "exact.json").write_text(json.dumps(measure_exactly(options)))
        case "sft":
            train_policy()
        case "values":
            device, _, _ = distributed.setup(0)
            for seed in SEEDS:
                file = OUT / f"values_{seed}.json"
                if not file.is_file():
                    file.write_text(json.dumps(measure("guess_number", seed, options, device)))
            distributed.cleanup()
        case "curves":
            curves = {arm: [learn(arm, seed, options.steps) for seed in SEEDS] for arm in ARMS}
            (OUT / "curves.json").write_text(json.dumps(curves))
        case "draw":
            report()
            draw()


if __name__ == "__main__":
    main()
