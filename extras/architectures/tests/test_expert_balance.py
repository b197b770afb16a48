"""The balance of experts: its value, and its gradient on any number of packs and ranks."""

from dataclasses import replace

import pytest
import torch
from helpers import ROOT, metrics, run
from model.test_moe import gradient_is_transformers, whole

from bench.models import ARGS, checkpoint, rows
from common.data.packing import pack, pack_groups
from common.data.sample import Sample
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from extras.architectures.expert_balance import expert_balance

# Program of a rank. The last of three ranks has no samples.
RANK = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from model.test_moe import *
from common.parallel import distributed
device, rank, world_size = distributed.setup(0)
policy = load_policy(sys.argv[1], replace(ARGS, share_prefix=0), device)
policy.watch_experts("")
mine = rows()[rank::2] if rank < 2 else []
assert gradient_is_transformers(policy, mine, sys.argv[1], 100, device, world_size, coefficient=10)
distributed.cleanup()
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return checkpoint("mixtral", tmp_path_factory.mktemp("mixtral"))


def test_a_run_logs_the_balance(path, main, sums, tmp_path):
    flags = ("--model", path, "--router_aux_loss_coef", 0.5, "--max_steps", 2, "--batch_size", 4,
             "--eval_every", 0, "--dataset", sums, "--output_dir", tmp_path)  # fmt: skip
    main("sft", *flags)
    assert all(1 < line["expert_balance"] < 2 for line in metrics(tmp_path))


@pytest.mark.parametrize(("pack_tokens", "recompute"), [(63, False), (1000, True)])
def test_gradient_does_not_depend_on_packing(pack_tokens, recompute, path, device):
    """With and without recomputation, it equals that of transformers' router logits."""
    args = replace(ARGS, activation_checkpointing=recompute, share_prefix=0)
    policy = load_policy(path, args, device)
    policy.watch_experts("")
    assert gradient_is_transformers(policy, rows(), path, pack_tokens, device, coefficient=10)


@pytest.mark.slow
def test_gradient_does_not_depend_on_ranks(path, tmp_path):
    (tmp_path / "rank.py").write_text(RANK.format(root=str(ROOT)))
    run(3, tmp_path / "rank.py", path)


def test_balance_loss_equals_its_bounds():
    """The loss is 1 if the tokens of a sequence are spread evenly, E / k if all choose the same
    expert with certainty; sequences do not compensate each other. The gradient reduces the logit of
    the most frequent expert."""
    even, sure = torch.eye(4) * 50, torch.tensor([[50.0, 0, 0, 0]] * 4)
    logits_TE = torch.cat([even, sure]).requires_grad_()
    lengths_N = torch.tensor([4, 4])
    torch.testing.assert_close(expert_balance((logits_TE,), lengths_N, 1), torch.tensor([1.0, 4.0]))
    logits_TE = torch.tensor([[1.0, 0, 0, 0]] * 3).requires_grad_()
    expert_balance((logits_TE,), torch.tensor([3]), 1).sum().backward()
    assert (logits_TE.grad[:, 0] > 0).all() and (logits_TE.grad[:, 1:] < 0).all()


def test_balancing_is_refused_without_experts_or_with_shared_prefixes(path, device):
    with pytest.raises(ValueError, match="--router_aux_loss_coef: qwen3 is no mixture of experts"):
        load_policy(tiny_model(), ARGS, device).watch_experts("--router_aux_loss_coef")
    policy = load_policy(path, ARGS, device)
    policy.watch_experts("--router_aux_loss_coef")
    (mb,) = pack_groups([[Sample([5, 6, 7, 8], [True] * 4)] * 2], 100, device, share_prefix=1)
    with pytest.raises(ValueError, match="counts how every token is routed; needs --share_prefix"):
        policy(mb)


def test_empty_pack_has_zero_gradient(path, device):
    policy = load_policy(path, replace(ARGS, share_prefix=0), device)
    policy.watch_experts("")
    (mb,) = pack([], 100, device)
    ((policy(mb)[0] * mb.loss_mask_T).sum() + policy.expert_balance_N.sum()).backward()
    assert all((whole(parameter.grad) == 0).all() for parameter in policy.parameters())
