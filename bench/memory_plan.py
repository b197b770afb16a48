"""Compare the memory that extras/plan/memory.py predicts with a training step on fake tensors
(docs/memory.md).

    python bench/memory_plan.py 1.7B 8B 32B

It runs forward and backward of the sharded model as the scripts do, but tensors only have shapes:
it uses torch's fake tensors, a fake process group of `--ranks`, and torch's tracker of FSDP2's
memory. Two parts whose CPU versions differ from CUDA's are replaced: attention keeps the same
tensors as FlashAttention, and the product of two bfloat16 matrices is float32. `--layers` makes the
models shorter."""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from common.config.groups import TrainArgs
from common.model import distill, logprobs, lora
from common.model.lora import add_adapters
from common.model.policy import Policy, shard
from common.objectives.divergence import reverse_kl
from common.packs.packing import PackedBatch
from common.parallel.context import ContextGroup
from extras.plan.launch import size_of
from extras.plan.memory import GIB, keep_activations, num_weights, training_peak
from extras.plan.table import SHAPES as CONFIGS
from extras.plan.table import qwen3

# Small models for the test, in which parts of a fixed size dominate.
TIED = qwen3(512, 1536, 3, 8, tied=True, vocab_size=32000, head_dim=64, num_key_value_heads=4)
UNTIED = qwen3(1024, 4096, 3, 16, vocab_size=8000, head_dim=64, num_key_value_heads=4)
SMALL = dict(tied=TIED, untied=UNTIED, context=UNTIED, distilled=TIED, nf4=UNTIED)


class Student(distill.Student):
    forward = distill.Student.distill  # the tracker of memory knows `forward` only


class Teacher(distill.Teacher):
    forward = distill.Teacher.teach


def meta_model(config, kind: type[Policy], dtype: torch.dtype = torch.float32) -> Policy:
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="packed", dtype=dtype)
    model = kind(hf, "")
    model.compute_dtype = torch.bfloat16
    return model


def with_packed_weights(policy: Policy) -> Policy:
    from extras.quantized.nf4 import pack_layers

    add_adapters(policy.hf, TrainArgs(lora_rank=16))
    pack_layers(policy.hf, torch.device("cpu"))
    return policy


# ---- the check ----


class KeptByFlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        logsumexp = query.new_empty(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def attention(module, query, key, value, attention_mask, scaling, **kwargs):
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return KeptByFlashAttention.apply(q, k, v)[None], None


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


def measured(
    policy: Policy, teacher: Policy | None, tokens: int, ranks: int, kept: int, splits: bool
) -> float:  # fmt: skip
    """Return the bytes at the peak of one micro-batch's forward and backward, without Adam's
    moments. `kept`: blocks that keep activations; `splits`: all ranks share the pack
    (`--context_ranks`)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    args = TrainArgs(dtype="bfloat16", shard_ranks=ranks)
    device = torch.device("cpu")
    policy.hf.gradient_checkpointing_enable(dict(use_reentrant=False))
    keep_activations(policy, kept)
    shard(policy.train(), policy.hf.get_decoder().layers, args, device, reshard_root=False)
    if teacher is not None:
        shard(teacher, teacher.hf.get_decoder().layers, args, device, reshard_root=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy.to_empty(device=device)
        ids = torch.zeros(tokens, dtype=torch.int64)
        where = dict(loss_mask_T=ids.bool(), index_N=ids[:0])
        mb = PackedBatch(ids, ids, ids, [len(ids)], **where)
        mb.context_group = ContextGroup(torch.distributed.group.WORLD) if splits else None
        for parameter in policy.parameters():
            if parameter.requires_grad:  # from earlier micro-batches
                parameter.grad = torch.zeros_like(parameter)
        tracker = FSDPMemTracker(policy)
        tracker.track_inputs((ids,))
        if teacher is not None:
            teacher.to_empty(device=device)
            tracker.track_external(*teacher.parameters())
        with tracker:
            statistics = policy(mb) if teacher is None else policy(mb, teacher(mb), reverse_kl)
            sum(x_T.sum() for x_T in statistics[: 1 if teacher is None else 2]).backward()
        return tracker.get_tracker_snapshot("peak")[device]["Total"]


def check(names: list[str], ranks: int, tokens: int, layers: int | None) -> float:
    """Print a line for each model. Return the largest relative difference."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= dict(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), RANK="0")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    chunk_size = logprobs.chunk_size
    logprobs.product, logprobs.add_product_ = float32_product, lambda sum_VD, a, b: None
    logprobs.chunk_size = lambda vocabulary, on_cuda: chunk_size(vocabulary, True)
    lora.merge = lambda weight_OI, a_LI, b_OL, scale: torch.addmm(
        weight_OI, b_OL, a_LI, alpha=scale
    )
    worst = 0.0
    for name in names:
        config = (CONFIGS | SMALL)[name]
        if layers is not None:
            config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
        distils = name == "distilled"
        count = config.num_hidden_layers
        for kept in (0, count // 2, count):
            policy = meta_model(config, Student if distils else Policy)
            if name == "nf4":
                policy = with_packed_weights(meta_model(config, Policy, torch.bfloat16))
            teacher = meta_model(config, Teacher, torch.bfloat16) if distils else None
            gradients = 4 * num_weights(policy, trained=True)
            parts = {"weights and gradients": (size_of(policy) + gradients) / ranks}
            if teacher is not None:
                parts["teacher"] = 2 * num_weights(teacher.requires_grad_(False)) / ranks
            parts |= training_peak(policy, ranks, tokens, kept)
            ours = sum(parts.values())
            splits = name == "context"
            theirs = measured(policy, teacher, tokens, ranks, kept, splits)
            worst = max(worst, abs(ours / theirs - 1))
            listed = [f"{part} {size / GIB:.2f}" for part, size in parts.items()]
            print(
                f"{name}, {ranks} ranks, {tokens} tokens, {kept} of {count} blocks kept: "
                f"fake tensors {theirs / GIB:.2f} GiB, "
                f"predicted {ours / GIB:.2f} ({ours / theirs - 1:+.1%}):",
                ", ".join(listed),
                flush=True,
            )
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", choices=[*CONFIGS, *SMALL])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int)
    parser.add_argument(
        "--limit", type=float, default=0.1, help="largest relative difference without failure"
    )
    flags = parser.parse_args()
    AttentionInterface.register("packed", attention)
    worst = check(flags.models, flags.ranks, flags.tokens, flags.layers)
    sys.exit(f"differs by {worst:.1%}" if worst > flags.limit else 0)


if __name__ == "__main__":
    main()
