"""Sampling for the steps of a run.

    groups = rollouts.rollout(step, total_steps, meter)    this rank's share of a step's prompts,
                                                           with their completions

A step may call `rollout` several times, each time with another number of prompts. `LocalSampler`
has the engine in the training process; with `--rollout_ranks` it is on other ranks
(remote_sampler.py). When a group is complete, its rewards start at once, if they do not need other
ranks."""

from collections.abc import Callable

import torch

from common.config.online import OnlineArgs
from common.data.order import Order, make_order
from common.metrics.meter import Meter
from common.model.hub import eos_token_ids
from common.model.policy import Policy
from common.rewards.total import Rewards
from common.rollout.base_sampler import Sampler
from common.rollout.engines import make_engine
from common.rollout.episode import PromptRequest
from common.rollout.episodes import Episodes
from common.rollout.prompts import Prompts
from common.rollout.remote_sampler import RemoteSampler
from common.rollout.rollout_rank import generate_until_training_ends
from common.rollout.weights import whole_weights


def make_sampler(
    policy: Policy,
    prompts: Prompts,
    args: OnlineArgs,
    tokenizer,
    rewards: Rewards,
    order: Order | None = None,
) -> Sampler:
    """Return the sampler of `prompts` for the present flags. It begins `rewards` of complete
    groups. `order`: in which the prompts are drawn, by default that of `make_order`. Call on every
    training rank. Raises `ValueError` for an engine that is not available."""
    order = order or make_order(prompts.rows, args)
    if args.rollout_ranks:
        return RemoteSampler(policy, prompts, args, rewards, order)
    return LocalSampler(policy, prompts, args, rewards, order, tokenizer)


def serve(args: OnlineArgs, device: torch.device) -> None:
    """Generate on a rollout rank until training ends."""
    generate_until_training_ends(args, device)


class LocalSampler(Sampler):
    """Sampler with an engine in this process. Generation and training alternate."""

    def __init__(
        self,
        policy: Policy,
        prompts: Prompts,
        args: OnlineArgs,
        rewards: Rewards,
        order: Order,
        tokenizer,
    ):
        super().__init__(policy, prompts, args, rewards, order)
        eos_ids = eos_token_ids(policy.path, tokenizer, args.prompt_format, args.stop_token_ids)
        self.engine = make_engine(policy.path, args, eos_ids, tokenizer, policy.device)
        self.episodes = Episodes(self.engine, args)

    def __str__(self) -> str:
        return type(self.engine).__name__

    def close(self) -> None:
        self.episodes.close()
        self.engine.close()

    def _request(self, requests: list[PromptRequest], step: int, meter: Meter) -> None:
        for request in self._share(requests):
            self.episodes.add(request)
        with meter.time("sync"):
            self.engine.wake()
            self.engine.load_weights(whole_weights(self.policy, self.engine.dtype), step)

    def _wait(self, is_ready: Callable[[], bool], meter: Meter) -> None:
        """Sample until `is_ready()` is true on every rank of the engine. Then release the engine's
        memory."""
        with meter.time("rollout"):
            while self.engine.any_rank(not is_ready()):
                for number, group in self.episodes.advance():
                    self.groups[number] = group
                    self.rewards.begin([group], number)  # groups with smaller numbers first
                self.engine.measure(meter)
            self.engine.interrupt()
            self.engine.sleep()
