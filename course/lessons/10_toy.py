"""The divergences of distill.py between a teacher with two modes and a student that can have one.

    python course/lessons/10_toy.py

A distribution has 21 tokens in a row. The teacher puts two bumps on it, the student one:
softmax(-(x - mean)^2 / (2 width^2)). Gradient descent on mean and width starts from many places."""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
from torch import Tensor

from common.objectives.divergence import forward_kl, jsd, reverse_kl

X_V = torch.arange(21, dtype=torch.float64)
TEACHER_V = 0.6 * torch.exp(-((X_V - 5) ** 2) / 4) + 0.4 * torch.exp(-((X_V - 15) ** 2) / 4)
LOGQ_V = (TEACHER_V / TEACHER_V.sum()).log()


def student(parameters_S2: Tensor) -> Tensor:
    """Return the log-probs of each start's student, [S, V], from its mean and the logarithm of its
    width."""
    mean_S1, log_width_S1 = parameters_S2.split(1, dim=1)
    return (-((X_V - mean_S1) ** 2) / (2 * (2 * log_width_S1).exp())).log_softmax(-1)


def fit(divergence: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and width of the best student, and its log-probs."""
    parameters_S2 = torch.tensor(
        [[mean, 1.0] for mean in range(0, 21, 2)], dtype=torch.float64, requires_grad=True
    )
    optimizer = torch.optim.Adam([parameters_S2], lr=0.02)
    for _ in range(2000):
        logp_SV = student(parameters_S2)
        optimizer.zero_grad()
        divergence(logp_SV, LOGQ_V.expand_as(logp_SV)).sum().backward()
        optimizer.step()
    logp_SV = student(parameters_S2.detach())
    values_S = divergence(logp_SV, LOGQ_V.expand_as(logp_SV))
    best = values_S.argmin()
    mean, log_width = parameters_S2.detach()[best]
    return torch.stack([mean, log_width.exp()]), logp_SV[best]


def main() -> None:
    print("divergence   mean  width  mass of tokens 0-9, 10-20   KL(q || pi)  KL(pi || q)")
    for name, divergence in (
        ("forward_kl", forward_kl),
        ("jsd", jsd),
        ("reverse_kl", reverse_kl),
    ):
        (mean, width), logp_V = fit(divergence)
        mass = logp_V.exp()[:10].sum(), logp_V.exp()[10:].sum()
        both = (f(logp_V[None], LOGQ_V[None]).item() for f in (forward_kl, reverse_kl))
        numbers = f"{mean:6.2f} {width:6.2f}  {mass[0]:18.3f} {mass[1]:6.3f}   "
        print(f"{name:<10} {numbers}{'  '.join(f'{x:11.3f}' for x in both)}")


if __name__ == "__main__":
    main()
