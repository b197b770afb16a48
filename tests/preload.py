"""Imports of the process from which ranks are forked (warm.py). They happen once: two ranks of
sft.py take 3.5 s of a core so, and 13.6 s without; `make test` would take more than 7 minutes."""

import atexit
import contextlib
import gc
import importlib
import sys
import warnings

import pytest
import torch
import transformers.conversion_mapping as conversions
from replaced import IN_TESTS, IN_VLLM
from scripts import SCRIPTS

from common.config.parse import parse

# ---- imports ----

# Imports inside functions of the scripts.
LATER = (
    "fsspec rich.table datasets torch.distributed.checkpoint._fsspec_filesystem "
    "transformers.models.auto.modeling_auto "
    "transformers.models.qwen3.modeling_qwen3 common.rollout.transformers_engine "
    "common.rollout.vllm_engine"
)
VLLM = (
    "vllm.entrypoints.llm vllm.entrypoints.launchers.cli_args vllm.v1.core.sched.scheduler "
    "vllm.v1.worker.cpu_worker "
    "vllm.v1.attention.backends.cpu_attn vllm.model_executor.layers.quantization.online.base "
    "vllm.plugins.lora_resolvers.filesystem_resolver vllm.distributed.elastic_ep.elastic_execute "
    "compressed_tensors.compressors"
)
scripts = {name: importlib.import_module(name) for name in SCRIPTS}
with contextlib.suppress(ImportError):  # vLLM may not be installed
    for name in [*LATER.split(), *([] if torch.cuda.is_available() else VLLM.split())]:
        importlib.import_module(name)
# tyro imports most of its modules here, and transformers makes the mappings of all models
parse(scripts["sft"].Args, ["--model", "m", "--dataset", "d"])
conversions.get_checkpoint_conversion_mapping("qwen3")
importlib.import_module("processes")  # has the function that a rank runs

# ---- what runs of tests do otherwise ----

if vllm := sys.modules.get("vllm.v1.worker.cpu_worker"):
    with warnings.catch_warnings(action="ignore"):
        vllm.current_platform.register_triton_kernel_overrides()
    sys.modules["vllm.logger"].configure_logging(sys.modules["vllm.config.logging"].LoggingConfig())
for name, value in (IN_TESTS | (IN_VLLM if vllm else {})).items():
    pytest.MonkeyPatch().setattr(name, value)
gc.freeze()  # collections in the ranks skip them
unfreeze, gc.unfreeze = gc.unfreeze, lambda: None  # an engine's shutdown would undo it
atexit.register(unfreeze)
