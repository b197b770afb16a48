"""View runs and their traces in a browser: curves, groups, and the numbers of each token.

    python extras/trace/view.py runs/demo/grpo                  # writes runs/demo/grpo/view.html
    python extras/trace/view.py runs/a runs/b --out pair.html
    python extras/trace/view.py runs/demo/grpo --serve          # follows a live run, port 8000

The page is one file that opens without a network. It holds the traces as they are on disk,
compressed, and reads the trace of a step when that step is shown. page/ has its source, without
framework or build step."""

import base64
import fnmatch
import hashlib
import json
import math
import sys
from collections.abc import Callable
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.metrics.curves import distinct
from common.parallel.process import print_any_text, visible
from extras.trace import file as trace_file
from tools.compare import read_run
from tools.options import Options

PAGE = Path(__file__).with_name("page")
POLL_SECONDS = 1.0
# Metrics that the page shows first.
MAIN = (
    "reward", "eval/solved*", "rewards/*/mean", "loss", "eval_loss*", "rewards/margins", "kl",
    "entropy", "completions/mean_length", "clip_ratio/region_mean", "grad_norm",
)  # fmt: skip


@lru_cache(maxsize=100_000)
def summary(path: Path, changed: int) -> dict:
    """Return the step of a trace, its file, and the files of its images by digest. `changed`: time
    of its last change, so that a new file is read again."""
    header, *groups = trace_file.read(path)
    try:
        completions = chain.from_iterable(group["completions"] for group in groups)
        images = chain.from_iterable(c.get("images", ()) for c in completions)
        files = {image["digest"]: image["file"] for image in images}
        return dict(step=header["step"], path=path, images=files)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: damaged; delete it") from error


def traces_of(folder: Path) -> list[dict]:
    paths = (folder / "trace").glob("step_*.jsonl.gz")
    return sorted((summary(p, p.stat().st_mtime_ns) for p in paths), key=lambda x: x["step"])


def collect(folders: list[Path], embed: bool) -> dict:
    """Return the data of the page. `embed`: with the content of the traces. Raises `ValueError` for
    bad input."""
    runs, images = [read_run(folder) for folder in folders], {}
    found = []
    for run in runs:
        if not run.metrics:
            file = run.folder / "metrics.jsonl"
            raise ValueError(f"{file}: no finished step; wait for the first one")
        traces = []
        for trace in traces_of(run.folder):
            traces.append(dict(step=trace["step"]))
            if embed:
                images |= trace["images"]
                traces[-1]["gzip"] = base64.b64encode(trace["path"].read_bytes()).decode()
        metrics = {name: [list(of), list(of.values())] for name, of in run.metrics.items()}
        name = run.folder.resolve().name
        found.append(dict(name=name, folder=str(run.folder), metrics=metrics, traces=traces))
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    first = chain.from_iterable(fnmatch.filter(names, pattern) for pattern in MAIN)
    main = distinct({name: [run.metrics.get(name) for run in runs] for name in first})
    return dict(runs=found, main=main, pictures=pictures_of(images))


def pictures_of(images: dict[str, str]) -> dict[str, dict]:
    if not images:
        return {}
    from extras.trace import pictures  # loads PIL

    return pictures.pictures_of(images)


# ---- the page ----


def finite(x: Any) -> Any:
    """Return `x` with null for numbers that JSON lacks."""
    if isinstance(x, dict):
        return {str(name): finite(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def as_json(data: dict) -> str:
    """Return JSON that may stand inside a script element."""
    text = json.dumps(finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def page(data: dict) -> str:
    """Return the HTML of the page. Its policy forbids all scripts and styles but its own, and every
    request but those to the server of `--serve`."""

    def source(*names: str) -> str:
        return "\n".join((PAGE / name).read_text(encoding="utf-8") for name in names)

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    style = source("vendor/uPlot.min.css", "page.css")
    script = source("vendor/uPlot.iife.min.js", "page.js")
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest(style)}'; "
        f"script-src 'sha256-{digest(script)}'; "
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

    def content(path: str) -> tuple[str, bytes]:
        """Return type and body of an answer. Raises `LookupError` if there is none."""
        if path in ("/", "/data"):
            data = collect(folders, embed=False) | dict(live=POLL_SECONDS)
            if path == "/":
                return "text/html", page(data).encode()
            return "application/json", as_json(data).encode()
        kind, run, step = path.split("/")[1:]
        traces = {str(trace["step"]): trace for trace in traces_of(folders[int(run)])}
        if kind == "trace":
            return "application/gzip", traces[step]["path"].read_bytes()
        return "application/json", as_json(pictures_of(traces[step]["images"])).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            try:
                if host not in ("localhost", "127.0.0.1"):  # another site's name for this machine
                    self.answer(403, "text/plain", b"only for localhost")
                else:
                    self.answer(200, *content(self.path))
            except (ValueError, LookupError, OSError) as error:
                self.answer(500, "text/plain", str(error).encode())

        def answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        ready(server)
        server.serve_forever(poll_interval=0.05)


def main() -> None:
    print_any_text()
    parser = Options(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    add("--out", type=Path, metavar="FILE", help="page to write; default: view.html in first RUN")
    add(
        "--serve", nargs="?", type=int, const=8000, metavar="PORT",
        help="serve a page that follows live runs, on localhost only; 0: a free port",
    )  # fmt: skip
    options = parser.parse_args()
    try:
        data = collect(options.runs, embed=options.serve is None)
        if options.serve is not None:
            address = "serving http://localhost:{}; Ctrl-C ends it"
            serve(
                options.runs,
                options.serve,
                lambda server: print(address.format(server.server_port), flush=True),
            )
            return
        out = options.out or options.runs[0] / "view.html"
        out.write_text(page(data | dict(live=0)), encoding="utf-8")
        print(visible(f"{out}: {out.stat().st_size / 1e6:.1f} MB"))
    except (OSError, OverflowError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
