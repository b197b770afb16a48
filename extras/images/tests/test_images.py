"""Sampling with images: engine and trainer agree while the tower is trained, on any ranks."""

import json
import re

import pytest
from helpers import assert_close_metrics, metrics, samples, stored, weights, write_rows
from processes import run

from extras.images.reader import Reader
from extras.images.tests.checkpoints import picture

SAME = ("grad_norm", "entropy", "reward", "completions/mean_length")
GAP = "sampling/sampling_logp_difference/max"


@pytest.fixture(scope="module")
def flags(pictures, reward_file):
    """Flags of a run whose prompts have no, one and two images."""
    rows = [json.loads(line) for line in pictures.read_text().splitlines()]
    prompts = pictures.with_name("prompts.jsonl")
    lines = [dict(prompt=row["prompt"], images=row.get("images", []), answer="abcdef")
             for row in rows]  # fmt: skip
    write_rows(prompts, lines)
    return (
        "--dataset", prompts, "--reward", f"{reward_file}:digits", "--missing_eos_penalty", 1,
        "--vision", "train",
        "--prompts_per_step", 6, "--samples_per_prompt", 4, "--max_new_tokens", 12,
        "--max_steps", 2, "--lr", 1e-2, "--eval_every", 0,
        "--advantage", "group_mean", "--trace_every", 0,
    )  # fmt: skip


def require_agreement(folder, base):
    """Check the gap of engine and trainer in each step, and that the tower was trained."""
    steps = metrics(folder)
    assert len(steps) == 2 and all(line[GAP] < 1e-4 and line["grad_norm"] > 0 for line in steps)
    files = stored(base)
    tower = [name for name in files if ".visual." in name or ".vision_model." in name]
    exported = weights(folder)
    assert any(not exported[name].equal(files[name]) for name in tower)


@pytest.mark.slow
def test_vllm_and_trainer_agree_while_the_tower_is_trained(checkpoints, flags, tmp_path):
    path = checkpoints("idefics3")
    run(1, "grpo.py", "--model", path, *flags, "--output_dir", tmp_path)
    require_agreement(tmp_path, path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["smolvlm", "qwen3_5"])
def test_whole_model_and_trainer_agree(family, checkpoints, flags, tmp_path, main, capsys):
    """Transformers samples with its own class of images and text. The prompt on the console shows
    an image in few characters, samples name their images."""
    path = checkpoints(family)
    main("grpo", "--model", path, *flags, "--engine", "transformers", "--output_dir", tmp_path)
    require_agreement(tmp_path, path)
    assert re.search(r"\[<[a-z|_]+> x \d+\]", capsys.readouterr().out)
    assert {len(line.get("images", ())) for line in samples(tmp_path)} == {0, 1, 2}


@pytest.mark.slow
def test_ranks_change_nothing(checkpoints, flags, tmp_path, main):
    """Two ranks train, one of which has most of the images, and another one only samples."""
    model = ("--model", checkpoints("idefics3"), *flags, "--engine", "transformers")
    main("grpo", *model, "--output_dir", tmp_path / "one")
    remote = ("--rollout_ranks", 1, "--max_staleness", 0)
    for name, more in (("two", ("--share_prefix", 1)), ("remote", remote)):
        run(2, "grpo.py", *model, *more, "--output_dir", tmp_path / name)
        assert_close_metrics(tmp_path / "one", tmp_path / name, SAME, rel=1e-4)
    assert all(line[GAP] < 1e-4 for line in metrics(tmp_path / "remote")[1:])


def test_sampled_placeholder_ends_the_completion(checkpoints, flags, tmp_path, main, monkeypatch):
    """Any character plays the part of a sampled placeholder here."""
    few = property(lambda self: [self.image_id, *range(80)])
    monkeypatch.setattr(Reader, "placeholder_ids", few)
    path = checkpoints("qwen3_vl")
    main("grpo", "--model", path, *flags, "--max_steps", 1, "--engine", "transformers",
         "--output_dir", tmp_path)  # fmt: skip
    assert metrics(tmp_path)[-1]["completions/mean_length"] < 7


# vLLM on a GPU loses what is no weight in its sleep. On a CPU it does not sleep.
SLEEP = """
from common.config.parse import parse
from common.rollout.vllm_engine import VLLMEngine
import grpo


def lose_buffers(worker):
    for buffer in worker.get_model().deepstack_input_embeds:
        buffer.fill_(1.0)


VLLMEngine.sleep = lambda self: self.llm.collective_rpc(lose_buffers)
grpo.main(parse(grpo.Args))
"""


@pytest.mark.slow
def test_images_are_not_mixed_up_in_the_caches_of_vllm(checkpoints, flags, tmp_path):
    """After a sleep, while the tower is trained: two prompts of the same tokens with different
    pictures, and a longer one without pictures."""
    script, path = tmp_path / "sleeping.py", checkpoints("qwen3_vl")
    script.write_text(SLEEP)
    text = "What is shown here, and how often is it shown? "
    rows = [dict(prompt=6 * text, images=[], answer="abcdef")]
    for seed in range(2):
        picture(40, 40, seed).save(tmp_path / f"{seed}.png")
        rows.append(rows[0] | dict(prompt=text, images=[f"{seed}.png"]))
    prompts = tmp_path / "prompts.jsonl"
    write_rows(prompts, rows)
    run(1, script, "--model", path, *flags, "--dataset", prompts,
        "--engine_args", "max_num_seqs=4",  # one prompt at a time
        "--prompts_per_step", 3, "--output_dir", tmp_path / "run")  # fmt: skip
    require_agreement(tmp_path / "run", path)
    for line in metrics(tmp_path / "run"):
        assert line["engine/prefix_hit_rate"] > 0.4
