"""Stored log-probs of a teacher equal the live teacher's; a teacher with another tokenizer in a
run."""

# ruff: noqa: F811 (fixtures of test_distill)

import shutil

import pytest
import torch
from helpers import ROOT, assert_close_metrics, assert_same_weights, metrics, run, samples
from safetensors.torch import load_file, save_file
from test_distill import SAME, SAMPLED, domains, flags, load_teacher, teacher  # noqa: F401

import distill
from common.data.packing import pack
from common.data.sample import Sample
from common.model import distill as students
from common.model.distill import most_likely
from extras.teachers import stored as teachers
from extras.teachers.tests.test_foreign_teacher import write_foreign_teacher

OFFLINE = ("--on_policy_fraction", 0, "--reward", "--top_k", 7, "--pack_tokens", 200)


@pytest.mark.slow
def test_gradient_of_the_sampled_estimator_does_not_depend_on_ranks(
    main, flags, domains, teacher, tmp_path
):
    """Each row has one of two teachers, one of which has another tokenizer."""
    foreign = write_foreign_teacher(tmp_path / "foreign")
    teachers = ("--teacher", f"usual={foreign}", f"rare={teacher}", "--model", "tiny-sft")
    flags = (*flags, *domains, *teachers, *SAMPLED, "--max_steps", 2)
    run(2, "distill.py", *flags, "--output_dir", tmp_path / "two")
    main("distill", *flags, "--pack_tokens", 40, "--output_dir", tmp_path / "one")
    assert samples(tmp_path / "two", 1) == samples(tmp_path / "one", 1)
    names = [name for name in SAME if not name.startswith("data/")] + ["unaligned"]
    assert_close_metrics(tmp_path / "two", tmp_path / "one", names, rel=1e-5, floor=0.1)
    (line, _) = metrics(tmp_path / "one")
    assert "data/reverse_kl" not in line and line["unaligned"] < 0.5


@pytest.mark.slow
def test_flops_include_the_forwards_of_the_teacher(main, flags, small, tmp_path):
    """A teacher of the student's size adds a forward to a forward and backward: a third more than a
    stored teacher."""
    flops = []
    for stored in ("live", "stored"):
        own = (*OFFLINE, "--teacher", small[1], "--teacher_logprobs", stored, "--max_steps", 1)
        main("distill", *flags, *own, "--output_dir", tmp_path / stored)
        (line,) = metrics(tmp_path / stored)
        flops.append(line["speed/tflops"] * (line["time/train"] + line["time/logprobs"]))
    assert flops[0] == pytest.approx(4 / 3 * flops[1])


@pytest.mark.slow
def test_stored_teacher_equals_the_live_teacher_on_any_number_of_ranks(
    main, flags, teacher, tmp_path, monkeypatch
):
    """The store is written by two ranks, by two of which one is killed, in two parts, or by an
    earlier run, in which case the model is not loaded."""
    flags, stored = (*flags, *OFFLINE), ("--teacher_logprobs", "stored")
    main("distill", *flags, "--output_dir", tmp_path / "live")
    monkeypatch.setattr(teachers, "CHUNK", 50)
    main("distill", *flags, *stored, "--output_dir", tmp_path / "stored")
    files = sorted((tmp_path / "stored/teacher_logprobs").glob("*.safetensors"))
    assert len(files) == 8 and load_file(files[-1])["logprobs"].shape[1] == 8
    names = [name for name in SAME if name.startswith("data/")] + [
        "loss",
        "grad_norm",
        "data/teacher_mass",
        "num_tokens",
    ]
    assert_close_metrics(tmp_path / "live", tmp_path / "stored", names, rel=1e-6, floor=0.1)
    assert not any(
        name.startswith(("sampling/", "completions/")) for name in metrics(tmp_path / "stored")[0]
    )

    went_on = tmp_path / "went_on"
    shutil.copytree(tmp_path / "stored/teacher_logprobs", went_on / "teacher_logprobs")
    for file in sorted(went_on.glob("teacher_logprobs/*.safetensors"))[2:5]:
        file.unlink()
    written = []
    monkeypatch.setattr(
        teachers,
        "save_file",
        lambda tensors, file: (written.append(file.name), save_file(tensors, file)),
    )
    main("distill", *flags, *stored, "--output_dir", went_on)
    assert written == [f"{i:06d}.tmp" for i in (2, 3, 4)]
    assert_same_weights(went_on, tmp_path / "stored")
    assert all(
        file.read_bytes() == (went_on / "teacher_logprobs" / file.name).read_bytes()
        for file in files
    )

    shutil.rmtree(went_on / "checkpoints")
    shutil.rmtree(went_on / "hf")
    (went_on / "metrics.jsonl").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(students, "load_policy", None)
        main("distill", *flags, *stored, "--output_dir", went_on)
    assert_same_weights(went_on, tmp_path / "stored")

    with_kill, without, two = tmp_path / "killed.py", tmp_path / "whole.py", tmp_path / "two"
    with_kill.write_text(f"""
import os, runpy, signal
from extras.teachers import stored as teachers
teachers.CHUNK, save, written = 50, teachers.save_file, []

def save_some(tensors, file):
    save(tensors, file)
    written.append(file)
    if len(written) == 3:  # of this rank, and not renamed yet
        os.kill(os.getpid(), signal.SIGKILL)

teachers.save_file = save_some
runpy.run_path({str(ROOT / "distill.py")!r}, run_name="__main__")
""")
    without.write_text(with_kill.read_text().replace("== 3", "== 0"))
    run(2, with_kill, *flags, *stored, "--output_dir", two, code=1)
    before = {file: file.stat().st_mtime_ns for file in two.glob("teacher_logprobs/*.safetensors")}
    assert 4 <= len(before) < 8 and not (two / "metrics.jsonl").exists()
    run(2, without, *flags, *stored, "--output_dir", two)
    assert (
        before.items()
        <= {file: file.stat().st_mtime_ns for file in two.glob("teacher_logprobs/*")}.items()
    )
    assert_close_metrics(tmp_path / "live", two, names, rel=1e-5, floor=0.1)
    written = {f"{file.stem}{end}" for file in files for end in (".safetensors", ".json")}
    assert {file.name for file in two.glob("teacher_logprobs/*")} == {"digest"} | written


