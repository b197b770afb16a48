"""Reward of a judge behind an endpoint of chat completions, such as `vllm serve`
(extras/judges/README.md).

    JUDGE_URL=http://localhost:8000/v1 JUDGE_MODEL=Qwen/Qwen3-8B JUDGE_RUBRIC='It is polite.' \\
        python grpo.py ... --reward tools/judge.py:judge --reward_timeout 300

Settings are environment variables with the prefix JUDGE_, or `name: value` lines of the YAML file
that JUDGE_SETTINGS names. The reward is the weighted mean of the scores of the criteria, from 0 to
1. Beside it are the numbers `cost` and `cached`."""

import asyncio
import hashlib
import json
import os
import random
import re
import sqlite3
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from common.rewards.functions import from_json, plain

QUESTION = """\
Prompt:
{prompt}

Answer:
{completion}

Criterion: {criterion}

How well does the answer meet the criterion? Give a short reason. Then end with a line
Score: n
where n is a number from 0 (not at all) to 10 (fully)."""
SCORE = re.compile(
    r"\W*Score\W*?(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*10)?(?: *\([^()]*\))?\W*", re.IGNORECASE
)
RETRIED = (408, 409, 429, *range(500, 600))  # HTTP status of errors that may pass


class Settings(NamedTuple):
    """Settings by their names in lower case: JUDGE_URL sets `url`."""

    url: str = ""
    """address of the endpoint up to /v1; required"""
    model: str = ""
    """name of the model there; required"""
    key: str = ""
    """API key, if the endpoint needs one"""
    rubric: str = ""
    """criterion for rows without a column `rubric`"""
    question: str = QUESTION
    """text with {prompt}, {completion}, {criterion}, or columns in braces"""
    concurrency: int = 16
    """requests in flight, per rank"""
    retries: int = 4
    """further attempts after errors that may pass"""
    backoff: float = 1.0
    """seconds before the first further attempt; doubled for each next one"""
    seconds: float = 60.0
    """time limit of one attempt"""
    max_tokens: int = 1024
    """maximum length of a reply"""
    input_price: float = 0.0
    """price of a million tokens of questions"""
    output_price: float = 0.0
    """price of a million tokens of replies"""
    cache: str = ""
    """SQLite file with the replies, shared by all processes of a machine; empty: none"""


# ---- settings, rubrics ----


@cache
def settings() -> Settings:
    """Return the settings. Raises `ValueError` for an unknown name or a wrong value."""
    file = os.environ.get("JUDGE_SETTINGS")
    values = yaml.safe_load(Path(file).read_text(encoding="utf-8")) if file else {}
    if not isinstance(values, dict):
        raise ValueError(f"JUDGE_SETTINGS {file}: expected `name: value` lines")
    for name in Settings._fields:
        if f"JUDGE_{name.upper()}" in os.environ:
            values[name] = os.environ[f"JUDGE_{name.upper()}"]
    for name, value in values.items():
        if name not in Settings._fields:
            raise ValueError(f"JUDGE_SETTINGS {file}: unknown name {name}")
        kind = type(Settings._field_defaults[name])
        try:
            values[name] = kind(value)
        except (TypeError, ValueError):
            problem = f"expected {kind.__name__}, got {value!r:.50}"
            raise ValueError(f"JUDGE_{name.upper()}: {problem}") from None
    for name in ("url", "model"):
        if not values.get(name):
            raise ValueError(f"JUDGE_{name.upper()} is not set; tools/judge.py needs it")
    return Settings(**values)


def criteria_of(row: dict) -> list[tuple[str, float]]:
    """Return the criteria of a row with their weights. Raises `ValueError` for a row without."""
    rubric = from_json(row.get("rubric") or settings().rubric)
    rubric = [rubric] if isinstance(rubric, str | dict) else rubric
    criteria = []
    for one in rubric if isinstance(rubric, list) else ():
        one = dict(criterion=one) if isinstance(one, str) else one
        weight = 1.0 if one.get("weight") is None else float(one["weight"])
        criteria.append((str(one["criterion"]).strip(), weight))
    are_usable = all(text and weight >= 0 for text, weight in criteria)
    if not are_usable or not any(weight for _, weight in criteria):
        raise ValueError("no rubric: set JUDGE_RUBRIC, or give the row criteria with weights > 0")
    return criteria


# ---- replies ----


