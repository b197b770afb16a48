"""AdamW, its learning rate as a function of the step, and the one place where weights change."""

import math

import torch
from torch import Tensor, nn

from common import distributed
from common.config import TrainArgs
from common.mesh import average_over_copies


def adamw(model: nn.Module, args: TrainArgs) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) over the sharded float32 masters; weight decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        dict(params=[p for p in parameters if p.ndim >= 2], weight_decay=args.weight_decay),
        dict(params=[p for p in parameters if p.ndim < 2], weight_decay=0.0),
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(args.adam_beta1, args.adam_beta2), fused=True)
    # Its states are there from the start: an engine beside the trainer takes of the memory what is free by then.
    for parameter in parameters:
        optimizer.state[parameter] = dict(
            step=torch.zeros((), device=parameter.device),
            exp_avg=torch.zeros_like(parameter),
            exp_avg_sq=torch.zeros_like(parameter),
        )
    return optimizer


def learning_rate(step: int, total_steps: int, args: TrainArgs) -> float:
    """Learning rate of the update after `step` finished ones: linear warmup from 0, then `--lr_schedule`, which
    reaches `min_lr_ratio` of the peak after the last update. A function of the step: nothing to save or resume."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    if args.lr_schedule == "constant":
        return args.lr
    done = min(1.0, (step - args.warmup_steps) / max(1, total_steps - args.warmup_steps))
    remaining = 1 - done if args.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return args.lr * (args.min_lr_ratio + (1 - args.min_lr_ratio) * remaining)


def optimizer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, lr: float, max_grad_norm: float, loss: Tensor
) -> float:
    """Average the gradients over copies of the model, clip, step, clear them; returns the global gradient norm before
    clipping. Collective.

    `loss` is this rank's share of it, summed over the micro-batches.
    Raises `RunError` before anything is changed if the loss or the gradient is not finite.
    """
    loss = distributed.all_sum(loss)
    average_over_copies(model)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).full_tensor().item()
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        what = f"the loss is {float(loss)}" if not math.isfinite(loss) else f"the gradient norm is {grad_norm}"
        raise distributed.RunError(f"{what}: stopped before the optimizer step, nothing was saved after it")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm
