"""Completions of prompts, of one turn each or, with `--environment`, of several: model and environment alternate.

The tokens of a turn stay as they were sampled. The answer of the environment is appended as the token ids that the chat
template gives it, without loss. An episode is one `Completion` that begins with the model's first turn and ends with
its last one; the environment's last answer is dropped.

Episodes do not wait for each other: the next turn is requested as soon as the environment has answered.
"""

from dataclasses import dataclass

from common.config.groups import SamplingArgs
from common.data.encode import Encoder
from common.data.sample import Completion, Group
from common.parallel import distributed
from common.rollout.engine import SEED_SPACING, Engine, Request, empty_completion
from common.rollout.environment_pool import Answer, Environments


@dataclass
class PromptRequest:
    """A prompt and the number of completions to sample."""

    number: int
    """name of the prompt; those with smaller numbers are sampled first"""
    ids: list[int]
    row: dict
    """data row, for environments and rewards"""
    seed: int
    samples: int
    temperature: float


@dataclass(eq=False)
class Episode:
    """One completion of a prompt, in flight."""

    prompt: PromptRequest
    index: int
    """among the completions of the prompt"""
    number: int
    """among all episodes"""
    completion: Completion


class Episodes:
    """Episodes in flight: an engine, and with `--environment` an environment for each episode.

    An episode has at most `--max_turns` turns and `--max_new_tokens` tokens, those of the environment included; if a
    limit truncates it, its finish_reason is `length`. Every turn has a seed of its own, so episodes depend neither on
    the number of ranks nor on other episodes.
    """

    def __init__(self, engine: Engine, args: SamplingArgs, tokenizer):
        self.engine, self.args, self.tokenizer = engine, args, tokenizer
        self.environments = self.encoder = None
        if args.environment is not None:
            self.environments = Environments(args.environment, args.environment_timeout)
            self.encoder = Encoder(tokenizer, args)
        self.sampling: dict[Request, Episode] = {}  # episodes that wait for the engine
        self.playing: dict[int, Episode] = {}  # episodes that wait for their environment, by number
        self.groups: dict[int, list[Completion | None]] = {}  # completions that have ended, by prompt
        self.complete: list[tuple[int, Group]] = []
        self.count = 0

    @property
    def busy(self) -> bool:
        """Whether this rank has episodes in flight."""
        return bool(self.groups or self.complete)

    def begin(self, prompt: PromptRequest) -> None:
        """Begin the episodes of a prompt."""
        self.groups[prompt.number] = [None] * prompt.samples
        for i in range(prompt.samples):
            self.count += 1
            episode = Episode(prompt, i, self.count, empty_completion(prompt.ids))
            self._submit(episode, self.args.max_new_tokens, prompt.seed * SEED_SPACING + i)

    def step(self) -> list[tuple[int, Group]]:
        """Advance the engine by one turn, process the answers of environments and return `(number, group)` of each
        prompt that is complete now. Wait a moment if there is nothing to sample. Collective with tensor parallelism."""
        if self.sampling or self.engine.group is not None:
            for request in self.engine.step():
                self._end_turn(self.sampling.pop(request))
        if self.playing:
            for number, answer in self.environments.answers(wait=0.0 if self.sampling else 0.05):
                self._reply(self.playing.pop(number), answer)
        complete, self.complete = self.complete, []
        return complete

    def finish(self) -> list[tuple[int, Group]]:
        """Advance the episodes that have begun to their ends, without beginning others, and return the prompts that are
        complete. Collective with tensor parallelism."""
        complete, self.engine.admits_new = [], False
        while self.engine.any_rank(bool(self.playing) or any(request.has_begun for request in self.sampling)):
            complete += self.step()
        self.engine.admits_new = True
        return complete

    def generate(self, prompts: list[PromptRequest]) -> list[Group]:
        """Return the completions of this rank's prompts, in order. Nothing else may be in flight. Collective with
        tensor parallelism."""
        for prompt in prompts:
            self.begin(prompt)
        groups = {}
        while self.engine.any_rank(self.busy):
            groups |= self.step()
        return [groups[prompt.number] for prompt in prompts]

    def close(self) -> None:
        if self.environments is not None:
            self.environments.close()

    # ---- one episode ----

    def _submit(self, episode: Episode, max_tokens: int, seed: int) -> None:
        """Request the next turn."""
        prompt = episode.prompt
        request = Request(episode.completion, max_tokens, seed, prompt.temperature, prompt.number)
        self.sampling[request] = episode
        self.engine.submit(request)

    def _end_turn(self, episode: Episode) -> None:
        """Hand a turn to the environment."""
        completion = episode.completion
        if self.environments is None or completion.finish_reason == "length":
            return self._end(episode)
        if completion.turns == 1:
            self.environments.reset(episode.number, episode.prompt.row)
        self.environments.step(episode.number, completion.text)
        self.playing[episode.number] = episode

    def _reply(self, episode: Episode, answer: Answer) -> None:
        """Add the environment's answer to the episode and, unless it ends here, request the next turn."""
        completion, reply = episode.completion, []
        completion.error = answer.error
        if not answer.error:
            completion.turn_rewards.append((len(completion.ids) - 1, answer.reward))
            try:
                reply = [] if answer.done else self.encoder.reply(answer.messages)
            except Exception as error:  # the messages come from the user's code
                completion.error = f"step {completion.turns}: {type(error).__name__}: {distributed.first_line(error)}"
        if completion.error or answer.done:
            return self._end(episode)
        room = completion.prompt_length + self.args.max_new_tokens - len(completion.ids) - len(reply)
        if completion.turns == self.args.max_turns or room <= 0:
            completion.finish_reason = "length"
            return self._end(episode)
        seed = distributed.fold_seed(distributed.fold_seed(episode.prompt.seed, episode.index), completion.turns)
        completion.ids += reply
        completion.loss_mask += [False] * len(reply)
        completion.rollout_logprobs += [0.0] * len(reply)
        completion.versions += [-1] * len(reply)
        completion.turns += 1
        completion.finish_reason = ""
        self._submit(episode, room, seed * SEED_SPACING)

    def _end(self, episode: Episode) -> None:
        completion, number = episode.completion, episode.prompt.number
        completion.row = episode.prompt.row
        if self.environments is not None:
            if episode.number in self.environments.episodes:  # not if the first turn was truncated
                self.environments.end(episode.number)
            completion.transcript = self.tokenizer.decode(completion.completion_ids)
        self.groups[number][episode.index] = completion
        if None not in self.groups[number]:
            self.complete.append((number, self.groups.pop(number)))
