"""A meter's values do not depend on how a batch is split; metrics.jsonl has every step once, also after a resume."""

import json
import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config import TrainArgs
from common.metrics import Meter, RunLogger, draw_curves, read_metrics, wilson_interval
from common.packing import Sample

# ---- Meter ----


def test_mean_is_weighted_and_max_and_min_are_not(device):
    meter = Meter()
    meter.mean("a", 6.0, 2)
    meter.mean("a", torch.tensor(1.0), torch.tensor(3))
    meter.mean("plain", 1)
    meter.mean("plain", 2)
    for value in (3.0, torch.tensor(-5.0), 4):
        meter.max("largest", value)
        meter.min("smallest", value)
    assert meter.reduce() == dict(a=1.4, plain=1.5, largest=4.0, smallest=-5.0)


@given(st.lists(st.lists(st.tuples(st.floats(-10, 10, width=32), st.booleans()), min_size=1), min_size=1, max_size=5))
def test_masked_mean_does_not_depend_on_the_split(micro_batches):
    meter, tokens = Meter(), [token for mb in micro_batches for token in mb]
    for mb in micro_batches:
        values, mask = zip(*mb, strict=True)
        meter.masked_mean("x", torch.tensor(values, dtype=torch.float64), torch.tensor(mask))
    kept = [value for value, trained in tokens if trained]
    assert meter.reduce() == (dict(x=pytest.approx(math.fsum(kept) / len(kept), abs=1e-9)) if kept else {})


def test_nothing_is_left_out_and_nothing_is_carried_over():
    meter = Meter()
    assert meter.reduce() == {}
    meter.mean("empty", 0.0, 0)
    meter.mean("x", 1.0)
    assert meter.reduce() == dict(x=1.0)
    assert meter.reduce() == {}


def test_a_name_has_one_kind():
    meter = Meter()
    meter.mean("x", 1.0)
    with pytest.raises(AssertionError, match="x is both mean and max"):
        meter.max("x", 1.0)


def test_times_add_up_within_a_step(monkeypatch):
    clock = iter([0.0, 1.5, 10.0, 10.25, 20.0, 24.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = Meter()
    for _ in range(2):
        with meter.time("nap"):
            pass
    assert meter.reduce() == {"time/nap": 1.75}
    with meter.time("nap"):
        pass
    assert meter.reduce() == {"time/nap": 4.0}


def test_spread_and_effective_fraction_do_not_depend_on_the_split():
    values = torch.tensor([1.0, 2, 4, 9], dtype=torch.float64)
    for parts in ([values], [values[:1], values[1:]], list(values.split(1))):
        meter = Meter()
        for part in parts:
            meter.std("spread", part)
            meter.effective_fraction("ess", part, torch.ones(len(part), dtype=torch.bool))
        got = meter.reduce()
        assert got["spread"] == pytest.approx(values.std(correction=0).item())
        assert got["ess"] == pytest.approx((values.mean() ** 2 / values.square().mean()).item())
    meter.std("spread", values[:0])
    meter.effective_fraction("ess", values, torch.zeros(len(values), dtype=torch.bool))
    assert meter.reduce() == {}


def test_no_graph_is_kept():
    meter, x = Meter(), torch.ones(3, requires_grad=True)
    meter.masked_mean("x", x * 2, torch.tensor([True, True, False]))
    assert not any(t.requires_grad for _, pairs in meter.values.values() for pair in pairs for t in pair)
    assert meter.reduce() == dict(x=2.0)


# ---- RunLogger ----


def logger(folder, first_step: int = 0, **flags) -> RunLogger:
    args = TrainArgs(output_dir=str(folder), **flags)
    return RunLogger(args, first_step, total_steps=4, show=("loss",), curves=("loss", "reward"))


def completion(text: str, reward: float = 1.0) -> Sample:
    row = dict(prompt="p")
    return Sample([1, 2], [False, True], text=text, reward=reward, advantage=0.5, finish_reason="length", row=row)


def log_steps(folder, first: int, last: int, run: int) -> None:
    log = logger(folder, first)
    for step in range(first + 1, last + 1):
        log.log(step, dict(loss=1.0 / step, run=run))
        log.samples(step, [[completion("x\ny")]], [0])
    log.close()


def steps(path) -> list[tuple[int, int]]:
    return [(line["step"], line.get("run", 0)) for line in read_metrics(path)]


def test_resume_cuts_what_will_come_again(tmp_path, capsys):
    log_steps(tmp_path, 0, 3, run=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    log_steps(tmp_path, 2, 4, run=2)
    assert steps(tmp_path / "metrics.jsonl") == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert [step for step, _ in steps(tmp_path / "samples.jsonl")] == [1, 2, 3, 4]
    assert "step 4/4  loss 0.25" in capsys.readouterr().out


@pytest.mark.parametrize("character", ["\u2028", "\x85"])
def test_resume_with_line_separators_in_a_completion(character, tmp_path):
    log = logger(tmp_path)
    log.samples(1, [[completion(f"a{character}b")]], [0])
    logger(tmp_path, first_step=1)
    (line,) = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").strip("\n").split("\n")
    assert json.loads(line)["completion"] == f"a{character}b"


def test_samples_are_written_whole(tmp_path):
    log, text = logger(tmp_path), "caf\u00e9\n[bold]not markup[/bold] " + "x" * 500
    log.samples(3, [[completion(text, 0.25), completion("y", 0.0)]], [0])
    first, second = read_metrics(tmp_path / "samples.jsonl")
    assert first == dict(
        step=3, prompt="p", completion=text, reward=0.25, advantage=0.5, finish_reason="length", version=0
    )
    assert (second["completion"], second["reward"]) == ("y", 0.0)


def test_preview_marks_what_is_trained(tmp_path, capsys):
    from common.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    ids = tokenizer("1+1=2[b]", add_special_tokens=False)["input_ids"]
    logger(tmp_path).preview(Sample(ids=ids, loss_mask=[i >= 4 for i in range(len(ids))]), tokenizer)
    assert "1+1=\u27e62[b]\u27e7" in capsys.readouterr().out


def test_curves_are_drawn_and_other_ranks_write_nothing(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    logger(tmp_path / "run").draw_curves()  # nothing to draw yet
    assert not (tmp_path / "run" / "curves.png").exists()
    log_steps(tmp_path / "run", 0, 4, run=1)
    logger(tmp_path / "run", first_step=4).draw_curves()
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    runs = [tmp_path / "run" / "metrics.jsonl"] * 2
    draw_curves(runs, ("loss",), tmp_path / "both.png", labels=("a", "b"))
    assert (tmp_path / "both.png").stat().st_size > 5000
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "other").mkdir()
    log_steps(tmp_path / "other", 0, 2, run=1)
    logger(tmp_path / "other").draw_curves()
    assert not list((tmp_path / "other").iterdir())


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = logger(tmp_path, log=("tensorboard",))
    log.log(1, dict(loss=0.5))
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(e.step, e.value) for e in events] == [(1, 0.5)]


def test_wilson_interval_is_that_of_the_tables():
    """Newcombe 1998 (doi:10.1002/(SICI)1097-0258(19980430)17:8<857::AID-SIM777>3.0.CO;2-E), Table I."""
    for hits, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        assert wilson_interval(hits / count, count) == pytest.approx((low, high), abs=5e-5)
