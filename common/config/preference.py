"""Flags of losses on pairs."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, Needs, NotNegative, Positive, Several
from common.objectives.preference import READS, FDivergence


def needed_by_loss(flag: str) -> Needs:
    """Return the condition that one of the losses reads a flag."""
    return Needs(loss=tuple(name for name, flags in READS.items() if flag in flags))


@dataclass(config=STRICT)
class PreferenceArgs:
    """Preference losses"""

    loss: Several[Literal[tuple(READS)]] = ("sigmoid",)
    """losses on pairs, added up (equations: docs/dpo.md). sigmoid: DPO; robust: DPO for noisy
    labels; hinge: SLiC; ipo: squared distance to a margin; sigmoid_norm: DPO per token; exo_pair:
    KL to smoothed labels; nca_pair, bco_pair: each side against zero; sppo_hard: each side to a
    target; apo_zero: chosen up, rejected down; apo_down: both down; discopop: logistic and
    exponential. Without a reference: simpo: margin per token; orpo: odds ratio; cpo: DPO and
    likelihood"""
    loss_weights: Several[NotNegative[float]] = ()
    """weight of each loss; default: all 1"""
    beta: Positive[float] = 0.1
    """scale of the implicit rewards: larger values keep the policy closer to the reference"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), needed_by_loss("label_smoothing")] = 0.0
    """assumed probability that chosen and rejected are swapped"""
    f_divergence: Annotated[FDivergence, needed_by_loss("f_divergence")] = "reverse_kl"
    """divergence that keeps the policy close to the reference (js: Jensen-Shannon; alpha: of order
    1/2, between reverse_kl and forward_kl)"""
    sft_weight: NotNegative[float] = 0.0
    """weight of the chosen completion's negative log-likelihood per token in the loss (RPO)"""

    @property
    def loss_settings(self) -> dict[str, Any]:
        """Flags that `preference.preference_loss` reads."""
        return dict(
            beta=self.beta, label_smoothing=self.label_smoothing, f_divergence=self.f_divergence
        )

    @model_validator(mode="after")
    def _check_preference(self) -> Self:
        names = f"--loss {' '.join(self.loss)}"
        if not self.loss or len({*self.loss}) < len(self.loss):
            raise ValueError(f"{names}: name at least one loss, each of them once")
        if self.loss_weights and len(self.loss_weights) != len(self.loss):
            counts = f"{len(self.loss_weights)} values for {len(self.loss)} losses"
            raise ValueError(f"--loss_weights has {counts}")
        if "exo_pair" in self.loss and not self.label_smoothing:
            advice = "needs --label_smoothing above 0 (its authors take 0.001)"
            raise ValueError(f"--loss exo_pair {advice}")
        return self
