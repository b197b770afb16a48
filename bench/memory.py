"""Measure the peak memory per rank of grpo.py with and without a reference, rloo.py and ppo.py, on
the same rollouts.

    OMP_NUM_THREADS=1 python bench/memory.py    # on CPU needs about 8 GB of memory and 5 GB of disk

The unchanged scripts run two steps under torchrun with 1 and with 2 ranks: 32 completions per step,
two minibatches, float32. The model is a random Qwen3 of 106M parameters with the tokenizer of
`tiny`, so that models dominate the memory. All use `--engine transformers`, which keeps one whole
copy of the policy on every rank.

Each rank runs the script in its own process (`runpy`) and reads its peak in three phases: loading
and the steps, the checkpoint, the export. On CPU this is the peak of the resident set, minus that
of the same script, rank and phase with `tiny` (libraries, the engine's code); malloc returns freed
memory. On CUDA it is the peak of the allocator, without the copy for the export, which is on the
host (not run on CUDA so far).

Expected, with N parameters on R ranks: 16N / R bytes per trained model (weight, gradient, two
moments), 4N / R per frozen one, 4N for the engine. Checkpoint and export have no gradients. The
export needs 4N more on rank 0's host. Activations, gathered blocks and gradients before their
reduction are not included: they are the column `over`."""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from bench.logprobs import peak, reset_peak
from common.model.hub import load_tokenizer, resolve_model
from common.train.checkpoint import Checkpointer

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("steps", "save", "export")
GROUPS, SINGLE = (
    ["--prompts_per_step=8", "--samples_per_prompt=4"],
    ["--prompts_per_step=32", "--samples_per_prompt=1"],
)
RUNS = {  # name: script, flags, trained models, frozen models
    "grpo.py": ("grpo.py", [*GROUPS, "--beta=0"], 1, 0),
    "grpo.py, reference": ("grpo.py", [*GROUPS, "--beta=0.04"], 1, 1),
    "rloo.py": ("rloo.py", [*GROUPS, "--beta=0.05"], 1, 1),
    "ppo.py": ("ppo.py", [*SINGLE, "--beta=0.05"], 2, 1),
}
FLAGS = [
    "--dataset=arithmetic", "--reward=exact_match", "--engine=transformers", "--dtype=float32",
    "--max_steps=2", "--eval_every=0", "--max_new_tokens=8", "--minibatches=2", "--pack_tokens=128",
]  # fmt: skip


def larger_model(folder: Path) -> tuple[str, int]:
    """Write a random Qwen3 with the tokenizer of `tiny`, and return its folder and its number of
    parameters."""
    tiny, layers = (
        resolve_model("tiny"),
        dict(num_hidden_layers=12, layer_types=["full_attention"] * 12),
    )
    width = dict(
        hidden_size=768,
        intermediate_size=3072,
        head_dim=64,
        num_attention_heads=12,
        num_key_value_heads=6,
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny, **width, **layers))
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    load_tokenizer(tiny).save_pretrained(folder)
    return str(folder), model.num_parameters()


def run_script(script: str, folder: Path) -> None:
    """Run the script as `__main__` in a rank. The end of each phase reads and resets the peak; a
    file gets all."""
    device, peaks = "cuda" if torch.cuda.is_available() else "cpu", {}

    def phase(method, before: str, name: str):
        def measured(self, *args):
            peaks[before] = peak(device)
            reset_peak(device)
            result = method(self, *args)
            peaks[name] = peak(device)
            reset_peak(device)
            return result

        return measured

    Checkpointer.save = phase(
        Checkpointer.save, "steps", "save"
    )  # `--save_every` is large: one call, at the end
    Checkpointer.export_hf = phase(Checkpointer.export_hf, "between", "export")
    runpy.run_path(str(ROOT / script), run_name="__main__")
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(peaks))


def measure(script: str, flags: list[str], model: str, ranks: int) -> list[dict]:
    """Return the bytes at the peak of each phase, for every rank."""
    quiet = dict(
        MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536", TORCH_CPP_LOG_LEVEL="ERROR"
    )
    with tempfile.TemporaryDirectory() as folder:
        launch = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
            __file__,
        ]
        flags = [f"--model={model}", f"--output_dir={folder}/run", *flags]
        command = [sys.executable, *launch, "in_rank", script, folder, *FLAGS, *flags]
        done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{script} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return [
            json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(ranks)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--only", nargs="+", choices=RUNS, default=[*RUNS], help="runs; the first is the baseline"
    )
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, parameters = larger_model(Path(folder))
        unit = 4 * parameters / 2**20
        print(
            f"{parameters / 1e6:.1f}M parameters, 4 bytes of each are {unit:.0f} MiB; "
            "MiB above `tiny`"
        )
        columns = "".join(f"{name:>8} expected  over" for name in PHASES)
        print(f"{'':18} ranks rank{columns}  steps: to {flags.only[0]}")
        for ranks in flags.ranks:
            first: dict[int, float] = {}  # peak of every rank in the steps of the first script
            for name in flags.only:
                script, more, trained, frozen = RUNS[name]
                runs = [
                    measure(script, more, path, ranks) for path in (resolve_model("tiny"), model)
                ]
                for rank, (base, peaks) in enumerate(zip(*runs, strict=True)):
                    above, row = (
                        {phase: (peaks[phase] - base[phase]) / 2**20 for phase in PHASES},
                        "",
                    )
                    for phase, measured in above.items():
                        units = (
                            4 if phase == "steps" else 3
                        ) * trained + frozen  # on all ranks together
                        expected = unit * (units / ranks + 1 + (phase == "export" and rank == 0))
                        row += f"{measured:8.0f} {expected:8.0f} {measured / expected - 1:5.0%}"
                    ratio = above["steps"] / first.setdefault(rank, above["steps"])
                    print(f"{name:18} {ranks:5} {rank:4}{row} {ratio:7.2f}x", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["in_rank"]:  # SCRIPT FOLDER, then the script's own flags
        script, folder = sys.argv[2:4]
        sys.argv = [script, *sys.argv[4:]]
        run_script(script, Path(folder))
    else:
        main()
