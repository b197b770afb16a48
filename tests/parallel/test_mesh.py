"""Several replicas of a model give the gradients, checkpoints and weights of one replica."""

from unittest import mock

import pytest
import torch
from processes import run

from common.parallel import distributed

RANK = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from model.checkpoints import samples
from common.parallel import distributed
from common.train.checkpoint import Checkpointer
from common.train.run_folder import prepare_output_dir
from common.config.groups import TrainArgs
from common.text.tokenizer import load_tokenizer
from common.rollout.weights import whole_weights
from common.model.loading import whole
from common.model.policy import load_policy
from common.train.optim import adamw, optimizer_step
from common.packs.packing import pack

device, rank, size = distributed.setup(0)
folder = Path(sys.argv[1])
batch = samples((18, 41, 41, 6, 64, 2, 90, 33, 12, 77, 5, 8), vocabulary=300)


def begin(shard_ranks):
    args = TrainArgs(dtype="float32", lr=1e-3, shard_ranks=shard_ranks, output_dir=str(folder))
    return args, load_policy(sys.argv[2], args, device)


reduced = []  # one for each gradient that is averaged over copies
all_reduce = dist.all_reduce
dist.all_reduce = lambda *args, **kwargs: reduced.append(args) or all_reduce(*args, **kwargs)


def backward(model, order=1):
    packs = pack(batch[rank::size], 90, device)[::order]
    assert len(packs) > 1
    tokens = distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in packs))
    loss = torch.zeros(())
    for mb in packs:
        logprobs_T, entropy_T, *_ = model(mb)
        of_pack = (-(logprobs_T + 0.1 * entropy_T) * mb.loss_mask_T).sum() / tokens
        reduced.clear()
        (of_pack * size).backward()
        has_copies = len(next(model.parameters()).device_mesh.shape) == 2
        units = 1 + len(model.hf.base_model.layers)  # the blocks, and the root
        assert len(reduced) == (units if has_copies and mb.is_last else 0)
        loss += of_pack.detach()
    return loss


def stepped(model, max_grad_norm=1e9):
    "Return the optimizer's gradients and their norm before clipping."
    seen = {}
    sgd = torch.optim.SGD(model.parameters())

    def keep_gradients(*_):
        seen.update({n: whole(p.grad) for n, p in model.named_parameters()})

    sgd.register_step_pre_hook(keep_gradients)
    return seen, optimizer_step(model, sgd, 0.0, max_grad_norm, backward(model))


def difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max() / other[n].abs().max()) for n in other)


def moments(model, optimizer):
    names = ("exp_avg", "exp_avg_sq")
    return [whole(optimizer.state[p][name]) for p in model.parameters() for name in names]


layouts = list(dict.fromkeys((size, 2, 1)))  # first of all plain FSDP
# Steps at rate 0 leave the models unchanged.
models = {shard_ranks: begin(shard_ranks)[1] for shard_ranks in layouts}
plain, norm = stepped(models[layouts[0]])
for shard_ranks in layouts[1:]:
    model = models[shard_ranks]
    (mesh,) = {p.device_mesh for p in model.parameters()}
    assert mesh.shape == (size // shard_ranks, shard_ranks)
    backends = [group._get_backend(device) for group in mesh.get_all_groups()]
    assert {backend.options._timeout.days for backend in backends} == {1}  # as of all ranks
    for share in (1, 0.5):
        hybrid, its_norm = stepped(model, norm * share)
        assert difference(hybrid, {n: share * g for n, g in plain.items()}) < 1e-5
        assert abs(its_norm / norm - 1) < 1e-6
try:
    optimizer_step(models[layouts[-1]], None, 0.0, 1.0, backward(models[layouts[-1]], order=-1))
    raise AssertionError("a gradient that is not averaged is not seen")
except distributed.RunError as error:
    assert "in order" in str(error)
if folder.is_dir():  # one gradient, also of another number of ranks
    assert difference(plain, torch.load(folder / "gradient.pt")) < 1e-6

tokenizer = load_tokenizer(sys.argv[2])
def checkpointer(shard_ranks):
    args, model = begin(shard_ranks)
    optimizer = adamw(model, args)
    return model, optimizer, Checkpointer(args, model, optimizer, tokenizer)


if not folder.is_dir():
    prepare_output_dir(begin(2)[0])
    model, optimizer, writer = checkpointer(2)
    for _ in range(2):
        optimizer_step(model, optimizer, 1e-3, 1.0, backward(model))
    writer.save(2)
    state = [[whole(p.detach()) for p in model.parameters()], moments(model, optimizer)]
    if rank == 0:
        torch.save(plain, folder / "gradient.pt")
        torch.save(state, folder / "state.pt")
    distributed.barrier()
weights, adam = torch.load(folder / "state.pt")
for shard_ranks in layouts:
    model, optimizer, reader = checkpointer(shard_ranks)
    assert reader.load_latest() == 2
    assert all(map(torch.equal, (whole(p.detach()) for p in model.parameters()), weights))
    assert all(map(torch.equal, moments(model, optimizer), adam))
    to_engine = dict(whole_weights(model, torch.float32))
    state = model.hf.state_dict()
    assert to_engine.keys() == state.keys()
    assert all(torch.equal(to_engine[n], whole(w)) for n, w in state.items())
    reader.save(2)  # for the next layout to read
if rank == 0:
    print("layouts", layouts)
distributed.cleanup()
"""


@pytest.mark.slow
def test_replicas_train_like_one_model(small, tmp_path):
    """Gradients, norms and clipping agree. Every layout resumes the checkpoints of every other, and
    those of more ranks. The engine gets the model's weights. Gradients are averaged over copies
    once in a step."""
    for ranks, layouts in ((4, "[4, 2, 1]"), (2, "[2, 1]")):
        done = run(ranks, RANK, tmp_path / "run", small[1])
        copies = f"{ranks} copies of each model, each on 1 of the {ranks} ranks"
        assert f"layouts {layouts}" in done.stdout and f"hybrid sharding: {copies}" in done.stdout


@pytest.mark.parametrize(
    ("ranks", "of_machine", "shape"),
    [(1, 1, (1,)), (4, 4, (4,)), (3, 4, (3,)), (4, 2, (2, 2)), (6, 2, (3, 2)), (5, 3, (5,))],
)
def test_default_copy_lies_on_one_machine(ranks, of_machine, shape, monkeypatch, capsys):
    """Ranks that machines do not divide evenly share one copy, which a line says."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of_machine))
    made = mock.Mock(**{"return_value.get_all_groups.return_value": []})
    monkeypatch.setattr(distributed, "init_device_mesh", made)
    distributed.shard_mesh.__wrapped__(torch.device("cpu"), None)
    assert made.call_args.args[1] == shape
    uneven = "5 ranks are no multiple of the 3 of a machine: each model is sharded over all of them"
    assert (uneven in capsys.readouterr().out) == (ranks == 5)
