"""Settings of the site, for `make site`: docs/ and the sources by Sphinx, with MyST and Furo."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "site")]

import curves  # noqa: E402
import pages  # noqa: E402

project, author, root_doc, language = "onefile", "the authors of onefile", "index", "en"
extensions = ["myst_parser"]
html_theme, html_title = "furo", "onefile"
html_theme_options = {"top_of_page_buttons": []}
html_static_path = ["static", "../extras/trace/page/vendor"]
html_css_files, html_js_files = ["uPlot.min.css", "site.css"], [("site.js", {"defer": "defer"})]
html_copy_source = html_use_index = html_show_copyright = False
myst_heading_anchors = 6  # GitHub's anchors
highlight_language = "text"
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
# The browser itself refuses requests to other hosts. Furo and Sphinx have inline scripts and
# styles.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:"
)


def prepare(app, config) -> None:
    """Write the pages and the curves below the source folder."""
    pages.make(Path(app.srcdir))
    static = Path(app.srcdir) / "static"
    static.mkdir(exist_ok=True)
    table = json.dumps(curves.charts(), separators=(",", ":"))
    (static / "curves.js").write_text(f"const CURVES = {table};\n", encoding="utf-8")
    config.html_static_path.append(str(static))


def finish(app, pagename: str, templatename: str, context: dict, doctree) -> None:
    """Add the policy for requests, the curves and the links between equations and code."""
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" '
        'href="data:,">'
    )
    context["metatags"] = head + context.get("metatags", "")
    if pagename == "objectives":
        for file in ("uPlot.iife.min.js", "curves.js"):
            app.add_js_file(file)
    script = pagename.removeprefix("code/").removesuffix(".py")
    if pagename == f"code/{script}.py" and script in pages.equations()["scripts"]:
        context["body"] = pages.light_page(script, context["body"])


def setup(app) -> dict:
    app.connect("config-inited", prepare)
    app.connect("html-page-context", finish)
    return dict(parallel_read_safe=True, parallel_write_safe=True)
