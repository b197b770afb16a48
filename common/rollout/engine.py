"""Base class of the engines. An engine samples turns of the model, many at the same time.

It is vLLM (one per rank or per tensor-parallel group) or transformers, as `--engine` says. Each
completion is a coroutine that awaits `sample` for its next turn. Between the coroutines, `Episodes`
(episodes.py) calls `step`, which does the work:

    await engine.sample(request)        one coroutine for each turn in flight
    engine.step(meter)                  adds a token (or all) to each turn; wakes those that ended

The weights may change between two calls of `step`. Turns in flight then go on with the new weights,
and every token records the version of the weights that sampled it. On a training rank:

    load_weights(whole_weights(policy, engine.dtype), version); step(meter) ...; sleep()"""

import asyncio
import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
import pydantic
import torch
import torch.distributed as dist
from torch import Tensor

from common.config.extra import extra
from common.config.flags import STRICT, Fraction, NotNegative, PositiveFraction
from common.config.groups import NO_IMAGES, ImageArgs
from common.config.online import SamplingArgs
from common.metrics.meter import Meter
from common.model.policy import compute_dtype
from common.packs.sample import Completion
from common.text.tokenizer import eos_token_ids

# The i-th completion of a prompt has the seed: the prompt's seed times SEED_SPACING, plus i.
SEED_SPACING = 1 << 16
COMPARED = 32  # `sync_weights` reads back this many columns of each weight and compares them


