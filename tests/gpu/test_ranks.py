"""Two ranks, on two GPUs or on one: NCCL, shards, dedicated rollout ranks, a tensor-parallel
engine, and resume on another number of ranks.

All tests use the built-in model and task, the defaults of every script. On a CPU the same launches
use gloo."""

import json
import os
import signal
from pathlib import Path

import pytest
from helpers import ROOT, assert_close_metrics, logged, metrics
from in_process import REWARD, write_teacher
from on_gpu import DTYPES, ON_CPU, gpu, launch, needs_vllm, started
from processes import descendants, ended, kill, until

pytestmark = gpu(2, shared=True)
# vLLM does not share a GPU.
ENGINES = ("transformers", pytest.param("vllm", marks=[needs_vllm, gpu(2)]))
STEPS = 2 if ON_CPU else 3
# Compiling takes longer than these steps; test_models.py compiles.
EAGER = ("--compile", "false")
SHORT = ("--max_steps", STEPS, "--eval_size", 16, "--save_every", 100, *EAGER)
OFFLINE = ("sft", "dpo", "kto", "rm")
ONLINE = ("grpo", "dapo", "reinforce", "rloo", "ppo", "online_dpo", "bok", "distill",
          "self_distill")  # fmt: skip
# Besides the defaults of every script: adapters on frozen shards, moments or all states on the
# host, recomputed blocks, and a vision tower that is trained.
MODES = [
    ("sft", "--lora_rank 8"),
    ("grpo", "--lora_rank 8 --beta 0.1"),
    ("ppo", "--lora_rank 8"),
    ("grpo", "--lora_rank 8 --beta 0.1 --offload all"),
    ("sft", "--offload optimizer"),
    ("grpo", "--offload all"),
    ("rm", "--activation_checkpointing true"),
    ("sft", "--vision train"),
    ("grpo", "--vision train"),
]


@pytest.mark.parametrize(
    ("script", "dtype", "flags"),
    [
        *((script, dtype, "") for script in (*OFFLINE, *ONLINE) for dtype in DTYPES[::-1]),
        *((script, "float32", flags) for script, flags in MODES),
    ],
)
def test_gradient_is_equal_on_one_and_two_ranks(script, dtype, flags, tmp_path):
    """NCCL replaces gloo, and the device of a rank is not always the first. Loss and gradient norm
    equal those of one rank, up to rounding."""
    flags = flags.split()
    if script == "distill":
        flags += ["--teacher", write_teacher(tmp_path / "teacher")]
    if "--vision" in flags:
        flags += "--model tiny-images --dataset squares --prompt_format plain".split()
        if script == "grpo":  # an untrained model has no right answers, but digits
            (tmp_path / "digits.py").write_text(REWARD)
            flags += ["--reward", f"{tmp_path}/digits.py:digits", "--max_new_tokens", 16]
    compare(script, dtype, tmp_path, *flags)


def compare(script: str, dtype: str, folder: Path, *flags: object) -> None:
    """Check that a script has the same loss and gradient norm on one and two ranks. In bfloat16,
    where the engine's samples may differ after the first update, only at the first step."""
    sampling = () if script in OFFLINE else ("--engine", "transformers")
    for ranks in (1, 2):
        place = ("--dtype", dtype, "--output_dir", folder / str(ranks))
        launch(ranks, f"{script}.py", *SHORT, *sampling, *place, *flags)
    names = ("loss", "grad_norm")
    # A loss may be a sum of terms of size 1 that nearly cancel.
    if dtype == "float32":
        assert_close_metrics(folder / "1", folder / "2", names, rel=2e-3, floor=0.1)
        return assert_close_metrics(folder / "1", folder / "2", ("num_tokens", "epoch"), rel=0)
    lines = ([line for line in metrics(folder / ranks) if line["step"] == 1] for ranks in "12")
    (one,), (two,) = lines
    for name in names:
        assert abs(one[name] - two[name]) < 0.03 * (0.1 + abs(one[name])), (name, one, two)


@pytest.mark.parametrize("script", ["sft", "ppo"])
def test_replica_on_each_gpu_trains_like_one_model(script, tmp_path):
    """NCCL averages the gradients of two replicas once per step in separate groups; ppo.py trains
    two models."""
    for shard_ranks in (2, 1):
        sampling = () if script == "sft" else ("--engine", "transformers")
        place = ("--shard_ranks", shard_ranks, "--output_dir", tmp_path / str(shard_ranks))
        launch(2, f"{script}.py", *SHORT, *sampling, "--dtype", "float32", *place)
    assert_close_metrics(tmp_path / "2", tmp_path / "1", ("loss", "grad_norm"), rel=2e-3, floor=0.1)


