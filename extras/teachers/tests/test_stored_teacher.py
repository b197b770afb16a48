"""Stored log-probs of a teacher equal the live teacher's; a teacher with another tokenizer in a
run."""

# ruff: noqa: F811 (fixtures of test_distill)

import pytest
import torch
from helpers import assert_close_metrics, metrics, samples
from processes import run
from safetensors.torch import load_file
from test_distill import SAME, SAMPLED, domains, flags, load_teacher, teacher  # noqa: F401

import distill
from common.packs.packing import pack
from common.packs.sample import ImageSpan, Sample
from extras.teachers import stored as teachers
from extras.teachers.tests.test_foreign_teacher import write_foreign_teacher

OFFLINE = ("--on_policy_fraction", 0, "--reward", "--top_k", 7, "--pack_tokens", 200)


@pytest.mark.slow
def test_gradient_of_the_sampled_estimator_does_not_depend_on_ranks(
    main, flags, domains, teacher, tmp_path
):
    """Rows have one of two teachers. One teacher has another tokenizer."""
    foreign = write_foreign_teacher(tmp_path / "foreign")
    teachers = ("--teacher", f"usual={foreign}", f"rare={teacher}", "--model", "tiny-sft")
    flags = (*flags, *domains, *teachers, *SAMPLED, "--max_steps", 1)
    run(2, "distill.py", *flags, "--output_dir", tmp_path / "two")
    main("distill", *flags, "--pack_tokens", 40, "--output_dir", tmp_path / "one")
    assert samples(tmp_path / "two", 1) == samples(tmp_path / "one", 1)
    names = [name for name in SAME if not name.startswith("data/")] + ["unaligned"]
    assert_close_metrics(tmp_path / "two", tmp_path / "one", names, rel=1e-5, floor=0.1)
    (line,) = metrics(tmp_path / "one")
    assert "data/reverse_kl" not in line and line["unaligned"] < 0.5


@pytest.mark.slow
def test_stored_teacher_equals_the_live_teacher(main, flags, teacher, tmp_path):
    """Two ranks write the store."""
    flags = (*flags, *OFFLINE, "--max_steps", 2)
    main("distill", *flags, "--output_dir", tmp_path / "live")
    run(2, "distill.py", *flags, "--teacher_logprobs", "stored", "--output_dir", tmp_path / "two")
    (file,) = (tmp_path / "two/teacher_logprobs").glob("*.safetensors")
    assert load_file(file)["rows"].shape[1] == 8 + 7 + 2
    names = [name for name in SAME if name.startswith("data/")]
    names += ["loss", "grad_norm", "data/teacher_mass", "num_tokens"]
    assert_close_metrics(tmp_path / "live", tmp_path / "two", names, rel=1e-5, floor=0.1)
    first = metrics(tmp_path / "two")[0]
    assert not any(name.startswith(("sampling/", "completions/")) for name in first)


def store(device, folder, teacher, samples, loaded, top_k=2):
    """Write or read a teacher's store as in a script; `loaded` counts the loads of the model."""

    def load(_):
        loaded.append(1)
        return load_teacher(str(teacher), device)

    flags = dict(teacher_logprobs="stored", on_policy_fraction=0.0, top_k=top_k, dtype="float32")
    args = distill.Args(**flags)
    return teachers.StoredTeacher(
        folder, str(teacher), load, samples, 356, args, args.top_k, device
    )


def test_all_tokens_may_be_stored(device, teacher, tmp_path):
    """Then no rest is left beside them."""
    rows = [Sample([3, 9, 4, 5], [False, False, True, True])]
    stored = store(device, tmp_path, teacher, rows, [], top_k=356)
    (batch,) = pack(rows, 200, device)
    known = stored.teach(batch)
    assert known.logprobs_TS.shape == known.tokens_TK.shape and known.logprobs_TS.shape[1] == 356
    assert known.logprobs_TS.exp().sum(1).allclose(torch.ones(1))
    assert (known.tokens_TK.sort(1).values == torch.arange(356)).all()


def test_complete_files_are_kept_and_damaged_ones_refused(device, teacher, tmp_path, monkeypatch):
    """After a kill only the missing files are written; for other samples all are. If all files are
    there, the model is not loaded. Several files have the same numbers as a single one."""
    rows = [Sample([3, i, 4, 5], [False, False, True, True]) for i in range(10, 15)]
    one = store(device, tmp_path / "whole", teacher, rows, [])
    (batch,) = pack(rows, 200, device)
    whole = one.teach(batch)
    monkeypatch.setattr(teachers, "CHUNK", 2)
    loaded, folder = [], tmp_path / "a"
    parts = store(device, folder, teacher, rows, loaded).teach(batch)
    assert torch.equal(parts.tokens_TK, whole.tokens_TK)
    torch.testing.assert_close(parts.logprobs_TS, whole.logprobs_TS)
    store(device, folder, teacher, rows, loaded)
    files = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.safetensors")}
    assert len(loaded) == 1 and len(files) == 3
    (folder / "000001.safetensors").unlink()
    store(device, folder, teacher, rows, loaded)
    again = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.safetensors")}
    assert len(loaded) == 2 and again.pop("000001.safetensors") > files.pop("000001.safetensors")
    assert again == files
    first, last = folder / "000000.safetensors", folder / "000002.safetensors"
    content = first.read_bytes()
    for damaged in (content[:-8], last.read_bytes(), content[:-1] + bytes([content[-1] ^ 1])):
        first.write_bytes(damaged)
        with pytest.raises(ValueError, match="000000.safetensors is damaged; delete it: it was ch"):
            store(device, folder, teacher, rows, loaded)
    first.unlink()
    rows[4].ids[1] = 9
    store(device, folder, teacher, rows[:2] + rows[4:], loaded)
    assert len(loaded) == 3 and len([*folder.glob("*.safetensors")]) == 2


def test_pictures_belong_to_the_digest():
    """The samples have equal tokens and different pictures."""
    rows = [dict(_images=[ImageSpan("a.png", digest, 1, 3, 4)]) for digest in ("aa", "bb")]
    one, other = (
        teachers._digest_of([Sample([1, 2], [True] * 2, row=row)], "model") for row in rows
    )
    assert one != other
