"""The collectives of a step on 64 ranks, without these ranks: fake tensors and a fake process
group.

NCCL hangs if two ranks of a group make different collectives, or the same ones in another order or
of another size."""

import json

import pytest
from processes import run

BLOCKS = 2

# Program that prints, for each rank, the collectives of forward and backward: name, sizes of
# tensors, size of group.
PROGRAM = f"""
import json, os, sys
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from bench.models import ARCHITECTURES, SIZES
from common.config.groups import TrainArgs
from common.packs.packing import PackedBatch
from common.model.policy import load_policy, shard
from common.parallel import context, distributed

distributed.set_timeout = lambda *_: None  # fake groups have no timeout

class Recorder(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:
            leaves = torch.utils._pytree.tree_leaves(args)
            tensors = [list(x.shape) for x in leaves if isinstance(x, torch.Tensor)]
            groups = [x for x in args if isinstance(x, torch.ScriptObject)]
            sizes = [dist.ProcessGroup.unbox(group).size() for group in groups[:1]]
            seen.append([function._schema.name, tensors, *sizes])
        return function(*args, **(kwargs or {{}}))

name = "mixtral" if sys.argv[1] == "hybrid" else "qwen3"
flags = json.loads(sys.argv[2])
folder = sys.argv[3]
sizes = SIZES | ARCHITECTURES[name] | dict(num_hidden_layers={BLOCKS})
AutoConfig.for_model(name, **sizes).save_pretrained(folder)
device, steps, world = torch.device("cpu"), [], 64
for rank in (0, world - 1):
    args = TrainArgs(dtype="bfloat16", **dict(shard_ranks=world) | flags)
    os.environ |= dict(WORLD_SIZE=str(world), RANK=str(rank))
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    if args.context_ranks > 1:
        context.setup_context_groups(args.context_ranks)
    policy, seen = load_policy(folder, args, torch.device("meta")), []
    shard(policy, policy.hf.base_model.layers, args, device, False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy.to_empty(device=device)
        ids = torch.arange(16) % 30
        others = dict(loss_mask_T=ids.bool(), index_N=ids[:0])
        mb = PackedBatch(ids, ids, ids, [16 * args.context_ranks], **others)
        mb.context_group = distributed.context_group
        with Recorder():
            policy(mb)[0].sum().backward()
    steps.append(seen)
    dist.destroy_process_group()
    distributed.shard_mesh.cache_clear()
    distributed.context_group = None
print(json.dumps(steps))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("hybrid", dict(shard_ranks=4)),  # and experts
        ("context", dict(context_ranks=2)),
        ("lora", dict(lora_rank=4)),
    ],
)
def test_all_ranks_make_the_same_collectives(mode, flags, tmp_path):
    done = run(1, PROGRAM, mode, json.dumps(flags), tmp_path)
    first, *others = json.loads(done.stdout.splitlines()[-1])
    assert first and all(other == first for other in others)
    names = [name for name, *_ in first]
    sizes = [size for name, _, *size in first if "allgather_base" in name]
    assert len(sizes) == 1 + 2 * BLOCKS  # the root once; each block in forward and backward
    assert {n for size in sizes for n in size} == {flags.get("shard_ranks", 64)}
    reductions = sum("reduce_scatter" in name for name in names)
    assert reductions == BLOCKS + (mode != "lora")  # the root has no adapters
    exchanges = any("alltoall" in name or "all_to_all" in name for name in names)
    assert exchanges == (mode == "context")
    assert any("allreduce" in name for name in names) == (mode == "hybrid")
