"""One step of grpo.py on a CPU core, with the numbers of one_step.md.

    python course/one_step.py

grpo.py runs unchanged. Three functions that it calls are wrapped, and print what passes through."""

import io
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch import Tensor

import grpo
from common.config.parse import parse

FLAGS = """--model tiny-sft --dataset arithmetic --prompt_format plain --reward exact_match
    --engine transformers --prompts_per_step 2 --samples_per_prompt 4 --max_new_tokens 5
    --epochs_per_rollout 2 --max_steps 1 --eval_every 0 --lr 4e-4 --trace_every 0"""
SHOWN = {4: "152", 6: "162"}  # completions in the pack, and their text
WEIGHT = "hf.model.embed_tokens.weight", (5, 9)  # of the row of token 5


def traced_step() -> list[str]:
    """Run the step; return the lines to show."""
    lines: list[str] = []
    tensors: dict[str, Tensor] = {}
    pack, loss, optimizer_step = grpo.pack_minibatches, grpo.loss, grpo.optimizer_step

    def show(name: str, x_T: Tensor) -> None:
        """Add a line for each shown completion. Prompts are left out of everything but ids."""
        for number, text in SHOWN.items():
            at_T = tensors["sequence_ids_T"] == number
            trained = tensors["loss_mask_T"][at_T].tolist()
            cells = [
                str(x) if isinstance(x, int) else f"{x:.4f}" if mask else "."
                for x, mask in zip(x_T[at_T].tolist(), trained, strict=True)
            ]
            lines.append(f"{name:<15} {text}{''.join(f'{cell:>8}' for cell in cells)}")

    def traced_pack(groups, *rest, **named):
        for group in groups:
            length = group[0].prompt_length
            lines.append(f"prompt {group[0].row['prompt']} ids {group[0].ids[:length]}")
            lines.extend(f"    completion {c.text} ids {c.ids[length:]}" for c in group)
        minibatches = pack(groups, *rest, **named)
        ((mb,),) = minibatches
        tensors.update(loss_mask_T=mb.loss_mask_T, sequence_ids_T=mb.sequence_ids_T)
        show("targets_T", mb.targets_T)
        show("loss_mask_T", mb.loss_mask_T.int())
        return minibatches

    def traced_loss(logprobs_T, old_logprobs_T, *rest, **named):
        share_T, logged = loss(logprobs_T, old_logprobs_T, *rest, **named)
        logprobs_T.retain_grad()
        if "logprobs_T" not in tensors:
            lines.append("update 1")
            show("old_logprobs_T", old_logprobs_T)
            show("advantages_T", rest[3])
        else:
            lines.append("update 2")
        tensors["logprobs_T"] = logprobs_T
        show("ratio", logged["ratio"])
        show("share_T", share_T)
        return share_T, logged

    def traced_optimizer_step(policy, optimizer, lr, *rest, **named):
        show("d L / d logprob", tensors["logprobs_T"].grad)
        name, index = WEIGHT
        weight = dict(policy.named_parameters())[name]
        before, gradient = (x.full_tensor()[index].item() for x in (weight, weight.grad))
        norm = optimizer_step(policy, optimizer, lr, *rest, **named)
        after = weight.full_tensor()[index].item()
        lines.append(f"grad_norm {norm:.3f}")
        lines.append(f"a weight: gradient {gradient:.4f}, value {before:.4f} -> {after:.4f}")
        return norm

    grpo.pack_minibatches, grpo.loss = traced_pack, traced_loss
    grpo.optimizer_step = traced_optimizer_step
    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # the run's own lines
        grpo.main(parse(grpo.Args, [*FLAGS.split(), "--output_dir", folder]))
    return lines


if __name__ == "__main__":
    print(*traced_step(), sep="\n")
