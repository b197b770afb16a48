"""`--agent`: an episode is whatever a user's function does with an endpoint for chat completions.

A request that continues a conversation gets the ids that were served before, followed by the ids of
the new messages: nothing is tokenised twice. Any other request begins a new branch, a sequence of
its own. The sampled ids of all branches are trained.

An agent runs in a process of its own (common/workers/pool.py). The rest runs beside the engine
(common/rollout/episodes.py): a coroutine for each agent, and for each request (endpoint.py)."""

import asyncio
import copy
import inspect
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common.config.online import SLOTS, SamplingArgs
from common.model.hub import longest_sequence
from common.packs.sample import Completion
from common.parallel import distributed
from common.rewards.total import checked
from common.rollout.engine import Engine, Request, empty_completion
from common.rollout.environments import episode_server, last_token
from common.rollout.episodes import PromptRequest
from common.text.encode import Encoder
from common.text.thoughts import TAIL
from common.workers.pool import Process
from common.workers.user_code import load_callable
from common.workers.worker import Result
from extras.agents.dialects import Refusal
from extras.agents.endpoint import (
    MODEL,
    SOURCE,
    Endpoint,
    continues,
    ignored_parameters,
    limit_of,
    messages_of,
    tools_of,
    written,
)
from extras.tools.parser import Parser, make_parser

STARTING = 4 * (os.cpu_count() or 1)  # agents that start at a time, which takes CPU
OVER = "api_key: its episode is over"


@dataclass(eq=False)
class Branch:
    """A conversation of an agent to which turns are only added."""

    tools: list[dict]
    completion: Completion | None = None
    """its turns so far; None before the first"""
    history: list[dict] = field(default_factory=list)
    """the messages of these turns as they were served; empty while the next turn is sampled"""


@dataclass(eq=False)
class Agent:
    """An agent that is playing an episode."""

    prompt: PromptRequest
    index: int
    asked: asyncio.Future
    """done when the agent has sent its first request"""
    branches: list[Branch] = field(default_factory=list)
    turns: list[asyncio.Task] = field(default_factory=list)
    """tasks of turns that the engine samples or has sampled"""
    requests: int = 0
    calls: int = 0
    at_limit: bool = False
    """whether its last request was refused because of a limit"""
    text: str | None = None
    """its last turn; None before the first"""


def load_agent(spec: str) -> Callable:
    """Return the function that `--agent` names. Raises `ValueError` if it is no agent."""
    function = load_callable("--agent", spec)
    form = "write it as async def name(row, base_url, api_key)"
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"--agent {spec}: not an async function; {form}")
    try:
        inspect.signature(function).bind({}, "", "")
    except TypeError as error:
        raise ValueError(f"--agent {spec}: {error}; {form}") from error
    return function


