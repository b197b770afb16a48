"""`--thinking_budget`: end a thought after so many tokens, so that the model goes on to answer."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from common.parallel import distributed
from common.rollout.engine import SEED_SPACING, Engine, Request
from common.text.thoughts import TAIL, pairs_of_marks, template_text


class ThinkingBudget:
    """Samples turns whose thoughts have at most `tokens` tokens each."""

    def __init__(self, tokens: int, engine: Engine):
        self.tokens = tokens
        self.engine = engine
        self.decode = engine.tokenizer.decode
        self.marks = pairs_of_marks(template_text(engine.tokenizer))
        if any("message" in end for _, end in self.marks):
            problem = "the thoughts of this chat template end with a new message"
            raise ValueError(f"--thinking_budget {tokens}: {problem}, which cannot be appended")

    async def sample(self, request: Request) -> None:
        """Sample a turn, like `Engine.sample`. When a thought reaches `tokens` tokens, append the
        mark that ends thoughts, such as </think>, without loss, and let the turn go on after it.

        To stop in time, the turn is sampled in pieces: each ends where a thought could reach the
        limit, and has a seed of its own."""
        completion, start = request.completion, request.start
        limit = start + request.max_tokens
        while True:
            mark, length = self.open_thought(completion.ids[:start], completion.ids[start:])
            if mark and length >= self.tokens:
                ids = self.engine.tokenizer(mark, add_special_tokens=False)["input_ids"]
                if len(completion.ids) + len(ids) >= limit:
                    break
                completion.append_forced(ids)
                length = 0
            seed = request.seed
            if sampled := len(completion.ids) - start:
                seed = distributed.fold_seed(seed, sampled) * SEED_SPACING
            room = min(self.tokens - length, limit - len(completion.ids))
            await self.engine.sample(replace(request, seed=seed, max_tokens=room))
            if completion.finish_reason != "length" or len(completion.ids) == limit:
                break
        completion.text = self.engine.text_of(completion.ids[start:])

    def open_thought(self, before: Sequence[int], turn: Sequence[int]) -> tuple[str, int]:
        """If the `turn` so far ends inside a thought, return the mark that would end this thought,
        and how many tokens it has; else ("", 0). The thought may begin in the tokens `before` the
        turn: some prompts end with <think>."""
        opened = self.decode(before[-TAIL:])
        text = self.decode(turn)
        for start, end in self.marks:
            mark = re.sub(r"\\(.)", r"\1", end)  # the text that the escaped pattern matches
            closed = [match.end() for match in re.finditer(end, text)]
            if re.search(start, text[closed[-1] if closed else 0 :]):

                def count(n: int, start: str = start) -> int:
                    return len(re.findall(start, self.decode(turn[:n])))

                size = bisect_left(range(len(turn)), count(len(turn)), key=count)
                return mark, len(turn) - size
            if not closed and re.search(rf"(?:{start})\s*\Z", opened):
                return mark, len(turn)
        return "", 0
