"""Splits of a folder of files: the same ones as in the library `datasets`, whose rules are called
here.

`configs` in a README.md may list the files of each split. Otherwise names decide: folders or files
with a word such as `train`, `testing` or `dev`, as in `math_train/` or `test_2.jsonl`. Without such
names all files are the split train."""

import os
import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import yaml

from common.data.files import KINDS, kind_of
from common.parallel import distributed

Patterns = dict[str, list[str]]  # of the files of each split


def files_of_split(label: str, folder: Path, split: str, config: str | None) -> list[Path]:
    """Return the files of a split, sorted, without hidden ones such as the copies in
    `.ipynb_checkpoints`.

    Raises `ValueError` that begins with `label` if there are no files, if a file belongs to two
    splits, if two files have one name, or if README.md is not usable."""
    files = sorted(file for file in folder.rglob("*") if kind_of(file) and not file.is_dir())
    names = [str(file.relative_to(folder)) for file in files]
    visible = [name for name in names if not re.search(r"(^|/)(\.|__[^/]*/)", name)]
    if not visible:
        raise ValueError(f"{label}: no {KINDS} files in it")
    chosen = _names_of_split(label, folder, visible, split, config)
    stems: dict[str, str] = {}
    for name in chosen:
        other = stems.setdefault(name.removesuffix(kind_of(Path(name))), name)
        if other != name:
            problem = f"{other} and {name} have one name"
            raise ValueError(f"{label}: {problem}; delete one, or name one kind by a pattern")
    return [folder / name for name in chosen]


def _names_of_split(
    label: str, folder: Path, names: Sequence[str], split: str, config: str | None
) -> list[str]:
    """Return the files of a split among `names`, which are relative to the folder, in their
    order."""
    from datasets.data_files import FILES_TO_IGNORE, SPLIT_KEYWORDS

    files = [name for name in names if os.path.basename(name) not in FILES_TO_IGNORE]
    splits = {}
    for name, patterns in _patterns(label, folder, files, config).items():
        matched = {file for pattern in patterns for file in _matches(pattern, files)}
        splits[name] = [file for file in files if file in matched]
    if split not in splits:
        keywords = SPLIT_KEYWORDS.items()
        split = next((str(known) for known, words in keywords if split in words), split)
    chosen = splits.pop(split, [])
    for other, others in splits.items():
        shared = set(chosen) & set(others)
        if shared:
            problem = f"{min(shared)} belongs to the splits {split} and {other} by its name"
            advice = "rename it, or name files with --dataset and --eval_dataset"
            raise ValueError(f"{label}: {problem}; {advice}")
    return chosen


def _matches(pattern: str, names: Sequence[str]) -> list[str]:
    from fsspec.utils import glob_translate

    matches = re.compile(glob_translate(pattern)).match
    return [name for name in names if matches(name)]


def _patterns(label: str, folder: Path, names: Sequence[str], config: str | None) -> Patterns:
    """Return the patterns of the splits. Raises `ValueError` for a file of README.md that is not
    there: its split, or a part of it, would be missing without a word."""
    from datasets.data_files import sanitize_patterns

    chosen = _configuration(label, folder, config)
    inside = chosen.get("data_dir") or ""

    def whole(pattern: str) -> str:
        return os.path.normpath(os.path.join(inside, pattern))

    def resolve(pattern: str) -> list[str]:
        return _matches(whole(pattern), names)

    listed = chosen.get("data_files")
    if not listed:
        patterns_of = _default_patterns(resolve)
    else:
        patterns_of = sanitize_patterns(listed)
        for pattern in chain(*patterns_of.values()):
            if not resolve(pattern):
                problem = f"README.md lists {pattern}: no readable file of this name in the folder"
                raise ValueError(f"{label}: {problem}")
    return {
        split: [whole(pattern) for pattern in patterns] for split, patterns in patterns_of.items()
    }


def _default_patterns(resolve: Callable[[str], list[str]]) -> Patterns:
    """Return the patterns of the first rule of `datasets` that fits; none if there are no files."""
    # its public caller counts files of other kinds too
    from datasets.data_files import _get_data_files_patterns

    try:
        return _get_data_files_patterns(resolve)
    except FileNotFoundError:
        return {}


def _configuration(label: str, folder: Path, config: str | None) -> dict:
    """Return the configuration `--dataset_config` of the folder's README.md, by default its default
    or `main`; an empty dict if it has none."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    readme = folder / "README.md"
    if not readme.is_file():
        return {}
    try:
        configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(readme).data)
        name = config or configs.get_default_config_name() or "main"
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{label}: README.md: {distributed.first_line(error)}") from error
    if configs and name not in configs:
        problem = f"README.md has the configurations {', '.join(configs)}"
        raise ValueError(f"{label}: {problem}; name one in --dataset_config")
    return configs.get(name, {})
