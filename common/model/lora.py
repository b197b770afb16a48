"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): the model is frozen, and each linear
layer learns two narrow matrices, whose product is added to its weight.

A layer multiplies by weight + scale b a, rounded to the compute dtype. Engine and exports get this
sum, so they have the same numbers. The two matrices are float32, so that small steps add up.

Shapes: L rank of the adapter, I inputs and O outputs of a layer."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import durable
from common.config.flags import ADAPTER_CONFIG
from common.config.groups import BUILT_IN_MODELS, LoRAArgs, TrainArgs
from common.model.loading import fill, named_errors, require_unchanged, whole
from common.packs.packing import PackedBatch
from common.parallel import distributed

Dense = Callable[[Tensor, torch.dtype], Tensor]


def merge(weight_OI: Tensor, a_LI: Tensor, b_OL: Tensor, scale: float) -> Tensor:
    """Return weight + scale b a, added up in float32 and rounded once to the dtype of all three."""
    if weight_OI.is_cuda:  # addmm does all this at once: 8 bytes of memory traffic a weight, not 28
        return torch.addmm(weight_OI, b_OL, a_LI, alpha=scale)
    merged_OI = torch.addmm(weight_OI.float(), b_OL.float(), a_LI.float(), alpha=scale)
    return merged_OI.to(weight_OI.dtype)


class _MergedLinear(torch.autograd.Function):
    """x (weight + scale b a)^T. To save memory, the backward computes the sum again, and never
    makes the gradient of the sum, [O, I]: those of a and b are products of narrow matrices."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias_O: Tensor | None, a_LI: Tensor, b_OL: Tensor,
        scale: float, dense: Dense,
    ):  # fmt: skip
        ctx.save_for_backward(x, weight, a_LI, b_OL)
        ctx.scale, ctx.dense = scale, dense
        return F.linear(x, merge(dense(weight, x.dtype), a_LI, b_OL, scale), bias_O)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, a_LI, b_OL = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ merge(ctx.dense(weight, x.dtype), a_LI, b_OL, ctx.scale)
        x = x.flatten(0, -2)
        grad = grad.flatten(0, -2)
        grad_a_LI = ctx.scale * (grad @ b_OL).T @ x
        grad_b_OL = ctx.scale * grad.T @ (x @ a_LI.T)
        return grad_x, None, None, grad_a_LI, grad_b_OL, None, None


class LoRALinear(nn.Linear):
    """Linear layer with an adapter. It takes weight and bias of the layer that it replaces."""

    # Returns the weight in a dtype. `--quantize` stores it in 4 bits, and here unpacks it.
    dense: Dense = staticmethod(Tensor.to)

    def __init__(self, layer: nn.Linear, rank: int, scale: float):
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias
        self.scale = scale
        options = dict(dtype=torch.float32, device=layer.weight.device)
        self.lora_A = nn.Parameter(torch.empty(rank, layer.in_features, **options))
        self.lora_B = nn.Parameter(torch.empty(layer.out_features, rank, **options))

    def forward(self, x: Tensor) -> Tensor:
        adapter = (self.lora_A, self.lora_B, self.scale)
        return _MergedLinear.apply(x, self.weight, self.bias, *adapter, self.dense)

    def merged(self, dtype: torch.dtype) -> Tensor:
        """Return the whole matrix that the layer multiplies by, in `dtype`. Collective if the
        parameters are sharded."""
        a_LI, b_OL = (whole(x.detach()).to(dtype) for x in (self.lora_A, self.lora_B))
        return merge(self.dense(whole(self.weight.detach()), dtype), a_LI, b_OL, self.scale)


# ---- the adapters of a model ----


def add_adapters(hf: nn.Module, args: LoRAArgs) -> None:
    """Put adapters (float32) on the layers of a model on meta, and freeze all other weights except
    a scalar head."""
    in_blocks = {*hf.get_decoder().layers.modules()}
    modules = dict(hf.named_modules())
    linear = {n: x for n, x in modules.items() if type(x) is nn.Linear and x in in_blocks}
    hf.requires_grad_(False)
    for target in args.lora_targets:
        names = [name for name in linear if f".{name}".endswith(f".{target}")]
        if target == "all-linear":
            names = [*linear]
        elif target == "attention":
            names = [name for name in linear if "attn" in name or "attention" in name]
        if not names:
            has = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
            raise ValueError(f"--lora_targets {target}: no such linear layer; the model has {has}")
        for name in names:
            layer = LoRALinear(linear[name], args.lora_rank, args.lora_alpha / args.lora_rank)
            hf.set_submodule(name, layer)
    if hasattr(hf, "score"):
        hf.score.float().requires_grad_(True)


def trained_parameters(hf: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in hf.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def fill_adapters(hf: nn.Module, stored: dict[str, Tensor], seed: int) -> None:
    """Fill sharded adapters with `stored` weights or, where these have none, with new ones:
    A ~ U(-1 / sqrt(I), 1 / sqrt(I)) and B = 0, the same on any number of ranks. Collective."""
    for number, (name, parameter) in enumerate(trained_parameters(hf).items()):
        if name in stored:
            value = stored[name].float()
        elif name.endswith("lora_A"):
            bound = parameter.shape[1] ** -0.5
            generator = torch.Generator().manual_seed(distributed.fold_seed(seed, number))
            value = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        elif name.endswith("lora_B"):
            value = torch.zeros(parameter.shape)
        else:
            continue
        fill(parameter, value)


class StartingModel(nn.Module):
    """The frozen model that a policy with adapters started from, as its reference. It shares the
    weights of the policy and holds only a copy of the first adapters: for a forward, it puts them
    into the policy in place of the trained ones, and afterwards puts these back."""

    def __init__(self, policy: nn.Module):
        super().__init__()
        self.policy = (policy,)  # in a tuple, so that it is not a submodule
        self.reshard = policy.reshard
        self.start = {name: x.detach().clone() for name, x in trained_parameters(policy).items()}

    def named_parameters(self, *_, **__) -> Iterator[tuple[str, Tensor]]:
        yield from self.start.items()

    def forward(self, *args, **kwargs):
        return self._run(self.policy[0], *args, **kwargs)

    def teach(self, mb: PackedBatch):
        return self._run(self.policy[0].teach, mb)

    @torch.no_grad()
    def _run(self, function: Callable, *args, **kwargs):
        self._exchange()
        try:
            return function(*args, **kwargs)
        finally:
            self._exchange()

    def _exchange(self) -> None:
        # With --offload all the GPU may still copy the adapters from the host for the last forward.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for name, parameter in trained_parameters(self.policy[0]).items():
            present = parameter.clone()
            parameter.copy_(self.start[name])
            self.start[name].copy_(present)


# ---- files of adapters: `adapter/` of a run, and `--adapter` ----

# The file's name, and the prefix of the names in it, in the format of the PEFT library.
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def save_adapter(hf: nn.Module, path: str, args: TrainArgs, folder: Path) -> None:
    """Write the adapter, without its model, to `folder`. `path`: the model's folder. Collective."""
    from safetensors.torch import save_file

    tensors = {}
    for name, parameter in trained_parameters(hf).items():
        key = PREFIX + name + ("" if name == "score.weight" else ".weight")
        tensors[key] = whole(parameter.detach()).cpu().contiguous()
    if distributed.is_main():
        work = folder.with_suffix(".tmp")
        work.mkdir(parents=True)
        save_file(tensors, work / WEIGHTS, metadata={"format": "pt"})
        (work / ADAPTER_CONFIG).write_text(json.dumps(_peft_config(hf, path, args), indent=2))
        durable.write_checksums(work)
        durable.replace(work, folder)
    distributed.barrier()


