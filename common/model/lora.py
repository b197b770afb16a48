"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): the model is frozen, and each of its linear layers learns
a product of two narrow matrices, `scale b a`, that is added to its weight.

The layer multiplies by weight + scale b a, rounded to the compute dtype. Engine and exports get the same numbers. The
two matrices are float32, so that small steps add up in them.

Shapes: R rank, I inputs and O outputs of a layer.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config.groups import BUILT_IN_MODELS, BaseArgs
from common.config.training import LoRAArgs
from common.data import durable
from common.model.loading import one_line_errors, require_unchanged
from common.parallel import distributed

# Names of the PEFT library: files, and the prefix of the model's names.
CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


def has_adapters(args: BaseArgs) -> bool:
    """Return whether adapters are trained in place of all weights."""
    return isinstance(args, LoRAArgs) and args.lora_rank > 0


# ---- the layer ----


def merge(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """Return weight + scale b a, computed in float32 and rounded to the dtype of the weight."""
    return torch.addmm(weight_OI.float(), b_OR.float(), a_RI.float(), alpha=scale).to(weight_OI.dtype)


class _MergedLinear(torch.autograd.Function):
    """x (weight + scale b a)^T. The backward computes the sum again, and its gradient, [O, I], never exists: the
    gradients of a and b are products of narrow matrices."""

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
    """Adapter of a linear layer, float32, outside of that layer."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        shapes = (rank, layer.in_features), (layer.out_features, rank)
        empty = (torch.empty(shape, dtype=torch.float32, device=layer.weight.device) for shape in shapes)
        self.lora_A, self.lora_B = map(nn.Parameter, empty)


class LoRALinear(nn.Linear):
    """Linear layer with an adapter, in place of a linear layer whose weight and bias it takes under their names.

    The layer has a second adapter if a value model shares it (value.py); `use` chooses between the two.
    """

    second_adapter: tuple[Adapter, ...] = ()  # at most one, which is not part of this module
    use_second = False

    def __init__(self, layer: nn.Linear, rank: int, scale: float):
        super().__init__(layer.in_features, layer.out_features, device="meta")
        adapter = Adapter(layer, rank)
        self.weight, self.bias, self.scale = layer.weight, layer.bias, scale
        self.lora_A, self.lora_B = adapter.lora_A, adapter.lora_B

    def forward(self, x: Tensor) -> Tensor:
        adapter = self.second_adapter[0] if self.use_second else self
        return _MergedLinear.apply(x, self.weight, self.bias, adapter.lora_A, adapter.lora_B, self.scale)

    def merged(self) -> Tensor:
        """Return the matrix that the layer multiplies by, where its parameters are whole."""
        return merge(self.weight, self.lora_A, self.lora_B, self.scale)


def layers_of(hf: nn.Module) -> dict[str, LoRALinear]:
    """Return the layers of a model that have adapters, by name."""
    return {name: module for name, module in hf.named_modules() if isinstance(module, LoRALinear)}


def use(hf: nn.Module, second: bool) -> None:
    """Compute with the second adapters of a model's layers from now on, or with the first."""
    for layer in layers_of(hf).values():
        layer.use_second = second


def add_adapters(hf: nn.Module, args: LoRAArgs, label: str) -> dict[str, Tensor]:
    """Give a model on meta its adapters, float32, and freeze all other weights except a scalar head.

    Returns the weights of `--adapter` by name, for `fill_adapters`. Raises `ValueError` for targets that match no
    layer, and for an adapter of other layers, or of another rank or scale.
    """
    in_blocks = set(hf.base_model.layers.modules())
    linear = {name: module for name, module in hf.named_modules() if type(module) is nn.Linear and module in in_blocks}
    found = {target: [name for name in linear if _is_target(name, target)] for target in args.lora_targets}
    for target, names in found.items():
        if not names:
            there = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
            raise ValueError(f"--lora_targets {target}: {label} has no such linear layer; it has {there}")
    hf.requires_grad_(False)
    scale = args.lora_alpha / (math.sqrt(args.lora_rank) if args.lora_rslora else args.lora_rank)
    for name in {name for names in found.values() for name in names}:
        hf.set_submodule(name, LoRALinear(linear[name], args.lora_rank, scale))
    if hasattr(hf, "score"):
        hf.score.float().requires_grad_(True)
    # The adapter belongs to --model; a value model beside it starts with a new one.
    return _read_adapter(hf, args) if args.adapter and label.startswith("--model ") else {}


def _is_target(name: str, target: str) -> bool:
    if target == "attention":
        return "attn" in name or "attention" in name
    return target == "all-linear" or f".{name}".endswith(f".{target}")


def _trained(hf: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in hf.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def fill_adapters(hf: nn.Module, stored: dict[str, Tensor], seed: int) -> None:
    """Fill sharded adapters with `stored` weights, or new ones: A ~ U(-1 / sqrt(I), 1 / sqrt(I)) and B = 0, the same on
    any number of ranks. Collective."""
    from torch.distributed.tensor import distribute_tensor

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
    """Frozen model that a policy with adapters started from: the policy itself, with its adapters of that time."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.policy = (policy,)  # not a submodule
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
    """Return a whole `weight` of `hf`'s state dict as its layer multiplies by it: with its adapter, if there is one, in
    the compute dtype. Collective."""
    layer = hf.get_submodule(name.rpartition(".")[0])
    if not isinstance(layer, LoRALinear) or weight.ndim < 2:
        return weight
    a_RI, b_OR = (whole(p.detach()).to(dtype) for p in (layer.lora_A, layer.lora_B))
    return merge(weight.to(dtype), a_RI, b_OR, layer.scale)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all its shards. Collective if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # of a DTensor


def save_adapter(hf: nn.Module, path: str, args: LoRAArgs, folder: Path, card: dict | None = None) -> None:
    """Write the adapter alone, in the format of the PEFT library, with the files of a model `card`; `path` is the
    folder of its model. The old folder stays until the new one is complete. Collective."""
    from safetensors.torch import save_file

    tensors = {}
    for name, parameter in _trained(hf).items():
        tensor = whole(parameter.detach())
        if distributed.is_main():
            tensors[PREFIX + name + ("" if name == "score.weight" else ".weight")] = tensor.cpu().contiguous()
    if distributed.is_main():
        adapted = layers_of(hf).keys()
        targets = {name.rpartition(".")[2] for name in adapted}
        matched = {name for name, module in hf.named_modules()
                   if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets}  # fmt: skip
        here = args.model in BUILT_IN_MODELS or Path(args.model).expanduser().exists()
        base = str(Path(path).resolve()) if here else args.model
        config = dict(
            peft_type="LORA", base_model_name_or_path=base, r=args.lora_rank, lora_alpha=args.lora_alpha,
            use_rslora=args.lora_rslora, target_modules=sorted(targets if matched == adapted else adapted),
            lora_dropout=0.0, bias="none", fan_in_fan_out=False, init_lora_weights=True, inference_mode=True,
            task_type="SEQ_CLS" if hasattr(hf, "score") else "CAUSAL_LM",
            modules_to_save=["score"] if hasattr(hf, "score") else None,
        )  # fmt: skip
        work = folder.with_suffix(".tmp")
        work.mkdir(parents=True)
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})
        (work / CONFIG).write_text(json.dumps(config, indent=2))
        for name, content in (card or {}).items():
            (work / name).write_bytes(content)
        durable.write_checksums(work)
        durable.replace_folder(work, folder)
    distributed.barrier()


def _read_adapter(hf: nn.Module, args: LoRAArgs) -> dict[str, Tensor]:
    """Return the weights of `--adapter` for the parameters of `hf`, by their names."""
    from safetensors.torch import load_file

    label, folder = f"--adapter {args.adapter}", Path(args.adapter).expanduser()
    require_unchanged(label, folder)
    with one_line_errors(label):
        config, tensors = durable.parse_json((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{label}: {CONFIG} is not that of a LoRA adapter (peft_type LORA)")
    for key, flag in (("r", "lora_rank"), ("lora_alpha", "lora_alpha"), ("use_rslora", "lora_rslora")):
        if config.get(key, False) != getattr(args, flag):
            raise ValueError(f"{label}: its {key} is {config.get(key, False)}, --{flag} is {getattr(args, flag)}")
    unsupported = [key for key in ("alpha_pattern", "fan_in_fan_out", "layer_replication") if config.get(key)]
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):  # other methods change W as well
        unsupported.append("init_lora_weights")
    for key in unsupported:
        raise ValueError(f"{label}: its {key} is {config[key]}, which is not supported")
    stored, wanted = {}, _trained(hf)
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        stored[name.removesuffix(".weight") if "lora_" in name else name] = tensor
    for name in sorted(wanted.keys() - stored.keys() - {"score.weight"}):  # an adapter of a language model has no head
        raise ValueError(f"{label}: no {name} in it; --lora_targets must be its layers, {config['target_modules']}")
    for name, tensor in stored.items():
        if name not in wanted:
            raise ValueError(f"{label}: --model with these --lora_targets has no {name}")
        if tensor.shape != wanted[name].shape:
            raise ValueError(f"{label}: {name} is {list(tensor.shape)}, --model needs {list(wanted[name].shape)}")
    distributed.say(f"{label}: made for {config.get('base_model_name_or_path')}")
    return stored
