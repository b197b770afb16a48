"""dpo.py as a whole: every objective gives one gradient, log-probs are those of plain transformers, exact resume."""

import json
import math
import random

import helpers
import pytest
import torch
from helpers import ROOT, assert_close_metrics, assert_same_weights, metrics, run

import dpo
from common.data import Encoder
from common.hub import load_tokenizer
from common.metrics import Meter
from common.models import load_policy
from common.preference_losses import LOSSES, OVER_BATCH
from common.rows import PAIR_COLUMNS
from common.tasks import arithmetic_rows
from common.tiny import tiny_model

# All of them at once: each is logged on its own, and the gradient is of the sum.
EVERY_OBJECTIVE = ("--loss", *LOSSES, "--label_smoothing", 0.1, "--f_divergence", "js", "--sft_weight", 0.5, "--wpo",
                   "--beta", 0.5)  # fmt: skip
STEPS = ("--max_steps", 6, "--batch_size", 8, "--lr", 1e-3, "--eval_every", 3, "--save_every", 3, "--eval_size", 7)
COMMON = ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "logps/rejected", "entropy", "num_tokens")
PAIRED = (*COMMON, "loss/sft", *(f"loss/{name}" for name in LOSSES), "wpo/weight", "rewards/accuracies")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs of very different lengths; every third rejected one is short."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("data") / "pairs.jsonl"

    def words(n):
        return " ".join(rng.choices(["apples", "7", "and", "pears", "sold", "12", "left"], k=n))

    rows = [dict(prompt=words(3), chosen=words(rng.randint(1, 30)), rejected=words(rng.randint(1, 30) if i % 3 else 1))
            for i in range(40)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def two_ranks(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run(2, "dpo.py", *STEPS, *EVERY_OBJECTIVE, "--dataset", data, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_every_objective_is_the_same_on_other_ranks_and_packing(two_ranks, data, tmp_path):
    flags = ("--dataset", data, "--pack_tokens", 1000, "--max_length", 400, "--output_dir", tmp_path)
    run(1, "dpo.py", *STEPS, *EVERY_OBJECTIVE, *flags)
    # At the first step nothing has been amplified by the optimizer: log-ratios are rounding, log-probs are not.
    assert_close_metrics(two_ranks, tmp_path, PAIRED, rel=1e-5, floor=0.1)
    evaluated = [(a, b) for a, b in zip(metrics(two_ranks), metrics(tmp_path), strict=True) if "eval_loss" in a]
    assert len(evaluated) == 2
    for a, b in evaluated:
        for name in ("loss", "loss/aot", "rewards/margins", "logps/chosen"):
            assert a[f"eval_{name}"] == pytest.approx(b[f"eval_{name}"], rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_the_first_sigmoid_loss_is_ln_2(two_ranks):
    assert metrics(two_ranks)[0]["loss/sigmoid"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.slow
def test_sorting_a_micro_batch_would_be_noticed(two_ranks, data, tmp_path):
    """The negative control: the optimal-transport losses over what one pack holds."""
    source = (ROOT / "dpo.py").read_text()
    line = "elif OVER_BATCH & set(args.loss):"
    assert source.count(line) == 1
    wrong = tmp_path / "dpo.py"
    wrong.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + source.replace(line, "elif False:"))
    run(2, wrong, *STEPS, *EVERY_OBJECTIVE, "--dataset", data, "--output_dir", tmp_path / "out")
    for name in (
        "loss/aot",
        "loss/aot_unpaired",
    ):  # at the first step all log-ratios are 0, whatever they are sorted by
        with pytest.raises(AssertionError, match=name):
            assert_close_metrics(two_ranks, tmp_path / "out", (name,), rel=1e-5, floor=0.1)


@pytest.mark.slow
def test_killed_and_resumed_is_bitwise_the_uninterrupted_run(two_ranks, data, tmp_path):
    flags = (*STEPS, *EVERY_OBJECTIVE, "--dataset", data, "--output_dir", tmp_path)
    helpers.run_and_kill(2, "dpo.py", *flags, folder=tmp_path, after_step=4, delay=0)
    assert not (tmp_path / "hf").exists(), "killed too late"
    assert "resuming from" in run(2, "dpo.py", *flags).stdout
    assert_same_weights(two_ranks, tmp_path)
    assert_close_metrics(two_ranks, tmp_path, PAIRED, rel=0)


@pytest.mark.slow
def test_kto_is_the_same_on_other_ranks_and_packing(data, tmp_path):
    flags = (*STEPS, "--loss", "kto", "--wpo", "--desirable_weight", 1.5, "--dataset", data)
    run(2, "dpo.py", *flags, "--output_dir", tmp_path / "two")
    run(1, "dpo.py", *flags, "--pack_tokens", 700, "--max_length", 300, "--output_dir", tmp_path / "one")
    names = (*COMMON[:3], "kl", "rewards/accuracies", "wpo/weight")
    assert_close_metrics(tmp_path / "two", tmp_path / "one", names, rel=1e-5, floor=0.1)
    assert metrics(tmp_path / "two")[-1]["kl"] > 0


# ---- in this process ----


def setup(data, device, **flags):
    args = dpo.Args(dataset=str(data), eval_every=0, **flags)
    tokenizer = load_tokenizer(tiny_model())
    rows = dpo.train_and_eval_rows(args)[0][:6]
    groups, _ = dpo.encode_rows(rows, PAIR_COLUMNS[0], Encoder(tokenizer, args), args)
    return args, groups, load_policy(tiny_model(), args, device)


def objective_of(model, reference, groups, args, device):
    meter = Meter()
    objective = dpo.Objective(model, reference, groups, args, device)
    loss = sum(objective(mb, meter) for mb in objective.micro_batches)
    return loss, meter.reduce()


def disturbed(model):
    """Another policy: a reference that differs."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    return model


def naive_logps(hf, sample, weights=None):
    """By plain transformers, one sequence at a time; and the mean of log p - log sum_v p(v)^2."""
    ids = torch.tensor([sample.ids])
    logp_TV = hf(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
    picked = logp_TV.gather(-1, ids[0, 1:, None])[:, 0]
    adjusted = picked - (2 * logp_TV).logsumexp(-1)
    mask = torch.tensor(sample.loss_mask[1:])
    weights = torch.ones(len(mask)) if weights is None else torch.tensor(weights[1:])
    return (picked * weights)[mask].sum().item(), adjusted[mask].mean().item()


def test_log_probs_are_those_of_plain_transformers(data, device):
    """Sums over completions, WPO's weights and LD-DPO's discount, from packs."""
    from transformers import AutoModelForCausalLM

    args, groups, model = setup(data, device, wpo=True, ld_alpha=0.3, pack_tokens=1200, max_length=500)
    hf = AutoModelForCausalLM.from_pretrained(tiny_model())
    _, got = objective_of(model, None, groups, args, device)
    expected = dict(chosen=[], rejected=[], weight=[])
    for pair in groups:
        shared = min(len(sample.completion_ids) for sample in pair)
        adjusted = 0.0
        for side, sample in zip(("chosen", "rejected"), pair, strict=True):
            beyond = sample.prompt_length + shared
            logp, mean = naive_logps(hf, sample, [1.0 if i < beyond else 0.3 for i in range(len(sample.ids))])
            expected[side].append(logp)
            adjusted += mean
        expected["weight"].append(min(1.0, math.exp(adjusted)))
    assert any(len(c.completion_ids) != len(r.completion_ids) for c, r in groups)
    for name, values in (("logps/chosen", expected["chosen"]), ("logps/rejected", expected["rejected"]),
                         ("wpo/weight", expected["weight"])):  # fmt: skip
        assert got[name] == pytest.approx(sum(values) / len(values), rel=1e-5)


def test_stored_and_online_references_agree(data, device, tmp_path):
    args, groups, model = setup(data, device, loss=("ipo", "aot"), output_dir=str(tmp_path))
    reference = disturbed(load_policy(tiny_model(), args, device, trainable=False))
    online, with_reference = objective_of(model, reference, groups, args, device)
    dpo.store_reference_logps(groups, tiny_model(), lambda: reference, args, device)
    stored, with_numbers = objective_of(model, None, groups, args, device)
    assert stored.item() == pytest.approx(online.item(), rel=1e-6)
    assert with_numbers == pytest.approx(with_reference, rel=1e-5) and with_numbers["rewards/margins"] != 0

    def never():
        raise AssertionError("the file of the first time was not used")

    before = [sample.ref_logp for pair in groups for sample in pair]
    dpo.store_reference_logps(groups, tiny_model(), never, args, device)
    assert [sample.ref_logp for pair in groups for sample in pair] == before
    groups[0][0].ids[-2] = 7  # other data: computed again
    with pytest.raises(AssertionError, match="was not used"):
        dpo.store_reference_logps(groups, tiny_model(), never, args, device)


def test_kto_baseline_and_loss_by_hand(data, device):
    from transformers import AutoModelForCausalLM

    args, groups, model = setup(data, device, loss=("kto",), beta=0.5, desirable_weight=2.0)
    reference = disturbed(load_policy(tiny_model(), args, device, trainable=False))
    hf = AutoModelForCausalLM.from_pretrained(tiny_model())
    ref_hf = disturbed(AutoModelForCausalLM.from_pretrained(tiny_model()))
    assert all(m.ids[: s.prompt_length] == s.ids[: s.prompt_length] for s, m in groups)
    assert len(groups) == 12 and [s.row["label"] for s, _ in groups] == [True] * 6 + [False] * 6
    ratio = {id(s): naive_logps(hf, s)[0] - naive_logps(ref_hf, s)[0] for group in groups for s in group}
    z0 = max(0.0, sum(ratio[id(mismatch)] for _, mismatch in groups) / 12)
    expected = 0.0
    for sample, mismatch in groups:
        sign = 1 if sample.row["label"] else -1
        expected += (2.0 if sign > 0 else 1.0) * (1 - 1 / (1 + math.exp(-sign * 0.5 * (ratio[id(sample)] - z0))))
        assert mismatch.ids[: sample.prompt_length] == sample.ids[: sample.prompt_length]
    loss, got = objective_of(model, reference, groups, args, device)
    assert got["kl"] == pytest.approx(z0, rel=1e-4, abs=1e-5)  # of float32 sums of some 10 nats
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_a_rank_without_pairs_has_a_loss_of_zero_and_a_gradient_of_zero(data, device):
    for losses in (("sigmoid",), ("kto",)):
        args, _, model = setup(data, device, loss=losses)
        loss, _ = objective_of(model, None, [], args, device)
        loss.backward()
        assert loss.item() == 0 and all(p.grad is None or not p.grad.full_tensor().any() for p in model.parameters())


def test_the_objectives_that_sort_are_known():
    assert OVER_BATCH == {name for name in LOSSES if name.startswith("aot")}


@pytest.mark.slow
def test_arithmetic_preferences_are_learned(tmp_path):
    """From the untrained model; from the demo's checkpoint it is more than 0.95 (docs/dpo.md)."""
    rows = [json.dumps(row) + "\n" for row in arithmetic_rows("train")[:4000]]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    flags = ("--max_steps", 70, "--batch_size", 64, "--lr", 2e-3, "--warmup_steps", 10, "--eval_every", 70, "--beta", 1,
             "--sft_weight", 1, "--dataset", tmp_path / "train.jsonl", "--eval_dataset", "arithmetic")  # fmt: skip
    run(2, "dpo.py", *flags, "--output_dir", tmp_path / "out")
    assert metrics(tmp_path / "out")[-1]["eval_rewards/accuracies"] > 0.7
