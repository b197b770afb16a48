"""Flags of the losses on pairs."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, NotNegative, Positive, Real, Several
from common.config.rules import require_default, require_effect
from common.objectives.preference import READS, FDivergence


@dataclass(config=STRICT)
class PreferenceArgs:
    """Preference losses"""

    loss: Several[Literal[tuple(READS)]] = ("sigmoid",)
    """losses on pairs, added up (equations: docs/dpo.md). sigmoid: DPO; robust: DPO for noisy
    labels; hinge: SLiC; ipo: squared distance to a margin; sigmoid_norm: DPO per token; exo_pair:
    KL to smoothed labels; nca_pair, bco_pair: each side against zero; sppo_hard: each side to a
    target; apo_zero: chosen up, rejected down; apo_down: both down; aot, aot_unpaired: on the
    sorted batch; discopop: logistic and exponential. Without a reference: simpo: margin per token;
    alphapo: simpo with a bent reward; orpo: odds ratio; cpo: DPO and likelihood"""
    loss_weights: Several[NotNegative[float]] = ()
    """weight of each loss; default: all 1"""
    beta: Positive[float] = 0.1
    """scale of the implicit rewards: larger values keep the policy closer to the reference"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """sigmoid, robust, exo_pair: assumed probability that chosen and rejected are swapped"""
    length_normalize: bool = True
    """ipo: log-ratios per token; false: summed over the completion, as in the paper"""
    f_divergence: FDivergence = "reverse_kl"
    """sigmoid, robust, hinge, exo_pair, discopop: divergence that keeps the policy close to the
    reference (js: Jensen-Shannon; alpha: see --f_alpha)"""
    f_alpha: Real = 0.5
    """order of --f_divergence alpha; 1: reverse_kl, 0: forward_kl"""
    simpo_gamma: Real = 0.5
    """simpo, alphapo: margin by which the reward of chosen should exceed that of rejected"""
    alphapo_alpha: Real = 0.25
    """alphapo: bend of the reward; 0: simpo"""
    discopop_tau: Annotated[float, Field(gt=0, le=1)] = 0.05
    """discopop: temperature of its blend of logistic and exponential loss; unbounded above 1, hence
    at most 1"""
    sft_weight: NotNegative[float] = 0.0
    """weight of the chosen completion's negative log-likelihood, added to the loss (RPO)"""
    sft_length_normalize: bool = True
    """with --sft_weight: likelihood per token; false: summed over the completion"""

    @property
    def loss_settings(self) -> dict[str, Any]:
        """Flags that `preference.preference_loss` reads."""
        return dict(
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            length_normalize=self.length_normalize,
            f_divergence=self.f_divergence,
            f_alpha=self.f_alpha,
            simpo_gamma=self.simpo_gamma,
            alphapo_alpha=self.alphapo_alpha,
            discopop_tau=self.discopop_tau,
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
        require_effect(self, "loss", READS)
        if self.f_divergence != "alpha":
            require_default(self, ("f_alpha",), f"with --f_divergence {self.f_divergence}")
        if not self.sft_weight:
            require_default(self, ("sft_length_normalize",), "with --sft_weight 0")
        if "exo_pair" in self.loss and not self.label_smoothing:
            raise ValueError(
                "--loss exo_pair needs --label_smoothing above 0 (its authors take 0.001)"
            )
        return self
