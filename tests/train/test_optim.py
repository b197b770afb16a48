"""The learning rate is a function of the step, and a non-finite gradient does not reach the
weights."""

from itertools import chain

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.config.groups import TrainArgs
from common.model.loading import whole
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.packs.packing import pack
from common.packs.sample import Sample
from common.parallel.distributed import RunError
from common.train.optim import HostAdamW, adamw, learning_rate, optimizer_step

CPU = torch.device("cpu")


def rates(total: int, **flags) -> list[float]:
    args = TrainArgs(lr=1.0, **flags)
    return [learning_rate(step, total, args) for step in range(total)]


def test_linear_schedule_follows_a_warmup():
    decayed = [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]
    assert rates(8, warmup_steps=4, lr_schedule="linear") == decayed
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_cosine_schedule_is_half_way_in_the_middle_and_ends_at_0():
    decay = rates(100, lr_schedule="cosine")
    assert decay[0] == 1 and decay[50] == pytest.approx(0.5) and 0 < decay[-1] < 0.001
    assert all(a > b for a, b in zip(decay, decay[1:], strict=False))
    after = learning_rate(100, 100, TrainArgs(lr=1.0, lr_schedule="cosine"))
    assert after == learning_rate(200, 100, TrainArgs(lr_schedule="linear", lr=1.0)) == 0


def test_warmup_may_be_longer_than_the_run():
    assert rates(2, warmup_steps=4, lr_schedule="cosine") == [0.25, 0.5]


# ---- the step ----


@pytest.fixture
def model(device):
    model = load_policy(tiny_model(), TrainArgs(dtype="float32"), device)
    (mb,) = pack([Sample(ids=[5, 6, 7, 8], loss_mask=[True] * 4)], 10, device)
    (-model(mb)[0].sum()).backward()
    return model


def snapshot(model) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_clipping_returns_the_norm_and_scales_only_longer_gradients(model, scale):
    """The returned norm is the one before clipping."""
    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt().item()
    before, sgd = snapshot(model), torch.optim.SGD(model.parameters(), lr=123.0)
    loss = torch.tensor(1.0)
    assert optimizer_step(model, sgd, 0.1, scale * norm, loss) == pytest.approx(norm, rel=1e-5)
    for name, parameter in model.named_parameters():
        expected = before[name] - 0.1 * min(scale, 1.0) * gradients[name]
        torch.testing.assert_close(whole(parameter.detach()), expected, atol=1e-6, rtol=1e-4)
        assert parameter.grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nonfinite_loss_or_gradient_changes_nothing(model, bad, where):
    args = TrainArgs(dtype="float32", lr=0.1, weight_decay=0.1)
    optimizer, before, loss = adamw(model, args), snapshot(model), torch.tensor(1.0)
    if where == "loss":
        loss = torch.tensor(bad)
    else:
        next(model.parameters()).grad.mul_(bad)
    with pytest.raises(RunError, match=f"the {where}.*stopped before the optimizer step"):
        optimizer_step(model, optimizer, 0.1, 1.0, loss)
    assert all(torch.equal(t, before[name]) for name, t in snapshot(model).items())
    states = chain(*(state.values() for state in optimizer.state.values()))
    assert not any(whole(value).any() for value in states)


def test_weight_decay_applies_only_to_matrices(model):
    args = TrainArgs(dtype="float32", lr=0.1, weight_decay=0.5)
    optimizer, before = adamw(model, args), snapshot(model)
    for parameter in model.parameters():
        parameter.grad.zero_()
    optimizer_step(model, optimizer, 0.1, 1.0, torch.tensor(0.0))
    shapes = {name: tensor.ndim for name, tensor in before.items()}
    assert set(shapes.values()) == {1, 2}
    for name, tensor in snapshot(model).items():
        torch.testing.assert_close(tensor, before[name] * (0.95 if shapes[name] == 2 else 1.0))


def test_adamw_takes_its_flags(model):
    optimizer = adamw(model, TrainArgs(adam_beta2=0.6, weight_decay=0.1))
    assert all(group["betas"] == (0.9, 0.6) for group in optimizer.param_groups)
    assert isinstance(adamw(model, TrainArgs(offload="optimizer")), HostAdamW)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters()
    }


def test_states_are_allocated_before_the_first_step_and_change_nothing(model):
    """An engine that starts later takes their memory into account; the updates equal those of
    lazily created states."""
    args = TrainArgs(lr=0.1, weight_decay=0.1)
    lazily = load_policy(tiny_model(), TrainArgs(dtype="float32"), CPU)
    ours, plain = adamw(model, args), adamw(lazily, args)
    names = {"step", "exp_avg", "exp_avg_sq"}
    assert all(ours.state[p].keys() == names for p in model.parameters())
    plain.state.clear()
    for _ in range(3):
        for p, q in zip(model.parameters(), lazily.parameters(), strict=True):
            p.grad = q.grad = torch.ones_like(p)
        ours.step()
        plain.step()
    for p, q in zip(model.parameters(), lazily.parameters(), strict=True):
        assert torch.equal(whole(p), whole(q))
        moments = (whole(o.state[x]["exp_avg"]) for o, x in ((ours, p), (plain, q)))
        assert ours.state[p]["step"] == 3 and torch.equal(*moments)


class Waits(TorchDispatchMode):
    """Counts reads of single numbers, each of which waits for a GPU, and blocking copies."""

    def __init__(self):
        super().__init__()
        self.reads = self.blocking = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        self.blocking += func is torch.ops.aten.copy_.default and args[2:] != (True,)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("dtype", "offload", "reads"), [
    ("float32", "none", 0), ("float32", "optimizer", 0), ("float16", "none", 1),
])  # fmt: skip
def test_waits_do_not_grow_with_the_number_of_parameters(dtype, offload, reads, device):
    """Loss and gradient norm are read together, by `tolist`, which is not counted here."""
    args = TrainArgs(dtype=dtype, offload=offload)
    model = load_policy(tiny_model(), args, device)
    optimizer = adamw(model, args)
    (mb,) = pack([Sample(ids=[5, 6, 7, 8], loss_mask=[True] * 4)], 10, device)
    with Waits() as forward:
        loss = -model(mb)[0].sum()
    loss.backward()
    with Waits() as step:
        optimizer_step(model, optimizer, 1e-3, 1.0, loss.detach())
    assert forward.reads == 0 and step.reads == reads
    if offload == "optimizer":
        assert step.blocking == 0