def _peft_config(hf: nn.Module, path: str, args: TrainArgs) -> dict[str, object]:
    """Return the fields of adapter_config.json. `target_modules` lists the endings of the layers'
    names, such as q_proj, or the whole names if other layers have these endings too."""
    linear = {name: module for name, module in hf.named_modules() if isinstance(module, nn.Linear)}
    adapted = {name for name, module in linear.items() if isinstance(module, LoRALinear)}
    endings = {name.rpartition(".")[2] for name in adapted}
    is_all = adapted == {name for name in linear if name.rpartition(".")[2] in endings}
    base, _, revision = args.model.partition("@")
    if args.model in BUILT_IN_MODELS or Path(os.path.expanduser(args.model)).exists():
        base, revision = str(Path(path).resolve()), ""
    is_scalar = hasattr(hf, "score")
    return dict(
        peft_type="LORA",
        base_model_name_or_path=base,
        revision=revision or None,
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=sorted(endings if is_all else adapted),
        inference_mode=True,
        task_type="SEQ_CLS" if is_scalar else "CAUSAL_LM",
        modules_to_save=["score"] if is_scalar else None,
    )


def read_adapter(hf: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Return the weights of `--adapter` for the parameters of `hf`, by name."""
    from safetensors.torch import load_file

    folder = Path(os.path.expanduser(adapter))
    with named_errors(f"--adapter {adapter}"):
        require_unchanged(folder)
        with named_errors("cannot read the checkpoint"):
            base = json.loads((folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
            tensors = load_file(folder / WEIGHTS)
        stored = {}
        for key, tensor in tensors.items():
            name = key.removeprefix(PREFIX)
            stored[name.removesuffix(".weight") if ".lora_" in name else name] = tensor
        has, needs = (
            {name: list(x.shape) for name, x in each.items()}
            for each in (stored, trained_parameters(hf))
        )
        if "score.weight" not in has:  # the adapter was trained on a language model
            needs.pop("score.weight", None)
        if wrong := [n for n in has.keys() | needs.keys() if has.get(n) != needs.get(n)]:
            name = min(wrong)
            needed = f"--model with these --lora_targets needs {needs.get(name, 'none')}"
            raise ValueError(f"{name} is {has.get(name, 'missing')}, {needed}")
    distributed.say(f"--adapter {adapter}: made for {base}")
    return stored
