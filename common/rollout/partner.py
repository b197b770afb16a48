"""The partner of a completion, which answers the model between its turns."""

from typing import Protocol

from common.config.extra import extra
from common.config.online import SamplingArgs
from common.data.sample import Completion
from common.rollout.environments import Environments


class Episode(Protocol):
    """What a partner's `begin(row)` returns for each completion."""

    async def answer(self, completion: Completion) -> list[int] | None:
        """Return the ids that follow the last turn of a completion, or None if it is over. Errors
        are `completion.error`, rewards `completion.turn_rewards`."""

    def end(self, completion: Completion) -> None:
        """End the episode, after its last answer or before its first one."""


def partner_of(args: SamplingArgs) -> type | None:
    """Return the class of `--environment`, `--tools` or `--agent`; None for completions of one
    turn. An object `partner(args, engine)` has `begin(row) -> Episode` and `close()`; an agent,
    which writes the prompts itself, has `async play(prompt, index) -> Completion` for `begin`."""
    if args.agent is not None:
        with extra("agents", f"--agent {args.agent}"):
            from extras.agents.agents import Agents
        return Agents
    if args.tools:
        with extra("tools", f"--tools {' '.join(args.tools)}"):
            from extras.tools.turns import Tools
        return Tools
    return Environments if args.environment is not None else None
