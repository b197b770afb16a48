"""`--agent`: episodes that a user's function plays through an endpoint for chat completions.

A request that continues a conversation as it was served gets the ids of this conversation and those
of the new messages; nothing is tokenised twice. Any other request begins a branch, a sequence of
its own. The sampled ids of all branches are trained.

An agent runs in a process of its own (common/rewards/processes.py), the endpoint in a thread
(agent_endpoint.py). This module runs in the thread that has the engine."""

import copy
import heapq
import os
import queue
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from common.config.online import SamplingArgs
from common.config.sampling import SLOTS
from common.data.encode import Encoder
from common.data.sample import Completion
from common.model.hub import context_length
from common.parallel import distributed
from common.rewards.old_processes import ForkServer, Process
from common.rewards.result import Result
from common.rewards.thoughts import TAIL
from common.rewards.total import read
from common.rewards.user_code import load_agent
from common.rewards.worker import one_line
from common.rollout.engine import Engine, Request, empty_completion
from common.rollout.environment_pool import GRACE, allow_files
from common.rollout.episode import Episode
from extras.agents.endpoint import MODEL, Call, Endpoint, Refusal
from extras.agents.requests import (
    SOURCE,
    continues,
    ignored_parameters,
    limit_of,
    messages_of,
    tools_of,
    written,
)
from extras.tools.parser import Parser, make_parser

STARTING = 4 * (os.cpu_count() or 1)  # agents at a time before their first request: they use CPU
OVER = Refusal("api_key: its episode is over", 401)


@dataclass(eq=False)
class Branch:
    """A conversation of an agent that only grows."""

    tools: list[dict]
    completion: Completion | None = None
    """all served turns; None before the first"""
    history: list[dict] = field(default_factory=list)
    """messages up to the model's last one as it was served; empty while that is sampled"""


class Sampling(NamedTuple):
    """A request of an agent that the engine has."""

    call: Call
    branch: Branch
    messages: list[dict]


@dataclass(eq=False)
class Agent:
    """An agent that plays an episode."""

    episode: Episode
    token: str
    process: Process
    branches: list[Branch] = field(default_factory=list)
    sampling: dict[Request, Sampling] = field(default_factory=dict)
    requests: int = 0
    calls: int = 0
    at_limit: bool = False
    """whether its last request was refused for a limit"""
    text: str | None = None
    """its last served turn; None before the first"""
    result: Result | None = None


