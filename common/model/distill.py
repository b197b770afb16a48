"""Distillation: a student is compared with its teacher at every token; the teachers of a run.

The comparison goes in chunks (logprobs.py), over the whole vocabulary or the K most likely tokens
of the teacher. If the two heads have different numbers of rows for one tokenizer, the divergence
covers the shared tokens, and each distribution is normalised over them.

Shapes: T packed tokens, C tokens of one chunk, V vocabulary, K most likely tokens. S = K + 1 with
one entry for all other tokens, or V for distributions over the whole vocabulary."""

from collections.abc import Callable, Collection
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.extra import extra
from common.config.flags import STRICT, NamesModels, Several, datasets_by_name, eval_sets_of
from common.config.online import OnlineArgs
from common.model.hub import read_tokenizer, require_same_tokenizer, resolve_model
from common.model.loading import load_config
from common.model.logprobs import ChunkFunctions, Logits, by_chunk
from common.model.policy import Policy, load_policy
from common.objectives.divergence import Divergence, coarsen, reverse_kl
from common.packs.packing import PackedBatch
from common.packs.sample import Group, Sample
from common.parallel import distributed


@dataclass(config=STRICT)
class TeacherArgs:
    """Teachers"""

    teacher: NamesModels[Several[str]] = ()
    """learn from this model: Hugging Face id or folder; required. Several as name=model: each row
    learns from its own (--teacher_column); the default name is the last part of the path"""
    teacher_column: str | None = None
    """read the name of each row's teacher in this column; _dataset: the row's data set, if
    --dataset has weights"""
    teacher_logprobs: Literal["live", "stored"] = "live"
    """get the teacher's log-probs. live: compute them in every step; stored (with
    --on_policy_fraction 0): compute its top_k log-probs of the data once, and train without the
    teacher in memory"""

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        if len(self.teacher) < 2:
            if self.teacher_column is not None:
                flag = f"--teacher_column {self.teacher_column}"
                raise ValueError(f"{flag} has no effect without several --teacher")
        elif self.teacher_column is None or self.teacher_logprobs == "stored":
            need = "--teacher_logprobs live" if self.teacher_column else "--teacher_column"
            raise ValueError(f"--teacher {' '.join(self.teacher)}: several need {need}")
        return self


class TopK(SimpleNamespace):
    """Distributions of a teacher over the shared tokens, coarsened to its most likely tokens. It is
    no tuple or dataclass, in which FSDP would round the tensors to the compute dtype."""

    logprobs_TS: Tensor  # the K most likely tokens, then all other tokens together
    tokens_TK: Tensor  # the most likely token is the first
    target_logprobs_T: Tensor
    entropy_T: Tensor  # entropy before coarsening
    vocabulary: int  # number of shared tokens


class Comparison(NamedTuple):
    """Statistics of a student and its teacher at each token: nats, float32 (or float64), [T]."""

    logprobs_T: Tensor  # log-prob of the target by the student, with gradient
    divergence_T: Tensor | None  # with gradient
    entropy_T: Tensor  # entropy of the student
    reverse_kl_T: Tensor  # KL(student || teacher), coarsened like the divergence
    teacher_logprobs_T: Tensor  # log-prob of the target by the teacher, over the shared tokens
    teacher_entropy_T: Tensor | None
    teacher_mass_T: Tensor | None  # teacher's probability of the kept tokens; 1 if all are kept
    agree_T: Tensor | None  # whether the two have the same most likely token, bool


@torch.no_grad()
def most_likely(
    teacher: Logits, targets_T: Tensor, temperature: float, vocabulary: int, top_k: int
) -> TopK:
    """Coarsen a teacher's distributions over the first `vocabulary` tokens."""
    chunks = []
    for c in teacher.chunks():
        logq_CV = teacher.chunk(c, temperature)[0][:, :vocabulary].log_softmax(-1)
        tokens_CK = logq_CV.topk(top_k).indices
        target_C = _of_target(logq_CV, targets_T[c])
        chunks.append((coarsen(logq_CV, tokens_CK), tokens_CK, target_C, _entropy(logq_CV)))
    names = ("logprobs_TS", "tokens_TK", "target_logprobs_T", "entropy_T")
    columns = map(torch.cat, zip(*chunks, strict=True))
    return TopK(**dict(zip(names, columns, strict=True)), vocabulary=vocabulary)


