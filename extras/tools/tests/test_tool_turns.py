"""Episodes with tools: turns of a script in place of sampled ones, so that every outcome of a call
occurs; then training on them."""

import asyncio
import json
from contextlib import closing
from types import SimpleNamespace

import pytest
from field.families import CHATML, IM_END, ours
from helpers import ROOT, assert_close_metrics, metrics, write_rows
from in_process import talkative
from processes import PATIENCE, Clock, run

from common.config.flags import Limit
from common.parallel.distributed import RunError
from common.rollout.engine import empty_completion
from common.rollout.prompts import encode_prompts, prompt_columns
from common.text.encode import Encoder
from extras.tools import turns as module
from extras.tools.tests import episodes
from extras.tools.tests.episodes import make_args
from extras.tools.turns import Tools

LIMIT = Limit(4256, "--pack_tokens 4255")

FILE = f"""
import os
import time


def score(completion, row):
    return len(completion) % 5

{episodes.FILE}
    def sleep(self) -> None:
        '''Sleep.'''
        time.sleep(60)

    def die(self) -> None:
        '''Die.'''
        os._exit(3)

    def leave(self) -> None:
        '''Raise SystemExit.'''
        raise SystemExit
"""


def calls(*named: tuple[str, dict]) -> str:
    texts = [json.dumps(dict(name=name, arguments=arguments)) for name, arguments in named]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


class Play:
    """An episode in which the model says these turns."""

    def __init__(self, folder, turns, code=FILE, template="", **flags):
        """`template`: a text to put in front of the chat template."""
        file = folder / "tools.py"
        file.write_text(code)
        flags = dict(environment_timeout=PATIENCE) | flags
        args = make_args(tools=(str(file), f"{file}:Shelf"), **flags)
        self.tokenizer = ours("qwen2_5", "builtin", IM_END, CHATML, IM_END[0]).load()
        self.tokenizer.add_tokens(["<|absent|>"], special_tokens=True)
        self.tokenizer.chat_template = template + self.tokenizer.chat_template
        rows = [dict(prompt="1+1?", answer="2", first="cup", _source="rows:1")]
        encoder = Encoder(self.tokenizer, args)
        prompts = encode_prompts(rows, prompt_columns(args, rows), encoder, LIMIT, args)
        self.prompt = self.tokenizer.decode(prompts.ids[0])
        self.sample = empty_completion(prompts.ids[0])
        with closing(Tools(args, SimpleNamespace(tokenizer=self.tokenizer))) as tools:
            tools.encoder.ids_end = self.tokenizer.convert_tokens_to_ids("<|absent|>")
            asyncio.run(self.play(tools.begin(prompts.rows[0]), turns))
        parts = self.tokenizer.decode(self.sample.ids).split("<tool_response>\n")[1:]
        self.results = [part.partition("\n</tool_response>")[0] for part in parts]

    async def play(self, episode, turns):
        for text in turns:
            ids = self.tokenizer(text + IM_END[0], add_special_tokens=False)["input_ids"]
            self.sample.ids += ids
            self.sample.loss_mask += [True] * len(ids)
            self.sample.text, self.sample.finish_reason = text, "stop"
            reply = await episode.answer(self.sample)
            assert (reply is None) == (text is turns[-1])
            self.sample.append_reply(reply or [])
        episode.end(self.sample)


def test_results_go_back_in_order_and_an_answer_ends_the_episode(tmp_path):
    turns = [
        "So." + calls(("add", dict(a=1, b=2)), ("put", dict(item="hat"))),
        calls(("put", dict(item="x"))),
        "It is 3.",
    ]
    play = Play(tmp_path, turns)
    sample = play.sample
    assert '"name": "add"' in play.prompt and '"name": "put"' in play.prompt
    assert play.results == ["3", '["cup", "hat"]', '["cup", "hat", "x"]']
    counts = {name: count for name, count in sample.tool_counts.items() if count}
    assert counts == dict(calls=3)
    pairs = zip(sample.ids, sample.loss_mask, strict=True)
    trained = [token for token, is_sampled in pairs if is_sampled]
    assert play.tokenizer.decode(trained) == "".join(turn + IM_END[0] for turn in turns)
    assert len(sample.turn_rewards) == 3


def test_whatever_goes_wrong_is_an_answer_to_the_model(tmp_path):
    turns = [
        calls(("nix", {}), ("add", dict(a="1", b=2)), ("leave", {})),
        "<tool_call>{",
        calls(("put", dict(item="hat")), ("die", {}), ("put", dict(item="hat"))),
        calls(("sleep", {})),
        calls(("put", dict(item="bag"))),
        "It is 3.",
    ]
    play = Play(tmp_path, turns, environment_timeout=1.0)
    unknown, wrong, left, malformed, *states = play.results
    assert unknown == "error: unknown tool nix; there are: add, die, leave, put, sleep"
    assert wrong.startswith("error: argument a: ") and left.startswith("error: SystemExit")
    assert malformed.startswith("error: the call is not JSON")
    lost = "the tools were restarted without their state"
    died, late = f"error: the process died; {lost}", f"error: no answer within 1 s; {lost}"
    hat = '["cup", "hat"]'
    assert states == [hat, died, hat, late, '["cup", "bag"]']
    assert play.sample.tool_counts == dict(
        calls=9, malformed=1, unknown=1, wrong_arguments=1, raised=2, timed_out=1, cut=0
    )


