"""`--eval_generate`: scripts that train on data alone (sft.py, dpo.py, ...) also sample completions
of held-out prompts. This module sets up the engine, the prompts and the rewards for that."""

import dataclasses
from collections import Counter

from common.config.groups import OfflineArgs
from common.config.online import OnlineArgs
from common.evaluate.held_out import evaluate_prompts
from common.model.hub import longest_sequence
from common.model.policy import Policy
from common.packs.order import Order
from common.parallel import distributed
from common.rewards.total import Rewards
from common.rollout.engine import EngineOptions
from common.rollout.prompts import encode_prompts, prompt_columns
from common.rollout.sampler import ColocatedEngine, Sampler
from common.text.encode import Encoder


class Generation:
    """The policy's completions of held-out prompts, and their rewards."""

    def __init__(self, policy: Policy, args: OfflineArgs, tokenizer, rows: list[dict]):
        """Encode the first `--eval_generate` prompts of `rows` and start the engine. Make the
        optimizer first: the engine takes the memory that is left. Collective.

        Raises `ValueError` for rows without a prompt or without a column that the reward needs."""
        online = sampling_args(args)
        # Copies, because the encoder of images changes the rows that it reads.
        rows = [dict(row) for row in first_of_each_set(rows, args.eval_generate)]
        columns = prompt_columns(online, rows)
        limit = longest_sequence(policy.path, args)
        encoder = Encoder(tokenizer, args, policy.image_args)
        self.prompts = encode_prompts(rows, columns, encoder, limit, online)
        if len(self.prompts) < args.eval_generate:
            distributed.say(f"--eval_generate {args.eval_generate} answers {self.prompts}")
        self.rewards = Rewards(online, self.prompts.rows, tokenizer, policy.device)
        order = Order({"": range(len(rows))}, args.seed)  # never drawn from
        options = EngineOptions(image_args=policy.image_args)
        engine = ColocatedEngine(policy, online, tokenizer, self.rewards.begin, options)
        self.sampler = Sampler(self.prompts, online, order, engine)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of the policy after `step` steps (`evaluate_prompts`). Collective."""
        return evaluate_prompts(self.sampler, step, self.prompts, self.rewards)

    def close(self) -> None:
        """Shut the engine down, before `distributed.cleanup`. Collective."""
        self.sampler.close()


def first_of_each_set(rows: list[dict], count: int) -> list[dict]:
    """Return `count` rows, taken from the start of every held-out set in turn, so that each set has
    equally many if it is long enough."""
    seen: Counter = Counter()
    turns = []
    for i, row in enumerate(rows):
        name = row.get("_dataset")
        turns.append((seen[name], i))
        seen[name] += 1
    return [rows[i] for i in sorted(i for _, i in sorted(turns)[:count])]


def sampling_args(args: OfflineArgs) -> OnlineArgs:
    """Return the flags for sampling in a script that has only some of them: its own, and defaults
    for the rest. Prompts that are too long are dropped."""
    names = {field.name for field in dataclasses.fields(OnlineArgs)}
    shared = {name: value for name, value in vars(args).items() if name in names}
    return OnlineArgs(**shared | dict(overlong="drop"))
