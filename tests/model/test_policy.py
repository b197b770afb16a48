"""The packed forward equals that of the Hugging Face model, and the loaded model equals the
checkpoint."""

import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from model.checkpoints import (
    ARCHITECTURES,
    ARGS,
    EXPERTS,
    hf_model,
    samples,
    separate,
    small,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from common.config.groups import TrainArgs
from common.model.loading import whole
from common.model.policy import load_policy, load_scalar_model
from common.model.tiny import tiny_model
from common.packs.packing import pack, pack_groups
from common.packs.sample import Sample


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen2", "gemma3"])
def checkpoint(request, tmp_path_factory) -> str:
    return write_checkpoint(ARCHITECTURES[request.param](), tmp_path_factory.mktemp(request.param))


# ---- the packed forward ----


@torch.no_grad()
def test_packed_forward_equals_separate_forwards(checkpoint, device):
    """The families differ in tied heads, biases, windows, and scaled rotary embeddings."""
    policy, plain = load_policy(checkpoint, ARGS, device), hf_model(checkpoint)
    batch = {tuple(sample.ids[1:]): sample for sample in samples()}
    for pack_tokens, temperature in ((63, 1.0), (100, 0.6), (1000, 0.6)):
        seen = 0
        for mb in pack(samples(), pack_tokens, device):
            *values, correct_T = policy(mb, temperature=temperature)
            for begin, end in zip(mb.offsets, mb.offsets[1:], strict=False):
                sample = batch[tuple(mb.targets_T[begin:end].tolist())]
                *expected, correct = separate(plain, sample, temperature)
                ours = [x_T[begin:end].double() for x_T in values]
                torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
                assert torch.equal(correct_T[begin:end], correct)
                seen += 1
        assert seen == len(batch)


def test_window_changes_logprobs(tmp_path, device):
    """Negative control of the test above, which would detect an ignored window."""
    config = ARCHITECTURES["mistral"]()
    path = write_checkpoint(config, tmp_path / "window")
    config.sliding_window = None
    wide = write_checkpoint(config, tmp_path / "wide")
    (mb,) = pack(samples(), 1000, device)
    with torch.no_grad():
        narrow_T, wide_T = (load_policy(p, ARGS, device)(mb)[0] for p in (path, wide))
    assert (narrow_T - wide_T).abs().max() > 1e-2


@pytest.mark.parametrize(("pack_tokens", "recompute"), [(63, False), (100, True), (1000, False)])
def test_gradient_does_not_depend_on_packing(device, pack_tokens, recompute):
    """With and without recomputation, it equals the gradient of the same masked loss by the plain
    model."""
    path, batch = tiny_model(), samples(vocabulary=300)
    args = TrainArgs(dtype="float32", activation_checkpointing=recompute)
    policy, plain = load_policy(path, args, device), hf_model(path)
    forwards = []
    policy.hf.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: forwards.append(1))
    micro_batches = pack(batch, pack_tokens, device)
    for mb in micro_batches:
        logprobs_T, entropy_T, *_ = policy(mb, temperature=0.8)
        (-(logprobs_T + 0.1 * entropy_T) * mb.loss_mask_T).sum().backward()
    assert len(forwards) == len(micro_batches) * (2 if recompute else 1)
    for sample in batch:
        logprobs, entropy, _ = separate(plain, sample, 0.8)
        (-(logprobs + 0.1 * entropy) * torch.tensor(sample.loss_mask[1:])).sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert expected.keys() == {name for name, _ in policy.hf.named_parameters()}
    for name, parameter in policy.hf.named_parameters():
        ours = whole(parameter.grad)
        torch.testing.assert_close(ours, expected[name], atol=2e-5, rtol=1e-4, msg=name)


# ---- loading ----


def test_buffers_that_nothing_fills_are_refused(device, monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "initialize_weights", lambda model: None)
    with pytest.raises(ValueError, match="keeps buffers that cannot be rebuilt$"):
        load_policy(tiny_model(), ARGS, device)


def edited(folder: Path, edit) -> str:
    shutil.copytree(tiny_model(), folder)
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata=dict(format="pt"))
    return str(folder)


def test_missing_or_misshaped_weight_is_refused_by_name(tmp_path, device):
    name = "model.layers.2.mlp.up_proj.weight"
    missing = edited(tmp_path / "missing", lambda weights: weights.pop(name))
    with pytest.raises(ValueError, match=f"{name}.*no such weight"):
        load_policy(missing, ARGS, device)
    change = {name: torch.zeros(512, 64)}
    misshaped = edited(tmp_path / "misshaped", lambda weights: weights.update(change))
    with pytest.raises(ValueError, match=rf"{name}: .*\[512, 64\].*\[512, 128\]"):
        load_policy(misshaped, ARGS, device)


def test_reward_model_is_no_policy(tmp_path, device):
    head = {"score.weight": torch.zeros(1, 128)}
    path = edited(tmp_path / "model", lambda weights: weights.update(head))
    with pytest.raises(ValueError, match=f"^--model {path}: a reward model .it has score.weight"):
        load_policy(path, ARGS, device)


@pytest.mark.parametrize(
    ("config", "load", "words"),
    [
        (transformers.BertConfig, load_policy, "bert does not keep its blocks in `layers`"),
        (transformers.T5Config, load_policy, "transformers has no language model of t5"),
        (transformers.OlmoeConfig, load_scalar_model, "no sequence classifier of olmoe"),
    ],
)
def test_model_of_another_kind_is_refused(config, load, words, tmp_path, device):
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^--model {tmp_path}: [^\n]*{words}"):
        load(str(tmp_path), ARGS, device)


