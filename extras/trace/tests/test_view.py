"""The viewer: the data of its page, a page in a browser if one is here, bad input."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers import write_rows
from in_process import call_main

from extras.trace import file as trace_file
from extras.trace import view

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is missing: apt-get install chromium"
)
HOSTILE = "</script><img src=x onerror=alert(1)>"


def completion(text: str, reward: float, share: float, **streams: list) -> dict:
    tokens, n = ["2", "=", *text], len(text)
    return dict(
        reward=reward, advantage=2 * reward - 1, finish_reason="stop", version=0, start=2,
        ids=[*range(n + 2)], tokens=tokens, mask=[1] * n, fixed=dict(old_logprobs=[-1.0] * n),
        updates=[dict(update=0, logprobs=[-1.0] * n, share=[share] * n) | streams],
    )  # fmt: skip


def write_trace(
    folder: Path, step: int, prompt: str = "2=", share: float = 0.5, text="ab", disputed: str = ""
) -> None:
    completions = [completion(text, 1.0, share), completion("c", 0.0, -share, entropy=[0.25])]
    group = dict(group=3, chosen=["first", "best"], prompt=prompt, completions=completions)
    more = dict(group=4, chosen=["disputed"], prompt=disputed, completions=completions)
    header = dict(schema=trace_file.SCHEMA, step=step, loss=[0.0])
    header |= dict(weights=[["0"]], flags={})
    trace_file.write(
        folder / "trace" / f"step_{step:06}.jsonl.gz", [header, group] + [more] * bool(disputed)
    )


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [{"step": step, "reward": step / 10, "rewards/x/mean": step / 10} for step in (1, 2)]
    lines[1]["loss"] = float("nan")
    write_rows(folder / "metrics.jsonl", lines)
    (folder / "args.yaml").write_text(yaml.safe_dump(dict(lr=1.0)))
    write_trace(folder, 1)
    return folder


def built(*folders: Path) -> Path:
    out = folders[0] / "view.html"
    out.write_text(view.page(view.collect([*folders])), encoding="utf-8")
    return out


def dom(html: Path) -> str:
    """Return the body of the page when it is filled, without its scripts."""
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    done = subprocess.run(
        [CHROMIUM, *words, "--dump-dom", html.as_uri()], capture_output=True, text=True
    )
    body = done.stdout[done.stdout.index("<body") :]
    assert "data-ready" in body, done.stderr[-2000:]
    return body.partition("<script")[0]


# ---- data of the page ----


def test_page_has_the_metrics_and_the_traces_as_they_are_on_disk(run):
    data = view.collect([run])
    (found,) = data["runs"]
    assert data["main"] == ["reward", "loss"]  # one of two equal metrics
    assert found["metrics"]["reward"] == [[1, 2], [0.1, 0.2]]
    assert [trace["step"] for trace in found["traces"]] == [1]
    html = built(run).read_text()
    assert found["traces"][0]["gzip"] in html and '"loss":[[2],[null]]' in html


def test_text_of_a_run_ends_no_script(run):
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, HOSTILE: 1.0}) + "\n")
    html = built(run).read_text()
    assert HOSTILE not in html
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    # no request, no script and no style but the page's own
    scripts = [each for each in policy.split("; ") if each.startswith(("script", "style"))]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert all(re.fullmatch("(script|style)-src 'sha256-[^ ]+'", each) for each in scripts)
    assert "img-src data:" in policy and "connect-src" not in policy


# ---- in a browser ----


@needs_chromium
def test_browser_shows_groups_and_tokens(run):
    shown = dom(built(run))
    assert "step 2, trace of 1" in shown
    assert "3: 1 of 2 with reward ≥ 1 · mean 0.5 ± 0.5 · first · best" in shown
    assert shown.count('class="token"') == 3
    colours = [f'rgb(var(--{name}) / 0.660);">' for name in ("blue", "orange")]
    assert [shown.count(x) for x in colours] == [2 + 1, 1 + 1]  # tokens, and one of the legend
    assert "advantage, one value per completion" in shown
    assert "blue: the update raises it, orange: lowers it" in shown


@needs_chromium
def test_page_opens_on_the_most_disputed_group_and_right_answers_are_blue(run):
    """A reader takes orange for bad, so a token at which the loss falls is blue."""
    write_trace(run, 2, disputed="3=")
    html = built(run)
    assert '<div id="prompt">3=</div>' in dom(html)
    page = html.read_text().replace('|| "advantage")', '|| "loss share")')
    (script,) = re.findall("<script>(.*)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html.write_text(re.sub("script-src 'sha256-[^']+'", f"script-src 'sha256-{digest}'", page))
    shown = dom(html)
    assert "loss share, one value" in shown
    first, second = (
        re.findall(r"--(blue|orange)\)", row) for row in shown.split('class="row"')[1:]
    )
    assert first == ["orange"] * 2 and second == ["blue"]  # shares 0.5 and -0.5


@needs_chromium
def test_browser_shows_hostile_text_as_text(run):
    write_trace(run, 2, prompt=HOSTILE, text=[HOSTILE])
    shown = dom(built(run))
    assert "<img" not in shown and shown.count("&lt;/script&gt;&lt;img src=x") == 3


@needs_chromium
def test_browser_shows_two_runs(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    shown = dom(built(run, other))
    assert f'<option value="1">{other}</option>' in shown and shown.count("u-over") == 2


# ---- the command ----


def test_command_writes_a_page(run, tmp_path, monkeypatch, capsys):
    words = ("view.py", run, "--out", tmp_path / "x.html")
    out, _ = call_main(view.main, words, 0, monkeypatch, capsys)
    assert out.startswith(f"{tmp_path}/x.html: 0.") and out.count("\n") == 1


def test_bad_input_is_one_line(run, monkeypatch, capsys):
    for name, text, words in (
        ("trace/step_000001.jsonl.gz", "no gzip", "damaged; delete it"),
        ("metrics.jsonl", "", "no finished step; wait for the first one"),
        ("metrics.jsonl", None, "No such file or directory; name the output folder of a run"),
    ):
        (run / name).unlink()
        if text is not None:
            (run / name).write_text(text)
        _, shown = call_main(view.main, ["view.py", run], 2, monkeypatch, capsys)
        assert shown == f"error: {run}/{name}: {words}\n"
        write_trace(run, 1)


def test_a_run_of_somebody_else_is_read_only_as_regular_files(run, monkeypatch, capsys):
    """To read a pipe would never end."""
    for name in ("trace/step_000001.jsonl.gz", "metrics.jsonl", "args.yaml"):
        (run / name).rename(run / "aside")
        os.mkfifo(run / name)
        _, shown = call_main(view.main, ["view.py", run], 2, monkeypatch, capsys)
        assert shown.startswith(f"error: {run}/{name}: ") and shown.count("\n") == 1
        (run / "aside").rename(run / name)
    header = dict(schema=trace_file.SCHEMA, step=1)
    for wrong in (
        [header, {}],
        [header, dict(completions=[dict(images=[1])])],
        [dict(schema=2), 3],
    ):
        trace_file.write(run / "trace" / "step_000001.jsonl.gz", wrong)
        _, shown = call_main(view.main, ["view.py", run], 2, monkeypatch, capsys)
        assert shown == f"error: {run}/trace/step_000001.jsonl.gz: damaged; delete it\n"