class Agents:
    """Plays the episodes of `--agent`: it starts an agent for each and serves its requests."""

    load = staticmethod(load_agent)

    def __init__(self, args: SamplingArgs, engine: Engine):
        """Raises `ValueError` if `--agent` names no agent."""
        load_agent(args.agent)
        self.args = args
        self.engine = engine
        self.encoder = Encoder(engine.tokenizer, args)
        self.room = longest_sequence(engine.path, args).tokens - args.max_new_tokens  # of a prompt
        self.agents: dict[str, Agent] = {}  # agents that play now, by their API key
        self.endpoint = Endpoint(self.serve, self.count, self.agents)
        self.serving: asyncio.Task | None = None  # from the first episode on
        self.server = episode_server(args.agent)
        self.slots = asyncio.Semaphore(SLOTS)
        self.starting = asyncio.Semaphore(STARTING)
        self.parser: Parser | None = None  # reads calls; made when needed
        if args.tool_parser is not None:
            self.parser = make_parser(engine.tokenizer, args)
        self.reported: set[str] = set()  # parameters that were reported as ignored

    async def play(self, prompt: PromptRequest, index: int) -> Completion:
        """Play an episode. Return a completion whose branches are all that the agent was served."""
        loop = asyncio.get_running_loop()
        if self.serving is None:
            self.serving = loop.create_task(self.endpoint.run())
        async with self.slots:
            key = secrets.token_urlsafe()
            agent = self.agents[key] = Agent(prompt, index, loop.create_future())
            process = Process(self.server)
            arguments = (prompt.row, self.endpoint.url, key)
            seconds = self.args.answer_seconds
            try:
                async with self.starting:
                    call = loop.create_task(process.call_each([arguments], seconds))
                    await asyncio.wait((call, agent.asked), return_when=asyncio.FIRST_COMPLETED)
                [result] = await call
                died = process.closed  # or was killed because it was late
            finally:
                del self.agents[key]
                process.close()
            await asyncio.gather(*agent.turns)
        return self._completion(agent, result, died)

    async def serve(self, key: str, body: dict, read: Callable[[dict], dict]) -> dict:
        """Return the answer to a request: a sampled turn. `read` translates its body. Raises
        `Refusal`."""
        agent = self.agents.get(key)
        if agent is None:  # its episode ended while it sent the request
            raise Refusal(OVER, 401)
        if not agent.asked.done():
            agent.asked.set_result(None)
        agent.at_limit = False
        number = agent.requests
        agent.requests += 1
        try:
            request, branch, messages = self._request(agent, number, read(body))
        except Refusal as refusal:
            agent.at_limit = refusal.code is not None
            raise
        agent.turns.append(asyncio.create_task(self.engine.sample(request)))
        await agent.turns[-1]
        if key not in self.agents:
            raise Refusal(OVER, 401)
        return self._answer(agent, number, request, branch, messages)

    def count(self, key: str, body: dict) -> int:
        """Return how many tokens a request would put before its turn."""
        completion, _ = self._next(self.agents[key], messages_of(body), tools_of(body))
        return len(completion.ids)

    def close(self) -> None:
        self.server.close()
        self.endpoint.close()

    # ---- requests ----

    def _request(self, agent: Agent, number: int, body: dict) -> tuple[Request, Branch, list[dict]]:
        """Return the turn to sample for a request, the branch to which it belongs (an old one or a
        new one), and its messages. Raises `Refusal`."""
        if number >= self.args.max_turns:
            raise Refusal(f"--max_turns {number}: no more requests", code="max_turns_exceeded")
        self._report(ignored_parameters(body))
        limit = limit_of(body, self.args.max_new_tokens)
        messages, tools = messages_of(body), tools_of(body)
        completion, branch = self._next(agent, messages, tools)
        asked, length = completion.prompt_length, len(completion.completion_ids)
        room = self.args.max_new_tokens - length
        _require_room(self.room - asked, f"the prompt has {asked} tokens")
        _require_room(room - 1, f"the conversation has {length} tokens after its prompt")
        if branch is None:
            branch = Branch(tools)
            agent.branches.append(branch)
        branch.history = []
        request = agent.prompt.turn(completion, agent.index, number, min(room, limit))
        return request, branch, messages

    def _next(
        self, agent: Agent, messages: list[dict], tools: list[dict]
    ) -> tuple[Completion, Branch | None]:
        """Return the ids before a turn, as a completion, and the branch that it continues."""
        for branch in agent.branches:
            if branch.completion is None:  # its first turn is not sampled yet
                continue
            if branch.tools == tools and continues(branch.history, messages):
                completion = copy.deepcopy(branch.completion)
                calls = branch.history[-1].get("tool_calls")
                new, last = messages[len(branch.history) :], last_token(completion, self.args)
                completion.append_reply(self.encoder.reply(new, last, calls, tools))
                return completion, branch
        if tools and self.parser is None:
            self.parser = make_parser(self.encoder.tokenizer, self.args)
        row = dict(_source=SOURCE, messages=messages, tools=tools)
        return empty_completion([*self.encoder.prompt(row, ("messages",))]), None

    def _report(self, ignored: list[str]) -> None:
        """Report parameters that have no effect, each once."""
        if not self.reported.issuperset(ignored):
            problem = f"{', '.join(ignored)} of requests have no effect"
            distributed.say(f"--agent: {problem}; the run's distribution is sampled")
        self.reported.update(ignored)

    # ---- answers ----

    def _answer(
        self, agent: Agent, number: int, request: Request, branch: Branch, messages: list[dict]
    ) -> dict:
        branch.completion = request.completion
        agent.text = request.completion.text
        message, reason = self._message(agent, request, branch.tools)
        branch.history = [*messages, message]
        size = len(request.completion.ids)
        usage = dict(prompt_tokens=request.start, completion_tokens=size - request.start)
        usage["total_tokens"] = size
        choice = dict(index=0, message=written(message), finish_reason=reason, logprobs=None)
        name = f"chatcmpl-{agent.prompt.number}-{agent.index}-{number}"
        return dict(id=name, object="chat.completion", created=int(time.time()), model=MODEL,
                    choices=[choice], usage=usage)  # fmt: skip

    def _message(self, agent: Agent, request: Request, tools: list[dict]) -> tuple[dict, str]:
        """Return a sampled turn as a message, and why it ended. Unreadable calls stay text."""
        completion = request.completion
        message = dict(role="assistant", content=completion.text)
        if not tools or completion.finish_reason == "length":
            return message, completion.finish_reason
        prompt = self.encoder.tokenizer.decode(completion.ids[: request.start][-TAIL:])
        turn = self.parser.parse(completion.text, tools, prompt)
        if not turn.calls or not all(isinstance(call.arguments, dict) for call in turn.calls):
            return message, completion.finish_reason
        calls = []
        for call in turn.calls:
            agent.calls += 1
            name = call.id or f"call{agent.calls:05}"  # as long as the ids of Mistral
            function = dict(name=call.name, arguments=call.arguments)
            calls.append(dict(id=name, type="function", function=function))
        content = turn.content if turn.content.strip() else ""  # Messages allows no blank texts
        return message | dict(content=content, tool_calls=calls), "tool_calls"

    # ---- the end of an episode ----

    def _completion(self, agent: Agent, result: Result, died: bool) -> Completion:
        completions = [branch.completion for branch in agent.branches if branch.completion]
        completion, *branches = completions or [self._filler()]
        completion.branches = branches
        completion.requests = agent.requests
        completion.text = agent.text or ""
        for sequence in completion.sequences:
            sequence.row = agent.prompt.row
        texts = [self.encoder.tokenizer.decode(sequence.ids) for sequence in completion.sequences]
        completion.transcript = "\n[branch]\n".join(texts)
        result = checked(result)
        if agent.at_limit:
            completion.finish_reason = "length"
        if result.error is not None and (died or not agent.at_limit):
            completion.error = result.error
        elif agent.text is None:
            completion.error = "the agent got no completion"
        elif result.value is not None:
            completion.turn_rewards = [(len(completion.ids) - 1, result.value)]
        elif "environment" in self.args.reward and not agent.at_limit:
            completion.error = "the agent returned None; --reward environment needs a number"
        return completion

    def _filler(self) -> Completion:
        """Return a completion that trains nothing, for an agent that got no turn."""
        filler = empty_completion([self.encoder.tokenizer.eos_token_id] * 2)
        filler.prompt_length = 1
        filler.versions[1] = self.engine.version
        filler.finish_reason = "stop"
        return filler


def _require_room(room: int, problem: str) -> None:
    if room < 0:
        raise Refusal(f"{problem}, too many; see --max_new_tokens", code="context_length_exceeded")
