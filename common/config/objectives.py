"""Groups of flags for objectives: importance weights, policy losses and KL, losses on pairs,
divergences from a teacher."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, BelowOne, Needs, NotNegative, Positive, Several
from common.objectives.divergence import DIVERGENCES
from common.objectives.importance import Correction
from common.objectives.policy import BY_TOKEN
from common.objectives.preference import READS, FDivergence


@dataclass(config=STRICT)
class CorrectionArgs:
    """Importance weights for samples of the engine"""

    one_weight_per_completion = False  # no flag: whether a completion always has one weight
    correction: Literal["none", "token", "sequence"] | None = None
    """importance weights: trainer probability / engine probability of the sampled tokens. token:
    one weight per token; sequence: one per completion; none: off; default: token, or sequence if
    the loss has one ratio per completion"""
    correction_high: Annotated[Positive[float], Needs(correction=("token", "sequence", None))] = 2.0
    """upper bound of the importance weights"""

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        if self.correction == "token" and self.one_weight_per_completion:
            raise ValueError("--correction token: a completion has one weight; use sequence")
        return self

    @property
    def correction_form(self) -> Correction:
        """Form of the importance weights."""
        default = "sequence" if self.one_weight_per_completion else "token"
        return Correction(self.correction or default, self.correction_high)


@dataclass(config=STRICT)
class PolicyLossArgs:
    """Policy loss"""

    loss: Literal[tuple(BY_TOKEN)] = "clip"
    """policy loss of a token with advantage A (docs/losses.md). clip: PPO; dppo: bounded
    divergence; cispo: clips the weight of the gradient; sapo: soft clip; reinforce: -A log pi"""
    clip_low: Annotated[BelowOne, Needs(loss="clip")] = 0.2
    """distance from 1 of the lower bound of the importance ratio"""
    clip_high: Annotated[NotNegative[float], Needs(loss="clip")] = 0.2
    """distance from 1 of the upper bound of the importance ratio"""


KL = Needs(beta=True, log_kl=True)


@dataclass(config=STRICT)
class KLEstimateArgs:
    """KL per token"""

    kl_estimator: Annotated[Literal["k1", "k2", "k3"], KL] = "k1"
    """estimator of the KL per token, with d = log(policy / reference). k1: d; k2: d^2 / 2; k3:
    exp(-d) - 1 + d"""


@dataclass(config=STRICT)
class LogKLArgs:
    """KL to the starting model"""

    log_kl: bool = False
    """log the KL to the starting model also with beta 0, at the cost of its memory and of one
    forward pass a step"""


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
    exponential. Without a reference: simpo: margin per token; alphapo: simpo with a bent reward;
    orpo: odds ratio; cpo: DPO and likelihood"""
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