def test_results_that_cannot_be_shown_are_an_error_for_the_model(tmp_path):
    """The result is a token for which the model has no embedding. The name has no UTF-8."""
    turns = [
        calls(("\ud800", {}), ("add", dict(a=1, b=2))),
        calls(("put", dict(item="<|absent|>"))),
        "3",
    ]
    play = Play(tmp_path, turns)
    assert play.sample.tool_counts["malformed"] == 1
    assert "error: the results cannot be shown" in play.tokenizer.decode(play.sample.ids)


def test_an_episode_whose_results_the_template_refuses_is_an_error(tmp_path):
    refuse = "{% for m in messages if m.role == 'tool' %}{% if 'error' in m.content %}"
    refuse += "{{ raise_exception('no errors here') }}{% endif %}{% endfor %}"
    play = Play(tmp_path, [calls(("add", dict(a=1, b=2))), calls(("nix", {}))], template=refuse)
    assert play.results == ["3"] and play.sample.tool_counts["malformed"] == 1
    assert play.sample.error.startswith("turn 2: ") and "no errors here" in play.sample.error


def test_calls_of_a_turn_share_a_time_limit(tmp_path, monkeypatch):
    """Calls for which no time is left are not run. The next turn has a limit of its own."""
    clock, answer = Clock(monkeypatch, module), module.Process.call

    async def slow_call(process, method, *arguments, seconds):
        clock.ahead += 6 if method == "call" else 60  # tools may take long to begin
        return await answer(process, method, *arguments, seconds=seconds)

    monkeypatch.setattr(module.Process, "call", slow_call)
    put = [("put", dict(item=item)) for item in "abcde"]
    play = Play(tmp_path, [calls(*put[:4]), calls(*put[4:]), "3"], environment_timeout=10.0)
    late = "error: not run: the calls before it took 10 s"
    last = '["cup", "a", "b", "e"]'
    assert play.results == ['["cup", "a"]', '["cup", "a", "b"]', late, late, last]
    assert play.sample.tool_counts["timed_out"] == 2 and play.sample.tool_counts["calls"] == 5


def test_tools_that_cannot_be_loaded_end_the_run(tmp_path):
    broken = "import sys\nif 'torch' not in sys.modules: raise RuntimeError('no index')\n" + FILE
    with pytest.raises(RunError, match="--tools: .*cannot be loaded: RuntimeError: no index"):
        Play(tmp_path, [calls(("put", dict(item="hat")))], broken)


# ---- training ----


def calling(folder, model):
    """Return a model of which many tokens are whole calls, and most letters end a turn: an
    untrained model then calls often, rightly and wrongly."""
    talkative(folder, model)
    file = folder / "tokenizer.json"
    text = file.read_text()
    for byte in range(128, 256):
        function = dict(name="add" if byte % 4 else "nix", arguments=dict(a=byte, b=1))
        written = json.dumps(f"<tool_call>{json.dumps(function)}</tool_call>")
        text = text.replace(f'"<0x{byte:02X}>"', written)
    file.write_text(text)
    return folder


@pytest.mark.slow
def test_training_on_calls_does_not_depend_on_ranks(small, main, tmp_path):
    """The trainer agrees with the engine on the sampled tokens of all turns."""
    (tmp_path / "tools.py").write_text(FILE)
    rows = [dict(prompt=f"{i}+1?", answer=str(i + 1)) for i in range(8)]
    write_rows(tmp_path / "rows.jsonl", rows)
    flags = (
        "--model", calling(tmp_path / "model", small[1]),
        "--dataset", tmp_path / "rows.jsonl", "--prompt_format", "chat",
        "--chat_template", ROOT / "configs/templates/tiny_tools.jinja",
        "--tools", tmp_path / "tools.py", "--reward", f"{tmp_path / 'tools.py'}:score",
        "--max_turns", 3, "--max_new_tokens", 200, "--max_steps", 1, "--prompts_per_step", 4,
        "--samples_per_prompt", 4, "--eval_every", 0, "--max_logprob_difference", 1e-4,
        "--engine", "transformers", "--environment_timeout", PATIENCE,
    )  # fmt: skip
    main("grpo", *flags, "--output_dir", tmp_path / "1")
    run(2, "grpo.py", *flags, "--pack_tokens", 600, "--output_dir", tmp_path / "2")
    names = ("loss", "grad_norm", "reward", "completions/mean_turns", "tools/calls", "num_tokens")
    assert_close_metrics(tmp_path / "1", tmp_path / "2", names, rel=1e-5, floor=1e-2)
    (line,) = metrics(tmp_path / "1")
    assert line["completions/mean_turns"] > 1.2 and 0 < line["tools/unknown"] < line["tools/calls"]
