"""Distil several teachers into one student, and a teacher with another tokenizer.

    python bench/teachers.py

Two domains of the same sums: `247+9=` has the answer 256, `247+9~` has it backwards, 652. sft.py
trains a teacher of each domain; a third one, of the first domain, has a byte-level BPE with a token
for each of 10 to 19. The student is a character model after a few steps of sft.py on both domains.
distill.py trains it with both teachers (`--teacher_column domain`), with either of them on all
rows, and with the third one on the first domain (`--estimator sampled`).

One process, no vLLM. The program prints the greedy exact match of each model in each domain. Runs
stay in runs/teachers; a finished run is not repeated."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from common.data.tasks import TASKS
from common.model.tiny import tiny_model

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs/teachers"
DOMAINS = ("forward", "backward")
HELD_OUT = 200
SFT = (
    "--save_every", "1000", "--batch_size", "128", "--lr", "1e-3", "--lr_schedule", "cosine",
    "--eval_every", "0",
)  # fmt: skip
SAMPLED = (
    "--save_every", "1000", "--log_every", "1000",
    "--reward", "exact_match", "--engine", "transformers", "--max_new_tokens", "5",
    "--prompt_format", "plain", "--lr", "1e-3", "--lr_schedule", "linear",
    "--prompts_per_step", "64", "--eval_every", "20", "--eval_size", str(HELD_OUT),
)  # fmt: skip


def write_data() -> None:
    """Write the training rows and held-out rows of each domain, and of both."""
    rows = {}
    for split in ("train", "test"):
        questions = {row["prompt"]: row for row in TASKS["arithmetic"](split)}.values()
        for domain in DOMAINS:
            rows[f"{split}_{domain}"] = [row_of(row, domain) for row in questions]
        both = zip(*(rows[f"{split}_{domain}"] for domain in DOMAINS), strict=True)
        rows[f"{split}_both"] = [row for pair in both for row in pair]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in lines)
        (FOLDER / f"{name}.jsonl").write_text(text)


def row_of(row: dict, domain: str) -> dict:
    """Return a row of `arithmetic` with its right answer, forwards or backwards."""
    if domain == "forward":
        prompt, answer = row["prompt"], row["answer"]
    else:
        prompt, answer = row["prompt"].replace("=", "~"), row["answer"][::-1]
    return dict(prompt=prompt, completion=answer, answer=answer, domain=domain)


def write_bpe_model(folder: Path) -> Path:
    """Write tiny-sft with a byte-level BPE in place of its characters. The embedding of a token is
    the mean of those of its characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("1", b) for b in "0123456789"]
    tokens = [*characters, *map("".join, merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    earlier = AutoTokenizer.from_pretrained(tiny_model("tiny-sft"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model("tiny-sft"))
    old_VD = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        for i, token in enumerate(tokens):
            ids = earlier(token, add_special_tokens=False)["input_ids"]
            model.get_input_embeddings().weight[i] = old_VD[ids].mean(0)
        model.get_input_embeddings().weight[-1] = old_VD[earlier.eos_token_id]
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def launch(name: str, script: str, *flags: object) -> Path:
    """Run a script once, and return its folder."""
    folder = FOLDER / name
    if not (folder / "done").is_file():
        environment = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        line = [sys.executable, script, *map(str, flags), "--output_dir", str(folder)]
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
        (folder / "done").touch()
    return folder


def solved(name: str) -> str:
    """Return the greedy exact match of the model of a run in each domain."""
    flags = ("--model", FOLDER / name / "hf", "--reward", "exact_match", "--samples_per_prompt", 0,
             "--max_new_tokens", 5, "--engine", "transformers", "--prompt_format", "plain",
             "--max_prompts", HELD_OUT)  # fmt: skip
    scores = []
    for domain in DOMAINS:
        data = ("--dataset", FOLDER / f"test_{domain}.jsonl")
        folder = launch(f"eval_{name}_{domain}", "eval.py", *flags, *data)
        results = json.loads((folder / "results.json").read_text())
        scores.append(results["overall"]["solved"]["mean"])
    return " ".join(f"{domain} {score:.3f}" for domain, score in zip(DOMAINS, scores, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of distill.py")
    names = ["both", *DOMAINS, "bpe"]
    parser.add_argument("--runs", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    write_data()
    both = FOLDER / "train_both.jsonl"
    teachers = {}
    start = ("--model", "tiny-sft", "--prompt_format", "plain", *SFT)
    for domain in DOMAINS:
        name = f"teacher_{domain}"
        data = ("--dataset", FOLDER / f"train_{domain}.jsonl")
        teachers[domain] = launch(name, "sft.py", *start, *data, "--max_steps", 150) / "hf"
        print(f"teacher {domain}: {solved(name)}", flush=True)
    student = launch("student", "sft.py", *start, "--dataset", both, "--max_steps", 20) / "hf"
    print(f"student: {solved('student')}", flush=True)
    if "bpe" in args.runs:
        bpe = write_bpe_model(FOLDER / "bpe")
        flags = ("--model", bpe, "--dataset", FOLDER / "train_forward.jsonl", *SFT)
        teachers["bpe"] = launch("teacher_bpe", "sft.py", *flags, "--max_steps", 150) / "hf"
        print(f"teacher bpe: {solved('teacher_bpe')}", flush=True)
    named = [f"{domain}={teachers[domain]}" for domain in DOMAINS]
    full = ("--dataset", both, "--divergence", "forward_kl")
    chosen = {
        "both": (*full, "--teacher", *named, "--teacher_column", "domain"),
        "forward": (*full, "--teacher", teachers["forward"]),
        "backward": (*full, "--teacher", teachers["backward"]),
        "bpe": ("--dataset", FOLDER / "train_forward.jsonl", "--teacher", teachers.get("bpe"),
                "--estimator", "sampled"),
    }  # fmt: skip
    for seed in range(args.seeds):
        for name in args.runs:
            flags = chosen[name]
            steps = ("--max_steps", args.steps, "--seed", seed)
            run = f"{name}_{seed}"
            launch(run, "distill.py", "--model", student, *flags, *SAMPLED, *steps)
            print(f"distilled from {name}, seed {seed}: {solved(run)}", flush=True)


if __name__ == "__main__":
    main()