@pytest.mark.parametrize("script", ["sft", "dpo", "grpo"])
def test_context_ranks_train_like_one_gpu(script, tmp_path):
    """All-to-all around attention on one communicator, while FSDP gathers the next block on
    another, must not deadlock: more steps than in other tests, and recomputed blocks. Loss and
    gradient norm of the first steps are those of one GPU."""
    sampling = ("--engine", "transformers") if script == "grpo" else ()
    flags = ("--max_steps", STEPS if ON_CPU else 20, "--eval_size", 16, "--save_every", 100, *EAGER)
    for ranks in (1, 2):
        where = ("--context_ranks", ranks, "--pack_tokens", 8192 // ranks)
        where += ("--output_dir", tmp_path / str(ranks))
        exact = ("--dtype", "float32", "--activation_checkpointing", "true")
        launch(ranks, f"{script}.py", *flags, *sampling, *where, *exact)
    lines = ([line for line in metrics(tmp_path / ranks) if line["step"] > 0] for ranks in "12")
    firsts = (each[:STEPS] for each in lines)
    for one, two in zip(*firsts, strict=True):
        assert one["num_tokens"] == two["num_tokens"]
        for name in ("loss", "grad_norm"):
            assert abs(one[name] - two[name]) < 2e-3 * (0.1 + abs(one[name])), name
    where = ("--context_ranks", 2, "--output_dir", tmp_path / "bfloat16")
    launch(2, f"{script}.py", *flags, *sampling, *where)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("engine", ENGINES)
def test_dedicated_rollout_ranks_respect_staleness(engine, staleness, tmp_path):
    """NCCL sends weights from one GPU to the other while both compute, and the engine never sleeps;
    both roles exit without a message. Samples are at most --max_staleness old, and agree with the
    trainer if it is 0."""
    where = ("--rollout_ranks", 1, "--max_staleness", staleness, "--output_dir", tmp_path)
    launch(2, "grpo.py", *SHORT, "--engine", engine, *where)
    lines = [line for line in metrics(tmp_path) if line["step"] > 0]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert max(line["sampling/staleness/max"] for line in lines) <= staleness
    for line in lines:
        is_stale = line["sampling/staleness/max"] > 0
        assert is_stale or line["sampling/sampling_logp_difference/mean"] < 0.02


@pytest.mark.parametrize("victim", [0, 1], ids=["trains", "generates"])
def test_killed_rank_ends_the_run(victim, tmp_path):
    """NCCL waits for dead ranks; ranks of the other role and torchrun must not."""
    flags = (
        *"--engine transformers --rollout_ranks 1 --max_steps 5000 --eval_every 0".split(),
        *EAGER,
    )
    with started(2, "grpo.py", *flags, "--output_dir", tmp_path) as process:
        try:
            until(lambda: process.poll() is not None or logged(tmp_path, 2))
            ranks = {rank_of(pid): pid for pid in descendants(process.pid)}
            ranks.pop(None, None)
            assert ranks.keys() == {0, 1}, process.poll()
            os.kill(ranks[victim], signal.SIGKILL)
            done = ended(process, [*ranks.values()], timeout=300)
        except BaseException:
            kill(process.pid)
            raise
    assert done.returncode == 1 and max(line["step"] for line in metrics(tmp_path)) < 5000


def rank_of(pid: int) -> int | None:
    """Return the local rank of a process; None for a helper process of a rank."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return None
    numbers = [v.removeprefix("LOCAL_RANK=") for v in variables if v.startswith("LOCAL_RANK=")]
    return int(numbers[0]) if numbers and str(ROOT / "grpo.py") in words else None


@needs_vllm
@gpu(2)
def test_tensor_parallel_engine_agrees_with_the_trainer(tmp_path):
    """With --tensor_parallel_size 2, each rank loads its half of every weight, and both submit all
    prompts of the two."""
    flags = ("--engine", "vllm", "--tensor_parallel_size", 2, "--output_dir", tmp_path)
    launch(2, "grpo.py", *SHORT, *flags)
    lines = [line for line in metrics(tmp_path) if line["step"] > 0]
    assert len(lines) == STEPS
    assert max(line["sampling/sampling_logp_difference/mean"] for line in lines) < 0.02


@pytest.mark.parametrize("engine", ENGINES)
def test_one_gpu_resumes_a_run_of_two_and_samples_from_its_export(engine, tmp_path):
    """One GPU reads the shards of two and continues the run as two would."""
    flags = ("--dtype", "float32", "--save_every", STEPS, "--eval_size", 16, *EAGER)
    whole, resumed = (("--output_dir", tmp_path / name) for name in ("whole", "resumed"))
    launch(2, "sft.py", *flags, "--max_steps", 2 * STEPS, *whole)
    launch(2, "sft.py", *flags, "--max_steps", STEPS, *resumed)
    assert "resuming from" in launch(1, "sft.py", *flags, "--max_steps", 2 * STEPS, *resumed).stdout
    both = tmp_path / "whole", tmp_path / "resumed"
    assert_close_metrics(*both, ("loss", "grad_norm"), rel=2e-3, floor=0.1)
    assert_close_metrics(*both, ("num_tokens", "epoch"), rel=0)
    model = ("--model", tmp_path / "resumed" / "hf", "--dataset", "arithmetic", "--eval_size", 16)
    flags = ("--engine", engine, "--max_new_tokens", 5, "--output_dir", tmp_path / "eval")
    launch(1, "eval.py", *model, *flags)
    overall = json.loads((tmp_path / "eval" / "results.json").read_text())["overall"]
    assert overall["prompts"] == 16 and 1 <= overall["mean_length"]["mean"] <= 5
