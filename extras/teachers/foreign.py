"""A teacher with another tokenizer: it reads the text of prompt and completion in its own tokens.

Student and teacher are compared on spans, the shortest parts of a completion that begin and end at
a token of both. The log-prob of a span is the sum over its tokens (chain rule). GOLD (Hugging Face,
2025) has the same spans, but merges whole distributions over them. The end of a completion is a
span: the student's EOS stands for the text that ends a completion for the teacher."""

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from common.config.online import SamplingArgs
from common.model.distill import Comparison, Teacher
from common.model.hub import longest_sequence
from common.model.loading import named_errors
from common.model.logprobs import TokenStats
from common.packs.packing import PackedBatch, pack_groups
from common.packs.sample import Completion, Group, Sample
from common.parallel import distributed
from common.text.columns import PROMPT_COLUMNS, choose_columns
from common.text.encode import Encoder
from common.text.tokenizer import eos_token_ids, format_of


class Spans:
    """A teacher's log-probs of spans, each of some tokens of the student. A plain class, like
    `TopK`."""

    def __init__(self, starts_T: Tensor, shares_T: Tensor):
        self.starts_T = starts_T  # 1 for the first token of a span, 0 for the others
        self.shares_T = shares_T  # log-prob of the span / its number of the student's tokens

    def compare(self, student: TokenStats, old_logprobs_T: Tensor | None) -> Comparison:
        """Compare a student with the teacher. The tokens of a span share its log q - log pi_old
        equally, so that they sum to the difference over the whole completion. Without
        `old_logprobs_T`, the student's log-probs are used. Distributions cannot be compared:
        `reverse_kl_T` is its estimate log pi_old - log q, the others are None."""
        old_T = student.logprobs_T.detach() if old_logprobs_T is None else old_logprobs_T
        span_T = (self.starts_T.long().cumsum(0) - 1).clamp(min=0)
        zeros_T = torch.zeros_like(old_T)  # room for every span, without a copy from the device
        sizes = zeros_T.index_add(0, span_T, torch.ones_like(old_T)).clamp(min=1)
        means = zeros_T.index_add(0, span_T, old_T) / sizes
        teacher_T = self.shares_T + (old_T - means[span_T])
        unknown = ("divergence_T", "teacher_entropy_T", "teacher_mass_T", "agree_T")
        return Comparison(
            logprobs_T=student.logprobs_T, entropy_T=student.entropy_T,
            reverse_kl_T=old_T - teacher_T, teacher_logprobs_T=teacher_T,
            **dict.fromkeys(unknown),
        )  # fmt: skip


class Reading(NamedTuple):
    """A completion in the teacher's tokens, and the span of each token of student and teacher."""

    sample: Sample
    spans: list[int]  # of the student's tokens of the completion
    teacher_spans: list[int]


class ForeignTeacher(Teacher):
    """A frozen policy that reads text, not the student's tokens. Call `set_tokenizers` first."""

    forward_methods = ()
    reads_text = True

    def set_tokenizers(
        self, tokenizer, student_path: str, student_tokenizer, rows: list[dict], args: SamplingArgs
    ) -> None:
        """Prepare to read completions of the prompts in `rows`. Raises `ValueError` for a tokenizer
        whose tokens have no bytes, and if the prompts cannot be read with the flags."""
        self.args = args
        self.tokenizer = tokenizer
        self.has_reported = False
        self.longest = longest_sequence(self.path, args)
        self.student_bytes = bytes_of_tokens(student_tokenizer)
        self.student_ends = eos_token_ids(
            student_path, student_tokenizer, args.prompt_format, args.stop_token_ids
        )
        with named_errors(f"--teacher {self.path}"):
            if args.has_turns:
                raise ValueError("another tokenizer than --model's cannot read several turns")
            self.bytes_of = bytes_of_tokens(tokenizer)
            prompt_format = format_of(student_tokenizer, args)
            self.encoder = Encoder(tokenizer, args, prompt_format=prompt_format)
            self.column = "_prompt"
            if "_prompt" not in rows[0]:
                self.column = choose_columns(args.dataset_flag, rows, PROMPT_COLUMNS)[0]
            self.encoder.prompt(rows[0], (self.column,))

    @torch.no_grad()
    def read(self, groups: list[Group], meter) -> list[Group]:
        """Return the completions with the streams of `Spans`. One that has no spans is masked, and
        counted in the metric `unaligned`. Collective."""
        samples = [*chain(*groups)]
        readings = [*chain(*map(self._readings, groups))]
        reasons = [reading for reading in readings if isinstance(reading, str)]
        meter.mean("unaligned", len(reasons), len(samples))
        reasons = [*chain(*distributed.gather_objects(reasons))]  # of all ranks
        if reasons and not self.has_reported:
            distributed.say(f"--teacher {self.path}: a completion is left out: {reasons[0]}")
            self.has_reported = True
        scores = iter(self._scores([r.sample for r in readings if isinstance(r, Reading)]))
        read = iter(
            masked(sample) if isinstance(r, str) else with_spans(sample, r, next(scores))
            for sample, r in zip(samples, readings, strict=True)
        )
        return [[next(read) for _ in group] for group in groups]

    def teach(self, mb: PackedBatch) -> Spans:
        """Return the log-probs of spans, for a student's `distill`."""
        return Spans(mb.span_starts_T, mb.teacher_shares_T)

    def _readings(self, group: Group) -> list[Reading | str]:
        """Return the reading of each completion of a prompt."""
        if not group:
            return []
        prompt = self.encoder.prompt(group[0].row, (self.column,))
        return [self._reading(sample, prompt) for sample in group]

    def _reading(self, sample: Completion, prompt: Sequence[int]) -> Reading | str:
        """Return a completion in the teacher's tokens, after the `prompt` in these tokens, or why
        it cannot be divided into spans."""
        ids = sample.completion_ids
        has_end = ids[-1] in self.student_ends
        pieces = [self.student_bytes.get(i) for i in (ids[:-1] if has_end else ids)]
        if None in pieces:
            return "it has a token without text"
        try:
            text = b"".join(pieces).decode()
            end = self._end(sample.row) if has_end else ""
            own_ids = self.encoder.text_ids.after("", text)
            end_ids = self.encoder.text_ids.after(text, end)
        except ValueError as error:  # also a UnicodeDecodeError: half of a character
            return distributed.first_line(error)
        own_pieces = [self.bytes_of.get(i) for i in own_ids]
        if None in own_pieces or b"".join(own_pieces) != text.encode():
            return "the tokens of the teacher have another text"
        own = [*prompt, *own_ids, *end_ids]
        if len(own) > self.longest.tokens:
            return f"it has {len(own)} tokens, more than {self.longest.flag}"
        mask = [False] * len(prompt) + [True] * (len(own) - len(prompt))
        at_end = len(text.encode()) + 1
        ends = [*accumulate(map(len, pieces)), *[at_end] * has_end]
        own_ends = [*accumulate(map(len, own_pieces)), *[at_end] * len(end_ids)]
        return Reading(Sample(own, mask, len(prompt), sample.row), *common_spans(ends, own_ends))

    def _end(self, row: dict) -> str:
        """Return the text that ends a completion for the teacher."""
        if isinstance(self.encoder.as_asked(row, self.column), str):
            return self.tokenizer.eos_token
        if self.encoder.chat.end is None:
            raise ValueError("the teacher's chat template does not show the model's turns")
        return self.encoder.chat.end.last

    def _scores(self, samples: list[Sample]) -> list[Tensor]:
        """Return the teacher's log-probs of the completion of each sample. Collective."""
        groups = [[sample] for sample in samples]
        packs = pack_groups(groups, self.args.pack_tokens, self.device, self.share_prefix)
        logprobs = {}  # of whole samples, by their index among those of all ranks
        for mb in packs:
            logprobs_T = self(mb, self.args.temperature).logprobs_T.double().cpu()
            for n, index in enumerate(mb.index_N.tolist()):
                logprobs[index] = logprobs_T[mb.offsets[n] : mb.offsets[n + 1]].clone()
        self.reshard()
        logprobs = distributed.gather_dict(logprobs)
        own = sorted(packs[0].own_samples.items())
        return [logprobs[index][sample.prompt_length - 1 :] for index, sample in own]


