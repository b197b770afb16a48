"""Run the GPU tests and bench/gpu.py, and write their results to docs/log.md: `make gpu-report`.

    python bench/gpu_report.py --tests 'ranks or logprobs' --bench '--layers 8'

The report replaces the previous one, between two marks in the page. If bench/gpu.py fails, it still
has the results of the tests. ONEFILE_GPU_TESTS_ON_CPU=1 runs all of it on a CPU, as a trial."""

import argparse
import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.cuda import nccl

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- report of make gpu-report -->\n", "<!-- end of the report -->\n"


def facts() -> str:
    """Return the date, the commit, the devices and the versions, as a line."""
    status = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    count = torch.cuda.device_count()
    devices = f"{count} x {torch.cuda.get_device_name()}" if count else "no GPU"
    versions = [f"torch {torch.__version__}"]
    for name in ("transformers", "vllm", "triton"):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    if count:
        versions.append(f"NCCL {'.'.join(map(str, nccl.version()))}")
    changed = " with changes" if status else ""
    return (
        f"{time.strftime('%Y-%m-%d')}, commit {commit.strip()}{changed}, {devices}. "
        f"{', '.join(versions)}."
    )


def table_of_tests(junit: Path) -> str:
    """Return a table with a row for each file of tests, and a list of the cases that failed."""
    counts: dict[str, Counter] = {}
    failed = []
    for case in ElementTree.parse(junit).iter("testcase"):
        file = case.get("classname", "").rpartition(".")[2]
        problem = next(
            (case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None
        )
        outcome = (
            "failed"
            if problem is not None
            else "skipped"
            if case.find("skipped") is not None
            else "passed"
        )
        counts.setdefault(file, Counter()).update(
            {outcome: 1, "seconds": round(float(case.get("time", 0)))}
        )
        if problem is not None:
            message = " ".join(problem.get("message", "").split())[:200]
            failed.append(f"- `{file}::{case.get('name')}`: {message}")
    columns = ("passed", "failed", "skipped", "seconds")
    rows = [
        f"| `{file}.py` | {' | '.join(str(of[column]) for column in columns)} |"
        for file, of in counts.items()
    ]
    head = [f"| file | {' | '.join(columns)} |", "| --- | --: | --: | --: | --: |"]
    return "\n".join([*head, *rows, *([""] if failed else []), *failed])


def replaced(page: str, report: str) -> str:
    """Return the page with the report between its marks. Raises `ValueError` if a mark is
    missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks {BEGIN.strip()} or {END.strip()}")
    return f"{before}{BEGIN}\n{report}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", default="", help="expression of pytest -k; default: all")
    parser.add_argument("--bench", default="", help="options of bench/gpu.py")
    parser.add_argument(
        "--page",
        type=Path,
        default=ROOT / "docs/log.md",
        help="page to write; default: docs/log.md",
    )
    options = parser.parse_args()
    (runs := ROOT / "runs").mkdir(exist_ok=True)
    junit, speed, began = runs / "gpu.xml", runs / "gpu.md", facts()
    for earlier in (junit, speed):
        earlier.unlink(missing_ok=True)
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", f"--junitxml={junit}"]
    subprocess.run(
        [*tests, *(["-k", options.tests] if options.tests else [])], cwd=ROOT, check=False
    )
    bench = [sys.executable, "bench/gpu.py", *shlex.split(options.bench)]
    code = subprocess.run(bench, cwd=ROOT, check=False, env=os.environ).returncode
    parts = [began, table_of_tests(junit)]
    parts += [speed.read_text().strip()] if speed.is_file() else []
    parts += [f"bench/gpu.py failed with exit code {code}."] if code else []
    options.page.write_text(replaced(options.page.read_text(), "\n\n".join(parts)))
    print(f"wrote {options.page}")
    sys.exit(int(code != 0))


if __name__ == "__main__":
    main()
