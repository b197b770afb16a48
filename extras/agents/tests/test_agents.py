"""Agents: what the endpoint served is what is trained, in the context in which it was served; an
agent that plays an environment has the environment's episodes; bad agents cost one episode."""

import asyncio
import json
import math
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from helpers import ROOT, metrics, short_turns
from in_process import Args
from processes import PATIENCE

from common.config.flags import Limit
from common.metrics.meter import Meter
from common.model.tiny import tiny_model
from common.packs.packing import pack_minibatches, per_sample
from common.packs.sample import Completion
from common.rewards.total import WANTED, Rewards
from common.rollout.engine import SampledTurn
from common.rollout.episodes import Episodes, PromptRequest, in_order
from common.rollout.measure import measure_groups
from common.rollout.prompts import encode_prompts, prompt_columns
from common.text.encode import Encoder
from common.text.tokenizer import load_tokenizer
from extras.agents.dialects import Refusal, of_messages, of_responses
from extras.agents.endpoint import ignored_parameters, limit_of, messages_of

pytest.importorskip("extras.tools")
agents = import_module("extras.agents.agents")
LIMIT = Limit(1200, "--pack_tokens 1199")

CLIENT = """
import asyncio, random, httpx

async def ask(row, base_url, api_key, messages, **body):
    headers = dict(authorization="Bearer " + api_key)
    options = dict(headers=headers, timeout=None, verify=False)  # certificates load slowly
    async with httpx.AsyncClient(base_url=base_url, **options) as client:
        answer = await client.post("/chat/completions", json=dict(messages=messages, **body))
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"], ""
    (choice,) = answer.json()["choices"]
    return 200, choice["message"], choice["finish_reason"]
"""
ONE_QUESTION = (
    CLIENT
    + """
async def play(row, base_url, api_key):
    await ask(row, base_url, api_key, [dict(role="user", content=row["prompt"])])
"""
)
# Draws what it asks, several at once: extended, forked, rewritten, shortened, invented histories.
WANDERER = (
    CLIENT
    + """
async def play(row, base_url, api_key):
    draw = random.Random(row["seed"])
    histories = [[dict(role="user", content=row["prompt"])]]
    for number in range(6):
        asked = []
        for k in range(draw.choice([1, 1, 3])):
            messages = list(draw.choice(histories))
            match draw.choice(["extend", "extend", "rewrite", "shorten", "system", "invent"]):
                case "rewrite":
                    messages[0] = dict(role="user", content=f"{number}?")
                case "shorten":
                    messages = messages[-2:]
                case "system":
                    messages = [dict(role="system", content="be brief")] + messages
                case "invent":
                    messages += [dict(role="assistant", content="7"), dict(role="user", content="")]
            if messages[-1]["role"] == "assistant":
                messages.append(dict(role=draw.choice(["user", "tool"]), content=f"go {k}"))
            asked.append(messages)
        limit = draw.choice([None, 4])
        answers = await asyncio.gather(
            *(ask(row, base_url, api_key, m, max_tokens=limit) for m in asked))
        for messages, (status, message, _) in zip(asked, answers):
            if status == 200:
                message["refusal"] = None  # a field that clients add
                histories.append([*messages, message])
    return len(histories)
"""
)
# Replies with the number of characters of a turn, for as many turns as the row has.
COUNTER = """
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
PLAYER = (
    CLIENT
    + COUNTER
    + """
async def play(row, base_url, api_key):
    environment, total, done = Counter(), 0.0, False
    messages = environment.reset(row)
    while not done:
        _, message, reason = await ask(row, base_url, api_key, messages)
        if reason == "length":
            return total
        said, reward, done = environment.step(message["content"])
        total += reward
        messages += [message, *said]
    return total
"""
)
LIAR = (
    CLIENT
    + """
import os, pathlib, time

