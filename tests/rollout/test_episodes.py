"""Episodes: sampled tokens are unchanged, replies of environments have no loss, seeds determine
completions, limits hold; training on episodes."""

import asyncio
import json
import math
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, chain
from types import SimpleNamespace

import pytest
import torch
from engines import stopping
from helpers import assert_close_metrics, metrics, short_turns, tiny_tokenizer, write_rows
from in_process import Args, talkative
from processes import PATIENCE, run
from text.chats import parts

from common.config.flags import Limit
from common.metrics.meter import Meter
from common.packs.packing import pack
from common.packs.sample import Completion
from common.rollout import episodes as module
from common.rollout.environments import (
    load_environment,
    prompt_maker_of_environment,
)
from common.rollout.episodes import Episodes, PromptRequest, in_order
from common.rollout.prompts import encode_prompts, prompt_columns
from common.text.encode import Encoder

LIMIT = Limit(1100, "--pack_tokens 1099")

# Replies with the number of characters of a turn, for as many turns as the row has; with a gate not
# before there is such a file.
USER_FILE = """
import os, time
class Counter:
    def reset(self, example):
        self.turns, self.done, self.gate = example["turns"], 0, example.get("gate", "/")
        return [{"role": "user", "content": example["prompt"]}]

    def step(self, completion):
        self.done += 1
        while not os.path.exists(self.gate):
            time.sleep(0.01)
        result = {"role": "tool", "content": f"{self.done}: {len(completion)}"}
        said = [result, {"role": "user", "content": "on"}]
        return said, 0.5 ** self.done, self.done == self.turns
"""
ROWS = [
    dict(prompt=f"{i}?", turns=turns, _source=f"rows:{i}") for i, turns in enumerate([1, 2, 3, 9])
]


@pytest.fixture
def user_file(tmp_path):
    (tmp_path / "counter.py").write_text(USER_FILE)
    return f"{tmp_path / 'counter.py'}:Counter"


class Play:
    """Episodes of some rows."""

    def __init__(self, engine, environment, rows=ROWS, **flags):
        # Answers in these tests are fast.
        flags = dict(environment_timeout=PATIENCE, max_new_tokens=100) | flags
        self.args = Args(environment=environment, reward=("environment",), **flags)
        rows = [dict(row) for row in rows]
        columns = prompt_columns(self.args, rows)
        self.encoder = Encoder(engine.tokenizer, self.args)
        self.prompts = encode_prompts(rows, columns, self.encoder, LIMIT, self.args)
        self.engine, self.episodes = engine, Episodes(engine, self.args)

    def __call__(self, which=slice(None), ends=short_turns) -> list[list[Completion]]:
        return in_order(self.each(which, ends))

    def each(self, which=slice(None), ends=short_turns) -> Iterator[tuple[int, list[Completion]]]:
        requests = [
            PromptRequest(i, *self.prompts[i], 31 * i, 3, 1.0) for i in range(len(self.prompts))
        ]
        with ends(self.engine):
            yield from self.episodes.generate(requests[which], Meter())

    def text(self, turn: list[int]) -> str:
        """Return what the environment reads of a turn."""
        return self.engine.text_of(turn)

    def reply(self, number: int, turn: list[int], last: int | None = None) -> list[int]:
        """Return what the environment says after a turn."""
        result = dict(role="tool", content=f"{number}: {len(self.text(turn))}")
        return self.encoder.reply([result, dict(role="user", content="on")], last)


