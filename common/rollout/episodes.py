"""Episodes in flight: completions of prompts, of one turn each or, with `--environment` or
`--tools`, of several turns (multi_turn.py, tool_turns.py).

Episodes do not wait for each other: an engine advances all of them, and a prompt is complete when
its last episode has ended."""

from common.config.online import SamplingArgs
from common.data.sample import Completion, Group
from common.rollout.engine import Engine, Request, empty_completion
from common.rollout.episode import Episode, PromptRequest, row_for_engine
from common.rollout.partner import partner_of


class Episodes:
    """Episodes in flight: an engine, and for each episode an environment or tools, if there are.

    An episode has at most `--max_turns` turns and `--max_new_tokens` tokens, those of the
    environment included; if a limit truncates it, its finish_reason is `length`. Every turn has a
    seed of its own, so episodes depend neither on the number of ranks nor on other episodes."""

    def __init__(self, engine: Engine, args: SamplingArgs):
        self.engine = engine
        self.args = args
        partner = partner_of(args)
        self.turns = None if partner is None else partner(args, engine)
        self.sampling: dict[Request, Episode] = {}  # episodes that wait for the engine
        # ended completions of each prompt in flight, None for the others
        self.groups: dict[int, list[Completion | None]] = {}
        self.count = 0

    @property
    def are_in_flight(self) -> bool:
        """Whether this rank has episodes in flight."""
        return bool(self.groups)

    def add(self, prompt: PromptRequest) -> None:
        """Add the episodes of a prompt."""
        self.groups[prompt.number] = [None] * prompt.samples
        for i in range(prompt.samples):
            self.count += 1
            completion = empty_completion(prompt.ids)
            completion.row = row_for_engine(prompt.row)
            episode = Episode(prompt, i, self.count, completion)
            if self.args.agent is not None:  # which writes the prompt
                self.turns.begin(episode)
                continue
            self._submit(episode, episode.turn(self.args.max_new_tokens))

    def advance(self) -> list[tuple[int, Group]]:
        """Run a round of the engine, process the answers of environments and return `(number,
        group)` of each prompt that is complete now. Wait a moment if there is nothing to sample.
        Collective with tensor parallelism."""
        ended: list[Episode] = []
        if self.sampling or self.engine.group is not None:
            for request in self.engine.advance():
                episode = self.sampling.pop(request)
                if self.args.agent is not None:
                    self.turns.answer(episode, request)
                elif self.turns is None or episode.completion.finish_reason == "length":
                    ended.append(episode)
                else:
                    self.turns.end_turn(episode)
        if self.turns is not None and self.turns.playing:
            for episode, request in self.turns.next_turns(wait=0.0 if self.sampling else 0.05):
                if request is None:
                    ended.append(episode)
                else:
                    self._submit(episode, request)
        return self._complete_groups(ended)

    def generate(self, prompts: list[PromptRequest]) -> list[Group]:
        """Return the completions of this rank's prompts, in order. Nothing else may be in flight.
        Collective with tensor parallelism."""
        for prompt in prompts:
            self.add(prompt)
        groups = {}
        while self.engine.any_rank(self.are_in_flight):
            groups |= self.advance()
        return [groups[prompt.number] for prompt in prompts]

    def close(self) -> None:
        if self.turns is not None:
            self.turns.close()

    def _submit(self, episode: Episode, request: Request) -> None:
        self.sampling[request] = episode
        self.engine.submit(request)

    def _complete_groups(self, ended: list[Episode]) -> list[tuple[int, Group]]:
        """Add episodes that have ended to their groups, and return the complete ones."""
        complete = []
        for episode in ended:
            if self.turns is not None:
                self.turns.end_episode(episode)
            for sequence in episode.completion.sequences:
                sequence.row = episode.prompt.row
            number = episode.prompt.number
            self.groups[number][episode.index] = episode.completion
            if None not in self.groups[number]:
                complete.append((number, self.groups.pop(number)))
        return complete
