"""The trace of a step (extras/trace/README.md): the numbers of its update, token by token.

Tracing computes nothing that the step does not compute: models hand over their outputs
(`PackedModel.watch`), and the meter hands over the values that the script logs. Tensors stay on the
device until the end of the step. The file is `trace/step_<n>.jsonl.gz`.

Shapes: T tokens and N samples of a micro-batch. A group has the completions of a prompt, a pair, or
one row."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.config.groups import TrainArgs
from common.metrics.logger import asked
from common.model.distill import Comparison
from common.model.logprobs import TokenStats
from common.model.policy import PackedModel
from common.packs.packing import PackedBatch
from common.packs.sample import Completion, Group, Sample
from common.parallel import distributed
from extras.trace.file import SCHEMA, write

GROUPS: int = 4  # groups of a step that are traced
DIGITS: int = 7  # significant digits of a number

# Streams of a micro-batch that are the same in all updates of a step.
FIXED = (
    "rollout_logprobs", "versions", "old_logprobs", "ref_logprobs",
    "advantages", "importance", "values", "returns", "loss_mask",
)  # fmt: skip


@dataclass
class Forward:
    """A forward with a graph, its backward, and what the script logs before the next forward."""

    update: int  # number of earlier optimizer steps in this step
    mb: PackedBatch
    outputs: dict[str, Tensor]  # [T], with gradients after the backward
    scale: float = 1.0  # of these gradients (--dtype float16)
    tokens: dict[str, Tensor] = field(default_factory=dict)  # [T]
    rows: dict[str, Tensor] = field(default_factory=dict)  # [N], or [N / 2] for pairs

    @property
    def samples_per_row(self) -> int:
        lengths = [len(x_N) for x_N in self.rows.values() if len(x_N)]
        return max((self.mb.num_samples // length for length in lengths), default=1)

    def share(self, n: int) -> float:
        """Return how much sample n adds to the loss. A pair counts for its first sample."""
        total = 0.0
        if "share" in self.tokens:
            start, end = self.mb.offsets[n : n + 2]
            total += self.tokens["share"][start:end].double().sum().item()
        row, index_in_row = divmod(n, self.samples_per_row)
        if "share" in self.rows and not index_in_row:
            total += self.rows["share"][row].item()
        return total


# Where a sample was trained: number of the forward in this step, index among all ranks' samples.
Place = tuple[int, int]


class Share(NamedTuple):
    """What a sample adds to the loss in one forward."""

    update: int
    loss: float
    samples_per_row: int


@dataclass
class Traced:
    """A sample that this rank gave to the packer in this step."""

    sample: Sample
    known: dict[str, float]  # reward, its parts, advantage
    shares: dict[Place, Share]

    @property
    def start(self) -> int:
        """The index of the first trained token."""
        mask = self.sample.loss_mask
        return next((i for i, trained in enumerate(mask) if trained and i), len(mask))


class Trace:
    """Traces the steps that `--trace_every` selects. `Run` calls `begin` and `end`."""

    def __init__(
        self, args: TrainArgs, models: Sequence[PackedModel], optimizer: Optimizer, tokenizer
    ):
        self.args = args
        self.models = models
        self.tokenizer = tokenizer
        self.on = False
        self.updates = 0
        self.forwards: list[Forward] = []
        # position in the step -> its completions, each with numbers by name
        self.sampled: dict[int, list[tuple[Completion, dict[str, float]]]] = {}
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_) -> None:
        self.updates += 1

    def begin(self, step: int, last: bool) -> None:
        """Begin step number `step`, counted from 1; trace it if selected. `last`: of the run."""
        every = self.args.trace_every
        self.on = every > 0 and (step % every == 0 or step == 1 or last)
        self.updates = 0
        self.forwards = []
        self.sampled = {}
        for model in self.models:
            model.watch = self._see if self.on else None

    def _see(self, mb: PackedBatch, output: TokenStats | Comparison | Tensor, scale: float) -> None:
        if isinstance(output, Tensor):  # from a value or reward model
            outputs = dict(value=output)
        else:
            outputs = dict(logprobs=output.logprobs_T, entropy=output.entropy_T)
        if isinstance(output, Comparison):
            outputs |= dict(
                divergence=output.divergence_T, teacher_logprobs=output.teacher_logprobs_T
            )
        for x_T in outputs.values():
            if x_T.requires_grad:
                x_T.retain_grad()
        self.forwards.append(Forward(self.updates, mb, outputs, scale))

    def keep(
        self, mb: PackedBatch, values_T: dict[str, Tensor], values_N: dict[str, Tensor]
    ) -> None:
        """Keep what the script logs of a micro-batch: values of tokens, and of samples or pairs."""
        if self.on:
            if not any(forward.mb is mb for forward in self.forwards):
                self.forwards.append(Forward(self.updates, mb, {}))  # changed after its forward
            forward = [forward for forward in self.forwards if forward.mb is mb][-1]
            forward.tokens |= {name: x_T.detach() for name, x_T in values_T.items()}
            forward.rows |= {name: x_N.detach() for name, x_N in values_N.items()}

    def add_groups(
        self, groups: list[Group], positions: Sequence[int], columns_PG: dict[str, Tensor]
    ) -> None:
        """Keep this rank's groups, their positions in the step, and named numbers of
        completions."""
        if not self.on:
            return
        columns = {name: x_PG.tolist() for name, x_PG in columns_PG.items()}
        for p, (position, group) in enumerate(zip(positions, groups, strict=True)):
            known = [
                {name: rows[p][g] for name, rows in columns.items()} for g in range(len(group))
            ]
            self.sampled[position] = list(zip(group, known, strict=True))

    def end(self, step: int) -> None:
        """Write the trace of a step. Collective."""
        shares = distributed.gather_dict(self._shares())
        groups, by_reward = self._groups(shares)
        values = distributed.gather_dict(
            {i: _value(group, by_reward) for i, group in groups.items()}
        )
        chosen = choose(values, GROUPS)
        traced = list(chain.from_iterable(groups.get(i, []) for i in chosen))
        numbers = self._numbers(traced)
        lines = {i: self._line(i, chosen[i], groups[i], numbers) for i in chosen if i in groups}
        lines = distributed.gather_dict(lines)
        weights = distributed.gather_objects([fingerprint(model) for model in self.models])
        losses = [0.0] * (1 + max((share.update for share in shares.values()), default=0))
        for share in shares.values():
            losses[share.update] += share.loss
        header = dict(schema=SCHEMA, step=step, loss=losses, weights=weights)
        if distributed.is_main():
            path = Path(self.args.output_dir, "trace", f"step_{step:06}.jsonl.gz")
            write(path, [header, *(lines[i] for i in chosen)])
        self.forwards = []
        self.sampled = {}

    # ---- samples: text and rewards are on the rank that gave them to the packer, numbers of the
    # update on the rank that trained on them

    def _shares(self) -> dict[Place, Share]:
        """Return what each sample that this rank trained on adds to the loss."""
        shares = {}
        for k, forward in enumerate(self.forwards):
            for n, index in enumerate(forward.mb.index_N.tolist()):
                share = Share(forward.update, forward.share(n), forward.samples_per_row)
                shares[k, index] = share
        return shares

    def _groups(self, shares: dict[Place, Share]) -> tuple[dict[int, list[Traced]], bool]:
        """Return this rank's groups by position in the step, and whether all of them have rewards.
        Groups of completions come first, then rows of data or pairs. A packed sample may be a copy
        of a completion with another mask; it is recognised by its list of ids, which is the same
        object. Collective."""
        own_samples = [
            (place, sample)
            for k, forward in enumerate(self.forwards)
            for index, sample in forward.mb.own_samples.items()
            if (place := (k, index)) in shares
        ]
        shares_of_ids = defaultdict(dict)
        for place, sample in own_samples:
            shares_of_ids[id(sample.ids)][place] = shares[place]
        groups = {
            position: [Traced(s, known, shares_of_ids.pop(id(s.ids), {})) for s, known in group]
            for position, group in self.sampled.items()
        }
        first = int(distributed.all_sum(len(groups)))
        rows: dict[int, dict[int, Traced]] = defaultdict(dict)
        for (k, index), sample in own_samples:
            if id(sample.ids) in shares_of_ids:  # it belongs to no completion
                i, g = divmod(index, shares[k, index].samples_per_row)
                traced = rows[first + i].setdefault(g, Traced(sample, {}, {}))
                traced.shares[k, index] = shares[k, index]
        groups |= {position: [row[g] for g in sorted(row)] for position, row in rows.items()}
        return groups, not distributed.all_sum(len(rows))

    def _numbers(self, traced: list[Traced]) -> dict[Place, dict]:
        """Return the update's numbers of all samples that ranks trace, by place. Collective."""
        wanted = {}
        for sample in traced:
            wanted |= dict.fromkeys(sample.shares, (sample.start, [*sample.sample.streams]))
        wanted = distributed.gather_dict(wanted)
        numbers = {}
        for k, forward in enumerate(self.forwards):
            for n, index in enumerate(forward.mb.index_N.tolist()):
                if (k, index) in wanted:
                    numbers[k, index] = _numbers_of(forward, n, *wanted[k, index])
        return distributed.gather_dict(numbers)

    def _line(
        self, position: int, chosen: list[str], group: list[Traced], numbers: dict[Place, dict]
    ) -> dict:
        first = group[0].sample
        text = asked(first.row) or first.decoded(self.tokenizer, first.prompt_ids)
        completions = [self._completion(traced, numbers) for traced in group]
        return dict(group=position, chosen=chosen, prompt=text, completions=completions)

    def _completion(self, traced: Traced, numbers: dict[Place, dict]) -> dict:
        """Return all that is known of a sample. Lists of tokens begin at the first trained one."""
        sample = traced.sample
        known = {name: rounded(x) for name, x in traced.known.items()}
        if isinstance(sample, Completion):
            known |= dict(finish_reason=sample.finish_reason, version=sample.version)
        if sample.images:
            known["images"] = [image._asdict() for image in sample.images]
        fixed = {}
        updates = defaultdict(dict)
        for place, share in traced.shares.items():
            fixed |= numbers[place]["fixed"]
            updates[share.update] |= dict(index=place[1]) | numbers[place]["update"]
        return known | dict(
            start=traced.start,
            ids=[*sample.ids],
            tokens=[self.tokenizer.decode([i]) for i in sample.ids],
            mask=[int(trained) for trained in sample.loss_mask[traced.start :]],
            fixed=fixed,
            updates=[dict(update=u) | updates[u] for u in sorted(updates)],
        )


