"""Results on held-out rows as text."""

import pytest

from common.evaluate.held_out import signs_of_unlearning, wilson_interval


def test_wilson_interval_equals_published_tables():
    """Newcombe 1998 (doi:10.1002/(SICI)1097-0258(19980430)17:8<857::AID-SIM777>3.0.CO;2-E), Table
    I."""
    for hits, count, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
    ):
        assert wilson_interval(hits / count, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("before", "after", "answered", "warns"),
    [(0.5, 0.42, 64, False), (0.5, 0.42, 256, True), (0.375, 0.25, 16, False)],
)
def test_fall_of_solved_prompts_is_compared_with_the_prompts_that_were_answered(
    before, after, answered, warns
):
    said = signs_of_unlearning(0.1, {"eval/solved": before}, {"eval/solved": after}, answered)
    assert said.startswith("eval/solved fell") == warns


@pytest.mark.parametrize(
    ("solved", "reward", "logp", "referenced", "said"),
    [
        (0.41, 0.1, -2.0, True, ""),
        (0.36, -0.05, -3.0, True, ""),  # within two standard errors, half a nat
        (0.30, 0.1, -3.0, True, "eval/solved fell from 0.41 to 0.3"),
        (0.41, -0.2, -3.0, True, "the log-prob of chosen completions fell from -1 to -3"),
        (0.41, -0.2, -300.0, True, ""),  # of a long completion
        (0.41, -0.2, -3.0, False, ""),
    ],
)
def test_falls_of_good_answers_are_reported(solved, reward, logp, referenced, said):
    metrics = {"eval/solved": solved, "eval_rewards/chosen": reward, "eval_logps/chosen": logp}
    assert signs_of_unlearning(0.1, {"eval/solved": 0.41}, metrics, 256, referenced) == said
    without = {name: value for name, value in metrics.items() if name != "eval/solved"}
    assert "solved" not in signs_of_unlearning(0.1, {}, without, 256, referenced)
