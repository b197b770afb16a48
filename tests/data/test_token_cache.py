"""Samples read from disk equal samples in memory and match exactly the run's data, flags and
code."""

import json
import os
import random
import re
import signal
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import helpers
import pytest
from helpers import ROOT, assert_close_metrics, assert_resumes_exactly, assert_same_weights, run

import dpo
import kto
import rm
import sft
from common.data import load as loading
from common.data import token_cache, tokenize
from common.data.load import Samples, load_samples
from common.data.rows import KTO_COLUMNS, PAIR_COLUMNS, SFT_COLUMNS
from common.data.sample import Completion, Sample
from common.model.hub import load_tokenizer, resolve_model
from common.model.tiny import tiny_model
from common.parallel import distributed

OWN = ("max_length", "overlong", "train_on")


def load(args: sft.Args) -> list:
    return load_samples(
        sft.encode_rows, SFT_COLUMNS, load_tokenizer(resolve_model(args.model), args), args, OWN
    )


def warm_process(workers: int, context, initializer, initargs) -> ProcessPoolExecutor:
    """Start the tokenising process with the libraries imported. It is not a child of this
    process."""
    return ProcessPoolExecutor(workers, helpers.warm())


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Return the folder of tokenised data. All data counts as large."""
    monkeypatch.setattr(tokenize, "ProcessPoolExecutor", warm_process)
    monkeypatch.setattr(loading, "LARGE", 0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))  # for ranks
    return tmp_path / "cache" / "onefile_tokens"


@pytest.fixture
def args(tmp_path) -> sft.Args:
    """Two weighted datasets. Some rows are too long, contain characters encoded as bytes, or are
    bad."""
    rng = random.Random(0)
    for name, rows in (("a", 40), ("b", 25)):
        lines = [
            json.dumps(
                dict(
                    question=f"{i}?", answer=rng.choice(["apples", "é", "7 "]) * rng.randint(1, 40)
                )
            )
            for i in range(rows)
        ]
        lines[7] = json.dumps(dict(question="7?", answer=8))
        lines[9] = "no JSON"
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return sft.Args(
        dataset=(f"{tmp_path}/a.jsonl:3", f"{tmp_path}/b.jsonl:1"),
        on_bad_row="skip",
        max_length=150,
        eval_size=10,
    )


def in_memory(load, monkeypatch) -> list:
    with monkeypatch.context() as patched:
        patched.setattr(loading, "LARGE", 2**60)
        return load()


def is_in_memory(samples: Samples) -> bool:
    return isinstance(getattr(samples.make, "__self__", None), list)


def assert_equal_parts(found: list, wanted: list, columns: tuple[str, ...], args) -> None:
    """Assert that samples on disk equal those in memory, which keep all columns of their rows."""
    for (samples, counts), (wanted_samples, wanted_counts) in zip(found, wanted, strict=True):
        groups = [item if isinstance(item, list) else [item] for item in wanted_samples]
        for sample in (sample for group in groups for sample in group):
            sample.row = {
                name: sample.row[name]
                for name in ("_source", "_dataset", *columns)
                if name in sample.row
            }
        assert is_in_memory(wanted_samples) and is_in_memory(samples) == (not wanted_samples)
        assert list(samples) == list(wanted_samples) and samples[3:9:2] == wanted_samples[3:9:2]
        assert list(counts.items()) == list(wanted_counts.items()) and samples.num_rows == len(
            wanted_samples
        )
        assert not samples or samples.order(args).draw(200) == wanted_samples.order(args).draw(200)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed", [{}, dict(overlong="truncate", eval_every=0)], ids=["skip", "truncate"]
)
def test_first_start_and_second_start_equal_samples_in_memory(
    changed, args, cache, monkeypatch, capfd
):
    monkeypatch.setattr(tokenize, "BATCH", 8)
    args = replace(args, **changed)
    wanted, messages = in_memory(lambda: load(args), monkeypatch), capfd.readouterr().out
    first, first_messages = load(args), capfd.readouterr().out
    monkeypatch.setattr(tokenize, "tokenise", None)
    second, second_messages = load(args), capfd.readouterr().out
    assert "left out, such as" in messages and messages == second_messages
    assert first_messages == f"tokenising the data, once on this machine, into {cache}\n" + messages
    assert len(wanted[0][0]) > 30
    for found in (first, second):
        assert_equal_parts(found, wanted, (), args)


@pytest.mark.slow
def test_files_of_every_kind_are_tokenised_as_in_memory(cache, tmp_path, monkeypatch):
    import pyarrow

    rows = datasets.Dataset.from_list(
        [dict(question=f"{i}?", answer="x\u2028é" * (i % 9)) for i in range(10)]
    )
    rows.save_to_disk(tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).rename(tmp_path / "rows.arrow")
    rows.to_parquet(tmp_path / "rows.parquet")
    rows.to_csv(tmp_path / "rows.csv")
    lines = "\n".join(map(json.dumps, rows))
    for kind, text in {
        "jsonl.gz": lines,
        "jsonl.zst": lines,
        "json": json.dumps(rows.to_list()),
    }.items():
        with pyarrow.output_stream(str(tmp_path / f"rows.{kind}"), compression="detect") as file:
            file.write(text.encode())
    files = sorted(str(file) for file in tmp_path.glob("rows.*"))
    args = sft.Args(dataset=tuple(files), on_bad_row="skip", max_length=40, eval_size=5)
    wanted = in_memory(lambda: load(args), monkeypatch)
    assert len(files) == 6 and len(wanted[0][0]) > 10
    assert_equal_parts(load(args), wanted, (), args)


@pytest.mark.slow
def test_bad_row_raises_as_in_memory_and_leaves_no_files(args, cache, monkeypatch):
    args = replace(args, dataset=(args.dataset[0].removesuffix(":3"),), on_bad_row="error")
    path = Path(args.dataset[0])
    path.write_text(
        "".join(line + "\n" for line in path.read_text().splitlines() if line != "no JSON")
    )
    with pytest.raises(ValueError) as wanted:
        in_memory(lambda: load(args), monkeypatch)
    with pytest.raises(ValueError) as found:
        load(args)
    assert str(found.value) == str(wanted.value) and "a.jsonl:8: column answer" in str(found.value)
    assert [file.suffix for file in cache.iterdir()] == [".lock"]
    with pytest.raises(
        ValueError, match=r"a.jsonl:8: column answer"
    ):  # nothing of the first start is reused
        load(args)


def test_other_workers_stop_when_one_has_failed(tmp_path):
    """`map` waits for all workers before it raises the error of one."""
    encode = partial(tokenize._encode_batch, kept=(), failed=tmp_path / "failed", num_rows=9)
    batch = dict(row=[tokenize.pickle.dumps(dict(_source="x:1"))])
    with pytest.raises(ValueError, match="x:1: bad"):
        encode(batch, [0], 1, encode=raise_bad_row)
    assert encode(batch, [0], 2, encode=None)["samples"] == []
    with pytest.raises(TypeError):
        encode(batch | dict(row=batch["row"]), [0], 2, encode=None, failed=tmp_path / "absent")


def raise_bad_row(rows):
    raise ValueError(f"{rows[0]['_source']}: bad")


@pytest.mark.slow
def test_folder_of_a_killed_process_is_not_reused(args, cache, monkeypatch):
    def killed(folder: Path, *task) -> None:
        (folder / "train.arrow").write_bytes(b"half")
        (folder / "about.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(tokenize, "tokenise", killed)
        load(args)
    assert len(load(args)[0][0]) > 30 and [
        file.suffix for file in cache.iterdir() if file.is_file()
    ] == [".lock"]


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "damage"), [
    ("train*.arrow", Path.unlink), ("train*.arrow", flip_a_bit), ("about.json", Path.unlink),
    ("about.json", flip_a_bit), ("about.json", lambda file: file.write_text("")),
])  # fmt: skip
def test_damaged_folder_is_written_again(name, damage, args, cache, capsys):
    before = [sample.ids for sample in load(args)[0][0]]
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    damage(next(folder.glob(name)))
    assert [sample.ids for sample in load(args)[0][0]] == before
    assert f"{folder} is damaged (" in capsys.readouterr().out
    load(args)
    assert "is damaged (" not in capsys.readouterr().out


def kill_own_process(*_, **__):
    os.kill(os.getpid(), 9)


def kill_parent(*_, **__):
    os.kill(os.getppid(), 9)


@pytest.mark.slow
@pytest.mark.parametrize("encode_rows", [kill_own_process, kill_parent])
def test_killed_process_gives_a_one_line_error(encode_rows, args, cache):
    with pytest.raises(
        distributed.RunError,
        match="^tokenising the data: a process was killed; check the free memory",
    ):
        load_samples(encode_rows, SFT_COLUMNS, load_tokenizer(tiny_model()), args, OWN)
    assert not list(cache.glob("*/about.json"))


ORPHANS = """
import os, time
from pathlib import Path

