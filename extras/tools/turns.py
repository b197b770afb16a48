"""`--tools`: episodes in which the model calls tools between its turns.

After a turn with calls come their results, as the token ids that the chat template gives them,
without loss. A turn without a call is the answer and ends the episode. Each episode with calls has
a process of its own (extras/tools/toolbox.py). If it hangs or dies, a new one takes its place,
without its state, and the model reads an error in place of the result."""

import time

from common.config.online import SamplingArgs
from common.packs.sample import Completion
from common.parallel import distributed
from common.rollout.engine import Engine
from common.rollout.environments import episode_server, last_token
from common.text.encode import Encoder
from common.text.thoughts import TAIL, before_last_turn
from common.workers.pool import Process
from common.workers.worker import Result, one_line
from extras.tools.parser import Call, make_parser
from extras.tools.schemas import tool_selector
from extras.tools.toolbox import PROBLEMS, Outcome, settings_of

START = 900.0  # seconds to load the tools, which may read an index of a large file
STARTS = 3  # attempts at loading them: a process may be killed from outside
MALFORMED = Call("invalid", {})  # stands for calls that could not be read


class Tools:
    """Plays the part of the tools in the episodes of `--tools`."""

    tools_of_rows = staticmethod(tool_selector)

    def __init__(self, args: SamplingArgs, engine: Engine):
        self.args = args
        self.tokenizer = engine.tokenizer
        self.encoder = Encoder(engine.tokenizer, args)
        self.parser = make_parser(engine.tokenizer, args)
        self.server = episode_server("extras.tools.toolbox:load_toolbox", settings_of(args))

    def begin(self, row: dict) -> "ToolEpisode":
        return ToolEpisode(self, row)

    def close(self) -> None:
        self.server.close()


class ToolEpisode:
    """The tools of one episode. It has a process from its first call on."""

    def __init__(self, tools: Tools, row: dict):
        self.tools = tools
        self.row = row
        self.process: Process | None = None
        self.counts = dict.fromkeys(("calls", *PROBLEMS), 0)

    async def answer(self, completion: Completion) -> list[int] | None:
        """Return the ids of the results of a turn's calls, None if it has none; see `Episode`."""
        completion.turn_rewards.append((len(completion.ids) - 1, 0.0))
        prompt = self.tools.tokenizer.decode(before_last_turn(completion)[-TAIL:])
        turn = self.tools.parser.parse(completion.text, self.row["tools"], prompt)
        if turn.problem:
            calls = [MALFORMED]
            outcomes = [Outcome(f"error: {turn.problem}", "malformed")]
        else:
            calls = turn.calls
            outcomes = await self._outcomes(calls)
        if not calls:
            return None
        self.counts["calls"] += len(calls)
        for outcome in outcomes:
            if outcome.problem:
                self.counts[outcome.problem] += 1
            self.counts["cut"] += outcome.cut
        texts = [outcome.text for outcome in outcomes]
        try:
            return self._reply(completion, calls, texts)
        except (ValueError, TypeError):  # a template may refuse several calls in a turn
            self.counts["malformed"] += 1
        problem = "error: the results cannot be shown"
        if len(calls) > 1:
            problem += "; make one call at a time"
        try:
            return self._reply(completion, [MALFORMED], [problem])
        except (ValueError, TypeError) as error:
            completion.error = f"turn {completion.turns}: {one_line(error)}"
            return None

    def end(self, completion: Completion) -> None:
        completion.tool_counts = self.counts
        if self.process is not None:
            self.process.close()

    async def _outcomes(self, calls: list[Call]) -> list[Outcome]:
        """Run the calls of a turn one after the other. They share the time of one answer: later
        calls are not run once it is used up."""
        seconds = self.tools.args.answer_seconds
        taken = 0.0
        outcomes = []
        for call in calls:
            if taken >= seconds:
                problem = f"error: not run: the calls before it took {seconds:g} s"
                outcomes.append(Outcome(problem, "timed_out"))
                continue
            result = None
            if self.process is None or self.process.closed:
                result = await self._start()
            began = time.monotonic()
            outcomes.append(await self._outcome(call, result))
            taken += time.monotonic() - began
        return outcomes

    async def _outcome(self, call: Call, result: Result | None) -> Outcome:
        """Run a call. If it ends the process, the error is its outcome, and the next call gets a
        new process. `result`: that of the start of a new process, which may have failed."""
        seconds = self.tools.args.answer_seconds
        if not self.process.closed:
            result = await self.process.call("call", call.name, call.arguments, seconds=seconds)
        if result.error is None:
            return result.value
        lost = "; the tools were restarted without their state" if self.process.closed else ""
        problem = "timed_out" if result.timed_out else "raised"
        return Outcome(f"error: {result.error}{lost}", problem)

    async def _start(self) -> Result:
        """Begin the episode in a new process. Raises `RunError` if the tools cannot be loaded."""
        error = None
        for _ in range(STARTS):
            self.process = Process(self.tools.server, START)
            seconds = self.tools.args.answer_seconds
            result = await self.process.call("begin", self.row, seconds=seconds)
            if self.process.loaded:
                return result
            error = result.error
        raise distributed.RunError(f"--tools: {error}")

    def _reply(self, completion: Completion, calls: list[Call], texts: list[str]) -> list[int]:
        last = last_token(completion, self.tools.args)
        return reply_ids(self.tools.encoder, self.row, calls, texts, last)


def reply_ids(
    encoder: Encoder, row: dict, calls: list[Call], texts: list[str], last_token: int | None = None
) -> list[int]:
    """Return the ids of the results of calls, which stand between two turns of the model.
    `last_token`: see `Encoder.reply`. Raises `ValueError` if the chat template refuses them."""
    made = []
    results = []
    for number, (call, text) in enumerate(zip(calls, texts, strict=True)):
        name = call.id or f"call{number:05}"  # as long as the ids of Mistral
        function = dict(name=call.name, arguments=dict(x=1))
        made.append(dict(type="function", id=name, function=function))
        results.append(dict(role="tool", name=call.name, tool_call_id=name, content=text))
    return encoder.reply(results, last_token, made, row["tools"])
