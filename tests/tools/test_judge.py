"""tools/judge.py against a local endpoint: questions, scores, errors."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers import ROOT
from in_process import Args

from common.metrics.meter import Meter
from common.packs.sample import Completion
from common.rewards.registry import row_check
from common.rewards.total import Rewards
from common.workers.worker import load_file

JUDGE = f"{ROOT}/tools/judge.py"
ROW = dict(prompt="Hi", _source="a:1", rubric=["polite", dict(criterion="short", weight=3)])


@pytest.fixture
def endpoint(monkeypatch):
    """Return a function that starts an endpoint and sets JUDGE_*. It answers a question by the
    first of `replies`, texts or HTTP errors, of a word in it, and drops this reply unless it is the
    last. The function returns the list of the requests."""
    servers = []

    def start(replies: dict[str, list[str | int]]) -> list[dict]:
        requests: list[dict] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                requests.append(body | dict(key=self.headers["authorization"]))
                text = body["messages"][0]["content"]
                of_word = next(found for word, found in replies.items() if word in text)
                reply = of_word.pop(0) if len(of_word) > 1 else of_word[0]
                choices = [dict(message=dict(content=reply))]
                payload = json.dumps(dict(choices=choices)).encode()
                self.send_response(reply if isinstance(reply, int) else 200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(payload)))
                self.send_header("retry-after-ms", "1")
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("JUDGE_MODEL", "m")
        return requests

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(row: dict) -> float:
    """Return the reward of a new process's first call."""
    load_file.cache_clear()
    return asyncio.run(load_file(JUDGE).judge("Hello", row))


def test_reward_is_the_weighted_mean_of_the_last_lines(endpoint, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    requests = endpoint({"polite": ["Score: 3\n**Score: 10**"], "short": ["score: 2.5/10"]})
    assert ask(ROW) == pytest.approx((1 + 3 * 0.25) / 4)
    first, _ = requests
    assert (first["model"], first["temperature"], first["key"]) == ("m", 0, "Bearer secret")
    assert "Prompt:\nHi\n\nAnswer:\nHello\n\nCriterion: " in first["messages"][0]["content"]


@pytest.mark.parametrize(
    "text",
    ["Score: 8 out of 10", "**Score:** 8/10", "Score: 8/10 (good)", "Score：８／１０", "Score: 8."],
)
def test_score_may_have_a_scale_and_a_remark(text, endpoint):
    endpoint({"polite": [text], "short": [text]})
    rubric = '[{"criterion": "polite", "weight": 3}, "short"]'  # JSON text, as in a table
    assert ask(dict(prompt="Hi", rubric=rubric)) == pytest.approx(0.8)


@pytest.mark.parametrize(
    "text", ["It is fine.", "Score: 11", "Score: -3", "Score: 7\nor more", None]
)
def test_reply_without_a_score_is_an_error(text, endpoint):
    endpoint({"Hi": [text]})
    with pytest.raises(ValueError, match="not end with `Score: n`, n from 0 to 10"):
        ask(dict(prompt="Hi", rubric="a"))


def test_run_gets_scores_after_errors_that_may_pass(endpoint, device):
    endpoint({"polite": [429, "Score: 8"], "short": [500, "Score: 4"]})
    load_file.cache_clear()
    rewards = Rewards(Args(reward=(f"{JUDGE}:judge",)), [ROW], None, device)
    group = [Completion([1], [True], row=ROW, text=text) for text in ("Hello", "Bye")]
    total, _, _ = rewards.wait([group], Meter())
    assert total.tolist() == [pytest.approx([0.5, 0.5])]


def test_missing_settings_and_rubrics_are_named_at_the_start(endpoint, monkeypatch):
    def refusal(row: dict) -> str:
        load_file.cache_clear()
        with pytest.raises(ValueError) as error:
            row_check(Args(reward=(f"{JUDGE}:judge",)))(row)
        return str(error.value)

    for name in ("JUDGE_URL", "JUDGE_MODEL"):
        endpoint({})
        monkeypatch.delenv(name)
        assert refusal(ROW).startswith(f"a:1: {name} is not set; tools/judge.py needs it")
    endpoint({})
    assert refusal(dict(prompt="", _source="a:1")).startswith("a:1: no rubric: set JUDGE_RUBRIC")
