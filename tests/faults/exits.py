"""Launches that nothing disturbs, as users start them: each must end with exit code 0 and without a
complaint."""

from collections.abc import Iterator
from pathlib import Path

from processes import BAD_ENDS, ended, start

from tests.faults.case import Case, inputs
from tests.faults.shim import shim

SFT = "sft.py --max_steps 1 --batch_size 2 --max_length 128 --eval_every 0"
SAMPLING = "--engine transformers --max_new_tokens 4 --reward {inputs}/reward.py:digits"
GRPO = (
    f"grpo.py --max_steps 1 --prompts_per_step 2 --samples_per_prompt 2 --eval_every 0 {SAMPLING}"
)
LAUNCHES = {  # name: number of ranks, script and flags
    "sft, 1 rank": (1, SFT),
    "sft, 2 ranks": (2, SFT),
    "grpo, a rollout rank": (
        2,
        f"{GRPO} --max_logprob_difference 1 --rollout_ranks 1 --max_staleness 0",
    ),
    "eval": (1, f"eval.py --samples_per_prompt 1 {SAMPLING}"),
}
LATE = 25  # milliseconds by which a thread of gloo may be late


def exits(late: int, plain: int) -> Iterator[Case]:
    """Yield launches of each kind: `late` ones whose threads of gloo are late, and `plain` ones."""
    for name in LAUNCHES:
        for how, count in (("late", late), ("plain", plain)):
            for i in range(count):
                yield Case("exits", f"{name}/{how}/{i}", ends_well, (name, how == "late"))


def ends_well(folder: Path, name: str, late: bool) -> str | None:
    """The exit code is 0, and neither Python nor C++ complains."""
    ranks, line = LAUNCHES[name]
    words = line.format(inputs=inputs()).split()
    files = (
        "--model",
        inputs() / "model",
        "--dataset",
        inputs() / "rows.jsonl",
        "--output_dir",
        folder / "run",
    )
    variables = dict(LD_PRELOAD=shim(), FAULTS_LATE_GLOO=LATE) if late else {}
    done = ended(start(ranks, *words, *files, **variables))
    bad = [word for word in BAD_ENDS if word in done.stdout + done.stderr]
    return (
        f"exit {done.returncode}, {bad}: {done.stderr[-300:]}" if done.returncode or bad else None
    )
