"""Measure bias and standard deviation of the gradient under every correction of samples of the
engine, on a toy whose true gradient is known; draw docs/corrections.png.

    python bench/corrections.py

A policy with random logits for each position and previous token writes up to eight of four tokens;
one of them ends the completion. All 9,841 completions are enumerated. The reward is 1 for exactly
two of the tokens 1. The reference is the gradient of the expected reward of the trainer's policy;
the baseline is the mean reward of the samples. Bias: norm of the error of the expected gradient,
over the norm of the reference. Standard deviation: root of the total variance of the mean gradient
of 64 completions, over the same norm. Both are sums over all completions; `normalised`, whose
weights depend on the minibatch, is the mean of 1,000 minibatches.

Two engines differ from the trainer by 0.03 nats per token: `rounding` by noise on the logits, ten
times larger in one context of ten; `stale` has the weights before some steps of gradient ascent.
Bars are means over five random policies, dots single ones."""

import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.objectives.importance import Correction, importance_weights, is_clipped  # noqa: E402

LENGTH, VOCABULARY, END = 8, 4, 0
COMPLETIONS, MINIBATCHES = 64, 1_000  # completions of a minibatch; minibatches of `normalised`
TOYS, KL = 5, 0.03  # number of random policies; nats per token between engine and trainer
COLOURS = "#c2500a", "#0b62a4"
NO_BOUND = 1e30
TOKEN = dict(level="token")
SEQUENCE = dict(level="sequence")
FORMS = {
    "no correction": dict(level="none"),
    "token ratio, no bound": TOKEN | dict(high=NO_BOUND),
    "token TIS, 2": TOKEN,
    "token TIS, 2, normalised": TOKEN | dict(normalize=True),
    "IcePop, 0.5 to 5": TOKEN | dict(mode="mask", low=0.5, high=5.0),
    "token TIS, token_tv 0.15": TOKEN | dict(reject="token_tv", bound=0.15),
    "token TIS, filter 0.8 to 1.25": TOKEN | dict(filter=(0.8, 1.25)),
    "token TIS, veto 0.4": TOKEN | dict(reject="veto", bound=0.4),
    "token TIS, seq_mean_k3 0.05": TOKEN | dict(reject="seq_mean_k3", bound=0.05),
    "token TIS, seq_max_k2 0.3": TOKEN | dict(reject="seq_max_k2", bound=0.3),
    "bypass, clip 0.2 / 0.28": None,
    "sequence ratio, no bound": SEQUENCE | dict(high=NO_BOUND),
    "sequence ratio, normalised": SEQUENCE | dict(high=NO_BOUND, normalize=True),
    "sequence TIS, 2": SEQUENCE,
    "sequence TIS, 2, normalised": SEQUENCE | dict(normalize=True),
    "sequence mask, 0.5 to 2": SEQUENCE | dict(mode="mask", low=0.5),
}


class Toy(NamedTuple):
    """All completions in one stream of T tokens; N completions, L positions, V tokens."""

    tokens_T: Tensor
    previous_T: Tensor
    positions_T: Tensor
    ids_T: Tensor
    rewards_N: Tensor

    def logprobs(self, logits_LVV: Tensor) -> Tensor:
        """Return the log-prob of each token."""
        all_LVV = logits_LVV.log_softmax(-1)
        return all_LVV[self.positions_T, self.previous_T, self.tokens_T]

    def probabilities(self, logits_LVV: Tensor) -> Tensor:
        """Return the probability of each completion."""
        return self.sums(self.logprobs(logits_LVV)).exp()

    def sums(self, x_T: Tensor) -> Tensor:
        return torch.zeros(len(self.rewards_N)).double().index_add(0, self.ids_T, x_T)

    def gradients(self, logits_LVV: Tensor, weights_T: Tensor) -> Tensor:
        """Return sum_t w_t grad log pi(y_t) of each completion, by all logits, [N, L V V]."""
        slopes_TV = torch.eye(VOCABULARY).double()[self.tokens_T]
        slopes_TV = slopes_TV - logits_LVV.softmax(-1)[self.positions_T, self.previous_T]
        found = torch.zeros(len(self.rewards_N), LENGTH, VOCABULARY, VOCABULARY).double()
        found[self.ids_T, self.positions_T, self.previous_T] = weights_T[:, None] * slopes_TV
        return found.flatten(1)

    def advantages(self, engine_LVV: Tensor) -> Tensor:
        """Return the advantage on each token, with the mean reward of a large group as baseline."""
        return (self.rewards_N - self.probabilities(engine_LVV) @ self.rewards_N)[self.ids_T]

    def exact_gradient(self, logits_LVV: Tensor) -> Tensor:
        """Return the gradient of the expected reward."""
        A_T = self.advantages(logits_LVV)
        return self.probabilities(logits_LVV) @ self.gradients(logits_LVV, A_T)


def toy() -> Toy:
    unfinished, finished = [()], []
    for _ in range(LENGTH):
        longer = [(*y, token) for y in unfinished for token in range(VOCABULARY)]
        finished += [y for y in longer if y[-1] == END]
        unfinished = [y for y in longer if y[-1] != END]
    completions = finished + unfinished
    columns = [
        (token, previous, position, n)
        for n, y in enumerate(completions)
        for position, (previous, token) in enumerate(zip((END, *y), y, strict=False))
    ]
    rewards_N = torch.tensor([float(y.count(1) == 2) for y in completions]).double()
    return Toy(*torch.tensor(columns).T, rewards_N)


