"""Two GPUs: NCCL, shards on both, ranks that only generate, an engine over both, a checkpoint for another number.

The built-in model and task, which every script takes without flags. On a CPU the same launches over gloo.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import (
    PIPE,
    ROOT,
    Moment,
    assert_close_metrics,
    command,
    descendants,
    ended,
    environment,
    kill,
    metrics,
    until,
)
from on_gpu import ENGINES, ON_CPU, gpu, launch, needs_vllm
from test_distill import write_teacher

pytestmark = gpu(2)
STEPS = 2 if ON_CPU else 3
SHORT = ("--max_steps", STEPS, "--eval_size", 16, "--save_every", 100)
SCRIPTS = ("sft", "dpo", "kto", "rm", "grpo", "dapo", "reinforce", "rloo", "ppo", "online_dpo", "bok", "distill")


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_gradient_on_one_gpu_and_on_two(script, tmp_path):
    """NCCL adds up where gloo did, and a rank's device is not always the first: loss and gradient norm of every script
    in float32 are those of one GPU, to rounding. CPU twins: the like-named tests of each script, to 1e-5."""
    teacher = ("--teacher", write_teacher(tmp_path / "teacher")) if script == "distill" else ()
    for ranks in (1, 2):
        sampling = () if script in ("sft", "dpo", "kto", "rm") else ("--engine", "transformers")
        flags = (*SHORT, *sampling, "--dtype", "float32", "--output_dir", tmp_path / str(ranks))
        launch(ranks, f"{script}.py", *flags, *teacher)
    names = ("loss", "grad_norm")
    # A loss may be a sum of terms of size 1 that nearly cancel.
    assert_close_metrics(tmp_path / "1", tmp_path / "2", names, rel=2e-3, floor=0.1)
    assert_close_metrics(tmp_path / "1", tmp_path / "2", ("num_tokens", "epoch"), rel=0)


@pytest.mark.parametrize("script", ["sft", "ppo"])
def test_a_copy_on_each_gpu(script, tmp_path):
    """Two copies, whose gradients NCCL averages once per step in groups of its own, are one model: ppo.py trains two.
    CPU twin: test_mesh.test_scripts_train_alike_on_copies."""
    for shard_ranks in (2, 1):
        sampling = () if script == "sft" else ("--engine", "transformers")
        flags = (*SHORT, *sampling, "--dtype", "float32", "--output_dir", tmp_path / str(shard_ranks))
        launch(2, f"{script}.py", *flags, "--shard_ranks", shard_ranks)
    assert_close_metrics(tmp_path / "2", tmp_path / "1", ("loss", "grad_norm"), rel=2e-3, floor=0.1)


@pytest.mark.parametrize("script", ["sft", "dpo", "grpo"])
def test_two_gpus_run_each_pack_together(script, tmp_path):
    """`--context_ranks 2`: all-to-all around attention on one communicator while FSDP gathers the next block on
    another, which NCCL must not deadlock: more steps than elsewhere, and blocks recomputed. Loss and gradient norm of
    the first ones are those of one GPU. CPU twin: test_sharing.test_scripts_with_context_ranks."""
    sampling = ("--engine", "transformers") if script == "grpo" else ()
    flags = ("--max_steps", STEPS if ON_CPU else 20, "--eval_size", 16, "--save_every", 100, "--dtype", "float32")
    for ranks in (1, 2):
        where = ("--context_ranks", ranks, "--pack_tokens", 8192 // ranks, "--output_dir", tmp_path / str(ranks))
        launch(ranks, f"{script}.py", *flags, *sampling, *where, "--activation_checkpointing", "true")
    firsts = [metrics(tmp_path / ranks)[:STEPS] for ranks in "12"]
    for one, two in zip(*firsts, strict=True):
        assert one["num_tokens"] == two["num_tokens"]
        assert all(abs(one[name] - two[name]) < 2e-3 * (0.1 + abs(one[name])) for name in ("loss", "grad_norm"))
    launch(2, f"{script}.py", *flags[:6], *sampling, "--context_ranks", 2, "--output_dir", tmp_path / "bfloat16")


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_that_only_generate(engine, staleness, tmp_path):
    """Weights go from one GPU to the other by NCCL while both work, and the engine there never sleeps; both kinds end
    with nothing said. Samples are no older than --max_staleness, and where it is 0 they agree with the trainer. CPU
    twin: test_remote.test_with_vllm_too_it_is_the_colocated_run."""
    where = ("--rollout_ranks", 1, "--max_staleness", staleness, "--output_dir", tmp_path)
    launch(2, "grpo.py", *SHORT, "--engine", engine, *where)
    lines = [line for line in metrics(tmp_path) if line["step"] > 0]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert max(line["sampling/staleness/max"] for line in lines) <= staleness
    for line in lines:
        assert line["sampling/staleness/max"] > 0 or line["sampling/sampling_logp_difference/mean"] < 0.02


@pytest.mark.parametrize("victim", [0, 1], ids=["trains", "generates"])
def test_a_killed_rank_ends_the_run(victim, tmp_path):
    """NCCL waits for ranks that are gone; the other kind of rank and torchrun must not. CPU twin:
    test_remote.test_a_dead_rank_of_either_kind_ends_the_job."""
    flags = ("--engine", "transformers", "--rollout_ranks", 1, "--max_steps", 5000, "--eval_every", 0)
    launcher = command(2, "grpo.py", *flags, "--output_dir", tmp_path)
    with subprocess.Popen(launcher, cwd=ROOT, env=environment(), stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            until(lambda: process.poll() is not None or Moment(tmp_path, step=2).logged())
            ranks = {rank_of(pid): pid for pid in descendants(process.pid) if rank_of(pid) is not None}
            assert ranks.keys() == {0, 1}, process.poll()
            os.kill(ranks[victim], signal.SIGKILL)
            done = ended(process, [*ranks.values()], timeout=300)
        except BaseException:
            kill(process.pid)
            raise
    assert done.returncode == 1 and max(line["step"] for line in metrics(tmp_path)) < 5000


def rank_of(pid: int) -> int | None:
    """torchrun's number of a process that is a rank and no helper of one."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return None
    numbers = [v.removeprefix("LOCAL_RANK=") for v in variables if v.startswith("LOCAL_RANK=")]
    return int(numbers[0]) if numbers and str(ROOT / "grpo.py") in words else None


