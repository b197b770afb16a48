"""A teacher's log-probs of the data's completions, stored in files (`--teacher_logprobs stored`).

A row of a file is about one token: S log-probs, the ids of the K most likely tokens (below 2^24),
the log-prob of the target and the entropy, all as float32.

Shapes: T tokens, t computed ones, K most likely tokens, S = K and the rest, M stored tokens, X
numbers of a row."""

import hashlib
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common import durable
from common.config.online import OnlineArgs
from common.model.distill import Teacher, TopK, most_likely
from common.packs.packing import PackedBatch, pack
from common.packs.sample import Group, Sample
from common.parallel import distributed

CHUNK = 512  # samples whose tokens share a file


class StoredTeacher:
    """A teacher's distributions at the trained tokens of samples, coarsened to its most likely
    tokens. The files do not depend on the number of ranks. After a kill, complete files are
    kept."""

    flops = 0.0  # no model runs
    reads_text = False

    def __init__(
        self, folder: Path, path: str, load: Callable[[str], Teacher], samples: list[Sample],
        vocabulary: int, args: OnlineArgs, top_k: int, device: torch.device,
    ):  # fmt: skip
        """Load the files in `folder`, after `load(path)`, the teacher, has scored what is missing.
        Collective. Raises `ValueError` for a damaged file."""
        self.vocabulary = vocabulary
        self.top_k = top_k
        self.device = device
        has_rest = top_k < vocabulary
        self.widths = (top_k + has_rest, top_k, 1, 1)  # numbers of each part of a row
        chunks = [samples[start : start + CHUNK] for start in range(0, len(samples), CHUNK)]
        places = accumulate(map(_trained, samples), initial=0)
        for sample, before in zip(samples, places, strict=False):
            sample.stored_at = before
        counts = [sum(map(_trained, chunk)) for chunk in chunks]
        self.starts = [0, *accumulate(counts)]
        files = [folder / f"{number:06d}.safetensors" for number in range(len(chunks))]
        settings = (args.dtype, args.temperature, top_k, vocabulary, CHUNK, "rows")
        _claim(folder, _digest_of(samples, path, *settings))
        missing = [i for i, file in enumerate(files) if not file.is_file()]
        missing = distributed.from_main(missing)
        if missing:
            count = sum(len(chunks[i]) for i in missing)
            distributed.say(f"{path} scores {count} completions, into {folder}")
            teacher = load(path)
            for i in missing:  # all ranks score a file together, one of them writes it
                writer = i % distributed.world_size()
                rows_MX = self._scored(teacher, chunks[i], self.starts[i], args, writer)
                if rows_MX is not None:
                    _save(files[i], rows_MX)
            distributed.barrier()
        self.rows_of_files = [_read(file, count) for file, count in zip(files, counts, strict=True)]

    @torch.no_grad()
    def _scored(
        self, teacher: Teacher, samples: list[Sample], start: int, args: OnlineArgs, writer: int
    ) -> Tensor | None:
        """Return, on the rank `writer` alone, a row for each trained token of the samples, [M, X].
        `start` is the number of the first of these tokens. Collective."""
        places = [torch.zeros(0, dtype=torch.int64)]
        rows = []
        share = distributed.items_of_rank(samples)
        for mb in pack(share, args.pack_tokens, self.device):
            logits = teacher.teach(mb)
            targets_t = mb.model_tokens.targets_T
            top = most_likely(logits, targets_t, args.temperature, self.vocabulary, self.top_k)
            columns_t = (
                *top.logprobs_TS.unbind(1),
                *top.tokens_TK.unbind(1),
                top.target_logprobs_T,
                top.entropy_T,
            )
            rows_TX = torch.stack([x_T.float() for x_T in mb.expand(columns_t)], 1)
            rows.append(rows_TX[mb.loss_mask_T].cpu())
            if mb.num_samples:
                places.append(mb.stored_at_T[mb.loss_mask_T].cpu())
        teacher.reshard()  # after a forward without a backward, FSDP has not freed the root
        is_writer = distributed.rank() == writer
        scored = [None] * distributed.world_size() if is_writer else None
        dist.gather_object((torch.cat(places), torch.cat(rows)), scored, writer)
        if scored is None:
            return None
        places, rows = zip(*scored, strict=True)
        return torch.cat(rows)[(torch.cat(places) - start).argsort()]

    def read(self, groups: list[Group], meter) -> list[Group]:
        return groups

    def teach(self, mb: PackedBatch) -> TopK:
        """Return the teacher's distributions for a student's `distill`."""
        last = self.starts[-1] - 1
        places_t = mb.model_tokens.stored_at_T.clamp(max=last).cpu()  # a masked token reads any row
        file_number_t = torch.bucketize(places_t, torch.tensor(self.starts), right=True) - 1
        rows_tX = torch.empty(len(places_t), sum(self.widths))
        for number in file_number_t.unique().tolist():
            is_in_file_t = file_number_t == number
            stored_MX = self.rows_of_files[number]
            rows_tX[is_in_file_t] = stored_MX[places_t[is_in_file_t] - self.starts[number]]
        parts = rows_tX.to(self.device).split(self.widths, dim=1)
        logprobs_tS, tokens_tK, target_t1, entropy_t1 = parts
        return TopK(
            logprobs_TS=logprobs_tS, tokens_TK=tokens_tK.long(), target_logprobs_T=target_t1[:, 0],
            entropy_T=entropy_t1[:, 0], vocabulary=self.vocabulary,
        )  # fmt: skip


