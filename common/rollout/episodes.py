"""Complete prompts with an engine: each completion is a coroutine.

A completion has one turn of the model. With `--environment`, `--tools` or `--agent` it may have
several: a partner (the environment, the tools, the agent) answers the model between them.
Completions do not wait for each other: the engine samples the turns of all of them at the same
time. A prompt is complete when its last completion has ended."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from common.config.extra import extra
from common.config.flags import shown
from common.config.online import SamplingArgs
from common.metrics.meter import Meter
from common.packs.sample import Completion, Group
from common.parallel import distributed
from common.rollout.engine import SEED_SPACING, Engine, Request, empty_completion

OnComplete = Callable[[Group], None]  # called with a group when its last completion has ended
WAIT = 0.02  # while the engine has nothing to sample, a round waits so long for a request (seconds)


class Episode(Protocol):
    """The partner's side of one completion."""

    async def answer(self, completion: Completion) -> list[int] | None:
        """Return the ids to append after the model's last turn, or None if the episode is over.
        Errors go into `completion.error`, rewards into `completion.turn_rewards`."""

    def end(self, completion: Completion) -> None:
        """End the episode. It may not have given its first answer yet."""


def partner_of(args: SamplingArgs) -> type | None:
    """Return the class of the partner for `--environment`, `--tools` or `--agent`; None if
    completions have one turn. A `partner(args, engine)` has `begin(row) -> Episode` and `close()`;
    an agent writes its prompts, so it has `async play(prompt, index) -> Completion` for `begin`."""
    if args.agent is not None:
        with extra("agents", f"--agent {args.agent}"):
            from extras.agents.agents import Agents
        return Agents
    if args.tools:
        with extra("tools", f"--tools {shown(args.tools)}"):
            from extras.tools.turns import Tools
        return Tools
    if args.environment is not None:
        from common.rollout.environments import Environments

        return Environments
    return None


@dataclass
class PromptRequest:
    """A prompt and the number of completions to sample."""

    number: int
    """identifies the prompt; smaller numbers are sampled first"""
    ids: list[int]
    row: dict
    """data row, for environments and rewards"""
    seed: int
    samples: int
    temperature: float

    def turn(self, completion: Completion, index: int, number: int, max_tokens: int) -> Request:
        """Return the request for turn `number`, from 0, of completion `index`."""
        seed = self.seed * SEED_SPACING + index
        if number > 0:
            seed = distributed.fold_seed(distributed.fold_seed(self.seed, index), number)
            seed *= SEED_SPACING
        return Request(completion, max_tokens, seed, self.temperature, self.number)


def is_own(number: int) -> bool:
    """Return whether this rank receives and scores the completions of prompt `number`."""
    return number % distributed.world_size() == distributed.rank()


def in_order(groups: Iterable[tuple[int, Group]]) -> list[Group]:
    """Sort what `Episodes.generate` yields by the numbers of the prompts."""
    return [group for _, group in sorted(groups, key=lambda pair: pair[0])]


class Episodes:
    """The prompts in flight, and the engine that completes them.

    A completion has at most `--max_turns` turns, and at most `--max_new_tokens` tokens in all turns
    and answers together. If a limit cuts it, its finish_reason is `length`. Every turn has a seed
    of its own: on a CPU, completions depend neither on the number of ranks nor on each other."""

    def __init__(self, engine: Engine, args: SamplingArgs):
        self.engine = engine
        self.args = args
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self.runner.get_loop()
        partner = partner_of(args)
        self.partner = None if partner is None else partner(args, engine)
        self.prompts: dict[int, asyncio.Task[Group]] = {}  # prompts in flight, by number
        self.sample = engine.sample
        if args.thinking_budget is not None:
            from common.rollout.thinking import ThinkingBudget

            self.sample = ThinkingBudget(args.thinking_budget, engine).sample

    def add(self, prompt: PromptRequest) -> None:
        """Queue all completions of a prompt. `advance` samples them."""
        self.prompts[prompt.number] = self.loop.create_task(self._complete(prompt))

    def advance(self, meter: Meter) -> dict[int, Group]:
        """Run a round of the engine, then let the completions react to the turns that have ended.
        Return the groups that are complete now, by the number of their prompt. Collective with
        tensor parallelism."""
        self.engine.step(meter)
        self.loop.run_until_complete(self._go_on())
        done = [number for number, task in self.prompts.items() if task.done()]
        return {number: self.prompts.pop(number).result() for number in done}

    def generate(
        self, prompts: list[PromptRequest], meter: Meter, stops: bool = True
    ) -> Iterator[tuple[int, Group]]:
        """Complete this rank's `prompts`. Yield the number and the group of each as soon as it is
        complete. If `stops`, a stop signal ends this after the present round, and drops the groups
        in flight. No other prompts may be in flight. Collective with tensor parallelism."""
        for prompt in prompts:
            self.add(prompt)
        while True:
            is_stopped = stops and distributed.stop_heard()
            states = self.engine.gather_in_engine((bool(self.prompts), is_stopped))
            if not any(busy for busy, _ in states) or any(stopped for _, stopped in states):
                break
            yield from self.advance(meter).items()

    def close(self) -> None:
        """Cancel the completions in flight, and close the partner."""
        self.runner.close()
        if self.partner is not None:
            self.partner.close()

    async def _go_on(self) -> None:
        """Let the coroutines run. If the engine then has nothing to sample (all completions wait
        for their partners), wait a moment for a request, or for a completion that ends."""
        for _ in range(5):  # an agent takes five turns of the loop from an answer to its request
            await asyncio.sleep(0)
        until = self.loop.time() + WAIT
        while self.prompts and not (self.engine.running or self.engine.new):
            if self.loop.time() > until or any(task.done() for task in self.prompts.values()):
                break
            await asyncio.sleep(0.001)

    async def _complete(self, prompt: PromptRequest) -> Group:
        play = self._play if self.args.agent is None else self.partner.play
        group = await asyncio.gather(*(play(prompt, i) for i in range(prompt.samples)))
        for completion in group:
            completion.number = prompt.number
        return group

    async def _play(self, prompt: PromptRequest, index: int) -> Completion:
        """Sample one completion: the model's turns and, between them, the partner's answers."""
        completion = empty_completion(prompt.ids, prompt.row)
        room = self.args.max_new_tokens
        if self.partner is None:
            await self.sample(prompt.turn(completion, index, 0, room))
            return completion
        episode = self.partner.begin(prompt.row)
        try:
            while True:
                turn = completion.turns - 1
                await self.sample(prompt.turn(completion, index, turn, room))
                if completion.finish_reason == "length":
                    break
                answer = await episode.answer(completion)
                if answer is None:
                    break
                room = self.args.max_new_tokens - len(completion.completion_ids) - len(answer)
                if completion.turns == self.args.max_turns or room <= 0:
                    completion.finish_reason = "length"
                    break
                completion.append_reply(answer)
        finally:
            episode.end(completion)
        completion.transcript = self.engine.tokenizer.decode(completion.completion_ids)
        return completion
