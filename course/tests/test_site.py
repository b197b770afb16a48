"""The site: pairs of equations and code, curves of the objectives, built pages without a dead link,
in a browser."""

import html
import json
import re
import runpy
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest import mock
from urllib.parse import unquote, urlsplit

import pytest
from helpers import ROOT
from scripts import ALGORITHMS

pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of MyST in Sphinx
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SITE = ROOT / "site"
pages = runpy.run_path(str(SITE / "pages.py"), run_name="pages")
EQUATIONS = pages["equations"]()
SCRIPTS = list(EQUATIONS["scripts"])

# ---- pairs of equations and code ----


def test_every_script_has_equations():
    assert set(SCRIPTS) == {*ALGORITHMS}
    assert [name for name in SCRIPTS if not 3 <= len(pages["terms"](name)) <= 10] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_fragment_occurs_exactly_once(script):
    """... in the function that is named, and shares no character with another one."""
    ranges: dict[tuple, list[range]] = {}
    for term in pages["terms"](script):
        source = pages["definitions"](term.path)[term.owner].text
        assert source.count(term.fragment) == 1, (term.text, term.owner, term.fragment)
        start = source.index(term.fragment)
        ranges.setdefault((term.path, term.owner), []).append(
            range(start, start + len(term.fragment))
        )
    for found in ranges.values():
        found.sort(key=lambda r: r.start)
        assert all(a.stop <= b.start for a, b in zip(found, found[1:], strict=False)), found


@pytest.mark.parametrize("script", SCRIPTS)
def test_equation_is_that_of_a_docstring(script):
    files = {ROOT / f"{script}.py", *(term.path for term in pages["terms"](script))}
    text = " ".join(" ".join(path.read_text(encoding="utf-8") for path in files).split())
    for line in EQUATIONS["scripts"][script]["lines"]:
        assert re.sub("<<|>>", "", line) in text
        assert set(re.findall("<<(.*?)>>", line)) <= EQUATIONS["scripts"][script]["code"].keys()


