"""Capacity and time in the plan of `--dry_run`: hand numbers, the measurements of docs/gpu.md, and
what a plan names as assumed."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from helpers import ROOT

import bok
import dpo
import grpo
import online_dpo
import ppo
import rloo
import self_distill
from bench.memory_plan import CONFIGS
from common.config.gpu_kinds import kind_of
from common.config.groups import check_ranks
from common.data.sample import Completion
from common.model.flops import matrix_weights
from common.model.memory import Plan, shapes_of
from common.model.policy import load_policy, load_scalar_model
from common.train import launch_plan, plan, time_plan
from common.train import rates as rates_of
from common.train.engine_plan import Room, bytes_in_cache
from common.train.launch_plan import Setting, describe, lack, make_launch, problem, span
from common.train.proposals import proposals
from common.train.rates import Rates, rates_of_cpu, rates_of_gpu
from common.train.time_plan import pass_seconds, sampling_seconds, sync_seconds, update_seconds

SETTINGS = dict(prompts_per_step=64, samples_per_prompt=8, pack_tokens=20_000, max_steps=100)
PROMPT = 84
LONGEST = 500  # tokens of a prompt


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return folders of Qwen3 models without weights, and their shapes, by size."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for size in ("1.7B", "8B"):
        CONFIGS[size].save_pretrained(folder / size)
        (folder / size / "tokenizer_config.json").write_text("{}")
        path = str(folder / size)
        found[size] = (path, plan.shapes(grpo.Args(dry_run="8xH100"), path, [], None))
    return found


def prompts_of(length: int, count: int = 1) -> list[list[Completion]]:
    return [[Completion([0] * length, [False] * length, length)]] * count


def launch_of(models, gpus: str, size: str = "8B", **flags):
    """Return the launch of grpo.py with prompts of `PROMPT` tokens, its setting and its lines."""
    args = grpo.Args(dry_run=gpus, **SETTINGS | flags)
    path, shapes = models[size]
    setting = Setting(shapes, path, [], False, prompts_of(PROMPT), LONGEST, 1000, 256, 1e-4)
    launch, rates = make_launch(args, setting)
    fits = problem(launch, setting) is None
    return launch, setting, [*describe(launch, 100, fits), rates]


# ---- capacity ----


def test_eight_billion_parameters_have_room_for_six_long_completions(models):
    launch, setting, lines = launch_of(models, "8x80GB", max_new_tokens=16_300)
    room = launch.room
    assert (room.tokens, room.running(room.length), room.length, room.completions) == (
        105_919,
        6,
        16_384,
        64,
    )
    text = "\n".join(lines)
    assert "memory of an engine per GPU: 29.8 GiB (weights 15.3, cache at most 14.5)" in text
    cache = "at most 105,919 tokens; 6 of its 64 completions of a step run at a time, if each has"
    everywhere = "48 of 512 on all engines"
    assert (
        f"cache of an engine: {cache} 16,384 tokens (the cache is the limit); {everywhere}" in text
    )
    assert problem(launch, setting) is None


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
    running = [room.running(room.length) for room in numbers]
    assert running == sorted(set(running))
    dedicated, _, lines = launch_of(models, "8x80GB", max_new_tokens=8000, rollout_ranks=4)
    assert dedicated.room.memory == 0.9 * 80e9 and dedicated.room.engines == 4
    assert any("; 4 engines of 1 GPU on rollout ranks" in line for line in lines)


PROPOSAL = re.compile(r"(faster|fits): (--.*?)( on \S+)?: (.*?) a step(?:, (\d+)% of now)?")


def proposed(line: str) -> tuple[str, dict, str, float]:
    """Return the kind of a proposal, its flags, the promised time and its share."""
    kind, flags, gpus, times, percent = PROPOSAL.match(line).groups()
    words = flags.split()
    values = zip(words[::2], words[1::2], strict=True)
    found = {flag.removeprefix("--"): yaml.safe_load(value) for flag, value in values}
    if gpus:
        found["dry_run"] = gpus.removeprefix(" on ")
    return kind, found, times, float(percent or 0) / 100


LAUNCHES = {
    "long completions": ("8x80GB", dict(max_new_tokens=16_300)),
    "given memory": ("8x80GB", dict(max_new_tokens=16_300, gpu_memory_utilization=0.8)),
    "too many rollout ranks": ("8x80GB", dict(max_new_tokens=16_300, rollout_ranks=6)),
    "small GPUs": ("8xA100-40GB", dict(max_new_tokens=4000)),
    "large packs": (
        "8x80GB",
        dict(max_new_tokens=1000, pack_tokens=2**17, activation_checkpointing=False),
    ),
    "two machines": ("16x80GB", dict(max_new_tokens=4000, tensor_parallel_size=2)),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_with_proposed_flags_is_as_promised(models, name):
    """The flags are valid together, the run fits, and the predicted time is the promised share."""
    gpus, flags = LAUNCHES[name]
    before, setting, _ = launch_of(models, gpus, **flags)
    lines = [*proposals(before, setting)]
    assert lines
    for line in lines:
        kind, changed, times, share = proposed(line)
        others = changed.pop("dry_run", gpus)
        after, after_setting, _ = launch_of(models, others, **flags | changed)
        if "lora_rank" in changed:
            continue  # the models of this test have no adapters
        check_ranks(after.args, after.ranks)
        assert problem(after, after_setting) is None
        assert span(after.step(0), after.step(1)) == times
        assert after.args.pack_capacity >= LONGEST + after.args.max_new_tokens
        assert kind == ("fits" if lack(before, setting) else "faster")
        if kind == "faster":
            sums = [launch.step(0) + launch.step(1) for launch in (after, before)]
            assert sums[0] / sums[1] == pytest.approx(share, abs=0.006) and share < 0.98
        if "completions at a time" in line:
            places = after.room.running(after.length(1))
            running = min(after.room.completions, places) * after.room.engines
            assert f"({running:,g} of {after.sequences} completions at a time" in line


def test_a_combination_is_faster_than_each_flag(models):
    launch, setting, _ = launch_of(models, "8x80GB", max_new_tokens=16_300)
    shares = [proposed(line)[-1] for line in proposals(launch, setting)]
    assert shares == sorted(shares) and shares[0] < 0.9 * shares[1]


def test_a_launch_that_does_not_fit_has_no_times(models):
    launch, setting, lines = launch_of(models, "4x4090", max_new_tokens=1000)
    assert "GiB of 23.5" in problem(launch, setting)
    assert not any(line.startswith("time of") for line in lines)
    assert all(line.startswith("fits: ") for line in proposals(launch, setting))


def test_a_launch_that_no_flag_can_save_says_so(models):
    launch, setting, _ = launch_of(models, "1x4GB", max_new_tokens=1000)
    (line,) = proposals(launch, setting)
    assert line == "no flags make it fit: take a smaller model"


def test_a_launch_that_does_not_fit_is_offered_adapters_and_more_gpus(models):
    flags = dict(max_new_tokens=1000, gpu_memory_utilization=0.8)
    launch, setting, _ = launch_of(models, "8x80GB", **flags)
    *_, adapters, gpus = proposals(launch, setting)
    assert adapters.startswith("fits: --lora_rank 16: ")
    assert gpus.startswith("fits: --shard_ranks 16 on 16x80GB: ")


def test_more_gpus_may_need_further_flags(models):
    """One 4090 is too small for 8B, whatever the flags, and so are two of them without them."""
    launch, setting, _ = launch_of(models, "1x4090", max_new_tokens=1000)
    assert any(" on 2x4090: " in line for line in proposals(launch, setting))


def test_no_prompt_is_too_long_for_a_proposed_pack(models):
    flags = dict(max_new_tokens=1000, pack_tokens=2**17, activation_checkpointing=False)
    launch, setting, _ = launch_of(models, "8x80GB", **flags)

    def packs(longest: int) -> list[int]:
        lines = proposals(launch, replace(setting, longest=longest))
        return [proposed(line)[1].get("pack_tokens", 2**17) for line in lines]

    assert min(packs(500)) == 2**12 and min(packs(10_000)) == 2**14


def test_enough_memory_gets_no_more(models):
    """64 completions of 2,084 tokens with 147,456 bytes each, and the weights, need 0.451 of the
    GPU."""
    launch, setting, _ = launch_of(models, "8x80GB", max_new_tokens=2000)
    (line,) = [
        line
        for line in proposals(launch, setting)
        if re.match("faster: --gpu_memory_utilization [0-9.]+:", line)
    ]
    assert "--gpu_memory_utilization 0.5:" in line and "512 of 512 completions at a time" in line


def test_a_cache_that_is_no_limit_gets_no_proposal(models):
    flags = dict(max_new_tokens=100, prompts_per_step=8)
    launch, setting, lines = launch_of(models, "8x80GB", **flags)
    assert any("all 8 completions of a step run at a time" in line for line in lines)
    assert not any("gpu_memory_utilization" in line for line in proposals(launch, setting))


def test_a_cache_that_does_not_hold_the_context_is_refused(models):
    flags = dict(gpu_memory_utilization=0.22, max_new_tokens=1000)
    launch, setting, _ = launch_of(models, "8x80GB", **flags)
    assert "does not hold a sequence of 20001 tokens, 2.7 GiB" in problem(launch, setting)


def test_models_are_sharded_over_a_machine(models):
    """`mesh.shard_mesh` does it: 64 GPUs hold 8 copies, and a GPU needs what one of 8 needs."""
    one, *_ = launch_of(models, "8x80GB", "1.7B")
    many, *_ = launch_of(models, "64x80GB", "1.7B")
    assert one.plan == many.plan and many.plan.ranks == 8
    assert launch_of(models, "4x2x80GB", "1.7B")[0].plan.ranks == 2
    # machines with different numbers of training ranks
    assert (
        launch_of(models, "2x8x80GB", "1.7B", rollout_ranks=4, prompts_per_step=12)[0].plan.ranks
        == 12
    )
    assert launch_of(models, "64x80GB", "1.7B", shard_ranks=32)[0].plan.ranks == 32


def test_a_copy_over_several_machines_gathers_over_the_network(models):
    in_machine, *_ = launch_of(models, "64xH100", pack_tokens=2048, max_new_tokens=100)
    across, *_ = launch_of(models, "64xH100", pack_tokens=2048, max_new_tokens=100, shard_ranks=64)
    assert across.phases(1)["update"] > 2 * in_machine.phases(1)["update"]
    one, *_ = launch_of(models, "8xH100", prompts_per_step=8)
    eight, *_ = launch_of(models, "64xH100", prompts_per_step=64)
    averaged = 8 * one.trained[0].trained / 8 * (7 / 8) / eight.rates.copies
    assert eight.updating(1) - one.updating(1) == pytest.approx(averaged)


def test_processes_are_compared_with_the_cores(models, monkeypatch):
    """A plan for other machines says nothing of the cores of this one."""
    monkeypatch.setattr(launch_plan.os, "cpu_count", lambda: 3)
    _, _, (line, *_) = launch_of(models, "16x80GB", reward=("math",), reward_workers=3)
    processes = "cores: 3 processes per rank (--reward_workers) for math"
    assert line == f"{processes}, 24 for the 8 training ranks of a machine"
    assert not launch_of(models, "16x80GB", reward=("gsm8k",))[2][0].startswith("cores")
    (line,) = launch_plan.describe_cores(grpo.Args(dry_run="true", reward=("math",)), 1)
    assert line.startswith("warning: cores: 4 processes per rank")
    assert line.endswith("4 for the training rank of a machine; this machine has 3 cores")


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
    room = Room(1, 1, 32e9, 2 * m.weights, CONFIGS["1.7B"], 2, 768, 256)

    def micro_batch(recompute: bool, rates: Rates) -> float:
        return pass_seconds(
            m, 8192, 1024, replace(kept, recompute=recompute), rates, 1, trains=True
        )

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
    for part, (size, _) in rates_of.PARTS.items():
        name, seconds = documented(part)
        rows.append(f"| {part} | {size} | bfloat16 | {500 * seconds} |  |  |  |  |")
        shares[part] = rates_of_gpu(kind_of(name, 0), part.endswith("compiled"), {})
    monkeypatch.setattr(rates_of, "TABLE", tmp_path / "gpu.md")
    rates_of.TABLE.write_text("\n".join(["NVIDIA H200, torch 2.13.0", "", *rows]))
    twice = rates_of.measured_rates(kind_of("H200", 0))
    fields = {"micro-batch": "training", "micro-batch, compiled": "training",
              "clip and AdamW": "updating", "vLLM: sync": "loading"}  # fmt: skip
    for part, field in fields.items():
        assert twice[part] == pytest.approx(2 * getattr(shares[part], field), rel=0.02), part
        rates = rates_of_gpu(kind_of("H200", 0), part.endswith("compiled"), twice)
        assert getattr(rates, field) == twice[part]
    _, seconds = documented("vLLM: generate")
    faster = 2 * rates_of.generating_seconds(kind_of("H200", 0)) / seconds
    rates = rates_of_gpu(kind_of("H200", 0), False, twice)
    usual = rates_of_gpu(kind_of("H200", 0), False, {})
    assert rates.reading == pytest.approx(faster * usual.reading)
    assert rates.token == pytest.approx(usual.token / faster)
    assert rates_of.measured_rates(kind_of("A100", 0)) == {}
    rates_of.TABLE.write_text("NVIDIA H200\n\n" + rows[0].replace("8192", "512"))
    assert rates_of.measured_rates(kind_of("H200", 0)) == {}


def test_weights_on_the_host_pass_through_the_link_in_every_pass(models):
    (m,) = models["8B"][1]
    rates = rates_of_gpu(kind_of("H100", 0), False, {})
    kept = Plan(1, 8192, recompute=True)
    hosted = replace(kept, offload="all")
    link = rates_of.LINK * rates_of.HOST_LINK
    tokens = 512 * 8192
    assert pass_seconds(m, tokens, 10, hosted, rates, 512, trains=True) == pytest.approx(
        512 * 12 * m.weights / link
    )
    assert pass_seconds(m, tokens, 10, kept, rates, 512, trains=True) < 512 * 12 * m.weights / link
    assert update_seconds(m, hosted, rates) == 40 * m.trained / rates_of.HOST_UPDATING


def test_a_named_mean_length_replaces_the_assumed_ones(models):
    launch, _, lines = launch_of(models, "8xH100@900", max_new_tokens=4000)
    assert launch.new_tokens(0) == launch.new_tokens(1) == 900
    factors = "0.7 and 1.3 times the computed times"
    assert f"assumed: {factors}; completions of 900 tokens on average, the longest 4,000" in lines
    with pytest.raises(ValueError, match="--dry_run 8xH100@900: --max_new_tokens is 800"):
        launch_of(models, "8xH100@900", max_new_tokens=800)
    wide, *_ = launch_of(models, "8xH100", max_new_tokens=4000)
    assert wide.step(0) < launch.step(1) < wide.step(1)


def test_phases_of_a_step_are_those_that_add_up(models):
    *_, lines = launch_of(models, "8xH100", max_new_tokens=4000)
    (line,) = [line for line in lines if line.startswith("time of a step")]
    shares = [int(share) for share in re.findall(r"\((\d+)%\)", line)]
    assert sum(shares) == pytest.approx(100, abs=6) and "; at the same time rewards" in line
    *_, lines = launch_of(models, "8xH100", max_new_tokens=4000, rollout_ranks=4)
    (line,) = [line for line in lines if line.startswith("time of a step")]
    assert re.search(r": update [^,]*, sync [^,]*; at the same time rollout ", line)


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
    pair = [Completion([0] * 100 + [side] * 400, [False] * 500, 100) for side in (1, 2)]
    setting = Setting(shapes, path, [], False, [pair], 0, 1000, 32, 0.0)
    launch, _ = make_launch(args, setting)
    assert (launch.sequences, launch.held_out, launch.room) == (128, 64, None)
    phases = launch.phases(1)
    assert phases["update"] > phases["evaluation"] > 0
    step, assumed, run = describe(launch, 10, True)
    assert "max_new_tokens" not in assumed and "sync" not in step and "; 10 steps; " in run
    # the prompts of pairs are computed once: without the last token, which predicts the first one
    alone, _ = make_launch(replace(args, share_prefix=0), setting)
    assert (alone.shared, launch.shared) == (0, 99)
    assert launch.packed(1, 128) == (pytest.approx(16 * (401 + 99 / 2)), 1)
    # the reference scores all rows before the first step, if the loss has one
    assert phases["reference"] == pytest.approx(phases["evaluation"] * 1032 / 32, rel=0.1)
    for others in (dict(loss=("simpo",)), dict(reference_logprobs="online")):
        launch, _ = make_launch(replace(args, **others), setting)
        assert launch.phases(1)["reference"] == 0


def test_packs_have_whole_sequences_and_prompts_once(models):
    """64 sequences on each rank: 33 of 600 tokens fill a pack of 20,000, and those of a group share
    a prompt; of 15,000, one does, and shares nothing."""
    launch, *_ = launch_of(models, "8xH100", max_new_tokens=600 - PROMPT)
    assert launch.packed(1, 512) == (64 * (600 - PROMPT + PROMPT / 8), 2)
    alone, *_ = launch_of(models, "8xH100", max_new_tokens=600 - PROMPT, share_prefix=0)
    assert alone.packed(1, 512) == (64 * 600, 2)
    assert alone.updating(1) > launch.updating(1)
    long, *_ = launch_of(models, "8xH100", max_new_tokens=15_000 - PROMPT)
    assert long.packed(1, 512) == (64 * 15_000, 64)


def test_completions_of_full_length_run_in_whole_waves(models):
    """9 of them where 8 run at a time take as long as 8 and then 1."""
    (m,) = models["1.7B"][1]
    rates = rates_of_gpu(kind_of("H100", 0), False, {})
    room = Room(1, 1, 0.0, 0.0, CONFIGS["1.7B"], 2, 1000, 9)
    room = replace(room, memory=8.5 * room.cached(1000))

    def seconds(count: int, mean: int = 900) -> float:
        return sampling_seconds(m, room, count, 0, 100, mean, 900, rates)

    assert seconds(9) == pytest.approx(seconds(8) + seconds(1))
    assert seconds(16) == pytest.approx(2 * seconds(8))


def test_shorter_completions_run_more_at_a_time(models):
    """The lower bound of a rollout has completions of half the length: more than half of the
    rounds are saved, because the cache holds more of them."""
    launch, *_ = launch_of(models, "8xH100", max_new_tokens=16_000)
    room = launch.room
    assert room.running(room.length / 2) >= 2 * room.running(room.length)
    low, high = (launch.phases(bound)["rollout"] / time_plan.SPREAD[bound] for bound in (0, 1))
    assert low < 0.45 * high


def test_engines_of_several_gpus_exchange_activations(models):
    one, *_ = launch_of(models, "8xL40S", "1.7B", tensor_parallel_size=2)
    at_no_cost = replace(one, rates=replace(one.rates, link=1e20))
    added = one.sampling(1, 512, 64) - at_no_cost.sampling(1, 512, 64)
    per_token = 2 * 28 * 4 * 2048 / one.rates.link
    tokens = (512 * one.args.max_new_tokens + 64 * PROMPT) / one.room.engines
    assert added == pytest.approx(tokens * per_token, rel=0.01)


@pytest.mark.parametrize(
    ("gpus", "source"),
    [
        (
            "8x80GB",
            "rates: H100, assumed by its memory (name a kind: --dry_run 8xA100): 989 TFLOP/s",
        ),
        ("8xa100", "rates: A100: 312 TFLOP/s, 2,040 GB/s published; shares of them measured on"),
        ("2x24", "rates: 4090, assumed by its memory"),
    ],
)
def test_a_plan_names_its_sources(models, gpus, source):
    _, _, (*_, assumed, run, rates) = launch_of(models, gpus, "1.7B")
    assert rates.startswith(source) and rates.endswith("rewards measured here on ten rows")
    known = "if you know their mean, give it: --dry_run 8xH100@900"
    lengths = f"completions of 128 and 256 tokens on average ({known})"
    assert assumed == f"assumed: 0.7 and 1.3 times the computed times; {lengths}"
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
    seconds = pass_seconds(m, 1, 1, Plan(1, 8192, recompute=False), rates, 1)
    assert seconds > m.layers * rates.layer > 0


@pytest.mark.parametrize(
    ("script", "flags", "frozen", "passes"),
    [
        (grpo, {}, 0, 0),
        (grpo, dict(beta=0.1), 1, 1),
        (grpo, dict(minibatches=2), 0, 1),
        (grpo, dict(minibatches=2, beta=0.1, lora_rank=8), 1, 2),
        (rloo, {}, 1, 2),
        (rloo, dict(beta=0.0), 0, 0),
        (bok, dict(prompts_per_step=64), 1, 2),
        (online_dpo, dict(prompts_per_step=64), 1, 1),
        (ppo, {}, 1, 3),
        (ppo, dict(lora_rank=8), 1, 3),
    ],
)
def test_models_that_score_the_samples_are_those_of_the_script(
    models, script, flags, frozen, passes
):
    """Each is a pass over the samples; ppo.py also trains a value model."""
    path, _ = models["1.7B"]
    args = script.Args(dry_run="8xH100", **SETTINGS | flags)
    value = path if script is ppo else None
    shapes = plan.shapes(args, path, [path] * frozen, value)
    inputs = (path, [path] * frozen, script is ppo, prompts_of(PROMPT), LONGEST)
    launch, _ = make_launch(args, Setting(shapes, *inputs, 1000, 256, 0.0))
    assert len(launch.scorers) == passes
    assert len(launch.trained) == (2 if script is ppo else 1)


def test_adapters_are_proposed_without_the_memory_of_the_reference(models):
    path, _ = models["8B"]
    args = grpo.Args(dry_run="8x80GB", beta=0.1, **SETTINGS | dict(gpu_memory_utilization=0.8))
    setting = Setting(
        plan.shapes(args, path, [path], None), path, [path], False, prompts_of(PROMPT), LONGEST,
        1000, 256, 0.0,
    )  # fmt: skip
    launch, _ = make_launch(args, setting)
    (line,) = [x for x in proposals(launch, setting) if x.startswith("fits: --lora_rank 16: ")]
    adapted = replace(args, lora_rank=16)
    real = replace(setting, models=plan.shapes(adapted, path, [path], None))
    after, _ = make_launch(adapted, real)
    assert proposed(line)[2] == span(after.step(0), after.step(1))


def test_weights_in_products_are_those_that_a_step_counts(tmp_path):
    """The models are a policy, tied or not, and one with a scalar head."""
    for size, tied in (("1.7B", True), ("8B", False)):
        CONFIGS[size].save_pretrained(tmp_path / size)
        args = grpo.Args(dry_run="8xH100")
        policy = load_policy(str(tmp_path / size), args, plan.META)
        assert policy.hf.config.tie_word_embeddings == tied
        counted = matrix_weights(policy.hf)
        assert time_plan.matrix_weights(shapes_of(policy.hf)) == pytest.approx(counted, rel=1e-3)
        scorer = load_scalar_model(str(tmp_path / size), args, plan.META)
        embedding = CONFIGS[size].vocab_size * CONFIGS[size].hidden_size
        without = shapes_of(scorer.hf).weights - embedding
        assert time_plan.matrix_weights(shapes_of(scorer.hf)) == without


def test_windows_hold_as_many_completions_whatever_their_length():
    windowed = config(sliding_window=100)
    room = Room(1, 1, 1e6, 0, windowed, 2, 8000, 256)
    assert room.running(8000) == room.running(200) > 0
    assert room.cached(8000) == room.cached(200)


def test_times_of_scripts_that_vary_are_not_predicted(models):
    path, shapes = models["1.7B"]
    args = self_distill.Args(dry_run="8xH100", hint="answer", **SETTINGS)
    inputs = (path, [path], False, prompts_of(PROMPT), LONGEST, 1000, 256, 0.0)
    setting = Setting(shapes, *inputs)
    launch, _ = make_launch(args, setting)
    assert "the time of self_distill.py is not predicted" in [*describe(launch, 10, True)]
    assert not [*proposals(launch, setting)]


def test_an_empty_prompt_and_an_empty_table_are_no_problem(models, tmp_path, monkeypatch):
    """Agents have empty prompts; the plan of a CPU measures products of as many rows."""
    path, shapes = models["1.7B"]
    monkeypatch.setattr(rates_of, "TABLE", tmp_path / "gpu.md")
    rates_of.TABLE.write_text("")
    for gpus in ("true", "8xH100"):
        small = [replace(m, hidden=64, inner=64) for m in shapes]
        inputs = (path, [], False, prompts_of(0), 0, 10, 10, 0.0)
        launch, _ = make_launch(grpo.Args(dry_run=gpus, **SETTINGS), Setting(small, *inputs))
        assert launch.step(1) > 0


def test_a_mean_length_needs_samples(models):
    path, shapes = models["1.7B"]
    pair = [Completion([0] * 500, [False] * 500, 100)] * 2
    setting = Setting(shapes, path, [], False, [pair], 0, 1000, 32, 0.0)
    with pytest.raises(ValueError, match="--dry_run 8xH100@900: this script samples no"):
        make_launch(dpo.Args(dry_run="8xH100@900"), setting)


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
    planned = {
        "8xH200": (8, 139.8 * 2**30, "H200", 8),
        "2x4090": (2, 23.5 * 2**30, "4090", 8),
        "8x40gb": (8, 40e9, "", 8),
        "8xA100": (8, 79.1 * 2**30, "A100", 8),
        "8xa100-40gb": (8, 39.4 * 2**30, "A100", 8),
        "8xH100-94GB": (8, 94e9, "H100", 8),
        "64xB200": (64, 178 * 2**30, "B200", 8),
        "4x8xH100": (32, 79.1 * 2**30, "H100", 8),
        "3x4x80GB@900": (12, 80e9, "", 4, 900),
    }
    for text, (ranks, size, *rest) in planned.items():
        gpus = grpo.Args(dry_run=text).planned
        assert gpus == (ranks, int(size), *rest, *([None] * (3 - len(rest))))
        assert grpo.Args(dry_run=gpus.times(2)).planned == gpus._replace(ranks=2 * ranks)
    assert kind_of("NVIDIA A100-SXM4-80GB", 85e9).gigabytes == 80
    assert kind_of("NVIDIA A100-SXM4-40GB", 42e9).gigabytes == 40
    assert kind_of("NVIDIA GH200 480GB", 102e9).name == "H100"  # the nearest memory
    assert kind_of("", 141e9).name == "H200"


@pytest.mark.parametrize(
    "gpus",
    [
        "8xB300",
        "8x",
        "x80GB",
        "0x80GB",
        "8x0GB",
        "8x80TB",
        "H100",
        "8xH100-",
        "8x4090-8",
        "8x8x8xH100",
        "8xH100@",
        "8xH100@0",
    ],
)
def test_a_wrong_value_has_one_line(gpus):
    with pytest.raises(ValueError, match=f"--dry_run {gpus}: expected GPUs with their memory"):
        grpo.Args(dry_run=gpus)