def compare(
    student: Logits, teacher: Logits | TopK, targets_T: Tensor, temperature: float = 1.0,
    divergence: Divergence = reverse_kl, top_k: int = 0,
) -> Comparison:  # fmt: skip
    """Compare a student with its teacher. A `top_k` above 0 coarsens both to the teacher's most
    likely tokens."""
    if top_k and isinstance(teacher, Logits):
        vocabulary = min(len(student.head_VD), len(teacher.head_VD))
        teacher = most_likely(teacher, targets_T, temperature, vocabulary, top_k)
    # The backward pass frees `tensors`, such as a large head, but not what a function holds.
    if isinstance(teacher, Logits):
        tensors, known, beside = teacher[:3], teacher[3:], len(teacher.head_VD)
    else:
        tensors, known, beside = (), teacher, teacher.vocabulary
    forward = partial(_statistics, known, targets_T, temperature, divergence)
    comparison = ChunkFunctions(forward, partial(_gradient, forward), beside)
    return Comparison(*by_chunk(student, temperature, comparison, *tensors))


def _statistics(
    known: TopK | tuple, targets_T: Tensor, temperature: float, divergence: Divergence,
    logits_CV: Tensor, c: slice, *tensors: Tensor | None,
) -> Comparison:  # fmt: skip
    """Compare student and teacher in a chunk. `known` is a `TopK`, or a tuple of all fields of the
    teacher's `Logits` but its `tensors`, which stand apart so that the backward pass can free
    them."""
    logp_CV = logits_CV.log_softmax(-1)
    targets_C = targets_T[c]
    if isinstance(known, TopK):
        shared, likely_C = known.vocabulary, known.tokens_TK[c, 0]
        logq_CS = known.logprobs_TS[c]
        logp_CS = coarsen(_first(logp_CV, shared), known.tokens_TK[c])
        mass_C = logq_CS[:, : known.tokens_TK.shape[1]].exp().sum(-1)
        of_teacher = known.target_logprobs_T[c], known.entropy_T[c], mass_C
    else:
        teacher = Logits(*tensors, *known)
        shared = min(logp_CV.shape[1], len(teacher.head_VD))
        logq_CS = teacher.chunk(c, temperature)[0][:, :shared].log_softmax(-1)
        logp_CS = _first(logp_CV, shared)
        likely_C, mass_C = logq_CS.argmax(-1), torch.ones_like(logq_CS[:, 0])
        of_teacher = _of_target(logq_CS, targets_C), _entropy(logq_CS), mass_C
    with torch.no_grad():
        of_student = _entropy(logp_CV), reverse_kl(logp_CS, logq_CS)
        agree_C = logp_CV[:, :shared].argmax(-1) == likely_C
    trained = _of_target(logp_CV, targets_C), divergence(logp_CS, logq_CS)
    return Comparison(*trained, *of_student, *of_teacher, agree_C)


@torch.enable_grad()
def _gradient(forward: Callable, logits_CV: Tensor, c: slice, grads_T, tensors, _) -> Tensor:
    """Autograd differentiates a chunk up to its logits."""
    values = forward(logits_CV.requires_grad_(), c, *tensors)
    used = [(x_C, x_T[c]) for x_C, x_T in zip(values, grads_T, strict=False) if x_T is not None]
    outputs, weights = zip(*used, strict=True)
    return torch.autograd.grad(outputs, logits_CV, weights)[0]


def _of_target(logp_CV: Tensor, targets_C: Tensor) -> Tensor:
    return logp_CV.gather(-1, targets_C[:, None])[:, 0]


def _entropy(logp_CV: Tensor) -> Tensor:
    return -torch.linalg.vecdot(logp_CV.exp(), logp_CV)


def _first(logp_CV: Tensor, count: int) -> Tensor:
    """Return the log-probs of the first `count` tokens, normalised over these tokens."""
    return logp_CV if count >= logp_CV.shape[1] else logp_CV[:, :count].log_softmax(-1)


# ---- students and teachers ----


class Student(Policy):
    """Policy that learns from a teacher."""

    forward_methods = ("distill",)
    distils = True

    def distill(
        self, mb: PackedBatch, teacher: Logits | TopK | Any, divergence: Divergence = reverse_kl,
        top_k: int = 0, temperature: float = 1.0,
    ) -> Comparison:  # fmt: skip
        """Return statistics of this student and its `teacher`, the result of a `teach`."""
        if not isinstance(teacher, Logits | TopK):  # the teacher has another tokenizer
            return teacher.compare(Policy.forward(self, mb, temperature), mb.old_logprobs_T)
        targets_T = mb.model_tokens.targets_T
        comparison = compare(self._logits(mb), teacher, targets_T, temperature, divergence, top_k)
        return self._output(mb, Comparison(*mb.expand(comparison)))


