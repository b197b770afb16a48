"""Draw the pictures of the pages again: `make pictures`.

    python tools/pictures.py             # all that have a maker here, in minutes on a CPU
    python tools/pictures.py ppo doctor  # these

Each file also holds the words and metrics that it shows, as text. tests/tools/test_pictures.py
compares them with the flags, files and metrics that exist. The pictures in ARCHIVED come from
longer runs; what made them stands beside their names."""

import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from transformers import AutoTokenizer

from common.config.groups import BaseArgs
from common.config.options import Options
from common.metrics.curves import draw_curves
from common.metrics.runs import Run
from common.model.tiny import tiny_model
from common.objectives.advantages import gae
from common.text.encode import Encoder

ROOT = Path(__file__).resolve().parent.parent
ARCHIVED = {  # picture -> its page, and what made it
    "async_rlhf": ("docs/log.md", "the log of commit 19c467a"),
    "calculator_seeds": ("docs/log.md", "python bench/seeds.py calculator"),
    "results": ("docs/results.md", "python bench/results/report.py"),
    "reward_model_seeds": ("docs/log.md", "python bench/seeds.py reward_model"),
    "squares_seeds": ("docs/log.md", "python bench/seeds.py squares"),
    "tool_python_seeds": ("docs/log.md", "python bench/seeds.py tool_python"),
    "squares": ("extras/images/README.md", "a run of configs/squares_grpo.yaml"),
}
BLUE, ORANGE, GREEN, PURPLE, GREY = "#4c86b8", "#dd8a3c", "#5fa463", "#8d78b8", "#b8b8b8"
INK, PALE = "#222222", "#eef2f6"


# ---- plans ----


def memory() -> Figure:
    """How many GiB of each GPU a launch needs, from extras/plan/table.py."""
    from extras.plan.launch import GPUS
    from extras.plan.memory import GIB
    from extras.plan.table import CARDS, METHODS, SIZES, needed

    figure, axes = plt.subplots(1, 2, figsize=(8.6, 5), sharey=True, layout="constrained")
    cases = list(product(SIZES, METHODS))
    names = [", ".join(case) for case in cases]
    for axis, gpus in zip(axes, (1, 8), strict=True):
        for shift, script, colour in ((-0.2, "sft", BLUE), (0.2, "grpo", ORANGE)):
            places = [place + shift for place in range(len(cases))]
            gib = [needed(script, size, gpus, method) for size, method in cases]
            axis.barh(places, gib, 0.38, color=colour, label=f"{script}.py")
        for card in CARDS:
            place = GPUS[CARDS[card]].memory / GIB
            axis.axvline(place, color=INK, linewidth=0.9, linestyle="--")
            label = f"{card} GB" if card == max(CARDS) else f"{card}"
            axis.text(place, -0.75, label, ha="center", va="bottom", fontsize=8)
        axis.set_xscale("log")
        axis.set_xlim(3, 700)
        axis.set_xticks(
            [4, 8, 16, 32, 64, 128, 256, 512], map(str, (4, 8, 16, 32, 64, 128, 256, 512))
        )
        axis.minorticks_off()
        axis.set_title(f"{gpus} GPU{'s' * (gpus > 1)}\n", fontsize=10)
        axis.set_xlabel("GiB that each GPU needs", fontsize=9)
        axis.tick_params(labelsize=8)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.8)
    axes[1].legend(fontsize=8, loc="lower right")
    figure.suptitle("Qwen3, planned, not measured", fontsize=9, color="#666666")
    return figure


def planned(**flags: object):
    """Return the plan of configs/qwen3_8b_grpo.yaml on 8 H100, with these flags changed."""
    from bench.recipes import launch_of
    from extras.plan.table import folder

    launch = launch_of("qwen3_8b_grpo", {"Qwen/Qwen3-8B": folder("8B")})
    return replace(launch, args=replace(launch.args, **flags))


