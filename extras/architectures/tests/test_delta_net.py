"""Gated delta nets in packs: their convolutions and states begin anew at every sequence.
test_coverage.py compares their numbers with transformers' on padded rows."""

import functools
import inspect
import sys
from dataclasses import replace

import pytest
import torch
from model.test_families import require_vllm_keeps_nothing
from model.test_policy import write_checkpoint
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench.models import ARCHITECTURES, ARGS, SIZES
from common.data.packing import pack, pack_groups
from common.data.sample import Sample
from common.model.flops import forward_flops
from common.model.loading import whole
from common.model.policy import load_policy
from extras.architectures.delta_net import CONVOLUTION, ONE_TOKEN, RECURRENCE

QUICK = "qwen3_5_text"
TYPES = (QUICK, "qwen3_next", "qwen3_5_moe_text")
# Around the convolution's four taps and the recurrence's chunks of 64 tokens, in targets.
LENGTHS = (2, 301, 3, 64, 65, 66, 2, 129, 4, 5)
SHORT = replace(ARGS, share_prefix=0)
STEPS = ("--max_steps", 2, "--batch_size", 4, "--lr", 1e-3, "--eval_every", 0, "--save_every", 1,
         "--lr_schedule", "constant", "--dtype", "float32")  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[t if t == QUICK else pytest.param(t, marks=pytest.mark.slow) for t in TYPES],
)
def model_type(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(model_type, tmp_path_factory) -> str:
    """Two layers: a delta net and attention."""
    layers = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    sizes = SIZES | ARCHITECTURES[model_type] | layers | dict(max_position_embeddings=512)
    config = AutoConfig.for_model(model_type, **sizes)
    return write_checkpoint(config, tmp_path_factory.mktemp(model_type))


def samples(lengths=LENGTHS) -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 384, (n,), generator=generator).tolist() for n in lengths]
    return [Sample(i, [True] * len(i)) for i in ids]


def numbers(policy, packs: list[list[Sample]], device) -> tuple[dict, dict[str, Tensor]]:
    """Return the log-probs of each sample and the gradient of a sum of them."""
    logprobs = {}
    policy.zero_grad()
    for group in packs:
        for mb in pack(group, 10_000, device):
            logprobs_T = policy(mb)[0]
            # The weight of each token depends on its target alone.
            (logprobs_T * (1 + mb.targets_T % 3)).sum().backward()
            for begin, end in zip(mb.offsets, mb.offsets[1:], strict=False):
                targets = tuple(mb.targets_T[begin:end].tolist())
                logprobs[targets] = logprobs_T[begin:end].detach()
    gradient = {n: whole(p.grad).clone() for n, p in policy.hf.named_parameters()}
    return logprobs, gradient


def assert_equal(one: tuple, other: tuple) -> None:
    assert one[0].keys() == other[0].keys()
    for targets, expected_T in other[0].items():
        torch.testing.assert_close(one[0][targets], expected_T, atol=1e-5, rtol=0)
    largest = max(g.abs().max() for g in other[1].values())
    for name, expected in other[1].items():
        assert (one[1][name] - expected).abs().max() < 1e-5 * largest, name


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pack_has_the_numbers_of_its_sequences_alone(recompute, path, device):
    """Values and gradients, in any order of sequences, of 1 to 300 targets. Activation
    checkpointing changes nothing."""
    alone = numbers(load_policy(path, SHORT, device), [[s] for s in samples()], device)
    policy = load_policy(path, replace(SHORT, activation_checkpointing=recompute), device)
    assert_equal(numbers(policy, [samples()], device), alone)
    if not recompute:
        assert_equal(numbers(policy, [samples()[::-1]], device), alone)
        order = sorted(samples(), key=lambda sample: len(sample.ids))
        assert_equal(numbers(policy, [order], device), alone)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels may be called here")
