"""kto.py: the baseline and the loss by hand; pairs and labelled rows give the same run."""

import math
from array import array
from itertools import pairwise

import pytest
import torch
from helpers import metrics, read_rows, write_rows
from hypothesis import given
from hypothesis import strategies as st
from naive import naive_logps

import kto
from common.metrics.meter import Meter
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.packs.packing import pack
from common.packs.sample import Sample
from common.text.columns import KTO_COLUMNS, PAIR_COLUMNS
from common.text.encode import Encoder
from common.text.load import Samples, encode_all
from common.text.tokenizer import load_tokenizer


def encode(rows: list[dict], columns: tuple[str, ...] = PAIR_COLUMNS[0], **flags):
    args = kto.Args(**(dict(eval_every=0, max_length=2048) | flags))
    rows = [row | dict(_source=f"rows:{i}") for i, row in enumerate(rows)]
    encoder = Encoder(load_tokenizer(tiny_model()), args)
    found, _ = encode_all(kto.encode_row, rows, columns, encoder, args)
    return args, list(kto.with_mismatches(found, args))


def objective_of(model, groups, ref_logps_B2, args, device):
    """Return the loss of kto.py, summed over these completions, and its metrics."""
    meter = Meter()
    micro_batches, *compared = kto.pack_with_baseline(model, groups, ref_logps_B2, args, device)
    ref_logps_B = ref_logps_B2[:, 0]
    losses = [kto.forward(model, mb, ref_logps_B, *compared, args, meter) for mb in micro_batches]
    return sum(losses), meter.reduce()


def test_conversations_and_labels_of_tables_are_read():
    """The last turn is the completion. pandas and parquet write labels as 1.0 and 0.0."""
    turns = [dict(role="user", content="1+1="), dict(role="assistant", content="2")]
    turns += [dict(role="user", content="2+1="), dict(role="assistant", content="3")]
    for name in ("messages", "conversations"):
        rows = [{name: turns, "label": 0.0}, {name: turns[:2], "label": 1.0}]
        _, found = encode(rows, (name, "label"), prompt_format="chat", loss="apo_zero_unpaired")
        split = [
            dict(prompt=turns[:3], completion=turns[3:], label=False),
            dict(prompt=turns[:1], completion=turns[1:2], label=True),
        ]
        _, expected = encode(split, KTO_COLUMNS[0], prompt_format="chat", loss="apo_zero_unpaired")
        for [ours], [theirs] in zip(found, expected, strict=True):
            assert (ours.ids, ours.loss_mask) == (theirs.ids, theirs.loss_mask)
            assert ours.row["label"] is theirs.row["label"]
    for messages in ([], turns[:3], "1+1"):
        with pytest.raises(ValueError, match="rows:0: column messages must end with a turn of the"):
            encode([dict(messages=messages, label=True)], ("messages", "label"))