def step() -> Figure:
    """One step of grpo.py over time: what runs in each part, and what lies on a GPU then."""
    from extras.plan.memory import GIB, total

    launch = planned()
    seconds = launch.seconds()
    states = {name: launch.states[name] for name in ("weights", "Adam")}
    forward = states | {"gathered weights": launch.sampling["gathered weights"]}
    sampling = launch.sampling | {"engine": launch.engine}
    parts = (  # share of the width, colour, seconds, memory, modules
        ("rollout", 3.0, BLUE, seconds["rollout"], sampling,
         "rollout/sampler.py\nrollout/episodes.py\nrollout/vllm_engine.py"),
        ("reward", 1.7, PURPLE, None, states, "rewards/total.py"),
        ("log-probs", 2.2, GREY, seconds["log-probs"], forward,
         "packs/packing.py\nmodel/policy.py\nmodel/logprobs.py"),
        ("update", 2.8, GREEN, seconds["update"], launch.update_memory,
         "grpo.py: loss\nmodel/logprobs.py\ntrain/optim.py"),
        ("sync", 1.9, ORANGE, None, sampling, "rollout/weights.py"),
    )  # fmt: skip
    colours = dict(
        zip(("weights", "Adam", "gathered weights", "gradients", "activations", "logits and head",
             "engine"), ("#5b8fbf", "#7fa8cc", "#c3d5e6", GREEN, "#a9d1ab", "#d9c7a0", ORANGE),
            strict=True)
    )  # fmt: skip
    figure, axis = plt.subplots(figsize=(8.6, 4.5), layout="constrained")
    left, top = 0.0, launch.gpu.memory / GIB
    for name, width, colour, time, uses, modules in parts:
        axis.add_patch(Rectangle((left, top + 6), width - 0.06, 11, color=colour))
        told = f"{time:.0f} s" if time else "not planned"
        axis.text(left + width / 2, top + 11.5, f"{name}\n{told}", ha="center", va="center",
                  fontsize=9)  # fmt: skip
        height = 0.0
        for use, shade in colours.items():
            size = uses.get(use, 0.0) / GIB
            axis.bar(left + width / 2 - 0.03, size, width - 0.06, height, color=shade)
            if size > 3.4:
                label = f"{use} {size:.1f}"
                axis.text(left + width / 2, height + size / 2, label, ha="center", va="center",
                          fontsize=7)  # fmt: skip
            height += size
        axis.text(left + width / 2, -3, modules, ha="center", va="top", fontsize=7.5,
                  family="monospace")  # fmt: skip
        left += width
    axis.axhline(top, color=INK, linestyle="--", linewidth=0.9)
    axis.text(left, top - 1, f"H100, {top:.1f} GiB", ha="right", va="top", fontsize=8)
    axis.set_xlim(0, left)
    axis.set_ylim(-17, top + 18)
    axis.set_xticks([])
    axis.set_yticks(range(0, 80, 20))
    axis.set_ylabel("GiB of a GPU", fontsize=9)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.set_title("configs/qwen3_8b_grpo.yaml on 8 H100: planned, not measured (widths: no scale)",
                   fontsize=9)  # fmt: skip
    assert total(launch.update_memory) <= launch.gpu.memory
    return figure


def asynchronous() -> Figure:
    """Four training and four rollout ranks over time, with the plan's seconds for each part."""
    figure, axes = plt.subplots(2, 1, figsize=(8.6, 2.9), sharex=True, layout="constrained")
    sync = 4  # seconds, for the eye
    for axis, staleness in zip(axes, (0, 1), strict=True):
        launch = planned(rollout_ranks=4, max_staleness=staleness)
        times = launch.seconds()
        rollout, train = times["rollout"], times["log-probs"] + times["update"]
        length = launch.step_seconds(times) + sync
        for k in range(-1, 4):
            start = k * length
            begin = start if staleness else start + rollout
            bars = [(1, start, rollout, BLUE), (0, begin, train, GREEN)]
            bars += [(row, start + length - sync, sync, ORANGE) for row in (0, 1)]
            for row, at, width, colour in bars:
                axis.barh(row, width, 0.7, at, color=colour, edgecolor="white", linewidth=0.5)
        axis.barh([0, 1], 4 * length, 0.7, 0, color="#e4e4e4", zorder=0)
        axis.set_yticks([0, 1], ["training ranks", "rollout ranks"], fontsize=8)
        axis.set_title(f"--max_staleness {staleness}", fontsize=9, loc="left")
        axis.set_xlim(0, 560)
    axes[1].set_xlabel("seconds, planned: configs/qwen3_8b_grpo.yaml --rollout_ranks 4, 8 H100",
                       fontsize=8)  # fmt: skip
    kinds = {
        "sample": BLUE,
        "log-probs and update": GREEN,
        "new weights": ORANGE,
        "wait": "#e4e4e4",
    }
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in kinds.values()]
    axes[0].legend(handles, kinds, ncols=4, fontsize=8, loc="lower right",
                   bbox_to_anchor=(1, 1.0), frameon=False)  # fmt: skip
    return figure


