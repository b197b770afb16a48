"""A reward that asks a chat model behind an endpoint, such as `vllm serve`, for a score. Copy it
and change it (extras/judges/README.md).

    JUDGE_URL=http://localhost:8000/v1 JUDGE_MODEL=Qwen/Qwen3-8B JUDGE_RUBRIC='It is polite.' \\
        python grpo.py ... --reward tools/judge.py:judge --reward_timeout 300

JUDGE_RUBRIC is the criterion for rows that have no column `rubric`. JUDGE_KEY is the API key, if
the endpoint needs one. The reward, from 0 to 1, is the weighted mean of the criteria's scores."""

import asyncio
import os
import re
from functools import cache

from openai import AsyncOpenAI

from common.rewards.answers import from_json, plain

# Other columns of the row may stand in braces, too.
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
IN_FLIGHT = asyncio.Semaphore(16)  # requests of a process


@cache
def client() -> AsyncOpenAI:
    """Return the client of this process. It repeats a request after a temporary error."""
    for name in ("JUDGE_URL", "JUDGE_MODEL"):
        if not os.environ.get(name):
            raise ValueError(f"{name} is not set; tools/judge.py needs it")
    key = os.environ.get("JUDGE_KEY") or "none"
    return AsyncOpenAI(base_url=os.environ["JUDGE_URL"], api_key=key, timeout=50, max_retries=4)


def criteria_of(row: dict) -> list[tuple[str, float]]:
    """Return the criteria of a row with their weights. Raises `ValueError` if it has none."""
    rubric = from_json(row.get("rubric") or os.environ.get("JUDGE_RUBRIC") or [])
    criteria = []
    for one in rubric if isinstance(rubric, list) else [rubric]:
        one = one if isinstance(one, dict) else dict(criterion=one)
        weight = 1.0 if one.get("weight") is None else float(one["weight"])
        criteria.append((str(one.get("criterion") or "").strip(), weight))
    texts, weights = zip(*criteria, strict=True) if criteria else ((), ())
    if not (all(texts) and any(weights) and min(weights) >= 0):
        raise ValueError("no rubric: set JUDGE_RUBRIC, or give the row criteria with weights > 0")
    return criteria


async def score(question: str) -> float:
    """Return the score in a reply to a question, from 0 to 1. Raises `ValueError` without one."""
    messages: list = [dict(role="user", content=question)]
    async with IN_FLIGHT:
        reply = await client().chat.completions.create(
            model=os.environ["JUDGE_MODEL"], messages=messages, temperature=0, max_tokens=1024
        )
    text = (reply.choices[0].message.content or "").strip()
    found = SCORE.fullmatch(plain(text.rpartition("\n")[2]))  # the last line
    if found is None or not 0 <= float(found[1]) <= 10:
        problem = "does not end with `Score: n`, n from 0 to 10"
        raise ValueError(f"the reply {problem}: {text[-200:]!r}")
    return float(found[1]) / 10


async def judge(completion: str, row: dict) -> float:
    """Return the weighted mean of a completion's scores."""
    prompt = row.get("prompt") or row.get("question") or ""
    if isinstance(prompt, list):
        prompt = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
    criteria = criteria_of(row)
    values = row | dict(prompt=prompt, completion=completion)
    questions = [QUESTION.format_map(values | dict(criterion=text)) for text, _ in criteria]
    scores = await asyncio.gather(*map(score, questions))
    total = sum(weight for _, weight in criteria)
    return sum(x * weight for x, (_, weight) in zip(scores, criteria, strict=True)) / total


def check(row: dict) -> None:
    """Raise `ValueError`, when a run starts, for missing settings or a row without criteria."""
    client()
    criteria_of(row)


judge.check = check
