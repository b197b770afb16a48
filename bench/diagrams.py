"""Draw the five figures of docs/primer.md from the functions of the project: docs/primer/*.svg.

    python bench/diagrams.py
    python bench/diagrams.py /tmp/figures png     # another folder, another format

The same code gives the same bytes: the SVG files have neither a date nor random ids.
"""

import sys
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402
from common.objectives.advantages import gae  # noqa: E402
from common.objectives.divergence import forward_kl, reverse_kl  # noqa: E402
from common.objectives.importance import is_clipped  # noqa: E402
from common.objectives.kl import kl_estimate  # noqa: E402

BLUE, ORANGE, GREEN, GREY = "#0b62a4", "#c2500a", "#1b7a3d", "#6b6b6b"
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "primer", "font.size": 10, "axes.spines.top": False,
    "axes.spines.right": False, "axes.titlesize": 10.5, "lines.linewidth": 2,
    "legend.frameon": False, "figure.facecolor": "white",
}  # fmt: skip


def gradient(value: Tensor, by: Tensor) -> Tensor:
    """Return the derivative of each value by its own argument."""
    (found,) = torch.autograd.grad(value.sum(), by)
    return found


# ---- one step of grpo.py ----


def step():
    """Draw a prompt, its completions, rewards, advantages and packed tokens, and the loss."""
    prompt, answers, rewards = "47+25=", ["72.", "62.", "71.", "4725"], [1.0, 0.0, 0.0, 0.0]
    rewards_BG = torch.tensor([rewards])
    (advantages_G,) = grpo.advantages("group", rewards_BG, rewards_BG[None], [1.0]).tolist()
    colours = [BLUE if A > 0 else ORANGE for A in advantages_G]
    figure = plt.figure(figsize=(9.6, 4.4))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, 90), ylim=(0, 46))
    axis.axis("off")

    def box(x, y, width, text, edge=GREY, face="white", height=4.6, **style):
        axis.add_patch(
            plt.Rectangle((x, y), width, height, edgecolor=edge, facecolor=face, linewidth=1.2)
        )
        axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", **style)

    def arrow(x, y, to_x, to_y):
        axis.annotate(
            "", (to_x, to_y), (x, y), arrowprops=dict(arrowstyle="-|>", color=GREY, linewidth=1.2)
        )

    columns = dict(prompt=1, completions=25, rewards=50, advantages=72)
    heads = ["prompt x", "G = 4 completions y", "rewards r", "advantages A"]
    for x, head in zip(columns.values(), heads, strict=True):
        axis.text(x, 43.5, head, weight="bold")
    box(1, 29, 14, prompt, family="monospace")
    for i, (answer, reward, A, colour) in enumerate(
        zip(answers, rewards, advantages_G, colours, strict=True)
    ):
        y = 37 - 5.6 * i
        arrow(15.4, 31.3, 24.6, y + 2.3)
        box(25, y, 14, answer.replace(".", " eos"), family="monospace")
        arrow(39.4, y + 2.3, 49.6, y + 2.3)
        box(50, y, 11, f"{reward:g}")
        arrow(61.4, y + 2.3, 71.6, y + 2.3)
        box(72, y, 13, f"{A:+.1f}", edge=colour, color=colour)
    for x, y, what in ((17, 38.5, "engine"), (44.5, 40.2, "reward"), (66.5, 40.2, "group")):
        axis.text(x, y, what, color=GREY, ha="center")
    axis.text(25, 16.7, "the last one is truncated: no eos", color=GREY, fontsize=9)

    legend = (
        "packed tokens: grey is masked; blue and orange carry the advantage of their completion"
    )
    axis.text(1, 13.6, legend, weight="bold")
    cells = [
        (token, i, t) for i, answer in enumerate(answers) for t, token in enumerate(prompt + answer)
    ]
    for place, (token, i, t) in enumerate(cells):
        face, colour = (colours[i], "white") if t >= len(prompt) else ("#e4e4e4", "#444444")
        text, size = ("eos", 7) if token == "." else (token, 10)
        at = 1 + 2.37 * place
        box(at, 8, 2.37, text, "white", face, 4.2, color=colour, family="monospace", fontsize=size)
    arrow(45, 7.6, 45, 4.6)
    formula = "L = sum_t w_t (-c_t min(rho_t A_i, clip(rho_t) A_i) + beta KL_t)"
    axis.text(45, 2, formula, ha="center", family="monospace")
    return figure