async def play(row, base_url, api_key):
    async def say(*texts, key=api_key, **body):
        roles = ["user", "assistant", "user"]
        messages = [dict(role=role, content=text) for role, text in zip(roles, texts)]
        status, answer, _ = await ask(row, base_url, key, messages, **body)
        return status, answer.get("code")

    match row["trouble"]:
        case "silent":
            return 1.0
        case "exit":
            await say("a")
            await say("a" * 3000)  # no excuse
            os._exit(3)
        case "raise":
            await say("a")
            raise KeyError("lost")
        case "none":
            await say("a")
        case "text":
            await say("a")
            return "1.0"
        case "blocks":
            time.sleep(1000)
        case "sleeps":
            await asyncio.sleep(1000)
        case "left":  # it ends before its second answer comes
            said = [dict(role="user", content="a")]
            _, message, _ = await ask(row, base_url, api_key, said)
            said += [message, dict(role="user", content="b")]
            asyncio.create_task(ask(row, base_url, api_key, said))
            await asyncio.sleep(0.2)
            return 1.0
        case "long":  # an error after a limit is a truncated episode
            assert await say("a" * 3000) == (400, "context_length_exceeded")
            await say("a")
            status, code = await say("a" * 3000)
            raise RuntimeError(code)
        case "greedy":
            statuses = [await say("a") for _ in range(12)]
            assert statuses[8:] == [(400, "max_turns_exceeded")] * 4
            await say("a")
        case "liar":
            assert await say("a", key="another") == (401, None)
            for body in (dict(n=2), dict(logprobs=True), dict(response_format=dict(type="json")),
                         dict(tool_choice="required"), dict(max_tokens=0), dict(stop=["a"]),
                         dict(tools=[3])):
                assert await say("a", **body) == (400, None), body
            pathlib.Path(row["file"]).write_text(f"{base_url} {api_key}")
            assert (await say("a", "invented", "b"))[0] == 200
            return 0.5
"""
)
# Calls a tool, sends the result, and asks once more; the last request is streamed.
CALLER = """
import json, openai

async def play(row, base_url, api_key):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    async def ask(**options):
        return await client.chat.completions.create(
            model="policy", messages=messages, tools=row["schemas"], **options)
    messages = [dict(role="user", content="2 + 3?")]
    answer = (await ask()).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", dict(a=2, b=3))
    messages += [answer.message, dict(role="tool", tool_call_id=call.id, content="5")]
    chunks = [c async for c in await ask(stream=True, stream_options=dict(include_usage=True))]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return float(text) + chunks[-1].usage.completion_tokens
"""
SPEAKERS = (Path(__file__).parent / "speakers.py").read_text()
TROUBLES = "silent exit raise none text left long greedy liar".split()
with_one_engine = pytest.mark.parametrize("engine", ["transformers"], indirect=True)


class Play:
    """Episodes of some rows, and what the endpoint served."""

    def __init__(self, engine, rows: list[dict], **flags):
        flags = dict(max_new_tokens=200, reward=("environment",)) | flags
        self.args = Args(**flags)
        self.rows = [dict(row) for row in rows]
        self.encoder = Encoder(engine.tokenizer, self.args)
        columns = prompt_columns(self.args, self.rows)
        self.prompts = encode_prompts(self.rows, columns, self.encoder, LIMIT, self.args)
        self.engine, self.episodes = engine, Episodes(engine, self.args)
        self.served: list[SimpleNamespace] = []
        if self.args.agent:
            self.answer = self.episodes.partner._answer
            self.episodes.partner._answer = self.recorded

    def recorded(self, agent, number, request, branch, messages) -> dict:
        completion = request.completion
        turn = SimpleNamespace(
            episode=(agent.prompt.number, agent.index), context=completion.ids[: request.start],
            ids=completion.ids[request.start :], text=completion.text,
            reason=completion.finish_reason, messages=messages,
        )  # fmt: skip
        self.served.append(turn)
        return self.answer(agent, number, request, branch, messages)

    def __call__(self, n: int) -> list[list[Completion]]:
        requests = [
            PromptRequest(i, *self.prompts[i], 31 * i, n, 1.0) for i in range(len(self.prompts))
        ]
        with short_turns(self.engine):
            return in_order(self.episodes.generate(requests, Meter()))

    def one_by_one(self, seed: int) -> list[Completion]:
        """Return one completion of each prompt, which the engine samples alone."""
        requests = [PromptRequest(i, *x, seed, 1, 1.0) for i, x in enumerate(self.prompts)]
        with short_turns(self.engine):
            return [one for x in requests for _, (one,) in self.episodes.generate([x], Meter())]


def flat(groups):
    return [sample for group in groups for sample in group]


@pytest.fixture
def play(synced, tmp_path):
    """`play(source, rows, ...)`: an agent's episodes; they are closed at the end."""
    plays = []

    def make(source, rows, **flags):
        file = tmp_path / "agent.py"
        file.write_text(source)
        flags = dict(agent=f"{file}:play", environment_timeout=PATIENCE) | flags
        plays.append(Play(synced, rows, **flags))
        return plays[-1]

    yield make
    for each in plays:
        each.episodes.close()


