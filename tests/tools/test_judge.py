"""tools/judge.py against a local endpoint: scores, further attempts, time-outs, malformed replies,
stored replies, prices."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers import ROOT
from in_process import Args

from common.data.sample import Completion
from common.metrics.meter import Meter
from common.rewards.total import Rewards
from common.rewards.worker import load_file

ROW = dict(prompt="Hi", _source="a:1", rubric=["polite", dict(criterion="short", weight=3)])
USAGE = dict(prompt_tokens=1000, completion_tokens=10)


def reply(content: object) -> tuple[int, object]:
    return 200, dict(choices=[dict(message=dict(content=content))], usage=USAGE)


class Endpoint:
    """Server that answers a question by the first of `replies`, (status, JSON), of a word in it,
    and drops this reply unless it is the last. A status of 0 answers only at the end of the
    test."""

    def __init__(self, replies: dict[str, list[tuple[int, object]]]):
        self.questions: list[dict] = []
        self.ended = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.questions.append(body | dict(key=self.headers["authorization"]))
                text = body["messages"][0]["content"]
                of_word = next(found for word, found in replies.items() if word in text)
                status, value = of_word.pop(0) if len(of_word) > 1 else of_word[0]
                if not status:
                    outer.ended.wait()
                    return
                payload = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def endpoint(monkeypatch):
    """Return a function that starts an endpoint with these replies and sets JUDGE_*."""
    started = []

    def start(replies, **settings):
        started.append(Endpoint(replies))
        values = dict(url=started[-1].url, model="m", backoff=0, retries=2) | settings
        for name, value in values.items():
            monkeypatch.setenv(f"JUDGE_{name.upper()}", str(value))
        return started[-1]

    yield start
    for one in started:
        one.close()


def ask(completion: str = "Hello", row: dict = ROW, times: int = 1) -> list:
    """Return the rewards of a new process's first calls, in turn."""

    async def calls():
        return [await module.judge(completion, row) for _ in range(times)]

    load_file.cache_clear()
    module = load_file(str(ROOT / "tools/judge.py"))
    return asyncio.run(calls())


def test_reward_is_the_weighted_mean_and_cost_that_of_all_tokens(endpoint, tmp_path, monkeypatch):
    file = tmp_path / "judge.yaml"
    file.write_text("input_price: 2\noutput_price: 10\nkey: secret\nurl: replaced")
    monkeypatch.setenv("JUDGE_SETTINGS", str(file))
    server = endpoint(
        {"polite": [reply("Score: 3\n**Score: 10**")], "short": [reply("score: 2.5/10")]}
    )
    ((reward, numbers),) = ask()
    assert reward == pytest.approx((1 + 3 * 0.25) / 4)
    assert numbers == pytest.approx(dict(cost=2 * (1000 * 2 + 10 * 10) / 1e6, cached=0))
    (first, _) = server.questions
    assert (first["model"], first["temperature"], first["key"]) == ("m", 0, "Bearer secret")
    assert "Prompt:\nHi\n\nAnswer:\nHello\n\nCriterion: " in first["messages"][0]["content"]


@pytest.mark.parametrize(
    "text",
    ["Score: 8 out of 10", "**Score:** 8/10", "Score: 8/10 (good)", "Score：８／１０", "Score: 8."],
)
def test_score_may_have_a_scale_and_a_remark(text, endpoint):
    endpoint({"polite": [reply(text)], "short": [reply(text)]})
    rubric = '[{"criterion": "polite", "weight": 3}, "short"]'  # JSON text, as in a table
    assert ask(row=dict(prompt="Hi", rubric=rubric))[0][0] == pytest.approx(0.8)