def _numbers_of(forward: Forward, n: int, start: int, streams: list[str]) -> dict[str, dict]:
    """Return the numbers of sample n from its id `start` on: `fixed` ones, which all updates read,
    and those of this forward and its backward. `streams`: names of the script's own streams."""
    mb = forward.mb
    # Streams are aligned with ids[1:].
    token_slice = slice(mb.offsets[n] + start - 1, mb.offsets[n + 1])
    fixed_T = {name: getattr(mb, f"{name}_T") for name in (*FIXED, *streams)}
    tokens_T = forward.outputs | forward.tokens
    for name, x_T in forward.outputs.items():
        if x_T.retains_grad and x_T.grad is not None:
            # The scripts multiply the loss by the number of ranks, and the model by its loss scale.
            tokens_T[f"{name}_gradient"] = x_T.grad / distributed.world_size() / forward.scale
    update = {name: all_rounded(x_T[token_slice]) for name, x_T in tokens_T.items()}
    row, index_in_row = divmod(n, forward.samples_per_row)
    if forward.rows and not index_in_row:  # values of a pair stand with its first sample
        update["row"] = {name: rounded(x_N[row].item()) for name, x_N in forward.rows.items()}
    fixed = {
        name: all_rounded(x_T[token_slice]) for name, x_T in fixed_T.items() if x_T is not None
    }
    return dict(fixed=fixed, update=update)


