"""All training scripts, each with every part of its objective switched on: the gradient does not
depend on ranks or packing, and a resumed run equals the uninterrupted one bit for bit."""

import random
import shutil
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from pathlib import Path

import pytest
from helpers import (
    ROOT,
    assert_close_metrics,
    assert_equal_runs,
    assert_resumes_exactly,
    assert_same_weights,
    metrics,
    of_each_step,
    read_rows,
    samples,
    write,
    write_rows,
)
from in_process import talkative, words, write_teacher
from processes import run, run_and_kill
from scripts import TRAINING
from text.chats import END, HEAD, loop, said, turn

import ppo
from common.model.policy import load_scalar_model
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import export_hf

pytestmark = pytest.mark.slow

STEPS = (
    "--max_steps", 2, "--save_every", 1, "--keep_last", 2, "--lr_schedule", "constant",
    "--warmup_steps", 0,
)  # fmt: skip
ROWS = ("--batch_size", 8, "--eval_every", 2, "--eval_size", 7, "--lr", 1e-3)
SAMPLED = (
    "--engine", "transformers", "--minibatches", 2, "--max_new_tokens", 12,
    "--eval_every", 0, "--max_logprob_difference", 1e-4, "--lr", 1e-4,
    "--prompts_per_step", 8, "--samples_per_prompt", 3,
)  # fmt: skip
GROUPED = ("--share_prefix", 1)
PENALTY = ("--missing_eos_penalty", 0.1)
# Metrics that show that a part has an effect.
ACTIVE = dict(
    kto=["kl"],
    grpo=["kl", "clip_ratio/region_mean"],
    dapo=["kl", "dynamic_sampling/unequal_fraction"],
    reinforce=["kl"],
    rloo=["kl"],
    ppo=["objective/kl", "value_loss", "rewards/model/mean"],
    online_dpo=["kl"],
    bok=["kl", "kept/fraction"],
    distill=["data/reverse_kl", "data/cross_entropy", "reverse_kl"],
    self_distill=["hints/used"],
)
OTHER_PACKS = ("--pack_tokens", 60)  # of a longest sequence of 26 tokens
PACKS = dict(
    sft=("--pack_tokens", 2048, "--max_length", 2048),
    dpo=("--pack_tokens", 500, "--max_length", 250),
    kto=("--pack_tokens", 700, "--max_length", 300),
    rm=("--pack_tokens", 1000, "--max_length", 400),
    self_distill=("--pack_tokens", 160),
)


# Earlier turns of the model lose their thoughts, so that each turn is a sequence of its own.
REWRITING = loop(HEAD + "{{ m.thinking if loop.last and m.thinking }}{{ m.content }}" + END)


def conversation(rng: random.Random) -> list[dict]:
    """Return an answer, followed by further questions with their answers."""
    answers = [said(words(rng, 2), thinking=words(rng, 3)) for _ in range(rng.randint(1, 3))]
    return [*chain(*([answer, turn("user", words(rng, 2))] for answer in answers)), said("4")]


