"""Samples that are read from a file are those that would be in memory, and of nothing else than what was asked for."""

import json
import multiprocessing
import os
import random
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import helpers
import inprocess
import pytest
from helpers import ROOT, assert_close_metrics, assert_same_weights, run

import dpo
import kto
import rm
import sft
from common.data import token_cache, tokenize
from common.data.encode import Encoder
from common.data.files import BadRows
from common.data.packing import Sample
from common.data.rows import PAIR_COLUMNS, SFT_COLUMNS, train_and_eval_rows
from common.data.token_cache import InMemory, OnDisk
from common.model.hub import load_tokenizer, resolve_model
from common.model.tiny import tiny_model
from common.parallel import distributed

main = inprocess.main
OWN = ("max_length", "overlong", "train_on")


def load(args: sft.Args) -> list:
    tokenizer = load_tokenizer(resolve_model(args.model), args)
    return token_cache.load_samples(sft.encode_rows, SFT_COLUMNS, tokenizer, args, OWN)


class Warm:
    """multiprocessing for data/tokenize.py: what it spawns is spared the imports. With two ranks it does spawn."""

    Pipe = staticmethod(multiprocessing.Pipe)

    def get_context(self, method: str):
        return self if method == "spawn" else multiprocessing.get_context(method)

    def Process(self, target, args):
        connection, _, *what = args
        return helpers.warm().Process(target=with_its_parent, args=(target, connection, *what))


