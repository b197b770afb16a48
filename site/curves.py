"""Values and gradients of the objectives on grids, computed by the functions of the scripts.

A chart has lines, and a line has a value and gradients for every combination of the settings that
it reads."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import dpo
import grpo
import kto
import ppo
import rm
import sft
from common.objectives.divergence import forward_kl, jsd, reverse_kl
from common.objectives.kl import KLEstimator, kl_estimate
from common.objectives.policy import PolicyInputs
from common.objectives.preference import READS, Pairs, preference_loss

Settings = Mapping[str, Sequence]
OLD = math.log(1 / 3)  # log-prob of the token at the time of the rollout
LENGTH = 20.0  # tokens of a completion, and minus its log-prob under the reference


def numbers(x: Tensor) -> list[float]:
    return [float(f"{round(value, 9):.4g}") for value in x.tolist()]


def grid(low: float, high: float, points: int = 81) -> Tensor:
    return torch.linspace(low, high, points, dtype=torch.float64)


def line(
    label: str, f: Callable[..., Tensor], inputs: dict[str, Tensor], settings: Settings
) -> dict:
    """Return value and gradients of `f(*inputs, **settings)` for all combinations of settings, the
    last one fastest. `inputs`: name -> grid; there is a gradient for each."""
    value, gradients = [], {name: [] for name in inputs}
    for combination in product(*settings.values()):
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        value_X = f(*leaves, **dict(zip(settings, combination, strict=True)))
        value.append(numbers(value_X))
        for name, gradient in zip(inputs, torch.autograd.grad(value_X.sum(), leaves), strict=True):
            gradients[name].append(numbers(gradient))
    return dict(label=label, settings=settings, value=value, gradients=gradients)


def chart(group: str, name: str, x: str, xs: Tensor, lines: list[dict], **start: object) -> dict:
    """Return a chart. `start`: first positions of its sliders, the middle by default."""
    settings = {flag: steps for one in lines for flag, steps in one["settings"].items()}
    first = {
        flag: steps.index(start.get(flag, steps[len(steps) // 2]))
        for flag, steps in settings.items()
    }
    return dict(
        group=group, name=name, x=x, xs=numbers(xs), lines=lines, settings=settings, start=first
    )


# ---- policy losses ----

CLIP = (
    dict(clip_high=[0.05, 0.1, 0.2, 0.28, 0.4, 0.6, 1.0]),
    dict(clip_low=[0.05, 0.1, 0.2, 0.3, 0.5]),
)
NO_FLAGS: tuple[Settings, Settings] = ({}, {})
SIGNED = dict.fromkeys(grpo.LOSSES, NO_FLAGS) | {
    # flags that are read for A = 1 and for A = -1
    "clip": CLIP,
    "gspo": CLIP,
    "gmpo": (dict(clip_high=[0.1, 0.2, 0.4, 0.8]), dict(clip_low=[0.1, 0.2, 0.4, 0.8])),
}


def policy_chart(name: str) -> dict:
    """Return the chart of a completion of one token."""
    rho_X = grid(0.03, 3, 100)
    low, high = (0.4, 0.4) if name == "gmpo" else (0.2, 0.28)  # gspo's are too close to 1

    def f(A: float, logprobs_X: Tensor, clip_low: float = low, clip_high: float = high) -> Tensor:
        old_X, A_X = torch.full_like(logprobs_X, OLD), torch.full_like(logprobs_X, A)
        mask_X, ids_X = torch.ones_like(A_X).bool(), torch.arange(len(A_X))
        x = PolicyInputs(logprobs_X, old_X, A_X, mask_X, ids_X, clip_low, clip_high)
        return grpo.LOSSES[name](x).loss_T

    logprobs = {"log-prob": rho_X.log() + OLD}
    signs = zip((1.0, -1.0), SIGNED[name], strict=True)
    lines = [line(f"A = {A:g}", partial(f, A), logprobs, settings) for A, settings in signs]
    return chart("policy", name, "rho", rho_X, lines, clip_low=low, clip_high=high)


# ---- preference losses ----

CHOICES: Settings = dict(
    beta=[0.05, 0.1, 0.3, 1.0],
    label_smoothing=[0.0, 0.1, 0.3],
    f_divergence=["reverse_kl", "forward_kl", "js", "alpha"],
)
DEFAULTS: dict[str, Any] = dict(beta=0.1, label_smoothing=0.0, f_divergence="reverse_kl")


def preference_chart(name: str) -> dict:
    margin_X, start = grid(-30, 30, 61), dict(DEFAULTS)
    settings = {flag: CHOICES[flag] for flag in ("beta", *READS[name])}
    if name == "exo_pair":  # needs label smoothing
        settings["label_smoothing"], start["label_smoothing"] = [0.001, 0.1, 0.3], 0.001

    def f(chosen_X: Tensor, rejected_X: Tensor, **flags) -> Tensor:
        n = torch.full_like(chosen_X, LENGTH)
        pairs = Pairs(chosen_X, rejected_X, -n, -n, n, n)
        if name == "sigmoid":
            return dpo.loss(pairs, dpo.Args(**DEFAULTS | flags))[0]
        return preference_loss(name, pairs, **DEFAULTS | flags)

    inputs = {"chosen": margin_X / 2 - LENGTH, "rejected": -margin_X / 2 - LENGTH}
    return chart("preference", name, "margin", margin_X, [line(name, f, inputs, settings)], **start)


# ---- the others ----


def kl_chart() -> dict:
    def f(estimator: KLEstimator, d_X: Tensor) -> Tensor:
        return kl_estimate(d_X, torch.zeros_like(d_X), estimator)

    d_X = grid(-3, 3, 121)
    lines = [line(k, partial(f, k), {"log-prob": d_X}, {}) for k in ("k1", "k2", "k3")]
    return chart("kl", "kl_estimate", "d", d_X, lines)


def divergence_chart() -> dict:
    def f(divergence: Callable, logit_X: Tensor, q: float, **flags) -> Tensor:
        logp_X2 = torch.stack([logit_X, torch.zeros_like(logit_X)], -1).log_softmax(-1)
        logq_X2 = torch.tensor([q, 1 - q], dtype=torch.float64).log().expand_as(logp_X2)
        return divergence(logp_X2, logq_X2, **flags)

    p_X, q = grid(0.01, 0.99, 99), dict(q=[0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98])
    each = [(reverse_kl, q), (forward_kl, q), (jsd, q | dict(b=[0.1, 0.5, 0.9]))]
    lines = [
        line(d.__name__, partial(f, d), {"logit": p_X.logit()}, settings) for d, settings in each
    ]
    return chart("divergence", "divergence", "pi", p_X, lines, q=0.75)


def other_charts() -> list[dict]:
    p_X, r_X, l_X, v_X = grid(0.01, 1, 100), grid(-5, 5), grid(-40, 40), grid(-2, 2)

    def of_pair(r_c: Tensor, margin: float, center_coefficient: float) -> Tensor:
        return rm.loss(r_c, torch.zeros_like(r_c), margin, center_coefficient)

    def of_completion(desirable: bool, l_N: Tensor, beta: float, z0: float) -> Tensor:
        args: Any = SimpleNamespace(**vars(kto.Args()) | dict(beta=beta))
        return kto.loss(l_N, torch.full_like(l_N, desirable).bool(), z0, args)

    def of_value(v_T: Tensor, R: float) -> Tensor:
        return ppo.value_loss(v_T, torch.zeros_like(v_T), torch.full_like(v_T, R))

    margins: Settings = dict(margin=[0.0, 0.5, 1.0, 2.0], center_coefficient=[0.0, 0.01, 0.1])
    scales: Settings = dict(beta=[0.05, 0.1, 0.3, 1.0], z0=[0.0, 2.0, 5.0, 10.0])
    values: Settings = dict(R=[-1.0, 0.0, 0.5, 1.0])
    sides = {"desirable": True, "undesirable": False}
    nll = [
        line(name, partial(sft.loss, name), {"log-prob": p_X.log()}, {}) for name in ("nll", "dft")
    ]
    pair = line("loss", of_pair, {"r_c": r_X}, margins)
    completion = [
        line(name, partial(of_completion, side), {"l": l_X}, scales) for name, side in sides.items()
    ]
    return [
        chart("other", "sft.py: loss", "pi", p_X, nll),
        chart(
            "other",
            "rm.py: loss with r_r = 0",
            "r_c",
            r_X,
            [pair],
            margin=0.0,
            center_coefficient=0.0,
        ),
        chart("other", "kto.py: loss", "l", l_X, completion, beta=0.1, z0=0.0),
        chart(
            "other",
            "ppo.py: value_loss with V = 0",
            "v",
            v_X,
            [line("value_loss", of_value, {"v": v_X}, values)],
        ),
    ]


def charts() -> list[dict]:
    """Return all charts, for site.js."""
    policy = map(policy_chart, grpo.LOSSES)
    return [*policy, kl_chart(), *map(preference_chart, READS), divergence_chart(), *other_charts()]
