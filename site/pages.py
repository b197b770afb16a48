"""Markdown pages of the site, made from the repository: docs, with the equations of the docstrings
to which they link, and a page for every source file.

A script's page has its equations on one side and its source, in chapters, on the other.
equations.yaml pairs the terms of an equation with fragments of code."""

import ast
import functools
import html
import os
import re
from pathlib import Path
from typing import NamedTuple

import yaml

from course.exercises.fragments import find

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".patch": "diff",
    ".js": "javascript",
    ".txt": "text",
    "": "text",
}
START = (
    "README", "docs/real_model", "docs/your_data", "docs/launch", "configs/README", "docs/trouble",
    "course/reading_order", "course/changes/README", "CONTRIBUTING", "CHANGELOG",
)  # fmt: skip
COURSE = (
    "course/README", "course/primer", "course/one_step", "course/one_pair", "course/lessons/*",
    "course/exercises/*", "course/glossary", "course/teaching", "objectives",
)  # fmt: skip
GREEK = {"rho": "ρ", "pi": "π", "beta": "β", "gamma": "γ", "lambda": "λ", "sigma": "σ"}
# Not the articles: "a", and "A" in front of a word.
LETTER = re.compile(
    rf"(?<![\w'`.{{+-])({'|'.join(GREEK)}|KL|z0|[B-Zb-z]|A(?! [a-z]))(?![A-Za-z0-9'])"
)


# ---- equations ----


