"""`--environment calculator`, the built-in environment; `--dataset calculator` has its task. Like a
user's file it runs in processes, so it imports nothing heavy."""

import re

from common.rewards.answers import to_number
from common.rewards.arithmetic import arithmetic


class Calculator:
    """Answers `<calc>expression</calc>` with `expression=value`. A turn without a call is the final
    answer.

    Columns: `prompt`, `answer`. Reward: 1 if the last number of the final answer is `answer`."""

    CALL = re.compile(r"<calc>([^<>]*)</calc>")

    def reset(self, example: dict) -> list[dict]:
        self.answer = to_number(str(example["answer"]))
        prompt = example["prompt"]
        return prompt if isinstance(prompt, list) else [dict(role="user", content=prompt)]

    def step(self, completion: str) -> tuple[list[dict], float, bool]:
        if "<calc>" in completion:
            expression = (self.CALL.findall(completion) or [""])[-1].strip()
            value, _ = arithmetic(expression)
            content = f"{expression}={value}"
            if value is None:
                content = "error: <calc>numbers with + - * / ( )</calc>"
            return [dict(role="tool", content=content)], 0.0, False
        numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
        return [], float(bool(numbers) and to_number(numbers[-1]) == self.answer), True
