"""The frozen reference of a preference run: its log-probs of a whole data set, stored before training or computed at
every step."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from common.config.groups import TrainArgs
from common.data import durable
from common.data.packing import PackedBatch, pack_minibatches, per_sample
from common.data.sample import Sample
from common.model.hub import context_length, require_same_tokenizer, resolve_model
from common.model.policy import Policy, load_reference
from common.model.scoring import weighted_logps
from common.parallel import distributed

Parts = Sequence[Sequence[list[Sample]]]  # groups of samples of the training rows and of the held-out rows


@torch.no_grad()
def reference_logps(reference: nn.Module | None, micro_batches: list[PackedBatch], stored: Tensor) -> Tensor:
    """Return the log-prob of each packed completion by the reference, in the shape of `stored`: the stored ones, or
    computed now if the reference is in memory. Collective."""
    if reference is None:
        return stored
    logps = [weighted_logps(mb, reference(mb)[0]) for mb in micro_batches]
    return per_sample(micro_batches, logps, stored.shape)


def reference_or_logps(
    policy: Policy, parts: Parts, tokenizer, args, device: torch.device, needed: bool = True
) -> tuple[Policy | None, list[Tensor]]:
    """Return the reference if it stays in memory (`--reference_logprobs online`), else None; and its log-probs of all
    groups, [groups, samples of a group] for each part, which are zeros if it stays in memory or is not `needed`.

    Call this before a checkpoint is loaded: the reference often is the starting model. Collective. Raises `ValueError`
    for a reference that does not fit the policy."""
    none = [torch.zeros(len(part), len(part[0]) if part else 0) for part in parts]
    if not needed:
        return None, none
    path = resolve_model(args.reference_model or args.model, "--reference_model")
    require_same_tokenizer("--reference_model", path, tokenizer)
    if args.max_length > (context := context_length(path, args)):
        raise ValueError(f"--max_length {args.max_length}: the reference's context has only {context} tokens")

    def load() -> Policy:
        other = args.reference_model or args.reference_logprobs == "online"
        return load_reference(policy, args, device, args.reference_model and path) if other else policy

    if args.reference_logprobs == "online":
        return load(), none
    return None, store_reference_logps(parts, path, load, Path(args.output_dir), args, device)


def store_reference_logps(
    parts: Parts, path: str, load: Callable[[], nn.Module], folder: Path, args: TrainArgs, device: torch.device
) -> list[Tensor]:
    """Return the log-probs of completions by the reference, [groups, samples of a group] float64 for each part.

    The log-probs come from `reference_logps.json` in the run's folder, if it has the same samples and reference.
    Otherwise the reference computes them in one pass, divided among the ranks, and stores them. Groups on disk are
    streamed. Collective. Raises `ValueError` for a damaged file.
    """
    file, weights = folder / "reference_logps.json", [part for part in (path, args.adapter) if part]
    shapes = [(len(part), len(part[0]) if part else 0) for part in parts]
    ends = list(accumulate(groups * size for groups, size in shapes))
    digest, stored = "", {}
    if distributed.is_main():
        digest = digest_of(_samples(parts), path, weights, args.dtype)
        stored = _read(file, digest, ends[-1]) if file.is_file() else {}
    digest, stored = distributed.gather_objects((digest, stored))[0]  # nodes may have copies: use that of rank 0
    if stored.get("digest") != digest:
        used = getattr(args, "batch_size", 1) * (args.max_steps or math.inf)
        hint = "; the steps use fewer: --reference_logprobs online is faster" if 2 * used < len(parts[0]) else ""
        distributed.say(f"the reference scores {sum(map(len, parts))} rows once{hint}")
        with distributed.signals_end_the_process():  # nothing is trained yet
            logps = _reference_logps(chain.from_iterable(parts), sum(map(len, parts)), load(), args.pack_tokens, device)
        stored = dict(digest=digest, logps=logps)
        if distributed.is_main():
            durable.write_json(file, stored)
    columns = np.split(np.array(stored["logps"]), ends[:-1])
    return [torch.from_numpy(x.reshape(shape)) for x, shape in zip(columns, shapes, strict=True)]


def _read(path: Path, digest: str, count: int) -> dict:
    try:
        stored = durable.read_json(path)
        if stored["digest"] == digest and len(stored["logps"]) != count:
            raise ValueError("another number of samples")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged; delete it: {distributed.first_line(error)}") from error
    return stored


@torch.no_grad()
def _reference_logps(
    groups: Iterable[list[Sample]], count: int, reference: nn.Module, pack_tokens: int, device: torch.device
) -> list[float]:
    """Return the reference's log-probs of the samples of `count` groups, on every rank. Collective."""
    rank, world_size = torch.distributed.get_rank(), distributed.world_size()
    mine, logps = islice(groups, rank, None, world_size), []
    for done in range(0, count, 512 * world_size):  # the same number of packs on every rank
        if done:
            distributed.say(f"the reference has scored {done / count:.0%}")
        batch = list(islice(mine, 512))
        (micro_batches,) = pack_minibatches(batch, 1, pack_tokens, device)
        scores = [weighted_logps(mb, reference(mb).logprobs_T) for mb in micro_batches]
        of_samples = iter(per_sample(micro_batches, scores, (sum(map(len, batch)),)).tolist())
        logps += [[next(of_samples) for _ in group] for group in batch]
    reference.reshard()  # a forward without backward leaves the root unsharded
    ranks = distributed.gather_objects(logps)
    return [logp for i in range(count) for logp in ranks[i % world_size][i // world_size]]


def digest_of(samples: Iterable[Sample], model_path: str, weights: list[str], *settings: object) -> str:
    """Return a digest of everything that decides the log-probs of samples: the tokens, the model (its path, and names,
    sizes and times of the files in the folders `weights`) and `settings`."""
    files = [file for folder in weights for file in sorted(Path(folder).expanduser().glob("*.safetensors"))]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    hashed = hashlib.blake2b(repr((model_path, stats, *settings)).encode())
    for sample in samples:
        hashed.update(repr((sample.ids, sample.loss_mask, sample.weights)).encode())
    return hashed.hexdigest()


def _samples(parts: Parts) -> Iterable[Sample]:
    return chain.from_iterable(chain.from_iterable(parts))
