"""`--thinking_budget`: a turn whose thoughts are closed when they have so many tokens."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from common.parallel import distributed
from common.rewards.thoughts import TAIL, pairs_of_marks, template_text
from common.rollout.engine import SEED_SPACING, Engine, Request


class ThinkingBudget:
    """The limit, and the marks of thoughts of one tokenizer."""

    def __init__(self, tokens: int, tokenizer):
        self.tokens = tokens
        self.tokenizer = tokenizer
        self.marks = pairs_of_marks(template_text(tokenizer))
        if any("message" in end for _, end in self.marks):
            problem = "the thoughts of this chat template end with a new message"
            raise ValueError(f"--thinking_budget {tokens}: {problem}, which cannot be appended")

    async def sample(self, engine: Engine, request: Request) -> None:
        """Sample a turn, like `Engine.sample`. When a thought has `tokens` tokens, the mark that
        ends it is appended, without loss, and the turn goes on behind it.

        The turn is sampled in pieces, each with a seed of its own, that end where a thought may
        have reached the limit."""
        completion = request.completion
        limit = request.start + request.max_tokens
        while True:
            mark, length = self.open_thought(
                completion.ids[: request.start], completion.ids[request.start :]
            )
            if mark and length >= self.tokens:
                ids = self.tokenizer(mark, add_special_tokens=False)["input_ids"]
                if len(completion.ids) + len(ids) >= limit:
                    break
                completion.append_forced(ids)
                length = 0
            sampled = len(completion.ids) - request.start
            seed = request.seed
            if sampled:
                seed = distributed.fold_seed(request.seed, sampled) * SEED_SPACING
            room = min(self.tokens - length, limit - len(completion.ids))
            await engine.sample(replace(request, seed=seed, max_tokens=room))
            if completion.finish_reason != "length" or len(completion.ids) == limit:
                break
        completion.text = engine.text_of(completion.ids[request.start :])

    def open_thought(self, before: Sequence[int], turn: Sequence[int]) -> tuple[str, int]:
        """Return the mark that ends the thought that is open at the end of a turn, and the number
        of the thought's tokens; ("", 0) without one. The tokens `before` the turn may open it."""
        opened = self.tokenizer.decode(before[-TAIL:])
        text = self.tokenizer.decode(turn)
        for start, end in self.marks:
            closed = [match.end() for match in re.finditer(end, text)]
            if re.search(start, text[closed[-1] if closed else 0 :]):
                opens = partial(self._count, start)
                size = bisect_left(range(len(turn)), opens(turn), key=lambda n: opens(turn[:n]))
                return literal(end), len(turn) - size
            if not closed and re.search(rf"(?:{start})\s*\Z", opened):
                return literal(end), len(turn)
        return "", 0

    def _count(self, start: str, ids: Sequence[int]) -> int:
        return len(re.findall(start, self.tokenizer.decode(ids)))


def literal(pattern: str) -> str:
    """Return the text that an escaped pattern matches."""
    return re.sub(r"\\(.)", r"\1", pattern)