class Teacher(Policy):
    """Frozen policy that a student learns from."""

    forward_methods = ("teach",)
    reads_text = False  # true if its tokenizer is not the student's

    def read(self, groups: list[Group], meter) -> list[Group]:
        """Return the student's completions in the form that `teach` reads. Raises `RunError` for a
        token that the teacher lacks: a head may have more rows than there are tokens."""
        known = self.hf.get_input_embeddings().num_embeddings
        if any(i >= known for sample in chain(*groups) for i in sample.completion_ids):
            raise distributed.RunError(f"--teacher {self.path}: has no token that the student uses")
        return groups

    @torch.no_grad()
    def teach(self, mb: PackedBatch) -> Logits:
        """Return the logits for `distill`, with a copy of the head: FSDP frees its own."""
        logits = self._logits(mb)
        bias_V = None if logits.bias_V is None else logits.bias_V.clone()
        return logits._replace(head_VD=logits.head_VD.clone(), bias_V=bias_V)


class OwnTeacher(Student, Teacher):
    """Policy that learns from itself."""

    forward_methods = Student.forward_methods + Teacher.forward_methods


# ---- the teachers of a run ----


def find_teachers(
    args: TeacherArgs, path: str, tokenizer, top_k: int, estimator: str, dry_run: bool | str
) -> dict[str, str]:
    """Return the local folders of `--teacher` by name; `path` and `tokenizer` are the student's."""
    folders = {}
    for name, model in datasets_by_name(eval_sets_of(args.teacher, "teacher")).items():
        folders[name] = resolve_model(model, "--teacher", not dry_run)
        if top_k > (shared := shared_tokens(path, folders[name])):
            raise ValueError(f"--top_k {top_k}: --model and --teacher share {shared} tokens")
        if estimator == "full":
            require_same_tokenizer("--teacher", folders[name], tokenizer)
    return folders


def shared_tokens(*paths: str) -> int:
    """Return the size of the smallest vocabulary of these models."""
    return min(load_config(path).get_text_config().vocab_size for path in paths)


def teacher_of(row: dict, teachers: Collection[str], column: str | None) -> str:
    """Return the name of a row's teacher, its value in `--teacher_column`; without this flag there
    is one teacher."""
    name = next(iter(teachers)) if column is None else str(row.get(column))
    if name not in teachers:
        problem = f"{row.get(column)!r} is no name of --teacher ({', '.join(teachers)})"
        raise ValueError(f"{row['_source']}: --teacher_column {column}: {problem}")
    return name


def load_teachers(
    folders: dict[str, str], policy: Policy, tokenizer, samples: list[Sample], rows: list[dict],
    args: OnlineArgs, device: torch.device, flags: TeacherArgs, top_k: int,
) -> dict[str, Teacher]:  # fmt: skip
    """Return the frozen models by name. `policy` and `tokenizer` are the student's, and each prompt
    has one of the `rows`. With `--teacher_logprobs stored`, the only teacher is a file of its
    log-probs for `samples`; the model is loaded to write it, and dropped. Collective."""
    options = dict(args=args, device=device, trainable=False, flag="--teacher")
    load = partial(load_policy, **options, kind=Teacher)
    for row in rows:
        teacher_of(row, folders, flags.teacher_column)
    teachers: dict[str, Any] = {}
    for name, path in folders.items():
        own_tokenizer = read_tokenizer(path, "--teacher")
        if flags.teacher_logprobs == "stored":
            with extra("teachers", "--teacher_logprobs stored"):
                from extras.teachers.stored import StoredTeacher
            folder = Path(args.output_dir) / "teacher_logprobs"
            shared = shared_tokens(policy.path, path)
            teachers[name] = StoredTeacher(folder, path, load, samples, shared, args, top_k, device)
        elif own_tokenizer.get_vocab() == tokenizer.get_vocab():
            teachers[name] = load(path)
        else:
            with extra("teachers", "--teacher with another tokenizer"):
                from extras.teachers.foreign import ForeignTeacher
            teachers[name] = load(path, kind=ForeignTeacher)
            teachers[name].set_tokenizers(own_tokenizer, policy.path, tokenizer, rows, args)
    return teachers