def surrogate():
    """Draw the surrogate of `--loss clip` and its gradient over the ratio, for both signs of the
    advantage."""
    args = SimpleNamespace(
        loss="clip", clip_low=grpo.Args.clip_low, clip_high=grpo.Args.clip_high, dual_clip=0.0
    )
    figure, axes = plt.subplots(2, 2, figsize=(9.6, 5.2), sharex=True, layout="constrained")
    log_rho = torch.linspace(0.4, 1.8, 1401, dtype=torch.float64).log().requires_grad_()
    rho = log_rho.detach().exp()
    for (upper, lower), A, colour in zip(axes.T, (1.0, -1.0), (BLUE, ORANGE), strict=True):
        A_T = torch.full_like(rho, A)
        objective = -grpo.policy_loss(log_rho, A_T, log_rho, args)
        slope = gradient(objective, log_rho)
        clipped = is_clipped(log_rho.detach(), A_T, args.clip_low, args.clip_high)
        for axis in (upper, lower):
            axis.axvspan(*rho[clipped][[0, -1]].tolist(), color="#eeeeee")
            for bound in (1 - args.clip_low, 1.0, 1 + args.clip_high):
                axis.axvline(bound, color=GREY, linewidth=0.8, linestyle=":")
        upper.plot(rho, rho * A, color=GREY, linestyle="--", linewidth=1.2, label="rho A")
        upper.plot(rho, objective.detach(), color=colour, label="surrogate")
        lower.plot(rho, slope, color=colour)
        lower.axhline(0, color="black", linewidth=0.8)
        upper.set_title(f"A = {A:+g}: {'raise' if A > 0 else 'lower'} the token")
        upper.legend(loc="upper left" if A > 0 else "upper right")
        at = rho[clipped].mean()
        lower.text(
            at,
            0.06 if A > 0 else -0.06,
            "clipped:\nno gradient",
            ha="center",
            va="bottom" if A > 0 else "top",
        )
        lower.set_xticks([0.4, 1 - args.clip_low, 1, 1 + args.clip_high, 1.8])
        lower.set_xlabel("rho = pi / pi_old")
    axes[0, 0].set_ylabel("surrogate")
    axes[1, 0].set_ylabel("gradient by log pi")
    return figure


def kl():
    """Draw the KL estimators over the log-ratio d, and their gradients."""
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
    d = torch.linspace(-2.5, 2.5, 501, dtype=torch.float64).requires_grad_()
    for name, label, colour in (("k1", "k1 = d", GREY), ("k2", "k2 = d^2 / 2", ORANGE),
                                ("k3", "k3 = exp(-d) - 1 + d", BLUE)):  # fmt: skip
        value = kl_estimate(d, torch.zeros_like(d), name)
        axes[0].plot(d.detach(), value.detach(), color=colour, label=label)
        axes[1].plot(d.detach(), gradient(value, d), color=colour, label=label)
    for axis, title in zip(axes, ("value", "gradient by log pi"), strict=True):
        axis.axhline(0, color="black", linewidth=0.8)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set(title=title, ylim=(-4, 4), xlabel="d = log(pi / pi_ref) of a token")
    axes[0].legend(loc="lower right")
    return figure


