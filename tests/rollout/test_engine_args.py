"""`--engine`, and `--engine_args`: options by vLLM's names."""

import os
from unittest import mock

import pytest
from engines import RANK_0_OF_1
from in_process import Args

from common.model.tiny import tiny_model
from common.parallel import distributed
from common.rollout.engines import make_engine
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
