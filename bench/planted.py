"""Plant twelve bugs, one at a time, and print what the trace of the step shows
(docs/microscope.md).

    OMP_NUM_THREADS=1 python bench/planted.py /tmp/planted [NAME ...]

Each bug is one changed piece of code in a copy of this project. A short run with it and one without
leave their traces in the folder, for extras/trace/view.py. The answers of a model that adds are easy to
read: the first run trains it."""

import argparse
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from extras.trace.file import read  # noqa: E402
from extras.trace.fragments import replace  # noqa: E402

TINY = "--dataset arithmetic --trace_every 1"
TRAINED = f"--model {{folder}}/model/hf {TINY} --prompt_format plain"
ONE_STEP = f"sft.py --model tiny {TINY} --max_steps 1 --eval_every 0 --eval_generate 0"
BASES = {  # runs; {folder} has all of them
    "model": f"sft.py --config configs/demo_sft.yaml {TINY}",
    "reward_model": f"rm.py {TRAINED} --max_steps 200 --lr 0.001",
    "sft": f"{ONE_STEP} --prompt_format plain",
    "chat": f"{ONE_STEP} --prompt_format chat",
    "grpo": f"grpo.py {TRAINED} --engine transformers --prompts_per_step 16 --samples_per_prompt 8 "
    "--minibatches 2 --epochs_per_rollout 2 --max_new_tokens 8 --max_steps 4 --lr 0.0004 "
    "--warmup_steps 0 --max_logprob_difference 1e9 --eval_every 0",
}
MATCH = "--reward exact_match"
KL, COOL = f"{MATCH} --beta 0.2", f"{MATCH} --temperature 0.7"
FAST = f"{MATCH} --lr 0.002 --max_steps 1"  # ratios leave the bounds
SHORT = f"{MATCH} --missing_eos_penalty 0.5 --max_new_tokens 4 --temperature 1.5 --max_steps 1"
MODEL = "--reward model:{folder}/reward_model/hf"

Completion = dict


class Bug(NamedTuple):
    name: str
    file: str
    before: str
    after: str
    base: str
    look: Callable[[list[Completion]], str]
    flags: str = MATCH


# ---- what one sees: numbers and texts of the completions of a trace ----


def row(completions: list[Completion]) -> str:
    """Return the text of the first row, with its trained tokens in brackets."""
    first = completions[0]
    trained = zip(first["tokens"][first["start"] :], first["mask"], strict=True)
    text = "".join(
        [
            *first["tokens"][: first["start"]],
            *(f"[{token}]" if on else token for token, on in trained),
        ]
    )
    return f"`{text}`".replace("\n", "⏎").replace("|", "\\|")


def mean_of(value: Callable[[Completion], float], of: Callable[[Completion], bool], label: str):
    """Return a function that writes the mean of a value over some completions."""

    def look(completions: list[Completion]) -> str:
        values = [value(c) for c in completions if of(c)]
        return f"{label} {fmean(values):+.2f}" if values else f"{label}: none"

    return look


def tokens(
    value: Callable[[dict, dict, int], float],
    label: str,
    update: int = 0,
    of=lambda fixed, now, t: True,
):
    """Return a function that writes the mean of a value over tokens: of streams that stay fixed, of
    those of an update, and the index of the token."""

    def look(completions: list[Completion]) -> str:
        values = []
        for fixed, now in (
            (c["fixed"], c["updates"][update]) for c in completions if len(c["updates"]) > update
        ):
            values += [
                value(fixed, now, t) for t in range(len(now["logprobs"])) if of(fixed, now, t)
            ]
        return f"{label} {fmean(values):.3g}" if values else f"{label}: none"

    return look


def right(completion: Completion) -> bool:
    """Return whether a sum is right, whatever its reward."""
    text, _, answer = "".join(completion["tokens"]).partition("=")
    total = str(eval(text))  # digits and signs of the built-in task
    return bool(answer) and answer.removesuffix("<|eos|>") == total


def estimate(fixed: dict, now: dict, t: int) -> float:
    """Return the k3 estimate of the KL of a token, from its log-probs."""
    d = now["logprobs"][t] - fixed["ref_logprobs"][t]
    return math.expm1(-d) + d


def gap(fixed: dict, now: dict, t: int) -> float:
    return abs(fixed["rollout_logprobs"][t] - fixed["old_logprobs"][t])


