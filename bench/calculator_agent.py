"""An agent for `--agent` (extras/agents/README.md) that plays the calculator of `--environment
calculator`, with the same prompts and answers.

    torchrun --nproc_per_node 2 grpo.py --config configs/calculator_agent.yaml
"""

import anyio._backends._asyncio  # noqa: F401 else each episode imports it
import httpx
import openai

from extras.tools.calculator import Calculator

# Loading certificates takes longer than an episode, and the endpoint needs none.
http_client = httpx.AsyncClient(verify=False)


async def play(row: dict, base_url: str, api_key: str) -> float:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    calculator = Calculator()
    messages = calculator.reset(row)
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages)
        turn = answer.choices[0]
        if turn.finish_reason == "length":
            return 0.0
        results, reward, done = calculator.step(turn.message.content)
        if done:
            return reward
        messages += [turn.message, *results]
