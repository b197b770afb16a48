"""Packed weights: bitsandbytes' bytes, the gradients of the unpacked model, ranks, resumption and
files."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import assert_equal_runs, assert_resumes_exactly, metrics, stored
from model.adapters import MODELS, assert_same_weights_everywhere, move
from model.checkpoints import samples, write_checkpoint
from processes import run
from safetensors.torch import load_file, save_file

from bench.models import checkpoint
from common.config.groups import TrainArgs as Args
from common.config.parse import one_line
from common.model.loading import whole
from common.model.lora import LoRALinear
from common.model.policy import load_policy
from common.packs.packing import pack as pack_samples
from extras.quantized.nf4 import BLOCK, PAIRS, pack, unpack, width

ARGS = Args(dtype="float32", lora_rank=4, lora_alpha=8.0, quantize="nf4")
DTYPES = ("float32", "bfloat16", "float16")


# ---- bytes ----

# Of bitsandbytes 0.50.2: quantize_4bit(matrix(), blocksize=64, quant_type="nf4").
CODES = bytes.fromhex(
    "013b1b52125c1c52114a092fee03b1d9658d1a2fdce04e51eef15e50eddf2b1e977ae2d51ff13b1c63248e3e95359e3e"
    "73124b092feef2a1c6335af60c989d181da89d070b6458d1c41ff14c1d8546b070d98ad191d989c06fa5336c1a2feef2"
    "7777777777777777777777777777777777777777777777777777777777777777"
)


def matrix() -> torch.Tensor:
    """Return [2, 128] integers that bfloat16 holds; the last block is 0."""
    k = torch.arange(256)
    weight = ((k * k * 31 + k * 17) % 509 - 254).reshape(2, 128).bfloat16()
    weight[1, 64:] = 0
    return weight


def test_codes_and_scales_are_those_of_bitsandbytes(device):
    packed = pack(matrix().to(device)).cpu()
    assert packed.dtype == torch.uint8 and packed.shape == (2, width(128))
    assert bytes(packed[:, :64].flatten().tolist()) == CODES
    scales = packed[:, 64:].contiguous().view(torch.bfloat16)
    assert scales.tolist() == [[254.0, 252.0], [249.0, 0.0]]


def test_unpacked_matrix_packs_to_the_same_bytes(device):
    """So an export does, too. No number is further from its own than half of the table's widest
    gap, also beside a much larger one, and zeros stay zeros."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 5 * BLOCK, generator=generator).to(device)
    weight[0, 7], weight[1, :BLOCK] = 1e4, 0
    packed = pack(weight)
    for dtype in DTYPES:
        again = unpack(PAIRS.to(device), packed, getattr(torch, dtype))
        assert again.dtype == getattr(torch, dtype) and torch.equal(pack(again), packed)
        largest = weight.unflatten(1, (-1, BLOCK)).abs().amax(-1).repeat_interleave(BLOCK, 1)
        assert ((again.float() - weight).abs() <= 0.156 * largest).all()
        assert (again[1, :BLOCK] == 0).all() and again[0, 7] == torch.tensor(1e4).bfloat16()


# ---- the model of a folder with unpacked weights ----


