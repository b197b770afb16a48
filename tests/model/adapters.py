"""Adapters that have moved, and whose weights must be the same wherever they are used."""

from pathlib import Path

import torch
import transformers
from model.checkpoints import ARCHITECTURES, samples, small
from safetensors.torch import load_file

import common.model.lora
from common.config.groups import TrainArgs as Args
from common.model.hub import resolve_model
from common.model.loading import fill, whole
from common.model.lora import LoRALinear
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.packs.packing import pack
from common.rollout.weights import whole_weights
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import Checkpointer
from common.train.optim import adamw

ARGS = Args(dtype="float32", lora_rank=4, lora_alpha=8.0, lr=5e-3)
MODELS = ARCHITECTURES | dict(
    untied=lambda: transformers.Qwen3Config(**small(head_dim=16, tie_word_embeddings=False))
)


@torch.no_grad()
def move(model, seed: int = 5):
    """Change the trained parameters as training would, so that B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            step = 0.1 * torch.randn(parameter.shape, generator=generator)
            fill(parameter, whole(parameter.detach()).cpu() + step)
    return model


def logprobs(model, device) -> list[torch.Tensor]:
    with torch.no_grad():
        out = [model(mb)[0] for mb in pack(samples(), 100, device)]
    model.reshard()
    return out


def assert_same_weights_everywhere(path, args, device, monkeypatch):
    """Equal bit for bit: the matrices of the layers' products, the engine's weights, hf/, and a
    converted checkpoint."""
    policy, used, names = move(load_policy(path, args, device)), {}, []
    merge = common.model.lora.merge

    def recorded(*args):
        used[names[-1]] = merge(*args)
        return used[names[-1]]

    monkeypatch.setattr(common.model.lora, "merge", recorded)
    layers = {n: layer for n, layer in policy.hf.named_modules() if isinstance(layer, LoRALinear)}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda *_, name=name: names.append(f"{name}.weight"))
    logprobs(policy, device)
    monkeypatch.undo()
    assert used.keys() == {f"{name}.weight" for name in layers} and len(used) == 21

    compute, stored = getattr(torch, args.dtype), load_file(Path(path) / "model.safetensors")
    run = Checkpointer(args, policy, adamw(policy, args), load_tokenizer(tiny_model()))
    run.export_hf(1)
    run.save(1)
    hf = run.folder / "hf"
    as_model = Path(resolve_model(str(run.checkpoints / "step_000001")))
    exported, named = (load_file(folder / "model.safetensors") for folder in (hf, as_model))
    for weights in (dict(whole_weights(policy, compute)), exported, named):
        assert weights.keys() == stored.keys()
        for name, weight in weights.items():
            base = stored[name].to(compute).to(weight.dtype)
            assert torch.equal(weight, base) == (name not in used), name
            assert name not in used or torch.equal(weight, used[name].to(weight.dtype)), name
    assert {f.name for f in hf.iterdir()} == {f.name for f in as_model.iterdir()}