class Agents:
    """Agents of the episodes in flight, like `Turns` (multi_turn.py). But an agent begins with its
    episode and writes the prompts, and several turns of an episode may be sampled at a time."""

    def __init__(self, args: SamplingArgs, engine: Engine):
        """Start the endpoint. Raises `ValueError` for a file that is no agent."""
        load_agent(args.agent)
        self.args = args
        self.engine = engine
        self.encoder = Encoder(engine.tokenizer, args)
        self.room = context_length(engine.path, args) - args.max_new_tokens  # for a prompt
        self.endpoint = Endpoint()
        self.server = ForkServer(args.agent, shared=True, grace=GRACE)
        allow_files()
        self.waiting: list[tuple[int, int, Episode]] = []  # heap of episodes without an agent yet
        self.agents: dict[int, Agent] = {}  # by the number of the episode
        self.parser: Parser | None = None  # of calls; made when needed
        if args.tool_parser is not None:
            self.parser = make_parser(engine.tokenizer, args)
        self.reported: set[str] = set()  # parameters

    @property
    def playing(self) -> bool:
        return bool(self.waiting or self.agents)

    def begin(self, episode: Episode) -> None:
        """Begin an episode; of many, those of the first prompts."""
        heapq.heappush(self.waiting, (episode.prompt.number, episode.number, episode))

    def next_turns(self, wait: float) -> list[tuple[Episode, Request | None]]:
        """Return the requests of agents for the engine, and None for each episode that ends here.
        Wait up to `wait` seconds for the first request."""
        starting = sum(not agent.requests for agent in self.agents.values())
        while self.waiting and len(self.agents) < SLOTS and starting < STARTING:
            self._start(heapq.heappop(self.waiting)[-1])
            starting += 1
        turns: list[tuple[Episode, Request | None]] = []
        for call in self._calls(wait):
            agent = self.agents.get(int(call.token.partition("-")[0]))
            if agent is None or agent.result is not None:
                call.answer(OVER)
                continue
            try:
                turns.append((agent.episode, self._request(agent, call)))
            except Refusal as refusal:
                agent.at_limit = refusal.code is not None
                call.answer(refusal)
        for agent in self.agents.values():
            for _, result in agent.process.answers():
                agent.result = result
                self.endpoint.tokens.remove(agent.token)
            if agent.result is not None and not agent.sampling:
                turns.append((agent.episode, None))
        return turns

    def answer(self, episode: Episode, request: Request) -> None:
        """Serve a sampled turn, unless its agent has ended."""
        agent = self.agents[episode.number]
        call, branch, messages = agent.sampling.pop(request)
        if agent.result is not None:
            call.answer(OVER)
            return
        branch.completion = request.completion
        agent.text = request.completion.text
        message, reason = self._message(agent, request, branch.tools)
        branch.history = [*messages, message]
        usage = dict(prompt_tokens=request.start, completion_tokens=request.num_sampled)
        usage["total_tokens"] = len(request.completion.ids)
        choice = dict(index=0, message=written(message), finish_reason=reason, logprobs=None)
        name = f"chatcmpl-{episode.number}-{agent.requests}"
        call.answer(
            dict(id=name, object="chat.completion", created=int(time.time()), model=MODEL,
                 choices=[choice], usage=usage)
        )  # fmt: skip

    def _message(self, agent: Agent, request: Request, tools: list[dict]) -> tuple[dict, str]:
        """Return a sampled turn as a message, and why it ended. Calls that cannot be read are
        text."""
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
        return message | dict(content=turn.content, tool_calls=calls), "tool_calls"

    def end_episode(self, episode: Episode) -> None:
        """End an agent, and make a completion with branches of what it was served."""
        agent = self.agents.pop(episode.number)
        agent.process.close()
        completions = [branch.completion for branch in agent.branches if branch.completion]
        completion, *branches = completions or [self._filler()]
        episode.completion = completion
        completion.branches = branches
        completion.requests = agent.requests
        completion.text = agent.text or ""
        texts = [self.encoder.tokenizer.decode(sequence.ids) for sequence in completion.sequences]
        completion.transcript = "\n[branch]\n".join(texts)
        result, _ = read(agent.result)
        if agent.at_limit:
            completion.finish_reason = "length"
        has_died = result.timed_out or agent.process.end is not None
        if result.error is not None and (has_died or not agent.at_limit):
            completion.error = result.error
        elif agent.text is None:
            completion.error = "the agent got no completion"
        elif result.value is not None:
            completion.turn_rewards = [(len(completion.ids) - 1, result.value)]
        elif "environment" in self.args.reward and not agent.at_limit:
            completion.error = "the agent returned None; --reward environment needs a number"

    def close(self) -> None:
        for agent in self.agents.values():
            for sampling in agent.sampling.values():
                sampling.call.answer(OVER)
            agent.process.close()
        for call in self._calls(wait=0.0):
            call.answer(OVER)
        self.server.close()
        self.endpoint.close()

    def _start(self, episode: Episode) -> None:
        agent = Agent(episode, f"{episode.number}-{secrets.token_urlsafe()}", Process(self.server))
        self.endpoint.tokens.add(agent.token)
        arguments = (episode.prompt.row, self.endpoint.url, agent.token)
        agent.process.ask(0, None, arguments, self.args.answer_seconds)
        self.agents[episode.number] = agent

    def _calls(self, wait: float) -> list[Call]:
        """Return the new requests in the order of their arrival."""
        calls: list[Call] = []
        with suppress(queue.Empty):
            while True:
                calls.append(self.endpoint.calls.get(wait > 0 and not calls, wait))
        return calls

    def _filler(self) -> Completion:
        """Return a completion that trains nothing."""
        filler = empty_completion([self.encoder.tokenizer.eos_token_id] * 2)
        filler.prompt_length = 1
        filler.versions[1] = self.engine.version
        filler.finish_reason = "stop"
        return filler

    # ---- requests ----

    def _request(self, agent: Agent, call: Call) -> Request:
        """Return the turn that an agent requests. Raises `Refusal`."""
        number = agent.requests
        agent.requests += 1
        agent.at_limit = False
        if number >= self.args.max_turns:
            raise Refusal(f"--max_turns {number}: no more requests", code="max_turns_exceeded")
        try:
            self._report(ignored_parameters(call.body, self.args.temperature))
            limit = limit_of(call.body, self.args.max_new_tokens)
            messages = messages_of(call.body)
            branch, completion = self._branch(agent, messages, tools_of(call.body))
        except Refusal:
            raise
        except Exception as error:  # the request comes from the user's code
            raise Refusal(one_line(error)) from error
        prompt = agent.episode.prompt
        seed = agent.episode.seed(number)
        room = self.args.max_new_tokens - len(completion.completion_ids)
        request = Request(completion, min(room, limit), seed, prompt.temperature, prompt.number)
        branch.history = []
        agent.sampling[request] = Sampling(call, branch, messages)
        return request

    def _report(self, ignored: list[str]) -> None:
        """Report parameters that have no effect, once."""
        if not self.reported.issuperset(ignored) and distributed.rank() == 0:
            names = ", ".join(ignored)
            print(f"--agent: {names} of requests have no effect; the run's distribution is sampled")
        self.reported.update(ignored)

    def _branch(
        self, agent: Agent, messages: list[dict], tools: list[dict]
    ) -> tuple[Branch, Completion]:
        """Return the branch that a request continues, or a new one, and its completion up to the
        turn that is requested."""
        row = dict(_source=SOURCE, messages=messages, tools=tools)
        for branch in agent.branches:
            if branch.tools == tools and continues(branch.history, messages):
                return branch, self._continued(branch, row)
        if tools and self.parser is None:
            self.parser = make_parser(self.encoder.tokenizer, self.args)
        ids = self.encoder.prompt(row, ("messages",))
        _require_room(self.room - len(ids), f"the prompt has {len(ids)} tokens")
        agent.branches.append(Branch(tools))
        return agent.branches[-1], empty_completion(ids)

    def _continued(self, branch: Branch, row: dict) -> Completion:
        """Return a copy of the completion of a branch with the new messages in `row`."""
        completion = branch.completion
        has_end = completion.finish_reason == "stop"
        if self.args.stop or self.args.stop_token_ids:  # a turn may lack its EOS
            has_end = False
        last_token = None if has_end else completion.ids[-1]
        new = row["messages"][len(branch.history) :]
        calls = branch.history[-1].get("tool_calls")
        ids = self.encoder.reply(new, last_token, calls, row["tools"])
        length = len(completion.completion_ids) + len(ids)
        room = self.args.max_new_tokens - length
        _require_room(room - 1, f"the conversation has {length} tokens after its prompt")
        continued = copy.deepcopy(completion)
        continued.append_reply(ids)
        return continued


def _require_room(room: int, problem: str) -> None:
    if room < 0:
        raise Refusal(f"{problem}, too many; see --max_new_tokens", code="context_length_exceeded")
