"""`--eval_generate`: greedy completions of held-out prompts, for the scripts that train on data alone."""

import dataclasses

from common.config.groups import OnlineArgs, TrainArgs
from common.data.encode import Encoder
from common.data.rows import held_out_rows, train_and_eval_rows
from common.model.hub import context_length
from common.model.policy import Policy
from common.rewards.registry import row_check
from common.rewards.scoring import Rewards
from common.rollout import statistics
from common.rollout.prompts import Prompts, encode_prompts, prompt_columns
from common.rollout.remote_sampler import make_sampler


class Generation:
    """Evaluation by generation: an engine with the policy's weights, prompts and rewards; nothing with 0 prompts."""

    def __init__(self, policy: Policy, args: TrainArgs, tokenizer):
        """Start the engine and load the prompts. Call after the optimizer is made. Collective.

        Raises `ValueError` for rows without a prompt or without the columns that the reward needs.
        """
        self.prompts = Prompts([], [])
        if not args.eval_generate:
            return
        shared = {f.name: getattr(args, f.name) for f in dataclasses.fields(OnlineArgs) if hasattr(args, f.name)}
        named = dict(reward=args.eval_reward, max_new_tokens=args.eval_new_tokens)
        online = OnlineArgs(**shared | named | dict(overlong_prompts="drop"))
        row_check(online)
        rows = held_out_rows(args) if args.eval_dataset is not None else train_and_eval_rows(args)[1]
        columns, room = prompt_columns(online, rows), context_length(policy.path, args) - online.max_new_tokens
        self.prompts = encode_prompts(rows[: args.eval_generate], columns, Encoder(tokenizer, args), room, online)
        self.rewards = Rewards(online, self.prompts.rows, tokenizer, policy.device)
        self.sampler = make_sampler(policy, self.prompts, online, tokenizer, self.rewards)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return `eval/solved` and `eval/reward` of the policy after `step` steps, see `statistics`. Collective."""
        return statistics.evaluate(self.sampler, step, self.prompts, self.rewards) if self.prompts else {}

    def close(self) -> None:
        """Shut the engine down, before `distributed.cleanup`. Collective."""
        if self.prompts:
            self.sampler.close()
