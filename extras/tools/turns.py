"""`--tools`: episodes in which the model calls tools between its turns.

A turn with calls goes on with their results, as the token ids that the chat template gives them,
without loss. A turn without a call is the answer and ends the episode. Each episode with calls has
a process of its own (extras/tools/toolbox.py); a process that hangs or dies is replaced by a new
one, without its state, and the model reads an error in place of the result.

Otherwise the episode is one of multi_turn.py."""

import time
from dataclasses import dataclass, field

from common.config.online import SamplingArgs
from common.data.encode import Encoder
from common.parallel import distributed
from common.rewards import old_processes as processes
from common.rewards.old_processes import ForkServer, Process
from common.rewards.thoughts import TAIL, before_last_turn
from common.rollout.engine import Engine, Request
from common.rollout.environment_pool import GRACE, allow_files
from common.rollout.episode import Episode
from common.rollout.multi_turn import next_request
from extras.tools.parser import Call, make_parser
from extras.tools.schemas import tool_selector
from extras.tools.toolbox import PROBLEMS, Outcome, settings_of

START = 900.0  # seconds to load the tools, such as the index of a large file
BEGIN = 0  # number of the question that begins an episode; its calls are counted from 1
MALFORMED = Call("invalid", {})  # stands for calls that could not be read


@dataclass
class Calls:
    """The calls of an episode's last turn, and the process that runs them."""

    process: Process | None = None
    calls: list[Call] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    """of the first calls, in order"""

    @property
    def are_done(self) -> bool:
        return len(self.outcomes) == len(self.calls)


