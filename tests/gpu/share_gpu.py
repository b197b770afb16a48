"""Run a script as one of several ranks that share a GPU.

    torchrun --standalone --nproc_per_node 2 tests/gpu/share_gpu.py grpo.py ...

Each engine would take all that is free: give vLLM `--engine_args gpu_memory_utilization=0.3`.

NCCL refuses two ranks on one GPU unless they seem to be on different hosts. Then they talk over
sockets, on the loopback interface. This shows that the collectives are right; it says nothing about
their speed."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ |= dict(NCCL_HOSTID=f"rank{os.environ['LOCAL_RANK']}", NCCL_SOCKET_IFNAME="lo")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
