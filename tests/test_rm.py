"""rm.py: transformers scores its export equally, and relabelling of pairs."""

import math

import pyarrow
import pyarrow.parquet
import pytest
import torch
from helpers import read_rows
from processes import run

import rm
from common.config.groups import TrainArgs
from common.metrics.meter import Meter
from common.model.policy import load_scalar_model
from common.model.scoring import score
from common.model.tiny import tiny_model
from common.packs.packing import pack, pack_groups
from common.packs.sample import at_end
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import export_hf


@pytest.fixture(scope="module")
def trained(small, pairs, main, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    flags = (*small[:2], "--max_steps", 2, "--batch_size", 8, "--lr", 1e-4, "--eval_every", 0)
    main("rm", *flags, "--dataset", pairs, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_transformers_gives_the_export_equal_scores(trained, device):
    """Scores are equal one sequence at a time, in a padded batch, and if rm.py loads the export."""
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(str(trained / "hf"))
    hf = AutoModelForSequenceClassification.from_pretrained(trained / "hf")
    assert hf.config.num_labels == 1
    assert hf.config.architectures == ["Qwen3ForSequenceClassification"]
    texts = ["1+1=2", "a longer text, which is not of the same length", "x"]
    sequences = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    model = load_scalar_model(str(trained / "hf"), TrainArgs(), device, trainable=False)
    ours = score(model, [sequences], 100)
    assert len(set(ours)) == 3
    padded = tokenizer.pad(dict(input_ids=sequences), return_tensors="pt")
    with torch.no_grad():
        alone = [hf(input_ids=torch.tensor([ids])).logits.item() for ids in sequences]
        together = hf(**padded).logits[:, 0].tolist()
    assert ours == pytest.approx(alone, abs=1e-4) and ours == pytest.approx(together, abs=1e-4)


@pytest.mark.slow
def test_relabelling_swaps_the_pairs_that_the_model_ranks_otherwise(
    trained, pairs, main, tmp_path, capsys
):
    """Two ranks relabel the pairs. On one rank, the model then agrees with every pair."""
    flags = ("--model", trained / "hf", "--output_dir")
    first = run(2, "tools/relabel.py", *flags, tmp_path, "--dataset", pairs).stdout
    out = tmp_path / "relabelled.jsonl"
    before, after = read_rows(pairs), read_rows(out)
    wrong = 0
    for old, new in zip(before, after, strict=True):
        swapped = dict(old, chosen=old["rejected"], rejected=old["chosen"], margin=0)
        assert new in (old, swapped)
        wrong += new == swapped
    assert 0 < wrong < 40 and f"agrees with {1 - wrong / 40:.3f} (" in first
    main("tools.relabel", *flags, tmp_path / "again", "--dataset", out)
    assert "agrees with 1.000 (" in capsys.readouterr().out
    with pytest.raises(ValueError, match="it has a relabelled.jsonl; name another one"):
        main("tools.relabel", *flags, tmp_path, "--dataset", pairs)


def test_a_language_model_relabels_nothing(small, pairs, main, tmp_path):
    flags = (*small[:2], "--dataset", pairs, "--output_dir")
    with pytest.raises(ValueError, match="a language model without a reward head"):
        main("tools.relabel", *flags, tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="^--output_dir .*/file/x: Not a directory; name another"):
        main("tools.relabel", *flags, tmp_path / "file" / "x")


def test_rows_that_are_no_json_are_not_relabelled(trained, main, tmp_path):
    """They are refused before anything is scored, and nothing is written."""
    row = dict(prompt="1+1=", chosen="2", rejected="3", day=b"\x00")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "days.parquet")
    flags = ("--model", trained / "hf", "--dataset", tmp_path / "days.parquet")
    with pytest.raises(ValueError, match="its rows cannot be written as JSON: .*bytes"):
        main("tools.relabel", *flags, "--output_dir", tmp_path / "out")
    assert not [*(tmp_path / "out").iterdir()]


def test_bradley_terry_loss_equals_a_calculation_by_hand():
    """The gradient is compared to central differences."""

    def loss(rc, rr, margin, c):
        return math.log1p(math.exp(-(rc - rr - margin))) + c * (rc + rr) ** 2

    generator = torch.Generator().manual_seed(0)
    rc, rr, margin = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    rc.requires_grad_(), rr.requires_grad_()
    got = rm.loss(rc, rr, margin, 0.3)
    got.sum().backward()
    for i in range(5):
        x = rc[i].item(), rr[i].item(), margin[i].item(), 0.3
        h = 1e-6
        assert got[i].item() == pytest.approx(loss(*x), rel=1e-12)
        slope = (loss(x[0] + h, *x[1:]) - loss(x[0] - h, *x[1:])) / (2 * h)
        assert rc.grad[i].item() == pytest.approx(slope, rel=1e-6)
        slope = (loss(x[0], x[1] + h, *x[2:]) - loss(x[0], x[1] - h, *x[2:])) / (2 * h)
        assert rr.grad[i].item() == pytest.approx(slope, rel=1e-6)
    extreme = rm.loss(torch.tensor([1e4, -1e4]), torch.tensor([-1e4, 1e4]))
    assert extreme.tolist() == [0.0, 2e4]


def test_loss_of_packs_has_the_margin_of_each_pair_and_the_centring(device):
    args = rm.Args(center_coefficient=0.3)
    model = load_scalar_model(tiny_model(), args, device)
    texts = [([5, 6, 7], [5, 9]), ([8, 4, 4, 4], [8, 5, 6]), ([3, 7], [3, 8, 9, 6])]
    pairs = [
        [at_end(ids, dict(margin=margin)) for ids in pair]
        for pair, margin in zip(texts, (0.5, -1.0, 2.0), strict=True)
    ]
    expected = 0.0
    for (chosen, rejected), margin in zip(texts, (0.5, -1.0, 2.0), strict=True):
        rc, rr = score(model, [[chosen, rejected]], 100)
        expected += math.log1p(math.exp(margin - rc + rr)) + 0.3 * (rc + rr) ** 2
    margins_B2, meter = rm.gather_margins(pairs), Meter()
    packs = pack_groups(pairs, 9, device)
    loss = sum(rm.forward(model, mb, margins_B2, args, meter) for mb in packs)
    assert len(packs) > 1 and loss.item() == pytest.approx(expected, rel=1e-5)


def test_score_depends_on_its_whole_sequence_only(device):
    model = load_scalar_model(tiny_model(), TrainArgs(), device)
    sequences = [[5, 6, 7], [8], [5, 6, 9, 10, 11]]
    together = score(model, [sequences], 100)
    apart = [score(model, [[s]], 100)[0] for s in sequences]
    assert together == pytest.approx(apart, abs=1e-5) and len(set(together)) == 3
    other_end = score(model, [[[5, 6, 8]]], 100)
    assert other_end[0] != pytest.approx(together[0], abs=1e-4)
    (mb,) = pack([at_end([5, 6, 7])], 10, device)
    assert mb.input_ids_T.tolist() == [5, 6, 7] and mb.loss_mask_T.tolist() == [False, False, True]


def test_end_of_text_that_is_also_padding_is_scored(device, tmp_path):
    """transformers reads the last token that is not padding, so the export must not name a token as
    padding that also ends texts."""
    from transformers import AutoModelForSequenceClassification

    model = load_scalar_model(tiny_model(), TrainArgs(), device)
    tokenizer = load_tokenizer(tiny_model())
    ids = [5, 6, 7, tokenizer.eos_token_id]
    for pad in (tokenizer.eos_token, "<|pad|>"):
        tokenizer.pad_token = pad
        export_hf(model, tokenizer, tmp_path / pad)
        hf = AutoModelForSequenceClassification.from_pretrained(tmp_path / pad)
        assert (hf.config.pad_token_id is None) == (pad == tokenizer.eos_token)
        with torch.no_grad():
            theirs = hf(input_ids=torch.tensor([ids])).logits.item()
        assert score(model, [[ids]], 100) == pytest.approx([theirs], abs=1e-5)


def test_new_head_depends_only_on_the_seed(device):
    def head(seed):
        return load_scalar_model(
            tiny_model(), TrainArgs(seed=seed), device
        ).hf.score.weight.full_tensor()

    assert torch.equal(head(0), head(0)) and not torch.equal(head(0), head(1))
    assert head(0).std().item() == pytest.approx(1 / math.sqrt(129), rel=0.2)
