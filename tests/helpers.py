"""Running the scripts as a user would: under torchrun, in their own processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_file(), reason="the GSM8K file is not here")


def command(ranks: int, script: str, *flags: object) -> list[str]:
    """The launch line; one rank is plain python."""
    torchrun = [] if ranks == 1 else ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master_port=0"]
    return [sys.executable, *torchrun, str(ROOT / script), *map(str, flags)]


def environment(**extra: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | extra


def run(ranks: int, script: str, *flags: object, code: int = 0, timeout: float = 300) -> subprocess.CompletedProcess:
    """Run to the end and check the exit code (torchrun turns every failure into 1)."""
    done = subprocess.run(
        command(ranks, script, *flags), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "hf" / "model.safetensors")
