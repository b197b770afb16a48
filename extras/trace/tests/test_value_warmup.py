"""Updates of a value model are told apart while the policy waits for it."""

import pytest

from extras.trace.tests.test_trace import flags, traces


@pytest.mark.slow
def test_updates_of_the_value_model_are_counted_before_the_policy_learns(main, small, tmp_path):
    more = ("--epochs_per_rollout", 1, "--value_warmup_steps", 1)
    main("ppo", *flags(small, "ppo", tmp_path / "run", *more))
    for step in (1, 2):
        assert len(traces(tmp_path / "run")[step][0]["loss"]) == 2  # --minibatches 2
