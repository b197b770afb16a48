"""Flags of a student's teachers and of the divergence from them."""

from functools import partial
from typing import Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, NotNegative, OpenFraction, Several
from common.config.rules import require_default, require_effect
from common.objectives.divergence import DIVERGENCES, READS, Divergence


@dataclass(config=STRICT)
class TeacherArgs:
    """Teachers"""

    teacher: Several[str] = ()
    """Hugging Face id or folder of the model to learn from; required. Several as name=model: each
    row by its own (--teacher_column); the default name is the last part of the path"""
    teacher_column: str | None = None
    """column with the name of each row's teacher; _dataset: the source of --dataset with weights"""
    teacher_logprobs: Literal["live", "stored"] = "live"
    """live: computed in every step; stored (with --on_policy_fraction 0): the teacher's top_k
    log-probs of the data are written once, before training, which then needs no teacher in
    memory"""

    @model_validator(mode="after")
    def _check_teachers(self) -> Self:
        if len(self.teacher) < 2:
            require_default(self, ("teacher_column",), "without several --teacher")
        elif self.teacher_column is None or self.teacher_logprobs == "stored":
            need = "--teacher_logprobs live" if self.teacher_column else "--teacher_column"
            raise ValueError(f"--teacher {' '.join(self.teacher)}: several need {need}")
        return self


@dataclass(config=STRICT)
class DivergenceArgs:
    """Divergence from the teacher"""

    divergence: Literal[tuple(DIVERGENCES)] = "reverse_kl"
    """divergence of student pi from teacher q. reverse_kl: KL(pi || q); forward_kl: KL(q || pi);
    jsd, skewed_kl, skewed_reverse_kl: of both, q, pi to a mixture; adaptive_kl: the first two,
    weighted at each token"""
    jsd_beta: OpenFraction = 0.5
    """jsd: weight of the teacher in the mixture; near 0: like forward_kl, near 1: like
    reverse_kl"""
    skew: OpenFraction = 0.1
    """skewed_kl: weight of the teacher in the mixture; skewed_reverse_kl: of the student"""
    head_mass: OpenFraction = 0.5
    """adaptive_kl: teacher's probability of the tokens whose errors favour forward_kl"""
    top_k: NotNegative[int] = 0
    """number of the teacher's most likely tokens to compare, the others as one token: a lower
    bound; 0: all tokens"""

    @model_validator(mode="after")
    def _check_divergence(self) -> Self:
        require_effect(self, "divergence", READS)
        return self

    @property
    def divergence_form(self) -> Divergence:
        """Function of the log-probs of student and teacher."""
        settings = dict(jsd_beta=self.jsd_beta, skew=self.skew, head_mass=self.head_mass)
        read = {name: settings[name] for name in READS[self.divergence]}
        return partial(DIVERGENCES[self.divergence], **read)
