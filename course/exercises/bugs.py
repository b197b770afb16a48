"""Table of the broken scripts: a copy of a script with one bug, for the reader to find
(course/exercises/README.md).

This file names the bugs. Read it afterwards.
"""

from typing import NamedTuple


class Bug(NamedTuple):
    name: str
    script: str
    before: str
    after: str
    tests: dict[str, str]  # as in holes.py; the first one fails with the bug


BUGS = [
    Bug(
        "bug_1",
        "bok.py",
        "order_PG.argsort(dim=-1) < keep",
        "order_PG < keep",
        {
            "tests/test_bok.py::test_best_completions_are_kept_by_reward_then_order": (
                "look at what it trains on"
            ),
        },
    ),
    Bug(
        "bug_2",
        "dpo.py",
        "x_N[0::2], x_N[1::2]",
        "x_N.chunk(2)",
        {
            "test_chosen_and_rejected_are_neighbours_in_a_pack": "look at what the loss compares",
        },
    ),
    Bug(
        "bug_3",
        "grpo.py",
        "PolicyInputs(logprobs_T, old_logprobs_T, advantages_T",
        "PolicyInputs(logprobs_T, logprobs_T.detach(), advantages_T",
        {
            "tests/test_grpo_objective.py::test_objective_equals_naive_code": "look at the ratio",
        },
    ),
    Bug(
        "bug_4",
        "rloo.py",
        "loss_N / num_sequences",
        "loss_N / len(loss_N)",
        {"tests/test_rloo.py::test_loss_and_gradient_equal_naive_code": "look at the denominator"},
    ),
]