def common_spans(ends: Sequence[int], other_ends: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the number of its span for each token of two tokenizers. `ends` and `other_ends` are
    the places in the bytes of the text where their tokens end."""
    cuts = sorted({*ends} & {*other_ends})
    return [bisect_left(cuts, end) for end in ends], [bisect_left(cuts, end) for end in other_ends]


def with_spans(sample: Completion, reading: Reading, logprobs: Tensor) -> Completion:
    """Return a completion with the streams that `Spans` reads, from the log-probs of the teacher's
    tokens. Each token of the prompt is a span of its own."""
    spans = torch.tensor(reading.spans)
    sizes = spans.bincount()
    sums = torch.zeros_like(sizes, dtype=torch.float64)
    sums.index_add_(0, torch.tensor(reading.teacher_spans), logprobs)
    prompt = sample.prompt_length
    starts = [1.0] * (prompt + 1) + spans.diff().tolist()
    shares = [0.0] * prompt + (sums / sizes)[spans].tolist()
    return replace(sample, streams=sample.streams | dict(span_starts=starts, teacher_shares=shares))


def masked(sample: Completion) -> Completion:
    """Return a completion that is not trained, with empty streams of `Spans`."""
    count = len(sample.ids)
    streams = sample.streams | dict(span_starts=[1.0] * count, teacher_shares=[0.0] * count)
    return replace(sample, loss_mask=[False] * count, streams=streams)


def bytes_of_tokens(tokenizer) -> dict[int, bytes]:
    """Return the bytes of each token after other text; special tokens have none. Raises
    `ValueError` for a tokenizer whose tokens are no bytes, such as WordPiece."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder or dict(type="none")])}
    added = tokenizer.added_tokens_decoder
    texts = {i: token for token, i in tokenizer.get_vocab().items() if i not in added}
    if "ByteLevel" in kinds:
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        texts = {i: text for i, text in texts.items() if byte_of.keys() >= {*text}}
        pieces = {i: bytes(map(byte_of.get, text)) for i, text in texts.items()}
    elif kinds <= {"ByteFallback", "Fuse", "Replace", "Strip", "Metaspace"}:
        has_blanks = not kinds.isdisjoint({"Replace", "Metaspace"})
        pieces = {i: _piece(text, has_blanks) for i, text in texts.items()}
    else:
        raise ValueError(f"the tokens of its tokenizer are no bytes ({', '.join(sorted(kinds))})")
    return pieces | {i: str(t).encode() for i, t in added.items() if not t.special}


def _piece(text: str, has_blanks: bool) -> bytes:
    """Return the bytes of a SentencePiece token: `<0x0A>` is one byte, and U+2581 is a blank."""
    if re.fullmatch("<0x[0-9A-F]{2}>", text):
        return bytes.fromhex(text[3:5])
    return (text.replace("\u2581", " ") if has_blanks else text).encode()