def kl(of: Toy, trainer: Tensor, engine: Tensor) -> float:
    """Return KL(engine || trainer) in nats per token."""
    old_T, rollout_T = of.logprobs(trainer), of.logprobs(engine)
    probabilities_N = of.probabilities(engine)
    tokens = probabilities_N @ of.sums(torch.ones_like(old_T))
    return (probabilities_N @ of.sums(rollout_T - old_T) / tokens).item()


def engines(of: Toy, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the logits of trainer and engine, at the same KL."""
    draw = torch.Generator().manual_seed(seed)
    shape = LENGTH, VOCABULARY, VOCABULARY
    start = torch.randn(shape, generator=draw).double()
    start[..., END] -= 1.5
    noise = torch.randn(shape, generator=draw).double()
    is_other = torch.rand(LENGTH, VOCABULARY, 1, generator=draw) < 1 / 10
    difference = torch.where(is_other, noise, 0.1 * noise)
    scale = 0.0
    while kl(of, start, start + scale * difference) < KL:
        scale += 0.01
    trained = start
    while kl(of, trained, start) < KL:
        trained = trained + 0.5 * of.exact_gradient(trained).view(shape)
    return {"rounding": (start, start + scale * difference), "stale": (trained, start)}


def measure(of: Toy, trainer: Tensor, engine: Tensor, form: dict | None) -> tuple[float, float]:
    """Return bias and standard deviation under a correction; None: the clipped ratio to the
    engine."""
    old_T, rollout_T = of.logprobs(trainer), of.logprobs(engine)
    is_trained_T = torch.ones_like(of.ids_T, dtype=torch.bool)
    A_T = of.advantages(engine)
    if form is None:
        log_ratio_T = old_T - rollout_T
        weights_T = log_ratio_T.exp() * ~is_clipped(log_ratio_T, A_T, 0.2, 0.28)
    else:
        streams = old_T, rollout_T, is_trained_T, of.ids_T
        weights_T = importance_weights(*streams, Correction(**form))
    gradients_ND = of.gradients(trainer, weights_T * A_T)
    reference_D = of.exact_gradient(trainer)
    probabilities_N = of.probabilities(engine)
    mean_D = probabilities_N @ gradients_ND
    variance = (probabilities_N @ gradients_ND.square() - mean_D.square()).sum() / COMPLETIONS
    if form and form.get("normalize"):
        lengths_N = of.sums(is_trained_T.double())
        weights_N = of.sums(weights_T)
        if form["level"] == "sequence":
            weights_N, lengths_N = weights_N / lengths_N, torch.ones_like(lengths_N)
        draw = torch.Generator().manual_seed(0)
        shape = MINIBATCHES, COMPLETIONS
        drawn = torch.multinomial(probabilities_N, MINIBATCHES * COMPLETIONS, True, generator=draw)
        drawn = drawn.view(shape)
        plain = torch.stack([gradients_ND[row].mean(0) for row in drawn])
        c_mean = weights_N[drawn].sum(1) / lengths_N[drawn].sum(1)
        normalised = plain / c_mean[:, None]
        variance = normalised.var(0).sum()
        mean_D = mean_D + (normalised - plain).mean(0)  # less noise: the mean of `plain` is known
    norm = reference_D.norm()
    return ((mean_D - reference_D).norm() / norm).item(), (variance.sqrt() / norm).item()


def main() -> None:
    of = toy()
    labels = ["sampled by the trainer", *FORMS]
    found = {}  # of each engine: bias and standard deviation, [toy, label, 2]
    for seed in range(TOYS):
        for name, (trainer, engine) in engines(of, seed).items():
            rows = [measure(of, trainer, trainer, dict(level="none"))]
            rows += [measure(of, trainer, engine, form) for form in FORMS.values()]
            found.setdefault(name, []).append(rows)
            rewards = [of.probabilities(logits) @ of.rewards_N for logits in (engine, trainer)]
            print(
                f"toy {seed}, {name}: reward of engine {rewards[0]:.2f}, trainer {rewards[1]:.2f}"
            )
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 6.2), sharey=True, layout="constrained")
    places = torch.arange(len(labels), 0, -1)
    for axis, (name, toys) in zip(axes, found.items(), strict=True):
        values = torch.tensor(toys)
        print(f"\n| {name} engine | bias | standard deviation |\n| --- | --- | --- |")
        for label, (bias, deviation) in zip(labels, values.mean(0).tolist(), strict=True):
            print(f"| {label} | {bias:.2f} | {deviation:.2f} |")
        kinds = zip(("bias", "standard deviation"), COLOURS, (0.2, -0.2), strict=True)
        for k, (kind, colour, shift) in enumerate(kinds):
            axis.barh(places + shift, values[..., k].mean(0), 0.38, color=colour, label=kind)
            for toy_values in values[..., k]:
                axis.plot(toy_values, places + shift, ".", color="black", markersize=3)
        axis.set_yticks(places, labels)
        axis.set_title(f"{name} engine")
        axis.set_xlabel("over the norm of the true gradient")
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower right", ncols=2)
    figure.savefig(ROOT / "docs/corrections.png", dpi=100)


if __name__ == "__main__":
    main()
