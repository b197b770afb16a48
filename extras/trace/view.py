"""View runs and their traces in a browser: curves, groups, and the numbers of each token.

    python extras/trace/view.py runs/demo/grpo                  # writes runs/demo/grpo/view.html
    python extras/trace/view.py runs/a runs/b --out pair.html
    python extras/trace/view.py step.zip                        # a step that replay.py packed

The page is one file that needs no network. It holds the compressed traces, and unpacks the trace of
a step only when the step is shown. Its source is in page/, without a framework or a build step."""

import base64
import fnmatch
import hashlib
import json
import math
import sys
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.config.options import Options
from common.metrics.curves import distinct
from common.metrics.runs import read_run
from common.parallel.process import print_any_text, visible
from extras.trace import file as trace_file
from extras.trace.step import unpack

PAGE = Path(__file__).with_name("page")
# Metrics that the page shows first.
MAIN = (
    "reward", "eval/solved*", "rewards/*/mean", "loss", "eval_loss*", "rewards/margins", "kl",
    "entropy", "completions/mean_length", "clip_ratio/region_mean", "grad_norm",
)  # fmt: skip


def collect(folders: list[Path]) -> dict:
    """Return the data of the page. Raises `ValueError` for a run without a finished step, and for
    missing or damaged files."""
    runs = [read_run(folder) for folder in folders]
    images: dict[str, str] = {}  # files by digest
    found = []
    for run in runs:
        if not run.metrics:
            file = run.folder / "metrics.jsonl"
            raise ValueError(f"{file}: no finished step; wait for the first one")
        traces = []
        for path in sorted((run.folder / "trace").glob("step_*.jsonl.gz")):
            header, *groups = trace_file.read(path)
            content = base64.b64encode(path.read_bytes()).decode()
            try:
                traces.append(dict(step=header["step"], gzip=content))
                completions = chain.from_iterable(group["completions"] for group in groups)
                spans = chain.from_iterable(c.get("images", ()) for c in completions)
                images |= {str(span["digest"]): str(span["file"]) for span in spans}
            except (LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}: damaged; delete it") from error
        metrics = {
            name: [list(of), [x if abs(x) < math.inf else None for x in of.values()]]  # no NaN
            for name, of in run.metrics.items()
        }
        name = run.folder.resolve().name
        found.append(dict(name=name, folder=str(run.folder), metrics=metrics, traces=traces))
    names = list(dict.fromkeys(chain(*(run.metrics for run in runs))))
    first = chain.from_iterable(fnmatch.filter(names, pattern) for pattern in MAIN)
    main = distinct({name: [run.metrics.get(name) for run in runs] for name in first})
    pictures = {}
    if images:
        from extras.trace.pictures import pictures_of  # needs extras/images

        pictures = pictures_of(images)
    return dict(runs=found, main=main, pictures=pictures)


# ---- the page ----


def page(data: dict) -> str:
    """Return the HTML of the page. Its content security policy forbids all requests, and all
    scripts and styles but its own."""

    def source(*names: str) -> str:
        return "\n".join((PAGE / name).read_text(encoding="utf-8") for name in names)

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    style = source("vendor/uPlot.min.css", "page.css")
    script = source("vendor/uPlot.iife.min.js", "page.js")
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest(style)}'; "
        f"script-src 'sha256-{digest(script)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # the data stands inside a script element
    parts = dict(policy=policy, style=style, script=script, data=text)
    before, *after = source("page.html").split("{{")
    pieces = [piece.split("}}", 1) for piece in after]
    return before + "".join(parts[name] + rest for name, rest in pieces)


def main() -> None:
    print_any_text()
    parser = Options(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    add("--out", type=Path, metavar="FILE", help="page to write; default: view.html in first RUN")
    options = parser.parse_args()
    first = options.runs[0]
    out = options.out or (first.with_suffix(".html") if first.is_file() else first / "view.html")
    try:
        with TemporaryDirectory() as temporary:
            for i, run in enumerate(options.runs):
                if run.suffix == ".zip":
                    options.runs[i] = Path(temporary, str(i), run.stem)
                    unpack(run, options.runs[i])
            out.write_text(page(collect(options.runs)), encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    print(visible(f"{out}: {out.stat().st_size / 1e6:.1f} MB"))


if __name__ == "__main__":
    main()
