"""Completions of several turns: the model speaks, an environment answers, and so on.

What was sampled stays as it was, token for token; what the environment says is appended as the token ids that the chat
template makes of it, without loss. An episode is one `Sample` whose completion begins with the model's first turn and
ends with its last: the environment's last words are context for nothing.

No episode waits for another: its next turn is asked for when its environment has answered.
"""

from dataclasses import dataclass

from common.config.groups import SamplingArgs
from common.data.encode import Encoder
from common.data.packing import Sample
from common.parallel import distributed
from common.rollout.engine import SEED_SPACING, Completion, Engine
from common.rollout.environment_pool import Answer, Environments

Group = list[Sample]


@dataclass(eq=False)
class Asked:
    """A prompt of which so many completions are in work."""

    number: int
    row: dict
    seed: int
    temperature: float
    samples: list[Sample | None]

    @property
    def is_done(self) -> bool:
        return None not in self.samples


@dataclass(eq=False)
class Episode:
    """One of a prompt's completions, in work."""

    asked: Asked
    place: int
    """which of them"""
    number: int
    """among all episodes"""
    turn: int = 0
    """turns that have been spoken"""
    sample: Sample | None = None
    """so far"""
    answered: int = 0
    """tokens that the environment has said since"""


class Episodes:
    """What samples: the engine, or the engine and `--environment` in turn.

    `begin` puts a prompt in work, `step` advances all and returns groups that are done. A completion may have up to
    `--max_turns` turns and `--max_new_tokens` tokens, those of the environment included; an episode that one of the two
    cuts off has finish_reason `length`. Every turn has a seed of its own: episodes do not depend on the ranks, nor on
    what else is in work.
    """

    def __init__(self, engine: Engine, args: SamplingArgs, tokenizer):
        self.engine, self.args, self.tokenizer = engine, args, tokenizer
        self.environments = self.encoder = None
        if args.environment is not None:
            self.environments = Environments(args.environment, args.environment_timeout)
            self.encoder = Encoder(tokenizer, args)
        self.speaking: dict[Completion, Episode] = {}
        self.listening: dict[int, Episode] = {}  # to their environments, by number
        self.done: list[tuple[int, Group]] = []
        self.count = 0

    @property
    def busy(self) -> bool:
        """Whether anything of this rank's is in work."""
        return bool(self.speaking or self.listening or self.done)

    def begin(self, number: int, prompt: list[int], row: dict, seed: int, n: int, temperature: float) -> None:
        """Put `n` completions of a prompt in work; `number` will name them, and those with smaller ones go first."""
        asked = Asked(number, row, seed, temperature, [None] * n)
        for i in range(n):
            self.count += 1
            completion = Completion(prompt, self.args.max_new_tokens, seed * SEED_SPACING + i, temperature, number)
            self._speak(Episode(asked, i, self.count), completion)

    def step(self) -> list[tuple[int, Group]]:
        """One turn of the engine, and what environments have answered: `(number, group)` of the prompts that are done
        with it. If only environments are at work it waits a moment for them. Collective with tensor parallelism."""
        if self.speaking or self.engine.group is not None:
            for completion in self.engine.step():
                self._spoken(self.speaking.pop(completion), completion)
        if self.listening:
            for number, answer in self.environments.answers(wait=0.0 if self.speaking else 0.05):
                self._answered(self.listening.pop(number), answer)
        done, self.done = self.done, []
        return done

    def finish(self) -> list[tuple[int, Group]]:
        """All that have begun to their ends, and no other; what is done. Collective with tensor parallelism."""
        done, self.engine.admits_new = [], False
        while self.engine.any_rank(bool(self.listening) or any(e.turn or c.ids for c, e in self.speaking.items())):
            done += self.step()
        self.engine.admits_new = True
        return done

    def generate(
        self, prompts: list[list[int]], rows: list[dict], seeds: list[int], n: int, temperature: float
    ) -> list[Group]:
        """`n` completions of each prompt of this rank, in order, with nothing else in work; one seed per prompt.
        Collective with tensor parallelism."""
        for i, (prompt, row, seed) in enumerate(zip(prompts, rows, seeds, strict=True)):
            self.begin(i, prompt, row, seed, n, temperature)
        groups = {}
        while self.engine.any_rank(self.busy):
            groups |= self.step()
        return [groups[i] for i in range(len(prompts))]

    def close(self) -> None:
        if self.environments is not None:
            self.environments.close()

    # ---- one episode ----

    def _speak(self, episode: Episode, completion: Completion) -> None:
        self.speaking[completion] = episode
        self.engine.submit(completion)

    def _spoken(self, episode: Episode, completion: Completion) -> None:
        spoken = self.engine.sample(completion)
        if episode.turn == 0:
            episode.sample = spoken
        else:
            _append(episode.sample, episode.answered, spoken)
        episode.turn += 1
        if self.environments is None or spoken.finish_reason == "length":
            return self._end(episode)
        if episode.turn == 1:
            self.environments.reset(episode.number, episode.asked.row)
        self.environments.step(episode.number, spoken.text)
        self.listening[episode.number] = episode

    def _answered(self, episode: Episode, answer: Answer) -> None:
        sample = episode.sample
        sample.error = answer.error
        if not sample.error:
            sample.turn_rewards.append((len(sample.ids) - 1, answer.reward))
            try:
                said = [] if answer.done else self.encoder.reply(answer.messages)
            except Exception as error:  # of messages that a user's code made
                sample.error = f"step {episode.turn}: {type(error).__name__}: {distributed.first_line(error)}"
        if sample.error or answer.done:
            return self._end(episode)
        room = sample.prompt_length + self.args.max_new_tokens - len(sample.ids) - len(said)
        if episode.turn == self.args.max_turns or room <= 0:
            sample.finish_reason = "length"
            return self._end(episode)
        asked, episode.answered = episode.asked, len(said)
        seed = distributed.fold_seed(distributed.fold_seed(asked.seed, episode.place), episode.turn) * SEED_SPACING
        self._speak(episode, Completion(sample.ids + said, room, seed, asked.temperature, asked.number, goes_on=True))

    def _end(self, episode: Episode) -> None:
        asked = episode.asked
        asked.samples[episode.place] = episode.sample
        if self.environments is not None:
            if episode.number in self.environments.episodes:  # not of one that the first turn ended
                self.environments.end(episode.number)
            episode.sample.transcript = self.tokenizer.decode(episode.sample.completion_ids)
        if asked.is_done:
            self.done.append((asked.number, asked.samples))


def _append(sample: Sample, answered: int, spoken: Sample) -> None:
    """The environment's answer of so many tokens, and the turn that was sampled after it."""
    sampled = len(spoken.completion_ids)
    sample.ids = spoken.ids
    sample.loss_mask = sample.loss_mask + [False] * answered + [True] * sampled
    sample.rollout_logprobs = sample.rollout_logprobs + [0.0] * answered + spoken.rollout_logprobs[-sampled:]
    sample.versions = sample.versions + [-1] * answered + spoken.versions[-sampled:]
    sample.version = min(sample.version, spoken.version)
    sample.finish_reason, sample.text = spoken.finish_reason, spoken.text
    sample.turns += 1
