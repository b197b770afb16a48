"""The frozen reference of a preference run: its log-probs of a whole data set, stored before
training."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor, nn

from common.config.groups import TrainArgs
from common.data.packing import pack_minibatches, per_sample, positions_of_share
from common.data.sample import Sample
from common.model.hub import context_length, require_same_tokenizer, resolve_model
from common.model.loading import named_errors
from common.model.policy import Policy, load_reference
from common.parallel import distributed, durable, signals

# Groups of samples of the training rows, and of the held-out rows.
Datasets = Sequence[Sequence[list[Sample]]]


def reference_logps(
    policy: Policy, datasets: Datasets, tokenizer, args, device: torch.device, needed: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Return the log-probs of all completions by the reference, [groups, samples of a group] for
    each data set; zeros if no reference is `needed`.

    Call this before a checkpoint is loaded: the reference often is the starting model. Collective.
    Raises `ValueError` for a reference that does not fit the policy."""
    if not needed:
        return [torch.zeros(shape) for shape in _shapes(datasets)]
    name = args.reference_model or args.model
    factor = args.rope_factor if name == args.model else None
    path = resolve_model(name, "--reference_model", rope_factor=factor)
    require_same_tokenizer("--reference_model", path, tokenizer)
    context = context_length(path, args)
    if args.max_length > context:
        raise ValueError(
            f"--max_length {args.max_length}: the reference's context has only {context} tokens"
        )

    def load() -> Policy:
        return load_reference(policy, args, device, path) if args.reference_model else policy

    return store_reference_logps(datasets, path, load, Path(args.output_dir), args, device)


def store_reference_logps(
    datasets: Datasets, path: str, load: Callable[[], nn.Module], folder: Path, args: TrainArgs,
    device: torch.device,
) -> list[Tensor]:  # fmt: skip
    """Return the log-probs of completions by the reference, [groups, samples of a group] float64
    for each data set.

    The log-probs come from `reference_logps.json` in the run's folder, if it has the same samples
    and reference. Otherwise the reference computes them in one pass, divided among the ranks, and
    stores them. Groups on disk are streamed. Collective. Raises `ValueError` for a damaged file.
    """
    file = folder / "reference_logps.json"
    shapes = _shapes(datasets)
    sizes = [groups * samples for groups, samples in shapes]
    digest = ""
    stored = {}
    if distributed.is_main():
        folders = [each for each in (path, args.adapter) if each]
        groups = chain.from_iterable(datasets)
        digest = digest_of(chain.from_iterable(groups), path, folders, args.dtype)
        stored = _read(file, digest, sum(sizes)) if file.is_file() else {}
    digest, stored = distributed.from_main((digest, stored))  # machines may have copies of the file
    if stored.get("digest") != digest:
        count = sum(map(len, datasets))
        distributed.say(f"the reference scores {count} rows once")
        with signals.signals_end_the_process():  # nothing is trained yet
            groups = chain.from_iterable(datasets)
            logps = _reference_logps(groups, count, load(), args, device)
        stored = dict(digest=digest, logps=logps)
        if distributed.is_main():
            durable.write_json(file, stored)
    columns = torch.tensor(stored["logps"], dtype=torch.float64).split(sizes)
    return [column.view(shape) for column, shape in zip(columns, shapes, strict=True)]


def _shapes(datasets: Datasets) -> list[tuple[int, int]]:
    """Return the number of groups of each data set, and of samples in a group."""
    return [(len(groups), len(groups[0]) if groups else 0) for groups in datasets]


def _read(path: Path, digest: str, count: int) -> dict:
    with named_errors(f"{path} is damaged; delete it", ValueError, TypeError, KeyError):
        stored = durable.read_json(path)
        if stored["digest"] == digest and len(stored["logps"]) != count:
            raise ValueError("another number of samples")
    return stored


@torch.no_grad()
def _reference_logps(
    groups: Iterable[list[Sample]], count: int, reference: nn.Module, args: TrainArgs,
    device: torch.device,
) -> list[float]:  # fmt: skip
    """Return the reference's log-probs of the samples of `count` groups, on every rank.
    Collective."""
    ranks = distributed.world_size()
    groups = iter(groups)
    logps = []
    for done in range(0, count, 512 * ranks):
        if done:
            distributed.say(f"the reference has scored {done / count:.0%}")
        batch = list(islice(groups, 512 * ranks))
        share = distributed.share_of(batch)
        positions = positions_of_share(len(share))
        (micro_batches,) = pack_minibatches(
            share, positions, 1, args.pack_tokens, device, reference.share_prefix
        )
        scores = [mb.sequence_sums(reference(mb).logprobs_T) for mb in micro_batches]
        logps += per_sample(micro_batches, scores, (sum(map(len, batch)),)).tolist()
    reference.reshard()  # a forward without backward leaves the root unsharded
    return logps


def digest_of(
    samples: Iterable[Sample], model_path: str, weights: list[str], *settings: object
) -> str:
    """Return a digest of all that decides the log-probs of samples: tokens, images, the model
    (its path, and names, sizes and times of the files in the folders `weights`) and `settings`."""
    stats = []
    for folder in weights:
        for file in sorted(Path(folder).expanduser().glob("*.safetensors")):
            status = file.stat()
            stats.append((file.name, status.st_size, status.st_mtime_ns))
    hashed = hashlib.blake2b(repr((model_path, stats, *settings)).encode())
    for sample in samples:
        images = [image.digest for image in sample.images]
        hashed.update(repr((sample.ids, sample.loss_mask, sample.weights, images)).encode())
    return hashed.hexdigest()
