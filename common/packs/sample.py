"""Samples: a prompt and its completion as token ids, read from data or sampled by an engine."""

import re
from array import array
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise
from typing import NamedTuple

import numpy as np

PLACEHOLDER = "<image>"  # marks an image in the texts of many data sets, and in our logs


class ImageSpan(NamedTuple):
    """An image of a sample. extras/images reads the file."""

    file: str
    digest: str  # digest of the content of `file`
    start: int  # place of its first placeholder in the ids of the sample
    end: int  # place after its last placeholder; other tokens may stand between placeholders
    patches: int  # number of patches that the vision tower reads


@dataclass
class Sample:
    """A prompt and its completion as token ids. Every per-token list has the length of `ids`:
    `x[i]` describes the token `ids[i]`.

    A sample of data has arrays, which take a seventh of the memory; a `Completion` has lists."""

    ids: array | list[int]  # int32: prompt, then completion
    loss_mask: bytes | list[bool]  # whether a token is trained; nothing predicts the first one
    prompt_length: int = 0  # tokens of the prompt; `ids[prompt_length:]` is the completion
    row: dict = field(default_factory=dict)  # data row of the prompt
    # Where its first trained token is in the stored log-probs (extras/teachers/stored.py).
    stored_at: int | None = None
    # Why turns of its row are not trained, one reason for each.
    turns_left_out: tuple[str, ...] = ()
    # How many first ids are left out to save memory (`without_shared_ids`). The sample before it
    # has them.
    left_out: int = 0
    # Per-token lists that your own script adds: `streams["x"]` is `x_T` of a micro-batch.
    streams: dict[str, list[float]] = field(default_factory=dict)

    @property
    def images(self) -> list[ImageSpan]:
        """The images of the prompt."""
        return [ImageSpan(*span) for span in self.row.get("_images") or ()]

    def decoded(self, tokenizer, ids: list[int]) -> str:
        """Decode some of `ids` for people. `[<image> x 64]` stands for 64 placeholders in a row."""
        text = tokenizer.decode([*ids])
        if not self.images or self.images[0].start >= len(self.ids):  # none, or cut off
            return text
        mark = tokenizer.decode([self.ids[self.images[0].start]])
        runs = f"(?:{re.escape(mark)}){{2,}}"
        return re.sub(runs, lambda run: f"[{mark} x {len(run[0]) // len(mark)}]", text)

    @property
    def sequences(self) -> "list[Sample]":
        """This sample, and the branches of an agent's episode."""
        return [self]

    @property
    def longest(self) -> int:
        """Number of tokens of the completion, or of its longest branch."""
        return max(len(sequence.completion_ids) for sequence in self.sequences)

    @property
    def prompt_ids(self) -> array | list[int]:
        return self.ids[: self.prompt_length]

    @property
    def completion_ids(self) -> array | list[int]:
        return self.ids[self.prompt_length :]

    @property
    def sampled_ids(self) -> list[int]:
        """The ids that a model sampled, of all turns and branches."""
        return [id_ for x in self.sequences for id_ in compress(x.ids, x.loss_mask)]

    @property
    def num_targets(self) -> int:
        """Number of its tokens in a pack: one for each id that is predicted, all but the first."""
        return len(self.ids) - 1


@dataclass
class Completion(Sample):
    """A sample whose completion an engine or another program sampled."""

    # For each of `ids`, the engine's log-prob, and the version of the weights that sampled it: how
    # many training steps they had taken. Tokens that were not sampled have 0 and -1.
    rollout_logprobs: list[float] | None = None
    versions: list[int] | None = None
    # With truncated sampling: the ids that could have been sampled, for each sampled token.
    support: list[np.ndarray] = field(default_factory=list)
    # `stop`: it ends with an EOS or a stop string. `length`: max_new_tokens or max_turns cut it.
    finish_reason: str = ""
    text: str = ""  # decoded completion, or its last turn, for rewards and logs
    number: int | None = None  # number of its prompt in the run
    turns: int = 1  # turns of the model; what an environment says between them is not trained
    turn_start: int = 0  # where the last of several turns begins in `ids`, if sampled here
    # Rewards of the environment, each with the place of the turn's last token in `ids`.
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    transcript: str = ""  # all turns decoded, for logs; empty without an environment
    error: str = ""  # what the environment raised, if anything
    # With `--tools`: number of calls, and how many had each problem (extras/tools/toolbox.py).
    tool_counts: dict[str, int] | None = None
    feedback: str = ""  # text about the completion that a reward returned
    # Why rewards could not be computed, by their names.
    reward_errors: dict[str, str] = field(default_factory=dict)
    # Further conversations of an agent's episode (extras/agents/README.md), with its reward.
    branches: "list[Completion]" = field(default_factory=list)
    requests: int | None = None  # requests of the agent in the episode, if there is one

    @property
    def sequences(self) -> "list[Completion]":
        return [self, *self.branches]

    def untrained(self) -> "Completion":
        """Return a copy without trained tokens, and without branches."""
        return replace(self, loss_mask=[False] * len(self.loss_mask), branches=[])

    def append_forced(self, ids: list[int]) -> None:
        """Append tokens that were not sampled."""
        self.ids += ids
        self.loss_mask += [False] * len(ids)
        self.rollout_logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.finish_reason = ""

    def append_reply(self, ids: list[int]) -> None:
        """Append tokens that were not sampled, and begin the turn of the model after them."""
        self.append_forced(ids)
        self.turns += 1
        self.turn_start = len(self.ids)

    def rewards_before_last_turn(self) -> list[float]:
        """Return, for each of `ids`, the environment's reward for the turn that ends there; 0 for
        the last turn."""
        rewards = [0.0] * len(self.ids)
        for index, reward in self.turn_rewards:
            rewards[index] = reward
        rewards[-1] = 0.0
        return rewards

    @property
    def version(self) -> int:
        """Version of the oldest weights that sampled one of its tokens: their training steps."""
        return min(version for version in self.versions or () if version >= 0)


Group = list[Completion]  # the completions of a prompt


def at_end(ids: list[int], row: dict | None = None) -> Sample:
    """Return a sample whose scalar is read once, after all of `ids`. Streams are aligned with
    targets, and the last token has no target. So a token is appended; any will do, because the
    model does not read it."""
    return Sample(ids + ids[-1:], [False] * len(ids) + [True], row=row or {})


# ---- samples of one row, as they are kept in memory ----


def without_shared_ids(group: list[Sample]) -> list[Sample]:
    """Return the samples, each without the first ids that it shares with the one before it."""
    shared = [0, *(shared_start(one, other) for one, other in pairwise(group))]
    return [
        replace(s, ids=s.ids[n:], loss_mask=s.loss_mask[n:], left_out=n)
        for s, n in zip(group, shared, strict=True)
    ]


def with_shared_ids(group: list[Sample]) -> list[Sample]:
    """Undo `without_shared_ids`: return copies with all their ids."""
    samples: list[Sample] = []
    for s in group:
        before = samples[-1].ids[: s.left_out] if s.left_out else array("i")
        mask = bytes(s.left_out) + s.loss_mask
        samples.append(replace(s, ids=before + s.ids, loss_mask=mask, left_out=0))
    return samples


def shared_start(one: Sample, other: Sample) -> int:
    """Return how many first ids two samples share, within the prompt of `other`."""
    length = min(len(one.ids), len(other.ids), other.prompt_length)
    differs = np.not_equal(one.ids[:length], other.ids[:length])
    return int(differs.argmax()) if differs.any() else length