def advantages():
    """Draw the values of one completion and its advantages for three lambdas."""
    rewards_T = torch.tensor([0.0] * 7 + [1.0], dtype=torch.float64)
    values_T = torch.tensor([0.5, 0.55, 0.5, 0.2, 0.25, 0.7, 0.8, 0.9], dtype=torch.float64)
    everywhere, first = torch.ones(8, dtype=torch.bool), torch.zeros(8, dtype=torch.long)
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9.6, 5), sharex=True, layout="constrained")
    tokens = torch.arange(1, 9)
    upper.bar(tokens, rewards_T, width=0.25, color=GREEN, label="reward r")
    upper.plot(tokens, values_T, "o-", color="black", label="value V before the token")
    upper.set(
        title="one completion of 8 tokens: the third token looks like an error, "
        "the fifth repairs it",
        ylim=(0, 1.1),
    )
    upper.legend(loc="upper left", ncols=2)
    for shift, lam, colour in ((-0.25, 0.0, ORANGE), (0.0, 0.95, BLUE), (0.25, 1.0, GREY)):
        A_T = gae(rewards_T, values_T, everywhere, first, 1.0, torch.tensor([lam]))
        lower.bar(tokens + shift, A_T, width=0.22, color=colour, label=f"lambda = {lam:g}")
    lower.axhline(0, color="black", linewidth=0.8)
    lower.set(xlabel="token t", ylabel="advantage A", ylim=(-0.4, 1.1))
    lower.legend(loc="upper left", ncols=3)
    return figure


def fit(divergence, logq_CV: Tensor, places_V: Tensor, start: float) -> tuple[float, Tensor]:
    """Return the divergence and the probabilities [V] of a student with one mode, fitted by
    gradient descent: its logits are -(place - centre)^2 / (2 width^2)."""
    centre, log_width = (
        torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (start, 0.0)
    )
    optimizer = torch.optim.Adam([centre, log_width], lr=0.05)
    for _ in range(1500):
        logits_CV = -((places_V - centre) / log_width.exp()).square()[None] / 2
        value_C, gradient_CV = divergence(logits_CV.detach().log_softmax(-1), logq_CV)
        optimizer.zero_grad()
        logits_CV.backward(gradient_CV)
        optimizer.step()
    return value_C.item(), logits_CV.detach().softmax(-1)[0]


def divergence():
    """Draw a teacher with two modes and the students that both directions of the KL give."""
    places_V = torch.linspace(-6, 6, 121, dtype=torch.float64)
    teacher_V = 0.6 * torch.exp(-(places_V + 2.5).square() / 0.7) + 0.4 * torch.exp(
        -(places_V - 2.5).square() / 0.7
    )
    logq_CV = (teacher_V / teacher_V.sum()).log()[None]
    figure, axis = plt.subplots(figsize=(9.6, 3.6), layout="constrained")
    axis.fill_between(places_V, logq_CV[0].exp(), color="#d9d9d9", label="teacher q")
    for name, of, colour in (
        ("forward_kl: KL(q || pi)", forward_kl, ORANGE),
        ("reverse_kl: KL(pi || q)", reverse_kl, BLUE),
    ):
        starts = (-2.0, 0.0, 2.0)
        value, student_V = min(
            (fit(of, logq_CV, places_V, start) for start in starts), key=lambda found: found[0]
        )
        axis.plot(places_V, student_V, color=colour, label=f"student pi by {name} = {value:.2f}")
    axis.set(
        xlabel="tokens of a small vocabulary, ordered along a line",
        ylabel="probability",
        ylim=(0, None),
    )
    axis.legend(loc="upper right")
    return figure


FIGURES = dict(step=step, clip=surrogate, kl=kl, gae=advantages, divergence=divergence)


def main(folder: Path, form: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure = draw()
            metadata = dict(Date=None, Creator=None) if form == "svg" else None
            figure.savefig(folder / f"{name}.{form}", metadata=metadata, dpi=110)
            plt.close(figure)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "primer")
    parser.add_argument("form", nargs="?", choices=("svg", "png"), default="svg")
    main(**vars(parser.parse_args()))
