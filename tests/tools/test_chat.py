"""The terminal chat: its answers are those of plain transformers, and every error is one line."""

import io
import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import ROOT, tiny_tokenizer
from in_process import call_main
from model.adapters import ARGS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.model.lora import save_adapter
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.train.checkpoint import export_hf

CHAT = ROOT / "tools" / "chat.py"
module = runpy.run_path(str(CHAT), run_name="chat")
GREEDY = ("--temperature", 0, "--max_new_tokens")


@pytest.fixture
def chat(monkeypatch, capsys) -> Callable[..., tuple[str, str]]:
    """`chat(text, *options)` returns stdout and stderr of a chat with this input on a pipe."""

    def chat(text: str | bytes, *options: object, code: int = 0) -> tuple[str, str]:
        data = text.encode() if isinstance(text, str) else text
        stdin = io.TextIOWrapper(io.BytesIO(data + b"\n/quit\nmore"), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        return call_main(module["main"], [CHAT, *options], code, monkeypatch, capsys)

    return chat


def greedy(path: str | Path, prompt: str, tokens: int) -> str:
    """Return the completion of plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def rendered(*turns: str, system: str = "") -> str:
    """Return the prompt of a conversation whose turns alternate."""
    roles = [("user", "assistant")[i % 2] for i in range(len(turns))]
    messages = [dict(role=role, content=text) for role, text in zip(roles, turns, strict=True)]
    messages = [dict(role="system", content=system)] * bool(system) + messages
    return tiny_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory, device) -> Path:
    """Folder with a merged model and, alone, the adapter that turns `tiny` into it."""
    folder = tmp_path_factory.mktemp("trained")
    policy = load_policy(tiny_model(), ARGS, device)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.to_local().add_(
                    torch.linspace(-0.3, 0.3, parameter.numel()).view(parameter.shape)
                )
    export_hf(policy, AutoTokenizer.from_pretrained(tiny_model()), folder / "hf")
    save_adapter(policy.hf, tiny_model(), ARGS, folder / "adapter")
    return folder


def test_conversation_is_that_of_plain_transformers_until_it_is_reset(chat):
    options = ("--model", "tiny", *GREEDY, 6, "--system", "S")
    shown, notes = chat("one\ntwo\n\n/help\n/reset\ntwo\n/system T\ntwo", *options)
    first = greedy(tiny_model(), rendered("one", system="S"), 6)
    second = greedy(tiny_model(), rendered("one", first, "two", system="S"), 6)
    alone = [greedy(tiny_model(), rendered("two", system=system), 6) for system in "ST"]
    assert shown == "".join(f"{text}\n" for text in (first, second, *alone))
    assert notes.count("the commands are /reset, /system TEXT, /image FILE and /quit") == 1
    assert notes.count("cut off after 6 tokens") == 4


def test_spaces_at_the_end_of_a_line_belong_to_a_plain_prompt(chat):
    shown, _ = chat("1+1= \n1+1=", "--model", "tiny", *GREEDY, 6, "--prompt_format", "plain")
    answers = [greedy(tiny_model(), prompt, 6) for prompt in ("1+1= ", "1+1=")]
    assert shown == "".join(f"{text}\n" for text in answers) and len({*answers}) == 2


def test_adapter_gives_the_answers_of_the_merged_model_or_is_refused(chat, trained, tmp_path):
    options = ("--prompt_format", "plain", *GREEDY, 8)
    shown, _ = chat("1+1=", "--model", "tiny", "--adapter", trained / "adapter", *options)
    merged = greedy(trained / "hf", "1+1=", 8)
    assert shown == f"{merged}\n" and merged != greedy(tiny_model(), "1+1=", 8)
    other = shutil.copytree(trained / "adapter", tmp_path / "other")
    (other / "checksums.json").unlink()
    config = (other / "adapter_config.json").read_text()
    (other / "adapter_config.json").write_text(config.replace('"r": ', '"r": 1'))
    shown, notes = chat("1+1=", "--model", "tiny", "--adapter", other, code=2)
    assert notes.startswith(f"error: --adapter {other}: model.layers.0.") and shown == ""


def test_lines_of_the_page_for_transformers_give_the_same_answer(chat, capsys):
    page = (ROOT / "docs" / "after.md").read_text()
    (code,) = re.findall("```python\n(from transformers.*?)```", page, re.DOTALL)
    exec(code.replace("runs/sft/hf", tiny_model()), {})
    expected = capsys.readouterr().out
    shown, _ = chat("47+25=", "--model", "tiny", *GREEDY, 256)
    assert shown == expected and len(expected) > 50


def test_answers_control_no_terminal_and_need_no_encoding(chat, tmp_path, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    for name, character in enumerate("\x1b\xe9"):  # the second is a byte that is no UTF-8
        chat("hi", "--model", talking(tmp_path / str(name), character), *GREEDY, 3)
    out.flush()
    assert out.buffer.getvalue() == rb"\x1b\x1b\x1b" + b"\n" + rb"\ufffd\ufffd\ufffd" + b"\n"


def test_line_beyond_the_context_is_dropped_and_the_next_one_is_answered(chat):
    shown, notes = chat(f"{'x' * 3000}\nhi", "--model", "tiny", *GREEDY, 4)
    assert "tokens do not fit in the context of 2048; the line is dropped" in notes
    assert shown == f"{greedy(tiny_model(), rendered('hi'), 4)}\n"


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat, tmp_path, monkeypatch):
    put = module["Printer"].put

    def interrupted(self, value) -> None:
        put(self, value)
        if len(self.token_cache) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(module["Printer"], "put", interrupted)
    shown, notes = chat("one\ntwo", "--model", talking(tmp_path / "model", "a"), *GREEDY, 9)
    assert shown == "aaa\naaa\n" and notes.count("[stopped]") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "the following arguments are required: --model"),
        (("--model", "/absent"), "--model /absent: no such folder"),
        (("--model", "tiny", "--adapter", "/absent"), "--adapter /absent: adapter_config.json: "),
        (("--model", "tiny", "--max_pixels", "0"), "--max_pixels 0 must be greater than 0"),
    ],
)
def test_bad_option_is_one_line(chat, options, words):
    shown, notes = chat("hi", *options, code=2)
    assert shown == "" and notes.startswith(f"error: {words}") and notes.count("\n") == 1


def talking(folder: Path, character: str) -> Path:
    """Write a model whose greedy completion repeats `character` without an end: all its logits are
    equal."""
    shutil.copytree(tiny_model(), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first = next(token for token, i in vocabulary.items() if i == 0)
    token = character if character in vocabulary else f"<0x{ord(character):02X}>"
    vocabulary[first], vocabulary[token] = vocabulary[token], 0
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