def stored(device, folder, teacher, samples, loaded=None):
    """Return a teacher's store as in a script; `loaded` counts the loads of the model."""

    def load(_):
        loaded.append(1)
        return load_teacher(str(teacher), device)

    args = distill.Args(teacher_logprobs="stored", on_policy_fraction=0.0, top_k=2, dtype="float32")
    return teachers.StoredTeacher(folder, str(teacher), load, samples, 356, args, device)


def test_mismatched_store_is_rewritten_and_damaged_store_is_refused(
    device, teacher, tmp_path, monkeypatch
):
    monkeypatch.setattr(teachers, "CHUNK", 2)
    rows, loaded, folder = (
        [Sample([3, i, 4, 5], [False, False, True, True]) for i in range(10, 15)],
        [],
        tmp_path / "a",
    )
    stored(device, folder, teacher, rows, loaded)
    stored(device, folder, teacher, rows, loaded)
    assert len(loaded) == 1 and len([*folder.glob("*.safetensors")]) == 3
    first, last = folder / "000000.safetensors", folder / "000002.safetensors"
    content = first.read_bytes()
    for damaged in (content[:-8], last.read_bytes(), content[:-1] + bytes([content[-1] ^ 1])):
        first.write_bytes(damaged)
        with pytest.raises(
            ValueError, match="000000.safetensors is damaged; delete it: it was changed after"
        ):
            stored(device, folder, teacher, rows, loaded)
    first.unlink()
    stored(device, folder, teacher, rows, loaded)
    assert first.read_bytes() == content and len(loaded) == 2
    rows[4].ids[1] = 9
    stored(device, folder, teacher, rows[:2] + rows[4:], loaded)
    assert len(loaded) == 3 and len([*folder.glob("*.safetensors")]) == 2


def test_store_returns_the_values_of_the_requested_tokens(device, teacher, tmp_path, monkeypatch):
    """The samples are in another order, from several files, with untrained tokens between."""
    monkeypatch.setattr(teachers, "CHUNK", 2)
    rows = [
        Sample(
            [3, *range(i, i + 7)], [i % 2 == 0, False, True, False, i % 3 > 0, True, False, True]
        )
        for i in range(10, 17)
    ]
    store = stored(device, tmp_path / "a", teacher, rows, [])
    policy = load_teacher(str(teacher), device)
    (mb,) = pack([rows[i] for i in (5, 0, 6, 3)], 100, device)
    ours, live = store.teach(mb), most_likely(policy.teach(mb), mb.targets_T, 1.0, 356, 2)
    assert torch.equal(ours.tokens_TK[mb.loss_mask_T], live.tokens_TK[mb.loss_mask_T])
    for name in ("logprobs_TS", "target_logprobs_T", "entropy_T"):
        torch.testing.assert_close(
            getattr(ours, name)[mb.loss_mask_T], getattr(live, name)[mb.loss_mask_T]
        )
    assert ours.logprobs_TS.isfinite().all()