def test_errors_that_may_pass_are_tried_again(endpoint):
    failures = [(500, "busy"), (429, {})]
    server = endpoint({"Hi": [*failures, reply("Score: 5")]})
    assert ask(row=dict(prompt="Hi", rubric="a"))[0][0] == 0.5
    assert len(server.questions) == 3
    for status, message, attempts in (
        (503, "HTTP 503", 3),
        (401, "HTTP 401", 1),
        (0, "Timeout", 3),
    ):
        server = endpoint({"Hi": [(status, "no")]}, seconds=0.2)
        with pytest.raises(RuntimeError, match=message) as error:
            ask(row=dict(prompt="Hi", rubric="a"))
        assert len(server.questions) == attempts and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply("It is fine."), "not end with `Score: n`, n from 0 to 10: 'It is fine.'"),
        (reply("Score: 11"), "not end with `Score: n`, n from 0 to 10"),
        (reply("Score: -3"), "not end with `Score: n`, n from 0 to 10"),
        (reply("Score: 7\nor more"), "not end with `Score: n`, n from 0 to 10"),
        (reply(None), "the reply has no message"),
        ((200, dict(choices=[])), "the reply has no message"),
        ((200, "<html>"), "the reply is no JSON: '<html>'"),
    ],
)
def test_malformed_reply_is_an_error_and_is_not_stored(answer, message, endpoint, tmp_path):
    server = endpoint({"Hi": [answer]}, cache=tmp_path / "replies.db", retries=0)
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match=message):
            ask(row=dict(prompt="Hi", rubric="a"))
    assert len(server.questions) == 2


def test_stored_reply_needs_no_request(endpoint, tmp_path):
    """Other processes have the stored replies too; another question or model has its own."""
    cache = tmp_path / "new" / "replies.db"
    server = endpoint({"Hi": [reply("Score: 5")]}, cache=cache, input_price=1)
    (first, second) = ask(row=dict(prompt="Hi", rubric="a"), times=2)
    assert first == (0.5, dict(cost=0.001, cached=0)) and second == (0.5, dict(cost=0, cached=1))
    assert ask(row=dict(prompt="Hi", rubric="a")) == [second] and len(server.questions) == 1
    ask("Bye", row=dict(prompt="Hi", rubric="a"))
    assert len(server.questions) == 2


def test_processes_share_the_file_of_replies(endpoint, tmp_path):
    cache = tmp_path / "replies.db"
    endpoint({"Hi": [reply("Score: 5")]}, cache=cache, concurrency=4)

    def many(start: int) -> None:
        load = load_file.__wrapped__(str(ROOT / "tools/judge.py"))

        async def calls():
            texts = [f"{start + n}" for n in range(20)]
            await asyncio.gather(*(load.judge(t, dict(prompt="Hi", rubric="a")) for t in texts))

        asyncio.run(calls())

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(many, (0, 10, 20)))
    answers = ask("39", row=dict(prompt="Hi", rubric="a"))
    assert answers[0][1]["cached"] == 1


def test_settings_and_rubrics_that_are_wrong_are_named(endpoint, device, monkeypatch):
    reward = f"{ROOT}/tools/judge.py:judge"

    def refused(row: dict, message: str) -> None:
        load_file.cache_clear()
        with pytest.raises(ValueError, match=message) as error:
            Rewards(Args(reward=(reward,)), [row], None, device)
        assert "\n" not in str(error.value)

    refused(ROW, "JUDGE_URL is not set; tools/judge.py needs it")
    endpoint({})
    refused(dict(prompt="", _source="a:1"), "a:1: .*no rubric: set JUDGE_RUBRIC")
    monkeypatch.setenv("JUDGE_RETRIES", "two")
    refused(ROW, "JUDGE_RETRIES: expected int, got 'two'")


def test_run_gets_scores_and_costs(endpoint, device):
    endpoint({"polite": [reply("Score: 8")], "short": [(500, ""), reply("Score: 4")]})
    load_file.cache_clear()
    rewards = Rewards(Args(reward=(f"{ROOT}/tools/judge.py:judge",)), [ROW], None, device)
    group = [Completion([1], [True], row=ROW, text=text) for text in ("Hello", "Bye")]
    meter = Meter()
    total, _, _ = rewards([group], meter)
    assert total.tolist() == [pytest.approx([0.5, 0.5])]
    assert meter.reduce()["rewards/judge/cost"] == 0
