"""What is required of every architecture of docs/models.md."""

from pathlib import Path

import pytest
from processes import run

from bench.models import ARCHITECTURES, checkpoint, measure

WITH_DELTA_NETS = [t for t in ARCHITECTURES if t.startswith(("qwen3_5", "qwen3_next"))]


def require_exact(model_type: str, folder: Path, device) -> None:
    """Packed log-probs and gradient equal those of transformers on padded rows, and the export
    equals the checkpoint."""
    found = measure(model_type, folder, device)
    # Gemma 4: in float32 transformers' own gradient is 5e-5 from that in float64, ours 3e-5.
    limit = 5e-5 if model_type == "gemma4" else 1e-5
    assert found["forward"] < 1e-5 and found["gradient"] < limit and found["export"] == 0


# Program of a rank: vLLM samples the same prompts again and again, with other weights each time.
AGAIN = """
import sys
from dataclasses import replace
import torch
from bench.completions import complete
from bench.delta_vllm import prepare
from bench.models import ARGS, rows
from common.model.policy import load_policy
from common.packs.packing import pack
from common.parallel import distributed
from common.rollout.engines import make_engine
from common.rollout.weights import sync_weights, whole_weights
from common.text.tokenizer import load_tokenizer
path, has_delta_nets = sys.argv[1:]
device, _, _ = distributed.setup(0)
if has_delta_nets == "True":
    prepare()
policy, tokenizer = load_policy(path, ARGS, device), load_tokenizer(path)
args = replace(ARGS, engine="vllm")
engine = make_engine(path, args, tokenizer, device)
worst = []
with torch.no_grad():
    for turn in range(4):
        sync_weights(engine, whole_weights(policy, engine.dtype))
        groups = complete(engine, rows()[1:4], 2, [1, 2, 3], 0.7)
        (mb,) = pack([sample for group in groups for sample in group], 2000, device)
        difference_T = policy(mb, temperature=0.7)[0] - mb.rollout_logprobs_T
        worst.append((difference_T * mb.loss_mask_T).abs().max().item())
        policy.reshard()
        for number, parameter in enumerate(policy.parameters()):
            parameter.mul_(1 + 0.05 * (number % 3))
engine.close()
print(worst)
assert max(worst) < 1e-4, worst
"""


def require_vllm_keeps_nothing(model_type: str, folder: Path) -> None:
    """It samples the same prompts four times, with other weights each time: neither a weight, nor
    a cached prefix, nor a state of a delta net is left from before."""
    pytest.importorskip("vllm")
    path = checkpoint(model_type, folder / "model")
    run(1, AGAIN, path, model_type.startswith("qwen3_5"))