# ---- diagrams ----


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty axis whose unit is an inch."""
    figure = plt.figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_xlim(0, width)
    axis.set_ylim(height, 0)  # downwards
    axis.axis("off")
    return figure, axis


def box(axis: Axes, x: float, y: float, width: float, text: str, colour: str = PALE,
        height: float = 0.42, size: float = 9.5, **font: object) -> None:  # fmt: skip
    """Draw a box with its left upper corner at x, y."""
    axis.add_patch(FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.06",
                                  facecolor=colour, edgecolor="none"))  # fmt: skip
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, **font)


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "",
          colour: str = "#777777") -> None:  # fmt: skip
    axis.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", color=colour, linewidth=1.2))
    if text:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        down = abs(start[0] - end[0]) < 0.01
        axis.text(x + 0.07 * down, y - 0.06 * (not down), text, fontsize=8.5, color="#555555",
                  ha="left" if down else "center", va="center" if down else "bottom")  # fmt: skip


def scripts() -> Figure:
    """Which script to use: five questions."""
    questions = (
        ("Do you have answers to imitate?", "sft.py"),
        ("Do you have pairs of a better and a worse\nanswer, or answers marked good or bad?",
         "pairs: dpo.py, or rm.py for a reward model\nmarks: kto.py"),
        ("Can a program, a reward model or\na judge score an answer?", "grpo.py"),
        ("Is there a stronger model to learn from?", "distill.py"),
        ("Does the model answer better with a hint?", "self_distill.py"),
    )  # fmt: skip
    others = (
        "many groups have equal rewards: dapo.py\na value for every token: ppo.py\n"
        "one completion per prompt: reinforce.py\na completion is one action: rloo.py\n"
        "pairs of its own samples: online_dpo.py\nimitate its best samples: bok.py"
    )
    figure, axis = canvas(7.3, 6.62)
    y = 0.15
    for i, (question, answer) in enumerate(questions):
        height = 0.62
        box(axis, 0.15, y, 3.3, question, height=height)
        box(axis, 4.05, y, 3.1, answer, "#d5e6d6", height, weight="bold" if i != 1 else "normal")
        arrow(axis, (3.45, y + height / 2), (4.05, y + height / 2), "yes")
        gap = 1.45 if i == 2 else 0.35
        arrow(axis, (0.8, y + height), (0.8, y + height + gap), "no")
        if i == 2:
            arrow(axis, (5.6, y + height), (5.6, y + height + 0.2))
            box(axis, 4.05, y + height + 0.2, 3.1, others, "#e9f1e9", 1.15, 8.5, linespacing=1.35)
        y += height + gap
    box(axis, 0.15, y, 3.3, "measure first: eval.py", "#f3e3d2", 0.36)
    return figure


def pieces(messages: list[dict], template: Path, **row: object) -> Iterator[list[tuple[str, bool]]]:
    """Yield each sequence that sft.py makes of a conversation, as pieces of text and whether they
    are trained. The tokens are those of the built-in model and the template's own."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.name_or_path = ""  # with more tokens it is no longer that model's
    tokenizer.add_tokens(
        "<|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call>".split()
    )
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    coder = Encoder(tokenizer, BaseArgs())
    row |= dict(messages=messages, _source="row:1")
    for sample in coder.sft(row, ("messages",)):
        tokens = zip(sample.ids, sample.loss_mask, strict=True)
        spans = [(bool(on), [i for i, _ in span]) for on, span in groupby(tokens, lambda x: x[1])]
        yield [(tokenizer.decode(ids), on) for on, ids in spans]


