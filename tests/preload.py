"""What the process that ranks are forked from has imported: most of a short run's time is imports.

And what they leave in memory is none of the collector's business: vLLM has it collect half a dozen times.
"""

import atexit
import contextlib
import gc
import importlib
import logging
import sys
from pathlib import Path

import torch

LIBRARIES = [
    "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor", "tyro",
    "transformers", "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3",
    "transformers.generation.utils", "rich.table", "matplotlib.pyplot",
]  # fmt: skip
OF_VLLM = [
    "vllm.entrypoints.llm", "vllm.v1.core.sched.scheduler", "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn", "vllm.plugins.lora_resolvers.filesystem_resolver",
    "compressed_tensors.compressors",
]  # fmt: skip
OURS = ["common.config.parse", "common.model.lora", "common.rollout.sampler", "common.rollout.vllm_engine",
        "common.train.run", "common.data.token_cache"]  # fmt: skip

logging.getLogger("vllm").setLevel(logging.ERROR)  # it says that a CPU has no Triton
sys.path[0] = str(Path(__file__).resolve().parent.parent)  # no longer the tests
gc.disable()
for name in LIBRARIES + OURS + ([] if torch.cuda.is_available() else OF_VLLM):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.enable()
gc.freeze()
atexit.register(gc.unfreeze)  # or Triton complains of what leaks
gc.unfreeze = lambda: None  # vLLM's shutdown calls it
sys.path.pop(0)
