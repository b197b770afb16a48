"""Base class of the engines: requests in flight, their priority and seeds, and their conversion to completions.

An engine works in turns: `submit` adds a request, `step` advances the running ones and returns those that have ended.
Weights may change between two turns. Requests in flight then continue under the new weights, and every token records
the version of the weights that sampled it.
"""

import contextlib
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.config.groups import SamplingArgs
from common.data.sample import Completion, Group
from common.metrics.meter import Meter
from common.model.policy import compute_dtype
from common.parallel import distributed

SEED_SPACING = 1 << 16  # distance of the seeds of two prompts: the i-th completion of a prompt adds i to its seed
SLOTS = 256  # requests that run at the same time: their float32 logits, 156 MB of 151,936 tokens, exist several times


@dataclass(eq=False)
class Request:
    """A turn to sample: the engine appends its tokens to `completion`. When the weights change the turn is sampled in
    pieces, each with a seed of its own."""

    completion: Completion
    max_tokens: int
    seed: int
    temperature: float
    """0: greedy"""
    priority: int = 0
    """smaller numbers run first; requests with the same number run in the order of submission"""

    def __post_init__(self) -> None:
        self.start = len(self.completion.ids)

    @property
    def num_sampled(self) -> int:
        return len(self.completion.ids) - self.start

    @property
    def piece_seed(self) -> int:
        """Seed of the piece that starts here."""
        return distributed.fold_seed(self.seed, self.num_sampled) * SEED_SPACING if self.num_sampled else self.seed

    @property
    def has_begun(self) -> bool:
        """Whether the completion has tokens, of this turn or an earlier one."""
        return len(self.completion.ids) > self.completion.prompt_length

    @property
    def has_ended(self) -> bool:
        return self.completion.finish_reason != ""


def empty_completion(prompt: list[int]) -> Completion:
    """Return a completion of `prompt` without tokens."""
    size = len(prompt)
    return Completion([*prompt], [False] * size, size, rollout_logprobs=[0.0] * size, versions=[-1] * size)