def _value(group: list[Traced], by_reward: bool) -> tuple[float, float]:
    """Return how good and how disputed a group is: mean and spread of its rewards, or -loss and
    loss."""
    if by_reward:
        rewards = [0.0 if math.isnan(r := traced.known["reward"]) else r for traced in group]
        return fmean(rewards), pstdev(rewards)
    loss = math.fsum(share.loss for share in chain.from_iterable(t.shares.values() for t in group))
    return -loss, loss


def choose(values: dict[int, tuple[float, float]], count: int) -> dict[int, list[str]]:
    """Choose `count` groups to trace. Return their positions, each with the reasons: the first, the
    last, the best, the most disputed; others by dispute. `values`: (how good, how disputed)."""
    if not values:
        return {}
    by_dispute = sorted(values, key=lambda i: (-values[i][1], i))
    best = max(values, key=lambda i: (values[i][0], -i))
    named = dict(first=min(values), last=max(values), best=best, disputed=by_dispute[0])
    reasons: dict[int, list[str]] = {}
    for reason, i in [*named.items(), *(("", i) for i in by_dispute)]:
        if i in reasons or len(reasons) < count:
            reasons.setdefault(i, []).extend([reason] if reason else [])
    return reasons


def all_rounded(x_T: Tensor) -> list:
    return [rounded(x) for x in x_T.tolist()]


def rounded(x: float | bool) -> float | int | None:
    """Return a number with `DIGITS` significant digits; None if it is not finite."""
    if isinstance(x, (bool, int)):
        return int(x)
    return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else None


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """Return a hash of the trained weights on this rank, as 16 hexadecimal digits."""
    combined = 0
    trained = [p for p in model.parameters() if p.requires_grad]
    for i, shard in enumerate(p.to_local() if hasattr(p, "to_local") else p for p in trained):
        number = torch.hash_tensor(shard).view(torch.int64).item() if shard.numel() else 0
        combined ^= ((number + i) * 0x9E3779B97F4A7C15) % 2**64
    return f"{combined:016x}"
