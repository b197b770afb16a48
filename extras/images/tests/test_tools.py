"""Images in what a run shows, in the viewer, in a replay and in the chat."""

import io
import runpy
import sys

import pytest
from helpers import ROOT, call_main

import sft
from common.data.encode import Encoder
from common.data.rows import encode_each
from common.model.hub import load_tokenizer
from common.parallel.process import visible
from extras.images.reader import reader
from extras.images.tests.checkpoints import picture, whole_logits

chat = runpy.run_path(str(ROOT / "tools/chat.py"), run_name="chat")


def test_console_folds_runs_of_placeholders(trained):
    shown = trained.console.replace("\n", "")
    assert "<row_1_col_1>[<image> x 4]<fake" in shown.replace("x4", "x 4")
    assert "<image><image>" not in shown


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
    encoder = Encoder(tokenizer, args)
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