def trained_turns(sequence) -> list[tuple[list[int], list[int]]]:
    """Return the context and the ids of each run of trained tokens."""
    mask = [*sequence.loss_mask, False]
    starts = [i for i, trained in enumerate(mask) if trained and not mask[i - 1]]
    turns = [(start, mask.index(False, start)) for start in starts]
    return [(sequence.ids[:start], sequence.ids[start:end]) for start, end in turns]


@with_one_engine
@torch.no_grad()
def test_what_was_served_is_trained_in_the_context_in_which_it_was_served(
    play, synced, policy, device
):
    rows = [dict(prompt=f"{i}?", seed=i, _source=f"rows:{i}") for i in range(4)]
    wander = play(WANDERER, rows, max_turns=20, max_new_tokens=60)
    groups = wander(2)
    assert not any(sample.error for sample in flat(groups))
    assert sum(len(sample.branches) for sample in flat(groups)) > 10
    kinds = []
    for number, group in enumerate(groups):
        for sample in group:
            served = [s for s in wander.served if s.episode == (number, group.index(sample))]
            trained = [turn for x in sample.sequences for turn in trained_turns(x)]
            assert sorted(trained) == sorted((s.context, s.ids) for s in served)
            assert sample.text == served[-1].text and sample.requests >= len(served)
            assert sum(x.turns for x in sample.sequences) == len(served)
            for i, turn in enumerate(served):
                begun = wander.encoder.prompt(
                    dict(_source="x", messages=turn.messages), ("messages",)
                )
                continued = [
                    before.context + before.ids + wander.encoder.reply(new, last)
                    for before in served[:i]
                    if (new := after(before, turn.messages)) is not None
                    for last in [before.ids[-1] if before.reason == "length" else None]
                ]
                kinds.append(turn.context in continued)
                assert turn.context == [*begun] or kinds[-1]
                if continued and not kinds[-1]:  # others have continued it before
                    assert any(b.context + b.ids == t.context[: len(b.context + b.ids)]
                               for b in served[:i] for t in served[:i] if b is not t)  # fmt: skip
    assert 10 < sum(kinds) < len(kinds) - 10
    # trainer and engine agree, and all sequences of an episode have its number
    counts_BG = [[sum(sum(x.loss_mask) for x in s.sequences) for s in group] for group in groups]
    numbers_BG = torch.arange(8.0).reshape(4, 2)
    for share_prefix in (0, 16):
        (mbs,) = pack_minibatches(groups, range(4), 1, 1500, device, share_prefix)
        assert any(mb.compact for mb in mbs) == (share_prefix > 0)
        for mb in mbs:
            logprobs_T, *_ = policy(mb, temperature=1.0)
            assert ((logprobs_T - mb.rollout_logprobs_T).abs() * mb.loss_mask_T).max() < 1e-4
        tokens_BG = per_sample(mbs, [mb.sequence_sums(mb.loss_mask_T) for mb in mbs], (4, 2))
        assert tokens_BG.tolist() == counts_BG
        sums = sum(mb.sequence_sums(mb.on_tokens(numbers_BG)).sum() for mb in mbs)
        assert sums == (tokens_BG * numbers_BG).sum()


def test_a_run_trains_on_an_agent_and_writes_no_trace(main, online, tmp_path):
    (tmp_path / "agent.py").write_text(ONE_QUESTION)
    flags = ("--agent", f"{tmp_path}/agent.py:play", "--prompt_format", "chat", "--max_steps", 1)
    main("grpo", *online, *flags, "--output_dir", tmp_path / "run")
    (line,) = metrics(tmp_path / "run")
    assert line["agent/requests"] == 1 and line["grad_norm"] >= 0
    assert not (tmp_path / "run" / "trace").exists()


