"""Make the weights of the built-in model `tiny-sft` (common/model/tiny.py): `python
tools/make_tiny_sft.py`.

Runs sft.py with configs/demo_sft.yaml, which takes about a minute on a CPU core, and stores the
weights in bfloat16, half of their size. The metrics of the run are stored in the file too. On
another machine the weights differ slightly, because sums are rounded in another order."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.metrics.curves import read_metrics
from common.model.tiny import SFT_WEIGHTS

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ("sft.py", "--config", "configs/demo_sft.yaml")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, *COMMAND, "--output_dir", folder], cwd=ROOT, check=True)
        weights = load_file(Path(folder, "hf", "model.safetensors"))
        losses = {
            line["step"]: line["loss"]
            for line in read_metrics(Path(folder, "metrics.jsonl"))
            if "loss" in line
        }
    metadata = dict(command=" ".join(COMMAND), losses=json.dumps(losses))
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, SFT_WEIGHTS, metadata
    )
    print(f"{SFT_WEIGHTS}: {SFT_WEIGHTS.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
