"""The short scripts of course/lessons/00_nano.md have the losses and the weights of sft.py, dpo.py,
grpo.py and ppo.py. With an error in its equation, a short script does not."""

import ast
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import ROOT, metrics, weights, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.model.tiny import tiny_model

SOURCES = {
    name: (ROOT / f"course/lessons/nano_{name}.py").read_text(encoding="utf-8")
    for name in ("sft", "dpo", "grpo", "ppo")
}
STEPS = 3
LR = 3e-5
P = 4  # rows, all of them in each step and in its trace
G = 8
EPOCHS = 3

PROMPTS = ["12+21=", "34+43=", "51+15=", "26+62="]
TEXTS = ["7", "12 pears", "a longer answer of several words", "3 + 4 = 7"]
OTHERS = ["no", "9", "another answer", "12 pears or more"]
COLUMNS = dict(
    sft=dict(prompt=PROMPTS, completion=TEXTS),
    dpo=dict(prompt=PROMPTS, chosen=TEXTS, rejected=OTHERS),
    grpo=dict(prompt=PROMPTS, answer=["10203", "20406", "30609", "40812"]),
    ppo=dict(prompt=PROMPTS, answer=["10203", "20406", "30609", "40812"]),
)
ROWS = {
    name: [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for name, columns in COLUMNS.items()
}
# That of nano_grpo.py and nano_ppo.py, as grpo.py and ppo.py call it.
REWARD = """
def characters(completion, row):
    right = sum(a == b for a, b in zip(completion, row["answer"]))
    return right / max(len(completion), len(row["answer"]))
"""
FLAGS = dict(
    sft=("--batch_size", P),
    dpo=("--batch_size", P),
    grpo=(
        *("--prompts_per_step", P, "--samples_per_prompt", G, "--epochs_per_rollout", EPOCHS),
        *("--max_new_tokens", 5, "--engine", "transformers"),
    ),
    ppo=(
        *("--prompts_per_step", P, "--minibatches", 1, "--epochs_per_rollout", EPOCHS),
        *("--max_new_tokens", 5, "--engine", "transformers"),
        *("--value_lr", LR, "--clip_high", 0.2),
    ),
)
# For each short script, a fragment and its replacement in a script with an error.
MASK = "for _, mask in {}], batch_first=True)[:, {}]"
ERRORS = dict(
    sft={
        MASK.format("batch", "1:"): MASK.format("batch", ":-1"),
        "[True] * len(completion)": "[True] * (len(completion) - 1) + [False]",
        "/ mask_NL.sum()": "/ mask_NL.numel()",
        "(1 + math.cos(math.pi * step / steps)) / 2": "(1 - step / steps)",
        "(model.parameters(), 1.0)": "(model.parameters(), 1e9)",
    },
    dpo={
        MASK.format("samples", "1:"): MASK.format("samples", ":-1"),
        "copy.deepcopy(model)": "model",
        " - ref_logps_N)": ")",
        "(logprobs_NL * mask_NL).sum(1)": "(logprobs_NL * mask_NL).sum(1) / mask_NL.sum(1)",
    },
    grpo={
        "(masks, batch_first=True)[:, 1:]": "(masks, batch_first=True)[:, :-1]",
        "/ mask_NL.sum()": "/ mask_NL.numel()",
        " / (rewards_PG.std(1, keepdim=True) + 1e-6)": "",
        "logprobs(model, ids_NL).detach()": "0",
        "rho_NL.clamp(0.8, 1.28)": "rho_NL.clamp(0.8, 1.2)",
    },
    ppo={
        "(masks, batch_first=True)[:, 1:]": "(masks, batch_first=True)[:, :-1]",
        "objective_NL[mask_NL].mean()": "objective_NL.mean()",
        "-beta * (old_logprobs_NL - ref_logprobs_NL)": "0 * ref_logprobs_NL",
        "gae_lambda * A_N": "A_N",
        "returns_NL = advantages_NL + old_values_NL": "returns_NL = advantages_NL",
        " / (trained.std() + 1e-6)": "",
        "update(value_model, value_optimizer, error)": "",
        "rho_NL.clamp(0.8, 1.2)": "rho_NL.clamp(0.8, 1.28)",
        "old_values_NL - 0.2, old_values_NL + 0.2": "old_values_NL - 9, old_values_NL + 9",
    },
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model whose EOS is the token that ends a turn, as in most chat models."""
    folder = shutil.copytree(tiny_model("tiny-sft"), tmp_path_factory.mktemp("nano") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|end_of_turn|>"
    tokenizer.save_pretrained(folder)
    return folder


def recorded(folder: Path) -> Callable[..., list[list[int]]]:
    """Return a replacement of `sample` in nano_grpo.py or nano_ppo.py: the completions of a run."""
    trace_file = pytest.importorskip("extras.trace.file")
    calls = 0

    def sample(_model, prompt: list[int], *_) -> list[list[int]]:
        nonlocal calls
        _, *groups = trace_file.read(folder / "trace" / f"step_{calls // P + 1:06}.jsonl.gz")
        calls += 1
        for group in groups:
            samples = [completion["ids"] for completion in group["completions"]]
            if samples[0][: len(prompt)] == prompt:
                return [ids[len(prompt) :] for ids in samples]
        raise AssertionError("grpo.py has another prompt")

    return sample


def difference(name: str, source: str, model: Path, folder: Path) -> float:
    """Return the largest difference of a loss or a weight between a short script and a run."""
    nano: dict = {"__name__": "nano"}
    exec(source, nano)
    sizes: dict = dict(batch_size=P)
    if name in ("grpo", "ppo"):
        nano["sample"] = recorded(folder)
        sizes = dict(P=P, epochs=EPOCHS) | (dict(G=G) if name == "grpo" else {})
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    losses = nano["train"](policy, tokenizer, ROWS[name], steps=STEPS, lr=LR, **sizes)
    trained = policy.state_dict()
    pairs = [(trained[key], value) for key, value in weights(folder).items()]
    means = torch.tensor(losses).view(STEPS, -1).mean(1)  # of the updates of a step
    pairs.append((means, torch.tensor([line["loss"] for line in metrics(folder)[-STEPS:]])))
    return max((one - other).abs().max().item() for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_short_script_has_losses_and_weights_of_the_script(name, model, main, tmp_path):
    """grpo.py samples, and the short script gets its completions. All the rest is its own."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    folder = tmp_path / "out"
    flags = (
        *("--model", model, "--dataset", rows, "--prompt_format", "chat", "--output_dir", folder),
        *("--max_steps", STEPS, "--lr", LR, "--eval_every", 0),
        *("--trace_every", 1),
    )
    if "answer" in COLUMNS[name]:
        flags += ("--reward", f"{write(tmp_path / 'reward.py', REWARD)}:characters")
    main(name, *flags, *FLAGS[name])
    assert name not in ("grpo", "ppo") or metrics(folder)[-1]["clip_ratio/region_mean"] > 0
    source = SOURCES[name]
    assert difference(name, source, model, folder) < 1e-5
    for right, wrong in ERRORS[name].items():
        assert source.count(right) == 1, right
        assert difference(name, source.replace(right, wrong), model, folder) > 1e-4, right


@pytest.mark.parametrize("name", SOURCES)
def test_short_script_is_short_and_stands_alone(name):
    lines = SOURCES[name].splitlines()
    assert len(lines) <= (175 if name == "ppo" else 120) and max(map(len, lines)) <= 100
    imported = set()
    for node in ast.walk(ast.parse(SOURCES[name])):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    # transformers depends on tokenizers
    assert imported - sys.stdlib_module_names == {"torch", "transformers", "tokenizers"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "learned"),
    [
        ("sft", 100, lambda loss: loss < 0.1),
        ("dpo", 60, lambda loss: loss < 0.5),
        ("grpo", 40, lambda reward: reward > 0.3),
        ("ppo", 30, lambda reward: reward > 0.2),
    ],
)
def test_command_line_learns_the_toy_and_trains_a_model(
    name, steps, learned, model, monkeypatch, tmp_path, capsys
):
    """The toy has fewer steps than on the page."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    source, replaced = re.subn(r"steps=\d+", "steps={}", SOURCES[name])
    assert replaced == 1
    for count, words in ((steps, []), (2, [str(model), "rows.jsonl", "--lr", "1e-5"])):
        monkeypatch.setattr(sys, "argv", [name, *words])
        exec(source.replace("steps={}", f"steps={count}"), {"__name__": "__main__"})
        numbers = re.findall(
            r"^step \d+: (?:loss|reward) ([\d.]+\d)", capsys.readouterr().out, re.M
        )
        assert words or learned(float(numbers[-1]))
        AutoModelForCausalLM.from_pretrained(f"runs/nano_{name}")
        AutoTokenizer.from_pretrained(f"runs/nano_{name}")


@pytest.mark.parametrize("name", SOURCES)
def test_page_quotes_the_script(name):
    """The first columns of its table and of that of all scripts have parts of its source."""
    page = (ROOT / "course/lessons/00_nano.md").read_text(encoding="utf-8")
    assert f"| {len(SOURCES[name].splitlines())} |" in page
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    for title in ("every script", f"{name}.py"):
        table = page.split(f"\n## What {title} adds\n")[1].split("\n## ")[0]
        quotes = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
        assert len(quotes) > 5 and [quote for quote in quotes if quote not in source] == []
