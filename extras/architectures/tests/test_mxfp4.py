"""gpt-oss: experts in MXFP4, and attention sinks. test_in_vllm.py has its weights in vLLM."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from bench.completions import complete
from bench.models import ARGS, WINDOW, against_transformers, checkpoint, rows
from common.model.loading import slices_of, whole
from common.model.policy import load_policy
from common.packs.packing import pack
from common.packs.sample import Sample
from common.rollout.transformers_engine import TransformersEngine
from common.rollout.weights import sync_weights, whole_weights
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import export_hf
from extras.architectures.mxfp4 import Unpacked


def pack_experts(folder: Path) -> str:
    """Replace the experts in a folder by random ones in MXFP4, as on the hub."""
    generator = torch.Generator().manual_seed(4)
    for file in sorted(folder.glob("*.safetensors")):
        weights = load_file(file)
        for name in [n for n in weights if n.endswith((".gate_up_proj", ".down_proj"))]:
            experts, inputs, outputs = weights.pop(name).shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator)
            weights[f"{name}_blocks"] = blocks.to(torch.uint8)
            scales = torch.randint(118, 124, shape, generator=generator)
            weights[f"{name}_scales"] = scales.to(torch.uint8)
        save_file(weights, file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    index = {name: f.name for f in folder.glob("*.safetensors") for name in load_file(f)}
    content = dict(metadata={}, weight_map=index)
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("mxfp4")
    checkpoint("gpt_oss", folder, file_size="200KB")
    return pack_experts(folder)


def dequantized(path: str) -> torch.nn.Module:
    """Return transformers' model, whose experts are bfloat16."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )


def test_weights_are_those_of_transformers_and_the_export_has_floats(path, tmp_path, device):
    """The export names no quantization, and transformers opens it with equal weights."""
    expected = dequantized(path).state_dict()
    policy = load_policy(path, ARGS, device)
    loaded = policy.hf.state_dict()
    assert sum(name.endswith(("gate_up_proj", "down_proj")) for name in expected) == 8
    export_hf(policy, load_tokenizer(path), tmp_path / "hf")
    assert "quantization_config" not in (tmp_path / "hf" / "config.json").read_text()
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    exported = model.state_dict()
    assert loaded.keys() == expected.keys() == exported.keys()
    for name, weight in expected.items():
        assert torch.equal(whole(loaded[name]).cpu(), weight.float()), name
        assert torch.equal(exported[name], weight.float()), name


def test_a_rank_reads_its_part_of_the_experts(path):
    """Three ranks divide four experts unevenly; others divide a matrix."""
    with ExitStack() as opened:
        slices = slices_of(path, opened)
        experts = [x for x in slices.values() if isinstance(x, Unpacked)]
        assert len(experts) == 8
        for each in experts:
            for index in (slice(0, 2), slice(3, 4), (slice(1, 3), slice(4, 9))):
                assert torch.equal(each[index], each[...][index])


@torch.no_grad()
def test_engine_of_transformers_samples_from_the_packed_weights(path, device):
    tokenizer = load_tokenizer(path)
    policy = load_policy(path, ARGS, device)
    engine = TransformersEngine(path, ARGS, tokenizer, device, False)
    for changed in (False, True):
        if changed:
            for parameter in policy.parameters():
                parameter.mul_(1.1)
            sync_weights(engine, whole_weights(policy, engine.dtype))
        groups = complete(engine, rows()[:2], 2, [1, 2], 0.7)
        (mb,) = pack([sample for group in groups for sample in group], 1000, device)
        difference_T = policy(mb, temperature=0.7)[0] - mb.rollout_logprobs_T
        assert (difference_T * mb.loss_mask_T).abs().max() < 1e-5
        policy.reshard()


def test_sinks_and_windows_are_those_of_eager_attention(tmp_path, device):
    """Sinks take most of the attention here, and sequences are longer than the window."""
    path = checkpoint("gpt_oss", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        weights = load_file(file)
        for name in [n for n in weights if n.endswith(".sinks")]:
            weights[name] = torch.tensor([-3.0, 0.0, 3.0, 6.0])
        save_file(weights, file, metadata={"format": "pt"})
    assert max(map(len, rows())) > 2 * WINDOW
    policy = load_policy(path, replace(ARGS, share_prefix=0), device)
    forward, gradient = against_transformers(path, policy, device)
    assert forward < 1e-5 and gradient < 1e-5
    (mb,) = pack([Sample(rows()[1], [True] * len(rows()[1]))], 100, device)
    policy.zero_grad()
    policy(mb)[0].sum().backward()
    sinks = {n: p for n, p in policy.hf.named_parameters() if n.endswith(".sinks")}
    assert len(sinks) == 4
    assert all((whole(p.grad) != 0).all() for p in sinks.values())


PART = "layers.0.mlp.experts.down_proj"
DAMAGE = dict(
    no_scales=dict(scales=lambda _: None),
    cut_blocks=dict(blocks=lambda weight: weight[:, :-1].contiguous()),
    fewer_experts=dict.fromkeys(("blocks", "scales"), lambda weight: weight[:2].contiguous()),
)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_experts_are_refused_by_name(damage, path, tmp_path, device):
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    for file in copy.glob("*.safetensors"):
        weights = load_file(file)
        for kind, change in DAMAGE[damage].items():
            for name in [n for n in weights if n.endswith(f"{PART}_{kind}")]:
                weights[name] = change(weights[name])
        weights = {name: weight for name, weight in weights.items() if weight is not None}
        save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=PART):
        load_policy(str(copy), ARGS, device)