@needs_vllm
def test_an_engine_over_two_gpus(tmp_path):
    """--tensor_parallel_size 2: each rank loads its half of every weight, and both ask for all prompts of the pair.
    CPU twin: test_grpo.test_tensor_parallel_engine_gives_the_same_completions."""
    launch(2, "grpo.py", *SHORT, "--engine", "vllm", "--tensor_parallel_size", 2, "--output_dir", tmp_path)
    lines = [line for line in metrics(tmp_path) if line["step"] > 0]
    assert len(lines) == STEPS
    assert max(line["sampling/sampling_logp_difference/mean"] for line in lines) < 0.02


@pytest.mark.parametrize("engine", ENGINES)
def test_saved_by_two_resumed_by_one_and_sampled_from(engine, tmp_path):
    """Shards of two GPUs are read by one, the run goes on as two would have, and the engine samples from the export.
    CPU twin: test_sft.test_resumed_on_another_number_of_ranks."""
    flags = ("--dtype", "float32", "--save_every", STEPS, "--eval_size", 16)
    whole, resumed = (("--output_dir", tmp_path / name) for name in ("whole", "resumed"))
    launch(2, "sft.py", *flags, "--max_steps", 2 * STEPS, *whole)
    launch(2, "sft.py", *flags, "--max_steps", STEPS, *resumed)
    assert "resuming from" in launch(1, "sft.py", *flags, "--max_steps", 2 * STEPS, *resumed).stdout
    assert_close_metrics(tmp_path / "whole", tmp_path / "resumed", ("loss", "grad_norm"), rel=2e-3, floor=0.1)
    assert_close_metrics(tmp_path / "whole", tmp_path / "resumed", ("num_tokens", "epoch"), rel=0)
    model = ("--model", tmp_path / "resumed" / "hf", "--dataset", "arithmetic", "--max_prompts", 16)
    launch(1, "eval.py", *model, "--engine", engine, "--max_new_tokens", 5, "--output_dir", tmp_path / "eval")
    results = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert results["overall"]["prompts"] == 16 and 1 <= results["overall"]["mean_length"]["mean"] <= 5
