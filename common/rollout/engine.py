"""What the engines share: completions in work, their order and seeds, and the form of what they become.

An engine is stepped: `submit` puts a completion in, `step` advances those in work and returns those that have ended. It
can be given other weights in between, and completions that are in work then go on with the new ones: every token knows
the version of the weights that sampled it.
"""

import contextlib
import heapq
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.config.groups import SamplingArgs
from common.data.packing import Sample
from common.model.policy import compute_dtype
from common.parallel import distributed

SEED_SPACING = 1 << 16  # between the seeds of two prompts: that of a prompt's i-th completion is i more
SLOTS = 256  # completions sampled at the same time: their float32 logits, 156 MB of 151,936 tokens, exist several times


@dataclass(eq=False)
class Completion:
    """A completion that an engine samples. Of weights that change meanwhile it is sampled in pieces: each goes on from
    the prompt and what is there, with a seed of its own."""

    prompt: list[int]
    limit: int
    """most tokens"""
    seed: int
    temperature: float
    """0: greedy"""
    order: int = 0
    """those with a smaller number go first, of equal ones the first to be submitted"""
    goes_on: bool = False
    """a later turn of an episode"""
    ids: list[int] = field(default_factory=list)
    """sampled so far"""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """of the weights, for each of `ids`"""
    finish_reason: str = ""
    """`stop` or `length` when it has ended"""

    @property
    def piece_seed(self) -> int:
        """Of the request that goes on from here."""
        return distributed.fold_seed(self.seed, len(self.ids)) * SEED_SPACING if self.ids else self.seed


