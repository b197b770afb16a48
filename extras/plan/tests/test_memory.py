"""Whether activations fit on a GPU is predicted."""

import pytest
import torch
from helpers import run

from common.config.groups import TrainArgs
from common.config.online import USABLE
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from extras.plan.memory import (
    GIB,
    keep_activations_that_fit,
    num_weights,
    total,
    training_peak,
)


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
        assert line.endswith(f"GiB of {capacity / GIB:.1f}")


@pytest.mark.slow
def test_predicted_memory_is_close_to_that_of_fake_tensors():
    """The tolerance is a tenth, for forward and backward of a training step with FSDP2 on 8
    ranks."""
    done = run(1, "bench/memory_plan.py", "--tokens", 2048, "untied", "context", "distilled")
    assert done.stdout.count("predicted") == 6
