"""What runs of tests do otherwise than a user's: each replaced name, and why."""

import torch

# In ranks (preload.py) and in `main` (in_process.py).
IN_TESTS = {
    "common.train.run.SAMPLES_EVERY": 1,  # tests read the samples of each step
    "common.train.run.CHECK_EVERY": 1,  # engine = trainer in each step
    "common.metrics.logger.RunLogger.draw_curves": lambda _: None,  # half of a short run's time
    "os.fsync": lambda _: None,  # a fifth
}
# In ranks, if vLLM is installed for CPUs.
IN_VLLM = {
    # most of the time of an engine's start; preload.py has called it once
    "vllm.platforms.cpu.CpuPlatform.register_triton_kernel_overrides": lambda _: None,
    # zeros, instead of a GiB
    "vllm.v1.worker.cpu_worker.CPUWorker.determine_available_memory": lambda _: 1 << 27,
    # else a new interpreter inspects a class
    "vllm.model_executor.models.registry._run_in_subprocess": lambda f: f(),
}


def in_process(device: torch.device) -> dict[str, object]:
    """In `main`, whose process is that of pytest."""
    return {
        "common.parallel.distributed.setup": lambda *_: (device, 0, 1),  # once in a process
        "common.parallel.distributed.cleanup": lambda: None,  # other tests use the group
        "common.parallel.process.note_signals": lambda: None,  # Ctrl-C stops pytest
    }
