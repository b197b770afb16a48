"""Compare our scripts to TRL 1.16: tokens per second of sft, dpo, rm and grpo on 2 CPU cores or a
GPU, as a table.

    pip install --no-deps --target peers trl==1.16.0 accelerate==1.15.0    # a separate folder
    FLAGS="--dataset gsm8k/train.jsonl --trl peers"
    python bench/peers.py $FLAGS
    python bench/peers.py $FLAGS --scripts grpo --lengths 512 128 --group 8
    python bench/peers.py $FLAGS --scripts dpo rm --lengths 300 150

Both sides train a Qwen3 of 3.2M parameters with random weights, written by this program, on the
same GSM8K rows in the same order. A step has 16 rows (pairs: the answer, and that of another
question), float32, AdamW (fused), no gradient checkpointing. For grpo it has 16 prompts x 16
completions of 64 tokens and one update. `--lengths P C`: prompts have P and completions C tokens on
average, cut from the joined rows; a length is drawn between half and one and a half of that.
The tokens of every step are counted on both sides and must be equal, for grpo to 0.1%. Every run is
a separate launch, and the launches take turns:
- ours, 2 ranks: `torchrun --nproc_per_node 2 sft.py ...`, one thread each; ours, 2 threads: one
  rank, `--pack_tokens 4096`;
- TRL, whole batch: one process, 2 threads, `per_device_train_batch_size` 16, padded to its longest
  row;
- TRL, 2 ranks: torchrun (DDP), one thread each, micro-batches of `MICRO` rows: less padding, the
  same update.

TRL's packing and padding-free modes need FlashAttention, which no CPU has. Without it, sequences of
a pack would attend to each other, or (sft) attention is quadratic in the pack. This version of TRL
disables these modes for dpo, and has none for rm and grpo. DPO's reference log-probs are computed
before training on both sides and are not timed. TRL's grpo samples with `model.generate`, because a
vLLM server does not run here. The table has the fraction of a step that each side samples.

With a GPU (`--gpu`) the model is a Qwen3 of 0.6B parameters with a vocabulary of 151,936. A step
has 64 rows (pairs), and completions have 256 tokens. Weights and moments are float32, the compute
dtype is bfloat16, and each side has one process:
- ours: the script's defaults, with packs of 8,192 tokens; activation checkpointing is off on both
  sides;
- TRL: SDPA, micro-batches of 8 rows (4 pairs), about as many tokens; grpo samples with vLLM in the
  same process;
- TRL, Liger: the same with `use_liger_kernel`, if liger-kernel is in the folder too.

Time is measured here, between the lines that a run prints after each step. So it includes logging,
data loading and packing, but not the first step, start-up and saving. Medians over the steps of all
rounds."""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CORES = 2
SCRIPTS = ("sft", "dpo", "rm", "grpo")
MICRO = dict(
    sft=2, dpo=2, rm=2, grpo=16
)  # rows, pairs or completions in a micro-batch of "TRL, 2 ranks"
GPU_MICRO = dict(sft=8, dpo=4, rm=4, grpo=16)
SIDES = {
    "ours, 2 ranks": 2,
    "ours, 2 threads": 1,
    "TRL, whole batch": 1,
    "TRL, 2 ranks": 2,
}  # ranks of each
GPU_SIDES = {"ours": 1, "TRL": 1, "TRL, Liger": 1}


def new_tokens(flags) -> int:
    return flags.lengths[1] if flags.lengths else 256 if flags.gpu else 64


def batch_size(script: str, flags) -> int:
    """Return the number of rows, pairs or prompts of a step."""
    return flags.batch_size or (64 if flags.gpu and script != "grpo" else 16)


