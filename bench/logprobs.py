"""Compare chunked token log-probs to full logits: peak memory and time of forward and backward of
the head.

    OMP_NUM_THREADS=1 python bench/logprobs.py    # on CPU needs about 11 GB

T = 4,096 tokens, width D = 256, vocabulary V = 151,936, float32. Each variant computes the gradient
of the mean negative log-prob with respect to hidden states [T, D] and head [V, D]:
- chunked: common.model.logprobs.token_logprobs, which also returns entropy and accuracy and never
  holds [T, V];
- full, same outputs: logits [T, V], log_softmax; entropy and accuracy for metrics, without
  gradient;
- full, log-prob only: logits [T, V], cross_entropy. Every measurement runs in its own process,
  since freed memory may stay with a process. The three take turns. Memory is the peak minus the
  memory before (inputs, libraries): on CPU the resident set, on CUDA that of the allocator.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from common.model.head import Logits
from common.model.logprobs import token_logprobs

D, V = 256, 151_936
MEMORY_TARGET, TIME_TARGET = 0.25, 1.3


def chunked(hidden_TD, head_VD, targets_T):
    return token_logprobs(Logits(hidden_TD, head_VD), targets_T)


def full_same_outputs(hidden_TD, head_VD, targets_T):
    logits_TV = hidden_TD @ head_VD.T
    logp_TV = logits_TV.log_softmax(-1)
    with torch.no_grad():
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        correct_T = logits_TV.argmax(-1) == targets_T
    return logp_TV.gather(-1, targets_T[:, None])[:, 0], entropy_T, correct_T


def full_logprob_only(hidden_TD, head_VD, targets_T):
    return (-F.cross_entropy(hidden_TD @ head_VD.T, targets_T, reduction="none"),)


VARIANTS = {
    "chunked": chunked,
    "full, same outputs": full_same_outputs,
    "full, log-prob only": full_logprob_only,
}


def reset_peak(device: str) -> int:
    """Reset the peak and return the bytes in use."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
    return peak(device)


def peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return next(
        int(line.split()[1]) * 1024
        for line in open("/proc/self/status")
        if line.startswith("VmHWM")
    )


def measure(name: str, T: int, device: str) -> None:
    """Run one forward and backward in this process and print it as JSON. A small one before loads
    libraries."""
    torch.manual_seed(0)
    hidden_TD, head_VD = torch.randn(T, D, device=device), 0.1 * torch.randn(V, D, device=device)
    targets_T = torch.randint(V, (T,), device=device)
    for tokens in (32, T):
        hidden = hidden_TD[:tokens].clone().requires_grad_()
        head = head_VD.clone().requires_grad_()
        before, start = reset_peak(device), time.perf_counter()
        outputs = VARIANTS[name](hidden, head, targets_T[:tokens])
        (-outputs[0].mean()).backward()
        sums = [
            output.detach().double().mean().item() for output in outputs
        ]  # item() waits for the device
        norms = [x.grad.norm().item() for x in (hidden, head)]
        seconds, memory = time.perf_counter() - start, peak(device) - before
    print(json.dumps(dict(seconds=seconds, bytes=memory, values=norms + sums)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="T")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each variant")
    parser.add_argument("--only", choices=VARIANTS, help=argparse.SUPPRESS)  # for child processes
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.only:
        return measure(args.only, args.tokens, device)
    runs: dict[str, list[dict]] = {name: [] for name in VARIANTS}
    for name in [*VARIANTS] * args.rounds:
        command = [sys.executable, __file__, "--only", name, "--tokens", str(args.tokens)]
        runs[name].append(
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        )
    print(
        f"{device}, {torch.get_num_threads()} threads, float32, T={args.tokens} D={D} V={V}, "
        f"{args.rounds} rounds"
    )
    seconds = {name: median(run["seconds"] for run in runs[name]) for name in VARIANTS}
    memory = {name: median(run["bytes"] for run in runs[name]) for name in VARIANTS}
    for name in VARIANTS:
        print(
            f"{name:20} {seconds[name]:6.2f} s {memory[name] / 1e9:6.2f} GB    chunked needs "
            f"{seconds['chunked'] / seconds[name]:.2f}x the time (target {TIME_TARGET}) and "
            f"{memory['chunked'] / memory[name]:.2f}x the memory (target {MEMORY_TARGET})"
        )
    ours = runs["chunked"][0]["values"]
    worst = max(
        abs(a / b - 1)
        for name in VARIANTS
        for a, b in zip(ours, runs[name][0]["values"], strict=False)
        if b
    )
    print(f"gradient norms and mean outputs differ by a factor of at most 1 + {worst:.0e}")


if __name__ == "__main__":
    main()
