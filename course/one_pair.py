"""One pair of dpo.py on a CPU core, with the numbers of one_pair.md.

    python course/one_pair.py

dpo.py runs unchanged. Three functions that it calls are wrapped, and print what passes through."""

import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch import Tensor

import dpo
from common.config.parse import parse

PAIR = dict(prompt="154+8=", chosen="162", rejected="152")
FLAGS = """--model tiny-sft --prompt_format plain --beta 0.1 --sft_weight 0 --batch_size 1
    --max_steps 3 --lr 1e-4 --lr_schedule constant --eval_every 0 --trace_every 0"""
SIDES = PAIR["chosen"], PAIR["rejected"]


def traced_pair() -> list[str]:
    """Train on one pair; return the lines to show."""
    lines: list[str] = []
    kept: list[Tensor] = []
    make_pairs, loss, optimizer_step = dpo.make_pairs, dpo.loss, dpo.optimizer_step

    def show(name: str, text: str, numbers: list[float]) -> None:
        lines.append(f"{name:<15} {text}{''.join(f'{x:>9.4f}' for x in numbers)}")

    def traced_make_pairs(mb, logprobs_T, ref_logps_B2):
        if not kept:
            for number, text in enumerate(SIDES):
                trained_T = mb.loss_mask_T & (mb.sequence_ids_T == number)
                show("log pi(token)", text, logprobs_T[trained_T].tolist())
        return make_pairs(mb, logprobs_T, ref_logps_B2)

    def traced_loss(pairs, args):
        kept[:] = pairs.chosen_logps, pairs.rejected_logps
        for logps_W in kept:
            logps_W.retain_grad()
        refs = pairs.ref_chosen_logps, pairs.ref_rejected_logps
        for text, logps_W, ref_W, ratio_W in zip(
            SIDES, kept, refs, (pairs.lc, pairs.lr), strict=True
        ):
            show("pi, pi_ref, l", text, [logps_W.item(), ref_W.item(), ratio_W.item()])
        loss_W, terms = loss(pairs, args)
        z = args.beta * (pairs.lc - pairs.lr).item()
        lines.append(f"z {z:.4f}, loss {loss_W.item():.4f}")
        return loss_W, terms

    def traced_optimizer_step(*given, **named):
        for text, logps_W in zip(SIDES, kept, strict=True):
            show("d L / d log pi", text, [logps_W.grad.item()])
        return optimizer_step(*given, **named)

    dpo.make_pairs, dpo.loss = traced_make_pairs, traced_loss
    dpo.optimizer_step = traced_optimizer_step
    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # the run's own lines
        rows = Path(folder) / "pair.jsonl"
        rows.write_text(json.dumps(PAIR) + "\n")
        flags = [*FLAGS.split(), "--dataset", str(rows), "--output_dir", f"{folder}/run"]
        dpo.main(parse(dpo.Args, flags))
    return lines


if __name__ == "__main__":
    print(*traced_pair(), sep="\n")
