"""Is a patch of grpo.py better than grpo.py? Both run with the flags of race.yaml and equal seeds.

    make race PATCH=course/changes/dual-clip.patch

The patch changes at most 15 lines of grpo.py, and its change is on by default: no run gets another
flag. The verdict is `better` or `worse` if the 95% t interval of the paired differences in greedy
`eval/solved` after the last step leaves out 0, else `not shown`. A row of race.md keeps it.

Runs are in runs/race/, by a digest of all code and flags that they depend on. What is there is not
run again, and an interrupted one continues, so a second race costs half. One core for each run."""

import filecmp
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from common.config.options import Options
from common.metrics.runs import interval, read_run
from common.parallel.process import print_any_text, visible

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 15
TABLE = """# Races

[race.py](race.py) writes this table: held-out questions solved greedily, in per cent.

| date | patch | commit | machine | budget | grpo.py | patched | difference, 95% | verdict |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def changed_lines(patch: Path) -> int:
    """Count the lines that a patch of grpo.py adds and removes, but for empty ones. Raises
    `ValueError` if it changes another file, too many lines or none."""
    if not patch.is_file():
        raise ValueError(f"{patch}: no such file; make it with diff -u grpo.py mine.py")
    lines = patch.read_text(encoding="utf-8").splitlines()
    heads = [line.split()[1] for line in lines if re.match(r"--- \S", line)]
    others = sorted({head.removeprefix("a/") for head in heads} - {"grpo.py"})
    if others:
        raise ValueError(f"{patch}: changes {', '.join(others)}; a race is about grpo.py alone")
    body = [line for line in lines if not re.match(r"(---|\+\+\+) \S", line)]
    count = sum(line[:1] in ("+", "-") and line[1:].strip() != "" for line in body)
    if not 0 < count <= MOST_LINES:
        raise ValueError(f"{patch}: {count} changed lines; a race takes 1 to {MOST_LINES}")
    return count


def digest(*texts: bytes) -> str:
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:8]


def launch(script: Path, *flags: object) -> subprocess.CompletedProcess:
    """Run a script outside of the project's folder, on one core."""
    variables = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT))
    command = [sys.executable, str(script), *map(str, flags)]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


def solved(folder: Path, steps: int) -> float | None:
    """Return `eval/solved` after the last step, or None if the run is not there or not finished."""
    if not (folder / "hf").is_dir():  # written last
        return None
    return read_run(folder).metrics.get("eval/solved", {}).get(steps)


def result(script: Path, name: str, config: Path, steps: int, seed: int) -> float:
    """Return `eval/solved` of one seed, after its run if it is not there. Raises `ValueError` if
    the run fails."""
    folder, log = script.parent / f"seed_{seed}", script.parent / f"seed_{seed}.log"
    value = solved(folder, steps)
    if value is None:
        flags = ("--config", config, "--max_steps", steps, "--eval_every", steps)
        done = launch(script, *flags, "--seed", seed, "--output_dir", folder)
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
        value = solved(folder, steps)
        if done.returncode or value is None:
            why = (done.stderr.strip() or "no eval/solved after the last step").splitlines()[-1]
            raise ValueError(f"{name}: the run of seed {seed} failed: {why}; {log} has all")
    print(visible(f"{name}, seed {seed}: eval/solved {value:.4g}"), flush=True)
    return value


def patched(patch: Path) -> bytes:
    """Return the text of grpo.py with a patch. Raises `ValueError` if it does not apply."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "grpo.py")
        command = ["patch", "-s", "-f", "-F", "0", "-r", "-", "-o", out, ROOT / "grpo.py", patch]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return out.read_bytes()
    raise ValueError(f"{patch}: does not apply to grpo.py; make it anew: diff -u grpo.py mine.py")


def keep(code: bytes, config: Path, steps: int, folder: Path) -> Path:
    """Write a script to a folder named after all that its runs depend on, and return its path."""
    common = [file.read_bytes() for file in sorted(ROOT.glob("common/**/*.py"))]
    script = folder / digest(code, config.read_bytes(), str(steps).encode(), *common) / "grpo.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_bytes(code)
    return script


def verdict(differences: np.ndarray) -> tuple[str, str]:
    """Return the verdict, and the mean in per cent with its interval."""
    low, high = interval(differences)
    word = "better" if low > 0 else "worse" if high < 0 else "not shown"
    return word, f"{100 * differences.mean():+.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout

    changed = git("status", "--porcelain", "grpo.py", "common", "course/race.yaml").strip()
    return (git("rev-parse", "--short", "HEAD").strip() or "unknown") + " changed" * bool(changed)


def machine() -> str:
    file = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", file.read_text()) if file.exists() else []
    return [*names, platform.machine()][0]


def write_row(table: Path, cells: list[str]) -> None:
    """Add a row, unless the table has it but for its date."""
    text = table.read_text(encoding="utf-8") if table.exists() else TABLE
    row = " | ".join(visible(cell).replace("|", "/") for cell in cells[1:]) + " |\n"
    if row not in text:
        table.write_text(f"{text}| {cells[0]} | {row}", encoding="utf-8")


def main() -> None:
    print_any_text()
    parser = Options(__doc__)
    add = parser.add_argument
    add("patch", type=Path, metavar="PATCH", help="a diff of grpo.py")
    add("--seeds", type=int, default=6, help="runs of each script; default: 6")
    add("--steps", type=int, default=500, help="steps of a run; default: 500, five CPU minutes")
    add("--config", type=Path, default=ROOT / "course/race.yaml", help="flags of all runs")
    add("--folder", type=Path, default=ROOT / "runs/race", help="where runs are kept")
    add("--table", type=Path, default=ROOT / "course/race.md", help="where the verdict is kept")
    options = parser.parse_args()
    patch, steps, seeds = options.patch, options.steps, range(options.seeds)
    if len(seeds) < 2:
        parser.error(f"--seeds {options.seeds}: an interval needs 2")
    if steps < 1:
        parser.error(f"--steps {steps}: must be at least 1")
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        lines = changed_lines(patch)
        codes = {patch.name: patched(patch), "grpo.py": (ROOT / "grpo.py").read_bytes()}
        runs = f"{2 * len(seeds)} runs of {steps} steps"
        print(f"{runs}; what is in {options.folder} is not run again", flush=True)
        folder = options.folder.resolve()
        scripts = {name: keep(code, options.config, steps, folder) for name, code in codes.items()}
        rest = options.config, steps
        pairs = [
            [pool.submit(result, script, name, *rest, seed) for name, script in scripts.items()]
            for seed in seeds
        ]
        for run in pairs[0]:  # a patch that fails, or changes nothing, does so first
            run.result()
        weights = [script.parent / "seed_0/hf/model.safetensors" for script in scripts.values()]
        if filecmp.cmp(*weights, shallow=False):
            raise ValueError(f"{patch}: no weight differs; its change must be on by default")
        new, old = np.array([[run.result() for run in pair] for pair in pairs]).T
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    finally:  # also at Ctrl-C: what has not begun never does
        pool.shutdown(wait=False, cancel_futures=True)
    word, shown = verdict(new - old)
    name = f"{patch.name} ({digest(patch.read_bytes())}, {lines} lines)"
    budget = f"{len(seeds)} seeds, {steps} steps"
    means = [f"{100 * values.mean():.1f}" for values in (old, new)]
    about = [f"{date.today()}", name, commit(), machine(), budget]
    write_row(options.table, [*about, *means, shown, word])
    print(visible(f"{patch.name}: {word}: {' -> '.join(means)}, difference {shown}"))


if __name__ == "__main__":
    main()
