"""Policies for distillation: a student, which is compared with a teacher at every token, and the
teacher."""

from itertools import chain

import torch

from common.data.packing import PackedBatch
from common.data.sample import Group
from common.model.comparison import Comparison, Spans, TopK, compare, compare_spans
from common.model.head import Logits
from common.model.policy import Policy
from common.objectives.divergence import Divergence
from common.parallel import distributed


class Student(Policy):
    """Policy that learns from a teacher."""

    forward_methods = ("distill",)

    def distill(
        self,
        mb: PackedBatch,
        teacher: Logits | TopK | Spans,
        divergence: Divergence | None = None,
        top_k: int = 0,
        temperature: float = 1.0,
    ) -> Comparison:
        """Return statistics of this student and its `teacher`, the result of the teacher's `teach`:
        see `compare` and `compare_spans`."""
        if isinstance(teacher, Spans):
            return compare_spans(Policy.forward(self, mb, temperature), teacher, mb.old_logprobs_T)
        targets_T = mb.model_tokens.targets_T
        comparison = compare(self._logits(mb), teacher, targets_T, temperature, divergence, top_k)
        return self._watched(mb, Comparison(*mb.expand(comparison)))


class Teacher(Policy):
    """Frozen policy that a student learns from."""

    forward_methods = ("teach",)
    reads_text = False  # whether its tokenizer is another one than the student's

    def read(self, groups: list[Group], meter) -> list[Group]:
        """Return the student's completions in the form that `teach` reads. Raises `RunError` for an
        id without an embedding: the student may have rows beyond the tokenizer's tokens, and may
        sample them while it is untrained."""
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