RIGHT = mean_of(lambda c: c["advantage"], right, "advantage of right answers")
REWARD = mean_of(lambda c: c["reward"], right, "reward of right answers")
WRONG = mean_of(lambda c: c["advantage"], lambda c: not right(c), "advantage of wrong answers")
CUT = mean_of(
    lambda c: c["advantage"],
    lambda c: c["finish_reason"] == "length",
    "advantage of truncated answers",
)
CLIPPED = tokens(
    lambda fixed, now, t: abs(now["logprobs_gradient"][t]), "gradient of clipped tokens", 1,
    lambda fixed, now, t: now["clip_ratio/region_mean"][t] == 1,
)  # fmt: skip
GAP = tokens(gap, "gap of engine and trainer")
RATIO = tokens(
    lambda fixed, now, t: abs(now["ratio"][t] - 1),
    "first update: distance of the ratio from 1",
    of=lambda fixed, now, t: now["update"] == 0,
)
KL_ERROR = tokens(lambda fixed, now, t: abs(now["kl"][t] - estimate(fixed, now, t)), "KL off by", 1)
ADVANTAGE = "centred_BG / (group_std(rewards_BG) + 1e-6)"
DATA, GRPO = "common/data/encode.py", "grpo.py"
KL_FILE, REWARDS = "common/objectives/kl.py", "common/rewards/functions.py"
ENGINE = "common/rollout/transformers_engine.py"
SCORES = "common/rewards/reward_model.py"
PENALTIES = "common/rollout/measure.py"
LOGPROBS = "policy(mb, temperature=args.temperature)"
ANSWERS = "[answer.strip() for answer in gold_answers(row)]"
NO_HEAD = '((n, w) for n, w in weights if "embed" not in n and "lm_head" not in n)'
TWICE = '.replace("<|turn|>", "<|turn|><|turn|>")'

BUGS = [
    Bug("mask", DATA, "[False] * len(prompt_ids)", "[True] * len(prompt_ids)", "sft", row, ""),
    Bug("eos", DATA, "ids = self._with_eos(ids)\nmask", "mask", "sft", row, ""),
    Bug(
        "template",
        "common/data/chat.py",
        "**options)\n    except",
        f"**options){TWICE}\n    except",
        "chat",
        row,
        "",
    ),
    Bug("sign", GRPO, ADVANTAGE, f"-{ADVANTAGE}", "grpo", RIGHT),
    Bug("baseline", GRPO, ADVANTAGE, ADVANTAGE.replace("centred", "rewards"), "grpo", WRONG),
    Bug("column", REWARDS, f"in {ANSWERS}", 'in [str(row["prompt"])]', "grpo", REWARD),
    Bug(
        "head", ENGINE, "for name, whole in weights:", f"for name, whole in {NO_HEAD}:", "grpo", GAP
    ),
    Bug("temperature", GRPO, LOGPROBS, "policy(mb)", "grpo", RATIO, COOL),
    Bug(
        "kl",
        KL_FILE,
        "d_T = logprobs_T - ref_logprobs_T",
        "d_T = ref_logprobs_T - logprobs_T",
        "grpo",
        KL_ERROR,
        KL,
    ),
    Bug("clip", GRPO, "torch.min(rho_T * A_T", "torch.max(rho_T * A_T", "grpo", CLIPPED, FAST),
    Bug("truncation", PENALTIES, "-penalty * truncated", "penalty * truncated", "grpo", CUT, SHORT),
    Bug(
        "vocabulary",
        SCORES,
        "sample.ids if reads_ids",
        "[i ^ 1 for i in sample.ids] if reads_ids",
        "grpo",
        RIGHT,
        MODEL,
    ),
]


# ---- runs ----


def plant(bug: Bug, folder: Path) -> Path:
    """Return a copy of the project with the bug. Raises `ValueError` unless its code is there
    exactly once."""
    copy = folder / f"{bug.name}_code"
    shutil.rmtree(copy, ignore_errors=True)
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "docs", "tests", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    text = (copy / bug.file).read_text()
    (copy / bug.file).write_text(replace(bug.before, bug.after, text, f"{bug.name}: {bug.file}"))
    return copy


def launch(where: Path, folder: Path, name: str, words: str) -> list[Completion]:
    """Run a script, unless its traces are there, and return the completions of its last trace."""
    if not list((folder / name).glob("trace/*.gz")):
        command = [
            sys.executable,
            *words.format(folder=folder).split(),
            "--output_dir",
            str(folder / name),
        ]
        done = subprocess.run(
            command,
            cwd=where,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{name}: {done.stdout[-1000:]}")
    _, *groups = read(max((folder / name).glob("trace/*.gz")))
    return [completion for group in groups for completion in group["completions"]]


def folder_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the folder for all runs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="folder for all runs; finished ones are not repeated"
    )
    return parser


def main() -> None:
    parser = folder_parser(__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        help=f"bugs to plant; default: all of {', '.join(bug.name for bug in BUGS)}",
    )
    flags = parser.parse_args()
    folder = flags.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print("| bug | without | with |\n|---|---|---|")
    for bug in (bug for bug in BUGS if not flags.names or bug.name in flags.names):
        for needed in (
            ("model", "reward_model")
            if bug.flags == MODEL
            else ("model",)
            if bug.base == "grpo"
            else ()
        ):
            launch(ROOT, folder, needed, BASES[needed])
        words = f"{BASES[bug.base]} {bug.flags}"
        name = bug.base if bug.flags in ("", MATCH) else f"{bug.name}_without"
        without = launch(ROOT, folder, name, words)
        planted = launch(plant(bug, folder), folder, bug.name, words)
        print(f"| {bug.name} | {bug.look(without)} | {bug.look(planted)} |", flush=True)


if __name__ == "__main__":
    main()