class Engine:
    """Base class of the engines, which implement its last section."""

    def __init__(
        self, path: str, args: SamplingArgs, eos_ids: list[int], tokenizer, device: torch.device, trained: bool
    ):
        self.args, self.eos_ids, self.tokenizer, self.device = args, eos_ids, tokenizer, device
        ends = {*eos_ids, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        self.silent_ids = ends & tokenizer.added_tokens_decoder.keys()
        """tokens that are no text: those that end a turn, BOS and padding; a character that ends a turn is text"""
        self.dtype = compute_dtype(args, device)
        self.beside_trainer = trained and not distributed.is_rollout_rank()
        self.group: dist.ProcessGroup | None = None  # the ranks that share this engine, if there are several
        self.group_rank = 0  # this rank's place among them
        self.version = 0  # of the weights
        self.submitted: list[Request] = []  # since the last step
        self.waiting: list[Request] = []  # of all ranks that share this engine
        self.running: dict[str, Request] = {}  # by name
        self.own: set[Request] = set()  # requests in flight that this rank submitted
        self.names = map(str, count())
        self.admits_new = True  # False: run only requests that have begun
        with untouched_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM walks over deprecated names of torch
            self._start(path)
            if trained:
                self.sleep()
        distributed.install_signal_handlers()  # vLLM's imports may have replaced them

    # ---- requests ----

    def submit(self, request: Request) -> None:
        """Add a request. `step` advances it, and returns it when it has ended."""
        self.submitted.append(request)

    def step(self) -> list[Request]:
        """Advance as many requests as there are slots for, and return those of this rank that have ended. Each gets one
        token, or all its tokens from an engine that cannot be interrupted. Collective with tensor parallelism.

        Tokens are sampled from softmax(logits / temperature), without any truncation of the distribution (temperature
        0: greedy). `logprobs` are those of that distribution. An EOS ends a completion and belongs to it.
        """
        self.own.update(self.submitted)
        for i, requests in enumerate(self.gather_in_engine(self.submitted)):
            self.waiting += self.submitted if i == self.group_rank else requests
        self.submitted = []
        with untouched_rng():
            if self.waiting and len(self.running) < SLOTS:
                self._fill_slots()
            if self.running:
                self._advance()
        ended = [request for request in self.running.values() if request.has_ended]
        self.running = {name: request for name, request in self.running.items() if not request.has_ended}
        ended_here = [request for request in ended if request in self.own]
        self.own.difference_update(ended_here)
        return ended_here

    def interrupt(self) -> None:
        """Stop the running requests, which keep their tokens and wait for the next step."""
        self._stop(list(self.running))
        self.waiting += self.running.values()
        self.running = {}

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int = 0) -> None:
        """Load all policy weights by name. Call before sampling; requests in flight continue under the new weights.
        Collective with tensor parallelism."""
        self.interrupt()
        self._load(weights)
        self.version = version

    def measure(self, meter: Meter) -> None:
        """Measure the numbers of requests that are running and waiting. Call after each step."""
        meter.mean("engine/running", len(self.running))
        meter.mean("engine/waiting", len(self.waiting))

    def generate(self, prompts: list[list[int]], n: int, seeds: list[int], temperature: float) -> list[Group]:
        """Return `n` completions for each prompt of this rank, in order; `seeds` has one seed per prompt. Nothing else
        may be in flight. Collective with tensor parallelism."""
        limit = self.args.max_new_tokens
        groups = [
            [Request(empty_completion(prompt), limit, seed * SEED_SPACING + i, temperature) for i in range(n)]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        for request in chain(*groups):
            self.submit(request)
        while self.any_rank(bool(self.submitted or self.own)):
            self.step()
        return [[request.completion for request in group] for group in groups]

    def gather_in_engine(self, value: object) -> list:
        """Return `value` of every rank that shares this engine. Collective over them. For small values: it pickles."""
        if self.group is None:
            return [value]
        values: list = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def any_rank(self, value: bool) -> bool:
        """Return whether `value` is true on any rank of this engine, so that all of them leave a collective loop
        together. Collective over them."""
        return any(self.gather_in_engine(value))

    def append_output(self, request: Request, ids: list[int], logprobs: list[float], finish_reason: str | None) -> None:
        """Append tokens that the present weights sampled to a running request."""
        completion = request.completion
        completion.ids += ids
        completion.loss_mask += [True] * len(ids)
        completion.rollout_logprobs += logprobs
        completion.versions += [self.version] * len(ids)
        if finish_reason:
            completion.finish_reason, turn = finish_reason, completion.ids[request.start :]
            # Other special tokens, such as <think> or <answer>, are text: a reward or an environment reads them.
            text_ids = [i for i in turn if i not in self.silent_ids]
            completion.text = self.tokenizer.decode(text_ids, skip_special_tokens=False)

    def _fill_slots(self) -> None:
        """Begin waiting requests by priority."""
        self.waiting.sort(key=lambda request: request.priority)  # stable
        admitted = [request for request in self.waiting if self.admits_new or request.has_begun]
        for request in admitted[: SLOTS - len(self.running)]:
            name = next(self.names)
            self.running[name] = request
            self._begin(name, request)
        running = set(self.running.values())
        self.waiting = [request for request in self.waiting if request not in running]

    # ---- implemented by each engine ----

    def _start(self, path: str) -> None:
        raise NotImplementedError

    def _begin(self, name: str, request: Request) -> None:
        """Start sampling the missing tokens of a request."""

    def _advance(self) -> None:
        """Advance all running requests by one turn, with `append_output`."""
        raise NotImplementedError

    def _stop(self, names: list[str]) -> None:
        """Stop sampling for these requests."""

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        raise NotImplementedError

    def sleep(self) -> None:
        """Release memory for the trainer, if the engine can. Nothing may be running."""

    def wake(self) -> None:
        """Reclaim the memory released by `sleep`. `load_weights` must follow before `step`."""

    def close(self) -> None:
        """Shut down, on every rank, before `distributed.cleanup`."""


@contextlib.contextmanager
def untouched_rng() -> Iterator[None]:
    """Restore the global random generators, from which engines draw at start and while sampling."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield
    np.random.set_state(numpy_state)
    random.setstate(python_state)