@pytest.mark.parametrize("script", sorted({*SCRIPTS} - {"eval"}))
def test_page_takes_its_equations_from_the_docstring(script):
    """... and defines nothing a second time."""
    page = (ROOT / f"docs/{script}.md").read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"^ {4,}\S.*\n", page, re.MULTILINE))
    defined = re.compile(r"(\S+) += ")  # symbols
    stated = pages["stated"](script)
    assert {*defined.findall(stated)} & {*defined.findall(blocks)} == set()
    assert pages["OBJECTIVE"].findall(page) == [script]
    made = pages["Pages"]()
    made.markdown(ROOT / f"docs/{script}.md")
    assert f"\n\n{stated}\n" in made[f"docs/{script}.md"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_letter_has_a_meaning(script):
    assert pages["letters"](script) - pages["glossary"]().keys() == set()


def test_a_letter_has_one_meaning():
    meanings = EQUATIONS["meanings"]
    shown = {text for name in SCRIPTS for text in EQUATIONS["scripts"][name]["code"]}
    assert meanings.keys() & pages["glossary"]().keys() == set(), "also in course/glossary.md"
    assert meanings.keys() - shown == set(), "on no page"
    text = (SITE / "equations.yaml").read_text(encoding="utf-8")
    twice = text.replace("\n  pi(y):", "\n  pi(y): the same\n  pi(y):")
    with pytest.raises(ValueError, match="stands twice"):
        pages["yaml"].load(twice, pages["UniqueKeys"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_chapters_are_the_whole_source(script):
    path = ROOT / f"{script}.py"
    own = [block for block in pages["chapters"](script) if block.path == path]
    assert "".join(block.text for block in own) == path.read_text(encoding="utf-8")
    assert all(a.heading != b.heading or not a.heading for a, b in zip(own, own[1:], strict=False))


def test_light_wraps_a_fragment_across_tags():
    code = '<span class="n">a</span> <span class="o">&lt;=</span> <span class="n">bc</span>\n'
    lit = pages["light"](code, [("a <= b", '<a id="x">')])
    assert re.sub(r"<[^>]*>", "", lit) == re.sub(r"<[^>]*>", "", code)
    inside = re.search(r'<a id="x">(.*?)</a>', lit)[1]
    assert html.unescape(re.sub(r"<[^>]*>", "", inside)) == "a <= b"
    assert inside.count("<span") == inside.count("</span>") and lit.count("<span") == lit.count(
        "</span>"
    )


def test_curves_are_those_of_the_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SITE))
    made = runpy.run_path(str(SITE / "curves.py"), run_name="curves")["charts"]()
    charts = {chart["name"]: chart for chart in made}

    def at(name: str, n: int, x: float, **settings) -> tuple[float, ...]:
        """Return value and gradients of line `n` of a chart."""
        chart = charts[name]
        line, row = chart["lines"][n], 0
        for flag, steps in line["settings"].items():
            row = row * len(steps) + steps.index(settings[flag])
        i = min(range(len(chart["xs"])), key=lambda i: abs(chart["xs"][i] - x))
        assert abs(chart["xs"][i] - x) < 1e-9
        return (line["value"][row][i], *(rows[row][i] for rows in line["gradients"].values()))

    assert at("clip", 0, 1.5, clip_high=0.28) == (-1.28, 0)
    assert at("clip", 0, 1.5, clip_high=0.6) == (-1.5, -1.5)
    assert at("clip", 1, 0.6, clip_low=0.2) == (0.8, 0)
    assert at("cispo", 0, 1.8)[1] == -1.8
    assert at("sapo", 1, 0.99)[1] == pytest.approx(0.99, abs=1e-3)
    assert at("kl_estimate", 2, 0.0) == (0, 0)
    assert at("kl_estimate", 1, -1.5) == (1.125, -1.5)
    plain = dict(beta=1.0, label_smoothing=0.0, f_divergence="reverse_kl")
    assert at("sigmoid", 0, 0, **plain) == (0.6931, -0.5, 0.5)
    assert at("hinge", 0, 1, beta=1.0, f_divergence="reverse_kl")[0] == 0
    assert at("divergence", 1, 0.75, q=0.75) == (0, 0)
    assert len(json.dumps(list(charts.values()))) < 1_500_000


# ---- the built site ----


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make site` does; a warning is an error."""
    build = pytest.importorskip(
        "sphinx.cmd.build", reason="sphinx is missing: pip install -e '.[dev]'"
    )
    folder = tmp_path_factory.mktemp("site")
    (folder / "pages").mkdir()
    words = ["-q", "-W", "--keep-going", "-c", SITE, "-d"]
    words += [folder / name for name in ("doctrees", "pages", "site")]
    with mock.patch.object(sys, "path", [*sys.path]):  # conf.py adds the sources
        assert build.build_main(list(map(str, words))) == 0
    return folder / "site"


class Links(HTMLParser):
    """Targets, resources and anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.resources, self.anchors = [], [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.anchors += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if tag == "a" and "href" in found else []
        self.resources += [found["src"]] if found.get("src") else []
        self.resources += [found["href"]] if tag == "link" and found["rel"] != "canonical" else []


@pytest.mark.slow
def test_no_dead_link_and_no_request_to_other_hosts(site):
    found = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(found) > 100
    dead, linked = [], {site / "index.html", site / "search.html"}
    anchors = defaultdict(lambda: {""})  # of other files: none
    anchors |= {path: {"", *page.anchors} for path, page in found.items()}
    for path, page in found.items():
        assert len(anchors[path]) == len(page.anchors) + 1, f"{path}: an id stands twice"
        for link in page.links + page.resources:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.resources and parts.scheme != "data":
                    dead.append((path.name, link))
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or unquote(parts.fragment) not in anchors[target]:
                dead.append((str(path.relative_to(site)), link))
            linked.add(target)
    assert dead == []
    assert set(found) - linked == set(), "orphan pages"


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_page_shows_every_fragment(site, script):
    text = (site / "code" / f"{script}.py.html").read_text(encoding="utf-8")
    for n, term in enumerate(pages["terms"](script)):
        (found,) = re.findall(rf'<a class="code" id="code-{n}".*?>(.*?)</a>', text, re.DOTALL)
        assert html.unescape(re.sub(r"<[^>]*>", "", found)) == term.fragment
        assert f'id="term-{n}"' in text


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser() -> Iterator:
    if CHROMIUM is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is missing: pip install playwright"
    )
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser, site) -> Iterator[Callable]:
    """Open pages of the site; they may neither log an error nor load anything from another host."""
    problems, contexts = [], []

    def open_page(name: str, width: int = 1400, host: str = site.as_uri(), **options):
        contexts.append(browser.new_context(viewport=dict(width=width, height=900), **options))
        page = contexts[-1].new_page()
        page.on(
            "console",
            lambda message: problems.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda r: None if r.url.startswith((host, "data:")) else problems.append(r.url),
        )
        page.goto(f"{host}/{name}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.mark.slow
def test_term_and_fragment_light_each_other(open_page):
    page = open_page("code/grpo.py.html")

    def lit() -> list[str]:
        return page.eval_on_selector_all(".lit", "all => all.map(one => one.id || one.className)")

    term, code = page.locator("dt .term").nth(1), page.locator("#code-1")
    term.hover()
    assert "code-1" in lit() and lit().count("code-1") == 1
    code.hover()
    assert "term lit" in lit() and "code-1" in lit()
    page.locator("h1").hover()
    assert lit() == []
    page.locator("dt .term").nth(2).focus()  # by keyboard
    assert "code-2" in lit() and "code-1" not in lit()
    page.keyboard.press("Enter")
    assert page.url.endswith("#code-2") and page.locator("#code-2").is_visible()


@pytest.mark.slow
def test_slider_changes_the_curve(open_page):
    page = open_page("objectives.html")
    box = page.locator(".explorer").first

    def values() -> list[str]:
        return box.locator("[data-values]").evaluate_all(
            "all => all.map(one => one.dataset.values)"
        )

    before = values()
    slider = box.get_by_role("slider", name="clip_high")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert box.locator("output").first.text_content() == "0.1" and values() != before
    box.locator("select").select_option("cispo")
    assert box.get_by_role("slider").count() == 0, "the paper's numbers are constants"


@pytest.mark.slow
def test_search_finds_a_page(open_page, site):
    """... through a server: the browser refuses to read other files from a file."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with (
        mock.patch.object(
            ThreadingHTTPServer, "request_queue_size", 100
        ),  # the page fetches all results at once
        mock.patch.object(SimpleHTTPRequestHandler, "log_message"),
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
    ):
        Thread(target=server.serve_forever, daemon=True).start()
        page = open_page("search.html?q=staleness", host=f"http://127.0.0.1:{server.server_port}")
        page.get_by_role("link", name="Dedicated rollout ranks").first.wait_for()
        page.wait_for_load_state("networkidle")
        server.shutdown()
