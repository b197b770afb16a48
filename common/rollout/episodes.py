"""Completions of several turns: the model speaks, an environment answers, and so on.

What was sampled stays as it was, token for token; what the environment says is appended as the token ids that the chat
template makes of it, without loss. An episode is one `Sample` whose completion begins with the model's first turn and
ends with its last: the environment's last words are context for nothing.
"""

import copy

from common import distributed
from common.config import SamplingArgs
from common.data import Encoder
from common.environments import Environment, load_environment
from common.packing import Sample
from common.rollout.base import Engine


class Episodes:
    """What samples: the engine, or the engine and `--environment` in turn."""

    def __init__(self, engine: Engine, args: SamplingArgs, tokenizer):
        self.engine, self.args, self.tokenizer = engine, args, tokenizer
        self.environment = load_environment(args.environment) if args.environment is not None else None
        self.encoder = Encoder(tokenizer, args) if self.environment else None

    def generate(
        self, prompts: list[list[int]], rows: list[dict], seeds: list[int], n: int, temperature: float
    ) -> list[list[Sample]]:
        """`Engine.generate`, where a completion may have up to `--max_turns` turns and `--max_new_tokens` tokens, those
        of the environment included. An episode that one of the two cuts off has finish_reason `length`.

        All episodes that go on advance together, in one call of the engine a turn. Every turn has a seed of its own, so
        that episodes do not depend on the number of ranks. Collective with tensor parallelism.
        """
        groups = self.engine.generate(prompts, n, seeds, temperature, [self.args.max_new_tokens] * len(prompts))
        if self.environment is None:
            return groups
        live: list[tuple[Sample, Environment, int]] = []
        for group, row, seed in zip(groups, rows, seeds, strict=True):
            for i, sample in enumerate(group):
                live.append((sample, self._reset(sample, row), distributed.fold_seed(seed, i)))
        for turn in range(1, self.args.max_turns + 1):
            answered = []
            for sample, environment, seed in live:
                answer = self._step(sample, environment, turn)
                if answer is not None:
                    answered.append((sample, environment, seed, answer))
            if not self._anybody(answered):
                break
            contexts = [sample.ids + answer for sample, _, _, answer in answered]
            turn_seeds = [distributed.fold_seed(seed, turn) for _, _, seed, _ in answered]
            room = [self._longest(s) - len(c) for (s, *_), c in zip(answered, contexts, strict=True)]
            turns = self.engine.generate(contexts, 1, turn_seeds, temperature, room)
            for (sample, _, _, answer), (spoken,) in zip(answered, turns, strict=True):
                _append(sample, len(answer), spoken)
            live = [(sample, environment, seed) for sample, environment, seed, _ in answered]
        for sample in (sample for group in groups for sample in group):
            sample.transcript = self.tokenizer.decode(sample.completion_ids)
        return groups

    def _reset(self, sample: Sample, row: dict) -> Environment | None:
        try:
            environment = self.environment()
            if environment.reset(copy.deepcopy(row)) != row["_prompt"]:
                raise ValueError("not the same messages as at the start of the run")
            return environment
        except (Exception, SystemExit) as error:  # counted as a reward that could not be computed
            sample.error = f"reset: {type(error).__name__}: {distributed.first_line(error)}"

    def _step(self, sample: Sample, environment: Environment, turn: int) -> list[int] | None:
        """What the environment says to the sample's last turn, as ids; None if the episode ends here."""
        if sample.error or sample.finish_reason == "length":
            return None
        try:
            messages, reward, done = environment.step(sample.text)
            sample.turn_rewards.append((len(sample.ids) - 1, float(reward)))
            ids = [] if done else self.encoder.reply(messages)
        except (Exception, SystemExit) as error:  # counted as a reward that could not be computed
            sample.error = f"step {turn}: {type(error).__name__}: {distributed.first_line(error)}"
            return None
        if done:
            return None
        if turn == self.args.max_turns or len(sample.ids) + len(ids) >= self._longest(sample):
            sample.finish_reason = "length"
            return None
        return ids

    def _longest(self, sample: Sample) -> int:
        return sample.prompt_length + self.args.max_new_tokens

    def _anybody(self, live: list) -> bool:
        """Whether the engine is needed: by anyone, where ranks must call it together."""
        if self.args.tensor_parallel_size == 1:
            return bool(live)
        return bool(distributed.all_max(len(live)))


def _append(sample: Sample, answered: int, spoken: Sample) -> None:
    """The environment's answer of so many tokens, and the turn that was sampled after it."""
    sampled = len(spoken.completion_ids)
    sample.ids = spoken.ids
    sample.loss_mask = sample.loss_mask + [False] * answered + [True] * sampled
    sample.rollout_logprobs = sample.rollout_logprobs + [0.0] * answered + spoken.rollout_logprobs[-sampled:]
    sample.finish_reason, sample.text = spoken.finish_reason, spoken.text
    sample.turns += 1
