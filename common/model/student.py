"""Policies for distillation: a student, which is compared with a teacher at every token, and the
teacher."""

import torch

from common.data.packing import PackedBatch
from common.model.comparison import Comparison, TopK, compare
from common.model.head import Logits
from common.model.policy import Policy
from common.objectives.divergence import Divergence


class Student(Policy):
    """Policy that learns from a teacher."""

    forward_methods = ("distill",)

    def distill(
        self,
        mb: PackedBatch,
        teacher: Logits | TopK,
        divergence: Divergence | None = None,
        top_k: int = 0,
        temperature: float = 1.0,
    ) -> Comparison:
        """Return statistics of this student and its `teacher`, the result of the teacher's `teach`:
        see `compare`."""
        targets_T = mb.model_tokens.targets_T
        comparison = compare(self._logits(mb), teacher, targets_T, temperature, divergence, top_k)
        return self._watched(mb, Comparison(*mb.expand(comparison)))


class Teacher(Policy):
    """Frozen policy that a student learns from."""

    forward_methods = ("teach",)

    @torch.no_grad()
    def teach(self, mb: PackedBatch) -> Logits:
        """Return the logits for a student's `distill`, with a copy of the head: FSDP frees its own.
        Keep it for one micro-batch only."""
        logits = self._logits(mb)
        bias_V = None if logits.bias_V is None else logits.bias_V.clone()
        return logits._replace(head_VD=logits.head_VD.clone(), bias_V=bias_V)
