"""`--dtype float16`: a loss scale that never changes the gradient, and steps that overflow."""

import shutil

import pytest
import torch
from helpers import assert_resumes_exactly, metrics
from processes import run
from safetensors.torch import load_file, save_file

from common.config.groups import TrainArgs
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.train import optim


@pytest.fixture(scope="module")
def flags(small) -> tuple:
    return (*small, "--dtype", "float16", "--batch_size", 8, "--eval_every", 0, "--lr", 3e-3,
            "--lr_schedule", "constant")  # fmt: skip


def test_model_learns_as_in_float32(flags, main, tmp_path):
    """The loss scale keeps small gradients: the norms are those of float32 within 3%."""
    for dtype in ("float32", "float16"):
        folder = tmp_path / dtype
        main("sft", *flags, "--dtype", dtype, "--max_steps", 15, "--output_dir", folder)
    exact, half = (metrics(tmp_path / dtype) for dtype in ("float32", "float16"))
    assert half[-1]["loss"] < 0.6 * half[0]["loss"]
    for one, other in zip(exact, half, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0.01)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.03)
    assert half[-1]["loss_scale"] == optim.FIRST_SCALE and half[-1]["skipped_steps"] == 0


def test_overflow_skips_the_step_and_resume_is_exact(flags, main, tmp_path, monkeypatch):
    """Too large a scale is halved until gradients fit. A checkpoint has the scale."""
    monkeypatch.setattr(optim, "FIRST_SCALE", 2.0**24)
    flags = (*flags, "--max_steps", 10, "--save_every", 5, "--keep_last", 2)
    main("sft", *flags, "--output_dir", tmp_path / "run")
    lines = metrics(tmp_path / "run")
    skipped = int(lines[-1]["skipped_steps"])
    assert 5 <= skipped < 9
    assert all(x["loss_scale"] == 2.0 ** (24 - x["skipped_steps"]) for x in lines)
    of_step = [tmp_path / "run" / "checkpoints" / f"step_{n:06d}" for n in (5, 10)]
    start = load_file(flags[1] / "model.safetensors")
    first, last = (load_file(folder / "hf" / "model.safetensors") for folder in of_step)
    assert all(torch.equal(first[name], start[name]) for name in start)
    assert not all(torch.equal(last[name], start[name]) for name in start)
    assert_resumes_exactly(main, "sft", *flags, folder=tmp_path / "run", finished=10)


def test_scale_grows_again(monkeypatch):
    monkeypatch.setattr(optim, "GROW_AFTER", 3)
    state = torch.tensor([4.0, 0.0, 0.0])
    scales = []
    for is_finite in (True, True, True, False, True):
        optim.change_scale(state, is_finite)
        scales.append(state[0].item())
    assert scales == [4, 4, 8, 4, 4] and state[2] == 1
    with pytest.raises(optim.distributed.RunError, match="use --dtype bfloat16"):
        for _ in range(3):
            optim.change_scale(state, False)


LARGE_SCALE = """
import runpy
from common.train import optim
optim.FIRST_SCALE = 2.0**24
runpy.run_path("sft.py", run_name="__main__")
"""


@pytest.mark.slow
def test_norm_does_not_depend_on_ranks(flags, main, tmp_path, monkeypatch):
    """Nor on the scale, which two ranks halve more often than one: each has the gradient of its own
    samples, twice as large before the average. The learning rate changes nothing."""
    monkeypatch.setattr(optim, "FIRST_SCALE", 2.0**24)
    flags = (*flags, "--lr", 1e-9, "--max_steps", 10, "--output_dir")
    main("sft", *flags, tmp_path / "one")
    run(2, LARGE_SCALE, *flags, tmp_path / "two")
    one, two = (metrics(tmp_path / ranks) for ranks in ("one", "two"))
    norms = torch.tensor([[line["grad_norm"] for line in lines] for lines in (one, two)])
    finite = norms.isfinite().all(0)
    assert 2 <= finite.sum() < len(one)
    torch.testing.assert_close(*norms[:, finite], rtol=0.01, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_engine_and_trainer_agree(engine, small, main, tmp_path):
    flags = (*small, "--dtype", "float16", "--engine", engine, "--max_steps", 2,
             "--prompts_per_step", 4, "--samples_per_prompt", 4, "--max_new_tokens", 16,
             "--eval_every", 0, "--output_dir", tmp_path)  # fmt: skip
    if engine == "vllm":
        pytest.importorskip("vllm")
        run(1, "grpo.py", *flags)
    else:
        main("grpo", *flags)
    for line in metrics(tmp_path):
        assert line["sampling/sampling_logp_difference/max"] < 0.03


def test_model_that_overflows_is_refused(tmp_path, device):
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.1.mlp.down_proj.weight"] *= 1e7
    save_file(stored, folder / "model.safetensors", metadata=dict(format="pt"))
    load_policy(str(folder), TrainArgs(dtype="bfloat16"), device)
    with pytest.raises(ValueError, match="numbers that are not finite in float16$"):
        load_policy(str(folder), TrainArgs(dtype="float16"), device)
