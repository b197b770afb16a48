"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): the model stays as it is, and each of its linear layers
learns a product of two narrow matrices, s B A, that is added to its weight W.

The layer multiplies with W + s B A rounded to the compute dtype. That is what the engine is given and what is exported
too: the three are the same numbers. Small steps add up in A and B, which are kept in float32.

Shapes: R rank, I inputs and O outputs of a layer.
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from common.config.flags import BaseArgs, NotNegative, Positive
from common.model.loading import one_line_errors
from common.parallel import distributed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # the PEFT library's names
PREFIX = "base_model.model."  # and what it puts before the model's


@dataclass
class LoRAArgs(BaseArgs):
    """Flags of every script that trains: adapters in place of all weights."""

    lora_rank: NotNegative[int] = 0
    """train adapters of this rank on linear layers of the blocks and nothing else, but for a reward or value model's
    head; 0: train all weights"""
    lora_alpha: Positive[float] = 32.0
    """what adapters add is scaled by lora_alpha / lora_rank"""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """layers with an adapter: all-linear, attention, or what their names end with, as `q_proj v_proj`"""
    lora_rslora: bool = False
    """scaled by lora_alpha / sqrt(lora_rank) instead (arXiv:2312.03732)"""
    adapter: str | None = None
    """folder of an adapter of --model to go on from: a run's adapter/, or one in the form of the PEFT library"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag in ("lora_alpha", "lora_targets", "lora_rslora", "adapter"):
            self.require_read(flag, self.lora_rank > 0, "--lora_rank is 0")
        if not self.lora_targets:
            raise ValueError("--lora_targets needs at least one name")


def scale_of(hf: nn.Module) -> float | None:
    """What its adapters are scaled by; None without any."""
    return next((module.scale for module in hf.modules() if isinstance(module, LoRALinear)), None)


def has_adapters(args: BaseArgs) -> bool:
    """Whether what is trained are adapters."""
    return isinstance(args, LoRAArgs) and args.lora_rank > 0


# ---- the layer ----


def merge(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """W + s B A, computed in float32 and rounded to W's dtype."""
    return torch.addmm(weight_OI.float(), b_OR.float(), a_RI.float(), alpha=scale).to(weight_OI.dtype)


class _MergedLinear(torch.autograd.Function):
    """x (W + s B A)^T. The sum is made anew in the backward, and its gradient [O, I] never exists: those of A and B are
    products of narrow matrices."""

    @staticmethod
    def forward(ctx, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scale: float):
        ctx.save_for_backward(x, weight_OI, a_RI, b_OR)
        ctx.scale = scale
        return F.linear(x, merge(weight_OI, a_RI, b_OR, scale), bias_O)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight_OI, a_RI, b_OR = ctx.saved_tensors
        grad_x = grad @ merge(weight_OI, a_RI, b_OR, ctx.scale) if ctx.needs_input_grad[0] else None
        x, grad = x.flatten(0, -2), grad.flatten(0, -2)
        return grad_x, None, None, ctx.scale * (grad @ b_OR).T @ x, ctx.scale * grad.T @ (x @ a_RI.T), None


class Adapter(nn.Module):
    """Of a linear layer, float32, beside the one that is in it."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        empty = dict(dtype=torch.float32, device=layer.weight.device)
        self.lora_A = nn.Parameter(torch.empty(rank, layer.in_features, **empty))
        self.lora_B = nn.Parameter(torch.empty(layer.out_features, rank, **empty))


class LoRALinear(nn.Linear):
    """A linear layer with an adapter. What it was keeps its names. `lora_second`, if there is one, is computed with
    while `use` says so."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    second = False

    def forward(self, x: Tensor) -> Tensor:
        adapter = self.lora_second if self.second else self
        return _MergedLinear.apply(x, self.weight, self.bias, adapter.lora_A, adapter.lora_B, self.scale)

    def merged(self) -> Tensor:
        """What the layer multiplies with, where its parameters are whole."""
        return merge(self.weight, self.lora_A, self.lora_B, self.scale)


def use(hf: nn.Module, second: bool) -> None:
    """From now on compute with the second adapters of its layers, or with the first."""
    for layer in hf.modules():
        if isinstance(layer, LoRALinear):
            layer.second = second


def add_adapters(hf: nn.Module, args: LoRAArgs, what: str) -> dict[str, Tensor]:
    """Give a model on meta its adapters, float32; all else is frozen, but for a scalar head, which is trained whole.

    Returns what `fill_adapters` is to fill in from `--adapter`, by name. Raises `ValueError` for targets that no layer
    is, and for an adapter that is not of these layers, rank and scale.
    """
    inside = set(hf.base_model.layers.modules())
    linear = {name: module for name, module in hf.named_modules() if type(module) is nn.Linear and module in inside}
    found = {target: [name for name in linear if _is_target(name, target)] for target in args.lora_targets}
    for target, names in found.items():
        if not names:
            there = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
            raise ValueError(f"--lora_targets {target}: no linear layer of {what} is that; there are {there}")
    hf.requires_grad_(False)
    for layer in {linear[name] for names in found.values() for name in names}:
        layer.__class__, adapter = LoRALinear, Adapter(layer, args.lora_rank)
        layer.scale = args.lora_alpha / (math.sqrt(args.lora_rank) if args.lora_rslora else args.lora_rank)
        layer.lora_A, layer.lora_B = adapter.lora_A, adapter.lora_B
    if hasattr(hf, "score"):
        hf.score.float().requires_grad_(True)
    # It is of --model; a value model beside it starts anew.
    return _read_adapter(hf, args) if args.adapter and what.startswith("--model ") else {}


def _is_target(name: str, target: str) -> bool:
    if target == "attention":
        return "attn" in name or "attention" in name
    return target == "all-linear" or f".{name}".endswith(f".{target}")