@cache
def client():
    """Return the client of this process, and its limit of requests in flight."""
    try:
        import httpx
    except ImportError as error:
        raise ImportError("tools/judge.py needs httpx; pip install onefile[judge]") from error
    headers = {"Authorization": f"Bearer {settings().key}"} if settings().key else {}
    limits = httpx.Limits(max_connections=settings().concurrency)
    http = httpx.AsyncClient(headers=headers, timeout=settings().seconds, limits=limits)
    return http, asyncio.Semaphore(settings().concurrency)


@cache
def stored() -> sqlite3.Connection:
    """Return the replies of this process and others. SQLite locks the file for a write."""
    Path(settings().cache).parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(settings().cache, timeout=60, isolation_level=None)
    database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT)")
    return database


async def answered(body: dict) -> dict:
    """Return the reply of the endpoint, a JSON object. Raises `RuntimeError` after the last attempt
    and for an error that does not pass."""
    import httpx

    http, in_flight = client()
    for attempt in range(settings().retries + 1):
        wait = settings().backoff * 2**attempt * random.uniform(0.5, 1.5)
        try:
            async with in_flight:
                response = await http.post(f"{settings().url}/chat/completions", json=body)
            if response.status_code == 200:
                return response.json()
            problem = f"HTTP {response.status_code}: {response.text[:200]}"
            if response.status_code not in RETRIED:
                break
            given = response.headers.get("retry-after", "")
            wait = float(given) if given.isdecimal() else wait
        except httpx.TransportError as error:  # also a time-out
            problem = f"{type(error).__name__} {error}"
        except json.JSONDecodeError:
            problem = f"the reply is no JSON: {response.text[:200]!r}"
        if attempt < settings().retries:
            await asyncio.sleep(wait)
    raise RuntimeError(f"{settings().url}: {problem}")


async def score(question: str) -> tuple[float, float, float]:
    """Return the score of the reply to a question, from 0 to 1; its price, 0 if it was stored; and
    whether it was stored. Raises `ValueError` for a reply without score."""
    messages = [dict(role="user", content=question)]
    body = dict(model=settings().model, messages=messages, temperature=0)
    body |= dict(max_tokens=settings().max_tokens)
    text = json.dumps([settings().url, body], sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()
    found = None
    if settings().cache:
        found = stored().execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
    reply = json.loads(found[0]) if found else await answered(body)
    try:
        content = reply["choices"][0]["message"]["content"]
        score = SCORE.fullmatch(plain(content.strip().rpartition("\n")[2]))  # the last line
    except (LookupError, TypeError, AttributeError):
        raise ValueError(f"the reply has no message: {json.dumps(reply):.200}") from None
    if score is None or not 0 <= float(score[1]) <= 10:
        raise ValueError(
            f"the reply does not end with `Score: n`, n from 0 to 10: {content[-200:]!r}"
        )
    if settings().cache and not found:
        # A reply without score is not stored: a later attempt may have one.
        row = (key, json.dumps(reply))
        stored().execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", row)
    usage = {} if found else reply.get("usage") or {}
    cost = settings().input_price * usage.get("prompt_tokens", 0)
    cost += settings().output_price * usage.get("completion_tokens", 0)
    return float(score[1]) / 10, cost / 1e6, float(bool(found))


# ---- the reward ----


def question_of(completion: str, row: dict, criterion: str) -> str:
    prompt = row.get("prompt") or row.get("question") or ""
    if isinstance(prompt, list):
        prompt = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
    values = dict(prompt=prompt, completion=completion, criterion=criterion)
    return settings().question.format_map(row | values)


async def judge(completion: str, row: dict) -> tuple[float, dict[str, float]]:
    """Return the weighted mean score of the criteria, and the numbers `cost`, in the unit of the
    prices, and `cached`, the fraction of replies that were stored."""
    criteria = criteria_of(row)
    questions = [question_of(completion, row, text) for text, _ in criteria]
    answers = await asyncio.gather(*map(score, questions))
    total = sum(weight for _, weight in criteria)
    pairs = zip(answers, criteria, strict=True)
    reward = sum(weight * one for (one, _, _), (_, weight) in pairs) / total
    cached = sum(was_stored for *_, was_stored in answers) / len(answers)
    return reward, dict(cost=sum(cost for _, cost, _ in answers), cached=cached)


def check(row: dict) -> None:
    """Raise `ValueError` at the start for wrong settings, or a row that cannot be asked about."""
    for text, _ in criteria_of(row):
        question_of("", row, text)


judge.check = check
judge.prepare = client  # in each process, before the first call