class ToolTurns:
    """Tools of episodes in flight, and the episodes that wait for one."""

    tools_of_rows = staticmethod(tool_selector)

    def __init__(self, args: SamplingArgs, engine: Engine):
        self.args = args
        self.tokenizer = engine.tokenizer
        self.encoder = Encoder(engine.tokenizer, args)
        self.parser = make_parser(engine.tokenizer, args)
        target = "extras.tools.toolbox:load_toolbox"
        self.server = ForkServer(target, shared=True, grace=GRACE, argument=settings_of(args))
        allow_files()
        self.playing: dict[int, Episode] = {}  # episodes whose last turn has ended, by number
        self.failed_starts = 0  # since a process last loaded the tools
        self.running: dict[int, Calls] = {}  # calls of the episodes in flight, by number

    def end_turn(self, episode: Episode) -> None:
        """Begin the calls of a turn of the model."""
        completion = episode.completion
        row = episode.prompt.row
        completion.turn_rewards.append((len(completion.ids) - 1, 0.0))
        prompt = self.tokenizer.decode(before_last_turn(completion)[-TAIL:])
        turn = self.parser.parse(completion.text, row["tools"], prompt)
        running = self._running(episode)
        running.calls = turn.calls
        running.outcomes = []
        if turn.problem:
            running.calls = [MALFORMED]
            running.outcomes = [Outcome(f"error: {turn.problem}", "malformed")]
        elif turn.calls:
            self._ask(running, row)
        self.playing[episode.number] = episode

    def next_turns(self, wait: float) -> list[tuple[Episode, Request | None]]:
        """Return the episodes whose calls are done, each with the request for its next turn, or
        None if it ends here. Wait up to `wait` seconds for the first one."""
        until = time.monotonic() + wait
        while True:
            for number, episode in self.playing.items():
                self._receive(self.running[number], episode.prompt.row)
            done = [number for number in self.playing if self.running[number].are_done]
            if done or time.monotonic() >= until:
                break
            processes.wait([self.running[number].process for number in self.playing], until)
        episodes = [self.playing.pop(number) for number in done]
        return [(episode, self._next_turn(episode)) for episode in episodes]

    def end_episode(self, episode: Episode) -> None:
        """End the process of an episode and decode all its turns."""
        running = self._running(episode)
        del self.running[episode.number]
        if running.process is not None:
            running.process.close()
        episode.completion.transcript = self.tokenizer.decode(episode.completion.completion_ids)

    def close(self) -> None:
        for running in self.running.values():
            if running.process is not None:
                running.process.close()
        self.server.close()

    def _running(self, episode: Episode) -> Calls:
        """Return the calls of an episode; at first none."""
        if episode.completion.tool_counts is None:
            episode.completion.tool_counts = dict.fromkeys(("calls", *PROBLEMS), 0)
        return self.running.setdefault(episode.number, Calls())

    def _ask(self, running: Calls, row: dict) -> None:
        """Send the calls that have no outcome yet, to a new process if there is none."""
        seconds = self.args.answer_seconds
        if running.process is None:
            running.process = Process(self.server, START)
            running.process.ask(BEGIN, "begin", (row,), seconds)
        for number, call in enumerate(running.calls, 1):
            if number > len(running.outcomes):
                running.process.ask(number, "call", (call.name, call.arguments), seconds)

    def _receive(self, running: Calls, row: dict) -> None:
        """Add the outcomes of calls that have ended. If a call, or the begin of its source, ended
        the process, the error is the outcome of the call, and a new process runs the others.
        Raises `RunError` if the tools cannot be loaded."""
        if running.are_done:
            return
        process = running.process
        answers = process.answers()
        if process.is_async is not None:
            self.failed_starts = 0
        elif process.end:  # at first again: it may have been killed from outside
            self.failed_starts += 1
            if self.failed_starts == 3:
                raise distributed.RunError(f"--tools: {process.end.error}")
            running.process = None
            self._ask(running, row)
            return
        for number, result in answers:
            if result.error is not None and (number != BEGIN or process.end):
                problem = "timed_out" if result.timed_out else "raised"
                lost = "; the tools were restarted without their state" if process.end else ""
                running.outcomes.append(Outcome(f"error: {result.error}{lost}", problem))
            elif number != BEGIN:
                running.outcomes.append(result.value)
        if process.end:
            running.process = None
        if process.end and not running.are_done:
            self._ask(running, row)

    def _next_turn(self, episode: Episode) -> Request | None:
        """Add the results of the calls to the episode."""
        completion = episode.completion
        row = episode.prompt.row
        running = self.running[episode.number]
        if not running.calls:  # an answer
            return None
        counts = completion.tool_counts
        counts["calls"] += len(running.calls)
        for outcome in running.outcomes:
            if outcome.problem:
                counts[outcome.problem] += 1
            counts["cut"] += outcome.cut
        texts = [outcome.text for outcome in running.outcomes]
        stops = self.args.stop or self.args.stop_token_ids  # a turn may lack its EOS
        last_token = completion.ids[-1] if stops else None
        try:
            reply = reply_ids(self.encoder, row, running.calls, texts, last_token)
        except (ValueError, TypeError):  # a template may refuse several calls in a turn
            counts["malformed"] += 1
            problem = "error: the results cannot be shown"
            if len(running.calls) > 1:
                problem += "; make one call at a time"
            reply = reply_ids(self.encoder, row, [MALFORMED], [problem], last_token)
        return next_request(episode, reply, self.args)


def reply_ids(
    encoder: Encoder, row: dict, calls: list[Call], texts: list[str], last_token: int | None = None
) -> list[int]:
    """Return the ids of the results of calls, between two turns of the model; `last_token` as in
    `Encoder.reply`. Raises `ValueError` if the chat template refuses them."""
    made = []
    results = []
    for number, (call, text) in enumerate(zip(calls, texts, strict=True)):
        name = call.id or f"call{number:05}"  # as long as the ids of Mistral
        function = dict(name=call.name, arguments=dict(x=1))
        made.append(dict(type="function", id=name, function=function))
        results.append(dict(role="tool", name=call.name, tool_call_id=name, content=text))
    return encoder.reply(results, last_token, made, row["tools"])
