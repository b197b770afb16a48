"""Groups of flags for teachers, and for divergences from them."""

from typing import Annotated, Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, Needs, NotNegative, Several
from common.objectives.divergence import DIVERGENCES


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
    log-probs of the data are computed once, and the training needs no teacher in memory"""

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


FULL = Needs(estimator="full")


@dataclass(config=STRICT)
class DivergenceArgs:
    """Divergence from the teacher"""

    divergence: Annotated[Literal[tuple(DIVERGENCES)], FULL] = "reverse_kl"
    """divergence of student pi from teacher q. reverse_kl: KL(pi || q); forward_kl: KL(q || pi);
    jsd: of both to their mixture"""
    top_k: Annotated[NotNegative[int], FULL] = 0
    """number of the teacher's most likely tokens to compare, the others as one token: a lower
    bound; 0: all tokens"""
