"""The memory of a run on a GPU is predicted; frozen models take half, and `--offload` changes no
number."""

import shutil

import pytest
import torch
from helpers import assert_same_weights, metrics, run
from model.test_policy import ARCHITECTURES, samples, write_checkpoint

from common.config.groups import TrainArgs
from common.data.packing import pack
from common.model import memory
from common.model.hub import load_tokenizer
from common.model.memory import (
    USABLE,
    block_and_root,
    head_weights,
    keep_activations_that_fit,
    num_weights,
    total,
    training_peak,
)
from common.model.policy import load_policy, load_scalar_model
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

SHORT = "--max_steps 2 --save_every 1 --eval_every 0 --dtype float32".split()
SFT = ("--batch_size", 8, "--lr", 3e-3, *SHORT)


@pytest.mark.slow
def test_offload_changes_no_number_and_may_change_at_a_resume(main, small, tmp_path):
    """A run resumed with another `--offload` ends with the same weights, bit for bit."""
    for offload in ("none", "optimizer", "all"):
        main("sft", *small, *SFT, "--offload", offload, "--output_dir", tmp_path / offload)
        assert_same_weights(tmp_path / "none", tmp_path / offload)
        losses = [line["loss"] for line in metrics(tmp_path / offload)]
        assert len(losses) == 2 and losses == [line["loss"] for line in metrics(tmp_path / "none")]
    for before, after in (("none", "optimizer"), ("optimizer", "all")):
        again = tmp_path / f"{before}_{after}"
        shutil.copytree(tmp_path / before, again, ignore=lambda *_: ["hf", "step_000002"])
        main("sft", *small, *SFT, "--offload", after, "--output_dir", again)
        assert_same_weights(tmp_path / "none", again)


@pytest.mark.slow
def test_offload_changes_no_number_on_two_ranks(small, tmp_path):
    """The test above has one rank, on which FSDP does not communicate."""
    for offload in ("none", "all"):
        run(2, "sft.py", *small, *SFT, f"--offload={offload}", f"--output_dir={tmp_path / offload}")
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


def test_sizes_are_those_of_the_loaded_model(device):
    """Cases: a tied model, trained and frozen, and a scalar model."""
    args = TrainArgs(dtype="bfloat16")
    policy = load_policy(tiny_model(), args, device)
    blocks = [sum(p.numel() for p in block.parameters()) for block in policy.hf.model.layers]
    weights = sum(p.numel() for p in policy.hf.parameters())
    assert block_and_root(policy) == (blocks[0], weights - sum(blocks))
    assert num_weights(policy) == weights
    assert head_weights(policy) == policy.hf.lm_head.weight.numel()
    frozen = load_policy(tiny_model(), args, device, trainable=False)
    assert block_and_root(frozen) == block_and_root(policy)
    assert block_and_root(frozen, trained=True) == (0, 0)
    scalar = load_scalar_model(tiny_model(), args, device)
    assert head_weights(scalar) == 0
    assert num_weights(scalar) == weights + policy.hf.config.hidden_size


def test_activations_are_recomputed_only_where_they_do_not_fit(device, monkeypatch):
    """They have to fit beside what is on the GPU and the gradients. A flag decides alone; scores
    with a softcap, whose memory is not predicted, are recomputed."""
    policy = load_policy(tiny_model(), TrainArgs(dtype="float32"), device)
    decoder, config = policy.hf.get_decoder(), policy.hf.config
    ranks, tokens = 1, TrainArgs.pack_tokens
    kept = 4 * num_weights(policy) + total(training_peak(policy, ranks, tokens, recompute=False))
    for flag, spare, offload, softcap, recomputed in (
        (None, 1, "none", None, False), (None, -1, "none", None, True),
        (None, -1, "all", None, False), (True, 1, "none", None, True),
        (False, -1, "none", None, False), (None, 1, "none", 50.0, True),
    ):  # fmt: skip
        capacity = 2 * kept / USABLE  # half of what may be used is taken
        free = capacity - kept + spare, capacity
        monkeypatch.setattr(memory, "free_memory", lambda _, free=free: free)
        config.attn_logit_softcapping = softcap
        args = TrainArgs(dtype="float32", activation_checkpointing=flag, offload=offload)
        decoder.gradient_checkpointing_enable()
        if flag is False:
            decoder.gradient_checkpointing_disable()
        line = keep_activations_that_fit([policy], args)
        assert decoder.is_gradient_checkpointing == recomputed
        assert line.startswith(f"memory per GPU, activations {'recomputed' * recomputed or 'kept'}")
        assert line.endswith(f"GiB of {capacity / memory.GIB:.1f}")


@pytest.mark.slow
def test_predicted_memory_is_close_to_that_of_fake_tensors():
    """The tolerance is a tenth, for forward and backward of a training step with FSDP2 on 8
    ranks."""
    models = ("tied", "untied", "context", "distilled")
    done = run(1, "bench/memory_plan.py", "--tokens", 2048, *models)
    assert done.stdout.count("predicted") == 8
