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
from common.model.memory import USABLE, keep_activations_that_fit, num_weights, total, training_peak
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
        model = load(path, TrainArgs(dtype="float32"), device)
        export_hf(model, load_tokenizer(path), tmp_path / "hf")
        path = str(tmp_path / "hf")
    models = [load(path, args, device, trainable=trained) for trained in (False, True)]
    frozen, masters = ([p.to_local() for p in model.parameters()] for model in models)
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert {p.dtype for p in masters} == {torch.float32}
    assert any(not torch.equal(p, p.bfloat16().float()) for p in masters)
    one, other = (dict(model.named_buffers()) for model in models)
    assert all(
        x.dtype == one[name].dtype and torch.equal(x, one[name]) for name, x in other.items()
    )
    (mb,) = pack(samples(vocabulary=300), 1000, device)
    outputs = (model(mb) for model in models)
    outputs = [(out,) if torch.is_tensor(out) else out for out in outputs]
    assert all(map(torch.equal, *outputs))


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
    """A run resumed with another `--offload` ends with the same weights, bit for bit.
    tests/parallel/test_placement.py has several ranks."""
    for offload in ("none", "optimizer", "all"):
        main("sft", *small, *SFT, "--offload", offload, "--output_dir", tmp_path / offload)
        assert_same_weights(tmp_path / "none", tmp_path / offload)
        losses = [line["loss"] for line in metrics(tmp_path / offload)]
        assert len(losses) == 2 and losses == [line["loss"] for line in metrics(tmp_path / "none")]
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "optimizer", again, ignore=lambda *_: ["hf", "step_000002"])
    main("sft", *small, *SFT, "--offload", "all", "--output_dir", again)
    assert_same_weights(tmp_path / "none", again)


# ---- the prediction ----


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
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: free)
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
    done = run(1, "bench/memory_plan.py", "--tokens", 2048, "untied", "context", "distilled")
    assert done.stdout.count("predicted") == 6
