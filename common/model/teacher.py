"""What distillation learns from: a frozen model that scores what it is given, or what such a model said of the data's
completions, stored once.

Shapes: T own tokens, t computed ones, K most likely tokens, S = K and the rest, M stored tokens.
"""

import math
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.config.groups import TrainArgs
from common.data.packing import PackedBatch, Sample, pack
from common.model.policy import Policy, load_policy
from common.model.reference import digest_of
from common.objectives.divergence import TopK, most_likely
from common.parallel import distributed
from common.parallel.placement import lend, own

CHUNK = 512  # samples whose tokens share a file


def shared_vocabulary(path: str, teacher_path: str, top_k: int) -> int:
    """How many tokens the models in two folders share. Raises `ValueError` if those are less than `--top_k`."""
    from transformers import AutoConfig

    shared = min(AutoConfig.from_pretrained(each).get_text_config().vocab_size for each in (path, teacher_path))
    if top_k > shared:
        raise ValueError(f"--top_k {top_k} is more than the {shared} tokens that --model and --teacher share")
    return shared


def load_teacher(
    path: str, samples: list[Sample], vocabulary: int, args: TrainArgs, device: torch.device
) -> "Policy | StoredTeacher":
    """The frozen model in `path` or, with `--teacher_logprobs stored`, what it says of the trained tokens of `samples`:
    from the folder `teacher_logprobs` of the run, if that is of these samples and this teacher, else the model writes
    it, and is let go. Both have `teach`. Collective."""

    def load() -> Policy:
        return load_policy(path, args, device, trainable=False, flag="--teacher")

    if args.teacher_logprobs == "live":
        return load()
    return StoredTeacher(Path(args.output_dir) / "teacher_logprobs", path, load, samples, vocabulary, args, device)


def require_known(samples: Iterable[Sample], teacher: Policy) -> None:
    """Raises `RunError` for a sampled id that the teacher has no embedding of: a row of the student's beyond their
    tokenizer's tokens, which an untrained student may sample."""
    known = teacher.hf.get_input_embeddings().num_embeddings
    if unknown := [i for sample in samples for i in sample.completion_ids if i >= known]:
        what = f"the student sampled token {unknown[0]}, --teacher {teacher.path} has {known}"
        raise distributed.RunError(f"{what}: begin with a student that has learned its tokenizer's tokens")


