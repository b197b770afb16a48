"""The frozen reference of a preference run: its log-probs of a whole data set, stored before
training or computed at every step."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor, nn

from common.config.groups import TrainArgs
from common.data import durable
from common.data.packing import PackedBatch, pack_minibatches, per_sample, positions_of_share
from common.data.sample import Sample
from common.model.hub import context_length, require_same_tokenizer, resolve_model
from common.model.loading import named_errors
from common.model.policy import Policy, load_reference
from common.parallel import distributed, signals

# Groups of samples of the training rows, and of the held-out rows.
Datasets = Sequence[Sequence[list[Sample]]]


def completion_logps(mb: PackedBatch, logprobs_T: Tensor) -> Tensor:
    """Return the log-prob of each completion: nats, [N], float64. The stream `weights`, if there is
    one, weights the tokens."""
    return mb.sequence_sums(logprobs_T if mb.weights_T is None else logprobs_T * mb.weights_T)


@torch.no_grad()
def reference_logps(
    reference: nn.Module | None, micro_batches: list[PackedBatch], stored: Tensor
) -> Tensor:
    """Return the log-prob of each packed completion of all ranks by the reference, in the shape of
    `stored`: the stored ones, or computed now if the reference is in memory. Collective."""
    if reference is None:
        return stored
    logps = [completion_logps(mb, reference(mb)[0]) for mb in micro_batches]
    return per_sample(micro_batches, logps, stored.shape)


def reference_or_logps(
    policy: Policy, datasets: Datasets, tokenizer, args, device: torch.device, needed: bool = True,
) -> tuple[Policy | None, list[Tensor]]:  # fmt: skip
    """Return the reference if it stays in memory (`--reference_logprobs online`), else None; and
    its log-probs of all groups, [groups, samples of a group] for each data set, which are zeros if
    it stays in memory or is not `needed`.

    Call this before a checkpoint is loaded: the reference often is the starting model. Collective.
    Raises `ValueError` for a reference that does not fit the policy."""
    zeros = [torch.zeros(shape) for shape in _shapes(datasets)]
    if not needed:
        return None, zeros
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
        return load_reference(policy, args, device, path if args.reference_model else None)

    if args.reference_logprobs == "online":
        return load(), zeros
    load_once = load if args.reference_model else lambda: policy
    folder = Path(args.output_dir)
    return None, store_reference_logps(datasets, path, load_once, folder, args, device)


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
        used = args.batch_size * (args.max_steps or math.inf)
        hint = ""
        if 2 * used < len(datasets[0]):
            hint = "; the steps use fewer: --reference_logprobs online is faster"
        distributed.say(f"the reference scores {count} rows once{hint}")
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
            share, positions, 1, args.pack_tokens, device, args.share_prefix
        )
        scores = [completion_logps(mb, reference(mb).logprobs_T) for mb in micro_batches]
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
