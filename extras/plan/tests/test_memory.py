"""Whether activations fit on a GPU is predicted, and those that do not are recomputed."""

from collections import Counter

import pytest
import torch
from model.checkpoints import ARCHITECTURES, samples, write_checkpoint
from processes import run

from common.config.groups import TrainArgs
from common.config.online import USABLE
from common.model.loading import whole
from common.model.policy import load_policy, load_scalar_model
from common.model.tiny import tiny_model
from common.packs.packing import pack_groups
from common.packs.sample import Sample
from extras.plan.memory import (
    GIB,
    blocks_to_keep,
    keep_activations,
    keep_activations_that_fit,
    num_blocks,
    num_weights,
    total,
    training_peak,
)

ARGS = dict(dtype="float32", activation_checkpointing=True)


def switches(model) -> list[bool]:
    """Return whether each block is recomputed."""
    return [block.gradient_checkpointing for block in model.hf.get_decoder().layers]


def test_only_blocks_that_do_not_fit_are_recomputed(device, monkeypatch):
    """Activations must fit beside the gradients and what is on the GPU. If the flag is given, it
    decides alone. Scores with a softcap are recomputed, because their memory is not predicted."""
    policy = load_policy(tiny_model(), TrainArgs(dtype="float32"), device)
    decoder, config = policy.hf.get_decoder(), policy.hf.config
    ranks, tokens, count = 1, TrainArgs.pack_tokens, num_blocks(policy)
    gradients = 4 * num_weights(policy)
    peaks = [total(training_peak(policy, ranks, tokens, kept)) for kept in range(count + 1)]
    assert peaks == sorted(peaks)
    for flag, room, offload, softcap, kept in (
        (None, gradients + peaks[count], "none", None, count),
        (None, gradients + peaks[count] - 1, "none", None, count - 1),
        (None, gradients + peaks[2], "none", None, 2), (None, 1, "none", None, 0),
        (None, peaks[count], "all", None, count), (True, 1e12, "none", None, 0),
        (False, 1, "none", None, count), (None, 1e12, "none", 50.0, 0),
    ):  # fmt: skip
        capacity = 2 * room / USABLE  # half of what may be used is taken
        free = capacity - room + 0.5, capacity
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: free)
        config.attn_logit_softcapping = softcap
        args = TrainArgs(dtype="float32", activation_checkpointing=flag, offload=offload)
        decoder.gradient_checkpointing_enable()
        if flag is False:
            decoder.gradient_checkpointing_disable()
        line = keep_activations_that_fit([policy], args)
        assert switches(policy) == [True] * (count - kept) + [False] * kept
        assert line.startswith(f"memory per GPU, activations of {kept} of {count} blocks kept: ")
        assert line.endswith(f"GiB of {capacity / GIB:.1f}")


def test_blocks_without_a_switch_of_their_own_are_all_kept_or_none(device, monkeypatch):
    policy = load_policy(tiny_model(), TrainArgs(dtype="float32"), device)
    count, args = num_blocks(policy), TrainArgs()
    room = total(training_peak(policy, 1, args.pack_tokens, count))
    assert [blocks_to_keep(policy, room - less, 1, args) for less in (0, 1)] == [count, count - 1]
    monkeypatch.setattr("extras.plan.memory.GradientCheckpointingLayer", torch.nn.Embedding)
    assert [blocks_to_keep(policy, room - less, 1, args) for less in (0, 1)] == [count, 0]


LEAST = """
from common.config.groups import TrainArgs
from common.config.online import USABLE
from common.model.policy import load_policy, load_scalar_model
from common.model.tiny import tiny_model
from common.parallel import distributed
from extras.plan import memory
from extras.plan.memory import keep_activations_that_fit, num_weights, total, training_peak
device, rank, ranks = distributed.setup(0)
args = TrainArgs(dtype="float32")
models = [load(tiny_model(), args, device) for load in (load_policy, load_scalar_model)]
gradients = 4 / ranks * sum(map(num_weights, models))
room = 1 + gradients + total(training_peak(models[0], ranks, args.pack_tokens, 2 + rank))
for model in models:
    model.hf.get_decoder().gradient_checkpointing_enable()
memory.used_memory = lambda _: (0, room / USABLE)  # rank 1 has more
keep_activations_that_fit(models, args)
switches = [block.gradient_checkpointing for block in models[0].hf.get_decoder().layers]
assert switches == [True, True, False, False], switches
distributed.cleanup()
"""


def test_all_ranks_keep_as_many_blocks():
    run(2, LEAST)


def group() -> list[Sample]:
    """Return samples with a shared prefix, of ids below 97."""
    start = samples([20])[0].ids
    return [
        Sample(start + [3 + n] + sample.ids, [True] * (21 + len(sample.ids)))
        for n, sample in enumerate(samples([1, 30, 12]))
    ]


def gradients(model, mb) -> list[torch.Tensor]:
    model.zero_grad()
    output = model(mb)
    values_T = output if isinstance(output, torch.Tensor) else output.logprobs_T
    (values_T * mb.position_ids_T.cos()).sum().backward()
    return [whole(p.grad).clone() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen3_moe", "scalar", "adapters"])
def test_gradient_is_the_same_bit_for_bit_however_many_blocks_are_kept(name, tmp_path, device):
    """It is so with and without shared prefixes. The last blocks compute once, the others twice."""
    load = load_scalar_model if name == "scalar" else load_policy
    path = write_checkpoint(ARCHITECTURES.get(name, ARCHITECTURES["qwen3"])(), tmp_path)
    args = TrainArgs(**ARGS, lora_rank=2 * (name == "adapters"))
    model, forwards = load(path, args, device), Counter()
    count = num_blocks(model)
    for i, block in enumerate(model.hf.get_decoder().layers):
        block.mlp.register_forward_pre_hook(lambda *_, i=i: forwards.update([i]))
    for share_prefix in (0, 1):
        (mb,) = pack_groups([group()], 1000, device, share_prefix=share_prefix)
        for kept in range(count + 1):
            model.hf.get_decoder().gradient_checkpointing_enable(dict(use_reentrant=False))
            keep_activations(model, kept)
            forwards.clear()
            found = gradients(model, mb)
            if kept == 0:
                expected = found
            assert [forwards[i] for i in range(count)] == [2] * (count - kept) + [1] * kept
            assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_predicted_memory_is_close_to_that_of_fake_tensors():
    """The tolerance is a tenth, for forward and backward of a training step with FSDP2 on 8 ranks,
    with all, some and no blocks recomputed."""
    done = run(1, "bench/memory_plan.py", "--tokens", 2048, "untied", "context", "distilled")
    assert done.stdout.count("predicted") == 9
