"""The terminal chat: its answers are those of plain transformers, and every error is one line."""

import io
import json
import os
import pty
import re
import runpy
import select
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import ROOT, Ranks, alive, tiny_tokenizer
from model.test_lora import ARGS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.model.lora import save_adapter
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.train.checkpoint import export_hf

CHAT = ROOT / "tools" / "chat.py"
main = runpy.run_path(str(CHAT), run_name="chat")["main"]


@pytest.fixture
def chat(monkeypatch, capsys) -> Callable[..., tuple[str, str]]:
    """`chat(text, *options)` returns stdout and stderr of a chat with this input on a pipe."""

    def chat(text: str | bytes, *options: object, code: int = 0) -> tuple[str, str]:
        data, ended = text.encode() if isinstance(text, str) else text, 0  # after /quit
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        monkeypatch.setattr(sys, "argv", [str(CHAT), *map(str, options)])
        try:
            main()
        except EOFError:
            ended = 0
        except SystemExit as error:
            ended = error.code
        shown = capsys.readouterr()
        assert ended == code, shown
        return shown.out, shown.err

    return chat


def greedy(path: str | Path, prompt: str, tokens: int) -> str:
    """Return the completion of plain transformers."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(path),
        AutoModelForCausalLM.from_pretrained(path),
    )
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
    options = ("--model", "tiny", "--temperature", 0, "--max_new_tokens", 6, "--system", "S")
    shown, notes = chat("one\ntwo\n\n/help\n/reset\ntwo\n/system T\ntwo\n/quit\nthree\n", *options)
    first = greedy(tiny_model(), rendered("one", system="S"), 6)
    second = greedy(tiny_model(), rendered("one", first, "two", system="S"), 6)
    alone = [greedy(tiny_model(), rendered("two", system=system), 6) for system in "ST"]
    assert shown == "".join(f"{text}\n" for text in (first, second, *alone))
    assert notes.count("the commands are /reset, /system TEXT, /image FILE and /quit") == 1


def test_spaces_at_the_end_of_a_line_belong_to_a_plain_prompt(chat):
    options = (
        "--model",
        "tiny",
        "--temperature",
        0,
        "--max_new_tokens",
        6,
        "--prompt_format",
        "plain",
    )
    answers = [greedy(tiny_model(), prompt, 6) for prompt in ("1+1= ", "1+1=")]
    assert (
        chat("1+1= \n1+1=\n", *options)[0] == "".join(f"{text}\n" for text in answers)
        and len({*answers}) == 2
    )


def test_adapter_gives_the_answers_of_the_merged_model_beside_those_of_the_base(chat, trained):
    options = ("--prompt_format", "plain", "--temperature", 0, "--max_new_tokens", 8)
    shown = chat(
        "1+1=\n", "--model", "tiny", "--adapter", trained / "adapter", "--compare", "tiny", *options
    )[0]
    merged, base = greedy(trained / "hf", "1+1=", 8), greedy(tiny_model(), "1+1=", 8)
    assert shown == f"tiny:\n{merged}\ntiny:\n{base}\n" and merged != base


def test_answers_depend_on_the_seed_alone(chat):
    options = (
        "--model",
        "tiny",
        "--compare",
        "tiny",
        "--max_new_tokens",
        20,
        "--prompt_format",
        "plain",
        "--seed",
    )
    one, same, other = (chat(b"\xff?\n", *options, seed)[0] for seed in (1, 1, 2))
    assert one == same != other
    first, second = one.split("tiny:\n")[1:]
    assert first == second


def test_environment_answers_the_model_until_its_end(chat, tmp_path):
    (tmp_path / "echo.py").write_text(
        "class Echo:\n"
        "    def reset(self, example):\n"
        "        self.turn = example['start']\n"
        "        return [dict(role='user', content=example['prompt'])]\n"
        "    def step(self, completion):\n"
        "        self.turn += 1\n"
        "        return [dict(role='tool', content=f'turn {self.turn}')], 0.5, self.turn == 4\n"
    )
    options = (
        "--model",
        "tiny",
        "--max_new_tokens",
        3,
        "--environment",
        f"{tmp_path}/echo.py:Echo",
    )
    shown, notes = chat("hi\n", *options, "--row", '{"start": 2}')
    assert re.findall("tool: .*", shown) == ["tool: turn 3", "tool: turn 4"]
    assert "[the episode ends after 2 turns with reward 1]" in notes
    assert "[KeyError: 'start']" in chat("hi\n", *options)[1]
    assert (
        "user: "
        in chat("\n", "--model", "tiny", "--max_new_tokens", 3, "--environment", "guess_number")[0]
    )


def test_lines_of_the_page_for_transformers_give_the_same_answer(chat, capsys):
    (code,) = re.findall(
        "```python\n(from transformers.*?)```", (ROOT / "docs" / "after.md").read_text(), re.DOTALL
    )
    exec(code.replace("runs/sft/hf", tiny_model()), {})
    expected = capsys.readouterr().out
    options = ("--model", "tiny", "--temperature", 0, "--max_new_tokens", 256)
    assert chat("47+25=\n", *options)[0] == expected and len(expected) > 50


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_answers_and_environments_control_no_terminal_in_any_encoding(
    encoding, chat, tmp_path, monkeypatch
):
    (tmp_path / "hostile.py").write_text(
        "class Hostile:\n"
        "    def reset(self, row):\n"
        "        return [dict(role='user', content=row['prompt'])]\n"
        "    def step(self, completion):\n"
        "        return [dict(role='tool', content='\x1b[2J⟦é')], 0.0, True\n"
    )
    options = (
        "--model",
        talking(tmp_path / "model", "\x1b"),
        "--temperature",
        0,
        "--max_new_tokens",
        3,
    )
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    chat("hi\n", *options, "--environment", f"{tmp_path}/hostile.py:Hostile")
    shown = "⟦é".encode(encoding, "backslashreplace").decode(encoding)
    assert (
        out.buffer.getvalue().decode(encoding)
        == rf"\x1b\x1b\x1b{chr(10)}tool: \x1b[2J{shown}{chr(10)}"
    )


def test_line_beyond_the_context_is_dropped_and_the_next_one_is_answered(chat):
    shown, notes = chat(
        f"{'x' * 3000}\nhi\n", "--model", "tiny", "--temperature", 0, "--max_new_tokens", 4
    )
    assert "tokens do not fit in the context of tiny, 2048; the line is dropped" in notes
    assert shown == f"{greedy(tiny_model(), rendered('hi'), 4)}\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "the following arguments are required: --model"),
        (("--model", "/absent"), "--model /absent: no such folder"),
        (("--model", "tiny", "--compare", ""), "--compare: the name is empty"),
        (
            ("--model", "tiny", "--adapter", "/absent"),
            "--adapter /absent: adapter_config.json: ",
        ),
        (("--model", "tiny", "--temperature", "nan"), "--temperature must be finite"),
        (("--model", "tiny", "--environment", "chess"), "--environment chess: unknown"),
        (
            ("--model", "tiny", "--row", "{}"),
            "--row must be a JSON object, and needs --environment",
        ),
    ],
)
def test_bad_option_is_one_line(chat, options, words):
    shown, notes = chat("hi\n", *options, code=2)
    assert shown == "" and notes.startswith(f"error: {words}") and notes.count("\n") == 1


def test_adapter_of_another_model_is_refused(chat, trained, tmp_path):
    adapter = shutil.copytree(trained / "adapter", tmp_path / "adapter")
    (adapter / "checksums.json").unlink()
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": ', '"r": 1'))
    _, notes = chat("", "--model", "tiny", "--adapter", adapter, code=2)
    assert (
        notes.startswith(f"error: --adapter {adapter} does not fit --model tiny: ")
        and notes.count("\n") == 1
    )


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


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_stops_the_answer_and_not_the_chat(tmp_path):
    controller, terminal = pty.openpty()
    (tmp_path / "on_terminal.py").write_text(
        "import os, runpy, signal, sys\n_, terminal, *sys.argv = sys.argv\nos.setsid()\n"
        "signal.signal(signal.SIGINT, "
        "signal.default_int_handler)  # a job in the background inherits an ignored one\n"
        "for descriptor in (0, 1, 2): os.dup2(os.open(terminal, os.O_RDWR), descriptor)\n"
        "sys.stdin, sys.stdout, sys.stderr = open(0), open(1, 'w', buffering=1), open(2, 'w', "
        "buffering=1)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    options, shown = (
        "--max_new_tokens 2000 --prompt_format plain --temperature 0 --model".split(),
        b"",
    )
    line = (
        tmp_path / "on_terminal.py",
        os.ttyname(terminal),
        CHAT,
        *options,
        talking(tmp_path / "model", "\n"),
    )

    def expect(words: bytes) -> None:
        nonlocal shown
        while words not in shown:
            if select.select([controller], [], [], 1)[0]:
                shown += os.read(controller, 4096)
            else:
                assert all(map(alive, chat.pids)), shown
        shown = shown.partition(words)[2]

    with Ranks(1, *line) as chat:
        expect(b"> ")
        for _ in range(2):
            os.write(controller, b"1+1=\n")
            expect(b"1+1=")
            expect(b"\r\n" * 9)  # the answer has begun
            os.kill(*chat.pids, signal.SIGINT)
            expect(b"[stopped]")
            expect(b"> ")
        os.write(controller, b"\x04")
        assert chat.end().returncode == 0
    os.close(terminal)
    os.close(controller)
