"""Policies for distillation: a student, which is compared with a teacher at every token, and the
teachers of a run."""

from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.config.extra import extra
from common.config.groups import TrainArgs
from common.config.specs import eval_sets_of
from common.data.packing import PackedBatch
from common.data.rows import datasets_by_name
from common.data.sample import Group, Sample
from common.model.comparison import Comparison, TopK, compare
from common.model.head import Logits
from common.model.hub import load_tokenizer, require_same_tokenizer, resolve_model
from common.model.loading import load_config
from common.model.lora import StartingModel
from common.model.policy import Policy, load_policy
from common.objectives.divergence import Divergence
from common.parallel import distributed


class Student(Policy):
    """Policy that learns from a teacher."""

    forward_methods = ("distill",)
    distils = True

    def distill(
        self,
        mb: PackedBatch,
        teacher: Logits | TopK | Any,
        divergence: Divergence | None = None,
        top_k: int = 0,
        temperature: float = 1.0,
    ) -> Comparison:
        """Return statistics of this student and its `teacher`, the result of the teacher's `teach`:
        see `compare`. The spans of a teacher with another tokenizer compare themselves."""
        if not isinstance(teacher, Logits | TopK):
            return teacher.compare(Policy.forward(self, mb, temperature), mb.old_logprobs_T)
        targets_T = mb.model_tokens.targets_T
        comparison = compare(self._logits(mb), teacher, targets_T, temperature, divergence, top_k)
        return self._watched(mb, Comparison(*mb.expand(comparison)))


class Teacher(Policy):
    """Frozen policy that a student learns from."""

    forward_methods = ("teach",)
    reads_text = False  # whether its tokenizer is another one than the student's

    def read(self, groups: list[Group], meter) -> list[Group]:
        """Return the student's completions in the form that `teach` reads. Raises `RunError` for an
        id without an embedding: an untrained student may sample any row of its head."""
        known = self.hf.get_input_embeddings().num_embeddings
        ids = chain.from_iterable(sample.completion_ids for sample in chain(*groups))
        if unknown := [i for i in ids if i >= known]:
            problem = f"has {known} tokens, the student sampled token {unknown[0]}"
            advice = "start from a student that has learned its tokenizer's tokens"
            raise distributed.RunError(f"--teacher {self.path} {problem}; {advice}")
        return groups

    @torch.no_grad()
    def teach(self, mb: PackedBatch) -> Logits:
        """Return the logits for a student's `distill`, with a copy of the head: FSDP frees its own.
        Keep it for one micro-batch only."""
        logits = self._logits(mb)
        bias_V = None if logits.bias_V is None else logits.bias_V.clone()
        return logits._replace(head_VD=logits.head_VD.clone(), bias_V=bias_V)


# ---- the teachers of a run ----


def find_teachers(args, path: str, tokenizer) -> dict[str, str]:
    """Return the local folders of `--teacher` by name. `path` and `tokenizer` are the student's.
    Raises `ValueError` for one that is missing, and with `--estimator full` for other tokens."""
    folders = {}
    for name, model in datasets_by_name(eval_sets_of(args.teacher, "teacher")).items():
        folders[name] = resolve_model(model, "--teacher", not args.dry_run)
        shared = shared_vocabulary(path, folders[name])
        if args.top_k > shared:
            problem = f"--model and --teacher share only {shared} tokens"
            raise ValueError(f"--top_k {args.top_k}: {problem}")
        if args.estimator == "full":
            otherwise = ", or set --estimator sampled, which compares text"
            require_same_tokenizer("--teacher", folders[name], tokenizer, otherwise)
    return folders


def shared_vocabulary(path: str, teacher_path: str) -> int:
    """Return how many tokens the models in two folders share."""
    return min(load_config(each).get_text_config().vocab_size for each in (path, teacher_path))


def by_teacher(
    groups: Sequence[Group], teachers: Collection[str], column: str | None
) -> dict[str, list[Group]]:
    """Return the groups of each teacher, with an empty one in place of each other group, so that
    all keep their positions. A row's value in `--teacher_column` is the name of its teacher. Raises
    `ValueError` for another value."""
    own = {name: [[] for _ in groups] for name in teachers}
    for position, group in enumerate(groups):
        row = group[0].row
        name = next(iter(own)) if column is None else str(row.get(column))
        if name not in own:
            problem = f"{row.get(column)!r} is no name of --teacher ({', '.join(own)})"
            raise ValueError(f"{row['_source']}: --teacher_column {column}: {problem}")
        own[name][position] = group
    return own


def load_teachers(
    folders: dict[str, str], policy: Policy, tokenizer, samples: list[Sample], rows: list[dict],
    args: TrainArgs, device: torch.device,
) -> dict[str, Teacher]:  # fmt: skip
    """Return the frozen models by name or, with `--teacher_logprobs stored`, the log-probs of the
    only one for the trained tokens of `samples`. They are in the run's folder `teacher_logprobs`;
    if that is of other samples or of another teacher, the model is loaded to write it, and dropped.
    `policy` and `tokenizer` are the student's, `rows` those of all prompts. Collective. Raises
    `ValueError` naming a row without a teacher."""

    def load(path: str, kind: type[Teacher] = Teacher) -> Teacher:
        return load_policy(path, args, device, trainable=False, flag="--teacher", kind=kind)

    by_teacher([[Sample([], [], row=row)] for row in rows], folders, args.teacher_column)
    teachers = {}
    for name, path in folders.items():
        own_tokenizer = tokenizer
        if args.estimator == "sampled":  # else `find_teachers` has required the same tokens
            own_tokenizer = load_tokenizer(path, flag="--teacher")
        is_foreign = own_tokenizer.get_vocab() != tokenizer.get_vocab()
        is_stored = args.teacher_logprobs == "stored"
        if not (is_stored or is_foreign):
            teachers[name] = load(path)
            continue
        why = "--teacher_logprobs stored" if is_stored else "--teacher with another tokenizer"
        with extra("teachers", why):
            from extras.teachers import foreign, stored
        if is_stored:
            folder = Path(args.output_dir) / "teacher_logprobs"
            shared = shared_vocabulary(policy.path, path)
            teachers[name] = stored.StoredTeacher(folder, path, load, samples, shared, args, device)
        else:
            teachers[name] = load(path, foreign.ForeignTeacher)
            teachers[name].set_tokenizers(own_tokenizer, policy.path, tokenizer, rows, args)
    return teachers


class OwnTeacher(Student, Teacher):
    """Policy that learns from itself."""

    forward_methods = Student.forward_methods + Teacher.forward_methods


def load_own_teacher(policy: OwnTeacher, args: TrainArgs, device: torch.device) -> nn.Module:
    """Return the model of `--teacher` of self_distill.py: the policy, or a frozen copy, in float32
    if it is to move. With adapters a copy is the policy with other adapters. Collective."""
    if args.teacher == "live":
        return policy
    if args.lora_rank:
        return StartingModel(policy)
    moves = args.teacher == "ema"
    return load_policy(
        policy.path, args, device, trainable=False, flag="--teacher", kind=Teacher, moves=moves
    )
