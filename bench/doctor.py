"""Plant bugs, one at a time, and print what extras/trace/doctor.py says of the runs (docs/microscope.md).

    OMP_NUM_THREADS=1 python bench/doctor.py /tmp/doctor [NAME ...]

The twelve bugs are those of bench/planted.py, eight more are here; each has a run with the bug and
one without. Then come healthy runs of all scripts, in which the doctor must find nothing. A
finished run is not repeated. The rules get the folder alone, and no name of a bug."""

import shutil
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import planted  # noqa: E402
from bench.planted import BASES, BUGS, MATCH, MODEL, Bug, folder_parser, launch, plant  # noqa: E402
from extras.trace.doctor import examine  # noqa: E402

SAMPLE = "--engine transformers --eval_every 0"
ONLINE = f"{SAMPLE} --max_steps 12"
HEALTHY = {  # short runs of the built-in task
    "sft": "sft.py --max_steps 60 --batch_size 32 --eval_every 30",
    "rm": "rm.py --max_steps 40 --batch_size 32",
    "dpo": "dpo.py --max_steps 30 --batch_size 32",
    "kto": "kto.py --max_steps 30 --batch_size 32",
    "grpo": f"grpo.py {ONLINE}",
    "gspo": f"gspo.py {ONLINE}",
    "dapo": f"dapo.py {ONLINE}",
    "reinforce": f"reinforce.py {ONLINE}",
    "rloo": f"rloo.py {ONLINE}",
    "ppo": f"ppo.py {SAMPLE} --prompts_per_step 128 --max_steps 25",
    "bok": f"bok.py {ONLINE}",
    "online_dpo": f"online_dpo.py {ONLINE} --prompts_per_step 32",
    "self_distill": f"self_distill.py {ONLINE} --lr 1e-5",  # the model reads no hints
    "distill": f"distill.py {ONLINE} --teacher {{folder}}/model/hf --prompts_per_step 64",
}
SEEDS = {name: (0, 1, 2) if name in ("grpo", "sft") else (0, 1) for name in HEALTHY}


class Own(NamedTuple):
    name: str
    base: str  # healthy run
    flags: str = ""
    file: str = ""  # with `before`, which becomes `after`; without a file the flags are the bug
    before: str = ""
    after: str = ""


RETURNS, OWN_A = "mb.values_T, mb.returns_T, args", "mb.on_tokens(advantages_BG)"
OWN = [
    Own("lr_high", "sft", "--lr 0.5"),
    Own("lr_low", "sft", "--lr 1e-8"),
    Own("cut", "grpo", "--max_new_tokens 2"),
    Own("displaced", "dpo", "--sft_weight 0 --lr 0.003"),
    Own(
        "length",
        "grpo",
        "",
        planted.REWARDS,
        f"completion.strip() in {planted.ANSWERS}",
        "len(completion)",
    ),
    Own("lag", "ppo", "", "ppo.py", RETURNS, RETURNS.replace("returns", "values")),
    Own(
        "flat",
        "rm",
        "",
        "common/data/sample.py",
        "[False] * len(ids) + [True]",
        "[False, True] + [False] * (len(ids) - 1)",
    ),
    Own("shuffled", "grpo", "", "grpo.py", OWN_A, OWN_A.replace("BG", "BG.flip(1)")),
]

# Rule that names each bug.
NAMES = {
    "mask": "prompt_trained",
    "eos": "no_end",
    "template": "special_twice",
    "sign": "advantage_sign",
    "baseline": "no_baseline",
    "column": "never_pays",
    "head": "engine_differs",
    "temperature": "first_ratio",
    "kl": "kl_differs",
    "clip": "clipped_gradient",
    "truncation": "penalty_sign",
    "vocabulary": "judge_differs",
    "lr_high": "rate_high",
    "lr_low": "rate_low",
    "cut": "truncated",
    "displaced": "displaced",
    "length": "likes_length",
    "lag": "value_lags",
    "flat": "scores_equal",
    "shuffled": "share_differs",
}