def test_turns_alternate_and_replies_are_rendered_by_the_template(synced, user_file):
    play = Play(synced, user_file)
    groups = play()
    assert {s.turns for s in chain(*groups)} >= {1, 2, 3}
    for i, sample in enumerate(chain(*groups)):
        ids, row = play.prompts[i // 3]
        pieces = parts(sample)[1:]
        assert sample.ids[: sample.prompt_length] == ids and sample.row == row
        alternating = [n % 2 == 0 for n in range(2 * sample.turns - 1)]
        assert [sampled for sampled, _ in pieces] == alternating
        for number, (_, said) in enumerate(pieces[1::2], 1):
            assert said == play.reply(number, pieces[2 * number - 2][1])
        assert sample.text == play.text(pieces[-1][1])
        assert sample.transcript == synced.tokenizer.decode(sample.ids[sample.prompt_length :])
        ends = accumulate((len(said) for _, said in pieces), initial=sample.prompt_length - 1)
        stepped = [*ends][1::2]  # the last token of each turn
        if sample.finish_reason == "stop":
            assert sample.turns == row["turns"]
        else:
            stepped = stepped[: len(sample.turn_rewards)]
        assert sample.turn_rewards == [(end, 0.5**t) for t, end in enumerate(stepped, 1)]


def test_reply_closes_a_turn_that_ends_at_a_stop_string(synced, user_file):
    """The environment reads the turn without the string; its reply begins with the end of turn,
    which was not sampled and has no loss."""
    letters = tuple("abcdefghijklmnopqrstuvwxyz")
    play, closed = Play(synced, user_file, stop=letters), []
    end = synced.tokenizer.convert_tokens_to_ids("<|end_of_turn|>")
    stops = partial(stopping, strings=letters)
    groups = play(ends=stops)
    with stops(synced):
        for sample in chain(*groups):
            pieces = parts(sample)[1:]
            for number, (_, ids) in enumerate(pieces[1::2], 1):
                turn = pieces[2 * number - 2][1]
                assert not set(letters) & set(play.text(turn))
                assert ids == play.reply(number, turn, turn[-1])
                closed.append(turn[-1] != end)
    assert sum(closed) > 5


def test_conversation_is_rendered_as_by_the_template():
    """If every turn ends with the template's end of turn, the ids are those of the whole rendered
    conversation."""
    tokenizer = tiny_tokenizer()
    encoder = Encoder(tokenizer, Args(prompt_format="chat"))
    end = tokenizer.convert_tokens_to_ids("<|end_of_turn|>")
    messages = [dict(role="user", content="5?")]
    ids = [*encoder.prompt(dict(prompt=messages, _source="x:1"), ("prompt",))]
    for turn in ("12", "so <b>", ""):
        said = [dict(role="tool", content="x y"), dict(role="user", content="\nand?")]
        ids += tokenizer(turn)["input_ids"] + [end] + encoder.reply(said)
        messages += [dict(role="assistant", content=turn), *said]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == whole and ids == tokenizer(whole)["input_ids"]


@torch.no_grad()
def test_engine_and_trainer_agree_on_every_sampled_token(synced, policy, user_file, device):
    samples = [*chain(*Play(synced, user_file)())]
    assert sum(s.turns > 2 for s in samples) > 2
    for mb in pack(samples, 2000, device):
        logprobs_T, *_ = policy(mb, temperature=1.0)
        assert ((logprobs_T - mb.rollout_logprobs_T).abs() * mb.loss_mask_T).max() < 1e-4
        assert torch.equal(mb.rollout_logprobs_T < 0, mb.loss_mask_T)  # 0 elsewhere


def test_episodes_do_not_depend_on_the_split_of_prompts(synced, user_file):
    play = Play(synced, user_file)
    together = [*chain(*play())]
    apart = [*chain(*(play(slice(i, i + 1))[0] for i in range(len(ROWS))))]
    assert [s.ids for s in together] == [s.ids for s in apart]
    assert [s.turn_rewards for s in together] == [s.turn_rewards for s in apart]
    assert len({tuple(s.completion_ids) for s in together[-3:]}) == 3, "of a prompt"


def test_a_complete_group_is_handed_on_while_others_are_sampled(synced, user_file, tmp_path):
    """Its rewards begin then. The last group ends after another one was handed on."""
    gate = tmp_path / "gate"
    rows = [*ROWS[:3], ROWS[3] | dict(gate=str(gate))]
    handed = []
    for number, group in Play(synced, user_file, rows).each():
        assert {sample.number for sample in group} == {number}
        handed.append(number)
        gate.touch()
    assert sorted(handed) == [0, 1, 2, 3] and handed[0] != 3


def test_no_rank_waits_while_another_of_its_engine_samples(synced, monkeypatch):
    """A rank whose episodes all wait for their environments must not hold up the next round."""
    monkeypatch.setattr(module, "WAIT", math.inf)
    running = SimpleNamespace(running={"0": None}, new=[], step=lambda meter: None, sample=None)
    episodes = Episodes(running, Args())
    episodes.prompts[0] = episodes.loop.create_task(asyncio.sleep(math.inf))
    assert episodes.advance(Meter()) == {}
    episodes.close()


def test_limits_on_turns_and_tokens_hold(synced, user_file):
    for limits in (dict(max_turns=2, max_new_tokens=200), dict(max_new_tokens=60)):
        groups = Play(synced, user_file, **limits)()
        for sample in chain(*groups):
            assert sample.turns <= limits.get("max_turns", 9) and sample.loss_mask[-1]
            assert len(sample.completion_ids) <= limits["max_new_tokens"]
        assert {s.finish_reason for s in groups[3]} == {"length"}  # nine turns
        assert any(s.turns > 1 for s in chain(*groups))
        if "max_turns" in limits:  # the environment has answered the last turn, too
            assert all(len(s.turn_rewards) == s.turns for s in groups[3] if s.turns == 2)


# ---- names and rows ----


@pytest.mark.parametrize(("name", "words"), [
    ("chess", "unknown; there are calculator, path/to/file.py:Class"),
    ("{}/absent.py:A", "no file"),
    ("{}/file.py:Absent", "has no function Absent"),
    ("{}/file.py:Half", "not a class with the methods reset and step$"),
    ("{}/file.py:f", "not a class"),
])  # fmt: skip
def test_bad_environment_names_are_refused(name, words, tmp_path):
    (tmp_path / "file.py").write_text(
        "class Half:\n    def reset(self, example): ...\ndef f(): ...\n"
    )
    with pytest.raises(ValueError, match=words):
        load_environment(name.format(tmp_path))


def test_environments_of_the_start_are_closed(tmp_path):
    """Also those of rows that they refuse."""
    code = """
class Game:
    open = []
    def reset(self, example):
        self.open.append(self)
        return [dict(role="user", content=example["prompt"])]
    def step(self, completion): ...
    def close(self):
        self.open.remove(self)
"""
    (tmp_path / "game.py").write_text(code)
    name = f"{tmp_path / 'game.py'}:Game"
    first_messages = prompt_maker_of_environment(Args(environment=name, reward=("environment",)))
    assert first_messages(dict(prompt="a", _source="rows:1")) == [dict(role="user", content="a")]
    with pytest.raises(ValueError, match="Game fails in reset: KeyError: 'prompt'"):
        first_messages(dict(_source="rows:2"))
    assert load_environment(name).open == []


def test_bad_rows_are_refused_by_name(tmp_path, user_file):
    silent = "class A:\n    def reset(self, example): return []\n    def step(self, c): ...\n"
    (tmp_path / "silent.py").write_text(silent)
    stuck = (
        silent.replace("[]", "example['messages']")
        + "    def close(self): raise OSError('stuck')\n"
    )
    (tmp_path / "stuck.py").write_text(stuck)
    for environment, words in (
        (f"{tmp_path / 'stuck.py'}:A", "A fails in close: OSError: stuck"),
        (user_file, "Counter fails in reset: KeyError: 'turns'"),
        (f"{tmp_path / 'silent.py'}:A", "A: reset returns no list of messages"),
    ):
        args = Args(environment=environment, reward=("environment",))
        with pytest.raises(ValueError, match=f"rows:2: --environment .*{words}"):
            prompt_maker_of_environment(args)(dict(messages=[], _source="rows:2"))
    for flags in (dict(environment="calculator"), dict(reward=("environment",)), dict(max_turns=3)):
        words = "need each other|--max_turns 3 has no effect without --environment"
        with pytest.raises(ValueError, match=words):
            Args(**flags)


# ---- training ----


@pytest.fixture(scope="module")
def flags(small, tmp_path_factory):
    """Return flags of a model with short turns and an environment that rewards each turn."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "counter.py").write_text(USER_FILE)
    rows = [dict(prompt=f"{i}?", turns=1 + i % 3) for i in range(12)]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "eval.jsonl", rows[:5])
    return (
        "--model", talkative(folder / "model", small[1]), "--dataset", folder / "rows.jsonl",
        "--eval_dataset", folder / "eval.jsonl", "--eval_split", "train",
        "--environment", f"{folder / 'counter.py'}:Counter", "--reward", "environment",
        "--max_turns", 3, "--max_new_tokens", 120, "--max_steps", 2, "--prompts_per_step", 4,
        "--samples_per_prompt", 4, "--lr", 1e-4, "--eval_every", 2,
        "--max_logprob_difference", 1e-4, "--engine", "transformers",
    )  # fmt: skip


@pytest.mark.slow
def test_episodes_and_their_gradient_do_not_depend_on_ranks(flags, main, tmp_path):
    """Two ranks train and a third samples, in one of the runs."""
    main("grpo", *flags, "--output_dir", tmp_path / "1")
    apart = ("--rollout_ranks", 1, "--max_staleness", 0, "--pack_tokens", 300, "--share_prefix", 1)
    run(3, "grpo.py", *flags, *apart, "--output_dir", tmp_path / "2")
    numbers = (
        "loss", "grad_norm", "reward", "reward_std", "completions/mean_length",
        "completions/mean_turns", "num_tokens", "eval/reward", "entropy",
    )  # fmt: skip
    assert_close_metrics(tmp_path / "1", tmp_path / "2", numbers, rel=1e-5, floor=1e-2)
    assert any(line.get("completions/mean_turns", 0) > 1.3 for line in metrics(tmp_path / "1"))
    one, other = ((tmp_path / name / "samples.jsonl").read_text().splitlines() for name in "12")
    for line, same in zip(map(json.loads, one), map(json.loads, other), strict=True):
        assert line.pop("advantage") == pytest.approx(same.pop("advantage"), abs=1e-5)
        assert line == same