def encode_rows(rows, columns, encoder, args):
    Path(os.environ["PIDS"], f"{os.getpid()} {os.getppid()}").touch()
    time.sleep(60)

def main():
    import sft
    from common.data.rows import SFT_COLUMNS
    from common.data import load
    from common.model.hub import load_tokenizer
    from common.model.tiny import tiny_model
    load.LARGE = 0
    args = sft.Args(dataset=(os.environ["DATA"],), max_length=150, eval_every=0)
    tokenizer = load_tokenizer(tiny_model())
    load.load_samples(encode_rows, SFT_COLUMNS, tokenizer, args, ("max_length",))

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_killed_rank_leaves_no_process(args, cache, tmp_path, monkeypatch):
    (tmp_path / "rank.py").write_text(ORPHANS)
    (tmp_path / "pids").mkdir()
    data = Path(args.dataset[0].removesuffix(":3"))
    data.write_text("\n".join(line for line in data.read_text().splitlines() if line != "no JSON"))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("DATA", str(data))
    with helpers.Ranks(1, tmp_path / "rank.py") as rank:
        helpers.until(lambda: os.listdir(tmp_path / "pids") or not helpers.alive(*rank.pids))
        os.kill(*rank.pids, signal.SIGKILL)
        pids = {int(pid) for name in os.listdir(tmp_path / "pids") for pid in name.split()}
        helpers.until(lambda: not any(map(helpers.alive, pids)))
    assert len(pids) >= 2 and not list(cache.glob("*/about.json"))


