"""The report of GPU tests and benchmarks."""

import subprocess
from types import SimpleNamespace

import pytest
from helpers import write
from in_process import call_main

from bench import gpu_report

JUNIT = '<testsuite><testcase classname="tests.gpu.test_ranks" name="t" time="2"/></testsuite>'


@pytest.mark.parametrize("code", [0, 3])
def test_report_has_the_tests_also_if_the_benchmark_fails(code, tmp_path, monkeypatch, capsys):
    def run(command, **_):
        ran = " ".join(command)
        if "pytest" in ran:
            write(tmp_path / "runs/gpu.xml", JUNIT)
        if "bench/gpu.py" in ran and not code:
            write(tmp_path / "runs/gpu.md", "| speed |\n")
        return SimpleNamespace(returncode=code if "bench/gpu.py" in ran else 0, stdout="")

    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "runs").mkdir()
    write(tmp_path / "runs/gpu.md", "| speed of an earlier report |\n")
    page = write(tmp_path / "page.md", f"before\n{gpu_report.BEGIN}\nold\n{gpu_report.END}after\n")
    call_main(
        gpu_report.main, ("gpu_report.py", "--page", page), int(code > 0), monkeypatch, capsys
    )
    text = page.read_text()
    assert "| `test_ranks.py` | 1 | 0 | 0 | 2 |" in text and "old" not in text
    last = "bench/gpu.py failed with exit code 3." if code else "| speed |"
    assert text.endswith(f"{last}\n\n{gpu_report.END}after\n") and "earlier" not in text