def after(before, messages: list[dict]) -> list[dict] | None:
    """Return the messages after an earlier turn that they continue."""
    history = [*before.messages, dict(role="assistant", content=before.text)]
    new = messages[len(history) :]
    is_continued = new and messages[: len(history)] == history
    return new if is_continued and all(m["role"] != "assistant" for m in new) else None


@with_one_engine
def test_an_agent_that_plays_an_environment_has_its_episodes(play, synced, tmp_path):
    """Its ids are those of the environment's episodes, also with limits on turns and tokens."""
    (tmp_path / "counter.py").write_text(COUNTER)
    rows = [dict(prompt=f"{n}?", turns=n, _source=f"rows:{n}") for n in (1, 2, 3, 9)]
    environment = f"{tmp_path / 'counter.py'}:Counter"
    for flags in (dict(max_turns=3), dict(max_new_tokens=60)):
        flags |= dict(environment_timeout=PATIENCE)
        expected = Play(synced, rows, environment=environment, **flags)
        samples = flat(play(PLAYER, rows, **flags)(1))
        for sample, other in zip(samples, flat(expected(1)), strict=True):
            assert sample.ids == other.ids and sample.loss_mask == other.loss_mask
            assert (sample.finish_reason, sample.turns) == (other.finish_reason, other.turns)
            assert sample.prompt_length == other.prompt_length and not sample.error
            assert not sample.branches
        assert any(s.finish_reason == "length" and s.turns > 1 for s in samples)
        expected.episodes.close()


@with_one_engine
def test_bad_agents_cost_an_episode(play, synced, tmp_path, device):
    rows = [dict(trouble=x, file=str(tmp_path / "key"), _source=f"rows:{x}") for x in TROUBLES]
    bad = play(LIAR, rows, max_reward_errors=1.0, max_new_tokens=30)
    partner = bad.episodes.partner

    async def sample(request) -> None:
        await synced.sample(request)
        agents = [a for a in partner.agents.values() if asyncio.current_task() in a.turns]
        if agents and agents[0].prompt.row["trouble"] == "left" and agents[0].requests == 2:
            while agents[0] in partner.agents.values():
                await asyncio.sleep(0.01)

    partner.engine = SimpleNamespace(sample=sample, version=0)
    groups = dict(zip(TROUBLES, bad(1), strict=True))
    errors = {trouble: group[0].error for trouble, group in groups.items() if group[0].error}
    assert errors.pop("raise").startswith("KeyError: 'lost' (line ")
    assert errors == dict(
        silent="the agent got no completion", exit="the process died",
        none="the agent returned None; --reward environment needs a number",
        text=f"TypeError: returned '1.0', not a number; {WANTED}",
    )  # fmt: skip
    rewards = Rewards(bad.args, bad.rows, synced.tokenizer, device)
    meter = Meter()
    total, *_ = rewards.wait(list(groups.values()), meter)
    measure_groups(meter, list(groups.values()), total, {})
    values = dict(zip(TROUBLES, total[:, 0].tolist(), strict=True))
    found = {trouble: value for trouble, value in values.items() if not math.isnan(value)}
    assert found == dict(left=1, long=0, greedy=0, liar=0.5)
    assert not any(groups["silent"][0].loss_mask)
    (left,) = groups["left"][0].sequences
    assert left.turns == 1 and all(left.loss_mask[left.prompt_length :])
    assert groups["long"][0].finish_reason == "length" and groups["long"][0].requests == 3
    assert groups["greedy"][0].requests == 13 and len(groups["greedy"][0].branches) == 7
    (invented,) = groups["liar"][0].sequences
    assert "invented" in synced.tokenizer.decode(invented.prompt_ids)
    url, token = (tmp_path / "key").read_text().split()
    headers = dict(authorization=f"Bearer {token}")

    async def late():
        async with httpx.AsyncClient(headers=headers, verify=False) as client:
            return await client.post(f"{url}/chat/completions", json=dict(messages=[]))

    assert bad.episodes.loop.run_until_complete(late()).status_code == 401


