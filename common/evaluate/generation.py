"""`--eval_generate` of the scripts that train on data alone: an engine, prompts and rewards."""

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
    """Completions of held-out prompts by the policy, and their rewards."""

    def __init__(self, policy: Policy, args: OfflineArgs, tokenizer, rows: list[dict]):
        """Encode the prompts of the first `--eval_generate` of `rows` and start the engine. Call
        after the optimizer is made. Collective.

        Raises `ValueError` for rows without a prompt or without the columns that the reward needs.
        """
        online = sampling_args(args)
        # The encoder of images changes the rows that it reads.
        rows = [dict(row) for row in first_of_each_set(rows, args.eval_generate)]
        columns = prompt_columns(online, rows)
        limit = longest_sequence(policy.path, args)
        encoder = Encoder(tokenizer, args, policy.image_args)
        self.prompts = encode_prompts(rows, columns, encoder, limit, online)
        if len(self.prompts) < args.eval_generate:
            distributed.say(f"--eval_generate {args.eval_generate} answers {self.prompts}")
        self.rewards = Rewards(online, self.prompts.rows, tokenizer, policy.device)
        order = Order({"": range(len(rows))}, args.seed)  # nothing is drawn
        options = EngineOptions(image_args=policy.image_args)
        engine = ColocatedEngine(policy, online, tokenizer, self.rewards.begin, options)
        self.sampler = Sampler(self.prompts, online, order, engine)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return `eval/solved` and `eval/reward` of the policy after `step` steps, see
        `evaluate_prompts`. Collective."""
        return evaluate_prompts(self.sampler, step, self.prompts, self.rewards)

    def close(self) -> None:
        """Shut the engine down, before `distributed.cleanup`. Collective."""
        self.sampler.close()


def first_of_each_set(rows: list[dict], count: int) -> list[dict]:
    """Return `count` rows: the first ones of every held-out set, equally many of each if they have
    so many."""
    seen: Counter = Counter()
    turns = []
    for i, row in enumerate(rows):
        name = row.get("_dataset")
        turns.append((seen[name], i))
        seen[name] += 1
    return [rows[i] for i in sorted(i for _, i in sorted(turns)[:count])]


def sampling_args(args: OfflineArgs) -> OnlineArgs:
    """Return the flags with which a script that does not sample answers held-out prompts."""
    names = {field.name for field in dataclasses.fields(OnlineArgs)}
    shared = {name: value for name, value in vars(args).items() if name in names}
    return OnlineArgs(**shared | dict(overlong="drop"))
