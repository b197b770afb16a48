"""The memory of a run on a GPU is predicted; frozen models take half, and `--offload` changes no
number."""

import shutil
from dataclasses import replace

import pytest
import torch
from helpers import assert_same_weights, metrics, run
from in_process import Args, write_teacher
from model.test_policy import ARCHITECTURES, samples, write_checkpoint
from transformers import AttentionInterface, Qwen3Config

from bench.memory_plan import UNTIED, meta_model
from common.config.groups import TrainArgs
from common.data.packing import pack
from common.model import memory
from common.model import policy as models
from common.model.attention import packed_attention
from common.model.hub import load_tokenizer
from common.model.memory import (
    USABLE,
    Plan,
    block_and_root,
    head_weights,
    keep_activations_that_fit,
    make_plan,
    num_weights,
    plan_of,
    predict,
    size_of,
    total,
)
from common.model.policy import Policy, load_policy, load_scalar_model
from common.model.tiny import tiny_model
from common.train.checkpoint import export_hf

# ---- frozen models ----


@pytest.mark.parametrize("kind", ["policy", "scalar"])
@torch.no_grad()
def test_frozen_models_use_the_compute_dtype_and_give_equal_numbers(tmp_path, device, kind):
    """Numbers are equal bit for bit, for float32 weights that bfloat16 cannot represent."""
    args, load = TrainArgs(dtype="bfloat16"), load_policy if kind == "policy" else load_scalar_model
    path = tiny_model()
    if kind == "scalar":
        export_hf(
            load(path, TrainArgs(dtype="float32"), device), load_tokenizer(path), tmp_path / "hf"
        )
        path = str(tmp_path / "hf")
    frozen, masters = load(path, args, device, trainable=False), load(path, args, device)
    assert {p.to_local().dtype for p in frozen.parameters()} == {torch.bfloat16}
    assert {p.to_local().dtype for p in masters.parameters()} == {torch.float32}
    assert any(
        not torch.equal(p, p.bfloat16().float())
        for p in (p.to_local() for p in masters.parameters())
    )
    buffers = dict(masters.named_buffers())
    assert all(
        b.dtype == buffers[name].dtype and torch.equal(b, buffers[name])
        for name, b in frozen.named_buffers()
    )
    (mb,) = pack(samples(vocabulary=300), 1000, device)
    ours, theirs = (
        (out,) if torch.is_tensor(out := model(mb)) else out for model in (frozen, masters)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_buffers_of_a_frozen_model_stay_float32(tmp_path, device):
    """Gemma multiplies its embedding by a buffer."""
    path = write_checkpoint(ARCHITECTURES["gemma3"](), tmp_path)
    frozen = load_policy(path, TrainArgs(dtype="bfloat16"), device, trainable=False)
    assert {b.dtype for b in frozen.buffers() if b.is_floating_point()} == {torch.float32}


# ---- --offload ----

SHORT = ["--max_steps", 2, "--save_every", 1, "--eval_every", 0, "--dtype", "float32"]
RUNS = {
    "sft": ["--batch_size", 8, *SHORT],
    "ppo": [
        "--prompts_per_step",
        4,
        "--minibatches",
        2,
        "--engine",
        "transformers",
        "--max_new_tokens",
        4,
        *SHORT,
    ],
}
CHANGES = dict(
    sft=[("none", "optimizer"), ("optimizer", "all"), ("all", "none")], ppo=[("none", "all")]
)


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_offload_changes_no_number_and_may_change_at_a_resume(main, sums, tmp_path, script):
    """A run resumed with another `--offload` ends with the same weights, bit for bit."""
    flags = (*RUNS[script], "--dataset", sums, *(["--lr", 3e-3] if script == "sft" else []))
    folders = {offload: tmp_path / offload for change in CHANGES[script] for offload in change}
    for offload, folder in folders.items():
        main(script, *flags, "--offload", offload, "--output_dir", folder)
        assert_same_weights(folders["none"], folder)
        losses = [
            [line["loss"] for line in metrics(f) if line["step"]] for f in (folders["none"], folder)
        ]
        assert losses[0] == losses[1] and len(losses[0]) == 2
    for before, after in CHANGES[script]:
        again = tmp_path / f"{before}_{after}"
        shutil.copytree(folders[before], again, ignore=lambda *_: ["hf", "step_000002"])
        main(script, *flags, "--offload", after, "--output_dir", again)
        assert_same_weights(folders["none"], again)


@pytest.mark.slow
def test_offload_changes_no_number_on_two_ranks(sums, tmp_path):
    """The test above has one rank, on which FSDP does not communicate."""
    flags = ["--batch_size", 8, *SHORT, "--dataset", sums, "--lr", 3e-3]
    for offload in ("none", "all"):
        run(2, "sft.py", *flags, f"--offload={offload}", f"--output_dir={tmp_path / offload}")
    assert_same_weights(tmp_path / "none", tmp_path / "all")


def test_offload_all_keeps_weights_and_gradients_on_the_host(device):
    args = TrainArgs(dtype="float32", offload="all")
    model = load_policy(tiny_model(), args, device)
    (mb,) = pack(samples(vocabulary=300), 1000, device)
    model(mb)[0].sum().backward()
    for parameter in model.parameters():
        assert parameter.to_local().device.type == parameter.grad.to_local().device.type == "cpu"
    assert {b.device.type for b in model.buffers()} == {device.type}


# ---- the prediction ----


def give_memory(monkeypatch, size: float) -> None:
    """Let the CPU count as a GPU with so many bytes."""
    for module in (models, memory):
        monkeypatch.setattr(module, "capacity_of", lambda device: size)


PLAN = Plan(ranks=10, pack_tokens=1024, recompute=True)
BLOCK = 2 * 1024 * 1024 + 2 * 1024 * 256 + 2 * 64 + 3 * 1024 * 4096 + 2 * 1024
WEIGHTS = 3 * BLOCK + 2 * 8000 * 1024 + 1024  # of UNTIED


def model(frozen: bool = False, **changes) -> Policy:
    """Return a Qwen3 of 60M weights on meta."""
    config = Qwen3Config(**UNTIED.to_dict() | changes)
    AttentionInterface.register("packed", packed_attention)
    dtype = torch.bfloat16 if frozen else torch.float32
    return meta_model(config, Policy, dtype).requires_grad_(not frozen)


def test_predicted_parts_equal_a_count_by_hand():
    """On 10 ranks: 4 bytes each as weight and as gradient, 8 for Adam; 2 bytes if frozen."""
    parts = predict([model(), model(frozen=True)], PLAN)
    N = WEIGHTS / 10
    names = ("weights", "frozen models", "gradients", "Adam")
    assert [parts[name] for name in names] == pytest.approx([4 * N, 2 * N, 4 * N, 8 * N])
    both = predict([model(), model()], PLAN)
    assert [both[name] for name in names] == pytest.approx([8 * N, 0, 8 * N, 16 * N])
    assert both["gathered weights"] == parts["gathered weights"]  # updates alternate
    host = predict([model(), model(frozen=True)], replace(PLAN, offload="optimizer"))
    assert host | dict(Adam=parts["Adam"]) == parts and host["Adam"] == 0
    gone = predict([model(), model(frozen=True)], replace(PLAN, offload="all"))
    assert [gone[name] for name in names] == [0] * 4


def test_sizes_are_those_of_the_loaded_model(device):
    """Cases: a tied model, trained and frozen, and a scalar model."""
    args = TrainArgs(dtype="bfloat16")
    policy = load_policy(tiny_model(), args, device)
    blocks = [sum(p.numel() for p in block.parameters()) for block in policy.hf.model.layers]
    weights = sum(p.numel() for p in policy.hf.parameters())
    assert block_and_root(policy) == (blocks[0], weights - sum(blocks))
    assert size_of(policy) == 4 * num_weights(policy) == 4 * weights
    assert head_weights(policy) == policy.hf.lm_head.weight.numel()
    frozen = load_policy(tiny_model(), args, device, trainable=False)
    assert block_and_root(frozen) == block_and_root(policy) and size_of(frozen) == 2 * weights
    assert block_and_root(frozen, trained=True) == (0, 0)
    scalar = load_scalar_model(tiny_model(), args, device)
    assert head_weights(scalar) == 0
    assert num_weights(scalar) == weights + policy.hf.config.hidden_size


def test_activations_are_recomputed_only_where_they_do_not_fit(device, monkeypatch):
    """Only without the flag, not on a CPU (0 bytes), and not for scores with a softcap, whose
    memory is not predicted."""
    kept = replace(PLAN, ranks=8, pack_tokens=8192, recompute=False)
    policy, capped = model(), model()
    capped.hf.config.attn_logit_softcapping = 50.0
    capacity = total(predict([policy], kept)) / USABLE
    for flag, one, size, recomputed in (
        (None, policy, capacity + 1, False), (None, policy, capacity - 1, True),
        (None, policy, 0, False), (True, policy, capacity + 1, True),
        (False, policy, capacity - 1, False), (None, capped, capacity + 1, True),
    ):  # fmt: skip
        plan = make_plan([one], TrainArgs(activation_checkpointing=flag), 8, size)
        assert plan == replace(kept, recompute=recomputed)
    give_memory(monkeypatch, 2**31)
    args = TrainArgs(dtype="float32", activation_checkpointing=True)
    policy = load_policy(tiny_model(), args, device)
    keep_activations_that_fit([policy], args)
    assert policy.hf.is_gradient_checkpointing
    keep_activations_that_fit([policy], TrainArgs(dtype="float32"))
    assert not policy.hf.is_gradient_checkpointing


def test_models_count_while_alive_and_are_refused_before_loading(device, monkeypatch):
    """The second of two models may exceed the memory; a deleted model counts nothing."""
    args, read = TrainArgs(dtype="float32"), []
    give_memory(monkeypatch, 2**31)
    load = models.read_weights
    monkeypatch.setattr(models, "read_weights", lambda *given: read.append(1) or load(*given))
    policy = load_policy(tiny_model(), args, device)
    one = keep_activations_that_fit([policy], args)
    assert one.startswith("memory per GPU, activations kept: 0.") and one.endswith("GiB of 2.0")
    load_policy(tiny_model(), args, device, trainable=False)
    assert keep_activations_that_fit([policy], args) == one and len(read) == 2
    needs = total(predict([policy], replace(plan_of(policy, args), recompute=True)))
    give_memory(monkeypatch, needs / USABLE + 2**20)
    with pytest.raises(
        ValueError, match="^--reference_model .*: needs .* GiB of .* GPU, .*; --dry_run shows what"
    ):
        load_policy(tiny_model(), args, device, trainable=False, flag="--reference_model")
    assert len(read) == 2


def test_transformers_engine_counts_as_a_copy_of_the_policy(tmp_path, device, monkeypatch):
    """Loading a smaller teacher later does not change the count."""
    give_memory(monkeypatch, 2**31)
    args = Args(dtype="float32", engine="transformers")
    policy = load_policy(tiny_model(), args, device)
    teacher = load_policy(
        str(write_teacher(tmp_path / "teacher")), args, device, trainable=False, flag="--teacher"
    )
    sizes = [4 * sum(p.numel() for p in model.parameters()) for model in (policy, teacher)]
    assert sizes[1] < sizes[0] == plan_of(teacher, args).engine


@pytest.mark.slow
def test_predicted_memory_is_close_to_that_of_fake_tensors():
    """The tolerance is a tenth, for forward and backward of a training step with FSDP2 on 8
    ranks."""
    models = ("tied", "untied", "context", "distilled")
    done = run(1, "bench/memory_plan.py", "--tokens", 2048, *models)
    assert done.stdout.count("predicted") == 8
