"""Images in what a run shows, in traces, in the viewer and in the chat."""

import io
import os
import runpy
import sys

import pytest
from helpers import ROOT
from in_process import call_main
from PIL import EpsImagePlugin, Image

import sft
from common.parallel.process import visible
from common.text.encode import Encoder
from common.text.rows import encode_each
from common.text.tokenizer import load_tokenizer
from extras.images.image_files import digest
from extras.images.reader import reader
from extras.images.tests.checkpoints import picture, whole_logits

chat = runpy.run_path(str(ROOT / "tools/chat.py"), run_name="chat")


def test_console_folds_runs_of_placeholders(trained):
    shown = trained.console.replace("\n", "")
    assert "<row_1_col_1>[<image> x 4]<fake" in shown.replace("x4", "x 4")
    assert "<image><image>" not in shown


def test_traces_and_the_viewer_have_the_images_in_their_places(trained):
    trace_file = pytest.importorskip("extras.trace.file")
    from extras.trace import view
    from extras.trace.tests.test_view import CHROMIUM, dom

    path = trained.folder / "trace" / "step_000001.jsonl.gz"
    header, *groups = trace_file.read(path)
    groups.sort(key=lambda group: group["prompt"] != "Two?")  # the page shows the first one
    completion, other = (group["completions"][0] for group in groups)
    assert "images" not in other
    assert [image["file"] for image in completion["images"]] == [*map(str, trained.pictures)]
    inside = [i for x in completion["images"] for i in range(x["start"], x["end"])]
    placeholders = [i for i, token in enumerate(completion["tokens"]) if token == "<image>"]
    assert {*placeholders} < {*inside} and completion["images"][1]["end"] == placeholders[-1] + 1

    trace_file.write(path, [header, *groups])
    html = trained.folder / "view.html"
    html.write_text(view.page(view.collect([trained.folder])))
    assert html.read_text().count("data:image/webp") == 2
    assert not CHROMIUM or dom(html).count("<img src=") == 2


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n"


def test_pictures_of_the_viewer_are_small_and_a_bad_one_is_a_problem(tmp_path, monkeypatch):
    """The viewer reads only regular files, and starts no program for one (PIL would start gs)."""
    pictures = pytest.importorskip("extras.trace.pictures")
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it may have been looked for
    for name in ("big.png", "bad.png", "changed.png"):
        picture(900, 700, 0).save(tmp_path / name)
    (tmp_path / "bad.png").write_text("no image")
    Image.new("1", (10_000, 9_100)).save(tmp_path / "huge.png")
    (tmp_path / "program.png").write_bytes(EPS)
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    wrong = {"2": "changed.png", "3": "absent.png", "4": "fifo.png", "5": "zero.png", "6": "."}
    wrong |= {"7": "program.png", "8": "a\0b"}
    names = {
        digest((tmp_path / x).read_bytes()): x
        for x in ("big.png", "bad.png", "program.png", "huge.png")
    }
    found = pictures.pictures_of(
        {key: str(tmp_path / name) for key, name in (names | wrong).items()}
    )
    shown, *problems = found.values()
    assert shown["url"].startswith("data:image/webp;base64,") and len(shown["url"]) < 70_000
    words = (
        "no image",
        "no image",
        "more than 90,000,000 pixels",
        "it has changed since the run read it",
        "No such file or directory",
        *["no regular file"] * 3,
        "it has changed",
        "null byte",
    )
    assert all(word in x["problem"] for word, x in zip(words, problems, strict=True))
    assert not (tmp_path / "ran").exists()


# ---- the chat ----


@pytest.fixture
def talk(monkeypatch, capsys, tmp_path):
    """`talk(model, *lines)` returns stdout and stderr of a greedy chat."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def talk(model, *lines: str, flags: tuple = ()) -> tuple[str, str]:
        text = "".join(f"{line}\n" for line in [*lines, "/quit"])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        words = ("chat.py", "--model", model, "--temperature", 0, "--max_new_tokens", 4, *flags)
        return call_main(chat["main"], words, 0, monkeypatch, capsys)

    return talk


def greedy(path, messages: list[dict], files: list[str]) -> str:
    """Return the answer of transformers' whole model to a row as in training."""
    args = sft.Args(model=str(path), vision="frozen")
    tokenizer = load_tokenizer(args.model, args)
    row = dict(_source="row", _folder="/", prompt=messages, images=[*map(str, files)])
    encoder = Encoder(tokenizer, args, image_args=args)
    ((row, ids),) = encode_each([row], lambda row: encoder.prompt(row, ("prompt",)), "error")
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end_of_turn|>")}
    ends |= {*reader(str(path), None).placeholder_ids}
    answer = []
    while len(answer) < 4 and not {*answer} & ends:
        answer.append(int(whole_logits(path, [*ids, *answer], row["_images"])[-1].argmax()))
    return tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_chat_answers_as_the_whole_model_on_rows_of_training(family, checkpoints, talk, tmp_path):
    path = checkpoints(family)
    files = []
    for i in range(3):
        files.append(tmp_path / f"{i}.png")
        picture(60, 40 + 20 * i, i).save(files[-1])
    lines = [f"/image {files[0]}", f"/image {files[1]}", "Two?", f"/image {files[2]}", "And this?"]
    shown, notes = talk(path, *lines, "Again?")
    messages, answers = [], []
    for text, marks in (("Two?", 2), ("And this?", 1), ("Again?", 0)):
        messages.append(dict(role="user", content="<image>" * marks + text))
        count = sum(message["content"].count("<image>") for message in messages)
        answers.append(greedy(path, messages, files[:count]))
        messages.append(dict(role="assistant", content=answers[-1]))
    assert shown == "".join(f"{visible(text)}\n" for text in answers)
    assert f"[attached to the next line: {files[0]}, {files[1]}]" in notes
    assert f"[attached to the next line: {files[2]}]" in notes


def test_chat_says_in_a_line_why_an_image_is_refused(talk, tmp_path, trained):
    (tmp_path / "bad.png").write_text("no image")
    exported, image = trained.folder / "hf", f"/image {trained.pictures[0]}"
    shown, notes = talk(
        exported, "/image /absent.png", f"/image {tmp_path}/bad.png", "hi", image, "hi"
    )
    assert "[ValueError: /image /absent.png: no such file]" in notes
    assert "image 1: cannot be read: no image, or of an unknown format]" in notes
    message = dict(role="user", content="<image>hi")
    assert shown == f"{visible(greedy(exported, [message], [trained.pictures[0]]))}\n"
    _, notes = talk("tiny", image, "hi")
    assert "qwen3 reads no images here; models of the types idefics3, " in notes
