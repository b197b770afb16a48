"""`--engine`, and `--engine_args`: options by vLLM's names."""

import os
from unittest import mock

import pytest
import torch
from engines import RANK_0_OF_1
from in_process import Args
from processes import run
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.config.online import ALONE
from common.model.tiny import tiny_model
from common.parallel import distributed
from common.rollout.engines import make_engine
from common.rollout.vllm_engine import free_fraction
from common.rollout.weights import gathered_bytes
from common.text.tokenizer import load_tokenizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("foo=1", "'foo'"),
        ("max_num_seqs=many", "max_num_seqs: Input should be a valid integer"),
        ("dtype=float16", "--engine_args dtype=float16: the run sets it"),
        ("logprobs_mode=raw_logprobs", "--engine_args logprobs_mode=raw_logprobs: the run sets it"),
    ],
)
def test_wrong_options_are_refused_in_one_line(device, option, reason):
    pytest.importorskip("vllm")
    path = tiny_model()
    args = Args(engine="vllm", max_new_tokens=8, engine_args=(option,))
    with (
        mock.patch.dict(os.environ, RANK_0_OF_1),
        pytest.raises(ValueError, match=reason) as caught,
    ):
        make_engine(path, args, load_tokenizer(path), device)
    assert "\n" not in str(caught.value)


def test_values_are_those_of_yaml():
    given = ("a=1", "b=0.5", "c=true", "d=x", 'e={"m": "ngram", "n": 4}')
    options = Args(engine_args=given).engine_options
    assert options == dict(a=1, b=0.5, c=True, d="x", e=dict(m="ngram", n=4))
    for wrong in ("a", "=1", "gpu_memory_utilization=2", "gpu_memory_utilization=x"):
        with pytest.raises(ValueError, match="--engine_args"):
            Args(engine_args=(wrong,))


def test_without_vllm_transformers_samples(device, monkeypatch, capsys):
    """The first rank that samples says so. Flags of vLLM are refused."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path, tokenizer = tiny_model(), load_tokenizer(tiny_model())
    for flags in (
        dict(engine="vllm"),
        dict(tensor_parallel_size=2),
        dict(engine_args=("max_num_seqs=8",)),
    ):
        with monkeypatch.context() as ranks, pytest.raises(ValueError, match="vllm"):
            ranks.setenv("WORLD_SIZE", "2")
            make_engine(path, Args(**flags), tokenizer, device)
    monkeypatch.setattr(distributed, "is_rollout_rank", lambda: True)
    assert type(make_engine(path, Args(), tokenizer, device)).__name__ == "TransformersEngine"
    assert "vllm is not installed: sampling with transformers" in capsys.readouterr().out


# ---- memory of an engine on a GPU ----


def test_an_engine_takes_what_is_free():
    """In GiB of a GPU: what the trainer has while sampling, and what a weight sync gathers, leave
    the rest of the usable 92%, but not more than an engine alone gets."""
    assert free_fraction(80, 0.5, 0) == ALONE
    assert free_fraction(80, 12, 4) == pytest.approx(0.92 - 0.2)
    for used in (76, 80):
        refused = f"{used / 80:.0%} of a GPU are in use, 92% are usable; --offload, .* help$"
        with pytest.raises(ValueError, match=refused):
            free_fraction(80, used, 0)


LEAST = """
from common.parallel import distributed
from common.rollout.vllm_engine import free_fraction
distributed.setup(0)
assert abs(free_fraction(80, 12 + 4 * distributed.rank(), 4) - (0.92 - 0.25)) < 1e-9
distributed.cleanup()
"""


def test_engines_take_the_least_that_is_free_on_any_rank():
    run(2, LEAST)


def test_a_weight_sync_gathers_the_root_and_two_blocks():
    sizes = dict(hidden_size=8, intermediate_size=16, num_attention_heads=2, head_dim=4,
                 num_key_value_heads=1, num_hidden_layers=3, vocab_size=100)  # fmt: skip
    for tied in (True, False):
        with torch.device("meta"):
            hf = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=tied))
        block = 2 * 8 * 8 + 2 * 8 * 4 + 2 * 4 + 3 * 8 * 16 + 2 * 8
        outside = (1 if tied else 2) * 100 * 8 + 8
        assert gathered_bytes(hf, torch.bfloat16) == 2 * (outside + 2 * block)