def unpacked_folder(path: str, folder: Path) -> str:
    """Write the model of `path` with the numbers that its packed layers have."""
    shutil.copytree(path, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if ".layers." in name and weight.ndim == 2 and weight.shape[1] % BLOCK == 0:
            weights[name] = unpack(PAIRS, pack(weight), torch.float32)
    save_file(weights, folder / "model.safetensors", metadata=dict(format="pt"))
    return str(folder)


def trained(path: str, args: Args, device: torch.device) -> list[torch.Tensor]:
    """Return log-probs, and the gradients of all adapters, which are moved off zero."""
    policy = move(load_policy(path, args, device))
    found = []
    for mb in pack_samples(samples(), 100, device):
        logprobs_T, *_ = policy(mb)
        (-logprobs_T * mb.loss_mask_T).sum().backward()
        found.append(logprobs_T.detach())
    return found + [whole(p.grad) for p in policy.parameters() if p.requires_grad]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """Return a folder whose down_proj has 96 inputs and is therefore not packed."""
    return write_checkpoint(MODELS["untied"](), tmp_path_factory.mktemp("untied"))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("recompute", [True, False])
def test_gradients_are_those_of_the_unpacked_model(dtype, recompute, path, device, tmp_path):
    """They are equal bit for bit, and the backward keeps no unpacked matrix."""
    args = replace(ARGS, dtype=dtype, activation_checkpointing=recompute)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ours = trained(path, args, device)
    theirs = trained(unpacked_folder(path, tmp_path / "f"), replace(args, quantize=None), device)
    assert len(ours) == len(theirs) > 42 and all(map(torch.equal, ours, theirs))
    dense = {(64, 64), (32, 64), (96, 64)}
    assert {x.dtype for x in kept if tuple(x.shape) in dense} <= {torch.int64}
    assert recompute or (96, width(64)) in {tuple(x.shape) for x in kept}


RANKS = """
import sys
sys.path[:0] = ["tests"]
import torch
from common.parallel import distributed
from extras.quantized.tests.test_nf4 import ARGS, replace, trained
device, rank, ranks = distributed.setup(0)
for dtype in ("float32", "bfloat16"):
    args = replace(ARGS, dtype=dtype)
    ours = trained(sys.argv[1], args, device)
    theirs = trained(sys.argv[2], replace(args, quantize=None), device)
    assert len(ours) == len(theirs) > 42 and all(map(torch.equal, ours, theirs))
distributed.cleanup()
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_are_those_of_the_unpacked_model(ranks, path, tmp_path):
    """They are equal bit for bit on each number of ranks."""
    run(ranks, RANKS, path, unpacked_folder(path, tmp_path / "unpacked"))


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_trainer_engine_and_files_have_the_same_weights(dtype, path, tmp_path, device, monkeypatch):
    args = replace(ARGS, dtype=dtype, output_dir=str(tmp_path))
    assert_same_weights_everywhere(path, args, device, monkeypatch)


def test_offloaded_shards_have_the_same_bytes(path, device):
    on_device, on_host = (
        load_policy(path, replace(ARGS, offload=x), device) for x in ("none", "all")
    )
    for ours, theirs in zip(on_device.parameters(), on_host.parameters(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(whole(ours), whole(theirs))


# ---- models ----


def test_names_and_rows_of_files_are_those_of_packed_layers(device, tmp_path):
    """The model has fused queries, keys and values, and an MLP of 96 inputs that is not packed."""
    path = checkpoint("phi3", tmp_path)
    policy, files = load_policy(path, ARGS, device), stored(path)
    layers = {n: x for n, x in policy.hf.named_modules() if isinstance(x, LoRALinear)}
    assert {n.rpartition(".")[2] for n in layers if n.endswith("proj")} >= {"qkv_proj", "down_proj"}
    for name, layer in layers.items():
        weight = files[f"{name}.weight"]
        is_packed = weight.shape[1] % BLOCK == 0
        assert is_packed == ("down_proj" not in name)
        assert torch.equal(whole(layer.weight), pack(weight) if is_packed else weight)


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        (
            "mixtral",
            {},
            "0.1966 M of 0.7885 M weights .* packed: linear layers .*, no stacked experts; leave",
        ),
        (
            "llama",
            dict(lora_targets=("q_proj",)),
            "linear layers with an adapter and a multiple of 64",
        ),
        ("other", {}, r"no matrix model.layers.0.mlp.gate_proj.weight \[96, 64\] in the files"),
    ],
)
def test_models_that_stay_or_differ_are_refused_in_one_line(model, flags, words, device, tmp_path):
    path = checkpoint(model.replace("other", "llama"), tmp_path)
    if model == "other":
        (file,) = Path(path).glob("*.safetensors")
        weights = load_file(file)
        weights["x"] = weights.pop("model.layers.0.mlp.gate_proj.weight")
        save_file(weights, file, metadata=dict(format="pt"))
    with pytest.raises(ValueError, match=f"--quantize nf4: .*{words}") as error:
        load_policy(path, replace(ARGS, **flags), device)
    assert "\n" not in one_line(error.value)


@pytest.mark.slow
def test_predicted_memory_is_close_to_that_of_fake_tensors():
    done = run(1, "bench/memory_plan.py", "--tokens", 2048, "nf4")
    assert done.stdout.count("predicted") == 3


# ---- runs ----

SFT = ("--max_steps", 3, "--save_every", 2, "--batch_size", 12, "--lr", 1e-2, "--warmup_steps", 0,
       "--eval_every", 0, "--lora_rank", 4, "--quantize", "nf4")  # fmt: skip
SCRIPTS = dict(
    sft=(3, *SFT, "--share_prefix", 0),
    dpo=(2, *SFT, "--dataset", "pairs", "--sft_weight", 0.1),
)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_run_is_equal_on_other_ranks_and_packs_and_resumes(script, small, pairs, main, tmp_path):
    """tests/test_every_script.py has the same for models that are not packed."""
    ranks, *flags = SCRIPTS[script]
    flags = [*small, *(pairs if flag == "pairs" else flag for flag in flags)]
    one, several = tmp_path / "one", tmp_path / "several"
    run(ranks, f"{script}.py", *flags, "--output_dir", several)
    flags += ["--pack_tokens", 500, "--max_length", 250]
    main(script, *flags, "--output_dir", one)
    assert_equal_runs(several, one)
    assert_resumes_exactly(main, script, *flags, folder=one, finished=3)


@pytest.mark.slow
def test_online_run_agrees_with_its_engine_and_resumes(online, main, tmp_path):
    flags = (*online, "--lora_rank", 4, "--quantize", "nf4", "--beta", 0.1, "--save_every", 1,
             "--keep_last", 2, "--value_lr", 1e-2, "--minibatches", 1)  # fmt: skip
    main("ppo", *flags, "--output_dir", tmp_path / "run")
    assert_resumes_exactly(main, "ppo", *flags, folder=tmp_path / "run", finished=2)
    assert metrics(tmp_path / "run")[0]["objective/kl"] == 0, "the reference is the start"
