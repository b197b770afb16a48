"""Trace of a step: the numbers of its update, token by token, in `trace/step_<n>.jsonl.gz` (docs/trace.md).

A trace computes nothing that the step does not compute: models hand over their outputs (`PackedModel.watch`), and the
meter hands over the values that the script logs. Tensors stay on the device until the end of the step.

Shapes: T tokens and N samples of a micro-batch. A group has the completions of a prompt, a pair, or one row of data.
"""

import gzip
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.config.groups import TrainArgs
from common.config.launch import flags_of
from common.data.packing import PackedBatch
from common.data.sample import Completion, Group, Sample
from common.metrics.logger import asked
from common.model.comparison import Comparison
from common.model.logprobs import TokenStats
from common.model.policy import PackedModel
from common.parallel import distributed
from common.train.optim import local

SCHEMA = 1
# Streams of a micro-batch that all updates of a step read.
FIXED = ("rollout_logprobs", "versions", "weights", "old_logprobs", "old_entropy", "ref_logprobs", "advantages",
         "importance", "values", "returns")  # fmt: skip


@dataclass
class Forward:
    """A forward with a graph, its backward, and the values that the script logs between it and the next forward."""

    update: int  # number of earlier optimizer steps in this step
    mb: PackedBatch
    outputs: dict[str, Tensor]  # [T], with gradients after the backward
    tokens: dict[str, Tensor] = field(default_factory=dict)  # [T]
    rows: dict[str, Tensor] = field(default_factory=dict)  # [N], or [N / 2] for pairs

    @property
    def samples_per_row(self) -> int:
        return max((len(self.mb.samples) // len(x) for x in self.rows.values() if len(x)), default=1)

    def share(self, n: int | None = None) -> float:
        """Return what sample n adds to the loss, or all samples. The share of a pair counts for its first sample."""
        own = slice(None) if n is None else slice(self.mb.offsets[n], self.mb.offsets[n + 1])
        total = self.tokens["share"][own].double().sum().item() if "share" in self.tokens else 0.0
        if "share" in self.rows:
            G = self.samples_per_row
            own = slice(None) if n is None else slice(n // G, n // G + (n % G == 0))
            total += self.rows["share"][own].double().sum().item()
        return total


@dataclass
class Traced:
    """A sample of the step."""

    sample: Sample
    known: dict[str, float]  # reward, its parts, advantage
    places: list[tuple[Forward, int]]  # its forwards, and its index in their micro-batches

    def shares(self) -> list[tuple[int, float]]:
        """Return what the sample adds to the loss, with the number of the update."""
        return [(forward.update, forward.share(n)) for forward, n in self.places]


class Trace:
    """Trace of the steps that `--trace_every` selects; nothing in other steps."""

    def __init__(self, args: TrainArgs, models: Sequence[PackedModel], optimizer: Optimizer, tokenizer):
        self.args, self.models, self.tokenizer = args, models, tokenizer
        self.script = Path(sys.modules[type(args).__module__].__file__).stem
        self.on, self.updates = False, 0
        self.forwards: list[Forward] = []
        self.sampled: dict[int, list[tuple[Completion, dict[str, float]]]] = {}  # by position in the step
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_) -> None:
        self.updates += 1

    def begin(self, step: int, last: bool) -> None:
        """Begin step number `step`, counted from 1; `last`: of the run."""
        every = self.args.trace_every
        self.on = every > 0 and (step % every == 0 or step == 1 or last)
        self.updates, self.forwards, self.sampled = 0, [], {}
        for model in self.models:
            model.watch = self._see if self.on else None

    def _see(self, mb: PackedBatch, output: TokenStats | Comparison | Tensor) -> None:
        if isinstance(output, Tensor):  # of a value or reward model
            outputs = dict(value=output)
        else:
            outputs = dict(logprobs=output.logprobs_T, entropy=output.entropy_T)
        if isinstance(output, Comparison):
            outputs |= dict(divergence=output.divergence_T, teacher_logprobs=output.teacher_logprobs_T)
        for x_T in outputs.values():
            if x_T.requires_grad:
                x_T.retain_grad()
        self.forwards.append(Forward(self.updates, mb, outputs))

    def keep(self, mb: PackedBatch, values_T: dict[str, Tensor], values_N: dict[str, Tensor]) -> None:
        """Keep values of the tokens of a micro-batch, and of its samples or pairs."""
        if self.on:
            forward = next((forward for forward in reversed(self.forwards) if forward.mb is mb), None)
            if forward is None:  # a script that changes its micro-batch after the forward
                self.forwards.append(forward := Forward(self.updates, mb, {}))
            forward.tokens |= {name: x_T.detach() for name, x_T in values_T.items()}
            forward.rows |= {name: x_N.detach() for name, x_N in values_N.items()}

    def add_groups(self, groups: list[Group], positions: Sequence[int], columns_PG: dict[str, Tensor]) -> None:
        """Keep this rank's groups with their positions in the step, and named numbers of each completion."""
        if not self.on:
            return
        columns = {name: x_PG.tolist() for name, x_PG in columns_PG.items()}
        for p, (position, group) in enumerate(zip(positions, groups, strict=True)):
            known = [{name: rows[p][g] for name, rows in columns.items()} for g in range(len(group))]
            self.sampled[position] = list(zip(group, known, strict=True))

    def end(self, step: int) -> None:
        """Write the trace of a step. Collective."""
        groups, rows = self._sampled_groups(), self._rows_of_data()
        by_reward = not distributed.all_sum(len(rows))
        groups |= rows
        values = distributed.gather_dict({i: _value(group, by_reward) for i, group in groups.items()})
        chosen = choose(values, self.args.trace_groups, self.args.trace_positions)
        lines = distributed.gather_dict({i: self._line(i, chosen[i], groups[i]) for i in chosen if i in groups})
        weights = distributed.gather_objects([fingerprint(model) for model in self.models])
        traced = [each for i in chosen for sample in groups.get(i, []) for each in sample.shares()]
        packs = {(forward.update, id(forward.mb)): forward.mb for forward in self.forwards}
        header = dict(
            schema=SCHEMA,
            script=self.script,
            step=step,
            loss=self._by_update((forward.update, forward.share()) for forward in self.forwards),
            traced=self._by_update(traced),
            tokens=self._by_update((u, int(mb.loss_mask_T.sum())) for (u, _), mb in packs.items()),
            sequences=self._by_update((u, sum(any(x.loss_mask) for x in mb.samples)) for (u, _), mb in packs.items()),
            weights=weights,
            flags=flags_of(self.args),
        )
        if distributed.is_main():
            path = Path(self.args.output_dir, "trace", f"step_{step:06}.jsonl.gz")
            write(path, [header, *(lines[i] for i in chosen)])
        self.forwards, self.sampled = [], {}

    def _by_update(self, numbers: Iterable[tuple[int, float]]) -> list[float]:
        """Add up numbers of all ranks, given with their updates: one sum for each update. Collective."""
        sums = [0.0] * (1 + max((forward.update for forward in self.forwards), default=0))
        for update, number in numbers:
            sums[update] += number
        return distributed.all_sum(torch.tensor(sums, dtype=torch.float64)).tolist()

    def _sampled_groups(self) -> dict[int, list[Traced]]:
        """Return this rank's groups of completions, by position. A packed sample may be a copy with another mask, but
        its list of ids is that of the completion."""
        places = defaultdict(list)
        for forward in self.forwards:
            for n, sample in enumerate(forward.mb.samples):
                places[id(sample.ids)].append((forward, n))
        return {
            position: [Traced(sample, known, places[id(sample.ids)]) for sample, known in group]
            for position, group in self.sampled.items()
        }

    def _rows_of_data(self) -> dict[int, list[Traced]]:
        """Return this rank's rows of data or pairs, by position in the batch, after the sampled groups. Collective."""
        groups: dict[int, dict[int, Traced]] = defaultdict(dict)
        ranks, rank = distributed.world_size(), dist.get_rank()
        first = int(distributed.all_sum(len(self.sampled)))
        sampled = {id(sample.ids) for group in self.sampled.values() for sample, _ in group}
        for forward in self.forwards:
            G = forward.samples_per_row
            for n, sample in enumerate(forward.mb.samples):
                if id(sample.ids) not in sampled:
                    i, g = divmod(int(forward.mb.index_N[n]), G)
                    traced = groups[first + i * ranks + rank].setdefault(g, Traced(sample, {}, []))
                    traced.places.append((forward, n))
        return {position: [group[g] for g in sorted(group)] for position, group in groups.items()}

    def _line(self, position: int, chosen: list[str], group: list[Traced]) -> dict:
        first = group[0].sample
        text = asked(first.row) or self.tokenizer.decode(first.prompt_ids)
        completions = [self._completion(traced) for traced in group]
        return dict(group=position, chosen=chosen, prompt=text, completions=completions)

    def _completion(self, traced: Traced) -> dict:
        """Return all that is known of a sample. Lists of tokens begin with the first trained one."""
        sample, known = traced.sample, {name: _number(x) for name, x in traced.known.items()}
        start = next((i for i, trained in enumerate(sample.loss_mask) if trained and i), len(sample.ids))
        if isinstance(sample, Completion):
            known |= dict(finish_reason=sample.finish_reason, version=sample.version)
        fixed, updates = {}, defaultdict(dict)
        for forward, n in traced.places:
            mb = forward.mb
            own = slice(mb.offsets[n] + start - 1, mb.offsets[n + 1])  # streams are aligned with ids[1:]
            streams = {name: getattr(mb, f"{name}_T") for name in (*FIXED, *sample.streams)}
            fixed |= {name: _numbers(x_T[own]) for name, x_T in streams.items() if x_T is not None}
            tokens = forward.outputs | forward.tokens
            for name, x_T in forward.outputs.items():
                if x_T.retains_grad and x_T.grad is not None:
                    tokens[f"{name}_gradient"] = x_T.grad / distributed.world_size()  # the scripts multiply by it
            update = updates[forward.update]
            update |= {name: _numbers(x_T[own]) for name, x_T in tokens.items()}
            row, of_row = divmod(n, forward.samples_per_row)
            if forward.rows and not of_row:  # values of a pair stand with its first sample
                update["row"] = {name: _number(x_N[row].item()) for name, x_N in forward.rows.items()}
        return known | dict(
            start=start,
            ids=sample.ids,
            tokens=[self.tokenizer.decode([i]) for i in sample.ids],
            mask=[int(trained) for trained in sample.loss_mask[start:]],
            fixed=fixed,
            updates=[dict(update=u) | updates[u] for u in sorted(updates)],
        )


# ---- what is traced, and how it is written ----


def choose(values: dict[int, tuple[float, float]], count: int, given: Sequence[int] = ()) -> dict[int, list[str]]:
    """Return the positions of the `given` groups and of `count` groups, with the reasons: the first, the last, the best
    and the most disputed; then others by dispute. `values`: how good and how disputed each group is."""
    if not values:
        return {}
    if unknown := set(given) - values.keys():
        raise ValueError(f"--trace_positions {min(unknown)}: this step has groups {min(values)} to {max(values)}")
    by_dispute = sorted(values, key=lambda i: (-values[i][1], i))
    named = dict(first=min(values), last=max(values), best=max(values, key=lambda i: (values[i][0], -i)))
    reasons, count = {i: ["given"] for i in given}, count + len(set(given))
    for reason, i in [*named.items(), ("disputed", by_dispute[0]), *(("", i) for i in by_dispute)]:
        if i in reasons or len(reasons) < count:
            reasons.setdefault(i, []).extend([reason] if reason else [])
    return reasons


def _value(group: list[Traced], by_reward: bool) -> tuple[float, float]:
    """Return the mean and the spread of the rewards of a group, or minus its loss, and its loss."""
    if by_reward:
        rewards = [0.0 if math.isnan(r := traced.known["reward"]) else r for traced in group]
        return fmean(rewards), pstdev(rewards)
    loss = math.fsum(share for traced in group for _, share in traced.shares())
    return -loss, loss


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """Return a hash of the trained weights on this rank, as 16 hexadecimal digits."""
    combined = 0
    for i, shard in enumerate(local(p) for p in model.parameters() if p.requires_grad):
        number = torch.hash_tensor(shard).view(torch.int64).item() if shard.numel() else 0
        combined ^= ((number + i) * 0x9E3779B97F4A7C15) % 2**64
    return f"{combined:016x}"


def write(path: Path, lines: list[dict]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.parent.mkdir(exist_ok=True)
    work = path.with_name(f"{path.name}.tmp")
    work.write_bytes(gzip.compress(text.encode(), 6, mtime=0))
    work.replace(path)


def read(path: Path) -> list[dict]:
    """Return the lines of a trace: its header and its groups. Raises `ValueError` for another schema."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    if lines[0].get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {lines[0].get('schema')}, expected {SCHEMA}; read it with its own version")
    return lines


def _numbers(x_T: Tensor) -> list:
    return [_number(x) for x in x_T.tolist()]


def _number(x: float | bool) -> float | int | None:
    """Return a number with seven significant digits; None if it is not finite."""
    if isinstance(x, (bool, int)):
        return int(x)
    return float(f"{x:.7g}") if math.isfinite(x) else None