def write_pieces(
    axis: Axes, x: float, y: float, spans: list[tuple[str, bool]], columns: int
) -> float:
    """Write a sequence in lines of at most `columns` characters, trained ones on green. Return the
    height below it."""
    wide, high = 0.0635, 0.155  # of a character at this size
    column = 0
    for text, trained in spans:
        for k, line in enumerate(text.split("\n")):
            if k:
                column, y = 0, y + high
            while line:
                part, line = line[: columns - column], line[columns - column :]
                if trained:
                    place = (x + column * wide - 0.01, y - high / 2)
                    axis.add_patch(Rectangle(place, len(part) * wide + 0.02, high, color="#a8d8a9"))
                axis.text(x + column * wide, y, part, fontsize=7.85, va="center",
                          family="monospace", color=INK if trained else "#666666")  # fmt: skip
                column += len(part)
                if line:
                    column, y = 0, y + high
    return y + high


def chat_row() -> Figure:
    """The sequences of two rows, with the trained tokens on green, by the code that trains."""
    user, said = dict(role="user"), dict(role="assistant")
    talk = [
        user | dict(content="2+3?"), said | dict(content="5", reasoning_content="2+3=5"),
        user | dict(content="Twice that?"),
        said | dict(content="10", reasoning_content="5*2=10"),
    ]  # fmt: skip
    call = dict(type="function", function=dict(name="add", arguments=dict(a=2, b=3)))
    tool = dict(type="function", function=dict(name="add", parameters=dict(type="object")))
    called = [
        user | dict(content="2+3?"), said | dict(content="", tool_calls=[call]),
        dict(role="tool", content="5"), said | dict(content="It is 5."),
    ]  # fmt: skip
    figure, axis = canvas(8.6, 6.85)
    axis.text(0.1, 0.15, "one row of two turns with thoughts: the template drops the first thought "
              "when the second turn is asked,\nso sft.py makes two sequences (trained tokens are "
              "green)", fontsize=8.5, va="top")  # fmt: skip
    sequences = [*pieces(talk, ROOT / "tests/field/templates/qwen3.jinja")]
    for k, spans in enumerate(sequences):
        write_pieces(axis, 0.2 + 4.2 * k, 0.72, spans, 60)
    axis.text(0.1, 2.75, "one row with a tool call, configs/templates/chatml_tools.jinja: the call "
              "is trained, the tool's result is not", fontsize=8.5, va="top")  # fmt: skip
    (spans,) = pieces(called, ROOT / "configs/templates/chatml_tools.jinja", tools=[tool])
    write_pieces(axis, 0.2, 3.15, spans, 122)
    return figure


def row_path() -> Figure:
    """How a row of data gets to the forward pass of sft.py, with the module of each part."""
    parts = (
        ("files", "text/files.py", "jsonl, parquet,\na Hub id"),
        ("rows", "text/rows.py", "objects"),
        ("columns", "text/columns.py", "which are read"),
        ("load", "text/load.py", "encode_row of\nthe script"),
        ("messages", "text/messages.py", "one form of a\nconversation"),
        ("chat", "text/chat.py", "the template's\ntext"),
        ("turns", "text/turns.py", "what is trained"),
        ("text_ids", "text/text_ids.py", "token ids"),
        ("sample", "packs/sample.py", "ids and\nloss mask"),
        ("order", "packs/order.py", "the rows of\na step"),
        ("packing", "packs/packing.py", "one stream for\neach rank"),
        ("forward", "model/policy.py", "log-probs"),
    )
    figure, axis = canvas(8.6, 3.5)
    for k, (name, module, what) in enumerate(parts):
        line, column = divmod(k, 4)
        x, y = 0.15 + 2.12 * column, 0.12 + 1.15 * line
        inside = 4 <= k < 8
        box(axis, x, y, 1.8, "", "#d5e6d6" if inside else PALE, 0.95)
        axis.text(x + 0.9, y + 0.17, name, ha="center", va="center", fontsize=10, weight="bold")
        axis.text(x + 0.9, y + 0.37, module, ha="center", va="center", fontsize=7.6,
                  family="monospace", color="#555555")  # fmt: skip
        axis.text(x + 0.9, y + 0.7, what, ha="center", va="center", fontsize=8.2)
        if column < 3:
            arrow(axis, (x + 1.8, y + 0.47), (x + 2.12, y + 0.47))
        elif line < 2:
            axis.plot([x + 0.9, x + 0.9, 1.05], [y + 0.95, y + 1.05, y + 1.05], color="#777777",
                      linewidth=1.2)  # fmt: skip
            arrow(axis, (1.05, y + 1.04), (1.05, y + 1.16))
    return figure


