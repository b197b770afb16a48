"""Base class of the engines: requests in flight, their priority and seeds, and their conversion to
completions.

An engine is vLLM (one per rank or per tensor-parallel group) or, where vLLM is not installed,
transformers. It works in rounds: `submit` adds a request, `advance` runs a round and returns the
requests that have ended. Weights may change between two rounds. Requests in flight then continue
under the new weights, and every token records the version of the weights that sampled it. A
training rank calls these methods in this order; a rollout rank never sleeps:

    wake(); load_weights(whole_weights(policy, engine.dtype), version); advance() ...; sleep()
"""

import contextlib
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.config.extra import extra
from common.config.online import SamplingArgs
from common.config.sampling import SLOTS
from common.data.sample import Completion
from common.metrics.meter import Meter
from common.model.policy import compute_dtype
from common.parallel import distributed
from common.rollout.stop_strings import StopStrings

# distance of the seeds of two prompts: the i-th completion of a prompt adds i to its seed
SEED_SPACING = 1 << 16


@dataclass(eq=False)
class Request:
    """A turn to sample: the engine appends its tokens to `completion`. When the weights change the
    turn is sampled in pieces, each with a seed of its own."""

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
    def num_missing(self) -> int:
        """Number of tokens until the limit."""
        return self.max_tokens - self.num_sampled

    @property
    def piece_seed(self) -> int:
        """Seed of the piece that starts here."""
        if not self.num_sampled:
            return self.seed
        return distributed.fold_seed(self.seed, self.num_sampled) * SEED_SPACING

    @property
    def has_ended(self) -> bool:
        return self.completion.finish_reason != ""


def empty_completion(prompt: list[int]) -> Completion:
    """Return a completion of `prompt` without tokens."""
    size = len(prompt)
    return Completion(
        [*prompt], [False] * size, size, rollout_logprobs=[0.0] * size, versions=[-1] * size
    )


