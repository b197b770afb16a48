"""LoRA adapters: gradients, equal weights in trainer, engine and files, the reference, checkpoints,
PEFT's format."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from helpers import assert_close_metrics, assert_resumes_exactly, metrics
from model.adapters import ARGS, MODELS, assert_same_weights_everywhere, logprobs, move
from model.checkpoints import hf_model, samples, separate, write_checkpoint
from processes import run
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader

from common.config.groups import TrainArgs as Args
from common.config.parse import one_line
from common.model.loading import whole
from common.model.lora import PREFIX, save_adapter
from common.model.policy import load_policy, load_reference, load_scalar_model
from common.model.tiny import tiny_model
from common.packs.packing import pack
from common.rollout.weights import whole_weights
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import Checkpointer, export_hf
from common.train.optim import adamw, optimizer_step

slow = partial(pytest.param, marks=pytest.mark.slow)


def adapters(model) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()) for name, p in model.hf.named_parameters() if ".lora_" in name}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return write_checkpoint(MODELS["untied"](), tmp_path_factory.mktemp("untied"))


# ---- numbers ----


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("untied", True),
        *(pytest.param(x, False, marks=pytest.mark.slow) for x in ("qwen2", "gemma3")),
    ],
)
def test_gradient_equals_autograd_through_the_merged_weight(name, recompute, tmp_path, device):
    """The merged weight is W + s B A. Only A and B have gradients, also with tied heads and
    biases."""
    path = write_checkpoint(MODELS[name](), tmp_path)
    policy = move(load_policy(path, replace(ARGS, activation_checkpointing=recompute), device))
    plain = hf_model(path)
    for mb in pack(samples(), 100, device):
        (-policy(mb)[0] * mb.loss_mask_T).sum().backward()
    leaves = {name: value.clone().requires_grad_() for name, value in adapters(policy).items()}
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    for layer in {name.rpartition(".")[0] for name in leaves}:
        added = 2.0 * leaves[f"{layer}.lora_B"] @ leaves[f"{layer}.lora_A"]  # alpha / rank
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + added
    assert len(leaves) == 2 * 7 * 3

    def patched(ids, **flags):
        return torch.func.functional_call(plain, weights, (ids,), flags)

    losses = [-separate(patched, s, 1.0)[0] * torch.tensor(s.loss_mask[1:]) for s in samples()]
    torch.cat(losses).sum().backward()
    for name, parameter in policy.hf.named_parameters():
        if name in leaves:
            ours, theirs = whole(parameter.grad), leaves[name].grad
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4, msg=name)
        else:
            assert parameter.grad is None and not parameter.requires_grad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainer_engine_and_files_have_the_same_weights(dtype, path, tmp_path, device, monkeypatch):
    args = replace(ARGS, dtype=dtype, output_dir=str(tmp_path))
    assert_same_weights_everywhere(path, args, device, monkeypatch)


def test_new_adapter_is_zero_and_depends_on_the_seed(path, device):
    plain = load_policy(path, Args(dtype="float32"), device)
    policy = load_policy(path, ARGS, device)
    assert all(map(torch.equal, logprobs(plain, device), logprobs(policy, device)))
    seeds = (replace(ARGS, seed=seed) for seed in (0, 1))
    again, other = (adapters(load_policy(path, args, device)) for args in seeds)
    for name, value in adapters(policy).items():
        assert torch.equal(value, again[name])
        if name.endswith("lora_B"):
            assert (value == 0).all()
        else:
            bound = value.shape[1] ** -0.5
            assert not torch.equal(value, other[name]) and 0.9 * bound < value.abs().max() <= bound
            assert abs(value.mean()) < bound / 4


def test_only_adapters_and_scalar_head_are_trained(path, device):
    """The trained parameters are float32; the frozen weights have the compute dtype."""
    args = replace(ARGS, dtype="bfloat16")
    for load, head in ((load_policy, set()), (load_scalar_model, {"score.weight"})):
        model = load(path, args, device)
        trained = {name for name, p in model.hf.named_parameters() if p.requires_grad}
        assert trained == adapters(model).keys() | head
        for name, p in model.hf.named_parameters():
            assert p.dtype == (torch.float32 if name in trained else torch.bfloat16), name
        before = {name: whole(p.detach()).clone() for name, p in model.hf.named_parameters()}
        optimizer = adamw(model, args)
        for _ in range(2):  # A has a gradient once B is not 0
            for mb in pack(samples(), 100, device):
                out = model(mb)
                loss = (-out[0] if load is load_policy else out).sum()
                loss.backward()
            optimizer_step(model, optimizer, args.lr, 1.0, loss.detach())
        for name, p in model.hf.named_parameters():
            assert torch.equal(whole(p.detach()), before[name]) == (name not in trained), name


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
ONE = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("targets", "layers", "blocks"),
    [
        (("all-linear",), ATTENTION | {"gate_proj", "up_proj", "down_proj"}, 3),
        (("attention",), ATTENTION, 3),
        (("q_proj", "mlp.up_proj", "self_attn.q_proj"), {"q_proj", "up_proj"}, 3),
        ((ONE,), {ONE}, 1),
    ],
)
def test_targets_choose_layers_by_name(targets, layers, blocks, path, device, tmp_path):
    """An adapter's file has the endings of names, or whole names if other layers have the same
    ending, and sets the flags of a later run: `--adapter` is enough."""
    policy = load_policy(path, replace(ARGS, lora_targets=targets), device)
    own = adapters(policy)
    assert {name.split(".")[-2] for name in own} == {name.split(".")[-1] for name in layers}
    assert len(own) == 2 * blocks * len(layers)
    save_adapter(policy.hf, path, ARGS, tmp_path / "adapter")
    args = Args(dtype="float32", adapter=str(tmp_path / "adapter"))
    assert args.lora_targets == tuple(sorted(layers))
    assert (args.lora_rank, args.lora_alpha) == (4, 8.0)
    again = adapters(load_policy(path, args, device))
    assert again.keys() == own.keys() and all(torch.equal(again[name], own[name]) for name in own)


# ---- the reference ----


def test_reference_is_the_starting_model(path, device, tmp_path):
    """This includes a run that starts from an adapter. The reference's forward does not change the
    policy or its gradients."""
    save_adapter(move(load_policy(path, ARGS, device)).hf, path, ARGS, tmp_path / "adapter")
    args = Args(dtype="float32", adapter=str(tmp_path / "adapter"))
    policy = load_policy(path, args, device)
    start = logprobs(policy, device)
    reference = load_reference(policy, args, device)
    assert all(".lora_" in name for name, _ in reference.named_parameters())
    moved = adapters(move(policy, seed=6))
    assert not any(map(torch.equal, logprobs(policy, device), start))

    def gradient(with_reference: bool) -> list[torch.Tensor]:
        for mb in pack(samples(), 100, device):
            logprobs_T, *_ = policy(mb)
            if with_reference:  # between the forward and its backward
                reference(mb)
            logprobs_T.sum().backward()
        grads = [whole(p.grad) for p in policy.parameters() if p.requires_grad]
        policy.zero_grad()
        return grads

    assert all(map(torch.equal, gradient(False), gradient(True)))
    assert all(map(torch.equal, logprobs(reference, device), start))
    assert all(torch.equal(value, moved[name]) for name, value in adapters(policy).items())
    other = load_reference(policy, args, device, path)  # the base without adapters
    assert not any(p.requires_grad for p in other.parameters())
    base = logprobs(load_policy(path, ARGS, device), device)
    assert all(map(torch.equal, logprobs(other, device), base))


# ---- checkpoints ----


def test_checkpoint_has_only_adapters_and_their_moments(path, device, tmp_path):
    args = replace(ARGS, output_dir=str(tmp_path))
    policy = load_policy(path, args, device)
    optimizer = adamw(policy, args)
    run = Checkpointer(args, policy, optimizer, load_tokenizer(tiny_model()))
    for state in optimizer.state.values():
        state["exp_avg"].to_local().fill_(1.5)
        state["exp_avg_sq"].to_local().fill_(2.5)
    kept = adapters(move(policy))
    run.save(1)
    reader = HuggingFaceStorageReader(tmp_path / "checkpoints" / "step_000001")
    stored = reader.read_metadata().state_dict_metadata
    in_file = {name for name in stored if name.startswith("model.")}
    assert in_file == {f"model.hf.{name}" for name in kept}
    assert all("lora_" in name for name in stored if "exp_avg" in name)
    fresh = load_policy(path, args, device)
    again = Checkpointer(args, fresh, other := adamw(fresh, args), load_tokenizer(tiny_model()))
    assert again.load_latest() == 1
    assert all(torch.equal(value, kept[name]) for name, value in adapters(fresh).items())
    for state in other.state.values():
        assert (whole(state["exp_avg"]) == 1.5).all() and (whole(state["exp_avg_sq"]) == 2.5).all()


# ---- PEFT's format ----


@pytest.mark.parametrize("load", [load_policy, load_scalar_model])
def test_adapter_folder_gives_the_exported_model(load, path, device, tmp_path):
    """The exported weight is W + alpha / r B A, as PEFT computes it; a run can start from the
    folder, and needs no other flag."""
    args = replace(ARGS, model=path)
    model = move(load(path, args, device))
    export_hf(model, load_tokenizer(tiny_model()), tmp_path / "hf")
    save_adapter(model.hf, path, args, tmp_path / "adapter")
    file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base, exported = (load_file(Path(x) / "model.safetensors") for x in (path, tmp_path / "hf"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    scalar = load is load_scalar_model
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == path
    assert config["task_type"] == ("SEQ_CLS" if scalar else "CAUSAL_LM")
    assert config["modules_to_save"] == (["score"] if scalar else None)
    if scalar:
        assert torch.equal(file.pop(f"{PREFIX}score.weight"), exported["score.weight"])
    for name in {name.rpartition(".lora_")[0] for name in file}:
        a, b = (file.pop(f"{name}.lora_{which}.weight") for which in "AB")
        added = config["lora_alpha"] / config["r"] * b @ a
        weight = f"{name.removeprefix(PREFIX)}.weight"
        torch.testing.assert_close(exported[weight], base[weight] + added, atol=1e-6, rtol=0)
        assert added.abs().max() > 1e-2
    assert not file
    again = load(path, Args(dtype="float32", adapter=str(tmp_path / "adapter")), device)
    ours, theirs = ([whole(p.detach()) for p in m.hf.parameters()] for m in (model, again))
    assert all(map(torch.equal, ours, theirs))


def by_peft(folder: Path, drop=(), **changes) -> str:
    """Write an adapter as PEFT's defaults do, on two layers of each block: bfloat16, with
    additional config keys."""
    config = dict(
        alpha_pattern={}, auto_mapping=None, base_model_name_or_path="some/base", bias="none",
        fan_in_fan_out=False, inference_mode=True, init_lora_weights=True, lora_alpha=8,
        lora_dropout=0.05, modules_to_save=None, peft_type="LORA", r=4, rank_pattern={},
        target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM", use_dora=False,
    )  # fmt: skip
    generator, tensors = torch.Generator().manual_seed(2), {}
    for block in range(3):
        for name, width in (("q_proj", 64), ("v_proj", 32)):
            layer = f"base_model.model.model.layers.{block}.self_attn.{name}"
            for which, sizes in (("A", (4, 64)), ("B", (width, 4))):
                tensor = torch.randn(sizes, generator=generator).bfloat16()
                tensors[f"{layer}.lora_{which}.weight"] = tensor
    folder.mkdir(parents=True)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drop}
    tensors |= changes.pop("tensors", {})
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return str(folder)


@pytest.mark.parametrize("targets", [["v_proj", "q_proj"], "whole names"])
def test_run_starts_from_a_peft_adapter(targets, path, device, tmp_path, capsys):
    if targets == "whole names":
        targets = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(3) for name in "qv"]
    args = Args(dtype="float32", adapter=by_peft(tmp_path / "adapter", target_modules=targets))
    weights = dict(whole_weights(load_policy(path, args, device), torch.float32))
    assert f"--adapter {args.adapter}: made for some/base" in capsys.readouterr().out
    file = load_file(tmp_path / "adapter/adapter_model.safetensors")
    for name, weight in load_file(Path(path) / "model.safetensors").items():
        layer = f"{PREFIX}{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in file:
            a, b = (file[f"{layer}.lora_{which}.weight"].float() for which in "AB")
            weight = weight + 2 * b @ a
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=1e-5)


LAYER = f"{PREFIX}model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("adapter", "flags", "words"),
    [
        (None, dict(lora_targets=("q_prj",)), "--lora_targets q_prj: no such .*; the model has do"),
        (None, dict(lora_targets=("q_proj", "lm_head")), "--lora_targets lm_head: no such linear"),
        (None, dict(adapter="/nowhere"), "--adapter /nowhere: adapter_config.json: .*No such file"),
        ({}, dict(lora_rank=0), "--lora_rank 0 contradicts --adapter .*, which sets 4"),
        ({}, dict(lora_alpha=16), "--lora_alpha 16.0 contradicts --adapter .*, which sets 8"),
        ({}, dict(lora_targets=("attention",)), "k_proj.lora_A is missing, --model with these --l"),
        ({}, dict(lora_targets=("q_proj",)), "v_proj.lora_A is .*, --model .* needs none"),
        (dict(peft_type="IA3"), {}, "adapter_config.json is not that of a LoRA adapter"),
        (dict(use_rslora=True), {}, "its use_rslora is True, which is not supported"),
        (dict(use_dora=True), {}, "its use_dora is True, which"),
        (dict(alpha_pattern=dict(q_proj=3)), {}, "its alpha_pattern is {'q_proj': 3}, which"),
        (dict(target_modules=r".*\.q_proj"), {}, r"its target_modules is \.\*.*q_proj, which"),
        (dict(r="many"), {}, "--lora_rank many must be a valid integer"),
        (dict(drop=(f"{LAYER}.lora_B.weight",)), {}, r"q_proj.lora_B is missing, --model with"),
        (
            dict(tensors={f"{LAYER}.lora_B.weight": torch.zeros(65, 4)}),
            {},
            r"model.layers.1.self_attn.q_proj.lora_B is \[65, 4\], --model .* needs \[64, 4\]",
        ),
    ],
)
def test_mismatched_targets_and_adapters_are_refused(adapter, flags, words, path, device, tmp_path):
    if adapter is None:
        flags = dict(lora_rank=4) | flags
    else:
        flags = dict(adapter=by_peft(tmp_path / "adapter", **adapter)) | flags
    with pytest.raises(ValueError) as error:
        load_policy(path, Args(dtype="float32", **flags), device)
    assert re.match(f"--.*{words.removeprefix('--')}", line := one_line(error.value)), line
    assert "\n" not in line


# ---- whole runs ----

STEPS = (
    "--max_steps", 4, "--batch_size", 8, "--lr", 1e-2, "--eval_every", 0, "--save_every", 2,
    "--warmup_steps", 0,
)  # fmt: skip


@pytest.mark.slow
def test_run_is_equal_on_one_and_two_ranks_and_resumes(model, sums, tmp_path, main):
    """A later run takes rank, scale and targets from the adapter, keeps them in args.yaml, and
    resumes bit for bit."""
    one, two, later = (tmp_path / name for name in ("one", "two", "later"))
    base = (*STEPS, "--model", model, "--dataset", sums, "--pack_tokens", 400, "--max_length", 100)
    flags = (*base, "--lora_rank", 4)
    run(2, "sft.py", *flags, "--output_dir", two)
    main("sft", *flags, "--output_dir", one)
    assert_close_metrics(one, two, ("loss", "grad_norm", "num_tokens"), rel=1e-4)
    first, *_, last = (line["loss"] for line in metrics(one))
    assert last < first
    with pytest.raises(ValueError, match=r"has a run with other flags \(lora_rank was 4, is 8\)"):
        main("sft", *base, "--lora_rank", 8, "--output_dir", one)
    flags = (*base, "--adapter", one / "adapter")
    main("sft", *flags, "--output_dir", later)
    assert yaml.safe_load((later / "args.yaml").read_text())["lora_rank"] == 4
    assert_resumes_exactly(main, "sft", *flags, folder=later, finished=4)


@pytest.fixture(scope="module")
def model(request):
    """Return the tiny model with one layer. `small` of the fixtures has the name of a function
    here."""
    return request.getfixturevalue("small")[1]


ONLINE = (
    "--max_steps", 2, "--prompts_per_step", 8, "--samples_per_prompt", 2, "--max_new_tokens", 5,
    "--lr", 1e-2, "--eval_every", 0, "--save_every", 1, "--keep_last", 2, "--lora_rank", 4,
    "--beta", 0.1, "--engine", "transformers",
)  # fmt: skip


@pytest.mark.slow
def test_online_run_resumes_exactly_and_agrees_with_its_engine(
    model, sums, reward_file, tmp_path, main
):
    """The checkpoints contain the adapters of the value model and its head; a reference is used
    too."""
    flags = (*ONLINE, "--model", model, "--dataset", sums, "--value_lr", 1e-2, "--minibatches", 1)
    flags += ("--reward", f"{reward_file}:digits", "--max_logprob_difference", 1e-4)
    main("ppo", *flags, "--output_dir", tmp_path / "run")
    assert_resumes_exactly(main, "ppo", *flags, folder=tmp_path / "run", finished=2)
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 7 and all(tensor.any() for tensor in adapter.values())
    kl = [line["objective/kl"] for line in metrics(tmp_path / "run")]
    assert kl[0] == 0 != kl[1]
