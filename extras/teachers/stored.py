"""A teacher's stored log-probs of the data's completions (`--teacher_logprobs stored`).

Shapes: T tokens, t computed ones, K most likely tokens, S = K and the rest, M stored tokens.
"""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.config.groups import TrainArgs
from common.data.packing import PackedBatch, pack
from common.data.sample import Group, Sample
from common.model.distill import Teacher, TopK, most_likely
from common.model.scoring import digest_of
from common.parallel import distributed, durable

CHUNK = 512  # samples whose tokens share a file


class StoredTeacher:
    """Stored distributions of a teacher at the trained tokens of samples, coarsened to its most
    likely tokens. The files do not depend on the number of ranks; complete files of a killed run
    are kept."""

    flops = 0.0  # no model runs
    reads_text = False

    def __init__(
        self, folder: Path, path: str, load: Callable[[str], Teacher], samples: list[Sample],
        vocabulary: int, args: TrainArgs, device: torch.device,
    ):  # fmt: skip
        """Collective. Raises `ValueError` for a damaged file."""
        self.vocabulary = vocabulary
        self.device = device
        chunks = [samples[start : start + CHUNK] for start in range(0, len(samples), CHUNK)]
        for sample, before in zip(
            samples, accumulate(map(_trained, samples), initial=0), strict=False
        ):
            sample.stored_at = before
        counts = [sum(map(_trained, chunk)) for chunk in chunks]
        self.starts = [0, *accumulate(counts)]
        files = [folder / f"{number:06d}.safetensors" for number in range(len(chunks))]
        settings = (args.dtype, args.temperature, args.top_k, vocabulary, CHUNK)
        _claim(folder, digest_of(samples, path, [path], *settings))
        missing = [i for i, file in enumerate(files) if not file.is_file()]
        missing = distributed.from_main(missing)
        if missing:
            count = sum(len(chunks[i]) for i in missing)
            distributed.say(f"{path} scores {count} completions, into {folder}")
            teacher = load(path)
            for i in missing:  # all ranks score a file together, one of them writes it
                writer = i % distributed.world_size()
                columns_MX = self._scored(teacher, chunks[i], self.starts[i], args, writer)
                if columns_MX is not None:
                    _save(files[i], columns_MX, args.top_k)
            distributed.barrier()
        self.columns_of_files = [
            _read(file, count) for file, count in zip(files, counts, strict=True)
        ]

    @torch.no_grad()
    def _scored(
        self, teacher: Teacher, samples: list[Sample], start: int, args: TrainArgs, writer: int
    ) -> Tensor | None:
        """Return, on the rank `writer`, the columns of each trained token of the samples, the first
        of which is number `start`: S log-probs, K tokens, the log-prob of the target and the
        entropy, float32 [M, X]. Collective."""
        places = [torch.zeros(0, dtype=torch.int64)]
        columns = []
        share = distributed.share_of(samples)
        for mb in pack(share, args.pack_tokens, self.device):
            logits = teacher.teach(mb)
            targets_t = mb.model_tokens.targets_T
            top = most_likely(logits, targets_t, args.temperature, self.vocabulary, args.top_k)
            columns_t = (
                *top.logprobs_TS.unbind(1),
                *top.tokens_TK.unbind(1),
                top.target_logprobs_T,
                top.entropy_T,
            )
            columns_TX = torch.stack(
                [x_T.float() for x_T in mb.expand(columns_t)], 1
            )  # ids: < 2^24
            columns.append(columns_TX[mb.loss_mask_T].cpu())
            if mb.num_samples:
                places.append(mb.stored_at_T[mb.loss_mask_T].cpu())
        teacher.reshard()  # after a forward without backward the root is still whole
        is_writer = distributed.rank() == writer
        scored = [None] * distributed.world_size() if is_writer else None
        dist.gather_object((torch.cat(places), torch.cat(columns)), scored, writer)
        if not is_writer:
            return None
        places, columns = zip(*scored, strict=True)
        return torch.cat(columns)[(torch.cat(places) - start).argsort()]

    def read(self, groups: list[Group], meter) -> list[Group]:
        return groups

    def teach(self, mb: PackedBatch) -> TopK:
        """Return the teacher's distributions for a student's `distill`."""
        last = self.starts[-1] - 1
        places_t = mb.model_tokens.stored_at_T.clamp(max=last).cpu()  # masked tokens: any place
        file_number_t = torch.bucketize(places_t, torch.tensor(self.starts), right=True) - 1
        columns = [
            column.new_empty(len(places_t), *column.shape[1:])
            for column in self.columns_of_files[0]
        ]
        for number in file_number_t.unique().tolist():
            is_in_file_t = file_number_t == number
            rows = places_t[is_in_file_t] - self.starts[number]
            for column, stored in zip(columns, self.columns_of_files[number], strict=True):
                column[is_in_file_t] = stored[rows]
        logprobs_tS, tokens_tK, target_t, entropy_t = (column.to(self.device) for column in columns)
        return TopK(
            logprobs_TS=logprobs_tS, tokens_TK=tokens_tK.long(), target_logprobs_T=target_t,
            entropy_T=entropy_t, vocabulary=self.vocabulary,
        )  # fmt: skip


def _trained(sample: Sample) -> int:
    """Return the number of trained tokens of a sample; its first token is never predicted."""
    return sum(sample.loss_mask[1:])


def _save(file: Path, columns_MX: Tensor, top_k: int) -> None:
    logprobs_MS, tokens_MK, others_M2 = columns_MX.split(
        [columns_MX.shape[1] - 2 - top_k, top_k, 2], 1
    )
    target_M, entropy_M = others_M2.unbind(1)
    tensors = dict(logprobs=logprobs_MS, tokens=tokens_MK.int(), target=target_M, entropy=entropy_M)
    work = file.with_suffix(".tmp")
    save_file({name: x.contiguous() for name, x in tensors.items()}, work)
    durable.write_json(file.with_suffix(".json"), dict(fingerprint=durable.fingerprint(work)))
    durable.replace(work, file)


def _claim(folder: Path, digest: str) -> None:
    """Delete stored files of another digest. Collective."""
    mark = folder / "digest"
    if distributed.is_main() and not (mark.is_file() and mark.read_text() == digest):
        folder.mkdir(exist_ok=True)
        for old in (
            mark,
            *folder.glob("*.safetensors"),
        ):  # the mark first: a kill may leave half of the files
            old.unlink(missing_ok=True)
        durable.write_text(mark, digest)
    distributed.barrier()


def _read(file: Path, count: int) -> list[Tensor]:
    """Return the columns of a file of `count` tokens, memory-mapped."""
    try:
        if durable.read_json(file.with_suffix(".json"))["fingerprint"] != durable.fingerprint(file):
            raise ValueError("it was changed after it was written")
        tensors = load_file(file)
        columns = [tensors[name] for name in ("logprobs", "tokens", "target", "entropy")]
        if any(len(x) != count for x in columns):
            raise ValueError("another number of tokens")
    except (OSError, SafetensorError, ValueError, RecursionError, KeyError) as error:
        raise ValueError(
            f"{file} is damaged; delete it: {distributed.first_line(error)}"
        ) from error
    return columns