@with_one_engine
def test_hanging_agents_are_killed(play):
    rows = [dict(trouble=trouble, _source="rows:1") for trouble in ("blocks", "sleeps")]
    groups = play(LIAR, rows, environment_timeout=0.2)(1)
    assert [sample.error for sample in flat(groups)] == ["no answer within 0.2 s"] * 2


HOSTILE = (
    CLIENT
    + """
import socket
from urllib.parse import urlsplit

async def play(row, base_url, api_key):
    address = urlsplit(base_url)
    place = address.hostname, address.port
    host = f"host: {address.netloc}\\r\\n"
    key = host + f"authorization: Bearer {api_key}\\r\\n"

    async def send(text, wait=True):
        reader, writer = await asyncio.open_connection(*place)
        writer.write(text.encode("latin-1"))
        return (await reader.read(9999)).decode() if wait else (reader, writer)

    def post(body, head=key, page="chat/completions"):
        length = f"content-length: {len(body)}\\r\\n\\r\\n"
        return send(f"POST /v1/{page} HTTP/1.1\\r\\n" + head + length + body)

    for line in ("garbage\\r\\n\\r\\n", "GET\\r\\n\\r\\n", "\\x16\\x03\\x01\\r\\n\\r\\n"):
        assert "HTTP/1" in await send(line)
    said = '{"messages": [{"role": "user", "content": "a"}]'
    assert " 401 " in await post(said + "}", host)
    for body in ("{", "[]", "\\xff", "[" * 99999, '{"messages": 3}', '{"\\\\ud800x": 1}',
                 said + ', "\\\\ud800x": 1}', said + ', "max_tokens": true}',
                 said + ', "tools": "\\\\ud800"}'):
        assert " 400 " in await post(body), body
    for body in ("{}", '{"messages": 3}', '{"messages": [3]}', '{"messages": [{"role": 3}]}',
                 '{"messages": [{"role": "user", "content": [3]}]}', '{"input": [[]]}',
                 '{"input": {"a": 1}}', '{"messages": [], "system": [{"type": "text"}]}'):
        for page in ("messages", "messages/count_tokens", "responses"):
            answer = await post(body, page=page)
            assert " 400 " in answer and '"type": "error"' in answer, answer
    assert " 413 " in await post(said + ', "user": "' + "a" * (1 << 22) + '"}')
    assert " 404 " in await send(f"GET /v1/nothing HTTP/1.1\\r\\n{key}\\r\\n")
    begun = "GET /v1/models HTTP/1.1\\r\\nx: " + "a" * 5000
    half = [await send(begun, wait=False) for _ in range(40)]
    status, *_ = await ask(row, base_url, api_key, [dict(role="user", content="a")])
    assert status == 200
    for reader, _ in half[:20]:  # which the endpoint closes
        try:
            await reader.read()
        except ConnectionResetError:
            pass
    for _, writer in half:
        writer.close()
    reader, writer = await send(begun, wait=False)
    for _ in range(40):  # which have ended before it says its key
        await send("garbage\\r\\n\\r\\n")
    writer.write(f"\\r\\n{key}\\r\\n".encode())
    assert " 200 " in (await reader.readline()).decode()
    return 1.0
"""
)


@with_one_engine
def test_the_endpoint_answers_whatever_is_sent(play, monkeypatch, capfd):
    """It prints nothing meanwhile: the terminal belongs to the run."""
    monkeypatch.setattr("extras.agents.endpoint.STRANGERS", 20)
    hostile = play(HOSTILE, [dict(_source="rows:1")], max_turns=40, max_new_tokens=60)
    ((sample,),) = hostile(1)
    assert not sample.error and sample.turn_rewards[0][1] == 1.0
    assert sample.requests == 22, "of which the key is right and the body an object"
    assert "Traceback" not in capfd.readouterr().err


def test_zero_is_a_parameter_and_false_is_none():
    body = dict(temperature=0, seed=0, n=1, logprobs=False, stop=None, top_p=1)
    assert ignored_parameters(body) == ["temperature", "top_p", "seed"]
    with pytest.raises(Refusal, match="top_logprobs 0: not supported"):
        ignored_parameters(dict(top_logprobs=0))


