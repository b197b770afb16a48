"""`--dry_run`: what it checks, what it prints, and its arithmetic against hand numbers."""

import functools
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from scripts import TRAINING
from transformers import AttentionInterface, Qwen3Config

import grpo
import ppo
from bench.memory_plan import CONFIGS, UNTIED, meta_model
from bench.recipes import rows
from common.config.groups import TrainArgs, check_ranks
from common.config.online import USABLE
from common.model.attention import packed_attention
from common.model.flops import forward_flops
from common.model.policy import Policy
from common.model.tiny import tiny_model
from common.parallel.distributed import RunError
from extras.plan import table
from extras.plan.launch import GPUS, Gpu, Launch, bytes_in_cache, flops_per_token
from extras.plan.memory import GIB, num_blocks, num_weights, total
from extras.plan.plan import build, describe_memory, gpus_of

SETTINGS = dict(dtype="bfloat16", prompts_per_step=64, samples_per_prompt=8, pack_tokens=20_000)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Return folders of Qwen3 models without weights, by size."""
    folder = tmp_path_factory.mktemp("models")
    for size in ("1.7B", "8B"):
        CONFIGS[size].save_pretrained(folder / size)
        (folder / size / "tokenizer_config.json").write_text("{}")
    return {size: str(folder / size) for size in ("1.7B", "8B")}


@functools.cache
def policy_of(path: str) -> Policy:
    """Return the policy of grpo.py. No flag of `launch_of` changes its size."""
    (policy,), _ = build(grpo.Args(dry_run="8xH100", **SETTINGS), path, None, [])
    return policy


def launch_of(path: str, gpus: str = "8xH100", prompt: float = 84, **flags) -> Launch:
    """Return the launch of grpo.py."""
    args = grpo.Args(dry_run=gpus, **SETTINGS | flags)
    count, machine, _, gpu = gpus_of(args)
    each = args.samples_per_prompt
    return Launch(args, count, gpu, machine, [policy_of(path)], [], [], prompt, each)


# ---- the dry run of a script ----


@pytest.fixture
def dry(main, capsys):
    """`dry("grpo", *flags)` returns what a dry run prints."""

    def dry(script: str, *flags: object) -> str:
        kind = () if "--dry_run" in flags else ("--dry_run", "8xH100")
        main(script, *flags, "--max_steps", 4, *kind)
        return capsys.readouterr().out

    return dry


@pytest.mark.parametrize("script", TRAINING)
def test_dry_run_needs_no_weights_and_leaves_no_files(script, dry, sums, tmp_path):
    ignored = shutil.ignore_patterns("*.safetensors")
    model = shutil.copytree(tiny_model(), tmp_path / "model", ignore=ignored)
    flags = ["--model", model, "--dataset", sums, "--output_dir", tmp_path / "run"]
    flags += ["--teacher", model] if script == "distill" else []
    flags += ["--hint", "answer"] if script == "self_distill" else []
    said = dry(script, *flags)
    assert re.search(r"memory of a training rank: [0-9.]+ GiB of 79.1 \(", said)
    assert "time of a step: " in said and "dry run: no weights were loaded" in said
    assert not (tmp_path / "run").exists()


def test_the_plan_has_the_first_row_the_step_and_the_rewards(dry, sums, tmp_path):
    flags = "--prompts_per_step 16 --samples_per_prompt 4 --max_new_tokens 10 --minibatches 2"
    flags += " --epochs_per_rollout 3 --rollout_ranks 4 --reward exact_match format"
    text = dry("grpo", "--model", "tiny", *flags.split())
    for line in (
        "the first prompt:\n",
        "reward exact_match, mean of 10 rows: 1 for column answer, 0 for empty completions\n",
        "warning: reward format: column answer scores no better than empty completions\n",
        "step: 16 rows x 4 = 64 sequences, at most ",
        "; training ranks: 4; optimizer steps: 6\n",
        "engines: 4 x 71.2 GiB per GPU (weights 0.0, cache at most 71.2): 256 completions of 16 ",
        "4 steps, without start",
        "x0.5 to x2 of a roofline for H100",
    ):
        assert line in text, line
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12", "completion": "345"}\n' * 16)
    flags = ("--dataset", tmp_path / "rows.jsonl", "--batch_size", 8, "--eval_every", 0)
    text = dry("sft", *flags)
    assert "12⟦345<|eos|>⟧" in text and "step: 8 rows x 1 = 8 sequences, 48 tokens" in text
    assert "time of the run: " in dry("sft", *flags, "--streaming", "true")
    assert "time: not predicted for a CPU" in dry("sft", *flags, "--dry_run", "true")


@pytest.mark.parametrize(("flags", "what"), [
    ("--reward FILE:raises", "rewards could not be computed .* ZeroDivisionError"),
    ("--pack_tokens 90000000", r"--dry_run: needs .* GiB of 79.1 \(activations .*\) on each GPU"),
    ("--dry_run 8xH10", "--dry_run 8xH10: unknown kind; use A100, A100_40GB, H100"),
])  # fmt: skip
def test_a_wrong_launch_is_refused_in_one_line(flags, what, main, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(dict(prompt=f"{i}+1=")) + "\n" for i in range(64)))
    file = tmp_path / "mine.py"
    file.write_text("def raises(*_): return 1 / 0\n\ndef fine(*_): return 1.0\n")
    words = ["--reward", f"{file}:fine", "--dry_run", "8xH100", "--dataset", data,
             "--max_new_tokens", 8, "--eval_every", 0]  # fmt: skip
    with pytest.raises((ValueError, RunError), match=what) as caught:
        main("grpo", *words, *flags.replace("FILE", str(file)).split())
    assert "\n" not in str(caught.value)


def test_flags_are_checked_for_the_planned_ranks():
    with pytest.raises(ValueError, match="must be a number and a kind of GPUs, such as 8xH100"):
        grpo.Args(dry_run="H100")
    for flags, words in (
        (dict(rollout_ranks=8), "--rollout_ranks 8 must be less than .* .8."),
        (dict(prompts_per_step=12), "--prompts_per_step 12 must be .* training ranks .8."),
    ):
        args = grpo.Args(dry_run="8xH100", **flags)
        with pytest.raises(ValueError, match=words):
            check_ranks(args, args.planned_ranks)


# ---- memory and engines ----

BLOCK = 2 * 1024 * 1024 + 2 * 1024 * 256 + 2 * 64 + 3 * 1024 * 4096 + 2 * 1024
WEIGHTS = 3 * BLOCK + 2 * 8000 * 1024 + 1024  # of UNTIED


def model(frozen: bool = False) -> Policy:
    """Return a Qwen3 of 60M weights on meta."""
    AttentionInterface.register("packed", packed_attention)
    dtype = torch.bfloat16 if frozen else torch.float32
    return meta_model(Qwen3Config(**UNTIED.to_dict()), Policy, dtype).requires_grad_(not frozen)


def small_launch(trained, frozen=(), gpus=10, memory=80 * GIB, **flags) -> Launch:
    args = TrainArgs(**dict(pack_tokens=1024, activation_checkpointing=True) | flags)
    return Launch(args, gpus, Gpu(memory), gpus, trained, frozen, [], prompt=100, each=1)


def test_predicted_parts_equal_a_count_by_hand():
    """10 ranks; a number takes 4 bytes as weight and as gradient, 8 for Adam, and 2 if frozen."""
    policy, reference = model(), model(frozen=True)
    parts = small_launch([policy], [reference]).memory
    N = WEIGHTS / 10
    names = ("weights", "frozen models", "gradients", "Adam")
    assert [parts[name] for name in names] == pytest.approx([4 * N, 2 * N, 4 * N, 8 * N])
    both = small_launch([policy, model()]).memory
    assert [both[name] for name in names] == pytest.approx([8 * N, 0, 8 * N, 16 * N])
    assert both["gathered weights"] == parts["gathered weights"]  # updates alternate
    host = small_launch([policy], [reference], offload="optimizer").memory
    assert host | dict(Adam=parts["Adam"]) == parts and host["Adam"] == 0
    gone = small_launch([policy], [reference], offload="all").memory
    assert [gone[name] for name in names] == [0] * 4


def test_activations_are_planned_as_a_run_chooses_them():
    """Blocks are only chosen without the flag, not on a CPU (0 bytes), and not for scores with a
    softcap, whose memory is not predicted."""
    policy, capped = model(), model()
    capped.hf.config.attn_logit_softcapping = 50.0
    all_kept = small_launch([policy], gpus=8, pack_tokens=8192, activation_checkpointing=False)
    capacity = total(all_kept.memory) / USABLE
    for flag, one, size, kept in (
        (None, policy, capacity + 1, 3), (None, policy, capacity - 1, 2), (None, policy, 1, 0),
        (None, policy, 0, 3), (True, policy, capacity + 1, 0), (False, policy, capacity - 1, 3),
        (None, capped, capacity + 1, 0),
    ):  # fmt: skip
        flags = dict(gpus=8, memory=size, pack_tokens=8192, activation_checkpointing=flag)
        assert small_launch([one], **flags).kept == [kept]


def test_a_step_needs_the_larger_of_update_and_sampling(folders):
    """A colocated engine shares the GPU with weights and Adam but not with gradients, and takes all
    that they leave. That of transformers stays in memory: it counts as a copy of the policy."""
    launch = launch_of(folders["1.7B"], pack_tokens=4096)
    update, sampling = launch.update_memory, launch.memory
    assert total(sampling) == pytest.approx(USABLE * launch.gpu.memory)
    assert launch.problem() is None
    assert sampling["engine"] == launch.engine and "gradients" not in sampling
    assert [sampling[name] for name in ("weights", "Adam")] == [update["weights"], update["Adam"]]
    small = replace(launch, args=replace(launch.args, engine_args=("gpu_memory_utilization=0.01",)))
    assert small.memory == update
    full = replace(launch, gpu=Gpu(total(sampling | dict(engine=0)) / USABLE))
    assert full.engine == 0 and full.problem().startswith("needs ")
    assert not launch_of(folders["1.7B"], rollout_ranks=4).memory["engine"]
    copy = launch_of(folders["1.7B"], engine="transformers")
    assert copy.memory["engine"] == 2 * num_weights(copy.trained[0])


def test_models_beside_the_policy_are_counted(folders):
    """With adapters, the policy without them is the reference."""
    path = folders["1.7B"]
    args = grpo.Args(dry_run="8xH100", reward=(f"judge:{folders['8B']}",), **SETTINGS)
    (policy,), (judge,) = build(args, path, None, [])
    assert policy.matrix_weights < 2e9 < 7e9 < judge.matrix_weights
    assert not any(parameter.requires_grad for parameter in judge.parameters())
    args = ppo.Args(dry_run="8xH100", lora_rank=8, **SETTINGS)
    trained, others = build(args, path, path, [path])
    launch = Launch(args, 8, GPUS["H100"], 8, trained, others, [], 100, 8)
    assert len(trained) == 2 and not others
    launch.kept[0] = 7
    assert launch.passes(trained[0]) == 2 + 1 - 7 / num_blocks(trained[0])


def test_models_are_sharded_over_a_machine(folders):
    path = folders["1.7B"]
    assert [launch_of(path, gpus).ranks for gpus in ("4xH100", "8xH100", "64xH100")] == [4, 8, 8]
    assert launch_of(path, "64xH100", shard_ranks=32).ranks == 32
    assert launch_of(path, "8xH100", rollout_ranks=4, prompts_per_step=64).ranks == 4


def test_eight_billion_parameters_have_room_for_nineteen_long_completions(folders):
    launch = launch_of(folders["8B"], max_new_tokens=16_300)
    *_, line = describe_memory(launch)
    expected = "engines: 8 x 58.3 GiB per GPU (weights 15.3, cache at most 43.0): 19 completions"
    assert line == expected + " of 16,384 tokens at a time, of 64 of a step"
    two = launch_of(folders["8B"], max_new_tokens=16_300, tensor_parallel_size=2)
    assert two.engine_weights == launch.engine_weights / 2 and two.engines == 4
    assert launch_of(folders["8B"], rollout_ranks=4).engine == 0.9 * GPUS["H100"].memory


def test_vllm_needs_room_for_one_sequence(folders):
    launch = launch_of(folders["8B"], engine_args=("gpu_memory_utilization=0.2",))
    assert "vLLM would not start: 15.3 GiB of weights and 2.7 for the" in launch.problem()
    assert launch_of(folders["8B"]).problem() is None


def config(**changes) -> SimpleNamespace:
    sizes = dict(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    return SimpleNamespace(hidden_size=64, **sizes | changes)


def test_cache_of_a_sequence_by_hand():
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


# ---- time ----


def test_times_by_hand(folders):
    """Operations are those of the metrics, every further forward takes a third of the update, waves
    are whole, and epochs repeat the update."""
    model = launch_of(folders["1.7B"]).trained[0]
    tokens = SimpleNamespace(
        lengths=[1000] * 3, keys=None, offsets=[0, 1000, 2000, 3000], targets_T=torch.zeros(3000)
    )
    counted = forward_flops(model.hf.config, model.matrix_weights, tokens)
    assert 3000 * flops_per_token(model, 1000) == pytest.approx(counted, rel=1e-3)

    flags = dict(max_new_tokens=16_300, activation_checkpointing=False, compile=False)
    launch = launch_of(folders["8B"], **flags)
    (model,) = launch.trained
    forward = 64 * 8 * 16_384 / 8 * flops_per_token(model, 16_384) / (0.27 * 989e12)
    scored = replace(launch, scorers=[model, model]).seconds()
    assert scored["log-probs"] == pytest.approx(2 * forward)
    half = replace(launch, own_forwards=0.5).seconds()
    assert half["log-probs"] == pytest.approx(forward / 2)
    assert scored["update"] == pytest.approx(3 * forward)
    compiled = replace(launch, args=replace(launch.args, compile=True)).seconds()
    assert compiled["update"] == pytest.approx(3 * forward * 0.27 / 0.38)
    args = replace(launch.args, epochs_per_rollout=4)
    assert replace(launch, args=args, trained_fraction=0.25).seconds() == launch.seconds()
    token = launch.engine_weights + 64 / 4 * launch.cached(84 + 8150)  # in four waves of at most 19
    prompts = 8 * 84 * flops_per_token(model, 84) / (0.27 * 989e12)
    assert launch.seconds()["rollout"] == pytest.approx(
        4 * 16_300 * token / (0.8 * 3.35e12) + prompts
    )


def test_rollouts_of_other_ranks_overlap_if_samples_may_be_older(folders):
    for staleness, longest in ((0, sum), (1, max)):
        launch = launch_of(folders["8B"], rollout_ranks=4, max_staleness=staleness)
        phases = launch.seconds()
        rest = phases["update"] + phases["log-probs"]
        assert launch.step_seconds(phases) == pytest.approx(longest([phases["rollout"], rest]))


def test_table_of_recipes_is_the_prediction():
    page = (ROOT / "configs/README.md").read_text()
    table = re.findall(r"^\| `(qwen3_\d\S+)` \| [^|]+ \| (.+)$", page, re.M)
    assert dict(rows()).items() <= dict(table).items()


def test_table_of_models_is_the_prediction():
    """The test makes one size; `python extras/plan/table.py --write` writes all."""
    page = table.PAGE.read_text().splitlines()
    for line in table.lines(("1.7B",), ("sft",)):
        assert line in page