def _trained(hf: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in hf.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def fill_adapters(hf: nn.Module, stored: dict[str, Tensor], seed: int) -> None:
    """Sharded adapters as `stored`, or new ones: A ~ U(-1 / sqrt(I), 1 / sqrt(I)), B = 0, the same on any number of
    ranks. Collective."""
    for number, (name, parameter) in enumerate(_trained(hf).items()):
        if name in stored:
            value = stored[name].float()
        elif name.endswith("lora_A"):
            bound, generator = parameter.shape[1] ** -0.5, torch.Generator()
            generator.manual_seed(distributed.fold_seed(seed, number))
            value = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        elif name.endswith("lora_B"):
            value = torch.zeros(parameter.shape)
        else:
            continue
        parameter.copy_(distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements))


class StartingModel(nn.Module):
    """The frozen model that a policy with adapters started from: the policy itself, with its adapters as they were."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.policy = [policy]  # not as a submodule
        self.start = [x.clone() for x in self._local()]

    def _local(self) -> list[Tensor]:
        return [parameter.detach().to_local() for parameter in _trained(self.policy[0]).values()]

    @torch.no_grad()
    def forward(self, *args, **kwargs):
        now = [x.clone() for x in self._local()]
        self._set(self.start)
        try:
            return self.policy[0](*args, **kwargs)
        finally:
            self._set(now)

    def _set(self, values: list[Tensor]) -> None:
        for x, value in zip(self._local(), values, strict=True):
            x.copy_(value)

    def reshard(self) -> None:
        self.policy[0].reshard()


# ---- files ----


def merged_weight(hf: nn.Module, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A whole `weight` of `hf`'s state dict as its layer multiplies with it: with the adapter, if it has one, of
    parameters in the compute dtype. Collective."""
    layer = hf.get_submodule(name.rpartition(".")[0])
    if not isinstance(layer, LoRALinear) or weight.ndim < 2:
        return weight
    a_RI, b_OR = (whole(p.detach()).to(dtype) for p in (layer.lora_A, layer.lora_B))
    return merge(weight.to(dtype), a_RI, b_OR, layer.scale)


def whole(tensor: Tensor) -> Tensor:
    """Collective for one that is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_adapter(hf: nn.Module, path: str, args: LoRAArgs, folder: Path) -> None:
    """The adapter alone, in the form of the PEFT library; `path` is where its model was read. The old folder stays
    until the new one is whole. Collective."""
    from safetensors.torch import save_file

    tensors = {}
    for name, parameter in _trained(hf).items():
        tensor = whole(parameter.detach())
        if distributed.is_main():
            tensors[PREFIX + name + ("" if name == "score.weight" else ".weight")] = tensor.cpu().contiguous()
    if distributed.is_main():
        adapted = {name for name, module in hf.named_modules() if isinstance(module, LoRALinear)}
        targets = {name.rpartition(".")[2] for name in adapted}
        meant = {name for name, module in hf.named_modules()
                 if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets}  # fmt: skip
        here = args.model == "tiny" or Path(args.model).expanduser().exists()
        base = str(Path(path).resolve()) if here else args.model
        config = dict(
            peft_type="LORA", base_model_name_or_path=base, r=args.lora_rank, lora_alpha=args.lora_alpha,
            use_rslora=args.lora_rslora, target_modules=sorted(targets if meant == adapted else adapted),
            lora_dropout=0.0, bias="none", fan_in_fan_out=False, init_lora_weights=True, inference_mode=True,
            task_type="SEQ_CLS" if hasattr(hf, "score") else "CAUSAL_LM",
            modules_to_save=["score"] if hasattr(hf, "score") else None,
        )  # fmt: skip
        work = folder.with_suffix(".tmp")
        work.mkdir(parents=True)
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})
        (work / CONFIG).write_text(json.dumps(config, indent=2))
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    distributed.barrier()


def _read_adapter(hf: nn.Module, args: LoRAArgs) -> dict[str, Tensor]:
    """What `--adapter` has for the parameters of `hf`, by their names."""
    from safetensors.torch import load_file

    what, folder = f"--adapter {args.adapter}", Path(args.adapter).expanduser()
    with one_line_errors(what):
        config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{what}: {CONFIG} is not that of a LoRA adapter (peft_type LORA)")
    for key, flag in (("r", "lora_rank"), ("lora_alpha", "lora_alpha"), ("use_rslora", "lora_rslora")):
        if config.get(key, False) != getattr(args, flag):
            raise ValueError(f"{what}: its {key} is {config.get(key, False)}, --{flag} is {getattr(args, flag)}")
    odd = [key for key in ("alpha_pattern", "fan_in_fan_out", "layer_replication") if config.get(key)]
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):  # others change W as well
        odd.append("init_lora_weights")
    if odd:
        raise ValueError(f"{what}: its {odd[0]} is {config[odd[0]]}, which is not supported")
    names = {key: key.removeprefix(PREFIX) for key in tensors}
    stored = {(name.removesuffix(".weight") if "lora_" in name else name): tensors[key] for key, name in names.items()}
    wanted = _trained(hf)
    for name in sorted(wanted.keys() - stored.keys() - {"score.weight"}):  # a language model's has no head
        raise ValueError(f"{what} has no {name}: --lora_targets are other layers than its {config['target_modules']}")
    for name, tensor in stored.items():
        if name not in wanted:
            raise ValueError(f"{what} has {name}, which is no adapter of --model with these --lora_targets")
        if tensor.shape != wanted[name].shape:
            raise ValueError(f"{what}: {name} is {list(tensor.shape)}, --model needs {list(wanted[name].shape)}")
    if distributed.is_main():
        print(f"{what}, which was made for {config.get('base_model_name_or_path')}")
    return stored