def ppo() -> Figure:
    """The parts of PPO on one completion. `gae` computes the advantages."""
    tokens = ["so", "12", "+", "7", "=", "19", "<eos>"]
    kl = torch.tensor([0.1, 0.0, 0.2, 0.1, 0.0, 0.3, 0.0])
    values = torch.tensor([0.3, 0.4, 0.4, 0.5, 0.6, 0.8, 0.9])
    beta, lam = 0.1, 0.9
    rewards = 0 - beta * kl
    rewards[-1] += 1.0
    n = len(tokens)
    deltas = rewards + torch.cat([values[1:], values.new_zeros(1)]) - values
    advantages = gae(rewards, values, torch.ones(n, dtype=torch.bool), torch.zeros(n), lam)
    figure, axis = canvas(8.6, 4.0)
    rows = (
        ("policy samples", "tokens", [*tokens], "#cfe0f0"),
        ("reference", "KL of each token", [f"{x:.1f}" for x in kl], "#e6e6e6"),
        ("reward", "-beta KL, and the score 1\nat the last token", [f"{x:.2f}" for x in rewards],
         "#e3dcf0"),
        ("value model", "V, the reward still to come", [f"{x:.1f}" for x in values], "#f6dfc8"),
        ("errors of V", "delta = r + V next - V", [f"{x:.2f}" for x in deltas], "#f3efe0"),
        ("GAE", "A = delta + 0.9 A next", [f"{x:.2f}" for x in advantages], "#d5e6d6"),
    )  # fmt: skip
    wide = 0.78
    for line, (name, what, cells, colour) in enumerate(rows):
        y = 0.15 + 0.64 * line
        axis.text(0.1, y + 0.13, name, fontsize=9.5, weight="bold", va="center")
        axis.text(0.1, y + 0.25, what, fontsize=8, va="top", color="#555555")
        for t, cell in enumerate(cells):
            box(axis, 2.25 + 0.9 * t, y, wide, cell, colour, 0.4)
            if name == "GAE" and t < n - 1:
                arrow(axis, (2.25 + 0.9 * (t + 1), y + 0.2), (2.25 + 0.9 * t + wide, y + 0.2))
    axis.text(2.25, 3.9, "GAE runs from the last token to the first. A trains the policy, A + V is "
              "the target of the value model.", fontsize=8, va="center")  # fmt: skip
    return figure


def shared_prefix() -> Figure:
    """Which keys each computed token reads when three sequences share prefixes."""
    sequences, starts = ("PPPPPxaycc", "PPPPPxayddd", "PPPPPxbb"), (0, 7, 5)
    stream = [(k, t) for k, each in enumerate(sequences) for t in range(starts[k], len(each))]
    common = {(1, 0): 7, (2, 0): 5, (2, 1): 5}  # how many tokens are read from an earlier sequence
    colours = {0: (0.62, 0.77, 0.88), 1: (0.66, 0.85, 0.66), 2: (0.96, 0.80, 0.58)}
    picture = torch.full((len(stream), len(stream), 3), 0.96)
    for row, (k, t) in enumerate(stream):
        for column, (j, u) in enumerate(stream):
            if u <= t if j == k else j < k and u < common[k, j] and j == 0:
                picture[row, column] = torch.tensor(colours[k])
    figure, axis = plt.subplots(figsize=(5.2, 4.6), layout="constrained")
    axis.imshow(picture.numpy())
    letters = [sequences[k][t] for k, t in stream]
    axis.set_xticks(range(len(stream)), letters, fontsize=9, family="monospace")
    axis.set_yticks(range(len(stream)), letters, fontsize=9, family="monospace")
    axis.xaxis.tick_top()
    axis.set_xticks([x + 0.5 for x in range(-1, len(stream))], minor=True)
    axis.set_yticks([x + 0.5 for x in range(-1, len(stream))], minor=True)
    axis.grid(which="minor", color="white", linewidth=1)
    axis.tick_params(which="both", length=0)
    axis.set_xlabel("keys", fontsize=9)
    axis.set_ylabel("queries", fontsize=9)
    whole = sum(map(len, sequences))
    axis.set_title(f"{', '.join(sequences)}:\n{whole} tokens, of which {len(stream)} are computed",
                   fontsize=9, family="monospace")  # fmt: skip
    return figure