def test_digest_covers_every_input_of_the_samples(args, cache, tmp_path, monkeypatch):
    def digest(args, encode_rows=sft.encode_rows):
        found = []
        monkeypatch.setattr(
            token_cache, "_write", lambda folder, *_: found.append(folder.name) or 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            load_samples(encode_rows, SFT_COLUMNS, load_tokenizer(tiny_model(), args), args, OWN)
        return found[0]

    first, file = digest(args), tmp_path / "b.jsonl"
    assert (
        digest(replace(args, lr=1e-3, batch_size=2, max_steps=3, eval_every=7, model="tiny"))
        == first
    )
    os.utime(file, (1, 1))
    assert digest(args) == first
    (tmp_path / "template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    )
    (tmp_path / "held_out.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    separate = replace(args, eval_dataset=str(tmp_path / "held_out.jsonl"))
    others = [
        digest(replace(args, **changed)) for changed in (
            dict(eval_every=0), dict(max_length=151), dict(on_bad_row="error"),
            dict(train_on="all"), dict(system_prompt="x"), dict(prompt_format="plain"),
            dict(eval_size=11), dict(dataset=args.dataset[::-1]),
            dict(chat_template=str(tmp_path / "template.jinja")),
            dict(eval_dataset=separate.eval_dataset),
        )
    ]  # fmt: skip
    before = file.stat()
    file.write_bytes(file.read_bytes().replace(b"apples", b"orange", 1))
    os.utime(file, (before.st_atime, before.st_mtime))
    others += [digest(args), digest(args, kill_own_process), digest(separate)]
    (tmp_path / "held_out.jsonl").write_text((tmp_path / "b.jsonl").read_text())
    others.append(digest(separate))
    assert file.stat().st_size == before.st_size and len({first, *others}) == 1 + len(others)


def test_small_data_is_tokenised_in_memory(args, cache, monkeypatch):
    monkeypatch.undo()
    (samples, _), (held_out, _) = load(args)
    assert is_in_memory(samples) and is_in_memory(held_out) and not cache.exists()


def test_digest_covers_the_modules_whose_names_encode_rows_uses():
    modules = {path.name for path in token_cache._modules(rm.encode_rows)}
    assert {"sample.py", "encode.py", "turns.py"} <= modules and "optim.py" not in modules


FLAGS = (
    "--on_bad_row", "skip", "--max_length", 150, "--eval_size", 10, "--batch_size", 8,
    "--max_steps", 6, "--save_every", 3, "--eval_every", 4, "--lr", 1e-3,
)  # fmt: skip


@pytest.mark.slow
def test_run_from_disk_equals_the_run_in_memory_bitwise_and_resumes(
    small, args, cache, tmp_path, main, monkeypatch
):
    flags = (*FLAGS, *small[:2], "--dataset", *args.dataset)
    in_memory(lambda: main("sft", *flags, "--output_dir", tmp_path / "in_memory"), monkeypatch)
    main("sft", *flags, "--output_dir", tmp_path / "cached")
    same = (
        "loss",
        "grad_norm",
        "epoch",
        "epoch/a",
        "loss/b",
        "eval_loss",
        "eval_loss/a",
        "num_tokens",
    )
    assert_same_weights(tmp_path / "in_memory", tmp_path / "cached")
    assert_close_metrics(tmp_path / "in_memory", tmp_path / "cached", same, rel=0)
    assert_resumes_exactly(
        main, "sft", *flags, folder=tmp_path / "in_memory", finished=6
    )  # from disk


def with_all_data_large(script: str, folder: Path) -> Path:
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    code += "from common.data import load\nload.LARGE = 0\n"
    (folder / script).write_text(code + (ROOT / script).read_text())
    return folder / script


# ---- preferences ----


@pytest.fixture
def pairs(tmp_path) -> tuple[str, str]:
    """Two weighted datasets of pairs with margins. Some pairs are bad."""
    rng = random.Random(0)
    for name, count in (("c", 40), ("d", 25)):
        texts = [("7 " * rng.randint(1, 40), "é" * rng.randint(1, 40)) for _ in range(count)]
        rows = [
            dict(prompt=f"{i // 2}?", chosen=c, rejected=r, margin=i / 3)
            for i, (c, r) in enumerate(texts)
        ]
        rows[7]["chosen"], rows[9]["margin"] = 8, "one"
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{tmp_path}/c.jsonl:3", f"{tmp_path}/d.jsonl:1"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "kept"), [(rm, ["margin"]), (dpo, []), (kto, ["label"])])
def test_pairs_from_disk_equal_pairs_in_memory(script, kept, pairs, cache, monkeypatch):
    flags = dict(ld_alpha=0.3, overlong="truncate") if script is dpo else {}
    args = script.Args(dataset=pairs, on_bad_row="skip", max_length=60, eval_every=0, **flags)
    choices = (*KTO_COLUMNS, *PAIR_COLUMNS) if script is kto else PAIR_COLUMNS
    own = (*script.PAIR_FLAGS, *(["ld_alpha"] if script is dpo else []))
    task = (script.encode_rows, choices, load_tokenizer(tiny_model()), args, own, kept)
    found, wanted = load_samples(*task), in_memory(lambda: load_samples(*task), monkeypatch)
    assert_equal_parts(found, wanted, tuple(kept), args)
    assert len(found[0][0]) > 20
    assert [sample.weights is None for sample in found[0][0][0]] == [script is not dpo] * 2


@pytest.mark.parametrize("more", [dict(text="x"), dict(versions=[0, 0])])
def test_sample_with_an_unstored_field_is_refused(more):
    sample = Sample([1, 2], [False, True], row=dict(_source="rows:1"))
    weighted = replace(sample, weights=[1.0, 0.5])
    row = tokenize._encode_row(
        dict(_source="rows:1"), lambda _: ([[sample, weighted]], Counter()), ()
    )
    assert [stored["weights"] for stored in row["samples"]] == [None, [1.0, 0.5]] and row[
        "is_group"
    ]
    with pytest.raises(AssertionError, match="a field that is not stored"):
        tokenize._encode_row({}, lambda _: ([Completion(**vars(weighted), **more)], Counter()), ())


PREFERENCES = (
    "--max_length", 150, "--eval_size", 10, "--batch_size", 8, "--max_steps", 4, "--save_every", 2,
    "--eval_every", 2, "--lr", 1e-3, "--on_bad_row", "skip",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("script", ["dpo", "kto"])
def test_preference_run_from_disk_equals_the_run_in_memory_and_resumes(
    script, small, pairs, cache, tmp_path, main, monkeypatch
):
    flags = (
        *PREFERENCES,
        *small[:2],
        "--dataset",
        *pairs,
        *(["--ld_alpha", 0.5] if script == "dpo" else []),
    )
    in_memory(lambda: main(script, *flags, "--output_dir", tmp_path / "in_memory"), monkeypatch)
    assert not cache.exists()
    main(script, *flags, "--output_dir", tmp_path / "cached")
    assert cache.exists()
    same = (
        "loss",
        "grad_norm",
        "epoch",
        "epoch/c",
        "eval_loss",
        "eval_loss/c",
        "rewards/chosen",
        "num_tokens",
    )
    assert_same_weights(tmp_path / "in_memory", tmp_path / "cached")
    assert_close_metrics(tmp_path / "in_memory", tmp_path / "cached", same, rel=0)
    stored = [(tmp_path / run / "reference_logps.json") for run in ("in_memory", "cached")]
    assert script == "rm" or stored[0].read_bytes() == stored[1].read_bytes()
    assert_resumes_exactly(
        main, script, *flags, folder=tmp_path / "in_memory", finished=4
    )  # from disk


@pytest.mark.slow
def test_one_rank_per_machine_tokenises(small, pairs, cache, tmp_path):
    """The reference scores pairs from disk. Both ranks end if a row is bad."""
    script, flags = (
        with_all_data_large("dpo.py", tmp_path),
        (*PREFERENCES, *small[:2], "--dataset", *pairs),
    )
    run(2, "dpo.py", *flags, "--output_dir", tmp_path / "in_memory")
    first = run(2, script, *flags, "--output_dir", tmp_path / "cached").stdout
    assert first.count("tokenising the data, once on this machine") == 1 and cache.exists()
    assert_same_weights(tmp_path / "in_memory", tmp_path / "cached")
    assert_close_metrics(
        tmp_path / "in_memory", tmp_path / "cached", ("loss", "epoch/c", "eval_loss/d"), rel=0
    )
    failed = run(
        2, script, *flags, "--output_dir", tmp_path / "bad", "--on_bad_row", "error", code=1
    )
    first_found = re.search(
        r"[cd]\.jsonl:8: column chosen", failed.stderr
    )  # in either file: workers read in parallel
    assert failed.stderr.count("error: ") == 1 and first_found, failed.stderr
