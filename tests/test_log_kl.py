"""--log_kl logs the KL to the starting model where no penalty does, and changes no weight."""

import pytest
from helpers import assert_same_weights, metrics

from extras.trace.tests.test_trace import SCRIPTS, flags

NAMES = dict(ppo="objective/kl")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo", "dapo", "reinforce", "rloo", "ppo", "bok"])
def test_kl_is_logged_without_a_penalty_and_changes_no_weight(main, script, small, tmp_path):
    without_kl = flags(small, script, tmp_path / "without", "--lr", 3e-3, "--warmup_steps", 0)
    if "--beta" in SCRIPTS[script] or script in ("reinforce", "rloo", "ppo"):
        without_kl += ("--beta", 0)
    main(script, *without_kl)
    main(script, *without_kl, "--log_kl", "--output_dir", tmp_path / "with")
    assert_same_weights(tmp_path / "with", tmp_path / "without")
    name = NAMES.get(script, "kl")
    seen, unseen = (
        [row.get(name) for row in metrics(tmp_path / run) if row["step"]]
        for run in ("with", "without")
    )
    assert unseen == [None, None] and seen[0] is not None and seen[1] > 0.01