@pydantic.dataclasses.dataclass(config=STRICT)
class TruncationArgs:
    """Truncated sampling"""

    top_p: PositiveFraction = 1.0
    """sample from the fewest tokens whose probabilities add up to this; 1: all tokens"""
    top_k: NotNegative[int] = 0
    """sample from this many most likely tokens; 0: all tokens"""
    min_p: Fraction = 0.0
    """sample from tokens with at least this fraction of the highest probability; 0: all tokens"""

    @property
    def truncation(self) -> dict[str, float] | None:
        """The flags by name; None if no flag cuts anything from the distribution."""
        flags = dict(top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)
        return None if flags == dict(top_p=1, top_k=0, min_p=0) else flags


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine that only some scripts offer as flags."""

    image_args: ImageArgs = NO_IMAGES
    truncation_args: TruncationArgs = TruncationArgs()
    support: int = 0
    """return the ids of this many most likely tokens beside each sampled token"""


NO_OPTIONS = EngineOptions()


@dataclass(eq=False)
class Request:
    """A turn to sample. The engine appends its tokens to `completion`."""

    completion: Completion
    max_tokens: int
    seed: int
    temperature: float
    """0: greedy"""
    priority: int = 0
    """smaller numbers run first; equal ones in the order in which they were submitted"""

    def __post_init__(self) -> None:
        self.start = len(self.completion.ids)


class SampledTurn(NamedTuple):
    """The tokens of a turn that has ended."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """version of the weights that sampled each token"""
    finish_reason: str
    support: Sequence[np.ndarray] = ()  # see Completion


def empty_completion(prompt: list[int], row: dict | None = None) -> Completion:
    """Return a completion that has its prompt, from this data row, and no sampled tokens yet."""
    size = len(prompt)
    logprobs, versions = [0.0] * size, [-1] * size
    return Completion([*prompt], [False] * size, size, row or {}, rollout_logprobs=logprobs,
                      versions=versions)  # fmt: skip


class Engine:
    """Base class of the engines. Each engine implements the methods of the last section."""

    keeps_weights = False  # whether the engine still has its weights after `sleep`

    def __init__(
        self, path: str, args: SamplingArgs, tokenizer, device: torch.device, trained: bool,
        options: EngineOptions = NO_OPTIONS,
    ):  # fmt: skip
        self.path = path
        self.args = args
        self.truncation = options.truncation_args.truncation
        self.support = options.support
        self.images = None  # reads images, if `--vision` has the engine run the whole model
        if options.image_args.vision is not None:
            with extra("images", f"--vision {options.image_args.vision}"):
                from extras.images.features import EngineImages
            self.images = EngineImages(path, options.image_args.max_pixels)
        self.tokenizer = tokenizer
        self.eos_ids = eos_token_ids(path, tokenizer, args.prompt_format, args.stop_token_ids)
        if self.images is not None:  # a sampled placeholder has no image: it ends the turn
            self.eos_ids += self.images.reader.placeholder_ids
        # BOS, padding and the special tokens that end a turn are not part of its text. An ordinary
        # token that ends a turn (--stop_token_ids) is.
        ends = {*self.eos_ids, tokenizer.bos_token_id, tokenizer.pad_token_id}
        self.silent_ids = ends & tokenizer.added_tokens_decoder.keys()
        self.device = device
        self.dtype = compute_dtype(args, device)
        self.trained = trained
        # With tensor parallelism: the ranks that share this engine, and this rank's place in them.
        self.group: dist.ProcessGroup | None = None
        self.group_rank = 0
        self.version = 0  # version of the weights
        self.new: list[Request] = []  # requests of this rank that the next `step` adds
        self.ended: dict[Request, asyncio.Future] = {}  # `sample` waits for these
        self.running: dict[str, Request] = {}  # requests of all ranks of this engine, by name
        self.names = map(str, count())
        with untouched_rng(), warnings.catch_warnings():
            # vLLM looks at every name in torch, deprecated ones too
            warnings.simplefilter("ignore", FutureWarning)
            self._start()
            if trained:
                self.sleep()

    async def sample(self, request: Request) -> None:
        """Sample a turn and append it to the completion of the request. Returns when it has ended.

        Tokens are sampled from softmax(logits / temperature) (temperature 0: greedy), truncated by
        the flags of `TruncationArgs`. Their log-probs belong to that distribution. The turn ends
        with, and includes, an EOS or the token that completes one of the `--stop` strings."""
        ended = self.ended[request] = asyncio.get_running_loop().create_future()
        self.new.append(request)
        await ended

    def step(self, meter: Meter) -> None:
        """Run a round: sample a token for each request or, if the engine cannot be interrupted, a
        whole turn. Call it outside of the event loop. Logs how many requests are in flight.
        Collective with tensor parallelism."""
        for rank, requests in enumerate(self.gather_in_engine(self.new)):
            for request in self.new if rank == self.group_rank else requests:
                name = next(self.names)
                self.running[name] = request
                self._add(name, request)
        self.new = []
        turns = []
        if self.running:
            meter.mean("engine/running", len(self.running))
            with untouched_rng():
                turns = self._step(meter)
        for name, turn in turns:
            request = self.running.pop(name)
            completion = request.completion
            completion.ids += turn.ids
            completion.loss_mask += [True] * len(turn.ids)
            completion.rollout_logprobs += turn.logprobs
            completion.versions += turn.versions
            completion.support.extend(turn.support)
            completion.finish_reason = turn.finish_reason
            completion.text = self.text_of(turn.ids)
            ended = self.ended.pop(request, None)
            # None: another rank waits for this request. Done: its episode was cancelled.
            if ended is not None and not ended.done():
                ended.set_result(None)

    def text_of(self, turn: list[int], cut: bool = True) -> str:
        """Decode a turn and, if `cut`, end the text before its first stop string. Special tokens
        such as <think> stay in the text: a reward or an environment may read them."""
        ids = [token for token in turn if token not in self.silent_ids]
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        stops = [text.index(string) for string in self.args.stop if cut and string in text]
        return text[: min(stops, default=None)]

    def gather_in_engine(self, value: object) -> list:
        """Return the `value` of every rank that shares this engine. Collective over these ranks.
        Keep the values small: they are pickled."""
        if self.group is None:
            return [value]
        values: list = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    # ---- implemented by each engine ----

    def _start(self) -> None:
        raise NotImplementedError

    def _add(self, name: str, request: Request) -> None:
        """Submit a new request. It is already in `running`."""

    def _step(self, meter: Meter) -> list[tuple[str, SampledTurn]]:
        """Run a round and return the turns that have ended, by the names of their requests."""
        raise NotImplementedError

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int = 0) -> None:
        """Load all policy weights by name, and wake the engine. Requests in flight continue under
        the new weights. Collective with tensor parallelism."""
        raise NotImplementedError

    def held_weights(self) -> Iterator[tuple[str, tuple, Callable[[], Tensor]]]:
        """Yield, for each weight that can be compared with the policy's: its name, the index of a
        small part of it, and a function that reads this part from the engine."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Release memory for the trainer, if the engine can. Drops the turns in flight."""

    def close(self) -> None:
        """Shut down, on every rank, before `distributed.cleanup`."""


@contextlib.contextmanager
def untouched_rng() -> Iterator[None]:
    """Restore the global random generators at the end: engines draw from them too."""
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield
    np.random.set_state(numpy_state)
    random.setstate(python_state)