# ---- runs ----

LOSES, GAINS = (0.5, 0.3), (0.3, 0.7)  # reward, first and last
SICK = {  # rule of the doctor -> the metric it names, its curve when sick and when well, and others
    "not_finite": ("loss", (0.5, float("nan")), (0.5, 0.3), {}),
    "explodes": ("grad_norm", (1.0, 40.0), (1.0, 0.8), {}),
    "truncated": ("completions/clipped_ratio", (0.4, 0.8), (0.3, 0.05), {}),
    "equal_rewards": ("frac_reward_zero_std", (0.7, 0.98), (0.4, 0.5), dict(reward_std=(0.1, 0.1))),
    "reward_errors": ("reward/error_fraction", (0.0, 0.1), (0.0, 0.0), {}),
    "engine_differs": ("sampling/sampling_logp_difference/mean", (1e-3, 2e-3), (1e-6, 1e-6), {}),
    "entropy_collapses": ("entropy", (1.0, 0.02), (1.0, 0.5), {}),
    "kl_grows": ("kl", (0.0, 3.0), (0.0, 0.3), {}),
    "clips_often": ("clip_ratio/region_mean", (0.4, 0.8), (0.1, 0.15), {}),
    "length_drifts": ("completions/mean_length", (100.0, 300.0), (100.0, 120.0), {}),
    "held_out_falls": (
        "eval/solved",
        (0.8, 0.4),
        (0.4, 0.8),
        {"reward": GAINS, "eval/solved_stderr": (0.01, 0.01)},
    ),
    "overfits": ("eval_loss", (0.5, 0.8), (0.5, 0.35), dict(loss=(0.5, 0.3))),
}