@pytest.fixture(scope="module")
def flags(small, sums, pairs, reward_file, device, tmp_path_factory) -> Callable[[str], tuple]:
    """Return the flags of a script: everything at once, because the gradient of a sum depends on
    the packing if that of one part does."""
    folder, rng, same = tmp_path_factory.mktemp("files"), random.Random(0), small[1]
    # Rows of very different lengths, so that a wrong denominator shows.
    lengths = sorted(rng.randint(1, 40) for _ in range(60))
    rows = [dict(question=words(rng, 3), answer=words(rng, n)) for n in lengths]
    dialogues = [row | dict(answer=conversation(rng)) for row in rows[:20]]
    of_domains = [
        row | dict(domain="rare" if i % 5 == 0 else "usual")
        for i, row in enumerate(read_rows(sums))
    ]
    short = write_rows(folder / "short.jsonl", rows[:20])
    long = write_rows(folder / "long.jsonl", rows[20:])
    one = write_rows(folder / "one.jsonl", rows[:1])  # fewer rows than ranks
    chats = write_rows(folder / "chats.jsonl", dialogues)
    domains = write_rows(folder / "domains.jsonl", of_domains)
    rewriting = write(folder / "rewriting.jinja", REWRITING)
    # Models. Rewards vary among the completions of an untrained one.
    other = write_teacher(folder / "other")
    brief = talkative(folder / "talkative", same)
    scorer = load_scalar_model(str(same), ppo.Args(), device)
    export_hf(scorer, load_tokenizer(str(same)), folder / "rm")
    digits, first, longer = (f"{reward_file}:{name}" for name in ("digits", "first", "longer"))

    table = dict(
        sft=(*ROWS, *GROUPED, "--loss", "dft", "--dataset", f"{short}:2", f"{long}:1",
             f"{chats}:2", "--eval_dataset", chats, long, one, "--prompt_format", "chat",
             "--chat_template", rewriting),
        dpo=(*ROWS, *GROUPED, "--dataset", pairs, "--loss", "sigmoid", "ipo", "cpo", "--sft_weight",
             0.5, "--label_smoothing", 0.1, "--beta", 0.5, "--reference_model", "tiny"),
        kto=(*ROWS, "--dataset", pairs, "--beta", 0.5, "--desirable_weight", 1.5),
        rm=(*ROWS, *GROUPED, "--dataset", pairs, "--lr", 1e-4, "--center_coefficient", 0.01),
        grpo=(*SAMPLED, *GROUPED, *PENALTY, "--reward", digits, first, "--reward_weights", 1, 0.5,
              "--advantage", "group_mean_batch_std", "--reduction", "sequence", "--beta", 0.05,
              "--entropy_coef", 0.01, "--clip_low", 0.001, "--clip_high", 0.001, "--loss", "gmpo",
              "--top_p", 0.9, "--top_k", 20),
        dapo=(*SAMPLED, *GROUPED, *PENALTY, "--reward", longer, "--overlong_buffer", 0.5,
              "--mask_truncated", "--correction", "sequence_mask", "--log_kl", "--model", brief),
        reinforce=(*SAMPLED, *GROUPED, *PENALTY, "--reward", digits, "--preset", "reinforce++",
                   "--entropy_coef", 0.01, "--correction", "sequence"),
        rloo=(*SAMPLED, *GROUPED, *PENALTY, "--reward", digits, "--beta", 0.05),
        ppo=(*SAMPLED, *GROUPED, *PENALTY, "--samples_per_prompt", 2, "--value_lr", 3e-4,
             "--value_warmup_steps", 1, "--beta", 0.05, "--max_steps", 3,
             "--reward", digits, f"model:{folder / 'rm'}", "--value_model", folder / "rm"),
        online_dpo=(*SAMPLED, *GROUPED, *PENALTY, "--reward", digits, "--epochs_per_rollout", 2,
                    "--loss", "sigmoid", "ipo", "--loss_weights", 1, 0.01, "--sft_weight", 0.1),
        bok=(*SAMPLED, *GROUPED, *PENALTY, "--reward", digits, "--keep", 2, "--beta", 0.3),
        distill=(*SAMPLED, *GROUPED, "--reward", digits, "--teacher", f"usual={other}",
                 f"rare={same}", "--teacher_column", "domain", "--dataset", domains,
                 "--on_policy_fraction", 0.5, "--sft_weight", 0.2, "--prompts_per_step", 16,
                 "--divergence", "jsd", "--epochs_per_rollout", 2, "--temperature", 0.8),
        self_distill=(*SAMPLED, "--samples_per_prompt", 4, "--hint", "sibling", "--hint_template",
                      "{hint};{prompt}", "--epochs_per_rollout", 2, "--temperature", 0.8,
                      "--lr", 1e-3, "--reward", longer, "--model", brief),
    )  # fmt: skip
    return lambda script: (*small, *STEPS, *table[script])


@pytest.fixture(scope="module")
def ranks(flags, tmp_path_factory) -> Callable[[int, str], Path]:
    @cache
    def folder_of(count: int, script: str) -> Path:
        folder = tmp_path_factory.mktemp(f"{script}_{count}")
        run(count, f"{script}.py", *flags(script), "--output_dir", folder)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def two_ranks(ranks) -> Callable[[str], Path]:
    return partial(ranks, 2)


@pytest.mark.parametrize("script", TRAINING)
def test_gradient_does_not_depend_on_ranks_or_packing_and_resume_is_exact(
    script, ranks, flags, main, tmp_path
):
    """A run on four ranks and one on one rank, with other packs and without shared prefixes, have
    the same metrics. A copy of the second then resumes before its last step."""
    whole = ("--share_prefix", 0) if "--share_prefix" in flags(script) else ()
    own = (*flags(script), *PACKS.get(script, OTHER_PACKS), *whole)
    main(script, *own, "--output_dir", tmp_path / "one")
    one = tmp_path / "one"
    assert_equal_runs(ranks(4, script), one)
    for name in ACTIVE.get(script, ()):
        assert any(line.get(name) for line in metrics(one)), name
    if script in ("reinforce", "rloo", "bok"):
        assert abs(metrics(one)[0]["kl"]) < 1e-6, "the policy starts at the reference"
    if script == "grpo":  # every sampled token, though top_p leaves some out
        gaps = [line["sampling/sampling_logp_difference/max"] for line in metrics(one)]
        assert max(gaps) < 1e-4
    if script == "ppo":
        assert "grad_norm" not in metrics(one)[0], "the value model warms up"
    assert_resumes_exactly(main, script, *own, folder=one, finished=metrics(one)[-1]["step"])


HYBRID, CONTEXT = ("--shard_ranks", 2), ("--context_ranks", 2)


