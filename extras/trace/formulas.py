"""The loss of a token or row as formulas: pairs of a name and an expression, selected by script and
flags.

extras/trace/view.py shows an expression, evaluates it in the browser, and shows it again with numbers in
place of names. An expression may use numeric flags, earlier names and values of the trace
(docs/trace.md): streams of the token, sums `sum_<stream>` over the trained tokens of the
completion, their number `length`, values of the row, `advantage`, and `tokens` and `sequences` of
the update. Other characters in names of the trace become `_`."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress

Formulas = list[tuple[str, str]]

SQUARE = "({0}) * ({0})"
CLIP = "min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)"
RATIO = [("A", "advantage"), ("log_rho", "logprobs - old_logprobs"), ("rho", "exp(log_rho)")]
WEIGHT = {
    "token": "1 / tokens",
    "sequence": "1 / length / sequences",
    "sequence_sum": "1 / sequences",
    "constant": "1 / sequences / max_new_tokens",
}


def formulas(script: str, flags: Mapping) -> dict[str, Formulas]:
    """Return the formulas of a share of the loss, of which `share` is the last, by script. A copy
    with a name of its own gets those of every script whose flags it has: the page takes those that
    give the recorded shares."""
    found = {}
    for name in [script] if script in SCRIPTS else SCRIPTS:
        with suppress(
            KeyError, TypeError, ValueError
        ):  # `flags` lack one, or have one of another type
            found[name] = SCRIPTS[name](flags)
    return {
        name: of if of[-1][0] == "share" else [*of, ("share", "loss * w")]
        for name, of in found.items()
    }


FUNCTIONS = dict(
    exp=lambda x: math.exp(min(x, 60)), expm1=lambda x: math.expm1(min(x, 60)), log=math.log,
    min=min, max=max, clip=lambda x, low, high: min(max(x, low), high),
    where=lambda condition, a, b: a if condition else b, sigmoid=lambda x: 1 / (1 + math.exp(-x)),
    logsigmoid=lambda x: -math.log1p(math.exp(-abs(x))) + min(x, 0.0),
)  # fmt: skip


def evaluate(lines: Formulas, names: Mapping) -> dict:
    """Return `names` with the values of formulas, NaN where one is not defined. Raises `NameError`
    or `TypeError` if a name is absent or None, `SyntaxError` if it is a word of Python."""
    values = dict(names)
    for name, text in lines:
        try:
            values[name] = eval(text, dict(FUNCTIONS, __builtins__={}), values)
        except (ArithmeticError, ValueError):
            values[name] = math.nan
    return values


# ---- parts ----


def policy_loss(f: Mapping) -> Formulas:
    match f["loss"]:
        case "clip" | "gspo" | "sequence_clip" if f.get("dual_clip"):
            bounded = "-where(A < 0, max(surrogate, dual_clip * A), surrogate)"
            return [("surrogate", CLIP), ("policy_loss", bounded)]
        case "clip" | "gspo" | "sequence_clip":
            return [("policy_loss", f"-{CLIP}")]
        case "reinforce":
            return [("policy_loss", "-A * logprobs")]
        case "cispo" if f.get("cispo_mask"):
            low, high = f["cispo_mask"]
            above = f"where(A > 0, where(rho > 1 + {high}, 0, 1), 1)"
            below = f"where(A < 0, where(rho < 1 - {low}, 0, 1), 1)"
            weight = ("weight", f"min(rho, 1 + cispo_high) * {above} * {below}")
            return [weight, ("policy_loss", "weight * (-A * logprobs)")]
        case "cispo":
            return [("policy_loss", "min(rho, 1 + cispo_high) * (-A * logprobs)")]
        case "dppo":
            kl = "(1 - old) * log((1 - old) / (1 - pi)) - old * log_rho"
            far = "max(pi - old, old - pi)" if f["dppo_divergence"] == "tv" else kl
            moved = "where(log_rho * A > 0, where(distance > dppo_bound, 0, 1), 1)"
            return [
                ("pi", "exp(logprobs)"), ("old", "exp(logprobs - log_rho)"), ("distance", far),
                ("weight", f"min(rho, 10) * {moved}"), ("policy_loss", "weight * (-A * logprobs)"),
            ]  # fmt: skip
        case "sapo":
            tau = "where(A > 0, sapo_tau_positive, sapo_tau_negative)"
            return [("tau", tau), ("policy_loss", "-4 / tau * sigmoid(tau * (rho - 1)) * A")]
        case "gmpo":
            return [("policy_loss", "-rho * A")]
        case "topr":
            return [("policy_loss", "where(A < 0, min(rho, 1), 1) * (-A * logprobs)")]
        case "vespo":
            by_sign = [
                (name, f"where(A < 0, vespo_{name}_negative, vespo_{name}_positive)")
                for name in ("k", "lambda")
            ]
            phi = ("phi", "exp(k * log_rho + lambda * (1 - rho))")
            return [*by_sign, phi, ("policy_loss", "phi * (-A * logprobs)")]
    return []


def importance(f: Mapping) -> Formulas:
    """Return the formulas of c, the bounded importance weight pi_old / pi_engine; its recorded
    value with --correction_reject or --correction_normalize."""
    if f.get("correction_reject") or f.get("correction_normalize"):
        return [("c", "sampling_weight")]
    total = "sum_old_logprobs - sum_rollout_logprobs"
    log_ratio = total if f["correction"] == "sequence" else "old_logprobs - rollout_logprobs"
    found = [("unbounded", f"exp({log_ratio})")]
    bounded = "clip(unbounded, correction_low, correction_high)"
    if f["correction_mode"] == "mask":
        bounded = (
            "where(unbounded < correction_low, 0, where(unbounded > correction_high, 0, unbounded))"
        )
    if f["correction"] == "none":
        found, bounded = [], "1"
    if f["correction_filter"] is None:
        return [*found, ("c", bounded)]
    low, high = f["correction_filter"]
    found.append(("mean_ratio", f"exp(({total}) / length)"))
    kept = f"where(mean_ratio < {low}, 0, where(mean_ratio > {high}, 0, 1))"
    return [*found, ("kept", kept), ("c", f"{bounded} * kept")]


def kl(f: Mapping) -> Formulas:
    estimate = dict(k1="d", k2="d * d / 2", k3="expm1(-d) + d")[f["kl_estimator"]]
    if f["kl_clamp"]:
        estimate = f"clip({estimate}, -kl_clamp, kl_clamp)"
    if f.get("unbiased_kl"):
        estimate = f"rho * ({estimate})"
    return [("d", "logprobs - ref_logprobs"), ("KL", estimate)]


def entropy_bonus(f: Mapping) -> str:
    """Return the term of the bonus. A trace lacks a coefficient that changes: `KeyError`."""
    if f.get("entropy_target"):
        raise KeyError("entropy_coef")
    return " - entropy_coef * entropy" if f["entropy_coef"] else ""


# ---- scripts with a loss of each token ----


def grpo(f: Mapping) -> Formulas:
    old = "rollout_logprobs" if f["old_logprobs"] == "engine" else "old_logprobs"
    ratio = [RATIO[0], ("log_rho", f"logprobs - {old}"), RATIO[2]]
    near, loss = [], "policy_loss * c"
    if f["off_policy_threshold"] is not None:
        gap = ("gap", "(sum_rollout_logprobs - sum_logprobs) / length")
        near = [gap, ("near", "where(A < 0, where(gap > off_policy_threshold, 0, 1), 1)")]
        loss += " * near"
    loss += " + beta * KL" if f["beta"] else ""
    loss += " + old_beta * log_rho * log_rho / 2" if f["old_beta"] else ""
    loss += entropy_bonus(f)
    parts = [*ratio, *policy_loss(f), *importance(f), *near, *(kl(f) if f["beta"] else [])]
    return [*parts, ("loss", loss), ("w", WEIGHT[f["reduction"]])]


def gspo(f: Mapping) -> Formulas:
    total = "sum_logprobs - sum_old_logprobs"
    log_rho = f"({total}) / length" if f["loss"] == "gspo" else total
    ratio = [RATIO[0], ("log_rho", log_rho), RATIO[2]]
    if f["loss"] == "gmpo":  # clips every token before the sum, so that its ratio is recorded
        ratio = [RATIO[0], ("rho", "ratio")]
    loss = f"policy_loss * c{' + beta * KL' if f['beta'] else ''}{entropy_bonus(f)}"
    parts = [*ratio, *policy_loss(f), *importance(f), *(kl(f) if f["beta"] else [])]
    return [*parts, ("loss", loss), ("w", WEIGHT[f["reduction"]])]


def dapo(f: Mapping) -> Formulas:
    chosen = [("chosen", "where(recorded * recorded > 0, 1, 0)")] if f["top_entropy"] < 1 else []
    loss = "policy_loss * c * chosen" if chosen else "policy_loss * c"
    return [
        *RATIO,
        ("policy_loss", f"-{CLIP}"),
        *importance(f),
        *chosen,
        ("loss", loss),
        ("w", "1 / tokens"),
    ]


def reinforce(f: Mapping) -> Formulas:
    in_loss = f["kl_in"] == "loss" and f["beta"]
    loss = f"policy_loss * c{' + beta * KL' if in_loss else ''}{entropy_bonus(f)}"
    parts = [
        ("A", "advantages"),
        *RATIO[1:],
        *policy_loss(f),
        *importance(f),
        *(kl(f) if in_loss else []),
    ]
    return [*parts, ("loss", loss), ("w", WEIGHT[f["reduction"]])]


def ppo(f: Mapping) -> Formulas:
    loss = f"policy_loss * importance{entropy_bonus(f)}"
    found = [
        ("A", "advantages"),
        *RATIO[1:],
        ("policy_loss", f"-{CLIP}"),
        ("loss", loss),
        ("w", "1 / tokens"),
    ]
    if f["positive_nll"]:
        found.append(("share", "loss * w - where(A > 0, positive_nll * logprobs / positives, 0)"))
    error = SQUARE.format("value - returns")
    if f["value_clip"]:
        error = (
            f"max({error}, "
            f"{SQUARE.format('clip(value, values - value_clip, values + value_clip) - returns')})"
        )
    return [("value_loss", f"{error} / 2"), *found]


def distill(f: Mapping) -> Formulas:
    if f["estimator"] == "full":
        return [("loss", "divergence"), ("w", "1 / tokens")]
    A = ("A", "teacher_coef * (teacher_logprobs - old_logprobs) + advantage")
    return [A, *RATIO[1:], ("policy_loss", f"-{CLIP}"), *importance(f), ("loss", "policy_loss * c"),
            ("w", "1 / tokens")]  # fmt: skip


def likelihood(f: Mapping) -> Formulas:
    return [
        ("loss", "exp(logprobs) * -logprobs" if f.get("loss") == "dft" else "-logprobs"),
        ("w", "1 / tokens"),
    ]


# ---- scripts with a loss of each completion or pair ----


def rloo(f: Mapping) -> Formulas:
    if f.get("correction_reject") or f.get("correction_normalize"):
        raise ValueError("the weights of completions are not recorded")
    log_rho = ("log_rho", "sum_logprobs - sum_old_logprobs")
    parts = [RATIO[0], log_rho, RATIO[2], ("policy_loss", f"-{CLIP}"), *importance(f)]
    return [*parts, ("loss", "policy_loss * c"), ("w", "1 / sequences")]


def kto(f: Mapping) -> Formulas:
    kl = "0" if f.get("loss") == "apo_zero_unpaired" else "kl"
    above = f"where(log_ratio > {kl}, 1, -1)"  # which is right, and whether it is right
    return [
        ("desirable", f"where(rewards_accuracies > 0, {above}, -{above})"),
        ("margin", f"beta * (log_ratio - {kl})"),
        ("weight", "where(desirable > 0, desirable_weight, undesirable_weight)"),
        ("loss", f"weight * sigmoid(-desirable * margin){' * wpo_weight' if f['wpo'] else ''}"),
        ("w", "1 / batch_size"),
    ]


def reward_model(f: Mapping) -> Formulas:
    total = "(rewards_chosen + rewards_rejected)"
    preference = "-logsigmoid(rewards_chosen - rewards_rejected - margin)"
    return [
        ("margin", "0"),
        ("loss", f"{preference} + center_coefficient * {total} * {total}"),
        ("w", "1 / batch_size"),
    ]


# Objectives of pairs in the notation of common/objectives/preference.py.
LOG_ODDS = [f"(mean_{side} - log(-expm1(mean_{side})))" for side in ("pc", "pr")]
PAIRS: dict[str, str] = {
    "sigmoid": "-(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)",
    "robust": "(-(1 - label_smoothing) * logsigmoid(z) + label_smoothing * logsigmoid(-z)) / "
    "(1 - 2 * "
    "label_smoothing)",
    "hinge": "max(1 - z, 0)",
    "ipo": SQUARE.format("lc / nc - lr / nr - 1 / (2 * beta)"),
    "ipo, summed": SQUARE.format("lc - lr - 1 / (2 * beta)"),
    "sigmoid_norm": "-logsigmoid(beta * (lc / nc - lr / nr))",
    "exo_pair": "sigmoid(z) * (logsigmoid(z) - log(1 - label_smoothing)) + sigmoid(-z) * "
    "(logsigmoid(-z) - "
    "log(label_smoothing))",
    "nca_pair": "-logsigmoid(beta * lc) - logsigmoid(-beta * lc) / 2 - logsigmoid(-beta * lr) / 2",
    "bco_pair": "-logsigmoid(beta * lc) - logsigmoid(-beta * lr)",
    "sppo_hard": SQUARE.format("lc - 1 / (2 * beta)")
    + " + "
    + SQUARE.format("lr + 1 / (2 * beta)"),
    "apo_zero": "sigmoid(-beta * lc) + sigmoid(beta * lr)",
    "apo_down": "sigmoid(beta * lc) + sigmoid(-beta * (lc - lr))",
    "discopop": "-sigmoid(-z / discopop_tau) * logsigmoid(z) + exp(logsigmoid(z / "
    "discopop_tau) - z)",
    "simpo": "-logsigmoid(beta * (mean_pc - mean_pr) - simpo_gamma)",
    "alphapo": "-logsigmoid(beta * (-expm1(-alphapo_alpha * mean_pc) + "
    "expm1(-alphapo_alpha * mean_pr)) / alphapo_alpha - simpo_gamma)",
    "orpo": f"-mean_pc - beta * logsigmoid({LOG_ODDS[0]} - {LOG_ODDS[1]})",
    "cpo": "-logsigmoid(beta * (logps_chosen - logps_rejected)) - mean_pc",
}
GENERATOR = dict(js="log(2) + logsigmoid({0})", forward_kl="-expm1(-{0})",
                 alpha="expm1((f_alpha - 1) * {0}) / (f_alpha - 1)")  # fmt: skip


def preference(f: Mapping, weight: str) -> Formulas:
    """Return the formulas of a pair. Log-ratios come from the logged rewards, which the first
    objective defines."""
    first = f["loss"][0]
    per_token = first in ("simpo", "alphapo", "orpo", "sigmoid_norm") or (
        first == "ipo" and f["length_normalize"]
    )
    found = [("mean_pc", "logps_chosen / nc"), ("mean_pr", "logps_rejected / nr")]
    if first not in ("simpo", "alphapo", "orpo", "cpo"):
        ends = [(" * nc" if per_token else ""), (" * nr" if per_token else "")]
        form = (
            "{0}"
            if f["f_divergence"] == "alpha" and f["f_alpha"] == 1
            else GENERATOR.get(f["f_divergence"], "{0}")
        )
        found = [
            ("lc", f"rewards_chosen / beta{ends[0]}"),
            ("lr", f"rewards_rejected / beta{ends[1]}"),
            *found,
        ]
        z = "beta * (lc - lr)"
        if form != "{0}":
            z = f"beta * (({form.format('lc')}) - ({form.format('lr')}))"
        found.append(("z", z))
    names = [
        f"{name}, summed" if name == "ipo" and not f["length_normalize"] else name
        for name in f["loss"]
    ]
    parts = [(f"loss_{name.split(',')[0]}", PAIRS.get(name, "all_pairs")) for name in names]
    weights = f["loss_weights"] or [1] * len(parts)
    loss = " + ".join(
        name if w == 1 else f"{w} * {name}" for w, (name, _) in zip(weights, parts, strict=True)
    )
    if f.get("wpo"):
        loss = f"wpo_weight * ({loss})"
    if f["sft_weight"]:
        loss += f" + sft_weight * (-{'mean_pc' if f['sft_length_normalize'] else 'logps_chosen'})"
    return [*found, *parts, ("loss", loss), ("w", weight)]


SCRIPTS: dict[str, Callable[[Mapping], Formulas]] = dict(
    grpo=grpo, gspo=gspo, dapo=dapo, reinforce=reinforce, ppo=ppo, distill=distill, sft=likelihood,
    bok=likelihood, rloo=rloo, kto=kto, rm=reward_model,
    dpo=lambda f: preference(f, "1 / batch_size"),
    online_dpo=lambda f: preference(f, "2 / sequences"),
)  # fmt: skip
