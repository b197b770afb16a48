"""dpo.py: its log-probs are those of plain transformers, the reference's are stored; its loss."""

import math
from dataclasses import replace

import pytest
import torch
from naive import naive_logps

import dpo
import online_dpo
from common.metrics.meter import Meter
from common.model.policy import load_policy
from common.model.scoring import reference_logps
from common.model.tiny import tiny_model
from common.objectives.preference import Pairs
from common.packs.packing import pack_groups
from common.text.columns import PAIR_COLUMNS
from common.text.encode import Encoder
from common.text.load import encode_all
from common.text.rows import train_and_eval_rows
from common.text.tokenizer import load_tokenizer


def setup(pairs, device, **flags):
    args = dpo.Args(dataset=str(pairs), **(dict(eval_every=0, max_length=2048) | flags))
    tokenizer = load_tokenizer(tiny_model())
    rows = train_and_eval_rows(args)[0][:6]
    encoder = Encoder(tokenizer, args)
    groups, _ = encode_all(dpo.encode_row, rows, PAIR_COLUMNS[0], encoder, args)
    return args, list(groups), load_policy(tiny_model(), args, device)


def objective_of(model, groups, args, device, ref_logps_B2=None):
    """Return the loss of dpo.py, a sum over these pairs, and its metrics."""
    meter, micro_batches = Meter(), pack_groups(groups, args.pack_tokens, device)
    if ref_logps_B2 is None:
        ref_logps_B2 = torch.zeros(len(groups), 2)
    losses = [dpo.forward(model, mb, ref_logps_B2, args, meter) for mb in micro_batches]
    return sum(losses), meter.reduce()


def test_logprobs_equal_those_of_plain_transformers(pairs, device):
    """Policy and reference compute sums over completions from packs."""
    from transformers import AutoModelForCausalLM

    args, groups, model = setup(pairs, device, pack_tokens=1200, max_length=500)
    hf = AutoModelForCausalLM.from_pretrained(tiny_model())
    _, got = objective_of(model, groups, args, device)
    for n, name in enumerate(("chosen", "rejected")):
        expected = sum(naive_logps(hf, pair[n]) for pair in groups) / len(groups)
        assert got[f"logps/{name}"] == pytest.approx(expected, rel=1e-5)
    (stored,) = reference_logps(model, [groups], load_tokenizer(tiny_model()), args, device)
    expected = torch.tensor([[naive_logps(hf, sample) for sample in pair] for pair in groups])
    torch.testing.assert_close(stored, expected.double(), rtol=1e-5, atol=1e-5)


def test_sft_weight_adds_the_nll_per_token_of_the_chosen(pairs, device):
    from transformers import AutoModelForCausalLM

    args, groups, model = setup(pairs, device, sft_weight=0.5)
    hf = AutoModelForCausalLM.from_pretrained(tiny_model())
    nll = sum(-naive_logps(hf, chosen) / sum(chosen.loss_mask) for chosen, _ in groups)
    plain, _ = objective_of(model, groups, replace(args, sft_weight=0.0), device)
    loss, got = objective_of(model, groups, args, device)
    assert (loss - plain).item() == pytest.approx(0.5 * nll, rel=1e-5)
    assert got["loss/sft"] == pytest.approx(nll / len(groups), rel=1e-5)


def test_rank_without_pairs_has_zero_loss_and_gradient(pairs, device):
    args, _, model = setup(pairs, device, loss=("sigmoid", "ipo"))
    loss, _ = objective_of(model, [], args, device)
    loss.backward()
    gradients = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    assert loss.item() == 0 and not any(gradient.any() for gradient in gradients)


def pairs_of(*columns) -> Pairs:
    return Pairs(*(torch.tensor(column, dtype=torch.float64) for column in columns))


@pytest.mark.parametrize("flags", [{}, dict(label_smoothing=0.1), dict(f_divergence="js")])
def test_stated_loss_equals_that_of_online_dpo(flags):
    """The loss is ln 2 while the policy equals the reference."""
    args = dpo.Args(beta=0.3, **flags)
    logps = [-3.0, -5, -1], [-4.0, -2, -1], [-3.5, -4, -1], [-3.0, -3, -1]
    pairs = pairs_of(*logps, [3.0, 4, 1], [5.0, 2, 1])
    loss_W, parts = dpo.loss(pairs, args)
    assert torch.equal(loss_W, online_dpo.loss(pairs, online_dpo.Args(beta=0.3, **flags)))
    assert loss_W[2].item() == math.log(2)
    assert list(parts) == ["sigmoid"]


def test_objectives_are_summed_with_their_weights():
    pairs = pairs_of([-3.0, -5], [-4.0, -2], [-3.5, -4], [-3.0, -3], [3.0, 4], [5.0, 2])
    args = dpo.Args(loss=("sigmoid", "ipo", "cpo"), loss_weights=(0.5, 2.0, 0.0))
    loss_W, parts = dpo.loss(pairs, args)
    expected_W = 0.5 * parts["sigmoid"] + 2 * parts["ipo"]
    torch.testing.assert_close(loss_W, expected_W, rtol=1e-12, atol=0)
    for name in parts:
        assert torch.equal(parts[name], dpo.loss(pairs, dpo.Args(loss=(name,)))[0])