@pytest.mark.parametrize(("code", "words"), [
    ("", "has no function play"),
    ("def play(row, base_url, api_key): ...", "not an async function; write it as async def"),
    ("async def play(row, base_url): ...", "too many positional arguments; write it as"),
])  # fmt: skip
def test_a_function_that_is_no_agent_is_refused(code, words, tmp_path):
    (tmp_path / "file.py").write_text(code)
    with pytest.raises(ValueError, match=f"--agent .*file.py:play: .*{words}"):
        agents.load_agent(f"{tmp_path / 'file.py'}:play")


@with_one_engine
def test_calls_of_tools_are_served_and_their_results_continue_the_branch(play, synced, monkeypatch):
    """The episode has the ids and the mask of the same conversation in a data set."""
    function = dict(name="add", description="Add.", parameters=dict(type="object", properties={}))
    schemas = [dict(type="function", function=function)]
    args = Args(chat_template=str(ROOT / "configs/templates/tiny_tools.jinja"))
    tokenizer = load_tokenizer(tiny_model(), args)
    monkeypatch.setattr(synced, "tokenizer", tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|end_of_turn|>")
    call = dict(name="add", arguments=dict(a=2, b=3))
    texts = iter([f"<tool_call>{json.dumps(call)}</tool_call>", "5"])

    def write(meter: Meter) -> list[tuple[str, SampledTurn]]:
        """Return the next text in place of a sampled turn."""
        (name,) = synced.running
        ids = [*tokenizer(next(texts))["input_ids"], end]
        return [(name, SampledTurn(ids, [-1.0] * len(ids), [0] * len(ids), "stop"))]

    monkeypatch.setattr(synced, "_step", write)
    monkeypatch.setattr(synced, "_add", lambda name, request: None)
    calls = play(CALLER, [dict(schemas=schemas, _source="rows:1")])
    ((sample,),) = calls(1)
    assert not sample.error and sample.turn_rewards == [(len(sample.ids) - 1, 5.0 + 2)]
    messages = [
        dict(role="user", content="2 + 3?"),
        dict(role="assistant", content="", tool_calls=[dict(type="function", function=call)]),
        dict(role="tool", content="5"),
        dict(role="assistant", content="5"),
    ]
    row = dict(messages=messages, tools=schemas, _source="rows:1")
    (same,) = calls.encoder.sft(row, ("messages",))
    assert sample.ids == [*same.ids] and sample.loss_mask == [*same.loss_mask]
    assert sample.turns == 2


# ---- dialects ----


def spoken(ways: list[tuple[str, str]], **said: object) -> list[dict]:
    """Return rows for speakers.py, each with the same conversation."""
    said = dict(system=["be brief", ", or not"], functions=[], _source="rows:1") | said
    return [dict(dialect=dialect, way=way) | said for dialect, way in ways]


BY_HTTP = [("chat", "whole"), *product(("messages", "responses"), ("whole", "stream"))]
CLIENTS = {"messages": "anthropic", "responses": "openai"}


def assert_same_episodes(samples: list[Completion], turns: int) -> None:
    first = samples[0]
    for sample in samples:
        assert not sample.error and not sample.branches and sample.turns == turns
        assert sample.requests == turns and sample.turn_rewards == [(len(first.ids) - 1, turns)]
        assert sample.ids == first.ids and sample.loss_mask == first.loss_mask
        assert sample.rollout_logprobs == first.rollout_logprobs


@with_one_engine
def test_a_sampled_episode_has_the_same_tokens_in_each_dialect(play, capfd):
    samples = play(SPEAKERS, spoken(BY_HTTP, asks=["a?", "b", "c"])).one_by_one(seed=7)
    assert_same_episodes(samples, turns=3)
    assert len({*samples[0].rollout_logprobs}) > 10
    ignored = "--agent: thinking, output_config, x-anthropic-billing-header of requests have no"
    assert capfd.readouterr().out.count(ignored) == 1


@with_one_engine
def test_an_episode_with_calls_has_the_same_tokens_in_each_dialect(play, synced, monkeypatch):
    """If the official clients are installed, they must be able to read the streams."""
    args = Args(chat_template=str(ROOT / "configs/templates/tiny_tools.jinja"))
    tokenizer = load_tokenizer(tiny_model(), args)
    monkeypatch.setattr(synced, "tokenizer", tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|end_of_turn|>")
    calls = [dict(name="add", arguments=dict(a=a, b=[1.5, "é"])) for a in (2, 3)]
    one, two = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
    texts = [f"\n{one}", f"two\n{one}{two}", "5", "bye"]

    def write(meter: Meter) -> list[tuple[str, SampledTurn]]:
        """Return the text of each turn in place of a sampled one."""
        turns = []
        for name, request in synced.running.items():
            ids = [*tokenizer(texts[request.completion.turns - 1])["input_ids"], end]
            turns.append((name, SampledTurn(ids, [-1.0] * len(ids), [0] * len(ids), "stop")))
        return turns

    monkeypatch.setattr(synced, "_step", write)
    monkeypatch.setattr(synced, "_add", lambda name, request: None)
    schema = dict(type="object", properties=dict(a=dict(type="integer")))
    functions = [dict(name="add", description="Add.", parameters=schema)]
    found = {dialect: name for dialect, name in CLIENTS.items() if find_spec(name)}
    ways = [*BY_HTTP, *product(found, ["client"])]
    imports = "".join(f"import {name}\n" for name in found.values())
    rows = spoken(ways, functions=functions, asks=["2 + 3?", "thanks"])
    samples = flat(play(imports + SPEAKERS, rows, max_new_tokens=600)(1))
    assert_same_episodes(samples, turns=4)


ASKED = [dict(role="user", content="a")]
IMAGE = dict(type="image", source=dict(type="url", url="http://a/b.png"))


@pytest.mark.parametrize(("read", "body", "problem"), [
    (dict, dict(messages=[dict(role="user", content=[dict(type="image_url", image_url="a")])]),
     "messages: an image: not supported"),
    (of_messages, dict(messages=[dict(role="user", content=[IMAGE])]),
     "content of type image: not supported; give text and calls"),
    (of_messages, dict(messages=ASKED, stop_sequences=["a"]), "stop_sequences .*: not supported"),
    (of_messages, dict(messages=ASKED, tool_choice=dict(type="any")), "tool_choice .*: not supp"),
    (of_messages, dict(messages=ASKED, output_config=dict(format=dict(type="json_schema"))),
     "response_format .*: not supported"),
    (of_messages, dict(messages=ASKED, tools=[dict(type="web_search_20250305", name="a")]),
     "tools: web_search_20250305 has no schema; give tools that the agent runs"),
    (of_messages, dict(messages=[*ASKED, dict(role="assistant", content="b")]),
     "a turn cannot be continued"),
    (of_messages, dict(messages=ASKED, max_tokens=0), "max_tokens 0: must be a positive integer"),
    (of_responses, dict(input="a", previous_response_id="b"), "previous_response_id .*: not supp"),
    (of_responses, dict(input=[dict(type="reasoning", summary=[])]), "content of type reasoning"),
    (of_responses, dict(input="a", tools=[dict(type="web_search")]), "tools: web_search has no sc"),
    (of_responses, dict(input="a", text=dict(format=dict(type="json_object"))), "response_format"),
    (of_responses, dict(input="a", truncation="auto"), "truncation 'auto': not supported"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_in_one_line(read, body, problem):
    with pytest.raises(Refusal, match=problem):
        request = read(body)
        ignored_parameters(request)
        limit_of(request, 9)
        messages_of(request)


def test_what_has_no_effect_is_named():
    result = dict(type="tool_result", tool_use_id="a", is_error=True)
    body = dict(messages=[dict(role="user", content=[result])], thinking=dict(type="adaptive"),
                context_management=dict(edits=[]), service_tier="auto", system="a")  # fmt: skip
    ignored = ["thinking", "context_management", "is_error"]
    assert ignored_parameters(of_messages(body)) == ignored
    body = dict(input="a", reasoning=dict(effort="low"), text=dict(verbosity="low"), store=True)
    assert ignored_parameters(of_responses(body)) == ["reasoning", "text"]
