"""The transformers engine: properties that vLLM gets from its flags. test_engine.py tests the
properties of both engines."""

import json
import shutil

import torch
from in_process import NEW_TOKENS, Args

from bench.completions import complete
from common.data.packing import pack
from common.model.hub import load_tokenizer
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.rollout.engines import make_engine


@torch.no_grad()
def test_generation_config_of_the_model_is_ignored(tmp_path, device):
    """The flag generation_config="vllm" does this for vLLM."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model(), path)
    config = json.loads((path / "generation_config.json").read_text())
    config |= dict(do_sample=True, temperature=0.3, top_k=5, top_p=0.5, repetition_penalty=1.5)
    (path / "generation_config.json").write_text(json.dumps(config))
    args = Args(dtype="float32", engine="transformers", max_new_tokens=NEW_TOKENS)
    tokenizer, policy = load_tokenizer(path), load_policy(str(path), args, device)
    engine = make_engine(str(path), args, tokenizer, device)
    prompts = [tokenizer(text)["input_ids"] for text in ("1+1=", "a")]
    groups = complete(engine, prompts, 4, [1, 2], 1.0)
    for mb in pack([sample for group in groups for sample in group], 1000, device):
        logprobs_T, *_ = policy(mb, temperature=1.0)
        assert ((logprobs_T - mb.rollout_logprobs_T).abs() * mb.loss_mask_T).max() < 1e-4
