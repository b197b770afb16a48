"""Measure the page of tools/view.py: its size, the seconds to write it, and the seconds until Chromium shows it.

    OMP_NUM_THREADS=1 python bench/view.py

grpo.py with the untrained built-in model writes 60 traces of 16 groups of 8 completions. They stay in runs/view; a
finished run is not repeated. Needs playwright and chromium.
"""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "runs/view"
COMMAND = (
    "grpo.py --model tiny --reward bench/view.py:ones --dataset arithmetic --prompt_format plain --max_new_tokens 100"
    " --prompts_per_step 16 --samples_per_prompt 8 --max_steps 60 --trace_every 1 --trace_groups 16 --eval_every 0"
    " --beta 0.01"
)


def ones(completion: str, row: dict) -> float:
    """Reward that differs within a group."""
    return completion.count("1")


def main() -> None:
    from playwright.sync_api import sync_playwright

    if not (RUN / "hf").is_dir():
        subprocess.run([sys.executable, *COMMAND.split(), "--output_dir", RUN], cwd=ROOT, check=True)
    page, start = RUN / "view.html", time.perf_counter()
    subprocess.run([sys.executable, "tools/view.py", RUN, "--out", page], cwd=ROOT, check=True)
    print(f"written in {time.perf_counter() - start:.1f} s, {page.stat().st_size / 1e6:.0f} MB")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        tab, start = browser.new_page(), time.perf_counter()
        tab.goto(page.as_uri())
        tab.locator("[data-ready]").wait_for()
        print(f"opened in {time.perf_counter() - start:.1f} s")
        browser.close()


if __name__ == "__main__":
    main()
