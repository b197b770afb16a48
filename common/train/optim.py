"""AdamW, the learning rate of each step, and `optimizer_step`. Nothing else changes trained
weights.

With `--dtype float16` small gradients would be rounded to 0. The model therefore multiplies the
gradient of its outputs by a loss scale, a power of two (arXiv:1710.03740), and `optimizer_step`
divides the float32 gradients by it. The scale is halved when a gradient overflows, and doubled
after `GROW_AFTER` steps without an overflow."""

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw as adamw_update

from common.config.groups import OptimArgs
from common.model.policy import PackedModel
from common.parallel import distributed

BETA1 = 0.9  # decay rate of the first moment
FIRST_SCALE = 2.0**16
GROW_AFTER = 2000  # steps


def adamw(model: nn.Module, args: OptimArgs) -> torch.optim.AdamW:
    """Return AdamW (arXiv:1711.05101) for the sharded float32 master weights. Only matrices have
    weight decay. `--offload optimizer` keeps the moments on the CPU."""
    if model.compute_dtype == torch.float16:  # as a buffer of the model it is saved in checkpoints
        state = [FIRST_SCALE, 0.0, 0.0]  # the scale, steps since it changed, and skipped steps
        model.loss_scale = torch.tensor(state, device=model.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        dict(params=[p for p in parameters if p.ndim >= 2], weight_decay=args.weight_decay),
        dict(params=[p for p in parameters if p.ndim < 2], weight_decay=0.0),
    ]
    on_host = args.offload == "optimizer"
    kind = HostAdamW if on_host else torch.optim.AdamW
    optimizer = kind(groups, lr=args.lr, betas=(BETA1, args.adam_beta2), fused=True)
    # Allocate the moments now: an engine on the same GPU will take all memory that is free.
    for parameter in parameters:
        home: dict = dict(device=parameter.device)
        if on_host:
            home = dict(device="cpu", pin_memory=parameter.is_cuda)
        moments = {name: torch.zeros_like(parameter, **home) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = dict(step=torch.zeros((), **home)) | moments
    return optimizer


class HostAdamW(torch.optim.AdamW):
    """AdamW that keeps its moments on the CPU. A step copies the moments of one parameter after
    another to the parameter's device, updates them there, and copies them back. It waits for the
    copies once, at the end, so that a checkpoint can read the moments."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                moments = [state[name].to_local() for name in ("exp_avg", "exp_avg_sq")]
                on_host = [*moments, state["step"]]
                copies = [x.to(parameter.device, non_blocking=True) for x in on_host]
                first, second, steps = ([copy] for copy in copies)
                adamw_update(
                    [parameter.to_local()], [parameter.grad.to_local()], first, second, [], steps,
                    fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
                    lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
                    maximize=False,
                )  # fmt: skip
                for x, copy in zip(on_host, copies, strict=True):
                    x.copy_(copy, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def learning_rate(step: int, total_steps: int, args: OptimArgs) -> float:
    """Return the learning rate of the update that follows `step` finished ones: a linear warmup
    from 0, then `--lr_schedule`, which would reach 0 right after the last update. It depends on the
    step alone, so a checkpoint need not save it."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    if args.lr_schedule == "constant":
        return args.lr
    done = min(1.0, (step - args.warmup_steps) / max(1, total_steps - args.warmup_steps))
    remaining = 1 - done if args.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return args.lr * remaining


def optimizer_step(
    model: PackedModel, optimizer: Optimizer, lr: float, max_grad_norm: float, loss: Tensor
) -> float:
    """Clip the gradients, update the weights and clear the gradients. Return the gradient norm over
    all ranks before clipping. Collective.

    `loss` is this rank's share of the loss, summed over its micro-batches. Raises `RunError`,
    before any weight changes, if the loss or the gradient is not finite, or if the last micro-batch
    of the minibatch did not run last. In float16 gradients may overflow now and then: such a step
    is skipped and halves the loss scale."""
    if not getattr(model, "is_averaged", True):
        raise distributed.RunError("run the micro-batches of a minibatch in order, and all of them")
    total = distributed.all_sum(loss)
    if model.loss_scale is not None:
        scale = model.loss_scale[0].item()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).full_tensor()
    total_loss, grad_norm = torch.stack([total, norm.to(total)]).tolist()  # one wait for the GPU
    if model.loss_scale is not None and math.isfinite(total_loss):
        change_scale(model.loss_scale, math.isfinite(grad_norm))
        if not math.isfinite(grad_norm):
            optimizer.zero_grad(set_to_none=True)
            return grad_norm
    if not (math.isfinite(total_loss) and math.isfinite(grad_norm)):
        problem = f"the gradient norm is {grad_norm}"
        if not math.isfinite(total_loss):
            problem = f"the loss is {total_loss}"
        advice = "stopped before the optimizer step; earlier checkpoints are intact"
        raise distributed.RunError(f"{problem}: {advice}")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def change_scale(state: Tensor, is_finite: bool) -> None:
    scale, steps, skipped = state.tolist()
    if not is_finite:
        scale, steps, skipped = scale / 2, 0.0, skipped + 1
    elif steps + 1 == GROW_AFTER:
        scale, steps = scale * 2, 0.0
    else:
        steps += 1
    if scale < 1:
        problem = "gradients overflow in float16 with every loss scale"
        raise distributed.RunError(f"{problem}: use --dtype bfloat16")
    state.copy_(torch.tensor([scale, steps, skipped]))
