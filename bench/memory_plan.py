"""Print the tables of docs/memory.md, or compare `common/model/memory.py` to a training step on
fake tensors.

    python bench/memory_plan.py            # the tables, by arithmetic alone
    python bench/memory_plan.py --check    # a step's peak on fake tensors beside the arithmetic

The check runs forward and backward of the sharded model as the scripts do, with shapes and without
numbers: fake tensors, a fake process group of `--ranks`, and torch's own tracker of FSDP2's memory.
It replaces two parts whose CPU versions differ from CUDA's. Attention keeps the same tensors as
FlashAttention, and the product of two bfloat16 matrices has a float32 result. `--layers` makes the
models shorter."""

import argparse
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from common.config.groups import TrainArgs
from common.data.packing import PackedBatch
from common.model import head, student
from common.model.capacity import GIB, USABLE, refusal
from common.model.memory import Plan, Shapes, on_the_host, predict, shapes_of
from common.model.policy import Policy, shard
from common.objectives.divergence import reverse_kl

CAPACITY = 80e9 / GIB  # GiB of a GPU that is sold with 80 GB
COMMON = dict(vocab_size=151936, head_dim=128, max_position_embeddings=40960)


def qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool = False) -> Qwen3Config:
    sizes = dict(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    return Qwen3Config(**COMMON, **sizes, num_key_value_heads=8, tie_word_embeddings=tied)


CONFIGS = {
    "1.7B": qwen3(2048, 6144, 28, 16, tied=True), "8B": qwen3(4096, 12288, 36, 32),
    "14B": qwen3(5120, 17408, 40, 40), "32B": qwen3(5120, 25600, 64, 64),
    "30B-A3B": Qwen3MoeConfig(
        **COMMON, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, num_experts=128,
        num_experts_per_tok=8, tie_word_embeddings=False,
    ),
}  # fmt: skip
SMALL = dict(  # for the test: fixed parts dominate
    tied=Qwen3Config(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    untied=Qwen3Config(
        vocab_size=8000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
    ),
)


SMALL |= dict(context=SMALL["untied"], distilled=SMALL["tied"])
MODES = dict(context=dict(context_ranks=8), distilled=dict(distils=True))


def meta_model(config, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="packed", dtype=dtype)


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


class Student(student.Student):
    forward = student.Student.distill  # the tracker of memory knows `forward` only


class Teacher(student.Teacher):
    forward = student.Teacher.teach


def measured(config, plan: Plan) -> float:
    """Return the bytes at the peak of forward and backward of one micro-batch, without Adam's
    moments. With `plan.distils` the teacher is a frozen model of the same `config`."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    args = TrainArgs(dtype="bfloat16")
    hf = meta_model(config)
    if plan.recompute:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    policy, device = (Student if plan.distils else Policy)(hf, "").train(), torch.device("cpu")
    shard(policy, hf.base_model.layers, args, device, reshard_root=False)
    teacher = Teacher(meta_model(config, torch.bfloat16).requires_grad_(False), "")
    shard(teacher, teacher.hf.base_model.layers, args, device, reshard_root=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy.to_empty(device=device)
        ids = torch.zeros(plan.pack_tokens, dtype=torch.int64)
        where = dict(loss_mask_T=ids.bool(), index_N=ids[:0])
        mb = PackedBatch(ids, ids, ids, [len(ids)], **where)
        mb.context_group = torch.distributed.group.WORLD if plan.context_ranks > 1 else None
        for parameter in policy.parameters():  # from earlier micro-batches
            parameter.grad = torch.zeros_like(parameter)
        tracker = FSDPMemTracker(policy)
        tracker.track_inputs((ids,))
        if plan.distils:
            teacher.to_empty(device=device)
            tracker.track_external(*teacher.parameters())
        with tracker:
            statistics = policy(mb, teacher(mb), reverse_kl) if plan.distils else policy(mb)
            sum(x_T.sum() for x_T in statistics[: 1 + plan.distils]).backward()
        return tracker.get_tracker_snapshot("peak")[device]["Total"]


def check(names: list[str], ranks: int, tokens: int, layers: int | None) -> float:
    """Print one line per model and return the largest relative difference."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= dict(WORLD_SIZE=str(ranks), RANK="0")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    chunk_size = head.chunk_size
    head.product, head.add_product_ = float32_product, lambda total, a, b: None
    head.chunk_size = lambda vocabulary, _: chunk_size(vocabulary, True)
    worst = 0.0
    for name in names:
        config = (CONFIGS | SMALL)[name]
        if layers is not None:
            config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
        for recompute in (True, False):
            m = shapes_of(meta_model(config))
            plan = Plan(ranks, tokens, recompute, **MODES.get(name, {}))
            if plan.distils:
                plan = replace(plan, teacher_head=m.head)
            parts = predict([m, frozen(m)] if plan.distils else [m], plan)
            ours = sum(parts.values()) - parts["Adam"]
            theirs = measured(config, plan)
            worst = max(worst, abs(ours / theirs - 1))
            listed = ", ".join(
                f"{part} {size / GIB:.2f}" for part, size in parts.items() if part != "Adam"
            )
            mode = "recomputed" if recompute else "kept"
            print(
                f"{name}, {config.num_hidden_layers} layers, {ranks} ranks, {tokens} tokens, "
                f"{mode}: fake tensors "
                f"{theirs / GIB:.2f} GiB, predicted {ours / GIB:.2f} ({ours / theirs - 1:+.1%}):",
                listed,
                flush=True,
            )
    return worst


# ---- the tables ----


def with_adapters(m: Shapes, rank: int) -> Shapes:
    """Add adapters to all matrices of the blocks except experts: `rank` numbers per row and per
    column."""
    widths = 2 * m.queries + 2 * m.keys + 4 * m.hidden  # of q, k, v and o
    adapters = rank * (
        widths if m.experts else widths + 3 * (m.inner + m.hidden)
    )  # of gate, up and down
    return replace(
        m, weights=m.weights + m.layers * adapters, trained=m.layers * adapters,
        block=m.block + adapters, block_trained=adapters, root_trained=0,
    )  # fmt: skip


def frozen(m: Shapes) -> Shapes:
    return replace(m, trained=0, block_trained=0, root_trained=0)


SCRIPTS = {  # trained models, frozen models, whether an engine samples
    "sft": (1, 0, False),
    "dpo": (1, 1, False),
    "grpo": (1, 0, True),
    "ppo": (2, 1, True),
}


def plan_for(
    m: Shapes, script: str, lora: bool, ranks: int, offload: str
) -> tuple[list[Shapes], Plan]:
    trains, stays, samples = SCRIPTS[script]
    trained = with_adapters(m, rank=16 * trains) if lora else m
    models = [trained, *([replace(trained, head=0)] if trains == 2 else [])]
    # The reference is the starting policy, and the value model has adapters on the same weights.
    models = models[:1] if lora else models + [frozen(m)] * stays
    engine = 0.4 * CAPACITY * GIB if samples else 0.0
    together = min(
        ranks, 2 ** math.ceil(math.log2(max(1, 2 * m.weights / (0.9 * (engine or math.inf)))))
    )
    return models, Plan(ranks, 8192, True, offload, engine=engine, engine_ranks=together)


def cell(m: Shapes, script: str, lora: bool, ranks: int) -> str:
    """Return GiB with the first --offload that fits, and the ranks per engine if one rank cannot
    hold it."""
    for offload in ("none", "optimizer", "all"):
        models, plan = plan_for(m, script, lora, ranks, offload)
        size, host = sum(predict(models, plan).values()) / GIB, on_the_host(models, plan) / GIB
        together = f", tp {plan.engine_ranks}" if plan.engine_ranks > 1 else ""
        if refusal(models, plan, CAPACITY * GIB) is None:
            return (
                f"{size:.0f}" if offload == "none" else f"{size:.0f} {offload} ({host:.0f})"
            ) + together
    return f"no ({size:.0f})" if size > USABLE * CAPACITY else "no (engine)"


def tables() -> None:
    ranks = (1, 8, 16, 64)
    models = {name: shapes_of(meta_model(config)) for name, config in CONFIGS.items()}
    for lora in (False, True):
        print(
            f"\n| {'LoRA, rank 16' if lora else 'full'} | | "
            f"{' | '.join(f'{r} GPU' + 's' * (r > 1) for r in ranks)} |"
        )
        print("|---" * (2 + len(ranks)) + "|")
        for name, m in models.items():
            for script in SCRIPTS:
                cells = " | ".join(cell(m, script, lora, r) for r in ranks)
                print(f"| {name} | {script} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", nargs="*", choices=[*CONFIGS, *SMALL], help="models; default: 1.7B, 8B and 14B"
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int)
    parser.add_argument(
        "--limit", type=float, default=0.1, help="largest relative difference without failure"
    )
    flags = parser.parse_args()
    AttentionInterface.register("packed", attention)
    if flags.check is None:
        return tables()
    worst = check(flags.check or ["1.7B", "8B", "14B"], flags.ranks, flags.tokens, flags.layers)
    sys.exit(f"differs by {worst:.1%}" if worst > flags.limit else 0)


if __name__ == "__main__":
    main()