def disturbed(model):
    """Perturb a policy: the reference must differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    return model


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_baseline_and_loss_equal_a_calculation_by_hand(name, pairs, device):
    """APO has the baseline 0 and no mismatches."""
    from transformers import AutoModelForCausalLM

    rows = read_rows(pairs)[:6]
    args, groups = encode(rows, loss=name, beta=0.5, desirable_weight=2.0)
    model = load_policy(tiny_model(), args, device)
    hf = AutoModelForCausalLM.from_pretrained(tiny_model())
    ref_hf = disturbed(AutoModelForCausalLM.from_pretrained(tiny_model()))
    for sample, *others in groups:
        assert len(others) == (name == "kto")
        prompt = slice(sample.prompt_length)
        assert all(m.ids[prompt] == sample.ids[prompt] for m in others)
    assert len(groups) == 12 and [s.row["label"] for s, *_ in groups] == [True] * 6 + [False] * 6
    ratio = {id(s): naive_logps(hf, s) - naive_logps(ref_hf, s) for group in groups for s in group}
    ref_logps_B2 = torch.tensor([[naive_logps(ref_hf, s) for s in group] for group in groups])
    z0 = max(0.0, sum(ratio[id(mismatch)] for _, *others in groups for mismatch in others) / 12)
    expected = right = 0.0
    for sample, *_ in groups:
        sign = 1 if sample.row["label"] else -1
        is_right = 1 / (1 + math.exp(-sign * 0.5 * (ratio[id(sample)] - z0)))
        expected += (2.0 if sign > 0 else 1.0) * (1 - is_right)
        right += (ratio[id(sample)] > z0) == sample.row["label"]
    loss, got = objective_of(model, groups, ref_logps_B2, args, device)
    assert ("kl" in got) == (name == "kto")
    # float32 sums of about 10 nats
    assert got.get("kl", 0.0) == pytest.approx(z0, rel=1e-4, abs=1e-5)
    assert (loss.item(), got["loss"]) == pytest.approx((expected, expected / 12), rel=1e-5)
    assert got["rewards/accuracies"] == pytest.approx(right / 12)
    chosen = sum(ratio[id(s)] for s, *_ in groups[:6]) / 6
    assert got["rewards/chosen"] == pytest.approx(0.5 * chosen, rel=1e-4, abs=1e-5)


def test_rank_without_completions_has_zero_loss_and_gradient(device):
    """It still takes part in the baseline, which comes from the completions of other ranks."""
    args, groups = encode(
        [dict(prompt="1", chosen="2", rejected="3"), dict(prompt="2", chosen="3", rejected="4")]
    )
    model = load_policy(tiny_model(), args, device)
    (mb,) = pack([], args.pack_tokens, device)
    nothing = torch.zeros(0)
    loss = kto.forward(model, mb, nothing, nothing, torch.tensor(0.5), args, Meter())
    loss.backward()
    gradients = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    assert loss.item() == 0 and not any(gradient.any() for gradient in gradients)


def test_pair_becomes_a_desirable_and_an_undesirable_row():
    rows = [dict(prompt=f"{n}+1=", chosen=f"{n + 1}", rejected="0") for n in range(4)]
    labelled = [dict(prompt=f"{n}+1=", completion=f"{n + 1}", label=True) for n in range(4)]
    labelled += [dict(prompt=f"{n}+1=", completion="0", label=False) for n in range(4)]
    (_, one), (_, other) = encode(rows), encode(labelled, KTO_COLUMNS[0])

    def seen(groups):
        return [(s.ids, s.loss_mask, s.row["label"], m.ids, m.loss_mask) for s, m in groups]

    assert seen(one) == seen(other) and len(one) == 8


def test_mismatch_is_the_completion_of_the_next_row_with_another_prompt():
    prompts = ("1+1=", "1+1=", "2+1=", "3+1=")
    rows = [dict(prompt=p, completion=f"<{i}>", label=i % 2 == 0) for i, p in enumerate(prompts)]
    _, groups = encode(rows, KTO_COLUMNS[0])
    tokenizer = load_tokenizer(tiny_model())
    told = [tokenizer.decode(mismatch.ids, skip_special_tokens=True) for _, mismatch in groups]
    # the mismatch of the last row is that of the first
    assert told == ["1+1=<2>", "1+1=<2>", "2+1=<3>", "3+1=<0>"]
    for sample, mismatch in groups:
        assert [*mismatch.loss_mask] == [
            i >= sample.prompt_length for i in range(len(mismatch.ids))
        ]
    _, short = encode(rows, KTO_COLUMNS[0], max_length=6, overlong="truncate")
    assert all(len(sample.ids) <= 6 for group in short for sample in group)


def naive_mismatches(prompts: list[str]) -> list[int]:
    count = len(prompts)
    return [
        next(j % count for j in range(i + 1, i + count) if prompts[j % count] != prompts[i])
        for i in range(count)
    ]


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=8).filter(lambda x: len({*x}) > 1))
def test_next_differing_prompt_equals_a_search(prompts):
    differs = [x != y for x, y in pairwise([*prompts, prompts[0]])]
    assert kto.next_differing(differs) == naive_mismatches(prompts)


def test_each_completion_is_read_a_few_times_whatever_the_order():
    """Rows are sorted by prompt: searching another prompt from each would read 40,000 rows."""
    rows = [dict(prompt=f"{i // 200}+1=", completion=str(i), label=i % 2 == 0) for i in range(400)]
    args, _ = encode(rows[:201], KTO_COLUMNS[0])
    samples = [
        Sample(array("i", [i // 200, 9]), bytes([0, 1]), 1, row) for i, row in enumerate(rows)
    ]
    reads = []
    made = Samples(rows, lambda i: reads.append(i) or [samples[i]])
    assert len(list(kto.with_mismatches(made, args))) == 400 and len(reads) < 2000


def test_held_out_rows_of_one_prompt_take_completions_of_training_rows():
    rows = [
        dict(prompt=f"{p}+1=", completion=f"<{p}{i}>", label=i == 0) for p in (1, 2) for i in (0, 1)
    ]
    args, _ = encode(rows, KTO_COLUMNS[0])
    encoder = Encoder(load_tokenizer(tiny_model()), args)
    rows = [row | dict(_source=f"rows:{i}") for i, row in enumerate(rows)]
    train, held_out = (
        encode_all(kto.encode_row, part, KTO_COLUMNS[0], encoder, args)[0]
        for part in (rows, rows[:2])
    )
    groups = kto.with_mismatches(held_out, args, others=train)
    told = [encoder.tokenizer.decode(m.ids, skip_special_tokens=True) for _, m in groups]
    assert told == ["1+1=<20>"] * 2


def test_run_with_few_rows_and_one_held_out_prompt(main, tmp_path):
    """Ten rows leave one held-out row. Two held-out answers to one prompt have no other prompt
    beside them from which to take a mismatch."""
    rows = [dict(prompt=f"{n}+1=", completion=str(n), label=n % 2 == 0) for n in range(10)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    held_out = [dict(prompt="7+7=", completion=str(n), label=n == 14) for n in (14, 15)]
    one = write_rows(tmp_path / "one.jsonl", held_out)
    flags = ("--max_steps", 1, "--batch_size", 2, "--save_every", 99)
    for name, more in (("few", ()), ("one", ("--eval_dataset", one))):
        main("kto", "--dataset", data, *flags, *more, "--output_dir", tmp_path / name)
        assert math.isfinite(metrics(tmp_path / name)[-1]["eval_loss"])


def test_value_and_gradient_equal_a_calculation_by_hand():
    """Some cases are extreme: the sigmoid is flat there."""
    args = kto.Args(beta=0.3, desirable_weight=2.0, undesirable_weight=0.5)
    for baseline in (0.0, 1.5):
        for log_ratio in (-1e4, -20.0, -1.0, 0.0, 2.0, 30.0, 1e4):
            for desirable in (True, False):
                x = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
                loss_N = kto.loss(
                    x, torch.tensor([desirable]), torch.tensor(baseline, dtype=torch.float64), args
                )
                loss_N.sum().backward()
                sign, weight = (1, 2.0) if desirable else (-1, 0.5)
                z = max(-700.0, min(700.0, sign * 0.3 * (log_ratio - baseline)))
                wrong = 1 / (1 + math.exp(z))  # 1 - sigmoid(z)
                assert loss_N.item() == pytest.approx(weight * wrong, rel=1e-9, abs=1e-300)
                slope = -weight * sign * 0.3 * wrong * (1 - wrong)
                assert x.grad.item() == pytest.approx(slope, rel=1e-9, abs=1e-300)
