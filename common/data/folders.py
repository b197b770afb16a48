"""Splits of a folder of files: the same ones as in the library `datasets`, whose rules are called here.

`configs` in a README.md may list the files of each split. Otherwise names decide: folders or files with a word such as
`train`, `testing` or `dev`, as in `math_train/` or `test_2.jsonl`. Without such names all files are the split train.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from common.parallel import distributed

Patterns = dict[str, list[str]]  # of the files of each split


def names_of_split(label: str, folder: Path, names: Sequence[str], split: str, config: str | None) -> list[str]:
    """Return the files of a split among `names`, which are relative to the folder, in their order.

    Raises `ValueError` that begins with `label` if a file belongs to two splits or if README.md is not usable.
    """
    from datasets.data_files import FILES_TO_IGNORE, SPLIT_KEYWORDS

    files = [name for name in names if os.path.basename(name) not in FILES_TO_IGNORE]
    split = next((str(known) for known, words in SPLIT_KEYWORDS.items() if split in words), split)
    splits = {}
    for name, patterns in _patterns(label, folder, files, config).items():
        matched = {file for pattern in patterns for file in _matches(pattern, files)}
        splits[name] = [file for file in files if file in matched]
    for other in splits.keys() - {split}:
        if both := set(splits.get(split, ())) & set(splits[other]):
            problem = f"{min(both)} belongs to the splits {split} and {other} by its name"
            raise ValueError(f"{label}: {problem}; rename it, or name files with --dataset and --eval_dataset")
    return splits.get(split, [])


def _matches(pattern: str, names: Sequence[str]) -> list[str]:
    from fsspec.utils import glob_translate

    matches = re.compile(glob_translate(pattern)).match
    return [name for name in names if matches(name)]


def _patterns(label: str, folder: Path, names: Sequence[str], config: str | None) -> Patterns:
    """Return the patterns of the splits. Raises `ValueError` for a file of README.md that is not there: its split, or a
    part of it, would be missing without a word."""
    from datasets.data_files import sanitize_patterns

    chosen = _configuration(label, folder, config)
    inside = chosen.get("data_dir") or ""

    def resolve(pattern: str) -> list[str]:
        return _matches(os.path.normpath(os.path.join(inside, pattern)), names)

    listed = chosen.get("data_files")
    found = sanitize_patterns(listed) if listed else _default_patterns(resolve)
    if lost := [pattern for patterns in found.values() for pattern in patterns if listed and not resolve(pattern)]:
        raise ValueError(f"{label}: README.md lists {lost[0]}: no readable file of this name in the folder")
    return {
        split: [os.path.normpath(os.path.join(inside, pattern)) for pattern in patterns]
        for split, patterns in found.items()
    }


def _default_patterns(resolve: Callable[[str], list[str]]) -> Patterns:
    """Return the patterns of the first rule of `datasets` that fits; none if there are no files."""
    from datasets.data_files import _get_data_files_patterns  # its public caller counts files of other kinds too

    try:
        return _get_data_files_patterns(resolve)
    except FileNotFoundError:
        return {}


def _configuration(label: str, folder: Path, config: str | None) -> dict:
    """Return the configuration `--dataset_config` of the folder's README.md, by default its default or `main`; an empty
    dict if it has none."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    readme = folder / "README.md"
    if not readme.is_file():
        return {}
    try:
        found = MetadataConfigs.from_dataset_card_data(DatasetCard.load(readme).data)
        name = config or found.get_default_config_name() or "main"
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{label}: README.md: {distributed.first_line(error)}") from error
    if found and name not in found:
        raise ValueError(f"{label}: README.md has the configurations {', '.join(found)}; name one in --dataset_config")
    return found.get(name, {})
