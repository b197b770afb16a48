"""dpo.py: log-probs are those of plain transformers; stored and online references; the stated loss."""

import json
import math
import random

import pytest
import torch
from helpers import assert_close_metrics, metrics

import dpo
from common.data.encode import Encoder
from common.data.packing import pack_groups
from common.data.rows import PAIR_COLUMNS, train_and_eval_rows
from common.data.tasks import arithmetic_rows
from common.metrics.meter import Meter
from common.model.hub import load_tokenizer
from common.model.policy import load_policy, move_towards
from common.model.reference import reference_logps, store_reference_logps
from common.model.tiny import tiny_model
from common.objectives.preference import OVER_BATCH, READS, Pairs, preference_loss


# All objectives at once: each is logged separately, and the gradient is that of the sum. The
# reference has other weights: equal log-ratios would be sorted by rounding errors.
@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs of very different lengths; every third rejected one is short."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("data") / "pairs.jsonl"

    def words(n):
        return " ".join(rng.choices(["apples", "7", "and", "pears", "sold", "12", "left"], k=n))

    rows = [
        dict(
            prompt=words(3),
            chosen=words(rng.randint(1, 30)),
            rejected=words(rng.randint(1, 30) if i % 3 else 1),
        )
        for i in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_reference_that_copies_the_policy_gives_the_first_loss(data, device):
    """With --reference_sync 1 and a rate of 1, each step has the log-ratios of the first one."""
    args, pairs, model = setup(data, device)
    reference = load_policy(tiny_model(), args, device, trainable=False)
    disturbed(model)
    before, _ = objective_of(model, reference, pairs, args, device)
    model.reshard()
    move_towards(reference, model, 1.0)
    after, metrics = objective_of(model, reference, pairs, args, device)
    assert after.item() == pytest.approx(len(pairs) * math.log(2), rel=1e-6) != before.item()
    assert metrics["rewards/margins"] == 0


# ---- in this process ----


def setup(data, device, **flags):
    args = dpo.Args(dataset=str(data), **(dict(eval_every=0, max_length=2048) | flags))
    tokenizer = load_tokenizer(tiny_model())
    rows = train_and_eval_rows(args)[0][:6]
    groups, _ = dpo.encode_rows(rows, PAIR_COLUMNS[0], Encoder(tokenizer, args), args)
    return args, groups, load_policy(tiny_model(), args, device)


def objective_of(model, reference, pairs, args, device, stored=None):
    """Return the loss of dpo.py, a sum over these pairs, and its metrics."""
    meter, micro_batches = Meter(), pack_groups(pairs, args.pack_tokens, device)
    stored = torch.zeros(len(pairs), 2) if stored is None else stored
    logps = reference_logps(reference, micro_batches, stored)
    others, places = dpo.gather_pairs(model, micro_batches, logps, args)
    packs = zip(micro_batches, places, strict=True)
    return sum(
        dpo.forward(model, mb, logps, others, own, args, meter) for mb, own in packs
    ), meter.reduce()


def disturbed(model):
    """Perturb a policy: the reference must differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    return model


def naive_logps(hf, sample, weights=None):
    """Compute log-probs by plain transformers, one sequence at a time, and the mean of log p - log
    sum_v p(v)^2."""
    ids = torch.tensor([sample.ids])
    logp_TV = hf(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
    picked = logp_TV.gather(-1, ids[0, 1:, None])[:, 0]
    adjusted = picked - (2 * logp_TV).logsumexp(-1)
    mask = torch.tensor(sample.loss_mask[1:])
    weights = torch.ones(len(mask)) if weights is None else torch.tensor(weights[1:])
    return (picked * weights)[mask].sum().item(), adjusted[mask].mean().item()


def test_logprobs_equal_those_of_plain_transformers(data, device):
    """Sums over completions, WPO's weights and LD-DPO's discount are computed from packs."""
    from transformers import AutoModelForCausalLM

    args, groups, model = setup(
        data, device, wpo=True, ld_alpha=0.3, pack_tokens=1200, max_length=500
    )
    hf = AutoModelForCausalLM.from_pretrained(tiny_model())
    _, got = objective_of(model, None, groups, args, device)
    expected = dict(chosen=[], rejected=[], weight=[])
    for pair in groups:
        shared = min(len(sample.completion_ids) for sample in pair)
        adjusted = 0.0
        for side, sample in zip(("chosen", "rejected"), pair, strict=True):
            beyond = sample.prompt_length + shared
            logp, mean = naive_logps(
                hf, sample, [1.0 if i < beyond else 0.3 for i in range(len(sample.ids))]
            )
            expected[side].append(logp)
            adjusted += mean
        expected["weight"].append(min(1.0, math.exp(adjusted)))
    assert any(len(c.completion_ids) != len(r.completion_ids) for c, r in groups)
    for name, values in (
        ("logps/chosen", expected["chosen"]),
        ("logps/rejected", expected["rejected"]),
        ("wpo/weight", expected["weight"]),
    ):
        assert got[name] == pytest.approx(sum(values) / len(values), rel=1e-5)


def test_stored_and_online_references_agree(data, device, tmp_path):
    args, pairs, model = setup(data, device, loss=("ipo", "aot", "aot_unpaired"))
    reference = disturbed(load_policy(tiny_model(), args, device, trainable=False))
    online, with_reference = objective_of(model, reference, pairs, args, device)
    (logps,) = store_reference_logps(
        [pairs], tiny_model(), lambda: reference, tmp_path, args, device
    )
    stored, with_numbers = objective_of(model, None, pairs, args, device, logps)
    assert stored.item() == pytest.approx(online.item(), rel=1e-6)
    assert (
        with_numbers == pytest.approx(with_reference, rel=1e-5)
        and with_numbers["rewards/margins"] != 0
    )


@pytest.mark.slow
def test_online_reference_gives_the_run_of_a_stored_one(data, tmp_path, main):
    flags = (
        "--max_steps",
        2,
        "--batch_size",
        8,
        "--lr",
        1e-3,
        "--eval_every",
        0,
        "--dataset",
        data,
        "--beta",
        0.5,
    )
    main("dpo", *flags, "--output_dir", tmp_path / "stored")
    main("dpo", *flags, "--output_dir", tmp_path / "online", "--reference_logprobs", "online")
    assert not (tmp_path / "online" / "reference_logps.json").exists()
    assert_close_metrics(
        tmp_path / "stored", tmp_path / "online", ("loss", "rewards/chosen"), rel=1e-5, floor=0.1
    )


def test_rank_without_pairs_has_zero_loss_and_gradient(data, device):
    args, _, model = setup(data, device, loss=("sigmoid", "aot"))
    loss, _ = objective_of(model, None, [], args, device)
    loss.backward()
    assert loss.item() == 0 and all(
        p.grad is None or not p.grad.full_tensor().any() for p in model.parameters()
    )


@pytest.mark.parametrize("losses", [("sigmoid",), ("aot", "aot_unpaired", "ipo")])
def test_gradient_does_not_depend_on_packing(losses, data, device):
    """Objectives that sort are included: their gradient is that of all pairs sorted together."""
    gradients = []
    for pack_tokens in (4000, 700):
        args, pairs, model = setup(
            data, device, loss=losses, pack_tokens=pack_tokens, max_length=300
        )
        reference = disturbed(load_policy(tiny_model(), args, device, trainable=False))
        objective_of(model, reference, pairs, args, device)[0].backward()
        micro_batches = pack_groups(pairs, args.pack_tokens, device)
        gradients.append(
            (
                len(micro_batches),
                torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]),
            )
        )
    (one, whole), (several, parts) = gradients
    assert one == 1 < several
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-4 * whole.abs().max().item())


def pairs_of(*columns) -> Pairs:
    return Pairs(*(torch.tensor(column, dtype=torch.float64) for column in columns))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_stated_loss_equals_the_sigmoid_objective_of_the_table(smoothing):
    """The loss is ln 2 if the policy equals the reference."""
    args = dpo.Args(beta=0.3, label_smoothing=smoothing)
    pairs = pairs_of(
        [-3.0, -5, -1],
        [-4.0, -2, -1],
        [-3.5, -4, -1],
        [-3.0, -3, -1],
        [3.0, 4, 1],
        [5.0, 2, 1],
        [1.0] * 3,
    )
    flags = dict(
        length_normalize=True, f_alpha=0.5, simpo_gamma=0.5, alphapo_alpha=0.25, discopop_tau=0.05
    )
    table_N = preference_loss(
        "sigmoid", pairs, beta=0.3, label_smoothing=smoothing, f_divergence="reverse_kl", **flags
    )
    loss_N, parts = dpo.loss(pairs, args)
    assert (
        torch.equal(loss_N, table_N)
        and list(parts) == ["sigmoid"]
        and loss_N[2].item() == math.log(2)
    )


def test_objectives_are_summed_with_loss_and_pair_weights():
    rows = [-3.0, -5], [-4.0, -2], [-3.5, -4], [-3.0, -3], [3.0, 4], [5.0, 2]
    args = dpo.Args(loss=("sigmoid", "ipo", "cpo"), loss_weights=(0.5, 2.0, 0.0))
    loss_N, parts = dpo.loss(pairs_of(*rows, [1.0, 0.25]), args)
    expected_N = torch.tensor([1.0, 0.25]) * (0.5 * parts["sigmoid"] + 2 * parts["ipo"])
    torch.testing.assert_close(loss_N, expected_N, rtol=1e-12, atol=0)
    for name in parts:
        assert torch.equal(
            parts[name], dpo.loss(pairs_of(*rows, [1.0, 1.0]), dpo.Args(loss=(name,)))[0]
        )


def test_objectives_over_the_batch_are_the_aot_ones():
    assert OVER_BATCH == {name for name in READS if name.startswith("aot")}


@pytest.mark.slow
def test_model_learns_arithmetic_preferences(small, tmp_path, main):
    """Training starts from the untrained model; from the demo's checkpoint the accuracy is more
    than 0.95 (docs/dpo.md)."""
    rows = [json.dumps(row) + "\n" for row in arithmetic_rows("train")[:3840]]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    flags = (
        *small, "--max_steps", 60, "--batch_size", 64, "--lr", 3e-3, "--warmup_steps", 10,
        "--eval_every", 60, "--beta", 1, "--sft_weight", 1, "--dataset", tmp_path / "train.jsonl",
        "--eval_dataset", "arithmetic", f"known={tmp_path}/train.jsonl",
    )  # fmt: skip
    main("dpo", *flags, "--output_dir", tmp_path / "out")
    last = metrics(tmp_path / "out")[-1]
    assert (
        last["eval_rewards/accuracies/arithmetic"] > 0.7
        and last["eval_rewards/accuracies/known"] > 0.7
    )