def write_model(folder: Path, gpu: bool) -> None:
    """Write a Qwen3 that practically never ends a completion: a constant in the residual stream
    keeps the logits of EOS tokens low."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from common.model.hub import resolve_model
    from common.text.tokenizer import load_tokenizer

    tiny = resolve_model("tiny")
    width = dict(
        hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=4
    )
    if gpu:
        width = dict(
            hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8
        )
        width |= dict(
            head_dim=128,
            num_hidden_layers=28,
            layer_types=["full_attention"] * 28,
            vocab_size=151_936,
        )
    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):  # on one core the larger one takes minutes
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny, **width))
    with torch.no_grad():
        embedding_VD = model.get_input_embeddings().weight
        embedding_VD[:, 0] = 0.5
        embedding_VD[model.config.eos_token_id, 0] = -2.0
    model.save_pretrained(folder)
    load_tokenizer(tiny).save_pretrained(folder)
    print(
        f"Qwen3 of {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", flush=True
    )


def write_rows(dataset: str, folder: Path, count: int, lengths: list[int] | None) -> None:
    """Write `rows.jsonl` for our scripts, which shuffle it, and `ordered.jsonl` for TRL in our
    shuffled order. A token is a byte. `lengths`: means of prompts and completions."""
    from common.packs.order import Order

    lines = Path(dataset).read_text().splitlines()
    rows = [json.loads(line) for line in random.Random(0).sample(lines, count)]
    if lengths:
        text, draw = " ".join(lines).encode("ascii", "replace").decode(), random.Random(1)
        for row in rows:
            for column, mean in zip(("question", "answer"), lengths, strict=True):
                start, length = (
                    draw.randrange(len(text) - 2 * mean),
                    round(mean * draw.uniform(0.5, 1.5)),
                )
                row[column] = text[start : start + length]
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        row |= dict(
            prompt=row.pop("question"),
            completion=row["answer"],
            chosen=row["answer"],
            rejected=other["answer"],
        )
    order = Order({"": range(count)}, seed=0).draw(count)
    for name, ordered in (("rows", rows), ("ordered", [rows[i] for i in order])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ordered))


# ---- the two sides ----


def characters(completion: str, row: dict) -> float:
    """The reward of both sides, which even a random model can improve: the fraction of the answer's
    characters that are right at their position."""
    right = sum(a == b for a, b in zip(completion, row["answer"], strict=False))
    return right / max(len(completion), len(row["answer"]), 1)


def our_command(script: str, folder: Path, flags) -> list[str]:
    ours = dict(
        model=folder / "model", dataset=folder / "rows.jsonl", output_dir=folder / "run", lr=1e-5
    )
    ours |= dict(max_steps=flags.steps, eval_every=0, save_every=1000, resume="never", seed=0)
    ours |= dict(prompt_format="plain")  # TRL leaves prompts of text as they are
    ours |= (
        dict(activation_checkpointing="false", pack_tokens=8192)
        if flags.gpu
        else dict(dtype="float32")
    )
    if script == "grpo":
        ours |= dict(prompts_per_step=batch_size(script, flags), samples_per_prompt=flags.group)
        ours |= dict(max_new_tokens=new_tokens(flags), reward=f"{__file__}:characters")
        ours |= dict(engine_args="gpu_memory_utilization=0.3") if flags.gpu else {}
    else:
        ours |= dict(batch_size=batch_size(script, flags), max_length=2048)
    return [str(ROOT / f"{script}.py"), *(f"--{name}={value}" for name, value in ours.items())]


def train_with_trl(script: str, folder: Path, flags) -> None:
    """Run TRL's trainer in this process. Each step prints the tokens so far and the time of
    sampling."""
    import torch
    import trl
    from datasets import load_dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(CORES // ranks)
    names = dict(sft="SFT", dpo="DPO", rm="Reward", grpo="GRPO")
    columns = dict(sft=["prompt", "completion"], grpo=["prompt", "answer"]).get(
        script, ["prompt", "chosen", "rejected"]
    )
    more, given, rows = dict(max_length=2048), {}, batch_size(script, flags)
    if script == "grpo":
        more = dict(
            num_generations=flags.group,
            max_completion_length=new_tokens(flags),
            temperature=1.0,
            shuffle_dataset=False,
        )
        if flags.gpu:
            more |= dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3)
        given = dict(
            reward_funcs=lambda completions, answer, **_: [
                characters(text, dict(answer=gold))
                for text, gold in zip(completions, answer, strict=True)
            ]
        )
        rows *= flags.group
    if script == "dpo":
        more |= dict(precompute_ref_log_probs=True)
    micro = min(rows // ranks, MICRO[script] if ranks > 1 else batch_size(script, flags))
    if flags.gpu:
        micro = GPU_MICRO[script]
        more |= dict(use_liger_kernel="Liger" in flags.child[2])
    config = getattr(trl, f"{names[script]}Config")(
        output_dir=str(folder / "trl"), max_steps=flags.steps, per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // ranks // micro, learning_rate=1e-5,
        lr_scheduler_type="constant", optim="adamw_torch_fused", adam_beta2=0.95, bf16=flags.gpu,
        gradient_checkpointing=False, use_cpu=not flags.gpu, save_strategy="no", report_to=[],
        logging_steps=1, disable_tqdm=True, dataloader_pin_memory=flags.gpu,
        train_sampling_strategy="sequential", **more,
    )  # fmt: skip
    load = AutoModelForSequenceClassification if script == "rm" else AutoModelForCausalLM
    model = load.from_pretrained(
        folder / "model", dtype=torch.float32, **(dict(num_labels=1) if script == "rm" else {})
    )
    data = load_dataset(
        "json", data_files=str(folder / "ordered.jsonl"), split="train"
    ).select_columns(columns)
    done = dict(tokens=0, sampling=0.0)

    def count(_, __, inputs: dict) -> None:
        """Count tokens as our scripts do: all except the first of a sequence; for a reward model,
        all."""
        if torch.is_grad_enabled():
            done["tokens"] += int(inputs["attention_mask"].sum()) - (script != "rm") * len(
                inputs["attention_mask"]
            )

    class Tell(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            tokens = torch.tensor(done["tokens"])
            if ranks > 1:
                torch.distributed.all_reduce(tokens)
            if state.is_world_process_zero:
                print(
                    "step",
                    state.global_step,
                    json.dumps(done | dict(tokens=tokens.item())),
                    flush=True,
                )

    model.register_forward_pre_hook(count, with_kwargs=True)
    trainer = getattr(trl, f"{names[script]}Trainer")(
        model=model, args=config, train_dataset=data, callbacks=[Tell()],
        processing_class=AutoTokenizer.from_pretrained(folder / "model"), **given,
    )  # fmt: skip
    if script == "grpo":
        generate = trainer._generate

        def timed(*arguments):
            start = time.perf_counter()
            out = generate(*arguments)
            done["sampling"] += time.perf_counter() - start
            return out

        trainer._generate = timed
    trainer.train()


def sides(flags) -> dict[str, int]:
    """Return the sides to compare, with their numbers of ranks."""
    return GPU_SIDES if flags.gpu else SIDES


def run(script: str, side: str, folder: Path, flags) -> list[dict]:
    """Launch one run. Return seconds, tokens and seconds of sampling of each step but the first."""
    ranks, ours = sides(flags)[side], side.startswith("ours")
    command = our_command(script, folder, flags)
    if ranks == 1 and not flags.gpu:
        command.append("--pack_tokens=4096")  # the memory of larger packs does not stay mapped
    environment = dict(os.environ, OMP_NUM_THREADS=str(CORES // ranks), HF_HUB_OFFLINE="1")
    if not flags.gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if not ours:
        command = [__file__, *sys.argv[1:], "--child", script, str(folder), side]
        path = [str(Path(flags.trl).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= dict(PYTHONPATH=os.pathsep.join(path), PYTHONWARNINGS="ignore")
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        if ours or ranks > 1
        else []
    )
    lines = []
    with (folder / "errors.txt").open("w") as errors:
        process: Any = subprocess.Popen(
            [sys.executable, *launcher, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        for line in process.stdout:
            if re.match(r"step \d+[/ ]\S", line):  # not the title of a table of samples
                lines.append((time.perf_counter(), line))
    if process.wait() or len(lines) != flags.steps:
        sys.exit(
            f"{script}, {side}: exit code {process.returncode}\n"
            f"{(folder / 'errors.txt').read_text()[-3000:]}"
        )
    if ours:
        metrics = [
            json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()
        ]
        sampling = [m.get("time/rollout", 0.0) + m.get("time/sync", 0.0) for m in metrics]
        tokens = [m["num_tokens"] for m in metrics]
    else:
        told = [json.loads(line.split(maxsplit=2)[2]) for _, line in lines]
        tokens = [t["tokens"] for t in told]
        sampling = [0.0] + [b["sampling"] - a["sampling"] for a, b in pairwise(told)]
    return [
        dict(
            seconds=after[0] - before[0], tokens=tokens[i + 1] - tokens[i], sampling=sampling[i + 1]
        )
        for i, (before, after) in enumerate(pairwise(lines))
    ]


def table(results: dict[str, dict[str, list[dict]]], known: list[str]) -> str:
    """Return a Markdown table: the tokens per second of every side, and how much faster our faster
    launch is than each of TRL's."""
    known = [side for side in known if all(side in of_side for of_side in results.values())]
    theirs = [side for side in known if side.startswith("TRL")]
    header = [
        "",
        "tokens/step",
        *(f"{side}: tokens/s" for side in known),
        *(f"ours to {side}" for side in theirs),
    ]
    lines = [header, ["---"] * len(header)]
    for script, of_side in results.items():
        rates = {side: median(s["tokens"] / s["seconds"] for s in of_side[side]) for side in known}
        shares = {
            side: sum(s["sampling"] for s in of_side[side])
            / sum(s["seconds"] for s in of_side[side])
            for side in known
        }
        shown = [
            f"{rate:,.0f}" + (f" (sampling {shares[side]:.0%})" if shares[side] else "")
            for side, rate in rates.items()
        ]
        best = max(rate for side, rate in rates.items() if side not in theirs)
        per_step = median(s["tokens"] for s in of_side[known[0]])
        ratios = [f"{best / rates[side]:.2f}x" for side in theirs]
        lines.append([script, f"{per_step:,.0f}", *shown, *ratios])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset", required=True, help="GSM8K's train.jsonl: `question` and `answer`"
    )
    parser.add_argument("--trl", help="folder with TRL and accelerate")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--gpu", action="store_true", help="use the larger model on one GPU")
    parser.add_argument(
        "--sides", nargs="+", choices=[*SIDES, *GPU_SIDES], help="default: all of the device"
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        help="rows, pairs or prompts of a step; default: 16, on a GPU 64 except for grpo",
    )
    parser.add_argument("--group", type=int, default=16, help="grpo: completions of a prompt")
    parser.add_argument(
        "--lengths", type=int, nargs=2, metavar=("P", "C"), help="tokens of prompts and completions"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="steps of each launch; the first is not timed"
    )
    parser.add_argument("--rounds", type=int, default=1, help="launches of each side")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)  # for TRL's processes
    flags = parser.parse_args()
    flags.sides = flags.sides or list(sides(flags))
    if flags.child:
        return train_with_trl(flags.child[0], Path(flags.child[1]), flags)
    if flags.trl is None or not (Path(flags.trl) / "trl").is_dir():
        sys.exit(
            f"--trl {flags.trl}: no folder with TRL in it; the top of this file says how to make it"
        )
    results: dict[str, dict[str, list[dict]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", flags.gpu)
        write_rows(
            flags.dataset,
            folder,
            max(batch_size(script, flags) for script in SCRIPTS) * flags.steps,
            flags.lengths,
        )
        for script in flags.scripts:
            for side in flags.sides * flags.rounds:
                start, steps = time.perf_counter(), run(script, side, folder, flags)
                of_side = results.setdefault(script, {side: [] for side in flags.sides})
                of_side[side] += steps
                seconds = ", ".join(f"{step['seconds']:.1f}" for step in steps)
                took = time.perf_counter() - start
                print(
                    f"{script}, {side}: {seconds} s/step, {took:.0f} s with its start", flush=True
                )
            counted = {side: [step["tokens"] for step in steps] for side, steps in of_side.items()}
            tolerance = 0.001 if script == "grpo" else 0  # a completion may sample an EOS
            if any(
                max(of_step) > (1 + tolerance) * min(of_step)
                for of_step in zip(*counted.values(), strict=True)
            ):
                sys.exit(f"{script}: the two sides were not given the same tokens: {counted}")
    print(table(results, flags.sides))


if __name__ == "__main__":
    main()
