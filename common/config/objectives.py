"""Flags of objectives that several scripts share, in groups: importance weights, reward shaping."""

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, BelowOne, NotNegative, Positive, PositiveFraction
from common.config.rules import require_default

if TYPE_CHECKING:
    from common.objectives.importance import Correction


@dataclass(config=STRICT)
class CorrectionArgs:
    """Importance weights for samples of the engine"""

    weights_completions = False  # whether a completion always has one weight
    correction: Literal["none", "token", "sequence"] = "token"
    """importance weights: trainer probability / engine probability of the sampled tokens. token:
    one weight per token; sequence: one per completion; none: off"""
    correction_mode: Literal["truncate", "mask"] = "truncate"
    """treatment of importance weights outside the bounds. truncate: set to the bound; mask: set to
    0"""
    correction_low: NotNegative[float] = 0.0
    """lower bound of the importance weights"""
    correction_high: Positive[float] = 2.0
    """upper bound of the importance weights"""
    correction_filter: tuple[NotNegative[float], NotNegative[float]] | None = None
    """two bounds, e.g. 0.5 2: completions are dropped if the geometric mean of their tokens'
    trainer / engine probability ratios lies outside them; default: off"""
    correction_reject: Literal[
        "veto", "token_k2", "token_k3", "token_tv", "seq_mean_k2", "seq_mean_k3", "seq_mean_tv",
        "seq_max_k2", "seq_max_k3", "seq_max_tv",
    ] | None = None  # fmt: skip
    """completions to drop, with correction_bound. veto: any ratio is below it; seq_mean, seq_max:
    the mean or any token is above it in k2, k3 (KL estimate in nats) or tv (probability
    difference); token: drop these tokens only"""
    correction_bound: Positive[float] | None = None
    """bound of correction_reject"""
    correction_normalize: bool = False
    """divide the weights by their mean over the minibatch; costs a forward pass if a rollout has
    one update"""

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        problem = "the lower bound must be below the upper one"
        if self.correction_low >= self.correction_high:
            flags = f"--correction_low {self.correction_low:g}"
            raise ValueError(f"{flags} --correction_high {self.correction_high:g}: {problem}")
        if self.correction_filter is not None:
            low, high = self.correction_filter
            if low >= high:
                raise ValueError(f"--correction_filter {low:g} {high:g}: {problem}")
        if self.correction == "none":
            unused = ("mode", "low", "high", "normalize")
            flags = [f"correction_{name}" for name in unused]
            require_default(self, flags, "with --correction none")
        if (self.correction_reject is None) != (self.correction_bound is None):
            raise ValueError("--correction_reject and --correction_bound: set both or none")
        if self.weights_completions and (self.correction_reject or "").startswith("token_"):
            flag = f"--correction_reject {self.correction_reject}"
            raise ValueError(f"{flag}: a completion has one weight; use seq_mean or seq_max")
        if self.correction_reject == "veto" and self.correction_bound >= 1:
            bound = f"--correction_bound {self.correction_bound:g}"
            raise ValueError(f"{bound}: a veto needs a bound below 1; ratios are near 1")
        return self

    @property
    def correction_form(self) -> "Correction":
        """Form of the importance weights."""
        from common.objectives.importance import Correction

        return Correction(
            self.correction, self.correction_mode, self.correction_low, self.correction_high,
            self.correction_filter, self.correction_reject, self.correction_bound,
            self.correction_normalize,
        )  # fmt: skip


@dataclass(config=STRICT)
class ClipArgs:
    """Clip of the importance ratio"""

    clip_low: BelowOne = 0.2
    """lower clip bound of the importance ratio: 1 - clip_low"""
    clip_high: NotNegative[float] = 0.2
    """upper clip bound of the importance ratio: 1 + clip_high"""


@dataclass(config=STRICT)
class KLEstimateArgs:
    """KL per token"""

    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """estimator of the KL per token, with d = log(policy / reference). k1: d; k2: d^2 / 2; k3:
    exp(-d) - 1 + d"""
    kl_clamp: NotNegative[float] = 0.0
    """bound of the KL estimate of each token, which is clamped to [-kl_clamp, kl_clamp]; 0: off"""


@dataclass(config=STRICT)
class MovingArgs:
    """Entropy bonus and reference that move"""

    entropy_coef: NotNegative[float] = 0.0
    """weight of the entropy bonus, reduced over tokens like the loss (--reduction)"""
    entropy_target: NotNegative[float] = 0.0
    """entropy in nats per token below which there is a bonus: entropy_coef grows after a step below
    it and shrinks after one above (arXiv:2505.22312); 0: entropy_coef is constant"""
    entropy_step: Positive[float] = 1e-4
    """with --entropy_target: change of entropy_coef after a step"""
    reference_sync: NotNegative[int] = 0
    """steps between moves of the reference model towards the policy (arXiv:2404.09656); 0: none"""
    reference_rate: PositiveFraction = 1.0
    """with --reference_sync: rate a of a move, reference <- (1 - a) reference + a policy"""

    @model_validator(mode="after")
    def _check_moving(self: Any) -> Any:  # reads flags of the script
        if not self.entropy_target:
            require_default(self, ("entropy_step",), "with --entropy_target 0")
        if not self.reference_sync:
            require_default(self, ("reference_rate",), "with --reference_sync 0")
        elif self.lora_rank or not self.beta:
            flag = f"--reference_sync {self.reference_sync}"
            raise ValueError(f"{flag} needs --beta above 0, and --lora_rank 0 (docs/dpo.md)")
        return self


@dataclass(config=STRICT)
class LogKLArgs:
    """KL to the starting model"""

    log_kl: bool = False
    """log the KL to the starting model also with beta 0, at the cost of its memory and of one
    forward pass a step"""


@dataclass(config=STRICT)
class RewardArgs:
    """Reward shaping and KL penalty"""

    beta: NotNegative[float] = 0.0
    """weight of the KL penalty to the starting model in the rewards; 0: no penalty, and no
    reference model in memory"""
    kl_target: NotNegative[float] = 0.0
    """target of the KL in nats, to which beta is adapted (per completion in rloo.py and ppo.py, per
    token in reinforce.py); 0: constant beta"""
    kl_horizon: Positive[int] = 10_000
    """with --kl_target: number of completions in which beta changes by a factor of at most exp(0.2)
    (arXiv:1909.08593)"""
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