def sketch(ends: tuple[float, float], seed: int, count: int = 40) -> list[float]:
    """Return a noisy curve from the first number to the second; its second half is NaN if that
    is."""
    first, last = ends
    draw = torch.Generator().manual_seed(seed)
    if last != last:
        return [*sketch((first, 0.8 * first), seed, count // 2), *[last] * (count - count // 2)]
    rise = torch.sigmoid(torch.linspace(-9, 9, count))
    noise = 0.03 * abs(last - first) * torch.randn(count, generator=draw)
    return (first + (last - first) * rise + noise).clamp(min=0).tolist()


def doctor() -> Figure:
    """What each rule of the doctor sees: a sketch of a sick and of a healthy run."""
    from extras.trace.doctor import RULES, examine

    figure, axes = plt.subplots(3, 4, figsize=(8.6, 5.2), layout="constrained")
    for seed, (axis, rule) in enumerate(zip(axes.flat, RULES, strict=True)):
        metric, sick, well, others = SICK[rule.__name__]
        for name, ends, reward, colour in (
            ("healthy", well, GAINS, BLUE), ("sick", sick, LOSES, ORANGE),
        ):  # fmt: skip
            shown = dict(reward=reward) | others | {metric: ends}
            curves = {key: dict(enumerate(sketch(each, seed))) for key, each in shown.items()}
            run = Run(Path(name), dict(samples_per_prompt=8), "grpo.py", curves)
            found = {each.__name__ for each, what in examine(run).items() if what}
            assert found == ({rule.__name__} if name == "sick" else set()), (rule, found)
            axis.plot([*curves[metric].values()], color=colour, linewidth=1.6, label=name)
            if curves[metric][39] != curves[metric][39]:
                axis.text(19, 0.4, " NaN", fontsize=8, color=colour)
        axis.set_title(f"{rule.__name__}\n", fontsize=8.5, weight="bold")
        short = metric.replace("sampling/sampling_logp", "sampling/sampling_logp\n")
        axis.text(
            0.5, 1.02, short, transform=axis.transAxes, ha="center", fontsize=6.6, color="#555555"
        )
        axis.tick_params(labelsize=6.5)
        axis.set_xticks([])
    axes[0, 1].legend(fontsize=7)
    figure.supxlabel("entropy_collapses, kl_grows and length_drifts need a reward that falls",
                     fontsize=8)  # fmt: skip
    return figure


def demo() -> Path:
    """Return the folder of the demo's runs. Run the demo first if it is not there."""
    if not (ROOT / "runs/demo/grpo/hf").is_dir():
        subprocess.run([sys.executable, "demo.py"], cwd=ROOT, check=True)
    return ROOT / "runs/demo"


DEMO_CURVES = ("loss", "eval_loss", "eval_mean_token_accuracy", "eval/solved", "reward", "entropy")


def demo_curves() -> Image.Image:
    """The curves of `make demo`."""
    files = [demo() / script / "metrics.jsonl" for script in ("sft", "grpo")]
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder, "curves.png")
        draw_curves(files, DEMO_CURVES, picture, labels=("sft.py", "grpo.py"))
        return Image.open(io.BytesIO(picture.read_bytes()))


def shown_run(run: Path, copy: Path) -> Path:
    """Copy a run with only one trace: the last one whose first group is about half right."""
    from extras.trace.file import read

    firsts = {file: read(file)[1] for file in sorted(run.glob("trace/*.gz"))}
    means = {file: fmean(x["reward"] for x in firsts[file]["completions"]) for file in firsts}
    chosen = [file for file, mean in means.items() if 0.4 < mean < 0.7][-1]
    (copy / "trace").mkdir(parents=True)
    for file in (chosen, run / "metrics.jsonl", run / "args.yaml"):
        shutil.copy(file, copy / file.relative_to(run))
    return copy


def view() -> Image.Image:
    """The viewer's page about the demo's run, photographed by Chromium."""
    from extras.trace.view import collect, page

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("chromium is missing: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        html, picture = Path(folder, "view.html"), Path(folder, "view.png")
        run = shown_run(demo() / "grpo", Path(folder, "grpo"))
        html.write_text(page(collect([run])), encoding="utf-8")
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += ["--virtual-time-budget=10000", "--window-size=1500,640"]
        subprocess.run([browser, *words, f"--screenshot={picture}", html.as_uri()], check=True,
                       capture_output=True)  # fmt: skip
        return Image.open(io.BytesIO(picture.read_bytes()))


# ---- files ----

Maker = Callable[[], Figure | Image.Image]
MADE: dict[str, tuple[str, Maker, Sequence[str]]] = {  # page, maker, metrics shown
    "memory": ("docs/memory.md", memory, ()),
    "step": ("docs/memory.md", step, ()),
    "shared_prefix": ("docs/memory.md", shared_prefix, ()),
    "asynchronous": ("docs/asynchronous.md", asynchronous, ()),
    "scripts": ("docs/launch.md", scripts, ()),
    "chat_row": ("docs/data.md", chat_row, ()),
    "row_path": ("course/reading_order.md", row_path, ()),
    "ppo": ("docs/ppo.md", ppo, ()),
    "doctor": ("extras/trace/README.md", doctor, [metric for metric, *_ in SICK.values()]),
    "demo_curves": ("docs/log.md", demo_curves, DEMO_CURVES),
    "view": ("extras/trace/README.md", view, ("reward", "eval/solved", "loss")),
}


def words_of(made: Figure | Image.Image) -> list[str]:
    """Return the texts in a figure."""
    if isinstance(made, Image.Image):
        return []
    texts = (text.get_text() for text in made.findobj(Text))
    return [*dict.fromkeys(text.strip() for text in texts if text.strip())]


def save(made: Figure | Image.Image, file: Path, metrics: Sequence[str]) -> None:
    """Write the picture as a small file that also holds its words and metrics."""
    about = PngInfo()
    about.add_itxt("words", json.dumps(words_of(made)))
    about.add_itxt("metrics", json.dumps([*metrics]))
    if isinstance(made, Figure):
        drawn = io.BytesIO()
        made.savefig(drawn, dpi=110, facecolor="white")
        plt.close(made)
        made = Image.open(drawn)
    few = made.convert("RGB").quantize(96, dither=Image.Dither.NONE)
    few.save(file, pnginfo=about, optimize=True)


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MADE)}")
    names = parser.parse_args().names
    if wrong := [name for name in names if name not in MADE]:
        parser.error(f"{wrong[0]}: no picture with a maker; use {', '.join(MADE)}")
    for name in names or MADE:
        _, maker, metrics = MADE[name]
        try:
            save(maker(), ROOT / f"docs/{name}.png", metrics)
        except FileNotFoundError as error:
            print(f"docs/{name}.png: left as it is: {error}")
        else:
            print(f"docs/{name}.png")


if __name__ == "__main__":
    main()
