"""Policy gradients on a bandit, with advantages and a loss that grpo.py can use.

    python course/lessons/02_bandit.py  # exact means and variances
    python course/lessons/02_bandit.py --baseline none --output_dir runs/course/02/none  # training

The bandit has four arms, A in shapes, and no prompt. The policy is a softmax over four logits. A
step samples a group of four arms. It has 4^4 = 256 outcomes, so the expectation and the variance of
the gradient are sums over all of them."""

import argparse
import json
import math
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
import yaml
from torch import Tensor

import grpo
import rloo
from common.objectives.advantages import group_mean
from common.objectives.policy import PolicyInputs, reinforce

BASELINES = dict(
    none=lambda rewards_OG: rewards_OG, leave_one_out=rloo.advantages, group_mean=group_mean,
    group=grpo.advantages,
)  # fmt: skip
REWARDS_A = torch.tensor([1.0, 0.6, 0.3, 0.0], dtype=torch.float64)
OUTCOMES_OG = torch.tensor([*product(range(4), repeat=4)])  # all groups of four arms


def gradients(baseline: str, rewards_A: Tensor, logits_A: Tensor, outcomes_OG: Tensor) -> Tensor:
    """Return the gradient of the loss, a mean over the group, for each outcome: [O, A]."""
    rewards_OG = rewards_A[outcomes_OG]
    advantages_OG = BASELINES[baseline](rewards_OG)
    logits_OA = logits_A.repeat(len(outcomes_OG), 1).requires_grad_()
    logprobs_OG = logits_OA.log_softmax(-1).gather(1, outcomes_OG)
    ids_OG = torch.arange(outcomes_OG.numel()).view_as(outcomes_OG)
    tokens = PolicyInputs(
        logprobs_OG, logprobs_OG.detach(), advantages_OG, torch.ones_like(ids_OG), ids_OG
    )
    losses_OG = reinforce(tokens).loss_T
    return torch.autograd.grad(losses_OG.mean(1).sum(), logits_OA)[0]


def moments(baseline: str, rewards_A: Tensor, logits_A: Tensor) -> tuple[Tensor, float]:
    """Return the expectation of the gradient [A], and its variance, summed over the logits.
    Exact."""
    weights_O1 = (
        logits_A.log_softmax(-1)[OUTCOMES_OG].sum(1, keepdim=True).exp()
    )  # probabilities of the outcomes
    gradients_OA = gradients(baseline, rewards_A, logits_A, OUTCOMES_OG)
    mean_A = (weights_O1 * gradients_OA).sum(0)
    return mean_A, (weights_O1 * (gradients_OA - mean_A).square()).sum().item()


def train(baseline: str, offset: float, steps: int, lr: float, seed: int, folder: Path) -> None:
    """Take steps of plain gradient descent from the uniform policy, and write a metrics.jsonl."""
    generator, logits_A = torch.Generator().manual_seed(seed), torch.zeros(4, dtype=torch.float64)
    lines = []
    for step in range(steps + 1):
        if step % 5 == 0:
            value = (
                (logits_A.softmax(-1) * REWARDS_A).sum().item()
            )  # expected reward, without the offset
            variance = moments(baseline, REWARDS_A + offset, logits_A)[1]
            lines.append(dict(step=step, value=value, log10_variance=math.log10(variance)))
        group_1G = torch.multinomial(
            logits_A.softmax(-1), 4, replacement=True, generator=generator
        )[None]
        logits_A = logits_A - lr * gradients(baseline, REWARDS_A + offset, logits_A, group_1G)[0]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.yaml").write_text(
        yaml.safe_dump(dict(baseline=baseline, offset=offset, lr=lr, seed=seed))
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(
        f"{baseline}: expected reward {lines[0]['value']:.3f} -> {lines[-1]['value']:.3f} in "
        f"{steps} steps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", choices=BASELINES, default="none")
    parser.add_argument(
        "--offset", type=float, default=10.0, help="number added to all rewards; default: 10"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output_dir",
        type=Path,
        help="folder of a training run; default: print exact numbers alone",
    )
    flags = parser.parse_args()
    if flags.output_dir:
        return train(
            flags.baseline, flags.offset, flags.steps, flags.lr, flags.seed, flags.output_dir
        )
    for offset, baseline in product((0.0, flags.offset), BASELINES):
        mean_A, variance = moments(
            baseline, REWARDS_A + offset, torch.zeros(4, dtype=torch.float64)
        )
        mean = " ".join(f"{x:+.4f}" for x in mean_A)
        print(f"rewards + {offset:<4g} {baseline:<14} mean {mean}  variance {variance:.4f}")


if __name__ == "__main__":
    main()