@pytest.mark.parametrize(
    ("script", "layout"),
    [
        ("sft", CONTEXT),
        ("dpo", HYBRID),
        ("grpo", (*HYBRID, *CONTEXT)),
        ("distill", HYBRID),
        ("ppo", ("--rollout_ranks", 3, "--max_staleness", 0)),
    ],
)
def test_layouts_of_four_ranks_are_equal(script, layout, ranks, flags, tmp_path):
    """Two copies of the model, context groups of two ranks, and three ranks that only sample."""
    run(4, f"{script}.py", *flags(script), *layout, "--output_dir", tmp_path)
    of_rollout_ranks = ("sampling/staleness", "sampling/version_spread")
    assert_equal_runs(ranks(4, script), tmp_path, of_rollout_ranks)


# ---- kill -9 ----


@pytest.fixture(scope="module")
def killed(flags, tmp_path_factory) -> Callable[[str], Path]:
    """Return the folder of a run on two ranks that was killed: sft.py in its second step, grpo.py
    while it saved the checkpoint of that step."""

    @cache
    def folder_of(script: str) -> Path:
        folder = tmp_path_factory.mktemp(f"{script}_killed")
        at, after = dict(sft=("torch.optim.AdamW.step", 1), grpo=("os.rename", 2))[script]
        own = (*flags(script), "--output_dir", folder)
        run_and_kill(2, f"{script}.py", *own, folder=folder, after_step=after, at=at)
        assert not (folder / "hf").exists(), "killed too late"
        return folder

    return folder_of


@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_killed_run_resumes_bitwise(script, two_ranks, killed, flags, tmp_path):
    shutil.copytree(killed(script), tmp_path, dirs_exist_ok=True)
    done = run(2, f"{script}.py", *flags(script), "--output_dir", tmp_path)
    assert "resuming from" in done.stdout
    assert_same_weights(two_ranks(script), tmp_path)
    assert of_each_step(two_ranks(script)) == of_each_step(tmp_path)
    if script == "grpo":
        assert samples(two_ranks(script)) == samples(tmp_path)


@pytest.mark.parametrize("script", ["sft", "grpo"])
def test_killed_run_resumes_on_another_number_of_ranks(
    script, two_ranks, killed, flags, main, tmp_path, capsys
):
    """It goes on with the same data in the same order."""
    shutil.copytree(killed(script), tmp_path, dirs_exist_ok=True)
    main(script, *flags(script), "--output_dir", tmp_path)
    assert "resuming from" in capsys.readouterr().out
    assert_close_metrics(two_ranks(script), tmp_path, ("epoch", "num_tokens"), rel=0)
    assert_close_metrics(two_ranks(script), tmp_path, ("loss",), rel=1e-4, floor=0.1)


# ---- damage, and several machines ----


def test_two_ranks_set_a_damaged_checkpoint_aside(two_ranks, flags, tmp_path):
    """Whichever rank finds the damaged file, both resume from the checkpoint before it."""
    folder = shutil.copytree(two_ranks("sft"), tmp_path / "run")
    shutil.rmtree(folder / "hf")
    for shard in (folder / "checkpoints" / "step_000002").glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-1])
    done = run(2, "sft.py", *flags("sft"), "--output_dir", folder)
    assert done.stdout.count("step_000002 is damaged (") == 1
    assert "is missing or not as it was written" in done.stdout
    assert "step_000001 (step 1)" in done.stdout
    assert_same_weights(two_ranks("sft"), folder)


def test_two_nodes_give_the_weights_of_one_node(two_ranks, flags, tmp_path):
    """Each rank is told that its machine has no other. tests/parallel/test_nodes.py has two
    torchruns."""
    node = (
        "import os, runpy\nos.environ |= dict(LOCAL_RANK='0', LOCAL_WORLD_SIZE='1')\n"
        "runpy.run_path('sft.py', run_name='__main__')\n"
    )
    one_copy = ("--shard_ranks", 2, "--output_dir", tmp_path)  # the same order of sums
    run(2, node, *flags("sft"), *one_copy)
    assert_same_weights(two_ranks("sft"), tmp_path)
    assert of_each_step(two_ranks("sft")) == of_each_step(tmp_path)


# ---- negative control ----


def test_denominator_per_rank_is_detected(two_ranks, flags, tmp_path):
    """A control: a copy of the script that divides by the tokens of its rank alone must fail."""
    source = (ROOT / "sft.py").read_text()
    count = "distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in micro_batches))"
    assert source.count(count) == 1
    of_rank = "sum(mb.loss_mask_T.sum() for mb in micro_batches) * world_size"
    run(2, source.replace(count, of_rank), *flags("sft"), "--output_dir", tmp_path / "out")
    with pytest.raises(AssertionError, match="grad_norm"):
        assert_close_metrics(two_ranks("sft"), tmp_path / "out", ("grad_norm",), rel=1e-5)
