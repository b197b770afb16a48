"""Flags of objectives that several scripts share, in groups: importance weights, reward shaping, preference losses."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, NotNegative, Positive, Real, Several, require_default, require_effect
from common.objectives.preference import READS, FDivergence


@dataclass(config=STRICT)
class CorrectionArgs:
    """Importance weights for samples of the engine"""

    correction: Literal["none", "token", "sequence"] = "token"
    """importance weights: trainer probability / engine probability of the sampled tokens. token: one weight per token;
    sequence: one per completion; none: off"""
    correction_mode: Literal["truncate", "mask"] = "truncate"
    """treatment of importance weights outside the bounds. truncate: set to the bound; mask: set to 0"""
    correction_low: NotNegative[float] = 0.0
    """lower bound of the importance weights"""
    correction_high: Positive[float] = 2.0
    """upper bound of the importance weights"""
    correction_filter: tuple[NotNegative[float], NotNegative[float]] | None = None
    """two bounds, e.g. 0.5 2: completions are dropped if the geometric mean of their tokens' trainer / engine
    probability ratios lies outside them; default: off"""

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        if self.correction_low >= self.correction_high:
            bounds = f"--correction_low {self.correction_low:g} --correction_high {self.correction_high:g}"
            raise ValueError(f"{bounds}: the lower bound must be below the upper one")
        if self.correction_filter is not None and self.correction_filter[0] >= self.correction_filter[1]:
            low, high = self.correction_filter
            raise ValueError(f"--correction_filter {low:g} {high:g}: the lower bound must be below the upper one")
        if self.correction == "none":
            unused = ("correction_mode", "correction_low", "correction_high", "correction_filter")
            require_default(self, unused, "with --correction none")
        return self


@dataclass(config=STRICT)
class LogKLArgs:
    """KL to the starting model"""

    log_kl: bool = False
    """log the KL to the starting model also with beta 0, at the cost of its memory and of one forward pass a step"""


@dataclass(config=STRICT)
class RewardArgs:
    """Reward shaping and KL penalty"""

    beta: NotNegative[float] = 0.0
    """weight of the KL penalty to the starting model in the rewards; 0: no penalty, and no reference model in memory"""
    kl_target: NotNegative[float] = 0.0
    """target of the KL in nats, to which beta is adapted (per completion in rloo.py and ppo.py, per token in
    reinforce.py); 0: constant beta"""
    kl_horizon: Positive[int] = 10_000
    """with --kl_target: number of completions in which beta grows or shrinks by at most a fifth (arXiv:1909.08593)"""
    reward_scale: Positive[float] = 1.0
    """factor on the rewards"""
    reward_clip: NotNegative[float] = 0.0
    """bound of the scaled rewards, which are clipped to [-reward_clip, reward_clip]; 0: off"""

    @model_validator(mode="after")
    def _check_kl_target(self) -> Self:
        if not self.kl_target:
            require_default(self, ("kl_horizon",), "with --kl_target 0")
        elif not self.beta:
            raise ValueError(f"--kl_target {self.kl_target:g} adapts --beta; set --beta above 0")
        return self


@dataclass(config=STRICT)
class PreferenceArgs:
    """Preference losses"""

    loss: Several[Literal[tuple(READS)]] = ("sigmoid",)
    """losses on pairs, added up (equations: docs/dpo.md). sigmoid: DPO; robust: DPO for noisy labels; hinge: SLiC; ipo:
    squared distance to a margin; sigmoid_norm: DPO per token; exo_pair: KL to smoothed labels; nca_pair, bco_pair: each
    side against zero; sppo_hard: each side to a target; apo_zero: chosen up, rejected down; apo_down: both down; aot,
    aot_unpaired: on the sorted batch; discopop: logistic and exponential. Without a reference: simpo: margin per token;
    orpo: odds ratio; cpo: DPO and likelihood"""
    loss_weights: Several[NotNegative[float]] = ()
    """weight of each loss; default: all 1"""
    beta: Positive[float] = 0.1
    """scale of the implicit rewards: larger values keep the policy closer to the reference"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """sigmoid, robust, exo_pair: assumed probability that chosen and rejected are swapped"""
    length_normalize: bool = True
    """ipo: log-ratios per token; false: summed over the completion, as in the paper"""
    f_divergence: FDivergence = "reverse_kl"
    """sigmoid, robust, hinge, exo_pair, discopop: divergence that keeps the policy close to the reference (js:
    Jensen-Shannon; alpha: see --f_alpha)"""
    f_alpha: Real = 0.5
    """order of --f_divergence alpha; 1: reverse_kl, 0: forward_kl"""
    simpo_gamma: Real = 0.5
    """simpo: margin by which the reward of chosen should exceed that of rejected"""
    discopop_tau: Annotated[float, Field(gt=0, le=1)] = 0.05
    """discopop: temperature of its blend of logistic and exponential loss; unbounded above 1, hence at most 1"""
    sft_weight: NotNegative[float] = 0.0
    """weight of the chosen completion's negative log-likelihood, added to the loss (RPO)"""
    sft_length_normalize: bool = True
    """with --sft_weight: likelihood per token; false: summed over the completion"""

    @model_validator(mode="after")
    def _check_preference(self) -> Self:
        if not self.loss or len(set(self.loss)) < len(self.loss):
            raise ValueError(f"--loss {' '.join(self.loss)}: name at least one loss, each of them once")
        if self.loss_weights and len(self.loss_weights) != len(self.loss):
            raise ValueError(f"--loss_weights has {len(self.loss_weights)} values for {len(self.loss)} losses")
        require_effect(self, "loss", READS)
        if self.f_divergence != "alpha":
            require_default(self, ("f_alpha",), f"with --f_divergence {self.f_divergence}")
        if not self.sft_weight:
            require_default(self, ("sft_length_normalize",), "with --sft_weight 0")
        if "exo_pair" in self.loss and not self.label_smoothing:
            raise ValueError("--loss exo_pair needs --label_smoothing above 0 (its authors take 0.001)")
        return self
