"""View runs and their traces in a browser: curves, groups, tokens, and the loss of a token term by
term.

    python extras/trace/view.py runs/demo/grpo                           # writes runs/demo/grpo/view.html
    python extras/trace/view.py runs/a runs/b --out pair.html
    python extras/trace/view.py runs/demo/grpo --serve                   # follows a live run on http://localhost:8000

The page is one file that opens without a network (docs/view.md). It holds the traces as they are on
disk, compressed, and reads the trace of a step when that step is shown. tools/view/ has the page,
without framework or build step."""

import ast
import base64
import fnmatch
import hashlib
import json
import math
import sys
import zlib
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from common.metrics.curves import distinct
from common.parallel.console import print_any_text, visible
from extras.trace import file as trace_file
from extras.trace.formulas import formulas
from tools.compare import Run, band, group_runs, label_groups, read_run, values_of
from tools.options import Options

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("page")
CHROMIUM = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip
POLL_SECONDS = 1.0


# ---- a run folder as data of the page ----


def clean(x: Any) -> Any:
    """Return `x` with null for numbers that JSON lacks."""
    if isinstance(x, dict):
        return {str(name): clean(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [clean(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


@lru_cache(maxsize=100_000)
def read_header(path: Path, changed: int) -> dict:
    """Check a trace and return its header, with the files of its images by digest. `changed`: time
    of its last change, so that a new file is read again."""
    try:
        lines = trace_file.read(path)
        header, groups = lines[0], lines[1:]
        if not all("completions" in group and "prompt" in group for group in groups):
            raise KeyError("completions")
        completions = chain.from_iterable(group["completions"] for group in groups)
        images = chain.from_iterable(c.get("images", ()) for c in completions)
        return {
            name: header[name]
            for name in ("script", "step", "loss", "traced", "tokens", "sequences")
        } | dict(images={image["digest"]: image["file"] for image in images})
    except ValueError as error:
        if "schema" in str(error):
            raise
        raise ValueError(f"{path}: damaged; delete it") from error
    except (
        OSError,
        EOFError,
        zlib.error,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ValueError(f"{path}: damaged; delete it") from error


def traces_of(folder: Path) -> list[dict]:
    """Return the headers of the traces of a run, by step. Each has its file as `path`."""
    found = []
    for path in sorted((folder / "trace").glob("step_*.jsonl.gz")):
        found.append(read_header(path, path.stat().st_mtime_ns) | dict(path=path))
    return sorted(found, key=lambda header: header["step"])


def timeline_of(folder: Path) -> list[dict]:
    """Return the spans of each rank, without an unfinished last line: names, begins and ends in
    seconds."""
    ranks = []
    for path in sorted(
        (folder / "timeline").glob("rank_*.jsonl"), key=lambda path: (len(path.name), path.name)
    ):
        try:
            spans = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
            columns = {name: [span[name] for span in spans] for name in ("what", "began", "ended")}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path}: damaged; delete it") from error
        columns |= {
            name: [round(second, 4) for second in columns[name]] for name in ("began", "ended")
        }
        ranks.append(dict(rank=path.stem.removeprefix("rank_"), **columns))
    return ranks


def gradients_of(folder: Path) -> dict | None:
    """Return gradients.json of a run: cosines by parameter, and two norms; None if there is
    none."""
    path = folder / "gradients.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(
            cosine={str(name): float(x) for name, x in found["cosine"].items()},
            norm=list(found["norm"]),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged; delete it") from error


# ---- the source of a script ----


def marked_lines(function: ast.FunctionDef, flags: dict) -> list[int]:
    """Return the lines of the cases that the flags select, or else those that assign or return the
    loss."""

    def values(expression: str) -> list[str]:
        name = expression.removeprefix("args.")
        value = flags.get("loss" if name == "name" else name)
        return [str(x) for x in (value if isinstance(value, list) else [value])]

    found, others = [], []
    for node in ast.walk(function):
        if isinstance(node, ast.Match):
            left = set(values(ast.unparse(node.subject)))
            for case in node.cases:
                named = {
                    str(x.value) for x in ast.walk(case.pattern) if isinstance(x, ast.Constant)
                } or left
                flag, _, required = (
                    ast.unparse(case.guard).partition(" == ") if case.guard else ("", "", "")
                )
                if left & named and (not flag or required.strip("'") in values(flag)):
                    left -= named
                    found.append((case.pattern.lineno, case.body[-1].end_lineno))
        elif isinstance(node, ast.Return):
            others.append((node.lineno, node.end_lineno))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith(
            ("loss_", "share_")
        ):
            others.append((node.lineno, node.end_lineno))
    return sorted({line for first, last in found or others for line in range(first, last + 1)})


def script_file(run: Run, script: str) -> Path:
    """Return the file of the script of a run: where the run began, or in this checkout."""
    began = run.script
    return began if began.stem == script and began.is_file() else ROOT / f"{script}.py"


def parsed(path: Path) -> tuple[list[str], ast.Module]:
    """Return the lines of a file and its syntax tree; nothing if the file is absent."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        return text.split("\n"), ast.parse(text)
    except SyntaxError as error:
        raise ValueError(
            f"{path}, line {error.lineno}: {error.msg}; mend it, or view the run without it"
        ) from error


def source_of(path: Path, origins: Container[str], flags: dict) -> list[dict]:
    """Return the functions that define the loss of a script, which may be a copy of `origins`:
    file, name, lines, and the marked ones by index."""
    files: dict[Path, tuple[str, ...]] = {path: ("policy_loss", "loss", "value_loss")}
    if "dpo" in origins or "online_dpo" in origins:
        files[ROOT / "common/objectives/preference.py"] = ("preference_loss",)
    functions = []
    for file, names in files.items():
        text, tree = parsed(file)
        shown = str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                lines = text[node.lineno - 1 : node.end_lineno]
                marked = [line - node.lineno for line in marked_lines(node, flags)]
                functions.append(dict(file=shown, name=node.name, lines=lines, marked=marked))
    return functions


def curves_of(path: Path) -> list[str]:
    """Return the main metrics of a script, as patterns: its `CURVES`, or those of scripts that
    sample."""
    _, tree = parsed(path)
    _, common = parsed(ROOT / "common/train/overview.py")
    named = {
        ast.unparse(node.targets[0]): node.value
        for part in (common, tree)
        for node in part.body
        if isinstance(node, ast.Assign)
    }
    further = [
        x.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple) and any(ast.unparse(x) == "*CURVES" for x in node.elts)
        for x in node.elts
        if isinstance(x, ast.Constant)
    ]
    return [*ast.literal_eval(named["CURVES"]), *map(str, further)]


# ---- the data of the page ----


def collect(folders: list[Path], embed: bool) -> dict:
    """Return the data of the page. `embed`: with the content of the traces. Raises `ValueError` for
    bad input."""
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if not run.metrics:
            raise ValueError(
                f"{run.folder / 'metrics.jsonl'}: no finished step; wait for the first one"
            )
    images = {}
    found = [run_data(run, embed, images) for run in runs]
    return clean(
        dict(
            runs=found,
            groups=group_data(runs),
            main=main_metrics(runs),
            pictures=pictures_of(images) if embed else {},
        )
    )


def pictures_of(images: dict[str, str]) -> dict[str, dict]:
    if not images:
        return {}
    from extras.trace import pictures  # loads PIL

    return pictures.pictures_of(images)


def script_of(run: Run, traces: list[dict]) -> str:
    """Return the name of the script of a run."""
    return next((header["script"] for header in traces), run.script.stem)


def run_data(run: Run, embed: bool, images: dict[str, str]) -> dict:
    """Return the data of a run, and add the files of its images to `images`."""
    traces = traces_of(run.folder)
    script = script_of(run, traces)
    for header in traces:
        path = header.pop("path")
        images |= header.pop("images")
        if embed:
            header["gzip"] = base64.b64encode(path.read_bytes()).decode()
    metrics = {name: [list(of), list(of.values())] for name, of in run.metrics.items()}
    found = formulas(script, run.flags)
    return dict(
        name=run.folder.resolve().name, folder=str(run.folder), script=script, flags=run.flags,
        metrics=metrics, traces=traces, timeline=timeline_of(run.folder),
        gradients=gradients_of(run.folder),
        source=source_of(script_file(run, script), found, run.flags), formulas=found,
    )  # fmt: skip


def group_data(runs: list[Run]) -> list[dict]:
    """Return the groups of runs that differ in their seed only: label, runs, and for each metric
    the mean and the band of its steps."""
    groups = group_runs(runs)
    place = {id(run): i for i, run in enumerate(runs)}
    out = []
    for group, label in zip(groups, label_groups(groups), strict=True):
        curves = {}
        for name in group[0].metrics if len(group) > 1 else ():
            if all(name in run.metrics for run in group) and set.intersection(
                *({*r.metrics[name]} for r in group)
            ):
                steps, values_RT = values_of(group, name)
                with np.errstate(all="ignore"):
                    low, high = band(values_RT)
                curves[name] = [steps, values_RT.mean(0).tolist(), low.tolist(), high.tolist()]
        out.append(dict(label=label, runs=[place[id(run)] for run in group], curves=curves))
    return out


def main_metrics(runs: list[Run]) -> list[str]:
    """Return the metrics that the page shows first."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    files = [script_file(run, script_of(run, traces_of(run.folder))) for run in runs]
    patterns = dict.fromkeys(x for file in files for x in curves_of(file))
    matching = [name for pattern in patterns for name in fnmatch.filter(names, pattern)]
    return distinct({name: [run.metrics.get(name) for run in runs] for name in matching})


# ---- the page ----


def as_json(data: dict) -> str:
    """Return JSON that may stand inside a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c")


def source(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def page(data: dict) -> str:
    """Return the HTML of the page. Its policy forbids all scripts and styles but its own, and every
    request but those to the server of `--serve`."""
    style = source("vendor/uPlot.min.css") + "\n" + source("page.css")
    script = source("vendor/uPlot.iife.min.js") + source("page.js")
    hashes = [
        base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in (style, script)
    ]
    policy = (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        f"connect-src {repr('self') if data['live'] else repr('none')}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = dict(policy=policy, style=style, script=script, data=as_json(data))
    before, *after = source("page.html").split("{{")
    pieces = [piece.split("}}", 1) for piece in after]
    return before + "".join(parts[name] + rest for name, rest in pieces)


def serve(folders: list[Path], port: int, ready: Callable[[ThreadingHTTPServer], None]) -> None:
    """Serve the page on localhost until Ctrl-C. `ready` gets the server before it waits for
    requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            try:
                if host not in ("localhost", "127.0.0.1"):  # another site's name for this machine
                    self.answer(403, "text/plain", b"only for localhost")
                elif self.path == "/":
                    self.answer(200, "text/html", page(live_data()).encode())
                elif self.path == "/data":
                    self.answer(200, "application/json", as_json(live_data()).encode())
                elif self.path.startswith(("/trace/", "/pictures/")):
                    kind, run, step = self.path.split("/")[1:]
                    traces = traces_of(folders[int(run)])
                    header = next(header for header in traces if header["step"] == int(step))
                    if kind == "trace":
                        self.answer(200, "application/gzip", header["path"].read_bytes())
                    else:
                        text = as_json(pictures_of(header["images"]))
                        self.answer(200, "application/json", text.encode())
                else:
                    self.answer(404, "text/plain", b"not found")
            except (ValueError, LookupError, StopIteration, OSError) as error:
                self.answer(500, "text/plain", str(error).encode())

        def answer(self, code: int, kind: str, body: bytes) -> None:
            tag = f'"{hashlib.sha256(body).hexdigest()}"'
            same = code == 200 and self.headers.get("If-None-Match") == tag
            self.send_response(304 if same else code)
            self.send_header("ETag", tag)
            self.send_header("Cache-Control", "no-cache")
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(0 if same else len(body)))
            self.end_headers()
            if not same:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    def live_data() -> dict:
        return collect(folders, embed=False) | dict(live=POLL_SECONDS)

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        ready(server)
        server.serve_forever(poll_interval=0.05)


@contextmanager
def opened(html: Path) -> Iterator:
    """Open the page in Chromium, filled. Yields playwright's page; needs playwright and
    chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=[*CHROMIUM])
        tab = browser.new_page(viewport=dict(width=1500, height=940))
        tab.goto(html.resolve().as_uri())
        tab.locator("[data-ready]").wait_for()
        yield tab
        browser.close()


def screenshot(html: Path, picture: Path) -> None:
    """Take a picture of the page with the token of the largest share of the loss open."""
    try:
        from playwright.sync_api import Error
    except ImportError as error:
        raise ValueError("--screenshot: playwright is missing; pip install playwright") from error
    try:
        with opened(html) as tab:
            tab.evaluate("view.openLargest()")
            tab.screenshot(path=picture)
    except Error as error:
        raise ValueError(
            f"--screenshot: {str(error).splitlines()[0]}; apt-get install chromium"
        ) from error


def main() -> None:
    print_any_text()
    parser = Options(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="page to write; default: view.html in the folder of the first run",
    )
    add(
        "--screenshot",
        type=Path,
        metavar="FILE",
        help="picture of the page to write; needs playwright and chromium",
    )
    add(
        "--serve", nargs="?", type=int, const=8000, metavar="PORT",
        help="serve a page that follows live runs, on localhost only; 0: a free port; "
        "default port: 8000",
    )  # fmt: skip
    options = parser.parse_args()
    try:
        twice = [
            run
            for i, run in enumerate(options.runs)
            if run.resolve() in map(Path.resolve, options.runs[:i])
        ]
        if twice:
            raise ValueError(f"{twice[0]}: the folder is given twice; name each run once")
        if not 0 <= (options.serve or 0) <= 65535:
            raise ValueError(f"--serve {options.serve}: must be between 0 and 65535")
        data = collect(options.runs, embed=options.serve is None)
        if options.serve is not None:
            serve(
                options.runs,
                options.serve,
                lambda server: print(
                    f"serving http://localhost:{server.server_port}; Ctrl-C ends it", flush=True
                ),
            )
            return
        out = options.out or options.runs[0] / "view.html"
        out.write_text(page(data | dict(live=0)), encoding="utf-8")
        if options.screenshot:
            screenshot(out, options.screenshot)
        print(visible(f"{out}: {out.stat().st_size / 1e6:.1f} MB"))
    except (OSError, OverflowError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