def test_out_of_memory_error_does_not_refuse_the_architecture(device, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("common.model.loading.packed_attention", full)
        with pytest.raises(torch.OutOfMemoryError):
            load_policy(tiny_model(), ARGS, device)
    load_policy(tiny_model(), ARGS, device)  # registers the function again


def test_damaged_file_gives_a_one_line_error(tmp_path, device):
    shutil.copytree(tiny_model(), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="cannot read the checkpoint") as error:
        load_policy(str(tmp_path / "model"), ARGS, device)
    assert "\n" not in str(error.value)


SSM = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1)
LEAKING = dict(
    mamba=lambda: transformers.MambaConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, state_size=8
    ),
    lfm2=lambda: transformers.Lfm2Config(**small(layer_types=["conv", "full_attention", "conv"])),
    falcon_h1=lambda: transformers.FalconH1Config(**small(**SSM)),
)


@pytest.mark.parametrize("architecture", LEAKING)
def test_models_that_mix_packed_sequences_are_refused(architecture, tmp_path, device):
    path = write_checkpoint(LEAKING[architecture](), tmp_path)
    with pytest.raises(ValueError, match=f"^--model {path}: [^\n]*$"):
        load_policy(path, ARGS, device)


# ---- memory ----


def whole_units(model) -> list[str]:
    """Return the FSDP units of a model that are gathered, or still hold the memory of gathered
    weights."""
    units = []
    for name, unit in model.named_modules():
        if isinstance(unit, FSDPModule):
            # torch 2.13 has no public function for this
            parameters = unit._get_fsdp_state()._fsdp_param_group.fsdp_params
            gathered = [tensor for p in parameters for tensor in p.all_gather_outputs]
            sharded = all(p.sharded_state.name == "SHARDED" for p in parameters)
            if not sharded or any(tensor.untyped_storage().size() for tensor in gathered):
                units.append(name or "root")
    return units


@pytest.mark.parametrize("kind", ["policy", "value", "reference"])
def test_weights_are_gathered_only_from_forward_to_backward(device, kind):
    """After a forward without backward a trained root needs `reshard`, a frozen one does not."""
    load, trainable = load_scalar_model if kind == "value" else load_policy, kind != "reference"
    model = load(tiny_model(), TrainArgs(), device, trainable=trainable)
    assert whole_units(model) == []  # the packing check has run a forward
    (mb,) = pack([Sample(list(range(20)), [True] * 20)], 100, device)
    with torch.no_grad():
        model(mb)
    assert whole_units(model) == (["root"] if trainable else [])
    model.reshard()
    assert whole_units(model) == []
    if trainable:
        out = model(mb)
        (out if kind == "value" else out[0]).sum().backward()
        assert whole_units(model) == []


def test_fsdp_does_not_copy_the_pack(device):
    """Every block gets the same object. FSDP would copy a dataclass or tuple, including all samples
    in it."""
    model = load_policy(tiny_model(), ARGS, device)
    (mb,) = pack([Sample(list(range(20)), [True] * 20)], 100, device)
    seen = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: seen.append(kwargs.get("pack") or args[0]), with_kwargs=True
            )
    model(mb)[0].sum().backward()
    assert len(seen) == 1 + model.hf.config.num_hidden_layers and all(pack is mb for pack in seen)


# ---- --compile ----


def test_model_that_cannot_be_compiled_is_refused_with_advice(device):
    """By default it is compiled on CUDA only."""
    assert not load_policy(tiny_model(), TrainArgs(), device).compiled

    def backend(graph, _):
        raise RuntimeError("no C compiler")

    message = "or cannot be compiled; try --compile false: .*no C compiler"
    with torch.compiler.set_stance("default", force_backend=backend):
        with pytest.raises(ValueError, match=message):
            load_policy(tiny_model(), TrainArgs(compile=True), device)


@pytest.mark.slow
def test_blocks_are_compiled_once_and_without_their_experts(tmp_path, device):
    """After two packs of each kind, with and without shared prefixes, packs of other shapes and
    other choices of experts add no compilation. Numbers and gradients, of adapters too, are those
    of uncompiled blocks. The test counts the graphs from Dynamo, which run uncompiled."""
    config = transformers.Qwen3MoeConfig(**small(**EXPERTS, num_hidden_layers=1))
    path, draw = write_checkpoint(config, tmp_path), random.Random(0)
    flags = dict(dtype="float32", activation_checkpointing=True, lora_rank=4)
    flags |= dict(lora_targets=("v_proj",))
    with torch.compiler.set_stance("force_eager"):  # without the compilations of the packing check
        models = [load_policy(path, TrainArgs(compile=c, **flags), device) for c in (False, True)]
    trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
    graphs, counts = [], []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    with torch.compiler.set_stance("default", force_backend=backend):
        for i in range(6):
            start = [draw.randrange(3, 90) for _ in range(draw.randrange(2, 30))]
            lengths = [draw.randrange(2, 40) for _ in range(2 + i // 2)]
            ids = [start + [draw.randrange(3, 90) for _ in range(n)] for n in lengths]
            batch = [Sample(each, [True] * len(each)) for each in ids]
            (mb,) = pack_groups([batch], 1000, device, share_prefix=i % 2)
            plain_T, compiled_T = (model(mb)[0] for model in models)
            torch.testing.assert_close(compiled_T, plain_T, atol=1e-5, rtol=0)
            (plain_T + compiled_T).sum().backward()
            counts.append(len(graphs))
    assert counts[3] == counts[-1] > 0 and not any("grouped_mm" in graph for graph in graphs)
    gradients = [[whole(p.grad) for p in parameters] for parameters in trained]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    assert all(gradient.any() for gradient in gradients[1][1::2])  # of B; A waits until B is not 0