class Engine:
    """Base class of the engines, which implement its last section."""

    def __init__(
        self,
        path: str,
        args: SamplingArgs,
        eos_ids: list[int],
        tokenizer,
        device: torch.device,
        trained: bool,
    ):
        self.path = path
        self.args = args
        self.images = None  # with `--vision` the engine has the whole model
        if args.vision is not None:
            with extra("images", f"--vision {args.vision}"):
                from extras.images.features import EngineImages
            self.images = EngineImages(path, args.max_pixels)
        self.tokenizer = tokenizer
        self.end_at(eos_ids)
        self.device = device
        self.dtype = compute_dtype(args, device)
        self.trained = trained
        self.beside_trainer = trained and not distributed.is_rollout_rank()
        # the ranks that share this engine, if there are several, and this rank's place among them
        self.group: dist.ProcessGroup | None = None
        self.group_rank = 0
        self.version = 0  # of the weights
        self.in_flight: set[Request] = set()  # requests of this rank that have not ended
        self.submitted: list[Request] = []  # requests of this rank since the last round
        self.waiting: list[Request] = []  # of all ranks that share this engine
        self.running: dict[str, Request] = {}  # of all ranks that share this engine, by name
        self.names = map(str, count())
        self.stop_strings = None
        if args.stop:
            self.stop_strings = StopStrings(args.stop, tokenizer, self.silent_ids)
        with untouched_rng(), warnings.catch_warnings():
            # vLLM walks over deprecated names of torch
            warnings.simplefilter("ignore", FutureWarning)
            self._start(path)
            if trained:
                self.sleep()

    def end_at(self, eos_ids: list[int]) -> None:
        """Set the tokens that end completions."""
        self.eos_ids = [*eos_ids]
        if self.images is not None:  # a placeholder that is sampled has no image
            self.eos_ids += self.images.reader.placeholder_ids
        tokenizer = self.tokenizer
        of_tokenizer = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        ends = {*self.eos_ids, *of_tokenizer}
        self.silent_ids = ends & tokenizer.added_tokens_decoder.keys()
        """tokens that are no text: those that end a turn, BOS and padding; a character that ends a
        turn is text"""

    # ---- requests ----

    def submit(self, request: Request) -> None:
        """Add a request. `advance` runs it, and returns it when it has ended."""
        self.submitted.append(request)
        self.in_flight.add(request)

    def advance(self) -> list[Request]:
        """Run a round of as many requests as there are slots for, and return those of this rank
        that have ended. Each gets one token, or all its tokens from an engine that cannot be
        interrupted. Collective with tensor parallelism.

        Tokens are sampled from softmax(logits / temperature) (temperature 0: greedy), which the
        flags of `TruncationArgs` truncate. `logprobs` are those of that distribution. An EOS ends a
        completion and belongs to it, and so does the token that completes one of `--stop`."""
        for rank, requests in enumerate(self.gather_in_engine(self.submitted)):
            self.waiting += self.submitted if rank == self.group_rank else requests
        self.submitted = []
        with untouched_rng():
            if self.waiting and len(self.running) < SLOTS:
                self._fill_slots()
            if self.running:
                self._sample()
        ended = {name: request for name, request in self.running.items() if request.has_ended}
        for name in ended:
            del self.running[name]
        ended_here = [request for request in ended.values() if request in self.in_flight]
        self.in_flight.difference_update(ended_here)
        return ended_here

    def interrupt(self) -> None:
        """Stop the running requests, which keep their tokens and wait for the next round."""
        self._stop(list(self.running))
        self.waiting += self.running.values()
        self.running = {}

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int = 0) -> None:
        """Load all policy weights by name. Call before sampling; requests in flight continue under
        the new weights. Collective with tensor parallelism."""
        self.interrupt()
        self._load(weights)
        self.version = version

    def measure(self, meter: Meter) -> None:
        """Measure the numbers of requests that are running and waiting. Call after each round."""
        meter.mean("engine/running", len(self.running))
        meter.mean("engine/waiting", len(self.waiting))

    def gather_in_engine(self, value: object) -> list:
        """Return `value` of every rank that shares this engine. Collective over them. For small
        values: it pickles."""
        if self.group is None:
            return [value]
        values: list = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def any_rank(self, value: bool) -> bool:
        """Return whether `value` is true on any rank of this engine, so that all of them leave a
        collective loop together. Collective over them."""
        return any(self.gather_in_engine(value))

    def append_output(
        self, request: Request, ids: list[int], logprobs: list[float], finish_reason: str | None
    ) -> None:
        """Append tokens that the present weights sampled to a running request, up to the one that
        completes a stop string and thereby ends it."""
        completion = request.completion
        before = len(completion.ids)
        completion.ids += ids
        if self.stop_strings is not None:
            end = self.stop_strings.end_of_turn(completion.ids, request.start, before)
            if end is not None:
                del completion.ids[end:]
                ids = ids[: end - before]
                logprobs = logprobs[: end - before]
                finish_reason = "stop"
        completion.loss_mask += [True] * len(ids)
        completion.rollout_logprobs += logprobs
        completion.versions += [self.version] * len(ids)
        if finish_reason:
            completion.finish_reason = finish_reason
            # Other special tokens, such as <think> or <answer>, are text: a reward or an
            # environment reads them.
            turn = completion.ids[request.start :]
            text_ids = [token for token in turn if token not in self.silent_ids]
            completion.text = self.tokenizer.decode(text_ids, skip_special_tokens=False)
            if self.stop_strings is not None:
                completion.text = self.stop_strings.without_stop(completion.text)

    def _fill_slots(self) -> None:
        """Start waiting requests by priority."""
        self.waiting.sort(key=lambda request: request.priority)  # stable
        room = SLOTS - len(self.running)
        for request in self.waiting[:room]:
            name = next(self.names)
            self.running[name] = request
            self._admit(name, request)
        self.waiting = self.waiting[room:]

    # ---- implemented by each engine ----

    def _start(self, path: str) -> None:
        raise NotImplementedError

    def _admit(self, name: str, request: Request) -> None:
        """Prepare the sampling of a request's missing tokens."""

    def _sample(self) -> None:
        """Sample tokens of the running requests, with `append_output`."""
        raise NotImplementedError

    def _stop(self, names: list[str]) -> None:
        """Stop sampling for these requests."""

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        raise NotImplementedError

    def sleep(self) -> None:
        """Release memory for the trainer, if the engine can. Nothing may be running."""

    def wake(self) -> None:
        """Reclaim the memory released by `sleep`. `load_weights` must follow before `advance`."""

    def close(self) -> None:
        """Shut down, on every rank, before `distributed.cleanup`."""


@contextlib.contextmanager
def untouched_rng() -> Iterator[None]:
    """Restore the global random generators, from which engines draw at start and while sampling."""
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield
    np.random.set_state(numpy_state)
    random.setstate(python_state)
