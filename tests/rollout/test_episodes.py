"""Episodes: sampled tokens are unchanged, replies of environments have no loss, seeds determine
completions, limits hold; the built-in environments; training on episodes."""

import asyncio
import dataclasses
import json
import math
import re
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from engines import stopping
from helpers import (
    PATIENCE,
    assert_close_metrics,
    assert_same_weights,
    metrics,
    run,
    short_turns,
)
from in_process import Args, talkative

from common.data.encode import Encoder
from common.data.packing import pack
from common.data.sample import Completion
from common.data.tasks import TASKS
from common.rollout import episodes as module
from common.rollout.environments import (
    ENVIRONMENTS,
    Calculator,
    GuessNumber,
    load_environment,
)
from common.rollout.episodes import Episodes, PromptRequest
from common.rollout.prompts import encode_prompts, prompt_columns, prompt_maker

# Replies with the number of characters of a turn, for as many turns as the row has.
USER_FILE = """
class Counter:
    def reset(self, example):
        self.turns, self.done = example["turns"], 0
        return [{"role": "user", "content": example["prompt"]}]

    def step(self, completion):
        self.done += 1
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
        flags = dict(environment_timeout=PATIENCE, max_new_tokens=200) | flags
        self.args = Args(environment=environment, reward=("environment",), **flags)
        rows = [dict(row) for row in rows]
        columns = prompt_columns(self.args, rows)
        self.encoder = Encoder(engine.tokenizer, self.args)
        prompts = encode_prompts(rows, columns, self.encoder, 1000, self.args)
        self.prompts, self.rows = prompts.ids, prompts.rows
        self.engine, self.episodes = engine, Episodes(engine, self.args)

    def requests(self, n=3) -> list[PromptRequest]:
        prompts = enumerate(zip(self.prompts, self.rows, strict=True))
        return [PromptRequest(i, prompt, row, 31 * i, n, 1.0) for i, (prompt, row) in prompts]

    def __call__(self, which=slice(None), n=3) -> list[list[Completion]]:
        with short_turns(self.engine):
            return self.episodes.generate(self.requests(n)[which])


def flat(groups):
    return [sample for group in groups for sample in group]


def spans(sample: Completion) -> list[tuple[bool, list[int]]]:
    """Return the spans of the completion: whether each is sampled, and its ids."""
    pieces = groupby(zip(sample.loss_mask, sample.ids, strict=True), key=lambda pair: pair[0])
    return [(sampled, [i for _, i in piece]) for sampled, piece in pieces][1:]


def test_turns_alternate_and_replies_are_rendered_by_the_template(synced, user_file):
    play = Play(synced, user_file)
    groups = play()
    assert {s.turns for s in flat(groups)} >= {1, 2, 3}
    for row, prompt, group in zip(play.rows, play.prompts, groups, strict=True):
        for sample in group:
            assert sample.ids[: sample.prompt_length] == prompt and len(sample.ids) == len(
                sample.loss_mask
            )
            pieces, text = spans(sample), synced.tokenizer.decode
            assert [sampled for sampled, _ in pieces] == [
                i % 2 == 0 for i in range(2 * sample.turns - 1)
            ]
            for turn, (_, ids) in enumerate(pieces[1::2], 1):
                spoken = text([i for i in pieces[2 * turn - 2][1] if i not in synced.silent_ids])
                said = [
                    dict(role="tool", content=f"{turn}: {len(spoken)}"),
                    dict(role="user", content="on"),
                ]
                assert ids == play.encoder.reply(said)
            assert sample.text == text([i for i in pieces[-1][1] if i not in synced.silent_ids])
            assert sample.transcript == text(sample.ids[sample.prompt_length :])
            ends, at = [], sample.prompt_length
            for sampled, ids in pieces:
                at += len(ids)
                ends += [at - 1] if sampled else []
            stepped = ends if sample.finish_reason == "stop" else ends[: len(sample.turn_rewards)]
            assert [index for index, _ in sample.turn_rewards] == stepped
            assert [reward for _, reward in sample.turn_rewards] == [
                0.5**t for t in range(1, len(stepped) + 1)
            ]
            if sample.finish_reason == "stop":
                assert sample.turns == row["turns"]


def test_reply_closes_a_turn_that_ends_at_a_stop_string(synced, user_file):
    """The environment reads the turn without the string; its reply begins with the end of turn,
    which was not sampled and has no loss."""
    letters = tuple("abcdefghijklmnopqrstuvwxyz")
    play = Play(synced, user_file, stop=letters)
    with stopping(synced, letters):
        groups = play.episodes.generate(play.requests())
    end, closed = synced.tokenizer.convert_tokens_to_ids("<|end_of_turn|>"), 0
    for sample in flat(groups):
        pieces = spans(sample)
        for turn, (_, ids) in enumerate(pieces[1::2], 1):
            spoken = pieces[2 * turn - 2][1]
            text = synced.tokenizer.decode([i for i in spoken if i not in synced.silent_ids])
            text = re.split("[a-z]", text)[0]
            said = [
                dict(role="tool", content=f"{turn}: {len(text)}"),
                dict(role="user", content="on"),
            ]
            reply = play.encoder.reply(said)
            assert ids == (reply if spoken[-1] == end else [end, *reply])
            closed += spoken[-1] == end
    assert closed < sum(sample.turns - 1 for sample in flat(groups)) > 5


def test_conversation_is_rendered_as_by_the_template(synced, user_file):
    """If every turn ends with the template's end of turn, the ids are those of the whole rendered
    conversation."""
    play = Play(synced, user_file)
    end = synced.tokenizer.convert_tokens_to_ids("<|end_of_turn|>")
    messages, ids = [dict(role="user", content="5?")], []
    for turn in ("12", "so <b>", ""):
        ids = ids or play.encoder.prompt(dict(prompt=messages, _source="x:1"), ("prompt",))
        ids = ids + synced.tokenizer(turn)["input_ids"] + [end]
        said = [dict(role="tool", content="x y"), dict(role="user", content="\nand?")]
        ids += play.encoder.reply(said)
        messages += [dict(role="assistant", content=turn), *said]
    whole = synced.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert synced.tokenizer.decode(ids) == whole and ids == synced.tokenizer(whole)["input_ids"]


@torch.no_grad()
def test_engine_and_trainer_agree_on_every_sampled_token(synced, policy, user_file, device):
    groups = Play(synced, user_file)()
    assert sum(s.turns > 2 for s in flat(groups)) > 2
    for mb in pack(flat(groups), 2000, device):
        logprobs_T, *_ = policy(mb, temperature=1.0)
        assert ((logprobs_T - mb.rollout_logprobs_T).abs() * mb.loss_mask_T).max() < 1e-4
        assert (mb.rollout_logprobs_T[~mb.loss_mask_T] == 0).all() and (
            mb.rollout_logprobs_T[mb.loss_mask_T] < 0
        ).all()


def test_episodes_do_not_depend_on_the_split_of_prompts(synced, user_file):
    play = Play(synced, user_file)
    together, apart = play(), [play(slice(i, i + 1))[0] for i in range(len(ROWS))]
    assert [s.ids for s in flat(together)] == [s.ids for s in flat(apart)]
    assert [s.turn_rewards for s in flat(together)] == [s.turn_rewards for s in flat(apart)]
    texts = [
        tuple(ids for sampled, ids in map(tuple, spans(s)) if sampled)
        for s in together[3]
        if s.turns > 1
    ]
    assert len({str(t) for t in texts}) == len(texts), "samples of a prompt are not the same"


def test_no_rank_waits_while_another_of_its_engine_samples(synced, monkeypatch):
    """A rank whose episodes all wait for their environments must not hold up the next round."""
    monkeypatch.setattr(module, "WAIT", math.inf)
    running = SimpleNamespace(running={"0": None}, new=[], step=lambda: None, sample=None)
    episodes = Episodes(running, Args())
    episodes.prompts[0] = episodes.loop.create_task(asyncio.sleep(math.inf))
    assert episodes.advance() == []
    episodes.close()


def test_limits_on_turns_and_tokens_hold(synced, user_file):
    groups = Play(synced, user_file, max_turns=2)()
    assert {s.turns for s in flat(groups[1:])} <= {1, 2} and any(
        s.turns == 2 for s in flat(groups[2:])
    )
    assert all(s.finish_reason == "length" for s in flat(groups[2:])) and all(
        s.loss_mask[-1] for s in flat(groups)
    )
    assert all(
        len(s.turn_rewards) == 2
        for s in flat(groups[2:])
        if s.turns == 2 and len(s.completion_ids) < 190
    )
    play = Play(synced, user_file, max_new_tokens=60)
    groups = play()
    assert all(len(s.completion_ids) <= 60 and s.loss_mask[-1] for s in flat(groups))
    assert all(s.finish_reason == "length" for s in groups[3]) and any(
        s.turns > 1 for s in flat(groups)
    )


# ---- the built-in environments ----


def play_demonstration(name: str, row: dict) -> float:
    """Play the demonstration of a row; the environment must answer as in the row. Return the sum of
    rewards."""
    environment, total = load_environment(name)(), 0.0
    assert environment.reset(row) == row["prompt"] == row["messages"][:1]
    assert row["messages"][-1]["role"] == "assistant"
    at = 1
    while at < len(row["messages"]):
        said, reward, done = environment.step(row["messages"][at]["content"])
        total, at = total + reward, at + 1
        assert done == (at == len(row["messages"]))
        assert done or said == [row["messages"][at]]
        at += 1
    return total


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_tasks_fit_their_environments(name):
    for split in ("train", "test"):
        rows = TASKS[name](split)
        assert rows == TASKS[name](split) and len(rows) >= 200
        scores = [play_demonstration(name, row) for row in rows[:300]]
        assert (
            (0.1 < sum(scores) / len(scores) < 0.2)
            if name == "calculator"
            else all(s == 1 for s in scores)
        )
    assert not TASKS[name]("train")[:200] == TASKS[name]("test")[:200]


@pytest.mark.parametrize(("text", "told", "reward"), [
    ("<calc>3*4</calc>", "3*4=12", 0),
    ("so <calc> (3+5)/16</calc>", "(3+5)/16=1/2", 0),
    ("it is 12", None, 1),
    ("13 - no, 12.0", None, 1),
    ("12 or 13", None, 0),
    ("", None, 0),
    ("-12", None, 0),
    ("9" * 10_000, None, 0),
    *((bad, "error", 0) for bad in (
        "<calc>3**4</calc>", "<calc>", "<calc>3*</calc>", "<calc>1/0</calc>",
        "<calc>__import__('os')</calc>", "<calc>9*" * 50, "<calc></calc>",
        "<calc>" + "(" * 9000 + "</calc>",
    )),
])  # fmt: skip
def test_calculator_evaluates_expressions(text, told, reward):
    environment = Calculator()
    environment.reset(dict(prompt="?", answer="12"))
    said, found, done = environment.step(text)
    assert found == reward and done == (told is None)
    assert done or said[0]["content"].partition(":")[0] == told


def test_guess_number_compares_guesses():
    environment = GuessNumber()
    environment.reset(dict(prompt="?", number=17))
    words = [
        environment.step(text)[0][0]["content"] for text in ("20", "I say 3", "what?", "9" * 10_000)
    ]
    assert words == ["lower", "higher", "a number!", "lower"]
    assert environment.step("17") == ([], 1.0, True)


# ---- names and rows ----


@pytest.mark.parametrize(("name", "words"), [
    ("chess", "unknown; there are calculator, guess_number, path/to/file.py:Class"),
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


def test_bad_rows_are_refused_by_name(tmp_path, user_file):
    args = Args(environment=user_file, reward=("environment",))
    with pytest.raises(
        ValueError, match=r"rows:2: --environment .*Counter fails in reset: KeyError: 'turns'"
    ):
        prompt_maker(args)(dict(prompt="a", _source="rows:2"))
    (tmp_path / "silent.py").write_text(
        "class A:\n    def reset(self, example): return []\n    def step(self, c): ...\n"
    )
    args = dataclasses.replace(args, environment=f"{tmp_path / 'silent.py'}:A")
    with pytest.raises(
        ValueError, match="rows:0: --environment .*A: reset returns no list of messages"
    ):
        prompt_maker(args)(dict(ROWS[0]))
    for flags in (dict(environment="calculator"), dict(reward=("environment",)), dict(max_turns=3)):
        with pytest.raises(
            ValueError, match="need each other|--max_turns 3 has no effect without --environment"
        ):
            Args(**flags)


# ---- training ----


@pytest.fixture(scope="module")
def flags(small, tmp_path_factory):
    """Return flags of a model with short turns and an environment that rewards each turn."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "counter.py").write_text(USER_FILE)
    rows = [dict(prompt=f"{i}?", turns=1 + i % 3) for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    return (
        "--model", talkative(folder / "model", small[1]), "--dataset", folder / "rows.jsonl",
        "--eval_dataset", folder / "eval.jsonl", "--eval_split", "train",
        "--environment", f"{folder / 'counter.py'}:Counter", "--reward", "environment",
        "--max_turns", 3, "--max_new_tokens", 120, "--max_steps", 2, "--prompts_per_step", 4,
        "--samples_per_prompt", 4, "--lr", 1e-4, "--eval_every", 2,
        "--max_logprob_difference", 1e-4, "--engine", "transformers",
    )  # fmt: skip


NUMBERS = (
    "loss", "grad_norm", "reward", "reward_std", "completions/mean_length",
    "completions/mean_turns", "num_tokens", "eval/reward", "entropy",
)  # fmt: skip


@pytest.fixture(scope="module")
def colocated(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("colocated")
    run(1, "grpo.py", *flags, "--output_dir", folder)
    assert any(line.get("completions/mean_turns", 0) > 1.3 for line in metrics(folder))
    return folder


@pytest.mark.slow
def test_gradient_does_not_depend_on_ranks(colocated, flags, tmp_path):
    run(2, "grpo.py", *flags, "--pack_tokens", 300, "--share_prefix", 1, "--output_dir", tmp_path)
    assert_close_metrics(colocated, tmp_path, NUMBERS, rel=1e-5, floor=1e-2)


TWICE = """
class Twice:
    def reset(self, example):
        self.turns = 0
        return [{"role": "user", "content": example["prompt"]}]

    def step(self, completion):
        self.turns += 1
        reward = sum(map(str.isalpha, completion)) / max(1, len(completion))
        return [{"role": "user", "content": "and now?"}], reward, self.turns == 2
"""


@pytest.mark.curve
def test_each_turn_learns_from_its_reward(flags, main, tmp_path):
    """The reward of a turn is its fraction of letters, and each letter ends a turn."""
    (tmp_path / "twice.py").write_text(TWICE)
    environment = f"{tmp_path / 'twice.py'}:Twice"
    extra = (
        "--environment", environment, "--max_steps", 17, "--prompts_per_step", 4,
        "--samples_per_prompt", 8, "--lr", 5e-3, "--max_new_tokens", 60, "--eval_every", 0,
    )  # fmt: skip
    main("grpo", *flags, *extra, "--output_dir", tmp_path / "out")
    rewards = [line["reward"] for line in metrics(tmp_path / "out")]
    assert rewards[0] < 1 and rewards[-1] > 1.5, rewards  # at most 2


@pytest.mark.slow
def test_rollout_ranks_play_the_same_episodes(colocated, flags, tmp_path):
    run(2, "grpo.py", *flags, "--rollout_ranks", 1, "--max_staleness", 0, "--output_dir", tmp_path)
    assert_same_weights(colocated, tmp_path)
    one, other = ((folder / "samples.jsonl").read_text() for folder in (colocated, tmp_path))
    assert one == other and math.isfinite(metrics(tmp_path)[-1]["reward"])
