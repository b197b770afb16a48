"""Measure the page of extras/trace/view.py: its size, the seconds to write it, and the seconds until
Chromium shows it.

    python bench/view.py

grpo.py with the untrained built-in model writes 60 traces of 16 groups of 8 completions, on two
ranks. They stay in runs/view; a finished run is not repeated. Needs playwright and chromium."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "runs/view"
FLAGS = (
    "--model tiny --reward bench/view.py:ones --dataset arithmetic --prompt_format plain "
    "--max_new_tokens 100"
    " --prompts_per_step 16 --samples_per_prompt 8 --max_steps 60 --trace_every 1 --trace_groups "
    "16 --eval_every 0"
    " --beta 0.01"
)


def ones(completion: str, row: dict) -> float:
    """Reward that differs within a group."""
    return completion.count("1")


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from seeds import launch  # not at the top: the processes of the reward import this file

    from extras.trace.view import opened

    launch(RUN, "grpo.py", *FLAGS.split())
    page, start = RUN / "view.html", time.perf_counter()
    subprocess.run(
        [sys.executable, "extras/trace/view.py", RUN, "--out", page], cwd=ROOT, check=True
    )
    print(f"written in {time.perf_counter() - start:.1f} s, {page.stat().st_size / 1e6:.0f} MB")
    with opened(page) as tab:
        print(f"opened in {tab.evaluate('performance.now()') / 1000:.1f} s")


if __name__ == "__main__":
    main()
