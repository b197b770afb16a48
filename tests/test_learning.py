"""Models learn, each starting from the untrained one: grpo.py in `make test`, other scripts in
`make curves`. docs/log.md has longer runs."""

import pytest
from helpers import metrics, write_rows
from in_process import talkative, write_teacher

from common.text.tasks import arithmetic_rows

curve = pytest.mark.curve
# Flags, and the reward of the last step, at least: one of digits in a completion, of at most 0.8.
DIGITS = dict(
    grpo=("--max_steps 12", 0.5),
    dapo=("--max_steps 16 --overlong_buffer 0", 0.5),
    reinforce=("--preset reinforce++_baseline --max_steps 12", 0.5),
    rloo=("--max_steps 13 --beta 0.01", 0.6),
    ppo=("--max_steps 14 --gae_lambda 1 --value_lr 5e-3 --value_warmup_steps 0 --beta 0.01"
         " --minibatches 2", 0.4),
    online_dpo=("--max_steps 11 --prompts_per_step 32 --samples_per_prompt 4", 0.3),
)  # fmt: skip


@pytest.mark.parametrize(
    "script", [s if s == "grpo" else pytest.param(s, marks=curve) for s in DIGITS]
)
def test_policy_learns_to_write_digits(script, online, small, main, tmp_path):
    extra, least = DIGITS[script]
    model = talkative(tmp_path / "model", small[1]) if script in ("dapo", "reinforce") else small[1]
    flags = "--prompts_per_step 16 --samples_per_prompt 8 --minibatches 1 --max_new_tokens 4"
    flags = (*online, *flags.split(), "--lr", 5e-3, "--model", model, *extra.split())
    main(script, *flags, "--output_dir", tmp_path / "run")
    rewards = [line["reward"] for line in metrics(tmp_path / "run")]
    assert rewards[0] < 0.2 and rewards[-1] > least, rewards


# Rows, flags, and the least accuracy on held-out pairs; of kto, the difference of its rewards.
PREFERENCES = dict(
    dpo=(3840, "--max_steps 60 --lr 3e-3 --beta 1 --sft_weight 1", 0.7),
    kto=(2240, "--max_steps 40 --lr 5e-4 --beta 1 --eval_size 64", 0.2),
    rm=(5120, "--max_steps 80 --lr 3e-3 --eval_size 200", 0.7),
)


@curve
@pytest.mark.parametrize("script", PREFERENCES)
def test_model_learns_arithmetic_preferences(script, small, main, tmp_path):
    count, flags, least = PREFERENCES[script]
    file = tmp_path / "train.jsonl"
    write_rows(file, arithmetic_rows("train")[:count])
    flags = (*flags.split(), "--batch_size", 64, "--warmup_steps", 10, "--eval_every", 80)
    sets = ("--dataset", file, "--eval_dataset", "arithmetic", f"known={file}")
    main(script, *small[:2], *flags, *sets, "--output_dir", tmp_path)
    last = metrics(tmp_path)[-1]
    if script == "kto":
        assert last["eval_rewards/chosen"] - last["eval_rewards/rejected"] > least, last
    else:
        for name in ("arithmetic", "known"):
            assert last[f"eval_rewards/accuracies/{name}"] > least, last


@curve
@pytest.mark.parametrize(
    ("changed", "where"),
    [("reverse_kl", ""), ("forward_kl --on_policy_fraction 0 --reward", "data/")],
)
def test_student_approaches_the_teacher(main, online, changed, where, tmp_path):
    flags = "--max_steps 10 --max_new_tokens 6 --minibatches 1 --on_policy_fraction 0.5"
    teacher = ("--teacher", write_teacher(tmp_path / "teacher"), "--temperature", 0.8)
    flags = (*online, *flags.split(), *teacher, "--lr", 3e-3, "--divergence", *changed.split())
    main("distill", *flags, "--output_dir", tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert lines[-1][f"{where}reverse_kl"] < 0.8 * lines[0][f"{where}reverse_kl"]
    assert ("reverse_kl" in lines[0]) == ("completions/mean_length" in lines[0]) == (where == "")