def once(where: Path, folder: Path, name: str, words: str) -> None:
    """Run a script, unless it has finished; an interrupted run begins again."""
    if not (folder / name / "hf").is_dir():
        shutil.rmtree(folder / name, ignore_errors=True)
    launch(where, folder, name, words)


def planted_run(bug: Bug, seed: int, folder: Path) -> tuple[Path, Path]:
    """Run a bug of bench/planted.py, and return the folders without and with it."""
    for needed in ("model", "reward_model") if bug.base == "grpo" else ():
        if needed == "model" or bug.flags == MODEL:
            once(ROOT, folder, needed, BASES[needed])
    words = f"{BASES[bug.base]} {bug.flags} --seed {seed}"
    end = f"_s{seed}" if seed else ""
    without = (bug.base if bug.flags in ("", MATCH) else f"{bug.name}_without") + end
    once(ROOT, folder, without, words)
    return folder / without, run_with(bug, bug.name + end, folder, words)


def own_run(bug: Own, seed: int, folder: Path) -> tuple[Path, Path]:
    """Run a bug of this file, and return the folders without and with it."""
    words = f"{HEALTHY[bug.base]} --seed {seed}"
    without, name = f"{bug.base}_{seed}", f"{bug.name}_s{seed}" if seed else bug.name
    once(ROOT, folder, without, words)
    return folder / without, run_with(bug, name, folder, f"{words} {bug.flags}")


def run_with(bug: Bug | Own, name: str, folder: Path, words: str) -> Path:
    """Run a script in a copy of the project with the bug, unless it has finished."""
    done = (folder / name / "hf").is_dir()
    once(plant(bug, folder) if bug.file and not done else ROOT, folder, name, words)
    return folder / name


def found(run: Path) -> list[str]:
    """Return the names of the rules that find something in a run."""
    return [finding.rule for finding in examine(run).findings]


def shown(runs: list[list[str]]) -> str:
    """Return the findings of the runs of several seeds, each with the number of its runs."""
    count = Counter(chain(*runs))
    return ", ".join(f"{name} {n}" if len(runs) > 1 else name for name, n in count.items()) or "-"


def bugs_table(folder: Path, names: list[str], seeds: range) -> None:
    named = 0
    total = 0
    print(f"| bug | without ({len(seeds)} seeds) | with | named |\n|---|---|---|---|")
    for bug in (bug for bug in [*BUGS, *OWN] if bug.name in names):
        run = planted_run if isinstance(bug, Bug) else own_run
        folders = [run(bug, seed, folder) for seed in seeds]
        without = [found(one) for one, _ in folders]
        with_bug = [found(other) for _, other in folders]
        right = sum(NAMES[bug.name] in rules for rules in with_bug)
        row = f"{bug.name} | {shown(without)} | {shown(with_bug)} | {right} of {len(seeds)}"
        print(f"| {row} |", flush=True)
        named += right == len(seeds)
        total += 1
    print(f"bugs named with every seed: {named} of {total}\n")


def healthy_table(folder: Path) -> None:
    alarms = []
    once(ROOT, folder, "model", BASES["model"])  # the teacher of distill.py
    print("| healthy run | runs | findings |\n|---|---|---|")
    for name, words in HEALTHY.items():
        runs = []
        for seed in SEEDS[name]:
            once(ROOT, folder, f"{name}_{seed}", f"{words} --seed {seed}")
            runs.append(found(folder / f"{name}_{seed}"))
        alarms += runs
        print(f"| {name} | {len(runs)} | {shown(runs)} |", flush=True)
    print(f"healthy runs with a finding: {sum(map(bool, alarms))} of {len(alarms)}")


def main() -> None:
    parser = folder_parser(__doc__)
    parser.add_argument(
        "names", nargs="*", default=[*NAMES, "healthy"],
        help=f"bugs to plant, and healthy for the healthy runs; default: all of {', '.join(NAMES)}",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="runs of each bug; default: 3")
    options = parser.parse_args()
    if unknown := set(options.names) - {*NAMES, "healthy"}:
        parser.error(f"no bug is named {', '.join(sorted(unknown))}")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    bugs_table(folder, options.names, range(options.seeds))
    if "healthy" in options.names:
        healthy_table(folder)


if __name__ == "__main__":
    main()
