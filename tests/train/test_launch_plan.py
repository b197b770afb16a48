"""Capacity and time in the plan of `--dry_run`: hand numbers, the measurements of docs/gpu.md, and
what a plan names as assumed."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import ROOT

import dpo
import grpo
from bench.memory_plan import CONFIGS
from common.config.gpu_kinds import kind_of
from common.data.sample import Completion
from common.model.memory import Plan
from common.train import launch_plan, plan, time_plan
from common.train.engine_plan import Room, bytes_in_cache
from common.train.launch_plan import describe, make_launch, problem, span
from common.train.time_plan import (
    Rates,
    pass_seconds,
    rates_of_cpu,
    rates_of_gpu,
    sampling_seconds,
    sync_seconds,
    update_seconds,
)

SETTINGS = dict(prompts_per_step=64, samples_per_prompt=8, pack_tokens=20_000, max_steps=100)
PROMPT = 84


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return folders of Qwen3 models without weights, and their shapes, by size."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for size in ("1.7B", "8B"):
        CONFIGS[size].save_pretrained(folder / size)
        path = str(folder / size)
        found[size] = (path, plan.shapes(grpo.Args(dry_run="8xH100"), path, [], None))
    return found


def launch_of(models, gpus: str, size: str = "8B", **flags):
    """Return the launch of grpo.py with prompts of `PROMPT` tokens, its folder and its lines."""
    args = grpo.Args(dry_run=gpus, **SETTINGS | flags)
    path, shapes = models[size]
    groups = [[Completion([0] * PROMPT, [False] * PROMPT, PROMPT)]]
    launch, rates = make_launch(args, shapes, path, [], groups, 256, (1e-4, 1e-3))
    return launch, path, [*describe(launch, 100), rates]


# ---- capacity ----


def test_eight_billion_parameters_have_room_for_six_long_completions(models):
    launch, path, lines = launch_of(models, "8x80GB", max_new_tokens=16_300)
    room = launch.room
    assert (room.tokens, room.at_a_time, room.length, room.completions) == (105_919, 6, 16_384, 64)
    text = "\n".join(lines)
    assert "memory of an engine per GPU: 29.8 GiB (weights 15.3, cache at most 14.5)" in text
    assert "64 completions of a step, 6 of 16,384 tokens at a time (the cache's limit)" in text
    assert problem(launch, path) is None


def config(**changes) -> SimpleNamespace:
    sizes = dict(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    return SimpleNamespace(hidden_size=64, **sizes | changes)


def test_cache_of_a_completion_by_hand():
    layer = 2 * 2 * 16 * 2  # keys and values of 2 heads of width 16, 2 bytes each
    assert bytes_in_cache(config(), 100, 2, 1) == 4 * layer * 100
    kinds = ["full_attention", "sliding_attention"] * 2
    windowed = config(sliding_window=10, layer_types=kinds)
    assert bytes_in_cache(windowed, 100, 2, 1) == 2 * layer * 100 + 2 * layer * 10
    assert bytes_in_cache(config(sliding_window=10), 100, 2, 1) == 4 * layer * 10
    assert bytes_in_cache(config(), 100, 2, 2) == 2 * layer * 100  # one head on each GPU
    assert bytes_in_cache(config(), 100, 2, 8) == 2 * layer * 100  # a head cannot be divided
    state = dict(linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    delta = config(layer_types=kinds, **state)
    assert bytes_in_cache(delta, 100, 2, 2) == layer / 2 * 100 + 3 * 4 * (4 * 8 * 8) / 2


def test_capacity_follows_memory_and_tensor_parallelism(models):
    one, *_ = launch_of(models, "8x80GB", max_new_tokens=8000)
    two, *_ = launch_of(models, "8x80GB", max_new_tokens=8000, tensor_parallel_size=2)
    assert two.room.weights == one.room.weights / 2 and two.room.engines == one.room.engines / 2
    numbers = [
        launch_of(models, "8x80GB", max_new_tokens=8000, gpu_memory_utilization=share)[0].room
        for share in (0.3, 0.5, 0.7)
    ]
    running = [room.at_a_time for room in numbers]
    assert running == sorted(set(running))
    dedicated, _, lines = launch_of(models, "8x80GB", max_new_tokens=8000, rollout_ranks=4)
    assert dedicated.room.memory == 0.9 * 80e9 and dedicated.room.engines == 4
    assert any("4 x 1 GPU on rollout ranks" in line for line in lines)


def test_proposed_flags_fit_and_serve_better(models):
    before, _, lines = launch_of(models, "8x80GB", max_new_tokens=16_300)
    (line,) = [line for line in lines if line.startswith("serves better, and fits: ")]
    share = float(re.search(r"--gpu_memory_utilization ([0-9.]+)", line)[1])
    count = int(re.search(r"--rollout_ranks (\d+)", line)[1])
    for flags in (dict(gpu_memory_utilization=share), dict(rollout_ranks=count)):
        after, path, _ = launch_of(models, "8x80GB", max_new_tokens=16_300, **flags)
        assert plan.predicted(after.args, after.models)[0] is None
        assert after.room.at_a_time > before.room.at_a_time and after.step(1) < before.step(1)
        assert f"{after.room.at_a_time} at a time on each engine (of {after.room.engines})" in line


def test_proposed_rollout_ranks_keep_the_given_memory(models):
    """Their engines have --gpu_memory_utilization of the run, not the default of rollout ranks."""
    flags = dict(gpu_memory_utilization=0.8, max_new_tokens=16_300)
    launch, path, lines = launch_of(models, "8x80GB", **flags)
    (line,) = [line for line in lines if line.startswith("serves better, and fits: ")]
    (proposal,) = re.findall(r"--rollout_ranks (\d+): (\d+) at a time", line)
    after, *_ = launch_of(models, "8x80GB", rollout_ranks=int(proposal[0]), **flags)
    assert after.room.at_a_time == int(proposal[1])


def test_fewer_rollout_ranks_may_fit(models):
    """With 6 of 8 the two others cannot hold the model; with fewer they can."""
    launch, path, lines = launch_of(models, "8x80GB", max_new_tokens=16_300, rollout_ranks=6)
    assert plan.predicted(launch.args, launch.models)[0] is not None
    assert any("serves better, and fits: --rollout_ranks" in line for line in lines)


def test_the_lowest_sufficient_memory_is_proposed(models):
    """64 completions of 2,084 tokens with 147,456 bytes each, and the weights, need 0.451 of the
    GPU."""
    *_, lines = launch_of(models, "8x80GB", max_new_tokens=2000)
    assert any("fits: --gpu_memory_utilization 0.5: 76 at a time" in line for line in lines)


def test_a_cache_that_is_no_limit_gets_no_proposal(models):
    _, _, lines = launch_of(models, "8x80GB", max_new_tokens=100, prompts_per_step=8)
    assert any("8 completions of a step, all at a time" in line for line in lines)
    assert not any("serves better" in line for line in lines)


def test_a_cache_that_does_not_hold_the_context_is_refused(models):
    flags = dict(gpu_memory_utilization=0.22, max_new_tokens=1000)
    launch, path, _ = launch_of(models, "8x80GB", **flags)
    assert "does not hold a sequence of 20001 tokens, 2.7 GiB; raise" in problem(launch, path)


def test_processes_are_compared_with_the_cores(models, monkeypatch):
    monkeypatch.setattr(launch_plan.os, "cpu_count", lambda: 30)
    _, _, (line, *_) = launch_of(models, "16x80GB", reward=("math",))
    assert line.startswith(
        "warning: cores: 4 processes per rank (--reward_workers) for math, 32 on"
    )
    _, _, (line, *_) = launch_of(models, "16x80GB", reward=("math",), reward_workers=3)
    assert line.startswith("cores: 3 processes") and "this machine has 30 cores" in line
    assert not launch_of(models, "16x80GB", reward=("gsm8k",))[2][0].startswith("cores")


# ---- time ----


def documented(part: str) -> tuple[str, float]:
    """Return the GPU and the seconds of a part in docs/gpu.md."""
    page = (ROOT / "docs/gpu.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(part)} \|.*$", page, re.MULTILINE)
    cells = [cell.strip() for cell in row.split("|")]
    return cells[9], float(cells[4]) / 1e3


def test_rates_reproduce_the_measurements(models):
    """The shares of the published rates give the times in docs/gpu.md, each with its GPU."""
    (m,) = models["1.7B"][1]
    kept = Plan(1, 8192, recompute=False)
    cache = bytes_in_cache(CONFIGS["1.7B"], 768, 2, 1)
    room = Room(1, 1, 32e9, 2 * m.weights, cache, 768, 256)

    def micro_batch(recompute: bool, rates: Rates) -> float:
        return pass_seconds(m, 8192, 1024, replace(kept, recompute=recompute), rates, trains=True)

    phases = {
        "micro-batch": lambda rates, _: micro_batch(False, rates),
        "micro-batch, compiled": lambda _, compiled: micro_batch(False, compiled),
        "micro-batch, activation checkpointing": lambda rates, _: micro_batch(True, rates),
        "clip and AdamW": lambda rates, _: update_seconds(m, kept, rates),
        "vLLM: sync": lambda rates, _: sync_seconds(m, kept, rates),
        "vLLM: generate": lambda rates, _: sampling_seconds(
            m, room, 256, 256, 512, 256, 256, rates
        ),
    }
    for part, phase in phases.items():
        name, seconds = documented(part)
        rates = (rates_of_gpu(kind_of(name, 0), compiles, {}) for compiles in (False, True))
        assert phase(*rates) == pytest.approx(seconds, rel=0.02), part


def test_a_table_of_bench_gpu_replaces_the_shares(tmp_path, monkeypatch):
    """Half the times of docs/gpu.md give twice the rates. A table of another GPU or of other sizes
    is not read."""
    rows = []
    shares = {}
    for part, (size, _) in time_plan.PARTS.items():
        name, seconds = documented(part)
        rows.append(f"| {part} | {size} | bfloat16 | {500 * seconds} |  |  |  |  |")
        shares[part] = rates_of_gpu(kind_of(name, 0), part.endswith("compiled"), {})
    monkeypatch.setattr(time_plan, "TABLE", tmp_path / "gpu.md")
    time_plan.TABLE.write_text("\n".join(["NVIDIA H200, torch 2.13.0", "", *rows]))
    twice = time_plan.measured_rates(kind_of("H200", 0))
    fields = dict(
        zip(twice, ("training", "training", "reading", "updating", "loading"), strict=True)
    )
    for part, field in fields.items():
        assert twice[part] == pytest.approx(2 * getattr(shares[part], field), rel=0.02), part
        rates = rates_of_gpu(kind_of("H200", 0), part.endswith("compiled"), twice)
        assert getattr(rates, field) == twice[part]
    assert time_plan.measured_rates(kind_of("A100", 0)) == {}
    time_plan.TABLE.write_text("NVIDIA H200\n\n" + rows[0].replace("8192", "512"))
    assert time_plan.measured_rates(kind_of("H200", 0)) == {}


def test_time_follows_the_rates_and_the_ranks(models):
    def steps(gpus: str, **flags) -> tuple[float, float]:
        launch, *_ = launch_of(models, gpus, max_new_tokens=4000, **flags)
        return launch.step(0), launch.step(1)

    low, high = steps("8xH100")
    assert 0 < low < high
    for faster, slower in (("8xH200", "8xH100"), ("8xH100", "8xA100"), ("16xH100", "8xH100")):
        assert all(a < b for a, b in zip(steps(faster), steps(slower), strict=True))
    launch, *_ = launch_of(models, "8xH100", max_new_tokens=4000, rollout_ranks=4)
    phases = launch.phases(1)
    together = max(phases["rollout"], phases["update"]) + phases["sync"]
    assert launch.step(1) == pytest.approx(together)
    in_turn = replace(launch, args=replace(launch.args, max_staleness=0))
    assert in_turn.step(1) == pytest.approx(together + min(phases["rollout"], phases["update"]))


def test_a_script_without_sampling_has_no_engine(models):
    args = dpo.Args(dry_run="8xH100", batch_size=64, max_steps=10)
    path, shapes = models["1.7B"]
    pair = [Completion([0] * 500, [False] * 500, 500)] * 2
    launch, _ = make_launch(args, shapes, path, [], [pair], 32, (0.0, 0.0))
    assert (launch.sequences, launch.held_out, launch.room) == (128, 64, None)
    assert launch.phases(1)["update"] > launch.phases(1)["evaluation"] > 0
    step, assumed, run = describe(launch, 10)
    assert "max_new_tokens" not in assumed and "sync" not in step and ": 10 steps" in run


@pytest.mark.parametrize(
    ("gpus", "source"),
    [
        ("8x80GB", "rates: H100, assumed by its memory (such as --dry_run 8xA100): 989 TFLOP/s"),
        ("8xa100", "rates: A100: 312 TFLOP/s, 2,040 GB/s published; shares of them measured on"),
        ("1x24", "rates: 4090, assumed by its memory"),
    ],
)
def test_a_plan_names_its_sources(models, gpus, source):
    _, _, (*_, assumed, run, rates) = launch_of(models, gpus, "1.7B")
    assert rates.startswith(source) and rates.endswith("rewards measured here on ten rows")
    assert assumed.startswith("assumed: 0.7 to 1.3 times the time")
    assert assumed.endswith("; completions of 50% to 100% of --max_new_tokens")
    assert run.endswith("without start and saves")


def test_an_engine_without_a_prediction_is_named(models):
    launch, _, lines = launch_of(models, "8xH100", engine="transformers")
    assert launch.room is None and "rollout" not in launch.phases(1)
    assert "engine transformers: its memory and the time of rollouts are not predicted" in lines
    assert not any(line.startswith(("time of a step:", "time of the run")) for line in lines)


def test_rates_of_a_cpu_are_measured(models):
    (m,) = models["1.7B"][1]
    rates, measured = rates_of_cpu(replace(m, hidden=64, inner=64), 64)
    assert re.fullmatch(r"\d+ GFLOP/s, [0-9.]+ us per small operation", measured)
    seconds = pass_seconds(m, 1, 1, Plan(1, 8192, recompute=False), rates)
    assert seconds > m.layers * rates.layer > 0


# ---- text ----


def test_spans_have_the_unit_of_their_end():
    spans = [span(0.002, 0.9), span(0.5, 100), span(60, 600), span(3600, 9000), span(1e4, 2e5)]
    assert spans == [
        "2 to 900 ms",
        "0.5 to 100 s",
        "1 to 10 min",
        "1 to 2.5 hours",
        "0.12 to 2.3 days",
    ]


def test_kinds_of_gpus():
    assert grpo.Args(dry_run="8xH200").planned == (8, 141 * 10**9, "H200")
    assert grpo.Args(dry_run="2x4090").planned == (2, 24 * 10**9, "4090")
    assert grpo.Args(dry_run="8x40gb").planned == (8, 40 * 10**9, "")
    assert kind_of("NVIDIA A100-SXM4-80GB", 85e9).name == "A100"
    assert kind_of("NVIDIA GH200 480GB", 102e9).name == "H100"  # the nearest memory
    assert kind_of("", 141e9).name == "H200"


@pytest.mark.parametrize("gpus", ["8xB300", "8x", "x80GB", "0x80GB", "8x0GB", "8x80TB", "H100"])
def test_a_wrong_value_has_one_line(gpus):
    with pytest.raises(ValueError, match=f"--dry_run {gpus}: expected GPUs with their memory"):
        grpo.Args(dry_run=gpus)