def with_its_parent(target, connection, *what) -> None:
    target(connection, os.getppid(), *what)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Where large data is kept, and all data is large."""
    monkeypatch.setattr(tokenize, "multiprocessing", Warm())
    monkeypatch.setattr(token_cache, "SMALLEST", 0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))  # of ranks
    return tmp_path / "cache" / "onefile_tokens"


@pytest.fixture
def args(tmp_path) -> sft.Args:
    """Two datasets with weights, some rows of which are too long, have characters in bytes, or are bad."""
    rng = random.Random(0)
    for name, rows in (("a", 40), ("b", 25)):
        lines = [
            json.dumps(dict(question=f"{i}?", answer=rng.choice(["apples", "é", "7 "]) * rng.randint(1, 40)))
            for i in range(rows)
        ]
        lines[7] = json.dumps(dict(question="7?", answer=8))
        lines[9] = "no JSON"
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return sft.Args(dataset=(f"{tmp_path}/a.jsonl:3", f"{tmp_path}/b.jsonl:1"), on_bad_row="skip", max_length=150,
                    eval_size=10)  # fmt: skip


def in_memory(args: sft.Args, monkeypatch) -> list:
    with monkeypatch.context() as patched:
        patched.setattr(token_cache, "SMALLEST", 2**60)
        return load(args)


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{}, dict(overlong="truncate", eval_every=0)], ids=["skip", "truncate"])
def test_a_first_start_a_second_one_and_samples_in_memory_are_the_same(changed, args, cache, monkeypatch, capfd):
    monkeypatch.setattr(tokenize, "CHUNK", 8)  # here only
    args = replace(args, **changed)
    wanted, said = in_memory(args, monkeypatch), capfd.readouterr().out
    first, said_first = load(args), capfd.readouterr().out
    monkeypatch.setattr(token_cache, "build", None)
    second, said_second = load(args), capfd.readouterr().out
    assert "left out, such as" in said and said == said_second
    assert said_first == f"tokenising the data, once on this machine, into {cache}\n" + said
    for (samples, counts), *others in zip(wanted, first, second, strict=True):
        assert isinstance(samples, InMemory)
        for found, their_counts in others:
            assert isinstance(found, OnDisk) and list(their_counts.items()) == list(counts.items())
            for row in (sample.row for sample in samples):
                row.pop("question", None), row.pop("answer", None)
            assert list(found) == samples and found[3:9:2] == samples[3:9:2]
            assert found.many == len(samples)
            assert not samples or found.order(args).draw(200) == samples.order(args).draw(200)
    assert len(wanted[0][0]) > 30


def test_chunks_make_up_a_part(tmp_path, monkeypatch, capfd):
    """Rows are counted, and bad ones told, as if they had been tokenised together."""
    args = sft.Args(on_bad_row="skip", max_length=60)
    rows = [dict(question=str(i), answer=8 if i % 7 == 3 else "x" * i, _source=f"rows:{i}") for i in range(60)]
    encode = partial(sft.encode_rows, encoder=Encoder(load_tokenizer(tiny_model()), args), args=args)
    wanted, counts = encode(rows, SFT_COLUMNS[2])
    monkeypatch.setattr(tokenize, "_encode", encode, raising=False)
    monkeypatch.setattr(BadRows, "gathered", [])
    chunks = (tokenize._chunk(rows[i : i + 7], SFT_COLUMNS[2], (), []) for i in range(0, 60, 7))
    assert tokenize._write(tmp_path, "train", chunks, 60, None)[0] == counts
    found = OnDisk(tmp_path, "train", [])
    for sample in wanted:
        sample.row = dict(_source=sample.row["_source"])
    assert len(found) > 10 and list(found) == wanted and found[-1] == wanted[-1]
    (tmp_path / "train.bin").write_bytes((tmp_path / "train.bin").read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged: delete it"):
        OnDisk(tmp_path, "train", [])


@pytest.mark.slow
def test_a_bad_row_ends_the_run_as_in_memory_and_leaves_nothing(args, cache, monkeypatch):
    args = replace(args, dataset=(args.dataset[0].removesuffix(":3"),), on_bad_row="error")
    path = Path(args.dataset[0])
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if line != "no JSON"))
    with pytest.raises(ValueError) as in_memory_it_says:
        in_memory(args, monkeypatch)
    with pytest.raises(ValueError) as it_says:
        load(args)
    assert str(it_says.value) == str(in_memory_it_says.value) and "a.jsonl:8: column answer" in str(it_says.value)
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


@pytest.mark.slow
def test_what_a_killed_build_left_is_not_taken(args, cache, monkeypatch):
    def build(folder: Path, *what) -> None:
        left = cache / f"{folder.name}.{socket.gethostname()}"
        left.mkdir(parents=True)
        (left / "about.json").write_text("{}")
        tokenize.build(folder, *what)
        assert folder.is_dir() and not left.exists()

    monkeypatch.setattr(token_cache, "build", build)
    samples, _ = load(args)[0]
    assert len(samples) > 30


def kill_oneself(*_, **__):
    os.kill(os.getpid(), 9)


def kill_the_parent(*_, **__):
    os.kill(os.getppid(), 9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encode_rows", "words"),
    [(kill_oneself, "a process was killed; has the machine enough"), (kill_the_parent, "process ended with code -9")],
)
def test_a_process_that_dies_is_one_line(encode_rows, words, args, cache):
    tokenizer = load_tokenizer(tiny_model())
    with pytest.raises(distributed.RunError, match=f"^tokenising the data: .*{words}"):
        token_cache.load_samples(encode_rows, SFT_COLUMNS, tokenizer, args, OWN)
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


def test_what_the_digest_is_of(args, cache, tmp_path, monkeypatch):
    def digest(args, encode_rows=sft.encode_rows):
        found = []
        monkeypatch.setattr(token_cache, "build", lambda folder, *_: found.append(folder.name) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            token_cache.load_samples(encode_rows, SFT_COLUMNS, load_tokenizer(tiny_model(), args), args, OWN)
        return found[0]

    first, file = digest(args), tmp_path / "b.jsonl"
    assert digest(replace(args, lr=1e-3, batch_size=2, max_steps=3, eval_every=7, model="tiny")) == first
    os.utime(file, (1, 1))
    assert digest(args) == first
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    others = [
        digest(replace(args, **changed))
        for changed in (
            dict(eval_every=0), dict(max_length=151), dict(on_bad_row="error"), dict(train_on="all"),
            dict(system_prompt="x"), dict(prompt_format="plain"), dict(eval_size=11), dict(dataset=args.dataset[::-1]),
            dict(chat_template=str(tmp_path / "template.jinja")), dict(eval_dataset=str(tmp_path / "a.jsonl")),
        )
    ]  # fmt: skip
    before = file.stat()
    file.write_bytes(file.read_bytes().replace(b"apples", b"orange", 1))
    os.utime(file, (before.st_atime, before.st_mtime))
    others += [digest(args), digest(args, kill_oneself)]
    assert file.stat().st_size == before.st_size and len({first, *others}) == 1 + len(others)


def test_small_data_is_tokenised_in_memory(args, cache, monkeypatch):
    monkeypatch.undo()
    (samples, _), (held_out, _) = load(args)
    assert isinstance(samples, InMemory) and isinstance(held_out, InMemory) and not cache.exists()


FLAGS = ("--on_bad_row", "skip", "--max_length", 150, "--eval_size", 10, "--batch_size", 8, "--max_steps", 6,
         "--save_every", 3, "--eval_every", 4, "--lr", 1e-3)  # fmt: skip


@pytest.mark.slow
def test_a_run_is_bitwise_the_same_and_resumes(args, cache, tmp_path, main, monkeypatch):
    flags = (*FLAGS, "--dataset", *args.dataset)
    with monkeypatch.context() as patched:
        patched.setattr(token_cache, "SMALLEST", 2**60)
        main("sft", *flags, "--output_dir", tmp_path / "in_memory")
    main("sft", *flags, "--output_dir", tmp_path / "cached")
    same = ("loss", "grad_norm", "epoch", "epoch/a", "loss/b", "eval_loss", "eval_loss/a", "num_tokens")
    assert_same_weights(tmp_path / "in_memory", tmp_path / "cached")
    assert_close_metrics(tmp_path / "in_memory", tmp_path / "cached", same, rel=0)
    inprocess.assert_resumes_exactly(main, "sft", *flags, folder=tmp_path / "in_memory", finished=6)  # of the other's


def with_all_data_large(script: str, folder: Path) -> Path:
    path = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    code = path + "from common.data import token_cache\ntoken_cache.SMALLEST = 0\n"
    (folder / script).write_text(code + (ROOT / script).read_text())
    return folder / script


@pytest.mark.slow
def test_ranks_of_a_machine_have_it_done_once(args, cache, tmp_path):
    script = with_all_data_large("sft.py", tmp_path)
    flags = (*FLAGS, "--dataset", *args.dataset)
    run(2, "sft.py", *flags, "--output_dir", tmp_path / "in_memory")
    first = run(2, script, *flags, "--output_dir", tmp_path / "cached").stdout
    assert first.count("tokenising the data, once on this machine") == 1
    assert_same_weights(tmp_path / "in_memory", tmp_path / "cached")
    assert_close_metrics(tmp_path / "in_memory", tmp_path / "cached", ("loss", "epoch/a", "eval_loss/b"), rel=0)
    failed = helpers.run(2, script, *flags, "--output_dir", tmp_path / "bad", "--on_bad_row", "error", code=1)
    assert failed.stderr.count("error: ") == 1 and "line 10 is not valid JSON" in failed.stderr, failed.stderr


# ---- preferences ----


@pytest.fixture
def pairs(tmp_path) -> tuple[str, str]:
    """Two datasets with weights; pairs with margins, of which some are bad."""
    rng = random.Random(0)
    for name, count in (("c", 40), ("d", 25)):
        texts = [("7 " * rng.randint(1, 40), "é" * rng.randint(1, 40)) for _ in range(count)]
        rows = [dict(prompt=f"{i // 2}?", chosen=c, rejected=r, margin=i / 3) for i, (c, r) in enumerate(texts)]
        rows[7]["chosen"], rows[9]["margin"] = 8, "1"
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{tmp_path}/c.jsonl:3", f"{tmp_path}/d.jsonl:1"


@pytest.mark.parametrize(("script", "kept"), [(rm, ["margin"]), (dpo, []), (kto, ["label"])])
def test_pairs_from_a_disk_are_those_in_memory(script, kept, pairs, tmp_path, monkeypatch):
    """Written in chunks, which know together what columns the rows have."""
    flags = dict(ld_alpha=0.3, overlong="truncate") if script is dpo else {}
    args = script.Args(dataset=pairs, on_bad_row="skip", max_length=60, eval_every=0, **flags)
    rows, _ = train_and_eval_rows(args)
    columns = tokenize.columns_of(rows, PAIR_COLUMNS[0], kept)
    encode = partial(script.encode_rows, encoder=Encoder(load_tokenizer(tiny_model()), args), args=args)
    groups, counts = encode(rows, columns)
    monkeypatch.setattr(tokenize, "_encode", encode, raising=False)
    monkeypatch.setattr(BadRows, "gathered", [])
    chunks = (tokenize._chunk(rows[i : i + 7], columns, kept, ["c", "d"]) for i in range(0, 65, 7))
    assert tokenize._write(tmp_path, "train", chunks, 65, None)[0] == counts
    stored = OnDisk(tmp_path, "train", ["c", "d"])
    assert stored.order(args).draw(200) == InMemory(groups).order(args).draw(200)
    for sample in (sample for group in groups for sample in group):
        sample.row = {name: sample.row[name] for name in ("_source", "_dataset", *kept)}
    assert list(stored) == groups and len(groups) > 20
    assert [sample.weights is None for sample in stored[0]] == [script is not dpo] * 2


@pytest.mark.parametrize("more", [dict(text="x"), dict(versions=[0, 0])])
def test_a_sample_that_has_more_than_is_stored_is_refused(more, monkeypatch):
    sample = Sample([1, 2], [False, True], row=dict(_source="rows:1"))
    weighted = replace(sample, weights=[1.0, 0.5])
    monkeypatch.setattr(tokenize, "_encode", lambda group, **_: ([group], {}), raising=False)
    assert tokenize._chunk([sample, weighted], (), (), [])[1].shape == (1, 2, 6)
    with pytest.raises(AssertionError, match="more than is stored"):
        tokenize._chunk([sample, replace(weighted, **more)], (), (), [])


PREFERENCES = ("--max_length", 150, "--eval_size", 10, "--batch_size", 8, "--max_steps", 4, "--save_every", 2,
               "--eval_every", 2, "--lr", 1e-3, "--on_bad_row", "skip")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("script", ["rm", "dpo", "kto"])
def test_a_run_on_preferences_is_bitwise_the_same_and_resumes(script, pairs, cache, tmp_path, main, monkeypatch):
    flags = (*PREFERENCES, "--dataset", *pairs, *(["--ld_alpha", 0.5] if script == "dpo" else []))
    with monkeypatch.context() as patched:
        patched.setattr(token_cache, "SMALLEST", 2**60)
        main(script, *flags, "--output_dir", tmp_path / "in_memory")
    assert not cache.exists()
    main(script, *flags, "--output_dir", tmp_path / "cached")
    assert cache.exists()
    same = ("loss", "grad_norm", "epoch", "epoch/c", "eval_loss", "eval_loss/c", "rewards/chosen", "num_tokens")
    assert_same_weights(tmp_path / "in_memory", tmp_path / "cached")
    assert_close_metrics(tmp_path / "in_memory", tmp_path / "cached", same, rel=0)
    stored = [(tmp_path / run / "reference_logps.json") for run in ("in_memory", "cached")]
    assert script == "rm" or stored[0].read_bytes() == stored[1].read_bytes()
    inprocess.assert_resumes_exactly(main, script, *flags, folder=tmp_path / "in_memory", finished=4)  # of the other's


@pytest.mark.slow
def test_a_reference_scores_what_ranks_read_from_a_disk(pairs, cache, tmp_path):
    flags = (*PREFERENCES, "--dataset", *pairs)
    run(2, "dpo.py", *flags, "--output_dir", tmp_path / "in_memory")
    run(2, with_all_data_large("dpo.py", tmp_path), *flags, "--output_dir", tmp_path / "cached")
    assert cache.exists()
    assert_same_weights(tmp_path / "in_memory", tmp_path / "cached")
    assert_close_metrics(tmp_path / "in_memory", tmp_path / "cached", ("loss", "epoch/c", "eval_loss/d"), rel=0)
