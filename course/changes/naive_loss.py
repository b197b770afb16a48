"""Naive code for a loss of mine.py, here that of new-loss.patch, with plain numbers.

python course/changes/naive_loss.py
"""

import importlib
import math
import sys

sys.path.insert(0, "tests")
sys.path.insert(0, ".")

from hypothesis import given, settings
from naive import check, rows
from test_grpo_objective import tokens

LOSSES = importlib.import_module("mine").LOSSES
LOSS = "spo"


def naive(new: float, old: float, a: float) -> tuple[float, float]:
    """Return the loss of a token with log-probs `new` and `old`, and its derivative by `new`."""
    rho = math.exp(new - old)
    value = -rho * a + abs(a) / 0.4 * (rho - 1) ** 2
    return value, rho * (-a + abs(a) / 0.2 * (rho - 1))


@settings(deadline=None)
@given(rows)
def test_loss_equals_naive_code(tokens_of_a_batch) -> None:
    loss = LOSSES[LOSS]
    check(lambda new, old, a: loss(tokens(new, old, a)).loss_T, naive, tokens_of_a_batch)


if __name__ == "__main__":
    if LOSS not in LOSSES:
        raise SystemExit(f"mine.LOSSES has no {LOSS!r}: {', '.join(LOSSES)}")
    test_loss_equals_naive_code()
    print(f"{LOSS}: values and derivatives equal those of naive code")