class Engine:
    """What both engines share."""

    def __init__(
        self, path: str, args: SamplingArgs, eos_ids: list[int], tokenizer, device: torch.device, trained: bool
    ):
        self.args, self.eos_ids, self.tokenizer, self.device = args, eos_ids, tokenizer, device
        self.added_ids = set(tokenizer.added_tokens_decoder)
        self.dtype = compute_dtype(args, device)
        self.beside_trainer = trained and not distributed.is_rollout_rank()
        self.group: dist.ProcessGroup | None = None  # of the ranks that share this engine, if there are others
        self.place = 0  # of this rank among them
        self.version = 0  # of the weights
        self.fresh: list[Completion] = []  # submitted since the last step
        self.waiting: list[tuple[int, int, Completion]] = []  # a heap
        self.running: dict[str, Completion] = {}  # by the names of their requests
        self.ours: set[Completion] = set()  # of those in work, the ones that this rank has submitted
        self.count = 0
        self.admits_new = True  # or only what has begun
        with untouched_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM walks over deprecated names of torch
            self._start(path)
            if trained:
                self.sleep()
        distributed.install_signal_handlers()  # vLLM's imports may have replaced them

    # ---- completions ----

    def submit(self, completion: Completion) -> None:
        """Put a completion in work. It is advanced by `step` and there when `step` has returned it."""
        self.fresh.append(completion)

    def step(self) -> list[Completion]:
        """One turn for as many as there is room for, and those of this rank's that have ended with it. Each gets one
        token more (all that are missing, where the engine cannot be interrupted). Collective with tensor parallelism.

        Sampled from softmax(logits / temperature), nothing cut off (temperature 0: greedy); `logprobs` are those of
        that distribution; an EOS ends a completion and belongs to it.
        """
        self.ours.update(self.fresh)
        for i, share in enumerate(self.together(self.fresh)):
            for completion in self.fresh if i == self.place else share:
                self._queue(completion)
        self.fresh = []
        with untouched_rng():
            held = []
            while self.waiting and len(self.running) < SLOTS:
                _, number, completion = entry = heapq.heappop(self.waiting)
                if self.admits_new or completion.goes_on or completion.ids:
                    self.running[str(number)] = completion
                    self._begin(str(number), completion)
                else:
                    held.append(entry)
            for entry in held:
                heapq.heappush(self.waiting, entry)
            if self.running:
                self._advance()
        ended = {name: c for name, c in self.running.items() if c.finish_reason}
        self.running = {name: c for name, c in self.running.items() if name not in ended}
        ended_here = [c for c in ended.values() if c in self.ours]
        self.ours.difference_update(ended_here)
        return ended_here

    def interrupt(self) -> None:
        """Those that are running wait, with what they have, until the next step."""
        running, self.running = self.running, {}
        self._stop(list(running))
        for completion in running.values():
            self._queue(completion)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int = 0) -> None:
        """Take the policy's weights, all of them by name. Always before sampling; nothing guesses. What is in work
        goes on with them. Collective with tensor parallelism."""
        self.interrupt()
        self._load(weights)
        self.version = version

    def occupancy(self) -> dict[str, float]:
        """How full the engine is now: completions that are sampled and that wait."""
        return dict(running=len(self.running), waiting=len(self.waiting))

    def generate(
        self, prompts: list[list[int]], n: int, seeds: list[int], temperature: float, limits: list[int] | None = None
    ) -> list[list[Sample]]:
        """`n` completions for each prompt of this rank, in order, with nothing else in work; `seeds` has one seed per
        prompt, `limits` the most tokens of its completions (default: `--max_new_tokens`). Collective with tensor
        parallelism."""
        limits = limits or [self.args.max_new_tokens] * len(prompts)
        groups = [
            [Completion(prompt, limit, seed * SEED_SPACING + i, temperature) for i in range(n)]
            for prompt, seed, limit in zip(prompts, seeds, limits, strict=True)
        ]
        for completion in chain(*groups):
            self.submit(completion)
        while self.any_rank(not all(c.finish_reason for c in chain(*groups))):
            self.step()
        return [[self.sample(c) for c in group] for group in groups]

    def sample(self, completion: Completion) -> Sample:
        """What a completion that has ended is to those who train on it."""
        prompt, ids = completion.prompt, completion.ids
        # What ends a turn is none of the text; not every tokenizer marks it as special.
        said = ids[:-1] if ids[-1] in self.eos_ids and ids[-1] in self.added_ids else ids
        return Sample(
            ids=prompt + ids,
            loss_mask=[False] * len(prompt) + [True] * len(ids),
            rollout_logprobs=[0.0] * len(prompt) + completion.logprobs,
            versions=[-1] * len(prompt) + completion.versions,
            version=min(completion.versions),
            prompt_length=len(prompt),
            finish_reason=completion.finish_reason,
            text=self.tokenizer.decode(said, skip_special_tokens=True),
        )

    def together(self, value: object) -> list:
        """`value` of every rank that shares this engine. Collective over them; for small things: it pickles."""
        if self.group is None:
            return [value]
        values: list = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def any_rank(self, value: bool) -> bool:
        """Whether it is true of any rank that shares this engine: what is collective must not end before. Collective
        over them."""
        return any(self.together(value))

    def _queue(self, completion: Completion) -> None:
        self.count += 1
        heapq.heappush(self.waiting, (completion.order, self.count, completion))

    def _said(self, completion: Completion, ids: list[int], logprobs: list[float], finish_reason: str | None) -> None:
        """More of a completion, by the present weights."""
        completion.ids += ids
        completion.logprobs += logprobs
        completion.versions += [self.version] * len(ids)
        completion.finish_reason = finish_reason or ""

    # ---- what the engines do ----

    def _start(self, path: str) -> None:
        raise NotImplementedError

    def _begin(self, name: str, completion: Completion) -> None:
        """A request for what is missing of a completion."""

    def _advance(self) -> None:
        """One turn of all that are running."""
        raise NotImplementedError

    def _stop(self, names: list[str]) -> None:
        """No more of these requests."""

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        raise NotImplementedError

    def sleep(self) -> None:
        """Give memory to the trainer, where the engine can; nothing may be running."""

    def wake(self) -> None:
        """Take it back. `load_weights` must follow before `step`."""

    def close(self) -> None:
        """Shut down, on every rank, before `distributed.cleanup`."""


@contextlib.contextmanager
def untouched_rng():
    """Starting an engine and sampling draw from the global generators; the trainer must not notice."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
