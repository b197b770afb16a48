"""--log_kl logs the KL to the starting model where no penalty does, and changes no weight."""

import pytest
from helpers import assert_same_weights, metrics
from in_process import REWARD

NAMES = dict(ppo="objective/kl")
FLAGS = (
    "--engine", "transformers", "--prompts_per_step", 8, "--samples_per_prompt", 4,
    "--max_new_tokens", 12, "--minibatches", 2, "--max_steps", 2, "--eval_every", 0, "--lr", 3e-3,
    "--warmup_steps", 0,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo", "dapo", "reinforce", "rloo", "ppo", "bok"])
def test_kl_is_logged_without_a_penalty_and_changes_no_weight(main, script, small, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    flags = (*small, *FLAGS, "--reward", f"{tmp_path / 'reward.py'}:digits")
    if script in ("reinforce", "rloo", "ppo"):
        flags += ("--beta", 0)
    main(script, *flags, "--output_dir", tmp_path / "without")
    main(script, *flags, "--log_kl", "--output_dir", tmp_path / "with")
    assert_same_weights(tmp_path / "with", tmp_path / "without")
    name = NAMES.get(script, "kl")
    seen, unseen = (
        [row.get(name) for row in metrics(tmp_path / run) if row["step"]]
        for run in ("with", "without")
    )
    assert unseen == [None, None] and seen[0] is not None and seen[1] > 0.01