def _trained(sample: Sample) -> int:
    """Return the number of trained tokens of a sample. Its first token is never predicted."""
    return sum(sample.loss_mask[1:])


def _save(file: Path, rows_MX: Tensor) -> None:
    work = file.with_suffix(".tmp")
    save_file(dict(rows=rows_MX.contiguous()), work)
    durable.write_json(file.with_suffix(".json"), dict(fingerprint=durable.fingerprint(work)))
    durable.replace(work, file)


def _digest_of(samples: Sequence[Sample], path: str, *settings: object) -> str:
    """Return a digest of everything that decides the log-probs: tokens, images, the model (its
    path, and names, sizes and times of its files) and `settings`."""
    stats = []
    for file in sorted(Path(os.path.expanduser(path)).glob("*.safetensors")):
        status = file.stat()
        stats.append((file.name, status.st_size, status.st_mtime_ns))
    hashed = hashlib.blake2b(repr((path, stats, *settings)).encode())
    for sample in samples:
        images = [image.digest for image in sample.images]
        # None stands for a field that samples no longer have, so that old digests stay valid.
        ids, mask = [*sample.ids], [*map(bool, sample.loss_mask)]
        hashed.update(repr((ids, mask, None, images)).encode())
    return hashed.hexdigest()


def _claim(folder: Path, digest: str) -> None:
    """Delete the stored files in a folder if they have another digest. Collective."""
    mark = folder / "digest"
    if distributed.is_main() and not (mark.is_file() and mark.read_text() == digest):
        folder.mkdir(exist_ok=True)
        # Delete the mark first: a kill may leave only half of the files.
        for old in (mark, *folder.glob("*.safetensors")):
            old.unlink(missing_ok=True)
        durable.write_text(mark, digest)
    distributed.barrier()


def _read(file: Path, count: int) -> Tensor:
    """Return the rows of `count` tokens, memory-mapped. Raises `ValueError` for a damaged file."""
    try:
        if durable.read_json(file.with_suffix(".json"))["fingerprint"] != durable.fingerprint(file):
            raise ValueError("it was changed after it was written")
        rows_MX = load_file(file)["rows"]
        if len(rows_MX) != count:
            raise ValueError("another number of tokens")
    except (OSError, SafetensorError, ValueError, RecursionError, KeyError) as error:
        problem = distributed.first_line(error)
        raise ValueError(f"{file} is damaged; delete it: {problem}") from error
    return rows_MX
