"""Every command that the project prints: in pages, docstrings, recipes and the notebook."""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from helpers import ROOT

PROGRAMS = (
    r"python3? |torchrun |make |pip |uv |hf |vllm |srun |sbatch |docker |cp |patch |echo |touch |"
    r"jupyter |tensorboard |\.venv/bin/"
)
COMMAND = rf"(?:[A-Z_]+=(?:\"[^\"]*\"|\S+)[ \0]+)*(?:{PROGRAMS})\S.*"
PLACES = re.compile(rf"^(?: {{4,}}|\$ )({COMMAND})$|`({COMMAND.replace('.*', '[^`]*')})`", re.M)
FRAGMENT = re.compile(r"\.\.\.|[<>]| \[|^vllm serve$|^(python|torchrun)3?\b(?!.*(\.py\b| -[cm] ))")


@dataclass
class Command:
    text: str
    places: list[str] = field(default_factory=list)  # file:line of each place that prints it
    variables: dict[str, str] = field(default_factory=dict)
    program: str = ""
    ranks: int = 1
    words: list[str] = field(default_factory=list)  # what follows python or torchrun's own flags
    stdin: str = "Hello\n"

    def __post_init__(self) -> None:
        words = shlex.split(self.text)
        while re.match(r"[A-Z_]+=", words[0]):
            name, _, self.variables[name] = words.pop(0).partition("=")
        if words[0] == "echo" and "|" in words:
            self.stdin = " ".join(words[1 : words.index("|")]) + "\n"
            words = words[words.index("|") + 1 :]
        self.program, *words = words
        if self.program == "torchrun":
            script = next(i for i, word in enumerate(words) if word.endswith(".py"))
            own, words = words[:script], words[script:]
            self.ranks = int(own[own.index("--nproc_per_node") + 1])
        self.words = words

    @property
    def page(self) -> str:
        return self.places[0].partition(":")[0] if self.places else ""

    @property
    def script(self) -> str:
        return self.words[0] if self.program in ("python", "torchrun") else self.program

    def printed(self) -> dict[str, list[str]]:
        """The values of each flag on the command line."""
        found: dict[str, list[str]] = {}
        name = ""
        for word in self.words[1:]:
            if word.startswith("--"):
                name, equals, value = word.removeprefix("--").partition("=")
                assert name not in found, f"{self.text}: --{name} is given twice"
                found[name] = [value] if equals else []
            elif name:
                found[name].append(word)
        return found

    def flags(self) -> dict[str, list[str]]:
        """The values of each flag, of the recipe too."""
        printed = self.printed()
        recipe = yaml.safe_load((ROOT / printed["config"][0]).read_text()) if (
            "config" in printed
        ) else {}  # fmt: skip
        lists = {k: v if isinstance(v, list) else [v] for k, v in recipe.items()}
        return {name: list(map(str, values)) for name, values in lists.items()} | printed

    @property
    def output_dir(self) -> str:
        """What the command writes: a folder or, without a flag for it, its first `runs/...`."""
        name = re.search(r"\bruns/[\w./]+", self.text)
        default = "runs/course/data" if "rows.py" in self.text else f"runs/{Path(self.script).stem}"
        if name and (len(self.words) == 2 and "course/" in self.script or self.script == "-c"):
            default = name[0]
        return self.flags().get("output_dir", [default])[0].removeprefix("/shared/")


def texts() -> Iterator[tuple[str, int, str]]:
    """Yield file, line and text of all that may print commands."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=True)  # fmt: skip
    for name in sorted(listed.stdout.split()):
        path = ROOT / name
        if "tests" in path.parts or not path.is_file():
            continue
        if path.suffix == ".md":
            yield name, 1, path.read_text()
        elif path.suffix == ".yaml":
            lines = path.read_text().splitlines()
            bases = [f"    {x}" for x in re.findall(r"^  \S+: (python .*)", path.read_text(), re.M)]
            yield (
                name,
                1,
                "\n".join([x.replace("#", " ", 1) if x[:1] == "#" else "" for x in lines] + bases),
            )
        elif path.suffix == ".py":
            tree = ast.parse(path.read_text())
            if text := ast.get_docstring(tree):
                yield name, 1, text
        elif path.suffix == ".ipynb":
            for cell in json.loads(path.read_text())["cells"]:
                yield name, 1, "".join(cell["source"])


def collect() -> list[Command]:
    """Return each command once, in the order of the pages."""
    found: dict[str, Command] = {}
    for name, first, text in texts():
        # Lines that end with a backslash are one; the numbers of lines stay.
        joined = re.sub(r"\\\n *", "\0", text)
        for match in PLACES.finditer(joined):
            line = first + text[: match.start() + joined[: match.start()].count("\0")].count("\n")
            words = (match[1] or match[2]).replace("\0", " ")
            words = " ".join(re.sub(r"\s#\s.*|\s{4,}\S.*$", "", words).split())
            words = re.sub(r" *(&|; wait)$", "", words).replace("$seed", "1")  # of a loop
            if not FRAGMENT.search(words):
                found.setdefault(words, Command(words)).places.append(f"{name}:{line}")
    return list(found.values())


if __name__ == "__main__":
    for command in collect():
        print(command.places[0], command.text, sep="\t")
