"""The partner of an episode, which answers the model between its turns."""

from common.config.extra import extra
from common.config.online import SamplingArgs
from common.rollout.multi_turn import Turns


def partner_of(args: SamplingArgs) -> type | None:
    """Return the class that plays the episodes of `--environment`, `--tools` or `--agent`, like
    `Turns`; None for completions of one turn."""
    if args.agent is not None:
        with extra("agents", f"--agent {args.agent}"):
            from extras.agents.agents import Agents
        return Agents
    if args.tools:
        with extra("tools", f"--tools {' '.join(args.tools)}"):
            from extras.tools.turns import ToolTurns
        return ToolTurns
    return Turns if args.environment is not None else None
