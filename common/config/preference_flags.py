"""Flags of the losses on pairs."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, Needs, NotNegative, Positive, Several
from common.objectives.preference import READS, FDivergence


def read(flag: str) -> Needs:
    """Return the losses that read a flag."""
    return Needs(loss=tuple(name for name, flags in READS.items() if flag in flags))


@dataclass(config=STRICT)
class PreferenceArgs:
    """Preference losses"""

    loss: Several[Literal[tuple(READS)]] = ("sigmoid",)
    """losses on pairs, added up (equations: docs/dpo.md). sigmoid: DPO; robust: DPO for noisy
    labels; hinge: SLiC; ipo: squared distance to a margin; sigmoid_norm: DPO per token; exo_pair:
    KL to smoothed labels; nca_pair, bco_pair: each side against zero; sppo_hard: each side to a
    target; apo_zero: chosen up, rejected down; apo_down: both down; discopop: logistic and
    exponential. Without a reference: simpo: margin per token; alphapo: simpo with a bent reward;
    orpo: odds ratio; cpo: DPO and likelihood"""
    loss_weights: Several[NotNegative[float]] = ()
    """weight of each loss; default: all 1"""
    beta: Positive[float] = 0.1
    """scale of the implicit rewards: larger values keep the policy closer to the reference"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), read("label_smoothing")] = 0.0
    """assumed probability that chosen and rejected are swapped"""
    f_divergence: Annotated[FDivergence, read("f_divergence")] = "reverse_kl"
    """divergence that keeps the policy close to the
    reference (js: Jensen-Shannon; alpha: of order 1/2, between reverse_kl and forward_kl)"""
    sft_weight: NotNegative[float] = 0.0
    """weight of the chosen completion's negative log-likelihood per token, added to the loss
    (RPO)"""

    @property
    def loss_settings(self) -> dict[str, Any]:
        """Flags that `preference.preference_loss` reads."""
        return dict(
            beta=self.beta, label_smoothing=self.label_smoothing, f_divergence=self.f_divergence
        )

    @model_validator(mode="after")
    def _check_preference(self) -> Self:
        if not self.loss or len(set(self.loss)) < len(self.loss):
            raise ValueError(
                f"--loss {' '.join(self.loss)}: name at least one loss, each of them once"
            )
        if self.loss_weights and len(self.loss_weights) != len(self.loss):
            raise ValueError(
                f"--loss_weights has {len(self.loss_weights)} values for {len(self.loss)} losses"
            )
        if "exo_pair" in self.loss and not self.label_smoothing:
            raise ValueError(
                "--loss exo_pair needs --label_smoothing above 0 (its authors take 0.001)"
            )
        return self