def test_installed_kernels_are_not_called_on_a_cpu(path, device, monkeypatch):
    """Transformers calls the kernels of an installed package on every device."""
    policy = load_policy(path, SHORT, device)
    module = sys.modules[type(policy.hf).__module__]
    for name in (CONVOLUTION, RECURRENCE, *ONE_TOKEN):
        function = getattr(module, name)
        torch_code = inspect.unwrap(getattr(function, "of_transformers", function))

        @functools.wraps(torch_code)
        def kernel(*_, **__):
            raise RuntimeError("no CUDA device")

        monkeypatch.setattr(module, name, kernel)
    policy = load_policy(path, SHORT, device)
    (mb,) = pack(samples(), 1000, device)
    assert policy(mb).logprobs_T.isfinite().all()
    policy.unshard()
    policy.hf.set_attn_implementation("eager")
    ids = policy.hf.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, eos_token_id=None)
    assert ids.shape == (1, 6)


def test_shared_prefixes_are_off(path, device, capsys):
    args = replace(ARGS, share_prefix=1)
    policy = load_policy(path, args, device)
    assert policy.share_prefix == 0
    model_type = policy.hf.config.model_type
    assert f"{model_type} needs --share_prefix 0, which is taken" in capsys.readouterr().out
    (mb,) = pack_groups([[Sample([5, 6, 7, 8], [True] * 4)] * 2], 100, device, share_prefix=1)
    with pytest.raises(ValueError, match="needs whole sequences; set --share_prefix 0"):
        policy(mb)


def test_context_ranks_are_refused(path, device):
    message = r"--context_ranks 2: gated delta nets \(.*\) need whole sequences on each rank"
    with pytest.raises(ValueError, match=message):
        load_policy(path, replace(SHORT, context_ranks=2), device)


def test_other_recurrences_are_refused(tmp_path, device):
    """MiniMax has layers of the same name in its config, with another recurrence."""
    fields = SIZES | dict(num_experts_per_tok=2, num_local_experts=4, block_size=16)
    types = ["linear_attention", "full_attention"] * 2
    config = AutoConfig.for_model("minimax", **fields, layer_types=types)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no language model of minimax with packed attention"):
        load_policy(str(tmp_path), SHORT, device)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [QUICK], indirect=True)
def test_compiled_blocks_have_the_same_numbers(path, device):
    """Forward and backward, of a pack of other lengths too."""
    plain = load_policy(path, SHORT, device)
    with torch.compiler.set_stance("force_eager"):
        policy = load_policy(path, replace(SHORT, compile=True), device)
    with torch.compiler.set_stance("default", force_backend="eager"):
        for group in (samples((9, 70, 2)), samples((30,))):
            assert_equal(numbers(policy, [group], device), numbers(plain, [group], device))


# ---- operations and memory ----


def test_attention_is_counted_in_its_layers_alone(path, device):
    """The operations grow with the square of a length in one layer of two."""
    policy = load_policy(path, SHORT, device)
    config = policy.hf.config
    (one,) = pack(samples((101,)), 1000, device)
    (two,) = pack(samples((51, 51)), 1000, device)
    weights = policy.matrix_weights
    pairs = 100 * 101 / 2 - 2 * 50 * 51 / 2
    difference = forward_flops(config, weights, one) - forward_flops(config, weights, two)
    assert difference == 4 * config.num_attention_heads * config.head_dim * pairs
    attention = 4 * config.num_attention_heads * config.head_dim * 100 * 101 / 2
    assert forward_flops(config, weights, one) == 100 * 2 * weights + attention


# ---- runs ----


@pytest.mark.parametrize("model_type", [QUICK], indirect=True)
@pytest.mark.slow
def test_adapters_of_delta_nets(path, sums, tmp_path, main):
    """The five linear layers of a delta net have adapters, and the merged export opens."""
    targets = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"
    flags = (*STEPS, "--model", path, "--dataset", sums, "--lora_rank", 2, "--output_dir", tmp_path)
    main("sft", *flags, "--lora_targets", *targets)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info
    before = AutoModelForCausalLM.from_pretrained(path).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[-2] for name in changed} == set(targets)


@pytest.mark.slow
def test_vllm_keeps_nothing_of_old_weights(tmp_path):
    """Nor of a state of a delta net. test_gpt_oss.py has the other model with a special way."""
    require_vllm_keeps_nothing(QUICK, tmp_path)