class UniqueKeys(yaml.SafeLoader):
    """Loader that refuses a key that stands twice in a mapping: a letter has one meaning."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ValueError(f"site/equations.yaml: {min(twice)!r} stands twice; keep one entry")
        return super().construct_mapping(node, deep)


class Term(NamedTuple):
    text: str
    meaning: str
    path: Path  # file of the function
    owner: str  # name of the function or class
    fragment: str  # part of its source, with the line breaks that it has there


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def equations() -> dict:
    return yaml.load(text_of(SITE / "equations.yaml"), UniqueKeys)


@functools.cache
def glossary() -> dict[str, str]:
    """Return the meaning of every symbol in the first table of the glossary, and of its letter
    alone."""
    table = text_of(ROOT / "course/glossary.md").partition("## Symbols")[2].partition("\n## ")[0]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| `")]
    return {
        name: row[2].strip().replace("`", "")
        for row in rows
        for symbol in re.findall("`(.+?)`", row[1])
        for name in (symbol, *LETTER.findall(symbol)[:1])
    }


def terms(script: str) -> list[Term]:
    """Return the terms of a script's equations with their code. Raises `ValueError` unless a
    fragment is in its function exactly once."""
    found = []
    for text, (place, fragment) in equations()["scripts"][script]["code"].items():
        module, _, owner = place.rpartition(".")
        path = ROOT / f"{module.replace('.', '/') or script}.py"
        meaning = glossary().get(text) or equations()["meanings"][text]
        source = definitions(path)[owner].text
        here = find(fragment, source, f"site/equations.yaml, {script}, {text}: {place}").group()
        found.append(Term(text, meaning, path, owner, here))
    return found


def letters(script: str) -> set[str]:
    """Return the letters of a script's equations, without those that are a term or stand in the
    meaning of a term."""
    explained = {letter for term in terms(script) for letter in LETTER.findall(f"{term.meaning} ")}
    explained |= {
        term.text.partition("_")[0].partition("(")[0]
        for term in terms(script)
        if term.text in glossary()
    }
    lines = re.sub("<<|>>", "", " ".join(equations()["scripts"][script]["lines"]))
    return set(LETTER.findall(lines)) - explained


def pretty(text: str) -> str:
    """Return a term as HTML, with Greek letters, subscripts and superscripts."""
    text = re.sub(
        rf"(?<![A-Za-z_])({'|'.join(GREEK)})(?![A-Za-z])", lambda m: GREEK[m[1]], html.escape(text)
    )
    index = r"(?<!\w)([A-Za-z]|[ρπ]|KL|mean|sum|score|length)_(?:\{([^}]*)\}|([A-Za-z0-9]+))"
    text = re.sub(index, r"\1<sub>\2\3</sub>", text)
    return re.sub(r"\^(\w)", r"<sup>\1</sup>", text).replace("z0", "z<sub>0</sub>")


def equation_html(script: str) -> str:
    """Return the equations of a script, whose terms are links to their code, and a list of their
    meanings."""
    found = terms(script)
    numbers = {term.text: n for n, term in enumerate(found)}

    def link(text: str) -> str:
        return (
            f'<a class="term" href="#code-{numbers[text]}" '
            f'data-term="{numbers[text]}">{pretty(text)}</a>'
        )

    def row(head: str, meaning: str) -> str:
        return f"{head}</dt><dd>{html.escape(meaning[0].upper() + meaning[1:])}.</dd>"

    out = ['<div class="equations">']
    for line in equations()["scripts"][script]["lines"]:
        pieces = enumerate(re.split("<<(.*?)>>", line))
        shown = [link(piece) if n % 2 else pretty(piece) for n, piece in pieces]
        out.append(f'<p class="equation">{"".join(shown)}</p>')
    out.append("<dl>")
    for n, term in enumerate(found):
        out.append(
            f'<dt id="term-{n}">'
            + row(f"{link(term.text)} <code>{term.owner}</code>", term.meaning)
        )
    out += ["<dt>" + row(pretty(letter), glossary()[letter]) for letter in sorted(letters(script))]
    return "\n".join([*out, "</dl>", "</div>"])


# A line of a page, which GitHub shows as a link.
OBJECTIVE = re.compile(r"^\[The objective: first lines of (\w+)\.py\]\(\S+\)$", re.MULTILINE)


def stated(script: str) -> str:
    """Return the indented lines with the equations in the docstring of a script."""
    text = ast.get_docstring(ast.parse(text_of(ROOT / f"{script}.py"))) or ""
    blocks = re.findall(r"(?:^ {4,}\S.*\n?)+", text, re.MULTILINE)
    return next(block for block in blocks if " = " in block)


# ---- source in chapters ----


class Block(NamedTuple):
    path: Path
    first: int  # number of its first line
    last: int
    owner: str = ""  # name of the function or class that it is part of
    heading: str = ""  # Markdown heading in front of it

    @property
    def text(self) -> str:
        return "".join(text_of(self.path).splitlines(True)[self.first - 1 : self.last])


@functools.cache
def definitions(path: Path) -> dict[str, Block]:
    """Return the functions and classes at the top of a file."""
    nodes = ast.parse(text_of(path)).body
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {
        node.name: Block(
            path,
            min([node.lineno, *(d.lineno for d in node.decorator_list)]),
            node.end_lineno or node.lineno,
            node.name,
        )
        for node in found
    }


def chapters(script: str) -> list[Block]:
    """Return the source of a script in blocks, without gaps, and the functions in common/ that its
    equations name."""
    path = ROOT / f"{script}.py"
    lines, tops = text_of(path).splitlines(), definitions(path)
    docstring = ast.parse(text_of(path)).body[0]
    imports = (docstring.end_lineno or 1) + 1
    cuts = [(1, "", "## Docstring"), (imports, "", "## Imports and constants")]
    title = "## The objective"  # of the functions in front of the flags
    for name, top in tops.items():
        start = top.first
        while not lines[start - 2] or lines[start - 2].startswith(
            "#"
        ):  # comments in front of a function belong to it
            start -= 1
        cuts.append((start, name, {"Args": "## Flags", "main": "## main"}.get(name, title)))
        title = "## Functions" if name == "Args" else "" if name != "main" else title
    for number in range(tops["main"].first, len(lines)):
        if chapter := re.fullmatch(r" +# ---- (.*) ----", lines[number]):
            loop = lines[number - 1].startswith("    for step in")
            cuts.append((number + 1 - loop, "main", f"### {chapter[1]}"))
    ends = [number - 1 for number, *_ in cuts[1:]] + [len(lines)]
    blocks = [
        Block(path, number, end, *rest) for (number, *rest), end in zip(cuts, ends, strict=True)
    ]
    for term in terms(script):
        block = definitions(term.path)[term.owner]
        heading = f"## {term.owner}() in {term.path.relative_to(ROOT)}"
        if term.path != path and (block := block._replace(heading=heading)) not in blocks:
            blocks.append(block)
    return blocks


def literalinclude(block: Block) -> str:
    file, first = (
        block.path.relative_to(ROOT),
        block.first + len(block.text) - len(block.text.lstrip("\n")),
    )
    lines = f"{first}-{block.first + len(block.text.rstrip().splitlines()) - 1}"
    return (
        f"```{{literalinclude}} /{file}\n:language: {LANGUAGES[block.path.suffix]}\n"
        f":lines: {lines}\n```\n"
    )


def light(code: str, links: list[tuple[str, str]]) -> str:
    """Wrap fragments of highlighted code, the content of a `<pre>`, in links: pairs of a fragment
    and its opening tag. Tags of the highlighter that cross an end of a fragment are closed there
    and opened again."""
    pieces = re.findall(r"<[^>]*>|&[^;]*;|[^<&]", code)
    shown = "".join(html.unescape(piece) for piece in pieces if piece[0] != "<")
    edges: dict[int, str] = {}
    for fragment, tag in links:
        start = shown.index(fragment)
        edges[start] = edges.get(start, "") + tag
        edges[start + len(fragment)] = "</a>" + edges.get(start + len(fragment), "")
    out, opened, position = [], [], 0
    for piece in pieces:
        if piece[0] == "<":
            opened = opened[:-1] if piece[1] == "/" else [*opened, piece]
        else:
            if position in edges:
                out += ["</span>" * len(opened), edges[position], *opened]
            position += 1
        out.append(piece)
    return "".join(out)


def light_page(script: str, body: str) -> str:
    """Link the fragments of the equations' terms in the HTML of a script's page."""
    found, blocks = terms(script), iter(chapters(script))

    def lit(match: re.Match) -> str:
        block = next(blocks)
        tag = '<a class="code" id="code-{0}" href="#term-{0}" data-term="{0}">'
        links = [
            (term.fragment, tag.format(n))
            for n, term in enumerate(found)
            if (term.path, term.owner) == (block.path, block.owner) and term.fragment in block.text
        ]
        return match[1] + light(match[2], links) + match[3]

    return re.sub(r"(<pre><span></span>)(.*?)(</pre>)", lit, body, flags=re.DOTALL)


# ---- pages ----


class Pages(dict[str, str]):
    """Text of each Markdown page by its path, and the files of the repository that pages show."""

    def __init__(self) -> None:
        self.sources: dict[Path, None] = {}  # with a page below code/, in order
        self.copies: dict[Path, None] = {}  # pictures and downloads

    def source(self, path: Path) -> Path:
        """Return the page of a source file."""
        self.sources[path] = None
        return ROOT / "code" / f"{path.relative_to(ROOT)}.md"

    def folder(self, path: Path) -> Path:
        """Add the page of a folder, a list of its files; return its place."""
        place = ROOT / "code" / path.relative_to(ROOT) / "index.md"
        files = sorted(
            file for file in path.iterdir() if file.suffix in LANGUAGES and file.is_file()
        )
        rows = [
            f"- [{file.name}]({file.name}.md)"
            for file in files
            if file.stat().st_size and self.source(file)
        ]
        self[str(place.relative_to(ROOT))] = "\n".join(
            [f"---\norphan: true\n---\n# {path.relative_to(ROOT)}/\n", *rows]
        )
        return place

    def link(self, target: str, folder: Path) -> str:
        """Return a link of a Markdown file in `folder`, adapted to the site: to pages of source
        files and folders, without line numbers of GitHub."""
        path = Path(os.path.normpath(folder / target.partition("#")[0]))
        if ":" in target or target[0] == "#" or path.suffix == ".md" or not path.exists():
            return target
        if path.is_dir():
            return os.path.relpath(
                path / "README.md" if (path / "README.md").exists() else self.folder(path), folder
            )
        if path.suffix in LANGUAGES:
            return os.path.relpath(self.source(path), folder)
        self.copies[path] = None
        return target

    def markdown(self, path: Path) -> None:
        """Add a Markdown file of the repository, with its links adapted."""
        text = OBJECTIVE.sub(lambda m: stated(m[1]), path.read_text(encoding="utf-8"))
        text = re.sub(r"(?<=\]\()[^()\s]+(?=\))", lambda m: self.link(m[0], path.parent), text)
        if path.parent == ROOT / "docs" and path.stem in equations()["scripts"]:
            title, _, rest = text.partition("\n")
            beside = f"[The source beside its equations](../code/{path.stem}.py.md)"
            text = (
                f"{title}\n\n{beside}; [value and gradient of the "
                f"objectives](../objectives.md)\n{rest}"
            )
        self[str(path.relative_to(ROOT))] = text

    def code(self, path: Path) -> None:
        """Add the page of a source file; for a script, in chapters and with its equations."""
        name, front, blocks = (
            path.relative_to(ROOT),
            "orphan: true\n",
            [Block(path, 1, text_of(path).count("\n"))],
        )
        about = ""
        if str(name.with_suffix("")) in equations()["scripts"]:
            front, blocks = "", chapters(path.stem)
            about = (
                f"[docs/{path.stem}.md](../docs/{path.stem}.md); "
                "[value and gradient](../objectives.md)\n\n"
            )
            about += f"```{{raw}} html\n{equation_html(path.stem)}\n```\n\n"
        shown = [f"{block.heading}\n\n{literalinclude(block)}" for block in blocks]
        self[f"code/{name}.md"] = (
            f"---\nhide-toc: true\n{front}---\n# {name}\n\n{about}" + "\n".join(shown)
        )


def make(target: Path) -> None:
    """Write all pages to the empty folder `target`."""
    site, scripts = Pages(), list(equations()["scripts"])
    pages = ("[A-Z]*.md", "configs/README.md", "docs/**/*.md", "course/**/*.md")
    for place in (*pages, "extras/*/README.md"):
        for path in sorted(ROOT.glob(place)):
            site.markdown(path)
    docs = [
        name.removesuffix(".md") for name in [*site, "objectives"] if not name.startswith("code/")
    ]
    course = list(
        dict.fromkeys(name for each in COURSE for name in sorted(docs) if Path(name).match(each))
    )
    extras = [name for name in docs if name.startswith("extras/")]
    shown = {*START, *course, *extras, *(f"docs/{name}" for name in scripts)}
    groups = {
        "Start": ["README <README>", *START[1:]],
        "Course": course,
        "Scripts": [f"docs/{name}" for name in scripts],
        "Source beside equations": [f"{name}.py <code/{name}.py>" for name in scripts],
        "Topics": [name for name in docs if name not in shown],
        "Extras": extras,
        "Source": ["code/index"],
    }
    for path in (
        *sorted([*ROOT.glob("common/*/__init__.py"), *ROOT.glob("extras/*/__init__.py")]),
        *(ROOT / f"{name}.py" for name in scripts),
    ):
        site.folder(path.parent) if path.parent != ROOT else site.source(path)
    for path in site.sources:
        site.code(path)
    others = sorted(
        name.removeprefix("code/") for name, text in site.items() if "\norphan: true" in text[:40]
    )
    rows = [f"- [{name.removesuffix('.md').removesuffix('index')}]({name})" for name in others]
    site["code/index.md"] = "\n".join(["# Other files\n", *rows])
    trees = [
        ["```{toctree}", f":caption: {name}", ":titlesonly:", "", *pages, "```\n"]
        for name, pages in groups.items()
    ]
    site["index.md"] = text_of(SITE / "index.md") + "\n".join(
        line for tree in trees for line in tree
    )
    site["objectives.md"] = text_of(SITE / "objectives.md")
    files = {name: text.encode() for name, text in site.items()}
    files |= {
        str(path.relative_to(ROOT)): path.read_bytes() for path in [*site.copies, *site.sources]
    }
    for name, content in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