class StoredTeacher:
    """A teacher's most likely tokens at each trained token of samples, in files of some hundred samples each. The files
    are the same whatever the number of ranks; what a killed run has written stays."""

    flops = 0.0  # it computes nothing

    def __init__(
        self, folder: Path, path: str, load: Callable[[], Policy], samples: list[Sample], vocabulary: int,
        args: TrainArgs, device: torch.device,
    ):  # fmt: skip
        """Collective. Raises `ValueError` for a damaged file."""
        self.vocabulary, self.device, rank = vocabulary, device, torch.distributed.get_rank()
        chunks = [samples[start : start + CHUNK] for start in range(0, len(samples), CHUNK)]
        for sample, before in zip(samples, accumulate(map(_trained, samples), initial=0), strict=False):
            sample.stored_at = before
        counts = [sum(map(_trained, chunk)) for chunk in chunks]
        self.starts = [0, *accumulate(counts)]
        files = [folder / f"{number:06d}.safetensors" for number in range(len(chunks))]
        decides = (args.dtype, args.temperature, args.top_k, vocabulary, CHUNK)
        _claim(folder, digest_of(samples, path, [path], *decides))
        missing = distributed.gather_objects([i for i, file in enumerate(files) if not file.is_file()])[0]
        if missing:
            if distributed.is_main():
                print(f"{path} scores {sum(len(chunks[i]) for i in missing)} completions, into {folder}", flush=True)
            teacher = load()
            mine = missing[rank :: distributed.world_size()]
            for turn in range(math.ceil(len(missing) / distributed.world_size())):
                number = mine[turn] if turn < len(mine) else None  # at the end a rank may have no file to write
                chunk, start = ([], 0) if number is None else (chunks[number], self.starts[number])
                columns_MX = self._scored(teacher, chunk, start, args)
                if number is not None:
                    _save(files[number], columns_MX, args.top_k)
            distributed.barrier()
        self.parts = [_read(file, count) for file, count in zip(files, counts, strict=True)]

    @torch.no_grad()
    def _scored(self, teacher: Policy, samples: list[Sample], start: int, args: TrainArgs) -> Tensor:
        """What is stored of each trained token of this rank's samples, of which the first is number `start`: the
        log-probs of S, K tokens, the log-prob of the target and the entropy, float32 [M, X]. Collective."""
        places, columns = [], []
        for mb in pack(samples, args.pack_tokens, self.device):
            targets_t = mb.computed.targets_T
            top = most_likely(teacher.teach(mb), targets_t, args.temperature, self.vocabulary, args.top_k)
            columns_t = (*top.logprobs_TS.unbind(1), *top.tokens_TK.unbind(1), top.targets_T, top.entropy_T)
            columns_TX = torch.stack([x_T.float() for x_T in own(columns_t, mb.shared)], 1)  # ids too: all below 2^24
            columns.append(columns_TX[mb.loss_mask_T].cpu())
            places.append(_places(mb))
        teacher.reshard()  # a forward without backward leaves the root whole
        return torch.cat(columns)[(torch.cat(places) - start).argsort()]

    def teach(self, mb: PackedBatch) -> TopK:
        """What a student's forward takes as its teacher. Collective."""
        places_T = torch.zeros(len(mb.targets_T), dtype=torch.int64)
        places_T[mb.loss_mask_T.cpu()] = _places(mb)
        places_t = lend(places_T.to(self.device), mb.shared).cpu()
        part_t = torch.bucketize(places_t, torch.tensor(self.starts), right=True) - 1
        order, rows = [], []
        for part in part_t.unique().tolist():
            (here,) = (part_t == part).nonzero(as_tuple=True)
            order.append(here)
            rows.append([x[places_t[here] - self.starts[part]] for x in self.parts[part]])
        back = torch.cat(order).argsort()
        logprobs_tS, tokens_tK, target_t, entropy_t = (
            torch.cat(column)[back].to(self.device) for column in zip(*rows, strict=True)
        )
        return TopK(logprobs_tS, tokens_tK.long(), target_t, entropy_t, self.vocabulary)


def _trained(sample: Sample) -> int:
    """Tokens of a sample that are trained on and predicted."""
    return sum(sample.loss_mask[1:])


def _places(mb: PackedBatch) -> Tensor:
    """Of a micro-batch's trained tokens among those of all stored samples, int64, on the host."""
    ranges = [torch.arange(sample.stored_at, sample.stored_at + _trained(sample)) for sample in mb.samples]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *ranges])


def _save(file: Path, columns_MX: Tensor, top_k: int) -> None:
    logprobs_MS, tokens_MK, others_M2 = columns_MX.split([columns_MX.shape[1] - 2 - top_k, top_k, 2], 1)
    target_M, entropy_M = others_M2.unbind(1)
    tensors = dict(logprobs=logprobs_MS, tokens=tokens_MK.int(), target=target_M, entropy=entropy_M)
    work = file.with_suffix(".tmp")
    save_file({name: x.contiguous() for name, x in tensors.items()}, work)
    work.rename(file)


def _claim(folder: Path, digest: str) -> None:
    """What is stored of anything else is deleted. Collective."""
    mark = folder / "digest"
    if distributed.is_main() and not (mark.is_file() and mark.read_text() == digest):
        folder.mkdir(exist_ok=True)
        for old in (mark, *folder.glob("*.safetensors")):  # the mark first: half of them may go
            old.unlink(missing_ok=True)
        mark.with_suffix(".tmp").write_text(digest)
        mark.with_suffix(".tmp").rename(mark)
    distributed.barrier()


def _read(file: Path, count: int) -> list[Tensor]:
    """What a file has of so many tokens; memory-mapped."""
    try:
        found = load_file(file)
        columns = [found[name] for name in ("logprobs", "tokens", "target", "entropy")]
        if any(len(x) != count for x in columns):
            raise ValueError("another number of tokens")
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{file} is damaged, delete it: {distributed.first_line(error)}") from error
    return columns
